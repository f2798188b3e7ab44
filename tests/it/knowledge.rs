//! What a running picker learns of its engines: metrics, KV events, and caches guessed from text.

use crate::harness::client::chat;
use crate::harness::envoy::ORIGINAL_DST;
use crate::harness::picker::{Picker, endpoints};
use crate::harness::{Stack, eventually, run};
use crate::kv_events::{Engine, Framing, captured, free};

/// A page of a vLLM with these requests waiting, and so many hits of its prefix cache.
fn page(waiting: u32, hits: u32) -> String {
    format!(
        "vllm:num_requests_waiting {waiting}\nvllm:num_requests_running 1\nvllm:kv_cache_usage_perc 0.5\nvllm:prefix_cache_queries_total 900\nvllm:prefix_cache_hits_total {hits}\n"
    )
}

#[test]
fn metrics_steer_requests_and_their_silence_stops_none() {
    run(async {
        let config = "metrics: { interval_ms: 20, stale_ms: 300 }\npolicy: weighted\npolicies:\n  weighted:\n    filters: []\n    scorers: [{ type: queue-scorer, weight: 1 }]\n    picker: max-score-picker\n";
        let Some(stack) = Stack::start(config, 2, &[ORIGINAL_DST]).await else { return };
        let fresh = "llm_ring_engine_metrics_fresh";
        stack.picker.reaches(fresh, "", 0.0).await;
        for (upstream, waiting) in stack.upstreams.iter().zip([50, 0]) {
            upstream.set_metrics(Some(&page(waiting, 10)));
        }
        stack.picker.reaches(fresh, "", 2.0).await;
        for _ in 0..10 {
            let call = chat("whom does this go to");
            assert_eq!(stack.answer(&call).await.status, 200);
            assert_eq!(stack.served(&call.id).0.name, stack.upstreams[1].name);
        }
        // Nobody says anything any more: nothing is known, and every request is served.
        for upstream in &stack.upstreams {
            upstream.set_metrics(None);
        }
        stack.picker.reaches(fresh, "", 0.0).await;
        for _ in 0..10 {
            assert_eq!(stack.answer(&chat("and now")).await.status, 200);
        }
        let metrics = stack.picker.metrics().await;
        assert!(metrics.sum("llm_ring_engine_scrapes_total", "") > 2.0);
        assert!(metrics.sum("llm_ring_engine_scrape_failures", "") > 0.0);
    });
}

#[test]
fn prompts_that_begin_alike_meet_until_their_engine_starts_again() {
    run(async {
        let config = "metrics: { interval_ms: 20 }\nprefix: { text: true }\npolicy: kv-aware\npolicies: { kv-aware: { threshold: 4000 } }\n";
        let Some(stack) = Stack::start(config, 3, &[ORIGINAL_DST]).await else { return };
        for upstream in &stack.upstreams {
            upstream.set_metrics(Some(&page(0, 100)));
        }
        stack.picker.reaches("llm_ring_engine_metrics_fresh", "", 3.0).await;
        let start = "all of these begin alike ".repeat(800);
        let ask = |rest: &str, cached: u32| {
            let call = chat(&format!("{start}{rest}"));
            call.answered(&format!("usage prompt=5000 cached={cached}"))
        };
        let first = ask("one", 0);
        assert_eq!(stack.answer(&first).await.status, 200);
        stack.picker.is_idle().await;
        let (home, _) = stack.served(&first.id);
        for rest in ["two", "three", "four"] {
            let call = ask(rest, 4900);
            assert_eq!(stack.answer(&call).await.status, 200);
            assert_eq!(stack.served(&call.id).0.name, home.name, "{rest}");
            stack.picker.is_idle().await;
        }
        let metrics = stack.picker.metrics().await;
        let predicted = metrics.sum("llm_ring_predicted_cached_tokens_total", "by=\"text\"");
        let delivered = metrics.sum("llm_ring_delivered_cached_tokens_total", "by=\"text\"");
        assert!(predicted > 14_000.0 && delivered > 0.9 * predicted, "{predicted} {delivered}");
        // Its counters have begun again: another process, and an empty cache.
        home.set_metrics(Some(&page(0, 0)));
        stack.picker.reaches("llm_ring_prefix_blocks", "index=\"text\"", 0.0).await;
    });
}

#[test]
fn kv_events_are_entered_and_an_engine_that_starts_again_is_emptied() {
    run(async {
        let [live, replay, model] = free::<3>();
        let config = format!(
            "metrics: {{ enabled: false }}\nprefix: {{ block_tokens: 1 }}\nevents: {{ enabled: true, port: {}, replay_port: {} }}\n",
            live.port(),
            replay.port()
        );
        let picker = Picker::start(&config, &endpoints([("a", model)])).await;
        let mut engine = Engine::start(live, replay, Framing::WithTopic).await;
        picker.reaches("llm_ring_kv_connections_total", "", 1.0).await;
        for payload in captured() {
            engine.say(&payload, true).await;
        }
        let events = "index=\"events\"";
        eventually("blocks of events", async || {
            let metrics = picker.metrics().await;
            (metrics.sum("llm_ring_kv_batches_total", "") > 0.0).then_some(())
        })
        .await;
        let before = picker.metrics().await;
        assert_eq!(before.sum("llm_ring_kv_not_entered_total", ""), 0.0);
        assert_eq!(before.sum("llm_ring_prefix_evicted_blocks_total", events), 0.0);
        picker.set_endpoints(&endpoints([]));
        picker.reaches("llm_ring_prefix_blocks", events, 0.0).await;
    });
}
