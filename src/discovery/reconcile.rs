//! Pods and the pool's rule in, endpoints out: pure, so that any order of events can be tried.
//!
//! Pods are known by their uid and not by their name: the successor of a pod has the same name, sometimes the same
//! address, and another cache; and the end of the first must not remove the second.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use crate::pool::{Endpoint, Engine, endpoint};

/// Which pods are endpoints, and on which ports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// Labels that a pod must have, all of them. `None`: the API server has chosen by a selector of its own.
    pub labels: Option<BTreeMap<String, String>>,
    /// Each is an endpoint of each pod (the ranks of data parallelism); its place here is its rank.
    pub ports: Vec<u16>,
}

/// A pod, as far as routing needs it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pod {
    /// What tells it from its successor of the same name.
    pub uid: String,
    /// Name, unique in the namespace at any moment.
    pub name: String,
    /// When it was made, in seconds; the younger of two that claim one address has it.
    pub created: i64,
    /// Its addresses, the primary one first.
    pub ips: Vec<IpAddr>,
    /// Whether its condition Ready is true.
    pub ready: bool,
    /// Whether it is being deleted, or has ended.
    pub ending: bool,
    /// All its labels.
    pub labels: BTreeMap<String, String>,
    /// The annotation that says which of the rule's ports are live.
    pub active_ports: Option<String>,
}

/// Which of a pod's addresses is dialled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// The one that Kubernetes calls the pod's.
    Primary,
    /// The first of IPv4.
    V4,
    /// The first of IPv6.
    V6,
}

/// How pods are read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reading {
    /// Which address is dialled.
    pub family: Family,
    /// Label with the weight.
    pub weight_label: String,
    /// Label with the role.
    pub role_label: String,
}

/// Why a pod of the pool is no endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Absence {
    /// It is being deleted, or has ended.
    Ending,
    /// It is not ready.
    NotReady,
    /// It has no address, or none of the family asked for.
    NoAddress,
    /// Its role takes no requests from clients.
    Role,
    /// Its annotation leaves it no port.
    NoPort,
    /// A younger pod has its address or its name.
    Superseded,
}

impl Absence {
    /// Every reason there is.
    pub const ALL: [Self; 6] =
        [Self::Ending, Self::NotReady, Self::NoAddress, Self::Role, Self::NoPort, Self::Superseded];

    /// Returns the word for metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ending => "ending",
            Self::NotReady => "not-ready",
            Self::NoAddress => "no-address",
            Self::Role => "role",
            Self::NoPort => "no-port",
            Self::Superseded => "superseded",
        }
    }
}

/// What the pods come to.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Members {
    /// The endpoints, no two of one name or address.
    pub endpoints: Vec<Endpoint>,
    /// The pool's pods that give no endpoint.
    pub absent: BTreeMap<Absence, u64>,
    /// What was found and could not be taken as it stands, for a person to mend.
    pub oddities: BTreeSet<String>,
}

/// Keeps what the watches have told.
#[derive(Debug)]
pub struct Reconciler {
    reading: Reading,
    rule: Option<Rule>,
    pods: BTreeMap<String, Pod>,
    /// A list that is still coming in. Until it is whole, the pods from before stand.
    coming: Option<BTreeMap<String, Pod>>,
}

impl Reconciler {
    /// Starts without a rule and without pods.
    #[must_use]
    pub fn new(reading: Reading) -> Self {
        Self { reading, rule: None, pods: BTreeMap::new(), coming: None }
    }

    /// Takes the pool's rule as it is now; `None` when there is no pool.
    pub fn set_rule(&mut self, rule: Option<Rule>) {
        self.rule = rule;
    }

    /// Begins a list of all pods; one that was begun before is void.
    pub fn list_begins(&mut self) {
        self.coming = Some(BTreeMap::new());
    }

    /// Takes a pod of the list.
    pub fn listed(&mut self, pod: Pod) {
        self.coming.get_or_insert_default().insert(pod.uid.clone(), pod);
    }

    /// Ends the list: what is not in it is gone, even if nobody saw it go.
    pub fn list_ends(&mut self) {
        if let Some(pods) = self.coming.take() {
            self.pods = pods;
        }
    }

    /// Takes a pod that was made or has changed.
    pub fn apply(&mut self, pod: Pod) {
        self.pods.insert(pod.uid.clone(), pod);
    }

    /// Takes a pod that is gone.
    pub fn delete(&mut self, uid: &str) {
        self.pods.remove(uid);
    }

    /// Returns what the pods come to under the rule.
    #[must_use]
    pub fn members(&self) -> Members {
        let mut members = Members::default();
        let Some(rule) = &self.rule else {
            return members;
        };
        if rule.labels.as_ref().is_some_and(BTreeMap::is_empty) {
            members.oddities.insert(
                "the pool's selector is empty, which selects no pod: give it matchLabels"
                    .to_owned(),
            );
            return members;
        }
        let mut pods: Vec<&Pod> = self.pods.values().filter(|pod| rule.selects(pod)).collect();
        pods.sort_by(|a, b| b.created.cmp(&a.created).then_with(|| b.uid.cmp(&a.uid)));
        let (mut names, mut addresses) = (BTreeSet::new(), BTreeSet::new());
        for pod in pods {
            let Err(absence) =
                self.endpoints_of(pod, rule, &mut names, &mut addresses, &mut members)
            else {
                continue;
            };
            *members.absent.entry(absence).or_default() += 1;
        }
        members.endpoints.sort_by(|a, b| a.name.cmp(&b.name));
        members
    }

