#![allow(clippy::disallowed_methods, reason = "this file owns the timer of requests that wait")]
//! Requests that are held back: each stream that waits has a seat, and whoever sees something end calls the next.

use std::collections::HashMap;
use std::future::Future as _;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::{Instant, Sleep};

use crate::engine::knowledge::{Facts, Knowledge, Prompt};
use crate::pool::InferenceRequest;
use crate::scheduling::{Decided, Detail, Hold, HoldSettings, Moment, Scheduler};

/// A head that is being computed shortens the backlog without a word: those who wait look again this often.
const TICK: Duration = Duration::from_millis(20);

/// How a request was decided that had waited.
#[derive(Debug)]
pub(super) struct Called {
    /// When, since the picker's start.
    pub(super) now: Duration,
    /// How long that took.
    pub(super) took: Duration,
    /// How.
    pub(super) decided: Decided,
    /// What was known for it.
    pub(super) facts: Option<Arc<Facts>>,
}

/// Who waits, and what is known for it.
#[derive(Debug)]
struct Waiter {
    caller: oneshot::Sender<Called>,
    prompt: Option<Arc<Prompt>>,
    /// As of when.
    facts: Mutex<(Duration, Option<Arc<Facts>>)>,
    /// Tells waiters apart.
    number: u64,
}

impl Waiter {
    fn has_gone(&self) -> bool {
        self.caller.is_closed()
    }
}

/// Where requests wait.
#[derive(Debug)]
pub(super) struct WaitingRoom {
    room: Mutex<Room>,
    scheduler: Arc<Scheduler>,
    knowledge: Option<Arc<Knowledge>>,
    entered: AtomicU64,
    detail: Detail,
}

#[derive(Debug)]
struct Room {
    hold: Hold<Waiter>,
    /// When somebody last looked who may go.
    looked: Duration,
}

/// One that waits.
#[derive(Debug)]
pub(super) struct Seat {
    called: oneshot::Receiver<Called>,
    tick: Pin<Box<Sleep>>,
}

impl WaitingRoom {
    pub(super) fn new(
        settings: HoldSettings,
        scheduler: Arc<Scheduler>,
        knowledge: Option<Arc<Knowledge>>,
        detail: Detail,
    ) -> Self {
        let room = Room { hold: Hold::new(settings), looked: Duration::ZERO };
        Self { room: Mutex::new(room), scheduler, knowledge, entered: AtomicU64::new(0), detail }
    }

    /// Decides a request, of whose prompt so much is known, or gives it a seat.
    pub(super) fn enter(
        &self,
        request: &InferenceRequest,
        (prompt, facts): (Option<&Arc<Prompt>>, Option<&Arc<Facts>>),
        moment: Moment<'_>,
    ) -> Result<Decided, Seat> {
        let (caller, called) = oneshot::channel();
        let mut room = self.lock();
        room.hold.forget(Waiter::has_gone);
        let waiter = || Waiter {
            caller,
            prompt: prompt.cloned(),
            facts: Mutex::new((moment.now, facts.cloned())),
            number: self.entered.fetch_add(1, Ordering::Relaxed),
        };
        let decided = room.hold.offer(&self.scheduler, request, waiter, moment, self.detail);
        decided.ok_or_else(|| Seat { called, tick: Box::pin(tokio::time::sleep(TICK)) })
    }

    /// Calls all who may go, since something has ended.
    pub(super) fn call(&self, now: Duration, seed: impl FnMut() -> u64) {
        let room = self.lock();
        if !room.hold.is_empty() {
            self.look(room, now, seed);
        }
    }

    /// Calls all who may go, since time has passed; once a tick, however many wait.
    pub(super) fn tick(&self, now: Duration, seed: impl FnMut() -> u64) {
        let room = self.lock();
        if now.saturating_sub(room.looked) >= TICK {
            self.look(room, now, seed);
        }
    }

    /// Lets everybody go: the picker ends.
    pub(super) fn open(&self, now: Duration, seed: impl FnMut() -> u64) {
        let mut room = self.lock();
        room.hold.open();
        self.look(room, now, seed);
    }

    fn look<'a>(
        &'a self,
        mut room: MutexGuard<'a, Room>,
        now: Duration,
        mut seed: impl FnMut() -> u64,
    ) {
        room.looked = now;
        room.hold.forget(Waiter::has_gone);
        loop {
            let begun = Instant::now();
            let known = self.known(&room.hold, now);
            let moment = |waiter: &Waiter| {
                let facts = known.get(&waiter.number);
                let evidence = facts.map(|facts| facts.evidence()).unwrap_or_default();
                let prefix = waiter.prompt.as_ref().and_then(|prompt| prompt.beginning());
                Moment { now, seed: seed(), evidence, prefix, ..Moment::default() }
            };
            let next = room.hold.release(&self.scheduler, now, moment, self.detail);
            drop(room);
            let Some((waiter, decided)) = next else { return };
            let facts = known.get(&waiter.number).cloned();
            // Who has gone in this moment leaves the booking behind, and it is released as it is dropped: not under
            // the lock.
            let called = Called { now, took: begun.elapsed(), decided, facts };
            drop(waiter.caller.send(called));
            room = self.lock();
        }
    }

    /// Looks at what is known for those who may go next, no more often than they look themselves.
    fn known(&self, hold: &Hold<Waiter>, now: Duration) -> HashMap<u64, Arc<Facts>> {
        let Some(knowledge) = &self.knowledge else { return HashMap::new() };
        let (pool, metrics) = self.scheduler.asks();
        hold.owners()
            .filter_map(|waiter| {
                let mut facts = waiter.facts.lock().unwrap_or_else(PoisonError::into_inner);
                if now.saturating_sub(facts.0) >= TICK {
                    let looked = knowledge.look((&pool, metrics), waiter.prompt.as_deref(), now);
                    *facts = (now, looked.map(Arc::new));
                }
                Some((waiter.number, facts.1.clone()?))
            })
            .collect()
    }

    fn lock(&self) -> MutexGuard<'_, Room> {
        self.room.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Seat {
    /// Waits to be called; `look` is called when it is time to look again.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>, look: impl Fn()) -> Poll<Called> {
        loop {
            if let Poll::Ready(called) = Pin::new(&mut self.called).poll(cx) {
                return Poll::Ready(called.expect("the room keeps the caller until it calls"));
            }
            if self.tick.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
            look();
            self.tick.as_mut().reset(Instant::now() + TICK);
        }
    }
}
