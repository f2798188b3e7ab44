//! By chance, in turn, and to the fewest requests: what knows nothing of caches.

use super::lowest;
use crate::random::Random;
use crate::sim::{Router, World};
use crate::workload::Request;

pub(super) struct Chance(pub(super) Random);

impl Router for Chance {
    fn choose(&mut self, _: &Request, _: f64, world: &World) -> Option<usize> {
        Some(world.live()[self.0.below(world.live().len())])
    }
}

#[derive(Default)]
pub(super) struct Turn {
    count: usize,
}

impl Router for Turn {
    fn choose(&mut self, _: &Request, _: f64, world: &World) -> Option<usize> {
        self.count += 1;
        Some(world.live()[self.count % world.live().len()])
    }
}

pub(super) struct LeastRequest(pub(super) Random);

impl Router for LeastRequest {
    fn choose(&mut self, _: &Request, _: f64, world: &World) -> Option<usize> {
        Some(least_requests(&mut self.0, world))
    }
}

/// Returns the endpoint with the fewest requests in flight.
pub(super) fn least_requests(random: &mut Random, world: &World) -> usize {
    let loads: Vec<f64> = world.live().iter().map(|&i| world.in_flight()[i] as f64).collect();
    world.live()[lowest(random, &loads)]
}
