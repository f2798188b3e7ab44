//! Where endpoints come from: an InferencePool or a selector in Kubernetes, or a file. Each source tells what endpoints
//! there are now; [`PoolKeeper`](crate::pool::PoolKeeper) makes pools of it.

pub mod file;
pub mod kubernetes;
pub mod lease;
pub mod objectives;
mod objects;
pub mod reconcile;
pub mod watch;
