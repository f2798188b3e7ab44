//! `live`: the same workloads under the same policies on real engines, behind a real Envoy with the real picker.
#![allow(clippy::disallowed_methods, reason = "it tells how long runs took")]

mod client;
mod parts;
mod plan;
mod play;
mod process;
mod stack;
mod stream;
mod text;

use std::collections::{BTreeMap, BTreeSet};
use std::io::IsTerminal as _;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;
use llm_ring::scheduling::POLICIES;

use super::engine::Params;
use super::grid::{self, Job};
use super::metrics::Measured;
use super::production::Named;
use super::progress::{Key, Store, file_name};
use super::record::{self, Run};
use super::workload::{Library, Point, Traces};
use super::{Format, Places, Seeds, command_line, read, report, seeds, study};
use parts::{Engine, Parts};
use plan::{Plan, Scaling};
use play::{Rehearsal, Times};
use stack::{Policy, Stack};
use text::{Sizes, Texts};

/// Seconds that a stack takes to start, for the time left.
const START: f64 = 3.0;

const EXAMPLES: &str = "\
Examples:
  llm-ring-lab live --workload demo --policy llm-aware bounded round-robin --seeds 1..3
  llm-ring-lab live -w demo -p marginal-cost llm-aware --seeds 1..4 --scale-at 8s:+1 --after 10s
  llm-ring-lab live -w zipf12:32 -p llm-aware least-request --replicas 3 --shrink 8 --stretch 2 --until 60s

The first run sets up Envoy, llama.cpp and a tiny model under ~/.cache/llm-ring, which takes a minute or two.";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Live {
    /// Workloads with their parameters, such as `demo` or `loadaware:17`; `list` shows them
    #[arg(long, short, value_name = "NAME", required = true, num_args = 1..)]
    workload: Vec<String>,
    /// Policies of this repository, such as `llm-aware` or `llm-aware{epsilon: 0.5}`
    #[arg(long, short, value_name = "NAME", required = true, num_args = 1..)]
    policy: Vec<String>,
    /// Seeds, such as `1..5`; the order of the policies rotates from one to the next
    #[arg(long, short, value_name = "SEEDS", default_value = "1..5", value_parser = seeds)]
    seeds: Seeds,
    /// Where results go; what is there already is not made again
    #[arg(long, short, value_name = "FOLDER", default_value = "lab-live")]
    out: PathBuf,
    /// The policy that is set beside the others; default: the first of --policy
    #[arg(long, value_name = "NAME")]
    of: Option<String>,
    /// Print a text for people, or `{workload: {policy: {metric: {mean, lo, hi}}}}`
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t = Format::Text)]
    format: Format,
    #[command(flatten)]
    places: Places,
    #[command(flatten)]
    size: Size,
    #[command(flatten)]
    scaling: Scale,
    #[command(flatten)]
    real: Real,
}

/// How a workload is made to fit this machine.
#[derive(Debug, Args)]
#[command(next_help_heading = "Size")]
struct Size {
    /// Engines at the start; default: as many as the workload has
    #[arg(long, value_name = "N")]
    replicas: Option<usize>,
    /// Divide all tokens by this: a prompt of 8000 is one of 1000 with 8
    #[arg(long, value_name = "BY", default_value_t = 1.0, value_parser = at_least_one)]
    shrink: f64,
    /// Multiply all times by this: 16 requests a second are 4 with 4
    #[arg(long, value_name = "BY", default_value_t = 1.0, value_parser = positive)]
    stretch: f64,
    /// Send only what the workload sends until then, before it is stretched, such as `40s`
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    until: Option<Duration>,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Scaling")]
struct Scale {
    /// Change the pool in the middle, instead of as the workload says: `20s:+1`, `30s:-1`, `25s:kill:1`, `40s:return:1`
    #[arg(long, value_name = "TIME:WHAT", num_args = 1..)]
    scale_at: Vec<Scaling>,
    /// How long after the first change the hit rate of follow-ups is reported
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = humantime::parse_duration)]
    after: Duration,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Real parts")]
