//! NVIDIA Dynamo's KV router: blocks to compute, weighted, and blocks in use; the least, ties by chance.

use std::collections::HashMap;

use super::lowest;
use crate::random::Random;
use crate::sim::{Router, Setup, World};
use crate::workload::Request;

pub(super) struct Dynamo {
    weight: f64,
    random: Random,
    /// Tokens of prompts under way to each endpoint that it has to compute.
    prefilling: Vec<i64>,
    /// The same of each request.
    new: HashMap<usize, i64>,
    block: i64,
}

impl Dynamo {
    pub(super) fn new(weight: f64, setup: &Setup) -> Self {
        Self {
            weight,
            random: Random::new(setup.seed),
            prefilling: vec![0; setup.endpoints],
            new: HashMap::new(),
            block: setup.params.block,
        }
    }

    fn new_tokens(&self, request: &Request, endpoint: usize, world: &World) -> i64 {
        let blocks = world.prefix(endpoint, &request.blocks) as i64;
        (request.prompt - blocks * self.block).max(0)
    }
}

impl Router for Dynamo {
    fn choose(&mut self, request: &Request, _: f64, world: &World) -> Option<usize> {
        let cost = |&i: &usize| {
            let engine = world.engine(i);
            let tokens = self.prefilling[i] + self.new_tokens(request, i, world);
            let added = request.blocks.iter().filter(|&&block| !engine.holds(block)).count() as i64;
            self.weight * tokens as f64 / self.block as f64
                + engine.used() as f64
                + engine.waiting_blocks() as f64
                + added as f64
        };
        let costs: Vec<f64> = world.live().iter().map(cost).collect();
        Some(world.live()[lowest(&mut self.random, &costs)])
    }

    fn on_dispatch(&mut self, request: &Request, endpoint: usize, _: f64, world: &World) {
        let new = self.new_tokens(request, endpoint, world);
        self.prefilling[endpoint] += new;
        self.new.insert(request.index, new);
    }

    fn on_first(&mut self, request: &Request, _: f64, world: &World) {
        if let Some(new) = self.new.remove(&request.index) {
            self.prefilling[world.endpoint_of(request)] -= new;
        }
    }

    fn on_finish(&mut self, request: &Request, now: f64, world: &World) {
        self.on_first(request, now, world);
    }

    fn on_added(&mut self, endpoint: usize, _: &World) {
        super::room_for(&mut self.prefilling, endpoint);
    }
}
