//! `experiments`: runs everything that `docs/experiments.md` tells of, and writes the page, its charts and its numbers
//! anew, or says what differs from those that are there.

mod numbers;
mod page;
mod plan;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::AtomicBool;

use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;

use crate::chart::Chart;
use crate::grid::{self, Job};
use crate::metrics::{Measured, Metric};
use crate::progress::{Store, file_name, write_whole};
use crate::report::words::label;
use crate::report::{Cells, Lines, Study};
use crate::workload::{Library, Point, Traces};
use crate::{Places, chart, key, simulate};
use numbers::{Numbers, Of};
use page::Page;
use plan::{Kind, Plan, Plot, Set};

/// Names of what is written, in the folder of the documentation.
const PAGE: &str = "experiments.md";
const NUMBERS: &str = "experiments.json";
const CHARTS: &str = "experiments";
/// Changes that are told one by one.
const TOLD: usize = 40;
/// Bytes of a chart: more is no picture but a dump.
const CHART_SIZE: usize = 150_000;

#[derive(Debug, Args)]
pub(crate) struct Experiments {
    /// Write nothing, and fail if a number, a chart or the page differs from what is there
    #[arg(long)]
    check: bool,
    /// Only these experiments; the others' numbers stay as they are
    #[arg(long, value_name = "NAME", num_args = 1.., conflicts_with = "page")]
    only: Vec<String>,
    /// Run nothing: make the page anew from the numbers that are there
    #[arg(long)]
    page: bool,
    /// Take stored runs of other builds of this program too: for work on the page, not on policies
    #[arg(long)]
    any_build: bool,
    /// Where runs are kept
    #[arg(long, short, value_name = "FOLDER", default_value = "target/experiments")]
    out: PathBuf,
    /// Runs at the same time; default: one a core
    #[arg(long, short, value_name = "N")]
    jobs: Option<usize>,
    /// Folder with the plan and the text
    #[arg(long, value_name = "FOLDER", default_value = "bench/lab/experiments")]
    plan: PathBuf,
    /// Folder of the page
    #[arg(long, value_name = "FOLDER", default_value = "docs")]
    docs: PathBuf,
    #[command(flatten)]
    places: Places,
}

/// What came of running.
#[derive(Debug, Default)]
struct Made {
    numbers: Numbers,
    charts: BTreeMap<String, Chart>,
    /// Experiments and workloads that were not run, since a trace is missing.
    skipped: BTreeSet<(String, String)>,
}

impl Experiments {
    /// Runs what is wanted, and writes or checks.
    ///
    /// # Errors
    /// A run failed, a trace is missing and not only a check is wanted, or something changed.
    pub(crate) fn run(&self) -> Result<()> {
        let library = Library::new(&self.places.workloads);
        let study: Vec<String> = library.list()?.into_iter().flat_map(|it| it.points).collect();
        let plan = Plan::read(&self.plan, &study)?;
        let before = self.before()?;
        if self.page {
            let text = self.rendered(&plan, &before)?;
            return self.finish(&[(PAGE.to_owned(), text)], &[]);
        }
        let sets = self.wanted(&plan)?;
        let stop = grid::stop_on_ctrl_c()?;
        let made = self.make(&plan, &library, &sets, &stop)?;
        tell_skipped(&made.skipped);
        ensure!(
            self.check || made.skipped.is_empty(),
            "nothing is written: the traces of some workloads are missing (--traces, LLM_RING_TRACES); with \
             --check what needs none is compared"
        );
        let not_run = before.0.keys().filter(|name| !made.numbers.0.contains_key(*name));
        // What the plan no longer names is gone, unless only some experiments were asked for.
        let kept: BTreeSet<(String, String)> = if self.only.is_empty() {
            BTreeSet::new()
        } else {
            not_run.map(|name| (name.clone(), String::new())).collect()
        };
        let skipped: BTreeSet<_> = made.skipped.union(&kept).cloned().collect();
        // Where there was nothing, nothing changed; a check wants something to be there.
        let first = before.0.is_empty() && !self.check;
        let changes = if first { Vec::new() } else { made.numbers.changes(&before, &skipped) };
        let mut files = Vec::new();
        if made.skipped.is_empty() {
            let mut numbers = made.numbers;
            for (name, _) in kept {
                numbers.0.insert(name.clone(), before.0[&name].clone());
            }
            files.push((NUMBERS.to_owned(), numbers.json()?));
            for (name, chart) in &made.charts {
                let svg = String::from_utf8(chart.svg().to_vec())?;
                ensure!(svg.len() < CHART_SIZE, "the chart `{name}` has {} bytes", svg.len());
                files.push((format!("{CHARTS}/{name}.svg"), svg));
            }
            let page = self.rendered(&plan, &numbers);
            let rendered = page.map(|page| files.push((PAGE.to_owned(), page)));
            // Numbers that took long to make are not lost to a slip in a text.
            return self.finish(&files, &changes).and(rendered);
        }
        self.finish(&files, &changes)
    }

