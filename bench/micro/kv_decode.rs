#![allow(
    clippy::disallowed_methods,
    clippy::print_stdout,
    reason = "a measuring loop owns a clock and prints"
)]
//! How many blocks a second the decoder of KV events reads, on messages that vLLM sent.
//! `cargo run --release --example kv_decode`

use std::hint::black_box;
use std::time::Instant;

use llm_ring::engine::kv_wire::{KvEvent, decode};

const ROUNDS: usize = 21;

fn unhex(text: &str) -> Vec<u8> {
    let digit = |at: usize| text.get(at..at + 2).and_then(|hex| u8::from_str_radix(hex, 16).ok());
    (0..text.len()).step_by(2).map(|at| digit(at).expect("hexadecimal test data")).collect()
}

fn blocks(payload: &[u8]) -> (usize, usize, usize) {
    let batch = decode(payload).expect("test data that can be read");
    let counts = batch.events.iter().map(|event| match event {
        KvEvent::Stored(stored) => (stored.hashes.len(), stored.tokens.len()),
        KvEvent::Removed { hashes, .. } => (hashes.len(), 0),
        KvEvent::Cleared => (0, 0),
    });
    counts
        .fold((batch.events.len(), 0, 0), |(e, b, t), (blocks, tokens)| (e, b + blocks, t + tokens))
}

fn measure(name: &str, payloads: &[Vec<u8>]) {
    let bytes: usize = payloads.iter().map(Vec::len).sum();
    let (events, found, tokens) = payloads
        .iter()
        .map(|p| blocks(p))
        .fold((0, 0, 0), |a, b| (a.0 + b.0, a.1 + b.1, a.2 + b.2));
    let repeat = 2_000_000 / bytes.max(1) + 1;
    let mut rates: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let start = Instant::now();
            for _ in 0..repeat {
                for payload in payloads {
                    black_box(decode(black_box(payload)).is_ok());
                }
            }
            repeat as f64 / start.elapsed().as_secs_f64()
        })
        .collect();
    rates.sort_by(f64::total_cmp);
    let rate = rates[ROUNDS / 2];
    println!(
        "{name}: {} messages, {events} events, {found} blocks, {tokens} tokens, {bytes} bytes; medians: {:.2} M blocks/s, {:.2} M events/s, {:.0} M tokens/s, {:.0} MB/s",
        payloads.len(),
        found as f64 * rate / 1e6,
        events as f64 * rate / 1e6,
        tokens as f64 * rate / 1e6,
        bytes as f64 * rate / 1e6
    );
}

fn main() {
    let data = include_str!("../../src/engine/testdata/vllm_kv_events.json");
    let data: serde_json::Value = serde_json::from_str(data).expect("test data in JSON");
    let list = |value: &serde_json::Value| value.as_array().cloned().expect("a list");
    let text = |value: &serde_json::Value| unhex(value.as_str().expect("a text"));
    let of_run = |run: usize| -> Vec<Vec<u8>> {
        list(&data["runs"][run]["messages"]).iter().map(|m| text(&m["frames_hex"][2])).collect()
    };
    measure("maps, numbers, 32 tokens a block", &of_run(0));
    measure("maps, digests, 128 tokens a block", &of_run(1));
    for version in list(&data["older_versions_encoded_with_their_own_structs"]) {
        let payloads: Vec<_> =
            list(&version["messages"]).iter().map(|m| text(&m["payload_hex"])).collect();
        measure(&format!("as {} writes it", version["version"]), &payloads);
    }
}
