//! NVIDIA Dynamo's KV router: blocks to compute, weighted, and blocks in use; the least, ties by chance.

use super::index::Prefilling;
use super::lowest;
use crate::random::Random;
use crate::sim::{Router, Setup, World};
use crate::workload::Request;

pub(super) struct Dynamo {
    weight: f64,
    random: Random,
    prefilling: Prefilling,
    block: i64,
}

impl Dynamo {
    pub(super) fn new(weight: f64, setup: &Setup) -> Self {
        Self {
            weight,
            random: Random::new(setup.seed),
            prefilling: Prefilling::new(setup.endpoints),
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
            let tokens = self.prefilling.at(i) + self.new_tokens(request, i, world);
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
        self.prefilling.put(request, endpoint, new);
    }

    fn on_first(&mut self, request: &Request, _: f64, world: &World) {
        self.prefilling.take(request, world);
    }

    fn on_finish(&mut self, request: &Request, _: f64, world: &World) {
        self.prefilling.take(request, world);
    }

    fn on_added(&mut self, endpoint: usize, _: &World) {
        self.prefilling.add(endpoint);
    }
}