    fn wanted(&self, plan: &Plan) -> Result<Vec<Set>> {
        for name in &self.only {
            let named = plan.experiments.iter().any(|experiment| experiment.name == *name);
            let names: Vec<&str> = plan.experiments.iter().map(|it| it.name.as_str()).collect();
            ensure!(named, "no experiment `{name}`; there are {}", names.join(", "));
        }
        let wanted = |set: &Set| self.only.is_empty() || self.only.contains(&set.experiment.name);
        Ok(plan.sets().into_iter().filter(wanted).collect())
    }

    /// The numbers that are there; none if there is no file.
    fn before(&self) -> Result<Numbers> {
        let path = self.docs.join(NUMBERS);
        if !path.exists() {
            return Ok(Numbers::default());
        }
        let text = read(&path)?;
        serde_json::from_str(&text).with_context(|| format!("{} holds no numbers", path.display()))
    }

    fn rendered(&self, plan: &Plan, numbers: &Numbers) -> Result<String> {
        let text = read(&self.plan.join(page::FILE))?;
        let include = |file: &str| read(&self.plan.join(file));
        Page { plan, numbers }
            .render(&text, &include)
            .with_context(|| self.plan.join(page::FILE).display().to_string())
    }

    /// Makes or finds the runs of all sets, and takes numbers and charts from them.
    fn make(
        &self,
        plan: &Plan,
        library: &Library,
        sets: &[Set],
        stop: &AtomicBool,
    ) -> Result<Made> {
        let traces = Traces::new(&self.places.traces);
        let mut made = Made::default();
        for set in sets {
            let runs = self.runs(set, library, &traces, stop, &mut made.skipped)?;
            let closed = closed(library, &set.experiment.workloads)?;
            let study =
                Study { runs: &runs, closed: &closed, version: "", command: "", policy: None };
            let cells = Cells::of(&study);
            made.numbers.0.insert(set.name.clone(), Of::runs(&set.experiment, &cells)?);
            for plot in plan.charts.iter().filter(|plot| plot.experiment == set.name) {
                let needed = |(name, workload): &(String, String)| {
                    *name == set.name && (plot.workload.is_empty() || *workload == plot.workload)
                };
                if !made.skipped.iter().any(needed) {
                    let chart = drawn(plot, plan, set, &cells, &made.numbers.0[&set.name])
                        .with_context(|| format!("chart `{}`", plot.name))?;
                    made.charts.insert(plot.name.clone(), chart);
                }
            }
        }
        Ok(made)
    }

