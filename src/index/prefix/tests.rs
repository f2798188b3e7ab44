//! The index against a naive model: sets of whole prefixes, searched from end to end.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::index::block::{Identity, Unit, keys};

/// Few numbers, near and far, so that marks take all their forms.
const NUMBERS: [u32; 9] = [0, 1, 2, 3, 63, 64, 130, 131, 700];
const BLOCK: u32 = 2;
const TIERS: [Tier; 4] = [Tier::Gpu, Tier::Cpu, Tier::Disk, Tier::Other];

/// A prefix: which root, and all its tokens.
type Path = (usize, Vec<u32>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Confirmed,
    Inferred,
    Speculative,
}

#[derive(Debug, Clone)]
struct Known {
    paths: Vec<Path>,
    copies: [u32; 4],
}

#[derive(Debug, Clone)]
struct Waiting {
    parent: u64,
    tokens: Vec<u32>,
    copies: [u32; 4],
    serial: usize,
}

#[derive(Debug, Clone, Default)]
struct Naive {
    known: BTreeMap<u64, Known>,
    waiting: BTreeMap<u64, Waiting>,
    /// Least recent first.
    guesses: Vec<(Path, Kind, u32)>,
    source: Option<Source>,
    serial: usize,
}

impl Naive {
    fn reported(&self, path: &Path) -> BTreeSet<usize> {
        let holding = self.known.values().filter(|known| known.paths.contains(path));
        holding.flat_map(|known| (0..4).filter(|&tier| known.copies[tier] > 0)).collect()
    }

    fn guess(&self, path: &Path) -> Option<&(Path, Kind, u32)> {
        self.guesses.iter().find(|guess| guess.0 == *path)
    }

    fn enter(&mut self, hash: u64, paths: Vec<Path>, copies: [u32; 4]) {
        self.guesses.retain(|guess| !paths.contains(&guess.0));
        let parent = paths.last().unwrap().clone();
        self.known.insert(hash, Known { paths, copies });
        let mut children: Vec<(usize, u64)> = self
            .waiting
            .iter()
            .filter(|(_, waiting)| waiting.parent == hash)
            .map(|(&hash, waiting)| (waiting.serial, hash))
            .collect();
        children.sort_unstable();
        for (_, child) in children {
            if let Some(waiting) = self.waiting.remove(&child) {
                self.enter(child, extend(&parent, &waiting.tokens), waiting.copies);
            }
        }
    }

    fn store(&mut self, hash: u64, parent: Option<u64>, root: usize, page: &[u32], tier: usize) {
        let mut copies = [0; 4];
        copies[tier] = 1;
        if let Some(known) = self.known.get_mut(&hash) {
            known.copies[tier] += 1;
            let paths = known.paths.clone();
            self.guesses.retain(|guess| !paths.contains(&guess.0));
            return;
        }
        let before = match parent {
            None => Some((root, Vec::new())),
            Some(parent) => {
                self.known.get(&parent).map(|known| known.paths.last().unwrap().clone())
            }
        };
        if let Some(waiting) = self.waiting.get_mut(&hash) {
            waiting.copies[tier] += 1;
            if before.is_none() {
                return;
            }
            copies = self.waiting.remove(&hash).unwrap().copies;
        }
        match before {
            Some(before) => self.enter(hash, extend(&before, page), copies),
            None => {
                self.serial += 1;
                let (parent, serial) = (parent.unwrap(), self.serial);
                let waiting = Waiting { parent, tokens: page.to_vec(), copies, serial };
                self.waiting.insert(hash, waiting);
            }
        }
    }

    fn remove(&mut self, hash: u64, tier: usize) {
        if let Some(waiting) = self.waiting.get_mut(&hash) {
            waiting.copies[tier] = waiting.copies[tier].saturating_sub(1);
            if waiting.copies == [0; 4] {
                self.waiting.remove(&hash);
            }
        } else if let Some(known) = self.known.get_mut(&hash) {
            known.copies[tier] = known.copies[tier].saturating_sub(1);
            if known.copies == [0; 4] {
                self.known.remove(&hash);
            }
        }
    }

