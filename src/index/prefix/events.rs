//! Events of engines: blocks stored, moved between tiers and removed, under the engine's own hashes.

use std::time::Duration;

use super::marks::EVENT;
use super::orphan::Orphans;
use super::{
    EngineHash, Entry, Holder, NONE, OfHolder, PrefixIndex, Refs, StoreError, Stored, Tier, hash,
    stamp,
};
use crate::index::block::{self, BlockKey, Extra};

/// The one before a block that is being stored.
#[derive(Debug, Clone, Copy)]
enum Parent {
    /// None: the key to start from.
    Root(BlockKey),
    Block(u32),
    /// A hash that nothing is known of.
    Unknown(u64),
}

impl PrefixIndex {
    /// Applies blocks that an engine stored.
    ///
    /// # Errors
    ///
    /// Fails on an event that contradicts itself or the block size; nothing is changed then.
    pub fn stored(
        &mut self,
        holder: Holder,
        stored: &Stored<'_>,
        now: Duration,
    ) -> Result<(), StoreError> {
        let Stored { hashes, tokens, extras, tier, .. } = *stored;
        if hashes.is_empty() {
            return Ok(());
        }
        if tokens.is_empty() {
            self.moved(holder, hashes, tier, now);
            return Ok(());
        }
        if !tokens.len().is_multiple_of(hashes.len()) {
            return Err(StoreError::Tokens { tokens: tokens.len(), hashes: hashes.len() });
        }
        if !extras.is_empty() && extras.len() != hashes.len() {
            return Err(StoreError::Extras { extras: extras.len(), hashes: hashes.len() });
        }
        let page = tokens.len() / hashes.len();
        let block = self.settings.block as usize;
        if !page.is_multiple_of(block) {
            return Err(StoreError::Page { page, block: self.settings.block });
        }
        let before = self.of(holder).span;
        if before != 0 && before * block != page {
            return Err(StoreError::Changed { page, before: before * block });
        }
        self.of(holder).span = page / block;
        let stamp = stamp(now);
        let mut parent = match stored.parent {
            None => Parent::Root(stored.root),
            Some(hash) => {
                let hash = self.mixed(hash);
                self.known(holder, hash).map_or(Parent::Unknown(hash), |block| {
                    self.touch_block(block, stamp);
                    Parent::Block(block)
                })
            }
        };
        for (i, (&hash, tokens)) in hashes.iter().zip(tokens.chunks_exact(page)).enumerate() {
            let extra = extras.get(i).copied().unwrap_or_default();
            let mut refs = Refs::default();
            refs.0[tier as usize] = 1;
            parent = self.store(holder, self.mixed(hash), parent, tokens, extra, refs, stamp);
        }
        self.settle(hashes.len() * page / block);
        Ok(())
    }

    /// Applies blocks of which an engine removed one copy each.
    pub fn removed(&mut self, holder: Holder, hashes: &[EngineHash], tier: Tier) {
        for &hash in hashes {
            let hash = self.mixed(hash);
            if let Some(orphan) = self.orphans.get_mut(holder, hash) {
                let count = &mut orphan.refs.0[tier as usize];
                if *count == 0 {
                    self.stats.unknown += 1;
                    continue;
                }
                *count -= 1;
                if orphan.refs == Refs::default() {
                    self.orphans.take(holder, hash);
                }
                continue;
            }
            // Ends first, as engines do, so that no block outlives the one before it even for a moment.
            let span = self.of(holder).span.max(1);
            for part in (0..span).rev() {
                self.remove_copy(holder, part_hash(hash, part, span), tier);
            }
        }
        self.settle(hashes.len());
    }

    /// Applies that an engine dropped all its blocks, or that its events can no longer be trusted.
    pub fn cleared(&mut self, holder: Holder) {
        self.orphans.clear(holder);
        let of = self.of(holder);
        of.span = 0;
        let entries = std::mem::take(&mut of.entries);
        self.stats.entries -= entries.len();
        for entry in entries.iter() {
            for tier in 0..4 {
                if entry.refs.0[tier] == u8::MAX && !self.copies.is_empty() {
                    self.copies.remove(&(holder, entry.hash, tier));
                }
                if entry.refs.0[tier] != 0 && !self.dead.has(entry.block) {
                    self.release(holder, entry.block, tier);
                }
            }
            if self.dead.has(entry.block) {
                self.dead.entries = self.dead.entries.saturating_sub(1);
            }
        }
        for block in self.of(holder).guesses.blocks() {
            self.drop_guess(holder, block);
        }
        self.settle(0);
    }

