#![allow(
    clippy::disallowed_methods,
    reason = "this file owns the clock and the timers of the streams"
)]
//! The tonic service: pumps one [`Exchange`] a stream, keeps its deadlines, and does what its effects say.
//!
//! A stream is a pull: Envoy's next message is read when the last one's effects are out. That needs no task and no
//! channel a stream, stops reading when Envoy stops taking, and ends with the stream: dropping it is how tonic says
//! that the client has gone.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher as _;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use envoy_types::pb::envoy::service::ext_proc::v3 as pb;
use pb::external_processor_server::{ExternalProcessor, ExternalProcessorServer};
use tokio::time::Sleep;
use tokio_stream::Stream;
use tonic::{Code, Request, Response, Status, Streaming};

use super::exchange::{Close, Effect, Exchange, ExchangeSettings, ToSchedule};
use super::reply::Routing;
use super::tokenizing::{Asking as AskingTokens, Tokenizing};
use super::waiting::{Called, Seat, WaitingRoom};
use crate::engine::knowledge::{Facts, Knowledge, Promise, Prompt};
use crate::index::hash;
use crate::pool::{InferenceRequest, Outcome};
use crate::scheduling::{Booking, Decided, Decision, Detail, HoldSettings, Moment, Scheduler};
use crate::telemetry::metrics::Why;
use crate::telemetry::observer::{Asking, Observation, Observer};
use crate::tokens::Resolver;

/// What bounds a stream.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// From the request's headers to the pick; then it is made on what has been read.
    pub decision_deadline: Duration,
    /// Silence in the middle of a body; then the request is given up.
    pub body_idle_timeout: Duration,
    /// Bytes of all bodies that wait for their pick; beyond, picks are made on what has been read.
    pub body_memory_bytes: u64,
    /// Largest gRPC message.
    pub message_bytes: usize,
}

/// The picker as Envoy sees it.
#[derive(Debug, Clone)]
pub struct Picker(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    scheduler: Arc<Scheduler>,
    observer: Arc<Observer>,
    exchange: Arc<ExchangeSettings>,
    limits: Limits,
    explain_headers: bool,
    detail: Detail,
    seeds: Seeds,
    waiting_room: Option<WaitingRoom>,
    knowledge: Option<Arc<Knowledge>>,
    tokenizing: Option<Tokenizing>,
    /// When the picker began: the core counts time from there.
    epoch: Instant,
}

/// What a picker is made of.
#[derive(Debug)]
pub struct Parts {
    /// Decides.
    pub scheduler: Arc<Scheduler>,
    /// Watches.
    pub observer: Arc<Observer>,
    /// How requests are read and answered.
    pub exchange: ExchangeSettings,
    /// What bounds a stream.
    pub limits: Limits,
    /// Whether answers carry `x-routed-to` and the like.
    pub explain_headers: bool,
    /// How much a trace holds.
    pub detail: Detail,
    /// When requests are held back, if they are.
    pub hold: Option<HoldSettings>,
    /// What is known of engines, if anything is to be.
    pub knowledge: Option<Arc<Knowledge>>,
    /// When the picker began: time counts from there.
    pub epoch: Instant,
    /// What tells the tokens of prompts, if anything does.
    pub tokens: Option<Arc<Resolver>>,
}

/// Why an exchange must decide on what it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Hurry {
    /// The decision deadline has passed.
    Deadline,
    /// The bodies waiting in all exchanges have filled their budget.
    Memory,
}

/// A stream of draws that no client can foresee.
#[derive(Debug)]
struct Seeds {
    start: u64,
    drawn: AtomicU64,
}

impl Picker {
    /// Makes the picker.
    #[must_use]
    pub fn new(parts: Parts) -> Self {
        let Parts { scheduler, observer, exchange, limits, explain_headers, detail, .. } = parts;
        let Parts { hold, knowledge, epoch, tokens, .. } = parts;
        let seeds = Seeds { start: RandomState::new().hash_one(0), drawn: AtomicU64::new(0) };
        let exchange = Arc::new(exchange);
        let waiting_room = hold
            .map(|hold| WaitingRoom::new(hold, Arc::clone(&scheduler), knowledge.clone(), detail));
        Self(Arc::new(Shared {
            scheduler,
            observer,
            exchange,
            limits,
            explain_headers,
            detail,
            seeds,
            waiting_room,
            knowledge,
            epoch,
            tokenizing: tokens.map(Tokenizing::new),
        }))
    }

