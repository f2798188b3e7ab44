//! Times of the prefix index: keys of a prompt, a match, and events of engines.
//!
//! usage: `cargo bench --bench prefix [-- FILTER]`. The targets are 20 µs for a prompt of 1000 blocks against 100
//! holders, and 5 million blocks stored or removed a second.
#![allow(clippy::unwrap_used, reason = "a fault may end it")]

use std::cell::RefCell;
use std::time::Duration;

use divan::counter::{BytesCount, ItemsCount};
use divan::{Bencher, black_box};
use llm_ring::index::block::{self, BlockKey, ByteChain, Identity, Unit};
use llm_ring::index::prefix::{EngineHash, Holder, PrefixIndex, Settings, Source, Stored, Tier};

const BLOCK: u32 = 16;

fn main() {
    divan::main();
}

fn root() -> BlockKey {
    Identity { model: "model", ..Identity::default() }.root(Unit::Tokens, BLOCK)
}

fn holder(number: u32) -> Holder {
    Holder::new(number).unwrap()
}

/// Tokens that depend on `seed` alone.
fn tokens(seed: u32, blocks: u32) -> Vec<u32> {
    (0..blocks * BLOCK)
        .map(|i| (i ^ seed.wrapping_mul(0x9e37_79b9)).wrapping_mul(0x85eb_ca6b) >> 15)
        .collect()
}

/// The hashes that an engine gives to the blocks of `tokens(seed, _)`.
fn hashes(engine: u32, seed: u32, blocks: u32) -> Vec<EngineHash> {
    let name = |i: u32| [engine.to_le_bytes(), seed.to_le_bytes(), i.to_le_bytes()].concat();
    (0..blocks).map(|i| EngineHash::unsigned(llm_ring::index::hash::hash(&name(i)))).collect()
}

fn stored<'a>(
    hashes: &'a [EngineHash],
    parent: Option<EngineHash>,
    tokens: &'a [u32],
) -> Stored<'a> {
    Stored { hashes, parent, root: root(), tokens, extras: &[], tier: Tier::Gpu }
}

/// Who has how much of the prompt.
#[derive(Debug, Clone, Copy)]
enum Case {
    /// Everybody has all of it.
    All,
    /// Every holder falls out at another block.
    Stairs,
    /// As `Stairs`, every other holder in host memory, and every third by guess.
    Mixed,
    /// Four holders have it.
    Few,
}

#[divan::bench(args = [Case::All, Case::Stairs, Case::Mixed, Case::Few], consts = [100, 1000])]
fn matches<const N: u32>(bencher: Bencher<'_, '_>, case: Case) {
    let blocks = 1000;
    let mut index = PrefixIndex::new(Settings { block: BLOCK, ..Settings::default() });
    let prompt = tokens(1, blocks);
    let keys = block::keys(root(), &prompt, BLOCK, &[]);
    // Other prompts, so that the tables are not tiny.
    for n in 0..2000 {
        let (other, hashes) = (tokens(n + 2, 100), hashes(0, n + 2, 100));
        index.stored(holder(n % N), &stored(&hashes, None, &other), Duration::ZERO).unwrap();
    }
    for n in 0..if matches!(case, Case::Few) { 4 } else { N } {
        let length = match case {
            Case::All | Case::Few => blocks,
            Case::Stairs | Case::Mixed => (n + 1) * blocks / N,
        };
        if matches!(case, Case::Mixed) && n % 3 == 0 {
            index.served(holder(n), &keys[..length as usize], 0, Duration::ZERO, None);
            continue;
        }
        let hashes = hashes(n, 1, length);
        let tier = if matches!(case, Case::Mixed) && n % 2 == 0 { Tier::Cpu } else { Tier::Gpu };
        let event = Stored { tier, ..stored(&hashes, None, &prompt[..(length * BLOCK) as usize]) };
        index.stored(holder(n), &event, Duration::ZERO).unwrap();
    }
    let candidates: Vec<Holder> = (0..N).map(holder).collect();
    let found = index.matches(&keys, &candidates);
    assert_eq!(found.iter().map(|found| found.blocks).max(), Some(blocks));
    bencher.bench(|| index.matches(black_box(&keys), black_box(&candidates)));
}

#[divan::bench(args = [16, 64, 256])]
fn keys_of_100k_tokens(bencher: Bencher<'_, '_>, size: u32) {
    let prompt = tokens(1, 6250);
    bencher
        .counter(BytesCount::of_slice(&prompt))
        .bench(|| block::keys(root(), black_box(&prompt), size, &[]));
}

#[divan::bench(args = [64, 256])]
fn keys_of_400_kilobytes(bencher: Bencher<'_, '_>, size: u32) {
    let prompt = vec![b'x'; 400_000];
    bencher.counter(BytesCount::of_slice(&prompt)).bench(|| {
        let mut chain = ByteChain::new(root(), size);
        for chunk in black_box(&prompt).chunks(32 * 1024) {
            chain.push(chunk);
        }
        chain.finish()
    });
}

/// Blocks of one event, for one engine.
struct Batch {
    holder: Holder,
    parent: Option<EngineHash>,
    hashes: Vec<EngineHash>,
    tokens: Vec<u32>,
}

