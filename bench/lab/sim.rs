//! The discrete-event loop: clients send, routers choose, engines compute, and a run is left behind.

use std::cell::{Ref, RefCell};
use std::cmp::{Ordering, Reverse};
use std::collections::{BinaryHeap, VecDeque};

use anyhow::bail;
use serde::{Deserialize, Serialize};

use super::engine::{Block, Blocks, Engine, Event, Happening, Job, Marks, Params};
use super::random::Random;
use super::record::{Row, Run, Work};
use super::workload::{Clients, Point, Request, Traces, What};

/// A way to choose an endpoint, with all that it keeps between requests.
pub(crate) trait Router {
    /// Chooses one of `world.live()`, or holds the request: then it comes out of [`Self::release`].
    fn choose(&mut self, request: &Request, now: f64, world: &World) -> Option<usize>;

    /// A request goes where it was sent to, by this router.
    fn on_dispatch(&mut self, _request: &Request, _endpoint: usize, _now: f64, _world: &World) {}

    /// The same by another one that shares what it does.
    fn on_peer_dispatch(&mut self, request: &Request, endpoint: usize, now: f64, world: &World) {
        self.on_dispatch(request, endpoint, now, world);
    }

    /// A request's first token has passed.
    fn on_first(&mut self, _request: &Request, _now: f64, _world: &World) {}

    /// A request has ended, well or not.
    fn on_finish(&mut self, _request: &Request, _now: f64, _world: &World) {}

    /// An endpoint is there, for the first time or again.
    fn on_added(&mut self, _endpoint: usize, _world: &World) {}

    /// An endpoint is gone.
    fn on_removed(&mut self, _endpoint: usize, _world: &World) {}

    /// Lets go of a request that is held, and says where to. Asked whenever something has ended, and every 20 ms.
    fn release(&mut self, _now: f64, _world: &World) -> Option<(usize, usize)> {
        None
    }

    /// Tells whether requests are held.
    fn holds(&self) -> bool {
        false
    }
}

/// How often routers that hold requests are asked.
const TICK: f64 = 0.02;

/// How good the signals are.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Knobs {
    /// How old polled metrics may be, in seconds.
    pub(crate) metrics_age: f64,
    /// How long an engine's cache event is under way, in seconds, and the share of events that are lost.
    pub(crate) event_age: f64,
    pub(crate) event_loss: f64,
    /// Pickers, which are dealt requests in turn, and how long what one does is under way to the others, in seconds;
    /// without it they do not share.
    pub(crate) pickers: usize,
    pub(crate) gossip_age: Option<f64>,
}

impl Default for Knobs {
    fn default() -> Self {
        Self { metrics_age: 0.05, event_age: 0.0, event_loss: 0.0, pickers: 1, gossip_age: None }
    }
}

/// What a router is built for.
#[derive(Debug, Clone)]
pub(crate) struct Setup {
    pub(crate) params: Params,
    /// Endpoints at the start.
    pub(crate) endpoints: usize,
    /// What its chance is drawn from.
    pub(crate) seed: u64,
    /// How many pickers there are that do not tell each other what they do: each sees one in so many requests.
    pub(crate) unseen: usize,
}

/// What a poll of an engine's metrics gives.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Metrics {
    pub(crate) waiting: usize,
    pub(crate) running: usize,
    /// Share of the cache that running requests hold.
    pub(crate) cache: f64,
}

/// The pool and its requests: the truth, and what can be known of it.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) params: Params,
    engines: Vec<Engine>,
    /// Which of them may be chosen, ascending.
    live: Vec<usize>,
    jobs: Vec<Job>,
    blocks: Blocks,
    now: f64,
    block_space: usize,
    knobs: Knobs,
    polled: RefCell<(f64, Vec<Metrics>)>,
    marks: RefCell<Marks>,
    events: Option<LateEvents>,
    /// Requests in flight on each engine, as each picker knows them.
    in_flight: Vec<Vec<i64>>,
    /// The picker that is asked.
    acting: usize,
}

/// Cache events that take their time, and what is known by those that have come.
#[derive(Debug)]
struct LateEvents {
    seen: Blocks,
    under_way: VecDeque<(f64, Event)>,
    random: Random,
}

