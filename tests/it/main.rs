//! The picker as a whole, behind real Envoys, before scripted and real model servers.
#![allow(clippy::disallowed_methods, reason = "tests own their clocks, timers and tasks")]
#![allow(clippy::print_stderr, reason = "that is where a test run is read")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says so where it stopped")]

mod chart;
mod cluster;
mod docs;
mod endpoints_file;
mod engines;
mod grpc;
mod harness;
mod install;
mod knowledge;
mod kubernetes;
mod kv_events;
#[cfg(feature = "lab")]
mod lab;
mod layering;
mod life;
mod modes;
mod passage;
mod picks;
mod records;
mod reload;
mod standalone;
mod start;
mod tokens;
mod traces;
