//! `experiments.yaml`: which runs are made, and which charts are drawn of them.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};
use serde::Deserialize;

use crate::metrics::Metric;
use crate::sim::Knobs;

/// The file's name in its folder.
pub(crate) const FILE: &str = "experiments.yaml";
/// Stands for all points of the study.
const STUDY: &str = "$study";

/// All experiments and charts, in the order of the file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Plan {
    /// Lists of names that `$name` stands for.
    #[serde(default)]
    pub(crate) lists: BTreeMap<String, Vec<String>>,
    /// Names for the page, of policies whose own are long.
    #[serde(default)]
    pub(crate) names: BTreeMap<String, String>,
    pub(crate) experiments: Vec<Experiment>,
    #[serde(default)]
    pub(crate) charts: Vec<Plot>,
}

/// Policies on workloads.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Experiment {
    pub(crate) name: String,
    pub(crate) workloads: Vec<String>,
    pub(crate) policies: Vec<String>,
    /// Such as `1..5`.
    pub(crate) seeds: String,
    /// Policies that are set against each of the others.
    #[serde(default)]
    pub(crate) of: Vec<String>,
    /// Among which the best of each workload is looked for in hindsight; default: all others.
    #[serde(default)]
    pub(crate) best_of: Vec<String>,
    /// The same runs with other signals; default: once, with the usual ones.
    #[serde(default)]
    pub(crate) variants: Vec<Variant>,
    /// What is kept of each policy on each workload, beside [`ALWAYS`].
    #[serde(default)]
    pub(crate) metrics: Vec<String>,
}

/// How good signals are.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Variant {
    pub(crate) name: String,
    #[serde(default)]
    pub(crate) signals: Knobs,
}

/// A chart of an experiment.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Plot {
    /// Of its file.
    pub(crate) name: String,
    pub(crate) kind: Kind,
    pub(crate) experiment: String,
    /// For a chart of one workload.
    #[serde(default)]
    pub(crate) workload: String,
    /// What is in it, in this order; default: all.
    #[serde(default)]
    pub(crate) policies: Vec<String>,
    /// The policy that it is about.
    #[serde(default)]
    pub(crate) of: Option<String>,
    /// What is set in ratio.
    #[serde(default)]
    pub(crate) metric: Option<String>,
}

/// What a chart shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Kind {
    /// Ratios of mean values to the best policy's, workloads by policies.
    Ratios,
    /// Geometric means over workloads of one policy against each other one, with intervals.
    Against,
    /// Distribution of the time to the first token on a workload.
    Ttft,
    /// Hit rate over time on a workload.
    Hits,
    /// Goodput by the time to the first token that is asked for.
    Goodput,
}

/// What is always kept of each policy on each workload.
pub(crate) const ALWAYS: [Metric; 7] = [
    Metric::TtftMean,
    Metric::TtftP50,
    Metric::TtftP95,
    Metric::E2eMean,
    Metric::Goodput,
    Metric::HitRate,
    Metric::Imbalance,
];

/// An experiment under one kind of signals.
#[derive(Debug, Clone)]
pub(crate) struct Set {
    pub(crate) experiment: Experiment,
    /// The experiment's name, and the variant's if it has any.
    pub(crate) name: String,
    pub(crate) knobs: Knobs,
}

impl Plan {
    /// Reads a plan; `study` are the points of the study.
    ///
    /// # Errors
    /// The file is not there, not as it should be, or names what there is not.
    pub(crate) fn read(folder: &Path, study: &[String]) -> Result<Self> {
        let path = folder.join(FILE);
        let text = std::fs::read_to_string(&path)
            .with_context(|| format!("cannot read {}", path.display()))?;
        Self::parse(&text, study).with_context(|| path.display().to_string())
    }

    pub(super) fn parse(text: &str, study: &[String]) -> Result<Self> {
        let mut plan: Self = serde_yaml::from_str(text)?;
        plan.lists.insert(STUDY.trim_start_matches('$').to_owned(), study.to_vec());
        let lists = plan.lists.clone();
        for experiment in &mut plan.experiments {
            for names in [
                &mut experiment.workloads,
                &mut experiment.policies,
                &mut experiment.of,
                &mut experiment.best_of,
            ] {
                *names = expanded(names, &lists)?;
            }
            experiment.check().with_context(|| format!("experiment `{}`", experiment.name))?;
        }
        let mut names: Vec<&str> = plan.experiments.iter().map(|it| it.name.as_str()).collect();
        names.sort_unstable();
        ensure!(names.windows(2).all(|pair| pair[0] != pair[1]), "two experiments of one name");
        for plot in &mut plan.charts {
            plot.policies = expanded(&plot.policies, &lists)?;
            let named = |experiment: &&Experiment| experiment.name == plot.experiment;
            let of = plan.experiments.iter().find(named);
            let of = of.with_context(|| format!("chart `{}`: no such experiment", plot.name))?;
            let one = matches!(plot.kind, Kind::Ttft | Kind::Hits | Kind::Goodput);
            ensure!(
                !one || of.workloads.contains(&plot.workload),
                "chart `{}`: `{}` is no workload of its experiment",
                plot.name,
                plot.workload
            );
        }
        Ok(plan)
    }