impl World {
    fn new(point: &Point, seed: u64, knobs: Knobs) -> Self {
        let late = knobs.event_age > 0.0 || knobs.event_loss > 0.0;
        let engines: Vec<Engine> = (0..)
            .zip(&point.speeds)
            .map(|(number, &speed)| Engine::new(point.engine, number, speed))
            .collect();
        Self {
            params: point.engine,
            live: (0..engines.len()).collect(),
            jobs: Vec::new(),
            blocks: Blocks::new(late),
            now: 0.0,
            block_space: 0,
            polled: RefCell::new((f64::NEG_INFINITY, Vec::new())),
            marks: RefCell::default(),
            events: late.then(|| LateEvents {
                seen: Blocks::default(),
                under_way: VecDeque::new(),
                random: Random::from_text(&format!("events-{seed}")),
            }),
            in_flight: vec![vec![0; engines.len()]; knobs.pickers],
            acting: 0,
            engines,
            knobs,
        }
    }

    /// Returns the endpoints that may be chosen, ascending.
    pub(crate) fn live(&self) -> &[usize] {
        &self.live
    }

    /// Counts the endpoints that there are or have been.
    pub(crate) fn endpoints(&self) -> usize {
        self.engines.len()
    }

    /// Returns the time.
    pub(crate) fn now(&self) -> f64 {
        self.now
    }

    /// Tells whether a request has ended well.
    pub(crate) fn succeeded(&self, request: &Request) -> bool {
        self.jobs[request.index].finished.is_some()
    }

    /// Returns an engine as it truly is.
    pub(crate) fn engine(&self, endpoint: usize) -> &Engine {
        &self.engines[endpoint]
    }

    /// Returns a request by its place in the run.
    pub(crate) fn request(&self, index: usize) -> &Request {
        &self.jobs[index].request
    }

    /// Returns where a request was sent to.
    pub(crate) fn endpoint_of(&self, request: &Request) -> usize {
        self.jobs[request.index].endpoint.expect("it has been sent")
    }

    /// Returns the tokens of a request's prompt that its engine found in its cache.
    pub(crate) fn cached(&self, request: &Request) -> i64 {
        self.jobs[request.index].cached
    }

    /// Returns a number that all blocks are below.
    pub(crate) fn block_space(&self) -> usize {
        self.block_space
    }

    /// Returns the requests in flight on each endpoint, as the router that asks knows them.
    pub(crate) fn in_flight(&self) -> &[i64] {
        &self.in_flight[self.acting]
    }

    /// Returns how many of a prompt's first blocks an endpoint has, as its cache events tell.
    pub(crate) fn prefix(&self, endpoint: usize, blocks: &[Block]) -> usize {
        self.seen().prefix(endpoint, blocks)
    }

    /// Returns the same in tokens.
    pub(crate) fn prefix_tokens(&self, endpoint: usize, request: &Request) -> i64 {
        let blocks = self.prefix(endpoint, &request.blocks) as i64;
        (blocks * self.params.block).min(request.prompt)
    }

    /// Returns the endpoints that have a block, a bit each, as their cache events tell.
    pub(crate) fn holders(&self, block: Block) -> u64 {
        self.seen().holders(block)
    }

    fn seen(&self) -> &Blocks {
        self.events.as_ref().map_or(&self.blocks, |events| &events.seen)
    }

    /// Returns the tokens of a prompt that an engine has in truth.
    pub(crate) fn true_prefix_tokens(&self, endpoint: usize, request: &Request) -> i64 {
        let blocks = self.blocks.prefix(endpoint, &request.blocks) as i64;
        (blocks * self.params.block).min(request.prompt)
    }

    /// Returns the true seconds of work before a request that came now would be begun.
    pub(crate) fn queue_seconds(&self, endpoint: usize) -> f64 {
        let mut marks = self.marks.borrow_mut();
        marks.reserve(self.block_space);
        self.engines[endpoint].queue_seconds(&self.jobs, &self.blocks, &mut marks, self.now)
    }

