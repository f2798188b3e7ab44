//! The longest unbroken prefix of every holder at once: bitmaps of holders slide along the blocks of a prompt.

use super::marks::{KINDS, Marks, Wide, ones, place, split};
use super::{Holder, Match};

/// One pass over a prompt.
pub(super) struct Pass {
    /// Candidates whose prefix is unbroken so far.
    alive: Vec<u64>,
    /// Scratch: those that have the block at hand.
    any: Vec<u64>,
    /// Length of the prefix of every holder that fell out.
    ended: Vec<u32>,
    /// Blocks by kind of evidence; kind 0 is what is left.
    counts: [Counter; KINDS],
}

/// Counts for each of many holders at once: plane `i` holds bit `i` of every count.
#[derive(Default)]
struct Counter {
    planes: Vec<u64>,
}

impl Counter {
    fn add(&mut self, word: usize, words: usize, mut carry: u64) {
        let mut at = word;
        while carry != 0 {
            if at >= self.planes.len() {
                self.planes.resize(self.planes.len() + words, 0);
            }
            let both = self.planes[at] & carry;
            self.planes[at] ^= carry;
            carry = both;
            at += words;
        }
    }

    fn get(&self, word: usize, words: usize, bit: u64) -> u32 {
        let planes = self.planes.iter().skip(word).step_by(words);
        planes.zip(0u32..).map(|(plane, i)| u32::from(plane & bit != 0) << i).sum()
    }
}

impl Pass {
    pub(super) fn new(candidates: &[Holder]) -> Self {
        let words = candidates.iter().map(|&holder| place(holder).0 + 1).max().unwrap_or(0);
        let mut alive = vec![0; words];
        for &holder in candidates {
            let (word, bit) = place(holder);
            alive[word] |= bit;
        }
        Self { alive, any: vec![0; words], ended: vec![0; words * 64], counts: Default::default() }
    }

    /// Takes the marks of block number `at`; `false` when no prefix goes on.
    pub(super) fn step(&mut self, at: u32, marks: &Marks, order: &Order) -> bool {
        match marks {
            Marks::Few(entries) => self.some(at, entries, order),
            Marks::List(entries) => self.some(at, entries, order),
            Marks::Wide(wide) => self.wide(at, Wide::new(wide), order),
        }
    }

    fn some(&mut self, at: u32, entries: &[u32], order: &Order) -> bool {
        let words = self.alive.len();
        self.any.fill(0);
        for &entry in entries {
            let (holder, mark) = split(entry);
            let (word, bit) = place(holder);
            if mark == 0 || word >= words || self.alive[word] & bit == 0 {
                continue;
            }
            self.any[word] |= bit;
            let kind = usize::from(order.best[usize::from(mark & 127)]);
            if kind != 0 {
                self.counts[kind].add(word, words, bit);
            }
        }
        let mut left = 0;
        for word in 0..words {
            left |= self.close(at, word, self.any[word]);
        }
        left != 0
    }

    fn wide(&mut self, at: u32, wide: Wide<'_>, order: &Order) -> bool {
        let words = self.alive.len();
        let mut left = 0;
        for word in 0..words {
            let alive = self.alive[word];
            if alive == 0 {
                continue;
            }
            let mut any = 0;
            if word < wide.words {
                if wide.kinds == 1 {
                    any = alive & wide.bits[word];
                } else {
                    for &kind in &order.kinds {
                        if wide.kinds & (1 << kind) == 0 {
                            continue;
                        }
                        // Only those that no better evidence was found for.
                        let new = wide.bits[wide.start(kind) + word] & alive & !any;
                        if kind != 0 {
                            self.counts[kind].add(word, words, new);
                        }
                        any |= new;
                    }
                }
            }
            left |= self.close(at, word, any);
        }
        left != 0
    }

    /// Ends the prefixes of those that do not have the block.
    fn close(&mut self, at: u32, word: usize, any: u64) -> u64 {
        let mut gone = self.alive[word] & !any;
        while gone != 0 {
            self.ended[word * 64 + gone.trailing_zeros() as usize] = at;
            gone &= gone - 1;
        }
        self.alive[word] = any;
        any
    }

    /// The results, in the order of the candidates; `at` is the number of blocks walked.
    pub(super) fn finish(mut self, at: u32, candidates: &[Holder], order: &Order) -> Vec<Match> {
        for word in 0..self.alive.len() {
            self.close(at, word, 0);
        }
        let words = self.alive.len();
        candidates
            .iter()
            .map(|&holder| {
                let (word, bit) = place(holder);
                let blocks = self.ended[holder.0 as usize];
                let mut by_kind = [0; KINDS];
                by_kind[0] = blocks;
                for (kind, count) in self.counts.iter().enumerate().skip(1) {
                    by_kind[kind] = count.get(word, words, bit);
                    by_kind[0] -= by_kind[kind];
                }
                let weighted = by_kind
                    .iter()
                    .zip(&order.weights)
                    .map(|(&count, weight)| f64::from(count) * weight)
                    .sum();
                Match { holder, blocks, by_kind, weighted }
            })
            .collect()
    }
}

/// Which evidence counts when a holder has several for one block.
#[derive(Debug, Clone)]
pub(super) struct Order {
    /// Kinds, the one that counts first.
    kinds: [usize; KINDS],
    /// The kind that counts, for every mark.
    best: [u8; 128],
    weights: [f64; KINDS],
}

impl Order {
    /// The heaviest tier first, then guesses from the surest on.
    pub(super) fn new(weights: [f64; KINDS]) -> Self {
        let mut kinds = [0, 1, 2, 3, 4, 5, 6];
        kinds[..4].sort_by(|&a, &b| weights[b].total_cmp(&weights[a]));
        let mut best = [0; 128];
        for (mark, best) in (0u8..).zip(&mut best) {
            let kind = kinds.iter().find(|&&kind| ones(mark).any(|one| one == kind));
            *best = kind.and_then(|&kind| u8::try_from(kind).ok()).unwrap_or(0);
        }
        Self { kinds, best, weights }
    }
}
