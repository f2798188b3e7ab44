#![allow(clippy::disallowed_methods, reason = "the composition root owns the tasks")]
//! Builds each part from its settings, runs them, and ends them in order.

mod engines;
mod reload;
mod source;
mod tokens;

use std::net::SocketAddr;
use std::num::{NonZeroU64, NonZeroUsize};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tonic::transport::Server;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use crate::admin::decisions::DecisionService;
use crate::admin::http;
use crate::config::{Config, Origin, TlsMode};
use crate::engine::follow;
use crate::engine::knowledge::Knowledge;
use crate::ext_proc::exchange::ExchangeSettings;
use crate::ext_proc::request::ReadOptions;
use crate::ext_proc::server::{Limits, Parts, Picker};
use crate::scheduling::{Admission, Detail, HoldSettings, Scheduler, Settings};
use crate::telemetry::metrics::Metrics;
use crate::telemetry::observer::Observer;
use crate::telemetry::records;
use crate::telemetry::source::SourceStatus;
use crate::telemetry::spans::Tracing;
use crate::tls::{self, Certificate};

use source::Source;

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

/// Serves until SIGTERM or SIGINT, then drains; follows the policy of the configuration's file, if it has one.
///
/// # Errors
/// A part cannot start: the text says which, and why.
pub async fn serve(config: Config, origin: Option<Origin>) -> anyhow::Result<()> {
    let mut keeper = source::keeper(&config);
    let source = Source::of(&config, &mut keeper).await?;
    let scheduler = Arc::new(Scheduler::new(settings(&config)?, keeper.pool()));
    let status = Arc::new(SourceStatus::default());
    let knowledge = Arc::new(knowledge(&config));
    let (metrics, registry) =
        Metrics::new(Arc::clone(&scheduler), Arc::clone(&status), Arc::clone(&knowledge));
    let reload = reload::Reload::new(&config, origin, Arc::clone(&scheduler))?;
    let tracing = tracing(&config)?;
    let tokens = tokens::resolver(&config).await?;
    let log = config.log.decisions.then_some(config.log.format);
    let records = records(&config);
    let observer = Arc::new(Observer::new(Arc::clone(&metrics), tracing.clone(), log, records));

    let http_listener = listen(&config, config.server.metrics_port, "metrics_port").await?;
    let admin_listener = listen(&config, config.server.health_port, "health_port").await?;
    let grpc_listener = listen(&config, config.server.grpc_port, "grpc_port").await?;
    let certificate = certificate(&config)?;

    let epoch = Instant::now();
    let (members, pool) = watch::channel(scheduler.pool());
    if knowledge.settings().any() {
        follow::start(engines::following(&config)?, Arc::clone(&knowledge), pool, epoch)?;
    }
    let (drain, draining) = watch::channel(false);
    let (stop, stopping) = watch::channel(false);
    let publish = source::Publish { scheduler: Arc::clone(&scheduler), members };
    let following = source.follow(keeper, publish, metrics, status, draining.clone())?;
    let (released, ended) = (following.released, following.ended);
    let readiness = Arc::new(Readiness {
        status: following.status,
        leader: following.leader,
        draining,
        scheduler: Arc::clone(&scheduler),
    });
    let (health, health_service) = tonic_health::server::health_reporter();
    readiness.report(&health).await;
    tracing::info!(
        grpc = %grpc_listener.local_addr()?,
        health = %admin_listener.local_addr()?,
        metrics = %http_listener.local_addr()?,
        policy = config.policy.as_str(),
        tls = ?config.tls.mode,
        "serving"
    );

    let pages = http::router(registry, Arc::clone(&readiness).as_page());
    let http = tokio::spawn(serve_http(http_listener, pages, stopping.clone()));
    let decisions = DecisionService::server(Arc::clone(&observer));
    let admin = Server::builder().add_service(health_service.clone()).add_service(decisions);
    let incoming = tls::incoming(admin_listener, None)?;
    let admin =
        tokio::spawn(admin.serve_with_incoming_shutdown(incoming, stopped(stopping.clone())));
    let picker = Picker::new(Parts {
        scheduler,
        observer,
        exchange: exchange(&config),
        limits: limits(&config),
        explain_headers: config.answers.explain_headers,
        detail: if config.log.full_detail { Detail::Full } else { Detail::Normal },
        hold: hold(&config),
        knowledge: knowledge.settings().any().then_some(knowledge),
        epoch,
        tokens,
    });
    let grpc = Server::builder()
        .initial_stream_window_size(config.server.stream_window_bytes.get())
        .initial_connection_window_size(config.server.connection_window_bytes.get())
        .http2_keepalive_interval(Some(Duration::from_secs(60)))
        .add_service(picker.clone().into_service())
        .add_service(health_service);
    let incoming = tls::incoming(grpc_listener, certificate)?;
    let mut grpc = tokio::spawn(grpc.serve_with_incoming_shutdown(incoming, stopped(stopping)));
    let reporting = tokio::spawn(readiness.follow(health));
    let reloading = tokio::spawn(reload.follow());

    let mut signals = Signals::new()?;
    let asked = tokio::select! {
        asked = signals.next() => asked,
        result = &mut grpc => return Ok(result??),
        _ = ended => anyhow::bail!("the thread that follows the endpoints has ended, which it never does by itself"),
    };
    let linger = Duration::from_secs(config.drain.linger_seconds);
    tracing::info!("draining");
    let _ = drain.send(true);
    picker.hold_no_more();
    if asked == Asked::ToTerminate && !linger.is_zero() {
        tokio::select! {
            () = tokio::time::sleep(linger) => {}
            _ = signals.next() => {}
        }
    }
    let _ = stop.send(true);
    let timeout = Duration::from_secs(config.drain.timeout_seconds);
    let result = tokio::select! {
        result = grpc => result?,
        () = tokio::time::sleep(timeout) => {
            tracing::warn!(
                seconds = config.drain.timeout_seconds,
                "streams were still open at the end of drain.timeout_seconds"
            );
            Ok(())
        }
        _ = signals.next() => {
            tracing::warn!("asked again: open streams are cut");
            Ok(())
        }
    };
    for task in [
        reporting.abort_handle(),
        reloading.abort_handle(),
        http.abort_handle(),
        admin.abort_handle(),
    ] {
        task.abort();
    }
    // Its sender is dropped when there is nothing to wait for any more.
    let _ = tokio::time::timeout(Duration::from_secs(3), released).await;
    if let Some(tracing) = tracing {
        tokio::task::spawn_blocking(move || tracing.shutdown()).await?;
    }
    tracing::info!("stopped");
    Ok(result?)
}