/// A hundred engines with 1.2 million blocks, and events to come: prompts that begin with the one system prompt.
struct Fleet {
    index: PrefixIndex,
    rounds: Vec<Vec<Batch>>,
    now: Duration,
}

const FLEET: u32 = 100;
const OWN: u32 = 100;
const SHARED: u32 = 64;
/// Prompts that are there before.
const BEFORE: u32 = 12_000;
/// Prompts whose events are measured together.
const ROUND: u32 = 100;
const ROUNDS: u32 = 30;

impl Fleet {
    fn new(run: usize, budget: usize) -> Self {
        let settings = Settings { block: BLOCK, budget, ..Settings::default() };
        let mut index = PrefixIndex::new(settings);
        let shared = tokens(1, SHARED);
        let mut rounds: Vec<Vec<Batch>> = Vec::new();
        for n in 0..BEFORE + ROUND * ROUNDS {
            let engine = n % FLEET;
            let first = hashes(engine, 1, SHARED);
            let (own, names) = (tokens(n + 2, OWN), hashes(engine, n + 2, OWN));
            let mut parent = first.last().copied();
            let at = Duration::from_millis(u64::from(n) * 10);
            if n < FLEET {
                index.set_source(holder(n), Source::Events);
                index.stored(holder(n), &stored(&first, None, &shared), at).unwrap();
            }
            if n < BEFORE {
                index.stored(holder(engine), &stored(&names, parent, &own), at).unwrap();
                continue;
            }
            if (n - BEFORE).is_multiple_of(ROUND) {
                rounds.push(Vec::new());
            }
            for (hashes, tokens) in names.chunks(run).zip(own.chunks(run * BLOCK as usize)) {
                let (hashes, tokens) = (hashes.to_vec(), tokens.to_vec());
                let next = hashes.last().copied();
                rounds.last_mut().unwrap().push(Batch {
                    holder: holder(engine),
                    parent,
                    hashes,
                    tokens,
                });
                parent = next;
            }
        }
        // As they come from many engines at once, not one prompt after the other.
        for round in &mut rounds {
            let per = round.len() / ROUND as usize;
            let mut all: Vec<(usize, Batch)> = round.drain(..).enumerate().collect();
            all.sort_by_key(|&(at, _)| at % per);
            round.extend(all.into_iter().map(|(_, batch)| batch));
        }
        Self { index, rounds, now: Duration::from_secs(200) }
    }

    fn store(&mut self, round: usize) {
        for Batch { holder, parent, hashes, tokens } in &self.rounds[round] {
            self.index.stored(*holder, &stored(hashes, *parent, tokens), self.now).unwrap();
        }
    }

    fn remove(&mut self, round: usize) {
        for Batch { holder, hashes, .. } in self.rounds[round].iter().rev() {
            self.index.removed(*holder, hashes, Tier::Gpu);
        }
    }
}

/// Runs `measured` on one round after the other, with `before` outside of the measurement.
fn rounds(
    bencher: Bencher<'_, '_>,
    fleet: Fleet,
    before: impl Fn(&mut Fleet, usize),
    measured: impl Fn(&mut Fleet, usize),
) {
    let fleet = RefCell::new(fleet);
    let mut next = 0;
    bencher
        .counter(ItemsCount::new(ROUND * OWN))
        .with_inputs(|| {
            let round = next % ROUNDS as usize;
            next += 1;
            let mut fleet = fleet.borrow_mut();
            fleet.now += Duration::from_secs(1);
            before(&mut fleet, round);
            round
        })
        .bench_local_values(|round| measured(&mut fleet.borrow_mut(), round));
}

#[divan::bench(args = [1, 20], sample_count = 30, sample_size = 1)]
fn events_stored(bencher: Bencher<'_, '_>, run: usize) {
    rounds(bencher, Fleet::new(run, 512 << 20), |_, _| (), Fleet::store);
}

#[divan::bench(args = [1, 20], sample_count = 30, sample_size = 1)]
fn events_stored_at_the_budget(bencher: Bencher<'_, '_>, run: usize) {
    let fleet = Fleet::new(run, 90 << 20);
    assert!(fleet.index.stats().evicted > 0);
    rounds(bencher, fleet, |_, _| (), Fleet::store);
}

#[divan::bench(args = [1, 20], sample_count = 30, sample_size = 1)]
fn events_removed(bencher: Bencher<'_, '_>, run: usize) {
    rounds(bencher, Fleet::new(run, 512 << 20), Fleet::store, Fleet::remove);
}

#[divan::bench]
fn speculate_64_known_blocks(bencher: Bencher<'_, '_>) {
    let mut index = PrefixIndex::new(Settings { block: BLOCK, ..Settings::default() });
    let keys = block::keys(root(), &tokens(1, SHARED), BLOCK, &[]);
    let mut now = Duration::ZERO;
    bencher.counter(ItemsCount::new(SHARED)).bench_local(|| {
        now += Duration::from_millis(1);
        index.speculate(holder(0), &keys, now, now + Duration::from_secs(2));
        index.expire(now);
    });
}
