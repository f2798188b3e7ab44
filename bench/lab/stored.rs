//! `report`: tables, charts and comparisons of results that are there, from one folder or several.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use clap::{Args, ValueEnum};
use serde_json::Value;

use crate::metrics::Measured;
use crate::progress::{self, Found};
use crate::report::{self, Study};

#[derive(Debug, Args)]
pub(crate) struct Report {
    /// Folders that `run` or `compare` wrote results into
    #[arg(value_name = "FOLDER", required = true, num_args = 1..)]
    folders: Vec<PathBuf>,
    /// Where the report goes; default: into the folder itself, if it is one
    #[arg(long, short, value_name = "FOLDER")]
    out: Option<PathBuf>,
    /// The policy that is set against each of the others
    #[arg(long, value_name = "POLICY", visible_alias = "of")]
    against: Option<String>,
    /// Print the report, and not only where it is: `summary.md`, `compare.json`, or the comparison of --against
    #[arg(long, value_name = "FORMAT", value_enum)]
    format: Option<Format>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    Md,
    Json,
    Text,
}

impl Report {
    /// Writes the report, and prints it or says where it is.
    ///
    /// # Errors
    /// The folders hold results that do not belong together, or none that can be compared.
    pub(crate) fn run(&self) -> Result<()> {
        let alone = (self.folders.len() == 1).then(|| &self.folders[0]);
        let Some(out) = self.out.as_ref().or(alone) else {
            bail!("a report of several folders needs one of its own: name it with --out");
        };
        ensure!(
            self.format != Some(Format::Text) || self.against.is_some(),
            "name the policy that the text is about with --against"
        );
        let mut found = Vec::new();
        for folder in &self.folders {
            found.extend(progress::all(folder, Measured::of)?);
        }
        let merged = merge(found)?;
        let study = merged.study(self.against.as_deref());
        report::write(out, &study)?;
        let comparison =
            self.against.as_ref().map(|policy| report::compare(&study, policy)).transpose()?;
        match self.format {
            None => println!("{}", out.join("summary.md").display()),
            Some(Format::Md) => print!("{}", read(&out.join("summary.md"))?),
            Some(Format::Json) => print!("{}", read(&out.join("compare.json"))?),
            Some(Format::Text) => comparison.iter().for_each(|comparison| print!("{comparison}")),
        }
        if let Some((rival, refusal)) =
            comparison.as_ref().and_then(report::Comparison::incomparable)
        {
            bail!(
                "{} and {rival} cannot be compared on any workload: {refusal}; what to do: {}",
                self.against.as_deref().unwrap_or_default(),
                refusal.advice()
            );
        }
        Ok(())
    }
}

/// Results of several folders.
#[derive(Debug)]
struct Merged {
    runs: Vec<Measured>,
    closed: BTreeSet<String>,
    /// Of the programs, and their command lines.
    version: String,
    command: String,
}

impl Merged {
    fn study<'a>(&'a self, policy: Option<&'a str>) -> Study<'a> {
        Study {
            runs: &self.runs,
            closed: &self.closed,
            version: &self.version,
            command: &self.command,
            policy,
        }
    }
}

/// Puts results together, if they belong together: one name stands for one workload under one kind of signals, and a run
/// that is there twice is the same both times.
fn merge(found: Vec<Found<Measured>>) -> Result<Merged> {
    let (mut versions, mut commands) = (BTreeSet::new(), BTreeSet::new());
    let mut parameters: BTreeMap<String, (Value, PathBuf)> = BTreeMap::new();
    let mut known: BTreeMap<(String, String, u64), (usize, PathBuf)> = BTreeMap::new();
    let (mut runs, mut closed) = (Vec::<Measured>::new(), BTreeSet::new());
    for Found { key, folder, version, command, kept } in found {
        match parameters.get(&key.workload) {
            None => {
                parameters.insert(key.workload.clone(), (key.parameters.clone(), folder.clone()));
            }
            Some((first, place)) => same(first, &key.parameters).with_context(|| {
                format!(
                    "{} in {} and in {} do not belong together; report them apart, or run one of them again like \
                     the other",
                    key.workload,
                    place.display(),
                    folder.display()
                )
            })?,
        }
        // Where a record does not say, nobody promised that the times are the workload's own.
        if key.parameters["arrivals"] != "open" {
            closed.insert(key.workload.clone());
        }
        versions.insert(version);
        commands.insert(command);
        let name = (key.workload, key.policy, key.seed);
        match known.get(&name) {
            None => {
                known.insert(name, (runs.len(), folder));
                runs.push(kept);
            }
            Some((at, _)) if runs[*at] == kept => (),
            Some((_, place)) => bail!(
                "{} under {}, seed {}, is in {} and in {}, and went differently: different programs made them; \
                 report the folders apart, or remove one of the two",
                name.0,
                name.1,
                name.2,
                place.display(),
                folder.display()
            ),
        }
    }
    let joined = |words: BTreeSet<String>, by: &str| words.into_iter().collect::<Vec<_>>().join(by);
    Ok(Merged {
        runs: in_order(runs),
        closed,
        version: joined(versions, ", "),
        command: joined(commands, "\n"),
    })
}

/// Of several folders, workloads and policies come as if it were one.
fn in_order(mut runs: Vec<Measured>) -> Vec<Measured> {
    runs.sort_by(|a, b| (&a.workload, &a.policy, a.seed).cmp(&(&b.workload, &b.policy, b.seed)));
    runs
}

fn same(first: &Value, other: &Value) -> Result<()> {
    ensure!(first["workload"] == other["workload"], "one name, two workloads");
    ensure!(first["signals"] == other["signals"], "one workload, two kinds of signals");
    ensure!(first["live"] == other["live"], "one workload, on different engines");
    Ok(())
}

fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::metrics::{Metric, made_up};
    use crate::progress::folder::Folder;
    use crate::progress::{Key, Store};

    fn parameters() -> Value {
        json!({"workload": "of a test", "signals": {"pickers": 1}, "arrivals": "open"})
    }

    /// Results of two seeds of some policies.
    fn results(folder: &Folder, policies: &[&str], parameters: &Value) {
        let store = Store::open(folder.path(), "0.1.0", "llm-ring-lab run").unwrap();
        for policy in policies {
            for seed in 1..=2 {
                let skill = if *policy == "bounded" { 0.5 } else { 0.9 };
                let key = Key {
                    workload: "chat:96".to_owned(),
                    policy: (*policy).to_owned(),
                    seed,
                    parameters: parameters.clone(),
                };
                store.put(&key, &made_up::run("chat:96", policy, seed, skill)).unwrap();
            }
        }
    }

    fn merged(folders: &[&Folder]) -> Result<Merged> {
        let all = folders.iter().map(|folder| progress::all(folder.path(), Measured::of).unwrap());
        merge(all.flatten().collect())
    }

    fn report(folders: &[&Folder], against: Option<&str>) -> Report {
        Report {
            folders: folders.iter().map(|folder| folder.path().to_owned()).collect(),
            out: None,
            against: against.map(ToOwned::to_owned),
            format: None,
        }
    }

    #[test]
    fn a_report_is_made_again_without_a_run() {
        let folder = Folder::new("stored");
        results(&folder, &["bounded", "llm-aware"], &parameters());
        report(&[&folder], Some("llm-aware")).run().unwrap();
        let summary = read(&folder.path().join("summary.md")).unwrap();
        assert!(
            summary.contains("Workloads: 1, policies: 2, runs: 4; llm-ring-lab 0.1.0."),
            "{summary}"
        );
        let comparison = read(&folder.path().join("comparison.txt")).unwrap();
        assert!(
            comparison.starts_with("llm-aware against 1 others on 1 workloads"),
            "{comparison}"
        );
        assert!(folder.path().join("charts/goodput-chat-96.svg").exists());
    }

    #[test]
    fn folders_are_put_together() {
        let (one, two) = (Folder::new("one"), Folder::new("two"));
        results(&one, &["llm-aware", "bounded"], &parameters());
        results(&two, &["bounded", "consistent"], &parameters());
        let merged = merged(&[&two, &one]).unwrap();
        let policies: Vec<&str> = merged.runs.iter().map(|run| run.policy.as_str()).collect();
        let each_once =
            ["bounded", "bounded", "consistent", "consistent", "llm-aware", "llm-aware"];
        assert_eq!(policies, each_once);
        assert!(merged.closed.is_empty());
        let error = report(&[&one, &two], None).run().unwrap_err().to_string();
        assert!(error.ends_with("name it with --out"), "{error}");
    }

    #[test]
    fn what_does_not_belong_together_is_refused_with_advice() {
        let (one, two) = (Folder::new("here"), Folder::new("there"));
        results(&one, &["bounded"], &parameters());
        for (key, value, expected) in [
            ("workload", json!("another"), "one name, two workloads"),
            ("signals", json!({"pickers": 4}), "one workload, two kinds of signals"),
            ("live", json!({"slots": 4}), "one workload, on different engines"),
        ] {
            let mut other = parameters();
            other[key] = value;
            results(&two, &["llm-aware"], &other);
            let error = format!("{:#}", merged(&[&one, &two]).unwrap_err());
            assert!(error.ends_with(expected) && error.contains("report them apart"), "{error}");
        }
    }

    #[test]
    fn a_run_that_went_differently_is_not_there_twice() {
        let (one, two) = (Folder::new("first"), Folder::new("second"));
        results(&one, &["bounded"], &parameters());
        results(&two, &["bounded"], &parameters());
        assert_eq!(merged(&[&one, &two]).unwrap().runs.len(), 2);
        let found = |folder: &Folder| progress::all(folder.path(), Measured::of).unwrap();
        let mut changed = found(&two);
        changed[1].kept.values.insert(Metric::TtftMean, 0.001);
        let error =
            merge(found(&one).into_iter().chain(changed).collect()).unwrap_err().to_string();
        assert!(
            error.contains("seed 2, is in ") && error.contains("remove one of the two"),
            "{error}"
        );
    }

    #[test]
    fn what_cannot_be_compared_at_all_is_an_error_with_advice() {
        let folder = Folder::new("apart");
        results(&folder, &["bounded"], &parameters());
        let store = Store::open(folder.path(), "0.1.0", "llm-ring-lab run").unwrap();
        let key = Key {
            workload: "chat:96".to_owned(),
            policy: "llm-aware".to_owned(),
            seed: 1,
            parameters: parameters(),
        };
        let mut run = made_up::run("chat:96", "llm-aware", 1, 0.5);
        for row in run.rows.iter_mut().take(200) {
            row.e2e = None;
        }
        store.put(&key, &run).unwrap();
        let error = report(&[&folder], Some("bounded")).run().unwrap_err().to_string();
        assert!(
            error.starts_with("bounded and llm-aware cannot be compared on any workload: seed 1: "),
            "{error}"
        );
        assert!(error.contains("lower the load"), "{error}");
    }

    #[test]
    fn a_text_is_about_a_policy() {
        let folder = Folder::new("text");
        results(&folder, &["bounded"], &parameters());
        let text = Report { format: Some(Format::Text), ..report(&[&folder], None) };
        assert!(text.run().unwrap_err().to_string().ends_with("with --against"));
    }
}