    /// Lets all requests go that are held back, and holds no more: the picker ends.
    pub fn hold_no_more(&self) {
        if let Some(room) = &self.0.waiting_room {
            room.open(self.0.epoch.elapsed(), || self.0.seeds.draw());
        }
    }

    /// Returns the gRPC service.
    #[must_use]
    pub fn into_service(self) -> ExternalProcessorServer<Self> {
        let limit = self.0.limits.message_bytes;
        ExternalProcessorServer::new(self).max_decoding_message_size(limit)
    }
}

#[tonic::async_trait]
impl ExternalProcessor for Picker {
    type ProcessStream = Pump;

    async fn process(
        &self,
        request: Request<Streaming<pb::ProcessingRequest>>,
    ) -> Result<Response<Pump>, Status> {
        let traceparent = request
            .metadata()
            .get("traceparent")
            .and_then(|value| value.to_str().ok())
            .map(ToOwned::to_owned);
        Ok(Response::new(Pump::new(Arc::clone(&self.0), request.into_inner(), traceparent)))
    }
}

/// One stream.
#[derive(Debug)]
pub struct Pump {
    shared: Arc<Shared>,
    inbound: Streaming<pb::ProcessingRequest>,
    exchange: Exchange,
    booking: Option<Booking>,
    /// What was predicted of it.
    promise: Option<Promise>,
    observation: Option<Observation>,
    /// Trace context of the gRPC call; it goes before the client's own.
    traceparent: Option<String>,
    started: Instant,
    heard: Instant,
    timer: Option<Pin<Box<Sleep>>>,
    held: u64,
    asking: Option<Box<AskingTokens>>,
    waiting: Option<Waiting>,
    state: State,
}

/// A request that is held back.
#[derive(Debug)]
struct Waiting {
    seat: Seat,
    asked: Asked,
}

/// A request on its way to a decision.
#[derive(Debug)]
struct Asked {
    observation: Observation,
    request: InferenceRequest,
    prompt: Option<Arc<Prompt>>,
    body: &'static str,
}

/// When a request was decided, on what, and how long that took.
#[derive(Clone, Copy)]
struct Turn<'a> {
    moment: Moment<'a>,
    begun: Instant,
    took: Duration,
    facts: Option<&'a Facts>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Open,
    /// Envoy will send no more.
    HalfClosed,
    Closed,
}

impl Pump {
    fn new(
        shared: Arc<Shared>,
        inbound: Streaming<pb::ProcessingRequest>,
        traceparent: Option<String>,
    ) -> Self {
        shared.observer.metrics.streams.inc();
        let exchange = Exchange::new(Arc::clone(&shared.exchange));
        let now = Instant::now();
        Self {
            shared,
            inbound,
            exchange,
            booking: None,
            promise: None,
            observation: None,
            traceparent,
            started: now,
            heard: now,
            timer: None,
            held: 0,
            asking: None,
            waiting: None,
            state: State::Open,
        }
    }

    /// Does what one effect says; returns what is to be sent.
    fn perform(&mut self, effect: Effect) -> Option<Result<pb::ProcessingResponse, Status>> {
        match effect {
            Effect::Send(message) => return Some(Ok(*message)),
            Effect::Schedule(to_schedule) => self.ask_for_tokens(to_schedule),
            Effect::Rejected(rejection) => {
                // After its pick the request is under observation already.
                let mut observation = self.observation.take().unwrap_or_else(|| self.observe());
                let now = Instant::now();
                self.booking = None;
                if let (Some(knowledge), Some(promise)) =
                    (&self.shared.knowledge, self.promise.take())
                {
                    let time = now.saturating_duration_since(self.shared.epoch);
                    knowledge.served(promise, &Outcome::default(), time);
                }
                self.shared.observer.rejected(
                    &mut observation,
                    (rejection.as_str(), &rejection.to_string()),
                    self.exchange.request_id(),
                    now,
                );
            }
            Effect::FirstToken => {
                // One time for both: what is recorded is what was decided with.
                let now = Instant::now();
                if let Some(booking) = &mut self.booking {
                    booking.first_token(now.saturating_duration_since(self.shared.epoch));
                    self.shared.call_waiting();
                }
                if let Some(observation) = &mut self.observation {
                    self.shared.observer.first_token(observation, now);
                }
            }
            Effect::Finish(outcome) => self.finish(&outcome),
            Effect::Close(close) => {
                self.state = State::Closed;
                if close == Close::Truncated {
                    return Some(Err(Status::cancelled("the request's body was cut off")));
                }
            }
        }
        None
    }

