//! `round-robin`: each endpoint in turn, in the order of their names.

use serde::{Deserialize, Serialize};

use super::plain;
use crate::scheduling::{Choice, Cx, Policy, Reason, Step, Trace};

/// Takes the count of decisions modulo the number of candidates.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct RoundRobin {}

impl Policy for RoundRobin {
    fn choose(&self, cx: &Cx<'_>, trace: &mut Trace) -> Choice {
        let n = cx.candidates.len();
        let slot = cx.candidates.nth(super::mod_n::remainder(cx.sequence, n));
        trace.steps.push(Step::Modulo { of: cx.sequence, n: n as u64, endpoint: slot });
        plain(slot, Reason::Turn)
    }

    fn needs_conversation(&self) -> bool {
        false
    }
}
