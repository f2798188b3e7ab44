//! Tables, charts and comparisons of finished runs, into an output folder; the same runs give the same bytes.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Write as _};
use std::path::Path;

use anyhow::{Context as _, Result};

use crate::chart::{self, Chart, short};
use crate::metrics::{Better, Measured, Metric, Unit, mean, quantile, sorted};
use crate::progress::{file_name, json, write_whole};
use crate::stats::{
    self, Arrivals, Difference, Interval, PRIMARIES, Pair, Point, Refusal, Test, Versus,
};

/// What `compare.json` holds of each policy on each workload.
const COMPARED: [Metric; 10] = [
    Metric::HitRate,
    Metric::FollowupHitRate,
    Metric::TtftMean,
    Metric::TtftP50,
    Metric::TtftP95,
    Metric::TtftP99,
    Metric::E2eMean,
    Metric::Goodput,
    Metric::Imbalance,
    Metric::MovedAfterScale,
];
/// What is set in ratio over workloads.
const RATIOS: [Metric; 4] = [Metric::TtftMean, Metric::TtftP95, Metric::E2eMean, Metric::SloMisses];
/// Points of a drawn distribution, besides its first.
const STEPS: u32 = 150;
/// One-sided, after Holm.
const SIGNIFICANT: f64 = 0.025;
/// With fewer seeds even a win on each of them is above that.
const ENOUGH_SEEDS: usize = 8;

/// Runs that are reported together.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Study<'a> {
    /// Workloads and policies are shown in the order in which they come here.
    pub(crate) runs: &'a [Measured],
    /// Workloads whose clients wait for answers before they send again.
    pub(crate) closed: &'a BTreeSet<String>,
    /// Of the program.
    pub(crate) version: &'a str,
    pub(crate) command: &'a str,
    /// The policy that is compared with each of the others.
    pub(crate) policy: Option<&'a str>,
}

/// Writes everything: `summary.md`, `compare.json`, `goodput.csv`, `charts/`, and with a policy `comparison.txt` and
/// `tests.csv`. Runs and their requests are in the store's folders.
pub(crate) fn write(folder: &Path, study: &Study<'_>) -> Result<()> {
    let cells = Cells::of(study);
    write_whole(&folder.join("compare.json"), &json(&cells.compared())?)?;
    write_whole(&folder.join("goodput.csv"), cells.goodput().as_bytes())?;
    for (name, chart) in cells.charts(study.policy)? {
        write_whole(&folder.join("charts").join(format!("{name}.svg")), chart.svg())?;
        write_whole(&folder.join("charts").join(format!("{name}.png")), &chart.png()?)?;
    }
    if let Some(policy) = study.policy {
        let comparison = compare(study, policy)?;
        write_whole(&folder.join("comparison.txt"), comparison.to_string().as_bytes())?;
        write_whole(&folder.join("tests.csv"), comparison.tests().as_bytes())?;
    }
    write_whole(&folder.join("summary.md"), cells.summary(study).as_bytes())
}

/// Compares a policy with each of the others, and with the best of them on each workload.
pub(crate) fn compare(study: &Study<'_>, policy: &str) -> Result<Comparison> {
    let cells = Cells::of(study);
    cells
        .policies
        .iter()
        .find(|name| **name == policy)
        .with_context(|| format!("no run of {policy}"))?;
    let rivals: Vec<Against> = cells
        .policies
        .iter()
        .filter(|rival| **rival != policy)
        .map(|rival| cells.against(policy, rival))
        .collect();
    let hindsight =
        RATIOS.into_iter().filter_map(|metric| in_hindsight(policy, &rivals, metric)).collect();
    Ok(Comparison {
        policy: policy.to_owned(),
        workloads: cells.workloads.iter().map(|&name| name.to_owned()).collect(),
        rivals,
        hindsight,
    })
}

/// One policy beside the others.
#[derive(Debug)]
pub(crate) struct Comparison {
    policy: String,
    workloads: Vec<String>,
    rivals: Vec<Against>,
    /// Against the best rival of each workload, chosen for each metric with the results known.
    hindsight: Vec<(Metric, Versus)>,
}

/// One policy beside one other.
#[derive(Debug)]
struct Against {
    rival: String,
    ratios: Vec<(Metric, Vec<Point>)>,
    tests: BTreeMap<String, Vec<Test>>,
    refused: BTreeMap<String, Refusal>,
}

impl Against {
    /// On how many workloads ours is significantly better, and on how many worse.
    fn significant(&self, metric: Metric) -> (usize, usize) {
        let of = || self.tests.values().flatten().filter(|test| test.metric == metric.name());
        (
            of().filter(|test| test.holm < SIGNIFICANT).count(),
            of().filter(|test| test.holm_worse < SIGNIFICANT).count(),
        )
    }
}

