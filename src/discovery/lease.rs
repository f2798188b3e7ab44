#![allow(clippy::disallowed_methods, reason = "the holder of a lease owns a clock and its timers")]
//! Leader election by a Lease (`coordination.k8s.io/v1`), as client-go does it: one of several pickers is asked, the
//! others watch the pool all the while and take over when its lease runs out or is given back.
//!
//! Clocks of machines differ, so nobody believes the time that is written in a lease: it has run out when it was not
//! written for its duration by the reader's own clock.

use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::sync::watch;

use super::watch::is_away;
use crate::telemetry::source::SourceStatus;

/// How a lease is held.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Name of the Lease.
    pub name: String,
    /// Its namespace.
    pub namespace: String,
    /// Who we are: the pod's name.
    pub identity: String,
    /// How long it holds without being written.
    pub duration: Duration,
}

/// Who holds a lease, and which writing of it that was.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Held {
    holder: String,
    version: String,
    duration: Duration,
}

/// What one of the electors has seen.
#[derive(Debug)]
struct Election {
    identity: String,
    seen: Option<(Held, Instant)>,
}

/// What to do about the lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Act {
    /// It is ours: write it again.
    Renew,
    /// It is free: write our name into it.
    Take,
    /// It is another's.
    Wait,
}

impl Election {
    /// Names who holds it, as far as is known: nobody, us, or another.
    fn holder(&self) -> String {
        match &self.seen {
            Some((held, _)) if held.holder.is_empty() => "nobody".to_owned(),
            Some((held, _)) => held.holder.clone(),
            None => self.identity.clone(),
        }
    }

    fn act(&mut self, lease: Option<Held>, now: Instant) -> Act {
        let Some(held) = lease else {
            return Act::Take;
        };
        if held.holder == self.identity {
            return Act::Renew;
        }
        let since = match &self.seen {
            Some((seen, since)) if *seen == held => *since,
            _ => now,
        };
        let free = held.holder.is_empty() || now.saturating_duration_since(since) >= held.duration;
        self.seen = Some((held, since));
        if free { Act::Take } else { Act::Wait }
    }
}

/// Holds the lease whenever it can, and says in `leader` whether it does, until `stop` says so; then gives it back.
///
/// While the API server gives no answer nothing changes: nobody else can take the lease either, and no leader is worse
/// than two. A leader that is cut off alone may so be one of two for a while; each of them books the requests that it
/// gets, which is what pickers without election do always.
pub async fn hold(
    client: Client,
    settings: Settings,
    status: Arc<SourceStatus>,
    leader: watch::Sender<bool>,
    mut stop: watch::Receiver<bool>,
) {
    let leases: Api<Lease> = Api::namespaced(client, &settings.namespace);
    let mut election = Election { identity: settings.identity.clone(), seen: None };
    // client-go's proportions: 15 s and 2 s.
    let retry = settings.duration * 2 / 15;
    loop {
        let mut wait = retry;
        // Who does not know the pool yet must not be asked.
        if *leader.borrow() || status.synced() {
            let attempt = attempt(&leases, &settings, &mut election);
            match tokio::time::timeout(settings.duration / 3, attempt).await {
                Ok(Ok(Some(held))) => {
                    status.accepted(LEASES);
                    status.led_by(election.holder());
                    say(&leader, held, &settings);
                }
                // Another wrote at the same time: what it wrote is to be read.
                Ok(Ok(None)) => wait = retry / 10,
                Ok(Err(kube::Error::Api(refused))) if !is_away(refused.code) => {
                    let text = advice(&refused);
                    if status.refused(LEASES, &text) {
                        tracing::warn!(
                            lease = settings.name,
                            error = text,
                            "no leader can be elected"
                        );
                    }
                }
                Ok(Err(error)) => {
                    status.unreachable(&error.to_string(), Instant::now());
                }
                Err(_) => {
                    status.unreachable("no answer about the lease", Instant::now());
                }
            }
        }
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            _ = stop.wait_for(|stop| *stop) => break,
        }
    }
    if *leader.borrow() {
        say(&leader, false, &settings);
        let released = tokio::time::timeout(Duration::from_secs(2), release(&leases, &settings));
        if !matches!(released.await, Ok(Ok(()))) {
            tracing::warn!(lease = settings.name, "the lease could not be given back; it runs out");
        }
    }
}

const LEASES: &str = "leases";

fn advice(refused: &kube::core::Status) -> String {
    let said = &refused.message;
    match refused.code {
        403 => format!(
            "its service account needs get, create and update on the Lease, or run one picker without --ha-enable-leader-election: {said}"
        ),
        code => format!("{code}: {said}"),
    }
}

