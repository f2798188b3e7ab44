//! Late binding: a request waits here while the endpoint that it would go to has too much to compute before it, and is
//! decided anew whenever something has ended. First come, first served among those whose endpoint is free by then.
//!
//! Order and timing are worth more than a better choice where work comes in bursts; what it costs is the tail, so there
//! is a longest wait, after which a request goes wherever it costs least.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::{Booking, Decision, Detail, Moment, Refusal, Scheduler};
use crate::pool::InferenceRequest;

/// Requests that are looked at for each that may go: a long queue must not make every answer's end expensive.
const LOOKED_AT: usize = 32;

/// When requests are held back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HoldSettings {
    /// Work before it, on the endpoint that it would go to, from which a request is held.
    pub backlog: Duration,
    /// The longest wait.
    pub longest: Duration,
    /// Requests that wait at most; more are turned away.
    pub most: usize,
    /// What a client that is turned away is told to wait.
    pub retry_after: Duration,
}

/// What became of a request.
pub type Decided = Result<(Decision, Booking), Refusal>;

/// The requests that wait, each with what its owner is told by.
#[derive(Debug)]
pub struct Hold<T> {
    settings: HoldSettings,
    waiting: VecDeque<Held<T>>,
    is_open: bool,
}

#[derive(Debug)]
struct Held<T> {
    request: InferenceRequest,
    since: Duration,
    owner: T,
}

impl<T> Hold<T> {
    /// Holds nothing yet.
    #[must_use]
    pub fn new(settings: HoldSettings) -> Self {
        Self { settings, waiting: VecDeque::new(), is_open: false }
    }

    /// Tells whether none wait.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Yields what the owners of those are told by that are looked at next.
    pub fn owners(&self) -> impl Iterator<Item = &T> + '_ {
        self.waiting.iter().take(LOOKED_AT).map(|held| &held.owner)
    }

    /// Forgets those whose owners wait no more.
    pub fn forget(&mut self, has_gone: impl Fn(&T) -> bool) {
        self.waiting.retain(|held| !has_gone(&held.owner));
    }

    /// Holds nothing back from now on: the picker ends.
    pub fn open(&mut self) {
        self.is_open = true;
    }

    /// Decides a request that has come; `None` if it waits. It does not overtake those that wait.
    pub fn offer(
        &mut self,
        scheduler: &Arc<Scheduler>,
        request: &InferenceRequest,
        owner: impl FnOnce() -> T,
        moment: Moment<'_>,
        detail: Detail,
    ) -> Option<Decided> {
        if self.waiting.is_empty() || self.is_open {
            let bound = (!self.is_open).then_some(self.settings.backlog);
            match scheduler.schedule_within(bound, request, moment, detail) {
                Ok(Some(decided)) => return Some(Ok(decided)),
                Ok(None) => {}
                Err(refusal) => return Some(Err(refusal)),
            }
        }
        if self.waiting.len() >= self.settings.most {
            let HoldSettings { most, retry_after, .. } = self.settings;
            return Some(Err(Refusal::QueueFull { most, retry_after }));
        }
        self.waiting.push_back(Held {
            request: request.clone(),
            since: moment.now,
            owner: owner(),
        });
        None
    }

    /// Lets the next request go, if there is one that may; `moment` says what is known for it.
    pub fn release<'a>(
        &mut self,
        scheduler: &Arc<Scheduler>,
        now: Duration,
        mut moment: impl FnMut(&T) -> Moment<'a>,
        detail: Detail,
    ) -> Option<(T, Decided)> {
        for place in 0..self.waiting.len().min(LOOKED_AT) {
            let held = &self.waiting[place];
            let waited = now.saturating_sub(held.since);
            let is_held = waited < self.settings.longest && !self.is_open;
            let bound = is_held.then_some(self.settings.backlog);
            let moment = Moment { held: waited, ..moment(&held.owner) };
            let decided = scheduler.schedule_within(bound, &held.request, moment, detail);
            if let Some(decided) = decided.transpose() {
                let held = self.waiting.remove(place)?;
                return Some((held.owner, decided));
            }
        }
        None
    }
}
