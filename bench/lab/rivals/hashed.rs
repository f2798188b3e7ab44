//! The first llm-ring's policies that hash keys: its ring, its bounded loads, and its token loads with placement memory.

use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use crate::digest::blake2b_64;
use crate::sim::{Router, World};
use crate::workload::Request;

/// Points of each endpoint.
const POINTS: u32 = 100;
/// Slack over the average load, and the same for long conversations that are cached.
const EPSILON: f64 = 0.25;
const LONG_EPSILON: f64 = 1.0;
/// Tokens from which a prompt is long.
const LONG: i64 = 800;

/// The ring, and the order of endpoints that it gives each key.
struct Ring {
    points: Vec<(u64, usize)>,
    endpoints: usize,
    orders: HashMap<Arc<str>, Rc<[usize]>>,
}

impl Ring {
    fn new(endpoints: impl Iterator<Item = usize>) -> Self {
        let mut count = 0;
        let mut points: Vec<(u64, usize)> = endpoints
            .inspect(|_| count += 1)
            .flat_map(|i| (0..POINTS).map(move |j| (blake2b_64(&format!("llm-{i}#{j}")), i)))
            .collect();
        points.sort_unstable();
        Self { points, endpoints: count, orders: HashMap::new() }
    }

    fn order(&mut self, key: &Arc<str>) -> Rc<[usize]> {
        if let Some(order) = self.orders.get(key) {
            return Rc::clone(order);
        }
        let hash = blake2b_64(key);
        let start = self.points.partition_point(|&(point, _)| point <= hash);
        let mut order = Vec::with_capacity(self.endpoints);
        for &(_, endpoint) in self.points.iter().cycle().skip(start).take(self.points.len()) {
            if !order.contains(&endpoint) {
                order.push(endpoint);
                if order.len() == self.endpoints {
                    break;
                }
            }
        }
        let order: Rc<[usize]> = order.into();
        self.orders.insert(Arc::clone(key), Rc::clone(&order));
        order
    }
}

/// `consistent`: a key's home.
pub(super) struct Consistent {
    ring: Ring,
}

impl Consistent {
    pub(super) fn new(endpoints: usize) -> Self {
        Self { ring: Ring::new(0..endpoints) }
    }

    fn rebuild(&mut self, world: &World) {
        self.ring = Ring::new(world.live().iter().copied());
    }
}

impl Router for Consistent {
    fn choose(&mut self, request: &Request, _: f64, _: &World) -> Option<usize> {
        self.ring.order(&request.key).first().copied()
    }

    fn on_added(&mut self, _: usize, world: &World) {
        self.rebuild(world);
    }

    fn on_removed(&mut self, _: usize, world: &World) {
        self.rebuild(world);
    }
}

/// `bounded`: the first on the ring that has room, in requests.
pub(super) struct Bounded(Consistent);

impl Bounded {
    pub(super) fn new(endpoints: usize) -> Self {
        Self(Consistent::new(endpoints))
    }
}

impl Router for Bounded {
    fn choose(&mut self, request: &Request, _: f64, world: &World) -> Option<usize> {
        let load = world.in_flight();
        let sum: i64 = world.live().iter().map(|&i| load[i]).sum();
        let cap = ((1.0 + EPSILON) * (sum + 1) as f64 / world.live().len() as f64).ceil();
        let order = self.0.ring.order(&request.key);
        let fits = |i: &&usize| load[**i] == 0 || (load[**i] + 1) as f64 <= cap;
        order.iter().find(fits).or_else(|| order.iter().min_by_key(|i| load[**i])).copied()
    }

    fn on_added(&mut self, _: usize, world: &World) {
        self.0.rebuild(world);
    }

    fn on_removed(&mut self, _: usize, world: &World) {
        self.0.rebuild(world);
    }
}

