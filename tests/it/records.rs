//! Records of a running picker: what is in the file, what is not, and that the lab decides them again.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use serde_json::Value;

use crate::harness::client::chat;
use crate::harness::envoy::ORIGINAL_DST;
use crate::harness::picker::Picker;
use crate::harness::process::folder;
use crate::harness::{Stack, run};

/// A word of the prompts, which is nowhere else.
const SECRET: &str = "xylophone";

/// Reads the lines of a file of records.
fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    assert!(!text.contains(SECRET), "text of a prompt is in the records");
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Serves conversations of a few turns, some at the same time, until the picker has ended; returns the requests' ids.
async fn serve(config: &str) -> Option<Vec<String>> {
    let stack = Stack::start(config, 3, &[ORIGINAL_DST]).await?;
    let mut ids = Vec::new();
    for turn in 1..5 {
        let calls: Vec<_> = (0..8)
            .map(|conversation| {
                let text = format!("{SECRET} {conversation} ").repeat(40 * turn);
                let call = chat(&text).conversation(&format!("talk-{conversation}"));
                if conversation % 2 == 0 { call.answered("sse events=3") } else { call }
            })
            .collect();
        let mut answers = Vec::new();
        for call in &calls {
            ids.push(call.id.clone());
            answers.push(call.stream(stack.port()).await);
        }
        for answer in answers {
            assert_eq!(answer.finish().await.status, 200);
        }
    }
    stack.picker.is_idle().await;
    // A file is only whole when its picker has ended.
    stack.picker.process.signal("TERM");
    assert_eq!(stack.picker.process.end().await.code(), Some(0));
    Some(ids)
}

#[test]
fn each_request_is_a_line_without_its_prompt() {
    run(async {
        let path = folder("records").join("records.jsonl");
        let config = format!("records: {{ path: {} }}\npolicy: llm-aware\n", path.display());
        let Some(ids) = serve(&config).await else { return };
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "only the picker's user reads it");
        let lines = lines(&path);
        assert_eq!(lines[0]["start"]["format"], 1);
        assert_eq!(lines[0]["start"]["config"]["policy"], "llm-aware");
        assert!(lines[0]["start"]["config"].get("server").is_none());
        assert_eq!(lines[1]["pool"]["endpoints"].as_array().unwrap().len(), 3);
        let decisions: Vec<&Value> = lines[2..].iter().map(|line| &line["decision"]).collect();
        assert_eq!(decisions.len(), ids.len());
        let (all, mut told) = (ids.len(), 0);
        for id in ids {
            let decision = decisions.iter().find(|it| it["request_id"] == *id).unwrap();
            let (asked, outcome) = (&decision["asked"], &decision["outcome"]);
            assert!(asked["text_bytes"].as_u64().unwrap() > 300, "{decision}");
            assert_eq!(asked["max_tokens"], 8);
            let time = |name: &str| asked[name].as_u64().unwrap();
            let times = [time("at_ns"), time("first_token_ns"), time("end_ns")];
            assert!(times.is_sorted(), "{times:?}");
            told += usize::from(outcome["prompt_tokens"] == 11 && outcome["cached_tokens"] == 5);
            // Any policy can decide it again, whatever it looks at.
            let loads = decision["loads"].as_array().unwrap();
            assert!(loads.len() == 3 && loads.iter().all(|load| load["sight"].is_object()));
            assert!(decision["steps"].as_array().unwrap().is_empty());
        }
        assert_eq!(told, all / 2, "every other answer says what was cached");
    });
}

#[cfg(feature = "lab")]
#[test]
fn the_lab_decides_them_again() {
    use std::process::Command;

    use crate::harness::process::output;

    run(async {
        for policy in ["llm-aware", "marginal-cost", "round-robin"] {
            let path = folder("records").join("records.jsonl");
            let mut config = format!("records: {{ path: {} }}\npolicy: {policy}\n", path.display());
            if policy == "marginal-cost" {
                // Counts that are exact are decided on again as well.
                let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/tokens/tiny");
                config +=
                    &format!("tokenizers: {{ models: {{ test: {{ folder: {folder} }} }} }}\n");
            }
            let Some(ids) = serve(&config).await else { return };
            let replay = |arguments: &[&str]| -> Value {
                let mut command = Command::new(env!("CARGO_BIN_EXE_llm-ring-lab"));
                command.arg("replay").arg(&path).args(["--format", "json"]).args(arguments);
                let (code, out, err) = output(&mut command);
                assert_eq!(code, Some(0), "{err}");
                serde_json::from_str(&out).unwrap()
            };
            for mode in ["sequence", "alone"] {
                let same = replay(&["--mode", mode]);
                assert_eq!(same["decisions"], ids.len());
                assert_eq!(same["elsewhere"], 0, "{policy} {mode}: {same}");
                assert_eq!(same["recorded"]["skipped"], serde_json::json!({}));
                let other = if policy == "round-robin" { "llm-aware" } else { "round-robin" };
                let other = replay(&["--mode", mode, "--policy", other]);
                assert!(other["elsewhere"].as_u64().unwrap() > 4, "{policy} {mode}: {other}");
                assert_eq!(other["ttft_seconds"]["requests"], ids.len());
            }
        }
    });
}

#[test]
fn a_file_that_cannot_be_written_is_said_once_and_costs_no_request() {
    run(async {
        let path = folder("records").join("no-such-folder").join("records.jsonl");
        let config = format!("records: {{ path: {} }}\n", path.display());
        let Some(stack) = Stack::start(&config, 1, &[ORIGINAL_DST]).await else { return };
        for _ in 0..3 {
            assert_eq!(stack.answer(&chat("hello?")).await.status, 200);
        }
        stack.picker.reaches("llm_ring_records_lost_total", "", 3.0).await;
        is_said_once(&stack.picker);
    });
}

fn is_said_once(picker: &Picker) {
    let text = picker.process.text();
    let said = text.lines().filter(|line| line.contains("records cannot be written")).count();
    assert_eq!(said, 1);
}
