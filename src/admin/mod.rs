//! What operators talk to: health, metrics, and the stream of decisions.

pub mod decisions;
pub mod http;
