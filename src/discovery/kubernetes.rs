#![allow(clippy::disallowed_methods, reason = "what follows a pool owns its timers")]
//! Follows an InferencePool and its pods and tells what endpoints there are. What must not be missed is in
//! [`reconcile`](super::reconcile), and what can go wrong with a watch in [`watch`](super::watch).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kube::Client;
use kube::runtime::watcher::{self, Event};

use super::objects::{InferencePool, Pod};
use super::reconcile::{Absence, Members, Reading, Reconciler, Rule};
use super::watch::{Place, Watch};
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

/// Follows the pool for ever, and tells of every change of its members.
pub async fn follow(
    client: Client,
    settings: Settings,
    status: Arc<SourceStatus>,
    mut changed: impl FnMut(Members),
) {
    let mut following = Following {
        current: Selected::nothing(&settings),
        coming: None,
        pool_listed: false,
        place: settings.place(client, &status),
        settings,
        status,
    };
    let mut pool = following.start();
    let (mut flush_at, mut rest) = (None::<tokio::time::Instant>, Duration::ZERO);
    let mut oddities = BTreeSet::new();
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
                let members = following.current.reconciler.members();
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
            event = next(pool.as_mut()) => following.on_pool(event),
            event = next(following.current.watch()) => following.on_pod(event),
            event = next(following.coming.as_mut().and_then(Selected::watch)) => following.on_coming(event),
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
    /// The pods that are the pool's.
    current: Selected,
    /// Those of a selector that the pool has got since. Until they have been listed, the ones from before serve on.
    coming: Option<Selected>,
    /// Whether the list of pools that comes in, or came in last, has the one that is followed.
    pool_listed: bool,
    place: Place,
    settings: Settings,
    status: Arc<SourceStatus>,
}

/// The pods of one selector.
struct Selected {
    reconciler: Reconciler,
    /// With the selector that they are watched by.
    pods: Option<(String, Watch<Pod>)>,
}

impl Selected {
    fn nothing(settings: &Settings) -> Self {
        Self { reconciler: Reconciler::new(settings.reading.clone()), pods: None }
    }

    fn watch(&mut self) -> Option<&mut Watch<Pod>> {
        self.pods.as_mut().map(|(_, pods)| pods)
    }

    fn is_of(&self, selector: &str) -> bool {
        self.pods.as_ref().is_some_and(|(of, _)| of == selector)
    }

    fn on_pod(&mut self, event: Event<Pod>) {
        match event {
            Event::Init => self.reconciler.list_begins(),
            Event::InitApply(pod) => self.reconciler.listed(pod.read()),
            Event::InitDone => self.reconciler.list_ends(),
            Event::Apply(pod) => self.reconciler.apply(pod.read()),
            Event::Delete(pod) => self.reconciler.delete(pod.uid()),
        }
    }
}

impl Settings {
    /// Says what has to be listed before there is a pool: to be called before anybody asks.
    pub fn expect(&self, status: &SourceStatus) {
        status.expect(PODS);
        if matches!(self.choice, Choice::Pool(_)) {
            status.expect(POOLS);
        }
    }

    /// Says where to watch.
    pub(super) fn place(&self, client: Client, status: &Arc<SourceStatus>) -> Place {
        let (namespace, status) = (self.namespace.clone(), Arc::clone(status));
        Place { client, namespace, time: self.watch, status }
    }
}

impl Following {
    fn start(&mut self) -> Option<Watch<InferencePool>> {
        match self.settings.choice.clone() {
            Choice::Pool(name) => {
                let config = watcher::Config::default().fields(&format!("metadata.name={name}"));
                Some(self.place.watch(POOLS, config))
            }
            Choice::Selector(selector, ports) => {
                self.select(selector, Rule { labels: None, ports });
                None
            }
        }
    }

    /// Takes the rule of the pool as it is now.
    fn select(&mut self, selector: String, rule: Rule) {
        if self.current.is_of(&selector) {
            self.coming = None;
            self.current.reconciler.set_rule(Some(rule));
            return;
        }
        let mut coming = self.coming.take().filter(|coming| coming.is_of(&selector));
        let selected = coming.get_or_insert_with(|| {
            let config = watcher::Config::default().labels(&selector);
            let pods = Some((selector, self.place.watch(PODS, config)));
            Selected { pods, ..Selected::nothing(&self.settings) }
        });
        selected.reconciler.set_rule(Some(rule));
        self.coming = coming;
    }

    fn on_pod(&mut self, event: Event<Pod>) {
        if matches!(event, Event::InitDone) {
            self.status.listed(PODS);
        }
        self.current.on_pod(event);
    }

    fn on_coming(&mut self, event: Event<Pod>) {
        let listed = matches!(event, Event::InitDone);
        if let Some(coming) = &mut self.coming {
            coming.on_pod(event);
        }
        if listed && let Some(coming) = self.coming.take() {
            self.current = coming;
            self.status.listed(PODS);
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
                if rule.labels.as_ref().is_some_and(|labels| !labels.is_empty()) {
                    self.select(pool.selector(), rule);
                } else {
                    // It would watch every pod of the namespace.
                    (self.current, self.coming) = (Selected::nothing(&self.settings), None);
                    self.current.reconciler.set_rule(Some(rule));
                    self.status.listed(PODS);
                }
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
        (self.current, self.coming) = (Selected::nothing(&self.settings), None);
        self.status.unlisted(PODS);
    }

    fn missing(&self) -> String {
        let namespace = &self.settings.namespace;
        match &self.settings.choice {
            Choice::Pool(name) => format!("there is no InferencePool {namespace}/{name}"),
            Choice::Selector(..) => String::new(),
        }
    }
}

impl Members {
    /// Returns the counts by their words.
    #[must_use]
    pub fn absences(&self) -> BTreeMap<&'static str, u64> {
        let count = |it: &Absence| (it.as_str(), self.absent.get(it).copied().unwrap_or(0));
        Absence::ALL.iter().map(count).collect()
    }
}

/// Takes the next event, or waits for ever where nothing is watched.
async fn next<K>(watch: Option<&mut Watch<K>>) -> Event<K> {
    match watch {
        Some(watch) => watch.next().await,
        None => std::future::pending().await,
    }
}
