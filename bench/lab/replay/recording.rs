//! Files of records read back: whatever is in them, what can be used is used, and the rest is counted.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use anyhow::{Context as _, Result};
use llm_ring::config::Points;
use llm_ring::pool::{Endpoint, PoolSnapshot, endpoint};
use llm_ring::telemetry::records::{FORMAT, Line, Pool, Start};
use llm_ring::telemetry::{pb, recall};
use serde::Serialize;

/// Longer lines are no records: a pool of ten thousand endpoints has about a megabyte.
const LONGEST: u64 = 32 << 20;

/// What the files hold.
#[derive(Debug, Default)]
pub(crate) struct Recording {
    /// Runs of pickers, in the order in which they began.
    pub(crate) runs: Vec<Run>,
    /// Requests that were decided, by time.
    pub(crate) decisions: Vec<Recorded>,
    /// Requests that the pickers refused, by reason.
    pub(crate) refused: BTreeMap<String, u64>,
    /// Lines in all.
    pub(crate) lines: u64,
    /// Requests that the pickers say are missing.
    pub(crate) lost: u64,
    /// Lines that could not be used, by reason.
    pub(crate) skipped: BTreeMap<String, Skipped>,
}

/// Lines that could not be used.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Skipped {
    pub(crate) lines: u64,
    /// The first of them: file, line, and what is wrong with it.
    pub(crate) first: String,
}

/// One run of a picker.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) id: String,
    /// When it began, in nanoseconds since 1970.
    pub(crate) began: u64,
    pub(crate) config: serde_json::Value,
    /// The pool by its versions.
    pub(crate) pools: BTreeMap<u64, Members>,
    /// Decisions between the first and the last one that the files do not have.
    pub(crate) missing: u64,
    /// Decisions before the first one that they have.
    pub(crate) before: u64,
}

/// Endpoints, and the virtual nodes for each unit of weight.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Members {
    pub(crate) endpoints: Vec<Endpoint>,
    pub(crate) points: u32,
}

/// A request that was decided.
#[derive(Debug)]
pub(crate) struct Recorded {
    /// Index of its run; `None` is a line of a decision log.
    pub(crate) run: Option<usize>,
    /// Times in nanoseconds since 1970: the pick, the first token, the end; each later than the one before.
    pub(crate) at: u64,
    pub(crate) first: Option<u64>,
    pub(crate) end: u64,
    pub(crate) record: pb::Record,
    pub(crate) asked: pb::Asked,
    /// Where it stands, for who finds something wrong with it later.
    pub(crate) place: Place,
}

/// A line of a file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    file: usize,
    line: u64,
}

/// Reads files one after the other.
#[derive(Debug, Default)]
struct Reader {
    recording: Recording,
    /// Runs by their ids.
    known: BTreeMap<String, usize>,
    /// The run that the next lines of this file are of.
    current: Current,
    /// Decisions that have been read, by run and sequence.
    seen: BTreeSet<(usize, u64)>,
}

/// What the last `start` of a file said.
#[derive(Debug, Default, Clone, Copy)]
enum Current {
    /// Nothing yet.
    #[default]
    Unknown,
    /// Lines in a format that came later than this program.
    Newer,
    Run(usize),
}

impl Recording {
    /// Reads files, in any order; `whole` keeps what decisions alone are made on.
    ///
    /// # Errors
    /// A file cannot be read at all.
    pub(crate) fn read(files: &[PathBuf], whole: bool) -> Result<Self> {
        let mut reader = Reader::default();
        for (number, path) in files.iter().enumerate() {
            reader.file(number, path, files, whole).with_context(|| path.display().to_string())?;
        }
        Ok(reader.recording.sort())
    }

    /// Notes a line that cannot be used.
    pub(crate) fn skip(&mut self, why: &str, files: &[PathBuf], place: Place, detail: &str) {
        let skipped = self.skipped.entry(why.to_owned()).or_insert_with(|| {
            let file = files.get(place.file).map_or_else(String::new, |path| file_name(path));
            let detail = if detail.is_empty() { String::new() } else { format!(": {detail}") };
            Skipped { lines: 0, first: format!("{file}:{}{detail}", place.line) }
        });
        skipped.lines += 1;
    }

