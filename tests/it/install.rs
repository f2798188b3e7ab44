//! The chart and the example on a real API server: what it takes, and what the rendered rights allow.

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Pod, Secret};
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams, WatchParams};
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};

use crate::chart::{Chart, documents, names, read, values_files};
use crate::harness::cluster::{ADMIN, Cluster, Namespace, client};
use crate::harness::process::output;
use crate::harness::{run, within};

/// Runs Helm against the cluster.
#[track_caller]
fn helm(chart: Chart, cluster: &Cluster, namespace: &Namespace, arguments: &[&str]) -> String {
    let kubeconfig = cluster.kubeconfig(ADMIN, cluster.address(), namespace);
    let mut helm = chart.helm();
    helm.arg("--kubeconfig").arg(kubeconfig).args(["--namespace", &namespace.name]);
    let (code, stdout, stderr) = output(helm.args(arguments));
    assert_eq!(code, Some(0), "{arguments:?}: {stdout}{stderr}");
    stdout
}

/// A client with the rights of the release's pods.
async fn account(cluster: &Cluster, namespace: &Namespace) -> Client {
    let token = namespace.token("test-llm-ring").await;
    client(&cluster.kubeconfig(&token, cluster.address(), namespace)).await
}

fn is_forbidden<T>(result: Result<T, kube::Error>) -> bool {
    matches!(result, Err(kube::Error::Api(status)) if status.code == 403)
}

#[test]
fn the_api_server_takes_every_rendering() {
    run(async {
        let (Some(chart), Some(cluster)) = (Chart::get(), Cluster::shared().await) else { return };
        let namespace = cluster.namespace("rendered").await;
        for values in values_files() {
            let text = chart.text(&["--namespace", &namespace.name, "--values", &values]);
            let taken = namespace.check(&text).await.unwrap_or_else(|e| panic!("{values}: {e}"));
            assert_eq!(taken.len(), documents(&text).len(), "{values}");
        }
    });
}

