//! Weighted sums of scores, as the Inference Extension and llm-d have them: queue, KV use, and prefix.

use super::highest;
use super::index::{Sent, UnderWay};
use crate::random::Random;
use crate::sim::{Metrics, Router, Setup, World};
use crate::workload::Request;

/// Scores an endpoint's queue among the queues of all: 1 is the shortest.
fn queues(metrics: &[Metrics], live: &[usize]) -> Vec<f64> {
    let waiting: Vec<usize> = live.iter().map(|&i| metrics[i].waiting).collect();
    let shortest = waiting.iter().copied().min().unwrap_or(0);
    let longest = waiting.iter().copied().max().unwrap_or(0);
    let score = |waiting| {
        if shortest == longest {
            1.0
        } else {
            (longest - waiting) as f64 / (longest - shortest) as f64
        }
    };
    waiting.into_iter().map(score).collect()
}

/// A prefix scorer with a memory of its own.
struct OwnPrefix {
    sent: Sent,
    /// Blocks of a prompt that are looked at.
    most: usize,
}

impl OwnPrefix {
    fn new(tokens: usize, setup: &Setup) -> Self {
        let most = setup.params.whole_blocks(tokens as i64).max(1);
        let held = setup.params.tokens / setup.params.block;
        Self { sent: Sent::new(setup.endpoints, held), most }
    }

    fn scores(&self, request: &Request, world: &World) -> Vec<f64> {
        let blocks = &request.blocks[..request.blocks.len().min(self.most)];
        let lengths = self.sent.prefixes(blocks, world.endpoints());
        world.live().iter().map(|&i| lengths[i] as f64 / blocks.len() as f64).collect()
    }

    fn record(&mut self, request: &Request, endpoint: usize, world: &World) {
        let blocks = &request.blocks[..request.blocks.len().min(self.most)];
        self.sent.record(endpoint, blocks, world.block_space());
    }
}

/// The Inference Extension's default profile.
pub(super) struct Gaie {
    prefix: OwnPrefix,
    random: Random,
}

impl Gaie {
    pub(super) fn new(tokens: usize, setup: &Setup) -> Self {
        Self { prefix: OwnPrefix::new(tokens, setup), random: Random::new(setup.seed) }
    }
}

impl Router for Gaie {
    fn choose(&mut self, request: &Request, _: f64, world: &World) -> Option<usize> {
        let (metrics, live) = (world.metrics(), world.live());
        let prefixes = self.prefix.scores(request, world);
        let queues = queues(&metrics, live);
        let score =
            |k: usize| 2.0 * queues[k] + 2.0 * (1.0 - metrics[live[k]].cache) + 3.0 * prefixes[k];
        let scores: Vec<f64> = (0..live.len()).map(score).collect();
        Some(live[highest(&mut self.random, &scores)])
    }

    fn on_dispatch(&mut self, request: &Request, endpoint: usize, _: f64, world: &World) {
        self.prefix.record(request, endpoint, world);
    }

    fn on_removed(&mut self, endpoint: usize, _: &World) {
        self.prefix.sent.forget(endpoint);
    }
}

/// llm-d's optimized baseline: prompts of which nothing is known go where none went longest.
pub(super) struct OptimizedBaseline {
    prefix: OwnPrefix,
    random: Random,
    /// Endpoints that got such a prompt, the one longest ago first.
    cold: Vec<usize>,
}

impl OptimizedBaseline {
    pub(super) fn new(setup: &Setup) -> Self {
        let prefix = OwnPrefix::new(100_000, setup);
        Self { prefix, random: Random::new(setup.seed), cold: Vec::new() }
    }

    /// Scores an endpoint for a cold prompt: 1 if it never got one, then by how long ago.
    fn cold_score(&self, endpoint: usize, world: &World) -> f64 {
        let Some(place) = self.cold.iter().position(|&it| it == endpoint) else { return 1.0 };
        let n = world.live().len();
        let rank = n - self.cold.len() + place;
        if n > 1 { 1.0 - rank as f64 / (n - 1) as f64 } else { 1.0 }
    }
}

impl Router for OptimizedBaseline {
    fn choose(&mut self, request: &Request, _: f64, world: &World) -> Option<usize> {
        let (metrics, live) = (world.metrics(), world.live());
        let prefixes = self.prefix.scores(request, world);
        let queues = queues(&metrics, live);
        let cold = prefixes.iter().all(|&share| share <= 0.0);
        let score = |k: usize| {
            let last = if cold { self.cold_score(live[k], world) } else { 0.5 };
            2.0 * queues[k] + 2.0 * (1.0 - metrics[live[k]].cache) + 3.0 * prefixes[k] + 2.0 * last
        };
        let scores: Vec<f64> = (0..live.len()).map(score).collect();
        let chosen = live[highest(&mut self.random, &scores)];
        if cold {
            self.cold.retain(|&endpoint| endpoint != chosen);
            self.cold.push(chosen);
        }
        Some(chosen)
    }

    fn on_dispatch(&mut self, request: &Request, endpoint: usize, _: f64, world: &World) {
        self.prefix.record(request, endpoint, world);
    }

    fn on_removed(&mut self, endpoint: usize, _: &World) {
        self.prefix.sent.forget(endpoint);
        self.cold.retain(|&it| it != endpoint);
    }
}

/// llm-d's precise prefix scorer, by cache events; prompts under way may count.
pub(super) struct Precise {
    /// Of prefix, queue, and KV use.
    weights: [f64; 3],
    under_way: Option<UnderWay>,
    random: Random,
}

impl Precise {
    pub(super) fn new(weights: [f64; 3], speculative: bool, setup: &Setup) -> Self {
        let under_way = speculative.then(UnderWay::default);
        Self { weights, under_way, random: Random::new(setup.seed) }
    }

    /// Scores each live endpoint.
    pub(super) fn scores(&self, request: &Request, world: &World) -> Vec<f64> {
        let (metrics, live) = (world.metrics(), world.live());
        let queues = queues(&metrics, live);
        let [prefix, queue, cache] = self.weights;
        let score = |k: usize| {
            let blocks = match &self.under_way {
                Some(under_way) => under_way.prefix(live[k], request, world),
                None => world.prefix(live[k], &request.blocks),
            };
            let share = blocks as f64 / request.blocks.len() as f64;
            queue * queues[k] + cache * (1.0 - metrics[live[k]].cache) + prefix * share
        };
        (0..live.len()).map(score).collect()
    }
}

impl Router for Precise {
    fn choose(&mut self, request: &Request, _: f64, world: &World) -> Option<usize> {
        let scores = self.scores(request, world);
        Some(world.live()[highest(&mut self.random, &scores)])
    }

    fn on_dispatch(&mut self, request: &Request, endpoint: usize, _: f64, world: &World) {
        if let Some(under_way) = &mut self.under_way {
            under_way.put(request, endpoint, world.block_space());
        }
    }

    fn on_first(&mut self, request: &Request, _: f64, _: &World) {
        if let Some(under_way) = &mut self.under_way {
            under_way.take(request);
        }
    }

    fn on_finish(&mut self, request: &Request, now: f64, world: &World) {
        self.on_first(request, now, world);
    }
}
