//! The chart's own Envoy: a real one runs the configuration that is rendered, but for addresses.

use std::net::SocketAddr;
use std::process::Command;

use serde_json::Value;

use crate::chart::{Chart, Rendering};
use crate::harness::client::{Call, chat, get};
use crate::harness::picker::{Picker, endpoints};
use crate::harness::port::Port;
use crate::harness::process::{Process, folder, output};
use crate::harness::tools::Tools;
use crate::harness::upstream::{Gate, Upstream};
use crate::harness::{eventually, run};

const PODS: &str = "test-llm-ring-pods.here.svc.cluster.local";
const SERVICE: &str = "test-llm-ring.here.svc.cluster.local";
/// Nobody listens here.
const NOBODY: &str = "127.0.0.1:1";

/// An Envoy that runs what the chart renders.
struct Standalone {
    process: Process,
    admin: Port,
    port: u16,
    status: u16,
}

fn config(rendering: &Rendering) -> String {
    rendering.one("ConfigMap", "envoy")["data"]["envoy.yaml"].as_str().unwrap().to_owned()
}

impl Standalone {
    /// Starts it with the addresses of names in the cluster.
    async fn start(tools: &Tools, mut config: String, names: &[(&str, u16, &str)]) -> Self {
        // Of all its ports only this one is not asked for afterwards, since it is to be asked.
        let admin = Port::reserve();
        let admin_port = admin.address.port();
        let host = |address: &str| {
            let address: SocketAddr = address.parse().unwrap();
            format!("address: {}, port_value: {}", address.ip(), address.port())
        };
        let mut replace = |from: &str, to: &str| {
            assert!(config.contains(from), "{from} is not in {config}");
            config = config.replace(from, to);
        };
        replace("port_value: 9901", &format!("port_value: {admin_port}"));
        replace("address: 0.0.0.0, port_value: 8080", &host("127.0.0.1:0"));
        replace("address: 0.0.0.0, port_value: 8081", &host("127.0.0.1:0"));
        for (name, port, address) in names {
            replace(&format!("address: {name}, port_value: {port}"), &host(address));
        }
        let file = folder("standalone").join("envoy.yaml");
        std::fs::write(&file, config).unwrap();
        let process = Process::start(
            "envoy (standalone)",
            Command::new(&tools.envoy)
                .arg("--config-path")
                .arg(&file)
                .args(["--concurrency", "1", "--log-level", "warning", "--disable-hot-restart"])
                .args(["--file-flush-interval-msec", "20"]),
        );
        // It is ready when it has asked the first of the pickers for its health.
        eventually("Envoy to be ready", async || {
            assert!(process.ended().is_none(), "envoy ended early");
            let listening = tokio::net::TcpStream::connect(admin.address).await.is_ok();
            let ready = listening && get("/ready").answer(admin_port).await.text().trim() == "LIVE";
            ready.then_some(())
        })
        .await;
        let listeners = get("/listeners?format=json").answer(admin_port).await.json();
        let port = |name: &str| {
            let listeners = listeners["listener_statuses"].as_array().unwrap();
            let listener = listeners.iter().find(|it| it["name"] == name).unwrap();
            let port = listener["local_address"]["socket_address"]["port_value"].as_u64();
            u16::try_from(port.unwrap()).unwrap()
        };
        Self { admin, port: port("inference"), status: port("status"), process }
    }

    /// Sends requests until one passes, and returns that.
    async fn passes(&self) -> Call {
        eventually("a request to pass", async || {
            let call = chat("let me pass");
            (call.answer(self.port).await.status == 200).then_some(call)
        })
        .await
    }
}

/// A picker as in a pod, with TLS, and an engine that it picks.
async fn picker() -> (Picker, Upstream) {
    let gate = Gate::closed();
    let engine = Upstream::start("a", &gate).await;
    let list = endpoints([(engine.name.as_str(), engine.address)]);
    (Picker::start("tls: { mode: self-signed }\n", &list).await, engine)
}

#[test]
fn requests_go_through_a_picker_with_tls_and_clients_choose_no_destination() {
    run(async {
        let (Some(chart), Some(tools)) = (Chart::get(), Tools::get()) else { return };
        let (picker, engine) = picker().await;
        let here = format!("127.0.0.1:{}", picker.grpc);
        let rendered = config(&chart.set("envoy.enabled=true,envoy.maxRequestsPerConnection=1"));
        let names = [(PODS, 9002, here.as_str()), (SERVICE, 9002, NOBODY)];
        let envoy = Standalone::start(tools, rendered, &names).await;
        envoy.passes().await;
        let spoofed = chat("hello").header("x-gateway-destination-endpoint", NOBODY);
        for call in [chat("hello"), get("/v1/models"), spoofed] {
            let answer = call.answer(envoy.port).await;
            assert_eq!(answer.status, 200, "{}", answer.text());
            assert_eq!(answer.headers["x-routed-to"], "a");
            assert_eq!(engine.seen(&call.id).len(), 1);
        }
        // The kubelet's and Prometheus's part of the admin page, and no more.
        assert_eq!(get("/ready").answer(envoy.status).await.status, 200);
        assert_eq!(get("/stats/prometheus").answer(envoy.status).await.status, 200);
        assert_eq!(get("/config_dump").answer(envoy.status).await.status, 404);
    });
}

