//! Preble's E2, simplified: where more is cached than not, exploit it; else the least load of three minutes, eviction
//! and prefill.

use std::collections::VecDeque;

use super::first_least;
use crate::sim::{Router, World};
use crate::workload::Request;

/// Seconds over which work is added up.
const WINDOW: f64 = 180.0;
/// An endpoint with this many times the least work is overloaded.
const OVERLOAD: f64 = 2.0;

#[derive(Default)]
struct Recent {
    work: VecDeque<(f64, f64)>,
    sum: f64,
}

pub(super) struct Preble {
    recent: Vec<Recent>,
}

impl Preble {
    pub(super) fn new(endpoints: usize) -> Self {
        Self { recent: (0..endpoints).map(|_| Recent::default()).collect() }
    }
}

impl Router for Preble {
    fn choose(&mut self, request: &Request, now: f64, world: &World) -> Option<usize> {
        let (p, live) = (&world.params, world.live());
        for recent in &mut self.recent {
            while let Some(&(_, work)) = recent.work.front().filter(|(at, _)| *at < now - WINDOW) {
                recent.sum -= work;
                recent.work.pop_front();
            }
        }
        let cached: Vec<i64> = live.iter().map(|&i| world.prefix_tokens(i, request)).collect();
        let load: Vec<f64> = live.iter().map(|&i| self.recent[i].sum).collect();
        let cost = |k: usize| {
            let new = request.prompt - cached[k];
            let needed = (new as f64 / p.block as f64).ceil();
            let missing = (needed - world.engine(live[k]).free() as f64).max(0.0);
            let evicted = missing * p.block as f64 * p.prefill * 0.5;
            load[k] + evicted + p.prefill * new as f64
        };
        let cheapest = || first_least(&(0..live.len()).map(cost).collect::<Vec<_>>());
        let most = cached.iter().copied().max().unwrap_or(0);
        if most < request.prompt - most {
            return Some(live[cheapest()]);
        }
        let holders = (0..live.len()).filter(|&k| cached[k] == most);
        let lightest = holders.min_by(|&a, &b| load[a].total_cmp(&load[b]))?;
        let least = load.iter().copied().fold(f64::INFINITY, f64::min);
        let overloaded =
            load[lightest] > OVERLOAD * least + 1.0 && world.engine(live[lightest]).waiting() > 0;
        Some(live[if overloaded { cheapest() } else { lightest }])
    }

    fn on_dispatch(&mut self, request: &Request, endpoint: usize, now: f64, world: &World) {
        let new = request.prompt - world.prefix_tokens(endpoint, request);
        let work = world.params.prefill * new as f64 + world.params.decode * request.output as f64;
        let recent = &mut self.recent[endpoint];
        recent.work.push_back((now, work));
        recent.sum += work;
    }

    fn on_added(&mut self, endpoint: usize, _: &World) {
        *super::room_for(&mut self.recent, endpoint) = Recent::default();
    }
}
