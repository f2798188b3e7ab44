//! Who holds which blocks: one index over what engines report, what we routed and what answers confirmed.
//!
//! Blocks have our own keys (see [`super::block`]); the hashes of engines are opaque and kept for each holder, so
//! how an engine hashes does not matter. One struct with one writer: queries take `&self`, and no query changes
//! anything. Time comes in; nothing here reads a clock.

mod arena;
mod budget;
mod events;
mod guess;
mod marks;
mod model;
mod orphan;
mod query;
mod table;
#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::time::Duration;

use arena::{Arena, State};
use budget::Dead;
use guess::{Guesses, NEVER};
use marks::KINDS;
use orphan::Orphans;
use query::{Order, Pass};
use table::{Slot, Table};

use super::block::{BlockKey, Extra};
use super::hash;

/// No block.
const NONE: u32 = u32::MAX;
/// Tables that share the keys, so that none is large enough to hold anyone up while it grows.
const SHARDS: usize = 256;

/// An endpoint, or one data-parallel rank of one, by a small dense number that may be used again once removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Holder(u32);

impl Holder {
    /// Takes a number below 2^24; `None` from there on.
    #[must_use]
    pub const fn new(number: u32) -> Option<Self> {
        if number < 1 << 24 { Some(Self(number)) } else { None }
    }

    /// Returns the number.
    #[must_use]
    pub const fn number(self) -> u32 {
        self.0
    }
}

/// An engine's own name for a block, of which only equality within one holder means anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct EngineHash(u64);

impl EngineHash {
    /// Takes a hash that came as an unsigned number.
    #[must_use]
    pub const fn unsigned(hash: u64) -> Self {
        Self(hash)
    }

    /// Takes a hash that came as a signed number: the same 64 bits, so -1 and 2^64 - 1 are one hash.
    #[must_use]
    pub const fn signed(hash: i64) -> Self {
        Self(hash.cast_unsigned())
    }

    /// Takes a hash of 1 to 32 bytes; the last 8 count, big-endian, as in engines that report numbers.
    ///
    /// # Errors
    ///
    /// Fails on no bytes and on more than 32.
    pub fn bytes(bytes: &[u8]) -> Result<Self, StoreError> {
        if bytes.is_empty() || bytes.len() > 32 {
            return Err(StoreError::Hash(bytes.len()));
        }
        let last = &bytes[bytes.len().saturating_sub(8)..];
        Ok(Self(last.iter().fold(0, |hash, &byte| hash << 8 | u64::from(byte))))
    }
}

/// Where an engine keeps a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tier {
    /// Memory of the accelerator.
    Gpu = 0,
    /// Memory of the host.
    Cpu = 1,
    /// A disk or a file system.
    Disk = 2,
    /// Anything else, such as a store that several engines share.
    Other = 3,
}

/// What one block of a match is worth, by the best evidence that its holder has it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Weights {
    /// Reported by the engine, by [`Tier`]; of several tiers the heaviest counts.
    pub tiers: [f64; 4],
    /// Reported as cached by an answer.
    pub confirmed: f64,
    /// Served there before.
    pub inferred: f64,
    /// Routed there a moment ago.
    pub speculative: f64,
}

impl Default for Weights {
    fn default() -> Self {
        Self { tiers: [1.0, 0.8, 0.5, 0.5], confirmed: 1.0, inferred: 1.0, speculative: 1.0 }
    }
}

/// Settings of a [`PrefixIndex`].
#[derive(Debug, Clone)]
pub struct Settings {
    /// Tokens of a block; pages of engines must be a multiple of it.
    pub block: u32,
    /// Bytes that the index may take; what was used least recently goes first, from the ends of chains.
    pub budget: usize,
    /// Bytes of the budget that blocks without a known parent may take.
    pub orphans: usize,
    /// Blocks that a holder is taken to have room for until told otherwise.
    pub capacity: u32,
    /// Worth of a block by evidence.
    pub weights: Weights,
    /// A secret of this process, so that nobody can choose hashes that pile up.
    pub seed: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            block: 16,
            budget: 512 << 20,
            orphans: 16 << 20,
            capacity: 31_250,
            weights: Weights::default(),
            seed: 0,
        }
    }
}

/// Where knowledge about a holder comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// A live stream of events: what was only served there is not noted, the engine tells.
    Events,
    /// Our own routing, with a model of an engine that has room for so many of our blocks.
    Model {
        /// Blocks, at least 1.
        capacity: u32,
    },
}

