//! What is done and what is left: a store of finished runs, and a bar that says how long the others take.

use std::fmt::Write as _;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::metrics::Measured;
use crate::record::{Live, Row, Run, Slo, Work};

const RECORD: &str = "run.json";
const REQUESTS: &str = "requests.csv";
/// A column for each field of a row, in their order.
const COLUMNS: &str = "id,conversation,turn,counts,sent,dispatched,ttft,e2e,prompt,output,cached,best_cached,endpoint";

/// What a run is of. The same key gives the same run.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Key {
    pub(crate) workload: String,
    pub(crate) policy: String,
    pub(crate) seed: u64,
    /// All parameters of the workload, the engine and the policy.
    pub(crate) parameters: Value,
}

/// Finished runs in an output folder: `runs/<workload>/<policy>/seed-<n>/`, with everything that it takes to repeat one.
#[derive(Debug)]
pub(crate) struct Store {
    folder: PathBuf,
    /// Of the program. A run of another version is made again, unless any will do.
    version: String,
    any_version: bool,
    /// The command line that asked for the runs, to be read by people.
    command: String,
}

/// A run without its rows, as it is in its file.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    version: String,
    command: String,
    workload: String,
    policy: String,
    seed: u64,
    parameters: Value,
    slo: Slo,
    scaled_at: Option<f64>,
    #[serde(default)]
    live: Option<Live>,
    /// To look at; they are measured anew when the run is read.
    metrics: Map<String, Value>,
    endpoints: Vec<Work>,
    /// The rows' file, beside this one.
    requests: String,
    rows: usize,
}

impl Store {
    pub(crate) fn open(folder: &Path, version: &str, command: &str) -> Result<Self> {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        Ok(Self {
            folder: folder.to_owned(),
            version: version.to_owned(),
            any_version: false,
            command: command.to_owned(),
        })
    }

    /// The same store, which also takes runs of other versions for finished.
    pub(crate) fn of_any_version(self) -> Self {
        Self { any_version: true, ..self }
    }

    /// The run of a key, if this version of the program has finished it with these parameters.
    pub(crate) fn get(&self, key: &Key) -> Result<Option<Run>> {
        let folder = self.folder_of(key);
        let Some(record) = read_record(&folder)? else { return Ok(None) };
        let current = self.any_version || record.version == self.version;
        if !current || !same_run(&record, key)? {
            return Ok(None);
        }
        whole_run(&folder, record).map(Some)
    }

    /// Keeps a run. Its times come back rounded to the microsecond.
    pub(crate) fn put(&self, key: &Key, run: &Run) -> Result<()> {
        let folder = self.folder_of(key);
        if let Some(other) = read_record(&folder)?
            .filter(|other| other.workload != key.workload || other.policy != key.policy)
        {
            bail!("{} is of {} under {}", folder.display(), other.workload, other.policy);
        }
        write_whole(&folder.join(REQUESTS), csv(&run.rows).as_bytes())?;
        // The record comes last: a run is there when its record is.
        write_whole(&folder.join(RECORD), &json(&self.record(key, run))?)
    }

    fn record(&self, key: &Key, run: &Run) -> Record {
        let metrics = Measured::of(run)
            .values
            .into_iter()
            .map(|(metric, value)| (metric.name().to_owned(), value.into()));
        Record {
            version: self.version.clone(),
            command: self.command.clone(),
            workload: key.workload.clone(),
            policy: key.policy.clone(),
            seed: key.seed,
            parameters: key.parameters.clone(),
            slo: run.slo,
            scaled_at: run.scaled_at,
            live: run.live,
            metrics: metrics.collect(),
            endpoints: run.endpoints.clone(),
            requests: REQUESTS.to_owned(),
            rows: run.rows.len(),
        }
    }

    fn folder_of(&self, key: &Key) -> PathBuf {
        let (workload, policy) = (file_name(&key.workload), file_name(&key.policy));
        self.folder.join("runs").join(workload).join(policy).join(format!("seed-{}", key.seed))
    }
}

/// Joins a record with its rows.
fn whole_run(folder: &Path, record: Record) -> Result<Run> {
    let path = folder.join(&record.requests);
    let rows =
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let rows =
        rows_of(&rows).with_context(|| format!("{} is not as it was written", path.display()))?;
    ensure!(
        rows.len() == record.rows,
        "{} has {} rows, not {}",
        path.display(),
        rows.len(),
        record.rows
    );
    Ok(Run {
        workload: record.workload,
        policy: record.policy,
        seed: record.seed,
        slo: record.slo,
        scaled_at: record.scaled_at,
        live: record.live,
        rows,
        endpoints: record.endpoints,
    })
}

