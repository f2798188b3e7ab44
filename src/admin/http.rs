//! `/metrics`, `/livez` and `/readyz` over HTTP.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use prometheus_client::registry::Registry;

/// What the pages show.
#[derive(Debug, Clone)]
pub struct Pages {
    registry: Arc<Registry>,
    ready: Arc<AtomicBool>,
}

/// Makes the pages; `ready` is what `/readyz` says.
pub fn router(registry: Registry, ready: Arc<AtomicBool>) -> Router {
    Router::new()
        .route("/metrics", get(metrics))
        .route("/livez", get(|| async { "ok\n" }))
        .route("/readyz", get(readyz))
        .with_state(Pages { registry: Arc::new(registry), ready })
}

async fn metrics(State(pages): State<Pages>) -> impl IntoResponse {
    let mut text = String::new();
    match prometheus_client::encoding::text::encode(&mut text, &pages.registry) {
        Ok(()) => (
            StatusCode::OK,
            [(header::CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")],
            text,
        ),
        Err(_) => (
            StatusCode::INTERNAL_SERVER_ERROR,
            [(header::CONTENT_TYPE, "text/plain")],
            "metrics cannot be written\n".to_owned(),
        ),
    }
}

async fn readyz(State(pages): State<Pages>) -> (StatusCode, &'static str) {
    if pages.ready.load(Ordering::Relaxed) {
        (StatusCode::OK, "ready\n")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "draining\n")
    }
}
