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

/// When a request was decided, since the picker's start, and how.
type Called = (Duration, Decided);

/// Where requests wait.
#[derive(Debug)]
pub(super) struct WaitingRoom {
    hold: Mutex<Hold<oneshot::Sender<Called>>>,
    scheduler: Arc<Scheduler>,
    detail: Detail,
}

/// One that waits.
#[derive(Debug)]
pub(super) struct Seat {
    called: oneshot::Receiver<Called>,
    tick: Pin<Box<Sleep>>,
}

impl WaitingRoom {
    pub(super) fn new(settings: HoldSettings, scheduler: Arc<Scheduler>, detail: Detail) -> Self {
        Self { hold: Mutex::new(Hold::new(settings)), scheduler, detail }
    }

    /// Decides a request, or gives it a seat.
    pub(super) fn enter(
        &self,
        request: &InferenceRequest,
        moment: Moment<'_>,
    ) -> Result<Decided, Seat> {
        let (caller, called) = oneshot::channel();
        let decided = self.lock().offer(&self.scheduler, request, || caller, moment, self.detail);
        decided.ok_or_else(|| Seat { called, tick: Box::pin(tokio::time::sleep(TICK)) })
    }

    /// Calls all who may go now.
    pub(super) fn call(&self, now: Duration, mut seed: impl FnMut() -> u64) {
        loop {
            let mut hold = self.lock();
            if hold.is_empty() {
                return;
            }
            let moment = |_: &_| Moment { now, seed: seed(), ..Moment::default() };
            let has_gone = oneshot::Sender::is_closed;
            let next = hold.release(&self.scheduler, now, moment, has_gone, self.detail);
            drop(hold);
            let Some((caller, decided)) = next else { return };
            // Who has gone in this moment leaves the booking behind, and it is released as it is dropped.
            drop(caller.send((now, decided)));
        }
    }

    fn lock(&self) -> MutexGuard<'_, Hold<oneshot::Sender<Called>>> {
        self.hold.lock().unwrap_or_else(PoisonError::into_inner)
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
