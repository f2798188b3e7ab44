//! What passes through Envoy and the picker arrives as it was sent, in both directions, and is counted as whole.

use std::io::Write as _;
use std::time::Duration;

use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::OnceCell;

use crate::harness::client::{Answer, CHECKSUM, Call, End, Http, chat, get, head, noise, post};
use crate::harness::envoy::{Front, ORIGINAL_DST, OVERRIDE_HOST};
use crate::harness::upstream::{event, hash};
use crate::harness::{Stack, run, within};

/// Both shapes, and both HTTP versions to the model servers.
const FRONTS: [Front; 2] = [ORIGINAL_DST, Front { http2: true, ..OVERRIDE_HOST }];

/// No bound on loads: whatever other tests send at the same time, a conversation stays.
pub(crate) const LOOSE: &str = "policies: { llm-aware: { epsilon: 1000, long_epsilon: 1000 } }";

/// The stack of tests that look at nothing but their own requests.
pub(crate) async fn stack() -> Option<&'static Stack> {
    static STACK: OnceCell<Option<Stack>> = OnceCell::const_new();
    STACK.get_or_init(|| Stack::start(LOOSE, 3, &FRONTS)).await.as_ref().map(Stack::watch)
}

/// Sends a request through both shapes: an upstream must receive what was sent, the one that the picker named; then
/// `answered` looks at the answer.
fn check(call: &Call, answered: impl Fn(&Answer)) {
    run(async {
        let Some(stack) = stack().await else { return };
        for envoy in &stack.envoys {
            let call = call.again();
            let answer = call.answer(envoy.port).await;
            assert_eq!(answer.status, 200, "{:?}", answer.body);
            let (upstream, seen) = stack.served(&call.id);
            assert_eq!((seen.method.as_str(), seen.path.as_str()), (call.method(), call.path()));
            assert_eq!((seen.length, seen.hash), (call.sent().len(), hash(&call.sent())));
            let address = upstream.address.to_string();
            assert_eq!(seen.headers["x-gateway-destination-endpoint"], address.as_str());
            assert_eq!(answer.header("x-routed-to"), Some(upstream.name.as_str()));
            let record = stack.picker.record(&call.id).await;
            assert_eq!(record["target"], upstream.name);
            assert_eq!(record["outcome"]["ending"], "complete");
            assert_eq!(record["outcome"]["status"], 200);
            assert_eq!(record["outcome"]["served"], address);
            answered(&answer);
        }
    });
}

fn any(_: &Answer) {}

#[test]
fn a_get_is_routed_and_answered() {
    check(&get("/v1/models"), |answer| {
        assert_eq!(answer.json()["method"], "GET");
    });
}

#[test]
fn a_head_is_answered_without_a_body() {
    check(&head("/v1/models"), |answer| assert!(answer.body.is_empty()));
}

#[test]
fn an_empty_post_is_routed() {
    check(&post("/v1/chat/completions", ""), any);
    check(&post("/v1/chat/completions", "").over(Http::Two), any);
}

#[test]
fn a_small_post_arrives_over_both_http_versions() {
    check(&chat("who kept the bridge?"), any);
    check(&chat("who kept the bridge?").over(Http::Two), any);
}

#[test]
fn three_hundred_kilobytes_arrive_over_both_http_versions() {
    check(&chat(&noise(300 << 10)), any);
    check(&chat(&noise(300 << 10)).over(Http::Two), any);
}

#[test]
fn five_megabytes_arrive_over_both_http_versions() {
    check(&chat(&noise(5 << 20)), any);
    check(&chat(&noise(5 << 20)).over(Http::Two), any);
}

#[test]
fn what_is_not_json_arrives_as_well() {
    check(&post("/v1/audio/transcriptions", noise(100_000)), any);
    check(&post("/v1/chat/completions", "{ this is no JSON"), any);
}

#[test]
fn a_compressed_body_is_read_and_arrives_compressed() {
    let body = json!({ "prompt": noise(200_000), "prompt_cache_key": "packed" }).to_string();
    let mut packed = GzEncoder::new(Vec::new(), Compression::default());
    packed.write_all(body.as_bytes()).unwrap();
    let call = post("/v1/completions", packed.finish().unwrap()).header("content-encoding", "gzip");
    check(&call, any);
    run(async {
        let Some(stack) = stack().await else { return };
        let call = call.again();
        stack.answer(&call).await;
        let record = stack.picker.record(&call.id).await;
        assert_eq!(record["conversation"]["id"], "packed");
        assert!(record["prompt_tokens"].as_u64() > Some(10_000), "{record}");
    });
}

/// Little time and little room: most bodies pass their pick on the way.
const HURRIED: &str = "requests: { decision_deadline_ms: 150, body_memory_bytes: 500000 }";

#[test]
fn a_body_that_is_picked_for_before_its_end_arrives_whole() {
    run(async {
        let Some(stack) = Stack::start(HURRIED, 3, &FRONTS).await else { return };
        let piece = noise(30_000);
        let slow = chat("").chunked(&[piece.as_str(); 5], Duration::from_millis(70), End::Plain);
        let trailed =
            chat("").chunked(&[piece.as_str(); 5], Duration::from_millis(70), End::Trailers);
        let large = chat(&noise(3 << 20));
        for (call, reason) in [(slow, "deadline"), (trailed, "deadline"), (large, "memory")] {
            for envoy in &stack.envoys {
                for http in [Http::One, Http::Two] {
                    let call = call.again().over(http).conversation("hurried");
                    let label = format!("reason=\"{reason}\"");
                    let hurried = async || {
                        stack.picker.metrics().await.sum("llm_ring_early_decisions_total", &label)
                    };
                    let before = hurried().await;
                    assert_eq!(call.answer(envoy.port).await.status, 200);
                    let (upstream, seen) = stack.served(&call.id);
                    assert_eq!((seen.length, seen.hash), (call.sent().len(), hash(&call.sent())));
                    let record = stack.picker.record(&call.id).await;
                    assert_eq!(record["target"], upstream.name);
                    assert_eq!(
                        (&record["body"], hurried().await),
                        (&json!("partial"), before + 1.0)
                    );
                }
            }
        }
        stack.picker.is_idle().await;
    });
}

