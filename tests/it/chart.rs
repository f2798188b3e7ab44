//! The Helm chart, the example in `k8s/` that is rendered from it, and the image: by a real Helm, and read as YAML.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use serde::Deserialize as _;
use serde_json::{Value, json};

use crate::harness::picker::BINARY;
use crate::harness::process::{folder, output};
use crate::harness::tools::Kubernetes;

pub(crate) const ROOT: &str = env!("CARGO_MANIFEST_DIR");
/// A Helm that was built without the version of its libraries takes Kubernetes for older than it is.
pub(crate) const KUBE_VERSION: &str = "1.34.0";

/// The chart, with a Helm to render it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Chart(&'static Kubernetes);

/// A rendering: all objects.
#[derive(Debug)]
pub(crate) struct Rendering(pub(crate) Vec<Value>);

impl Chart {
    /// Returns it, or says that the test is skipped.
    pub(crate) fn get() -> Option<Self> {
        Kubernetes::get().map(Self)
    }

    pub(crate) fn helm(self) -> Command {
        let mut command = Command::new(&self.0.helm);
        command.current_dir(ROOT);
        command
    }

    fn template(self, arguments: &[&str]) -> (Option<i32>, String, String) {
        let mut helm = self.helm();
        helm.args(["template", "test", "charts/llm-ring", "--kube-version", KUBE_VERSION]);
        output(helm.args(["--namespace", "here"]).args(arguments))
    }

    /// Renders it with these arguments of `helm template`, as YAML.
    #[track_caller]
    pub(crate) fn text(self, arguments: &[&str]) -> String {
        let (code, stdout, stderr) = self.template(arguments);
        assert_eq!(code, Some(0), "{arguments:?}: {stderr}");
        stdout
    }

    /// Renders it with these arguments of `helm template`.
    #[track_caller]
    pub(crate) fn render(self, arguments: &[&str]) -> Rendering {
        Rendering(documents(&self.text(arguments)))
    }

    /// Renders it with this of `--set`.
    #[track_caller]
    pub(crate) fn set(self, values: &str) -> Rendering {
        self.render(&["--set", values])
    }

    /// All renderings that a reader of the chart is pointed to, by the file of values.
    pub(crate) fn renderings(self) -> BTreeMap<String, Rendering> {
        let rendering = |file: String| {
            let rendering = self.render(&["--values", &file]);
            (file, rendering)
        };
        values_files().into_iter().map(rendering).collect()
    }
}

impl Rendering {
    /// The only object of this kind whose name ends like this.
    #[track_caller]
    pub(crate) fn one(&self, kind: &str, name: &str) -> &Value {
        let found: Vec<&Value> = self
            .0
            .iter()
            .filter(|it| it["kind"] == kind)
            .filter(|it| it["metadata"]["name"].as_str().is_some_and(|it| it.ends_with(name)))
            .collect();
        assert_eq!(found.len(), 1, "objects of kind {kind} named …{name}");
        found[0]
    }

    pub(crate) fn kinds(&self) -> BTreeSet<&str> {
        self.0.iter().map(|it| it["kind"].as_str().unwrap()).collect()
    }

    fn picker(&self) -> &Value {
        &self.one("Deployment", "llm-ring")["spec"]["template"]["spec"]
    }

    fn arguments(&self) -> Vec<&str> {
        let arguments = self.picker()["containers"][0]["args"].as_array().unwrap();
        arguments.iter().map(|it| it.as_str().unwrap()).collect()
    }

    fn config(&self) -> &str {
        self.one("ConfigMap", "llm-ring")["data"]["llm-ring.yaml"].as_str().unwrap()
    }