    /// Forgets a holder, after which its number may be used for another.
    pub fn remove_holder(&mut self, holder: Holder) {
        self.cleared(holder);
        *self.of(holder) = OfHolder::default();
    }

    /// The live block of an engine's hash.
    fn known(&self, holder: Holder, hash: u64) -> Option<u32> {
        let entries = &self.holders.get(holder.0 as usize)?.entries;
        let block = entries.at(entries.find(hash, |_| true)?).block;
        (!self.dead.has(block)).then_some(block)
    }

    #[expect(clippy::too_many_arguments, reason = "the parts of one event, all plain values")]
    fn store(
        &mut self,
        holder: Holder,
        hash: u64,
        parent: Parent,
        tokens: &[u32],
        extra: Extra,
        mut refs: Refs,
        stamp: u32,
    ) -> Parent {
        // A known hash is one more copy, and needs neither tokens nor parent.
        if let Some(block) = self.known(holder, hash) {
            self.add_copies(holder, hash, refs, stamp);
            return Parent::Block(block);
        }
        if let Some(orphan) = self.orphans.get_mut(holder, hash) {
            orphan.refs.add(refs);
            if matches!(parent, Parent::Unknown(_)) {
                return Parent::Unknown(hash);
            }
            if let Some(orphan) = self.orphans.take(holder, hash) {
                refs = orphan.refs;
                self.stats.attached += 1;
            }
        }
        let (key, last) = match parent {
            Parent::Root(key) => (key, NONE),
            Parent::Block(block) => (self.arena.get(block).key, block),
            Parent::Unknown(parent) => {
                let orphan = Orphans::orphan(parent, tokens.into(), extra, refs);
                self.stats.orphans_dropped +=
                    self.orphans.insert(holder, hash, orphan, self.settings.orphans);
                return Parent::Unknown(hash);
            }
        };
        let Some(block) = self.place(holder, hash, key, last, tokens, extra, refs, stamp) else {
            return Parent::Unknown(hash);
        };
        if self.orphans.len() == 0 {
            return Parent::Block(block);
        }
        // Whoever waited for this one, and whoever waited for those.
        let mut found = vec![(hash, block)];
        while let Some((parent, last)) = found.pop() {
            for hash in self.orphans.waiting(holder, parent) {
                let Some(orphan) = self.orphans.take(holder, hash) else {
                    continue;
                };
                let key = self.arena.get(last).key;
                let (tokens, extra, refs) = (&orphan.tokens, orphan.extra, orphan.refs);
                if let Some(block) = self.place(holder, hash, key, last, tokens, extra, refs, stamp)
                {
                    self.stats.attached += 1;
                    found.push((hash, block));
                }
            }
        }
        Parent::Block(block)
    }

    /// Enters one block of an engine, which may be several of ours; returns the last.
    #[expect(clippy::too_many_arguments, reason = "the parts of one event, all plain values")]
    fn place(
        &mut self,
        holder: Holder,
        hash: u64,
        mut key: BlockKey,
        mut last: u32,
        tokens: &[u32],
        extra: Extra,
        refs: Refs,
        stamp: u32,
    ) -> Option<u32> {
        let size = self.settings.block as usize;
        let span = tokens.len() / size;
        for (part, tokens) in tokens.chunks_exact(size).enumerate() {
            key = block::chain(key, tokens, extra);
            last = self.make(last, key, stamp)?;
            let hash = part_hash(hash, part, span);
            self.enter(holder, Entry { hash, block: last, refs }, span);
        }
        Some(last)
    }

    /// Enters one of our blocks under its name within the engine.
    fn enter(&mut self, holder: Holder, mut entry: Entry, span: usize) {
        // An entry is left of a block that was evicted here but not by the engine, or of the first parts of a block of
        // the engine of which the last was evicted; without either it is known that there is none.
        let certain = span == 1 && self.dead.is_empty();
        let entries = &mut self.of(holder).entries;
        let found = if certain { None } else { entries.find(entry.hash, |_| true) };
        let Some(at) = found else {
            entries.insert(entry);
            self.stats.entries += 1;
            self.hold_new(holder, entry, Refs::default());
            return;
        };
        let old = entries.at(at);
        entry.refs.add(old.refs);
        entries.set(at, entry);
        if self.dead.has(old.block) {
            self.dead.entries = self.dead.entries.saturating_sub(1);
            self.hold_new(holder, entry, Refs::default());
        } else if old.block == entry.block {
            self.hold_new(holder, entry, old.refs);
        } else {
            // An engine that gives one name to two blocks. The new one is held first: it may lead to the old.
            self.hold_new(holder, entry, Refs::default());
            for tier in (0..4).filter(|&tier| old.refs.0[tier] != 0) {
                self.release(holder, old.block, tier);
            }
        }
    }