    /// Returns what was polled last; polls if that is too old.
    pub(crate) fn metrics(&self) -> Ref<'_, [Metrics]> {
        {
            let (at, values) = &mut *self.polled.borrow_mut();
            if self.now - *at >= self.knobs.metrics_age || values.len() != self.engines.len() {
                let poll = |engine: &Engine| Metrics {
                    waiting: engine.waiting(),
                    running: engine.running(),
                    cache: engine.use_of_cache(),
                };
                *values = self.engines.iter().map(poll).collect();
                *at = self.now;
            }
        }
        Ref::map(self.polled.borrow(), |(_, values)| &values[..])
    }

    fn add_job(&mut self, request: Request) -> usize {
        let index = self.jobs.len();
        let answer = request.answer.iter().flat_map(|blocks| blocks.iter());
        let highest = request.blocks.iter().chain(answer).max().map_or(0, |&block| block as usize);
        if highest >= self.block_space {
            self.reserve((highest + 1).next_power_of_two());
        }
        self.jobs.push(Job::new(Request { index, ..request }));
        index
    }

    /// Makes room for blocks with numbers below `blocks`.
    fn reserve(&mut self, blocks: usize) {
        self.block_space = blocks;
        self.blocks.reserve(blocks);
        if let Some(events) = &mut self.events {
            events.seen.reserve(blocks);
        }
        for engine in &mut self.engines {
            engine.reserve(blocks);
        }
    }

    /// Sends new cache events on their way, and takes those that have come.
    fn carry_events(&mut self) {
        let Some(late) = &mut self.events else { return };
        for event in self.blocks.take_events() {
            if self.knobs.event_loss == 0.0 || late.random.random() >= self.knobs.event_loss {
                late.under_way.push_back((self.now + self.knobs.event_age, event));
            }
        }
        while let Some(&(at, event)) = late.under_way.front()
            && at <= self.now
        {
            late.seen.apply(event);
            late.under_way.pop_front();
        }
    }
}

/// Something at a time, and in what order among things at the same time.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Due {
    at: f64,
    order: u64,
    job: usize,
}

impl Eq for Due {}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Due {
    fn cmp(&self, other: &Self) -> Ordering {
        self.at.total_cmp(&other.at).then(self.order.cmp(&other.order))
    }
}

/// What happens next; at the same time, in this order.
#[derive(Debug, Clone, Copy)]
enum Next {
    Arrival,
    Step(usize),
    Change,
    Tick(usize),
}

/// What one picker tells the others.
#[derive(Debug, Clone, Copy)]
enum Gossip {
    Dispatch(usize),
    First(usize),
    Finish(usize),
}

struct Sim {
    world: World,
    routers: Vec<Box<dyn Router>>,
    /// The picker of each request.
    picker: Vec<usize>,
    clients: Option<Box<dyn Clients>>,
    arrivals: BinaryHeap<Reverse<Due>>,
    /// When each engine's step ends.
    steps: Vec<Option<Due>>,
    /// When each picker that holds requests is asked again.
    ticks: Vec<Option<f64>>,
    changes: VecDeque<super::workload::Change>,
    /// What pickers have told each other: when it comes, and from whom.
    gossip: VecDeque<(f64, usize, Gossip)>,
    order: u64,
    /// Requests in the order they were sent.
    sent: Vec<usize>,
}

/// More endpoints than this do not fit a word of bits.
const MOST_ENDPOINTS: usize = 64;

/// Runs a workload under the routers that `build` makes.
///
/// # Errors
/// The workload cannot be drawn, or no router be built.
pub(crate) fn run(
    point: &Point,
    (policy, seed): (&str, u64),
    traces: &Traces,
    knobs: Knobs,
    build: impl Fn(&Setup) -> anyhow::Result<Box<dyn Router>>,
) -> anyhow::Result<Run> {
    let joins = point.changes.iter().filter(|change| matches!(change.what, What::Join(_))).count();
    if point.speeds.len() + joins > MOST_ENDPOINTS {
        bail!("`{}` has more than {MOST_ENDPOINTS} endpoints", point.name);
    }
    if knobs.pickers == 0 {
        bail!("there is at least one picker");
    }
    let traffic = point.traffic(seed, traces)?;
    let unseen = if knobs.gossip_age.is_some() { 1 } else { knobs.pickers };
    let routers = (0..knobs.pickers as u64).map(|picker| {
        build(&Setup {
            params: point.engine,
            endpoints: point.speeds.len(),
            seed: (seed * 7 + 1) ^ picker << 32,
            unseen,
        })
    });
    let mut sim = Sim {
        world: World::new(point, seed, knobs),
        routers: routers.collect::<anyhow::Result<_>>()?,
        picker: Vec::new(),
        clients: traffic.clients,
        arrivals: BinaryHeap::new(),
        steps: vec![None; point.speeds.len()],
        ticks: vec![None; knobs.pickers],
        changes: point.changes.iter().copied().collect(),
        gossip: VecDeque::new(),
        order: 0,
        sent: Vec::new(),
    };
    let started = sim.clients.as_mut().map(|clients| clients.start()).unwrap_or_default();
    sim.send(started);
    sim.send(traffic.arrivals);
    sim.run();
    Ok(sim.record(point, policy, seed))
}

impl Sim {
    fn send(&mut self, requests: Vec<Request>) {
        for request in requests {
            self.order += 1;
            let at = request.sent;
            let job = self.world.add_job(request);
            self.arrivals.push(Reverse(Due { at, order: self.order, job }));
        }
    }

