//! `random`: an endpoint by chance.

use serde::{Deserialize, Serialize};

use super::plain;
use crate::scheduling::{Choice, Cx, Policy, Reason, Step, Trace};

/// Takes the decision's seed modulo the number of candidates.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Random {}

impl Policy for Random {
    fn choose(&self, cx: &Cx<'_>, trace: &mut Trace) -> Choice {
        let n = cx.candidates.len();
        let slot = cx.candidates.nth(super::mod_n::remainder(cx.seed, n));
        trace.steps.push(Step::Modulo { of: cx.seed, n: n as u64, endpoint: slot });
        plain(slot, Reason::Random)
    }

    fn needs_conversation(&self) -> bool {
        false
    }
}