    /// Puts runs and decisions in order, and counts gaps.
    fn sort(mut self) -> Self {
        let mut order: Vec<usize> = (0..self.runs.len()).collect();
        order.sort_by(|&a, &b| {
            let key = |index: usize| (self.runs[index].began, &self.runs[index].id);
            key(a).cmp(&key(b))
        });
        let mut moved = vec![0; order.len()];
        for (new, &old) in order.iter().enumerate() {
            moved[old] = new;
        }
        let mut runs: Vec<Option<Run>> = self.runs.into_iter().map(Some).collect();
        self.runs = order.iter().filter_map(|&old| runs[old].take()).collect();
        for decision in &mut self.decisions {
            decision.run = decision.run.map(|run| moved[run]);
        }
        self.decisions.sort_by_key(|it| (it.at, it.run, it.record.sequence));
        for (index, run) in self.runs.iter_mut().enumerate() {
            let of = self.decisions.iter().filter(|it| it.run == Some(index));
            let (mut first, mut last, mut count) = (u64::MAX, 0, 0);
            for decision in of {
                first = first.min(decision.record.sequence);
                last = last.max(decision.record.sequence);
                count += 1;
            }
            if count > 0 {
                run.before = first;
                run.missing = (last - first).saturating_add(1).saturating_sub(count);
            }
        }
        self
    }
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}

impl Reader {
    fn file(&mut self, number: usize, path: &Path, files: &[PathBuf], whole: bool) -> Result<()> {
        let mut input = BufReader::new(File::open(path)?);
        self.current = Current::Unknown;
        let mut text = Vec::new();
        for line in 1.. {
            text.clear();
            let place = Place { file: number, line };
            if input.by_ref().take(LONGEST).read_until(b'\n', &mut text)? == 0 {
                break;
            }
            self.recording.lines += 1;
            let complete = text.ends_with(b"\n");
            if !complete && text.len() as u64 == LONGEST {
                input.skip_until(b'\n')?;
                self.recording.skip("longer than any record", files, place, "");
                continue;
            }
            if text.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            if let Err((why, detail)) = self.line(&text, place, whole) {
                // The last line of a file that is being written, or was when its picker died.
                let why = if complete || why != NOT_JSON { why } else { "cut off" };
                self.recording.skip(why, files, place, &detail);
            }
        }
        Ok(())
    }

    fn line(
        &mut self,
        text: &[u8],
        place: Place,
        whole: bool,
    ) -> Result<(), (&'static str, String)> {
        let line: Line = match serde_json::from_slice(text) {
            Ok(line) => line,
            Err(error) if error.is_data() => {
                let json: serde_json::Value =
                    serde_json::from_slice(text).map_err(|error| (NOT_JSON, error.to_string()))?;
                let known = ["start", "pool", "decision", "lost"].iter();
                let is_record = known.clone().any(|key| json.get(key).is_some());
                let why = if is_record { UNKNOWN_FIELDS } else { FOREIGN };
                return Err((why, error.to_string()));
            }
            Err(error) => return Err((NOT_JSON, error.to_string())),
        };
        if let Some(start) = line.start {
            return self.start(start);
        }
        if matches!(self.current, Current::Newer) {
            return Err((NEWER, String::new()));
        }
        if let Some(pool) = line.pool {
            return self.pool(&pool);
        }
        if let Some(lost) = line.lost {
            self.recording.lost = self.recording.lost.saturating_add(lost.requests);
            return Ok(());
        }
        let record = line.decision.ok_or((FOREIGN, String::new()))?;
        self.decision(record, place, whole)
    }

    fn start(&mut self, start: Start) -> Result<(), (&'static str, String)> {
        if start.format > FORMAT {
            self.current = Current::Newer;
            let detail = format!("llm-ring {} writes format {}", start.version, start.format);
            return Err((NEWER, detail));
        }
        self.current = Current::Unknown;
        let began = humantime::parse_rfc3339(&start.began)
            .ok()
            .and_then(|began| began.duration_since(UNIX_EPOCH).ok())
            .and_then(|began| u64::try_from(began.as_nanos()).ok())
            .ok_or_else(|| (UNREADABLE, format!("`{}` is no time", start.began)))?;
        let runs = &mut self.recording.runs;
        let index = *self.known.entry(start.run).or_insert_with_key(|id| {
            runs.push(Run {
                id: id.clone(),
                began,
                config: start.config,
                pools: BTreeMap::new(),
                missing: 0,
                before: 0,
            });
            runs.len() - 1
        });
        self.current = Current::Run(index);
        Ok(())
    }

