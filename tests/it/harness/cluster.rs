//! A real API server over a real etcd, where RBAC holds and the CRDs of gateways are known. There are no nodes and no
//! controllers: of a pod is true what a test says.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use hyper::Request;
use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Namespace as NamespaceObject, Pod, ServiceAccount};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::core::{ApiResource, GroupVersionKind, TypeMeta};
use kube::discovery::{Scope, pinned_kind};
use kube::{Client, ResourceExt as _};
use serde::Deserialize as _;
use serde_json::{Value, json};
use tokio::sync::OnceCell;

use super::client::post;
use super::port::Port;
use super::process::{Process, folder};
use super::tools::Kubernetes;
use super::{patiently, within};

/// How long a start may take: on a busy laptop a server needs a quarter of it.
const START: Duration = Duration::from_secs(60);
/// The bearer token of one who may do everything.
pub(crate) const ADMIN: &str = "admin-token";

/// A running API server.
pub(crate) struct Cluster {
    parts: &'static Kubernetes,
    folder: PathBuf,
    port: Port,
    etcd_port: Port,
    _etcd_peer_port: Port,
    etcd: Process,
    /// None while it is stopped.
    apiserver: Option<Process>,
    client: Client,
}

/// A namespace of a test's own.
pub(crate) struct Namespace {
    pub(crate) name: String,
    client: Client,
}

/// A pod to create.
#[derive(Debug, Default)]
pub(crate) struct NewPod<'a> {
    pub(crate) name: &'a str,
    pub(crate) labels: &'a [(&'a str, &'a str)],
    pub(crate) annotations: &'a [(&'a str, &'a str)],
    /// A pod on a node stays, terminating, when it is deleted; one without goes at once.
    pub(crate) node: Option<&'a str>,
}

