//! The decision: which endpoint gets a request, and why.

pub mod decision;
pub mod filter;
pub mod hold;
pub mod picker;
pub mod policy;
pub mod registry;
pub mod scenario;
pub mod scheduler;
pub mod scorer;
#[cfg(test)]
mod tests;

use std::time::Duration;

use crate::pool::{Adapters, LoadLedger, Placed, PoolSnapshot, Said, Sight};

pub use decision::{Decision, Reason, Refusal, Score, Step, Terms, Trace, Unit};
pub use hold::{Decided, Hold, HoldSettings};
pub use registry::{ALIASES, POLICIES, Policies, named};
pub use scenario::Scenario;
pub use scheduler::{Admission, Booking, Detail, Scheduler, Settings};

/// All that a policy may look at. Equal input gives an equal choice: in production, the lab, a fuzzer and a test.
#[derive(Debug)]
pub struct Cx<'a> {
    /// The endpoints.
    pub pool: &'a PoolSnapshot,
    /// Those that may be chosen; never empty.
    pub candidates: &'a Candidates,
    /// The sum of their weights.
    pub weight: f64,
    /// What is booked on them.
    pub ledger: &'a LoadLedger,
    /// Place of the conversation on the ring; of a request without one, a value drawn for it.
    pub key: u64,
    /// Whether it belongs to a conversation.
    pub in_conversation: bool,
    /// The model asked for, which may be an adapter.
    pub model: Option<&'a str>,
    /// Tokens of the prompt, estimated.
    pub prompt_tokens: u64,
    /// Tokens that may be generated.
    pub max_tokens: u64,
    /// Where the conversation was last served, if that endpoint may be chosen.
    pub placed: Option<(u32, Placed)>,
    /// All places where it was served, as far as they are remembered.
    pub places: &'a [Placed],
    /// Counts the decisions since the start.
    pub sequence: u64,
    /// A value drawn for this decision: the only chance there is.
    pub seed: u64,
    /// What is seen of the engines.
    pub sights: Sights<'a>,
    /// Tokens that the answer is expected to have: what answers lately had, within the request's own limit.
    pub output: f64,
    /// Requests of lately that begin as this one does, fading within seconds.
    pub hot: f64,
    /// How many times the price work takes in the pool.
    pub scale: f64,
    /// How much to write into the trace.
    pub detail: Detail,
}

/// What is seen of the engines, by slot.
#[derive(Debug, Clone, Copy)]
pub enum Sights<'a> {
    /// As it is now, with what better evidence than our own there is.
    Now {
        /// Since the picker's start.
        time: Duration,
        /// The conversation's place on the ring, if the request belongs to one.
        conversation: Option<u64>,
        /// What begins as this prompt does.
        prefix: Option<u64>,
        /// What the engines say.
        evidence: Evidence<'a>,
    },
    /// As it was recorded.
    Recorded(&'a [Sight]),
}

/// What engines say of themselves, by slot of one pool: a list is empty where nobody says it, and an entry
/// `None` where that engine does not. What is not said is unknown and must never look like the best or the worst.
#[derive(Debug, Clone, Copy, Default)]
pub struct Evidence<'a> {
    /// The version of the pool whose slots these are; of any other it says nothing. `None` is the pool in use.
    pub version: Option<u64>,
    /// Tokens of the prompt in the cache.
    pub cached: &'a [Option<u64>],
    /// The same when the prompts that are under way there have been computed; not below `cached`.
    pub coming: &'a [Option<u64>],
    /// Share of the KV memory in use.
    pub memory: &'a [Option<f64>],
    /// Requests that wait there.
    pub waiting: &'a [Option<u64>],
    /// Requests that run there.
    pub running: &'a [Option<u64>],
    /// LoRA adapters there.
    pub adapters: &'a [Option<Adapters>],
    /// What is likely to be in the cache, by what was sent there: no more than a guess, as our own memory of
    /// conversations is, and of the two the greater counts. An engine's own word goes before both.
    pub guessed: &'a [Guess],
}

/// Shares of a prompt, 0 to 1, that are likely to be in a cache.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Guess {
    /// Now.
    pub held: f64,
    /// When the prompts that are under way there have been computed.
    pub coming: f64,
}

