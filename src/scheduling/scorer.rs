//! What a weighted sum is made of: each scorer gives each endpoint 0 to 1, as its authors define it. The names are those
//! of the Inference Extension and llm-d (llm-d-router 0.10).
//!
//! What an engine does not say counts as the average of what the others say, and where nobody says it as 0.5 for all:
//! upstream takes it for 0, so that an engine which cannot be scraped looks idle and draws the traffic.

use serde::{Deserialize, Serialize};

use crate::pool::{AdapterState, Sight};

/// One scorer with its parameters.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(tag = "type")]
pub enum Scorer {
    /// Requests that wait: 1 is the fewest of all candidates, 0 the most; 1 for all where all are equal.
    #[serde(rename = "queue-scorer")]
    Queue(Plain),
    /// The share of the KV memory that is free.
    #[serde(rename = "kv-cache-utilization-scorer")]
    KvCacheUtilization(Plain),
    /// Requests that run, as `queue-scorer` has those that wait.
    #[serde(rename = "running-requests-size-scorer")]
    RunningRequestsSize(Plain),
    /// The share of the prompt that is cached; nothing known is 0, as upstream.
    #[serde(rename = "prefix-cache-scorer")]
    PrefixCache(PrefixCache),
    /// 1 where the adapter is loaded, 0.8 with room for one more, 0.6 where it waits, else 0.
    #[serde(rename = "lora-affinity-scorer")]
    LoraAffinity(Plain),
    /// Uncached tokens under way and those of this request, against a limit. Our own count, so always known.
    #[serde(rename = "token-load-scorer")]
    TokenLoad(TokenLoad),
    /// Requests in flight against the most of all candidates. Our own count, so always known.
    #[serde(rename = "active-request-scorer")]
    ActiveRequest(ActiveRequest),
    /// Requests that wait against a limit: 0.5 with none, 0 with as many or more.
    #[serde(rename = "load-aware-scorer")]
    LoadAware(LoadAware),
    /// A prompt that nobody has goes where none went longest: 1 there, 0 where the last went. For others 0.5.
    #[serde(rename = "no-hit-lru-scorer")]
    NoHitLru(Plain),
}

/// Parameters of a scorer that has none but its weight.
#[derive(Debug, Clone, PartialEq, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Plain {
    /// What its score counts.
    weight: Weight,
}

/// Parameters of `prefix-cache-scorer`.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct PrefixCache {
    /// What its score counts.
    weight: Weight,
    /// How much of the score is the square of the cached length, instead of the share; 0 to 1.
    match_length_weight: Share,
    /// Cached tokens that are as good as any more, for that.
    match_length_scale_tokens: u32,
}

/// Parameters of `token-load-scorer`.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct TokenLoad {
    /// What its score counts.
    weight: Weight,
    /// Tokens that score 0.
    queue_threshold_tokens: Count,
}

/// Parameters of `active-request-scorer`.
#[derive(Debug, Clone, PartialEq, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct ActiveRequest {
    /// What its score counts.
    weight: Weight,
    /// Requests up to which an endpoint is as good as idle.
    idle_threshold: u64,
    /// The most that a busy one scores; 0 to 1.
    max_busy_score: One,
}

/// Parameters of `load-aware-scorer`.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct LoadAware {
    /// What its score counts.
    weight: Weight,
    /// Requests that score 0.
    threshold: Count,
}

/// A weight: finite, and not below 0.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize)]
#[serde(try_from = "f64", into = "f64")]
pub struct Weight(f64);

/// A share, 0 to 1.
#[derive(Debug, Clone, Copy, PartialEq, Default, Deserialize, Serialize)]
#[serde(try_from = "f64", into = "f64")]
pub struct Share(f64);

/// A share that is 1 unless something else is said.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize)]
#[serde(transparent)]
struct One(Share);

/// A number above 0.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize)]
#[serde(try_from = "u32", into = "u32")]
struct Count(u32);

/// An endpoint as scorers see it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Seen {
    /// Its slot.
    pub slot: u32,
    /// Our own requests in flight there.
    pub requests: u64,
    /// Tokens of the prompt that count as cached there.
    pub cached: f64,
    /// All that is seen of it.
    pub sight: Sight,
}

/// What is scored: the request, and the endpoints that are left to choose from.
#[derive(Debug, Clone, Copy)]
pub struct Scene<'a> {
    /// Tokens of the prompt.
    pub prompt: f64,
    /// Whether nothing of it is cached on any candidate, those that a filter took out included.
    pub cold: bool,
    /// The endpoints, in slot order.
    pub seen: &'a [Seen],
}

/// Requests of 32 K tokens, 128 of them: upstream's limit.
const QUEUE_THRESHOLD_TOKENS: Count = Count(4_194_304);

impl Default for Weight {
    fn default() -> Self {
        Self(1.0)
    }
}

