//! The first study's rule: the seconds that a request costs itself on an endpoint, and those that it costs others.

use std::collections::{HashMap, VecDeque};

use super::index::UnderWay;
use super::{first_least, lowest, room_for};
use crate::engine::{Block, Params};
use crate::random::Random;
use crate::sim::{Metrics, Router, Setup, World};
use crate::workload::Request;

/// Price of uncached work for each sequence that decodes beside it, and for each prompt that waits on an average endpoint.
const DECODING_PRICE: f64 = 0.1;
const WAITING_PRICE: f64 = 0.5;
/// Weight of the answer's own slowness and of what it does to others: for a rare prompt, and for one that all send.
const ANSWER_RARE: f64 = 0.03;
const ANSWER_HOT: f64 = 0.3;
/// Seconds over which a prompt's popularity is counted.
const HOT_WINDOW: f64 = 10.0;
/// Weight of the work of the last seconds, for what is not cached.
const BALANCE: f64 = 3.0;
const BALANCE_WINDOW: f64 = 90.0;
/// KV use from which a request is taken to wait for memory.
const FULL: f64 = 0.97;
/// Price of a second copy when memory is short, and the KV use from which it is.
pub(super) const MEMORY_PRICE: f64 = 0.05;
const SHORT: f64 = 0.85;
/// However much is cached, this many tokens of a prompt are computed.
const ALWAYS_COMPUTED: i64 = 16;

/// What was sent to an endpoint and has not ended.
#[derive(Default)]
struct Ledger {
    /// Requests before their first token, in order; some may have left from the middle.
    outstanding: VecDeque<usize>,
    waiting: i64,
    /// Seconds of their work, and when the first of them can have begun.
    work: f64,
    since: f64,
    /// Sequences after it, and the tokens of their contexts.
    decoding: i64,
    contexts: f64,
    /// Seconds of work sent in a second, decayed, and when that was.
    rate: f64,
    rated: f64,
}

/// A request that has not ended.
#[derive(Debug, Clone, Copy)]
struct Booked {
    endpoint: usize,
    stage: Stage,
}

#[derive(Debug, Clone, Copy)]
enum Stage {
    Waiting { work: f64 },
    Decoding { contexts: f64 },
}

/// What a request would cost on an endpoint.
#[derive(Debug, Clone, Copy)]
struct Cost {
    seconds: f64,
    /// Seconds of its own work, tokens to compute, and tokens that are cached.
    work: f64,
    new: i64,
    cached: i64,
}

pub(super) struct Rec {
    params: Params,
    memory_price: f64,
    random: Random,
    /// Each picker sees one in so many requests.
    unseen: f64,
    under_way: UnderWay,
    ledgers: Vec<Ledger>,
    booked: HashMap<usize, Booked>,
    /// Requests with each middle block, decayed, and when that was.
    popular: HashMap<Block, (f64, f64)>,
    mean_output: f64,
    ended: u64,
    /// What was chosen last, with its cost: it is dispatched next.
    chosen: Option<(usize, usize, Cost)>,
}

/// An endpoint as the ledger has it, for all pickers.
struct State {
    decoding: f64,
    contexts: f64,
    queue: f64,
    waiting: f64,
}

impl Rec {
    pub(super) fn new(memory_price: f64, setup: &Setup) -> Self {
        Self {
            params: setup.params,
            memory_price,
            random: Random::new(setup.seed),
            unseen: setup.unseen as f64,
            under_way: UnderWay::default(),
            ledgers: (0..setup.endpoints).map(|_| Ledger::default()).collect(),
            booked: HashMap::new(),
            popular: HashMap::new(),
            mean_output: 100.0,
            ended: 0,
            chosen: None,
        }
    }

    /// Returns the seconds until an endpoint has computed what was sent to it.
    fn backlog(&self, endpoint: usize, now: f64) -> f64 {
        let ledger = &self.ledgers[endpoint];
        let first = ledger.outstanding.iter().find_map(|job| self.waiting_work(*job));
        first.map_or(0.0, |work| ledger.work - work.min((now - ledger.since).max(0.0)))
    }

    fn waiting_work(&self, job: usize) -> Option<f64> {
        match self.booked.get(&job)?.stage {
            Stage::Waiting { work } => Some(work),
            Stage::Decoding { .. } => None,
        }
    }