impl Cluster {
    /// Returns the one that tests share, each in a namespace of its own; or says that the test is skipped.
    pub(crate) async fn shared() -> Option<&'static Self> {
        static SHARED: OnceCell<Option<Cluster>> = OnceCell::const_new();
        Kubernetes::get()?;
        let cluster = SHARED.get_or_init(Self::start).await.as_ref()?;
        cluster.etcd.watch();
        cluster.apiserver.iter().for_each(Process::watch);
        Some(cluster)
    }

    /// Starts one, for a test that stops it; or says that the test is skipped.
    pub(crate) async fn start() -> Option<Self> {
        let parts = Kubernetes::get()?;
        let folder = folder("cluster");
        // One key for all: of the server, and what signs tokens.
        let name = "127.0.0.1".to_owned();
        let identity = rcgen::generate_simple_self_signed([name]).unwrap();
        std::fs::write(folder.join(CERTIFICATE), identity.cert.pem()).unwrap();
        std::fs::write(folder.join(KEY), identity.signing_key.serialize_pem()).unwrap();
        let tokens = format!("{ADMIN},admin,1,system:masters\n");
        std::fs::write(folder.join(TOKENS), tokens).unwrap();

        let (port, etcd_port, etcd_peer_port) = (Port::reserve(), Port::reserve(), Port::reserve());
        let etcd = start_etcd(parts, &folder, etcd_port.address, etcd_peer_port.address);
        let apiserver = Some(start_apiserver(parts, &folder, port.address, etcd_port.address));
        let client = client(&write_kubeconfig(&folder, ADMIN, port.address, "default")).await;
        let cluster = Self {
            parts,
            folder,
            port,
            etcd_port,
            _etcd_peer_port: etcd_peer_port,
            etcd,
            apiserver,
            client,
        };
        cluster.is_ready().await;
        cluster.install_crds().await;
        Some(cluster)
    }

    /// Returns a client that may do everything.
    pub(crate) fn client(&self) -> Client {
        self.client.clone()
    }

    /// Where it listens.
    pub(crate) fn address(&self) -> SocketAddr {
        self.port.address
    }

    /// Its certificate, in PEM.
    pub(crate) fn certificate(&self) -> PathBuf {
        self.folder.join(CERTIFICATE)
    }

    /// Writes a kubeconfig of one who has this token and reaches the server at this address, be it a relay's.
    pub(crate) fn kubeconfig(&self, token: &str, at: SocketAddr, namespace: &Namespace) -> PathBuf {
        write_kubeconfig(&self.folder, token, at, &namespace.name)
    }

    /// Creates a namespace, of which the name begins so.
    pub(crate) async fn namespace(&self, prefix: &str) -> Namespace {
        let namespace = json!({ "metadata": { "generateName": format!("{prefix}-") } });
        let namespace: NamespaceObject = serde_json::from_value(namespace).unwrap();
        let namespaces = Api::all(self.client());
        let parameters = PostParams::default();
        let created = within("a namespace", namespaces.create(&parameters, &namespace)).await;
        Namespace { name: created.unwrap().name_any(), client: self.client() }
    }

    /// Kills the API server; what it knows is in etcd.
    pub(crate) async fn stop(&mut self) {
        if let Some(apiserver) = self.apiserver.take() {
            // On SIGTERM it would keep its port for up to a minute.
            apiserver.signal("KILL");
            apiserver.end().await;
        }
    }

    /// Starts it again where it was.
    pub(crate) async fn start_again(&mut self) {
        let (port, etcd_port) = (self.port.address, self.etcd_port.address);
        self.apiserver = Some(start_apiserver(self.parts, &self.folder, port, etcd_port));
        self.is_ready().await;
    }

    /// Makes etcd forget all that was before now. Watches are fed from what a server itself remembers since its start:
    /// to have one that begins earlier fail with 410, start the server again.
    pub(crate) async fn compact(&self) {
        let ask = async |path: &str, body: Value| {
            let answer = post(path, body.to_string()).answer(self.etcd_port.address.port()).await;
            assert_eq!(answer.status, 200, "{path}: {}", answer.text());
            answer.json()
        };
        let range = ask("/v3/kv/range", json!({ "key": "AA==", "limit": 1 })).await;
        let now = &range["header"]["revision"];
        ask("/v3/kv/compaction", json!({ "revision": now, "physical": true })).await;
    }

    /// Takes a CRD away, and waits until it is not served any more.
    pub(crate) async fn remove_crd(&self, name: &str) {
        let crds: Api<CustomResourceDefinition> = Api::all(self.client());
        let crd = within("a CRD", crds.get(name)).await.unwrap();
        drop(within("its end", crds.delete(name, &DeleteParams::default())).await.unwrap());
        patiently(START, "its kind to be gone", async || {
            (!is_served(&self.client, &crd).await).then_some(())
        })
        .await;
    }

    async fn is_ready(&self) {
        patiently(START, "the API server to be ready", async || {
            assert!(self.etcd.ended().is_none(), "etcd ended early");
            let runs = self.apiserver.as_ref().is_some_and(|it| it.ended().is_none());
            assert!(runs, "kube-apiserver ended early");
            let request = Request::get("/readyz").body(Vec::new()).unwrap();
            let answer = self.client.request_text(request);
            let answer = tokio::time::timeout(Duration::from_secs(1), answer).await;
            answer.is_ok_and(|answer| answer.is_ok()).then_some(())
        })
        .await;
    }

    async fn install_crds(&self) {
        let mut names = Vec::new();
        for file in std::fs::read_dir(&self.parts.crds).unwrap() {
            let text = std::fs::read_to_string(file.unwrap().path()).unwrap();
            let applied = apply(&self.client, "default", &text, false).await.unwrap();
            names.extend(applied.iter().map(DynamicObject::name_any));
        }
        let crds: Api<CustomResourceDefinition> = Api::all(self.client());
        for name in names {
            patiently(START, &format!("{name} to be served"), async || {
                let crd = within("a CRD", crds.get(&name)).await.unwrap();
                is_served(&self.client, &crd).await.then_some(())
            })
            .await;
        }
    }
}