/// Blocks that an engine reports to have, one after the other.
#[derive(Debug, Clone, Copy)]
pub struct Stored<'a> {
    /// The engine's hashes, in the order of the prompt.
    pub hashes: &'a [EngineHash],
    /// Hash of the block before the first, `None` at the start of a prompt.
    pub parent: Option<EngineHash>,
    /// Key before the first block of the prompt; used only without a parent.
    pub root: BlockKey,
    /// Tokens of all blocks; empty when the engine only tells that known blocks are in one more tier.
    pub tokens: &'a [u32],
    /// Items within each block; empty for none at all.
    pub extras: &'a [Extra],
    /// Where the copy is.
    pub tier: Tier,
}

/// An event that cannot be used; the index is as it was.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// A hash of this many bytes.
    #[error("a block hash has {0} bytes; 1 to 32 are expected")]
    Hash(usize),
    /// The tokens cannot be shared out among the hashes.
    #[error("{tokens} tokens for {hashes} blocks")]
    Tokens {
        /// Tokens in the event.
        tokens: usize,
        /// Hashes in the event.
        hashes: usize,
    },
    /// Items for another number of blocks.
    #[error("extra keys for {extras} of {hashes} blocks")]
    Extras {
        /// Blocks that items were given for.
        extras: usize,
        /// Hashes in the event.
        hashes: usize,
    },
    /// The engine's block is not a multiple of ours.
    #[error("the engine's block of {page} tokens is not a multiple of the index's {block}")]
    Page {
        /// Tokens of the engine's block.
        page: usize,
        /// Tokens of ours.
        block: u32,
    },
    /// The engine's block differs from that of earlier events; clear the holder first.
    #[error("the engine's block has become {page} tokens; it was {before}")]
    Changed {
        /// Tokens of the engine's block now.
        page: usize,
        /// Tokens of the engine's block before.
        before: usize,
    },
}

/// The longest unbroken prefix that one holder has.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Match {
    /// Whose prefix.
    pub holder: Holder,
    /// Its length in blocks.
    pub blocks: u32,
    /// The blocks by what is known of them: the four tiers, confirmed, inferred, speculative. They add up to `blocks`.
    pub by_kind: [u32; KINDS],
    /// The blocks, each times its weight.
    pub weighted: f64,
}

impl Match {
    /// Blocks that the engine reported, in any tier.
    #[must_use]
    pub fn reported(&self) -> u32 {
        self.by_kind[..4].iter().sum()
    }
}

/// What the index holds and what happened to it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Blocks that somebody has, or that lead to such.
    pub blocks: usize,
    /// Hashes of engines, over all holders.
    pub entries: usize,
    /// Blocks that holders have by our own doing.
    pub guesses: usize,
    /// Blocks whose parent is not known.
    pub orphans: usize,
    /// Bytes counted against the budget.
    pub bytes: usize,
    /// Blocks evicted to stay within the budget.
    pub evicted: u64,
    /// Guesses that the models of the holders evicted.
    pub outgrown: u64,
    /// Guesses that came to their end.
    pub expired: u64,
    /// Orphans that found their parent.
    pub attached: u64,
    /// Orphans that had to go.
    pub orphans_dropped: u64,
    /// Moves and removals of blocks that are not known, or not in that tier.
    pub unknown: u64,
}

/// How many copies a holder has of a block, by tier; each count stops at 255, and what is above is kept elsewhere.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Refs([u8; 4]);

/// An engine's hash and the block it stands for.
#[derive(Debug, Clone, Copy)]
struct Entry {
    hash: u64,
    block: u32,
    refs: Refs,
}

impl Slot for Entry {
    const EMPTY: Self = Self { hash: 0, block: NONE, refs: Refs([0; 4]) };
    fn is_empty(&self) -> bool {
        self.block == NONE
    }
    fn order(&self) -> u64 {
        self.hash
    }
}

/// Part of a key and the block of that key.
#[derive(Debug, Clone, Copy)]
struct Place {
    tag: u32,
    block: u32,
}

impl Slot for Place {
    const EMPTY: Self = Self { tag: 0, block: NONE };
    fn is_empty(&self) -> bool {
        self.block == NONE
    }
    fn order(&self) -> u64 {
        u64::from(self.tag) << 32
    }
}

