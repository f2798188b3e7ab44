//! Which endpoint a request goes to, when it is turned away, and what the client and the engine are told of it.

use std::time::Duration;

use serde_json::json;
use tokio::net::TcpSocket;

use crate::harness::client::{Answer, End, Http, chat, get, noise, post};
use crate::harness::envoy::{Front, ORIGINAL_DST, OVERRIDE_HOST};
use crate::harness::picker::endpoints;
use crate::harness::tools::Tools;
use crate::harness::upstream::{Gate, Upstream};
use crate::harness::{Stack, run};
use crate::passage::stack;

/// What an answer of the picker itself must look like.
fn is_refusal(answer: &Answer, status: u16, code: &str, message: &str) {
    assert_eq!(answer.status, status, "{}", answer.text());
    assert_eq!(answer.header("content-type"), Some("application/json"));
    let error = &answer.json()["error"];
    assert_eq!(error["code"], code, "{error}");
    let text = error["message"].as_str().unwrap();
    assert!(text.contains(message), "{text:?} says nothing of {message:?}");
}

#[test]
fn a_conversation_named_in_a_header_stays_where_it_was() {
    run(async {
        let Some(stack) = stack().await else { return };
        for (i, envoy) in stack.envoys.iter().enumerate() {
            let mut homes = std::collections::BTreeSet::new();
            for conversation in 0..12 {
                let id = format!("named-{i}-{conversation}");
                let mut targets = Vec::new();
                for turn in 0..3 {
                    // Not a word of it stays the same.
                    let call = chat(&format!("{conversation} {turn}")).conversation(&id);
                    let answer = call.answer(envoy.port).await;
                    assert_eq!(answer.header("x-conversation-id"), Some(id.as_str()));
                    targets.push(stack.served(&call.id).0.name.clone());
                    let record = stack.picker.record(&call.id).await;
                    assert_eq!(record["conversation"]["source"], "x-conversation-id");
                }
                assert!(targets.iter().all(|target| *target == targets[0]), "{id}: {targets:?}");
                homes.insert(targets.remove(0));
            }
            assert!(homes.len() > 1, "twelve conversations all went to {homes:?}");
        }
    });
}

#[test]
fn a_conversation_is_known_by_its_opening_or_by_a_field_of_its_body() {
    run(async {
        let Some(stack) = stack().await else { return };
        let user = |text: &str| json!({ "role": "user", "content": text });
        let assistant = json!({ "role": "assistant", "content": "the smith's daughter" });
        let opening = json!({ "messages": [user("who kept the bridge?")] });
        let later = [user("who kept the bridge?"), assistant, user("and after her?")];
        let key = |text: &str| json!({ "messages": [user(text)], "prompt_cache_key": "one" });
        let cases = [
            ([opening, json!({ "messages": later })], "opening"),
            ([key("first"), key("second")], "prompt_cache_key"),
        ];
        for (bodies, source) in cases {
            let mut seen = Vec::new();
            for body in bodies {
                let call = post("/v1/chat/completions", body.to_string());
                stack.answer(&call).await;
                let record = stack.picker.record(&call.id).await;
                assert_eq!(record["conversation"]["source"], source, "{record}");
                seen.push((record["conversation"]["id"].clone(), record["target"].clone()));
            }
            assert_eq!(seen[0], seen[1]);
        }
    });
}

/// Sends the subset hint, made of the upstreams' addresses, and names who may serve then; nobody is 503.
fn check_subset(hint: impl Fn(&[String]) -> String, may_serve: &[&str]) {
    run(async {
        let Some(stack) = stack().await else { return };
        let addresses: Vec<_> = stack.upstreams.iter().map(|it| it.address.to_string()).collect();
        let hint = hint(&addresses);
        for (envoy, http) in stack.envoys.iter().zip([Http::One, Http::Two]) {
            for turn in 0..4 {
                let call =
                    chat(&format!("{hint} {turn}")).header("x-test-subset", &hint).over(http);
                let answer = call.answer(envoy.port).await;
                if may_serve.is_empty() {
                    is_refusal(&answer, 503, "no_endpoints", "subset");
                    let reason = answer.header("x-llm-d-request-dropped-reason");
                    assert_eq!(reason, Some("rejected-no-endpoints"));
                } else {
                    let name = stack.served(&call.id).0.name.as_str();
                    assert!(may_serve.contains(&name), "{hint:?} went to {name}");
                }
            }
        }
    });
}