fn say(leader: &watch::Sender<bool>, held: bool, settings: &Settings) {
    let changed = leader.send_if_modified(|leader| std::mem::replace(leader, held) != held);
    if changed {
        let (lease, identity) = (&settings.name, &settings.identity);
        let message = if held { "this picker leads" } else { "this picker leads no longer" };
        tracing::info!(lease, identity, "{message}");
    }
}

/// Reads the lease and writes it if it is ours to write; tells whether we hold it, or `None` if another was quicker.
async fn attempt(
    leases: &Api<Lease>,
    settings: &Settings,
    election: &mut Election,
) -> Result<Option<bool>, kube::Error> {
    let current = leases.get_opt(&settings.name).await?;
    let act = election.act(current.as_ref().map(held), Instant::now());
    let written = match (act, current) {
        (Act::Wait, _) => return Ok(Some(false)),
        (_, None) => {
            let metadata =
                ObjectMeta { name: Some(settings.name.clone()), ..ObjectMeta::default() };
            let lease = Lease { metadata, spec: Some(spec(settings, None)) };
            leases.create(&PostParams::default(), &lease).await
        }
        (Act::Renew | Act::Take, Some(lease)) => {
            let before = lease.spec.as_ref().filter(|_| act == Act::Renew);
            let mut spec = spec(settings, before);
            if act == Act::Take {
                let transitions = lease.spec.and_then(|spec| spec.lease_transitions);
                spec.lease_transitions = Some(transitions.unwrap_or(0).saturating_add(1));
            }
            // It carries the version that was read: of two that write at once, one is told that it is too late.
            let lease = Lease { metadata: lease.metadata, spec: Some(spec) };
            leases.replace(&settings.name, &PostParams::default(), &lease).await
        }
    };
    match written {
        Ok(_) => {
            election.seen = None;
            Ok(Some(true))
        }
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(None),
        Err(error) => Err(error),
    }
}

/// Gives the lease back, so that the next picker need not wait for its end.
async fn release(leases: &Api<Lease>, settings: &Settings) -> Result<(), kube::Error> {
    let Some(lease) = leases.get_opt(&settings.name).await? else {
        return Ok(());
    };
    if held(&lease).holder != settings.identity {
        return Ok(());
    }
    let spec = lease.spec.map(|spec| LeaseSpec {
        holder_identity: Some(String::new()),
        lease_duration_seconds: Some(1),
        ..spec
    });
    let lease = Lease { metadata: lease.metadata, spec };
    leases.replace(&settings.name, &PostParams::default(), &lease).await.map(drop)
}

fn held(lease: &Lease) -> Held {
    let spec = lease.spec.clone().unwrap_or_default();
    let seconds = spec.lease_duration_seconds.and_then(|it| u64::try_from(it).ok()).unwrap_or(0);
    Held {
        holder: spec.holder_identity.unwrap_or_default(),
        version: lease.metadata.resource_version.clone().unwrap_or_default(),
        duration: Duration::from_secs(seconds),
    }
}

fn spec(settings: &Settings, before: Option<&LeaseSpec>) -> LeaseSpec {
    let now = MicroTime(Timestamp::now());
    LeaseSpec {
        holder_identity: Some(settings.identity.clone()),
        lease_duration_seconds: i32::try_from(settings.duration.as_secs()).ok(),
        acquire_time: before.and_then(|spec| spec.acquire_time.clone()).or(Some(now.clone())),
        renew_time: Some(now),
        lease_transitions: before.and_then(|spec| spec.lease_transitions).or(Some(0)),
        ..LeaseSpec::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(holder: &str, version: u32) -> Held {
        let duration = Duration::from_secs(15);
        Held { holder: holder.to_owned(), version: version.to_string(), duration }
    }

    #[test]
    fn a_lease_is_taken_when_it_is_free_or_was_not_written_for_its_duration() {
        let mut election = Election { identity: "b".to_owned(), seen: None };
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        for (seconds, lease, act) in [
            (0, None, Act::Take),
            (0, Some(of("b", 1)), Act::Renew),
            (0, Some(of("", 1)), Act::Take),
            (0, Some(of("a", 2)), Act::Wait),
            (14, Some(of("a", 2)), Act::Wait),
            // Written again: its time begins anew, by our clock.
            (16, Some(of("a", 3)), Act::Wait),
            (30, Some(of("a", 3)), Act::Wait),
            (31, Some(of("a", 3)), Act::Take),
            // Another was quicker.
            (32, Some(of("c", 4)), Act::Wait),
        ] {
            assert_eq!(
                election.act(lease.clone(), at(seconds)),
                act,
                "{lease:?} after {seconds} s"
            );
        }
    }
}