    fn note(&mut self, paths: &[Path], what: impl Fn(usize) -> (Kind, u32), capacity: usize) {
        for (i, path) in paths.iter().enumerate().rev() {
            if !self.reported(path).is_empty() {
                continue;
            }
            let (mut kind, mut ends) = what(i);
            if let Some(at) = self.guesses.iter().position(|guess| guess.0 == *path) {
                let (_, was, until) = self.guesses.remove(at);
                if kind == Kind::Speculative && was != Kind::Speculative {
                    (kind, ends) = (was, until);
                }
                ends = ends.max(until);
            }
            self.guesses.push((path.clone(), kind, ends));
        }
        self.outgrow(capacity);
    }

    fn outgrow(&mut self, capacity: usize) {
        let capacity = match self.source {
            Some(Source::Model { capacity }) => capacity as usize,
            _ => capacity,
        };
        let over = self.guesses.len().saturating_sub(capacity);
        self.guesses.drain(..over);
    }

    fn matched(&self, paths: &[Path], weights: &Weights) -> (u32, [u32; 7]) {
        let mut by_kind = [0; 7];
        let mut blocks = 0;
        for path in paths {
            let tiers = self.reported(path);
            let best = tiers
                .iter()
                .copied()
                .reduce(|a, b| if weights.tiers[b] > weights.tiers[a] { b } else { a });
            let guess = self.guess(path).map(|guess| match guess.1 {
                Kind::Confirmed => 4,
                Kind::Inferred => 5,
                Kind::Speculative => 6,
            });
            let Some(kind) = best.or(guess) else {
                break;
            };
            by_kind[kind] += 1;
            blocks += 1;
        }
        (blocks, by_kind)
    }
}

fn extend(before: &Path, page: &[u32]) -> Vec<Path> {
    let mut path = before.clone();
    page.chunks(BLOCK as usize)
        .map(|block| {
            path.1.extend(block);
            path.clone()
        })
        .collect()
}

fn paths(root: usize, tokens: &[u32]) -> Vec<Path> {
    extend(&(root, Vec::new()), tokens)
}

fn roots() -> [BlockKey; 2] {
    ["a", "b"].map(|model| Identity { model, ..Identity::default() }.root(Unit::Tokens, BLOCK))
}

/// The engine's hash of a page: equal in all engines, in one of two ways, small and unmixed on purpose.
fn engine(root: usize, tokens: &[u32], way: u64) -> u64 {
    tokens.iter().fold(way * 2 + root as u64 + 4, |hash, token| hash * 4 + 1 + u64::from(*token))
}

#[derive(Debug, Clone)]
enum Step {
    Store { from: usize, to: usize, way: u64, tier: usize },
    Move { at: usize, way: u64, tier: usize },
    Remove { from: usize, to: usize, way: u64, tier: usize },
    Clear,
    RemoveHolder,
    Speculate { ttl: u32 },
    Forget,
    Serve { cached: usize, ttl: Option<u32> },
    Touch,
    Expire,
    Source(Source),
}

#[derive(Debug, Clone)]
struct Op {
    holder: usize,
    root: usize,
    tokens: Vec<u32>,
    step: Step,
    wait: u32,
}

fn events() -> impl Strategy<Value = Step> {
    let range = (0usize..6, 1usize..6);
    prop_oneof![
        8 => (range.clone(), 0u64..2, 0usize..4).prop_map(|((from, n), way, tier)| Step::Store { from, to: from + n, way, tier: tier / 2 }),
        6 => (0usize..2, 0u64..2).prop_map(|(from, way)| Step::Store { from: from * 2, to: 9, way, tier: 0 }),
        1 => (0usize..6, 0u64..2, 0usize..4).prop_map(|(at, way, tier)| Step::Move { at, way, tier }),
        6 => (range, 0u64..2, 0usize..4).prop_map(|((from, n), way, tier)| Step::Remove { from, to: from + n, way, tier: tier / 2 }),
        1 => Just(Step::Clear),
        1 => Just(Step::RemoveHolder),
    ]
}

