//! The picker in a cluster: a real API server, the rights of the chart and no others, and requests through Envoy all
//! the while.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use crate::chart::{Chart, KUBE_VERSION};
use crate::harness::client::{Answer, chat};
use crate::harness::cluster::{Cluster, Namespace, NewPod};
use crate::harness::envoy::{Envoy, Front, ORIGINAL_DST};
use crate::harness::picker::{BINARY, Picker};
use crate::harness::process::{Process, folder, output};
use crate::harness::relay::Relay;
use crate::harness::tools::Tools;
use crate::harness::upstream::{Gate, Upstream};
use crate::harness::{AbortOnDrop, eventually, patiently, run, within};

const POOL: &str = "
apiVersion: inference.networking.k8s.io/v1
kind: InferencePool
metadata: { name: pool }
spec:
  selector: { matchLabels: { app: engine } }
  targetPorts: [{ number: PORT }]
  endpointPickerRef: { name: picker, port: { number: 9002 } }
";
const ENGINE: &[(&str, &str)] = &[("app", "engine")];
const CONFIG: &str = "kubernetes: { pool: pool }\n";

/// A namespace with engines that listen, and a picker's account in it.
struct Scene {
    namespace: Namespace,
    token: String,
    engines: Vec<Upstream>,
    port: u16,
    gate: Gate,
}

/// A picker with its Envoy.
struct Stage {
    picker: Picker,
    envoy: Envoy,
}

impl Scene {
    /// Sets it with this many engines, at 127.0.0.2 and so on, all on one port. No pod and no pool is there yet.
    async fn set(cluster: &Cluster, engines: u8) -> Option<Self> {
        let chart = Chart::get()?;
        let namespace = cluster.namespace("scene").await;
        let rights = output(chart.helm().args(["template", "picker", "charts/llm-ring"]).args([
            "--namespace",
            &namespace.name,
            "--kube-version",
            KUBE_VERSION,
            "--set=replicas=2,pool.name=pool",
            "--show-only=templates/rbac.yaml",
        ]));
        let (Some(0), rights, _) = rights else { panic!("{rights:?}") };
        let applied = namespace.apply(&rights).await.unwrap();
        let account = applied[0].metadata.name.clone().unwrap();
        let token = namespace.token(&account).await;
        let gate = Gate::closed();
        let (port, listeners) = on_one_port(engines).await;
        let engines = listeners.into_iter().map(|(ip, listener)| {
            Upstream::on(&format!("engine-{}", ip.octets()[3]), listener, &gate)
        });
        Some(Self { namespace, token, engines: engines.collect(), port, gate })
    }

    async fn apply_pool(&self, port: u16) {
        self.namespace.apply(&POOL.replace("PORT", &port.to_string())).await.unwrap();
    }

    /// Creates the pod of an engine, ready.
    async fn pod(&self, engine: usize) -> String {
        let name = self.engines[engine].name.clone();
        let pod = NewPod { name: &name, labels: ENGINE, node: Some("node"), ..NewPod::default() };
        self.namespace.create(&pod).await;
        self.ready(engine, true).await;
        name
    }

    async fn ready(&self, engine: usize, ready: bool) {
        let engine = &self.engines[engine];
        self.namespace.runs(&engine.name, &engine.address.ip().to_string(), ready).await;
    }

    fn kubeconfig(&self, cluster: &Cluster, at: SocketAddr) -> PathBuf {
        cluster.kubeconfig(&self.token, at, &self.namespace)
    }

    async fn stage(&self, config: &str, kubeconfig: &Path) -> Option<Stage> {
        let picker = Picker::in_kubernetes(config, kubeconfig).await;
        let envoy = Envoy::start(Tools::get()?, ORIGINAL_DST, picker.grpc, &[]).await;
        Some(Stage { picker, envoy })
    }

    /// Sets a scene with pool and pods and waits until the picker knows them.
    async fn played(cluster: &Cluster, engines: u8) -> Option<(Self, Stage)> {
        Self::played_with(cluster, engines, CONFIG, cluster.address()).await
    }

    /// The same with a configuration, for a picker that reaches the API server at an address.
    async fn played_with(
        cluster: &Cluster,
        engines: u8,
        config: &str,
        at: SocketAddr,
    ) -> Option<(Self, Stage)> {
        let scene = Self::set(cluster, engines).await?;
        scene.apply_pool(scene.port).await;
        for engine in 0..scene.engines.len() {
            scene.pod(engine).await;
        }
        let kubeconfig = scene.kubeconfig(cluster, at);
        let stage = scene.stage(config, &kubeconfig).await?;
        stage.has(engines).await;
        Some((scene, stage))
    }
}

