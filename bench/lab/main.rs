#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command speaks to its user")]
//! `llm-ring-lab`: policies beside each other, on the same traffic and simulated engines.
//!
//! The policies of this repository run in their own scheduler, pool keeper and ledger; time, chance and engines are
//! simulated. Equal seeds give equal bytes.

mod chart;
mod digest;
mod engine;
mod experiments;
mod grid;
mod knee;
mod live;
mod metrics;
mod production;
mod progress;
mod random;
mod recency;
mod record;
mod replay;
mod report;
mod rivals;
mod sim;
mod stats;
mod stored;
mod workload;

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::AtomicBool;

use anyhow::{Context as _, Result, bail, ensure};
use clap::{Args, Parser, Subcommand, ValueEnum};
use llm_ring::scheduling::POLICIES;

use grid::Job;
use metrics::Measured;
use progress::{Key, Store};
use record::Run;
use report::Study;
use sim::Knobs;
use workload::{Library, Point, Traces};

/// Compares routing policies on simulated LLM engines: what each does to waiting times, caches and balance.
#[derive(Debug, Parser)]
#[command(name = "llm-ring-lab", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show the workloads and the policies there are
    List(List),
    /// Run policies on workloads and write tables, charts and every request into a folder
    Run(Runs),
    /// Run what is missing and print one policy beside each of the others
    Compare(Compare),
    /// Decide the records of a running picker again, under another policy or configuration
    Replay(replay::Replay),
    /// Make tables, charts and comparisons of stored results anew, from one folder or several
    Report(stored::Report),
    /// Run all that docs/experiments.md tells of, and write it anew or check it
    Experiments(experiments::Experiments),
    /// Find how far a workload's rate can go before requests miss their SLO
    Knee(knee::Knee),
    /// Play workloads on real engines, behind a real Envoy with the real picker, and print the same comparison
    Live(live::Live),
}

#[derive(Debug, Args)]
struct List {
    #[command(flatten)]
    places: Places,
}

#[derive(Debug, Args)]
struct Places {
    /// Folder with the workloads, a YAML file each
    #[arg(long, value_name = "FOLDER", default_value = "bench/lab/workloads")]
    workloads: PathBuf,
    /// Folder with the traces that some workloads replay; without it those cannot run
    #[arg(long, value_name = "FOLDER", env = "LLM_RING_TRACES", default_value = "traces")]
    traces: PathBuf,
}

#[derive(Debug, Args)]
struct Runs {
    /// Workloads with their parameters, such as `loadaware:17 conv:1.0`; `list` shows them
    #[arg(long, short, value_name = "NAME", required = true, num_args = 1..)]
    workload: Vec<String>,
    /// Policies, such as `llm-aware` or `llm-aware{epsilon: 0.5}`; `+events`, `+metrics`, `+hold` and `+prices` let ours see more
    #[arg(long, short, value_name = "NAME", required = true, num_args = 1..)]
    policy: Vec<String>,
    /// Seeds, such as `1..5` or `1,4,9`
    #[arg(long, short, value_name = "SEEDS", default_value = "1..5", value_parser = seeds)]
    seeds: Seeds,
    /// Where results go; what is there already is not made again
    #[arg(long, short, value_name = "FOLDER", default_value = "lab-results")]
    out: PathBuf,
    /// Runs at the same time; default: one a core
    #[arg(long, short, value_name = "N")]
    jobs: Option<usize>,
    #[command(flatten)]
    places: Places,
    #[command(flatten)]
    signals: Signals,
}

/// How good the signals are that policies see.
#[derive(Debug, Args)]
#[command(next_help_heading = "Signals")]
struct Signals {
    /// Age of polled metrics, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = Knobs::default().metrics_age)]
    metrics_age: f64,
    /// Age of cache events, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = Knobs::default().event_age)]
    event_age: f64,
    /// Share of cache events that are lost
    #[arg(long, value_name = "SHARE", default_value_t = Knobs::default().event_loss)]
    event_loss: f64,
    /// Pickers, which are dealt requests in turn
    #[arg(long, value_name = "N", default_value_t = Knobs::default().pickers)]
    pickers: usize,
    /// Age of what pickers tell each other, in seconds; without it they tell nothing
    #[arg(long, value_name = "SECONDS")]
    gossip_age: Option<f64>,
}

