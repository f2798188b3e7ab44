//! Workloads as data: a YAML file each, of one of a few kinds. `loadaware:17` is the file `loadaware.yaml` with its first
//! parameter set to 17.

mod chat;
mod demo;
mod ring;
mod shared;
mod trace;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, bail};
use serde::Deserialize;
use serde_yaml::Value;

use super::engine::{Block, Params};
use super::random::Random;
use super::record::Slo;

pub(crate) use trace::Traces;

/// A request as its client sends it.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    /// Its place among the requests of the run, which the run gives it.
    pub(crate) index: usize,
    /// Its number in the workload.
    pub(crate) id: u64,
    /// When its client sends it.
    pub(crate) sent: f64,
    /// Tokens of its prompt, and of the answer that it will get.
    pub(crate) prompt: i64,
    pub(crate) output: i64,
    /// The blocks of its prompt.
    pub(crate) blocks: Arc<[Block]>,
    /// The blocks that its answer fills; `None` if nobody can ask for them.
    pub(crate) answer: Option<Arc<[Block]>>,
    /// What a router that hashes keys hashes.
    pub(crate) key: Arc<str>,
    /// The conversation and which turn of it, from 1.
    pub(crate) conversation: Option<u64>,
    pub(crate) turn: u32,
    /// Whether it counts: warm-up does not.
    pub(crate) counts: bool,
}

/// Clients that wait for answers before they go on.
pub(crate) trait Clients {
    /// Returns what they send whatever happens.
    fn start(&mut self) -> Vec<Request>;

    /// Returns what they send now that this request has ended.
    fn next(&mut self, ended: &Request, now: f64) -> Vec<Request>;
}

/// What is sent: at fixed times, and by clients that wait.
pub(crate) struct Traffic {
    pub(crate) arrivals: Vec<Request>,
    pub(crate) clients: Option<Box<dyn Clients>>,
}

/// Where the workloads are.
#[derive(Debug, Clone)]
pub(crate) struct Library {
    folder: PathBuf,
}

/// A workload of the library.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Listed {
    /// Without parameters.
    pub(crate) name: String,
    /// What it is, in a sentence or two.
    pub(crate) about: String,
    /// What it takes.
    pub(crate) parameters: Vec<String>,
    /// Its points of the comparison, by their names.
    pub(crate) points: Vec<String>,
    /// Whether policies were tuned without them.
    pub(crate) held_out: bool,
}

/// One workload with its parameters set.
#[derive(Debug, Clone)]
pub(crate) struct Point {
    /// Such as `loadaware:17`.
    pub(crate) name: String,
    /// What is asked of its requests.
    pub(crate) slo: Slo,
    /// The engine's set of parameters, and the speed of each of them.
    pub(crate) engine: Params,
    pub(crate) speeds: Vec<f64>,
    /// What happens to the pool meanwhile, in order.
    pub(crate) changes: Vec<Change>,
    kind: Kind,
}

/// A change of the pool.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
pub(crate) struct Change {
    /// When, in seconds.
    pub(crate) at: f64,
    #[serde(flatten)]
    pub(crate) what: What,
}

/// What changes.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum What {
    /// One more endpoint, of this speed.
    Join(f64),
    /// An endpoint takes no more requests, and ends those that it has.
    Leave(usize),
    /// An endpoint loses its cache and its requests, and is gone until something brings it back.
    Crash(usize),
    /// A crashed endpoint or one that left is back.
    Return(usize),
}

/// What a file says of itself, whatever its parameters.
#[derive(Debug, Deserialize)]
struct Head {
    /// What it is, in a sentence or two.
    about: String,
    /// Names of what stands behind the colons of a point's name; a `$name` in the file stands for its value.
    #[serde(default)]
    parameters: Vec<String>,
    /// Values of parameters that a name may leave out.
    #[serde(default)]
    defaults: BTreeMap<String, Value>,
    /// The points of the comparison: values of the parameters, as they stand in a name.
    #[serde(default)]
    points: Vec<String>,
    /// Whether policies were tuned without them.
    #[serde(default)]
    held_out: bool,
}

/// What else it says, with the values of its parameters.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    engine: String,
    /// What differs from the named engine.
    #[serde(default)]
    engine_with: EngineWith,
    endpoints: Endpoints,
    slo: Slo,
    #[serde(default)]
    changes: Vec<Change>,
    traffic: Kind,
}

