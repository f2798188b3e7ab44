//! A decision as a value that explains itself: numbers and steps, no prose, no HTTP.

use std::sync::Arc;
use std::time::Duration;

use crate::pool::{KeySource, Load, PoolSnapshot, Sight};

/// Where a request goes, and why.
#[derive(Debug, Clone)]
pub struct Decision {
    /// Name of the policy that chose.
    pub policy: &'static str,
    /// Why, in a word.
    pub reason: Reason,
    /// Slots of the endpoints, the chosen one first, then those to try if it cannot be reached.
    pub targets: Vec<u32>,
    /// Prompt tokens believed to be cached at the chosen endpoint.
    pub cached: u64,
    /// The endpoints that the slots are of.
    pub pool: Arc<PoolSnapshot>,
    /// What led to it.
    pub trace: Trace,
}

/// Why an endpoint was chosen. The words for `bounded` and `llm-aware` are those of the first llm-ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Reason {
    /// The conversation's own place.
    Home,
    /// The same, over the normal cap: a long cached conversation tolerates more load.
    HomeLong,
    /// Where it was last served, which is not its home.
    Sticky,
    /// The same, over the normal cap.
    StickyLong,
    /// The preferred endpoint was over its cap; the next one that has room.
    Overflow,
    /// Every endpoint was over its cap; the least loaded.
    FallbackLeastLoaded,
    /// The least loaded, which is the policy.
    LeastLoaded,
    /// The request belongs to no conversation, so the least loaded.
    NoConversation,
    /// Where the request costs least, which is the policy.
    LowestCost,
    /// The next in turn.
    Turn,
    /// Drawn by chance.
    Random,
    /// Where the weighted scores are best, which is the policy.
    BestScore,
    /// Where most of the prompt is cached.
    Cached,
    /// Nothing of the prompt is known to be cached on any candidate. The scheduler notes who took such a prompt last.
    Cold,
}

/// What load is counted in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Unit {
    /// Requests in flight.
    Requests,
    /// Tokens of work in flight.
    Tokens,
}

/// What led to a decision, in order.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Trace {
    /// Conversation's identity and where it was found.
    pub conversation: Option<(String, KeySource)>,
    /// The model asked for.
    pub model: Option<String>,
    /// Its objective's priority; below 0 it is shed first.
    pub priority: i32,
    /// Tokens of the prompt, estimated or counted.
    pub prompt_tokens: u64,
    /// Tokens a byte used for the estimate, and the answers it was learned from; `None` of an exact count.
    pub estimate: Option<(f64, u32)>,
    /// Tokens that may be generated.
    pub max_tokens: u64,
    /// Endpoints in the pool.
    pub endpoints: usize,
    /// Those that could be chosen.
    pub candidates: usize,
    /// The conversation's place on the ring.
    pub key: u64,
    /// Decisions before this one.
    pub sequence: u64,
    /// The value drawn for it.
    pub seed: u64,
    /// Where the conversation was last served, and the tokens believed to be cached there.
    pub placed: Option<(u32, u64)>,
    /// Load of each candidate before this request, in slot order; empty in a large pool unless asked for.
    pub loads: Vec<(u32, Load)>,
    /// What the policy saw of the candidates' engines, where it looks at them and `loads` are there too.
    pub sights: Vec<(u32, Sight)>,
    /// Tokens that the answer was expected to have, where the policy looks at it.
    pub output: f64,
    /// Requests of lately that begin as this one does, where the policy looks at it.
    pub hot: f64,
    /// How many times the price work took in the pool, where the policy looks at it.
    pub scale: f64,
    /// How long the request was held back before.
    pub held: Duration,
    /// What the policy did.
    pub steps: Vec<Step>,
}

