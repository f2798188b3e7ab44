//! Any bytes, as a page of metrics of every kind of engine.
//!
//! `cargo +nightly fuzz run --fuzz-dir bench/fuzz metrics`

#![no_main]

use libfuzzer_sys::fuzz_target;
use llm_ring::engine::dialect::{Ranks, Reader};
use llm_ring::pool::Engine;

fuzz_target!(|page: &[u8]| {
    for (_, engine) in Engine::NAMES {
        for ranks in [Ranks::Summed, Ranks::Rank(1)] {
            let signals = Reader::new(engine, ranks).read(page).signals;
            assert!(signals.kv_usage.is_none_or(|usage| (0.0..=1.0).contains(&usage)));
        }
    }
});
