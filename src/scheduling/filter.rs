//! What takes endpoints out before the others are scored. A filter never takes out all.

use serde::{Deserialize, Serialize};

use super::decision::Gate;
use super::picker::unit;
use super::scorer::{Scene, Seen, Share, share};
use super::{Step, Trace};

/// One filter with its parameters, by its name upstream.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(tag = "type")]
pub enum Filter {
    /// Keeps to endpoints that have most of the prompt cached, unless they are too far behind.
    #[serde(rename = "prefix-cache-affinity-filter")]
    PrefixCacheAffinity(PrefixCacheAffinity),
}

/// Parameters of `prefix-cache-affinity-filter`, as llm-d's guides have them since July 2026.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct PrefixCacheAffinity {
    /// Share of the prompt that an endpoint has to have; 0 switches the filter off.
    affinity_threshold: Share,
    /// Share of requests that may go anywhere.
    exploration_probability: Share,
    /// By how much the wait for the least busy of them may be longer than for the least busy of the others, in
    /// milliseconds; 0 is any time.
    max_ttft_penalty_ms: u32,
    /// Prompt tokens that an endpoint computes in a second.
    peak_prefill_throughput: Throughput,
}

/// Tokens a second, above 0.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize)]
#[serde(try_from = "f64", into = "f64")]
struct Throughput(f64);

impl Default for PrefixCacheAffinity {
    fn default() -> Self {
        Self {
            affinity_threshold: Share::constant(0.8),
            exploration_probability: Share::default(),
            max_ttft_penalty_ms: 18_000,
            // Qwen3-32B on two H100.
            peak_prefill_throughput: Throughput(15_928.0),
        }
    }
}

impl TryFrom<f64> for Throughput {
    type Error = String;

    fn try_from(throughput: f64) -> Result<Self, String> {
        if throughput.is_finite() && throughput > 0.0 {
            Ok(Self(throughput))
        } else {
            Err(format!("it is above 0 tokens a second, not {throughput}"))
        }
    }
}

impl From<Throughput> for f64 {
    fn from(throughput: Throughput) -> Self {
        throughput.0
    }
}

impl Filter {
    /// Returns those that are kept, and writes down why; `chance` is a hash drawn for this decision.
    #[must_use]
    pub fn keep(&self, scene: &Scene<'_>, chance: u64, trace: &mut Trace) -> Vec<Seen> {
        match self {
            Self::PrefixCacheAffinity(parameters) => parameters.keep(scene, chance, trace),
        }
    }
}

impl PrefixCacheAffinity {
    fn keep(&self, scene: &Scene<'_>, chance: u64, trace: &mut Trace) -> Vec<Seen> {
        let threshold = self.affinity_threshold.get();
        if scene.seen.len() <= 1 || threshold <= 0.0 {
            return scene.seen.to_vec();
        }
        let (sticky, others): (Vec<Seen>, Vec<Seen>) =
            scene.seen.iter().partition(|it| share(it.cached, scene.prompt) >= threshold);
        let mut behind = None;
        let gate = if unit(chance) < self.exploration_probability.get() {
            Gate::Explores
        } else if sticky.is_empty() {
            Gate::NobodyHasIt
        } else if others.is_empty() || self.max_ttft_penalty_ms == 0 {
            Gate::Closed
        } else {
            let seconds = self.wait(&sticky) - self.wait(&others);
            behind = Some(seconds);
            let too_far = seconds * 1000.0 > f64::from(self.max_ttft_penalty_ms);
            if too_far { Gate::Open } else { Gate::Closed }
        };
        let (count, of) = (sticky.len(), scene.seen.len());
        trace.steps.push(Step::Affinity { sticky: count, of, threshold, behind, gate });
        if gate == Gate::Closed { sticky } else { scene.seen.to_vec() }
    }

    /// Returns the seconds until the least busy of them would have computed what is under way to it.
    fn wait(&self, seen: &[Seen]) -> f64 {
        let tokens = seen.iter().map(|it| it.sight.uncached).fold(f64::INFINITY, f64::min);
        tokens / self.peak_prefill_throughput.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::Sight;

    /// Which of the endpoints, each with what is cached and what is under way, are kept of a prompt of 1000 tokens.
    #[track_caller]
    fn check(filter: &str, seen: &[(f64, f64)], kept: &[u32], gate: Option<Gate>) {
        let filter: Filter = serde_yaml::from_str(filter).unwrap();
        let seen: Vec<Seen> = (0u32..)
            .zip(seen)
            .map(|(slot, &(cached, uncached))| Seen {
                slot,
                requests: 0,
                cached,
                sight: Sight { uncached, ..Sight::default() },
            })
            .collect();
        let scene = Scene { prompt: 1000.0, cold: false, seen: &seen };
        let mut trace = Trace::default();
        let left: Vec<u32> =
            filter.keep(&scene, 7, &mut trace).iter().map(|seen| seen.slot).collect();
        assert_eq!(left, kept);
        let said = trace.steps.iter().find_map(|step| {
            if let Step::Affinity { gate, .. } = step { Some(*gate) } else { None }
        });
        assert_eq!(said, gate);
    }

    #[test]
    fn endpoints_that_have_the_prompt_are_kept_until_they_are_too_far_behind() {
        let defaults = "{type: prefix-cache-affinity-filter}";
        check(defaults, &[(800.0, 0.0), (799.0, 0.0)], &[0], Some(Gate::Closed));
        check(defaults, &[(700.0, 0.0), (0.0, 0.0)], &[0, 1], Some(Gate::NobodyHasIt));
        check(defaults, &[(900.0, 1e9), (1000.0, 1e9)], &[0, 1], Some(Gate::Closed));
        // 18 s × 15,928 tokens a second = 286,704 tokens; exactly as many are not too many.
        check(defaults, &[(1000.0, 286_704.0), (0.0, 0.0)], &[0], Some(Gate::Closed));
        check(defaults, &[(1000.0, 286_705.0), (0.0, 0.0)], &[0, 1], Some(Gate::Open));
        check(defaults, &[(1000.0, 286_705.0), (0.0, 2.0)], &[0], Some(Gate::Closed));
        // The least busy of those that have it counts.
        let two = [(1000.0, 9e5), (0.0, 0.0), (850.0, 10.0)];
        check(defaults, &two, &[0, 2], Some(Gate::Closed));
        let never = "{type: prefix-cache-affinity-filter, max_ttft_penalty_ms: 0}";
        check(never, &[(1000.0, 1e12), (0.0, 0.0)], &[0], Some(Gate::Closed));
        let always = "{type: prefix-cache-affinity-filter, exploration_probability: 1}";
        check(always, &[(1000.0, 0.0), (0.0, 0.0)], &[0, 1], Some(Gate::Explores));
        check(
            "{type: prefix-cache-affinity-filter, affinity_threshold: 0}",
            &two,
            &[0, 1, 2],
            None,
        );
        check(defaults, &two[..1], &[0], None);
    }
}