fn guesses() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (1u32..30).prop_map(|ttl| Step::Speculate { ttl }),
        1 => Just(Step::Forget),
        3 => (0usize..8, prop::option::of(1u32..30)).prop_map(|(cached, ttl)| Step::Serve { cached, ttl }),
        1 => Just(Step::Touch),
        2 => Just(Step::Expire),
        1 => (1u32..12).prop_map(|capacity| Step::Source(Source::Model { capacity })),
        1 => Just(Step::Source(Source::Events)),
    ]
}

fn op(step: impl Strategy<Value = Step>) -> impl Strategy<Value = Op> {
    (0usize..NUMBERS.len(), 0usize..2, prop::collection::vec(0u32..2, 1..14), step, 0u32..6)
        .prop_map(|(holder, root, mut tokens, step, wait)| {
            // Most prompts begin alike, as prompts do.
            if tokens.len() > 6 {
                tokens[..6].copy_from_slice(&[0, 1, 1, 0, 1, 1]);
            }
            Op { holder, root, tokens, step, wait }
        })
}

fn eighths(steps: u32) -> Duration {
    Duration::from_millis(125) * steps
}

struct Both {
    index: PrefixIndex,
    naive: Vec<Naive>,
    now: u32,
}

impl Both {
    fn new(settings: Settings) -> Self {
        let naive = vec![Naive::default(); NUMBERS.len()];
        Self { index: PrefixIndex::new(settings), naive, now: 0 }
    }