    fn run(&mut self) {
        while let Some((at, next)) = self.next() {
            self.world.now = at;
            self.world.carry_events();
            self.hear(at);
            match next {
                Next::Arrival => self.arrive(at),
                Next::Step(engine) => self.step(engine, at),
                Next::Change => self.change(at),
                Next::Tick(picker) => {
                    self.ticks[picker] = None;
                    self.let_go(picker, at);
                    self.arm(picker, at);
                }
            }
        }
    }

    fn next(&self) -> Option<(f64, Next)> {
        let arrival = self.arrivals.peek().map(|Reverse(due)| (due.at, Next::Arrival));
        let step = (0..).zip(&self.steps).filter_map(|(engine, due)| Some((due.as_ref()?, engine)));
        let step = step.min().map(|(due, engine)| (due.at, Next::Step(engine)));
        // Changes and ticks come only while there is something to wait for.
        let busy = arrival.is_some() || step.is_some() || self.ticks.iter().any(Option::is_some);
        let change = self.changes.front().filter(|_| busy).map(|change| (change.at, Next::Change));
        let ticks = (0..).zip(&self.ticks);
        let tick = ticks.filter_map(|(picker, at)| Some(((*at)?, Next::Tick(picker))));
        let tick = tick.min_by(|a, b| a.0.total_cmp(&b.0));
        // The first of equals wins, and they stand in their order.
        [arrival, step, change, tick].into_iter().flatten().min_by(|a, b| a.0.total_cmp(&b.0))
    }

    fn arrive(&mut self, now: f64) {
        let Some(Reverse(Due { job, .. })) = self.arrivals.pop() else { return };
        let picker = self.sent.len() % self.routers.len();
        self.sent.push(job);
        if self.picker.len() <= job {
            self.picker.resize(job + 1, 0);
        }
        self.picker[job] = picker;
        if self.world.live.is_empty() {
            self.go_on(job, now);
            return;
        }
        self.world.acting = picker;
        let request = &self.world.jobs[job].request;
        match self.routers[picker].choose(request, now, &self.world) {
            Some(endpoint) => self.dispatch(job, endpoint, now),
            None => self.arm(picker, now),
        }
    }

    /// Sees to it that a router that holds requests is asked again.
    fn arm(&mut self, picker: usize, now: f64) {
        if self.routers[picker].holds() && self.ticks[picker].is_none() {
            self.ticks[picker] = Some(now + TICK);
        }
    }

    fn dispatch(&mut self, job: usize, endpoint: usize, now: f64) {
        let picker = self.picker[job];
        let at = &mut self.world.jobs[job];
        at.endpoint = Some(endpoint);
        at.dispatched = Some(now);
        self.world.in_flight[picker][endpoint] += 1;
        self.world.acting = picker;
        let request = &self.world.jobs[job].request;
        self.routers[picker].on_dispatch(request, endpoint, now, &self.world);
        self.tell(picker, now, Gossip::Dispatch(job));
        let request = &self.world.jobs[job].request;
        let live = self.world.live.iter();
        let best = live.map(|&endpoint| self.world.true_prefix_tokens(endpoint, request)).max();
        self.world.jobs[job].best_cached = best.unwrap_or(0);
        let World { engines, jobs, blocks, .. } = &mut self.world;
        let idle = engines[endpoint].step_end().is_none();
        engines[endpoint].enqueue(job, jobs, blocks, now);
        if idle {
            self.note_step(endpoint);
        }
    }

    /// Notes when an engine's step ends.
    fn note_step(&mut self, engine: usize) {
        self.order += 1;
        let order = self.order;
        let end = self.world.engines[engine].step_end();
        self.steps[engine] = end.map(|at| Due { at, order, job: 0 });
    }

    fn step(&mut self, engine: usize, now: f64) {
        self.world.engines[engine].end_step();
        loop {
            let World { engines, jobs, blocks, .. } = &mut self.world;
            match engines[engine].happening(jobs, blocks, now) {
                None => break,
                Some(Happening::First(job)) => self.first(job, now),
                Some(Happening::Finished(job)) => self.finish(job, now),
            }
        }
        let World { engines, jobs, blocks, .. } = &mut self.world;
        engines[engine].start(jobs, blocks, now);
        self.note_step(engine);
    }

    fn first(&mut self, job: usize, now: f64) {
        let picker = self.picker[job];
        self.world.acting = picker;
        let request = &self.world.jobs[job].request;
        self.routers[picker].on_first(request, now, &self.world);
        self.tell(picker, now, Gossip::First(job));
        self.let_go(picker, now);
    }