impl Default for One {
    fn default() -> Self {
        Self(Share(1.0))
    }
}

impl Default for PrefixCache {
    fn default() -> Self {
        Self {
            weight: Weight::default(),
            match_length_weight: Share::default(),
            match_length_scale_tokens: 8192,
        }
    }
}

impl Default for TokenLoad {
    fn default() -> Self {
        Self { weight: Weight::default(), queue_threshold_tokens: QUEUE_THRESHOLD_TOKENS }
    }
}

impl Default for LoadAware {
    fn default() -> Self {
        Self { weight: Weight::default(), threshold: Count(128) }
    }
}

impl TryFrom<f64> for Weight {
    type Error = String;

    fn try_from(weight: f64) -> Result<Self, String> {
        if weight.is_finite() && weight >= 0.0 {
            Ok(Self(weight))
        } else {
            Err(format!("a scorer's weight is a finite number, 0 or more, not {weight}"))
        }
    }
}

impl From<Weight> for f64 {
    fn from(weight: Weight) -> Self {
        weight.0
    }
}

impl TryFrom<f64> for Share {
    type Error = String;

    fn try_from(share: f64) -> Result<Self, String> {
        if (0.0..=1.0).contains(&share) {
            Ok(Self(share))
        } else {
            Err(format!("it is 0 to 1, not {share}"))
        }
    }
}

impl From<Share> for f64 {
    fn from(share: Share) -> Self {
        share.0
    }
}

impl Share {
    /// Takes a share whose validity is plain to see.
    pub(super) const fn constant(share: f64) -> Self {
        Self(share)
    }

    /// Returns the share.
    #[must_use]
    pub fn get(self) -> f64 {
        self.0
    }
}

impl TryFrom<u32> for Count {
    type Error = String;

    fn try_from(count: u32) -> Result<Self, String> {
        if count > 0 { Ok(Self(count)) } else { Err("it is above 0".to_owned()) }
    }
}

impl From<Count> for u32 {
    fn from(count: Count) -> Self {
        count.0
    }
}

impl Scorer {
    /// Scores queues.
    #[must_use]
    pub fn queue(weight: f64) -> Self {
        Self::Queue(Plain { weight: Weight(weight) })
    }

    /// Scores KV use.
    #[must_use]
    pub fn kv_cache_utilization(weight: f64) -> Self {
        Self::KvCacheUtilization(Plain { weight: Weight(weight) })
    }

    /// Scores prefixes.
    #[must_use]
    pub fn prefix_cache(weight: f64) -> Self {
        Self::PrefixCache(PrefixCache { weight: Weight(weight), ..PrefixCache::default() })
    }

    /// Scores by who got a cold prompt last.
    #[must_use]
    pub fn no_hit_lru(weight: f64) -> Self {
        Self::NoHitLru(Plain { weight: Weight(weight) })
    }

    /// Scores uncached tokens.
    #[must_use]
    pub fn token_load(weight: f64) -> Self {
        Self::TokenLoad(TokenLoad { weight: Weight(weight), ..TokenLoad::default() })
    }

    /// Returns its name without the `-scorer`, for traces.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Queue(_) => "queue",
            Self::KvCacheUtilization(_) => "kv-cache-utilization",
            Self::RunningRequestsSize(_) => "running-requests-size",
            Self::PrefixCache(_) => "prefix-cache",
            Self::LoraAffinity(_) => "lora-affinity",
            Self::TokenLoad(_) => "token-load",
            Self::ActiveRequest(_) => "active-request",
            Self::LoadAware(_) => "load-aware",
            Self::NoHitLru(_) => "no-hit-lru",
        }
    }

    /// Returns what its score counts.
    #[must_use]
    pub fn weight(&self) -> f64 {
        let weight = match self {
            Self::Queue(it)
            | Self::KvCacheUtilization(it)
            | Self::RunningRequestsSize(it)
            | Self::LoraAffinity(it)
            | Self::NoHitLru(it) => it.weight,
            Self::PrefixCache(it) => it.weight,
            Self::TokenLoad(it) => it.weight,
            Self::ActiveRequest(it) => it.weight,
            Self::LoadAware(it) => it.weight,
        };
        weight.0
    }

    /// Scores each endpoint, in the scene's order.
    #[must_use]
    pub fn scores(&self, scene: &Scene<'_>) -> Vec<f64> {
        let each = |score: &dyn Fn(&Seen) -> Option<f64>| {
            neutral(scene.seen.iter().map(|it| score(it).map(|it| it.clamp(0.0, 1.0))).collect())
        };
        match self {
            Self::Queue(_) => fewest(scene.seen.iter().map(|it| it.sight.said.waiting).collect()),
            Self::RunningRequestsSize(_) => {
                fewest(scene.seen.iter().map(|it| it.sight.said.running).collect())
            }
            Self::KvCacheUtilization(_) => each(&|it| it.sight.said.memory.map(|used| 1.0 - used)),
            Self::PrefixCache(parameters) => {
                each(&|it| Some(parameters.score(it.cached, scene.prompt)))
            }
            Self::LoraAffinity(_) => each(&|it| {
                it.sight.said.adapter.map(|state| match state {
                    AdapterState::Active => 1.0,
                    AdapterState::Room => 0.8,
                    AdapterState::Waiting => 0.6,
                    AdapterState::Full => 0.0,
                })
            }),
            Self::TokenLoad(parameters) => each(&|it| {
                let tokens = it.sight.uncached + (scene.prompt - it.cached).max(0.0);
                Some(1.0 - tokens / f64::from(parameters.queue_threshold_tokens.0))
            }),
            Self::ActiveRequest(parameters) => {
                let most = scene.seen.iter().map(|it| it.requests).max().unwrap_or(0);
                each(&|it| Some(parameters.score(it.requests, most)))
            }
            Self::LoadAware(parameters) => each(&|it| {
                let full = f64::from(parameters.threshold.0);
                it.sight.said.waiting.map(|waiting| 0.5 * (1.0 - waiting.min(full) / full))
            }),
            Self::NoHitLru(_) if scene.cold => longest_ago(scene.seen),
            Self::NoHitLru(_) => vec![0.5; scene.seen.len()],
        }
    }
}

