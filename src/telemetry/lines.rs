#![allow(clippy::disallowed_methods, reason = "the writer owns a thread")]
//! Lines on their way from requests to a writer with a thread of its own: who leaves one never waits for it.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// How long lines are gathered before they are written.
const GATHER: Duration = Duration::from_millis(20);
/// Lines that may wait; beyond, they are lost and counted: what is written must not take the memory of the picker.
const WAITING: usize = 20_000;

/// The end on the side of the requests. Dropping it waits until everything is written.
pub(super) struct Lines<T> {
    shared: Arc<Shared<T>>,
    writer: Option<JoinHandle<()>>,
}

struct Shared<T> {
    queue: Mutex<Queue<T>>,
    filled: Condvar,
}

struct Queue<T> {
    lines: Vec<T>,
    lost: u64,
    closed: bool,
}

impl<T: Send + 'static> Lines<T> {
    /// Starts the writer: `write` gets the lines that have come together, and how many were lost meanwhile.
    pub(super) fn new(write: impl FnMut(Vec<T>, u64) + Send + 'static) -> Self {
        let queue = Mutex::new(Queue { lines: Vec::new(), lost: 0, closed: false });
        let shared = Arc::new(Shared { queue, filled: Condvar::new() });
        let writer = std::thread::spawn({
            let shared = Arc::clone(&shared);
            move || shared.run(write)
        });
        Self { shared, writer: Some(writer) }
    }
}

impl<T> Lines<T> {
    /// Leaves a line; tells whether there was room for it.
    pub(super) fn push(&self, line: T) -> bool {
        let mut queue = self.shared.lock();
        if queue.lines.len() >= WAITING {
            queue.lost += 1;
            return false;
        }
        queue.lines.push(line);
        if queue.lines.len() == 1 {
            self.shared.filled.notify_one();
        }
        true
    }
}

impl<T> Drop for Lines<T> {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.filled.notify_one();
        if let Some(writer) = self.writer.take() {
            // A writer that has panicked has nothing left to write.
            drop(writer.join());
        }
    }
}

impl<T> std::fmt::Debug for Lines<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lines").finish_non_exhaustive()
    }
}

impl<T> Shared<T> {
    fn lock(&self) -> MutexGuard<'_, Queue<T>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes lines until the queue is closed and empty.
    fn run(&self, mut write: impl FnMut(Vec<T>, u64)) {
        loop {
            let queue = self.lock();
            let queue =
                self.filled.wait_while(queue, |queue| queue.lines.is_empty() && !queue.closed);
            let mut queue = queue.unwrap_or_else(PoisonError::into_inner);
            if !queue.closed {
                drop(queue);
                std::thread::sleep(GATHER);
                queue = self.lock();
            }
            let lines = std::mem::take(&mut queue.lines);
            let (lost, closed) = (std::mem::take(&mut queue.lost), queue.closed);
            drop(queue);
            write(lines, lost);
            if closed {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn a_writer_that_hangs_costs_lines_and_holds_nobody_up() {
        let (let_go, held) = mpsc::channel::<()>();
        let (told, heard) = mpsc::channel();
        let lines = Lines::new(move |lines: Vec<usize>, lost| {
            // It hangs until the other end is gone, and then never again.
            let _ = held.recv();
            told.send((lines.len(), lost)).unwrap();
        });
        assert!(lines.push(0));
        // The writer has taken the first, and whatever came with it, when the queue is seen empty.
        while !lines.shared.lock().lines.is_empty() {
            std::thread::yield_now();
        }
        let taken = (0..WAITING + 7).filter(|&line| lines.push(line)).count();
        assert_eq!(taken, WAITING);
        drop(let_go);
        drop(lines);
        assert_eq!(heard.iter().collect::<Vec<_>>(), [(1, 0), (WAITING, 7)]);
    }
}
