//! The policy follows the configuration's file while the picker runs.

use envoy_types::pb::envoy::config::core::v3::{HeaderMap, HeaderValue};
use envoy_types::pb::envoy::service::ext_proc::v3 as ext_proc;
use ext_proc::external_processor_client::ExternalProcessorClient;
use ext_proc::processing_request::Request;
use serde_json::Value;

use crate::harness::picker::{Picker, endpoints};
use crate::harness::{run, within};

/// Sends a request of one conversation to the picker and returns its record.
async fn decision(picker: &Picker, id: &str) -> Value {
    let url = format!("http://127.0.0.1:{}", picker.grpc);
    let mut client = ExternalProcessorClient::connect(url).await.unwrap();
    let header = |key: &str, value: &str| HeaderValue {
        key: key.to_owned(),
        raw_value: value.as_bytes().to_vec(),
        ..HeaderValue::default()
    };
    let headers = vec![header("x-request-id", id), header("x-conversation-id", "one")];
    let headers = ext_proc::HttpHeaders {
        headers: Some(HeaderMap { headers }),
        end_of_stream: true,
        ..ext_proc::HttpHeaders::default()
    };
    let request = ext_proc::ProcessingRequest {
        request: Some(Request::RequestHeaders(headers)),
        ..ext_proc::ProcessingRequest::default()
    };
    let mut answers = client.process(tokio_stream::iter([request])).await.unwrap().into_inner();
    while within("the end", answers.message()).await.unwrap().is_some() {}
    picker.record(id).await
}

/// The picker's configuration with other lines at its end.
struct File {
    path: std::path::PathBuf,
    start: String,
}

impl File {
    fn of(picker: &Picker, last: &str) -> Self {
        let path = picker.folder().join("llm-ring.yaml");
        let text = std::fs::read_to_string(&path).unwrap();
        Self { start: text.strip_suffix(last).unwrap().to_owned(), path }
    }

    fn write(&self, last: &str) {
        std::fs::write(&self.path, format!("{}{last}", self.start)).unwrap();
    }
}

fn two() -> String {
    endpoints(
        [("a", "10.0.0.1:8000"), ("b", "10.0.0.2:8000")]
            .map(|(name, address)| (name, address.parse().unwrap())),
    )
}

/// Waits for a line about the configuration that has all of this in it.
async fn says(picker: &Picker, parts: &[&str]) {
    let said = |line: &str| parts.iter().all(|part| line.contains(part)).then_some(());
    picker.process.line(&format!("{parts:?}"), said).await;
}

#[test]
fn a_parameter_and_a_policy_change_without_a_restart() {
    run(async {
        let first = "policy: load-aware";
        let picker = Picker::start(first, &two()).await;
        let file = File::of(&picker, first);
        assert_eq!(decision(&picker, "first").await["policy"], "load-aware");

        file.write("policy: load-aware\npolicies: { load-aware: { beta: 0.25 } }");
        says(&picker, &["the policy has changed", "load-aware", r#"\"beta\":0.25"#]).await;

        file.write("policy: weighted\npolicies: { weighted: { profile: guide } }");
        says(&picker, &["the policy has changed", "weighted", "token-load-scorer"]).await;
        let decision = decision(&picker, "second").await;
        assert_eq!(decision["policy"], "weighted");
        let steps = decision["steps"].as_array().unwrap();
        assert!(steps.iter().any(|step| step["scores"][0]["name"] == "token-load"), "{steps:?}");
        picker.is_idle().await;
    });
}

#[test]
fn a_broken_file_changes_nothing_and_says_so() {
    run(async {
        let first = "policy: kvaware";
        let picker = Picker::start(first, &two()).await;
        let file = File::of(&picker, first);
        for (last, why) in [
            ("policy: load-awar", "did you mean `load-aware`?"),
            ("policy: load-aware\npolicies: { load-aware: { beta: -1 } }", "0 or more"),
            ("policies: { weighted: { scorers: [{ type: queue-scorr }] } }", "`queue-scorer`?"),
            ("policy: [", "llm-ring.yaml:"),
        ] {
            file.write(last);
            says(&picker, &["WARN", "the configuration in use stays", why]).await;
            assert_eq!(decision(&picker, why).await["policy"], "kv-aware", "after {last:?}");
        }
        std::fs::remove_file(&file.path).unwrap();
        says(&picker, &["the configuration in use stays", "cannot be read"]).await;
        // And what was wrong can be mended; what is no policy is left for the next start.
        file.write("policy: consistent\nring: { points: 7 }");
        says(&picker, &["WARN", "these changes need a restart", "ring"]).await;
        says(&picker, &["the policy has changed", "consistent"]).await;
        let decision = decision(&picker, "mended").await;
        assert_eq!(
            (&decision["policy"], &decision["ring_points"]),
            (&"consistent".into(), &100.into())
        );
    });
}

#[test]
fn a_hangup_reads_the_file_at_once_and_ends_nothing() {
    run(async {
        let first = "policy: bounded";
        let picker = Picker::start(first, &two()).await;
        picker.process.signal("HUP");
        says(&picker, &["read again: the policy is the same", "bounded"]).await;
        File::of(&picker, first).write("policy: random");
        picker.process.signal("HUP");
        says(&picker, &["the policy has changed", "random"]).await;
        assert_eq!(decision(&picker, "later").await["policy"], "random");
    });
}