impl Namespace {
    pub(crate) fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &self.name)
    }

    /// Returns the InferencePools.
    pub(crate) fn pools(&self) -> Api<DynamicObject> {
        let kind = GroupVersionKind::gvk("inference.networking.k8s.io", "v1", "InferencePool");
        Api::namespaced_with(self.client.clone(), &self.name, &ApiResource::from_gvk(&kind))
    }

    /// Creates a pod that is pending.
    pub(crate) async fn create(&self, pod: &NewPod<'_>) -> Pod {
        let map = |pairs: &[(&str, &str)]| -> Value {
            pairs.iter().map(|&(key, value)| (key.to_owned(), Value::from(value))).collect()
        };
        let object = json!({
            "metadata": { "name": pod.name, "labels": map(pod.labels), "annotations": map(pod.annotations) },
            "spec": { "nodeName": pod.node, "containers": [{ "name": "server", "image": "none" }] },
        });
        let object = serde_json::from_value(object).unwrap();
        let pods = self.pods();
        within("a pod", pods.create(&PostParams::default(), &object)).await.unwrap()
    }

    /// Says that a pod runs, with this address, and whether it is ready.
    pub(crate) async fn runs(&self, pod: &str, ip: &str, ready: bool) -> Pod {
        let ready = if ready { "True" } else { "False" };
        let status = json!({
            "phase": "Running", "podIP": ip, "podIPs": [{ "ip": ip }],
            "conditions": [{ "type": "Ready", "status": ready }],
        });
        self.set_status(pod, status).await
    }

    /// Merges this into the status of a pod.
    pub(crate) async fn set_status(&self, pod: &str, status: Value) -> Pod {
        let (pods, patch) = (self.pods(), Patch::Merge(json!({ "status": status })));
        let parameters = PatchParams::default();
        within("its status", pods.patch_status(pod, &parameters, &patch)).await.unwrap()
    }

    /// Deletes a pod: one on a node is terminating from now on.
    pub(crate) async fn delete(&self, pod: &str) {
        self.delete_with(pod, &DeleteParams::default()).await;
    }

    /// Deletes a pod at once.
    pub(crate) async fn delete_now(&self, pod: &str) {
        self.delete_with(pod, &DeleteParams::default().grace_period(0)).await;
    }

    async fn delete_with(&self, pod: &str, parameters: &DeleteParams) {
        let pods = self.pods();
        drop(within("its deletion", pods.delete(pod, parameters)).await.unwrap());
    }

    /// Returns a token of a service account.
    pub(crate) async fn token(&self, account: &str) -> String {
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client.clone(), &self.name);
        let request =
            TokenRequest { spec: Some(TokenRequestSpec::default()), ..TokenRequest::default() };
        let parameters = PostParams::default();
        let answer = accounts.create_token_request(account, &parameters, &request);
        within("a token", answer).await.unwrap().status.unwrap().token.unwrap()
    }

    /// Applies each document of a YAML text, here where it does not say; returns what became of them, or what is
    /// wrong with those that were refused: one line each.
    pub(crate) async fn apply(&self, yaml: &str) -> Result<Vec<DynamicObject>, String> {
        apply(&self.client, &self.name, yaml, false).await
    }

    /// Like `apply`, but nothing is kept.
    pub(crate) async fn check(&self, yaml: &str) -> Result<Vec<DynamicObject>, String> {
        apply(&self.client, &self.name, yaml, true).await
    }
}

/// Returns a client as a kubeconfig describes it.
pub(crate) async fn client(kubeconfig: &Path) -> Client {
    let file = Kubeconfig::read_from(kubeconfig).unwrap();
    let options = KubeConfigOptions::default();
    let config = kube::Config::from_custom_kubeconfig(file, &options).await.unwrap();
    Client::try_from(config).unwrap()
}

const CERTIFICATE: &str = "certificate.pem";
const KEY: &str = "key.pem";
const TOKENS: &str = "tokens.csv";

fn start_etcd(
    parts: &Kubernetes,
    folder: &Path,
    address: SocketAddr,
    peers: SocketAddr,
) -> Process {
    let (address, peers) = (format!("http://{address}"), format!("http://{peers}"));
    Process::start(
        "etcd",
        Command::new(&parts.etcd)
            .arg("--data-dir")
            .arg(folder.join("etcd"))
            .args(["--listen-client-urls", &address, "--advertise-client-urls", &address])
            .args(["--listen-peer-urls", &peers, "--initial-advertise-peer-urls", &peers])
            .args(["--initial-cluster", &format!("default={peers}")])
            .args(["--unsafe-no-fsync", "--log-level", "warn"]),
    )
}

fn start_apiserver(
    parts: &Kubernetes,
    folder: &Path,
    address: SocketAddr,
    etcd: SocketAddr,
) -> Process {
    let option = |name: &str, file: &str| format!("--{name}={}", folder.join(file).display());
    Process::start(
        "kube-apiserver",
        Command::new(&parts.apiserver)
            .arg(format!("--etcd-servers=http://{etcd}"))
            .arg(format!("--bind-address={}", address.ip()))
            .arg(format!("--secure-port={}", address.port()))
            .arg(option("tls-cert-file", CERTIFICATE))
            .arg(option("tls-private-key-file", KEY))
            .arg("--service-account-issuer=https://kubernetes.default.svc")
            .arg(option("service-account-signing-key-file", KEY))
            .arg(option("service-account-key-file", CERTIFICATE))
            .arg(option("token-auth-file", TOKENS))
            .arg("--authorization-mode=RBAC")
            // It would want a service account of each pod, which a controller makes.
            .arg("--disable-admission-plugins=ServiceAccount")
            .arg("--service-cluster-ip-range=10.99.0.0/24"),
    )
}

