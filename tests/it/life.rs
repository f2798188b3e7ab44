//! Requests that end, well or not, leave nothing behind; and so does the picker.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{MutexGuard, OnceCell};

use crate::harness::client::{Call, Connection, End, Http, chat, get, noise, post};
use crate::harness::envoy::{Front, ORIGINAL_DST, OVERRIDE_HOST};
use crate::harness::picker::{Picker, endpoints};
use crate::harness::upstream::event;
use crate::harness::{AbortOnDrop, Stack, run, within};

const STREAMED: Front =
    Front { request_mode: "STREAMED", response_mode: "STREAMED", ..ORIGINAL_DST };
const FRONTS: [Front; 3] = [ORIGINAL_DST, Front { http2: true, ..OVERRIDE_HOST }, STREAMED];

/// The stack of tests that look at sums, one at a time.
async fn stack() -> Option<(&'static Stack, MutexGuard<'static, ()>)> {
    static STACK: OnceCell<Option<Stack>> = OnceCell::const_new();
    let stack = STACK.get_or_init(|| Stack::start("", 3, &FRONTS)).await.as_ref()?.watch();
    let alone = stack.alone.lock().await;
    stack.gate.close();
    Some((stack, alone))
}

/// Returns how many requests have ended well and how many have been cut off.
async fn endings(picker: &Picker) -> (f64, f64) {
    let metrics = picker.metrics().await;
    let count =
        |ending: &str| metrics.sum("llm_ring_outcomes_total", &format!("ending=\"{ending}\""));
    assert_eq!(count("unobserved"), 0.0);
    (count("complete"), count("aborted"))
}

/// Runs a client that goes away when it is dropped.
fn spawn(client: impl Future<Output = ()> + Send + 'static) -> AbortOnDrop {
    AbortOnDrop(tokio::spawn(client).abort_handle())
}

/// How far a request gets before its client goes away.
#[derive(Clone, Copy)]
enum Until {
    /// Its body is on its way, and no endpoint has been picked.
    Gathered,
    /// It is booked on an endpoint.
    Booked,
    /// The headers and the first event of its answer have come.
    Answered,
}

/// Hangs up, and looks whether that is noticed, over both HTTP versions.
fn check_hang_up(front: usize, call: &Call, until: Until) {
    run(async {
        let Some((stack, _alone)) = stack().await else { return };
        let (picker, port) = (&stack.picker, stack.envoys[front].port);
        // A streamed body comes too late to be read.
        let max_tokens = if front == 2 { 256.0 } else { 8.0 };
        for http in [Http::One, Http::Two] {
            let call = call.again().over(http);
            let before = endings(picker).await;
            let first_tokens = picker.metrics().await.sum("llm_ring_ttft_seconds_count", "");
            // Over HTTP/2 the stream is cancelled, and its connection stays.
            let connection = match http {
                Http::One => None,
                Http::Two => Some(Arc::new(Connection::open(port).await)),
            };
            let client = spawn({
                let (call, connection) = (call.clone(), connection.clone());
                async move {
                    let mut answer = match &connection {
                        None => call.stream(port).await,
                        Some(connection) => connection.stream(&call).await,
                    };
                    assert_eq!(answer.chunk().await, event(0));
                    std::future::pending::<()>().await;
                }
            });
            match until {
                Until::Gathered => picker.reaches("llm_ring_held_body_bytes", "", 9.0).await,
                Until::Booked => picker.reaches("llm_ring_endpoint_requests", "", 1.0).await,
                Until::Answered => {
                    // The prompt is done with; what may be generated is still booked.
                    picker.reaches("llm_ring_endpoint_tokens", "", max_tokens).await;
                    picker.reaches("llm_ring_ttft_seconds_count", "", first_tokens + 1.0).await;
                }
            }
            picker.reaches("llm_ring_streams", "", 1.0).await;
            drop(client);
            picker.is_idle().await;
            drop(connection);
            let after = endings(picker).await;
            if matches!(until, Until::Gathered) {
                assert_eq!(after, before, "nothing was decided");
                continue;
            }
            assert_eq!(after, (before.0, before.1 + 1.0));
            let outcome = &picker.record(&call.id).await["outcome"];
            assert_eq!(outcome["ending"], "aborted");
            assert_eq!(outcome["status"].is_null(), matches!(until, Until::Booked));
        }
    });
}

#[test]
fn a_client_that_leaves_during_its_upload_leaves_nothing_behind() {
    let call = post("/v1/chat/completions", "");
    let call = call.chunked(&["{\"model\":"], Duration::ZERO, End::Never);
    check_hang_up(0, &call, Until::Gathered);
    check_hang_up(1, &call, Until::Gathered);
    // Here the endpoint is picked before the body comes.
    check_hang_up(2, &call, Until::Booked);
}

#[test]
fn a_client_that_leaves_while_the_engine_thinks_frees_its_load() {
    for front in 0..FRONTS.len() {
        check_hang_up(front, &chat("think").answered("hold"), Until::Booked);
    }
}

#[test]
fn a_client_that_leaves_between_two_events_frees_its_load() {
    for front in 0..FRONTS.len() {
        check_hang_up(front, &chat("stream").answered("hold-sse"), Until::Answered);
    }
}

