//! The one place where a request is decided and booked: a pick and its booking are one step under one lock.

use std::collections::HashMap;
use std::num::{NonZeroU64, NonZeroUsize};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lru::LruCache;

use super::{
    Candidates, Choice, Cx, Decision, Moment, Policy, Reason, Refusal, Sights, Step, Trace, Unit,
};
use crate::pool::estimate::TokenEstimator;
use crate::pool::{
    Conversation, Decaying, EndpointId, Flight, InferenceRequest, KeySource, Load, LoadLedger,
    MOST_TOKENS, Outcome, Placed, Placement, PoolSnapshot, Prices, PromptSize, Release, Ticket,
    Work,
};

/// Pools up to this size have every candidate's load in every trace; in larger ones it would cost more than the pick.
const LOADS_SHOWN: usize = 32;

/// What the scheduler is built with.
#[derive(Debug)]
pub struct Settings {
    /// Name of the policy.
    pub policy_name: &'static str,
    /// The policy.
    pub policy: Arc<dyn Policy>,
    /// When requests are turned away.
    pub admission: Admission,
    /// When a prompt's tokens leave the ledger.
    pub release: Release,
    /// What work costs.
    pub prices: Prices,
    /// Tokens that a request is taken to generate when it sets no limit.
    pub default_max_tokens: u64,
    /// Endpoints that a decision names, the fallbacks included.
    pub destinations: NonZeroUsize,
    /// Conversations remembered.
    pub memory_entries: NonZeroUsize,
    /// Whether traces that have loads also have what is seen of the engines, whatever the policy looks at: then any
    /// policy can decide a record again.
    pub trace_sights: bool,
}

/// When requests are turned away: when no candidate has room. Without a limit there always is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Admission {
    /// Requests in flight on an endpoint for each unit of its weight.
    pub requests: Option<NonZeroU64>,
    /// The same for requests of negative priority, which are the first to be shed.
    pub sheddable: Option<NonZeroU64>,
    /// What a refused client is told to wait.
    pub retry_after: Duration,
}

impl Admission {
    fn limit(self, priority: i32) -> Option<u64> {
        let sheddable = self.sheddable.filter(|_| priority < 0);
        self.requests.into_iter().chain(sheddable).min().map(NonZeroU64::get)
    }
}

/// How much a trace holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Detail {
    /// Steps, and loads of small pools.
    Normal,
    /// Everything.
    Full,
}

/// Decides requests over one pool and keeps its load, its memory and its estimates.
#[derive(Debug)]
pub struct Scheduler {
    settings: Settings,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    pool: Arc<PoolSnapshot>,
    /// The policy in use, with its name; at first that of the settings.
    policy: (&'static str, Arc<dyn Policy>),
    ledger: LoadLedger,
    placement: Placement,
    estimator: TokenEstimator,
    output: Output,
    hot: Hot,
    /// Priorities by the names of objectives.
    objectives: HashMap<String, i32>,
    sequence: u64,
}

/// A request's claim on its endpoint. However it goes away, the load goes back.
#[derive(Debug)]
#[must_use = "dropping a booking releases it"]
pub struct Booking {
    scheduler: Arc<Scheduler>,
    ticket: Option<Ticket>,
    subject: Subject,
}

/// What is learned about when the request ends.
#[derive(Debug)]
struct Subject {
    conversation: Option<u64>,
    endpoint: EndpointId,
    model: Option<String>,
    prompt: PromptSize,
    prompt_tokens: u64,
    /// Whether anything was to be generated; what computes no answer leaves no conversation in a cache.
    generates: bool,
}

impl Scheduler {
    /// Starts with `pool`, no load and an empty memory.
    #[must_use]
    pub fn new(settings: Settings, pool: Arc<PoolSnapshot>) -> Self {
        let mut ledger = LoadLedger::new(settings.prices);
        ledger.adopt(&pool);
        let placement = Placement::new(settings.memory_entries);
        let state = State {
            pool,
            policy: (settings.policy_name, Arc::clone(&settings.policy)),
            ledger,
            placement,
            estimator: TokenEstimator::default(),
            output: Output::default(),
            hot: Hot::default(),
            objectives: HashMap::new(),
            sequence: 0,
        };
        Self { settings, state: Mutex::new(state) }
    }

