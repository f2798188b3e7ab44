//! Spans reach a real OpenTelemetry collector, within the client's trace and with the engine's after them.

use std::collections::BTreeMap;
use std::process::Command;

use crate::harness::client::chat;
use crate::harness::envoy::{ORIGINAL_DST, OVERRIDE_HOST};
use crate::harness::process::{Process, folder};
use crate::harness::{Stack, eventually, run, tools};

/// A span, as the collector's `debug` exporter prints it.
type Span = BTreeMap<String, String>;

fn spans(log: &str) -> Vec<Span> {
    log.split("Span #")
        .skip(1)
        .map(|text| {
            let field = |line: &str| {
                let line = line.trim_start_matches([' ', '-', '>']).trim();
                let (name, value) = line.split_once(':')?;
                Some((name.trim().to_owned(), value.trim().to_owned()))
            };
            // Of a name that comes twice the first is the span's own.
            text.lines().rev().filter_map(field).collect()
        })
        .collect()
}

#[test]
fn a_request_is_a_span_in_the_trace_of_its_client() {
    run(async {
        let Some(collector) = tools::collector() else { return };
        let port = {
            let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            free.local_addr().unwrap().port()
        };
        let file = folder("collector").join("config.yaml");
        let config = format!(
            "receivers: {{ otlp: {{ protocols: {{ grpc: {{ endpoint: '127.0.0.1:{port}' }} }} }} }}\n\
             exporters: {{ debug: {{ verbosity: detailed }} }}\n\
             service:\n  telemetry: {{ metrics: {{ level: none }} }}\n  \
             pipelines: {{ traces: {{ receivers: [otlp], exporters: [debug] }} }}\n"
        );
        std::fs::write(&file, config).unwrap();
        let collector =
            Process::start("otelcol", Command::new(collector).arg("--config").arg(&file));
        let ready = |line: &str| line.contains("Everything is ready").then_some(());
        collector.line("its readiness", ready).await;

        let config = format!(
            "tracing: {{ otlp_endpoint: 'http://127.0.0.1:{port}', sample: 0 }}\n\
             admission: {{ max_requests_per_endpoint: 1 }}\n"
        );
        let fronts = [ORIGINAL_DST, OVERRIDE_HOST];
        let Some(stack) = Stack::start(&config, 1, &fronts).await else { return };
        let (parent, mut expected) = ("b7ad6b7169203331", Vec::new());
        for (i, envoy) in stack.envoys.iter().enumerate() {
            let trace = format!("0af7651916cd43dd8448eb211c8031{i:02}");
            let call = chat("trace").conversation("traced").answered("sse events=2");
            let call = call.header("traceparent", format!("00-{trace}-{parent}-01"));
            assert_eq!(call.answer(envoy.port).await.status, 200);
            let headers = stack.served(&call.id).1.headers;
            let sent = headers["traceparent"].to_str().unwrap().to_owned();
            assert!(sent.starts_with(&format!("00-{trace}-")) && sent.ends_with("-01"), "{sent}");
            assert!(!sent.contains(parent), "the engine's parent is our span: {sent}");
            assert_eq!(stack.picker.record(&call.id).await["trace_id"], trace);
            expected.push((trace, sent));
        }

        // A client that did not sample is followed in that, and so is the share of 0.
        let unsampled = "11111111111111111111111111111111";
        let call = chat("quiet").header("traceparent", format!("00-{unsampled}-{parent}-00"));
        stack.answer(&call).await;
        let sent = stack.served(&call.id).1.headers["traceparent"].to_str().unwrap().to_owned();
        assert!(sent.contains(unsampled) && sent.ends_with("-00"), "{sent}");
        let call = chat("no parent");
        stack.answer(&call).await;
        let sent = stack.served(&call.id).1.headers["traceparent"].to_str().unwrap().to_owned();
        assert!(sent.ends_with("-00"), "{sent}");

        // The picker sends what it has when it ends.
        stack.picker.process.signal("TERM");
        assert_eq!(stack.picker.process.end().await.code(), Some(0));
        let spans = eventually("four spans", async || {
            let spans = spans(&collector.text());
            (spans.len() >= 4).then_some(spans)
        })
        .await;
        assert_eq!(spans.len(), 4, "{spans:?}");
        for (trace, sent) in expected {
            let find = |name: &str| {
                let is_it = |span: &&Span| span["Trace ID"] == trace && span["Name"] == name;
                spans
                    .iter()
                    .find(is_it)
                    .unwrap_or_else(|| panic!("no {name} of {trace}: {spans:?}"))
            };
            let (exchange, schedule) = (find("llm_ring.exchange"), find("llm_ring.schedule"));
            assert_eq!(exchange["Parent ID"], parent);
            assert_eq!(schedule["Parent ID"], exchange["ID"]);
            assert_eq!(sent, format!("00-{trace}-{}-01", exchange["ID"]));
            assert_eq!(exchange["llm_ring.target"], "Str(a)");
            assert_eq!(exchange["llm_ring.conversation"], "Str(traced)");
            assert_eq!(exchange["http.response.status_code"], "Int(200)");
            assert_eq!(exchange["gen_ai.usage.input_tokens"], "Int(11)");
            assert_eq!(exchange["llm_ring.cached_tokens"], "Int(5)");
            assert_eq!(exchange["llm_ring.ending"], "Str(complete)");
        }
    });
}