/// When and with which chance a decision is made, and on what evidence.
#[derive(Debug, Clone, Copy, Default)]
pub struct Moment<'a> {
    /// Since the picker's start.
    pub now: Duration,
    /// The only chance in the decision.
    pub seed: u64,
    /// What engines say of themselves.
    pub evidence: Evidence<'a>,
    /// What begins as this prompt does: requests with the same value share a prefix.
    pub prefix: Option<u64>,
    /// How long the request has been held back.
    pub held: Duration,
}

/// The endpoints that may be chosen, as slots of the snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Candidates {
    /// Every endpoint of the pool; the number of them.
    All(u32),
    /// Some of them, ascending.
    Some(Vec<u32>),
}

/// A policy's answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// The endpoint, one of the candidates.
    pub slot: u32,
    /// Why, in a word.
    pub reason: Reason,
    /// Prompt tokens that the policy believes to be cached there; they are not booked as work.
    pub cached: u64,
}

/// One way to choose an endpoint. It does no I/O, reads no clock, draws no randomness and keeps no state.
pub trait Policy: std::fmt::Debug + Send + Sync {
    /// Chooses one of `cx.candidates`, writing each number and step that mattered into `trace`.
    fn choose(&self, cx: &Cx<'_>, trace: &mut Trace) -> Choice;

    /// Tells whether the choice depends on the conversation; if so, a request without one goes by load.
    fn needs_conversation(&self) -> bool {
        true
    }

    /// Tells whether the choice depends on engines' load and memory as they say; if not, nobody has to collect that.
    fn asks_engines(&self) -> bool {
        false
    }
}

impl Candidates {
    /// Adds up their weights.
    #[must_use]
    pub fn weight(&self, pool: &PoolSnapshot) -> f64 {
        match self {
            Self::All(_) => pool.weight(),
            Self::Some(slots) => slots.iter().map(|&slot| pool.weight_of(slot)).sum(),
        }
    }

    /// Counts them.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::All(n) => *n as usize,
            Self::Some(slots) => slots.len(),
        }
    }

    /// Tells whether nothing may be chosen.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Tells whether `slot` may be chosen.
    #[must_use]
    pub fn contains(&self, slot: u32) -> bool {
        match self {
            Self::All(n) => slot < *n,
            Self::Some(slots) => slots.binary_search(&slot).is_ok(),
        }
    }

    /// Returns the `i`th candidate, in slot order.
    ///
    /// # Panics
    /// `i` is not below [`Self::len`].
    #[must_use]
    pub fn nth(&self, i: usize) -> u32 {
        match self {
            Self::All(n) => {
                assert!(i < *n as usize, "candidate {i} of {n}");
                u32::try_from(i).expect("below a u32")
            }
            Self::Some(slots) => slots[i],
        }
    }

    /// Yields them in slot order.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        let (all, some) = match self {
            Self::All(n) => (*n, [].as_slice()),
            Self::Some(slots) => (0, slots.as_slice()),
        };
        (0..all).chain(some.iter().copied())
    }
}

impl Evidence<'_> {
    /// Returns it if it is about this version of the pool, and else none at all: slots of another version are other
    /// endpoints. That happens to a request that is decided just when the pool changes.
    pub(crate) fn about(self, version: u64) -> Self {
        if self.version.is_none_or(|of| of == version) { self } else { Self::default() }
    }

    /// Returns what the engine in a slot says, with the adapter of `model`.
    fn of(&self, at: usize, model: Option<&str>) -> Said {
        fn entry<T: Clone>(list: &[Option<T>], at: usize) -> Option<T> {
            list.get(at).cloned().flatten()
        }
        #[expect(clippy::cast_precision_loss, reason = "tokens and requests stay far below 2^52")]
        let number = |list: &[Option<u64>]| entry(list, at).map(|number| number as f64);
        Said {
            cached: number(self.cached),
            waiting: number(self.waiting),
            running: number(self.running),
            memory: entry(self.memory, at).filter(|share| share.is_finite()),
            adapter: self.adapters.get(at).and_then(Option::as_ref).map(|it| it.state_of(model)),
        }
    }
}

