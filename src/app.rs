#![allow(clippy::disallowed_methods, reason = "the composition root owns the tasks")]
//! Builds each part from its settings, runs them, and ends them in order.

use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tonic::transport::Server;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use crate::admin::decisions::DecisionService;
use crate::admin::http;
use crate::config::{Config, TlsMode};
use crate::discovery::file;
use crate::ext_proc::exchange::ExchangeSettings;
use crate::ext_proc::request::ReadOptions;
use crate::ext_proc::server::{Limits, Parts, Picker};
use crate::pool::PoolSnapshot;
use crate::scheduling::{Admission, Detail, Scheduler, Settings};
use crate::telemetry::metrics::Metrics;
use crate::telemetry::observer::Observer;
use crate::telemetry::spans::Tracing;
use crate::tls::{self, Certificate};

/// Health service names that gateways and the upstream chart ask for.
const HEALTH_NAMES: [&str; 5] = [
    "",
    "liveness",
    "readiness",
    "inference-extension",
    "envoy.service.ext_proc.v3.ExternalProcessor",
];
/// gRPC messages may exceed the body limit by this much for headers, in bytes; a larger body gets its 413 from us.
const MESSAGE_SLACK: usize = 4 << 20;

/// Serves until SIGTERM or SIGINT, then drains.
///
/// # Errors
/// A part cannot start: the text says which, and why.
pub async fn serve(config: Config) -> anyhow::Result<()> {
    let path = config.endpoints.file.clone().context(
        "no endpoints: name a file with --endpoints FILE, or in the configuration as endpoints.file",
    )?;
    let points = config.ring.points.get();
    let pool = file::read(&path, 0, points).map_err(anyhow::Error::msg)?;
    tracing::info!(endpoints = pool.endpoints().len(), file = %path.display(), "endpoints loaded");

    let scheduler = Arc::new(Scheduler::new(settings(&config)?, Arc::new(pool)));
    let (metrics, registry) = Metrics::new(Arc::clone(&scheduler));
    let tracing = tracing(&config)?;
    let log = config.log.decisions.then_some(config.log.format);
    let observer = Arc::new(Observer::new(Arc::clone(&metrics), tracing.clone(), log));

    let ready = Arc::new(AtomicBool::new(true));
    let (health, health_service) = tonic_health::server::health_reporter();
    report(&health, ServingStatus::Serving).await;
    let (stop, stopping) = watch::channel(false);

    let http_listener = listen(&config, config.server.metrics_port, "metrics_port").await?;
    let admin_listener = listen(&config, config.server.health_port, "health_port").await?;
    let grpc_listener = listen(&config, config.server.grpc_port, "grpc_port").await?;
    tracing::info!(
        grpc = %grpc_listener.local_addr()?,
        health = %admin_listener.local_addr()?,
        metrics = %http_listener.local_addr()?,
        policy = config.policy.as_str(),
        tls = ?config.tls.mode,
        "serving"
    );

    let pages = http::router(registry, Arc::clone(&ready));
    let http = tokio::spawn(serve_http(http_listener, pages, stopping.clone()));
    let decisions = DecisionService::server(Arc::clone(&observer));
    let admin = Server::builder().add_service(health_service.clone()).add_service(decisions);
    let incoming = tls::incoming(admin_listener, None)?;
    let admin =
        tokio::spawn(admin.serve_with_incoming_shutdown(incoming, stopped(stopping.clone())));
    let picker = Picker::new(Parts {
        scheduler: Arc::clone(&scheduler),
        observer: Arc::clone(&observer),
        exchange: exchange(&config),
        limits: limits(&config),
        explain_headers: config.answers.explain_headers,
        detail: if config.log.full_detail { Detail::Full } else { Detail::Normal },
    });
    let grpc = Server::builder()
        .initial_stream_window_size(config.server.stream_window_bytes.get())
        .initial_connection_window_size(config.server.connection_window_bytes.get())
        .http2_keepalive_interval(Some(Duration::from_secs(60)))
        .add_service(picker.into_service())
        .add_service(health_service);
    let incoming = tls::incoming(grpc_listener, certificate(&config)?)?;
    let mut grpc = tokio::spawn(grpc.serve_with_incoming_shutdown(incoming, stopped(stopping)));
    let watching =
        tokio::spawn(watch_pool(path, config.endpoints.poll_ms.into(), scheduler, metrics));

    let served = tokio::select! {
        () = asked_to_stop() => None,
        result = &mut grpc => Some(result),
    };
    tracing::info!("draining");
    ready.store(false, Ordering::Relaxed);
    report(&health, ServingStatus::NotServing).await;
    let _ = stop.send(true);
    let result = match served {
        Some(result) => result?,
        None => match tokio::time::timeout(Duration::from_secs(config.drain.timeout_seconds), grpc)
            .await
        {
            Ok(result) => result?,
            Err(_) => {
                tracing::warn!(
                    seconds = config.drain.timeout_seconds,
                    "streams were still open at the end of drain.timeout_seconds"
                );
                Ok(())
            }
        },
    };
    for task in [watching.abort_handle(), http.abort_handle(), admin.abort_handle()] {
        task.abort();
    }
    if let Some(tracing) = tracing {
        tokio::task::spawn_blocking(move || tracing.shutdown()).await?;
    }
    tracing::info!("stopped");
    Ok(result?)
}