/// Either a number of equal endpoints, or the speed of each.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Endpoints {
    Equal(usize),
    Speeds(Vec<f64>),
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct EngineWith {
    overhead: Option<f64>,
    prefill: Option<f64>,
    decode: Option<f64>,
    budget: Option<i64>,
    tokens: Option<i64>,
    block: Option<i64>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
enum Kind {
    Chat(chat::Chat),
    Demo(demo::Demo),
    Rounds(chat::Rounds),
    LlmRing(ring::LlmRing),
    SharedPrefix(shared::SharedPrefix),
    PrefixPool(shared::PrefixPool),
    Unique(shared::Unique),
    Mooncake(trace::Mooncake),
    Azure(trace::Azure),
}

impl Library {
    /// Reads workloads from a folder.
    pub(crate) fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into() }
    }

    /// Reads what there is, in the order of the names.
    pub(crate) fn list(&self) -> anyhow::Result<Vec<Listed>> {
        let read = std::fs::read_dir(&self.folder)
            .with_context(|| format!("cannot read the workloads in {}", self.folder.display()))?;
        let mut listed = Vec::new();
        for entry in read {
            let path = entry?.path();
            let name = path.file_stem().and_then(|stem| stem.to_str());
            let Some(name) = name.filter(|_| path.extension().is_some_and(|it| it == "yaml"))
            else {
                continue;
            };
            let text = std::fs::read_to_string(&path);
            let head: Head = serde_yaml::from_str(&text?)
                .with_context(|| format!("the workload {}", path.display()))?;
            let point = |values: &String| {
                if values.is_empty() { name.to_owned() } else { format!("{name}:{values}") }
            };
            listed.push(Listed {
                name: name.to_owned(),
                about: head.about,
                parameters: head.parameters,
                points: head.points.iter().map(point).collect(),
                held_out: head.held_out,
            });
        }
        listed.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(listed)
    }

    /// Reads a workload by its name with its parameters, such as `mrqa:3:90`.
    pub(crate) fn point(&self, name: &str) -> anyhow::Result<Point> {
        let mut words = name.split(':');
        let file = words.next().unwrap_or_default();
        let path = self.folder.join(format!("{file}.yaml"));
        let text = std::fs::read_to_string(&path)
            .with_context(|| format!("no workload `{file}`: cannot read {}", path.display()))?;
        let values: Vec<&str> = words.collect();
        point(name, &text, &values)
            .with_context(|| format!("workload `{name}`, {}", path.display()))
    }
}

fn point(name: &str, text: &str, values: &[&str]) -> anyhow::Result<Point> {
    let head: Head = serde_yaml::from_str(text)?;
    let mut document: Value = serde_yaml::from_str(text)?;
    if let Some(map) = document.as_mapping_mut() {
        for key in ["about", "parameters", "defaults", "points", "held_out"] {
            map.remove(key);
        }
    }
    substitute(&mut document, &head.values(values)?)?;
    let file: File = serde_yaml::from_value(document)?;
    let speeds = match file.endpoints {
        Endpoints::Equal(endpoints) => vec![1.0; endpoints],
        Endpoints::Speeds(speeds) => speeds,
    };
    check(&file.changes, speeds.len())?;
    Ok(Point {
        name: name.to_owned(),
        slo: file.slo,
        engine: file.engine_with.over(Params::named(&file.engine)?),
        speeds,
        changes: file.changes,
        kind: file.traffic,
    })
}

/// Checks that changes are in order, and of endpoints that there are by then.
fn check(changes: &[Change], mut endpoints: usize) -> anyhow::Result<()> {
    if !changes.is_sorted_by(|a, b| a.at <= b.at) {
        bail!("the changes are not in the order of their times");
    }
    for change in changes {
        match change.what {
            What::Join(_) => endpoints += 1,
            What::Leave(number) | What::Crash(number) | What::Return(number) => {
                if number >= endpoints {
                    bail!("endpoint {number} changes, and there are 0 to {}", endpoints - 1);
                }
            }
        }
    }
    Ok(())
}

impl Head {
    /// Joins the names of parameters with the values that a point's name gives them.
    fn values(self, given: &[&str]) -> anyhow::Result<BTreeMap<String, Value>> {
        let (names, mut values) = (self.parameters, self.defaults);
        if given.len() > names.len() {
            bail!("{} parameters are given, and it takes {names:?}", given.len());
        }
        for (name, value) in names.iter().zip(given) {
            let number: Value = serde_yaml::from_str(value)?;
            if !number.is_number() {
                bail!("`{name}` is a number, not `{value}`");
            }
            values.insert(name.clone(), number);
        }
        match names.iter().find(|name| !values.contains_key(*name)) {
            Some(missing) => bail!("`{missing}` is not given; it takes {names:?}"),
            None => Ok(values),
        }
    }
}

