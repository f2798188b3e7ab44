//! Runs by workload and policy: what is paired with what, means with their intervals, and what charts are drawn from.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use anyhow::{Context as _, Result};

use super::Study;
use crate::chart::{self, Chart};
use crate::metrics::{Measured, Metric, mean, quantile, sorted};
use crate::progress::file_name;
use crate::stats::{self, Arrivals, Interval, Pair, Refusal};

/// What `compare.json` holds of each policy on each workload.
const COMPARED: [Metric; 11] = [
    Metric::HitRate,
    Metric::FollowupHitRate,
    Metric::TtftMean,
    Metric::TtftP50,
    Metric::TtftP95,
    Metric::TtftP99,
    Metric::E2eMean,
    Metric::Goodput,
    Metric::Imbalance,
    Metric::InFlight,
    Metric::MovedAfterScale,
];
/// Points of a drawn distribution, besides its first.
const STEPS: u32 = 150;

/// Runs by workload and policy.
#[derive(Debug)]
pub(crate) struct Cells<'a> {
    pub(crate) workloads: Vec<&'a str>,
    pub(crate) policies: Vec<&'a str>,
    runs: BTreeMap<&'a str, BTreeMap<&'a str, Vec<&'a Measured>>>,
    closed: &'a BTreeSet<String>,
}

/// What lines show.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lines {
    /// Distributions of the time to the first token.
    Ttft,
    /// Hit rates over time.
    Hits,
    /// Goodput by the time to the first token that is asked for.
    Goodput,
}

/// How a workload's policies stand to its best one.
#[derive(Debug)]
pub(super) struct Standing<'a> {
    pub(super) best: &'a str,
    /// In the order of the policies.
    pub(super) ratios: Vec<Option<f64>>,
}

impl<'a> Cells<'a> {
    pub(crate) fn of(study: &Study<'a>) -> Self {
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

    pub(crate) fn get(&self, workload: &str, policy: &str) -> &[&'a Measured] {
        self.runs.get(workload).and_then(|policies| policies.get(policy)).map_or(&[], Vec::as_slice)
    }

    /// The policies that were run on a workload.
    pub(crate) fn on(&self, workload: &str) -> impl Iterator<Item = &'a str> {
        self.policies.iter().copied().filter(move |policy| !self.get(workload, policy).is_empty())
    }

    pub(crate) fn pairs(
        &self,
        workload: &str,
        policy: &str,
        rival: &str,
    ) -> Result<Vec<Pair<'a>>, Refusal> {
        let arrivals =
            if self.closed.contains(workload) { Arrivals::Closed } else { Arrivals::Open };
        stats::pair(self.get(workload, policy), self.get(workload, rival), arrivals)
    }

    pub(crate) fn interval(
        &self,
        workload: &str,
        policy: &str,
        metric: Metric,
    ) -> Option<Interval> {
        let values: Vec<f64> =
            self.get(workload, policy).iter().filter_map(|run| run.get(metric)).collect();
        stats::mean_over_seeds(&values, &[workload, policy, metric.name()])
    }

    /// The best policy of a workload is one that can be compared with the most others, and of these has the shortest
    /// mean time to the first token: one that only failed more often must not be the measure of all.
    pub(super) fn standing(&self, workload: &'a str) -> Option<Standing<'a>> {
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

    pub(super) fn compared(&self) -> BTreeMap<&str, BTreeMap<&str, BTreeMap<&str, Interval>>> {
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
    pub(super) fn goodput(&self) -> String {
        let mut out = "workload,policy,ttft_slo,goodput\n".to_owned();
        for &workload in &self.workloads {
            for policy in self.on(workload) {
                for (slo, share) in goodput(self.get(workload, policy)) {
                    let _ = writeln!(out, "{workload},{policy},{slo:.4},{share:.6}");
                }
            }
        }
        out
    }

    pub(super) fn charts(&self, policy: Option<&str>) -> Result<Vec<(String, Chart)>> {
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
            charts
                .push((name("goodput"), chart::goodput(workload, &lines(goodput), run.slo.ttft)?));
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

    /// A chart of lines of one workload's policies, each with the name that it is shown by.
    pub(crate) fn lines(
        &self,
        kind: Lines,
        workload: &str,
        policies: &[(&str, &str)],
        ours: Option<&str>,
    ) -> Result<Chart> {
        let points = match kind {
            Lines::Ttft => distribution,
            Lines::Hits => hits,
            Lines::Goodput => goodput,
        };
        let others = policies.iter().filter(|(policy, _)| Some(*policy) != ours);
        let lines: Vec<chart::Line> = policies
            .iter()
            .filter(|(policy, _)| !self.get(workload, policy).is_empty())
            .map(|(policy, name)| chart::Line {
                name: (*name).to_owned(),
                points: points(self.get(workload, policy)),
                look: others
                    .clone()
                    .position(|(other, _)| other == policy)
                    .map_or(chart::Look::Ours, chart::Look::Other),
            })
            .collect();
        let runs = policies.iter().flat_map(|(policy, _)| self.get(workload, policy));
        let run = runs.copied().next().with_context(|| format!("no run on `{workload}`"))?;
        match kind {
            Lines::Ttft => chart::ttft(workload, &lines, run.slo.ttft),
            Lines::Hits => chart::hit_rate(workload, &lines, run.scaled_at),
            Lines::Goodput => chart::goodput(workload, &lines, run.slo.ttft),
        }
    }

    fn matrix(&self) -> Result<Chart> {
        let none = || vec![None; self.policies.len()];
        let ratios: Vec<Vec<Option<f64>>> = self
            .workloads
            .iter()
            .map(|workload| self.standing(workload).map_or_else(none, |standing| standing.ratios))
            .collect();
        chart::ratios(
            "Mean TTFT over the best policy's on each workload",
            &self.workloads,
            &self.policies,
            &ratios,
        )
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

/// The mean over seeds of the share of requests within the SLO, by the time to the first token that is asked for.
fn goodput(runs: &[&Measured]) -> Vec<(f64, f64)> {
    let at = |at: usize| {
        let slo = runs[0].sweep[at].0;
        Some((slo, mean(runs.iter().filter_map(|run| Some(run.sweep.get(at)?.1)))?))
    };
    (0..runs[0].sweep.len()).filter_map(at).collect()
}
