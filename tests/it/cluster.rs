//! What the tests of Kubernetes stand on: the API server does what it does in a cluster.

use std::process::Command;
use std::time::Duration;

use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, ListParams, VersionMatch, WatchEvent, WatchParams};

use crate::harness::cluster::{ADMIN, Cluster, Namespace, NewPod, client};
use crate::harness::process::output;
use crate::harness::relay::Relay;
use crate::harness::tools::Kubernetes;
use crate::harness::{eventually, run, within};

const ACCOUNT: &str = "
apiVersion: v1
kind: ServiceAccount
metadata: { name: picker }
";
const RIGHTS: &str = "
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: { name: picker }
rules: [{ apiGroups: [''], resources: [pods], verbs: [list] }]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: { name: picker }
roleRef: { apiGroup: rbac.authorization.k8s.io, kind: Role, name: picker }
subjects: [{ kind: ServiceAccount, name: picker }]
";
const POOL: &str = "
apiVersion: inference.networking.k8s.io/v1
kind: InferencePool
metadata: { name: pool }
spec:
  selector: { matchLabels: { app: engine } }
  targetPorts: [{ number: 8000 }]
  endpointPickerRef: { name: picker, port: { number: 9002 } }
";

/// The version of all that is known now.
async fn version(namespace: &Namespace) -> String {
    let pods = namespace.pods().list(&ListParams::default()).await.unwrap();
    pods.metadata.resource_version.unwrap()
}

/// Watches pods from a version on, and returns what comes first.
async fn first_after(version: &str, pods: &Api<Pod>) -> WatchEvent<Pod> {
    let parameters = WatchParams::default();
    let events = within("a watch", pods.watch(&parameters, version)).await.unwrap();
    within("an event", events.boxed().next()).await.unwrap().unwrap()
}

fn code(error: &kube::Error) -> Option<u16> {
    if let kube::Error::Api(status) = error { Some(status.code) } else { None }
}

#[test]
fn a_pod_is_what_a_test_says_of_it() {
    run(async {
        let Some(cluster) = Cluster::shared().await else { return };
        let namespace = cluster.namespace("pods").await;
        let pods = namespace.pods();
        let (labels, annotations) = (&[("app", "engine")], &[("note", "warm")]);
        let pod = NewPod { name: "a", labels, annotations, node: Some("n") };
        let created = namespace.create(&pod).await;
        assert_eq!(created.status.unwrap().phase.as_deref(), Some("Pending"));
        namespace.create(&NewPod { name: "b", ..NewPod::default() }).await;

        let before = version(&namespace).await;
        namespace.runs("a", "127.0.0.2", true).await;
        let seen = first_after(&before, &pods).await;
        let WatchEvent::Modified(seen) = seen else { panic!("{seen:?}") };
        assert_eq!(seen.metadata.labels.unwrap()["app"], "engine");
        assert_eq!(seen.metadata.annotations.unwrap()["note"], "warm");
        let status = seen.status.unwrap();
        assert_eq!(status.pod_ip.as_deref(), Some("127.0.0.2"));
        assert_eq!(status.conditions.unwrap()[0].status, "True");
        let status = namespace.runs("a", "127.0.0.3", false).await.status.unwrap();
        assert_eq!(status.pod_ips.unwrap().len(), 1);
        assert_eq!(status.conditions.unwrap()[0].status, "False");

        namespace.delete("a").await;
        let terminating = pods.get("a").await.unwrap();
        assert!(terminating.metadata.deletion_timestamp.is_some());
        namespace.delete_now("a").await;
        namespace.delete("b").await;
        assert_eq!(pods.list(&ListParams::default()).await.unwrap().items.len(), 0);
    });
}

#[test]
fn a_text_is_applied_or_refused_with_reasons() {
    run(async {
        let Some(cluster) = Cluster::shared().await else { return };
        let namespace = cluster.namespace("apply").await;
        let both = format!("{POOL}---{ACCOUNT}");
        for _ in 0..2 {
            let checked = namespace.check(&both).await.unwrap();
            assert_eq!(checked.len(), 2);
            assert_eq!(checked[0].metadata.generation, Some(1), "nothing was kept");
        }
        for _ in 0..2 {
            assert_eq!(namespace.apply(&both).await.unwrap().len(), 2);
        }

        let invalid = POOL.replace("8000", "80000");
        let misspelt = POOL.replace("number: 8000", "numbr: 8000");
        let unknown = POOL.replace("InferencePool", "InferencePond");
        let refused = namespace.check(&[&*invalid, &misspelt, &unknown].join("---")).await;
        let refused = refused.unwrap_err();
        let reasons = ["80000", "numbr", "InferencePond"];
        assert_eq!(refused.lines().count(), reasons.len(), "{refused}");
        for (line, reason) in refused.lines().zip(reasons) {
            assert!(line.contains(reason), "{reason}: {line}");
        }
        let refused = namespace.check(&format!("{POOL}kind: InferencePool")).await.unwrap_err();
        assert!(refused.contains("duplicate"), "{refused}");
    });
}

