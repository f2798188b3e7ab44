//! What routers believe to be cached where: their own memory of what they sent, and prompts that are under way.

use std::collections::HashMap;

use crate::engine::{Block, prefix};
use crate::recency::Recency;
use crate::sim::World;
use crate::workload::Request;

/// A router's own memory of the prompts that it sent to each endpoint, the oldest blocks forgotten first.
pub(super) struct Sent {
    /// A bit for each endpoint that a block was sent to.
    holders: Vec<u64>,
    recency: Vec<Recency>,
    /// Blocks remembered for each endpoint.
    most: i64,
}

impl Sent {
    pub(super) fn new(endpoints: usize, most: i64) -> Self {
        Self {
            holders: Vec::new(),
            recency: (0..endpoints).map(|_| Recency::default()).collect(),
            most,
        }
    }

    /// Returns how many of a prompt's first blocks are remembered for each endpoint.
    pub(super) fn prefixes(&self, blocks: &[Block], endpoints: usize) -> Vec<usize> {
        let mut lengths = vec![0; endpoints];
        let mut left = !0 >> (64 - endpoints);
        for (at, &block) in blocks.iter().enumerate() {
            let holders = self.holders.get(block as usize).copied().unwrap_or(0);
            note_ends(&mut lengths, left & !holders, at);
            left &= holders;
            if left == 0 {
                return lengths;
            }
        }
        note_ends(&mut lengths, left, blocks.len());
        lengths
    }

    pub(super) fn record(&mut self, endpoint: usize, blocks: &[Block], space: usize) {
        if self.holders.len() < space {
            self.holders.resize(space, 0);
        }
        let recency = super::room_for(&mut self.recency, endpoint);
        recency.reserve(space);
        let bit = 1 << endpoint;
        for &block in blocks {
            recency.touch(block);
            self.holders[block as usize] |= bit;
        }
        recency.evict(recency.len() - self.most, |block| self.holders[block as usize] &= !bit);
    }

    pub(super) fn forget(&mut self, endpoint: usize) {
        super::room_for(&mut self.recency, endpoint).clear();
        self.holders.iter_mut().for_each(|bits| *bits &= !(1 << endpoint));
    }
}

/// Notes where the prefixes of some endpoints end.
pub(super) fn note_ends(lengths: &mut [usize], mut ended: u64, at: usize) {
    while ended != 0 {
        lengths[ended.trailing_zeros() as usize] = at;
        ended &= ended - 1;
    }
}

/// Tokens that each endpoint has to compute of prompts that are under way to it.
pub(super) struct Prefilling {
    tokens: Vec<i64>,
    /// The same of each request.
    of: HashMap<usize, i64>,
}

impl Prefilling {
    pub(super) fn new(endpoints: usize) -> Self {
        Self { tokens: vec![0; endpoints], of: HashMap::new() }
    }

    pub(super) fn at(&self, endpoint: usize) -> i64 {
        self.tokens[endpoint]
    }

    pub(super) fn put(&mut self, request: &Request, endpoint: usize, new: i64) {
        self.tokens[endpoint] += new;
        self.of.insert(request.index, new);
    }

    /// Takes a request's tokens out again, once.
    pub(super) fn take(&mut self, request: &Request, world: &World) {
        if let Some(new) = self.of.remove(&request.index) {
            self.tokens[world.endpoint_of(request)] -= new;
        }
    }

    pub(super) fn add(&mut self, endpoint: usize) {
        super::room_for(&mut self.tokens, endpoint);
    }
}

/// Blocks of prompts that were sent and have not been computed: they will be cached.
#[derive(Default)]
pub(crate) struct UnderWay {
    holders: Vec<u64>,
    counts: Vec<Vec<u32>>,
    at: HashMap<usize, usize>,
}

impl UnderWay {
    pub(crate) fn put(&mut self, request: &Request, endpoint: usize, space: usize) {
        if self.holders.len() < space {
            self.holders.resize(space, 0);
        }
        let counts = super::room_for(&mut self.counts, endpoint);
        if counts.len() < space {
            counts.resize(space, 0);
        }
        for &block in request.blocks.iter() {
            counts[block as usize] += 1;
            self.holders[block as usize] |= 1 << endpoint;
        }
        self.at.insert(request.index, endpoint);
    }

    /// Takes a request's blocks out again, once.
    pub(crate) fn take(&mut self, request: &Request) {
        let Some(endpoint) = self.at.remove(&request.index) else { return };
        for &block in request.blocks.iter() {
            let count = &mut self.counts[endpoint][block as usize];
            *count -= 1;
            if *count == 0 {
                self.holders[block as usize] &= !(1 << endpoint);
            }
        }
    }

    /// Returns how many of a prompt's first blocks an endpoint has or will have.
    pub(crate) fn prefix(&self, endpoint: usize, request: &Request, world: &World) -> usize {
        prefix(&request.blocks, |block| {
            let coming = self.holders.get(block as usize).copied().unwrap_or(0);
            (world.holders(block) | coming) >> endpoint & 1 == 1
        })
    }
}
