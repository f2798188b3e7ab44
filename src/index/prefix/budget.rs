//! The byte budget: what was used least recently goes first, from the ends of chains.
//!
//! A block that is evicted may still be named by entries of engines' hashes. It is dead until a walk over all entries,
//! made in small steps, has taken those out; then its slot is free.

use std::cmp::Reverse;

use super::arena::State;
use super::marks::{EVENT, ones};
use super::{BLOCK_BYTES, ENTRY_BYTES, Holder, PrefixIndex};

/// Entries looked at for each block stored while dead ones wait to be cleared away.
const SWEEP: usize = 32;

/// Blocks on their way out, until no entry points at them.
#[derive(Debug, Default)]
pub(super) struct Dead {
    /// One bit for each slot of the arena.
    pub(super) bits: Vec<u64>,
    /// Those that the pass at hand clears.
    pub(super) now: Vec<u32>,
    /// Those that the next pass clears.
    pub(super) next: Vec<u32>,
    /// Entries that point at them, about.
    pub(super) entries: usize,
    /// Where the pass is: holder and hash.
    holder: usize,
    hash: u64,
}

impl Dead {
    pub(super) fn has(&self, block: u32) -> bool {
        let word = self.bits.get(block as usize / 64);
        word.is_some_and(|word| word & (1 << (block % 64)) != 0)
    }

    fn set(&mut self, block: u32, dead: bool) {
        let word = block as usize / 64;
        if word >= self.bits.len() {
            self.bits.resize(word + 1, 0);
        }
        if dead {
            self.bits[word] |= 1 << (block % 64);
        } else {
            self.bits[word] &= !(1 << (block % 64));
        }
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.now.is_empty() && self.next.is_empty()
    }
}

impl PrefixIndex {
    /// Ends an update: new leaves are queued, and the budget is kept.
    pub(super) fn settle(&mut self, blocks: usize) {
        let mut fresh = std::mem::take(&mut self.fresh);
        for id in fresh.drain(..) {
            self.tidy(id);
        }
        self.fresh = fresh;
        let budget = self.settings.budget;
        // What is evicted leaves once no entry points at it any more; a sixteenth is kept free for it until then.
        let soft = budget - budget / 16;
        while self.bytes() > soft.saturating_add(self.pending()) && self.evict() {}
        if !self.dead.is_empty() {
            self.sweep(blocks.saturating_mul(SWEEP).saturating_add(SWEEP));
        }
        while self.bytes() > budget && !self.dead.is_empty() {
            self.sweep(usize::MAX);
            while self.bytes() > budget.saturating_add(self.pending()) && self.evict() {}
        }
    }

    /// Bytes that will be free when the dead are cleared away.
    const fn pending(&self) -> usize {
        (self.dead.now.len() + self.dead.next.len()) * BLOCK_BYTES + self.dead.entries * ENTRY_BYTES
    }

    /// Evicts the leaf that was used least recently; `false` when there is none.
    fn evict(&mut self) -> bool {
        while let Some(Reverse((touched, id))) = self.leaves.pop() {
            let block = self.arena.get_mut(id);
            block.queued = false;
            if block.state != State::Live || block.children != 0 {
                continue;
            }
            if block.touched > touched {
                self.queue(id);
                continue;
            }
            self.evict_block(id);
            self.stats.evicted += 1;
            return true;
        }
        false
    }

    fn evict_block(&mut self, id: u32) {
        let marks = std::mem::take(&mut self.arena.get_mut(id).marks);
        self.marks_bytes -= marks.heap_bytes();
        let mut reported = 0;
        for (holder, mark) in marks.collect() {
            if mark & !EVENT != 0 && self.of(holder).guesses.remove(id).is_some() {
                self.stats.guesses -= 1;
            }
            if mark & EVENT != 0 {
                reported += 1;
                for tier in ones(mark & EVENT) {
                    if !self.doubles.is_empty() {
                        self.doubles.remove(&(holder, id, tier));
                    }
                }
            }
        }
        if reported == 0 {
            self.tidy(id);
            return;
        }
        let parent = self.unlink(id);
        self.arena.get_mut(id).state = State::Dead;
        self.dead.set(id, true);
        self.dead.next.push(id);
        self.dead.entries += reported;
        self.tidy(parent);
    }

    /// Goes on clearing away entries of dead blocks, looking at about so many entries.
    pub(super) fn sweep(&mut self, mut steps: usize) {
        if self.dead.now.is_empty() {
            self.dead.now = std::mem::take(&mut self.dead.next);
            (self.dead.holder, self.dead.hash) = (0, 0);
        }
        while let Some(of) = self.holders.get_mut(self.dead.holder) {
            if steps == 0 {
                return;
            }
            let before = of.entries.len();
            let (dead, copies) = (&self.dead, &mut self.copies);
            let holder = u32::try_from(dead.holder).map(Holder);
            let next = of.entries.sweep(dead.hash, &mut steps, |entry| {
                let gone = dead.has(entry.block);
                for tier in 0..4 {
                    if gone
                        && entry.refs.0[tier] == u8::MAX
                        && let Ok(holder) = holder
                    {
                        copies.remove(&(holder, entry.hash, tier));
                    }
                }
                gone
            });
            let gone = before - of.entries.len();
            self.stats.entries -= gone;
            self.dead.entries = self.dead.entries.saturating_sub(gone);
            if let Some(hash) = next {
                self.dead.hash = hash;
            } else {
                self.dead.holder += 1;
                self.dead.hash = 0;
                steps = steps.saturating_sub(1);
            }
        }
        // Every entry was looked at since these died: nothing points at them.
        for id in std::mem::take(&mut self.dead.now) {
            self.dead.set(id, false);
            self.arena.free(id);
        }
        if self.dead.next.is_empty() {
            self.dead.entries = 0;
        }
    }
}
