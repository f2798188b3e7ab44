//! Where the blocks live: chunks that never move, so that growing costs no pause, and slots that are used again.

use super::NONE;
use super::marks::Marks;
use crate::index::block::BlockKey;

const CHUNK: usize = 4096;

/// What a slot of the arena is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Free,
    Live,
    /// Evicted, but entries of engines' hashes may still point here.
    Dead,
}

#[derive(Debug)]
pub(super) struct Block {
    pub(super) key: BlockKey,
    pub(super) marks: Marks,
    /// The block before this one, or the next free slot.
    pub(super) parent: u32,
    /// Number of blocks right after this one.
    pub(super) children: u32,
    /// When it was last used, in steps of the index's clock.
    pub(super) touched: u32,
    pub(super) state: State,
    /// Whether the queue of leaves has this slot.
    pub(super) queued: bool,
}

#[derive(Debug)]
pub(super) struct Arena {
    chunks: Vec<Vec<Block>>,
    free: u32,
    next: u32,
    used: usize,
}

impl Default for Arena {
    fn default() -> Self {
        Self { chunks: Vec::new(), free: NONE, next: 0, used: 0 }
    }
}

impl Arena {
    /// Slots that are live or dead.
    pub(super) const fn used(&self) -> usize {
        self.used
    }

    pub(super) const fn capacity_bytes(&self) -> usize {
        self.chunks.len() * CHUNK * size_of::<Block>()
    }

    /// Slots ever used: ids are below this.
    #[cfg(test)]
    pub(super) const fn end(&self) -> u32 {
        self.next
    }

    pub(super) fn get(&self, id: u32) -> &Block {
        &self.chunks[id as usize / CHUNK][id as usize % CHUNK]
    }

    pub(super) fn get_mut(&mut self, id: u32) -> &mut Block {
        &mut self.chunks[id as usize / CHUNK][id as usize % CHUNK]
    }

    /// Whether a slot, which need not exist, is the live block of this key.
    pub(super) fn is(&self, id: u32, key: BlockKey) -> bool {
        self.chunks
            .get(id as usize / CHUNK)
            .and_then(|chunk| chunk.get(id as usize % CHUNK))
            .is_some_and(|block| block.key == key && block.state == State::Live)
    }

    /// Adds a live block; `None` when all ids are taken.
    pub(super) fn add(&mut self, key: BlockKey, parent: u32, touched: u32) -> Option<u32> {
        let block = Block {
            key,
            marks: Marks::default(),
            parent,
            children: 0,
            touched,
            state: State::Live,
            queued: false,
        };
        let id = if self.free == NONE {
            let id = self.next;
            if id == NONE {
                return None;
            }
            if id as usize / CHUNK == self.chunks.len() {
                self.chunks.push(Vec::with_capacity(CHUNK));
            }
            self.chunks[id as usize / CHUNK].push(block);
            self.next += 1;
            id
        } else {
            let id = self.free;
            let slot = self.get_mut(id);
            // The queue of leaves may still have the slot; one place in it is enough.
            let block = Block { queued: slot.queued, ..block };
            let next = std::mem::replace(slot, block).parent;
            self.free = next;
            id
        };
        self.used += 1;
        Some(id)
    }

    pub(super) fn free(&mut self, id: u32) {
        let free = self.free;
        let slot = self.get_mut(id);
        slot.state = State::Free;
        slot.marks = Marks::default();
        slot.parent = free;
        self.free = id;
        self.used -= 1;
    }
}
