#![allow(
    clippy::disallowed_methods,
    reason = "the writer counts time from its own start, and says when that was"
)]
//! Files of records: a JSON line for each request that ended, with all that it takes to decide it again.
//!
//! A line is an object with one key. `start`: a run of the picker begins here, or goes on in a new file. `pool`: the
//! endpoints that decisions of this version were made over; it stands before the first of them in each file.
//! `decision`: a [`pb::Record`], as in the decision log, without the steps, which follow from the rest, and with
//! [`pb::Asked`]. `lost`: so many requests are missing. No text of a prompt is in any of them.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions, TryLockError};
use std::hash::{BuildHasher as _, RandomState};
use std::io::{self, Write as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use prometheus_client::metrics::counter::Counter;
use serde::{Deserialize, Serialize};

use super::lines::Lines;
use super::observer::Decided;
use super::pb;
use crate::pool::PoolSnapshot;

/// The format of the lines: it changes when a reader of the older one would misread them.
pub const FORMAT: u32 = 1;
/// After an error, how long until the file is tried again.
const RETRY: Duration = Duration::from_secs(10);
/// How often losses are said in the log at most.
const SAID: Duration = Duration::from_secs(10);
/// Only the picker's own user reads who talks with what.
const MODE: u32 = 0o600;

/// Where records go.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The file that is written; older ones are `PATH.1` and so on.
    pub path: PathBuf,
    /// Bytes of one file.
    pub max_bytes: u64,
    /// Files that are kept, the one that is written among them.
    pub files: u32,
    /// The part of the configuration that decides.
    pub config: serde_json::Value,
}

/// A line of a file of records: just one of them.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Line {
    /// The picker's run that the lines after it are of.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start: Option<Start>,
    /// Endpoints.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pool: Option<Pool>,
    /// A request that ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decision: Option<pb::Record>,
    /// Requests that are missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lost: Option<Lost>,
}

/// A run of a picker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Start {
    /// See [`FORMAT`].
    pub format: u32,
    /// Version of the picker.
    pub version: String,
    /// Tells this run from others: 16 hex digits.
    pub run: String,
    /// When it began, RFC 3339 with nanoseconds: times of its records count from here.
    pub began: String,
    /// The part of its configuration that decides.
    pub config: serde_json::Value,
}

/// The endpoints of a version of the pool.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Pool {
    /// Counts the changes of membership and of weights.
    pub version: u64,
    /// Virtual nodes on the ring for each unit of weight.
    pub ring_points: u32,
    /// In the order of their names.
    pub endpoints: Vec<Member>,
}

/// An endpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Member {
    /// Its name.
    pub name: String,
    /// Where it is dialled, `ip:port`.
    pub address: String,
    /// Its weight at the time, warming up included.
    pub weight: f64,
    /// What tells one life of it from the next, if anything does.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub instance: String,
}

/// A gap.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Lost {
    /// Requests that ended and have no line.
    pub requests: u64,
}

/// The end on the side of the requests.
#[derive(Debug)]
pub(super) struct Recorder {
    epoch: Instant,
    lines: Lines<Ended>,
    lost: Counter,
}

/// A request, as it left.
struct Ended {
    decided: Option<Arc<Decided>>,
    /// What goes over the record of the decision.
    with: pb::Record,
    first_token_ns: Option<u64>,
    end_ns: u64,
}

impl Recorder {
    /// Starts the writer. A file that cannot be written is said in the log, and tried again later.
    pub(super) fn new(settings: Settings, lost: Counter) -> Self {
        // Both at once: times count from here.
        let (epoch, began) = (Instant::now(), SystemTime::now());
        let mut writer = Writer::new(settings, began, lost.clone());
        writer.open_or_say();
        let lines = Lines::new(move |lines, lost| writer.write(lines, lost));
        Self { epoch, lines, lost }
    }

    /// Returns a time as records hold it: nanoseconds since the start.
    pub(super) fn time(&self, moment: Instant) -> u64 {
        u64::try_from(moment.saturating_duration_since(self.epoch).as_nanos()).unwrap_or(u64::MAX)
    }

    /// Leaves a request that has ended.
    pub(super) fn ended(
        &self,
        decided: Arc<Decided>,
        outcome: pb::Outcome,
        (first_token, end): (Option<Instant>, Instant),
    ) {
        self.push(Ended {
            decided: Some(decided),
            with: pb::Record { outcome: Some(outcome), ..pb::Record::default() },
            first_token_ns: first_token.map(|at| self.time(at)),
            end_ns: self.time(end),
        });
    }