/// Bytes counted for a block: itself, its place among the keys at their emptiest, and one in the queue of leaves.
const BLOCK_BYTES: usize = size_of::<arena::Block>() + size_of::<Place>() * 45 / 32 + 8;
/// Bytes counted for an entry, in a table at its emptiest.
const ENTRY_BYTES: usize = size_of::<Entry>() * 45 / 32;
/// Bytes counted for a place in one of the maps of rare cases.
const RARE_BYTES: usize = 48;

#[derive(Debug, Default)]
struct OfHolder {
    entries: Table<Entry>,
    guesses: Guesses,
    /// Blocks of ours in one of the engine's; 0 until the first event.
    span: usize,
    source: Option<Source>,
}

/// Who holds which blocks.
#[derive(Debug)]
pub struct PrefixIndex {
    settings: Settings,
    order: Order,
    arena: Arena,
    keys: Vec<Table<Place>>,
    holders: Vec<OfHolder>,
    orphans: Orphans,
    /// Further hashes of a holder for one block in one tier, beyond the first.
    doubles: HashMap<(Holder, u32, usize), u32>,
    /// Copies beyond what an entry can count.
    copies: HashMap<(Holder, u64, usize), u32>,
    /// Blocks that have none after them, by the time when they were last used, or an earlier one.
    leaves: BinaryHeap<Reverse<(u32, u32)>>,
    /// Guesses by the time when they end.
    ends: BinaryHeap<Reverse<(u32, Holder, u32)>>,
    dead: Dead,
    /// Blocks that the update at hand made.
    fresh: Vec<u32>,
    marks_bytes: usize,
    stats: Stats,
}

impl PrefixIndex {
    /// Makes an empty index.
    #[must_use]
    pub fn new(mut settings: Settings) -> Self {
        settings.block = settings.block.max(1);
        settings.orphans = settings.orphans.min(settings.budget / 2);
        let Weights { tiers: [a, b, c, d], confirmed, inferred, speculative } = settings.weights;
        Self {
            order: Order::new([a, b, c, d, confirmed, inferred, speculative]),
            settings,
            arena: Arena::default(),
            keys: std::iter::repeat_with(Table::default).take(SHARDS).collect(),
            holders: Vec::new(),
            orphans: Orphans::default(),
            doubles: HashMap::new(),
            copies: HashMap::new(),
            leaves: BinaryHeap::new(),
            ends: BinaryHeap::new(),
            dead: Dead::default(),
            fresh: Vec::new(),
            marks_bytes: 0,
            stats: Stats::default(),
        }
    }

    /// Returns the longest unbroken prefix of each candidate, in their order.
    #[must_use]
    pub fn matches(&self, keys: &[BlockKey], candidates: &[Holder]) -> Vec<Match> {
        let mut pass = Pass::new(candidates);
        let mut at = 0;
        let mut last = NONE;
        for &key in keys {
            let Some(id) = self.find_after(last, key) else {
                break;
            };
            last = id;
            if !pass.step(at, &self.arena.get(id).marks, &self.order) {
                break;
            }
            at += 1;
        }
        pass.finish(at, candidates, &self.order)
    }

    /// Returns what the index holds and what happened to it.
    #[must_use]
    pub fn stats(&self) -> Stats {
        Stats {
            blocks: self.arena.used() - self.dead.now.len() - self.dead.next.len(),
            orphans: self.orphans.len(),
            bytes: self.bytes(),
            ..self.stats
        }
    }

