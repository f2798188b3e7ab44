#![allow(clippy::disallowed_methods, reason = "watches own a clock, timers and tasks")]
//! Watches an InferencePool and its pods and tells what endpoints there are: what must not be missed is in
//! [`reconcile`](super::reconcile), and here is what can go wrong with a watch.
//!
//! A watch ends and is resumed, or is too old to be resumed (410), or goes silent without a byte: it is asked for anew
//! every `watch`, and given up a few seconds after that. Whatever the server itself says no to begins with a list
//! again, since a version that it refuses once it may refuse for ever. Lists are whole or nothing.

use std::fmt::Debug;
use std::hash::{BuildHasher as _, RandomState};
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use kube::client::ClientBuilder;
use kube::core::NamespaceResourceScope;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tower::util::MapResponseLayer;

use super::objects::{InferencePool, Pod};
use super::reconcile::{Absence, Members, Reading, Reconciler, Rule};
use crate::telemetry::source::SourceStatus;

/// Which pods are endpoints.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Choice {
    /// Those of an InferencePool of this name.
    Pool(String),
    /// Those that a label selector matches, on these ports.
    Selector(String, Vec<u16>),
}

/// How Kubernetes is watched.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Which pods are endpoints.
    pub choice: Choice,
    /// Namespace of all of them.
    pub namespace: String,
    /// How pods are read.
    pub reading: Reading,
    /// How long one watch lasts.
    pub watch: Duration,
}

/// Finds the API server: by the service account of the pod, or by `KUBECONFIG` or `~/.kube/config`.
///
/// # Errors
/// There is neither, or it cannot be read.
pub async fn server(watch: Duration) -> anyhow::Result<kube::Config> {
    let mut config = kube::Config::infer().await.map_err(|error| {
        anyhow::anyhow!(
            "no way to Kubernetes: neither a service account of a pod nor a kubeconfig ({error})"
        )
    })?;
    config.connect_timeout = Some(Duration::from_secs(5));
    // An answer that stops in the middle is one that will not come.
    config.read_timeout = Some(watch + Duration::from_secs(10));
    config.reset_reader_on_write = true;
    Ok(config)
}

/// Makes a client that tells `status` of every answer. It belongs to the runtime it is made on.
///
/// # Errors
/// The certificates of the server's configuration cannot be read.
pub fn client(server: kube::Config, status: &Arc<SourceStatus>) -> anyhow::Result<Client> {
    let status = Arc::clone(status);
    let heard = MapResponseLayer::new(move |response| {
        if let Some(silent) = status.heard(Instant::now()) {
            tracing::info!(silent_seconds = silent.as_secs(), "Kubernetes answers again");
        }
        response
    });
    Ok(ClientBuilder::try_from(server)?.with_layer(&heard).build())
}

