//! What experiments gave, in numbers: kept in a file, rounded, and compared with what they gave before.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

use super::plan::Experiment;
use crate::metrics::Metric;
use crate::report::{Cells, in_hindsight};
use crate::stats::{self, Interval, PRIMARIES, Versus};

/// The rival that is the best of each workload, chosen with the results known.
pub(crate) const HINDSIGHT: &str = "best in hindsight";

/// All numbers, by experiment with its variant.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Numbers(pub(crate) BTreeMap<String, Of>);

/// The numbers of one experiment.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Of {
    pub(crate) seeds: usize,
    /// By workload, policy and metric.
    pub(crate) workloads: BTreeMap<String, BTreeMap<String, BTreeMap<String, Number>>>,
    /// By policy, rival and metric: ratios over the workloads where both met the same requests.
    pub(crate) against: BTreeMap<String, BTreeMap<String, BTreeMap<String, Ratio>>>,
}

/// A mean over seeds, for the primaries with its interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub(crate) enum Number {
    Mean(f64),
    /// Mean, and the ends of the interval.
    Interval([f64; 3]),
}

/// A policy against another one over workloads.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Ratio {
    /// Geometric mean, and the ends of its interval.
    pub(crate) mean: [f64; 3],
    /// Wins, ties and losses.
    pub(crate) counts: [usize; 3],
    pub(crate) worst: f64,
    pub(crate) worst_at: String,
}

impl Number {
    pub(crate) fn mean(self) -> f64 {
        match self {
            Self::Mean(mean) | Self::Interval([mean, ..]) => mean,
        }
    }
}

impl Of {
    /// Takes an experiment's numbers from its runs.
    ///
    /// # Errors
    /// The experiment names a metric that there is not.
    pub(crate) fn runs(experiment: &Experiment, cells: &Cells<'_>) -> Result<Self> {
        let metrics = experiment.kept()?;
        let of = |workload: &str, policy: &str| -> BTreeMap<String, Number> {
            let number = |metric: &Metric| {
                let Interval { mean, lo, hi } = cells.interval(workload, policy, *metric)?;
                let number = if PRIMARIES.contains(metric) && lo < hi {
                    Number::Interval([mean, lo, hi].map(rounded))
                } else {
                    Number::Mean(rounded(mean))
                };
                Some((metric.name().to_owned(), number))
            };
            metrics.iter().filter_map(number).collect()
        };
        let policies = |workload: &str| {
            cells.on(workload).map(|policy| (policy.to_owned(), of(workload, policy))).collect()
        };
        Ok(Self {
            seeds: experiment.seeds()?.len(),
            workloads: cells
                .workloads
                .iter()
                .map(|workload| ((*workload).to_owned(), policies(workload)))
                .collect(),
            against: experiment
                .of
                .iter()
                .map(|policy| (policy.clone(), against(experiment, cells, policy)))
                .collect(),
        })
    }

    /// A mean over seeds.
    ///
    /// # Errors
    /// It was not measured.
    pub(crate) fn number(&self, workload: &str, policy: &str, metric: &str) -> Result<Number> {
        let policies =
            self.workloads.get(workload).with_context(|| format!("no workload `{workload}`"))?;
        let metrics = policies
            .get(policy)
            .with_context(|| format!("no policy `{policy}` on `{workload}`"))?;
        let number = metrics.get(metric).copied();
        number.with_context(|| format!("no `{metric}` of `{policy}` on `{workload}`"))
    }
}

fn against(
    experiment: &Experiment,
    cells: &Cells<'_>,
    policy: &str,
) -> BTreeMap<String, BTreeMap<String, Ratio>> {
    let others = cells.policies.iter().filter(|rival| **rival != policy);
    let all: Vec<_> = others.map(|rival| cells.against(policy, rival)).collect();
    let mut named = BTreeMap::new();
    for rival in &all {
        let of = |(metric, points): &(Metric, Vec<stats::Point>)| {
            let versus = stats::versus(points, &[policy, rival.rival(), metric.name()])?;
            Some((metric.name().to_owned(), Ratio::of(&versus)))
        };
        named.insert(rival.rival().to_owned(), rival.ratios().iter().filter_map(of).collect());
    }
    let best_of = |name: &str| {
        experiment.best_of.is_empty() || experiment.best_of.iter().any(|it| it == name)
    };
    let best: Vec<_> = all.into_iter().filter(|rival| best_of(rival.rival())).collect();
    let of = |metric| {
        let (metric, versus) = in_hindsight(policy, &best, metric)?;
        Some((metric.name().to_owned(), Ratio::of(&versus)))
    };
    named.insert(HINDSIGHT.to_owned(), crate::report::RATIOS.into_iter().filter_map(of).collect());
    named
}