    fn runs(
        &self,
        set: &Set,
        library: &Library,
        traces: &Traces,
        stop: &AtomicBool,
        skipped: &mut BTreeSet<(String, String)>,
    ) -> Result<Vec<Measured>> {
        let Set { experiment, name, knobs } = set;
        let mut points: BTreeMap<&str, Point> = BTreeMap::new();
        let mut jobs = Vec::new();
        for workload in &experiment.workloads {
            let point = library.point(workload)?;
            if point.missing_trace(traces).is_some() {
                skipped.insert((name.clone(), workload.clone()));
                continue;
            }
            for policy in &experiment.policies {
                for seed in experiment.seeds()? {
                    let key = key(workload, &point, policy, seed, *knobs);
                    jobs.push(Job { key, cost: 1.0 });
                }
            }
            points.insert(workload, point);
        }
        // Equal signals share a folder, so that no run is made twice.
        let folder = self.out.join(file_name(&serde_json::to_string(knobs)?));
        let mut store = Store::open(&folder, build()?, "llm-ring-lab experiments")?;
        if self.any_build {
            store = store.of_any_version();
        }
        let workers = self.jobs.unwrap_or_else(grid::cores).max(1);
        let make =
            |job: &Job| simulate(&points[job.key.workload.as_str()], &job.key, traces, *knobs);
        let grid = grid::run(&jobs, &store, workers, stop, make, Measured::of)?;
        eprintln!("{name}: {} runs, {} of them from before", jobs.len(), grid.found);
        ensure!(
            grid.missing() == 0,
            "{} of {} runs of `{name}` are left; the same command goes on with them",
            grid.missing(),
            jobs.len()
        );
        Ok(grid.results.into_iter().flatten().collect())
    }

    /// Writes files, or compares them with those that are there; fails if a number changed.
    fn finish(&self, files: &[(String, String)], changes: &[String]) -> Result<()> {
        for change in changes.iter().take(TOLD) {
            eprintln!("changed: {change}");
        }
        if changes.len() > TOLD {
            eprintln!("and {} more", changes.len() - TOLD);
        }
        let differs = |(name, text): &&(String, String)| {
            std::fs::read_to_string(self.docs.join(name)).ok().as_ref() != Some(text)
        };
        let stale: Vec<&str> =
            files.iter().filter(differs).map(|(name, _)| name.as_str()).collect();
        if self.check {
            ensure!(
                changes.is_empty() && stale.is_empty(),
                "{} numbers changed; not as they would be written: {}; `make experiments` writes them",
                changes.len(),
                if stale.is_empty() { "nothing else".to_owned() } else { stale.join(", ") }
            );
            eprintln!("nothing changed");
            return Ok(());
        }
        for (name, text) in files {
            write_whole(&self.docs.join(name), text.as_bytes())?;
        }
        crate::print(&format!("{}\n", self.docs.join(PAGE).display()))?;
        if !changes.is_empty() {
            bail!(
                "{} numbers changed: the files are written anew; read the difference, and commit it if it is meant",
                changes.len()
            );
        }
        Ok(())
    }
}

/// Workloads whose clients wait for answers.
fn closed(library: &Library, workloads: &[String]) -> Result<BTreeSet<String>> {
    let mut closed = BTreeSet::new();
    for name in workloads {
        if library.point(name)?.waits() {
            closed.insert(name.clone());
        }
    }
    Ok(closed)
}

/// What this program is: another build may route otherwise, so its runs are not these.
fn build() -> Result<&'static str> {
    static BUILD: OnceLock<String> = OnceLock::new();
    if let Some(build) = BUILD.get() {
        return Ok(build);
    }
    let program = std::env::current_exe().context("this program does not know where it is")?;
    let bytes =
        std::fs::read(&program).with_context(|| format!("cannot read {}", program.display()))?;
    let hash = llm_ring::index::hash::hash(&bytes);
    Ok(BUILD.get_or_init(|| format!("{} build {hash:016x}", env!("CARGO_PKG_VERSION"))))
}

fn tell_skipped(skipped: &BTreeSet<(String, String)>) {
    let mut by_set: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (set, workload) in skipped {
        by_set.entry(set).or_default().push(workload);
    }
    for (set, workloads) in by_set {
        eprintln!(
            "SKIPPED, not checked, since their traces are missing: {} of {set}, and all ratios over its workloads",
            workloads.join(" ")
        );
    }
}

