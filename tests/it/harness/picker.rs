//! The picker under test: its own binary, with everything that it tells of itself.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use super::DEADLINE;
use super::client::get;
use super::process::{Process, folder};

pub(crate) const BINARY: &str = env!("CARGO_BIN_EXE_llm-ring");

/// A running picker.
pub(crate) struct Picker {
    pub(crate) process: Process,
    pub(crate) grpc: u16,
    pub(crate) health: u16,
    metrics: u16,
    folder: PathBuf,
}

/// A page of `/metrics`.
#[derive(Debug)]
pub(crate) struct Metrics(Vec<(String, f64)>);

/// Writes an endpoints file.
pub(crate) fn endpoints<'a>(list: impl IntoIterator<Item = (&'a str, SocketAddr)>) -> String {
    let entries = list.into_iter().map(|(name, address)| {
        format!("\n- {{ name: {name}, address: '{}', port: {} }}", address.ip(), address.port())
    });
    let entries: String = entries.collect();
    format!("endpoints:{}\n", if entries.is_empty() { " []" } else { &entries })
}

impl Picker {
    /// Starts it with these endpoints; `config` is all of the configuration but ports and files, and without a word
    /// about TLS or warming up they are off.
    pub(crate) async fn start(config: &str, endpoints: &str) -> Self {
        let folder = folder("picker");
        let list = folder.join("endpoints.yaml");
        std::fs::write(&list, endpoints).unwrap();
        let text = format!("endpoints: {{ file: {}, poll_ms: 50 }}\n{config}", list.display());
        Self::run(folder, &text, &mut Command::new(BINARY)).await
    }

    /// Starts it in Kubernetes, as whom a kubeconfig says.
    pub(crate) async fn in_kubernetes(config: &str, kubeconfig: &Path) -> Self {
        let mut command = Command::new(BINARY);
        Self::run(folder("picker"), config, command.env("KUBECONFIG", kubeconfig)).await
    }

    async fn run(folder: PathBuf, config: &str, command: &mut Command) -> Self {
        let mut text =
            "server: { address: 127.0.0.1, grpc_port: 0, health_port: 0, metrics_port: 0 }\n"
                .to_owned();
        for (key, off) in
            [("tls:", "tls: { mode: \"off\" }\n"), ("warmup:", "warmup: { seconds: 0 }\n")]
        {
            if !config.contains(key) {
                text.push_str(off);
            }
        }
        text.push_str(config);
        let file = folder.join("llm-ring.yaml");
        std::fs::write(&file, text).unwrap();
        command.arg("serve").arg("--config").arg(&file);
        if !config.contains("linger_seconds:") {
            command.args(["--drain-timeout", "0s"]);
        }
        Self::serving(folder, Process::start("llm-ring", command)).await
    }

    /// Waits for the ports of one that has been started.
    pub(crate) async fn serving(folder: PathBuf, process: Process) -> Self {
        let serving = process.line("its ports", |line| {
            let line: Value = serde_json::from_str(line).ok()?;
            (line["message"] == "serving").then_some(line)
        });
        let serving = serving.await;
        let port = |key: &str| serving[key].as_str().unwrap().parse::<SocketAddr>().unwrap().port();
        let (grpc, health, metrics) = (port("grpc"), port("health"), port("metrics"));
        Self { process, grpc, health, metrics, folder }
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Replaces the endpoints file, whole, as a ConfigMap volume does.
    pub(crate) fn set_endpoints(&self, text: &str) {
        let new = self.folder.join("new");
        std::fs::write(&new, text).unwrap();
        std::fs::rename(new, self.folder.join("endpoints.yaml")).unwrap();
    }

    /// Waits for the line of the decision log about a request.
    pub(crate) async fn record(&self, id: &str) -> Value {
        let what = format!("the decision about {id}");
        self.process.line(&what, |line| decision(line).filter(|it| it["request_id"] == id)).await
    }

    /// Waits for a log line with this message.
    pub(crate) async fn logs(&self, message: &str) -> Value {
        let is_it = |line: &Value| line["message"] == message;
        let line = |line: &str| serde_json::from_str(line).ok().filter(is_it);
        self.process.line(&format!("{message:?}"), line).await
    }

    pub(crate) async fn metrics(&self) -> Metrics {
        let page = get("/metrics").answer(self.metrics).await;
        let line = |line: &str| {
            let (name, value) = line.split_once("} ").or_else(|| line.split_once(' '))?;
            let value = value.split(' ').next()?.parse().ok()?;
            (!line.starts_with('#')).then(|| (name.to_owned(), value))
        };
        Metrics(page.text().lines().filter_map(line).collect())
    }

    /// Waits until a metric, summed over its labels, has a value.
    pub(crate) async fn reaches(&self, metric: &str, label: &str, expected: f64) {
        let mut value = f64::NAN;
        let reached = tokio::time::timeout(DEADLINE, async {
            while value != expected {
                tokio::time::sleep(Duration::from_millis(5)).await;
                value = self.metrics().await.sum(metric, label);
            }
        });
        let reached = reached.await.is_ok();
        assert!(reached, "waited for {metric} {label} to be {expected}, and it is {value}");
    }

    /// Waits until nothing is booked, held or open.
    pub(crate) async fn is_idle(&self) {
        for gauge in ["endpoint_requests", "endpoint_tokens", "streams", "held_body_bytes"] {
            self.reaches(&format!("llm_ring_{gauge}"), "", 0.0).await;
        }
    }

    pub(crate) async fn get(&self, path: &str) -> super::client::Answer {
        get(path).answer(self.metrics).await
    }
}

impl Metrics {
    /// Sums the metric of this name over all its label sets in which `label` (such as `ending="aborted"`) occurs.
    pub(crate) fn sum(&self, metric: &str, label: &str) -> f64 {
        let is_it = |series: &str| {
            let (name, labels) = series.split_once('{').unwrap_or((series, ""));
            name == metric && labels.contains(label)
        };
        self.0.iter().filter(|(series, _)| is_it(series)).map(|(_, value)| value).sum()
    }
}

/// Reads a line of the decision log.
pub(crate) fn decision(line: &str) -> Option<Value> {
    let mut line: Value = serde_json::from_str(line).ok()?;
    (line["message"] == "decision").then(|| line["decision"].take())
}
