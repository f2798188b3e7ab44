//! Data structures of routing, generic over a dense slot number; they know no pool.

pub mod hash;
pub mod rendezvous;
pub mod ring;
