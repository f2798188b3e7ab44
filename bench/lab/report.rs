//! Tables, charts and comparisons of finished runs, into an output folder; the same runs give the same bytes.

mod cells;
mod comparison;
mod summary;
pub(crate) mod words;

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::Result;

pub(crate) use cells::{Cells, Lines};
pub(crate) use comparison::{Comparison, RATIOS, compare, in_hindsight};
pub(crate) use words::plain;

use crate::metrics::Measured;
use crate::progress::{json, write_whole};

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

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs;

    use serde_json::Value;

    use super::*;
    use crate::metrics::Metric;
    use crate::metrics::made_up;
    use crate::progress::folder::Folder;
    use crate::stats;

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
        let charts =
            ["goodput-chat-96", "hits-chat-96", "imbalance-chat-96", "ratios", "ttft-chat-96"];
        let charts: Vec<String> = charts
            .iter()
            .flat_map(|chart| ["png", "svg"].map(|kind| format!("charts/{chart}.{kind}")))
            .collect();
        assert_eq!(names[..10], charts);
        assert_eq!(
            names[10..],
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
            "in_flight",
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