/// Puts the values of parameters where a document names them.
fn substitute(value: &mut Value, parameters: &BTreeMap<String, Value>) -> anyhow::Result<()> {
    if let Some(name) = value.as_str().and_then(|text| text.strip_prefix('$')) {
        let found = parameters.get(name).with_context(|| format!("`${name}` is no parameter"))?;
        *value = found.clone();
    } else if let Some(list) = value.as_sequence_mut() {
        list.iter_mut().try_for_each(|item| substitute(item, parameters))?;
    } else if let Some(map) = value.as_mapping_mut() {
        map.iter_mut().try_for_each(|(_, item)| substitute(item, parameters))?;
    }
    Ok(())
}

impl EngineWith {
    fn over(self, named: Params) -> Params {
        Params {
            overhead: self.overhead.unwrap_or(named.overhead),
            prefill: self.prefill.unwrap_or(named.prefill),
            decode: self.decode.unwrap_or(named.decode),
            budget: self.budget.unwrap_or(named.budget),
            tokens: self.tokens.unwrap_or(named.tokens),
            block: self.block.unwrap_or(named.block),
            ..named
        }
    }
}

impl Point {
    /// Draws what is sent with a seed.
    ///
    /// # Errors
    /// A trace is not where it should be.
    pub(crate) fn traffic(&self, seed: u64, traces: &Traces) -> anyhow::Result<Traffic> {
        let p = &self.engine;
        Ok(match &self.kind {
            Kind::Chat(chat) => Traffic::of(chat.clients(p, seed)),
            Kind::Demo(demo) => Traffic::of(demo.clients(p, seed)),
            Kind::Rounds(rounds) => Traffic::of(rounds.clients(p, seed)),
            Kind::LlmRing(profile) => Traffic::of(profile.clients(p, seed)),
            Kind::SharedPrefix(shared) => shared.traffic(p, seed),
            Kind::PrefixPool(pool) => Traffic::at(pool.arrivals(p, seed)),
            Kind::Unique(unique) => Traffic::at(unique.arrivals(p, seed)),
            Kind::Mooncake(trace) => Traffic::at(trace.arrivals(seed, traces)?),
            Kind::Azure(trace) => Traffic::at(trace.arrivals(p, traces)?),
        })
    }
}

impl Point {
    /// Tells whether clients wait for answers before they send again.
    pub(crate) fn waits(&self) -> bool {
        match &self.kind {
            Kind::Chat(_) | Kind::Demo(_) | Kind::Rounds(_) | Kind::LlmRing(_) => true,
            Kind::SharedPrefix(shared) => shared.waits(),
            Kind::PrefixPool(_) | Kind::Unique(_) | Kind::Mooncake(_) | Kind::Azure(_) => false,
        }
    }

    /// Returns the trace that it replays, if that is not where it should be.
    pub(crate) fn missing_trace(&self, traces: &Traces) -> Option<PathBuf> {
        let file = match &self.kind {
            Kind::Mooncake(trace) => trace.file(),
            Kind::Azure(trace) => trace.file(),
            Kind::Chat(_)
            | Kind::Demo(_)
            | Kind::Rounds(_)
            | Kind::LlmRing(_)
            | Kind::SharedPrefix(_)
            | Kind::PrefixPool(_)
            | Kind::Unique(_) => return None,
        };
        Some(traces.path(file)).filter(|path| !path.exists())
    }
}

impl Traffic {
    fn of(clients: impl Clients + 'static) -> Self {
        Self { arrivals: Vec::new(), clients: Some(Box::new(clients)) }
    }

    fn at(arrivals: Vec<Request>) -> Self {
        Self { arrivals, clients: None }
    }
}

/// Gives out the numbers of blocks.
#[derive(Debug, Clone, Default)]
struct Ids {
    next: Block,
}

impl Ids {
    fn take(&mut self, count: usize) -> impl Iterator<Item = Block> + use<> {
        let first = self.next;
        self.next += Block::try_from(count).expect("a workload has fewer than 2^32 blocks");
        first..self.next
    }
}

/// Joins the prefix that prompts share with blocks of their own.
fn prompt(shared: &[Block], own: impl Iterator<Item = Block>) -> Arc<[Block]> {
    shared.iter().copied().chain(own).collect()
}

