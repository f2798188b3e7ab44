//! `rendezvous`: highest-random-weight hashing with exact weights, and the lightest of the best few.

use std::num::NonZeroU8;

use serde::{Deserialize, Serialize};

use super::plain;
use crate::scheduling::{Choice, Cx, Policy, Reason, Step, Trace, Unit};

/// Ranks the candidates for the conversation and takes the lightest of the first `choices`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Rendezvous {
    /// How many of the best are compared by load, at most 255; 1 is pure hashing.
    pub choices: NonZeroU8,
    /// What load is counted in: `requests` or `tokens`.
    pub load: Unit,
}

impl Default for Rendezvous {
    fn default() -> Self {
        Self { choices: NonZeroU8::MIN, load: Unit::Tokens }
    }
}

impl Policy for Rendezvous {
    fn choose(&self, cx: &Cx<'_>, trace: &mut Trace) -> Choice {
        let ranked = cx
            .pool
            .rendezvous()
            .top(cx.key, usize::from(self.choices.get()), |slot| cx.candidates.contains(slot));
        // The first of equal ones wins: min_by keeps the earlier.
        let slot = ranked
            .iter()
            .copied()
            .min_by(|&a, &b| {
                cx.relative_load(a, self.load).total_cmp(&cx.relative_load(b, self.load))
            })
            .expect("a policy is called with at least one candidate");
        let reason = if ranked.first() == Some(&slot) { Reason::Home } else { Reason::Overflow };
        trace.steps.push(Step::Ranked { endpoints: ranked });
        plain(slot, reason)
    }
}