    /// Leaves a request that was turned away, maybe after its decision.
    pub(super) fn refused(
        &self,
        decided: Option<Arc<Decided>>,
        refusal: &pb::Record,
        (first_token, end): (Option<Instant>, Instant),
    ) {
        self.push(Ended {
            decided,
            with: refusal.clone(),
            first_token_ns: first_token.map(|at| self.time(at)),
            end_ns: self.time(end),
        });
    }

    fn push(&self, ended: Ended) {
        if !self.lines.push(ended) {
            self.lost.inc();
        }
    }
}

impl Ended {
    fn record(self) -> pb::Record {
        let Self { decided, with, first_token_ns, end_ns } = self;
        let Some(decided) = decided else {
            let asked = pb::Asked { at_ns: end_ns, end_ns, ..pb::Asked::default() };
            return pb::Record { asked: Some(asked), ..with };
        };
        let facts = decided.facts();
        let asked = facts.asked.map(|asked| pb::Asked { first_token_ns, end_ns, ..asked });
        pb::Record { asked, outcome: with.outcome, refusal: with.refusal, ..facts }
    }
}

/// The files.
struct Writer {
    settings: Settings,
    start: Start,
    file: Option<Open>,
    /// When to try again after an error.
    retry: Option<Instant>,
    /// Whether the error has been said.
    failed: bool,
    /// What is to be written next, the requests in it, and the losses that are stated in it.
    text: Vec<u8>,
    gathered: u64,
    stated: u64,
    /// Requests that are missing and not yet stated in a file.
    lost: u64,
    said: Option<Instant>,
    counter: Counter,
}

/// The file that is written.
struct Open {
    file: File,
    bytes: u64,
    /// Versions of the pool that stand in it.
    pools: BTreeSet<u64>,
}

impl Writer {
    fn new(settings: Settings, began: SystemTime, counter: Counter) -> Self {
        let start = Start {
            format: FORMAT,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            run: format!("{:016x}", RandomState::new().hash_one(0)),
            began: humantime::format_rfc3339_nanos(began).to_string(),
            config: settings.config.clone(),
        };
        Self {
            settings,
            start,
            file: None,
            retry: None,
            failed: false,
            text: Vec::new(),
            gathered: 0,
            stated: 0,
            lost: 0,
            said: None,
            counter,
        }
    }

    /// Opens the file unless it is open; what goes wrong is said once.
    fn open_or_say(&mut self) {
        if self.file.is_some() || self.retry.is_some_and(|at| Instant::now() < at) {
            return;
        }
        match self.open() {
            Ok(open) => {
                self.file = Some(open);
                self.retry = None;
            }
            Err(error) => self.fail(&error),
        }
    }

    fn fail(&mut self, error: &io::Error) {
        self.file = None;
        self.retry = Some(Instant::now() + RETRY);
        if !std::mem::replace(&mut self.failed, true) {
            let path = self.settings.path.display();
            tracing::error!(%error, %path, "records cannot be written; requests are served without them");
        }
    }

    fn open(&self) -> io::Result<Open> {
        let path = &self.settings.path;
        let mut options = OpenOptions::new();
        options.read(true).append(true).create(true).mode(MODE);
        let file = options.open(path)?;
        let about = file.metadata()?;
        if !about.is_file() {
            return Err(io::Error::other("it is no regular file"));
        }
        // Where there are no locks, nobody can tell.
        if let Err(TryLockError::WouldBlock) = file.try_lock() {
            return Err(io::Error::other("another picker writes it"));
        }
        file.set_permissions(std::fs::Permissions::from_mode(MODE))?;
        let mut open = Open { file, bytes: about.len(), pools: BTreeSet::new() };
        let mut text = Vec::new();
        // What broke off in the middle of a line must not take the next one with it.
        if let Some(last) = open.bytes.checked_sub(1) {
            let mut byte = [0];
            open.file.read_exact_at(&mut byte, last)?;
            if byte != *b"\n" {
                text.push(b'\n');
            }
        }
        line(&mut text, &Line { start: Some(self.start.clone()), ..Line::default() })?;
        open.put(&text)?;
        Ok(open)
    }