/// Listens on one port of several addresses.
async fn on_one_port(count: u8) -> (u16, Vec<(Ipv4Addr, TcpListener)>) {
    'ports: for _ in 0..20 {
        let mut listeners = Vec::new();
        let mut port = 0;
        for n in 0..count {
            let ip = Ipv4Addr::new(127, 0, 0, n + 2);
            let Ok(listener) = TcpListener::bind((ip, port)).await else { continue 'ports };
            port = listener.local_addr().unwrap().port();
            listeners.push((ip, listener));
        }
        return (port, listeners);
    }
    panic!("no port is free on {count} addresses");
}

impl Stage {
    /// Sends what begins a conversation of its own.
    async fn ask(&self) -> Answer {
        static ASKED: AtomicUsize = AtomicUsize::new(0);
        let number = ASKED.fetch_add(1, Ordering::Relaxed);
        chat(&format!("who kept bridge {number}?")).answer(self.envoy.port).await
    }

    /// Asks until each of these has answered, and nobody else.
    async fn serve(&self, names: &[&str]) {
        let mut seen = std::collections::BTreeSet::new();
        for _ in 0..40 {
            let answer = self.ask().await;
            assert_eq!(answer.status, 200, "{}", answer.text());
            seen.insert(answer.header("x-routed-to").unwrap().to_owned());
        }
        assert_eq!(seen.iter().map(String::as_str).collect::<Vec<_>>(), names);
    }

    async fn has(&self, endpoints: u8) {
        self.picker.reaches("llm_ring_endpoints", "", f64::from(endpoints)).await;
        self.picker.reaches("llm_ring_pool_synced", "", 1.0).await;
    }

    /// Waits for a line of `/readyz` and its status.
    async fn says(&self, status: u16, text: &str) {
        eventually(&format!("{status} with {text:?}"), async || {
            let answer = self.picker.get("/readyz").await;
            (answer.status == status && answer.text().contains(text)).then_some(())
        })
        .await;
    }
}

#[test]
fn pods_that_are_ready_are_endpoints_and_those_that_are_not_are_none() {
    run(async {
        let Some(cluster) = Cluster::shared().await else { return };
        let Some((scene, stage)) = Scene::played(cluster, 3).await else { return };
        stage.serve(&["engine-2", "engine-3", "engine-4"]).await;
        assert_eq!(stage.picker.get("/readyz").await.text(), "ready\n3 endpoints\n");

        scene.ready(0, false).await;
        stage.has(2).await;
        stage.serve(&["engine-3", "engine-4"]).await;
        stage.picker.reaches("llm_ring_pods_absent", "reason=\"not-ready\"", 1.0).await;
        scene.ready(0, true).await;
        stage.has(3).await;

        // Evicted: the address goes, and the pod stays.
        let evicted =
            json!({ "phase": "Failed", "reason": "Evicted", "podIP": null, "podIPs": null });
        scene.namespace.set_status("engine-3", evicted).await;
        stage.has(2).await;
        scene.namespace.delete_now("engine-4").await;
        stage.has(1).await;
        stage.serve(&["engine-2"]).await;
        scene.namespace.delete_now("engine-2").await;
        stage.has(0).await;
        assert_eq!(stage.ask().await.status, 503);
    });
}

#[test]
fn a_pod_that_is_terminating_keeps_its_streams_and_gets_no_new_ones() {
    run(async {
        let Some(cluster) = Cluster::shared().await else { return };
        let Some((scene, stage)) = Scene::played(cluster, 2).await else { return };
        scene.ready(1, false).await;
        stage.has(1).await;
        let call = chat("a long story").answered("hold-sse events=5");
        let mut answer = call.stream(stage.envoy.port).await;
        answer.chunk().await;
        scene.ready(1, true).await;
        stage.has(2).await;

        scene.namespace.delete("engine-2").await;
        stage.has(1).await;
        stage.picker.reaches("llm_ring_pods_absent", "reason=\"ending\"", 1.0).await;
        stage.serve(&["engine-3"]).await;
        // Gone altogether, and another pod has its name and its address: it owes nothing.
        scene.namespace.delete_now("engine-2").await;
        scene.pod(0).await;
        stage.has(2).await;
        stage.picker.reaches("llm_ring_endpoint_requests", "endpoint=\"engine-2\"", 0.0).await;
        scene.gate.open();
        assert!(answer.finish().await.text().ends_with("data: [DONE]\n\n"));
        stage.picker.is_idle().await;
    });
}