/// Writes a kubeconfig of one who has this token, for the server in this folder at this address.
fn write_kubeconfig(server: &Path, token: &str, at: SocketAddr, namespace: &str) -> PathBuf {
    let file = folder("kubeconfig").join("config");
    let certificate = server.join(CERTIFICATE);
    let config = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{
            "name": "test",
            "cluster": { "server": format!("https://{at}"), "certificate-authority": certificate },
        }],
        "users": [{ "name": "test", "user": { "token": token } }],
        "contexts": [{
            "name": "test",
            "context": { "cluster": "test", "user": "test", "namespace": namespace },
        }],
        "current-context": "test",
    });
    std::fs::write(&file, config.to_string()).unwrap();
    file
}

/// Applies each document of a YAML text.
async fn apply(
    client: &Client,
    namespace: &str,
    yaml: &str,
    dry_run: bool,
) -> Result<Vec<DynamicObject>, String> {
    let (mut applied, mut errors) = (Vec::new(), Vec::new());
    for object in documents(yaml).map_err(|error| error.to_string())? {
        match apply_object(client, namespace, &object, dry_run).await {
            Ok(object) => applied.push(object),
            Err(error) => {
                let text = |value: &Value| value.as_str().unwrap_or("?").to_owned();
                let (kind, name) = (text(&object["kind"]), text(&object["metadata"]["name"]));
                errors.push(format!("{kind} {name}: {}", error.replace('\n', " ")));
            }
        }
    }
    if errors.is_empty() { Ok(applied) } else { Err(errors.join("\n")) }
}

fn documents(yaml: &str) -> Result<Vec<Value>, serde_yaml::Error> {
    let documents = serde_yaml::Deserializer::from_str(yaml).map(|document| {
        // Not into JSON at once: this minds keys that come twice.
        let object = serde_yaml::Value::deserialize(document)?;
        serde_yaml::from_value(object)
    });
    documents.filter(|object| !matches!(object, Ok(Value::Null))).collect()
}

async fn apply_object(
    client: &Client,
    namespace: &str,
    object: &Value,
    dry_run: bool,
) -> Result<DynamicObject, String> {
    let text = |error: kube::Error| {
        if let kube::Error::Api(status) = error { status.message } else { error.to_string() }
    };
    let types = TypeMeta::deserialize(object).map_err(|error| error.to_string())?;
    let kind = GroupVersionKind::try_from(&types).map_err(|error| error.to_string())?;
    let found = within("its kind", pinned_kind(client, &kind)).await;
    let (resource, capabilities) = found.map_err(text)?;
    let metadata = &object["metadata"];
    let namespace = metadata["namespace"].as_str().unwrap_or(namespace);
    let api: Api<DynamicObject> = match capabilities.scope {
        Scope::Namespaced => Api::namespaced_with(client.clone(), namespace, &resource),
        Scope::Cluster => Api::all_with(client.clone(), &resource),
    };
    let parameters =
        PatchParams { dry_run, ..PatchParams::apply("test").force().validation_strict() };
    let (name, patch) = (metadata["name"].as_str().unwrap_or_default(), Patch::Apply(object));
    within("it to be applied", api.patch(name, &parameters, &patch)).await.map_err(text)
}

async fn is_served(client: &Client, crd: &CustomResourceDefinition) -> bool {
    let conditions = crd.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let established = |(kind, status): (&str, &str)| kind == "Established" && status == "True";
    if !conditions.map(|it| (it.type_.as_str(), it.status.as_str())).any(established) {
        return false;
    }
    for version in crd.spec.versions.iter().filter(|version| version.served) {
        let (group, kind) = (&crd.spec.group, &crd.spec.names.kind);
        let kind = GroupVersionKind::gvk(group, &version.name, kind);
        if pinned_kind(client, &kind).await.is_err() {
            return false;
        }
    }
    true
}
