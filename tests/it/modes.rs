//! Gateways that do not show the picker all of a request, or nothing of its answer.

use std::time::Duration;

use serde_json::json;
use tokio::sync::OnceCell;

use crate::harness::client::{Answer, Call, End, Http, chat, get, noise, post};
use crate::harness::envoy::{DUPLEX, Front, ORIGINAL_DST, OVERRIDE_HOST};
use crate::harness::upstream::hash;
use crate::harness::{Stack, run};
use crate::passage::LOOSE;

const fn modes(shape: Front, request_mode: &'static str, response_mode: &'static str) -> Front {
    Front { request_mode, response_mode, ..shape }
}

const FRONTS: [Front; 5] = [
    modes(ORIGINAL_DST, "BUFFERED", "BUFFERED"),
    modes(OVERRIDE_HOST, "BUFFERED", "BUFFERED"),
    modes(ORIGINAL_DST, "STREAMED", "STREAMED"),
    modes(ORIGINAL_DST, "NONE", DUPLEX),
    modes(ORIGINAL_DST, DUPLEX, "NONE"),
];

async fn stack() -> Option<&'static Stack> {
    static STACK: OnceCell<Option<Stack>> = OnceCell::const_new();
    STACK.get_or_init(|| Stack::start(LOOSE, 3, &FRONTS)).await.as_ref().map(Stack::watch)
}

/// Returns how a request ends whose answer such a gateway shows, or does not.
fn ending(front: &Front) -> &'static str {
    if front.response_mode == "NONE" { "unobserved" } else { "complete" }
}

/// Sends a request through every gateway; it must arrive whole at the endpoint that the picker named.
fn check(call: &Call, answered: impl Fn(&Answer)) {
    run(async {
        let Some(stack) = stack().await else { return };
        for (front, envoy) in FRONTS.iter().zip(&stack.envoys) {
            let call = call.again();
            let answer = call.answer(envoy.port).await;
            assert_eq!(answer.status, 200, "{front:?}: {:?}", answer.body);
            let (upstream, seen) = stack.served(&call.id);
            assert_eq!((seen.length, seen.hash), (call.sent().len(), hash(&call.sent())));
            assert_eq!(answer.header("x-routed-to"), Some(upstream.name.as_str()), "{front:?}");
            let record = stack.picker.record(&call.id).await;
            assert_eq!(record["target"], upstream.name);
            assert_eq!(record["outcome"]["ending"], ending(front), "{front:?}");
            assert_eq!(record["outcome"]["status"], 200);
            answered(&answer);
        }
    });
}

#[test]
fn every_mode_passes_requests_of_all_kinds() {
    for http in [Http::One, Http::Two] {
        check(&get("/v1/models").over(http), |_| {});
        check(&post("/v1/chat/completions", "").over(http), |_| {});
        check(&chat("small").over(http), |_| {});
        check(&chat(&noise(300 << 10)).over(http), |_| {});
        let pause = Duration::from_millis(20);
        check(&chat("").chunked(&["{\"a\":", "1}"], pause, End::Plain).over(http), |_| {});
        check(&chat("").chunked(&["{}"], Duration::ZERO, End::Trailers).over(http), |_| {});
    }
}

#[test]
fn every_mode_passes_answers_of_all_kinds() {
    for http in [Http::One, Http::Two] {
        check(&chat("all").answered("json bytes=900000").over(http), |answer| {
            assert!(answer.json()["text"] == noise(900_000), "the text came back changed");
        });
        check(&chat("count").answered("sse events=3 pause=10").over(http), |answer| {
            assert!(answer.text().ends_with("data: [DONE]\n\n"), "{}", answer.text());
        });
    }
}

#[test]
fn in_every_mode_a_named_conversation_stays() {
    run(async {
        let Some(stack) = stack().await else { return };
        for (front, envoy) in FRONTS.iter().zip(&stack.envoys) {
            for conversation in 0..6 {
                let id = format!("{}-{}-{conversation}", front.request_mode, front.response_mode);
                let mut targets = Vec::new();
                for turn in 0..3 {
                    let call = chat(&format!("{conversation} {turn}")).conversation(&id);
                    call.answer(envoy.port).await;
                    let record = stack.picker.record(&call.id).await;
                    assert_eq!(record["conversation"]["id"], id);
                    targets.push(stack.served(&call.id).0.name.clone());
                }
                assert!(targets.iter().all(|target| *target == targets[0]), "{id}: {targets:?}");
            }
        }
    });
}

#[test]
fn a_body_is_read_where_it_comes_before_the_pick() {
    run(async {
        let Some(stack) = stack().await else { return };
        for (front, envoy) in FRONTS.iter().zip(&stack.envoys) {
            let body =
                json!({ "model": "m", "prompt": "hello", "prompt_cache_key": "in-the-body" });
            let call = post("/v1/completions", body.to_string());
            call.answer(envoy.port).await;
            let record = stack.picker.record(&call.id).await;
            let is_read = ["BUFFERED", DUPLEX].contains(&front.request_mode);
            let source = &record["conversation"]["source"];
            assert_eq!(source == "prompt_cache_key", is_read, "{front:?}: {record}");
            assert_eq!(record["body"] == "whole", is_read, "{front:?}: {record}");
        }
    });
}

#[test]
fn usage_is_noted_where_the_answer_is_shown() {
    run(async {
        let Some(stack) = stack().await else { return };
        for (front, envoy) in FRONTS.iter().zip(&stack.envoys) {
            let call = chat("count").answered("usage prompt=9 cached=4");
            call.answer(envoy.port).await;
            let outcome = &stack.picker.record(&call.id).await["outcome"];
            let shown = front.response_mode != "NONE";
            let expected = if shown { (json!(9), json!(4)) } else { (json!(null), json!(null)) };
            assert_eq!(
                (&outcome["prompt_tokens"], &outcome["cached_tokens"]),
                (&expected.0, &expected.1)
            );
        }
        stack.picker.is_idle().await;
    });
}
