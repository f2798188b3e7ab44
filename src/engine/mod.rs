//! What model servers say of themselves: load and memory by their metrics, their caches by their KV events; and what
//! is known of the caches from that, or else from what was sent there.

pub mod dialect;
pub mod exposition;
pub mod follow;
pub mod knowledge;
pub mod kv_stream;
pub mod kv_subscribe;
pub mod kv_wire;
pub mod scrape;
mod zmtp;