fn drawn(plot: &Plot, plan: &Plan, set: &Set, cells: &Cells<'_>, of: &Of) -> Result<Chart> {
    let policies = if plot.policies.is_empty() { &set.experiment.policies } else { &plot.policies };
    let metric = plot.metric.as_deref().map_or(Ok(Metric::TtftMean), plan::metric)?;
    let shown: Vec<&str> = policies.iter().map(|policy| plan.shown(policy)).collect();
    let lines = |kind| {
        let names: Vec<(&str, &str)> =
            policies.iter().map(String::as_str).zip(shown.iter().copied()).collect();
        cells.lines(kind, &plot.workload, &names, plot.of.as_deref())
    };
    match plot.kind {
        Kind::Ratios => {
            let workloads: Vec<&str> =
                set.experiment.workloads.iter().map(String::as_str).collect();
            let rows: Vec<Vec<Option<f64>>> =
                workloads.iter().map(|workload| ratios(of, workload, policies, metric)).collect();
            let title = format!("{} over the best policy's on each workload", label(metric));
            chart::ratios(&title, &workloads, &shown, &rows)
        }
        Kind::Against => {
            let ours = plot.of.as_deref().context("`of` is not given")?;
            let rivals = of
                .against
                .get(ours)
                .with_context(|| format!("`{ours}` is not set against others"))?;
            let names = policies.iter().map(String::as_str).filter(|policy| *policy != ours);
            let bars = names.chain([numbers::HINDSIGHT]).filter_map(|rival| {
                let [mean, lo, hi] = rivals.get(rival)?.get(metric.name())?.mean;
                Some((plan.shown(rival).to_owned(), [mean, lo, hi]))
            });
            chart::against(plan.shown(ours), label(metric), &bars.collect::<Vec<_>>())
        }
        Kind::Ttft => lines(Lines::Ttft),
        Kind::Hits => lines(Lines::Hits),
        Kind::Goodput => lines(Lines::Goodput),
    }
}

/// How many times the best of some policies each of them is on a workload.
fn ratios(of: &Of, workload: &str, policies: &[String], metric: Metric) -> Vec<Option<f64>> {
    let number = |policy: &String| Some(of.number(workload, policy, metric.name()).ok()?.mean());
    let best = policies.iter().filter_map(number).reduce(f64::min);
    policies.iter().map(|policy| Some(number(policy)? / best?)).collect()
}

fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::folder::Folder;

    const PLAN: &str = "