impl Ratio {
    fn of(versus: &Versus) -> Self {
        Self {
            mean: [versus.mean, versus.lo, versus.hi].map(rounded),
            counts: [versus.wins, versus.ties, versus.losses],
            worst: rounded(versus.worst.ratio),
            worst_at: versus.worst.workload.clone(),
        }
    }
}

/// Six digits: enough to see any change, and no noise.
fn rounded(value: f64) -> f64 {
    format!("{value:.5e}").parse().unwrap_or(value)
}

impl Numbers {
    /// The file: a line for each policy on each workload, so that a difference is read at a glance.
    ///
    /// # Errors
    /// A number is none.
    pub(crate) fn json(&self) -> Result<String> {
        let mut out = "{".to_owned();
        for (at, (name, of)) in self.0.iter().enumerate() {
            let comma = if at == 0 { "" } else { "," };
            let _ = write!(
                out,
                "{comma}\n{}: {{\n  \"seeds\": {},\n",
                serde_json::to_string(name)?,
                of.seeds
            );
            let _ = write!(out, "  \"workloads\": {{{}\n  }},\n", lines(&of.workloads)?);
            let _ = write!(out, "  \"against\": {{{}\n  }}\n}}", lines(&of.against)?);
        }
        out.push_str("\n}\n");
        Ok(out)
    }

    /// What differs from the numbers before, a line each; what is only in one of the two counts, but of the experiments
    /// and workloads that are `skipped` nothing is said.
    pub(crate) fn changes(
        &self,
        before: &Self,
        skipped: &BTreeSet<(String, String)>,
    ) -> Vec<String> {
        let mut changes = Vec::new();
        let (old, new) = (before.flat(), self.flat());
        for key in old.keys().chain(new.keys()).collect::<BTreeSet<_>>() {
            let workload = || (key[0].clone(), key[1].clone());
            let whole = || (key[0].clone(), String::new());
            // A ratio over workloads needs them all.
            let of_all = key[1].starts_with(AGAINST);
            let left_out = skipped.iter().any(|(set, _)| *set == key[0]);
            if skipped.contains(&workload()) || skipped.contains(&whole()) || (of_all && left_out) {
                continue;
            }
            let (was, is) = (old.get(key), new.get(key));
            if was != is {
                let said =
                    |value: Option<&String>| value.map_or("nothing", String::as_str).to_owned();
                changes.push(format!("{}: {} before, {} now", key.join(", "), said(was), said(is)));
            }
        }
        changes
    }

    /// Every number by experiment, workload, policy and metric.
    fn flat(&self) -> BTreeMap<Vec<String>, String> {
        let mut flat = BTreeMap::new();
        let text = |value: serde_json::Result<String>| value.unwrap_or_default();
        for (name, of) in &self.0 {
            for (workload, policies) in &of.workloads {
                for (policy, metrics) in policies {
                    for (metric, number) in metrics {
                        let key = [name, workload, policy, metric].map(Clone::clone).into();
                        flat.insert(key, text(serde_json::to_string(number)));
                    }
                }
            }
            for (policy, rivals) in &of.against {
                for (rival, metrics) in rivals {
                    for (metric, ratio) in metrics {
                        let against = format!("{AGAINST}{rival}");
                        let key = vec![name.clone(), against, policy.clone(), metric.clone()];
                        flat.insert(key, text(serde_json::to_string(ratio)));
                    }
                }
            }
        }
        flat
    }
}

/// What stands before a rival's name where else a workload stands.
const AGAINST: &str = "all workloads against ";

