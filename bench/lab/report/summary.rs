//! `summary.md`.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use super::cells::Standing;
use super::words::{bracketed, marked, plain, title, value};
use super::{Cells, Study};
use crate::chart::short;
use crate::metrics::{Better, Metric, Unit};
use crate::progress::file_name;
use crate::stats::{self, Interval, PRIMARIES, Point, Versus};

impl Cells<'_> {
    pub(super) fn summary(&self, study: &Study<'_>) -> String {
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
        let _ = writeln!(
            out,
            "![Imbalance](charts/imbalance-{file}.png)\n![Goodput](charts/goodput-{file}.png)\n"
        );
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
- Imbalance is the busiest endpoint's computed seconds over their mean; in flight is the mean number of requests on the busiest over that on the least busy.
- Avoidable are prompt tokens that another endpoint had in its cache and the chosen one had not.
- Runs are set side by side only if they are of the same requests and their error rates are within 1 point.
";
