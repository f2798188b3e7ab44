//! vLLM production stack's routers by cache: `kvaware`, and `loadaware`, which weighs it against requests in flight.

use super::highest;
use super::plain::least_requests;
use crate::random::Random;
use crate::sim::{Router, World};
use crate::workload::Request;

pub(super) struct LoadAware {
    /// What the excess over the mean load weighs.
    beta: f64,
    random: Random,
}

impl LoadAware {
    pub(super) fn new(beta: f64, random: Random) -> Self {
        Self { beta, random }
    }

    /// Scores each live endpoint, unless nobody has anything of the prompt.
    pub(super) fn scores(&self, request: &Request, world: &World) -> Option<Vec<f64>> {
        let (cached, load) = (cached(request, world), world.in_flight());
        if cached.iter().all(|&tokens| tokens == 0) {
            return None;
        }
        let sum: i64 = world.live().iter().map(|&i| load[i]).sum();
        let mean = sum as f64 / world.live().len() as f64;
        let score = |(&tokens, &i): (&i64, &usize)| {
            let excess = load[i] as f64 - mean;
            tokens as f64 / request.prompt as f64 - self.beta * excess / mean.max(1.0)
        };
        Some(cached.iter().zip(world.live()).map(score).collect())
    }
}

/// Returns the tokens of a prompt that each live endpoint has.
fn cached(request: &Request, world: &World) -> Vec<i64> {
    world.live().iter().map(|&i| world.prefix_tokens(i, request)).collect()
}

impl Router for LoadAware {
    fn choose(&mut self, request: &Request, _: f64, world: &World) -> Option<usize> {
        Some(match self.scores(request, world) {
            Some(scores) => world.live()[highest(&mut self.random, &scores)],
            None => least_requests(&mut self.random, world),
        })
    }
}

pub(super) struct KvAware {
    random: Random,
}

impl KvAware {
    pub(super) fn new(random: Random) -> Self {
        Self { random }
    }
}

impl Router for KvAware {
    fn choose(&mut self, request: &Request, _: f64, world: &World) -> Option<usize> {
        let cached = cached(request, world);
        let most = cached.iter().copied().max().filter(|&tokens| tokens > 0);
        let first = most.and_then(|most| cached.iter().position(|&tokens| tokens == most));
        Some(match first {
            Some(first) => world.live()[first],
            None => least_requests(&mut self.random, world),
        })
    }
}