    /// All experiments with all their variants.
    pub(crate) fn sets(&self) -> Vec<Set> {
        let mut sets = Vec::new();
        for experiment in &self.experiments {
            let set = |name: String, knobs| Set { experiment: experiment.clone(), name, knobs };
            if experiment.variants.is_empty() {
                sets.push(set(experiment.name.clone(), Knobs::default()));
            }
            for variant in &experiment.variants {
                let name = format!("{} / {}", experiment.name, variant.name);
                sets.push(set(name, variant.signals));
            }
        }
        sets
    }

    /// Names, with the lists among them opened.
    ///
    /// # Errors
    /// There is no list of a name.
    pub(crate) fn expand(&self, names: &[String]) -> Result<Vec<String>> {
        expanded(names, &self.lists)
    }

    /// A policy's name on the page.
    pub(crate) fn shown<'a>(&'a self, policy: &'a str) -> &'a str {
        self.names.get(policy).map_or(policy, String::as_str)
    }
}

impl Experiment {
    fn check(&self) -> Result<()> {
        for policy in self.of.iter().chain(&self.best_of) {
            ensure!(self.policies.contains(policy), "`{policy}` is none of its policies");
        }
        self.kept()?;
        self.seeds()?;
        Ok(())
    }

    /// What is kept of each policy on each workload.
    ///
    /// # Errors
    /// There is no metric of a name.
    pub(crate) fn kept(&self) -> Result<Vec<Metric>> {
        let mut kept = ALWAYS.to_vec();
        for name in &self.metrics {
            let metric = metric(name)?;
            if !kept.contains(&metric) {
                kept.push(metric);
            }
        }
        Ok(kept)
    }

    /// # Errors
    /// They are no list of seeds.
    pub(crate) fn seeds(&self) -> Result<Vec<u64>> {
        match crate::seeds(&self.seeds) {
            Ok(seeds) => Ok(seeds.0),
            Err(error) => bail!(error),
        }
    }
}

/// The metric of a name.
pub(crate) fn metric(name: &str) -> Result<Metric> {
    let found = Metric::ALL.into_iter().find(|metric| metric.name() == name);
    found.with_context(|| format!("there is no metric `{name}`"))
}

fn expanded(names: &[String], lists: &BTreeMap<String, Vec<String>>) -> Result<Vec<String>> {
    let mut all = Vec::new();
    for name in names {
        let opened = match name.strip_prefix('$') {
            Some(list) => {
                let list = lists.get(list).with_context(|| format!("there is no list `{name}`"))?;
                expanded(list, lists)?
            }
            None => vec![name.clone()],
        };
        for name in opened {
            if !all.contains(&name) {
                all.push(name);
            }
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAN: &str = "
lists: {ours: [llm-aware, bounded], theirs: [gaie]}
experiments:
- {name: grid, workloads: [$study, 'chat:96'], policies: [$ours, $theirs, gaie], seeds: 1..3, of: [llm-aware], metrics: [redirects]}
- name: signals
  workloads: ['chat:96']
  policies: [gaie]
  seeds: 1,4
  variants: [{name: fresh}, {name: old, signals: {metrics_age: 1}}]
charts: [{name: ratios, kind: ratios, experiment: grid}]
";

    #[test]
    fn lists_and_variants_are_opened() {
        let plan = Plan::parse(PLAN, &["conv:1.0".to_owned(), "chat:96".to_owned()]).unwrap();
        let sets = plan.sets();
        let names: Vec<&str> = sets.iter().map(|set| set.name.as_str()).collect();
        assert_eq!(names, ["grid", "signals / fresh", "signals / old"]);
        assert_eq!(sets[0].experiment.workloads, ["conv:1.0", "chat:96"]);
        assert_eq!(sets[0].experiment.policies, ["llm-aware", "bounded", "gaie"]);
        assert_eq!(sets[0].experiment.kept().unwrap().last(), Some(&Metric::Redirects));
        assert_eq!((sets[1].knobs, sets[2].knobs.metrics_age), (Knobs::default(), 1.0));
        assert_eq!(sets[2].experiment.seeds().unwrap(), [1, 4]);
    }

    #[test]
    fn what_a_plan_names_is_there() {
        let error = |from: &str, to: &str| {
            assert!(PLAN.contains(from), "{from}");
            format!("{:#}", Plan::parse(&PLAN.replace(from, to), &[]).unwrap_err())
        };
        assert_eq!(error("[$ours", "[$our"), "there is no list `$our`");
        assert_eq!(
            error("of: [llm-aware]", "of: [dynamo]"),
            "experiment `grid`: `dynamo` is none of its policies"
        );
        assert_eq!(
            error("[redirects]", "[moves]"),
            "experiment `grid`: there is no metric `moves`"
        );
        assert!(error("1..3", "1..").contains("is no list of seeds"));
        assert_eq!(
            error("experiment: grid", "experiment: grit"),
            "chart `ratios`: no such experiment"
        );
        assert!(error("kind: ratios", "kind: ttft").ends_with("is no workload of its experiment"));
        assert_eq!(error("name: signals", "name: grid"), "two experiments of one name");
    }
}