    fn state(&self, endpoint: usize, now: f64) -> State {
        let (ledger, all) = (&self.ledgers[endpoint], self.unseen);
        State {
            decoding: ledger.decoding as f64 * all,
            contexts: ledger.contexts * all,
            queue: self.backlog(endpoint, now) * all,
            waiting: ledger.waiting as f64 * all,
        }
    }

    /// Returns the seconds of a prompt's own work.
    fn work(&self, new: i64, cached: i64, state: &State) -> f64 {
        let p = &self.params;
        let (u, m) = (new as f64, cached as f64);
        let budget = (p.budget as f64 - state.decoding).max(1.0);
        let steps = (u / budget).ceil().max(1.0);
        let mut computed = u * p.prefill + steps * p.decode * state.decoding;
        if u < budget {
            computed = p.floor.max(computed);
        }
        steps * (p.overhead + p.context * state.contexts)
            + computed
            + p.attention * (u * (m + u * 0.5))
    }

    /// Returns the seconds of a prompt's work on an idle endpoint.
    fn pure_work(&self, new: i64, cached: i64) -> f64 {
        let (p, u, m) = (&self.params, new as f64, cached as f64);
        p.prefill * u + p.attention * u * (m + u * 0.5)
    }

    /// Returns the share of the endpoints that would each get this prompt once in the window.
    fn heat(&self, request: &Request, now: f64, endpoints: f64) -> f64 {
        let counted = self.popular.get(&middle(request));
        let count = counted.map_or(0.0, |(count, at)| count * (-(now - at) / HOT_WINDOW).exp());
        count / endpoints
    }

    fn rate(&self, endpoint: usize, now: f64) -> f64 {
        let ledger = &self.ledgers[endpoint];
        ledger.rate * (-(now - ledger.rated) / BALANCE_WINDOW).exp()
    }

    fn costs(&self, request: &Request, now: f64, world: &World) -> Vec<Cost> {
        let live = world.live();
        let n = live.len() as f64;
        let states: Vec<State> = live.iter().map(|&i| self.state(i, now)).collect();
        let waiting: f64 = states.iter().map(|state| state.waiting).sum();
        let heat = self.heat(request, now, n);
        let rare = 1.0 / (1.0 + heat);
        let prices = Prices {
            waiting: WAITING_PRICE * waiting / n * rare,
            decoding: DECODING_PRICE * rare,
            answer: ANSWER_RARE + (ANSWER_HOT - ANSWER_RARE) * heat / (1.0 + heat),
            copies: self.copies(&world.metrics(), live),
        };
        live.iter()
            .zip(&states)
            .map(|(&i, state)| self.cost(request, (i, state), &prices, now, world))
            .collect()
    }

    /// Returns how short memory is, in [0, 1].
    fn copies(&self, metrics: &[Metrics], live: &[usize]) -> f64 {
        if self.memory_price == 0.0 {
            return 0.0;
        }
        let mean = live.iter().map(|&i| metrics[i].cache).sum::<f64>() / live.len() as f64;
        ((mean - SHORT) / (1.0 - SHORT)).clamp(0.0, 1.0)
    }

    fn cost(
        &self,
        request: &Request,
        (endpoint, state): (usize, &State),
        prices: &Prices,
        now: f64,
        world: &World,
    ) -> Cost {
        let p = &self.params;
        let (length, output) = (request.prompt as f64, self.mean_output);
        let blocks = self.under_way.prefix(endpoint, request, world) as i64;
        let cached = (blocks * p.block).min(request.prompt);
        let new = (request.prompt - cached).max(ALWAYS_COMPUTED);
        let u = new as f64;
        let work = self.work(new, cached, state);
        let pure = self.pure_work(new, cached);
        let mut seconds =
            state.queue + work + pure * (prices.waiting + prices.decoding * state.decoding);
        let beside = state.decoding + state.waiting;
        let slowness = p.context * state.contexts
            + p.decode * beside
            + (p.decode + p.context * length) * beside;
        seconds += prices.answer * output * slowness;
        let step = p.decode_step(state.decoding, state.contexts);
        if prices.copies > 0.0 {
            seconds += self.memory_price * prices.copies * u / output.max(256.0) * output * step;
        }
        seconds += self.admission(world.metrics()[endpoint], state, u, step);
        seconds += BALANCE * (u / length) * self.rate(endpoint, now);
        Cost { seconds, work, new, cached }
    }