/// The rival against which ours looks worst is the best one.
fn in_hindsight(policy: &str, rivals: &[Against], metric: Metric) -> Option<(Metric, Versus)> {
    let mut worst: BTreeMap<&str, f64> = BTreeMap::new();
    for (_, points) in rivals.iter().flat_map(|rival| &rival.ratios).filter(|(of, _)| *of == metric)
    {
        for Point { workload, ratio } in points {
            let entry = worst.entry(workload).or_insert(*ratio);
            *entry = entry.max(*ratio);
        }
    }
    let points: Vec<Point> = worst
        .into_iter()
        .map(|(workload, ratio)| Point { workload: workload.to_owned(), ratio })
        .collect();
    Some((metric, stats::versus(&points, &[policy, "in hindsight", metric.name()])?))
}

/// Runs by workload and policy.
#[derive(Debug)]
struct Cells<'a> {
    workloads: Vec<&'a str>,
    policies: Vec<&'a str>,
    runs: BTreeMap<&'a str, BTreeMap<&'a str, Vec<&'a Measured>>>,
    closed: &'a BTreeSet<String>,
}

/// How a workload's policies stand to its best one.
#[derive(Debug)]
struct Standing<'a> {
    best: &'a str,
    /// In the order of the policies.
    ratios: Vec<Option<f64>>,
}

impl<'a> Cells<'a> {
    fn of(study: &Study<'a>) -> Self {
        let (mut workloads, mut policies) = (Vec::new(), Vec::new());
        let mut runs: BTreeMap<_, BTreeMap<_, Vec<&Measured>>> = BTreeMap::new();
        for run in study.runs {
            let (workload, policy) = (run.workload.as_str(), run.policy.as_str());
            if !workloads.contains(&workload) {
                workloads.push(workload);
            }
            if !policies.contains(&policy) {
                policies.push(policy);
            }
            runs.entry(workload).or_default().entry(policy).or_default().push(run);
        }
        for runs in runs.values_mut().flat_map(BTreeMap::values_mut) {
            runs.sort_by_key(|run| run.seed);
        }
        Self { workloads, policies, runs, closed: study.closed }
    }

    fn get(&self, workload: &str, policy: &str) -> &[&'a Measured] {
        self.runs.get(workload).and_then(|policies| policies.get(policy)).map_or(&[], Vec::as_slice)
    }