#[test]
fn the_service_stands_in_for_pods_that_dns_does_not_know_yet() {
    run(async {
        let (Some(chart), Some(tools)) = (Chart::get(), Tools::get()) else { return };
        let (picker, _engine) = picker().await;
        let here = format!("127.0.0.1:{}", picker.grpc);
        let rendered = config(&chart.set("envoy.enabled=true"));
        let names = [(PODS, 9002, NOBODY), (SERVICE, 9002, here.as_str())];
        let envoy = Standalone::start(tools, rendered, &names).await;
        envoy.passes().await;
    });
}

#[test]
fn without_a_picker_it_fails_closed_or_open_as_the_pool_says() {
    run(async {
        let (Some(chart), Some(tools)) = (Chart::get(), Tools::get()) else { return };
        for (values, after) in [
            ("pool.failureMode=FailClose", None),
            ("pool.failureMode=FailOpen", None),
            ("pool.failureMode=FailOpen,envoy.fallback.host=engines", Some("b")),
        ] {
            let (picker, engine) = picker().await;
            let other = Upstream::start("b", &Gate::closed()).await;
            let (here, fallback) =
                (format!("127.0.0.1:{}", picker.grpc), other.address.to_string());
            let rendered = config(&chart.set(&format!("envoy.enabled=true,{values}")));
            let mut names = vec![(PODS, 9002, here.as_str()), (SERVICE, 9002, here.as_str())];
            if after.is_some() {
                names.push(("engines", 8000, &fallback));
            }
            let envoy = Standalone::start(tools, rendered, &names).await;
            let call = envoy.passes().await;
            assert_eq!(engine.seen(&call.id).len(), 1, "{values}");

            picker.process.signal("KILL");
            // Under both names. Until then requests are given to it, and lost.
            let unhealthy = async || {
                let clusters = get("/clusters").answer(envoy.admin.address.port()).await;
                (clusters.text().matches("failed_active_hc").count() == 2).then_some(())
            };
            eventually("the picker to be missed", unhealthy).await;
            match after {
                None => assert_eq!(chat("closed").answer(envoy.port).await.status, 503, "{values}"),
                Some(engine) => {
                    // Its threads hear of it one after the other.
                    let call = envoy.passes().await;
                    let seen = &other.seen(&call.id);
                    assert_eq!((seen.len(), other.name.as_str()), (1, engine), "{values}");
                    assert_eq!(seen[0].length, call.sent().len(), "the body is whole");
                }
            }
        }
    });
}

#[test]
fn it_ends_when_its_last_answer_has() {
    run(async {
        let (Some(chart), Some(tools)) = (Chart::get(), Tools::get()) else { return };
        let gate = Gate::closed();
        let engine = Upstream::start("a", &gate).await;
        let list = endpoints([(engine.name.as_str(), engine.address)]);
        let picker = Picker::start("tls: { mode: self-signed }\n", &list).await;
        let here = format!("127.0.0.1:{}", picker.grpc);
        let rendering = chart.set("envoy.enabled=true");
        let names = [(PODS, 9002, here.as_str()), (SERVICE, 9002, NOBODY)];
        let envoy = Standalone::start(tools, config(&rendering), &names).await;
        envoy.passes().await;
        let answer = chat("long").answered("hold-sse").stream(envoy.port).await;

        let script = rendering.one("ConfigMap", "envoy")["data"]["drain.sh"].as_str().unwrap();
        let script = script.replace("/9901", &format!("/{}", envoy.admin.address.port()));
        let drain = Process::start("drain.sh", Command::new("bash").args(["-ec", &script]));
        tokio::time::sleep(std::time::Duration::from_secs(7)).await;
        assert!(drain.ended().is_none(), "an answer is still open");
        gate.open();
        assert_eq!(answer.finish().await.status, 200);
        assert!(drain.end().await.success());
        assert!(envoy.process.ended().is_none());
    });
}

#[test]
fn envoy_takes_every_configuration_that_is_rendered() {
    let (Some(chart), Some(tools)) = (Chart::get(), Tools::get()) else { return };
    let has_envoy = |rendering: &Rendering| {
        rendering.0.iter().any(|it: &Value| !it["data"]["envoy.yaml"].is_null())
    };
    let renderings = chart.renderings();
    let mut configs: Vec<String> =
        renderings.values().filter(|it| has_envoy(it)).map(config).collect();
    assert!(configs.len() > 1);
    configs.push(config(&chart.render(&[
        "--set-string",
        "config.tls.mode=off,pool.appProtocol=kubernetes\\.io/h2c,pool.failureMode=FailOpen",
        "--set",
        "envoy.enabled=true",
    ])));
    for config in configs {
        let file = folder("standalone").join("envoy.yaml");
        std::fs::write(&file, config).unwrap();
        let mut envoy = Command::new(&tools.envoy);
        let (code, stdout, stderr) = output(envoy.args(["--mode", "validate", "-c"]).arg(&file));
        assert_eq!(code, Some(0), "{stdout}{stderr}");
        assert!(!stderr.contains("Deprecated") && !stderr.contains("deprecated"), "{stderr}");
    }
}
