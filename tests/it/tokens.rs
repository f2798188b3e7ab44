//! Requests whose tokens the picker knows before it decides, and those whose tokens it cannot know.

use std::collections::BTreeMap;
use std::time::Duration;

use llm_ring::tokens::{Api, Dialect, LocalTokenizers, ModelOptions};
use serde_json::{Value, json};

use crate::harness::client::{Call, chat, chat_body, noise, post};
use crate::harness::envoy::ORIGINAL_DST;
use crate::harness::process::folder;
use crate::harness::upstream::hash;
use crate::harness::{Stack, run};

/// The folder of a small tokenizer, of the model `test` that clients of these tests ask for.
const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/tokens/tiny");

fn config() -> String {
    // Unoptimised tokenizers are slow.
    format!(
        "tokenizers: {{ local_timeout_ms: 60000, models: {{ test: {{ folder: {FOLDER} }} }} }}\n"
    )
}

/// Counts the tokens of a chat as the picker should.
fn count(body: &str) -> usize {
    let options = ModelOptions {
        folder: FOLDER.into(),
        dialect: Dialect::Vllm,
        chat_template: None,
        content_format: None,
    };
    let models = BTreeMap::from([("test".to_owned(), options)]);
    let tokenizers = LocalTokenizers::load(&models, 0, 1 << 24).unwrap();
    tokenizers
        .tokens("test", Api::Chat, body.as_bytes(), "2026-01-01T00:00:00Z".parse().unwrap())
        .unwrap()
        .len()
}

fn of(body: &str) -> Call {
    post("/v1/chat/completions", body.to_owned()).header("content-type", "application/json")
}

/// Sends a request, which must be served whatever is known of it; returns its record.
async fn served(stack: &Stack, call: &Call) -> Value {
    let answer = stack.answer(call).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    stack.picker.record(&call.id).await
}

#[test]
fn the_decision_is_made_on_the_exact_count() {
    run(async {
        let path = folder("tokens").join("records.jsonl");
        let config = format!("{}records: {{ path: {} }}\n", config(), path.display());
        let Some(stack) = Stack::start(&config, 2, &[ORIGINAL_DST]).await else { return };
        // One chunk, several chunks, and more than one chunk of ours.
        let texts = ["Hello there, 简短 🙂".to_owned(), noise(30_000), noise(200_000)];
        for text in &texts {
            let body = chat_body(text);
            let call = chat(text);
            let record = served(&stack, &call).await;
            assert_eq!(record["prompt_tokens"], count(&body), "{} bytes", text.len());
            assert_eq!(record["tokens_per_byte"].as_f64().unwrap_or(0.0), 0.0, "{record}");
            let (_, seen) = stack.served(&call.id);
            assert_eq!(seen.hash, hash(body.as_bytes()), "the body goes on as it came");
        }
        // A next turn counts as itself, whatever the engine said of the last one.
        let turns = |last: &str| {
            json!({ "model": "test", "messages": [
                { "role": "user", "content": "One?" },
                { "role": "assistant", "content": "Two." },
                { "role": "user", "content": last },
            ] })
            .to_string()
        };
        for last in ["Three?", "Three, and four?"] {
            let body = turns(last);
            let record = served(&stack, &of(&body).conversation("turns")).await;
            assert_eq!(record["prompt_tokens"], count(&body));
        }
        let ids = json!({ "model": "other", "prompt": [5, 6, 7, 8] }).to_string();
        let record = served(&stack, &post("/v1/completions", ids)).await;
        assert_eq!(record["prompt_tokens"], 4);
        stack.picker.reaches("llm_ring_tokenized_total", "local", 5.0).await;
        stack.picker.reaches("llm_ring_tokenized_total", "given", 1.0).await;
        stack.picker.reaches("llm_ring_token_failures_total", "", 0.0).await;
        stack.picker.is_idle().await;
        stack.picker.process.signal("TERM");
        assert_eq!(stack.picker.process.end().await.code(), Some(0));
        let text = std::fs::read_to_string(&path).unwrap();
        let exact = format!("\"exact_tokens\":{}", count(&chat_body(&texts[0])));
        assert!(text.contains(&exact), "no {exact} in {text}");
        assert!(!text.contains("Hello there"));
    });
}