#[test]
fn a_pool_is_waited_for_and_its_end_and_its_changes_are_followed() {
    run(async {
        let Some(cluster) = Cluster::shared().await else { return };
        let Some(scene) = Scene::set(cluster, 2).await else { return };
        let kubeconfig = scene.kubeconfig(cluster, cluster.address());
        let Some(stage) = scene.stage(CONFIG, &kubeconfig).await else { return };
        let missing = format!("there is no InferencePool {}/pool", scene.namespace.name);
        stage.says(503, &missing).await;
        assert_eq!(stage.picker.get("/livez").await.status, 200);
        assert_eq!(stage.ask().await.status, 503);

        scene.apply_pool(scene.port).await;
        scene.pod(0).await;
        scene.pod(1).await;
        stage.has(2).await;
        stage.says(200, "ready").await;
        // Ports change: at once, without a word from the pods.
        scene.apply_pool(9).await;
        eventually("the new port", async || (stage.ask().await.status == 503).then_some(())).await;
        let two = format!("number: {} }}, {{ number: 9", scene.port);
        scene.namespace.apply(&POOL.replace("number: PORT", &two)).await.unwrap();
        stage.has(4).await;
        scene.apply_pool(scene.port).await;
        stage.has(2).await;
        stage.serve(&["engine-2", "engine-3"]).await;

        // The selector changes.
        let other = NewPod { name: "other", labels: &[("app", "other")], ..NewPod::default() };
        scene.namespace.create(&other).await;
        scene.namespace.runs("other", "127.0.0.3", true).await;
        let pool = POOL.replace("PORT", &scene.port.to_string());
        let stop = Arc::new(AtomicBool::new(false));
        let client = tokio::spawn(keep_asking(stage.envoy.port, Arc::clone(&stop)));
        // The client is well under way when it changes, however fast the change is.
        tokio::time::sleep(Duration::from_millis(300)).await;
        scene.namespace.apply(&pool.replace("app: engine", "app: other")).await.unwrap();
        stage.has(1).await;
        stage.serve(&["other"]).await;
        // Until the pods of the new selector were known, those of the old one served.
        stop.store(true, Ordering::Relaxed);
        let (sent, failed) = client.await.unwrap();
        assert!(sent > 2 && failed.is_empty(), "{sent} requests; {failed:?}");

        // Deleted, and made again.
        let delete = |name: &'static str| {
            let pools = scene.namespace.pools();
            async move { pools.delete(name, &kube::api::DeleteParams::default()).await.unwrap() }
        };
        drop(within("its deletion", delete("pool")).await);
        stage.says(503, &missing).await;
        stage.picker.reaches("llm_ring_endpoints", "", 0.0).await;
        assert_eq!(stage.ask().await.status, 503);
        scene.apply_pool(scene.port).await;
        stage.has(2).await;
        stage.says(200, "2 endpoints").await;
        stage.serve(&["engine-2", "engine-3"]).await;
    });
}

#[test]
fn what_happens_while_the_watch_is_down_is_not_missed() {
    run(async {
        let Some(cluster) = Cluster::shared().await else { return };
        let mut relay = Relay::start(cluster.address());
        let played = Scene::played_with(cluster, 3, CONFIG, relay.address()).await;
        let Some((scene, stage)) = played else { return };

        relay.cut().await;
        scene.namespace.delete_now("engine-2").await;
        // The same name, another pod and another address.
        scene.namespace.delete_now("engine-3").await;
        let again = NewPod { name: "engine-3", labels: ENGINE, ..NewPod::default() };
        scene.namespace.create(&again).await;
        scene.namespace.runs("engine-3", "127.0.0.2", true).await;
        // It goes on with what it knew, stays ready, and says so.
        stage.says(200, "Kubernetes has not answered for").await;
        stage.serve(&["engine-2", "engine-3", "engine-4"]).await;
        assert!(stage.picker.metrics().await.sum("llm_ring_kubernetes_silent_seconds", "") > 0.0);
        relay.mend();
        stage.has(2).await;
        eventually("the new engine-3", async || {
            let answer = stage.ask().await;
            let served = scene.engines[0].address.to_string();
            let record = stage.picker.process.find(|line| {
                line.contains(&format!("\"destinations\":[\"{served}\"]")).then_some(())
            });
            assert_eq!(answer.status, 200);
            record
        })
        .await;
        stage.serve(&["engine-3", "engine-4"]).await;
        stage.picker.reaches("llm_ring_kubernetes_silent_seconds", "", 0.0).await;
    });
}

#[test]
fn a_watch_that_goes_silent_without_a_byte_is_noticed() {
    run(async {
        let Some(cluster) = Cluster::shared().await else { return };
        let mut relay = Relay::start(cluster.address());
        let config = "kubernetes: { pool: pool, watch_seconds: 2 }\n";
        let played = Scene::played_with(cluster, 2, config, relay.address()).await;
        let Some((scene, stage)) = played else { return };
        relay.freeze().await;
        scene.namespace.delete_now("engine-2").await;
        stage.says(200, "Kubernetes has not answered for").await;
        stage.serve(&["engine-2", "engine-3"]).await;
        relay.thaw();
        stage.has(1).await;
        stage.serve(&["engine-3"]).await;
    });
}