    fn finish(&mut self, job: usize, now: f64) {
        let picker = self.picker[job];
        let endpoint = self.world.jobs[job].endpoint.expect("it was somewhere");
        self.world.in_flight[picker][endpoint] -= 1;
        self.world.acting = picker;
        let request = &self.world.jobs[job].request;
        self.routers[picker].on_finish(request, now, &self.world);
        self.tell(picker, now, Gossip::Finish(job));
        self.let_go(picker, now);
        self.go_on(job, now);
    }

    /// Lets a client go on after a request has ended.
    fn go_on(&mut self, job: usize, now: f64) {
        let request = &self.world.jobs[job].request;
        let next = self.clients.as_mut().map(|clients| clients.next(request, now));
        self.send(next.unwrap_or_default());
    }

    /// Lets a router release what it holds.
    fn let_go(&mut self, picker: usize, now: f64) {
        while self.routers[picker].holds() {
            self.world.acting = picker;
            let Some((job, endpoint)) = self.routers[picker].release(now, &self.world) else {
                return;
            };
            self.dispatch(job, endpoint, now);
        }
    }

    fn tell(&mut self, picker: usize, now: f64, what: Gossip) {
        if let Some(age) = self.world.knobs.gossip_age
            && self.routers.len() > 1
        {
            self.gossip.push_back((now + age, picker, what));
        }
    }

    /// Lets every picker hear what the others told until now.
    fn hear(&mut self, now: f64) {
        while let Some(&(at, from, what)) = self.gossip.front()
            && at <= now
        {
            self.gossip.pop_front();
            let (Gossip::Dispatch(job) | Gossip::First(job) | Gossip::Finish(job)) = what;
            let endpoint = self.world.jobs[job].endpoint.expect("it was sent");
            for picker in (0..self.routers.len()).filter(|&picker| picker != from) {
                self.world.acting = picker;
                match what {
                    Gossip::Dispatch(_) => self.world.in_flight[picker][endpoint] += 1,
                    Gossip::First(_) => {}
                    Gossip::Finish(_) => self.world.in_flight[picker][endpoint] -= 1,
                }
                let (world, router) = (&self.world, &mut self.routers[picker]);
                let request = &world.jobs[job].request;
                match what {
                    Gossip::Dispatch(_) => router.on_peer_dispatch(request, endpoint, at, world),
                    Gossip::First(_) => router.on_first(request, at, world),
                    Gossip::Finish(_) => router.on_finish(request, at, world),
                }
            }
        }
    }

    fn change(&mut self, now: f64) {
        let Some(change) = self.changes.pop_front() else { return };
        match change.what {
            What::Join(speed) => {
                let number = self.world.engines.len();
                let mut engine = Engine::new(self.world.params, number, speed);
                engine.reserve(self.world.block_space);
                self.world.engines.push(engine);
                self.world.in_flight.iter_mut().for_each(|counts| counts.push(0));
                self.steps.push(None);
                self.add(number);
            }
            What::Return(endpoint) => self.add(endpoint),
            What::Leave(endpoint) => self.remove(endpoint),
            What::Crash(endpoint) => {
                self.remove(endpoint);
                let World { engines, blocks, .. } = &mut self.world;
                let lost = engines[endpoint].crash(blocks);
                self.steps[endpoint] = None;
                for job in lost {
                    self.finish(job, now);
                }
            }
        }
    }

    fn add(&mut self, endpoint: usize) {
        if let Err(place) = self.world.live.binary_search(&endpoint) {
            self.world.live.insert(place, endpoint);
            for (picker, router) in self.routers.iter_mut().enumerate() {
                self.world.acting = picker;
                router.on_added(endpoint, &self.world);
            }
        }
    }

    fn remove(&mut self, endpoint: usize) {
        if let Ok(place) = self.world.live.binary_search(&endpoint) {
            self.world.live.remove(place);
            for (picker, router) in self.routers.iter_mut().enumerate() {
                self.world.acting = picker;
                router.on_removed(endpoint, &self.world);
            }
        }
    }

    fn record(&self, point: &Point, policy: &str, seed: u64) -> Run {
        let joined = point.changes.iter().find(|change| matches!(change.what, What::Join(_)));
        Run {
            workload: point.name.clone(),
            policy: policy.to_owned(),
            seed,
            slo: point.slo,
            scaled_at: joined.map(|change| change.at),
            live: None,
            rows: self.sent.iter().map(|&job| row(&self.world.jobs[job])).collect(),
            endpoints: self
                .world
                .engines
                .iter()
                .map(|engine| work(engine, &point.engine))
                .collect(),
        }
    }
}