    /// Makes room for a new file.
    fn rotate(&mut self) -> io::Result<()> {
        self.file = None;
        let path = &self.settings.path;
        for number in (1..self.settings.files).rev() {
            let from = if number == 1 { path.clone() } else { numbered(path, number - 1) };
            match std::fs::rename(from, numbered(path, number)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                Ok(()) | Err(_) => {}
            }
        }
        if self.settings.files <= 1 {
            std::fs::remove_file(path)?;
        }
        self.file = Some(self.open()?);
        Ok(())
    }

    /// Writes what has come together.
    fn write(&mut self, lines: Vec<Ended>, lost: u64) {
        self.lost += lost;
        self.open_or_say();
        let (came, mut written) = (lines.len() as u64, 0);
        if self.file.is_some() {
            let mut lines = lines.into_iter();
            let result = lines
                .try_for_each(|ended| self.append(ended, &mut written))
                .and_then(|()| self.flush(&mut written));
            match result {
                Ok(()) if std::mem::take(&mut self.failed) => {
                    let path = self.settings.path.display();
                    tracing::info!(%path, "records are written again");
                }
                Ok(()) => {}
                Err(error) => {
                    self.text.clear();
                    self.lost += std::mem::take(&mut self.stated);
                    self.gathered = 0;
                    self.fail(&error);
                }
            }
        }
        let missing = came - written;
        self.counter.inc_by(missing);
        self.lost += missing;
        if missing + lost > 0 && self.said.is_none_or(|at| at.elapsed() > SAID) {
            self.said = Some(Instant::now());
            tracing::warn!(requests = missing + lost, "requests are missing in the records");
        }
    }

    /// Appends a request to the text that is to be written, and before it what it refers to. Where the file would
    /// become too large, what is there is written and a new file begun.
    fn append(&mut self, ended: Ended, written: &mut u64) -> io::Result<()> {
        let decided = ended.decided.clone();
        let mut added = Vec::new();
        line(&mut added, &Line { decision: Some(ended.record()), ..Line::default() })?;
        let full = self.file.as_ref().is_some_and(|open| {
            open.bytes + (self.text.len() + added.len()) as u64 > self.settings.max_bytes
        });
        if full {
            self.flush(written)?;
            self.rotate()?;
        }
        self.state_losses()?;
        if let (Some(decided), Some(open)) = (decided, &mut self.file)
            && open.pools.insert(decided.pool().version())
        {
            let pool = Some(Pool::of(decided.pool()));
            line(&mut self.text, &Line { pool, ..Line::default() })?;
        }
        self.text.append(&mut added);
        self.gathered += 1;
        Ok(())
    }

    /// Appends how many requests are missing, if any are.
    fn state_losses(&mut self) -> io::Result<()> {
        let requests = std::mem::take(&mut self.lost);
        if requests > 0 {
            self.stated += requests;
            line(&mut self.text, &Line { lost: Some(Lost { requests }), ..Line::default() })?;
        }
        Ok(())
    }

    fn flush(&mut self, written: &mut u64) -> io::Result<()> {
        self.state_losses()?;
        if let Some(open) = &mut self.file {
            open.put(&self.text)?;
            self.text.clear();
            self.stated = 0;
            *written += std::mem::take(&mut self.gathered);
        }
        Ok(())
    }
}

impl Open {
    fn put(&mut self, text: &[u8]) -> io::Result<()> {
        self.file.write_all(text)?;
        self.bytes += text.len() as u64;
        Ok(())
    }
}

impl Pool {
    fn of(pool: &PoolSnapshot) -> Self {
        let member = |endpoint: &crate::pool::Endpoint| Member {
            name: endpoint.name.clone(),
            address: endpoint.address.to_string(),
            weight: endpoint.weight,
            instance: endpoint.instance.clone(),
        };
        Self {
            version: pool.version(),
            ring_points: pool.ring_points(),
            endpoints: pool.endpoints().iter().map(member).collect(),
        }
    }
}

/// Appends a line.
fn line(text: &mut Vec<u8>, line: &Line) -> io::Result<()> {
    let begin = text.len();
    match serde_json::to_writer(&mut *text, line) {
        Ok(()) => {
            text.push(b'\n');
            Ok(())
        }
        Err(error) => {
            text.truncate(begin);
            Err(error.into())
        }
    }
}

