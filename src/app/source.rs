#![allow(
    clippy::disallowed_methods,
    reason = "the composition root owns the threads and their clocks"
)]
//! The thread on which endpoints are found: reading ten thousand pods or building a large ring must not make a request
//! wait.

use std::hash::{BuildHasher as _, RandomState};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use tokio::sync::{oneshot, watch as channel};

use crate::config::{AddressFamily, Config};
use crate::discovery::kubernetes::{self, Choice};
use crate::discovery::reconcile::{Family, Reading};
use crate::discovery::{file, lease, objectives, watch};
use crate::pool::{Change, Endpoint, PoolKeeper, PoolSnapshot, Warmup};
use crate::scheduling::Scheduler;
use crate::telemetry::metrics::Metrics;
use crate::telemetry::source::SourceStatus;

/// Where endpoints come from, ready to be followed.
pub(super) enum Source {
    File { path: PathBuf, poll: Duration },
    Kubernetes(Box<Kubernetes>),
}

/// A pool in Kubernetes.
pub(super) struct Kubernetes {
    server: kube::Config,
    settings: kubernetes::Settings,
    lease: Option<lease::Settings>,
    objectives: bool,
}

/// What the rest of the picker knows of the source.
pub(super) struct Following {
    pub(super) status: Arc<SourceStatus>,
    /// Whether this picker is the one that is to be asked.
    pub(super) leader: channel::Receiver<bool>,
    /// Ends when a lease that was held has been given back, or at once where there is none.
    pub(super) released: oneshot::Receiver<()>,
    /// Ends when nobody follows the source any more.
    pub(super) ended: oneshot::Receiver<()>,
}

impl Source {
    /// Finds out where endpoints come from, and with a file reads it.
    ///
    /// # Errors
    /// Nothing says where they come from, the file cannot be read, or there is no way to Kubernetes.
    pub(super) async fn of(config: &Config, keeper: &mut PoolKeeper) -> anyhow::Result<Self> {
        if let Some(path) = config.endpoints.file.clone() {
            let endpoints = file::read(&path).map_err(anyhow::Error::msg)?;
            tracing::info!(endpoints = endpoints.len(), file = %path.display(), "endpoints loaded");
            keeper.update(endpoints, Instant::now())?;
            let poll = Duration::from_millis(config.endpoints.poll_ms.into());
            return Ok(Self::File { path, poll });
        }
        let settings = &config.kubernetes;
        let choice = match (&settings.pool, &settings.selector) {
            (Some(pool), _) => Choice::Pool(pool.clone()),
            (None, Some(selector)) => {
                Choice::Selector(selector.clone(), settings.target_ports.clone())
            }
            (None, None) => anyhow::bail!(
                "no endpoints: name an InferencePool with --pool-name NAME (kubernetes.pool), pods with --endpoint-selector and --endpoint-target-ports, or a file with --endpoints FILE (endpoints.file)"
            ),
        };
        let time = Duration::from_secs(settings.watch_seconds.into());
        let server = watch::server(time).await?;
        let namespace =
            settings.namespace.clone().unwrap_or_else(|| server.default_namespace.clone());
        let lease =
            settings.leader_election.then(|| lease_settings(config, &namespace)).transpose()?;
        let reading = Reading {
            family: match settings.address_family {
                AddressFamily::Primary => Family::Primary,
                AddressFamily::Ipv4 => Family::V4,
                AddressFamily::Ipv6 => Family::V6,
            },
            weight_label: settings.weight_label.clone(),
            role_label: settings.role_label.clone(),
        };
        tracing::info!(?choice, namespace, server = %server.cluster_url, "endpoints come from Kubernetes");
        let objectives = settings.objectives;
        let settings = kubernetes::Settings { choice, namespace, reading, watch: time };
        Ok(Self::Kubernetes(Box::new(Kubernetes { server, settings, lease, objectives })))
    }

    /// Follows it on a thread of its own until the process ends.
    ///
    /// # Errors
    /// The thread or its client cannot be made.
    pub(super) fn follow(
        self,
        mut keeper: PoolKeeper,
        to: Publish,
        metrics: Arc<Metrics>,
        status: Arc<SourceStatus>,
        stop: channel::Receiver<bool>,
    ) -> anyhow::Result<Following> {
        let elected = matches!(&self, Self::Kubernetes(it) if it.lease.is_some());
        let (leads, leader) = channel::channel(!elected);
        let (released, was_released) = oneshot::channel();
        // Without a lease there is nothing to wait for.
        let released = elected.then_some(released);
        let (members, mut updates) = channel::channel(None::<Vec<Endpoint>>);
        if let Self::Kubernetes(kubernetes) = &self {
            kubernetes.settings.expect(&status);
        }
        let (ends, ended) = oneshot::channel::<()>();
        let following =
            Following { status: Arc::clone(&status), leader, released: was_released, ended };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        // The client belongs to the runtime that it is made on.
        let entered = runtime.enter();
        let client = match &self {
            Self::File { .. } => None,
            Self::Kubernetes(kubernetes) => {
                Some(watch::client(kubernetes.server.clone(), &status)?)
            }
        };
        drop(entered);
        let run = async move {
            let keep = keep(&mut keeper, &mut updates, |change| to.publish(&status, change));
            match self {
                Self::File { path, poll } => {
                    let read = file::watch(&path, poll, |read| match read {
                        Ok(endpoints) => drop(members.send(Some(endpoints))),
                        Err(error) => {
                            metrics.pool_errors.inc();
                            tracing::warn!(error, "the endpoints in use stay");
                        }
                    });
                    tokio::join!(read, keep);
                }
                Self::Kubernetes(kubernetes) => {
                    let Kubernetes { settings, lease, objectives, .. } = *kubernetes;
                    let client = client.expect("it was made for Kubernetes");
                    if let Some(lease) = lease {
                        let (client, status) = (client.clone(), Arc::clone(&status));
                        tokio::spawn(async move {
                            lease::hold(client, lease, status, leads, stop).await;
                            drop(released);
                        });
                    }
                    let prioritise = async {
                        if objectives {
                            let set = |found| to.scheduler.set_objectives(found);
                            objectives::follow(client.clone(), &settings, &status, set).await;
                        }
                    };
                    let follow = kubernetes::follow(
                        client.clone(),
                        settings.clone(),
                        Arc::clone(&status),
                        |found| {
                            status.set_absent(found.absences());
                            drop(members.send(Some(found.endpoints)));
                        },
                    );
                    tokio::join!(follow, prioritise, keep);
                }
            }
        };
        std::thread::Builder::new()
            .name("discovery".to_owned())
            .spawn(move || {
                // Dropped however this ends.
                let _ends = ends;
                runtime.block_on(run);
            })
            .context("no thread for discovery")?;
        Ok(following)
    }
}

