//! `least-loaded`: the endpoint with the least work for its weight.

use serde::{Deserialize, Serialize};

use super::plain;
use crate::scheduling::{Choice, Cx, Policy, Reason, Step, Trace, Unit};

/// Compares load over weight; equal endpoints are told apart by chance.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct LeastLoaded {
    /// What load is counted in: `requests` or `tokens`.
    pub load: Unit,
}

impl Default for LeastLoaded {
    fn default() -> Self {
        Self { load: Unit::Tokens }
    }
}

impl Policy for LeastLoaded {
    fn choose(&self, cx: &Cx<'_>, trace: &mut Trace) -> Choice {
        let slot = cx.least_loaded(self.load, |slot| cx.chance(slot));
        trace.steps.push(Step::Least {
            endpoint: slot,
            load: cx.load(slot, self.load),
            unit: self.load,
        });
        plain(slot, Reason::LeastLoaded)
    }

    fn needs_conversation(&self) -> bool {
        false
    }
}