impl PrefixCache {
    fn score(&self, cached: f64, prompt: f64) -> f64 {
        let (by_length, scale) =
            (self.match_length_weight.0, f64::from(self.match_length_scale_tokens));
        let length = if scale > 0.0 { (cached / scale).min(1.0) } else { 1.0 };
        by_length * length * length + (1.0 - by_length) * share(cached, prompt)
    }
}

impl ActiveRequest {
    #[expect(clippy::cast_precision_loss, reason = "requests stay far below 2^52")]
    fn score(&self, requests: u64, most: u64) -> f64 {
        if requests <= self.idle_threshold {
            1.0
        } else {
            (most - requests) as f64 / most as f64 * self.max_busy_score.0.0
        }
    }
}

/// Returns the share of a prompt that is cached; of an empty one nothing is.
#[must_use]
pub fn share(cached: f64, prompt: f64) -> f64 {
    if prompt > 0.0 { (cached / prompt).min(1.0) } else { 0.0 }
}

/// Gives those that say nothing the average of those that say something.
fn neutral(scores: Vec<Option<f64>>) -> Vec<f64> {
    let known: Vec<f64> = scores.iter().copied().flatten().collect();
    #[expect(clippy::cast_precision_loss, reason = "a pool has far fewer than 2^52 endpoints")]
    let average =
        if known.is_empty() { 0.5 } else { known.iter().sum::<f64>() / known.len() as f64 };
    scores.into_iter().map(|score| score.unwrap_or(average)).collect()
}

/// Scores numbers against each other: 1 is the least of those that are known, 0 the greatest.
fn fewest(numbers: Vec<Option<f64>>) -> Vec<f64> {
    let known = || numbers.iter().copied().flatten();
    let least = known().fold(f64::INFINITY, f64::min);
    let most = known().fold(f64::NEG_INFINITY, f64::max);
    let score = |number: f64| if least < most { (most - number) / (most - least) } else { 1.0 };
    neutral(numbers.into_iter().map(|number| number.map(score)).collect())
}

