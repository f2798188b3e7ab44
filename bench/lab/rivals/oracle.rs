//! Perfect knowledge, used greedily: the least true time to the first token. It is no upper bound.

use super::lowest;
use crate::random::Random;
use crate::sim::{Router, World};
use crate::workload::Request;

pub(super) struct Oracle(pub(super) Random);

impl Router for Oracle {
    fn choose(&mut self, request: &Request, _: f64, world: &World) -> Option<usize> {
        let ttft = |&i: &usize| {
            let cached = world.true_prefix_tokens(i, request);
            let new = (request.prompt - cached).max(16);
            world.queue_seconds(i) + world.engine(i).prefill_seconds(new, cached as f64)
        };
        let times: Vec<f64> = world.live().iter().map(ttft).collect();
        Some(world.live()[lowest(&mut self.0, &times)])
    }
}