/// Makes the scheduler's settings of a configuration.
///
/// # Errors
/// The policy does not exist.
pub fn settings(config: &Config) -> anyhow::Result<Settings> {
    let name = config.policy.as_str();
    let (policy_name, policy) =
        config.policies.get(name).with_context(|| format!("there is no policy `{name}`"))?;
    Ok(Settings {
        policy_name,
        policy,
        admission: match config.admission.max_requests_per_endpoint {
            0 => Admission::Open,
            requests => Admission::Limited {
                requests,
                retry_after: Duration::from_secs(config.admission.retry_after_seconds.into()),
            },
        },
        release: config.load.release_prompt.into(),
        default_max_tokens: config.load.default_max_tokens,
        destinations: config.answers.destinations,
        memory_entries: usize::try_from(config.memory.conversations.get())
            .ok()
            .and_then(NonZeroUsize::new)
            .unwrap_or(NonZeroUsize::MIN),
    })
}

/// Makes the settings of request reading of a configuration.
#[must_use]
pub fn exchange(config: &Config) -> ExchangeSettings {
    ExchangeSettings {
        conversation_headers: config.requests.conversation_headers.clone(),
        max_body_bytes: config.requests.max_body_bytes,
        read: ReadOptions {
            max_decoded_bytes: config.requests.max_decoded_bytes,
            use_user_field: config.requests.use_user_field,
        },
        errors: config.answers.errors,
    }
}

fn limits(config: &Config) -> Limits {
    let requests = &config.requests;
    Limits {
        decision_deadline: Duration::from_millis(requests.decision_deadline_ms),
        body_idle_timeout: Duration::from_millis(requests.body_idle_timeout_ms),
        body_memory_bytes: requests.body_memory_bytes,
        message_bytes: usize::try_from(requests.max_body_bytes)
            .unwrap_or(usize::MAX)
            .saturating_add(MESSAGE_SLACK),
    }
}

fn tracing(config: &Config) -> anyhow::Result<Option<Tracing>> {
    let tracing = &config.tracing;
    let Some(endpoint) = &tracing.otlp_endpoint else {
        return Ok(None);
    };
    Tracing::new(endpoint, tracing.sample.into(), &tracing.service_name)
        .with_context(|| format!("tracing.otlp_endpoint `{endpoint}` cannot be used; it is like http://collector:4317"))
        .map(Some)
}

async fn listen(config: &Config, port: u16, key: &str) -> anyhow::Result<TcpListener> {
    let address = SocketAddr::new(config.server.address, port);
    TcpListener::bind(address).await.with_context(|| {
        format!("cannot listen on {address}; if it is in use, choose another server.{key} (0 takes a free one)")
    })
}

fn certificate(config: &Config) -> anyhow::Result<Option<Arc<Certificate>>> {
    match config.tls.mode {
        TlsMode::Off => Ok(None),
        TlsMode::SelfSigned => Certificate::self_signed().map(Some),
        TlsMode::Files => {
            let (cert, key) = config.tls.files().map_err(anyhow::Error::msg)?;
            let certificate = Certificate::from_files(cert, key)?;
            tokio::spawn(Arc::clone(&certificate).follow(cert.to_owned(), key.to_owned()));
            Ok(Some(certificate))
        }
    }
}

async fn serve_http(listener: TcpListener, pages: axum::Router, stopping: watch::Receiver<bool>) {
    if let Err(error) = axum::serve(listener, pages).with_graceful_shutdown(stopped(stopping)).await
    {
        tracing::error!(%error, "the metrics port has failed");
    }
}

async fn watch_pool(path: PathBuf, poll_ms: u64, scheduler: Arc<Scheduler>, metrics: Arc<Metrics>) {
    let poll = Duration::from_millis(poll_ms);
    file::watch(&path, scheduler.pool(), poll, |change| match change {
        Ok(pool) => adopt(&scheduler, pool),
        Err(error) => {
            metrics.pool_errors.inc();
            tracing::warn!(error, "the endpoints in use stay");
        }
    })
    .await;
}

fn adopt(scheduler: &Scheduler, pool: Arc<PoolSnapshot>) {
    tracing::info!(
        endpoints = pool.endpoints().len(),
        version = pool.version(),
        "endpoints changed"
    );
    scheduler.adopt(pool);
}

async fn report(health: &HealthReporter, status: ServingStatus) {
    for name in HEALTH_NAMES {
        // A draining picker is alive: it must not be restarted for it.
        let status = if name == "liveness" { ServingStatus::Serving } else { status };
        health.set_service_status(name, status).await;
    }
}

async fn stopped(mut stopping: watch::Receiver<bool>) {
    // An error means that the sender is gone, which is a stop as well.
    drop(stopping.wait_for(|stop| *stop).await);
}

async fn asked_to_stop() {
    let (Ok(mut term), Ok(mut int)) =
        (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    else {
        tracing::error!("signals cannot be received");
        return std::future::pending().await;
    };
    tokio::select! {
        _ = term.recv() => {}
        _ = int.recv() => {}
    }
}
