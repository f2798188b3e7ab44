//! `load-aware`: the share of the prompt that is cached, less beta times the excess of requests over the mean.
//!
//! vLLM production-stack's `loadaware` (its pull request 1035). For two servers an excess of 1 / (2 beta) over the mean
//! is worth as much as a whole prompt.

use serde::{Deserialize, Serialize};

use super::{first_by_address, look, record, uncached, whole};
use crate::scheduling::scorer::share;
use crate::scheduling::{Choice, Cx, Policy, Reason, Score, Step, Trace, Unit};

/// Scores every candidate by `cached / prompt − beta × (requests − mean) / max(1, mean)` and takes the highest; equal
/// ones by the text of their addresses. Weights of endpoints do not count, as with its authors.
#[derive(Debug, Clone, PartialEq, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct LoadAware {
    /// What the excess of requests over the mean counts, 0 or more; 0 is the cache alone.
    pub beta: Beta,
    /// A conversation of which nothing is cached anywhere goes to its home on the ring, as with a session key; otherwise it goes where the fewest requests are.
    pub session: bool,
}

/// What the excess counts: a finite number, 0 or more.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize)]
#[serde(try_from = "f64", into = "f64")]
pub struct Beta(f64);

impl Default for Beta {
    fn default() -> Self {
        Self(1.0)
    }
}

impl TryFrom<f64> for Beta {
    type Error = String;

    fn try_from(beta: f64) -> Result<Self, String> {
        if beta.is_finite() && beta >= 0.0 {
            Ok(Self(beta))
        } else {
            Err(format!("beta is a finite number, 0 or more (0 is the cache alone), not {beta}"))
        }
    }
}

impl From<Beta> for f64 {
    fn from(beta: Beta) -> Self {
        beta.0
    }
}

/// Candidates whose scores a trace shows.
const SHOWN: usize = 3;

impl Policy for LoadAware {
    fn choose(&self, cx: &Cx<'_>, trace: &mut Trace) -> Choice {
        let sights = look(cx);
        if sights.iter().all(|(_, sight)| sight.held <= 0.0) {
            record(cx, sights, trace);
            return uncached(cx, self.session, Reason::Cold, trace);
        }
        #[expect(clippy::cast_precision_loss, reason = "tokens and requests stay far below 2^52")]
        let (n, sum, prompt) =
            (sights.len() as f64, cx.total(Unit::Requests) as f64, cx.prompt_tokens as f64);
        let mean = sum / n;
        let parts = |slot: u32, held: f64| {
            #[expect(clippy::cast_precision_loss, reason = "requests stay far below 2^52")]
            let requests = cx.load(slot, Unit::Requests) as f64;
            let excess = (requests - mean) / mean.max(1.0);
            [
                ("cached share", 1.0, share(held, prompt)),
                ("excess of requests", -self.beta.0, excess),
            ]
            .map(|(name, weight, score)| Score { name, weight, score })
        };
        let mut scored: Vec<(u32, f64, f64)> = sights
            .iter()
            .map(|(slot, sight)| (*slot, sight.held, Score::total(&parts(*slot, sight.held))))
            .collect();
        let best = scored.iter().map(|&(.., score)| score).fold(f64::NEG_INFINITY, f64::max);
        let equal = scored.iter().filter(|&&(.., score)| score >= best).map(|&(slot, ..)| slot);
        let chosen = first_by_address(cx, equal);
        scored.sort_by(|a, b| (b.0 == chosen).cmp(&(a.0 == chosen)).then(b.2.total_cmp(&a.2)));
        for &(endpoint, held, _) in scored.iter().take(SHOWN) {
            let parts = parts(endpoint, held).to_vec();
            trace.steps.push(Step::Scores { endpoint, cached: whole(held), parts });
        }
        record(cx, sights, trace);
        Choice { slot: chosen, reason: Reason::BestScore, cached: whole(scored[0].1) }
    }

    fn needs_conversation(&self) -> bool {
        false
    }
}