#[test]
fn what_cannot_be_told_is_estimated_and_served() {
    run(async {
        let Some(stack) = Stack::start(&config(), 2, &[ORIGINAL_DST]).await else { return };
        let user = |content: Value| json!([{ "role": "user", "content": content }]);
        let text = user(json!("hello there, you who keep the bridge"));
        let image = json!([{ "type": "image_url", "image_url": { "url": "data:," } }]);
        let cases = [
            ("no-tokenizer", json!({ "model": "unknown", "messages": text })),
            ("no-tokenizer", json!({ "messages": text })),
            ("media", json!({ "model": "test", "messages": user(image) })),
            ("malformed", json!({ "model": "test", "messages": "none" })),
            ("unsupported", json!({ "model": "test", "messages": text, "chat_template": "x" })),
        ];
        for (i, (reason, body)) in cases.iter().enumerate() {
            let record = served(&stack, &of(&body.to_string())).await;
            assert!(record["tokens_per_byte"].as_f64() > Some(0.0), "{reason}: {record}");
            let label = format!("reason=\"{reason}\"");
            let times = cases[..=i].iter().filter(|(it, _)| it == reason).count();
            #[expect(clippy::cast_precision_loss, reason = "a few")]
            stack.picker.reaches("llm_ring_token_failures_total", &label, times as f64).await;
        }
        // What is no JSON is not asked about.
        for body in ["{\"model\":\"test\",\"messages\":[}", "no json", ""] {
            served(&stack, &of(body)).await;
        }
        stack.picker.reaches("llm_ring_token_failures_total", "", 5.0).await;
        stack.picker.reaches("llm_ring_tokenized_total", "", 0.0).await;
        // None of these is a fault of ours.
        assert!(!stack.picker.process.text().contains("are estimated"));
        stack.picker.is_idle().await;
    });
}

#[test]
fn engines_that_do_not_tell_cost_no_request() {
    run(async {
        let config = "tokenizers: { engine: vllm-tokenize, engine_timeout_ms: 200 }\n";
        let Some(stack) = Stack::start(config, 2, &[ORIGINAL_DST]).await else { return };
        for _ in 0..3 {
            // The stubs answer with a completion, which is no list of tokens.
            let record = served(&stack, &chat("hello?")).await;
            assert!(record["tokens_per_byte"].as_f64() > Some(0.0), "{record}");
        }
        stack.picker.reaches("llm_ring_token_failures_total", "step=\"engine\"", 3.0).await;
        let text = stack.picker.process.text();
        assert_eq!(text.lines().filter(|line| line.contains("are estimated")).count(), 1);
        stack.picker.is_idle().await;
    });
}

#[test]
fn a_client_that_hangs_up_meanwhile_leaves_nothing_behind() {
    run(async {
        // A template that takes its time.
        let folder = folder("tokens");
        let template = folder.join("slow.jinja");
        std::fs::write(
            &template,
            "{% for a in range(2000) %}{% for b in range(1000) %}{% endfor %}{% endfor %}x",
        )
        .unwrap();
        let config = format!(
            "tokenizers: {{ local_timeout_ms: 60000, models: {{ test: {{ folder: {FOLDER}, chat_template: {} }} }} }}\n",
            template.display()
        );
        let Some(stack) = Stack::start(&config, 1, &[ORIGINAL_DST]).await else { return };
        let call = chat("hello?");
        let hung = tokio::time::timeout(Duration::from_millis(100), stack.answer(&call)).await;
        assert!(hung.is_err(), "it was answered before its tokens can be known");
        stack.picker.is_idle().await;
    });
}