#[test]
fn a_subset_of_one_is_obeyed() {
    check_subset(|all| all[0].clone(), &["a"]);
    check_subset(|all| all[2].clone(), &["c"]);
}

#[test]
fn a_subset_may_be_a_list_with_blanks_and_with_entries_that_name_nothing() {
    check_subset(|all| format!("{} , {}", all[0], all[1]), &["a", "b"]);
    check_subset(|all| format!("[fd00::1]:8000,nonsense,{}", all[1]), &["b"]);
}

#[test]
fn a_subset_that_names_no_endpoint_of_the_pool_is_a_503() {
    for hint in ["10.255.0.1:8000", "[fd00::1]:8000", "]:[", "10.255.0.1", ","] {
        check_subset(|_| hint.to_owned(), &[]);
    }
}

#[test]
fn a_client_cannot_choose_the_endpoint() {
    run(async {
        let Some(stack) = stack().await else { return };
        for envoy in &stack.envoys {
            for (turn, spoofed) in ["127.0.0.1:9", "169.254.169.254:80", ""].iter().enumerate() {
                for call in [get("/v1/models"), chat(&format!("spoof {turn}"))] {
                    let call = call.header("x-gateway-destination-endpoint", *spoofed);
                    let call = call.header("x-gateway-destination-endpoint", *spoofed);
                    assert_eq!(call.answer(envoy.port).await.status, 200);
                    let (upstream, seen) = stack.served(&call.id);
                    let received: Vec<_> =
                        seen.headers.get_all("x-gateway-destination-endpoint").iter().collect();
                    assert_eq!(received, [upstream.address.to_string().as_str()]);
                }
            }
        }
    });
}

#[test]
fn headers_that_steer_pickers_do_not_reach_the_engine() {
    const STEERING: [&str; 8] = [
        "x-gateway-destination-endpoint-subset",
        "x-gateway-inference-objective",
        "x-llm-d-inference-fairness-id",
        "x-gateway-model-name-rewrite",
        "x-prefiller-host-port",
        "x-session-token",
        "x-routed-to",
        "test-epp-endpoint-selection",
    ];
    run(async {
        let Some(stack) = stack().await else { return };
        for envoy in &stack.envoys {
            let mut call = chat("steer").header("x-kept", "yes").conversation("kept-too");
            for name in STEERING {
                call = call.header(name, "127.0.0.1:9");
            }
            assert_eq!(call.answer(envoy.port).await.status, 200);
            let headers = stack.served(&call.id).1.headers;
            let reached: Vec<_> =
                STEERING.into_iter().filter(|name| headers.contains_key(*name)).collect();
            assert_eq!(reached, [""; 0]);
            assert_eq!(
                (&headers["x-kept"], &headers["x-conversation-id"]),
                (&"yes".parse().unwrap(), &"kept-too".parse().unwrap())
            );
        }
    });
}

#[test]
fn an_answer_says_where_it_came_from_and_why() {
    run(async {
        let Some(stack) = stack().await else { return };
        let call = chat("why?").conversation("explained").answered("usage");
        let answer = stack.answer(&call).await;
        let record = stack.picker.record(&call.id).await;
        let told = |name: &str| json!(answer.header(name));
        assert_eq!(told("x-routed-to"), record["target"]);
        assert_eq!(told("x-route-reason"), record["reason"]);
        assert_eq!(
            (told("x-route-policy"), told("x-conversation-id")),
            (json!("llm-aware"), json!("explained"))
        );
    });
}

#[test]
fn without_an_own_span_the_trace_context_of_the_client_passes_untouched() {
    run(async {
        let Some(stack) = stack().await else { return };
        let traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00";
        for envoy in &stack.envoys {
            let call = chat("trace").header("traceparent", traceparent);
            call.answer(envoy.port).await;
            assert_eq!(stack.served(&call.id).1.headers["traceparent"], traceparent);
        }
    });
}

