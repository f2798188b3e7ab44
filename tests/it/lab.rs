//! `llm-ring-lab live`: a small workload on real engines, and what it leaves behind.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::harness::picker::BINARY;
use crate::harness::process::{folder, output};
use crate::harness::tools::Tools;

/// Chats of a few turns, which last for some seconds.
const WORKLOAD: &str = "\
about: Of a test.
engine: tiny
endpoints: 2
slo: {ttft: 5, itl: 1}
traffic: {kind: chat, users: 5, conversations_per_user: 1, ramp: 1, opening: 300, turns: 4, input: 60, output: 8,
  think: {mean: 0.6, most: 1.2}}
";
const WORDS: &str = "live -w little -p llm-aware round-robin -s 1 --after 20s --scale-at 1500ms:+1";

fn lab(folder: &Path, words: &str) -> (Option<i32>, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_llm-ring-lab"));
    command.current_dir(env!("CARGO_MANIFEST_DIR")).args(words.split(' '));
    command.args(["--picker", BINARY, "--workloads"]).arg(folder);
    output(command.arg("--out").arg(folder.join("out")))
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// A column of a run's requests, as numbers; an empty cell is -1.
fn column(csv: &str, name: &str) -> Vec<f64> {
    let mut lines = csv.lines();
    let at = lines.next().unwrap().split(',').position(|it| it == name).unwrap();
    let cell = |line: &str| line.split(',').nth(at).unwrap().parse().unwrap_or(-1.0);
    lines.map(cell).collect()
}

#[test]
fn a_workload_is_played_on_real_engines_once() {
    if Tools::get().is_none() {
        return;
    }
    let folder = folder("lab");
    std::fs::write(folder.join("little.yaml"), WORKLOAD).unwrap();
    let (code, said, errors) = lab(&folder, WORDS);
    assert_eq!(code, Some(0), "{errors}");
    assert!(said.contains("llm-aware against 1 others on 1 workloads"), "{said}");
    assert!(errors.contains("run 2 of 2: little round-robin 1"), "{errors}");
    let out = folder.join("out");
    assert!(!out.join("logs").exists(), "the logs of what went well");
    assert!(read(&out.join("summary.md")).contains("of real engines"));

    for policy in ["llm-aware", "round-robin"] {
        let run = out.join("runs/little").join(policy).join("seed-1");
        let record: Value = serde_json::from_str(&read(&run.join("run.json"))).unwrap();
        let csv = read(&run.join("requests.csv"));
        let of = |name: &str| column(&csv, name);
        assert_eq!(of("id").len(), 20, "{csv}");
        assert!(
            of("ttft").iter().zip(of("e2e")).all(|(ttft, e2e)| 0.0 < *ttft && *ttft <= e2e),
            "{csv}"
        );
        assert!(of("output").iter().all(|tokens| *tokens == 8.0), "{csv}");
        // The third engine is there after a second and a half, and not before.
        let third: Vec<f64> = of("sent")
            .into_iter()
            .zip(of("endpoint"))
            .filter(|it| it.1 == 2.0)
            .map(|it| it.0)
            .collect();
        assert!(third.iter().all(|sent| *sent > 1.5), "{csv}");
        assert!(policy != "round-robin" || !third.is_empty(), "{csv}");
        assert_eq!(record["scaled_at"], 1.5);
        assert_eq!(record["endpoints"].as_array().unwrap().len(), 3);
        assert_eq!(record["metrics"]["failed"], 0.0);
        for metric in ["moved_after_scale", "hit_after_scale", "new_share"] {
            assert!(record["metrics"][metric].is_number(), "{metric}: {record}");
        }
        assert!(record["metrics"]["avoidable"].is_null(), "nobody can know: {record}");
        // By the engines' own count: a turn that came to where the last one was finds it there.
        let hits = record["metrics"]["followup_hit_rate"].as_f64().unwrap();
        assert!(policy == "round-robin" || hits > 0.6, "{policy}: {hits}");
    }

    let (code, _, errors) = lab(&folder, WORDS);
    assert_eq!(code, Some(0), "{errors}");
    assert!(errors.contains("2 runs, 2 of them from before"), "{errors}");
}

#[test]
fn what_cannot_be_played_says_what_can() {
    let folder = folder("lab-errors");
    std::fs::write(folder.join("little.yaml"), WORKLOAD).unwrap();
    let (code, _, errors) = lab(&folder, "live -w little -p gaie");
    assert_eq!(code, Some(1));
    assert!(
        errors.contains("`gaie` cannot be played live") && errors.contains("llm-aware"),
        "{errors}"
    );
    let (code, _, errors) = lab(&folder, "live -w little -p llm-aware --scale-at 20:+1");
    assert_eq!(code, Some(2));
    assert!(errors.contains("`20s:+1` (one more)"), "{errors}");
}
