#![allow(clippy::disallowed_methods, reason = "a watch owns a clock, timers and a task")]
//! A watch of one kind of object, with all that can go wrong with it.
//!
//! A watch ends and is resumed, or is too old to be resumed (410), or goes silent without a byte: it is asked for anew
//! every `time`, and given up a few seconds after that. Whatever the server itself says no to begins with a list
//! again, since a version that it refuses once it may refuse for ever.

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

use crate::telemetry::source::SourceStatus;

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
    // It would hide a server that is away for minutes, and come back to it late.
    config.default_retry = false;
    Ok(config)
}

/// Makes a client that tells `status` of every answer. It belongs to the runtime it is made on.
///
/// # Errors
/// The certificates of the server's configuration cannot be read.
pub fn client(server: kube::Config, status: &Arc<SourceStatus>) -> anyhow::Result<Client> {
    let status = Arc::clone(status);
    let heard = MapResponseLayer::new(move |response: http::Response<_>| {
        if !is_away(response.status().as_u16())
            && let Some(silent) = status.heard(Instant::now())
        {
            tracing::info!(silent_seconds = silent.as_secs(), "Kubernetes answers again");
        }
        response
    });
    Ok(ClientBuilder::try_from(server)?.with_layer(&heard).build())
}

/// Where watches are made.
#[derive(Clone)]
pub(super) struct Place {
    pub(super) client: Client,
    pub(super) namespace: String,
    /// How long one watch lasts.
    pub(super) time: Duration,
    pub(super) status: Arc<SourceStatus>,
}

/// What can be watched in a namespace.
pub(super) trait Watchable:
    Resource<DynamicType = (), Scope = NamespaceResourceScope>
    + Clone
    + DeserializeOwned
    + Debug
    + Send
    + 'static
{
}

impl<K> Watchable for K where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + DeserializeOwned
        + Debug
        + Send
        + 'static
{
}

/// A watch that ends with its owner.
pub(super) struct Watch<K> {
    events: mpsc::Receiver<Event<K>>,
    task: AbortHandle,
}

impl<K> Drop for Watch<K> {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl<K> Watch<K> {
    /// Waits for the next event.
    pub(super) async fn next(&mut self) -> Event<K> {
        self.events.recv().await.expect("the watch's task never ends by itself")
    }
}

impl Place {
    /// Watches the objects that the server chooses by `config`; `resource` is their name for people.
    pub(super) fn watch<K: Watchable>(
        &self,
        resource: &'static str,
        config: watcher::Config,
    ) -> Watch<K> {
        let timeout = Some(u32::try_from(self.time.as_secs()).unwrap_or(u32::MAX));
        let config = watcher::Config { timeout, ..config };
        let api = Api::namespaced(self.client.clone(), &self.namespace);
        let (sender, events) = mpsc::channel(256);
        let task = tokio::spawn(run(resource, api, config, Arc::clone(&self.status), sender));
        Watch { events, task: task.abort_handle() }
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
            // One that was restored from a backup says 504 to a version that it has not come to, and may for ever.
            if refusal.is_some() || backoff.errors > PATIENCE {
                break;
            }
        }
    }
}

/// Tells whether an answer is none: whoever stands before the server says so for it, or it has no time.
pub(super) fn is_away(status: u16) -> bool {
    status >= 500 || status == 429
}

/// What the server itself said no with.
fn refusal(error: &watcher::Error) -> Option<&kube::core::Status> {
    match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status))
        | watcher::Error::WatchFailed(kube::Error::Api(status))
        | watcher::Error::WatchError(status) => (!is_away(status.code)).then_some(&**status),
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
        404 if resource == "inferenceobjectives" => {
            format!("the API server has no {resource}; all requests have priority 0")
        }
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

/// Errors in a row after which a watch begins with a list again.
const PATIENCE: u32 = 8;

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
    fn what_stands_before_a_server_that_is_away_does_not_speak_for_it() {
        let of = |code| {
            let status = kube::core::Status { code, ..kube::core::Status::default() };
            watcher::Error::WatchStartFailed(kube::Error::Api(Box::new(status)))
        };
        for (code, is_refusal) in [
            (401, true),
            (403, true),
            (404, true),
            (410, true),
            (429, false),
            (500, false),
            (503, false),
            (504, false),
        ] {
            assert_eq!(refusal(&of(code)).is_some(), is_refusal, "{code}");
        }
        assert!(refusal(&watcher::Error::NoResourceVersion).is_none());
    }

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