#[test]
fn a_dead_endpoint_is_a_503_that_is_counted_as_answered() {
    run(async {
        let Some(tools) = Tools::get() else { return };
        // Bound and never listening: nobody else gets the port, and nobody answers.
        let dead = TcpSocket::new_v4().unwrap();
        dead.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let list = endpoints([("dead", dead.local_addr().unwrap())]);
        let none = (Vec::new(), Gate::closed());
        let stack = Stack::assemble(tools, "", &list, none, &[ORIGINAL_DST]).await;
        for call in [chat("hello?"), get("/v1/models")] {
            let answer = stack.answer(&call).await;
            assert_eq!(answer.status, 503);
            assert_eq!(answer.header("x-routed-to"), Some("dead"));
            let outcome = &stack.picker.record(&call.id).await["outcome"];
            assert_eq!((&outcome["ending"], &outcome["status"]), (&json!("complete"), &json!(503)));
        }
        stack.picker.is_idle().await;
    });
}

#[test]
fn the_next_endpoint_of_the_list_serves_when_the_first_is_dead_and_that_is_learned() {
    run(async {
        let Some(tools) = Tools::get() else { return };
        let dead = TcpSocket::new_v4().unwrap();
        dead.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let dead = dead.local_addr().unwrap();
        let gate = Gate::closed();
        let upstream = Upstream::start("alive", &gate).await;
        let list = endpoints([("dead", dead), ("alive", upstream.address)]);
        let front = Front { retries: true, ..OVERRIDE_HOST };
        let config = "answers: { destinations: 2 }";
        let parts = (vec![upstream], gate);
        let hosts = [dead, parts.0[0].address];
        let stack = Stack::before(tools, config, &list, parts, &hosts, &[front]).await;
        let mut saved = 0;
        for conversation in 0..20 {
            let id = format!("list-{conversation}");
            let call = chat("first").conversation(&id);
            assert_eq!(stack.answer(&call).await.status, 200);
            let record = stack.picker.record(&call.id).await;
            let address = stack.upstreams[0].address.to_string();
            assert_eq!(record["outcome"]["served"], address);
            assert_eq!(record["destinations"].as_array().unwrap().len(), 2);
            if record["target"] == "dead" {
                saved += 1;
                // The conversation now lives where it was served.
                let call = chat("second").conversation(&id);
                assert_eq!(stack.answer(&call).await.header("x-routed-to"), Some("alive"));
            }
        }
        assert!(saved > 0, "no request was sent to the dead endpoint first");
        stack.picker.is_idle().await;
    });
}

/// A pool of one endpoint that takes one request at a time, small ones, and from nobody who dawdles.
const STRICT: &str = "
requests: { max_body_bytes: 65536, body_idle_timeout_ms: 400 }
admission: { max_requests_per_endpoint: 1, retry_after_seconds: 7 }
";

#[test]
fn limits_are_kept() {
    run(async {
        let Some(stack) = Stack::start(STRICT, 1, &[ORIGINAL_DST]).await else { return };

        // Saturated: another request is being served.
        let held = chat("hold").answered("hold");
        let task = tokio::spawn({
            let (held, port) = (held.clone(), stack.port());
            async move { held.answer(port).await }
        });
        stack.picker.reaches("llm_ring_endpoint_requests", "", 1.0).await;
        for call in [chat("too much"), get("/v1/models")] {
            let answer = stack.answer(&call).await;
            is_refusal(&answer, 429, "saturated", "");
            assert_eq!(answer.header("retry-after"), Some("7"));
            let reason = answer.header("x-llm-d-request-dropped-reason");
            assert_eq!(reason, Some("rejected-saturated"));
            let record = stack.picker.record(&call.id).await;
            assert!(record["refusal"].as_str().unwrap().starts_with("saturated"), "{record}");
        }
        stack.gate.open();
        assert_eq!(task.await.unwrap().status, 200);
        stack.picker.is_idle().await;

        // Too large, with the length told before and without.
        let large = noise(80_000);
        let told = post("/v1/chat/completions", large.clone());
        let untold = post("/v1/chat/completions", "");
        let untold = untold.chunked(&[&large], Duration::ZERO, End::Plain);
        for call in [told, untold] {
            let answer = stack.answer(&call).await;
            is_refusal(&answer, 413, "request_body_too_large", "65536");
            let record = stack.picker.record(&call.id).await;
            assert!(record["refusal"].as_str().unwrap().contains("65536"), "{record}");
        }

        // Stalled.
        let call = chat("").chunked(&["{\"model\":"], Duration::ZERO, End::Never);
        is_refusal(&stack.answer(&call).await, 408, "request_body_timeout", "stopped coming");
        stack.picker.record(&call.id).await;

        stack.picker.is_idle().await;
        for (reason, count) in [("saturated", 2.0), ("body-too-large", 2.0), ("body-stalled", 1.0)]
        {
            let label = format!("reason=\"{reason}\"");
            stack.picker.reaches("llm_ring_rejections_total", &label, count).await;
        }
        assert_eq!(stack.answer(&chat("just right")).await.status, 200);
        assert_eq!(stack.picker.metrics().await.sum("llm_ring_outcomes_total", "aborted"), 0.0);
    });
}