#[test]
fn a_server_that_is_gone_and_has_forgotten_is_listed_again() {
    run(async {
        let Some(mut cluster) = Cluster::start().await else { return };
        let mut relay = Relay::start(cluster.address());
        let config = "kubernetes: { pool: pool, leader_election: true, lease_seconds: 3 }\n";
        let played = Scene::played_with(&cluster, 3, config, relay.address()).await;
        let Some((scene, stage)) = played else { return };
        stage.says(200, "ready").await;
        // Who leads goes on leading: nobody else can take the lease either, and it has long run out.
        cluster.stop().await;
        stage.says(200, "routing on what was known").await;
        tokio::time::sleep(Duration::from_secs(5)).await;
        stage.says(200, "routing on what was known").await;
        stage.serve(&["engine-2", "engine-3", "engine-4"]).await;
        cluster.start_again().await;
        scene.namespace.delete_now("engine-2").await;
        stage.has(2).await;

        // What it watches from is too old for the server now: only a list can tell it what it missed.
        relay.cut().await;
        stage.says(200, "Kubernetes has not answered for").await;
        let lists = stage.picker.metrics().await.sum("llm_ring_kubernetes_lists_total", "");
        scene.namespace.delete_now("engine-3").await;
        cluster.stop().await;
        cluster.compact().await;
        cluster.start_again().await;
        relay.mend();
        stage.has(1).await;
        stage.serve(&["engine-4"]).await;
        assert!(stage.picker.metrics().await.sum("llm_ring_kubernetes_lists_total", "") > lists);
        stage.says(200, "ready\n1 endpoints").await;
    });
}

#[test]
fn objectives_of_the_older_group_count_where_the_newer_is_not_installed() {
    run(async {
        let Some(cluster) = Cluster::start().await else { return };
        cluster.remove_crd("inferenceobjectives.llm-d.ai").await;
        let Some((scene, stage)) = Scene::played(&cluster, 1).await else { return };
        let objective =
            "{ apiVersion: inference.networking.x-k8s.io/v1alpha2, kind: InferenceObjective,
            metadata: { name: batch }, spec: { priority: -3, poolRef: { name: pool } } }";
        scene.namespace.apply(objective).await.unwrap();
        eventually("its priority", async || {
            let call = chat("later").header("x-gateway-inference-objective", "batch");
            assert_eq!(call.answer(stage.envoy.port).await.status, 200);
            (stage.picker.record(&call.id).await["priority"] == -3).then_some(())
        })
        .await;
    });
}

#[test]
fn an_objective_gives_its_requests_their_priority() {
    run(async {
        let Some(cluster) = Cluster::shared().await else { return };
        let Some((scene, stage)) = Scene::played(cluster, 1).await else { return };
        for (name, pool, priority) in [("batch", "pool", -5), ("other", "other-pool", -5)] {
            let objective = format!(
                "{{ apiVersion: llm-d.ai/v1alpha2, kind: InferenceObjective, metadata: {{ name: {name} }},
                   spec: {{ priority: {priority}, poolRef: {{ name: {pool} }} }} }}"
            );
            scene.namespace.apply(&objective).await.unwrap();
        }
        let priority = async |header: &'static str, name: &str| {
            let call = chat("later").header(header, name);
            assert_eq!(call.answer(stage.envoy.port).await.status, 200);
            stage.picker.record(&call.id).await["priority"].as_i64().unwrap_or(0)
        };
        eventually("its priority", async || {
            let now = priority("x-llm-d-inference-objective", "batch").await;
            (now == -5).then_some(())
        })
        .await;
        assert_eq!(priority("x-gateway-inference-objective", "batch").await, -5);
        assert_eq!(
            priority("x-llm-d-inference-objective", "other").await,
            0,
            "it is another pool's"
        );
        assert_eq!(priority("x-llm-d-inference-objective", "nobody").await, 0);
    });
}

#[test]
fn a_selector_needs_no_pool() {
    run(async {
        let Some(cluster) = Cluster::shared().await else { return };
        let Some(scene) = Scene::set(cluster, 2).await else { return };
        scene.pod(0).await;
        scene.pod(1).await;
        let config = format!(
            "kubernetes: {{ selector: 'app in (engine, other),!canary', target_ports: [{}] }}\n",
            scene.port
        );
        let kubeconfig = scene.kubeconfig(cluster, cluster.address());
        let Some(stage) = scene.stage(&config, &kubeconfig).await else { return };
        stage.has(2).await;
        let canary = NewPod {
            name: "canary",
            labels: &[("app", "engine"), ("canary", "1")],
            ..NewPod::default()
        };
        scene.namespace.create(&canary).await;
        scene.namespace.runs("canary", "127.0.0.9", true).await;
        stage.serve(&["engine-2", "engine-3"]).await;
    });
}

