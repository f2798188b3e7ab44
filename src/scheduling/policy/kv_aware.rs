//! `kv-aware`: where most of the prompt is cached, whatever the load, unless too much of it is cached nowhere.
//!
//! vLLM production-stack's `kvaware`, which asks LMCache's controller; here it is what engines say of their caches, or
//! else placement memory.

use serde::{Deserialize, Serialize};

use super::{first_by_address, look, record, uncached, whole};
use crate::scheduling::{Choice, Cx, Policy, Reason, Step, Trace};

/// Takes the candidate with most of the prompt, equal ones by the text of their addresses, if all but `threshold` tokens
/// are there; otherwise the prompt goes as one of which nothing is known.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct KvAware {
    /// Tokens of the prompt that may be missing where most of it is cached.
    pub threshold: u64,
    /// A conversation that finds too little cached goes to its home on the ring, as with a session key; otherwise it goes where the fewest requests are.
    pub session: bool,
}

impl Default for KvAware {
    fn default() -> Self {
        Self { threshold: 2000, session: false }
    }
}

impl Policy for KvAware {
    fn choose(&self, cx: &Cx<'_>, trace: &mut Trace) -> Choice {
        let sights = look(cx);
        let most = sights.iter().map(|(_, sight)| sight.held).fold(0.0, f64::max);
        let chosen = (most > 0.0).then(|| {
            let have = sights.iter().filter(|(_, sight)| sight.held >= most);
            first_by_address(cx, have.map(|&(slot, _)| slot))
        });
        record(cx, sights, trace);
        let Some(slot) = chosen else {
            return uncached(cx, self.session, Reason::Cold, trace);
        };
        let (cached, needed) = (whole(most), cx.prompt_tokens.saturating_sub(self.threshold));
        trace.steps.push(Step::Longest { endpoint: slot, cached, needed });
        if cached >= needed {
            return Choice { slot, reason: Reason::Cached, cached };
        }
        let choice = uncached(cx, self.session, Reason::LeastLoaded, trace);
        let cached = whole(cx.sight(choice.slot).held);
        Choice { cached, ..choice }
    }

    fn needs_conversation(&self) -> bool {
        false
    }
}