    fn apply(&mut self, op: &Op) {
        self.now += op.wait;
        let now = eighths(self.now);
        let holder = Holder(NUMBERS[op.holder]);
        let naive = &mut self.naive[op.holder];
        let index = &mut self.index;
        let capacity = index.settings.capacity as usize;
        // Two of the engines have blocks of two of ours.
        let page = BLOCK as usize * if op.holder % 4 == 3 { 2 } else { 1 };
        let pages: Vec<&[u32]> = op.tokens.chunks_exact(page).collect();
        let hash = |at: usize, way: u64| engine(op.root, &op.tokens[..(at + 1) * page], way);
        let prompt = keys(roots()[op.root], &op.tokens, BLOCK, &[]);
        let prefixes = paths(op.root, &op.tokens[..prompt.len() * BLOCK as usize]);
        match op.step {
            Step::Store { from, to, way, tier } => {
                let to = to.min(pages.len());
                let from = from.min(to);
                let hashes: Vec<u64> = (from..to).map(|at| hash(at, way)).collect();
                let parent = from.checked_sub(1).map(|at| hash(at, way));
                let mut before = parent;
                for (i, &hash) in hashes.iter().enumerate() {
                    naive.store(hash, before, op.root, pages[from + i], tier);
                    before = Some(hash);
                }
                let stored = Stored {
                    hashes: &hashes.iter().map(|&hash| EngineHash(hash)).collect::<Vec<_>>(),
                    parent: parent.map(EngineHash),
                    root: roots()[op.root],
                    tokens: &op.tokens[from * page..to * page],
                    extras: &[],
                    tier: TIERS[tier],
                };
                index.stored(holder, &stored, now).unwrap();
            }
            Step::Move { at, way, tier } if at < pages.len() => {
                let hash = hash(at, way);
                if let Some(known) = naive.known.get_mut(&hash) {
                    known.copies[tier] += 1;
                } else if let Some(waiting) = naive.waiting.get_mut(&hash) {
                    waiting.copies[tier] += 1;
                }
                let stored = Stored {
                    hashes: &[EngineHash(hash)],
                    parent: None,
                    root: BlockKey(0),
                    tokens: &[],
                    extras: &[],
                    tier: TIERS[tier],
                };
                index.stored(holder, &stored, now).unwrap();
            }
            Step::Move { .. } => {}
            Step::Remove { from, to, way, tier } => {
                let to = to.min(pages.len());
                let hashes: Vec<u64> = (from.min(to)..to).rev().map(|at| hash(at, way)).collect();
                for &hash in &hashes {
                    naive.remove(hash, tier);
                }
                let hashes: Vec<EngineHash> = hashes.into_iter().map(EngineHash).collect();
                index.removed(holder, &hashes, TIERS[tier]);
            }
            Step::Clear => {
                *naive = Naive { source: naive.source, ..Naive::default() };
                index.cleared(holder);
            }
            Step::RemoveHolder => {
                *naive = Naive::default();
                index.remove_holder(holder);
            }
            Step::Speculate { ttl } => {
                let ends = self.now + ttl;
                naive.note(&prefixes, |_| (Kind::Speculative, ends), capacity);
                index.speculate(holder, &prompt, now, eighths(ends));
            }
            Step::Forget => {
                naive.guesses.retain(|(path, kind, _)| {
                    *kind != Kind::Speculative || !prefixes.contains(path)
                });
                index.forget(holder, &prompt);
            }
            Step::Serve { cached, ttl } => {
                let ends = ttl.map(|ttl| self.now + ttl);
                let noted = match naive.source {
                    Some(Source::Events) => &prefixes[..cached.min(prefixes.len())],
                    _ => &prefixes[..],
                };
                let kind = |i| if i < cached { Kind::Confirmed } else { Kind::Inferred };
                naive.note(noted, |i| (kind(i), ends.unwrap_or(NEVER)), capacity);
                index.served(holder, &prompt, cached, now, ends.map(eighths));
            }
            Step::Touch => {
                for path in prefixes.iter().rev() {
                    if let Some(at) = naive.guesses.iter().position(|guess| guess.0 == *path) {
                        let guess = naive.guesses.remove(at);
                        naive.guesses.push(guess);
                    }
                }
                index.touch(holder, &prompt, now);
            }
            Step::Expire => {
                for naive in &mut self.naive {
                    naive.guesses.retain(|guess| guess.2 > self.now);
                }
                index.expire(now);
            }
            Step::Source(source) => {
                naive.source = Some(source);
                if source == Source::Events {
                    naive.guesses.retain(|guess| guess.1 != Kind::Inferred);
                }
                naive.outgrow(capacity);
                index.set_source(holder, source);
            }
        }
    }

    /// Matches of a prompt: the index's and the model's.
    fn matches(&self, root: usize, tokens: &[u32]) -> Vec<(Match, (u32, [u32; 7]))> {
        let holders: Vec<Holder> = NUMBERS.iter().map(|&number| Holder(number)).collect();
        let prompt = keys(roots()[root], tokens, BLOCK, &[]);
        let prefixes = paths(root, &tokens[..prompt.len() * BLOCK as usize]);
        let weights = self.index.settings.weights;
        self.index
            .matches(&prompt, &holders)
            .into_iter()
            .zip(&self.naive)
            .map(|(found, naive)| (found, naive.matched(&prefixes, &weights)))
            .collect()
    }
}

