//! Any bytes, as a payload of KV events and as a stream of messages and answers.
//!
//! `cargo +nightly fuzz run --fuzz-dir bench/fuzz kv_events`

#![no_main]

use std::time::Duration;

use llm_ring::engine::kv_stream::{self, KvStream, Replayed, StreamSettings};
use llm_ring::engine::kv_wire::{self, KvEvent};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(batch) = kv_wire::decode(bytes) {
        for event in &batch.events {
            if let KvEvent::Stored(stored) = event {
                let tokens = stored.tokens.len();
                assert!(tokens == 0 || tokens == stored.hashes.len() * stored.block_size as usize);
                assert!(stored.hashes.len() + tokens <= bytes.len());
            }
        }
    }
    stream(bytes);
});

/// Takes the bytes as what happens to a stream: a byte says what, the next ones how.
fn stream(bytes: &[u8]) {
    let (Some((first, mut rest)), mut out) = (bytes.split_first(), Vec::new()) else {
        return;
    };
    let settings =
        StreamSettings { replay: first & 1 == 0, held_frames: 4, ..StreamSettings::default() };
    let mut stream = KvStream::new(settings);
    let mut now = Duration::ZERO;
    while let Some((what, after)) = rest.split_first() {
        // The payload is one of a few, most of them good, so that copies and other engines come about.
        let (seq, kind) = (u64::from(what >> 4), after.first().copied().unwrap_or(0));
        let payload = [b"\x92".as_slice(), &[kind & 0x3f], b"\x91\x91\xb0AllBlocksCleared"].concat();
        let payload = if kind & 0xc0 == 0xc0 { after } else { &payload };
        let number = seq.to_be_bytes();
        match what & 7 {
            0 => stream.connected(now, &mut out),
            1 => stream.disconnected(&mut out),
            2 | 3 => {
                if let Ok((_, frame)) = kv_stream::live(&[b"t", &number, payload], 1 << 16) {
                    stream.live(frame, now, &mut out);
                }
            }
            4 => {
                if let Ok(answer) = kv_stream::replayed(&[b"", &number, payload], 1 << 16) {
                    stream.replayed(answer, now, &mut out);
                }
            }
            5 => stream.replayed(Replayed::End, now, &mut out),
            6 => stream.replay_failed(now, &mut out),
            _ => {
                now += Duration::from_secs(seq * 10);
                stream.asked(now);
                stream.tick(now, &mut out);
            }
        }
        out.clear();
        rest = after.get(1..).unwrap_or_default();
    }
}