#[derive(Debug, Args)]
struct Compare {
    #[command(flatten)]
    runs: Runs,
    /// The policy that is set beside the others; default: the first of --policy
    #[arg(long, value_name = "NAME")]
    of: Option<String>,
    /// Print a text for people, or `{workload: {policy: {metric: {mean, lo, hi}}}}`
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t = Format::Text)]
    format: Format,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    Text,
    Json,
}

#[derive(Debug, Clone)]
struct Seeds(Vec<u64>);

fn seeds(text: &str) -> Result<Seeds, String> {
    let wrong = || format!("`{text}` is no list of seeds such as 1..5 or 1,4,9");
    let number = |text: &str| text.trim().parse::<u64>().or(Err(wrong()));
    let seeds = match text.split_once("..") {
        Some((first, last)) => (number(first)?..=number(last.trim_start_matches('='))?).collect(),
        None => text.split(',').map(number).collect::<Result<Vec<u64>, String>>()?,
    };
    if seeds.is_empty() || seeds.len() > 10_000 { Err(wrong()) } else { Ok(Seeds(seeds)) }
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::List(list) => list.run(),
        Command::Run(runs) => runs.run(),
        Command::Compare(compare) => compare.run(),
        Command::Replay(replay) => replay.run(),
        Command::Report(report) => report.run(),
        Command::Experiments(experiments) => experiments.run(),
        Command::Knee(knee) => knee.run(),
        Command::Live(live) => live.run(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

impl List {
    fn run(&self) -> Result<()> {
        print(&format!("Workloads ({}):\n", self.places.workloads.display()))?;
        for listed in Library::new(&self.places.workloads).list()? {
            let parameters: Vec<String> =
                listed.parameters.iter().map(|name| format!(":{name}")).collect();
            print(&format!("  {}{}\n", listed.name, parameters.concat()))?;
            print(&format!("      {}\n", listed.about))?;
            if !listed.points.is_empty() {
                let held_out = if listed.held_out { " (held out)" } else { "" };
                print(&format!("      in the study: {}{held_out}\n", listed.points.join(" ")))?;
            }
        }
        let part = |title: &str, policies: &[(&str, &str)]| -> Result<()> {
            print(&format!("\n{title}:\n"))?;
            for (name, about) in policies {
                print(&format!("  {name:<20} {about}\n"))?;
            }
            Ok(())
        };
        part("Policies of this repository", POLICIES)?;
        part("Policies of others", rivals::PUBLISHED)?;
        part("The same with other weights", rivals::RETUNED)?;
        part("References", rivals::REFERENCES)?;
        Ok(())
    }
}

impl Runs {
    fn run(&self) -> Result<()> {
        let (runs, closed) = self.make()?;
        let command = command_line();
        report::write(&self.out, &study(&runs, &closed, &command, None))?;
        print(&format!("{}\n", self.out.join("summary.md").display()))?;
        Ok(())
    }

    /// Makes the runs that are missing; also returns the workloads whose clients wait for answers.
    fn make(&self) -> Result<(Vec<Measured>, BTreeSet<String>)> {
        self.make_of(&self.workload, &self.policy, &*grid::stop_on_ctrl_c()?)
    }

    /// The same for some workloads and policies.
    fn make_of(
        &self,
        workloads: &[String],
        policies: &[String],
        stop: &AtomicBool,
    ) -> Result<(Vec<Measured>, BTreeSet<String>)> {
        let (library, traces) =
            (Library::new(&self.places.workloads), Traces::new(&self.places.traces));
        let knobs = Knobs {
            metrics_age: self.signals.metrics_age,
            event_age: self.signals.event_age,
            event_loss: self.signals.event_loss,
            pickers: self.signals.pickers,
            gossip_age: self.signals.gossip_age,
        };
        let (mut points, mut closed) = (BTreeMap::new(), BTreeSet::new());
        for name in workloads {
            let point = library.point(name)?;
            // Drawn once here, so that a missing trace is known before anything runs.
            point.traffic(self.seeds.0[0], &traces)?;
            if point.waits() {
                closed.insert(name.clone());
            }
            points.insert(name.clone(), point);
        }
        for (names, what) in [(workloads, "workload"), (policies, "policy")] {
            ensure_distinct(names, what)?;
        }
        ensure_distinct(&self.seeds.0, "seed")?;
        let mut jobs = Vec::new();
        for (name, point) in workloads.iter().map(|name| (name, &points[name])) {
            for policy in policies {
                for &seed in &self.seeds.0 {
                    jobs.push(Job { key: key(name, point, policy, seed, knobs), cost: 1.0 });
                }
            }
        }
        let store = Store::open(&self.out, env!("CARGO_PKG_VERSION"), &command_line())?;
        let workers = self.jobs.unwrap_or_else(grid::cores).max(1);
        let make = |job: &Job| simulate(&points[&job.key.workload], &job.key, &traces, knobs);
        let grid = grid::run(&jobs, &store, workers, stop, make, Measured::of)?;
        eprintln!("{} runs, {} of them from before", jobs.len(), grid.found);
        ensure!(
            grid.missing() == 0,
            "{} of {} runs are left; the same command goes on with them",
            grid.missing(),
            jobs.len()
        );
        Ok((grid.results.into_iter().flatten().collect(), closed))
    }
}

fn study<'a>(
    runs: &'a [Measured],
    closed: &'a BTreeSet<String>,
    command: &'a str,
    policy: Option<&'a str>,
) -> Study<'a> {
    Study { runs, closed, version: env!("CARGO_PKG_VERSION"), command, policy }
}