/// One step of a policy.
#[derive(Debug, Clone, PartialEq)]
pub enum Step {
    /// Placement memory knows the conversation.
    Remembered {
        /// Where it was last served.
        endpoint: u32,
        /// Tokens believed to be cached there.
        cached: u64,
        /// Whether that is also its home.
        home: bool,
    },
    /// Placement memory does not know it, or the endpoint it knows cannot be chosen.
    NotRemembered,
    /// Placement memory is switched off.
    MemoryOff,
    /// What the request costs on its preferred endpoint.
    Cost {
        /// The endpoint.
        endpoint: u32,
        /// Prompt tokens to compute there.
        new_tokens: u64,
        /// Tokens to generate.
        max_tokens: u64,
        /// What is booked, in the policy's unit.
        cost: u64,
        /// The unit.
        unit: Unit,
    },
    /// What the request costs wherever nothing of it is cached.
    CostElsewhere {
        /// Tokens to compute.
        new_tokens: u64,
        /// Tokens to generate.
        max_tokens: u64,
        /// What would be booked, in the policy's unit.
        cost: u64,
        /// The unit.
        unit: Unit,
    },
    /// What an endpoint of average weight may carry, this request included.
    Capacity {
        /// Load of all candidates with this request.
        total: u64,
        /// The same for each candidate.
        average: f64,
        /// Slack over the average.
        epsilon: f64,
        /// Average × (1 + ε), at least the floor; rounded up when requests are counted.
        cap: f64,
        /// What an endpoint may always carry, where that is the cap.
        floor: Option<u64>,
        /// The unit.
        unit: Unit,
    },
    /// A long cached conversation may stay up to a higher cap.
    LongApplies {
        /// Slack over the average for long conversations.
        long_epsilon: f64,
        /// Average × (1 + long ε), at least the floor.
        cap: f64,
        /// Whether the cap is the floor.
        floor: bool,
    },
    /// It may not, since the prompt is shorter than the threshold.
    LongTooShort {
        /// Tokens of the prompt.
        prompt_tokens: u64,
        /// Tokens from which a prompt is long.
        threshold: u64,
    },
    /// It may not, since nothing is known to be cached.
    LongNotCached,
    /// Long stickiness is switched off.
    LongOff,
    /// An endpoint was tested against its cap.
    Tested {
        /// The endpoint.
        endpoint: u32,
        /// Its load.
        load: u64,
        /// What the request would add.
        cost: u64,
        /// What it may carry.
        cap: f64,
        /// Its weight over the average weight, which is in the cap.
        weight: f64,
        /// The outcome.
        verdict: Verdict,
    },
    /// No endpoint had room, so the least loaded takes it.
    AllOver {
        /// The endpoint.
        endpoint: u32,
        /// Its load.
        load: u64,
    },
    /// The least loaded of all candidates.
    Least {
        /// The endpoint.
        endpoint: u32,
        /// Its load.
        load: u64,
        /// The unit.
        unit: Unit,
    },
    /// What the request costs on an endpoint.
    Costs {
        /// The endpoint.
        endpoint: u32,
        /// Tokens of its prompt that are cached there.
        cached: u64,
        /// The parts.
        terms: Terms,
    },
    /// What the engine says of its cache, which goes before what is remembered.
    Told {
        /// The endpoint.
        endpoint: u32,
        /// Tokens of the prompt cached there.
        cached: u64,
    },
    /// What an endpoint scores.
    Scores {
        /// The endpoint.
        endpoint: u32,
        /// Tokens of its prompt that are cached there.
        cached: u64,
        /// The parts, in the order in which they are summed.
        parts: Vec<Score>,
    },
    /// A filter kept to endpoints that have most of the prompt, or did not.
    Affinity {
        /// Endpoints that have it.
        sticky: usize,
        /// All that it was asked about.
        of: usize,
        /// Share of the prompt that they have at least.
        threshold: f64,
        /// By how many seconds the least busy of them is behind the least busy of the others, if that was asked.
        behind: Option<f64>,
        /// What was made of it.
        gate: Gate,
    },
    /// Where most of the prompt is cached, and whether it is enough.
    Longest {
        /// The endpoint.
        endpoint: u32,
        /// Tokens cached there.
        cached: u64,
        /// Tokens that have to be.
        needed: u64,
    },
    /// Endpoints that have the longest prefix.
    Holders {
        /// Tokens of that prefix.
        cached: u64,
        /// How many have it.
        endpoints: usize,
    },
    /// The first candidate on the ring.
    Ring {
        /// The endpoint.
        endpoint: u32,
    },
    /// The best candidates by rendezvous hash, best first.
    Ranked {
        /// The endpoints.
        endpoints: Vec<u32>,
    },
    /// A number taken modulo the number of candidates.
    Modulo {
        /// What was taken: a count of decisions, a drawn number, or the conversation's key.
        of: u64,
        /// Candidates.
        n: u64,
        /// The endpoint at the remainder.
        endpoint: u32,
    },
}

/// The parts of a cost, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Terms {
    /// Until the engine begins with it.
    pub queue: f64,
    /// From there to its first token.
    pub prompt: f64,
    /// What its uncached work takes from others.
    pub others: f64,
    /// What its answer costs and takes from others.
    pub answer: f64,
    /// What would come of giving one endpoint more than its part in the long run.
    pub balance: f64,
    /// Until there is memory and a place for it.
    pub admission: f64,
}

