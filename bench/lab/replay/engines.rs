//! What goes on at the engines, then and now: two pictures of the same kind, one made of the recorded decisions and
//! one of those anew. What differs between them is what a different decision is estimated to change.

use std::collections::BTreeMap;
use std::time::Duration;

use llm_ring::pool::{EndpointId, EngineQueue, Flight, Pace, Place, Prices, Sight};
use serde::Serialize;

use crate::metrics::{quantile, sorted};

/// Engines compute at least a block of a prompt.
const LEAST_COMPUTED: f64 = 16.0;
/// Fewer samples than this say nothing of one endpoint, and the pool's are taken.
const ENOUGH: usize = 5;

/// One picture: what waits at each engine, what is being written, and what of each conversation is cached where.
#[derive(Debug, Default)]
pub(crate) struct Engines {
    queues: BTreeMap<EndpointId, EngineQueue>,
    held: BTreeMap<(EndpointId, u64), Held>,
    places: BTreeMap<usize, (EndpointId, Place)>,
    prices: Prices,
    /// Queues learn a pace too, which nobody asks for here.
    pace: Pace,
}

/// What a request left in a cache.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Held {
    pub(crate) tokens: u64,
    /// The request, and whether its answer is in it.
    pub(crate) by: usize,
    pub(crate) whole: bool,
}

/// A request at an engine.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Task {
    pub(crate) conversation: Option<u64>,
    pub(crate) prompt: u64,
    pub(crate) cached: u64,
    pub(crate) output: u64,
}

/// How an engine looked when a request came.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct View {
    /// Requests before it that had no first token yet.
    pub(crate) waiting: usize,
    /// Answers that were being written.
    pub(crate) answers: u32,
    /// Seconds to its first token, by the prices at the pace of the engine: its own part, and that of those before.
    pub(crate) own: f64,
    pub(crate) queue: f64,
    /// Seconds that a token of its answer takes, by the prices.
    pub(crate) step: f64,
    /// The same as `own` at the price, on an idle engine.
    pub(crate) idle: f64,
    #[serde(skip)]
    seconds: f64,
}

impl View {
    /// Returns how a picker saw an engine, for a prompt of which so much is cached there.
    pub(crate) fn seen(sight: &Sight, prompt: u64) -> Self {
        let prices = Prices::default();
        let new = (float(prompt) - sight.cached).max(LEAST_COMPUTED);
        let first_token =
            |answers, contexts| prices.first_token(new, sight.cached, answers, contexts);
        let seconds = first_token(sight.answers, sight.contexts);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "they were made of counts"
        )]
        let (waiting, answers) = (sight.waiting as usize, sight.answers as u32);
        Self {
            waiting,
            answers,
            own: seconds * sight.prompt_pace,
            queue: sight.backlog,
            step: prices.step(sight.answers + 1.0, sight.contexts + float(prompt)),
            idle: first_token(0.0, 0.0) * sight.prompt_pace,
            seconds,
        }
    }

    /// Seconds to the first token.
    pub(crate) fn first_token(&self) -> f64 {
        self.queue + self.own
    }
}

#[expect(clippy::cast_precision_loss, reason = "tokens stay far below 2^52")]
fn float(tokens: u64) -> f64 {
    tokens as f64
}

impl Task {
    fn computed(&self) -> f64 {
        (float(self.prompt) - float(self.cached)).max(LEAST_COMPUTED)
    }
}

impl Engines {
    /// Returns what is held of a conversation.
    pub(crate) fn held(&self, at: EndpointId, conversation: Option<u64>) -> Option<Held> {
        self.held.get(&(at, conversation?)).copied()
    }

    /// Notes what is cached where; a conversation's last request counts.
    pub(crate) fn hold(&mut self, at: EndpointId, conversation: Option<u64>, held: Held) {
        if let Some(conversation) = conversation {
            self.held.insert((at, conversation), held);
        }
    }

    /// Looks at an engine before a request goes there.
    pub(crate) fn look(
        &self,
        at: EndpointId,
        now: Duration,
        task: &Task,
        (pace, behind): (f64, f64),
    ) -> View {
        let nothing = EngineQueue::default();
        let queue = self.queues.get(&at).unwrap_or(&nothing);
        let (answers, contexts) = (f64::from(queue.answers()), queue.contexts());
        let (new, cached) = (task.computed(), float(task.cached));
        let seconds = self.prices.first_token(new, cached, answers, contexts);
        View {
            waiting: queue.waiting(),
            answers: queue.answers(),
            own: seconds * pace,
            queue: queue.backlog(now, pace) * behind,
            step: self.prices.step(answers + 1.0, contexts + float(task.prompt)),
            idle: self.prices.first_token(new, cached, 0.0, 0.0) * pace,
            seconds,
        }
    }

    /// A request goes to an engine.
    pub(crate) fn dispatch(
        &mut self,
        request: usize,
        at: EndpointId,
        now: Duration,
        (task, view): (&Task, &View),
    ) {
        let prompt = float(task.prompt);
        let flight = Flight {
            conversation: task.conversation,
            prefix: None,
            prompt,
            uncached: float(task.prompt.saturating_sub(task.cached)),
            output: float(task.output),
            seconds: view.seconds,
            work: view.seconds,
        };
        let place = self.queues.entry(at).or_default().dispatch(flight, now);
        self.places.insert(request, (at, place));
    }

    /// Its first token comes.
    pub(crate) fn first_token(&mut self, request: usize, now: Duration) {
        if let Some((at, place)) = self.places.get_mut(&request) {
            let queue = self.queues.entry(*at).or_default();
            let step = self.prices.step(f64::from(queue.answers() + 1), queue.contexts());
            queue.first_token(place, step, now, &mut self.pace);
        }
    }