#[test]
fn rights_that_are_missing_are_named_and_can_be_given_later() {
    run(async {
        let Some(cluster) = Cluster::shared().await else { return };
        let Some(scene) = Scene::set(cluster, 1).await else { return };
        scene.apply_pool(scene.port).await;
        scene.pod(0).await;
        let account = "{ apiVersion: v1, kind: ServiceAccount, metadata: { name: nobody } }";
        scene.namespace.apply(account).await.unwrap();
        let token = scene.namespace.token("nobody").await;
        let kubeconfig = cluster.kubeconfig(&token, cluster.address(), &scene.namespace);
        let Some(stage) = scene.stage(CONFIG, &kubeconfig).await else { return };
        stage.says(503, "its service account needs get, list and watch on inferencepools").await;
        let name = &scene.namespace.name;
        let binding = format!(
            "{{ apiVersion: rbac.authorization.k8s.io/v1, kind: RoleBinding, metadata: {{ name: later }},
               roleRef: {{ apiGroup: rbac.authorization.k8s.io, kind: Role, name: picker-llm-ring }},
               subjects: [{{ kind: ServiceAccount, name: nobody, namespace: {name} }}] }}"
        );
        scene.namespace.apply(&binding).await.unwrap();
        stage.has(1).await;
        stage.says(200, "ready\n1 endpoints\n").await;
    });
}

#[test]
fn of_two_pickers_one_leads_and_the_other_takes_over() {
    run(async {
        let Some(cluster) = Cluster::shared().await else { return };
        let config = |identity: &str| {
            format!(
                "kubernetes: {{ pool: pool, leader_election: true, lease_seconds: 3, identity: {identity} }}\n"
            )
        };
        let played = Scene::played_with(cluster, 2, &config("first"), cluster.address()).await;
        let Some((scene, first)) = played else { return };
        let kubeconfig = scene.kubeconfig(cluster, cluster.address());
        first.says(200, "ready").await;
        let Some(second) = scene.stage(&config("second"), &kubeconfig).await else { return };
        second.has(2).await;
        second.says(503, "not the leader: first holds the Lease").await;
        // It knows the pool all the while: an Envoy that still asks it gets an answer.
        second.serve(&["engine-2", "engine-3"]).await;

        let killed = Instant::now();
        first.picker.process.signal("KILL");
        second.says(200, "ready").await;
        // The lease holds for 3 s from its last renewal, and is looked at every 0.4 s.
        let (after, least) = (killed.elapsed(), Duration::from_millis(1500));
        assert!(after > least, "taken over after {after:?}, while the lease still held");

        // One that is asked to end gives it back, and nobody waits.
        let Some(third) = scene.stage(&config("third"), &kubeconfig).await else { return };
        third.has(2).await;
        third.says(503, "not the leader: second holds the Lease").await;
        second.picker.process.signal("TERM");
        third.says(200, "ready").await;
        assert_eq!(second.picker.process.end().await.code(), Some(0));
        third.serve(&["engine-2", "engine-3"]).await;
    });
}

#[test]
fn a_newcomer_warms_up_and_it_is_told_how_many_conversations_move() {
    run(async {
        let Some(cluster) = Cluster::shared().await else { return };
        let Some(scene) = Scene::set(cluster, 3).await else { return };
        scene.apply_pool(scene.port).await;
        scene.pod(0).await;
        scene.pod(1).await;
        let kubeconfig = scene.kubeconfig(cluster, cluster.address());
        let config = format!("{CONFIG}warmup: {{ seconds: 2, steps: 4 }}\n");
        let Some(stage) = scene.stage(&config, &kubeconfig).await else { return };
        stage.has(2).await;
        for conversation in 0..60 {
            let name = format!("conversation-{conversation}");
            let call = chat(&name).header("x-conversation-id", &name).answered("usage prompt=90");
            assert_eq!(call.answer(stage.envoy.port).await.status, 200);
        }
        stage.picker.reaches("llm_ring_remembered_conversations", "", 60.0).await;
        // Who comes within the time of warming up is one of the founders, and they are all as cold.
        tokio::time::sleep(Duration::from_secs(2)).await;
        scene.pod(2).await;
        stage.picker.reaches("llm_ring_warming_endpoints", "", 1.0).await;
        let joined = stage.picker.process.line("the change", |line| {
            let line: Value = serde_json::from_str(line).ok()?;
            (line["joined"] == "engine-4").then_some(line)
        });
        let joined = joined.await;
        assert_eq!((&joined["warming"], &joined["remembered"]), (&json!(1), &json!(60)));
        let at_first = joined["homes_moved"].as_f64().unwrap();
        stage.picker.reaches("llm_ring_warming_endpoints", "", 0.0).await;
        let moved = stage.picker.metrics().await.sum("llm_ring_homes_moved_total", "");
        // A third of them in the end, and about a quarter of that at each step.
        assert!(at_first < 15.0 && (8.0..36.0).contains(&moved), "{at_first}, then {moved}");
    });
}

