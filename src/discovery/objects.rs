//! The Kubernetes objects that are watched, with the few fields that are read: ten thousand pods are not kept whole.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::net::IpAddr;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Resource, core::NamespaceResourceScope};
use serde::Deserialize;

use super::reconcile::{self, Rule};

/// Annotations that say which ports of a pod are live; the second is the older name.
const ACTIVE_PORTS: [&str; 2] =
    ["llm-d.ai/active-ports", "inference.networking.k8s.io/active-ports"];

/// `v1` Pod.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct Pod {
    metadata: ObjectMeta,
    status: PodStatus,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct PodStatus {
    phase: String,
    #[serde(rename = "podIP")]
    pod_ip: String,
    #[serde(rename = "podIPs")]
    pod_ips: Vec<PodIp>,
    conditions: Vec<Condition>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct PodIp {
    ip: String,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct Condition {
    r#type: String,
    status: String,
}

/// `inference.networking.k8s.io/v1` InferencePool (Gateway API Inference Extension, `api/v1`).
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct InferencePool {
    metadata: ObjectMeta,
    spec: PoolSpec,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct PoolSpec {
    selector: Selector,
    target_ports: Vec<Port>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Selector {
    match_labels: BTreeMap<String, String>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct Port {
    number: u16,
}

/// `InferenceObjective` of `llm-d.ai/v1alpha2`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct Objective {
    metadata: ObjectMeta,
    spec: ObjectiveSpec,
}

/// `InferenceObjective` of its older group, `inference.networking.x-k8s.io/v1alpha2`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(transparent)]
pub(super) struct OldObjective(Objective);

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct ObjectiveSpec {
    priority: i32,
    pool_ref: PoolRef,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct PoolRef {
    name: String,
}

/// What gives requests of a name a priority.
pub(super) trait HasPriority {
    /// Returns its name, its pool and its priority.
    fn read(&self) -> (&str, &str, i32);
}

impl HasPriority for Objective {
    fn read(&self) -> (&str, &str, i32) {
        let name = self.metadata.name.as_deref().unwrap_or_default();
        (name, &self.spec.pool_ref.name, self.spec.priority)
    }
}

impl HasPriority for OldObjective {
    fn read(&self) -> (&str, &str, i32) {
        self.0.read()
    }
}

impl Pod {
    /// Returns the part that routing needs.
    #[must_use]
    pub(super) fn read(self) -> reconcile::Pod {
        let (metadata, status) = (self.metadata, self.status);
        let annotation = |names: &[&str]| {
            let annotations = metadata.annotations.as_ref()?;
            names.iter().find_map(|name| annotations.get(*name)).cloned()
        };
        let ips = status.pod_ips.iter().map(|it| &it.ip);
        // The list has the primary address too, except on servers that are far too old.
        let mut ips: Vec<IpAddr> = ips.filter_map(|ip| ip.parse().ok()).collect();
        if let Ok(primary) = status.pod_ip.parse() {
            ips.retain(|ip| *ip != primary);
            ips.insert(0, primary);
        } else {
            // An eviction takes the address away, and may leave the list behind.
            ips.clear();
        }
        let ended = matches!(status.phase.as_str(), "Failed" | "Succeeded");
        reconcile::Pod {
            active_ports: annotation(&ACTIVE_PORTS),
            uid: metadata.uid.unwrap_or_default(),
            name: metadata.name.unwrap_or_default(),
            created: metadata.creation_timestamp.map_or(0, |time| time.0.as_second()),
            ips,
            ready: status.conditions.iter().any(|it| it.r#type == "Ready" && it.status == "True"),
            ending: metadata.deletion_timestamp.is_some() || ended,
            labels: metadata.labels.unwrap_or_default(),
        }
    }

    /// Returns the uid.
    #[must_use]
    pub(super) fn uid(&self) -> &str {
        self.metadata.uid.as_deref().unwrap_or_default()
    }
}

impl InferencePool {
    /// Returns which pods are its endpoints.
    #[must_use]
    pub(super) fn rule(&self) -> Rule {
        Rule {
            labels: Some(self.spec.selector.match_labels.clone()),
            ports: self
                .spec
                .target_ports
                .iter()
                .map(|port| port.number)
                .filter(|&it| it > 0)
                .collect(),
        }
    }

    /// Returns the pool's labels as a selector for the API server.
    #[must_use]
    pub(super) fn selector(&self) -> String {
        let labels = self.spec.selector.match_labels.iter();
        let pairs: Vec<String> = labels.map(|(key, value)| format!("{key}={value}")).collect();
        pairs.join(",")
    }
}

macro_rules! resource {
    ($type:ty, $($field:tt).+, $group:literal, $version:literal, $kind:literal, $plural:literal) => {
        impl Resource for $type {
            type DynamicType = ();
            type Scope = NamespaceResourceScope;

            fn kind((): &()) -> Cow<'_, str> {
                $kind.into()
            }

            fn group((): &()) -> Cow<'_, str> {
                $group.into()
            }

            fn version((): &()) -> Cow<'_, str> {
                $version.into()
            }

            fn plural((): &()) -> Cow<'_, str> {
                $plural.into()
            }

            fn meta(&self) -> &ObjectMeta {
                &self.$($field).+
            }

            fn meta_mut(&mut self) -> &mut ObjectMeta {
                &mut self.$($field).+
            }
        }
    };
}

resource!(Pod, metadata, "", "v1", "Pod", "pods");
resource!(
    InferencePool,
    metadata,
    "inference.networking.k8s.io",
    "v1",
    "InferencePool",
    "inferencepools"
);
resource!(Objective, metadata, "llm-d.ai", "v1alpha2", "InferenceObjective", "inferenceobjectives");
resource!(
    OldObjective,
    0.metadata,
    "inference.networking.x-k8s.io",
    "v1alpha2",
    "InferenceObjective",
    "inferenceobjectives"
);

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(text: &str) -> reconcile::Pod {
        serde_json::from_str::<Pod>(text).unwrap().read()
    }

    #[test]
    fn a_pod_is_read() {
        let read = pod(
            r#"{"metadata":{"uid":"u","name":"a","creationTimestamp":"2026-01-01T00:00:00Z","labels":{"app":"x"},
                "annotations":{"inference.networking.k8s.io/active-ports":"8001"},"managedFields":[{"manager":"m"}]},
               "spec":{"containers":[]},"status":{"phase":"Running","podIP":"10.0.0.5",
               "podIPs":[{"ip":"fd00::5"},{"ip":"10.0.0.5"}],"conditions":[{"type":"Ready","status":"True"}]}}"#,
        );
        assert_eq!(
            (read.uid.as_str(), read.name.as_str(), read.ready, read.ending),
            ("u", "a", true, false)
        );
        assert_eq!(read.ips, ["10.0.0.5".parse::<IpAddr>().unwrap(), "fd00::5".parse().unwrap()]);
        assert_eq!((read.created, read.active_ports.as_deref()), (1_767_225_600, Some("8001")));
    }

    #[test]
    fn a_pod_that_is_going_or_has_nothing_yet_is_read_as_such() {
        let going = pod(r#"{"metadata":{"uid":"u","deletionTimestamp":"2026-01-01T00:00:00Z"}}"#);
        assert!(going.ending && !going.ready && going.ips.is_empty());
        let evicted = pod(
            r#"{"metadata":{"uid":"u"},"status":{"phase":"Failed","reason":"Evicted","podIPs":[{"ip":"10.0.0.1"}]}}"#,
        );
        assert!(evicted.ending && evicted.ips.is_empty());
        let pending = pod(
            r#"{"metadata":{"uid":"u"},"status":{"conditions":[{"type":"Ready","status":"False"}]}}"#,
        );
        assert!(!pending.ready && !pending.ending);
    }

    #[test]
    fn a_pool_is_read() {
        let pool: InferencePool = serde_json::from_str(
            r#"{"metadata":{"name":"p"},"spec":{"selector":{"matchLabels":{"b":"2","a":"1"}},
               "targetPorts":[{"number":8000},{"number":8001}],"endpointPickerRef":{"name":"x"}}}"#,
        )
        .unwrap();
        assert_eq!(pool.rule().ports, [8000, 8001]);
        assert_eq!(pool.selector(), "a=1,b=2");
    }
}
