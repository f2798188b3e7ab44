//! llm-ring: an endpoint picker for the Kubernetes Gateway API Inference Extension.
pub mod index;
pub mod pool;
pub mod scheduling;
