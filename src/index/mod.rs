//! Data structures of routing, generic over a dense slot number; they know no pool.

pub mod block;
pub mod hash;
pub mod prefix;
pub mod rendezvous;
pub mod ring;
pub mod trust;