    /// Marks the tiers of an entry that had no copy before.
    fn hold_new(&mut self, holder: Holder, entry: Entry, before: Refs) {
        for tier in (0..4).filter(|&tier| before.0[tier] == 0 && entry.refs.0[tier] != 0) {
            self.hold(holder, entry.block, tier);
        }
    }

    /// Counts further copies of a known block.
    fn add_copies(&mut self, holder: Holder, hash: u64, refs: Refs, stamp: u32) {
        let span = self.of(holder).span.max(1);
        for part in 0..span {
            let hash = part_hash(hash, part, span);
            let entries = &mut self.of(holder).entries;
            let Some(at) = entries.find(hash, |_| true) else {
                continue;
            };
            let mut entry = entries.at(at);
            let before = entry.refs;
            let over = entry.refs.add(refs);
            entries.set(at, entry);
            if self.dead.has(entry.block) {
                continue;
            }
            self.touch_block(entry.block, stamp);
            for (tier, over) in over.into_iter().enumerate().filter(|&(_, over)| over != 0) {
                *self.copies.entry((holder, hash, tier)).or_default() += over;
            }
            self.hold_new(holder, entry, before);
        }
    }

    /// Applies that known blocks are in one more tier.
    fn moved(&mut self, holder: Holder, hashes: &[EngineHash], tier: Tier, now: Duration) {
        let stamp = stamp(now);
        let mut refs = Refs::default();
        refs.0[tier as usize] = 1;
        for &hash in hashes {
            let hash = self.mixed(hash);
            if self.known(holder, hash).is_some() {
                self.add_copies(holder, hash, refs, stamp);
            } else if let Some(orphan) = self.orphans.get_mut(holder, hash) {
                orphan.refs.add(refs);
            } else {
                self.stats.unknown += 1;
            }
        }
        self.settle(0);
    }

    fn remove_copy(&mut self, holder: Holder, hash: u64, tier: Tier) {
        let tier = tier as usize;
        let Some(of) = self.holders.get_mut(holder.0 as usize) else {
            self.stats.unknown += 1;
            return;
        };
        let entries = &mut of.entries;
        let Some(at) = entries.find(hash, |_| true) else {
            self.stats.unknown += 1;
            return;
        };
        let mut entry = entries.at(at);
        if entry.refs.0[tier] == 0 {
            self.stats.unknown += 1;
            return;
        }
        if entry.refs.0[tier] == u8::MAX
            && let Some(over) = self.copies.get_mut(&(holder, hash, tier))
        {
            *over -= 1;
            if *over == 0 {
                self.copies.remove(&(holder, hash, tier));
            }
            return;
        }
        entry.refs.0[tier] -= 1;
        let gone = entry.refs.0[tier] == 0;
        if entry.refs == Refs::default() {
            entries.remove(at);
            self.stats.entries -= 1;
        } else {
            entries.set(at, entry);
        }
        if self.dead.has(entry.block) {
            if entry.refs == Refs::default() {
                self.dead.entries = self.dead.entries.saturating_sub(1);
            }
        } else if gone {
            self.release(holder, entry.block, tier);
        }
    }

    /// Marks a block as held in a tier by one more hash of the holder.
    fn hold(&mut self, holder: Holder, block: u32, tier: usize) {
        let mark = self.arena.get(block).marks.get(holder);
        if mark & (1 << tier) != 0 {
            *self.doubles.entry((holder, block, tier)).or_default() += 1;
            return;
        }
        if mark & !EVENT != 0 && self.of(holder).guesses.remove(block).is_some() {
            self.stats.guesses -= 1;
        }
        self.set_mark(block, holder, mark & EVENT | 1 << tier);
    }

    /// Takes back one [`PrefixIndex::hold`].
    fn release(&mut self, holder: Holder, block: u32, tier: usize) {
        if !self.doubles.is_empty()
            && let Some(more) = self.doubles.get_mut(&(holder, block, tier))
        {
            *more -= 1;
            if *more == 0 {
                self.doubles.remove(&(holder, block, tier));
            }
            return;
        }
        let mark = self.arena.get(block).marks.get(holder);
        self.set_mark(block, holder, mark & !(1 << tier));
        self.tidy(block);
    }
}

/// The name of one of our blocks within a block of the engine: the last has the engine's own.
fn part_hash(hash: u64, part: usize, span: usize) -> u64 {
    if part + 1 == span { hash } else { hash::mix(hash, part as u64 + 1) }
}