struct Real {
    /// The picker; default: the `llm-ring` beside this program
    #[arg(long, value_name = "PROGRAM", env = "LLM_RING")]
    picker: Option<PathBuf>,
    /// Folder with the scripts that find, set up and run Envoy and llama.cpp
    #[arg(long, value_name = "FOLDER", default_value = "bench/demo")]
    parts: PathBuf,
    /// Requests that an engine works on at once
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
    slots: u32,
    /// Tokens of an engine's context, which its slots share
    #[arg(long, value_name = "TOKENS", default_value_t = 16384)]
    context: u32,
    /// An engine's store for prompts that lost their slot, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 6)]
    cache: u32,
    /// Keep the logs and configurations of every run, in `logs/`, and not only of one that went wrong
    #[arg(long)]
    keep_logs: bool,
}

fn positive(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|number| *number > 0.0 && number.is_finite());
    number.ok_or_else(|| format!("`{text}` is no number above 0"))
}

fn at_least_one(text: &str) -> Result<f64, String> {
    positive(text).and_then(|number| {
        if number < 1.0 { Err("tokens are divided: 1 or more".to_owned()) } else { Ok(number) }
    })
}

/// A workload that is ready to be played.
#[derive(Debug)]
struct Piece {
    point: Point,
    plan: Plan,
    /// Of the first seed.
    rehearsal: Rehearsal,
}

/// Reads a policy that the picker has.
///
/// # Errors
/// It has none of that name, or not with these parameters.
fn policy(name: &str) -> Result<Policy> {
    let Some(named) = Named::read(name)? else {
        let known: Vec<&str> = POLICIES.iter().map(|(name, _)| *name).collect();
        bail!(
            "`{name}` cannot be played live: it is an emulation, or unknown; live plays what the picker has: {}",
            known.join(", ")
        );
    };
    ensure!(
        !named.has_words(),
        "`{name}`: the picker sees what it sees; `+events` and the like are of the simulation"
    );
    named.config(&Params::named("tiny")?)?;
    Ok(Policy { name: named.policy.to_owned(), parameters: named.parameters.to_owned() })
}

impl Live {
    pub(crate) fn run(&self) -> Result<()> {
        let of = self.of.as_ref().unwrap_or(&self.policy[0]);
        ensure!(
            self.policy.contains(of),
            "--of {of} is none of --policy {}",
            self.policy.join(" ")
        );
        let distinct: BTreeSet<&String> = self.policy.iter().collect();
        ensure!(distinct.len() == self.policy.len(), "--policy names one twice");
        let runs = self.make()?;
        // Nobody sends at the same microsecond twice, so that no workload is one of fixed times.
        let closed = self.workload.iter().cloned().collect();
        let command = command_line();
        let study = study(&runs, &closed, &command, Some(of));
        report::write(&self.out, &study)?;
        match self.format {
            Format::Text => crate::print(&report::compare(&study, of)?.to_string())?,
            Format::Json => crate::print(&read(&self.out.join("compare.json"))?)?,
        }
        eprintln!("{}", self.out.join("summary.md").display());
        Ok(())
    }

