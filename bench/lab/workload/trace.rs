//! Traces of real traffic, by path: Mooncake's (JSON lines with block hashes) and Azure's (CSV of lengths).

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context as _;
use serde::{Deserialize, Deserializer};

use super::shared::single;
use super::{Ids, Request, missing, prompt};
use crate::engine::{Block, Params};
use crate::random::{self, Random};

/// The folder of the traces, and those of them that have been read.
#[derive(Debug, Default)]
pub(crate) struct Traces {
    folder: PathBuf,
    hashed: Mutex<HashMap<String, Arc<[Hashed]>>>,
}

/// A line of Mooncake's traces.
#[derive(Debug, Deserialize)]
struct Hashed {
    /// Milliseconds.
    timestamp: f64,
    input_length: i64,
    output_length: i64,
    #[serde(deserialize_with = "shared")]
    hash_ids: Arc<[Block]>,
}

/// Reads a list that many requests will hold.
fn shared<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Arc<[Block]>, D::Error> {
    Vec::deserialize(deserializer).map(Into::into)
}

impl Traces {
    /// Looks for traces in a folder.
    pub(crate) fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into(), ..Self::default() }
    }

    /// Returns where a trace should be.
    pub(super) fn path(&self, file: &str) -> PathBuf {
        self.folder.join(file)
    }

    fn read(&self, file: &str) -> anyhow::Result<String> {
        let path = self.path(file);
        std::fs::read_to_string(&path).with_context(|| missing(&path))
    }

    fn hashed(&self, file: &str) -> anyhow::Result<Arc<[Hashed]>> {
        let mut known = self.hashed.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(rows) = known.get(file) {
            return Ok(Arc::clone(rows));
        }
        let text = self.read(file)?;
        let rows = text.lines().enumerate().map(|(at, line)| {
            serde_json::from_str(line).with_context(|| format!("{file}, line {}", at + 1))
        });
        let rows: Arc<[Hashed]> = rows.collect::<anyhow::Result<_>>()?;
        known.insert(file.to_owned(), Arc::clone(&rows));
        Ok(rows)
    }
}

/// A replay of one of Mooncake's traces.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Mooncake {
    file: String,
    /// How many times faster than it was.
    speed: f64,
    /// The part that is replayed, in seconds of the trace.
    from: Option<f64>,
    until: Option<f64>,
    /// Spreads arrivals that the trace has rounded, over so many seconds.
    jitter: Option<f64>,
    /// The block that names the conversation: the first that not all prompts share.
    key_block: usize,
    overlay: Option<Overlay>,
}

/// Requests of tools beside those of the trace.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Overlay {
    /// Requests of the trace in a second, and the share of all requests that are the overlay's.
    rate: f64,
    share: f64,
    families: Vec<Family>,
}

/// Requests with one long prefix.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Family {
    /// Its share of the overlay.
    share: f64,
    prefix_blocks: usize,
    /// Weights of having one, two, ... blocks of its own.
    own_blocks: Vec<f64>,
    /// Tokens in the last of them, least and most.
    last_block: (u32, u32),
    output: Output,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
enum Output {
    OneOf { one_of: Vec<i64> },
    Between { between: (u32, u32) },
}

/// The tokens of a block in Mooncake's traces.
const BLOCK: i64 = 512;

impl Mooncake {
    pub(super) fn file(&self) -> &str {
        &self.file
    }

    pub(super) fn arrivals(&self, seed: u64, traces: &Traces) -> anyhow::Result<Vec<Request>> {
        let rows = traces.hashed(&self.file)?;
        let mut random = Random::new(seed);
        let mut arrivals = Vec::new();
        for row in rows.iter() {
            let mut at = row.timestamp / 1000.0;
            if self.until.is_some_and(|until| at > until) {
                break;
            }
            if let Some(jitter) = self.jitter {
                at += random.uniform(0.0, jitter);
            }
            let key = match row.hash_ids.get(self.key_block) {
                Some(block) => format!("('m', {block})"),
                None => format!("('m', ('u', {}))", arrivals.len()),
            };
            let size = (row.input_length, row.output_length);
            arrivals.push(single(0, at, size, Arc::clone(&row.hash_ids), key.into()));
        }
        if let Some(overlay) = &self.overlay {
            let end = arrivals.iter().map(|request| request.sent).fold(0.0, f64::max);
            let ids = Ids { next: 1 + highest(&rows) };
            arrivals.extend(overlay.arrivals(&mut Random::new(seed + 7), ids, end));
        }
        arrivals.sort_by(|a, b| a.sent.total_cmp(&b.sent));
        if let Some(from) = self.from {
            arrivals.retain(|request| request.sent > from);
        }
        for (request, id) in arrivals.iter_mut().zip(0..) {
            request.id = id;
            request.sent = (request.sent - self.from.unwrap_or(0.0)) / self.speed;
        }
        Ok(arrivals)
    }
}