#[test]
fn what_ended_well_is_never_counted_as_aborted() {
    run(async {
        let Some((stack, _alone)) = stack().await else { return };
        let before = endings(&stack.picker).await;
        let calls = [
            get("/v1/models"),
            post("/v1/chat/completions", ""),
            chat("plain"),
            chat("count").answered("sse events=3"),
            chat("fail").answered("status code=500"),
            chat(&noise(100_000)).answered("json bytes=100000"),
            chat("trailers").answered("trailers").header("te", "trailers"),
        ];
        let mut tasks = tokio::task::JoinSet::new();
        let mut sent = 0.0;
        for front in &stack.envoys {
            for http in [Http::One, Http::Two] {
                for call in &calls {
                    for _ in 0..8 {
                        let (call, port) = (call.again().over(http), front.port);
                        tasks.spawn(async move { call.answer(port).await });
                        sent += 1.0;
                    }
                }
            }
        }
        within("all answers", tasks.join_all()).await;
        stack.picker.is_idle().await;
        assert_eq!(endings(&stack.picker).await, (before.0 + sent, before.1));
    });
}

#[test]
fn a_thousand_requests_at_once_are_booked_and_released() {
    const REQUESTS: usize = 1200;
    run(async {
        let Some((stack, _alone)) = stack().await else { return };
        let before = endings(&stack.picker).await;
        // The front that speaks HTTP/2 to the engines: it needs no connection a request.
        let port = stack.envoys[1].port;
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..REQUESTS / 100 {
            let connection = Arc::new(Connection::open(port).await);
            for _ in 0..100 {
                let connection = Arc::clone(&connection);
                let call = chat("wait").answered("hold").over(Http::Two);
                tasks.spawn(async move { connection.stream(&call).await.finish().await.status });
            }
        }
        stack.picker.reaches("llm_ring_endpoint_requests", "", 1200.0).await;
        stack.picker.reaches("llm_ring_streams", "", 1200.0).await;
        stack.gate.open();
        let statuses = within("all answers", tasks.join_all()).await;
        assert!(statuses.iter().all(|status| *status == 200), "{statuses:?}");
        stack.picker.is_idle().await;
        assert_eq!(endings(&stack.picker).await, (before.0 + 1200.0, before.1));
    });
}

#[test]
fn on_sigterm_open_streams_end_whole_and_then_the_picker_ends() {
    run(async {
        let Some(stack) = Stack::start("", 1, &[ORIGINAL_DST]).await else { return };
        let picker = &stack.picker;
        assert_eq!(picker.get("/readyz").await.status, 200);
        let call = chat("count").answered("hold-sse events=20 pause=10");
        let mut answer = call.stream(stack.port()).await;
        assert_eq!(answer.chunk().await, event(0));

        picker.process.signal("TERM");
        picker.logs("draining").await;
        assert!(picker.process.ended().is_none());
        stack.gate.open();
        let rest = answer.finish().await;
        let events: String = (1..20).map(event).collect();
        assert!(rest.text().starts_with(&events), "{}", rest.text());
        assert!(rest.text().ends_with("data: [DONE]\n\n"), "{}", rest.text());

        assert_eq!(picker.process.end().await.code(), Some(0));
        picker.logs("stopped").await;
        assert_eq!(picker.record(&call.id).await["outcome"]["ending"], "complete");
    });
}

#[test]
fn a_stream_that_outlasts_the_drain_does_not_keep_the_picker() {
    run(async {
        let config = "drain: { timeout_seconds: 1 }";
        let Some(stack) = Stack::start(config, 1, &[ORIGINAL_DST]).await else { return };
        let call = chat("count").answered("hold-sse");
        let mut answer = call.stream(stack.port()).await;
        answer.chunk().await;
        stack.picker.process.signal("TERM");
        assert_eq!(stack.picker.process.end().await.code(), Some(0));
        stack.picker.logs("streams were still open at the end of drain.timeout_seconds").await;
    });
}

#[test]
fn the_requests_of_an_endpoint_that_left_the_pool_end_well() {
    run(async {
        let Some(stack) = Stack::start("", 2, &[ORIGINAL_DST]).await else { return };
        let call = chat("wait")
            .answered("hold")
            .header("x-test-subset", stack.upstreams[0].address.to_string());
        let task = tokio::spawn({
            let (call, port) = (call.clone(), stack.port());
            async move { call.answer(port).await }
        });
        stack.picker.reaches("llm_ring_endpoint_requests", "endpoint=\"a\"", 1.0).await;
        let both =
            [&stack.upstreams[0], &stack.upstreams[1]].map(|it| (it.name.as_str(), it.address));
        stack.picker.set_endpoints(&endpoints([both[1]]));
        stack.picker.reaches("llm_ring_endpoints", "", 1.0).await;
        assert_eq!(stack.answer(&chat("next")).await.header("x-routed-to"), Some("b"));

        // It comes back, with what it still serves.
        stack.picker.set_endpoints(&endpoints(both));
        stack.picker.reaches("llm_ring_endpoints", "", 2.0).await;
        stack.picker.reaches("llm_ring_endpoint_requests", "endpoint=\"a\"", 1.0).await;
        stack.gate.open();
        assert_eq!(task.await.unwrap().status, 200);
        stack.picker.is_idle().await;
        assert_eq!(stack.picker.record(&call.id).await["outcome"]["ending"], "complete");
    });
}