/// Follows the pool for ever, and tells of every change of its members.
pub async fn follow(
    client: Client,
    settings: Settings,
    status: Arc<SourceStatus>,
    mut changed: impl FnMut(Members),
) {
    let mut following = Following {
        reconciler: Reconciler::new(settings.reading.clone()),
        pods: None,
        pool_listed: false,
        client,
        settings,
        status,
    };
    let mut pool = following.start();
    let (mut flush_at, mut rest) = (None::<tokio::time::Instant>, Duration::ZERO);
    let mut oddities = std::collections::BTreeSet::new();
    loop {
        let flush = async {
            match flush_at {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            // Members are made first when they are due: events that never pause must not keep them.
            biased;
            () = flush => {
                let began = Instant::now();
                let members = following.reconciler.members();
                for oddity in members.oddities.difference(&oddities) {
                    tracing::warn!(oddity, "a part of the pool is not as it should be");
                }
                oddities.clone_from(&members.oddities);
                changed(members);
                // At most a fifth of the time goes into this, however large the pool and however often it changes.
                rest = 4 * began.elapsed();
                flush_at = None;
                continue;
            }
            event = next(&mut pool) => following.on_pool(event),
            event = next(&mut following.pods) => following.on_pod(event),
        }
        flush_at.get_or_insert_with(|| tokio::time::Instant::now() + SETTLE.max(rest));
    }
}

/// Changes come in flocks: a rolling update is a dozen events.
const SETTLE: Duration = Duration::from_millis(10);

/// Names of the resources, as they are shown.
const PODS: &str = "pods";
const POOLS: &str = "inferencepools";

struct Following {
    reconciler: Reconciler,
    pods: Option<Watch<Pod>>,
    /// Whether the list of pools that comes in, or came in last, has the one that is followed.
    pool_listed: bool,
    client: Client,
    settings: Settings,
    status: Arc<SourceStatus>,
}

impl Following {
    fn start(&mut self) -> Option<Watch<InferencePool>> {
        self.status.expect(PODS);
        match self.settings.choice.clone() {
            Choice::Pool(name) => {
                self.status.expect(POOLS);
                let config = watcher::Config::default().fields(&format!("metadata.name={name}"));
                Some(self.watch(POOLS, config))
            }
            Choice::Selector(selector, ports) => {
                self.reconciler.set_rule(Some(Rule { labels: None, ports }));
                self.watch_pods(selector);
                None
            }
        }
    }

    fn watch<K: Watchable>(&self, resource: &'static str, config: watcher::Config) -> Watch<K> {
        let config = watcher::Config {
            timeout: Some(u32::try_from(self.settings.watch.as_secs()).unwrap_or(u32::MAX)),
            ..config
        };
        let api = Api::namespaced(self.client.clone(), &self.settings.namespace);
        Watch::start(resource, api, config, Arc::clone(&self.status))
    }

    fn watch_pods(&mut self, selector: String) {
        if self.pods.as_ref().is_none_or(|pods| pods.selector != selector) {
            let pods = self.watch(PODS, watcher::Config::default().labels(&selector));
            self.pods = Some(Watch { selector, ..pods });
        }
    }

    fn on_pool(&mut self, event: Event<InferencePool>) {
        match event {
            // A pool is one object: its absence is only known at the list's end.
            Event::Init => self.pool_listed = false,
            Event::InitApply(pool) | Event::Apply(pool) => {
                self.pool_listed = true;
                self.status.missing(None);
                let rule = pool.rule();
                // An empty selector would watch every pod of the namespace.
                if rule.labels.as_ref().is_some_and(|labels| !labels.is_empty()) {
                    self.watch_pods(pool.selector());
                }
                self.reconciler.set_rule(Some(rule));
            }
            Event::InitDone => {
                self.status.listed(POOLS);
                if !self.pool_listed {
                    self.lose_pool();
                }
            }
            Event::Delete(_) => self.lose_pool(),
        }
    }

    fn lose_pool(&mut self) {
        tracing::warn!("{}: there is no endpoint to route to until it is made", self.missing());
        self.status.missing(Some(self.missing()));
        self.reconciler = Reconciler::new(self.settings.reading.clone());
        self.pods = None;
        self.status.unlisted(PODS);
    }

    fn missing(&self) -> String {
        let namespace = &self.settings.namespace;
        match &self.settings.choice {
            Choice::Pool(name) => format!("there is no InferencePool {namespace}/{name}"),
            Choice::Selector(..) => String::new(),
        }
    }

    fn on_pod(&mut self, event: Event<Pod>) {
        match event {
            Event::Init => self.reconciler.list_begins(),
            Event::InitApply(pod) => self.reconciler.listed(pod.read()),
            Event::InitDone => {
                self.reconciler.list_ends();
                self.status.listed(PODS);
            }
            Event::Apply(pod) => self.reconciler.apply(pod.read()),
            Event::Delete(pod) => self.reconciler.delete(pod.uid()),
        }
    }
}

impl Members {
    /// Returns the counts by their words.
    #[must_use]
    pub fn absences(&self) -> std::collections::BTreeMap<&'static str, u64> {
        let count = |it: &Absence| (it.as_str(), self.absent.get(it).copied().unwrap_or(0));
        Absence::ALL.iter().map(count).collect()
    }
}

/// Takes the next event, or waits for ever where nothing is watched.
async fn next<K>(watch: &mut Option<Watch<K>>) -> Event<K> {
    match watch {
        Some(watch) => watch.events.recv().await.expect("the watch's task never ends by itself"),
        None => std::future::pending().await,
    }
}

trait Watchable:
    Resource<DynamicType = (), Scope = NamespaceResourceScope>
    + Clone
    + DeserializeOwned
    + Debug
    + Send
    + 'static
{
}

impl Watchable for Pod {}
impl Watchable for InferencePool {}

/// A watch that ends with its owner.
struct Watch<K> {
    selector: String,
    events: mpsc::Receiver<Event<K>>,
    _task: Task,
}