impl PrefixIndex {
    /// Checks that everything that is kept twice agrees.
    fn check(&self) {
        let mut marks: BTreeMap<(u32, Holder), u8> = BTreeMap::new();
        let mut hashes: BTreeMap<(Holder, u32, usize), u32> = BTreeMap::new();
        let (mut entries, mut guesses) = (0, 0);
        for (of, number) in self.holders.iter().zip(0u32..) {
            let holder = Holder(number);
            entries += of.entries.len();
            guesses += of.guesses.len();
            for entry in of.entries.iter().filter(|entry| !self.dead.has(entry.block)) {
                assert_ne!(entry.refs, Refs::default());
                for tier in (0..4).filter(|&tier| entry.refs.0[tier] != 0) {
                    *marks.entry((entry.block, holder)).or_default() |= 1 << tier;
                    *hashes.entry((holder, entry.block, tier)).or_default() += 1;
                }
            }
            let order = of.guesses.blocks();
            assert_eq!(order.len(), of.guesses.len());
            for (i, &block) in order.iter().enumerate() {
                let mark = marks.entry((block, holder)).or_default();
                assert_eq!(*mark, 0, "a guess beside an event");
                *mark = of.guesses.get(block).unwrap().0.bit();
                let parent = self.arena.get(block).parent;
                let before = order.iter().position(|&other| other == parent);
                assert!(before.is_none_or(|before| before > i), "evicted before its descendants");
            }
        }
        assert_eq!((entries, guesses), (self.stats.entries, self.stats.guesses));
        hashes.retain(|_, count| {
            *count -= 1;
            *count > 0
        });
        assert_eq!(hashes, self.doubles.clone().into_iter().collect::<BTreeMap<_, _>>());
        let mut children: BTreeMap<u32, u32> = BTreeMap::new();
        let mut found: BTreeMap<(u32, Holder), u8> = BTreeMap::new();
        let (mut used, mut bytes) = (0, 0);
        for id in 0..self.arena.end() {
            let block = self.arena.get(id);
            assert_eq!(self.dead.has(id), block.state == State::Dead);
            used += usize::from(block.state != State::Free);
            if block.state != State::Live {
                assert!(block.marks.is_empty());
                continue;
            }
            assert_eq!(self.find(block.key), Some(id));
            bytes += block.marks.heap_bytes();
            found.extend(block.marks.collect().into_iter().map(|(of, mark)| ((id, of), mark)));
            if block.parent != NONE {
                assert_eq!(
                    self.arena.get(block.parent).state,
                    State::Live,
                    "the parent went first"
                );
                *children.entry(block.parent).or_default() += 1;
            }
        }
        for id in (0..self.arena.end()).filter(|&id| self.arena.get(id).state == State::Live) {
            let block = self.arena.get(id);
            assert_eq!(block.children, children.get(&id).copied().unwrap_or(0));
            assert!(block.children != 0 || (block.queued && !block.marks.is_empty()));
        }
        assert_eq!(found, marks);
        assert_eq!((used, bytes), (self.arena.used(), self.marks_bytes));
        assert_eq!(self.keys.iter().map(Table::len).sum::<usize>(), self.stats().blocks);
        assert!(self.bytes() <= self.settings.budget, "{} bytes", self.bytes());
    }
}

fn small() -> Settings {
    Settings { block: BLOCK, capacity: 20, seed: 7, ..Settings::default() }
}

