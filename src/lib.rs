//! llm-ring: an endpoint picker for the Kubernetes Gateway API Inference Extension.
pub mod admin;
pub mod app;
pub mod cli;
pub mod config;
pub mod discovery;
pub mod ext_proc;
pub mod index;
pub mod pool;
pub mod scheduling;
pub mod telemetry;
pub mod tls;
pub mod yaml;