impl Cx<'_> {
    /// Returns what is seen of the engine in `slot`.
    #[must_use]
    pub fn sight(&self, slot: u32) -> Sight {
        let at = slot as usize;
        let (time, conversation, prefix, evidence) = match self.sights {
            Sights::Recorded(sights) => {
                let seen = sights.get(at).copied().unwrap_or_default();
                #[expect(clippy::cast_precision_loss, reason = "tokens stay far below 2^52")]
                let prompt = self.prompt_tokens as f64;
                let (held, cached) = (seen.held.min(prompt), seen.cached.min(prompt));
                return Sight { held, cached, ..seen };
            }
            Sights::Now { time, conversation, prefix, evidence } => {
                (time, conversation, prefix, evidence)
            }
        };
        let mut sight = self.ledger.sight(slot, time);
        let said = evidence.of(at, self.model);
        #[expect(clippy::cast_precision_loss, reason = "tokens and requests stay far below 2^52")]
        {
            let prompt = self.prompt_tokens as f64;
            let placed = self.places.iter().find(|it| it.endpoint == self.pool.ids()[at]);
            let remembered = placed.map_or(0, Placed::cached) as f64;
            let guess = evidence.guessed.get(at).copied().unwrap_or_default();
            sight.held = said.cached.unwrap_or(remembered.max(guess.held * prompt)).min(prompt);
            // What waits there is computed before this request is.
            let coming = match evidence.coming.get(at) {
                Some(&Some(tokens)) => tokens as f64,
                Some(None) | None => {
                    let queued = self.ledger.queue(slot).coming(conversation, prefix, prompt);
                    queued.max(guess.coming * prompt)
                }
            };
            sight.cached = sight.held.max(coming).min(prompt);
        }
        sight.stuck = said.waiting.unwrap_or(0.0);
        sight.memory = said.memory.unwrap_or(sight.memory);
        sight.said = said;
        sight
    }

    /// Returns the load of an endpoint in `unit`.
    #[must_use]
    pub fn load(&self, slot: u32, unit: Unit) -> u64 {
        unit.of(self.ledger.load(slot))
    }

    /// Returns the load of an endpoint over its weight.
    #[must_use]
    pub fn relative_load(&self, slot: u32, unit: Unit) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "loads stay far below 2^52 tokens")]
        let load = self.load(slot, unit) as f64;
        load / self.pool.weight_of(slot)
    }

    /// Returns the load of all candidates in `unit`.
    #[must_use]
    pub fn total(&self, unit: Unit) -> u64 {
        match self.candidates {
            Candidates::All(_) => unit.of(self.ledger.total()),
            Candidates::Some(slots) => slots.iter().map(|&slot| self.load(slot, unit)).sum(),
        }
    }

    /// Returns the weight of an endpoint over the average weight of the candidates: 1 where all weigh the same.
    #[must_use]
    pub fn relative_weight(&self, slot: u32) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "a pool has far fewer than 2^52 endpoints")]
        let n = self.candidates.len() as f64;
        self.pool.weight_of(slot) * n / self.weight
    }

    /// Yields the candidates clockwise from the conversation's place on the ring: its home first.
    pub fn ring_order(&self) -> impl Iterator<Item = u32> + '_ {
        self.pool.ring().walk(self.key).filter(|&slot| self.candidates.contains(slot))
    }

    /// Returns the home of the conversation: the first candidate on the ring.
    ///
    /// # Panics
    /// There are no candidates, which no policy is ever called with.
    #[must_use]
    pub fn home(&self) -> u32 {
        self.ring_order().next().expect("a policy is called with at least one candidate")
    }

    /// Returns the candidate with the least load for its weight; equal ones are told apart by `tie`.
    ///
    /// # Panics
    /// There are no candidates, which no policy is ever called with.
    #[must_use]
    pub fn least_loaded(&self, unit: Unit, tie: impl Fn(u32) -> u64) -> u32 {
        let level = self
            .candidates
            .iter()
            .map(|slot| self.relative_load(slot, unit))
            .fold(f64::INFINITY, f64::min);
        let as_light =
            self.candidates.iter().filter(|&slot| self.relative_load(slot, unit) <= level);
        as_light
            .min_by_key(|&slot| tie(slot))
            .expect("a policy is called with at least one candidate")
    }

    /// Breaks ties by chance, but never by position: the seed mixed with the endpoint's own hash.
    #[must_use]
    pub fn chance(&self, slot: u32) -> u64 {
        crate::index::hash::mix(self.seed, self.pool.ids()[slot as usize].hash())
    }
}
