//! LMetric: tokens to compute times requests in flight; with the queue, its tokens count too.

use super::index::Prefilling;
use crate::sim::{Router, World};
use crate::workload::Request;

pub(super) struct Lmetric {
    queue: bool,
    prefilling: Prefilling,
}

impl Lmetric {
    pub(super) fn new(queue: bool, endpoints: usize) -> Self {
        Self { queue, prefilling: Prefilling::new(endpoints) }
    }
}

fn new_tokens(request: &Request, endpoint: usize, world: &World) -> i64 {
    (request.prompt - world.prefix_tokens(endpoint, request)).max(1)
}

impl Router for Lmetric {
    fn choose(&mut self, request: &Request, _: f64, world: &World) -> Option<usize> {
        let load = world.in_flight();
        world.live().iter().copied().min_by_key(|&i| {
            let new = new_tokens(request, i, world);
            let work = new + if self.queue { self.prefilling.at(i) } else { 0 };
            (work * (load[i] + 1), load[i], new, i)
        })
    }

    fn on_dispatch(&mut self, request: &Request, endpoint: usize, _: f64, world: &World) {
        let new = new_tokens(request, endpoint, world);
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