#[test]
fn the_upstream_chart_s_arguments_start_it() {
    run(async {
        let Some(cluster) = Cluster::shared().await else { return };
        let Some(scene) = Scene::set(cluster, 1).await else { return };
        scene.apply_pool(scene.port).await;
        scene.pod(0).await;
        let folder = folder("upstream");
        let plugins = folder.join("default-plugins.yaml");
        let text = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n- type: queue-scorer\n- type: prefix-cache-scorer\n";
        std::fs::write(&plugins, text).unwrap();
        let mut command = Command::new(BINARY);
        command
            .args(["--pool-name", "pool", "--pool-namespace", &scene.namespace.name])
            .args(["--pool-group", "inference.networking.k8s.io", "--zap-encoder", "json"])
            .arg("--config-file")
            .arg(&plugins)
            .args(["--grpc-port=0", "--grpc-health-port", "0", "--metrics-port=0", "--v=4"])
            .args([
                "--ha-enable-leader-election",
                "--tracing=false",
                "--metrics-endpoint-auth=false",
            ])
            .args(["--refresh-metrics-interval=50ms", "--secure-serving=false"])
            .env("KUBECONFIG", scene.kubeconfig(cluster, cluster.address()))
            .env("NAMESPACE", &scene.namespace.name)
            .env("POD_NAME", "picker-0");
        let process = Process::start("llm-ring", &mut command);
        let warned = process.line("a word about plugins", |line| {
            line.contains("queue-scorer, prefix-cache-scorer").then_some(())
        });
        warned.await;
        let warned = process.line("a word about a flag", |line| {
            line.contains("--refresh-metrics-interval has no effect").then_some(())
        });
        warned.await;
        let led = process.line("its lease", |line| {
            let name = format!("epp-{}-pool.llm-d.ai", scene.namespace.name);
            (line.contains("this picker leads") && line.contains(&name)).then_some(())
        });
        led.await;
        process
            .line("its endpoints", |line| line.contains("\"joined\":\"engine-2\"").then_some(()))
            .await;
        process.signal("TERM");
        assert_eq!(process.end().await.code(), Some(0));
    });
}

#[test]
fn in_the_files_of_its_image_it_is_as_good_as_in_a_pod() {
    run(async {
        let Some(cluster) = Cluster::shared().await else { return };
        if output(Command::new("id").arg("-u")).1.trim() != "0" {
            assert!(std::env::var_os("CI").is_none(), "CI skips nothing");
            eprintln!("SKIPPED: in_the_files_of_its_image: only root may change its root");
            return;
        }
        let Some(scene) = Scene::set(cluster, 2).await else { return };
        scene.apply_pool(scene.port).await;
        scene.pod(0).await;
        scene.pod(1).await;
        // What a kubelet mounts, and the variables it sets.
        let account = folder("account");
        std::fs::write(account.join("token"), &scene.token).unwrap();
        std::fs::write(account.join("namespace"), &scene.namespace.name).unwrap();
        std::fs::copy(cluster.certificate(), account.join("ca.crt")).unwrap();
        let mut image = Command::new("bash");
        image
            .arg(format!("{}/tests/image.sh", crate::chart::ROOT))
            .arg(BINARY)
            .args(["--pool-name=pool", "--address=127.0.0.1", "--grpc-port=0"])
            .args(["--grpc-health-port=0", "--metrics-port=0", "--drain-timeout=0s"])
            .env("FOLDER", folder("root"))
            .env(
                "VOLUMES",
                format!("{}:/var/run/secrets/kubernetes.io/serviceaccount", account.display()),
            )
            .env("KUBERNETES_SERVICE_HOST", "127.0.0.1")
            .env("KUBERNETES_SERVICE_PORT", cluster.address().port().to_string())
            .env_remove("KUBECONFIG");
        let picker =
            Picker::serving(folder("picker"), Process::start("llm-ring in its image", &mut image))
                .await;
        let front = Front { tls: true, ..ORIGINAL_DST };
        let Some(tools) = Tools::get() else { return };
        let envoy = Envoy::start(tools, front, picker.grpc, &[]).await;
        let stage = Stage { picker, envoy };
        stage.has(2).await;
        stage.serve(&["engine-2", "engine-3"]).await;
        let status =
            std::fs::read_to_string(format!("/proc/{}/status", stage.picker.process.pid()))
                .unwrap();
        let has = |line: &str| assert!(status.contains(line), "{status}");
        has("Uid:\t65532\t65532\t65532\t65532");
        has("CapEff:\t0000000000000000");
        has("NoNewPrivs:\t1");
        stage.picker.process.signal("TERM");
        assert_eq!(stage.picker.process.end().await.code(), Some(0));
    });
}