/// How conversations and load are kept while the membership changes.
pub(super) fn keeper(config: &Config) -> PoolKeeper {
    let warmup = Warmup {
        time: Duration::from_secs(config.warmup.seconds.into()),
        steps: config.warmup.steps.get(),
    };
    PoolKeeper::new(config.ring.points.get(), warmup)
}

fn lease_settings(config: &Config, namespace: &str) -> anyhow::Result<lease::Settings> {
    let settings = &config.kubernetes;
    let name = settings.lease.clone().unwrap_or_else(|| {
        let pool = settings.pool.as_deref().unwrap_or("llm-ring");
        format!("epp-{namespace}-{pool}.llm-d.ai")
    });
    let identity = settings.identity.clone().or_else(|| {
        let name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok()?;
        // Two on one host must not take themselves for one.
        let name = format!("{}-{:08x}", name.trim(), RandomState::new().hash_one(0) >> 32);
        Some(name).filter(|name| !name.starts_with('-'))
    });
    let identity = identity
        .context("who we are in the Lease is not known: set POD_NAME, or kubernetes.identity")?;
    let duration = Duration::from_secs(settings.lease_seconds.into());
    Ok(lease::Settings { name, namespace: namespace.to_owned(), identity, duration })
}

/// Feeds the keeper with what the source tells, and lets its newcomers rise in time.
async fn keep(
    keeper: &mut PoolKeeper,
    updates: &mut channel::Receiver<Option<Vec<Endpoint>>>,
    mut publish: impl FnMut(Change),
) {
    loop {
        let next = keeper.next_tick(Instant::now());
        let tick = async {
            match next {
                Some(at) => tokio::time::sleep_until(at.into()).await,
                None => std::future::pending().await,
            }
        };
        let began;
        let change = tokio::select! {
            changed = updates.changed() => {
                if changed.is_err() {
                    return;
                }
                let endpoints = updates.borrow_and_update().clone().unwrap_or_default();
                began = Instant::now();
                keeper.update(endpoints, Instant::now()).unwrap_or_else(|error| {
                    tracing::error!(%error, "the endpoints in use stay");
                    None
                })
            }
            () = tick => {
                began = Instant::now();
                keeper.tick(began)
            }
        };
        if let Some(change) = change {
            publish(change);
            // At most a fifth of the time goes into rings and counts, however large the pool and often it changes;
            // what comes meanwhile comes together.
            tokio::time::sleep(4 * began.elapsed()).await;
        }
    }
}

/// Conversations whose homes are counted at a change of membership: as many as are remembered by default.
const COUNTED: usize = 50_000;

/// Who follows the pool.
pub(super) struct Publish {
    pub(super) scheduler: Arc<Scheduler>,
    /// Those who hear its engines.
    pub(super) members: channel::Sender<Arc<PoolSnapshot>>,
}

impl Publish {
    fn publish(&self, status: &SourceStatus, change: Change) {
        let scheduler = &self.scheduler;
        let conversations = scheduler.conversations(COUNTED);
        let homes_moved = scheduler.pool().homes_moved(&change.pool, &conversations);
        status.changed(change.warming, homes_moved);
        let (endpoints, version) = (change.pool.endpoints().len(), change.pool.version());
        let (warming, remembered) = (change.warming, conversations.len());
        self.members.send_replace(Arc::clone(&change.pool));
        scheduler.adopt(change.pool);
        if change.joined.is_empty() && change.left.is_empty() {
            tracing::debug!(
                endpoints,
                version,
                warming,
                homes_moved,
                remembered,
                "weights changed"
            );
        } else {
            let (joined, left) = (names(&change.joined), names(&change.left));
            tracing::info!(
                endpoints,
                version,
                joined,
                left,
                warming,
                homes_moved,
                remembered,
                "endpoints changed"
            );
        }
    }
}

/// Writes names, but not a thousand of them.
fn names(names: &[String]) -> String {
    const SHOWN: usize = 20;
    let mut text = names[..names.len().min(SHOWN)].join(" ");
    if names.len() > SHOWN {
        text.push_str(&format!(" and {} more", names.len() - SHOWN));
    }
    text
}
