//! What one holder should have by our own doing: blocks of requests routed or served there, least recent first out.

use super::NONE;
use super::table::{Slot, Table};

/// Where a guess comes from; the number is its kind of evidence (see [`super::marks`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Origin {
    Confirmed = 4,
    Inferred = 5,
    Speculative = 6,
}

impl Origin {
    /// Bit of the kind in a mark.
    pub(super) const fn bit(self) -> u8 {
        1 << self as u8
    }
}

/// Time at which a guess ends that never does.
pub(super) const NEVER: u32 = (1 << 30) - 1;

/// A guess about one block, linked from the most to the least recently used.
///
/// A touch always covers a whole prefix, its last block first: a block is more recent than any after it, so the
/// least recent one is always the end of a chain.
#[derive(Debug, Clone, Copy)]
struct Guess {
    block: u32,
    newer: u32,
    older: u32,
    /// Origin in the two high bits, end in the others.
    ends: u32,
}

#[derive(Debug, Clone, Copy)]
struct Place {
    block: u32,
    at: u32,
}

impl Slot for Place {
    const EMPTY: Self = Self { block: NONE, at: 0 };
    fn is_empty(&self) -> bool {
        self.block == NONE
    }
    fn order(&self) -> u64 {
        order(self.block)
    }
}

const fn order(block: u32) -> u64 {
    // Ids are dense and our own, so nobody can choose them to collide; one multiplication spreads them.
    (block as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

#[derive(Debug)]
pub(super) struct Guesses {
    index: Table<Place>,
    list: Vec<Guess>,
    free: u32,
    newest: u32,
    oldest: u32,
}

impl Default for Guesses {
    fn default() -> Self {
        Self { index: Table::default(), list: Vec::new(), free: NONE, newest: NONE, oldest: NONE }
    }
}

impl Guesses {
    /// Bytes that one guess takes, counted whole: the list, the index at its emptiest and the queue of ends.
    pub(super) const BYTES: usize = size_of::<Guess>() * 9 / 8 + size_of::<Place>() * 3 / 2 + 12;

    pub(super) const fn len(&self) -> usize {
        self.index.len()
    }

    pub(super) const fn capacity_bytes(&self) -> usize {
        self.index.capacity_bytes() + self.list.capacity() * size_of::<Guess>()
    }

    fn find(&self, block: u32) -> Option<(usize, u32)> {
        let place = self.index.find(order(block), |place| place.block == block)?;
        Some((place, self.index.at(place).at))
    }

    /// Origin and end of the guess about a block.
    pub(super) fn get(&self, block: u32) -> Option<(Origin, u32)> {
        let (_, at) = self.find(block)?;
        Some(unpack(self.list[at as usize].ends))
    }

    /// Adds or replaces a guess and makes it the most recent.
    pub(super) fn put(&mut self, block: u32, origin: Origin, ends: u32) {
        let ends = pack(origin, ends);
        if let Some((_, at)) = self.find(block) {
            self.list[at as usize].ends = ends;
            self.unlink(at);
            self.link(at);
            return;
        }
        let guess = Guess { block, newer: NONE, older: NONE, ends };
        let at = if self.free == NONE {
            let Ok(at) = u32::try_from(self.list.len()) else {
                return;
            };
            if self.list.len() == self.list.capacity() {
                self.list.reserve_exact(self.list.len() / 8 + 8);
            }
            self.list.push(guess);
            at
        } else {
            let at = self.free;
            self.free = self.list[at as usize].older;
            self.list[at as usize] = guess;
            at
        };
        self.index.insert(Place { block, at });
        self.link(at);
    }

    /// Makes a guess the most recent.
    pub(super) fn touch(&mut self, block: u32) {
        if let Some((_, at)) = self.find(block) {
            self.unlink(at);
            self.link(at);
        }
    }

    pub(super) fn remove(&mut self, block: u32) -> Option<Origin> {
        let (place, at) = self.find(block)?;
        self.unlink(at);
        self.index.remove(place);
        let (origin, _) = unpack(self.list[at as usize].ends);
        if self.index.len() == 0 {
            *self = Self::default();
        } else {
            self.list[at as usize].older = self.free;
            self.free = at;
        }
        Some(origin)
    }

    /// The block that was used least recently.
    pub(super) fn oldest(&self) -> Option<u32> {
        (self.oldest != NONE).then(|| self.list[self.oldest as usize].block)
    }

    /// Blocks from the least to the most recently used.
    pub(super) fn blocks(&self) -> Vec<u32> {
        let mut at = self.oldest;
        let mut blocks = Vec::new();
        while at != NONE {
            blocks.push(self.list[at as usize].block);
            at = self.list[at as usize].newer;
        }
        blocks
    }

    fn link(&mut self, at: u32) {
        let older = self.newest;
        self.list[at as usize].newer = NONE;
        self.list[at as usize].older = older;
        match older {
            NONE => self.oldest = at,
            older => self.list[older as usize].newer = at,
        }
        self.newest = at;
    }

    fn unlink(&mut self, at: u32) {
        let Guess { newer, older, .. } = self.list[at as usize];
        match newer {
            NONE => self.newest = older,
            newer => self.list[newer as usize].older = older,
        }
        match older {
            NONE => self.oldest = newer,
            older => self.list[older as usize].newer = newer,
        }
    }
}

const fn pack(origin: Origin, ends: u32) -> u32 {
    let ends = if ends > NEVER { NEVER } else { ends };
    ((origin as u32 - 4) << 30) | ends
}

const fn unpack(ends: u32) -> (Origin, u32) {
    let origin = match ends >> 30 {
        0 => Origin::Confirmed,
        1 => Origin::Inferred,
        _ => Origin::Speculative,
    };
    (origin, ends & NEVER)
}