/// How many cases to try, by hand more than on every build.
fn cases(default: u32) -> ProptestConfig {
    ProptestConfig::with_cases(
        std::env::var("PREFIX_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(default),
    )
}

proptest! {
    #![proptest_config(cases(48))]

    #[test]
    fn it_agrees_with_the_naive_model(ops in prop::collection::vec(op(prop_oneof![3 => events(), 2 => guesses()]), 1..60)) {
        let mut both = Both::new(small());
        for op in &ops {
            both.apply(op);
            both.index.check();
            for (found, (blocks, by_kind)) in both.matches(op.root, &op.tokens) {
                prop_assert_eq!((found.blocks, found.by_kind), (blocks, by_kind), "holder {:?}", found.holder);
                let weights = [1.0, 0.8, 0.5, 0.5, 1.0, 1.0, 1.0];
                let sum: f64 = by_kind.iter().zip(weights).map(|(&n, weight)| f64::from(n) * weight).sum();
                prop_assert!((found.weighted - sum).abs() < 1e-9);
            }
            let waiting: usize = both.naive.iter().map(|naive| naive.waiting.len()).sum();
            prop_assert_eq!(both.index.stats().orphans, waiting);
        }
        for number in NUMBERS {
            both.index.remove_holder(Holder(number));
            both.index.check();
            let none = both.index.matches(&keys(roots()[0], &[0, 1, 1, 0], BLOCK, &[]), &[Holder(number)]);
            prop_assert_eq!(none[0].blocks, 0);
        }
        let stats = both.index.stats();
        prop_assert_eq!((stats.blocks, stats.entries, stats.guesses, stats.orphans, stats.bytes), (0, 0, 0, 0, 0));
    }

    #[test]
    fn a_removed_holder_leaves_nothing_and_takes_nothing(ops in prop::collection::vec(op(prop_oneof![events(), guesses()]), 1..40), gone in 0usize..NUMBERS.len()) {
        // The same steps with and without one holder come to the same bytes once it is removed.
        let (mut with, mut without) = (Both::new(small()), Both::new(small()));
        for op in &ops {
            with.apply(op);
            if op.holder == gone {
                without.now += op.wait;
                if matches!(op.step, Step::Expire) {
                    without.index.expire(eighths(without.now));
                }
            } else {
                without.apply(op);
            }
        }
        with.index.remove_holder(Holder(NUMBERS[gone]));
        with.index.check();
        let (a, b) = (with.index.stats(), without.index.stats());
        // Marks in bitmaps keep some room; all else is exactly as before.
        prop_assert_eq!((a.blocks, a.entries, a.guesses, a.orphans), (b.blocks, b.entries, b.guesses, b.orphans));
        prop_assert_eq!(a.bytes - with.index.marks_bytes, b.bytes - without.index.marks_bytes);
    }

    #[test]
    fn a_small_budget_is_kept_and_nothing_is_made_up(ops in prop::collection::vec(op(events()), 1..80), budget in 400usize..6000) {
        let mut both = Both::new(Settings { budget, orphans: budget / 4, ..small() });
        for op in &ops {
            both.apply(op);
            both.index.check();
            for (found, (blocks, _)) in both.matches(op.root, &op.tokens) {
                prop_assert!(found.blocks <= blocks);
            }
        }
        for number in NUMBERS {
            both.index.remove_holder(Holder(number));
        }
        both.index.sweep(usize::MAX);
        both.index.sweep(usize::MAX);
        both.index.check();
        prop_assert_eq!(both.index.bytes(), 0);
    }

    #[test]
    fn a_small_budget_is_kept_whatever_the_evidence(ops in prop::collection::vec(op(prop_oneof![events(), guesses()]), 1..80), budget in 400usize..6000) {
        let mut both = Both::new(Settings { budget, orphans: budget / 4, ..small() });
        for op in &ops {
            both.apply(op);
            both.index.check();
        }
    }

    #[test]
    fn nonsense_from_an_engine_does_no_harm(events in prop::collection::vec((0u32..3, prop::collection::vec(0u64..8, 0..4), prop::option::of(0u64..8), prop::collection::vec(0u32..2, 0..9), 0usize..5), 0..60)) {
        let mut index = PrefixIndex::new(Settings { budget: 3000, ..small() });
        for (holder, hashes, parent, tokens, tier) in events {
            let hashes: Vec<EngineHash> = hashes.into_iter().map(EngineHash).collect();
            if tier == 4 {
                index.removed(Holder(holder), &hashes, Tier::Gpu);
            } else {
                let stored = Stored { hashes: &hashes, parent: parent.map(EngineHash), root: roots()[0], tokens: &tokens, extras: &[], tier: TIERS[tier] };
                let before = index.stats();
                if index.stored(Holder(holder), &stored, Duration::ZERO).is_err() {
                    prop_assert_eq!(index.stats(), before);
                }
            }
            index.check();
        }
    }
}

fn store(
    index: &mut PrefixIndex,
    number: u32,
    hashes: &[u64],
    parent: Option<u64>,
    tokens: &[u32],
) {
    let hashes: Vec<EngineHash> = hashes.iter().map(|&hash| EngineHash(hash)).collect();
    let stored = Stored {
        hashes: &hashes,
        parent: parent.map(EngineHash),
        root: roots()[0],
        tokens,
        extras: &[],
        tier: Tier::Gpu,
    };
    index.stored(Holder(number), &stored, Duration::ZERO).unwrap();
}

fn blocks(index: &PrefixIndex, number: u32, tokens: &[u32]) -> u32 {
    index.matches(&keys(roots()[0], tokens, BLOCK, &[]), &[Holder(number)])[0].blocks
}

#[test]
fn one_system_prompt_on_a_thousand_holders_has_no_cap() {
    let mut index = PrefixIndex::new(small());
    let tokens: Vec<u32> = (0..40).collect();
    let hashes: Vec<u64> = (1..=20).collect();
    for number in 0..1000 {
        store(
            &mut index,
            number,
            &hashes[..number as usize % 20 + 1],
            None,
            &tokens[..(number as usize % 20 + 1) * 2],
        );
    }
    let all: Vec<Holder> = (0..1000).map(Holder).collect();
    let found = index.matches(&keys(roots()[0], &tokens, BLOCK, &[]), &all);
    assert!(found.iter().all(|found| found.blocks == found.holder.0 % 20 + 1));
    index.check();
}

#[test]
fn orphans_are_bounded_and_the_oldest_go_first() {
    let mut index = PrefixIndex::new(Settings { orphans: 2000, ..small() });
    for n in 0..100 {
        store(&mut index, 0, &[1000 + n], Some(500 + n), &[0, 1]);
    }
    let stats = index.stats();
    assert!(index.orphans.bytes() <= 2000 && stats.orphans > 3, "{stats:?}");
    assert_eq!(stats.orphans_dropped, 100 - stats.orphans as u64);
    // The newest is still there, the oldest is not.
    store(&mut index, 0, &[599], None, &[7, 7]);
    store(&mut index, 0, &[500], None, &[8, 8]);
    assert_eq!((blocks(&index, 0, &[7, 7, 0, 1]), blocks(&index, 0, &[8, 8, 0, 1])), (2, 1));
    index.check();
}

#[test]
fn a_cycle_of_parents_ends_nowhere() {
    let mut index = PrefixIndex::new(small());
    store(&mut index, 0, &[1], Some(1), &[0, 1]);
    store(&mut index, 0, &[2], Some(3), &[0, 1]);
    store(&mut index, 0, &[3], Some(2), &[0, 1]);
    assert_eq!(index.stats().orphans, 3);
    store(&mut index, 0, &[2], None, &[0, 1]);
    assert_eq!((index.stats().orphans, blocks(&index, 0, &[0, 1, 0, 1])), (1, 2));
    index.check();
}

#[test]
fn every_copy_counts_even_beyond_what_an_entry_can() {
    let mut index = PrefixIndex::new(small());
    for _ in 0..600 {
        store(&mut index, 0, &[1], None, &[0, 1]);
    }
    let mut left = 600;
    while blocks(&index, 0, &[0, 1]) == 1 {
        index.removed(Holder(0), &[EngineHash(1)], Tier::Gpu);
        left -= 1;
    }
    assert_eq!(left, 0);
    index.check();
    assert_eq!(index.bytes(), 0);
}

#[test]
fn the_eviction_takes_the_least_recent_end_first() {
    let budget = 40 * (BLOCK_BYTES + ENTRY_BYTES);
    let mut index = PrefixIndex::new(Settings { budget, ..small() });
    let at = |steps| eighths(steps);
    for n in 0..60u32 {
        let hashes = [EngineHash(u64::from(n) * 2 + 1), EngineHash(u64::from(n) * 2 + 2)];
        let stored = Stored {
            hashes: &hashes,
            parent: None,
            root: roots()[0],
            tokens: &[n, n, 0, 0],
            extras: &[],
            tier: Tier::Gpu,
        };
        index.stored(Holder(0), &stored, at(n * 2)).unwrap();
        // The first prompt is used again and again.
        index.touch(Holder(0), &keys(roots()[0], &[0, 0, 0, 0], BLOCK, &[]), at(n * 2 + 1));
        index.check();
    }
    assert!(index.stats().evicted > 60, "{:?}", index.stats());
    let lengths: Vec<u32> = (0..60).map(|n| blocks(&index, 0, &[n, n, 0, 0])).collect();
    assert_eq!(lengths[0], 2);
    assert!(lengths[1..].is_sorted() && lengths[59] == 2 && lengths[1] == 0, "{lengths:?}");
}

#[test]
fn an_event_that_contradicts_itself_is_refused() {
    let mut index = PrefixIndex::new(small());
    let hashes = [EngineHash(1), EngineHash(2)];
    let good = Stored {
        hashes: &hashes,
        parent: None,
        root: roots()[0],
        tokens: &[0; 4],
        extras: &[],
        tier: Tier::Gpu,
    };
    let one = [Extra::default()];
    let mut apply = |stored: Stored<'_>| index.stored(Holder(0), &stored, Duration::ZERO);
    assert_eq!(
        apply(Stored { tokens: &[0; 5], ..good }),
        Err(StoreError::Tokens { tokens: 5, hashes: 2 })
    );
    assert_eq!(
        apply(Stored { tokens: &[0; 6], ..good }),
        Err(StoreError::Page { page: 3, block: 2 })
    );
    assert_eq!(
        apply(Stored { extras: &one, ..good }),
        Err(StoreError::Extras { extras: 1, hashes: 2 })
    );
    assert_eq!(apply(good), Ok(()));
    assert_eq!(
        apply(Stored { tokens: &[0; 8], ..good }),
        Err(StoreError::Changed { page: 4, before: 2 })
    );
    index.cleared(Holder(0));
    assert_eq!(
        index.stored(Holder(0), &Stored { tokens: &[0; 8], ..good }, Duration::ZERO),
        Ok(())
    );
    assert_eq!(blocks(&index, 0, &[0; 8]), 4);
}

#[test]
fn engine_hashes_come_in_every_form() {
    let digest: Vec<u8> = (1..=32).collect();
    let last = u64::from_be_bytes([25, 26, 27, 28, 29, 30, 31, 32]);
    assert_eq!(EngineHash::bytes(&digest), Ok(EngineHash::unsigned(last)));
    assert_eq!(EngineHash::bytes(&[1, 2]), Ok(EngineHash::unsigned(258)));
    assert_eq!(EngineHash::signed(-1), EngineHash::unsigned(u64::MAX));
    assert_eq!(EngineHash::bytes(&[]), Err(StoreError::Hash(0)));
    assert_eq!(EngineHash::bytes(&[0; 33]), Err(StoreError::Hash(33)));
    assert!(Holder::new(1 << 24).is_none() && Holder::new((1 << 24) - 1).is_some());
}

#[test]
fn items_and_identity_reach_from_events_to_prompts() {
    let mut index = PrefixIndex::new(small());
    let item = crate::index::block::Item {
        identity: crate::index::block::Item::identity(b"image"),
        at: 2,
        len: 2,
    };
    let extras = [Extra::default(), Extra::default().with(item.identity)];
    let stored = Stored {
        hashes: &[EngineHash(1), EngineHash(2)],
        parent: None,
        root: roots()[0],
        tokens: &[9; 4],
        extras: &extras,
        tier: Tier::Cpu,
    };
    index.stored(Holder(0), &stored, Duration::ZERO).unwrap();
    let found =
        |root, items: &[_]| index.matches(&keys(root, &[9; 4], BLOCK, items), &[Holder(0)])[0];
    assert_eq!(found(roots()[0], &[item]).by_kind, [0, 2, 0, 0, 0, 0, 0]);
    assert!((found(roots()[0], &[item]).weighted - 1.6).abs() < 1e-9);
    assert_eq!(found(roots()[0], &[]).blocks, 1);
    assert_eq!(found(roots()[1], &[item]).blocks, 0);
}