/// Returns the name of an older file.
fn numbered(path: &Path, number: u32) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{number}"));
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(settings: Settings) -> Writer {
        let mut writer = Writer::new(settings, SystemTime::UNIX_EPOCH, Counter::default());
        writer.open_or_say();
        writer
    }

    fn settings(name: &str, max_bytes: u64, files: u32) -> (tempfile::Dir, Settings) {
        let folder = tempfile::Dir::new(name);
        let path = folder.0.join("records.jsonl");
        (folder, Settings { path, max_bytes, files, config: serde_json::json!({}) })
    }

    /// A folder that goes away.
    mod tempfile {
        pub(super) struct Dir(pub(super) std::path::PathBuf);

        impl Dir {
            pub(super) fn new(name: &str) -> Self {
                let name = format!("llm-ring-records-{name}-{}", std::process::id());
                let path = std::env::temp_dir().join(name);
                drop(std::fs::remove_dir_all(&path));
                std::fs::create_dir_all(&path).unwrap();
                Self(path)
            }
        }

        impl Drop for Dir {
            fn drop(&mut self) {
                drop(std::fs::remove_dir_all(&self.0));
            }
        }
    }

    fn refused(request_id: &str) -> Ended {
        let request_id = request_id.to_owned();
        let with = pb::Record { request_id, refusal: "full".to_owned(), ..pb::Record::default() };
        Ended { decided: None, with, first_token_ns: None, end_ns: 5 }
    }

    /// Says what the lines of a file are.
    fn read(path: &Path) -> Vec<String> {
        let text = std::fs::read_to_string(path).unwrap();
        let name = |line: &str| {
            let line: Line = serde_json::from_str(line).ok()?;
            line.start
                .map(|_| "start".to_owned())
                .or(line.lost.map(|lost| format!("lost {}", lost.requests)))
                .or(line.decision.map(|record| record.request_id))
        };
        text.lines().map(|line| name(line).unwrap_or_else(|| "nothing".to_owned())).collect()
    }

    #[test]
    fn old_files_are_moved_on_and_the_oldest_goes() {
        let (folder, settings) = settings("rotation", 700, 3);
        let path = settings.path.clone();
        let mut writer = open(settings);
        for round in 0..20 {
            writer.write(vec![refused(&format!("{round}"))], 0);
        }
        drop(writer);
        let mut names: Vec<_> = std::fs::read_dir(&folder.0)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(names, ["records.jsonl", "records.jsonl.1", "records.jsonl.2"]);
        let mut seen = Vec::new();
        for number in [2, 1, 0] {
            let path = if number == 0 { path.clone() } else { numbered(&path, number) };
            let about = std::fs::metadata(&path).unwrap();
            assert!(about.len() <= 700);
            assert_eq!(about.permissions().mode() & 0o777, 0o600);
            let lines = read(&path);
            assert_eq!(lines[0], "start", "each file stands alone");
            seen.extend(lines[1..].iter().map(|line| line.parse::<u32>().unwrap()));
        }
        let first = seen[0];
        assert!(first > 0 && seen == (first..20).collect::<Vec<_>>(), "{seen:?}");
    }

    #[test]
    fn a_line_that_broke_off_does_not_take_the_next_one_with_it() {
        let (_folder, settings) = settings("append", 1 << 20, 3);
        let path = settings.path.clone();
        std::fs::write(&path, "{\"decision\": {\"time\"").unwrap();
        let mut writer = open(settings);
        writer.write(vec![refused("a")], 0);
        assert_eq!(read(&path), ["nothing", "start", "a"]);
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn what_is_missing_is_counted_and_stated() {
        let (folder, settings) = settings("lost", 1 << 20, 3);
        let path = settings.path.clone();
        let mut writer = open(settings.clone());
        writer.write(vec![refused("a")], 3);
        assert_eq!(read(&path), ["start", "lost 3", "a"]);
        // Somebody else's file is left alone.
        let mut second = open(settings.clone());
        assert!(second.failed);
        second.write(vec![refused("b"), refused("c")], 0);
        assert_eq!(second.counter.get(), 2);
        drop(writer);
        second.retry = None;
        second.write(vec![refused("d")], 0);
        assert!(!second.failed && second.counter.get() == 2);
        assert_eq!(read(&path), ["start", "lost 3", "a", "start", "lost 2", "d"]);
        // A folder in its place is an error, and no more than that.
        let settings = Settings { path: folder.0.clone(), ..settings };
        let mut nowhere = open(settings);
        nowhere.write(vec![refused("e")], 0);
        assert!(nowhere.failed && nowhere.counter.get() == 1);
    }
}
