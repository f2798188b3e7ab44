//! The page: a text by hand, with the numbers put in. Between double braces stands what is wanted: a number in a
//! sentence, a table, a chart, another file.

use std::fmt::Write as _;

use anyhow::{Context as _, Result, bail, ensure};

use super::numbers::{HINDSIGHT, Number, Numbers, Of, Ratio};
use super::plan::{Experiment, Plan, metric};
use crate::metrics::{Better, Metric};
use crate::report::words::{bracketed, label, marked, plain, title, value};
use crate::stats::TIE;

/// The text's name in its folder.
pub(crate) const FILE: &str = "page.md";
const NOTICE: &str =
    "<!-- Made by `make experiments` from bench/lab/experiments/page.md: change that. -->\n\n";

/// What a page is made of.
#[derive(Debug)]
pub(crate) struct Page<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) numbers: &'a Numbers,
}

impl Page<'_> {
    /// Puts numbers into a text; `read` gives the files that it names.
    ///
    /// # Errors
    /// It asks for what there is not.
    pub(crate) fn render(
        &self,
        text: &str,
        read: &dyn Fn(&str) -> Result<String>,
    ) -> Result<String> {
        Ok(format!("{NOTICE}{}", self.filled(text, read)?))
    }

    fn filled(&self, text: &str, read: &dyn Fn(&str) -> Result<String>) -> Result<String> {
        let mut out = String::new();
        let mut rest = text;
        while let Some((before, after)) = rest.split_once("{{") {
            out.push_str(before);
            let (asked, after) =
                after.split_once("}}").with_context(|| format!("`{{{{{after}` has no end"))?;
            let answer = self.answer(asked, read).with_context(|| format!("{{{{{asked}}}}}"))?;
            out.push_str(&answer);
            rest = after;
        }
        out.push_str(rest);
        Ok(out)
    }

    fn answer(&self, asked: &str, read: &dyn Fn(&str) -> Result<String>) -> Result<String> {
        let groups: Vec<Vec<&str>> =
            asked.split('|').map(|group| group.split_whitespace().collect()).collect();
        let list = |at: usize| -> Result<Vec<String>> {
            let words = groups.get(at).into_iter().flatten().map(|word| (*word).to_owned());
            self.plan.expand(&words.collect::<Vec<_>>())
        };
        match groups[0][..] {
            ["include", file] => Ok(self.filled(&read(file)?, read)?.trim_end().to_owned()),
            ["chart", name, ..] => {
                let known = self.plan.charts.iter().any(|chart| chart.name == name);
                ensure!(known, "there is no chart `{name}`");
                Ok(format!("![{}](experiments/{name}.svg)", groups[0][2..].join(" ")))
            }
            ["count", set, what] => self.count(set, what),
            ["mean", set, workload, policy, name] => {
                let mean = self.of(set)?.number(workload, policy, name)?.mean();
                Ok(value(mean, metric(name)?.unit()))
            }
            ["times", set, workload, policy, rival, name] => {
                let of = self.of(set)?;
                let mean =
                    |policy| Ok::<f64, anyhow::Error>(of.number(workload, policy, name)?.mean());
                Ok(plain(mean(policy)? / mean(rival)?, 2))
            }
            ["ratio", set, policy, rival, name] => {
                Ok(interval(self.ratio(set, policy, rival, name)?.mean))
            }
            ["all", set, policy, rival, name] => {
                let (experiment, of) = (self.experiment(set)?, self.of(set)?);
                let (mean, points) = over_all(experiment, of, (policy, rival), metric(name)?)
                    .context("nothing to set in ratio")?;
                ensure!(points == experiment.workloads.len(), "of {points} workloads only");
                Ok(format!("{mean:.2}"))
            }
            ["against", set, policy, ref metrics @ ..] => {
                self.against(set, policy, metrics, &list(1)?)
            }
            ["table", set, name] => self.table(set, metric(name)?, (list(1)?, list(2)?)),
            ["policies", set, workload, ref metrics @ ..] => {
                self.policies(set, workload, metrics, list(1)?)
            }
            ["variants", set, name, workload] => {
                self.variants(set, metric(name)?, workload, list(1)?)
            }
            ["losses", set, policy, name] => self.losses(set, policy, metric(name)?),
            _ => bail!("not known"),
        }
    }

    fn of(&self, set: &str) -> Result<&Of> {
        self.numbers
            .0
            .get(set)
            .with_context(|| format!("no numbers of `{set}`: `make experiments` makes them"))
    }

    fn experiment(&self, name: &str) -> Result<&Experiment> {
        let found = self.plan.experiments.iter().find(|experiment| experiment.name == name);
        found.with_context(|| format!("no experiment `{name}`"))
    }

    fn ratio(&self, set: &str, policy: &str, rival: &str, metric: &str) -> Result<&Ratio> {
        let against = self.of(set)?.against.get(policy);
        let against = against.with_context(|| format!("`{policy}` is not set against others"))?;
        let metrics = against.get(rival).with_context(|| format!("no rival `{rival}`"))?;
        metrics.get(metric).with_context(|| format!("no ratio of `{metric}`"))
    }

    fn count(&self, set: &str, what: &str) -> Result<String> {
        let experiment = self.experiment(set)?;
        let (workloads, policies) = (experiment.workloads.len(), experiment.policies.len());
        let seeds = experiment.seeds()?.len();
        let count = match what {
            "workloads" => workloads,
            "policies" => policies,
            "seeds" => seeds,
            "runs" => workloads * policies * seeds * experiment.variants.len().max(1),
            _ => bail!("not known"),
        };
        Ok(count.to_string())
    }

    /// A line for each rival, and one for the best of all in hindsight.
    fn against(
        &self,
        set: &str,
        policy: &str,
        metrics: &[&str],
        rivals: &[String],
    ) -> Result<String> {
        let (experiment, of) = (self.experiment(set)?, self.of(set)?);
        let first = *metrics.first().context("no metric")?;
        let mut out = "| against |".to_owned();
        for (at, name) in metrics.iter().enumerate() {
            let _ = write!(out, " {} |", label(metric(name)?));
            if at == 0 {
                out.push_str(" wins/ties/losses | worst | all points |");
            }
        }
        let _ = write!(out, "\n|---|{}", "---|".repeat(metrics.len() + 3));
        let rivals = if rivals.is_empty() { &experiment.policies } else { rivals };
        let hindsight = HINDSIGHT.to_owned();
        for rival in rivals.iter().chain([&hindsight]).filter(|rival| *rival != policy) {
            let _ = write!(out, "\n| {} |", self.shown(rival));
            for (at, name) in metrics.iter().enumerate() {
                let ratio = self.ratio(set, policy, rival, name).ok();
                let _ = write!(
                    out,
                    " {} |",
                    ratio.map_or(NONE.to_owned(), |ratio| interval(ratio.mean))
                );
                if at == 0 {
                    let counts = ratio.map_or(NONE.to_owned(), |ratio| {
                        ratio.counts.map(|n| n.to_string()).join("/")
                    });
                    let worst = ratio.map_or(NONE.to_owned(), |ratio| {
                        format!("{} `{}`", plain(ratio.worst, 3), ratio.worst_at)
                    });
                    let all = over_all(experiment, of, (policy, rival), metric(first)?)
                        .map_or(NONE.to_owned(), |(mean, _)| format!("{mean:.2}"));
                    let _ = write!(out, " {counts} | {worst} | {all} |");
                }
            }
        }
        Ok(out)
    }

    /// A line for each workload, a column for each policy, and the best of a line is bold.
    fn table(
        &self,
        set: &str,
        metric: Metric,
        (workloads, policies): (Vec<String>, Vec<String>),
    ) -> Result<String> {
        let (experiment, of) = (self.experiment(set)?, self.of(set)?);
        let or = |names: Vec<String>, all: &[String]| {
            if names.is_empty() { all.to_vec() } else { names }
        };
        let workloads = or(workloads, &experiment.workloads);
        let policies = or(policies, &experiment.policies);
        let mut out = format!("| {} |", title(metric));
        for policy in &policies {
            let _ = write!(out, " {} |", self.shown(policy));
        }
        let _ = write!(out, "\n|---|{}", "---|".repeat(policies.len()));
        for workload in &workloads {
            let numbers: Vec<Option<f64>> = policies
                .iter()
                .map(|policy| Some(of.number(workload, policy, metric.name()).ok()?.mean()))
                .collect();
            ensure!(numbers.iter().any(Option::is_some), "nothing on `{workload}`");
            let _ = write!(out, "\n| `{workload}` | {} |", cells(&numbers, metric).join(" | "));
        }
        Ok(out)
    }

    /// A line for each policy on one workload, a column for each metric, and the best of a column is bold.
    fn policies(
        &self,
        set: &str,
        workload: &str,
        metrics: &[&str],
        policies: Vec<String>,
    ) -> Result<String> {
        let (experiment, of) = (self.experiment(set)?, self.of(set)?);
        let policies = if policies.is_empty() { experiment.policies.clone() } else { policies };
        let mut out = "| policy |".to_owned();
        let mut columns = Vec::new();
        for name in metrics {
            let metric = metric(name)?;
            let _ = write!(out, " {} |", title(metric));
            let numbers: Vec<Option<f64>> = policies
                .iter()
                .map(|policy| Some(of.number(workload, policy, name).ok()?.mean()))
                .collect();
            ensure!(numbers.iter().any(Option::is_some), "no `{name}` on `{workload}`");
            columns.push(cells(&numbers, metric));
        }
        let _ = write!(out, "\n|---|{}", "---|".repeat(metrics.len()));
        for (at, policy) in policies.iter().enumerate() {
            let row: Vec<&str> = columns.iter().map(|column| column[at].as_str()).collect();
            let _ = write!(out, "\n| {} | {} |", self.shown(policy), row.join(" | "));
        }
        Ok(out)
    }

    /// A line for each kind of signals, a column for each policy.
    fn variants(
        &self,
        name: &str,
        metric: Metric,
        workload: &str,
        policies: Vec<String>,
    ) -> Result<String> {
        let experiment = self.experiment(name)?;
        let policies = if policies.is_empty() { experiment.policies.clone() } else { policies };
        let mut out = format!("| `{workload}`: {} |", title(metric));
        for policy in &policies {
            let _ = write!(out, " {} |", self.shown(policy));
        }
        let _ = write!(out, "\n|---|{}", "---|".repeat(policies.len()));
        for variant in &experiment.variants {
            let of = self.of(&format!("{name} / {}", variant.name))?;
            let _ = write!(out, "\n| {} |", variant.name);
            for policy in &policies {
                let number = of.number(workload, policy, metric.name())?;
                let _ = write!(out, " {} |", value(number.mean(), metric.unit()));
            }
        }
        Ok(out)
    }

    /// Every workload on which a policy is worse than the best of the others, the worst first.
    fn losses(&self, set: &str, policy: &str, metric: Metric) -> Result<String> {
        let (experiment, of) = (self.experiment(set)?, self.of(set)?);
        let rivals =
            if experiment.best_of.is_empty() { &experiment.policies } else { &experiment.best_of };
        let mut losses = Vec::new();
        for workload in &experiment.workloads {
            let ours = of.number(workload, policy, metric.name())?;
            let best = rivals
                .iter()
                .filter(|rival| *rival != policy)
                .filter_map(|rival| Some((rival, of.number(workload, rival, metric.name()).ok()?)))
                .min_by(|a, b| turned(a.1, metric).total_cmp(&turned(b.1, metric)));
            let Some((rival, theirs)) = best else { continue };
            let ratio = turned(ours, metric) / turned(theirs, metric);
            if ratio > 1.0 + TIE {
                losses.push((ratio, workload, ours, rival, theirs));
            }
        }
        losses.sort_by(|a, b| b.0.total_cmp(&a.0));
        if losses.is_empty() {
            return Ok("None.".to_owned());
        }
        let e2e = Metric::E2eMean.name();
        let mut out = format!(
            "| workload | {}: {} | best | its | ratio | E2E ratio to the same |\n|---|---|---|---|---|---|",
            title(metric),
            self.shown(policy)
        );
        for (ratio, workload, ours, rival, theirs) in losses {
            let read = |number: Number| value(number.mean(), metric.unit());
            let whole =
                of.number(workload, policy, e2e)?.mean() / of.number(workload, rival, e2e)?.mean();
            let _ = write!(
                out,
                "\n| `{workload}` | {} | {} | {} | {} | {whole:.2} |",
                read(ours),
                self.shown(rival),
                read(theirs),
                plain(ratio, 3)
            );
        }
        Ok(out)
    }

    fn shown(&self, policy: &str) -> String {
        match self.plan.names.get(policy) {
            Some(name) => name.clone(),
            None if policy == HINDSIGHT => HINDSIGHT.to_owned(),
            None => format!("`{policy}`"),
        }
    }
}