/// A finished run that lies in a folder, whatever it was made for, and what is kept of it.
#[derive(Debug)]
pub(crate) struct Found<T> {
    pub(crate) key: Key,
    pub(crate) folder: PathBuf,
    /// Of the program that made it, and the command line that asked for it.
    pub(crate) version: String,
    pub(crate) command: String,
    pub(crate) kept: T,
}

/// Reads all finished runs of a results folder, in the order of workloads, policies and seeds.
///
/// # Errors
/// It holds no run, or a damaged one.
pub(crate) fn all<T>(folder: &Path, keep: impl Fn(&Run) -> T) -> Result<Vec<Found<T>>> {
    let mut found = Vec::new();
    for run in folders(&folder.join("runs"), 3)? {
        let Some(record) = read_record(&run)? else { continue };
        let (version, command) = (record.version.clone(), record.command.clone());
        let parameters = record.parameters.clone();
        let kept = whole_run(&run, record)?;
        let key = Key {
            workload: kept.workload.clone(),
            policy: kept.policy.clone(),
            seed: kept.seed,
            parameters,
        };
        found.push(Found { key, version, command, kept: keep(&kept), folder: run });
    }
    let order = |found: &Found<T>| {
        let Key { workload, policy, seed, .. } = &found.key;
        (workload.clone(), policy.clone(), *seed)
    };
    found.sort_by_cached_key(order);
    ensure!(!found.is_empty(), "{} holds no finished run", folder.display());
    Ok(found)
}

/// The folders that lie so deep below one.
fn folders(folder: &Path, depth: usize) -> Result<Vec<PathBuf>> {
    if depth == 0 {
        return Ok(vec![folder.to_owned()]);
    }
    let read = fs::read_dir(folder)
        .with_context(|| format!("{} is no folder of results", folder.display()))?;
    let mut deep = Vec::new();
    for entry in read {
        let path = entry?.path();
        if path.is_dir() {
            deep.extend(folders(&path, depth - 1)?);
        }
    }
    Ok(deep)
}

fn read_record(folder: &Path) -> Result<Option<Record>> {
    let path = folder.join(RECORD);
    let bytes = match fs::read(&path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
    };
    let record = serde_json::from_slice(&bytes);
    record.map(Some).with_context(|| {
        format!("{} is not a run; remove it to make the run again", path.display())
    })
}

fn same_run(record: &Record, key: &Key) -> Result<bool> {
    // Through text, as the record's were: a number may have lost its last bit.
    let parameters: Value = serde_json::from_slice(&json(&key.parameters)?)?;
    Ok((&record.workload, &record.policy, record.seed) == (&key.workload, &key.policy, key.seed)
        && record.parameters == parameters)
}

/// A name with nothing that a file system could mind.
pub(crate) fn file_name(name: &str) -> String {
    name.chars()
        .map(|c| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '-' })
        .collect()
}

pub(crate) fn json(value: &impl Serialize) -> Result<Vec<u8>> {
    let mut bytes = serde_json::to_vec_pretty(value)?;
    bytes.push(b'\n');
    Ok(bytes)
}

/// Writes a file beside its place and moves it there: it is never half there.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    let write = || {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        let mut beside = path.as_os_str().to_owned();
        beside.push(format!(".{}", std::process::id()));
        fs::write(&beside, bytes)?;
        fs::rename(&beside, path)
    };
    write().with_context(|| format!("cannot write {}", path.display()))
}

fn csv(rows: &[Row]) -> String {
    let mut out = format!("{COLUMNS}\n");
    for row in rows {
        let Row { id, turn, prompt, output, cached, best_cached, .. } = row;
        let counts = u8::from(row.counts);
        let conversation = row.conversation.map(|id| id.to_string()).unwrap_or_default();
        let endpoint = row.endpoint.map(|number| number.to_string()).unwrap_or_default();
        let [sent, dispatched, ttft, e2e] =
            [Some(row.sent), row.dispatched, row.ttft, row.e2e].map(time);
        let _ = writeln!(
            out,
            "{id},{conversation},{turn},{counts},{sent},{dispatched},{ttft},{e2e},{prompt},{output},{cached},{best_cached},{endpoint}"
        );
    }
    out
}

fn time(seconds: Option<f64>) -> String {
    seconds.map(|seconds| ((seconds * 1e6).round() / 1e6).to_string()).unwrap_or_default()
}

fn rows_of(csv: &str) -> Result<Vec<Row>> {
    let mut lines = csv.lines();
    ensure!(lines.next() == Some(COLUMNS), "other columns");
    lines
        .enumerate()
        .map(|(at, line)| row_of(line).with_context(|| format!("line {}", at + 2)))
        .collect()
}

