//! Envoy's external processing: one stream a request, read, decided, passed on and watched to its end.

pub mod exchange;
mod inflate;
mod json;
pub mod reply;
pub mod request;
pub mod response;
pub mod server;
mod tokenizing;
mod waiting;