    /// The policies that were run on a workload.
    fn on(&self, workload: &str) -> impl Iterator<Item = &'a str> {
        self.policies.iter().copied().filter(move |policy| !self.get(workload, policy).is_empty())
    }

    fn pairs(&self, workload: &str, policy: &str, rival: &str) -> Result<Vec<Pair<'a>>, Refusal> {
        let arrivals =
            if self.closed.contains(workload) { Arrivals::Closed } else { Arrivals::Open };
        stats::pair(self.get(workload, policy), self.get(workload, rival), arrivals)
    }

    fn interval(&self, workload: &str, policy: &str, metric: Metric) -> Option<Interval> {
        let values: Vec<f64> =
            self.get(workload, policy).iter().filter_map(|run| run.get(metric)).collect();
        stats::mean_over_seeds(&values, &[workload, policy, metric.name()])
    }

    fn against(&self, policy: &str, rival: &str) -> Against {
        let mut against = Against {
            rival: rival.to_owned(),
            ratios: RATIOS.map(|metric| (metric, Vec::new())).into(),
            tests: BTreeMap::new(),
            refused: BTreeMap::new(),
        };
        for &workload in &self.workloads {
            match self.pairs(workload, policy, rival) {
                Ok(pairs) => {
                    for (metric, points) in &mut against.ratios {
                        let point = |ratio| Point { workload: workload.to_owned(), ratio };
                        points.extend(stats::ratio_of(&pairs, *metric).map(point));
                    }
                    against.tests.insert(workload.to_owned(), stats::tests(&pairs));
                }
                Err(refusal) => {
                    against.refused.insert(workload.to_owned(), refusal);
                }
            }
        }
        against
    }

    /// The best policy of a workload is one that can be compared with the most others, and of these has the shortest
    /// mean time to the first token: one that only failed more often must not be the measure of all.
    fn standing(&self, workload: &'a str) -> Option<Standing<'a>> {
        let comparable = |policy: &str| {
            self.on(workload).filter(|rival| self.pairs(workload, policy, rival).is_ok()).count()
        };
        let most = self.on(workload).map(comparable).max()?;
        let ttft = |policy| {
            mean(self.get(workload, policy).iter().filter_map(|run| run.get(Metric::TtftMean)))
        };
        let best = self
            .on(workload)
            .filter(|policy| comparable(policy) == most)
            .filter_map(|policy| Some((policy, ttft(policy)?)))
            .min_by(|a, b| a.1.total_cmp(&b.1))?
            .0;
        let ratio = |policy: &&str| {
            let pairs = self.pairs(workload, policy, best).ok()?;
            stats::ratio_of(&pairs, Metric::TtftMean)
        };
        Some(Standing { best, ratios: self.policies.iter().map(ratio).collect() })
    }

    fn compared(&self) -> BTreeMap<&str, BTreeMap<&str, BTreeMap<&str, Interval>>> {
        let metrics = |workload, policy| {
            let named =
                |metric: Metric| Some((metric.name(), self.interval(workload, policy, metric)?));
            COMPARED.into_iter().filter_map(named).collect()
        };
        let policies = |workload| {
            self.on(workload).map(|policy| (policy, metrics(workload, policy))).collect()
        };
        self.workloads.iter().map(|&workload| (workload, policies(workload))).collect()
    }

    /// Goodput by the time to the first token that is asked for, as means over seeds.
    fn goodput(&self) -> String {
        let mut out = "workload,policy,ttft_slo,goodput\n".to_owned();
        for &workload in &self.workloads {
            for policy in self.on(workload) {
                let runs = self.get(workload, policy);
                for (at, (slo, _)) in runs[0].sweep.iter().enumerate() {
                    let average = mean(runs.iter().filter_map(|run| Some(run.sweep.get(at)?.1)))
                        .unwrap_or(0.0);
                    let _ = writeln!(out, "{workload},{policy},{slo:.4},{average:.6}");
                }
            }
        }
        out
    }

    fn charts(&self, policy: Option<&str>) -> Result<Vec<(String, Chart)>> {
        let mut charts = vec![("ratios".to_owned(), self.matrix()?)];
        for &workload in &self.workloads {
            let name = |kind: &str| format!("{kind}-{}", file_name(workload));
            let mut shown: Vec<&str> = self.on(workload).collect();
            shown.sort_by_key(|name| Some(*name) != policy);
            let lines = |points: fn(&[&Measured]) -> Vec<(f64, f64)>| -> Vec<chart::Line> {
                let line = |name: &&str| chart::Line {
                    name: (*name).to_owned(),
                    points: points(self.get(workload, name)),
                    look: self.look(name, policy),
                };
                shown.iter().map(line).collect()
            };
            let bar = |name: &&str| {
                let value = self.interval(workload, name, Metric::Imbalance)?;
                Some(chart::Bar { name: (*name).to_owned(), value, look: self.look(name, policy) })
            };
            let bars: Vec<chart::Bar> = shown.iter().filter_map(bar).collect();
            let run = self.get(workload, shown[0])[0];
            charts.push((name("hits"), chart::hit_rate(workload, &lines(hits), run.scaled_at)?));
            charts.push((name("ttft"), chart::ttft(workload, &lines(distribution), run.slo.ttft)?));
            charts.push((name("imbalance"), chart::imbalance(workload, &bars)?));
        }
        Ok(charts)
    }

    /// A policy looks the same on all charts.
    fn look(&self, name: &str, ours: Option<&str>) -> chart::Look {
        let number = self
            .policies
            .iter()
            .filter(|policy| Some(**policy) != ours)
            .position(|policy| *policy == name);
        number.map_or(chart::Look::Ours, chart::Look::Other)
    }

    fn matrix(&self) -> Result<Chart> {
        let none = || vec![None; self.policies.len()];
        let ratios: Vec<Vec<Option<f64>>> = self
            .workloads
            .iter()
            .map(|workload| self.standing(workload).map_or_else(none, |standing| standing.ratios))
            .collect();
        chart::ratios(&self.workloads, &self.policies, &ratios)
    }
}

/// The mean over seeds of each window.
fn hits(runs: &[&Measured]) -> Vec<(f64, f64)> {
    let windows = runs.iter().map(|run| run.hits.len()).min().unwrap_or(0);
    let window = |at: usize| {
        let time = mean(runs.iter().map(|run| run.hits[at].at))?;
        Some((time, mean(runs.iter().filter_map(|run| run.hits[at].hit_rate))?))
    };
    (0..windows).filter_map(window).collect()
}

/// The share of all requests of all seeds that had their first token by then; it stays below 1 if some never had one.
fn distribution(runs: &[&Measured]) -> Vec<(f64, f64)> {
    let times = sorted(runs.iter().flat_map(|run| run.ttft.iter().copied()));
    let answered = 1.0 - mean(runs.iter().map(|run| run.error_rate())).unwrap_or(0.0);
    let step = |step: u32| {
        let share = f64::from(step) / f64::from(STEPS);
        Some((quantile(&times, share)?, share * answered))
    };
    (0..=STEPS).filter_map(step).collect()
}

