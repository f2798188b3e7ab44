//! What the source of endpoints last said of itself: for readiness, for `/readyz` and for metrics.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::watch;

/// The state of what endpoints come from.
#[derive(Debug, Default)]
pub struct SourceStatus {
    state: Mutex<State>,
    synced: watch::Sender<bool>,
}

#[derive(Debug, Default)]
struct State {
    /// What has to be listed once before there is a pool to speak of, and whether it has been.
    lists: BTreeMap<&'static str, bool>,
    /// What has to exist and does not.
    missing: Option<String>,
    /// Since when nothing was heard, and the error.
    unreachable: Option<(Instant, String)>,
    /// What the server says no to, by resource.
    refused: BTreeMap<&'static str, String>,
    /// Who holds the Lease, once that is known.
    leader: Option<String>,
    relists: u64,
    errors: u64,
    absent: BTreeMap<&'static str, u64>,
    warming: usize,
    homes_moved: u64,
}

/// A reading of it, for metrics.
#[derive(Debug, Clone, Default)]
pub struct SourceReading {
    /// Whether every list has been had once.
    pub synced: bool,
    /// Seconds since nothing was heard; 0 while all is well.
    pub unreachable_seconds: f64,
    /// Lists read, the first ones included.
    pub relists: u64,
    /// Errors of lists and watches.
    pub errors: u64,
    /// Pods of the pool that give no endpoint, by reason.
    pub absent: BTreeMap<&'static str, u64>,
    /// Endpoints below their full weight.
    pub warming: usize,
    /// Remembered conversations whose home has moved with the membership.
    pub homes_moved: u64,
}

impl SourceStatus {
    /// Says what has to be listed before there is a pool.
    pub fn expect(&self, resource: &'static str) {
        self.lock().lists.entry(resource).or_insert(false);
        self.tell();
    }

    /// Notes a whole list of a resource.
    pub fn listed(&self, resource: &'static str) {
        let mut state = self.lock();
        state.relists += 1;
        if let Some(listed) = state.lists.get_mut(resource) {
            *listed = true;
        }
        drop(state);
        self.tell();
    }

    /// Notes that what was listed is no longer known.
    pub fn unlisted(&self, resource: &'static str) {
        self.lock().lists.insert(resource, false);
        self.tell();
    }

    /// Notes what has to exist and does not.
    pub fn missing(&self, missing: Option<String>) {
        self.lock().missing = missing;
        self.tell();
    }

    /// Notes that the server takes requests for a resource again; tells whether it did not before.
    pub fn accepted(&self, resource: &'static str) -> bool {
        self.lock().refused.remove(resource).is_some()
    }

    /// Notes an answer of the server, whatever it says; returns for how long there was none.
    pub fn heard(&self, now: Instant) -> Option<std::time::Duration> {
        let unreachable = self.lock().unreachable.take();
        unreachable.map(|(since, _)| now.saturating_duration_since(since))
    }

    /// Notes that the server gave no answer; tells whether that is new.
    pub fn unreachable(&self, error: &str, now: Instant) -> bool {
        let mut state = self.lock();
        state.errors += 1;
        let new = state.unreachable.is_none();
        let since = state.unreachable.take().map_or(now, |(since, _)| since);
        state.unreachable = Some((since, error.to_owned()));
        new
    }

    /// Notes that the server refused requests for a resource; tells whether that is new.
    pub fn refused(&self, resource: &'static str, error: &str) -> bool {
        let mut state = self.lock();
        state.errors += 1;
        state.refused.insert(resource, error.to_owned()).as_deref() != Some(error)
    }

    /// Notes who holds the Lease.
    pub fn led_by(&self, holder: String) {
        self.lock().leader = Some(holder);
    }

    /// Returns who holds the Lease, if that is known.
    #[must_use]
    pub fn leader(&self) -> Option<String> {
        self.lock().leader.clone()
    }

    /// Notes the pods of the pool that give no endpoint.
    pub fn set_absent(&self, absent: BTreeMap<&'static str, u64>) {
        self.lock().absent = absent;
    }

    /// Notes a change of membership.
    pub fn changed(&self, warming: usize, homes_moved: u64) {
        let mut state = self.lock();
        state.warming = warming;
        state.homes_moved += homes_moved;
    }

    /// Tells whether every list has been had once: before that, an empty pool means nothing.
    #[must_use]
    pub fn synced(&self) -> bool {
        self.lock().synced()
    }

    /// Follows whether it is synced.
    #[must_use]
    pub fn follow(&self) -> watch::Receiver<bool> {
        self.tell();
        self.synced.subscribe()
    }

    fn tell(&self) {
        let synced = self.synced();
        self.synced.send_if_modified(|before| std::mem::replace(before, synced) != synced);
    }

    /// Says it for a person, a line each.
    #[must_use]
    pub fn lines(&self, now: Instant) -> Vec<String> {
        let state = self.lock();
        let mut lines = Vec::from_iter(state.missing.clone());
        for (resource, listed) in &state.lists {
            if !listed {
                lines.push(format!("waiting for the first list of {resource}"));
            }
        }
        if let Some((since, error)) = &state.unreachable {
            let seconds = now.saturating_duration_since(*since).as_secs();
            let then = if state.synced() { "; routing on what was known" } else { "" };
            lines.push(format!("Kubernetes has not answered for {seconds} s{then}: {error}"));
        }
        for (resource, error) in &state.refused {
            lines.push(format!("{resource}: {error}"));
        }
        lines
    }

    /// Reads it for metrics.
    #[must_use]
    pub fn reading(&self, now: Instant) -> SourceReading {
        let state = self.lock();
        SourceReading {
            synced: state.synced(),
            unreachable_seconds: state
                .unreachable
                .as_ref()
                .map_or(0.0, |(since, _)| now.saturating_duration_since(*since).as_secs_f64()),
            relists: state.relists,
            errors: state.errors,
            absent: state.absent.clone(),
            warming: state.warming,
            homes_moved: state.homes_moved,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn synced(&self) -> bool {
        self.missing.is_none() && self.lists.values().all(|listed| *listed)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[expect(clippy::disallowed_methods, reason = "any instant will do")]
    fn start() -> Instant {
        Instant::now()
    }

    #[test]
    fn it_is_synced_when_every_list_was_had_and_says_what_is_missing() {
        let (status, now) = (SourceStatus::default(), start());
        status.expect("pods");
        status.expect("inferencepools");
        assert!(
            status.refused("pods", "may not be listed")
                && !status.refused("pods", "may not be listed")
        );
        status.listed("inferencepools");
        assert!(!status.synced());
        assert_eq!(
            status.lines(now),
            ["waiting for the first list of pods", "pods: may not be listed"]
        );
        status.listed("pods");
        assert!(status.accepted("pods") && !status.accepted("pods"));
        assert!(status.synced() && status.lines(now).is_empty());
    }

    #[test]
    fn a_silent_server_is_silent_since_its_first_error() {
        let (status, now) = (SourceStatus::default(), start());
        let later = now + Duration::from_secs(90);
        assert!(status.unreachable("refused", now));
        assert!(!status.unreachable("timed out", later));
        assert_eq!(
            status.lines(later),
            ["Kubernetes has not answered for 90 s; routing on what was known: timed out"]
        );
        assert!(status.reading(later).unreachable_seconds >= 90.0);
        assert_eq!(status.heard(later), Some(Duration::from_secs(90)));
        assert_eq!((status.heard(later), status.reading(later).unreachable_seconds), (None, 0.0));
    }
}