/// Whether requests may come: the pool is known, this picker leads, and it is not on its way out.
#[derive(Debug)]
struct Readiness {
    status: Arc<SourceStatus>,
    leader: watch::Receiver<bool>,
    draining: watch::Receiver<bool>,
    scheduler: Arc<Scheduler>,
}

impl Readiness {
    fn is_ready(&self) -> bool {
        self.status.synced() && *self.leader.borrow() && !*self.draining.borrow()
    }

    fn lines(&self) -> Vec<String> {
        let endpoints = self.scheduler.pool().endpoints().len();
        let mut lines = vec![format!("{endpoints} endpoints")];
        lines.extend(self.status.lines(Instant::now()));
        if !*self.leader.borrow() {
            lines.push(match self.status.leader() {
                Some(leader) => format!("not the leader: {leader} holds the Lease"),
                None => "not the leader: the Lease has not been read yet".to_owned(),
            });
        }
        if *self.draining.borrow() {
            lines.push("draining".to_owned());
        }
        lines
    }

    fn as_page(self: Arc<Self>) -> http::Readiness {
        Arc::new(move || (self.is_ready(), self.lines()))
    }

    async fn report(&self, health: &HealthReporter) {
        let status =
            if self.is_ready() { ServingStatus::Serving } else { ServingStatus::NotServing };
        for name in HEALTH_NAMES {
            // One that drains, waits or stands by is alive: it must not be restarted for it.
            let status = if name == "liveness" { ServingStatus::Serving } else { status };
            health.set_service_status(name, status).await;
        }
    }

