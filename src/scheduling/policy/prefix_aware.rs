//! `prefix-aware`: by chance among those that have the longest prefix, whatever the load.
//!
//! vLLM production-stack's `prefixaware`. Its trie of what was sent where is here what engines say of their caches, or
//! else placement memory, with the prompts that are under way.

use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};

use super::mod_n::remainder;
use super::{look, record, whole};
use crate::scheduling::{Choice, Cx, Policy, Reason, Step, Trace};

/// Counts whole chunks of the prompt and draws one of the candidates that have the most of them; all, if none has any.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct PrefixAware {
    /// Tokens of a chunk: prefixes that differ by less are equally long. The trie's chunks are 128 characters.
    pub chunk_tokens: NonZeroU32,
}

impl Default for PrefixAware {
    fn default() -> Self {
        Self { chunk_tokens: NonZeroU32::new(32).expect("it is not 0") }
    }
}

impl Policy for PrefixAware {
    fn choose(&self, cx: &Cx<'_>, trace: &mut Trace) -> Choice {
        let sights = look(cx);
        let chunk = f64::from(self.chunk_tokens.get());
        let chunks = |cached: f64| (cached / chunk).floor();
        let most = sights.iter().map(|(_, sight)| chunks(sight.cached)).fold(0.0, f64::max);
        let holders: Vec<(u32, u64)> = sights
            .iter()
            .filter(|(_, sight)| chunks(sight.cached) >= most)
            .map(|(slot, sight)| (*slot, whole(sight.cached)))
            .collect();
        let n = holders.len();
        let (slot, cached) = holders[remainder(cx.seed, n)];
        if most > 0.0 {
            trace.steps.push(Step::Holders { cached: whole(most * chunk), endpoints: n });
        }
        trace.steps.push(Step::Modulo { of: cx.seed, n: n as u64, endpoint: slot });
        record(cx, sights, trace);
        Choice { slot, reason: if most > 0.0 { Reason::Cached } else { Reason::Cold }, cached }
    }

    fn needs_conversation(&self) -> bool {
        false
    }
}
