//! llm-ring: an endpoint picker for the Kubernetes Gateway API Inference Extension.
//!
//! The core is pure and knows no wire: [`index`] (ring and rendezvous hash), [`pool`] (endpoints, load, placement),
//! [`scheduling`] (policies, the scheduler, decisions that explain themselves). Adapters translate: [`ext_proc`] for
//! Envoy, [`discovery`] for endpoints, [`telemetry`] and [`admin`] for people. [`config`] knows the settings of all,
//! [`app`] puts them together, [`cli`] is the command. `docs/architecture.md` has the map and the invariants;
//! `tests/it/layering.rs` keeps the directions.
//!
//! Words: an *endpoint* is one model server of the *pool*; a *slot* its index in one snapshot; a *conversation* what
//! its cache is about; *work* the tokens a request makes it compute; a *booking* the claim on it until it ends.

pub mod admin;
pub mod app;
pub mod cli;
pub mod config;
pub mod discovery;
pub mod engine;
pub mod ext_proc;
pub mod index;
pub mod pool;
pub mod scheduling;
pub mod telemetry;
pub mod tls;
pub mod tokens;
pub mod yaml;
