//! SGLang's gateway, `cache_aware`: the longest match of a tree that never forgets, unless loads are out of balance.

use super::index::note_ends;
use crate::sim::{Router, World};
use crate::workload::Request;

/// The share of a prompt that must match.
const THRESHOLD: f64 = 0.3;

pub(super) struct Sglang {
    /// Loads are out of balance when they differ by more than this, and by more than this factor.
    difference: i64,
    factor: f64,
    /// A bit for each endpoint that a block was sent to, and the blocks sent to each.
    holders: Vec<u64>,
    sizes: Vec<usize>,
}

impl Sglang {
    pub(super) fn new(difference: i64, factor: f64, endpoints: usize) -> Self {
        Self { difference, factor, holders: Vec::new(), sizes: vec![0; endpoints] }
    }

    fn matched(&self, request: &Request, world: &World) -> Vec<usize> {
        let mut lengths = vec![0; world.endpoints()];
        let mut left = world.live().iter().fold(0u64, |bits, &i| bits | 1 << i);
        for (at, &block) in request.blocks.iter().enumerate() {
            let holders = self.holders.get(block as usize).copied().unwrap_or(0);
            note_ends(&mut lengths, left & !holders, at);
            left &= holders;
            if left == 0 {
                break;
            }
        }
        note_ends(&mut lengths, left, request.blocks.len());
        lengths
    }
}

impl Router for Sglang {
    fn choose(&mut self, request: &Request, _: f64, world: &World) -> Option<usize> {
        let (live, load) = (world.live(), world.in_flight());
        // The first of equals, in each of the three choices.
        let lightest = live.iter().copied().min_by_key(|&i| load[i])?;
        let most = live.iter().map(|&i| load[i]).max()?;
        let least = load[lightest];
        if most - least > self.difference && most as f64 > least as f64 * self.factor {
            return Some(lightest);
        }
        let lengths = self.matched(request, world);
        let best = live.iter().copied().min_by_key(|&i| std::cmp::Reverse(lengths[i]))?;
        if lengths[best] as f64 / request.blocks.len() as f64 > THRESHOLD {
            return Some(best);
        }
        live.iter().copied().min_by_key(|&i| self.sizes[i])
    }

    fn on_dispatch(&mut self, request: &Request, endpoint: usize, _: f64, world: &World) {
        if self.holders.len() < world.block_space() {
            self.holders.resize(world.block_space(), 0);
        }
        for &block in request.blocks.iter() {
            let holders = &mut self.holders[block as usize];
            if *holders >> endpoint & 1 == 0 {
                *holders |= 1 << endpoint;
                self.sizes[endpoint] += 1;
            }
        }
    }

    fn on_added(&mut self, endpoint: usize, _: &World) {
        super::room_for(&mut self.sizes, endpoint);
    }

    fn on_removed(&mut self, endpoint: usize, _: &World) {
        self.holders.iter_mut().for_each(|bits| *bits &= !(1 << endpoint));
        self.sizes[endpoint] = 0;
    }
}