    /// Follows a change of membership; load in flight and memory stay.
    pub fn adopt(&self, pool: Arc<PoolSnapshot>) {
        let mut state = self.lock();
        state.ledger.adopt(&pool);
        let before = std::mem::replace(&mut state.pool, pool);
        drop(state);
        // A ring of a large pool is not freed while requests wait.
        drop(before);
    }

    /// Decides under another policy from now on; load in flight and memory stay.
    pub fn set_policy(&self, name: &'static str, policy: Arc<dyn Policy>) {
        self.lock().policy = (name, policy);
    }

    /// Takes the priorities of objectives, by their names, as they are now.
    pub fn set_objectives(&self, objectives: HashMap<String, i32>) {
        self.lock().objectives = objectives;
    }

    /// Returns the current endpoints.
    #[must_use]
    pub fn pool(&self) -> Arc<PoolSnapshot> {
        Arc::clone(&self.lock().pool)
    }

    /// Returns the current endpoints, and whether engines' load and memory as they say are looked at in decisions.
    #[must_use]
    pub fn asks(&self) -> (Arc<PoolSnapshot>, bool) {
        let state = self.lock();
        let asks = self.settings.trace_sights || state.policy.1.asks_engines();
        (Arc::clone(&state.pool), asks)
    }

    /// Returns the current endpoints with the load of each, in slot order.
    #[must_use]
    pub fn loads(&self) -> (Arc<PoolSnapshot>, Vec<Load>) {
        let state = self.lock();
        let slots = 0..u32::try_from(state.pool.endpoints().len()).unwrap_or(u32::MAX);
        (Arc::clone(&state.pool), slots.map(|slot| state.ledger.load(slot)).collect())
    }

    /// Returns the keys of the conversations that were served last, at most so many.
    #[must_use]
    pub fn conversations(&self, most: usize) -> Vec<u64> {
        self.lock().placement.conversations(most)
    }

    /// Counts the conversations that are remembered.
    #[must_use]
    pub fn remembered(&self) -> usize {
        self.lock().placement.len()
    }

    /// Counts on from so many decisions, as who decides a recording again has to.
    pub fn resume(&self, decisions: u64) {
        self.lock().sequence = decisions;
    }

    /// Takes over what another memory knew of a conversation, unless something is known here: where it was last
    /// served, and the tokens that were believed to be cached there.
    pub fn remember(&self, conversation: u64, endpoint: EndpointId, cached: u64) {
        let placed = Placed { endpoint, held: cached, kept: 1.0, counted: None };
        self.lock().placement.remember(conversation, placed);
    }

    /// Chooses an endpoint for `request` and books the work on it.
    ///
    /// # Errors
    /// No endpoint may be chosen: see [`Refusal`].
    pub fn schedule(
        self: &Arc<Self>,
        request: &InferenceRequest,
        moment: Moment<'_>,
        detail: Detail,
    ) -> Result<(Decision, Booking), Refusal> {
        let decided = self.schedule_within(None, request, moment, detail)?;
        Ok(decided.expect("without a bound every choice is taken"))
    }

