//! What a run leaves behind: a row for each request, and what the engines did. Reports read nothing else.

use serde::{Deserialize, Serialize};

/// One request, as it went.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Row {
    /// Its number in the workload, which is the same under every policy.
    pub(crate) id: u64,
    /// The conversation it belongs to.
    pub(crate) conversation: Option<u64>,
    /// Which turn of it, from 1.
    pub(crate) turn: u32,
    /// Whether it counts: warm-up does not.
    pub(crate) counts: bool,
    /// When its client sent it, in seconds.
    pub(crate) sent: f64,
    /// When it was handed to its endpoint, in seconds: later than `sent` if it was held.
    pub(crate) dispatched: Option<f64>,
    /// From `sent` to its first token, in seconds; `None` if there was none.
    pub(crate) ttft: Option<f64>,
    /// From `sent` to its last token, in seconds; `None` if it did not end well.
    pub(crate) e2e: Option<f64>,
    /// Tokens of its prompt.
    pub(crate) prompt: u32,
    /// Tokens that were generated.
    pub(crate) output: u32,
    /// Tokens of its prompt that the endpoint found in its cache.
    pub(crate) cached: u32,
    /// The most that any endpoint had of it in its cache when it was dispatched.
    pub(crate) best_cached: u32,
    /// Where it was served, by the endpoint's number.
    pub(crate) endpoint: Option<u32>,
}

/// What an endpoint did.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Work {
    /// Seconds of work that it computed: prompts and answers, by the engine model's prices.
    pub(crate) seconds: f64,
    /// Prompt tokens that it computed.
    pub(crate) prefill_tokens: u64,
    /// Tokens that it generated.
    pub(crate) decode_tokens: u64,
    /// Requests that lost their memory and were computed again.
    pub(crate) preemptions: u64,
}

/// What is asked of a run's requests.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Slo {
    /// Seconds to the first token.
    pub(crate) ttft: f64,
    /// Mean seconds between tokens after it.
    pub(crate) itl: f64,
}

/// What is otherwise where real engines answered. What another endpoint had in its cache is not known there.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Live {
    /// How long after `scaled_at` the caches of follow-ups are looked at, in seconds.
    pub(crate) window: f64,
    /// The endpoint that was added then; `None` if one went.
    pub(crate) added: Option<u32>,
}

/// One workload under one policy with one seed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Run {
    /// The workload's name, such as `loadaware:17`.
    pub(crate) workload: String,
    /// The policy's name, such as `marginal-cost`.
    pub(crate) policy: String,
    /// The seed of everything that is drawn.
    pub(crate) seed: u64,
    /// What is asked of its requests.
    pub(crate) slo: Slo,
    /// When an endpoint was added in the middle, in seconds; on real engines, when the pool first changed.
    pub(crate) scaled_at: Option<f64>,
    /// Of a run on real engines; a simulated one has none.
    pub(crate) live: Option<Live>,
    /// The requests, in the order they were sent.
    pub(crate) rows: Vec<Row>,
    /// The endpoints, by their numbers.
    pub(crate) endpoints: Vec<Work>,
}