/// A count that a record keeps.
fn count<T: TryFrom<i64> + Default>(count: i64) -> T {
    T::try_from(count).unwrap_or_default()
}

fn row(job: &Job) -> Row {
    let request = &job.request;
    Row {
        id: request.id,
        conversation: request.conversation,
        turn: request.turn,
        counts: request.counts,
        sent: request.sent,
        dispatched: job.dispatched,
        ttft: job.ttft,
        e2e: job.finished.map(|at| at - request.sent),
        prompt: count(request.prompt),
        output: count(request.output),
        cached: count(job.cached),
        best_cached: count(job.best_cached),
        endpoint: job.endpoint.and_then(|endpoint| u32::try_from(endpoint).ok()),
    }
}

/// The context that a generated token is reckoned to attend to when work is compared.
const TYPICAL_CONTEXT: f64 = 1500.0;

/// Returns the seconds that tokens cost by the engine model's prices.
pub(crate) fn seconds_of_work(prefill_tokens: i64, decode_tokens: i64, p: &Params) -> f64 {
    let prompts = prefill_tokens as f64 * p.prefill;
    prompts + decode_tokens as f64 * (p.decode + TYPICAL_CONTEXT * p.context)
}

fn work(engine: &Engine, p: &Params) -> Work {
    Work {
        seconds: seconds_of_work(engine.prefill_tokens, engine.decode_tokens, p) / engine.speed(),
        prefill_tokens: count(engine.prefill_tokens),
        decode_tokens: count(engine.decode_tokens),
        preemptions: engine.preemptions,
    }
}

#[cfg(test)]
impl World {
    /// Makes a pool of H100 for a test, in which nothing has happened.
    pub(crate) fn of(endpoints: usize) -> Self {
        let text = format!(
            "{{engine: h100, endpoints: {endpoints}, slo: {{ttft: 1, itl: 1}}, \
             traffic: {{kind: unique, requests: 0, rate: 1, prompt: 1, output: 1}}}}"
        );
        let point = super::workload::tests::inline(&text);
        let mut world = Self::new(&point, 1, Knobs::default());
        world.reserve(1 << 12);
        world
    }

    /// Lets an endpoint have blocks in its cache.
    pub(crate) fn cache(&mut self, engine: usize, blocks: impl IntoIterator<Item = Block>) {
        for block in blocks {
            self.blocks.apply(Event { block, engine, stored: true });
        }
    }

    /// Counts the requests of a test.
    pub(crate) fn requests(&self) -> usize {
        self.jobs.len()
    }

    /// Sets the requests in flight.
    pub(crate) fn load(&mut self, in_flight: &[i64]) {
        self.in_flight[0] = in_flight.to_vec();
    }

    /// Adds a request that a router can be asked about.
    pub(crate) fn ask(&mut self, request: Request) -> Request {
        let index = self.add_job(request);
        self.jobs[index].request.clone()
    }