fn row_of(line: &str) -> Result<Row> {
    let cells: Vec<&str> = line.split(',').collect();
    let Ok(
        [
            id,
            conversation,
            turn,
            counts,
            sent,
            dispatched,
            ttft,
            e2e,
            prompt,
            output,
            cached,
            best_cached,
            endpoint,
        ],
    ) = <[&str; 13]>::try_from(cells)
    else {
        bail!("not 13 cells");
    };
    Ok(Row {
        id: id.parse()?,
        conversation: some(conversation)?,
        turn: turn.parse()?,
        counts: counts == "1",
        sent: sent.parse()?,
        dispatched: some(dispatched)?,
        ttft: some(ttft)?,
        e2e: some(e2e)?,
        prompt: prompt.parse()?,
        output: output.parse()?,
        cached: cached.parse()?,
        best_cached: best_cached.parse()?,
        endpoint: some(endpoint)?,
    })
}

fn some<T: std::str::FromStr>(cell: &str) -> Result<Option<T>, T::Err> {
    if cell.is_empty() { Ok(None) } else { cell.parse().map(Some) }
}

/// A bar on a terminal, and nothing elsewhere. It moves by what runs cost, so that the time left is about right when
/// some are a hundred times longer than others.
#[derive(Debug)]
pub(crate) struct Bar {
    bar: ProgressBar,
    runs: usize,
}

impl Bar {
    pub(crate) fn new(runs: usize, cost: f64) -> Result<Self> {
        let style = ProgressStyle::with_template("{bar:30} {percent:>3} %  {eta} left  {msg}")?;
        let bar = ProgressBar::new(parts(cost)).with_style(style.progress_chars("=> "));
        bar.enable_steady_tick(std::time::Duration::from_millis(500));
        Ok(Self { bar, runs })
    }

    /// Tells what is being made.
    pub(crate) fn starts(&self, done: usize, key: &Key) {
        let (runs, Key { workload, policy, seed, .. }) = (self.runs, key);
        self.bar.set_message(format!("{done} of {runs} runs  {workload} {policy} {seed}"));
    }