experiments:
- {name: small, workloads: [tiny], policies: [llm-aware, gaie], seeds: 1..2, of: [llm-aware]}
- {name: traced, workloads: [tiny, replayed], policies: [gaie], seeds: '1'}
charts:
- {name: small-ratios, kind: ratios, experiment: small}
- {name: small-against, kind: against, experiment: small, of: llm-aware}
- {name: small-goodput, kind: goodput, experiment: small, workload: tiny, of: llm-aware}
";
    const TINY: &str = "{about: a, engine: h100, endpoints: 2, slo: {ttft: 2, itl: 1}, traffic: {kind: unique, requests: 60, rate: 8, prompt: 500, output: 50}}";
    const REPLAYED: &str = "{about: a, engine: h100, endpoints: 2, slo: {ttft: 2, itl: 1}, traffic: {kind: azure, file: none.csv, speed: 1}}";
    const TEXT: &str = "gaie: {{mean small tiny gaie ttft_mean}} s\n";

    fn repository(path: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
    }

    /// Experiments in a folder, with its workloads, and without any trace.
    fn experiments(folder: &Path) -> Experiments {
        Experiments {
            check: false,
            only: Vec::new(),
            page: false,
            any_build: false,
            out: folder.join("runs"),
            jobs: None,
            plan: folder.to_owned(),
            docs: folder.join("docs"),
            places: Places {
                workloads: folder.join("workloads"),
                traces: PathBuf::from("/nowhere"),
            },
        }
    }

    fn places() -> Places {
        let traces = PathBuf::from("/nowhere");
        Places { workloads: repository("bench/lab/workloads"), traces }
    }

    fn files(folder: &Folder) {
        std::fs::write(folder.path().join(plan::FILE), PLAN).unwrap();
        std::fs::write(folder.path().join(page::FILE), TEXT).unwrap();
        let workloads = folder.path().join("workloads");
        std::fs::create_dir(&workloads).unwrap();
        std::fs::write(workloads.join("tiny.yaml"), TINY).unwrap();
        std::fs::write(workloads.join("replayed.yaml"), REPLAYED).unwrap();
    }

    #[test]
    fn what_is_written_is_what_a_check_finds_until_a_number_changes() {
        let folder = Folder::new("experiments");
        files(&folder);
        let small = |check| Experiments {
            check,
            only: vec!["small".to_owned()],
            ..experiments(folder.path())
        };
        assert!(small(true).run().unwrap_err().to_string().contains(" numbers changed"));
        small(false).run().unwrap();
        small(true).run().unwrap();
        small(false).run().unwrap();
        let docs = |name: &str| folder.path().join("docs").join(name);
        assert!(read(&docs(PAGE)).unwrap().contains("gaie: 0."));
        for chart in ["small-ratios", "small-against", "small-goodput"] {
            assert!(read(&docs(&format!("{CHARTS}/{chart}.svg"))).unwrap().starts_with("<svg"));
        }

        let numbers = read(&docs(NUMBERS)).unwrap();
        let changed = numbers.replacen("\"hit_rate\":0.0", "\"hit_rate\":0.5", 1);
        std::fs::write(docs(NUMBERS), changed).unwrap();
        let error = small(true).run().unwrap_err().to_string();
        assert!(
            error.starts_with("1 numbers changed; not as they would be written: experiments.json;"),
            "{error}"
        );
        let error = small(false).run().unwrap_err().to_string();
        assert!(error.starts_with("1 numbers changed: the files are written anew;"), "{error}");
        assert_eq!(read(&docs(NUMBERS)).unwrap(), numbers);
        std::fs::write(docs(PAGE), "by hand").unwrap();
        let error = small(true).run().unwrap_err().to_string();
        assert!(
            error.starts_with("0 numbers changed; not as they would be written: experiments.md;"),
            "{error}"
        );
        Experiments { page: true, ..small(false) }.run().unwrap();
        small(true).run().unwrap();
    }

    #[test]
    fn what_needs_a_trace_is_left_out_of_a_check_and_nothing_is_written_without() {
        let folder = Folder::new("untraced");
        files(&folder);
        let error = experiments(folder.path()).run().unwrap_err().to_string();
        assert!(error.starts_with("nothing is written: the traces"), "{error}");
        assert!(!folder.path().join("docs").exists());
        let before = Experiments { check: true, ..experiments(folder.path()) }.run().unwrap_err();
        assert!(before.to_string().contains(" numbers changed"), "nothing was there: {before}");
        let plan = Plan::read(folder.path(), &[]).unwrap();
        let library = Library::new(folder.path().join("workloads"));
        let made = experiments(folder.path())
            .make(&plan, &library, &plan.sets(), &AtomicBool::new(false))
            .unwrap();
        assert_eq!(made.skipped, BTreeSet::from([("traced".to_owned(), "replayed".to_owned())]));
        std::fs::create_dir(folder.path().join("docs")).unwrap();
        std::fs::write(folder.path().join("docs").join(NUMBERS), made.numbers.json().unwrap())
            .unwrap();
        Experiments { check: true, ..experiments(folder.path()) }.run().unwrap();
        let unknown = Experiments { only: vec!["big".to_owned()], ..experiments(folder.path()) };
        assert_eq!(
            unknown.run().unwrap_err().to_string(),
            "no experiment `big`; there are small, traced"
        );
    }

    #[test]
    fn the_page_of_this_repository_is_made_of_its_numbers() {
        let page = Experiments {
            check: true,
            page: true,
            plan: repository("bench/lab/experiments"),
            docs: repository("docs"),
            places: places(),
            ..experiments(Path::new("/nowhere"))
        };
        page.run().unwrap();
    }

    #[test]
    fn the_quick_experiments_give_what_the_page_tells() {
        let folder = Folder::new("quick");
        let quick = Experiments {
            check: true,
            only: vec!["quick".to_owned()],
            plan: repository("bench/lab/experiments"),
            docs: repository("docs"),
            places: places(),
            ..experiments(folder.path())
        };
        quick.run().unwrap();
    }
}