#[test]
fn where_a_body_cannot_follow_its_pick_nothing_is_hurried() {
    run(async {
        let buffered =
            Front { request_mode: "BUFFERED", response_mode: "BUFFERED", ..ORIGINAL_DST };
        let Some(stack) = Stack::start(HURRIED, 1, &[buffered]).await else { return };
        let call = chat(&noise(900_000));
        assert_eq!(stack.answer(&call).await.status, 200);
        assert_eq!(stack.picker.record(&call.id).await["body"], "whole");
        let metrics = stack.picker.metrics().await;
        assert_eq!(metrics.sum("llm_ring_early_decisions_total", ""), 0.0);
        stack.picker.is_idle().await;
    });
}

#[test]
fn five_megabytes_come_back() {
    for http in [Http::One, Http::Two] {
        check(&chat("tell me all").answered("json bytes=5242880").over(http), |answer| {
            assert!(answer.json()["text"] == noise(5 << 20), "the text came back changed");
        });
    }
}

#[test]
fn an_upload_in_pieces_with_pauses_arrives_whole() {
    let large = noise(100_000);
    let chunks = ["{\"a\"", ":1, \"text\": \"", large.as_str(), "\"}"];
    for http in [Http::One, Http::Two] {
        let call = post("/v1/chat/completions", "").over(http);
        check(&call.chunked(&chunks, Duration::from_millis(30), End::Plain), any);
    }
}

#[test]
fn trailers_of_a_request_arrive() {
    for http in [Http::One, Http::Two] {
        let call = chat("").over(http).chunked(&["{}"], Duration::ZERO, End::Trailers);
        check(&call, any);
        run(async {
            let Some(stack) = stack().await else { return };
            for envoy in &stack.envoys {
                let call = call.again();
                call.answer(envoy.port).await;
                let trailers = stack.served(&call.id).1.trailers.expect("trailers");
                assert_eq!(trailers[CHECKSUM], "of-the-request");
            }
        });
    }
}

#[test]
fn trailers_of_an_answer_come_back() {
    for http in [Http::One, Http::Two] {
        let call =
            chat("trailers, please").answered("trailers").header("te", "trailers").over(http);
        check(&call, |answer| {
            assert_eq!(answer.text(), "{\"object\": 1}");
            let trailers = answer.trailers.as_ref().expect("trailers");
            assert_eq!(trailers[CHECKSUM], "of-the-answer");
        });
    }
}

#[test]
fn events_pass_as_they_come_and_their_usage_is_noted() {
    run(async {
        let Some(stack) = stack().await else { return };
        for (envoy, http) in stack.envoys.iter().zip([Http::One, Http::Two]) {
            let call = chat("count").answered("sse events=4 pause=30").over(http);
            let mut answer = call.stream(envoy.port).await;
            assert_eq!(answer.chunk().await, event(0));
            let rest = answer.finish().await;
            let (text, end) = rest.text().split_once("data: {\"choices\":[]").unwrap();
            assert_eq!(text, [event(1), event(2), event(3)].concat());
            assert!(end.ends_with("data: [DONE]\n\n"), "{end:?}");
            let outcome = &stack.picker.record(&call.id).await["outcome"];
            let usage = [&outcome["prompt_tokens"], &outcome["cached_tokens"]];
            assert_eq!(
                (usage, &outcome["completion_tokens"]),
                ([&json!(11), &json!(5)], &json!(1))
            );
            let (ttft, whole) = (&outcome["ttft_ms"], &outcome["duration_ms"]);
            assert!(ttft.as_f64() < whole.as_f64(), "{outcome}");
        }
    });
}

#[test]
fn an_error_of_the_engine_comes_back_as_it_is() {
    run(async {
        let Some(stack) = stack().await else { return };
        for envoy in &stack.envoys {
            let call = chat("fail").answered("status code=500");
            let answer = call.answer(envoy.port).await;
            assert_eq!((answer.status.as_u16(), answer.text()), (500, "as asked"));
            let outcome = &stack.picker.record(&call.id).await["outcome"];
            assert_eq!((&outcome["ending"], &outcome["status"]), (&json!("complete"), &json!(500)));
        }
    });
}

#[test]
fn a_client_that_waits_to_be_told_to_continue_is_told() {
    run(async {
        let Some(stack) = stack().await else { return };
        for envoy in &stack.envoys {
            let call = chat("after you");
            let mut stream =
                tokio::net::TcpStream::connect(("127.0.0.1", envoy.port)).await.unwrap();
            let head = format!(
                "POST {} HTTP/1.1\r\nhost: llm.test\r\nx-request-id: {}\r\nconnection: close\r\n\
                 expect: 100-continue\r\ncontent-length: {}\r\n\r\n",
                call.path(),
                call.id,
                call.sent().len()
            );
            stream.write_all(head.as_bytes()).await.unwrap();
            let mut told = [0; 25];
            within("100-continue", stream.read_exact(&mut told)).await.unwrap();
            assert_eq!(told.as_slice(), b"HTTP/1.1 100 Continue\r\n\r\n");
            stream.write_all(&call.sent()).await.unwrap();
            let mut answer = String::new();
            within("the answer", stream.read_to_string(&mut answer)).await.unwrap();
            assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
            assert_eq!(stack.served(&call.id).1.hash, hash(&call.sent()));
        }
    });
}