/// Hands connections to whom it is told to, as a Service does; those that are open stay where they are.
struct Service {
    address: SocketAddr,
    to: Arc<Mutex<u16>>,
    _task: AbortOnDrop,
}

impl Service {
    async fn start(to: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, to) = (listener.local_addr().unwrap(), Arc::new(Mutex::new(to)));
        let current = Arc::clone(&to);
        let task = tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let to = *current.lock().unwrap();
                tokio::spawn(async move {
                    let mut server = TcpStream::connect(("127.0.0.1", to)).await.unwrap();
                    drop(tokio::io::copy_bidirectional(&mut client, &mut server).await);
                });
            }
        });
        Self { address, to, _task: AbortOnDrop(task.abort_handle()) }
    }
}

/// Sends chats one after the other until told to stop; returns how many, and what was wrong with those that failed.
async fn keep_asking(port: u16, stop: Arc<AtomicBool>) -> (usize, Vec<String>) {
    let (mut sent, mut failed) = (0, Vec::new());
    while !stop.load(Ordering::Relaxed) {
        let how = if sent % 2 == 0 { "usage prompt=50" } else { "sse events=8 pause=25" };
        let call = chat(&format!("turn {sent}")).answered(how);
        let answer = call.answer(port).await;
        sent += 1;
        if answer.status != 200 || (sent % 2 == 0 && !answer.text().ends_with("data: [DONE]\n\n")) {
            failed.push(format!("{} {}", answer.status, answer.text()));
        }
    }
    (sent, failed)
}

#[test]
fn a_rolling_restart_of_the_picker_under_load_loses_no_request() {
    run(async {
        let Some(cluster) = Cluster::shared().await else { return };
        let Some(scene) = Scene::set(cluster, 2).await else { return };
        scene.apply_pool(scene.port).await;
        scene.pod(0).await;
        scene.pod(1).await;
        let kubeconfig = scene.kubeconfig(cluster, cluster.address());
        // As the chart's default with two replicas: one leads, all are replaced at once.
        let config = "kubernetes: { pool: pool, leader_election: true, lease_seconds: 3 }\ndrain: { linger_seconds: 2 }\n";
        let mut picker = Picker::in_kubernetes(config, &kubeconfig).await;
        picker.reaches("llm_ring_endpoints", "", 2.0).await;
        let service = Service::start(picker.grpc).await;
        let Some(tools) = Tools::get() else { return };
        let envoy = Envoy::start(tools, ORIGINAL_DST, service.address.port(), &[]).await;

        let stop = Arc::new(AtomicBool::new(false));
        let mut clients = JoinSet::new();
        for _ in 0..8 {
            clients.spawn(keep_asking(envoy.port, Arc::clone(&stop)));
        }
        for _ in 0..3 {
            let next = Picker::in_kubernetes(config, &kubeconfig).await;
            next.reaches("llm_ring_endpoints", "", 2.0).await;
            picker.process.signal("TERM");
            // The Service learns of it a moment later.
            tokio::time::sleep(Duration::from_millis(500)).await;
            *service.to.lock().unwrap() = next.grpc;
            assert_eq!(picker.process.end().await.code(), Some(0));
            picker = next;
        }
        stop.store(true, Ordering::Relaxed);
        let results = within("the last answers", clients.join_all()).await;
        let sent: usize = results.iter().map(|(sent, _)| sent).sum();
        let failed: Vec<&String> = results.iter().flat_map(|(_, failed)| failed).collect();
        println!("{sent} requests, {} failed", failed.len());
        assert!(sent > 100 && failed.is_empty(), "{sent} requests; {failed:?}");
    });
}