fn highest(rows: &[Hashed]) -> Block {
    rows.iter().flat_map(|row| row.hash_ids.iter().copied()).max().unwrap_or(0)
}

impl Overlay {
    fn arrivals(&self, random: &mut Random, mut ids: Ids, end: f64) -> Vec<Request> {
        let prefixes: Vec<Vec<Block>> =
            self.families.iter().map(|family| ids.take(family.prefix_blocks).collect()).collect();
        let rate = self.rate * self.share / (1.0 - self.share);
        let (mut arrivals, mut at) = (Vec::new(), 0.0);
        loop {
            at += random.expovariate(rate);
            if at > end {
                return arrivals;
            }
            let chosen = self.family(random.random());
            let family = &self.families[chosen];
            let own = 1 + random.weighted(&random::sums(family.own_blocks.iter().copied()));
            let last = i64::from(random.randint(family.last_block.0, family.last_block.1));
            let whole = (family.prefix_blocks + own - 1) as i64;
            let output = match &family.output {
                Output::OneOf { one_of } => *random.choice(one_of),
                Output::Between { between } => i64::from(random.randint(between.0, between.1)),
            };
            let blocks = prompt(&prefixes[chosen], ids.take(own));
            let key = format!("('t', {chosen})").into();
            arrivals.push(single(0, at, (whole * BLOCK + last, output), blocks, key));
        }
    }

    fn family(&self, drawn: f64) -> usize {
        let sums = random::sums(self.families.iter().map(|family| family.share));
        sums.iter().position(|&sum| drawn < sum).unwrap_or(self.families.len() - 1)
    }
}

/// A replay of one of Azure's traces: nothing in it is known to be shared.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Azure {
    file: String,
    /// How many times faster than it was.
    speed: f64,
    /// Where it is cut off, in seconds of the trace.
    until: Option<f64>,
}

impl Azure {
    pub(super) fn file(&self) -> &str {
        &self.file
    }

    pub(super) fn arrivals(&self, p: &Params, traces: &Traces) -> anyhow::Result<Vec<Request>> {
        let text = traces.read(&self.file)?;
        let (mut ids, mut first) = (Ids::default(), None);
        let mut arrivals: Vec<Request> = Vec::new();
        for (at, line) in text.lines().enumerate().skip(1) {
            let (time, prompt, output) =
                row(line).with_context(|| format!("{}, line {}", self.file, at + 1))?;
            let sent = time - *first.get_or_insert(time);
            if self.until.is_some_and(|until| sent > until) {
                break;
            }
            let blocks = ids.take(p.blocks(prompt)).collect();
            let key = format!("('u', {})", arrivals.len()).into();
            arrivals.push(single(0, sent / self.speed, (prompt, output), blocks, key));
        }
        arrivals.sort_by(|a, b| a.sent.total_cmp(&b.sent));
        for (request, id) in arrivals.iter_mut().zip(0..) {
            request.id = id;
        }
        Ok(arrivals)
    }
}

/// Reads `2023-11-16 18:17:03.9799600,4808,10`.
fn row(line: &str) -> anyhow::Result<(f64, i64, i64)> {
    let mut fields = line.trim_end().split(',');
    let mut field = || fields.next().context("a field is missing");
    let (time, prompt, output) = (field()?, field()?, field()?);
    Ok((seconds(time)?, prompt.parse::<i64>()?.max(1), output.parse::<i64>()?.max(1)))
}

/// Returns the seconds since 1970 of a time in UTC, to the microsecond.
fn seconds(time: &str) -> anyhow::Result<f64> {
    let (date, clock) = time.split_once(' ').context("a date and a time")?;
    let (clock, fraction) = clock.split_once('.').unwrap_or((clock, "0"));
    let numbers = |text: &str, by: char| -> anyhow::Result<Vec<i64>> {
        Ok(text.split(by).map(str::parse).collect::<Result<_, _>>()?)
    };
    let (date, clock) = (numbers(date, '-')?, numbers(clock, ':')?);
    let (&[year, month, day], &[hour, minute, second]) = (&date[..], &clock[..]) else {
        anyhow::bail!("a date and a time");
    };
    // Days of the civil calendar, counted from a March so that the leap day is a year's last.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = 365 * year + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + day - 1;
    let whole = (days - 719_468) * 86_400 + hour * 3600 + minute * 60 + second;
    let micros: f64 = format!("{fraction:0<6}")[..6].parse()?;
    Ok(whole as f64 + micros / 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_read_to_the_microsecond() {
        assert_eq!(seconds("2023-11-16 18:17:03.9799600").unwrap(), 1_700_158_623.979_96);
        assert_eq!(seconds("1970-01-01 00:00:00").unwrap(), 0.0);
        assert!(seconds("yesterday").is_err());
    }
}