struct Task(AbortHandle);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl<K: Watchable> Watch<K> {
    fn start(
        resource: &'static str,
        api: Api<K>,
        config: watcher::Config,
        status: Arc<SourceStatus>,
    ) -> Self {
        let (sender, events) = mpsc::channel(256);
        let task = tokio::spawn(run(resource, api, config, status, sender));
        Self { selector: String::new(), events, _task: Task(task.abort_handle()) }
    }
}

async fn run<K: Watchable>(
    resource: &'static str,
    api: Api<K>,
    config: watcher::Config,
    status: Arc<SourceStatus>,
    sender: mpsc::Sender<Event<K>>,
) {
    let mut backoff = Backoff::default();
    loop {
        let mut events = pin!(watcher(api.clone(), config.clone()));
        while let Some(event) = events.next().await {
            let error = match event {
                Ok(event) => {
                    if matches!(event, Event::InitDone | Event::Apply(_) | Event::Delete(_))
                        && status.accepted(resource)
                    {
                        tracing::info!(resource, "the API server takes requests again");
                    }
                    if sender.send(event).await.is_err() {
                        return;
                    }
                    continue;
                }
                Err(error) => error,
            };
            let refusal = refusal(&error);
            match &refusal {
                // Too old a version is nothing that anybody could mend: the next list does.
                Some(refused) if refused.code == 410 => {
                    tracing::debug!(resource, "the watch is too old; listing again");
                }
                Some(refused) => {
                    let text = advice(resource, refused);
                    if status.refused(resource, &text) {
                        tracing::warn!(resource, error = text, "the API server refuses");
                    }
                }
                None => {
                    let text = shown(&error);
                    if status.unreachable(&text, Instant::now()) {
                        tracing::warn!(
                            resource,
                            error = text,
                            "Kubernetes does not answer; routing goes on with what is known"
                        );
                    }
                }
            }
            tokio::time::sleep(backoff.next(Instant::now())).await;
            if refusal.is_some() {
                break;
            }
        }
    }
}

/// What the server itself said no with.
fn refusal(error: &watcher::Error) -> Option<&kube::core::Status> {
    match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status))
        | watcher::Error::WatchFailed(kube::Error::Api(status))
        | watcher::Error::WatchError(status) => Some(status),
        watcher::Error::InitialListFailed(_)
        | watcher::Error::WatchStartFailed(_)
        | watcher::Error::WatchFailed(_)
        | watcher::Error::NoResourceVersion => None,
    }
}

/// Says what to do about a refusal.
fn advice(resource: &str, refused: &kube::core::Status) -> String {
    let said = &refused.message;
    match refused.code {
        401 => format!("the API server does not know who we are: {said}"),
        403 => format!("its service account needs get, list and watch on {resource}: {said}"),
        404 => format!(
            "the API server has no {resource}: install the CRDs of the Gateway API Inference Extension (v1), or choose pods with --endpoint-selector and --endpoint-target-ports"
        ),
        code => format!("{code}: {said}"),
    }
}

/// Writes an error with its causes, each once.
fn shown(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let said = error.to_string();
        if !text.contains(&said) {
            text = format!("{text}: {said}");
        }
        cause = error.source();
    }
    text
}

/// How long to wait after an error: longer each time, until it has been well for a while; never in step with others.
#[derive(Debug, Default)]
struct Backoff {
    errors: u32,
    last: Option<Instant>,
}

impl Backoff {
    const SHORTEST: Duration = Duration::from_millis(200);
    const LONGEST: Duration = Duration::from_secs(5);
    const WELL: Duration = Duration::from_secs(60);

    fn next(&mut self, now: Instant) -> Duration {
        if self.last.is_some_and(|last| now.saturating_duration_since(last) > Self::WELL) {
            self.errors = 0;
        }
        let wait = (Self::SHORTEST * 2u32.pow(self.errors.min(8))).min(Self::LONGEST);
        self.errors += 1;
        self.last = Some(now + wait);
        let chance = RandomState::new().hash_one(self.errors) >> 32;
        wait / 2 + wait / 2 * u32::try_from(chance).unwrap_or(0) / u32::MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_that_go_on_are_waited_for_longer_and_never_long() {
        let (mut backoff, mut now) = (Backoff::default(), Instant::now());
        let mut waited = Duration::ZERO;
        for _ in 0..20 {
            let wait = backoff.next(now);
            assert!(wait >= Backoff::SHORTEST / 2 && wait <= Backoff::LONGEST);
            now += wait;
            waited += wait;
        }
        assert!(waited > Duration::from_secs(30));
        assert!(backoff.next(now + Duration::from_secs(120)) <= Backoff::SHORTEST);
    }
}