fn key(workload: &str, point: &Point, policy: &str, seed: u64, knobs: Knobs) -> Key {
    let arrivals = if point.waits() { "closed" } else { "open" };
    let parameters = serde_json::json!({
        "workload": format!("{point:?}"), "signals": knobs, "arrivals": arrivals
    });
    Key { workload: workload.to_owned(), policy: policy.to_owned(), seed, parameters }
}

fn simulate(point: &Point, key: &Key, traces: &Traces, knobs: Knobs) -> Result<Run> {
    let policy = key.policy.as_str();
    sim::run(point, (policy, key.seed), traces, knobs, |setup| {
        match production::build(policy, setup)? {
            Some(router) => Ok(router),
            None => rivals::build(policy, setup),
        }
    })
}

impl Compare {
    fn run(&self) -> Result<()> {
        let (runs, closed) = self.runs.make()?;
        let command = command_line();
        let of = self.of.as_ref().unwrap_or(&self.runs.policy[0]);
        if !self.runs.policy.contains(of) {
            bail!("--of {of} is none of --policy {}", self.runs.policy.join(" "));
        }
        let study = study(&runs, &closed, &command, Some(of));
        report::write(&self.runs.out, &study)?;
        match self.format {
            Format::Text => print(&report::compare(&study, of)?.to_string())?,
            Format::Json => print(&read(&self.runs.out.join("compare.json"))?)?,
        }
        Ok(())
    }
}

/// A run that is there twice would count twice.
fn ensure_distinct<T: Ord + std::fmt::Display>(given: &[T], what: &str) -> Result<()> {
    let mut known = BTreeSet::new();
    match given.iter().find(|it| !known.insert(*it)) {
        None => Ok(()),
        Some(twice) => bail!("{what} {twice} is given twice"),
    }
}

/// Prints to standard output. A reader that has seen enough closes the pipe; that is no error.
fn print(text: &str) -> Result<()> {
    match std::io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(error.into()),
        Ok(()) | Err(_) => Ok(()),
    }
}

fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// The command line, as it is kept with the results.
fn command_line() -> String {
    let words = std::env::args().skip(1);
    format!("llm-ring-lab {}", words.collect::<Vec<_>>().join(" "))
}