#[test]
fn a_service_account_may_do_what_its_role_says() {
    run(async {
        let Some(cluster) = Cluster::shared().await else { return };
        let namespace = cluster.namespace("rbac").await;
        namespace.apply(ACCOUNT).await.unwrap();
        let token = namespace.token("picker").await;
        let file = cluster.kubeconfig(&token, cluster.address(), &namespace);
        let pods: Api<Pod> = Api::default_namespaced(client(&file).await);
        let all = ListParams::default();
        assert_eq!(code(&pods.list(&all).await.unwrap_err()), Some(403));
        let subject = format!("name: picker, namespace: {} }}]", namespace.name);
        namespace.apply(&RIGHTS.replace("name: picker }]", &subject)).await.unwrap();
        // They are known a moment later.
        eventually("the rights", async || pods.list(&all).await.ok()).await;
        assert_eq!(code(&pods.get("a").await.unwrap_err()), Some(403));
    });
}

#[test]
fn a_server_that_starts_again_knows_what_it_knew_but_for_what_was_compacted() {
    run(async {
        let Some(mut cluster) = Cluster::start().await else { return };
        let namespace = cluster.namespace("again").await;
        let pods = namespace.pods();
        let before = version(&namespace).await;
        namespace.create(&NewPod { name: "a", ..NewPod::default() }).await;
        let seen = first_after(&before, &pods).await;
        assert!(matches!(seen, WatchEvent::Added(_)), "{seen:?}");

        cluster.stop().await;
        assert_eq!(code(&pods.get("a").await.unwrap_err()), None);
        cluster.start_again().await;
        assert_eq!(pods.get("a").await.unwrap().metadata.name.as_deref(), Some("a"));

        let then = ListParams::default().at(&before).matching(VersionMatch::Exact);
        assert_eq!(pods.list(&then).await.unwrap().items.len(), 0);
        cluster.compact().await;
        assert_eq!(code(&pods.list(&then).await.unwrap_err()), Some(410));
        let seen = first_after(&before, &pods).await;
        assert!(matches!(&seen, WatchEvent::Error(error) if error.code == 410), "{seen:?}");
    });
}

#[test]
fn a_relay_holds_still_and_is_cut() {
    const WHILE: Duration = Duration::from_millis(300);
    run(async {
        let Some(cluster) = Cluster::shared().await else { return };
        let namespace = cluster.namespace("relay").await;
        let mut relay = Relay::start(cluster.address());
        let file = cluster.kubeconfig(ADMIN, relay.address(), &namespace);
        let pods: Api<Pod> = Api::default_namespaced(client(&file).await);
        let version = version(&namespace).await;
        let parameters = WatchParams::default();
        let events = within("a watch", pods.watch(&parameters, &version)).await.unwrap();
        let mut events = events.boxed();

        relay.freeze().await;
        namespace.create(&NewPod { name: "a", ..NewPod::default() }).await;
        let seen = tokio::time::timeout(WHILE, events.next()).await;
        assert!(seen.is_err(), "{seen:?}");
        // This is another connection.
        let seen = tokio::time::timeout(WHILE, pods.get("a")).await;
        assert!(seen.is_err(), "{seen:?}");
        relay.thaw();
        let seen = within("the event", events.next()).await.unwrap().unwrap();
        assert!(matches!(seen, WatchEvent::Added(_)), "{seen:?}");

        relay.cut().await;
        let end = within("the end of the watch", events.next()).await;
        assert!(!matches!(end, Some(Ok(_))), "{end:?}");
        assert_eq!(code(&within("a refusal", pods.get("a")).await.unwrap_err()), None);
        relay.mend();
        within("an answer", pods.get("a")).await.unwrap();
    });
}

#[test]
fn helm_reaches_the_server() {
    run(async {
        let Some((cluster, parts)) = Cluster::shared().await.zip(Kubernetes::get()) else { return };
        let namespace = cluster.namespace("helm").await;
        let file = cluster.kubeconfig(ADMIN, cluster.address(), &namespace);
        let mut helm = Command::new(&parts.helm);
        let releases = output(helm.args(["list", "--short", "--kubeconfig"]).arg(file));
        assert_eq!(releases, (Some(0), String::new(), String::new()));
    });
}