    /// The same, unless more work than `most` is before the request where it would go: then nothing is booked.
    ///
    /// # Errors
    /// No endpoint may be chosen: see [`Refusal`].
    pub fn schedule_within(
        self: &Arc<Self>,
        most: Option<Duration>,
        request: &InferenceRequest,
        moment: Moment<'_>,
        detail: Detail,
    ) -> Result<Option<(Decision, Booking)>, Refusal> {
        let Moment { now, seed, evidence, prefix, held } = moment;
        let mut state = self.lock();
        let state = &mut *state;
        let evidence = evidence.about(state.pool.version());
        let conversation =
            request.conversation.as_ref().map(|conversation| state.key_of(conversation));
        let candidates = self.candidates(state, request)?;
        let placed = conversation.and_then(|key| state.placement.find(key));
        let counted = placed.and_then(|placed| placed.counted);
        let estimate = state.estimator.estimate(request.model.as_deref(), &request.prompt, counted);
        let max_tokens =
            request.max_tokens.unwrap_or(self.settings.default_max_tokens).min(MOST_TOKENS);
        let placed = placed
            .and_then(|placed| Some((state.pool.slot_of(placed.endpoint)?, placed)))
            .filter(|(slot, _)| candidates.contains(*slot));
        let cx = Cx {
            pool: &state.pool,
            candidates: &candidates,
            weight: candidates.weight(&state.pool),
            ledger: &state.ledger,
            key: conversation.unwrap_or(seed),
            in_conversation: conversation.is_some(),
            model: request.model.as_deref(),
            prompt_tokens: estimate.tokens,
            max_tokens,
            placed,
            places: conversation.map_or(&[], |key| state.placement.places(key)),
            sequence: state.sequence,
            seed,
            sights: Sights::Now { time: now, conversation, prefix, evidence },
            output: state.output.expected(request.max_tokens),
            hot: state.hot.of(prefix.or(conversation), now),
            scale: state.ledger.pace().scale(),
            detail,
        };
        let mut trace = Trace {
            conversation: request.conversation.as_ref().map(|c| (c.id.clone(), c.source.clone())),
            model: request.model.clone(),
            priority: state.priority_of(request),
            prompt_tokens: estimate.tokens,
            estimate: estimate.ratio,
            max_tokens,
            held,
            ..Trace::default()
        };
        let policy_name = state.policy.0;
        let choice = choose(&*state.policy.1, &cx, &mut trace);
        if most.is_some_and(|most| cx.sight(choice.slot).backlog > most.as_secs_f64()) {
            return Ok(None);
        }
        let targets = targets(&cx, choice.slot, self.settings.destinations);
        // Policies that look at every engine have left what they saw.
        let left = trace.sights.len() == trace.candidates;
        if self.settings.trace_sights && !trace.loads.is_empty() && !left {
            trace.sights = cx.candidates.iter().map(|slot| (slot, cx.sight(slot))).collect();
            (trace.output, trace.hot, trace.scale) = (cx.output, cx.hot, cx.scale);
        }
        let prefill = estimate.tokens.saturating_sub(choice.cached).max(1);
        let flight = flight(&cx, &choice, conversation, prefix);
        let ticket =
            state.ledger.book(choice.slot, Work { prefill, decode: max_tokens }, flight, now);
        state.hot.count(prefix.or(conversation), now);
        state.sequence += 1;
        if choice.reason == Reason::Cold {
            state.ledger.note_cold(choice.slot, state.sequence);
        }
        let endpoint = state.pool.ids()[choice.slot as usize];
        let decision = Decision {
            policy: policy_name,
            reason: choice.reason,
            targets,
            cached: choice.cached,
            pool: Arc::clone(&state.pool),
            trace,
        };
        let subject = Subject {
            conversation,
            endpoint,
            model: request.model.clone(),
            prompt: request.prompt,
            prompt_tokens: estimate.tokens,
            generates: max_tokens > 0,
        };
        Ok(Some((decision, Booking { scheduler: Arc::clone(self), ticket: Some(ticket), subject })))
    }