const NONE: &str = "–";

fn interval([mean, lo, hi]: [f64; 3]) -> String {
    bracketed(&format!("{mean:.2}"), lo, hi, |end| format!("{end:.2}"))
}

/// A number turned so that less is better.
fn turned(number: Number, metric: Metric) -> f64 {
    if metric.better() == Better::More { 1.0 / number.mean() } else { number.mean() }
}

/// Values as text, the best of them bold; where all read the same, none is.
fn cells(numbers: &[Option<f64>], metric: Metric) -> Vec<String> {
    let read = |number: f64| value(number, metric.unit());
    let known = || numbers.iter().copied().flatten();
    let best = match metric.better() {
        Better::Less => known().reduce(f64::min),
        Better::More => known().reduce(f64::max),
        Better::Neither => None,
    };
    let best = best.map(read).filter(|best| known().any(|number| read(number) != *best));
    numbers
        .iter()
        .map(|number| match number {
            Some(number) => marked(&read(*number), Some(read(*number)) == best),
            None => NONE.to_owned(),
        })
        .collect()
}

/// The geometric mean over all workloads of the ratio of means, where both have one, and of how many that is: unlike the
/// ratios of pairs it also counts where clients drew other requests under each policy.
fn over_all(
    experiment: &Experiment,
    of: &Of,
    (policy, rival): (&str, &str),
    metric: Metric,
) -> Option<(f64, usize)> {
    let best_of =
        if experiment.best_of.is_empty() { &experiment.policies } else { &experiment.best_of };
    let number = |workload: &str, policy: &str| {
        Some(turned(of.number(workload, policy, metric.name()).ok()?, metric))
    };
    let theirs = |workload: &str| {
        if rival != HINDSIGHT {
            return number(workload, rival);
        }
        let others = best_of.iter().filter(|rival| *rival != policy);
        others.filter_map(|rival| number(workload, rival)).reduce(f64::min)
    };
    let logs: Vec<f64> = experiment
        .workloads
        .iter()
        .filter_map(|workload| Some((number(workload, policy)? / theirs(workload)?).ln()))
        .filter(|log| log.is_finite())
        .collect();
    Some((crate::metrics::mean(logs.iter().copied())?.exp(), logs.len()))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn plan() -> Plan {
        let text = "
lists: {some: [gaie]}
names: {llm-aware+events: ours}
experiments:
- {name: grid, workloads: ['chat:96', 'conv:1.0'], policies: [llm-aware+events, gaie, dynamo], seeds: 1..3, of: [llm-aware+events], best_of: [gaie, dynamo]}
- {name: signals, workloads: ['chat:96'], policies: [gaie], seeds: '1', variants: [{name: old, signals: {metrics_age: 1}}]}
charts: [{name: ratios, kind: ratios, experiment: grid}]
";
        Plan::parse(text, &[]).unwrap()
    }

    fn numbers() -> Numbers {
        let policy = |ttft: f64| {
            BTreeMap::from([
                ("ttft_mean".to_owned(), Number::Mean(ttft)),
                ("e2e_mean".to_owned(), Number::Mean(10.0 * ttft)),
                ("hit_rate".to_owned(), Number::Mean(0.5 / ttft)),
            ])
        };
        let workload = |ttfts: [f64; 3]| {
            let names = ["llm-aware+events", "gaie", "dynamo"].map(ToOwned::to_owned);
            names.into_iter().zip(ttfts.map(policy)).collect::<BTreeMap<_, _>>()
        };
        let ratio = Ratio {
            mean: [0.7123, 0.5, 1.0],
            counts: [1, 1, 0],
            worst: 1.0,
            worst_at: "conv:1.0".to_owned(),
        };
        let ratios = BTreeMap::from([("ttft_mean".to_owned(), ratio)]);
        let rivals = ["gaie", HINDSIGHT].map(|name| (name.to_owned(), ratios.clone()));
        let grid = Of {
            seeds: 3,
            workloads: BTreeMap::from([
                ("chat:96".to_owned(), workload([1.0, 2.0, 4.0])),
                ("conv:1.0".to_owned(), workload([3.0, 3.0, 1.5])),
            ]),
            against: BTreeMap::from([("llm-aware+events".to_owned(), rivals.into())]),
        };
        Numbers(BTreeMap::from([
            ("grid".to_owned(), grid.clone()),
            ("signals / old".to_owned(), grid),
        ]))
    }

    fn render(text: &str) -> Result<String> {
        let (plan, numbers) = (plan(), numbers());
        let read = |file: &str| {
            ensure!(file == "live.md", "no {file}");
            Ok("It has {{count grid workloads}} workloads.\n".to_owned())
        };
        let page = Page { plan: &plan, numbers: &numbers }.render(text, &read)?;
        Ok(page.strip_prefix(NOTICE).unwrap().to_owned())
    }

    #[test]
    fn numbers_stand_in_sentences() {
        let text = "{{count grid runs}} runs; {{mean grid chat:96 gaie ttft_mean}} s, {{mean grid chat:96 gaie hit_rate}} %, \
                    {{times grid chat:96 gaie dynamo ttft_mean}} times, {{ratio grid llm-aware+events gaie ttft_mean}}, \
                    {{all grid llm-aware+events gaie ttft_mean}}.";
        assert_eq!(
            render(text).unwrap(),
            "18 runs; 2.00 s, 25.0 %, 0.50 times, 0.71 [0.50, 1.00], 0.71."
        );
        assert_eq!(render("a {{include live.md}} b").unwrap(), "a It has 2 workloads. b");
        assert_eq!(
            render("{{chart ratios All of them}}").unwrap(),
            "![All of them](experiments/ratios.svg)"
        );
    }

    #[test]
    fn tables_mark_the_best() {
        assert_eq!(
            render("{{table grid ttft_mean}}").unwrap(),
            "| TTFT mean, s | ours | `gaie` | `dynamo` |\n|---|---|---|---|\n| `chat:96` | **1.00** | 2.00 | 4.00 |\n\
             | `conv:1.0` | 3.00 | 3.00 | **1.50** |"
        );
        assert_eq!(
            render("{{table grid hit_rate | chat:96 | $some dynamo}}").unwrap(),
            "| hits, % | `gaie` | `dynamo` |\n|---|---|---|\n| `chat:96` | **25.0** | 12.5 |"
        );
        assert_eq!(
            render("{{policies grid chat:96 ttft_mean hit_rate | gaie llm-aware+events}}").unwrap(),
            "| policy | TTFT mean, s | hits, % |\n|---|---|---|\n| `gaie` | 2.00 | 25.0 |\n| ours | **1.00** | **50.0** |"
        );
        assert_eq!(
            render("{{variants signals ttft_mean chat:96}}").unwrap(),
            "| `chat:96`: TTFT mean, s | `gaie` |\n|---|---|\n| old | 2.00 |"
        );
    }

    #[test]
    fn a_policy_is_set_against_the_others_and_where_it_loses_is_told() {
        assert_eq!(
            render("{{against grid llm-aware+events ttft_mean e2e_mean | gaie}}").unwrap(),
            "| against | TTFT mean | wins/ties/losses | worst | all points | E2E mean |\n|---|---|---|---|---|---|\n\
             | `gaie` | 0.71 [0.50, 1.00] | 1/1/0 | 1.00 `conv:1.0` | 0.71 | – |\n\
             | best in hindsight | 0.71 [0.50, 1.00] | 1/1/0 | 1.00 `conv:1.0` | 1.00 | – |"
        );
        assert_eq!(
            render("{{losses grid llm-aware+events ttft_mean}}").unwrap(),
            "| workload | TTFT mean, s: ours | best | its | ratio | E2E ratio to the same |\n|---|---|---|---|---|---|\n\
             | `conv:1.0` | 3.00 | `dynamo` | 1.50 | 2.00 | 2.00 |"
        );
        assert_eq!(
            render("{{losses signals gaie ttft_mean}}").unwrap_err().root_cause().to_string(),
            "no numbers of `signals`: `make experiments` makes them"
        );
    }

    #[test]
    fn what_is_not_there_is_an_error_that_names_it() {
        let error = |text: &str| format!("{:#}", render(text).unwrap_err());
        assert_eq!(
            error("{{mean grid chat:97 gaie ttft_mean}}"),
            "{{mean grid chat:97 gaie ttft_mean}}: no workload `chat:97`"
        );
        assert_eq!(
            error("{{mean grid chat:96 gaie ttft}}"),
            "{{mean grid chat:96 gaie ttft}}: no `ttft` of `gaie` on `chat:96`"
        );
        assert_eq!(error("{{chart nothing}}"), "{{chart nothing}}: there is no chart `nothing`");
        assert_eq!(error("{{sum grid}}"), "{{sum grid}}: not known");
        assert_eq!(error("{{mean grid"), "`{{mean grid` has no end");
        assert_eq!(error("{{include other.md}}"), "{{include other.md}}: no other.md");
    }
}