    /// Returns the seconds that a request is taken to wait for a place or for memory.
    fn admission(&self, metrics: Metrics, state: &State, new: f64, step: f64) -> f64 {
        let (p, output) = (&self.params, self.mean_output);
        let most = p.sequences as f64;
        let excess = state.decoding + state.waiting + 1.0 - most;
        if excess > 0.0 {
            return excess * output * step / state.decoding.min(most).max(1.0);
        }
        let over = metrics.cache + (new + output) / p.tokens as f64 - FULL;
        if over <= 0.0 && metrics.waiting == 0 {
            return 0.0;
        }
        let rate = state.decoding.max(1.0) / (output * step).max(1e-3);
        let queued = if metrics.waiting > 0 && metrics.cache > 0.9 { 1.0 } else { 0.0 };
        (metrics.waiting + 1) as f64 / rate * (over.max(0.0) * 20.0 + queued).min(1.0)
    }

    fn book(&mut self, request: &Request, endpoint: usize, cost: &Cost, now: f64, world: &World) {
        let p = &self.params;
        let answer = self.mean_output * (p.decode + p.context * request.prompt as f64);
        let sent = self.pure_work(cost.new, cost.cached) + answer;
        let rate = self.rate(endpoint, now) + sent / BALANCE_WINDOW;
        let heat = self.heat(request, now, 1.0);
        self.popular.insert(middle(request), (heat + 1.0, now));
        self.under_way.put(request, endpoint, world.block_space());
        let stage = Stage::Waiting { work: cost.work };
        self.booked.insert(request.index, Booked { endpoint, stage });
        let ledger = &mut self.ledgers[endpoint];
        if ledger.waiting == 0 {
            ledger.since = now;
        }
        ledger.outstanding.push_back(request.index);
        ledger.waiting += 1;
        ledger.work += cost.work;
        (ledger.rate, ledger.rated) = (rate, now);
    }

    /// Takes a request out of those that wait for their first token.
    fn begin(&mut self, booked: Booked, work: f64, now: f64) {
        let ledger = &mut self.ledgers[booked.endpoint];
        ledger.waiting -= 1;
        ledger.work -= work;
        if ledger.waiting == 0 {
            ledger.work = 0.0;
            ledger.outstanding.clear();
        }
        ledger.since = now;
        let bookings = &self.booked;
        let waits = |job: &usize| {
            bookings.get(job).is_some_and(|it| matches!(it.stage, Stage::Waiting { .. }))
        };
        while ledger.outstanding.front().is_some_and(|job| !waits(job)) {
            ledger.outstanding.pop_front();
        }
    }
}

/// What is the same for all endpoints.
struct Prices {
    waiting: f64,
    decoding: f64,
    answer: f64,
    copies: f64,
}

/// Returns the block that stands for a prompt when popularity is counted.
fn middle(request: &Request) -> Block {
    request.blocks[request.blocks.len() / 2]
}

impl Router for Rec {
    fn choose(&mut self, request: &Request, now: f64, world: &World) -> Option<usize> {
        let costs = self.costs(request, now, world);
        let seconds: Vec<f64> = costs.iter().map(|cost| cost.seconds).collect();
        let chosen = lowest(&mut self.random, &seconds);
        let endpoint = world.live()[chosen];
        self.chosen = Some((request.index, endpoint, costs[chosen]));
        Some(endpoint)
    }

    fn on_dispatch(&mut self, request: &Request, endpoint: usize, now: f64, world: &World) {
        let chosen =
            self.chosen.take().filter(|chosen| (chosen.0, chosen.1) == (request.index, endpoint));
        if let Some((_, _, cost)) = chosen {
            self.book(request, endpoint, &cost, now, world);
        }
    }

    fn on_peer_dispatch(&mut self, request: &Request, endpoint: usize, now: f64, world: &World) {
        let costs = self.costs(request, now, world);
        if let Ok(place) = world.live().binary_search(&endpoint) {
            self.book(request, endpoint, &costs[place], now, world);
        }
    }

    fn on_first(&mut self, request: &Request, now: f64, _: &World) {
        let contexts = request.prompt as f64 + self.mean_output * 0.5;
        let Some(entry) = self.booked.get_mut(&request.index) else { return };
        let booked = *entry;
        let Stage::Waiting { work } = booked.stage else { return };
        entry.stage = Stage::Decoding { contexts };
        self.begin(booked, work, now);
        self.under_way.take(request);
        let ledger = &mut self.ledgers[booked.endpoint];
        ledger.decoding += 1;
        ledger.contexts += contexts;
    }