    /// Returns the endpoints that the subset hint and the limits allow.
    fn candidates(&self, state: &State, request: &InferenceRequest) -> Result<Candidates, Refusal> {
        let all = u32::try_from(state.pool.endpoints().len()).unwrap_or(u32::MAX);
        if let Some(subset) = &request.subset
            && subset.is_empty()
        {
            return Err(Refusal::SubsetEmpty);
        }
        if all == 0 {
            return Err(Refusal::PoolEmpty);
        }
        let candidates = match &request.subset {
            None => Candidates::All(all),
            Some(subset) => {
                let mut slots: Vec<u32> =
                    subset.iter().flat_map(|&address| state.pool.slots_at(address)).collect();
                slots.sort_unstable();
                slots.dedup();
                if slots.is_empty() {
                    return Err(Refusal::SubsetUnmatched(subset.len()));
                }
                Candidates::Some(slots)
            }
        };
        let admission = self.settings.admission;
        let Some(limit) = admission.limit(state.priority_of(request)) else {
            return Ok(candidates);
        };
        let retry_after = admission.retry_after;
        #[expect(clippy::cast_precision_loss, reason = "requests in flight stay far below 2^52")]
        let has_room = |slot: u32| {
            (state.ledger.load(slot).requests as f64) < limit as f64 * state.pool.weight_of(slot)
        };
        let open: Vec<u32> = candidates.iter().filter(|&slot| has_room(slot)).collect();
        if open.is_empty() {
            return Err(Refusal::Saturated { limit, retry_after });
        }
        Ok(if open.len() == candidates.len() { candidates } else { Candidates::Some(open) })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic in a policy must not stop the picker; state is only changed after a policy has returned.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How long answers have lately been.
#[derive(Debug)]
struct Output {
    mean: f64,
    answers: u32,
}

impl Default for Output {
    fn default() -> Self {
        Self { mean: 100.0, answers: 0 }
    }
}

impl Output {
    fn expected(&self, limit: Option<u64>) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "it is bounded")]
        limit.map_or(self.mean, |limit| self.mean.min(limit.min(MOST_TOKENS) as f64))
    }

    fn learn(&mut self, generated: u64) {
        self.answers = self.answers.saturating_add(1);
        #[expect(clippy::cast_precision_loss, reason = "it is bounded")]
        let generated = generated.min(MOST_TOKENS) as f64;
        self.mean += (generated - self.mean) * (1.0 / f64::from(self.answers)).max(0.01);
    }
}

/// How often prompts have lately begun in the same way.
#[derive(Debug)]
struct Hot(LruCache<u64, Decaying>);

impl Default for Hot {
    fn default() -> Self {
        Self(LruCache::new(NonZeroUsize::new(4096).expect("it is not zero")))
    }
}

impl Hot {
    /// Within which a request is lately.
    const TIME: Duration = Duration::from_secs(10);

    fn of(&self, prefix: Option<u64>, now: Duration) -> f64 {
        let counted = prefix.and_then(|prefix| self.0.peek(&prefix));
        counted.map_or(0.0, |counted| counted.at(now, Self::TIME))
    }

    fn count(&mut self, prefix: Option<u64>, now: Duration) {
        if let Some(prefix) = prefix {
            let counted = self.0.get_or_insert_mut(prefix, Decaying::default);
            counted.add(1.0, now, Self::TIME);
        }
    }
}

impl State {
    /// Returns the priority that the request's objective gives it; 0 without one, as upstream.
    fn priority_of(&self, request: &InferenceRequest) -> i32 {
        let objective = request.objective.as_ref();
        objective.and_then(|name| self.objectives.get(name)).copied().unwrap_or(0)
    }

    fn key_of(&mut self, conversation: &Conversation) -> u64 {
        match conversation.source {
            KeySource::PreviousResponse => {
                self.placement.conversation_of(&conversation.id).unwrap_or(conversation.key)
            }
            KeySource::Header(_) | KeySource::Field(_) | KeySource::Opening => conversation.key,
        }
    }
}

/// Says what a request brings to the queue that it was chosen for.
fn flight(cx: &Cx<'_>, choice: &Choice, conversation: Option<u64>, prefix: Option<u64>) -> Flight {
    let (sight, prices) = (cx.sight(choice.slot), cx.ledger.prices());
    #[expect(clippy::cast_precision_loss, reason = "tokens stay far below 2^52")]
    let (prompt, cached) = (cx.prompt_tokens as f64, choice.cached as f64);
    let new = new_tokens(prompt, cached);
    let output = cx.output;
    let seconds = prices.first_token(new, cached, sight.answers, sight.contexts);
    let work = prices.prompt(new, cached) + output * (prices.decode + prices.context * prompt);
    let uncached = (prompt - cached).max(0.0);
    Flight { conversation, prefix, prompt, uncached, output, seconds, work }
}

