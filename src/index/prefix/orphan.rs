//! Blocks that came before their parent did: kept under the engine's hash, within a budget, until the parent appears.

use std::collections::{BTreeSet, HashMap, VecDeque};

use super::{Holder, Refs};
use crate::index::block::Extra;

/// One block of an engine whose parent is not known.
#[derive(Debug)]
pub(super) struct Orphan {
    pub(super) parent: u64,
    pub(super) tokens: Box<[u32]>,
    pub(super) extra: Extra,
    pub(super) refs: Refs,
    /// Tells this orphan from an earlier one of the same hash.
    serial: u64,
}

impl Orphan {
    fn bytes(&self) -> usize {
        // Itself, its place in both maps and in the queue, and what it owns.
        size_of::<Self>() + 96 + self.tokens.len() * 4
    }
}

#[derive(Debug, Default)]
struct OfHolder {
    by_hash: HashMap<u64, Orphan>,
    /// Serial and hash of the blocks that wait for a parent, in the order in which they came.
    by_parent: HashMap<u64, BTreeSet<(u64, u64)>>,
}

/// The orphans of all holders, oldest first out.
#[derive(Debug, Default)]
pub(super) struct Orphans {
    holders: HashMap<Holder, OfHolder>,
    queue: VecDeque<(Holder, u64, u64)>,
    len: usize,
    bytes: usize,
    serial: u64,
}

impl Orphans {
    pub(super) const fn len(&self) -> usize {
        self.len
    }

    pub(super) const fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn get_mut(&mut self, holder: Holder, hash: u64) -> Option<&mut Orphan> {
        if self.len == 0 {
            return None;
        }
        self.holders.get_mut(&holder)?.by_hash.get_mut(&hash)
    }

    /// Keeps a block; the caller knows that it is not there. Returns how many old ones had to go for it.
    pub(super) fn insert(
        &mut self,
        holder: Holder,
        hash: u64,
        mut orphan: Orphan,
        limit: usize,
    ) -> u64 {
        self.serial += 1;
        orphan.serial = self.serial;
        self.queue.push_back((holder, hash, self.serial));
        self.len += 1;
        self.bytes += orphan.bytes();
        let of = self.holders.entry(holder).or_default();
        of.by_parent.entry(orphan.parent).or_default().insert((self.serial, hash));
        of.by_hash.insert(hash, orphan);
        let mut dropped = 0;
        while self.bytes > limit {
            let Some((holder, hash, serial)) = self.queue.pop_front() else {
                break;
            };
            if self.get_mut(holder, hash).is_some_and(|orphan| orphan.serial == serial) {
                self.take(holder, hash);
                dropped += 1;
            }
        }
        // Places of orphans that left otherwise are not worth a search until they are most of the queue.
        if self.queue.len() > 2 * self.len + 64 {
            let mut queue = std::mem::take(&mut self.queue);
            queue.retain(|&(holder, hash, serial)| {
                self.get_mut(holder, hash).is_some_and(|orphan| orphan.serial == serial)
            });
            self.queue = queue;
        }
        dropped
    }

    /// Takes a block out.
    pub(super) fn take(&mut self, holder: Holder, hash: u64) -> Option<Orphan> {
        let of = self.holders.get_mut(&holder)?;
        let orphan = of.by_hash.remove(&hash)?;
        if let Some(siblings) = of.by_parent.get_mut(&orphan.parent) {
            siblings.remove(&(orphan.serial, hash));
            if siblings.is_empty() {
                of.by_parent.remove(&orphan.parent);
            }
        }
        if of.by_hash.is_empty() {
            self.holders.remove(&holder);
        }
        self.len -= 1;
        self.bytes -= orphan.bytes();
        if self.len == 0 {
            self.queue = VecDeque::new();
        }
        Some(orphan)
    }

    /// Hashes of the blocks that wait for a parent, in the order in which they came.
    pub(super) fn waiting(&self, holder: Holder, parent: u64) -> Vec<u64> {
        if self.len == 0 {
            return Vec::new();
        }
        let of = self.holders.get(&holder);
        let waiting = of.and_then(|of| of.by_parent.get(&parent));
        waiting.map_or_else(Vec::new, |waiting| waiting.iter().map(|&(_, hash)| hash).collect())
    }

    /// Forgets a holder's blocks.
    pub(super) fn clear(&mut self, holder: Holder) {
        if let Some(mut of) = self.holders.remove(&holder) {
            self.len -= of.by_hash.len();
            // Draining in any order: only a sum is taken.
            let parents = std::mem::take(&mut of.by_parent);
            let bytes: usize = parents
                .into_values()
                .flatten()
                .filter_map(|(_, hash)| of.by_hash.remove(&hash))
                .map(|orphan| orphan.bytes())
                .sum();
            self.bytes -= bytes;
        }
        if self.len == 0 {
            self.queue = VecDeque::new();
        }
    }

    /// A block about to be kept.
    pub(super) const fn orphan(
        parent: u64,
        tokens: Box<[u32]>,
        extra: Extra,
        refs: Refs,
    ) -> Orphan {
        Orphan { parent, tokens, extra, refs, serial: 0 }
    }
}