    fn on_finish(&mut self, request: &Request, now: f64, _: &World) {
        let Some(booked) = self.booked.remove(&request.index) else { return };
        match booked.stage {
            Stage::Waiting { work } => {
                self.begin(booked, work, now);
                self.under_way.take(request);
            }
            Stage::Decoding { contexts } => {
                let ledger = &mut self.ledgers[booked.endpoint];
                ledger.decoding -= 1;
                ledger.contexts -= contexts;
            }
        }
        self.ended += 1;
        let weight = (1.0 / self.ended as f64).max(0.01);
        self.mean_output += (request.output as f64 - self.mean_output) * weight;
    }

    fn on_added(&mut self, endpoint: usize, _: &World) {
        room_for(&mut self.ledgers, endpoint);
    }
}

/// Seconds of work on the chosen endpoint from which requests are held.
const THETA: f64 = 0.3;
/// A second less work is worth so many seconds of waiting.
const AGE: f64 = 10.0;
/// How many of those that are held are looked at.
const SCANNED: usize = 32;

/// The order in which requests that are held are let go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// First come, first served.
    Fcfs,
    /// The shortest first, aged.
    Shortest,
}

/// The same rule, and requests wait in the picker while their endpoint is busy.
pub(super) struct Held {
    rec: Rec,
    order: Order,
    held: Vec<usize>,
}

impl Held {
    pub(super) fn new(order: Order, setup: &Setup) -> Self {
        Self { rec: Rec::new(MEMORY_PRICE, setup), order, held: Vec::new() }
    }

    fn pick(&self, request: &Request, now: f64, world: &World) -> (usize, Cost) {
        let costs = self.rec.costs(request, now, world);
        let seconds: Vec<f64> = costs.iter().map(|cost| cost.seconds).collect();
        let chosen = first_least(&seconds);
        (world.live()[chosen], costs[chosen])
    }

    fn busy(&self, endpoint: usize, now: f64) -> bool {
        let (p, ledger) = (&self.rec.params, &self.rec.ledgers[endpoint]);
        let mut backlog = self.rec.backlog(endpoint, now);
        let over = ledger.decoding + ledger.waiting + 1 - p.sequences;
        if over > 0 {
            let step = p.overhead + p.decode * ledger.decoding as f64;
            let running = ledger.decoding.min(p.sequences).max(1) as f64;
            backlog += over as f64 * self.rec.mean_output * step / running;
        }
        backlog > THETA
    }
}

impl Router for Held {
    fn choose(&mut self, request: &Request, now: f64, world: &World) -> Option<usize> {
        if self.held.is_empty() {
            let (endpoint, cost) = self.pick(request, now, world);
            if !self.busy(endpoint, now) {
                self.rec.chosen = Some((request.index, endpoint, cost));
                return Some(endpoint);
            }
        }
        self.held.push(request.index);
        None
    }

    fn release(&mut self, now: f64, world: &World) -> Option<(usize, usize)> {
        if world.live().iter().all(|&endpoint| self.busy(endpoint, now)) {
            return None;
        }
        let mut best: Option<(f64, usize, usize, Cost)> = None;
        for (place, &job) in self.held.iter().take(SCANNED).enumerate() {
            let request = world.request(job);
            let (endpoint, cost) = self.pick(request, now, world);
            if self.busy(endpoint, now) {
                continue;
            }
            let score = match self.order {
                Order::Fcfs => request.sent,
                Order::Shortest => cost.work - (now - request.sent) / AGE,
            };
            if best.is_none_or(|(least, ..)| score < least) {
                best = Some((score, place, endpoint, cost));
            }
        }
        let (_, place, endpoint, cost) = best?;
        let job = self.held.remove(place);
        self.rec.chosen = Some((job, endpoint, cost));
        Some((job, endpoint))
    }

    fn holds(&self) -> bool {
        !self.held.is_empty()
    }

    fn on_dispatch(&mut self, request: &Request, endpoint: usize, now: f64, world: &World) {
        self.rec.on_dispatch(request, endpoint, now, world);
    }

    fn on_peer_dispatch(&mut self, request: &Request, endpoint: usize, now: f64, world: &World) {
        self.rec.on_peer_dispatch(request, endpoint, now, world);
    }

    fn on_first(&mut self, request: &Request, now: f64, world: &World) {
        self.rec.on_first(request, now, world);
    }

    fn on_finish(&mut self, request: &Request, now: f64, world: &World) {
        self.rec.on_finish(request, now, world);
    }

    fn on_added(&mut self, endpoint: usize, world: &World) {
        self.rec.on_added(endpoint, world);
    }
}
