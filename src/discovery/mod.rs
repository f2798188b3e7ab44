//! Where endpoints come from. Each source ends in a new [`PoolSnapshot`](crate::pool::PoolSnapshot).

pub mod file;