/// Returns the tokens of a prompt that have to be computed: engines compute at least a block.
pub(super) fn new_tokens(prompt: f64, cached: f64) -> f64 {
    (prompt - cached).max(LEAST_COMPUTED)
}

const LEAST_COMPUTED: f64 = 16.0;

/// Runs `policy`, filling in the parts of the trace that every policy shares.
pub(super) fn choose(policy: &dyn Policy, cx: &Cx<'_>, trace: &mut Trace) -> Choice {
    trace.key = cx.key;
    trace.sequence = cx.sequence;
    trace.seed = cx.seed;
    trace.placed = cx.placed.map(|(slot, placed)| (slot, placed.cached()));
    trace.endpoints = cx.pool.endpoints().len();
    trace.candidates = cx.candidates.len();
    if cx.detail == Detail::Full || trace.candidates <= LOADS_SHOWN {
        trace.loads = cx.candidates.iter().map(|slot| (slot, cx.ledger.load(slot))).collect();
    }
    if cx.in_conversation || !policy.needs_conversation() {
        return policy.choose(cx, trace);
    }
    let slot = cx.least_loaded(Unit::Tokens, |slot| cx.chance(slot));
    trace.steps.push(Step::Least {
        endpoint: slot,
        load: cx.load(slot, Unit::Tokens),
        unit: Unit::Tokens,
    });
    Choice { slot, reason: Reason::NoConversation, cached: 0 }
}

/// Returns the chosen endpoint and then, clockwise on the ring, those to try after it: a conversation fails over to
/// the same endpoint every time.
pub(super) fn targets(cx: &Cx<'_>, chosen: u32, destinations: NonZeroUsize) -> Vec<u32> {
    let mut targets = vec![chosen];
    if destinations.get() > 1 {
        targets.extend(cx.ring_order().filter(|&slot| slot != chosen).take(destinations.get() - 1));
    }
    targets
}

impl Booking {
    /// Tells that the first token of the answer has passed: the prompt is computed.
    pub fn first_token(&mut self, now: Duration) {
        if let Some(ticket) = &mut self.ticket {
            let mut state = self.scheduler.lock();
            state.ledger.first_token(ticket, now);
            if self.scheduler.settings.release == Release::FirstToken {
                state.ledger.prefilled(ticket);
            }
        }
    }

    /// Releases the load and learns from the outcome.
    pub fn finish(mut self, outcome: &Outcome, now: Duration) {
        let mut state = self.scheduler.lock();
        let state = &mut *state;
        let subject = &self.subject;
        if let Some(conversation) = subject.conversation
            && subject.teaches(outcome)
        {
            let served = outcome.served.and_then(|address| state.pool.slot_at(address));
            let endpoint = served.map_or(subject.endpoint, |slot| state.pool.ids()[slot as usize]);
            let prompt = (subject.prompt, subject.prompt_tokens);
            state.placement.learn(conversation, endpoint, prompt, outcome);
        }
        if outcome.succeeded()
            && let Some(counted) = outcome.usage.prompt_tokens
        {
            state.estimator.learn(subject.model.as_deref(), &subject.prompt, counted);
        }
        let generated = outcome.usage.completion_tokens.filter(|_| outcome.succeeded());
        if let Some(generated) = generated {
            state.output.learn(generated);
        }
        if let Some(ticket) = self.ticket.take() {
            state.ledger.release(ticket, Some(now), generated);
        }
    }
}

impl Subject {
    /// Tells whether the conversation's prompt was computed: a listing of models with the same session header is no turn.
    fn teaches(&self, outcome: &Outcome) -> bool {
        let read = self.prompt.messages + self.prompt.token_ids > 0;
        self.generates && (read || outcome.usage.prompt_tokens.is_some())
    }
}

impl Drop for Booking {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            self.scheduler.lock().ledger.release(ticket, None, None);
        }
    }
}
