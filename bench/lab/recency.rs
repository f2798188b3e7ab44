//! Blocks in the order of their last use: a doubly linked list over dense numbers, with runs of blocks that nobody can ask for.

use super::engine::Block;

/// The end of the list, and the neighbour of its ends.
const NONE: u32 = u32::MAX;
/// The neighbour of what is not in the list.
const OUT: u32 = u32::MAX - 1;
/// Numbers from here on are runs.
const RUNS: u32 = 1 << 31;

/// The least recently used block is the first to go.
#[derive(Debug, Default)]
pub(crate) struct Recency {
    blocks: Vec<Link>,
    runs: Vec<(Link, i64)>,
    spare_runs: Vec<u32>,
    ends: Ends,
    len: i64,
}

#[derive(Debug, Clone, Copy)]
struct Link {
    before: u32,
    after: u32,
}

#[derive(Debug)]
struct Ends {
    oldest: u32,
    newest: u32,
}

impl Default for Ends {
    fn default() -> Self {
        Self { oldest: NONE, newest: NONE }
    }
}

impl Recency {
    /// Makes room for blocks with numbers below `blocks`.
    pub(crate) fn reserve(&mut self, blocks: usize) {
        if self.blocks.len() < blocks {
            self.blocks.resize(blocks, Link { before: OUT, after: OUT });
        }
    }

    /// Counts the blocks, those in runs included.
    pub(crate) fn len(&self) -> i64 {
        self.len
    }

    /// Tells whether a block is in the list.
    pub(crate) fn contains(&self, block: Block) -> bool {
        self.blocks[block as usize].before != OUT
    }

    /// Adds a block as the last used; one that is there stays where it is.
    pub(crate) fn insert(&mut self, block: Block) {
        if !self.contains(block) {
            self.append(block);
            self.len += 1;
        }
    }

    /// Makes a block the last used.
    pub(crate) fn touch(&mut self, block: Block) {
        if self.contains(block) {
            self.unlink(block);
            self.append(block);
        } else {
            self.insert(block);
        }
    }

    /// Takes a block out.
    pub(crate) fn remove(&mut self, block: Block) {
        if self.contains(block) {
            self.unlink(block);
            self.blocks[block as usize] = Link { before: OUT, after: OUT };
            self.len -= 1;
        }
    }

    /// Adds `count` blocks that hold what nobody will ask for.
    pub(crate) fn insert_run(&mut self, count: i64) {
        if count == 0 {
            return;
        }
        let fresh = (Link { before: OUT, after: OUT }, count);
        let run = if let Some(run) = self.spare_runs.pop() {
            self.runs[(run - RUNS) as usize] = fresh;
            run
        } else {
            self.runs.push(fresh);
            RUNS + u32::try_from(self.runs.len() - 1).expect("fewer runs than requests")
        };
        self.append(run);
        self.len += count;
    }

    /// Takes out the oldest `count` blocks, telling `gone` of each that has a number; false if there are too few.
    pub(crate) fn evict(&mut self, mut count: i64, mut gone: impl FnMut(Block)) -> bool {
        while count > 0 && self.ends.oldest != NONE {
            let oldest = self.ends.oldest;
            if oldest < RUNS {
                self.remove(oldest);
                gone(oldest);
                count -= 1;
                continue;
            }
            let held = &mut self.runs[(oldest - RUNS) as usize].1;
            let taken = count.min(*held);
            *held -= taken;
            let empty = *held == 0;
            self.len -= taken;
            count -= taken;
            if empty {
                self.unlink(oldest);
                self.spare_runs.push(oldest);
            }
        }
        count <= 0
    }

    /// Forgets all.
    pub(crate) fn clear(&mut self) {
        let blocks = self.blocks.len();
        *self = Self::default();
        self.reserve(blocks);
    }

    fn link(&mut self, at: u32) -> &mut Link {
        if at < RUNS {
            &mut self.blocks[at as usize]
        } else {
            &mut self.runs[(at - RUNS) as usize].0
        }
    }

    fn append(&mut self, at: u32) {
        let newest = self.ends.newest;
        *self.link(at) = Link { before: newest, after: NONE };
        if newest == NONE {
            self.ends.oldest = at;
        } else {
            self.link(newest).after = at;
        }
        self.ends.newest = at;
    }

    fn unlink(&mut self, at: u32) {
        let Link { before, after } = *self.link(at);
        if before == NONE {
            self.ends.oldest = after;
        } else {
            self.link(before).after = after;
        }
        if after == NONE {
            self.ends.newest = before;
        } else {
            self.link(after).before = before;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn evicted(recency: &mut Recency, count: i64) -> Vec<Block> {
        let mut gone = Vec::new();
        recency.evict(count, |block| gone.push(block));
        gone
    }

    #[test]
    fn the_oldest_go_first_and_a_use_makes_young() {
        let mut recency = Recency::default();
        recency.reserve(8);
        for block in [3, 1, 4, 5] {
            recency.insert(block);
        }
        recency.insert(3);
        recency.touch(1);
        recency.remove(4);
        assert_eq!(recency.len(), 3);
        assert_eq!(evicted(&mut recency, 2), [3, 5]);
        assert_eq!(evicted(&mut recency, 2), [1]);
        assert!(!recency.evict(1, |_| {}));
    }

    #[test]
    fn a_run_goes_block_by_block() {
        let mut recency = Recency::default();
        recency.reserve(4);
        recency.insert(0);
        recency.insert_run(5);
        recency.insert(1);
        assert_eq!(recency.len(), 7);
        assert_eq!(evicted(&mut recency, 4), [0]);
        assert_eq!(recency.len(), 3);
        recency.insert_run(1);
        assert_eq!(evicted(&mut recency, 3), [1]);
        assert_eq!(recency.len(), 1);
        recency.clear();
        assert_eq!(recency.len(), 0);
    }
}