impl Cells<'_> {
    fn summary(&self, study: &Study<'_>) -> String {
        let mut out = "# Results\n\n".to_owned();
        let (runs, version, command) = (study.runs.len(), study.version, study.command);
        let (workloads, policies) = (self.workloads.len(), self.policies.len());
        let _ = writeln!(
            out,
            "Workloads: {workloads}, policies: {policies}, runs: {runs}; llm-ring-lab {version}."
        );
        let _ = writeln!(
            out,
            "{} Each run's parameters, and the requests of each, are in `runs/`.\n",
            if study.runs.iter().any(|run| run.live) {
                "Times are real: of real engines, measured at the client."
            } else {
                "Times are simulated."
            }
        );
        let _ = writeln!(out, "```sh\n{command}\n```\n");
        self.standings(&mut out);
        for &workload in &self.workloads {
            self.workload(&mut out, workload);
        }
        self.refusals(&mut out);
        out.push_str(DEFINITIONS);
        out
    }

    fn standings(&self, out: &mut String) {
        let _ = writeln!(out, "## Mean TTFT over the best policy's on each workload\n");
        let _ = writeln!(out, "| workload | {} |", self.policies.join(" | "));
        let _ = writeln!(out, "|---|{}", "---|".repeat(self.policies.len()));
        let mut columns: Vec<Vec<Point>> = vec![Vec::new(); self.policies.len()];
        for &workload in &self.workloads {
            let Some(Standing { best, ratios }) = self.standing(workload) else { continue };
            let _ = write!(out, "| {workload} |");
            for ((policy, ratio), column) in self.policies.iter().zip(ratios).zip(&mut columns) {
                column.extend(ratio.map(|ratio| Point { workload: workload.to_owned(), ratio }));
                let text = ratio.map_or_else(|| "–".to_owned(), |ratio| plain(ratio, 3));
                let _ = write!(out, " {} |", marked(&text, *policy == best));
            }
            out.push('\n');
        }
        let versus: Vec<Option<Versus>> = self
            .policies
            .iter()
            .zip(&columns)
            .map(|(policy, points)| stats::versus(points, &[policy, "best"]))
            .collect();
        let row = |name: &str, cell: &dyn Fn(&Versus) -> String| {
            let cells: Vec<String> = versus
                .iter()
                .map(|versus| versus.as_ref().map_or_else(|| "–".to_owned(), cell))
                .collect();
            format!("| {name} | {} |\n", cells.join(" | "))
        };
        out.push_str(&row("geometric mean", &|versus| {
            bracketed(&plain(versus.mean, 3), versus.lo, versus.hi, |value| plain(value, 3))
        }));
        out.push_str(&row("worst", &|versus| plain(versus.worst.ratio, 3)));
        let _ = writeln!(out, "\n![Ratios](charts/ratios.png)\n");
    }

    fn workload(&self, out: &mut String, workload: &str) {
        let policies: Vec<&str> = self.on(workload).collect();
        let run = self.get(workload, policies[0])[0];
        let seeds: BTreeSet<usize> =
            policies.iter().map(|policy| self.get(workload, policy).len()).collect();
        let seeds: Vec<String> = seeds.iter().map(ToString::to_string).collect();
        let _ = writeln!(out, "## {workload}\n");
        let _ = writeln!(
            out,
            "{} seeds, {} requests each; SLO: first token within {} s, then {} ms a token.\n",
            seeds.join(" or "),
            run.sent,
            short(run.slo.ttft),
            short(run.slo.itl * 1e3)
        );
        let columns = self.columns(workload);
        let titles: Vec<String> = columns.iter().map(|metric| title(*metric)).collect();
        let _ = writeln!(out, "| policy | {} |", titles.join(" | "));
        let _ = writeln!(out, "|---|{}", "---|".repeat(columns.len()));
        let best = self.standing(workload).map(|standing| standing.best);
        let comparable =
            |policy: &str| best.is_some_and(|best| self.pairs(workload, policy, best).is_ok());
        let rows: Vec<(&str, bool)> =
            policies.iter().map(|policy| (*policy, comparable(policy))).collect();
        let cells: Vec<Vec<String>> =
            columns.iter().map(|metric| self.column(workload, &rows, *metric)).collect();
        for (row, (policy, comparable)) in rows.iter().enumerate() {
            let row: Vec<&str> = cells.iter().map(|column| column[row].as_str()).collect();
            let _ = writeln!(
                out,
                "| {policy}{} | {} |",
                if *comparable { "" } else { " †" },
                row.join(" | ")
            );
        }
        if rows.iter().any(|(_, comparable)| !comparable) {
            let _ = writeln!(out, "\n† not comparable with the others: the reason is below.");
        }
        let file = file_name(workload);
        let _ =
            writeln!(out, "\n![TTFT](charts/ttft-{file}.png)\n![Hit rate](charts/hits-{file}.png)");
        let _ = writeln!(out, "![Imbalance](charts/imbalance-{file}.png)\n");
    }

    /// The metrics that say something about a workload.
    fn columns(&self, workload: &str) -> Vec<Metric> {
        let says = |metric: &Metric| {
            let mut values = self
                .on(workload)
                .flat_map(|policy| self.get(workload, policy))
                .filter_map(|run| run.get(*metric));
            // Nothing is said of what never happened.
            let event = metric.unit() == Unit::Count || *metric == Metric::Failed;
            if event { values.any(|value| value > 0.0) } else { values.next().is_some() }
        };
        Metric::ALL.into_iter().filter(|metric| *metric != Metric::SloMisses).filter(says).collect()
    }

    /// A metric of a workload's policies, the primaries with their intervals, and the best marked of those that can be
    /// compared.
    fn column(&self, workload: &str, policies: &[(&str, bool)], metric: Metric) -> Vec<String> {
        let intervals: Vec<(Option<Interval>, bool)> = policies
            .iter()
            .map(|(policy, comparable)| (self.interval(workload, policy, metric), *comparable))
            .collect();
        let compared = intervals.iter().filter(|(_, comparable)| *comparable);
        let means = || compared.clone().filter_map(|(interval, _)| Some((*interval)?.mean));
        let best = match metric.better() {
            Better::Less => means().reduce(f64::min),
            Better::More => means().reduce(f64::max),
            Better::Neither => None,
        };
        // What reads the same as the best is as good; where all do, there is none.
        let read = |mean| value(mean, metric.unit());
        let best = best.map(read).filter(|best| means().any(|mean| read(mean) != *best));
        let cell = |(interval, comparable): &(Option<Interval>, bool)| {
            let Some(Interval { mean, lo, hi }) = interval else { return "–".to_owned() };
            let text = value(*mean, metric.unit());
            let marked = marked(&text, *comparable && Some(&text) == best.as_ref());
            let plain = !PRIMARIES.contains(&metric) || lo == hi;
            if plain {
                marked
            } else {
                bracketed(&marked, *lo, *hi, |end| value(end, metric.unit()))
            }
        };
        intervals.iter().map(cell).collect()
    }

    fn refusals(&self, out: &mut String) {
        let mut lines = String::new();
        for &workload in &self.workloads {
            let Some(best) = self.standing(workload).map(|standing| standing.best) else {
                continue;
            };
            for policy in self.on(workload) {
                if let Err(refusal) = self.pairs(workload, policy, best) {
                    let _ = writeln!(lines, "- {workload}, {policy} beside {best}: {refusal}");
                }
            }
        }
        if !lines.is_empty() {
            let _ = writeln!(out, "## Not compared\n\n{lines}");
        }
    }
}