impl Terms {
    /// Adds them up.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.named().iter().map(|(_, seconds)| seconds).sum()
    }

    /// Returns them with their names.
    #[must_use]
    pub fn named(&self) -> [(&'static str, f64); 6] {
        [
            ("queue", self.queue),
            ("prompt", self.prompt),
            ("others", self.others),
            ("answer", self.answer),
            ("balance", self.balance),
            ("admission", self.admission),
        ]
    }
}

/// One part of a weighted sum.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Score {
    /// What is scored.
    pub name: &'static str,
    /// What it counts; below 0 it is taken off.
    pub weight: f64,
    /// The score.
    pub score: f64,
}

impl Score {
    /// Adds parts up.
    #[must_use]
    pub fn total(parts: &[Self]) -> f64 {
        parts.iter().map(|part| part.weight * part.score).sum()
    }
}

/// What a filter by affinity made of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gate {
    /// Nobody has most of the prompt, so all are kept.
    NobodyHasIt,
    /// Only those that have it are kept.
    Closed,
    /// They are too far behind, so all are kept.
    Open,
    /// All are kept to explore.
    Explores,
}

/// Outcome of a test against a cap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It takes the request.
    Fits,
    /// It takes the request, because it has no other work.
    Idle,
    /// It is full.
    Over,
}

/// Why a request gets no endpoint.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// No endpoint is ready.
    #[error("the pool has no ready endpoint")]
    PoolEmpty,
    /// The gateway's subset hint allows none.
    #[error("the gateway's subset hint is empty")]
    SubsetEmpty,
    /// The gateway's subset hint names no endpoint of the pool.
    #[error("none of the {0} endpoints in the gateway's subset hint is in the pool")]
    SubsetUnmatched(usize),
    /// Every endpoint has as many requests as it may have.
    #[error("every endpoint has its limit of {limit} requests in flight for each unit of weight")]
    Saturated {
        /// Requests for each unit of weight.
        limit: u64,
        /// When to try again.
        retry_after: Duration,
    },
    /// Too many requests are held back already.
    #[error("every endpoint it could go to is busy, and {most} requests wait already")]
    QueueFull {
        /// Requests that may wait.
        most: usize,
        /// When to try again.
        retry_after: Duration,
    },
}

impl Reason {
    /// Every reason.
    pub const ALL: [Self; 14] = [
        Self::Home,
        Self::HomeLong,
        Self::Sticky,
        Self::StickyLong,
        Self::Overflow,
        Self::FallbackLeastLoaded,
        Self::LeastLoaded,
        Self::NoConversation,
        Self::LowestCost,
        Self::Turn,
        Self::Random,
        Self::BestScore,
        Self::Cached,
        Self::Cold,
    ];

    /// Returns the word.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Home => "home",
            Self::HomeLong => "home-long",
            Self::Sticky => "sticky",
            Self::StickyLong => "sticky-long",
            Self::Overflow => "overflow",
            Self::FallbackLeastLoaded => "fallback-least-loaded",
            Self::LeastLoaded => "least-loaded",
            Self::NoConversation => "no-conversation",
            Self::LowestCost => "lowest-cost",
            Self::Turn => "turn",
            Self::Random => "random",
            Self::BestScore => "best-score",
            Self::Cached => "cached",
            Self::Cold => "cold",
        }
    }
}

impl Refusal {
    /// Returns the refusal's kind in a word, for labels.
    #[must_use]
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::PoolEmpty => "pool-empty",
            Self::SubsetEmpty => "subset-empty",
            Self::SubsetUnmatched(_) => "subset-unmatched",
            Self::Saturated { .. } => "saturated",
            Self::QueueFull { .. } => "queue-full",
        }
    }
}

impl Unit {
    /// Returns that part of a load.
    #[must_use]
    pub fn of(self, load: Load) -> u64 {
        match self {
            Self::Requests => load.requests,
            Self::Tokens => load.tokens,
        }
    }

    /// Returns the unit's name.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Requests => "requests",
            Self::Tokens => "tokens",
        }
    }
}

impl Decision {
    /// Returns the slot of the chosen endpoint.
    ///
    /// # Panics
    /// A decision without targets, which the scheduler never makes.
    #[must_use]
    pub fn target(&self) -> u32 {
        *self.targets.first().expect("a decision has at least one target")
    }
}