/// Ranks endpoints by when they last got a cold prompt: 1 is longest ago, 0 the latest; those that never did are first,
/// all alike. (Upstream ranks these too, in the order in which they happen to be listed.)
fn longest_ago(seen: &[Seen]) -> Vec<f64> {
    let mut order: Vec<Option<u64>> = seen.iter().map(|it| it.sight.cold).collect();
    order.sort_unstable();
    let rank = |it: &Seen| order.partition_point(|cold| *cold < it.sight.cold);
    #[expect(clippy::cast_precision_loss, reason = "a pool has far fewer than 2^52 endpoints")]
    let last = (seen.len().max(2) - 1) as f64;
    #[expect(clippy::cast_precision_loss, reason = "a pool has far fewer than 2^52 endpoints")]
    seen.iter().map(|it| 1.0 - rank(it) as f64 / last).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::Said;

    fn seen(sight: Sight) -> Seen {
        Seen { slot: 0, requests: 0, cached: 0.0, sight }
    }

    fn said(said: Said) -> Seen {
        seen(Sight { said, ..Sight::default() })
    }

    #[track_caller]
    fn check(scorer: &str, (prompt, cold): (f64, bool), seen: &[Seen], expected: &[f64]) {
        let scorer: Scorer = serde_yaml::from_str(scorer).unwrap();
        let scores = scorer.scores(&Scene { prompt, cold, seen });
        assert_eq!(scores.len(), expected.len());
        for (score, expected) in scores.iter().zip(expected) {
            assert!((score - expected).abs() < 1e-9, "{scores:?} and not {expected}");
        }
    }

    #[test]
    fn counts_are_scored_between_the_fewest_and_the_most() {
        let waiting = |waiting| said(Said { waiting, ..Said::default() });
        let queue = "{type: queue-scorer}";
        let with = |numbers: [Option<f64>; 3]| numbers.map(waiting);
        check(queue, (0.0, false), &with([Some(2.0), Some(6.0), Some(10.0)]), &[1.0, 0.5, 0.0]);
        check(queue, (0.0, false), &with([Some(3.0); 3]), &[1.0; 3]);
        // One that says nothing is neither idle nor full.
        check(queue, (0.0, false), &with([Some(0.0), None, Some(10.0)]), &[1.0, 0.5, 0.0]);
        check(queue, (0.0, false), &with([None; 3]), &[0.5; 3]);
        let running = |running| said(Said { running, ..Said::default() });
        let seen = [Some(1.0), Some(2.0), Some(5.0)].map(running);
        check("{type: running-requests-size-scorer}", (0.0, false), &seen, &[1.0, 0.75, 0.0]);
        // Half at best, and nothing from 128 on.
        let seen = [Some(0.0), Some(64.0), Some(500.0), None].map(waiting);
        let load = "{type: load-aware-scorer}";
        check(load, (0.0, false), &seen, &[0.5, 0.25, 0.0, 0.25]);
        check("{type: load-aware-scorer, threshold: 64}", (0.0, false), &seen[1..3], &[0.0; 2]);
    }

    #[test]
    fn memory_and_adapters_are_what_engines_say() {
        let memory = |memory| said(Said { memory, ..Said::default() });
        let seen = [Some(0.25), Some(1.25), None].map(memory);
        check("{type: kv-cache-utilization-scorer}", (0.0, false), &seen, &[0.75, 0.0, 0.375]);
        let adapter = |adapter| said(Said { adapter, ..Said::default() });
        let states = AdapterState::NAMES.map(|(_, state)| adapter(Some(state)));
        check("{type: lora-affinity-scorer}", (0.0, false), &states, &[1.0, 0.8, 0.6, 0.0]);
        check("{type: lora-affinity-scorer}", (0.0, false), &[adapter(None)], &[0.5]);
    }

    #[test]
    fn a_prefix_is_scored_by_its_share_and_where_asked_by_its_length() {
        let cached = |cached| Seen { cached, ..seen(Sight::default()) };
        let seen = [0.0, 600.0, 4096.0].map(cached);
        check("{type: prefix-cache-scorer}", (1000.0, false), &seen, &[0.0, 0.6, 1.0]);
        check("{type: prefix-cache-scorer}", (0.0, false), &seen, &[0.0; 3]);
        // .25 × (4096 / 8192)² + .75 × 1 = .8125
        let by_length = "{type: prefix-cache-scorer, match_length_weight: 0.25}";
        check(by_length, (1000.0, false), &seen[2..], &[0.8125]);
    }

    #[test]
    fn our_own_counts_are_scored_against_limits() {
        let with =
            |uncached, cached| Seen { cached, ..seen(Sight { uncached, ..Sight::default() }) };
        let seen = [with(0.0, 0.0), with(300.0, 0.0), with(300.0, 150.0), with(5000.0, 0.0)];
        let tokens = "{type: token-load-scorer, queue_threshold_tokens: 1000}";
        check(tokens, (200.0, false), &seen, &[0.8, 0.5, 0.65, 0.0]);
        let busy = |requests| Seen { requests, ..self::seen(Sight::default()) };
        let requests = [0, 1, 4, 8].map(busy);
        let active = "{type: active-request-scorer}";
        check(active, (0.0, false), &requests, &[1.0, 0.875, 0.5, 0.0]);
        let gap = "{type: active-request-scorer, idle_threshold: 1, max_busy_score: 0.5}";
        check(gap, (0.0, false), &requests, &[1.0, 1.0, 0.25, 0.0]);
        check(active, (0.0, false), &requests[..1], &[1.0]);
    }

    #[test]
    fn a_cold_prompt_goes_where_none_went_longest() {
        let cold = |cold| seen(Sight { cold, ..Sight::default() });
        let seen = [Some(9), None, Some(4), None, Some(7)].map(cold);
        check("{type: no-hit-lru-scorer}", (1.0, true), &seen, &[0.0, 1.0, 0.5, 1.0, 0.25]);
        check("{type: no-hit-lru-scorer}", (1.0, false), &seen, &[0.5; 5]);
        check("{type: no-hit-lru-scorer}", (1.0, true), &seen[..1], &[1.0]);
    }
}
