#![allow(clippy::disallowed_methods, reason = "this file owns the timer of requests that wait")]
//! Requests that are held back: each stream that waits has a seat, and whoever sees something end calls the next.

use std::future::Future as _;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::{Instant, Sleep};

use crate::pool::InferenceRequest;
use crate::scheduling::{Decided, Detail, Hold, HoldSettings, Moment, Scheduler};

/// A head that is being computed shortens the backlog without a word: those who wait look again this often.
const TICK: Duration = Duration::from_millis(20);

/// A request that was decided: when, since the picker's start, how long that took, and how.
#[derive(Debug)]
pub(super) struct Called {
    pub(super) now: Duration,
    pub(super) took: Duration,
    pub(super) decided: Decided,
}

/// Where requests wait.
#[derive(Debug)]
pub(super) struct WaitingRoom {
    room: Mutex<Room>,
    scheduler: Arc<Scheduler>,
    detail: Detail,
}

#[derive(Debug)]
struct Room {
    hold: Hold<oneshot::Sender<Called>>,
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
    pub(super) fn new(settings: HoldSettings, scheduler: Arc<Scheduler>, detail: Detail) -> Self {
        let room = Room { hold: Hold::new(settings), looked: Duration::ZERO };
        Self { room: Mutex::new(room), scheduler, detail }
    }

    /// Decides a request, or gives it a seat.
    pub(super) fn enter(
        &self,
        request: &InferenceRequest,
        moment: Moment<'_>,
    ) -> Result<Decided, Seat> {
        let (caller, called) = oneshot::channel();
        let mut room = self.lock();
        room.hold.forget(oneshot::Sender::is_closed);
        let decided = room.hold.offer(&self.scheduler, request, || caller, moment, self.detail);
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
        room.hold.forget(oneshot::Sender::is_closed);
        loop {
            let begun = Instant::now();
            let moment = |_: &_| Moment { now, seed: seed(), ..Moment::default() };
            let next = room.hold.release(&self.scheduler, now, moment, self.detail);
            drop(room);
            let Some((caller, decided)) = next else { return };
            // Who has gone in this moment leaves the booking behind, and it is released as it is dropped: not under
            // the lock.
            drop(caller.send(Called { now, took: begun.elapsed(), decided }));
            room = self.lock();
        }
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