    /// Starts the observation of the request, under the trace of Envoy's call or else of the client.
    fn observe(&self) -> Observation {
        let parents = [self.traceparent.as_deref(), self.exchange.traceparent()];
        self.shared.observer.start(self.started, parents)
    }

    /// Asks for the tokens of a request before it is decided, if there is somebody to ask.
    fn ask_for_tokens(&mut self, mut to_schedule: Box<ToSchedule>) {
        let (Some(tokenizing), Some(prompt)) = (&self.shared.tokenizing, to_schedule.prompt.take())
        else {
            return self.schedule(*to_schedule);
        };
        let engine = tokenizing
            .asks_engines()
            .then(|| self.shared.engine_for(&to_schedule.request))
            .flatten();
        let times = (Instant::now(), self.started + self.shared.limits.decision_deadline);
        self.asking = Some(Box::new(tokenizing.ask(to_schedule, prompt, engine, times)));
    }

    /// Waits for the tokens of the request, then decides it.
    fn poll_tokens(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(asking) = &mut self.asking else { return Poll::Ready(()) };
        let told = std::task::ready!(asking.poll(cx));
        self.asking = None;
        let Some((mut to_schedule, outcome, begun)) = told else { return Poll::Ready(()) };
        let shared = Arc::clone(&self.shared);
        if let Some(tokenizing) = &shared.tokenizing {
            let times = (begun.elapsed(), shared.epoch.elapsed());
            let metrics = &shared.observer.metrics;
            tokenizing.told(&mut to_schedule.request, outcome, metrics, times);
        }
        self.schedule(*to_schedule);
        Poll::Ready(())
    }

    fn schedule(&mut self, to_schedule: ToSchedule) {
        let ToSchedule { request, body, prompt: _ } = to_schedule;
        let shared = Arc::clone(&self.shared);
        let observation = self.observe();
        if !matches!(body, "whole" | "none" | "partial") {
            shared.observer.metrics.unread_bodies.get_or_create(&Why { reason: body }).inc();
        }
        let begun = Instant::now();
        let now = begun.saturating_duration_since(shared.epoch);
        let knowledge = shared.knowledge.as_ref();
        let prompt = knowledge.and_then(|it| it.prompt(&request));
        let facts = knowledge.and_then(|it| {
            let (pool, metrics) = shared.scheduler.asks();
            it.look((&pool, metrics), prompt.as_deref(), now).map(Arc::new)
        });
        let moment = Moment {
            now,
            seed: shared.seeds.draw(),
            evidence: facts.as_ref().map(|facts| facts.evidence()).unwrap_or_default(),
            prefix: prompt.as_ref().and_then(|prompt| prompt.beginning()),
            ..Moment::default()
        };
        let decided = match &shared.waiting_room {
            None => Ok(shared.scheduler.schedule(&request, moment, shared.detail)),
            Some(room) => room.enter(&request, (prompt.as_ref(), facts.as_ref()), moment),
        };
        let asked = Asked { observation, request, prompt, body };
        match decided {
            Ok(decided) => {
                let turn = Turn { moment, begun, took: begun.elapsed(), facts: facts.as_deref() };
                self.decided(asked, decided, turn);
            }
            Err(seat) => {
                shared.observer.metrics.waiting.inc();
                self.waiting = Some(Waiting { seat, asked });
            }
        }
    }

