//! `consistent`: the conversation's home on the ring, whatever it carries.

use serde::{Deserialize, Serialize};

use super::plain;
use crate::scheduling::{Choice, Cx, Policy, Reason, Step, Trace};

/// Takes the first candidate clockwise from the conversation's place.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Consistent {}

impl Policy for Consistent {
    fn choose(&self, cx: &Cx<'_>, trace: &mut Trace) -> Choice {
        let slot = cx.home();
        trace.steps.push(Step::Ring { endpoint: slot });
        plain(slot, Reason::Home)
    }
}
