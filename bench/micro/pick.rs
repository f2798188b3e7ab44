//! Times of the core: a decision with its booking and release, the ring of a pool, and one request from its headers
//! to the end of its answer, without the network.
//!
//! usage: `cargo bench --bench pick [-- FILTER]`. The targets are 2 µs a decision at 64 endpoints and 10 µs at 1000.

use std::sync::Arc;

use divan::counter::BytesCount;
use divan::{Bencher, black_box};
use envoy_types::pb::envoy::config::core::v3::{HeaderMap, HeaderValue};
use envoy_types::pb::envoy::service::ext_proc::v3 as pb;
use llm_ring::config::Config;
use llm_ring::ext_proc::exchange::{Effect, Exchange, ExchangeSettings};
use llm_ring::ext_proc::reply::Routing;
use llm_ring::pool::PoolSnapshot;
use llm_ring::scheduling::POLICIES;
use pb::processing_request::Request;
use setup::{Bench, Case, POINTS, endpoints};

mod setup;

const SIZES: [usize; 3] = [3, 64, 1000];

fn main() {
    divan::main();
}

fn run(bencher: Bencher<'_, '_>, policy: &str, n: usize, case: Case) {
    let mut bench = Bench::new(policy, n, case);
    bencher.bench_local(|| bench.pick());
}

#[divan::bench(args = POLICIES.iter().map(|&(name, _)| name), consts = SIZES)]
fn decide<const N: usize>(bencher: Bencher<'_, '_>, policy: &str) {
    run(bencher, policy, N, Case::New);
}

#[divan::bench(args = [Case::New, Case::Remembered, Case::HomeFull, Case::AllFull], consts = SIZES)]
fn llm_aware<const N: usize>(bencher: Bencher<'_, '_>, case: Case) {
    run(bencher, "llm-aware", N, case);
}

#[divan::bench(args = [100, 1000])]
fn build_pool(bencher: Bencher<'_, '_>, n: usize) {
    bencher
        .with_inputs(|| endpoints(n))
        .bench_values(|endpoints| PoolSnapshot::new(0, endpoints, POINTS));
}

/// The bytes that Envoy puts into one message, as seen with HTTP/1.1 clients.
const CHUNK: usize = 32 * 1024;

#[divan::bench(args = [4_096, 222_000, 5_000_000])]
fn exchange(bencher: Bencher<'_, '_>, size: usize) {
    let settings = Arc::new(llm_ring::app::exchange(&Config::default()));
    let messages = messages(size);
    bencher
        .counter(BytesCount::new(size))
        .with_inputs(|| messages.clone())
        .bench_local_values(|messages| pass(&settings, messages));
}

/// Passes one request and its answer through the state machine, doing as the server does.
fn pass(settings: &Arc<ExchangeSettings>, messages: Vec<pb::ProcessingRequest>) {
    let mut exchange = Exchange::new(Arc::clone(settings));
    for message in messages {
        exchange.on(message);
        while let Some(effect) = exchange.next_effect() {
            if matches!(effect, Effect::Schedule(_)) {
                exchange.scheduled(Routing {
                    destination: "10.0.0.1:8000".to_owned(),
                    traceparent: None,
                    explanation: Vec::new(),
                });
            }
            black_box(effect);
        }
    }
}

fn messages(size: usize) -> Vec<pb::ProcessingRequest> {
    let word = "processed conversation history ";
    let text = word.repeat(size / word.len());
    let body = format!(
        r#"{{"model":"tiny","messages":[{{"role":"user","content":"{text}"}}],"max_tokens":4}}"#
    );
    let answer = r#"{"id":"c","choices":[{"index":0,"message":{"content":"hello"}}],"usage":{"prompt_tokens":9,"completion_tokens":4}}"#;
    let modes = pb::ProtocolConfiguration {
        request_body_mode: 4,
        response_body_mode: 4,
        ..Default::default()
    };
    let headers = |pairs: &[(&str, &str)]| {
        let headers = pairs.iter().map(|&(key, value)| HeaderValue {
            key: key.to_owned(),
            raw_value: value.as_bytes().to_vec(),
            ..Default::default()
        });
        let headers = Some(HeaderMap { headers: headers.collect() });
        pb::HttpHeaders { headers, ..Default::default() }
    };
    let request = [
        (":method", "POST"),
        (":path", "/v1/chat/completions"),
        (":authority", "models.example.com"),
        ("content-type", "application/json"),
        ("x-session-id", "s17"),
        ("x-request-id", "4c6f1c5e-7c1e-4f7d-9e57-0d2f9c1b7a11"),
    ];
    let chunk = |body: &[u8], end_of_stream| pb::HttpBody {
        body: body.to_vec(),
        end_of_stream,
        ..Default::default()
    };
    let last = body.len().div_ceil(CHUNK) - 1;
    let chunks = (0..).zip(body.as_bytes().chunks(CHUNK));
    let message = |request| pb::ProcessingRequest { request: Some(request), ..Default::default() };
    let first = pb::ProcessingRequest {
        protocol_config: Some(modes),
        ..message(Request::RequestHeaders(headers(&request)))
    };
    std::iter::once(first)
        .chain(chunks.map(|(i, bytes)| message(Request::RequestBody(chunk(bytes, i == last)))))
        .chain([
            message(Request::ResponseHeaders(headers(&[
                (":status", "200"),
                ("content-type", "application/json"),
            ]))),
            message(Request::ResponseBody(chunk(answer.as_bytes(), true))),
        ])
        .collect()
}