    fn decided(&mut self, asked: Asked, decided: Decided, turn: Turn<'_>) {
        let Asked { mut observation, request, prompt, body } = asked;
        let shared = Arc::clone(&self.shared);
        match decided {
            Ok((decision, booking)) => {
                self.booking = Some(booking);
                self.exchange.scheduled(Routing {
                    destination: destination(&decision),
                    traceparent: observation.traceparent(),
                    explanation: if shared.explain_headers {
                        explanation(&decision)
                    } else {
                        Vec::new()
                    },
                });
                let Turn { moment, begun, took, facts } = turn;
                if let (Some(knowledge), Some(prompt)) = (&shared.knowledge, prompt) {
                    let endpoint = decision.pool.ids()[decision.target() as usize];
                    self.promise = knowledge.chosen(endpoint, prompt, facts, moment.now);
                }
                let asking = Asking { request: &request, moment, body, begun, took };
                shared.observer.decided(&mut observation, decision, asking);
                self.observation = Some(observation);
            }
            Err(refusal) => {
                let (why, text) = (refusal.as_str(), refusal.to_string());
                let refused = (why, text.as_str());
                shared.observer.rejected(&mut observation, refused, &request.id, turn.begun);
                self.exchange.refused(refusal);
            }
        }
    }

    fn finish(&mut self, outcome: &Outcome) {
        let now = Instant::now();
        let time = now.saturating_duration_since(self.shared.epoch);
        if let (Some(knowledge), Some(promise)) = (&self.shared.knowledge, self.promise.take()) {
            knowledge.served(promise, outcome, time);
        }
        if let Some(booking) = self.booking.take() {
            booking.finish(outcome, time);
            self.shared.call_waiting();
        }
        if let Some(observation) = self.observation.take() {
            self.shared.observer.ended(observation, outcome, now);
        }
    }

    /// Books the bytes that this stream holds, and hurries when all streams together hold too many.
    fn account(&mut self) {
        let holds = self.exchange.held_bytes();
        if holds == self.held {
            return;
        }
        let signed = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
        let change = signed(holds) - signed(self.held);
        self.held = holds;
        let all = self.shared.observer.metrics.held_body_bytes.inc_by(change) + change;
        let over = all > signed(self.shared.limits.body_memory_bytes);
        if change > 0 && over && self.exchange.can_hurry() {
            self.hurry(Hurry::Memory);
        }
    }

    fn hurry(&mut self, why: Hurry) {
        let reason = match why {
            Hurry::Deadline => "deadline",
            Hurry::Memory => "memory",
        };
        self.shared.observer.metrics.early_decisions.get_or_create(&Why { reason }).inc();
        self.exchange.hurry();
        self.account();
    }

    /// Waits for the next time limit; returns whether one has passed.
    fn poll_limits(&mut self, cx: &mut Context<'_>) -> bool {
        if !self.exchange.awaits_body() {
            self.timer = None;
            return false;
        }
        let limits = self.shared.limits;
        let idle = self.heard + limits.body_idle_timeout;
        let deadline = self.started + limits.decision_deadline;
        let next = if self.exchange.can_hurry() { idle.min(deadline) } else { idle };
        let timer =
            self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(next.into())));
        if timer.deadline() != next.into() {
            timer.as_mut().reset(next.into());
        }
        if timer.as_mut().poll(cx).is_pending() {
            return false;
        }
        if Instant::now() >= idle {
            self.exchange.on_stalled_body();
            self.account();
        } else {
            self.hurry(Hurry::Deadline);
        }
        true
    }
}