    /// It ends.
    pub(crate) fn end(&mut self, request: usize, now: Duration) {
        if let Some((at, place)) = self.places.remove(&request) {
            self.queues.entry(at).or_default().end(place, None, Some(now), &mut self.pace);
        }
    }
}

/// What a recording tells of engines: how their pace is to the prices, and how well they keep what they have computed.
#[derive(Debug, Default)]
pub(crate) struct Fitted {
    prompt: Paces,
    answer: Paces,
    /// How much of the prompts before it a request waits for: engines that compute several at once make it less than 1.
    waits: Vec<f64>,
    behind: Option<f64>,
    /// Tokens found again of those that a conversation had left, and those it had left.
    found: (u64, u64),
    /// Tokens that engines had of prompts whose conversation they had not served, by model.
    others: BTreeMap<String, Vec<u64>>,
    first_visits: BTreeMap<String, u64>,
}

/// Factors on the prices.
#[derive(Debug, Default)]
struct Paces {
    samples: BTreeMap<EndpointId, Vec<f64>>,
    of: BTreeMap<EndpointId, f64>,
    pool: Option<f64>,
}

impl Paces {
    fn learn(&mut self, at: EndpointId, factor: f64) {
        if factor.is_finite() && factor > 0.0 {
            self.samples.entry(at).or_default().push(factor);
        }
    }

    fn fit(&mut self) {
        let median = |samples: &[f64]| quantile(&sorted(samples.iter().copied()), 0.5);
        let all: Vec<f64> = self.samples.values().flatten().copied().collect();
        self.pool = median(&all);
        self.of = self
            .samples
            .iter()
            .filter(|(_, samples)| samples.len() >= ENOUGH)
            .filter_map(|(&at, samples)| Some((at, median(samples)?)))
            .collect();
    }

    fn at(&self, at: EndpointId) -> f64 {
        self.of.get(&at).copied().or(self.pool).unwrap_or(1.0)
    }
}

impl Fitted {
    /// Learns from a request's first token, `seconds` after it came to an engine that looked so at pace 1.
    pub(crate) fn first_token(&mut self, at: EndpointId, view: &View, seconds: f64) {
        // Who found nobody waiting shows what its own prompt takes.
        if view.waiting == 0 {
            self.prompt.learn(at, seconds / view.own);
        }
    }

    /// Learns from the same how long a request waits behind others, once the pace is known.
    pub(crate) fn waited(&mut self, view: &View, seconds: f64) {
        if view.waiting > 0 && view.queue > 0.0 {
            self.waits.push(((seconds - view.own) / view.queue).clamp(0.0, 2.0));
        }
    }

    /// Makes a factor of how long requests waited.
    pub(crate) fn fit_waits(&mut self) {
        let waits = sorted(std::mem::take(&mut self.waits).into_iter());
        self.behind = (waits.len() >= ENOUGH).then(|| quantile(&waits, 0.5)).flatten();
    }

    /// Learns from an answer of so many tokens, which took so long from its first one on.
    pub(crate) fn answer(&mut self, at: EndpointId, view: &View, (seconds, tokens): (f64, u64)) {
        if tokens >= 8 {
            self.answer.learn(at, seconds / float(tokens - 1) / view.step);
        }
    }

    /// Learns from what an engine found in its cache, where it held so much of the conversation.
    pub(crate) fn cached(&mut self, held: Option<Held>, model: &str, task: &Task) {
        match held {
            Some(held) => {
                let most = held.tokens.min(task.prompt);
                self.found.0 += task.cached.min(most);
                self.found.1 += most;
            }
            None => self.others.entry(model.to_owned()).or_default().push(task.cached),
        }
    }

    /// Makes factors and medians of what was learned.
    pub(crate) fn fit(&mut self) {
        self.prompt.fit();
        self.answer.fit();
        for (model, mut cached) in std::mem::take(&mut self.others) {
            cached.sort_unstable();
            let median = cached.get(cached.len() / 2).copied().unwrap_or(0);
            self.first_visits.insert(model, median);
        }
    }

    /// Returns how many times the price a prompt takes at an engine, and how much of those before it one waits for.
    pub(crate) fn pace(&self, at: EndpointId) -> (f64, f64) {
        (self.prompt.at(at), self.behind.unwrap_or(1.0))
    }

    /// Returns the second of them, if enough requests told it.
    pub(crate) fn behind(&self) -> Option<f64> {
        self.behind
    }

    /// Returns how many times the price a step of an answer takes.
    pub(crate) fn answer_pace(&self, at: EndpointId) -> f64 {
        self.answer.at(at)
    }

    /// Returns the pace of the pool as a whole, if any request told it.
    pub(crate) fn pool_pace(&self) -> Option<f64> {
        self.prompt.pool
    }

    /// Returns the share of what a conversation left in a cache that is found again, if any request told it.
    pub(crate) fn kept(&self) -> Option<f64> {
        (self.found.1 > 0).then(|| float(self.found.0) / float(self.found.1))
    }

    /// Returns the tokens that an engine will probably find of a prompt.
    pub(crate) fn expected(&self, held: Option<Held>, model: &str, prompt: u64) -> u64 {
        match held {
            Some(held) => {
                let kept = float(held.tokens.min(prompt)) * self.kept().unwrap_or(1.0);
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "a share of a token count"
                )]
                let kept = kept.round() as u64;
                kept
            }
            None => self.first_visits.get(model).copied().unwrap_or(0).min(prompt),
        }
    }
}