    /// The rights, as `group/resource: verbs`.
    fn rights(&self) -> Vec<String> {
        let mut rights = Vec::new();
        for rule in self.one("Role", "llm-ring")["rules"].as_array().unwrap() {
            let list = |key: &str| -> Vec<&str> {
                rule[key].as_array().unwrap().iter().map(|it| it.as_str().unwrap()).collect()
            };
            let named = rule["resourceNames"].as_array().map_or(String::new(), |names| {
                let names: Vec<&str> = names.iter().map(|name| name.as_str().unwrap()).collect();
                format!(" of {}", names.join(" "))
            });
            for group in list("apiGroups") {
                for resource in list("resources") {
                    let verbs = list("verbs").join(" ");
                    rights.push(format!("{group}/{resource}: {verbs}{named}"));
                }
            }
        }
        rights
    }
}

/// Reads YAML of several documents.
pub(crate) fn documents(text: &str) -> Vec<Value> {
    let documents = serde_yaml::Deserializer::from_str(text);
    let values = documents.map(|document| Value::deserialize(document).unwrap());
    values.filter(|value| !value.is_null()).collect()
}

/// The defaults, all optional parts at once, and what is for each gateway.
pub(crate) fn values_files() -> Vec<String> {
    let mut files = vec!["charts/llm-ring/values.yaml", "tests/it/chart-everything.yaml"];
    let for_gateways = names("charts/llm-ring/values");
    files.extend(for_gateways.iter().map(String::as_str));
    files.into_iter().map(str::to_owned).collect()
}

/// The files of a folder, in order.
pub(crate) fn names(folder: &str) -> Vec<String> {
    let entries = std::fs::read_dir(Path::new(ROOT).join(folder)).unwrap();
    let name = |entry: std::io::Result<std::fs::DirEntry>| {
        format!("{folder}/{}", entry.unwrap().file_name().to_str().unwrap())
    };
    let mut names: Vec<String> = entries.map(name).collect();
    names.sort();
    names
}