/// `llm-aware`: token loads, the last place of each conversation, and patience for long ones.
pub(super) struct LlmAware {
    ring: Consistent,
    /// Where each conversation was last served, and the tokens of its prompt.
    placed: HashMap<Arc<str>, (usize, i64)>,
    load: Vec<i64>,
    /// What each request in flight has booked.
    booked: HashMap<usize, i64>,
}

impl LlmAware {
    pub(super) fn new(endpoints: usize) -> Self {
        Self {
            ring: Consistent::new(endpoints),
            placed: HashMap::new(),
            load: vec![0; endpoints],
            booked: HashMap::new(),
        }
    }

    fn placed(&self, request: &Request, world: &World) -> Option<(usize, i64)> {
        let placed = self.placed.get(&request.key).copied();
        placed.filter(|(endpoint, _)| world.live().binary_search(endpoint).is_ok())
    }

    fn cap(&self, cost: i64, epsilon: f64, world: &World) -> f64 {
        let sum: i64 = world.live().iter().map(|&i| self.load[i]).sum();
        (1.0 + epsilon) * (sum + cost) as f64 / world.live().len() as f64
    }

    fn fits(&self, endpoint: usize, cost: i64, cap: f64) -> bool {
        self.load[endpoint] == 0 || (self.load[endpoint] + cost) as f64 <= cap
    }
}

/// Returns the tokens of work that a request is.
fn cost(request: &Request, endpoint: usize, placed: Option<(usize, i64)>) -> i64 {
    match placed {
        Some((at, tokens)) if at == endpoint => (request.prompt - tokens).max(1) + request.output,
        _ => request.prompt + request.output,
    }
}

impl Router for LlmAware {
    fn choose(&mut self, request: &Request, _: f64, world: &World) -> Option<usize> {
        let order = self.ring.ring.order(&request.key);
        let placed = self.placed(request, world);
        let preferred = placed.map_or(order[0], |(endpoint, _)| endpoint);
        let here = cost(request, preferred, placed);
        let long = placed.is_some() && request.prompt >= LONG;
        let limit = self.cap(here, if long { LONG_EPSILON } else { EPSILON }, world);
        if self.fits(preferred, here, limit) {
            return Some(preferred);
        }
        let has_room = |endpoint: usize| {
            let there = cost(request, endpoint, placed);
            self.fits(endpoint, there, self.cap(there, EPSILON, world))
        };
        let mut others = order.iter().copied().filter(|&endpoint| endpoint != preferred);
        others
            .find(|&i| has_room(i))
            .or_else(|| order.iter().copied().min_by_key(|&i| self.load[i]))
    }

    fn on_dispatch(&mut self, request: &Request, endpoint: usize, _: f64, world: &World) {
        let cost = cost(request, endpoint, self.placed(request, world));
        self.load[endpoint] += cost;
        self.booked.insert(request.index, cost);
    }

    fn on_finish(&mut self, request: &Request, _: f64, world: &World) {
        let endpoint = world.endpoint_of(request);
        self.load[endpoint] -= self.booked.remove(&request.index).unwrap_or(0);
        self.placed.insert(Arc::clone(&request.key), (endpoint, request.prompt));
    }

    fn on_added(&mut self, endpoint: usize, world: &World) {
        super::room_for(&mut self.load, endpoint);
        self.ring.rebuild(world);
    }

    fn on_removed(&mut self, _: usize, world: &World) {
        self.ring.rebuild(world);
    }
}

#[cfg(test)]
impl LlmAware {
    /// Ends all requests of a test.
    pub(super) fn finish_all(&mut self, world: &World) {
        for index in 0..world.requests() {
            let request = world.request(index);
            let endpoint = self.ring.ring.order(&request.key)[0];
            self.placed.insert(Arc::clone(&request.key), (endpoint, request.prompt));
        }
        self.booked.clear();
    }

    /// Sets the tokens of work in flight.
    pub(super) fn preset(&mut self, load: [i64; 3]) {
        self.load = load.to_vec();
    }
}