impl Stream for Pump {
    type Item = Result<pb::ProcessingResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let pump = &mut *self;
        loop {
            while let Some(effect) = pump.exchange.next_effect() {
                if let Some(message) = pump.perform(effect) {
                    pump.account();
                    return Poll::Ready(Some(message));
                }
            }
            if pump.asking.is_some() {
                std::task::ready!(pump.poll_tokens(cx));
                continue;
            }
            if let Some(Waiting { seat, .. }) = &mut pump.waiting {
                let shared = &pump.shared;
                let Poll::Ready(called) = seat.poll(cx, || shared.tick_waiting()) else {
                    return Poll::Pending;
                };
                shared.observer.metrics.waiting.dec();
                if let Some(Waiting { asked, .. }) = pump.waiting.take() {
                    let Called { now, took, decided, facts } = called;
                    let begun = pump.shared.epoch + now;
                    let moment = Moment { now, ..Moment::default() };
                    let facts = facts.as_deref();
                    pump.decided(asked, decided, Turn { moment, begun, took, facts });
                }
                continue;
            }
            if pump.state != State::Open {
                return Poll::Ready(None);
            }
            match Pin::new(&mut pump.inbound).poll_next(cx) {
                Poll::Ready(Some(Ok(message))) => {
                    pump.heard = Instant::now();
                    pump.exchange.on(message);
                    pump.account();
                }
                // A message over the limit of the decoder: its body is over ours.
                Poll::Ready(Some(Err(status)))
                    if status.code() == Code::OutOfRange && pump.exchange.awaits_body() =>
                {
                    pump.exchange.on_oversized();
                    pump.state = State::HalfClosed;
                }
                // Envoy resets a stream at its normal end; whether it was one, the exchange knows.
                Poll::Ready(Some(Err(_))) => pump.state = State::Closed,
                Poll::Ready(None) => {
                    pump.state = State::HalfClosed;
                    pump.exchange.on_half_close();
                }
                Poll::Pending => {
                    if !pump.poll_limits(cx) {
                        return Poll::Pending;
                    }
                }
            }
        }
    }
}

impl Drop for Pump {
    fn drop(&mut self) {
        let metrics = &self.shared.observer.metrics;
        metrics.streams.dec();
        if let Some(Waiting { asked, .. }) = self.waiting.take() {
            metrics.waiting.dec();
            let Asked { mut observation, request, .. } = asked;
            let why = ("left-while-held", "the client left while the request was held back");
            self.shared.observer.rejected(&mut observation, why, &request.id, Instant::now());
        }
        metrics.duplicate_body_messages.inc_by(self.exchange.duplicates());
        metrics.held_body_bytes.dec_by(i64::try_from(self.held).unwrap_or(i64::MAX));
        if let Some(outcome) = self.exchange.abandoned() {
            self.finish(&outcome);
        }
    }
}

impl Shared {
    /// Draws an engine that may be asked for the tokens of a request.
    fn engine_for(&self, request: &InferenceRequest) -> Option<http::Uri> {
        let pool = self.scheduler.pool();
        let allowed = |address: &SocketAddr| {
            request.subset.as_ref().is_none_or(|subset| {
                let any_port = SocketAddr::new(address.ip(), 0);
                subset.contains(address) || subset.contains(&any_port)
            })
        };
        let addresses = pool.endpoints().iter().map(|endpoint| endpoint.address);
        let allowed: Vec<SocketAddr> = addresses.filter(allowed).collect();
        let count = u64::try_from(allowed.len()).ok().filter(|count| *count > 0)?;
        let address = allowed.get(usize::try_from(self.seeds.draw() % count).ok()?)?;
        format!("http://{address}").parse().ok()
    }

    /// Lets those go who wait and may: something has ended.
    fn call_waiting(&self) {
        if let Some(room) = &self.waiting_room {
            room.call(self.epoch.elapsed(), || self.seeds.draw());
        }
    }

    /// The same since time has passed.
    fn tick_waiting(&self) {
        if let Some(room) = &self.waiting_room {
            room.tick(self.epoch.elapsed(), || self.seeds.draw());
        }
    }
}

impl Seeds {
    fn draw(&self) -> u64 {
        hash::mix(self.start, self.drawn.fetch_add(1, Ordering::Relaxed))
    }
}

/// Writes the endpoints as the protocol wants them: `ip:port`, with commas between.
fn destination(decision: &Decision) -> String {
    let addresses: Vec<String> = decision
        .targets
        .iter()
        .map(|&slot| decision.pool.endpoint(slot).address.to_string())
        .collect();
    addresses.join(",")
}

fn explanation(decision: &Decision) -> Vec<(&'static str, String)> {
    let mut headers = vec![
        ("x-routed-to", decision.pool.endpoint(decision.target()).name.clone()),
        ("x-route-reason", decision.reason.as_str().to_owned()),
        ("x-route-policy", decision.policy.to_owned()),
    ];
    headers.extend(
        decision.trace.conversation.as_ref().map(|(id, _)| ("x-conversation-id", id.clone())),
    );
    headers
}