const DEFINITIONS: &str = "\
## How to read this

- Means over seeds, in brackets 95 % bootstrap intervals (BCa). The best of a column is bold.
- TTFT and E2E are from the client's send to the first and the last token, of requests that had one; quantiles are exact.
- Hit rates are tokens that endpoints found in their caches over prompt tokens; follow-ups are turns after the first.
- Goodput is the share of sent requests within both SLOs; a request that failed is not.
- Imbalance is the busiest endpoint's computed seconds over their mean.
- Avoidable are prompt tokens that another endpoint had in its cache and the chosen one had not.
- Runs are set side by side only if they are of the same requests and their error rates are within 1 point.
";

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { policy, workloads, rivals, .. } = self;
        writeln!(f, "{policy} against {} others on {} workloads\n", rivals.len(), workloads.len())?;
        writeln!(
            f,
            "Ratios, geometric mean over workloads: below 1, {policy} is better. In brackets 95 % by bootstrap over"
        )?;
        writeln!(
            f,
            "workloads; wins, ties (±1 %) and losses; the worst workload. * counts workloads on which it is significantly"
        )?;
        writeln!(
            f,
            "better, ! worse: exact one-sided Wilcoxon signed-rank test over seeds, Holm over the four primaries, below"
        )?;
        writeln!(
            f,
            "{SIGNIFICANT}, which takes {ENOUGH_SEEDS} seeds or more (SLO misses: of goodput). All p values are in tests.csv."
        )?;
        writeln!(
            f,
            "The last line is against the best rival of each workload, chosen when all results are known."
        )?;
        for metric in RATIOS {
            self.ratios(f, metric)?;
        }
        self.by_workload(f)?;
        self.refused(f)
    }
}

impl Comparison {
    fn width(&self) -> usize {
        self.rivals
            .iter()
            .map(|rival| rival.rival.len())
            .max()
            .unwrap_or(0)
            .max("best in hindsight".len())
    }

    fn ratios(&self, f: &mut fmt::Formatter<'_>, metric: Metric) -> fmt::Result {
        writeln!(f, "\n{}", label(metric))?;
        for rival in &self.rivals {
            let points = rival
                .ratios
                .iter()
                .find(|(of, _)| *of == metric)
                .map_or(&[][..], |(_, points)| points);
            let versus = stats::versus(points, &[&self.policy, &rival.rival, metric.name()]);
            let tested = if metric == Metric::SloMisses { Metric::Goodput } else { metric };
            let (better, worse) = rival.significant(tested);
            self.line(f, &rival.rival, versus.as_ref(), &format!("*{better} !{worse}"))?;
        }
        let hindsight =
            self.hindsight.iter().find(|(of, _)| *of == metric).map(|(_, versus)| versus);
        self.line(f, "best in hindsight", hindsight, "")
    }

