//! The policies, one file each. The registry names them; nothing else does.

pub mod bounded;
pub mod consistent;
pub mod least_loaded;
pub mod llm_aware;
pub mod marginal_cost;
pub mod mod_n;
pub mod random;
pub mod rendezvous;
pub mod round_robin;

use super::{Choice, Reason};

/// A choice that expects nothing to be cached.
fn plain(slot: u32, reason: Reason) -> Choice {
    Choice { slot, reason, cached: 0 }
}