    /// Lets an engine work on a request.
    pub(crate) fn occupy(&mut self, endpoint: usize, request: Request) -> Request {
        let request = self.ask(request);
        let job = request.index;
        self.jobs[job].endpoint = Some(endpoint);
        self.engines[endpoint].enqueue(job, &mut self.jobs, &mut self.blocks, self.now);
        request
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::rivals;
    use crate::workload::tests::{inline, library, traces};

    fn run_with(point: &Point, policy: &str, seed: u64, knobs: Knobs) -> Run {
        let traces = Traces::new(std::env::var_os("LLM_RING_TRACES").unwrap_or_default());
        run(point, (policy, seed), &traces, knobs, |setup| rivals::build(policy, setup)).unwrap()
    }

    fn run_named(point: &str, policy: &str, seed: u64) -> Run {
        run_with(&library().point(point).unwrap(), policy, seed, Knobs::default())
    }

    /// What the first study's simulator printed for a run.
    #[derive(Debug, PartialEq, Deserialize)]
    struct Printed {
        ttft: f64,
        p95: f64,
        e2e: f64,
        hit: f64,
        imbalance: f64,
        preemptions: u64,
        /// Σ place in the order of arrival × number of the endpoint, both from 1.
        placements: u64,
    }

    fn mean(values: impl Iterator<Item = f64> + Clone) -> f64 {
        values.clone().sum::<f64>() / values.count() as f64
    }

    fn printed(run: &Run) -> Printed {
        let rows = || run.rows.iter().filter(|row| row.counts);
        let mut ttft: Vec<f64> = rows().filter_map(|row| row.ttft).collect();
        ttft.sort_by(f64::total_cmp);
        let at = (ttft.len() - 1) * 95;
        let below = ttft[at / 100];
        let above = ttft[(at / 100 + 1).min(ttft.len() - 1)];
        let sum = |of: fn(&Row) -> u32| rows().map(|row| u64::from(of(row))).sum::<u64>() as f64;
        let work = run.endpoints.iter().map(|work| work.seconds);
        let places = (1u64..).zip(&run.rows);
        Printed {
            ttft: mean(ttft.iter().copied()),
            p95: below + (above - below) * (at % 100) as f64 / 100.0,
            e2e: mean(rows().filter_map(|row| row.e2e)),
            hit: sum(|row| row.cached) / sum(|row| row.prompt),
            imbalance: work.clone().fold(0.0, f64::max) / mean(work),
            preemptions: run.endpoints.iter().map(|work| work.preemptions).sum(),
            placements: places
                .map(|(place, row)| place * (u64::from(row.endpoint.unwrap()) + 1))
                .sum(),
        }
    }

    #[test]
    fn every_request_goes_where_the_first_study_sent_it() {
        let table: BTreeMap<String, BTreeMap<String, Printed>> =
            serde_json::from_str(include_str!("testdata/prototype.json")).unwrap();
        let traced = ["conv", "synth", "tool", "azcode", "azconv", "azure", "convB"];
        for (point, policies) in &table {
            if traced.contains(&point.split(':').next().unwrap()) && traces().is_none() {
                continue;
            }
            for (policy, expected) in policies {
                let is = printed(&run_named(point, policy, 1));
                let same = |of: fn(&Printed) -> f64| {
                    let (is, expected) = (of(&is), of(expected));
                    assert!(
                        (is - expected).abs() <= 1e-9 * expected.abs(),
                        "{point} {policy}: {is} {expected}"
                    );
                };
                assert_eq!(is.placements, expected.placements, "{point} {policy}");
                assert_eq!(is.preemptions, expected.preemptions, "{point} {policy}");
                same(|it| it.ttft);
                same(|it| it.p95);
                same(|it| it.e2e);
                same(|it| it.hit);
                same(|it| it.imbalance);
            }
        }
    }

    /// Chats on three small engines, with what else a test says.
    fn chats(more: &str) -> Point {
        inline(&format!(
            "{{engine: cpu, endpoints: 3, slo: {{ttft: 60, itl: 1}}, traffic: {{kind: chat, users: 12, \
             conversations_per_user: 2, ramp: 20, opening: 200, turns: 4, input: 60, output: 40, \
             think: {{mean: 5, most: 20}}}}{more}}}"
        ))
    }

    #[test]
    fn the_same_seed_gives_the_same_bytes() {
        for policy in ["rec", "predicted-latency", "gaie", "proto-llm-aware"] {
            let knobs = Knobs {
                event_age: 0.1,
                event_loss: 0.1,
                pickers: 3,
                gossip_age: Some(0.05),
                ..Knobs::default()
            };
            let bytes =
                |seed| serde_json::to_vec(&run_with(&chats(""), policy, seed, knobs)).unwrap();
            assert_eq!(bytes(1), bytes(1), "{policy}");
            assert_ne!(bytes(1), bytes(2), "{policy}");
        }
    }

    fn on(run: &Run, endpoint: u32, after: f64) -> usize {
        run.rows.iter().filter(|row| row.endpoint == Some(endpoint) && row.sent >= after).count()
    }

    #[test]
    fn an_endpoint_that_joins_is_used_and_one_that_leaves_ends_what_it_has() {
        let point = chats(", changes: [{at: 30, join: 1}, {at: 60, leave: 0}]");
        for (policy, _) in rivals::PUBLISHED.iter().chain(rivals::REFERENCES) {
            let run = run_with(&point, policy, 1, Knobs::default());
            assert_eq!(run.scaled_at, Some(30.0));
            assert_eq!((on(&run, 0, 60.0), run.endpoints.len()), (0, 4), "{policy}");
            assert!(on(&run, 0, 0.0) > 0, "{policy}");
            assert!(run.rows.iter().all(|row| row.e2e.is_some()), "{policy} lost a request");
            assert_eq!(run.rows.len(), 12 * 2 * 4, "{policy}");
        }
    }

    #[test]
    fn an_endpoint_that_crashes_loses_its_requests_and_its_cache() {
        let point = chats(", changes: [{at: 30, crash: 1}, {at: 90, return: 1}]");
        for (policy, _) in rivals::PUBLISHED.iter().chain(rivals::REFERENCES) {
            let run = run_with(&point, policy, 1, Knobs::default());
            let lost = run.rows.iter().filter(|row| row.e2e.is_none());
            assert!(lost.clone().count() > 0, "{policy}");
            assert!(lost.clone().all(|row| row.endpoint == Some(1) && row.sent < 30.0), "{policy}");
            let meanwhile = |row: &&Row| row.endpoint == Some(1) && row.dispatched > Some(30.0);
            let back = run.rows.iter().find(meanwhile).map(|row| (row.dispatched, row.cached));
            assert!(
                back.is_none_or(|(at, cached)| at > Some(90.0) && cached == 0),
                "{policy}: {back:?}"
            );
            assert_eq!(run.rows.len(), 12 * 2 * 4, "{policy}");
        }
    }

    #[test]
    fn a_faster_endpoint_does_more() {
        let point = |speeds: &str| {
            inline(&format!(
                "{{engine: a10, endpoints: {speeds}, slo: {{ttft: 1, itl: 1}}, \
                 traffic: {{kind: unique, requests: 200, rate: 4, prompt: 1000, output: 64}}}}"
            ))
        };
        let work = |speeds: &str| {
            let run = run_with(&point(speeds), "lmetric-q", 1, Knobs::default());
            run.endpoints[1].prefill_tokens as f64 / run.endpoints[0].prefill_tokens as f64
        };
        assert!((work("[1, 1]") - 1.0).abs() < 0.1);
        assert!(work("[1, 3]") > 1.5);
        let ttft = |speeds: &str| {
            printed(&run_with(&point(speeds), "proto-round-robin", 1, Knobs::default())).ttft
        };
        assert!(ttft("[2, 2]") < 0.6 * ttft("[1, 1]"));
    }

    #[test]
    fn late_and_lost_events_cost_hits() {
        // Ten prefixes on four engines; what was computed a moment ago is asked for again.
        let point = inline(
            "{engine: a10, endpoints: 4, slo: {ttft: 1, itl: 1}, traffic: {kind: prefix-pool, prefixes: 40, \
             skew: 0, prefix: 1600, suffix: 30, output: 16, requests: 400, rate: 8, \
             runs: {first: 1, step: 1, count: 1}, pause: 0, suffix_draws: 0}}",
        );
        let hit = |knobs| printed(&run_with(&point, "kvaware", 1, knobs)).hit;
        let fresh = hit(Knobs::default());
        let late = hit(Knobs { event_age: 10.0, ..Knobs::default() });
        let lossy = hit(Knobs { event_loss: 0.5, ..Knobs::default() });
        assert!(late < fresh - 0.05, "{late} {fresh}");
        assert!(lossy < fresh - 0.05, "{lossy} {fresh}");
    }

    #[test]
    fn pickers_that_share_what_they_do_are_nearly_one() {
        let ttft = |pickers, gossip_age| {
            let knobs = Knobs { pickers, gossip_age, ..Knobs::default() };
            let point = inline(
                "{engine: a10, endpoints: 8, slo: {ttft: 1, itl: 1}, \
                 traffic: {kind: unique, requests: 600, rate: 16, prompt: 1578, output: 16}}",
            );
            printed(&run_with(&point, "rec", 1, knobs)).ttft
        };
        let (one, shared, alone) = (ttft(1, None), ttft(4, Some(0.005)), ttft(4, None));
        assert!(shared < 1.1 * one, "{shared} {one}");
        assert!(alone > 1.3 * shared, "{alone} {shared}");
    }

    #[test]
    fn metrics_are_as_old_as_they_may_be() {
        let mut world = World::of(2);
        let polled = |world: &World| world.metrics()[0].waiting;
        assert_eq!(polled(&world), 0);
        let request =
            |id: u32| Request { blocks: (id * 200..id * 200 + 180).collect(), ..sample() };
        for id in 0..4 {
            world.occupy(0, request(id));
        }
        world.now = 0.04;
        assert_eq!(polled(&world), 0, "the poll is 40 ms old");
        world.now = 0.06;
        assert!(polled(&world) > 0, "a poll is due");
    }

    fn sample() -> Request {
        Request {
            index: 0,
            id: 0,
            sent: 0.0,
            prompt: 11_520,
            output: 10,
            blocks: [].into(),
            answer: None,
            key: "k".into(),
            conversation: None,
            turn: 1,
            counts: true,
        }
    }
}