#[test]
fn a_request_waits_for_its_endpoint_and_one_too_many_is_turned_away() {
    run(async {
        let config = "
policy: marginal-cost
hold: { backlog_ms: 100, longest_ms: 60000, requests: 1 }
";
        let Some(stack) = Stack::start(config, 1, &[ORIGINAL_DST]).await else { return };
        let send = |call: &crate::harness::client::Call| {
            let (call, port) = (call.clone(), stack.port());
            tokio::spawn(async move { call.answer(port).await })
        };
        // Some 100,000 tokens: seconds of work, by the prices.
        let long = chat(&"word ".repeat(80_000)).answered("hold");
        let first = send(&long);
        stack.picker.reaches("llm_ring_endpoint_requests", "", 1.0).await;
        let call = chat("I can wait");
        let second = send(&call);
        stack.picker.reaches("llm_ring_waiting_requests", "", 1.0).await;
        let third = stack.answer(&chat("me too")).await;
        is_refusal(&third, 429, "queue_full", "");
        assert_eq!(third.header("retry-after"), Some("1"));
        // A client that goes while it waits leaves its place to another.
        second.abort();
        stack.picker.reaches("llm_ring_waiting_requests", "", 0.0).await;
        let call = chat("and I");
        let second = send(&call);
        stack.picker.reaches("llm_ring_waiting_requests", "", 1.0).await;
        stack.gate.open();
        assert_eq!(first.await.unwrap().status, 200);
        assert_eq!(second.await.unwrap().status, 200);
        let record = stack.picker.record(&call.id).await;
        assert!(
            record["heldMs"].as_f64().or(record["held_ms"].as_f64()).unwrap() > 0.0,
            "{record}"
        );
        stack.picker.is_idle().await;
    });
}

#[test]
fn an_empty_pool_is_a_503_in_plain_text_if_asked_so() {
    run(async {
        let config = "answers: { errors: plain, explain_headers: false }";
        let Some(stack) = Stack::start(config, 0, &[ORIGINAL_DST]).await else { return };
        for call in [chat("anybody?"), get("/v1/models")] {
            let answer = stack.answer(&call).await;
            assert_eq!(answer.status, 503);
            assert_eq!(answer.header("content-type"), Some("text/plain"));
            let text = answer.text();
            assert!(text.starts_with("inference error: ServiceUnavailable - "), "{text:?}");
        }

        // The same picker once an endpoint comes, and with nothing said about its reasons.
        let upstream = Upstream::start("late", &stack.gate).await;
        stack.picker.set_endpoints(&endpoints([("late", upstream.address)]));
        stack.picker.logs("endpoints changed").await;
        let call = chat("now?").conversation("quiet");
        let answer = stack.answer(&call).await;
        assert_eq!(answer.status, 200);
        for name in ["x-routed-to", "x-route-reason", "x-route-policy", "x-conversation-id"] {
            assert_eq!(answer.header(name), None, "{name}");
        }
    });
}

#[test]
fn an_empty_pool_is_a_503_in_json() {
    run(async {
        let Some(stack) = Stack::start("", 0, &[OVERRIDE_HOST]).await else { return };
        for call in [chat("anybody?"), get("/v1/models")] {
            is_refusal(&stack.answer(&call).await, 503, "no_endpoints", "no ready endpoint");
        }
    });
}
