//! `mod-n`: the conversation's hash modulo the number of endpoints, to show what a ring is for.

use serde::{Deserialize, Serialize};

use super::plain;
use crate::scheduling::{Choice, Cx, Policy, Reason, Step, Trace};

/// Takes the conversation's key modulo the number of candidates.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct ModN {}

impl Policy for ModN {
    fn choose(&self, cx: &Cx<'_>, trace: &mut Trace) -> Choice {
        let n = cx.candidates.len();
        let slot = cx.candidates.nth(remainder(cx.key, n));
        trace.steps.push(Step::Modulo { of: cx.key, n: n as u64, endpoint: slot });
        plain(slot, Reason::Home)
    }
}

/// Takes `number` modulo `n`, which is not 0.
#[must_use]
pub fn remainder(number: u64, n: usize) -> usize {
    usize::try_from(number % n as u64).expect("a remainder is below n")
}