    /// Reports every change, for as long as the picker runs.
    async fn follow(self: Arc<Self>, health: HealthReporter) {
        let (mut synced, mut leader, mut draining) =
            (self.status.follow(), self.leader.clone(), self.draining.clone());
        loop {
            self.report(&health).await;
            tokio::select! {
                Ok(()) = synced.changed() => {}
                Ok(()) = leader.changed() => {}
                Ok(()) = draining.changed() => {}
                else => return,
            }
        }
    }
}

/// Makes what is to be known of engines, by a configuration: nothing is known yet.
#[must_use]
pub fn knowledge(config: &Config) -> Knowledge {
    Knowledge::new(engines::knowledge(config))
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
        admission: Admission {
            requests: NonZeroU64::new(config.admission.max_requests_per_endpoint),
            sheddable: NonZeroU64::new(config.admission.max_sheddable_requests_per_endpoint),
            retry_after: Duration::from_secs(config.admission.retry_after_seconds.into()),
        },
        release: config.load.release_prompt.into(),
        prices: (&config.prices).into(),
        default_max_tokens: config.load.default_max_tokens,
        destinations: config.answers.destinations,
        memory_entries: usize::try_from(config.memory.conversations.get())
            .ok()
            .and_then(NonZeroUsize::new)
            .unwrap_or(NonZeroUsize::MIN),
        trace_sights: config.records.path.is_some(),
    })
}

/// Makes the settings of the file of records, if there is to be one.
fn records(config: &Config) -> Option<records::Settings> {
    let path = config.records.path.clone()?;
    // What decides; addresses, certificates and the rest are nobody's business.
    let decides = serde_json::json!({
        "policy": config.policy,
        "policies": config.policies,
        "ring": config.ring,
        "memory": config.memory,
        "load": config.load,
        "prices": config.prices,
        "hold": config.hold,
        "admission": config.admission,
        "answers": { "destinations": config.answers.destinations },
    });
    Some(records::Settings {
        path,
        max_bytes: config.records.max_bytes.into(),
        files: config.records.files.get(),
        config: decides,
    })
}

/// Makes the settings of late binding of a configuration; `None` where it is off.
#[must_use]
pub fn hold(config: &Config) -> Option<HoldSettings> {
    let hold = &config.hold;
    (hold.backlog_ms.get() > 0).then(|| HoldSettings {
        backlog: Duration::from_millis(hold.backlog_ms.get().into()),
        longest: Duration::from_millis(hold.longest_ms.get().into()),
        most: usize::try_from(hold.requests.get()).unwrap_or(usize::MAX),
        retry_after: Duration::from_secs(config.admission.retry_after_seconds.into()),
    })
}

/// Makes the settings of request reading of a configuration.
#[must_use]
pub fn exchange(config: &Config) -> ExchangeSettings {
    let keep_bodies = config.tokenizers.are_used();
    ExchangeSettings {
        conversation_headers: config.requests.conversation_headers.clone(),
        max_body_bytes: config.requests.max_body_bytes,
        read: ReadOptions {
            max_decoded_bytes: config.requests.max_decoded_bytes,
            use_user_field: config.requests.use_user_field,
            block_bytes: if config.prefix.text { config.prefix.block_bytes.get() } else { 0 },
            keep_decoded: keep_bodies,
        },
        errors: config.answers.errors,
        use_subset: config.requests.use_subset,
        keep_bodies,
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

async fn stopped(mut stopping: watch::Receiver<bool>) {
    // An error means that the sender is gone, which is a stop as well.
    drop(stopping.wait_for(|stop| *stop).await);
}

/// How the picker is asked to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Asked {
    /// SIGTERM: as Kubernetes asks, while gateways still send requests.
    ToTerminate,
    /// SIGINT: by somebody at a terminal, who does not want to wait.
    ToStop,
}

struct Signals {
    term: Signal,
    int: Signal,
}

impl Signals {
    fn new() -> anyhow::Result<Self> {
        let (term, int) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()));
        let (term, int) = (term.context("no signals")?, int.context("no signals")?);
        Ok(Self { term, int })
    }

    async fn next(&mut self) -> Asked {
        tokio::select! {
            _ = self.term.recv() => Asked::ToTerminate,
            _ = self.int.recv() => Asked::ToStop,
        }
    }
}