    /// Makes the runs that are missing, one after the other.
    fn make(&self) -> Result<Vec<Measured>> {
        let policies = self.policies()?;
        let traces = Traces::new(&self.places.traces);
        let pieces = self.pieces(&traces)?;
        let parts = Parts::find(&self.real.parts, self.real.picker.as_deref())?;
        let versions = parts.versions()?;
        let mut jobs = Vec::new();
        for name in &self.workload {
            let piece = &pieces[name];
            let Rehearsal { requests, seconds, .. } = piece.rehearsal;
            eprintln!("{name}: about {requests} requests in {seconds:.0} s or more");
            for (at, &seed) in self.seeds.0.iter().enumerate() {
                for policy in plan::order(&self.policy, at) {
                    let key = self.key(piece, policy, seed, &versions);
                    jobs.push(Job { key, cost: piece.rehearsal.seconds * 1.2 + START });
                }
            }
        }
        let store = Store::open(&self.out, env!("CARGO_PKG_VERSION"), &command_line())?;
        let stop = grid::stop_on_ctrl_c()?;
        let progress = Progress::new(&jobs, &store)?;
        let make = |job: &Job, tell: &dyn Fn(f64)| {
            let piece = &pieces[&job.key.workload];
            let policy = &policies[&job.key.policy];
            let run = self.play(piece, (policy, &job.key), &parts, &traces, tell);
            if run.is_ok() {
                progress.ended(job);
            }
            let (run, remarks) = run?;
            progress.remark(job, remarks);
            Ok(run)
        };
        // Two at once would share the machine, and tell nothing.
        let grid = grid::run_telling(&jobs, &store, 1, &stop, make, Measured::of)?;
        progress.remarks();
        eprintln!("{} runs, {} of them from before", jobs.len(), grid.found);
        ensure!(
            grid.missing() == 0,
            "{} of {} runs are left; the same command goes on with them",
            grid.missing(),
            jobs.len()
        );
        let mut runs: Vec<Measured> = grid.results.into_iter().flatten().collect();
        // In the order of the command line, and not in that of playing.
        let place = |policy: &String| self.policy.iter().position(|it| it == policy);
        runs.sort_by_key(|run| place(&run.policy));
        let workload = |name: &String| self.workload.iter().position(|it| it == name);
        runs.sort_by_key(|run| workload(&run.workload));
        Ok(runs)
    }

    fn policies(&self) -> Result<BTreeMap<String, Policy>> {
        self.policy.iter().map(|name| Ok((name.clone(), policy(name)?))).collect()
    }

    fn times(&self) -> Times {
        let until = self.size.until.map_or(f64::INFINITY, |until| until.as_secs_f64());
        Times { stretch: self.size.stretch, until }
    }

    fn sizes(&self, point: &Point) -> Sizes {
        Sizes { shrink: self.size.shrink, block: point.engine.block }
    }

    fn engine(&self) -> Engine {
        let Real { slots, context, cache, .. } = self.real;
        Engine { slots, context, cache_mib: cache }
    }

    fn pieces(&self, traces: &Traces) -> Result<BTreeMap<String, Piece>> {
        let library = Library::new(&self.places.workloads);
        let mut pieces = BTreeMap::new();
        for name in &self.workload {
            let point = library.point(name)?;
            let piece = self.piece(point, traces).with_context(|| format!("workload `{name}`"))?;
            ensure!(pieces.insert(name.clone(), piece).is_none(), "--workload names {name} twice");
        }
        Ok(pieces)
    }

    fn piece(&self, point: Point, traces: &Traces) -> Result<Piece> {
        let replicas = match self.size.replicas {
            Some(replicas) => replicas,
            None if point.speeds.iter().all(|speed| *speed == 1.0) => point.speeds.len(),
            None => {
                bail!("its endpoints are of different speeds, real engines of one; give --replicas")
            }
        };
        let plan = if self.scaling.scale_at.is_empty() {
            Plan::of_workload(replicas, &point.changes, self.size.stretch)?
        } else {
            Plan::of_scaling(replicas, &self.scaling.scale_at)?
        };
        let mut rehearsal = None;
        let slot = i64::from(self.real.context / self.real.slots);
        for &seed in &self.seeds.0 {
            let rehearsed = play::rehearse(point.traffic(seed, traces)?, self.times())?;
            let longest = self.sizes(&point).tokens(rehearsed.longest);
            if longest + MARGIN > slot {
                let fits = rehearsed.longest as f64 / (slot - MARGIN).max(1) as f64;
                bail!(
                    "a prompt and its answer have {longest} tokens, and a slot of an engine holds {slot}: give \
                     --shrink {}, or more --context",
                    fits.ceil()
                );
            }
            rehearsal.get_or_insert(rehearsed);
        }
        Ok(Piece { point, plan, rehearsal: rehearsal.context("there are no seeds")? })
    }