fn lines<T: Serialize>(outer: &BTreeMap<String, BTreeMap<String, T>>) -> Result<String> {
    let mut out = String::new();
    for (at, (name, inner)) in outer.iter().enumerate() {
        let comma = if at == 0 { "" } else { "," };
        let _ = write!(out, "{comma}\n    {}: {{", serde_json::to_string(name)?);
        for (at, (name, value)) in inner.iter().enumerate() {
            let comma = if at == 0 { "" } else { "," };
            let (name, value) = (serde_json::to_string(name)?, serde_json::to_string(value)?);
            let _ = write!(out, "{comma}\n      {name}: {value}");
        }
        out.push_str("\n    }");
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers() -> Numbers {
        let metrics = |ttft| {
            BTreeMap::from([
                ("ttft_mean".to_owned(), Number::Interval([ttft, ttft - 0.01, ttft + 0.01])),
                ("hit_rate".to_owned(), Number::Mean(0.5)),
            ])
        };
        let policies = || {
            BTreeMap::from([
                ("bounded".to_owned(), metrics(0.25)),
                ("gaie".to_owned(), metrics(0.5)),
            ])
        };
        let ratio = Ratio {
            mean: [0.5, 0.4, 0.6],
            counts: [2, 0, 0],
            worst: 0.6,
            worst_at: "chat:96".to_owned(),
        };
        let ratios = BTreeMap::from([("ttft_mean".to_owned(), ratio)]);
        let of = Of {
            seeds: 3,
            workloads: BTreeMap::from([
                ("chat:96".to_owned(), policies()),
                ("conv:1.0".to_owned(), policies()),
            ]),
            against: BTreeMap::from([(
                "bounded".to_owned(),
                BTreeMap::from([("gaie".to_owned(), ratios)]),
            )]),
        };
        Numbers(BTreeMap::from([("grid".to_owned(), of)]))
    }

    #[test]
    fn numbers_come_back_from_their_file() {
        let json = numbers().json().unwrap();
        assert_eq!(serde_json::from_str::<Numbers>(&json).unwrap(), numbers());
        assert!(
            json.contains("\n      \"gaie\": {\"hit_rate\":0.5,\"ttft_mean\":[0.5,0.49,0.51]}"),
            "{json}"
        );
        assert_eq!(
            serde_json::from_str::<Numbers>(&Numbers::default().json().unwrap()).unwrap(),
            Numbers::default()
        );
    }

    #[test]
    fn a_changed_number_is_named_with_what_it_was() {
        let (before, mut now) = (numbers(), numbers());
        assert!(now.changes(&before, &BTreeSet::new()).is_empty());
        let of = now.0.get_mut("grid").unwrap();
        let gaie = of.workloads.get_mut("chat:96").unwrap().get_mut("gaie").unwrap();
        gaie.insert("hit_rate".to_owned(), Number::Mean(0.500_001));
        of.workloads.get_mut("conv:1.0").unwrap().remove("gaie");
        of.against
            .get_mut("bounded")
            .unwrap()
            .get_mut("gaie")
            .unwrap()
            .get_mut("ttft_mean")
            .unwrap()
            .worst = 0.7;
        let changes = now.changes(&before, &BTreeSet::new());
        assert_eq!(changes.len(), 4, "{changes:?}");
        assert!(
            changes.contains(&"grid, chat:96, gaie, hit_rate: 0.5 before, 0.500001 now".to_owned())
        );
        assert!(
            changes.contains(&"grid, conv:1.0, gaie, hit_rate: 0.5 before, nothing now".to_owned())
        );
        assert!(changes.iter().any(|change| {
            change.starts_with("grid, all workloads against gaie, bounded, ttft_mean: ")
        }));

        // What could not be run says nothing, and neither do ratios over all.
        let skipped = BTreeSet::from([("grid".to_owned(), "conv:1.0".to_owned())]);
        let changes = now.changes(&before, &skipped);
        assert_eq!(changes, ["grid, chat:96, gaie, hit_rate: 0.5 before, 0.500001 now"]);
        let whole = BTreeSet::from([("grid".to_owned(), String::new())]);
        assert!(now.changes(&before, &whole).is_empty());
    }

    #[test]
    fn six_digits_are_kept() {
        assert_eq!(
            [0.123_456_49, 1_234_567.0, 0.0, 1.0].map(rounded),
            [0.123_456, 1_234_570.0, 0.0, 1.0]
        );
    }
}
