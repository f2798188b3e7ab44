//! The policies, one file each. The registry names them; nothing else does.

pub mod bounded;
pub mod consistent;
pub mod kv_aware;
pub mod least_loaded;
pub mod llm_aware;
pub mod load_aware;
pub mod marginal_cost;
pub mod mod_n;
pub mod prefix_aware;
pub mod random;
pub mod rendezvous;
pub mod round_robin;
pub mod weighted;

use super::{Choice, Cx, Reason, Step, Trace, Unit};
use crate::pool::Sight;

/// A choice that expects nothing to be cached.
fn plain(slot: u32, reason: Reason) -> Choice {
    Choice { slot, reason, cached: 0 }
}

/// Returns what is seen of each candidate, in slot order.
fn look(cx: &Cx<'_>) -> Vec<(u32, Sight)> {
    cx.candidates.iter().map(|slot| (slot, cx.sight(slot))).collect()
}

/// Leaves in the trace what was seen, if it has the loads too, so that the decision can be made again.
fn record(cx: &Cx<'_>, sights: Vec<(u32, Sight)>, trace: &mut Trace) {
    if !trace.loads.is_empty() {
        trace.output = cx.output;
        trace.hot = cx.hot;
        trace.scale = cx.scale;
        trace.sights = sights;
    }
}

/// Tokens are whole.
fn whole(tokens: f64) -> u64 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "it was made of a token count"
    )]
    {
        tokens as u64
    }
}

/// Takes an endpoint for a prompt that is cached nowhere, or not enough of it: where its conversation lives, if that is
/// asked for, else the one with the fewest requests in flight for its weight.
fn uncached(cx: &Cx<'_>, by_conversation: bool, reason: Reason, trace: &mut Trace) -> Choice {
    if by_conversation && cx.in_conversation {
        let slot = cx.home();
        trace.steps.push(Step::Ring { endpoint: slot });
        return plain(slot, Reason::Home);
    }
    let slot = cx.least_loaded(Unit::Requests, |slot| cx.chance(slot));
    let load = cx.load(slot, Unit::Requests);
    trace.steps.push(Step::Least { endpoint: slot, load, unit: Unit::Requests });
    plain(slot, reason)
}

/// Returns the first of some slots by the text of their addresses, which is what others break ties by.
fn first_by_address(cx: &Cx<'_>, slots: impl Iterator<Item = u32>) -> u32 {
    let mut slots = slots.peekable();
    let first = slots.next().expect("a policy is called with at least one candidate");
    if slots.peek().is_none() {
        return first;
    }
    let address = |slot: u32| cx.pool.endpoint(slot).address.to_string();
    let least = |(best, text): (u32, String), slot: u32| {
        let other = address(slot);
        if other < text { (slot, other) } else { (best, text) }
    };
    slots.fold((first, address(first)), least).0
}