    fn key(
        &self,
        piece: &Piece,
        policy: &str,
        seed: u64,
        versions: &BTreeMap<&'static str, String>,
    ) -> Key {
        let Piece { point, plan, .. } = piece;
        let Engine { slots, context, cache_mib } = self.engine();
        let parameters = serde_json::json!({
            "workload": format!("{point:?}"),
            "live": {
                "pool": format!("{plan:?}"),
                "after": self.scaling.after.as_secs_f64(),
                "shrink": self.size.shrink,
                "stretch": self.size.stretch,
                "until": self.size.until.map(|until| until.as_secs_f64()),
                "slots": slots,
                "context": context,
                "cache_mib": cache_mib,
                "parts": versions,
            },
        });
        Key { workload: point.name.clone(), policy: policy.to_owned(), seed, parameters }
    }

    /// Plays one run in a stack of its own, whose caches are empty and which knows nothing.
    fn play(
        &self,
        piece: &Piece,
        (policy, key): (&Policy, &Key),
        parts: &Parts,
        traces: &Traces,
        tell: &dyn Fn(f64),
    ) -> Result<(Run, Vec<String>)> {
        let Piece { point, plan, rehearsal } = piece;
        let name = format!("{}-{}-{}", file_name(&key.workload), file_name(&key.policy), key.seed);
        let logs = self.out.join("logs").join(name);
        let told = Mutex::new(0);
        let ended = || {
            let mut told = told.lock().unwrap_or_else(PoisonError::into_inner);
            if *told < rehearsal.requests {
                *told += 1;
                tell(rehearsal.seconds / rehearsal.requests as f64);
            }
        };
        let play = async {
            let pool = (plan.processes, &plan.start[..]);
            let mut stack = Stack::start(parts, self.engine(), pool, policy, &logs).await?;
            let sizes = self.sizes(point);
            let texts = Texts::new(stack.tokenizer().await?, sizes, key.seed);
            let traffic = point.traffic(key.seed, traces)?;
            let plan = (plan, self.times());
            play::play(&mut stack, traffic, plan, (texts, sizes), &point.engine, &ended).await
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let played = runtime.block_on(play)?;
        if !self.real.keep_logs {
            std::fs::remove_dir_all(&logs).ok();
            // Only if it is empty.
            std::fs::remove_dir(self.out.join("logs")).ok();
        }
        let first = plan.steps.first();
        let added = first.and_then(|step| u32::try_from(step.added?).ok());
        let run = Run {
            workload: key.workload.clone(),
            policy: key.policy.clone(),
            seed: key.seed,
            slo: point.slo,
            scaled_at: first.map(|step| step.at),
            live: Some(record::Live { window: self.scaling.after.as_secs_f64(), added }),
            rows: played.rows,
            endpoints: played.endpoints,
        };
        Ok((run, played.remarks))
    }
}

/// Tokens of a slot that are left free.
const MARGIN: i64 = 64;

/// What is done and what is left, in lines: where there is no terminal, no bar shows it.
#[derive(Debug)]
struct Progress {
    lines: bool,
    began: Instant,
    runs: usize,
    cost: f64,
    /// Runs that ended, and what they cost.
    done: Mutex<(usize, f64)>,
    remarks: Mutex<Vec<String>>,
}

impl Progress {
    fn new(jobs: &[Job], store: &Store) -> Result<Self> {
        let mut missing = (0, 0.0);
        for job in jobs {
            if store.get(&job.key)?.is_none() {
                missing = (missing.0 + 1, missing.1 + job.cost);
            }
        }
        let lines = !std::io::stderr().is_terminal();
        if missing.0 > 0 {
            let minutes = (missing.1 / 60.0).ceil();
            eprintln!("{} runs to play, {minutes:.0} minutes or more", missing.0);
        }
        Ok(Self {
            lines,
            began: Instant::now(),
            runs: missing.0,
            cost: missing.1,
            done: Mutex::default(),
            remarks: Mutex::default(),
        })
    }

    fn ended(&self, job: &Job) {
        let mut done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        *done = (done.0 + 1, done.1 + job.cost);
        if self.lines {
            let Key { workload, policy, seed, .. } = &job.key;
            let (runs, share) = (self.runs, done.1 / self.cost);
            let elapsed = self.began.elapsed().as_secs_f64();
            let left = Duration::from_secs_f64((elapsed / share - elapsed).max(0.0).round());
            let left = humantime::format_duration(left);
            eprintln!("run {} of {runs}: {workload} {policy} {seed}; {left} left", done.0);
        }
    }