    fn line(
        &self,
        f: &mut fmt::Formatter<'_>,
        name: &str,
        versus: Option<&Versus>,
        tested: &str,
    ) -> fmt::Result {
        let width = self.width();
        let Some(Versus { mean, lo, hi, wins, ties, losses, worst, .. }) = versus else {
            return writeln!(f, "  {name:<width$}  nothing to compare");
        };
        let counts = format!("{wins}/{ties}/{losses}");
        let interval = format!("[{lo:.3}, {hi:.3}]");
        writeln!(
            f,
            "  {name:<width$}  {mean:>6.3} {interval:<16} {counts:<9} {tested:<9} worst {:.3} {}",
            worst.ratio, worst.workload
        )
    }

    fn by_workload(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "\nBy workload: the median difference over seeds in %, with its 95 % BCa interval, and * or !."
        )?;
        for workload in &self.workloads {
            self.workload(f, workload)?;
        }
        Ok(())
    }

    fn workload(&self, f: &mut fmt::Formatter<'_>, workload: &str) -> fmt::Result {
        const CELL: usize = 26;
        let width = self.width();
        let row = |cells: &[String]| {
            cells.iter().map(|cell| format!("{cell:<CELL$}")).collect::<String>()
        };
        writeln!(
            f,
            "\n  {workload:<width$}  {}",
            row(&PRIMARIES.map(|metric| label(metric).to_owned())).trim_end()
        )?;
        for rival in &self.rivals {
            let Some(tests) = rival.tests.get(workload) else { continue };
            let cells: Vec<String> = tests.iter().map(cell).collect();
            writeln!(f, "  {:<width$}  {}", rival.rival, row(&cells).trim_end())?;
        }
        Ok(())
    }

    fn refused(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let refused = self
            .rivals
            .iter()
            .flat_map(|rival| rival.refused.iter().map(|why| (&rival.rival, why)));
        for (at, (rival, (workload, refusal))) in refused.enumerate() {
            let gap = if at == 0 { "\n" } else { "" };
            writeln!(f, "{gap}Not compared: {rival} on {workload} ({refusal})")?;
        }
        Ok(())
    }

    /// All tests, one a line.
    fn tests(&self) -> String {
        let mut out = "workload,policy,rival,metric,seeds,equal,difference,lo,hi,wilcoxon,sign_flip,holm,holm_worse\n".to_owned();
        for workload in &self.workloads {
            for rival in &self.rivals {
                for test in rival.tests.get(workload).into_iter().flatten() {
                    let Test {
                        metric, seeds, equal, wilcoxon, sign_flip, holm, holm_worse, ..
                    } = test;
                    let difference = test.difference.map_or_else(
                        || ",,".to_owned(),
                        |difference| {
                            format!(
                                "{:.6},{:.6},{:.6}",
                                difference.median, difference.lo, difference.hi
                            )
                        },
                    );
                    let (policy, rival) = (&self.policy, &rival.rival);
                    let _ = writeln!(
                        out,
                        "{workload},{policy},{rival},{metric},{seeds},{equal},{difference},{wilcoxon:.6},{sign_flip:.6},{holm:.6},{holm_worse:.6}"
                    );
                }
            }
        }
        out
    }
}

fn cell(test: &Test) -> String {
    let mark = match test {
        Test { holm, .. } if *holm < SIGNIFICANT => " *",
        Test { holm_worse, .. } if *holm_worse < SIGNIFICANT => " !",
        Test { .. } => "",
    };
    let Some(Difference { median, lo, hi }) = test.difference else { return format!("–{mark}") };
    let [median, lo, hi] = [median, lo, hi].map(|share| share * 100.0);
    format!("{median:+.1} [{lo:+.1}, {hi:+.1}]{mark}")
}

/// A metric's name for people.
fn label(metric: Metric) -> &'static str {
    match metric {
        Metric::HitRate => "hits",
        Metric::FollowupHitRate => "follow-up hits",
        Metric::TtftMean => "TTFT mean",
        Metric::TtftP50 => "TTFT p50",
        Metric::TtftP95 => "TTFT p95",
        Metric::TtftP99 => "TTFT p99",
        Metric::E2eMean => "E2E mean",
        Metric::ItlMean => "ITL mean",
        Metric::Goodput => "goodput",
        Metric::SloMisses => "SLO misses",
        Metric::Failed => "failed",
        Metric::Imbalance => "imbalance",
        Metric::Avoidable => "avoidable",
        Metric::Redirects => "redirects",
        Metric::MovedAfterScale => "moved at scale-up",
        Metric::HitAfterScale => "hits after it",
        Metric::NewShare => "new endpoint's share",
        Metric::Preemptions => "preemptions",
        Metric::OutputTokensPerSecond => "output",
    }
}

