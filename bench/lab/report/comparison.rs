//! One policy beside the others: ratios over workloads, and tests on each of them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Write as _};

use anyhow::{Context as _, Result};

use super::words::label;
use super::{Cells, Study};
use crate::metrics::Metric;
use crate::stats::{self, Difference, PRIMARIES, Point, Refusal, Test, Versus};

/// What is set in ratio over workloads.
pub(crate) const RATIOS: [Metric; 4] =
    [Metric::TtftMean, Metric::TtftP95, Metric::E2eMean, Metric::SloMisses];
/// One-sided, after Holm.
const SIGNIFICANT: f64 = 0.025;
/// With fewer seeds even a win on each of them is above that.
const ENOUGH_SEEDS: usize = 8;

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
    pub(super) rivals: Vec<Against>,
    /// Against the best rival of each workload, chosen for each metric with the results known.
    pub(super) hindsight: Vec<(Metric, Versus)>,
}

impl Cells<'_> {
    /// Sets a policy beside another one, on every workload where their runs are of the same requests.
    pub(crate) fn against(&self, policy: &str, rival: &str) -> Against {
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
}

/// One policy beside one other.
#[derive(Debug)]
pub(crate) struct Against {
    pub(super) rival: String,
    pub(super) ratios: Vec<(Metric, Vec<Point>)>,
    tests: BTreeMap<String, Vec<Test>>,
    pub(super) refused: BTreeMap<String, Refusal>,
}

impl Against {
    pub(crate) fn rival(&self) -> &str {
        &self.rival
    }

    /// By metric, the ratio on every workload where both met the same requests.
    pub(crate) fn ratios(&self) -> &[(Metric, Vec<Point>)] {
        &self.ratios
    }

    /// On how many workloads ours is significantly better, and on how many worse.
    pub(super) fn significant(&self, metric: Metric) -> (usize, usize) {
        let of = || self.tests.values().flatten().filter(|test| test.metric == metric.name());
        (
            of().filter(|test| test.holm < SIGNIFICANT).count(),
            of().filter(|test| test.holm_worse < SIGNIFICANT).count(),
        )
    }
}

/// Against the best of some rivals on each workload: the one against which ours looks worst.
pub(crate) fn in_hindsight(
    policy: &str,
    rivals: &[Against],
    metric: Metric,
) -> Option<(Metric, Versus)> {
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
        let advice: BTreeSet<&str> = self
            .rivals
            .iter()
            .flat_map(|rival| rival.refused.values().map(Refusal::advice))
            .collect();
        advice.into_iter().try_for_each(|advice| writeln!(f, "What to do: {advice}."))
    }

    /// A rival that could not be compared on any workload, with the first reason.
    pub(crate) fn incomparable(&self) -> Option<(&str, &Refusal)> {
        let alone = self.rivals.iter().find(|rival| rival.tests.is_empty())?;
        Some((&alone.rival, alone.refused.values().next()?))
    }

    /// All tests, one a line.
    pub(super) fn tests(&self) -> String {
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