    fn pool(&mut self, pool: &Pool) -> Result<(), (&'static str, String)> {
        let Current::Run(run) = self.current else { return Err((NO_START, String::new())) };
        let members = members(pool).map_err(|error| (UNREADABLE, format!("{error:#}")))?;
        self.recording.runs[run].pools.insert(pool.version, members);
        Ok(())
    }

    fn decision(
        &mut self,
        mut record: pb::Record,
        place: Place,
        whole: bool,
    ) -> Result<(), (&'static str, String)> {
        if record.target.is_empty() {
            if record.refusal.is_empty() {
                return Err((FOREIGN, "it names no endpoint".to_owned()));
            }
            let why = record.refusal.split(':').next().unwrap_or_default().to_owned();
            *self.recording.refused.entry(why).or_insert(0) += 1;
            return Ok(());
        }
        if record.sequence > MOST_DECISIONS {
            return Err((UNREADABLE, format!("sequence {}", record.sequence)));
        }
        let asked = record.asked.take();
        let (run, asked, began) = match (self.current, asked) {
            (Current::Run(run), Some(asked)) => {
                if !self.seen.insert((run, record.sequence)) {
                    return Err((TWICE, String::new()));
                }
                (Some(run), asked, self.recording.runs[run].began)
            }
            (_, Some(_)) => return Err((NO_START, String::new())),
            (_, None) => {
                let at = humantime::parse_rfc3339(&record.time)
                    .ok()
                    .and_then(|time| time.duration_since(UNIX_EPOCH).ok())
                    .map_or(0, |since| u64::try_from(since.as_nanos()).unwrap_or(u64::MAX));
                let outcome = record.outcome.as_ref();
                let after = |ms: f64| nanoseconds(ms / 1000.0);
                let first = outcome.and_then(|it| it.ttft_ms).map(after);
                let end = outcome.map_or(0, |it| after(it.duration_ms));
                let asked = pb::Asked { first_token_ns: first, end_ns: end, ..Default::default() };
                (None, asked, at)
            }
        };
        let at = began.saturating_add(asked.at_ns);
        // Nothing comes before what it follows from, whatever a file says.
        let first =
            asked.first_token_ns.map(|first| began.saturating_add(first).max(at.saturating_add(1)));
        let end = began.saturating_add(asked.end_ns).max(first.unwrap_or(at).saturating_add(1));
        recall::conversation(&record).map_err(|error| (UNREADABLE, format!("{error:#}")))?;
        if !whole {
            // In sequence only what engines said is needed of them.
            let said =
                |load: &pb::EndpointLoad| load.sight.as_ref().is_some_and(|it| it.said.is_some());
            record.loads.retain(said);
        }
        record.steps = Vec::new();
        self.recording.decisions.push(Recorded { run, at, first, end, record, asked, place });
        Ok(())
    }
}

/// No picker decides as often.
const MOST_DECISIONS: u64 = 1 << 52;
const NOT_JSON: &str = "not JSON";
const FOREIGN: &str = "JSON that is no line of records";
const UNKNOWN_FIELDS: &str = "with fields or values that this version does not know";
const NEWER: &str = "written by a newer llm-ring";
const UNREADABLE: &str = "with a value that cannot be read";
const NO_START: &str = "of a run whose `start` is not before it in its file";
const TWICE: &str = "there twice";

/// Returns seconds as nanoseconds; what is no time is none.
pub(crate) fn nanoseconds(seconds: f64) -> u64 {
    let duration = Duration::try_from_secs_f64(seconds).unwrap_or_default();
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

fn members(pool: &Pool) -> Result<Members> {
    let points = Points::try_from(u64::from(pool.ring_points)).map_err(anyhow::Error::msg)?;
    let endpoints = pool.endpoints.iter().map(|member| {
        let address = member.address.parse().with_context(|| format!("`{}`", member.address))?;
        Ok(Endpoint {
            weight: endpoint::weight(member.weight).map_err(anyhow::Error::msg)?,
            instance: member.instance.clone(),
            ..Endpoint::new(member.name.clone(), address)
        })
    });
    let endpoints = endpoints.collect::<Result<Vec<_>>>()?;
    PoolSnapshot::check(&endpoints)?;
    Ok(Members { endpoints, points: points.get() })
}