/// The same with its unit.
fn title(metric: Metric) -> String {
    let name = label(metric);
    match metric.unit() {
        Unit::Seconds => format!("{name}, s"),
        Unit::Share => format!("{name}, %"),
        Unit::Rate => format!("{name}, tok/s"),
        Unit::Plain | Unit::Count => name.to_owned(),
    }
}

fn value(value: f64, unit: Unit) -> String {
    match unit {
        Unit::Seconds => plain(value, 3),
        Unit::Share => format!("{:.1}", value * 100.0),
        Unit::Plain => format!("{value:.3}"),
        Unit::Count | Unit::Rate => format!("{value:.0}"),
    }
}

/// A number with so many significant digits, without an exponent.
pub(crate) fn plain(value: f64, digits: i32) -> String {
    if value == 0.0 || !value.is_finite() {
        return value.to_string();
    }
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a logarithm of a float is between -324 and 308"
    )]
    let size = value.abs().log10().floor() as i32;
    let decimals = usize::try_from(digits - 1 - size).unwrap_or(0);
    format!("{value:.decimals$}")
}

fn bracketed(text: &str, lo: f64, hi: f64, write: impl Fn(f64) -> String) -> String {
    format!("{text} [{}, {}]", write(lo), write(hi))
}

fn marked(text: &str, best: bool) -> String {
    if best { format!("**{text}**") } else { text.to_owned() }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::Value;

    use super::*;
    use crate::metrics::made_up;
    use crate::progress::folder::Folder;

    const POLICIES: [(&str, f64); 3] =
        [("marginal-cost", 0.9), ("round-robin", 0.1), ("bounded", 0.5)];

    fn runs(workloads: &[&str], seeds: u64) -> Vec<Measured> {
        let all = workloads.iter().flat_map(|workload| POLICIES.map(|policy| (*workload, policy)));
        let seeded = all.flat_map(|of| (1..=seeds).map(move |seed| (of, seed)));
        seeded
            .map(|((workload, (policy, skill)), seed)| {
                Measured::of(&made_up::run(workload, policy, seed, skill))
            })
            .collect()
    }

    fn study<'a>(runs: &'a [Measured], closed: &'a BTreeSet<String>) -> Study<'a> {
        Study {
            runs,
            closed,
            version: "0.1.0",
            command: "llm-ring-lab run",
            policy: Some("marginal-cost"),
        }
    }

    fn read(folder: &Path) -> BTreeMap<String, Vec<u8>> {
        let mut files = BTreeMap::new();
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if path.is_dir() {
                files.extend(
                    read(&path).into_iter().map(|(file, bytes)| (format!("{name}/{file}"), bytes)),
                );
            } else {
                files.insert(name, fs::read(&path).unwrap());
            }
        }
        files
    }

    #[test]
    fn the_same_runs_give_the_same_files() {
        let folder = Folder::new("report");
        let (mut runs, closed) = (runs(&["chat:96"], 2), BTreeSet::new());
        write(folder.path(), &study(&runs, &closed)).unwrap();
        let files = read(folder.path());
        let names: Vec<&str> = files.keys().map(String::as_str).collect();
        let charts = ["hits-chat-96", "imbalance-chat-96", "ratios", "ttft-chat-96"];
        let charts: Vec<String> = charts
            .iter()
            .flat_map(|chart| ["png", "svg"].map(|kind| format!("charts/{chart}.{kind}")))
            .collect();
        assert_eq!(names[..8], charts);
        assert_eq!(
            names[8..],
            ["compare.json", "comparison.txt", "goodput.csv", "summary.md", "tests.csv"]
        );

        runs.swap(0, 1);
        let study = study(&runs, &closed);
        let cells = Cells::of(&study);
        assert_eq!(
            files["summary.md"],
            cells.summary(&study).as_bytes(),
            "whatever the order of seeds"
        );
        assert_eq!(files["compare.json"], json(&cells.compared()).unwrap());
        assert_eq!(
            files["comparison.txt"],
            compare(&study, "marginal-cost").unwrap().to_string().as_bytes()
        );
        for (name, chart) in cells.charts(study.policy).unwrap() {
            assert_eq!(files[&format!("charts/{name}.svg")], chart.svg(), "{name}");
        }
    }

    #[test]
    fn compare_json_is_by_workload_policy_and_metric() {
        let (mut runs, closed) = (runs(&["chat:96"], 4), BTreeSet::new());
        for run in &mut runs {
            run.values.remove(&Metric::FollowupHitRate);
        }
        let cells = Cells::of(&study(&runs, &closed));
        let compared: Value = serde_json::from_slice(&json(&cells.compared()).unwrap()).unwrap();
        let policy = compared["chat:96"]["bounded"].as_object().unwrap();
        let metrics: Vec<&str> = policy.keys().map(String::as_str).collect();
        let expected = [
            "e2e_mean",
            "goodput",
            "hit_rate",
            "imbalance",
            "ttft_mean",
            "ttft_p50",
            "ttft_p95",
            "ttft_p99",
        ];
        assert_eq!(metrics, expected, "what was not measured is not there");
        let [mean, lo, hi] =
            ["mean", "lo", "hi"].map(|key| policy["ttft_mean"][key].as_f64().unwrap());
        assert!(lo < mean && mean < hi, "{lo} {mean} {hi}");
    }

    #[test]
    fn the_summary_shows_every_workload_and_marks_the_best() {
        let (runs, closed) = (runs(&["chat:96", "conv:1.0"], 3), BTreeSet::new());
        let study = study(&runs, &closed);
        let summary = Cells::of(&study).summary(&study);
        assert!(summary.contains("Workloads: 2, policies: 3, runs: 18"), "{summary}");
        assert!(summary.contains("## chat:96\n") && summary.contains("## conv:1.0\n"));
        assert!(summary.contains(
            "3 seeds, 560 requests each; SLO: first token within 0.5 s, then 50 ms a token."
        ));
        assert!(summary.contains("| chat:96 | **1.00** |"), "{summary}");
        let ours: Vec<&str> =
            summary.lines().filter(|line| line.starts_with("| marginal-cost | **")).collect();
        assert_eq!(ours.len(), 2, "the best hit rate");
        assert!(!summary.contains("Not compared") && !summary.contains("moved at scale-up"));
    }

    #[test]
    fn what_failed_more_is_shown_but_not_compared() {
        let (mut runs, closed) = (runs(&["chat:96"], 3), BTreeSet::new());
        // The best by far, of the few that it answered.
        for run in runs.iter_mut().filter(|run| run.policy == "bounded") {
            run.values.insert(Metric::Failed, 0.5);
            run.values.insert(Metric::TtftMean, 0.001);
        }
        let study = study(&runs, &closed);
        let summary = Cells::of(&study).summary(&study);
        assert!(
            summary.contains(
                "- chat:96, bounded beside marginal-cost: seed 1: 50.0 % failed and 0.5 %"
            ),
            "{summary}"
        );
        assert!(summary.contains("| chat:96 | **1.00** | "), "it is not the measure of the others");
        assert!(
            summary.contains("| bounded † |") && summary.contains(" | 0.00100 | "),
            "nor the best of its column"
        );
        let text = compare(&study, "marginal-cost").unwrap().to_string();
        assert!(
            text.contains("\nNot compared: bounded on chat:96 (seed 1: 0.5 % failed and 50.0 %)"),
            "{text}"
        );
        assert!(text.contains("  bounded            nothing to compare"), "{text}");
    }

    #[test]
    fn a_policy_is_compared_with_each_and_with_the_best_in_hindsight() {
        let (runs, closed) = (runs(&["chat:96", "conv:1.0"], 8), BTreeSet::new());
        let study = study(&runs, &closed);
        let comparison = compare(&study, "marginal-cost").unwrap();
        let (metric, versus) = &comparison.hindsight[0];
        assert_eq!((*metric, versus.wins, versus.losses), (Metric::TtftMean, 2, 0));
        let bounded = &comparison.rivals[1];
        assert_eq!(bounded.rival, "bounded");
        assert_eq!(
            versus.worst,
            stats::versus(&bounded.ratios[0].1, &["any"]).unwrap().worst,
            "bounded is the best rival"
        );
        assert_eq!(bounded.significant(Metric::TtftMean), (2, 0));
        let text = comparison.to_string();
        assert!(text.contains("2/0/0     *2 !0"), "{text}");
        assert_eq!(comparison.tests().lines().count(), 1 + 2 * 2 * 4);

        let worst = compare(&study, "round-robin").unwrap();
        assert_eq!(worst.rivals[0].significant(Metric::Goodput), (0, 2));
        assert!(worst.to_string().contains("] !"));
        assert_eq!(compare(&study, "none").unwrap_err().to_string(), "no run of none");
    }

    #[test]
    fn a_closed_loop_is_compared_in_spite_of_its_times() {
        let mut runs = runs(&["agent:16"], 2);
        for run in runs.iter_mut().filter(|run| run.policy == "bounded") {
            run.manifest.times += 1;
        }
        let refusals = |closed: BTreeSet<String>| {
            let comparison = compare(&study(&runs, &closed), "bounded").unwrap();
            comparison.rivals.iter().map(|rival| rival.refused.len()).sum::<usize>()
        };
        assert_eq!(refusals(BTreeSet::new()), 2);
        assert_eq!(refusals(BTreeSet::from(["agent:16".to_owned()])), 0);
    }

    #[test]
    fn numbers_have_three_digits() {
        let read: Vec<String> = [0.012_34, 0.1, 1.234, 12.34, 1234.5, 0.0]
            .iter()
            .map(|value| plain(*value, 3))
            .collect();
        assert_eq!(read, ["0.0123", "0.100", "1.23", "12.3", "1234", "0"]);
    }
}