/// `cargo test --release --test it measured -- --ignored --nocapture`
#[test]
#[ignore = "a measurement, of minutes"]
fn measured_from_ready_to_first_pick_and_from_gone_to_last() {
    run(async {
        let Some(cluster) = Cluster::shared().await else { return };
        let Some((scene, stage)) = Scene::played(cluster, 2).await else { return };
        let (mut first, mut last) = (Vec::new(), Vec::new());
        for _ in 0..30 {
            scene.ready(0, false).await;
            stage.has(1).await;
            scene.ready(0, true).await;
            let ready = Instant::now();
            while stage.ask().await.header("x-routed-to") != Some("engine-2") {}
            first.push(ready.elapsed());
            scene.ready(0, false).await;
            let gone = Instant::now();
            let mut latest = Duration::ZERO;
            while gone.elapsed() < Duration::from_millis(200) {
                let asked = gone.elapsed();
                if stage.ask().await.header("x-routed-to") == Some("engine-2") {
                    latest = asked;
                }
            }
            last.push(latest);
        }
        for (what, mut times) in [("ready to first pick", first), ("not ready to last pick", last)]
        {
            times.sort_unstable();
            println!("{what}: median {:?}, max {:?}", times[15], times[29]);
        }
    });
}

/// `cargo test --release --test it measured -- --ignored --nocapture`
#[test]
#[ignore = "a measurement, of minutes"]
fn measured_memory_and_cpu_with_thousands_of_pods() {
    const LABELS: &[(&str, &str)] = &[
        ("app", "engine"),
        ("app.kubernetes.io/name", "llm"),
        ("app.kubernetes.io/instance", "llm-8b"),
        ("pod-template-hash", "7d4b9c6f58"),
        ("llm-d.ai/engine-type", "vllm"),
    ];
    run(async {
        let Some(cluster) = Cluster::start().await else { return };
        let Some(scene) = Scene::set(&cluster, 0).await else { return };
        scene.apply_pool(8000).await;
        let kubeconfig = scene.kubeconfig(&cluster, cluster.address());
        let mut made = 0;
        for pods in [0u32, 1_000, 10_000] {
            while made < pods {
                let batch = (made..pods.min(made + 50)).map(|n| {
                    let namespace = &scene.namespace;
                    async move {
                        let name = format!("llm-7d4b9c6f58-{n:05}");
                        namespace
                            .create(&NewPod { name: &name, labels: LABELS, ..NewPod::default() })
                            .await;
                        let ip = format!("10.{}.{}.{}", n / 60_000, n / 250 % 240, n % 250 + 1);
                        namespace.runs(&name, &ip, true).await;
                    }
                });
                futures_util::future::join_all(batch).await;
                made = pods.min(made + 50);
            }
            let began = Instant::now();
            let picker = Picker::in_kubernetes(CONFIG, &kubeconfig).await;
            let pid = picker.process.pid();
            patiently(Duration::from_secs(120), "all pods", async || {
                let metrics = picker.metrics().await;
                (metrics.sum("llm_ring_endpoints", "") == f64::from(pods)
                    && metrics.sum("llm_ring_pool_synced", "") == 1.0)
                    .then_some(())
            })
            .await;
            let synced = began.elapsed();
            let (start_cpu, resident) = (cpu(pid), resident(pid));
            tokio::time::sleep(Duration::from_secs(30)).await;
            let idle = cpu(pid) - start_cpu;
            println!(
                "{pods} pods: known after {synced:.2?}, CPU until then {start_cpu:.2?}, RSS {resident} MiB (peak {} MiB), then {:.2} % of a core",
                peak(pid),
                idle.as_secs_f64() / 30.0 * 100.0
            );
            if pods > 0 {
                // One pod after the other becomes unready and ready again, 20 changes a second.
                let before = cpu(pid);
                let churn = Instant::now();
                for n in 0..200u32 {
                    let (n, ready) = (n / 2, n % 2 == 1);
                    let ip = format!("10.{}.{}.{}", n / 60_000, n / 250 % 240, n % 250 + 1);
                    scene.namespace.runs(&format!("llm-7d4b9c6f58-{n:05}"), &ip, ready).await;
                    tokio::time::sleep_until(
                        (churn + Duration::from_millis(50) * (2 * n + u32::from(ready) + 1)).into(),
                    )
                    .await;
                }
                let share = (cpu(pid) - before).as_secs_f64() / churn.elapsed().as_secs_f64();
                println!(
                    "{pods} pods, 20 changes a second: {:.1} % of a core, peak RSS {} MiB",
                    share * 100.0,
                    peak(pid)
                );
            }
        }
    });
}

/// Processor time of a process so far.
fn cpu(pid: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit(") ").next().unwrap().split(' ').collect();
    let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
    Duration::from_millis(ticks * 10)
}

fn memory(pid: u32, what: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(what)).unwrap();
    line.trim_end_matches("kB").trim().parse::<u64>().unwrap() / 1024
}

/// MiB that a process holds.
fn resident(pid: u32) -> u64 {
    memory(pid, "VmRSS:")
}

/// The most that it has held.
fn peak(pid: u32) -> u64 {
    memory(pid, "VmHWM:")
}