#[test]
fn the_example_is_applied_in_the_order_of_its_files() {
    run(async {
        let Some(cluster) = Cluster::shared().await else { return };
        let elsewhere = cluster.namespace("example").await;
        let mut pods = Vec::new();
        for file in names("k8s").iter().filter(|name| name.ends_with(".yaml")) {
            let text = read(file);
            let applied = elsewhere.apply(&text).await.unwrap_or_else(|e| panic!("{file}: {e}"));
            for (object, sent) in applied.iter().zip(documents(&text)) {
                let namespace = object.metadata.namespace.as_deref();
                assert!(namespace == Some("llm") || file.contains("namespace"), "{file}");
                if !sent["spec"]["template"].is_null() {
                    pods.push((object.name_any(), sent));
                }
            }
        }
        assert_eq!(pods.len(), 3, "engines, pickers and Envoys");
        // The namespace takes only pods of the strictest kind, which is seen when they are made.
        let api: Api<Pod> = Api::namespaced(cluster.client(), "llm");
        let create = async |name: &str, spec: &Value| {
            let pod = json!({ "metadata": { "name": name }, "spec": spec });
            let parameters = PostParams { dry_run: true, ..PostParams::default() };
            let pod = serde_json::from_value(pod).unwrap();
            within("a pod", api.create(&parameters, &pod)).await
        };
        for (name, mut object) in pods {
            let claims = object["spec"]["volumeClaimTemplates"].take();
            let spec = &mut object["spec"]["template"]["spec"];
            for claim in claims.as_array().into_iter().flatten() {
                let name = &claim["metadata"]["name"];
                let volume =
                    json!({ "name": name, "persistentVolumeClaim": { "claimName": name } });
                spec["volumes"] = json!([volume]);
            }
            create(&name, spec).await.unwrap_or_else(|error| panic!("{name}: {error}"));
            spec["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = json!(true);
            assert!(is_forbidden(create(&name, spec).await), "{name}: nobody minds");
        }
    });
}

#[test]
fn a_release_is_installed_upgraded_and_removed() {
    run(async {
        let (Some(chart), Some(cluster)) = (Chart::get(), Cluster::shared().await) else { return };
        let namespace = cluster.namespace("release").await;
        let pools = namespace.pools();
        let helm = |arguments: &[&str]| helm(chart, cluster, &namespace, arguments);
        let notes = helm(&["install", "test", "charts/llm-ring"]);
        assert!(notes.contains("llm-ring/pool=test-llm-ring"), "{notes}");
        assert!(notes.contains("which no registry has"), "{notes}");
        assert_eq!(pools.get("test-llm-ring").await.unwrap().metadata.generation, Some(1));

        // Everything that can change from one to the other, there and back: what Kubernetes does not let change, such
        // as selectors, must not.
        for values in ["tests/it/chart-everything.yaml", "charts/llm-ring/values.yaml"] {
            // Names are the release's own, or the objects would be others.
            let names = ["--set", "fullnameOverride=test-llm-ring,nameOverride=,pool.name="];
            helm(&[&["upgrade", "test", "charts/llm-ring", "-f", values][..], &names].concat());
        }
        assert_eq!(pools.get("test-llm-ring").await.unwrap().metadata.generation, Some(3));
        helm(&["uninstall", "test"]);
        assert!(pools.get_opt("test-llm-ring").await.unwrap().is_none());
    });
}

#[test]
fn pods_of_a_release_may_read_their_pool_and_nothing_else() {
    run(async {
        let (Some(chart), Some(cluster)) = (Chart::get(), Cluster::shared().await) else { return };
        let namespace = cluster.namespace("rights").await;
        let other = cluster.namespace("rights-elsewhere").await;
        let here = namespace.name.as_str();
        let list = ListParams::default();
        let apply = async |arguments: &[&str]| {
            let text = chart.text(&[&["--namespace", here][..], arguments].concat());
            namespace.apply(&text).await.unwrap();
        };
        apply(&[]).await;
        let client = account(cluster, &namespace).await;
        let pods: Api<Pod> = Api::namespaced(client.clone(), here);
        pods.list(&list).await.unwrap();
        drop(pods.watch(&WatchParams::default(), "0").await.unwrap());
        let resource = |kind: &str, group: &str, version: &str| {
            let kind = kube::core::GroupVersionKind::gvk(group, version, kind);
            let resource = kube::core::ApiResource::from_gvk(&kind);
            Api::<kube::core::DynamicObject>::namespaced_with(client.clone(), here, &resource)
        };
        let pools = resource("InferencePool", "inference.networking.k8s.io", "v1");
        assert_eq!(pools.list(&list).await.unwrap().items.len(), 1);
        drop(pools.watch(&WatchParams::default(), "0").await.unwrap());
        let objectives =
            resource("InferenceObjective", "inference.networking.x-k8s.io", "v1alpha2");
        objectives.list(&list).await.unwrap();

        let secrets: Api<Secret> = Api::namespaced(client.clone(), here);
        assert!(is_forbidden(secrets.list(&list).await));
        let elsewhere: Api<Pod> = Api::namespaced(client.clone(), &other.name);
        assert!(is_forbidden(elsewhere.list(&list).await));
        assert!(is_forbidden(Api::<Pod>::all(client.clone()).list(&list).await));
        assert!(is_forbidden(pods.delete("any", &DeleteParams::default()).await));
        let patch = Patch::Merge(json!({ "spec": { "targetPorts": [{ "number": 1 }] } }));
        let patched = pools.patch("test-llm-ring", &PatchParams::default(), &patch).await;
        assert!(is_forbidden(patched));

        // A lease only for those who need one.
        let leases: Api<Lease> = Api::namespaced(client.clone(), here);
        let lease = Lease {
            metadata: kube::core::ObjectMeta {
                name: Some(format!("epp-{here}-test-llm-ring.llm-d.ai")),
                ..Default::default()
            },
            spec: None,
        };
        let parameters = PostParams::default();
        assert!(is_forbidden(leases.create(&parameters, &lease).await));
        apply(&["--set", "replicas=2"]).await;
        // Rights come into effect a moment after they are given.
        let created = crate::harness::eventually("the right to a lease", async || {
            leases.create(&parameters, &lease).await.ok()
        });
        let mut created = created.await;
        let name = created.name_any();
        created.spec = Some(k8s_openapi::api::coordination::v1::LeaseSpec {
            holder_identity: Some("a".to_owned()),
            ..Default::default()
        });
        leases.replace(&name, &parameters, &created).await.unwrap();
        assert_eq!(leases.get(&name).await.unwrap().spec.unwrap().holder_identity.unwrap(), "a");
        assert!(is_forbidden(leases.delete(&name, &DeleteParams::default()).await));
    });
}
