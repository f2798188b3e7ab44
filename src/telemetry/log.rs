//! The decision log: a line for each request that ended, written by a thread of its own.
//!
//! A request only leaves its decision here. Making a line of it and writing it would double what the picker costs;
//! in batches they cost a third, and a slow reader of the log holds no request up.

use std::io::Write as _;
use std::sync::Arc;

use super::init::LogFormat;
use super::lines::Lines;
use super::observer::Decided;
use super::{explain, pb};

/// One line, as the request left it.
pub(super) enum Line {
    /// A decision and its outcome, of which the writer makes the record.
    Ended(Arc<Decided>, pb::Outcome),
    /// A refusal.
    Refused(Box<pb::Record>),
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

/// Starts the log.
pub(super) fn start(format: LogFormat) -> Lines<Line> {
    let mut text = Vec::new();
    Lines::new(move |lines: Vec<Line>, lost| {
        for line in lines {
            append(&mut text, format, &line.record());
        }
        // A log that cannot be written must not stop the picker.
        drop(std::io::stdout().lock().write_all(&text));
        text.clear();
        if lost > 0 {
            tracing::warn!(lost, "decisions came faster than the log could be written");
        }
    })
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