/// A number of tokens, or of turns: fixed or drawn.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(untagged)]
enum Length {
    Fixed(i64),
    Normal { normal: Spread },
    LogNormal { log_normal: Spread },
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
struct Spread {
    mean: f64,
    deviation: f64,
    low: f64,
    high: f64,
    /// Round to the nearest whole number, and not down.
    #[serde(default)]
    round: bool,
}

impl Length {
    #[expect(clippy::cast_possible_truncation, reason = "a number of tokens")]
    fn draw(self, random: &mut Random) -> i64 {
        let (drawn, spread) = match self {
            Self::Fixed(length) => return length,
            Self::Normal { normal: spread } => {
                (random.gauss(spread.mean, spread.deviation), spread)
            }
            Self::LogNormal { log_normal: spread } => {
                let variance = (1.0 + (spread.deviation / spread.mean).powi(2)).ln();
                let mean = spread.mean.ln() - variance / 2.0;
                (random.lognormvariate(mean, variance.sqrt()), spread)
            }
        };
        let drawn = if spread.round { drawn.round_ties_even() } else { drawn };
        drawn.max(spread.low).min(spread.high) as i64
    }
}

/// Says that a file which is needed is not there.
fn missing(path: &Path) -> String {
    format!(
        "cannot read the trace {}: traces are no part of this repository; give the folder that holds them",
        path.display()
    )
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// The workloads of this repository.
    pub(crate) fn library() -> Library {
        Library::new(concat!(env!("CARGO_MANIFEST_DIR"), "/bench/lab/workloads"))
    }

    /// A workload of a test's own.
    pub(crate) fn inline(text: &str) -> Point {
        point("inline", &text.replacen('{', "{about: of a test, ", 1), &[]).unwrap()
    }

    /// The folder of the traces, if the environment names it.
    pub(crate) fn traces() -> Option<PathBuf> {
        let folder = std::env::var_os("LLM_RING_TRACES").map(PathBuf::from);
        if folder.is_none() {
            // Not by a macro, whose words a test that passes swallows.
            let words = "SKIPPED: LLM_RING_TRACES does not name the folder of the traces\n";
            std::io::Write::write_all(&mut std::io::stderr(), words.as_bytes()).unwrap();
        }
        folder
    }

    #[test]
    fn every_file_is_a_workload() {
        let listed = library().list().unwrap();
        for Listed { name, parameters, points, .. } in &listed {
            let ones = ":1".repeat(parameters.len());
            for name in [format!("{name}{ones}")].iter().chain(points) {
                library().point(name).unwrap_or_else(|error| panic!("{name}: {error:#}"));
            }
        }
        let count = |held_out| -> usize {
            listed.iter().filter(|it| it.held_out == held_out).map(|it| it.points.len()).sum()
        };
        assert_eq!((count(false), count(true)), (25, 15));
    }

    #[test]
    fn it_is_known_who_waits_and_what_is_missing() {
        let (library, nowhere) = (library(), Traces::new("/nowhere"));
        for Listed { name, parameters, .. } in library.list().unwrap() {
            let point = library.point(&format!("{name}{}", ":1".repeat(parameters.len()))).unwrap();
            match point.traffic(1, &nowhere) {
                Ok(traffic) => {
                    assert_eq!(point.waits(), traffic.clients.is_some(), "{name}");
                    assert_eq!(point.missing_trace(&nowhere), None, "{name}");
                }
                Err(error) => {
                    let missing = point.missing_trace(&nowhere).unwrap();
                    assert!(format!("{error:#}").contains(missing.to_str().unwrap()), "{name}");
                }
            }
        }
    }

    #[test]
    fn a_wrong_name_is_a_clear_error() {
        let error = |name: &str| format!("{:#}", library().point(name).unwrap_err());
        assert!(error("nothing").starts_with("no workload `nothing`: cannot read "));
        assert!(
            error("conv").ends_with("`speed` is not given; it takes [\"speed\"]"),
            "{}",
            error("conv")
        );
        assert!(error("conv:fast").ends_with("`speed` is a number, not `fast`"));
        assert!(error("conv:1:2").ends_with("2 parameters are given, and it takes [\"speed\"]"));
    }

    #[test]
    fn a_change_of_what_is_not_there_is_a_clear_error() {
        let error = |changes: &str| {
            let text = format!(
                "{{about: a, engine: cpu, endpoints: 2, slo: {{ttft: 1, itl: 1}}, changes: [{changes}], \
                 traffic: {{kind: unique, requests: 1, rate: 1, prompt: 1, output: 1}}}}"
            );
            point("inline", &text, &[]).unwrap_err().to_string()
        };
        assert_eq!(error("{at: 1, crash: 2}"), "endpoint 2 changes, and there are 0 to 1");
        assert!(error("{at: 2, join: 1}, {at: 1, leave: 2}").contains("not in the order"));
    }

    #[test]
    fn a_trace_that_is_not_there_is_a_clear_error() {
        let error = library().point("synth:1").unwrap().traffic(1, &Traces::new("/nowhere"));
        let error = format!("{:#}", error.err().unwrap());
        assert!(
            error.starts_with("cannot read the trace /nowhere/mooncake_synthetic_trace.jsonl"),
            "{error}"
        );
    }
}
