//! Prints the bytes that the prefix index takes for each block of each holder, as the allocator sees them.
//!
//! usage: `cargo run --release --example prefix_memory`
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a fault may end it, and it is there to print"
)]

use std::time::Duration;

use llm_ring::index::block::{self, Identity, Unit};
use llm_ring::index::hash;
use llm_ring::index::prefix::{EngineHash, Holder, PrefixIndex, Settings, Source, Stored, Tier};

/// Resident bytes of this process.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: usize = status.split_whitespace().nth(1).unwrap().parse().unwrap();
    pages * 4096
}

fn main() {
    println!("holders  of each block  pairs      counted  allocated  resident   (bytes a pair)");
    for (holders, copies, prompts, events) in [
        (100, 100, 400, true),
        (100, 100, 500, true),
        (100, 30, 1200, true),
        (100, 10, 3000, true),
        (100, 4, 6000, true),
        (100, 1, 12_000, true),
        (1000, 1000, 40, true),
        (1000, 20, 2000, true),
        (100, 100, 400, false),
        (100, 10, 3000, false),
        (100, 1, 12_000, false),
    ] {
        let before = resident();
        let settings =
            Settings { budget: usize::MAX / 2, capacity: u32::MAX, ..Settings::default() };
        let mut index = PrefixIndex::new(settings);
        let root = Identity { model: "model", ..Identity::default() }.root(Unit::Tokens, 16);
        let (mut pairs, blocks) = (0usize, 100u32);
        for prompt in 0..prompts {
            let tokens: Vec<u32> = (0..blocks * 16).map(|i| i ^ (prompt * 7919)).collect();
            for copy in 0..copies {
                let number = (prompt * 31 + copy * holders / copies) % holders;
                let holder = Holder::new(number).unwrap();
                pairs += blocks as usize;
                if events {
                    index.set_source(holder, Source::Events);
                    let names: Vec<EngineHash> = (0..blocks)
                        .map(|i| {
                            let name =
                                [prompt.to_le_bytes(), number.to_le_bytes(), i.to_le_bytes()];
                            EngineHash::unsigned(hash::hash(&name.concat()))
                        })
                        .collect();
                    let stored = Stored {
                        hashes: &names,
                        parent: None,
                        root,
                        tokens: &tokens,
                        extras: &[],
                        tier: Tier::Gpu,
                    };
                    index.stored(holder, &stored, Duration::ZERO).unwrap();
                } else {
                    let keys = block::keys(root, &tokens, 16, &[]);
                    index.served(holder, &keys, 0, Duration::ZERO, None);
                }
            }
        }
        let each = |bytes: usize| bytes as f64 / pairs as f64;
        println!(
            "{holders:7}  {copies:13}  {pairs:9}  {:7.1}  {:9.1}  {:8.1}  {}",
            each(index.bytes()),
            each(index.capacity_bytes()),
            each(resident().saturating_sub(before)),
            if events { "events" } else { "guesses" },
        );
    }
}
