#![allow(clippy::disallowed_methods, reason = "the writer owns a thread")]
//! The decision log: a line for each request that ended, written by a thread of its own.
//!
//! A request only leaves its decision here. Making a line of it and writing it would double what the picker costs;
//! in batches they cost a third, and a slow reader of the log holds no request up.

use std::io::Write as _;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::init::LogFormat;
use super::observer::Decided;
use super::{explain, pb};

/// How long lines are gathered before they are written.
const GATHER: Duration = Duration::from_millis(20);
/// Lines that may wait; beyond, they are lost and counted: the log must not take the memory of the picker.
const WAITING: usize = 20_000;

/// One line, as the request left it.
pub(super) enum Line {
    /// A decision and its outcome, of which the writer makes the record.
    Ended(Box<Decided>, pb::Outcome),
    /// A refusal.
    Refused(Box<pb::Record>),
}

/// The log's end on the side of the requests.
pub(super) struct DecisionLog {
    shared: Arc<Shared>,
    writer: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    filled: Condvar,
}

#[derive(Default)]
struct Queue {
    lines: Vec<Line>,
    lost: u64,
    closed: bool,
}

impl Line {
    fn record(self) -> pb::Record {
        match self {
            Self::Ended(decided, outcome) => {
                pb::Record { outcome: Some(outcome), ..decided.record() }
            }
            Self::Refused(record) => *record,
        }
    }
}

impl DecisionLog {
    /// Starts the writer.
    pub(super) fn new(format: LogFormat) -> Self {
        let shared = Arc::new(Shared::default());
        let writer = std::thread::spawn({
            let shared = Arc::clone(&shared);
            move || write(&shared, format)
        });
        Self { shared, writer: Some(writer) }
    }

    /// Leaves a line.
    pub(super) fn push(&self, line: Line) {
        let mut queue = self.shared.lock();
        if queue.lines.len() >= WAITING {
            queue.lost += 1;
            return;
        }
        queue.lines.push(line);
        if queue.lines.len() == 1 {
            self.shared.filled.notify_one();
        }
    }
}

impl Drop for DecisionLog {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.filled.notify_one();
        if let Some(writer) = self.writer.take() {
            // A writer that has panicked has nothing left to write.
            drop(writer.join());
        }
    }
}

impl std::fmt::Debug for DecisionLog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DecisionLog").finish_non_exhaustive()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Writes lines until the log is closed and empty.
fn write(shared: &Shared, format: LogFormat) {
    let mut text = Vec::new();
    loop {
        let queue = shared.lock();
        let queue =
            shared.filled.wait_while(queue, |queue| queue.lines.is_empty() && !queue.closed);
        let mut queue = queue.unwrap_or_else(PoisonError::into_inner);
        if !queue.closed {
            drop(queue);
            std::thread::sleep(GATHER);
            queue = shared.lock();
        }
        let lines = std::mem::take(&mut queue.lines);
        let (lost, closed) = (std::mem::take(&mut queue.lost), queue.closed);
        drop(queue);
        for line in lines {
            append(&mut text, format, &line.record());
        }
        // A log that cannot be written must not stop the picker.
        drop(std::io::stdout().lock().write_all(&text));
        text.clear();
        if lost > 0 {
            tracing::warn!(lost, "decisions came faster than the log could be written");
        }
        if closed {
            return;
        }
    }
}

/// Appends a record as a JSON line, or as the text that `explain` prints.
fn append(text: &mut Vec<u8>, format: LogFormat, record: &pb::Record) {
    #[derive(serde::Serialize)]
    struct Line<'a> {
        timestamp: &'a str,
        level: &'static str,
        message: &'static str,
        decision: &'a pb::Record,
    }
    match format {
        LogFormat::Json => {
            let line = Line {
                timestamp: &record.time,
                level: "INFO",
                message: "decision",
                decision: record,
            };
            let begin = text.len();
            if serde_json::to_writer(&mut *text, &line).is_err() {
                text.truncate(begin);
                return;
            }
            text.push(b'\n');
        }
        LogFormat::Human => {
            text.extend_from_slice(
                format!("{}  {}", record.time, explain::render(record)).as_bytes(),
            );
        }
    }
}