    fn endpoints_of<'a>(
        &'a self,
        pod: &'a Pod,
        rule: &Rule,
        names: &mut BTreeSet<&'a str>,
        addresses: &mut BTreeSet<SocketAddr>,
        members: &mut Members,
    ) -> Result<(), Absence> {
        if pod.ending {
            return Err(Absence::Ending);
        }
        if !pod.ready {
            return Err(Absence::NotReady);
        }
        let Some(ip) = pod.ip(self.reading.family) else {
            return Err(Absence::NoAddress);
        };
        if !pod.labels.get(&self.reading.role_label).is_none_or(|role| takes_requests(role)) {
            return Err(Absence::Role);
        }
        let ports = pod.live_ports(&rule.ports, &mut members.oddities);
        if ports.is_empty() {
            return Err(Absence::NoPort);
        }
        if !names.insert(&pod.name) {
            return Err(Absence::Superseded);
        }
        let weight = pod.weight(&self.reading.weight_label, &mut members.oddities);
        let engine = pod.engine();
        let before = members.endpoints.len();
        for (rank, port) in ports {
            let address = SocketAddr::new(ip, port);
            if addresses.insert(address) {
                members.endpoints.push(Endpoint {
                    name: rank_name(&pod.name, rank),
                    address,
                    weight,
                    labels: pod.labels.clone(),
                    engine,
                    instance: pod.uid.clone(),
                });
            } else {
                members.oddities.insert(format!(
                    "pod {}: a younger pod has its address {address}; pods on the host's network need ports of their own",
                    pod.name
                ));
            }
        }
        if members.endpoints.len() == before { Err(Absence::Superseded) } else { Ok(()) }
    }
}

/// Names a rank of a pod: the first as the pod, so that a pool of one port reads as its pods do. No pod's name has a
/// slash.
fn rank_name(pod: &str, rank: usize) -> String {
    if rank == 0 { pod.to_owned() } else { format!("{pod}/rank-{rank}") }
}

/// Tells whether pods of a role take requests from clients: those that only compute prompts or encode images for
/// others do not (`llm-d.ai/role`). What is not known takes them.
fn takes_requests(role: &str) -> bool {
    !matches!(role, "prefill" | "encode" | "encode-prefill")
}

/// Labels that say which engine a pod runs; the second is the older name.
const ENGINE_LABELS: [&str; 2] =
    ["llm-d.ai/engine-type", "inference.networking.k8s.io/engine-type"];

impl Rule {
    fn selects(&self, pod: &Pod) -> bool {
        self.labels.as_ref().is_none_or(|labels| {
            labels.iter().all(|(key, value)| pod.labels.get(key) == Some(value))
        })
    }
}

impl Pod {
    fn ip(&self, family: Family) -> Option<IpAddr> {
        self.ips.iter().copied().find(|ip| match family {
            Family::Primary => true,
            Family::V4 => ip.is_ipv4(),
            Family::V6 => ip.is_ipv6(),
        })
    }

    /// Returns the live ones of the rule's ports, each with its rank.
    fn live_ports(&self, ports: &[u16], oddities: &mut BTreeSet<String>) -> Vec<(usize, u16)> {
        let mut seen = BTreeSet::new();
        let all = ports.iter().copied().enumerate().filter(|&(_, port)| seen.insert(port));
        let all: Vec<(usize, u16)> = all.collect();
        let Some(text) = &self.active_ports else {
            return all;
        };
        let live: Result<BTreeSet<u16>, _> =
            text.split(',').map(str::trim).filter(|it| !it.is_empty()).map(str::parse).collect();
        if let Ok(live) = live {
            return all.into_iter().filter(|(_, port)| live.contains(port)).collect();
        }
        oddities.insert(format!(
            "pod {}: its annotation active-ports is {text:?} and not ports with commas between them; all its ports are used",
            self.name
        ));
        all
    }

    fn weight(&self, label: &str, oddities: &mut BTreeSet<String>) -> f64 {
        let Some(text) = self.labels.get(label) else {
            return 1.0;
        };
        let number = text.parse().or(Err(format!("`{text}` is no number")));
        number.and_then(endpoint::weight).unwrap_or_else(|error| {
            oddities.insert(format!("pod {}: label {label}: {error}; it counts as 1", self.name));
            1.0
        })
    }

    fn engine(&self) -> Engine {
        let named = ENGINE_LABELS.iter().find_map(|label| self.labels.get(*label));
        let known = |name: &String| match name.as_str() {
            "trtllm-serve" => Some(Engine::TrtLlm),
            "triton-tensorrt-llm" => Some(Engine::Triton),
            name => Engine::NAMES.iter().find(|(known, _)| *known == name).map(|&(_, it)| it),
        };
        named.and_then(known).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests;
