//! `/metrics`, `/livez` and `/readyz` over HTTP.

use std::fmt;
use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use prometheus_client::registry::Registry;

/// Says whether requests may come, and what there is to know about it, a line each.
pub type Readiness = Arc<dyn Fn() -> (bool, Vec<String>) + Send + Sync>;

/// What the pages show.
#[derive(Clone)]
struct Pages {
    registry: Arc<Registry>,
    ready: Readiness,
}

impl fmt::Debug for Pages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pages").finish_non_exhaustive()
    }
}

/// Makes the pages; `ready` is what `/readyz` says.
pub fn router(registry: Registry, ready: Readiness) -> Router {
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

async fn readyz(State(pages): State<Pages>) -> (StatusCode, String) {
    let (ready, lines) = (pages.ready)();
    let (status, word) = if ready {
        (StatusCode::OK, "ready")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "not ready")
    };
    (
        status,
        format!("{word}\n{}", lines.iter().map(|line| format!("{line}\n")).collect::<String>()),
    )
}