pub(crate) fn read(path: &str) -> String {
    std::fs::read_to_string(Path::new(ROOT).join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

#[test]
fn the_chart_is_of_the_picker_s_version() {
    let chart = &documents(&read("charts/llm-ring/Chart.yaml"))[0];
    assert_eq!(chart["appVersion"], env!("CARGO_PKG_VERSION"));
}

#[test]
fn every_values_file_passes_helm_s_lint() {
    let Some(chart) = Chart::get() else { return };
    for values in values_files() {
        let mut helm = chart.helm();
        helm.args(["lint", "charts/llm-ring", "--strict", "--kube-version", KUBE_VERSION]);
        let (code, stdout, stderr) = output(helm.arg("--values").arg(values));
        assert_eq!(code, Some(0), "{stdout}{stderr}");
    }
}

#[test]
fn values_that_cannot_be_are_refused_by_name() {
    let Some(chart) = Chart::get() else { return };
    for (values, says) in [
        ("replcas=2", "'replcas' not allowed"),
        ("envoy.enable=true", "'enable' not allowed"),
        ("replicas=two", "/replicas"),
        ("replicas=0", "/replicas"),
        ("ha.mode=both", "'active-active'"),
        ("pool.targetPorts={0}", "/pool/targetPorts/0"),
        ("pool.failureMode=Open", "'FailOpen'"),
        ("pool.source=Pods", "'Labels'"),
        // What YAML makes of `off` without quotes.
        ("config.tls.mode=false", "/config/tls/mode"),
        ("config.drain.linger_seconds=-1", "/config/drain/linger_seconds"),
        ("config.kubernetes.pool=other", "config.kubernetes.pool: the chart sets it"),
        ("tls.secretName=a,config.tls.mode=off", "set one of them"),
        ("httpRoute.enabled=true", "/httpRoute/parentRefs"),
        ("httpRoute.enabled=true,httpRoute.parentRefs[0].name=a,pool.source=Labels", "pool.source"),
        ("envoy.enabled=true,config.answers.destinations=2", "destinations must be 1"),
        ("podDisruptionBudget.maxUnavailable=some", "/podDisruptionBudget/maxUnavailable"),
    ] {
        let (code, _, stderr) = chart.template(&["--set", values]);
        assert_eq!(code, Some(1), "{values} is taken");
        assert!(stderr.contains(says), "{values}: nothing of {says:?} in {stderr}");
    }
}

#[test]
fn every_key_of_the_values_has_its_place_in_the_schema() {
    fn keys(values: &Value, schema: &Value, path: &str, missing: &mut Vec<String>) {
        let Some(properties) = schema["properties"].as_object() else { return };
        // Helm itself adds `global`.
        for key in properties.keys().filter(|key| *key != "global") {
            if path != ".config" && values.get(key).is_none() {
                missing.push(format!("values.yaml lacks {path}.{key}"));
            }
        }
        for (key, value) in values.as_object().into_iter().flatten() {
            match properties.get(key) {
                Some(schema) => keys(value, schema, &format!("{path}.{key}"), missing),
                None => missing.push(format!("values.schema.json lacks {path}.{key}")),
            }
        }
    }
    let schema = serde_json::from_str(&read("charts/llm-ring/values.schema.json")).unwrap();
    let mut missing = Vec::new();
    keys(&documents(&read("charts/llm-ring/values.yaml"))[0], &schema, "", &mut missing);
    assert_eq!(missing, [""; 0]);
}

#[test]
fn the_example_is_what_the_chart_renders() {
    let Some(chart) = Chart::get() else { return };
    let fresh = folder("k8s");
    let mut render = Command::new("bash");
    render.arg("k8s/render.sh").arg(&fresh).current_dir(ROOT).env("HELM", &chart.0.helm);
    let (code, stdout, stderr) = output(&mut render);
    assert_eq!(code, Some(0), "{stdout}{stderr}");
    let mut files = 0;
    for file in std::fs::read_dir(fresh).unwrap() {
        let path = file.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        let rendered = std::fs::read_to_string(&path).unwrap();
        assert!(rendered == read(&format!("k8s/{name}")), "k8s/{name} is stale: k8s/render.sh");
        files += 1;
    }
    assert_eq!(files, 4);
}

/// The rights that one picker needs.
const RIGHTS: [&str; 4] = [
    "/pods: get list watch",
    "inference.networking.k8s.io/inferencepools: get list watch",
    "inference.networking.x-k8s.io/inferenceobjectives: get list watch",
    "llm-d.ai/inferenceobjectives: get list watch",
];
/// The rights that one of several needs besides.
const LEASE: [&str; 2] = [
    "coordination.k8s.io/leases: create",
    "coordination.k8s.io/leases: get update of epp-here-test-llm-ring.llm-d.ai",
];

#[test]
fn rights_are_these_and_no_others() {
    let Some(chart) = Chart::get() else { return };
    assert_eq!(chart.render(&[]).rights(), RIGHTS);
    assert_eq!(chart.set("replicas=2").rights(), [&RIGHTS[..], &LEASE].concat());
    let by_labels = chart.set("pool.source=Labels").rights();
    assert_eq!(by_labels, [RIGHTS[0], RIGHTS[2], RIGHTS[3]], "no CRD is needed, nor a right to it");
    for (name, rendering) in chart.renderings() {
        let kinds = rendering.kinds();
        assert!(kinds.iter().all(|kind| !kind.starts_with("Cluster")), "{name}: {kinds:?}");
        let subject = &rendering.one("RoleBinding", "llm-ring")["subjects"][0];
        assert_eq!(subject["name"], rendering.picker()["serviceAccountName"], "{name}");
        for object in &rendering.0 {
            assert_eq!(object["metadata"]["namespace"], "here", "{name}: {object}");
        }
    }
}

#[test]
fn more_than_one_replica_is_one_switch() {
    const FLAG: &str = "--ha-enable-leader-election";
    let Some(chart) = Chart::get() else { return };
    let one = chart.render(&[]);
    assert!(!one.arguments().contains(&FLAG));
    assert!(!one.kinds().contains("PodDisruptionBudget"));
    let no_gap = json!({ "maxSurge": 1, "maxUnavailable": 0 });
    let rollout = |it: &Rendering| {
        it.one("Deployment", "llm-ring")["spec"]["strategy"]["rollingUpdate"].clone()
    };
    assert_eq!(rollout(&one), no_gap);

    let two = chart.set("replicas=2");
    assert!(two.arguments().contains(&FLAG));
    let budget = &two.one("PodDisruptionBudget", "llm-ring")["spec"];
    // Of two only the leader is Ready: a lower number would make its node impossible to drain.
    assert_eq!(budget["maxUnavailable"], "100%");
    // And a rollout that waits for new pods to be Ready would never end.
    assert_eq!(rollout(&two)["maxUnavailable"], "100%");
    let spread = two.picker()["topologySpreadConstraints"].as_array().unwrap();
    assert_eq!(spread.len(), 2);

    let all_pick = chart.set("replicas=2,ha.mode=active-active");
    assert!(!all_pick.arguments().contains(&FLAG));
    assert_eq!(all_pick.rights(), RIGHTS);
    assert_eq!(all_pick.one("PodDisruptionBudget", "llm-ring")["spec"]["maxUnavailable"], 1);
    assert_eq!(rollout(&all_pick), no_gap);
    for rendering in [&two, &all_pick] {
        let budget = &rendering.one("PodDisruptionBudget", "llm-ring")["spec"]["selector"];
        assert_eq!(budget, &rendering.one("Deployment", "llm-ring")["spec"]["selector"]);
    }
}

#[test]
fn the_picker_is_told_its_pool() {
    let Some(chart) = Chart::get() else { return };
    let by_name = chart.set("pool.name=llama,pool.matchLabels.app=llama,pool.targetPorts={1,2}");
    assert_eq!(
        by_name.arguments(),
        ["--config=/etc/llm-ring/llm-ring.yaml", "--pool-name=llama", "--pool-namespace=here"]
    );
    let pool = &by_name.one("InferencePool", "llama")["spec"];
    assert_eq!(pool["selector"]["matchLabels"], json!({ "app": "llama" }));
    assert_eq!(pool["targetPorts"], json!([{ "number": 1 }, { "number": 2 }]));
    let picker = by_name.one("Service", "llm-ring");
    assert_eq!(pool["endpointPickerRef"]["name"], picker["metadata"]["name"]);
    assert_eq!(pool["endpointPickerRef"]["port"]["number"], picker["spec"]["ports"][0]["port"]);

    let by_labels = chart.set("pool.source=Labels,pool.matchLabels.b=two,pool.matchLabels.a=one");
    assert_eq!(
        by_labels.arguments()[1..],
        ["--endpoint-selector=a=one,b=two", "--endpoint-target-ports=8000"]
    );
    assert!(!by_labels.kinds().contains("InferencePool"));
    assert!(!chart.set("pool.create=false").kinds().contains("InferencePool"));

    let default = chart.render(&[]);
    let pool = default.one("InferencePool", "llm-ring");
    assert_eq!(
        pool["spec"]["selector"]["matchLabels"],
        json!({ "llm-ring/pool": "test-llm-ring" })
    );
}

#[test]
fn probes_ask_the_health_port_by_the_names_that_it_knows() {
    let Some(chart) = Chart::get() else { return };
    for (values, port) in [("replicas=1", 9003), ("config.server.health_port=7003", 7003)] {
        let rendering = chart.set(values);
        let container = &rendering.picker()["containers"][0];
        let grpc = |probe: &str| container[probe]["grpc"].clone();
        assert_eq!(grpc("livenessProbe"), json!({ "port": port, "service": "liveness" }));
        assert_eq!(grpc("readinessProbe"), json!({ "port": port, "service": "readiness" }));
        // A follower is not ready for as long as another leads, and must not be ended for it.
        assert_eq!(grpc("startupProbe"), json!({ "port": port, "service": "liveness" }));
        let startup = |key: &str| container["startupProbe"][key].as_u64().unwrap();
        assert!(startup("periodSeconds") * startup("failureThreshold") >= 120);
    }
}

#[test]
fn pods_are_given_the_time_that_the_picker_takes_to_end() {
    let Some(chart) = Chart::get() else { return };
    for (values, takes) in [
        ("replicas=1", 5 + 60),
        ("config.drain.timeout_seconds=600", 5 + 600),
        ("config.drain.timeout_seconds=0,config.drain.linger_seconds=40", 40),
    ] {
        let rendering = chart.set(&format!("{values},envoy.enabled=true"));
        let envoy = &rendering.one("Deployment", "envoy")["spec"]["template"]["spec"];
        for pod in [rendering.picker(), envoy] {
            let given = pod["terminationGracePeriodSeconds"].as_u64().unwrap();
            assert!(given > takes, "{values}: {given}");
        }
    }
}

#[test]
fn the_picker_takes_every_command_line_and_configuration_that_is_rendered() {
    let Some(chart) = Chart::get() else { return };
    let file = folder("chart").join("llm-ring.yaml");
    for (name, rendering) in chart.renderings() {
        std::fs::write(&file, rendering.config()).unwrap();
        let mut picker = Command::new(BINARY);
        picker.arg("config").arg("--config").arg(&file).args(&rendering.arguments()[1..]);
        let (code, stdout, stderr) = output(&mut picker);
        assert_eq!(code, Some(0), "{name}: {stderr}");
        let pool = rendering.one("InferencePool", "")["metadata"]["name"].as_str().unwrap();
        assert!(stdout.contains(&format!("pool: \"{pool}\"")), "{name}: {stdout}");
    }
    // Numbers stay numbers, and words words, however large and however odd.
    let config = r#"config={"requests": {"max_body_bytes": 536870912}, "policies": {"bounded": {"epsilon": 0.5}}}"#;
    let rendering = chart.render(&["--set-json", config, "--set-string", "config.tls.mode=off"]);
    std::fs::write(&file, rendering.config()).unwrap();
    let (code, stdout, stderr) = output(Command::new(BINARY).args(["config", "-c"]).arg(&file));
    assert_eq!(code, Some(0), "{stderr}");
    for line in ["max_body_bytes: 536870912", "mode: \"off\"", "epsilon: 0.5"] {
        assert!(stdout.contains(line), "nothing of {line:?} in {stdout}");
    }
}

#[test]
fn a_new_configuration_is_new_pods() {
    let Some(chart) = Chart::get() else { return };
    let template = |values: &str| {
        let rendering = chart.set(&format!("envoy.enabled=true,{values}"));
        ["llm-ring", "envoy"].map(|it| rendering.one("Deployment", it)["spec"]["template"].clone())
    };
    let [picker, envoy] = template("config.policy=bounded");
    assert_eq!([picker.clone(), envoy.clone()], template("config.policy=bounded"));
    assert_ne!(picker, template("config.policy=random")[0]);
    assert_ne!(envoy, template("envoy.idleTimeout=60s")[1]);
}

#[test]
fn pods_have_no_privileges() {
    let Some(chart) = Chart::get() else { return };
    let example: Vec<Value> = ["11-engines", "22-picker", "23-envoy"]
        .iter()
        .flat_map(|file| documents(&read(&format!("k8s/{file}.yaml"))))
        .collect();
    let mut renderings = chart.renderings();
    renderings.insert("k8s".to_owned(), Rendering(example));
    for (name, rendering) in renderings {
        for object in &rendering.0 {
            let pod = &object["spec"]["template"]["spec"];
            if pod.is_null() {
                continue;
            }
            let security = &pod["securityContext"];
            assert_eq!(security["runAsNonRoot"], true, "{name}");
            assert_eq!(security["runAsUser"], 65532, "{name}");
            assert_eq!(security["seccompProfile"]["type"], "RuntimeDefault", "{name}");
            for container in ["containers", "initContainers"]
                .iter()
                .flat_map(|key| pod[key].as_array().into_iter().flatten())
            {
                let security = &container["securityContext"];
                assert_eq!(security["allowPrivilegeEscalation"], false, "{name}");
                assert_eq!(security["readOnlyRootFilesystem"], true, "{name}");
                assert_eq!(security["capabilities"]["drop"], json!(["ALL"]), "{name}");
                assert!(container["resources"]["limits"]["memory"].is_string(), "{name}");
            }
        }
    }
}

#[test]
fn the_dashboard_shows_metrics_that_exist() {
    let dashboard = read("charts/llm-ring/dashboards/llm-ring.json");
    let dashboard: Value = serde_json::from_str(&dashboard).unwrap();
    let mut named = BTreeSet::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        for target in panel["targets"].as_array().into_iter().flatten() {
            let expression = target["expr"].as_str().unwrap();
            let words = expression.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
            named.extend(
                words
                    .filter(|word| word.starts_with("llm_ring_"))
                    .map(|word| word.strip_suffix("_bucket").unwrap_or(word).to_owned()),
            );
        }
    }
    let page = read("docs/operations.md");
    let row = |line: &str| Some(line.strip_prefix("| `llm_ring_")?.split('`').next()?.to_owned());
    let exist: BTreeSet<String> =
        page.lines().filter_map(row).map(|name| format!("llm_ring_{name}")).collect();
    let unknown: Vec<&String> = named.difference(&exist).collect();
    assert_eq!(unknown, [""; 0]);
    assert!(named.len() > 20);
}

#[test]
fn the_cluster_demo_runs_these_commands_on_files_that_exist() {
    let script = "cluster/kind-demo.sh";
    let mut check = Command::new("bash");
    let (code, _, stderr) = output(check.current_dir(ROOT).args(["-n", script]));
    assert_eq!(code, Some(0), "{stderr}");
    let mut demo = Command::new("bash");
    let (code, stdout, stderr) = output(demo.current_dir(ROOT).args([script, "--dry-run"]));
    assert_eq!(code, Some(0), "{stderr}");
    let commands: Vec<&str> = stdout.lines().filter_map(|line| line.strip_prefix("+ ")).collect();
    let mut rest = commands.iter();
    for step in [
        "kind create cluster",
        "docker build",
        "kind load docker-image",
        "apply --server-side --filename https://github.com/kubernetes-sigs/gateway-api-inference-extension/",
        "wait --for condition=Established",
        "apply --filename k8s/",
        "rollout status statefulset/llama",
        "rollout status deployment/llm-ring-envoy",
        "port-forward service/llm-ring-envoy",
        "curl ",
        "python3 cluster/traffic.py",
        "scale statefulset/llama",
    ] {
        assert!(rest.any(|command| command.contains(step)), "{step} is not next in {commands:#?}");
    }
    let names = commands.iter().flat_map(|command| command.split([' ', '\\']));
    let files: BTreeSet<&str> = names
        .filter(|word| ["cluster/", "k8s/", "charts/"].iter().any(|it| word.starts_with(it)))
        .collect();
    assert!(files.len() >= 4, "{files:?}");
    for file in files {
        assert!(Path::new(ROOT).join(file).exists(), "{file}");
    }
    // What the commands name inside the cluster is what k8s/ makes there.
    let example: String = ["11-engines", "23-envoy", "21-inferencepool"]
        .map(|file| read(&format!("k8s/{file}.yaml")))
        .concat();
    for name in ["kind: StatefulSet", "name: llama", "name: llm-ring-envoy"] {
        assert!(example.contains(name), "{name}");
    }
}

#[test]
fn the_picker_needs_no_more_of_its_image_than_it_has() {
    // It mounts and changes its root, which is for root alone.
    let root = output(Command::new("id").arg("-u")).1.trim() == "0";
    let config = folder("image");
    std::fs::write(config.join("llm-ring.yaml"), "{}").unwrap();
    let mut image = Command::new("bash");
    image.current_dir(ROOT).args(["tests/image.sh", BINARY]);
    image
        .env("FOLDER", folder("root"))
        .env("VOLUMES", format!("{}:/etc/llm-ring", config.display()));
    if root {
        image.args(["config", "--config", "/etc/llm-ring/llm-ring.yaml"]);
    }
    let (code, stdout, stderr) = output(&mut image);
    assert_eq!(code, Some(0), "{stdout}{stderr}");
    assert!(!root || stdout.contains("grpc_port: 9002"), "{stdout}");
}