    /// Returns the bytes counted against the budget.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.arena.used() * BLOCK_BYTES
            + self.marks_bytes
            + self.stats.entries * ENTRY_BYTES
            + self.stats.guesses * Guesses::BYTES
            + self.orphans.bytes()
            + (self.doubles.len() + self.copies.len()) * RARE_BYTES
    }

    /// Returns the bytes allocated, those kept for later use among them.
    #[must_use]
    pub fn capacity_bytes(&self) -> usize {
        let keys: usize = self.keys.iter().map(Table::capacity_bytes).sum();
        let holders: usize = self
            .holders
            .iter()
            .map(|of| of.entries.capacity_bytes() + of.guesses.capacity_bytes())
            .sum();
        self.arena.capacity_bytes()
            + self.marks_bytes
            + keys
            + holders
            + self.holders.capacity() * size_of::<OfHolder>()
            + self.leaves.capacity() * 8
            + self.ends.capacity() * 12
            + self.dead.bits.capacity() * 8
            + self.orphans.bytes()
            + (self.doubles.capacity() + self.copies.capacity()) * RARE_BYTES
    }

    // Blocks and their keys.

    fn mixed(&self, hash: EngineHash) -> u64 {
        hash::mix(self.settings.seed, hash.0)
    }

    fn of(&mut self, holder: Holder) -> &mut OfHolder {
        let at = holder.0 as usize;
        if at >= self.holders.len() {
            self.holders.resize_with(at + 1, OfHolder::default);
        }
        &mut self.holders[at]
    }

    fn spot(&self, key: BlockKey) -> (usize, u32) {
        let mixed = hash::mix(self.settings.seed, key.0);
        #[expect(clippy::cast_possible_truncation, reason = "the bits after the first 8")]
        let tag = (mixed >> 24) as u32;
        ((mixed >> 56) as usize, tag)
    }

    fn find(&self, key: BlockKey) -> Option<u32> {
        let (shard, tag) = self.spot(key);
        let keys = &self.keys[shard];
        let at = keys.find(u64::from(tag) << 32, |place| self.arena.get(place.block).key == key)?;
        Some(keys.at(at).block)
    }

    /// Finds a block; blocks of one prompt mostly stand one after the other, so the next slot is tried first.
    fn find_after(&self, last: u32, key: BlockKey) -> Option<u32> {
        let next = last.wrapping_add(1);
        if last != NONE && self.arena.is(next, key) { Some(next) } else { self.find(key) }
    }

    /// The known blocks of a prompt, up to the first that is not.
    fn walk<'a>(&'a self, keys: &'a [BlockKey]) -> impl Iterator<Item = u32> + 'a {
        let mut last = NONE;
        keys.iter().map_while(move |&key| {
            last = self.find_after(last, key)?;
            Some(last)
        })
    }

    /// Finds or adds the block of a key; `None` when no more ids are left.
    fn make(&mut self, last: u32, key: BlockKey, stamp: u32) -> Option<u32> {
        if let Some(id) = self.find_after(last, key) {
            self.touch_block(id, stamp);
            return Some(id);
        }
        let id = self.arena.add(key, last, stamp)?;
        let (shard, tag) = self.spot(key);
        self.keys[shard].insert(Place { tag, block: id });
        if last != NONE {
            self.arena.get_mut(last).children += 1;
        }
        self.fresh.push(id);
        Some(id)
    }

    fn touch_block(&mut self, id: u32, stamp: u32) {
        let block = self.arena.get_mut(id);
        block.touched = block.touched.max(stamp);
    }

    fn queue(&mut self, id: u32) {
        let block = self.arena.get_mut(id);
        if !block.queued {
            block.queued = true;
            self.leaves.push(Reverse((block.touched, id)));
        }
    }

    fn set_mark(&mut self, block: u32, holder: Holder, mark: u8) {
        let marks = &mut self.arena.get_mut(block).marks;
        let before = marks.heap_bytes();
        marks.set(holder, mark);
        self.marks_bytes = self.marks_bytes + marks.heap_bytes() - before;
    }

    /// Frees a block that nobody has and that leads nowhere, and those before it that then are so too.
    fn tidy(&mut self, mut id: u32) {
        while id != NONE {
            let block = self.arena.get(id);
            if block.children != 0 || block.state != State::Live {
                return;
            }
            if !block.marks.is_empty() {
                self.queue(id);
                return;
            }
            let parent = self.unlink(id);
            self.arena.free(id);
            id = parent;
        }
    }

    /// Takes a leaf out of the keys and from its parent, which is returned.
    fn unlink(&mut self, id: u32) -> u32 {
        let block = self.arena.get(id);
        let (key, parent) = (block.key, block.parent);
        let (shard, tag) = self.spot(key);
        let keys = &mut self.keys[shard];
        if let Some(at) = keys.find(u64::from(tag) << 32, |place| place.block == id) {
            keys.remove(at);
        }
        if parent != NONE {
            self.arena.get_mut(parent).children -= 1;
        }
        parent
    }
}

impl Refs {
    /// Adds counts; returns what did not fit.
    fn add(&mut self, more: Self) -> [u32; 4] {
        let mut over = [0; 4];
        for ((count, more), over) in self.0.iter_mut().zip(more.0).zip(&mut over) {
            let sum = u16::from(*count) + u16::from(more);
            *count = u8::try_from(sum).unwrap_or(u8::MAX);
            *over = u32::from(sum - u16::from(*count));
        }
        over
    }
}

/// The index's clock: eighths of a second, enough for four years.
fn stamp(now: Duration) -> u32 {
    u32::try_from(now.as_millis() / 125).unwrap_or(NEVER).min(NEVER - 1)
}