    pub(crate) fn ends(&self, cost: f64) {
        self.bar.inc(parts(cost));
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// Costs as whole numbers, a thousandth each.
fn parts(cost: f64) -> u64 {
    crate::metrics::whole(cost * 1e3) as u64
}

#[cfg(test)]
pub(crate) mod folder {
    use std::fs;
    use std::path::{Path, PathBuf};

    /// A folder for a test, which goes with it.
    #[derive(Debug)]
    pub(crate) struct Folder(PathBuf);

    impl Folder {
        pub(crate) fn new(test: &str) -> Self {
            let path =
                std::env::temp_dir().join(format!("llm-ring-lab-{test}-{}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }

        pub(crate) fn path(&self) -> &Path {
            &self.0
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::folder::Folder;
    use super::*;
    use crate::metrics::made_up;

    fn key(workload: &str, epsilon: f64) -> Key {
        Key {
            workload: workload.to_owned(),
            policy: "bounded".to_owned(),
            seed: 3,
            parameters: json!({"epsilon": epsilon}),
        }
    }

    fn store(folder: &Folder, version: &str) -> Store {
        Store::open(folder.path(), version, "llm-ring-lab run --workload chat:96").unwrap()
    }

    #[test]
    fn a_run_comes_back_as_it_was() {
        let folder = Folder::new("store");
        let store = store(&folder, "0.1.0");
        let (key, run) = (key("chat:96", 0.1 + 0.2), made_up::run("chat:96", "bounded", 3, 0.5));
        assert_eq!(store.get(&key).unwrap(), None);
        store.put(&key, &run).unwrap();
        let back = store.get(&key).unwrap().unwrap();
        assert_eq!(back.rows.len(), run.rows.len());
        assert!((back.rows[9].sent - run.rows[9].sent).abs() <= 5e-7);
        assert_eq!(
            (&back.policy, back.slo, &back.endpoints[0].preemptions),
            (&run.policy, run.slo, &0)
        );
        store.put(&key, &back).unwrap();
        assert_eq!(store.get(&key).unwrap(), Some(back), "rounded once is rounded");
    }

    #[test]
    fn what_was_made_otherwise_is_made_again() {
        let folder = Folder::new("other");
        let run = made_up::run("chat", "bounded", 3, 0.5);
        store(&folder, "0.1.0").put(&key("chat", 0.25), &run).unwrap();
        assert_eq!(store(&folder, "0.1.0").get(&key("chat", 0.5)).unwrap(), None);
        assert_eq!(store(&folder, "0.2.0").get(&key("chat", 0.25)).unwrap(), None);
        assert!(store(&folder, "0.1.0").get(&key("chat", 0.25)).unwrap().is_some());
        let any = store(&folder, "0.2.0").of_any_version();
        assert!(any.get(&key("chat", 0.25)).unwrap().is_some());
        assert_eq!(any.get(&key("chat", 0.5)).unwrap(), None);
    }

    #[test]
    fn a_run_without_its_record_is_not_there() {
        let folder = Folder::new("half");
        let store = store(&folder, "0.1.0");
        let key = key("chat", 0.25);
        store.put(&key, &made_up::run("chat", "bounded", 3, 0.5)).unwrap();
        fs::remove_file(store.folder_of(&key).join(RECORD)).unwrap();
        assert_eq!(store.get(&key).unwrap(), None);
    }

    #[test]
    fn all_that_lies_in_a_folder_is_found_in_order() {
        let folder = Folder::new("all");
        let store = store(&folder, "0.1.0");
        assert!(
            all(folder.path(), |_| ())
                .unwrap_err()
                .to_string()
                .ends_with("is no folder of results")
        );
        for (workload, seed) in [("chat:96", 10), ("chat:96", 2), ("agent:16", 3)] {
            let key = Key { seed, ..key(workload, 0.25) };
            store.put(&key, &made_up::run(workload, "bounded", seed, 0.5)).unwrap();
        }
        let found = all(folder.path(), |run| run.rows.len()).unwrap();
        let keys: Vec<(&str, u64)> =
            found.iter().map(|found| (found.key.workload.as_str(), found.key.seed)).collect();
        assert_eq!(keys, [("agent:16", 3), ("chat:96", 2), ("chat:96", 10)]);
        assert_eq!(found[0].key.parameters, json!({"epsilon": 0.25}));
        assert_eq!((found[0].version.as_str(), found[0].kept), ("0.1.0", 600));
    }

    #[test]
    fn names_that_share_a_folder_do_not_overwrite_each_other() {
        let folder = Folder::new("names");
        let store = store(&folder, "0.1.0");
        store.put(&key("chat:96", 0.25), &made_up::run("chat:96", "bounded", 3, 0.5)).unwrap();
        let error = store
            .put(&key("chat-96", 0.25), &made_up::run("chat-96", "bounded", 3, 0.5))
            .unwrap_err();
        assert!(error.to_string().ends_with("is of chat:96 under bounded"), "{error}");
    }

    #[test]
    fn the_record_says_how_to_repeat_the_run() {
        let folder = Folder::new("record");
        let store = store(&folder, "0.1.0");
        let key = key("chat:96", 0.25);
        store.put(&key, &made_up::run("chat:96", "bounded", 3, 0.5)).unwrap();
        let record: Value =
            serde_json::from_slice(&fs::read(store.folder_of(&key).join(RECORD)).unwrap()).unwrap();
        assert_eq!(record["version"], "0.1.0");
        assert_eq!(record["command"], "llm-ring-lab run --workload chat:96");
        assert_eq!(record["parameters"], json!({"epsilon": 0.25}));
        assert_eq!(record["seed"], 3);
        assert!(record["metrics"]["ttft_mean"].as_f64().unwrap() > 0.0);
        let names: Vec<_> = fs::read_dir(store.folder_of(&key))
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        assert_eq!(names.len(), 2, "nothing is left beside them: {names:?}");
    }

    #[test]
    fn a_damaged_file_is_named() {
        assert_eq!(rows_of("id\n").unwrap_err().to_string(), "other columns");
        let error = rows_of(&format!("{COLUMNS}\n1,2\n")).unwrap_err();
        assert_eq!(format!("{error:#}"), "line 2: not 13 cells");
    }

    proptest! {
        #[test]
        fn rows_survive_their_file(id: u64, conversation: Option<u64>, sent in 0.0..1e5f64, e2e in prop::option::of(0.0..1e4f64), endpoint: Option<u32>) {
            let mut row = made_up::run("w", "p", 1, 0.5).rows.remove(0);
            (row.id, row.conversation, row.endpoint) = (id, conversation, endpoint);
            (row.sent, row.e2e) = (sent, e2e);
            let once = rows_of(&csv(&[row])).unwrap();
            prop_assert_eq!(once[0].id, id);
            prop_assert_eq!(once[0].conversation, conversation);
            prop_assert_eq!(once[0].endpoint, endpoint);
            prop_assert!((once[0].sent - sent).abs() <= 5.1e-7);
            prop_assert_eq!(rows_of(&csv(&once)).unwrap(), once);
        }
    }
}