    fn remark(&self, job: &Job, remarks: Vec<String>) {
        let Key { workload, policy, seed, .. } = &job.key;
        let mut all = self.remarks.lock().unwrap_or_else(PoisonError::into_inner);
        let named = |remark| format!("{workload} {policy} {seed}: {remark}");
        all.extend(remarks.into_iter().map(named));
    }

    fn remarks(&self) {
        for remark in &*self.remarks.lock().unwrap_or_else(PoisonError::into_inner) {
            eprintln!("note: {remark}");
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::{Cli, Command};

    fn live(more: &[&str]) -> Live {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/bench/lab/workloads");
        let line = ["llm-ring-lab", "live", "-p", "llm-aware", "--workloads", folder];
        let cli = Cli::try_parse_from(line.iter().chain(more)).unwrap();
        let Command::Live(live) = cli.command else { panic!("{cli:?}") };
        live
    }

    fn pieces(more: &[&str]) -> Result<BTreeMap<String, Piece>> {
        live(more).pieces(&Traces::default())
    }

    #[test]
    fn only_what_the_picker_has_is_played() {
        let error = |name: &str| format!("{:#}", policy(name).unwrap_err());
        for rival in ["gaie", "precise", "nothing"] {
            assert!(error(rival).contains("live plays what the picker has: "), "{rival}");
            assert!(error(rival).contains("llm-aware"), "{rival}");
        }
        assert!(error("marginal-cost+events").contains("of the simulation"));
        assert!(error("llm-aware{epsilom: 1}").contains("epsilom"));
        let given = policy("llm-aware{epsilon: 0.5}").unwrap();
        assert_eq!(
            (given.name.as_str(), given.parameters.as_str()),
            ("llm-aware", "{epsilon: 0.5}")
        );
        assert_eq!(policy("least-request").unwrap().name, "least-loaded");
    }

    #[test]
    fn a_workload_that_does_not_fit_says_what_to_do() {
        let error = format!("{:#}", pieces(&["-w", "chat:96", "-s", "1"]).unwrap_err());
        assert!(error.contains("workload `chat:96`") && error.contains("--shrink 5"), "{error}");
        let piece = &pieces(&["-w", "chat:96", "-s", "1", "--shrink", "5"]).unwrap()["chat:96"];
        assert_eq!(piece.plan.processes, 8);
        let replicas = ["-w", "chat:96", "-s", "1", "--shrink", "5", "--replicas", "2"];
        assert_eq!(pieces(&replicas).unwrap()["chat:96"].plan.processes, 2);
    }

    #[test]
    fn the_pool_changes_as_the_command_line_says_and_else_as_the_workload_does() {
        let own = &pieces(&["-w", "llmring-scale", "--stretch", "0.5"]).unwrap()["llmring-scale"];
        assert_eq!((own.plan.steps.len(), own.plan.steps[0].at), (1, 150.0));
        let given = ["-w", "llmring-scale", "--scale-at", "10s:kill:1", "20s:return:1"];
        let given = &pieces(&given).unwrap()["llmring-scale"];
        let steps: Vec<f64> = given.plan.steps.iter().map(|step| step.at).collect();
        assert_eq!((steps, given.plan.processes), (vec![10.0, 20.0], 4));
    }

    #[test]
    fn another_size_or_pool_is_another_run() {
        let parameters = |more: &[&str]| {
            let live = live(&[&["-w", "demo"], more].concat());
            let pieces = live.pieces(&Traces::default()).unwrap();
            live.key(&pieces["demo"], "llm-aware", 1, &BTreeMap::new()).parameters
        };
        let plain = parameters(&[]);
        assert_eq!(plain, parameters(&["--out", "elsewhere", "--keep-logs"]));
        let others: [&[&str]; 6] = [
            &["--shrink", "2"],
            &["--stretch", "2"],
            &["--until", "9s"],
            &["--scale-at", "5s:+1"],
            &["--replicas", "2"],
            &["--slots", "2"],
        ];
        for other in others {
            assert_ne!(plain, parameters(other), "{other:?}");
        }
    }
}
