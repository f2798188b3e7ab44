#![allow(clippy::disallowed_methods, reason = "the watch owns its timer")]
//! Endpoints from a YAML file that is looked at again and again: for running without a cluster.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use serde::Deserialize;

use crate::pool::{Endpoint, Engine, PoolSnapshot, endpoint};
use crate::yaml;

/// The file.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    /// Absent in an empty file, which is what a writer who truncates leaves for a moment.
    endpoints: Option<Vec<Entry>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: Name,
    address: IpAddr,
    port: Port,
    #[serde(default)]
    weight: Weight,
    #[serde(default)]
    labels: BTreeMap<String, String>,
    #[serde(default)]
    engine: EngineName,
}

#[derive(Debug, Deserialize)]
#[serde(try_from = "String")]
struct Name(String);

#[derive(Debug, Deserialize)]
#[serde(try_from = "u16")]
struct Port(u16);

#[derive(Debug, Deserialize)]
#[serde(try_from = "f64")]
struct Weight(f64);

#[derive(Debug, Default, Deserialize)]
#[serde(try_from = "String")]
struct EngineName(Engine);

/// Reads the endpoints in `text`.
///
/// # Errors
/// The text begins with line and column and says what is wrong.
pub fn parse(text: &str) -> Result<Vec<Endpoint>, String> {
    let document: Document = yaml::parse(text)?;
    let endpoints = document
        .endpoints
        .ok_or("1:1: there is no list `endpoints`; a pool of none is `endpoints: []`")?;
    Ok(endpoints
        .into_iter()
        .map(|entry| Endpoint {
            name: entry.name.0,
            address: SocketAddr::new(entry.address, entry.port.0),
            weight: entry.weight.0,
            labels: entry.labels,
            engine: entry.engine.0,
            instance: String::new(),
        })
        .collect())
}

/// Reads the endpoints in the file.
///
/// # Errors
/// The file cannot be read, or is not a list of endpoints that make a pool; the text names the file.
pub fn read(path: &Path) -> Result<Vec<Endpoint>, String> {
    endpoints(path, &text(path)?)
}

fn text(path: &Path) -> Result<String, String> {
    std::fs::read_to_string(path)
        .map_err(|error| format!("{}: cannot be read: {error}", path.display()))
}

fn endpoints(path: &Path, text: &str) -> Result<Vec<Endpoint>, String> {
    let endpoints = parse(text).map_err(|error| format!("{}:{error}", path.display()))?;
    PoolSnapshot::check(&endpoints).map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(endpoints)
}

/// Looks at the file every `poll` and hands on what is in it, or what is wrong with it, whenever it has changed.
///
/// It compares contents, not times: a ConfigMap volume changes by a swap of links. Its first look is at once, so
/// that nothing is missed between the start's reading and this watch.
pub async fn watch(
    path: &Path,
    poll: Duration,
    mut changed: impl FnMut(Result<Vec<Endpoint>, String>),
) {
    let mut seen = None;
    let mut ticks = tokio::time::interval(poll);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let text = text(path);
        if seen.as_ref() != Some(&text) {
            changed(text.clone().and_then(|text| endpoints(path, &text)));
            seen = Some(text);
        }
    }
}

impl TryFrom<String> for Name {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        if !name.is_empty() && name.len() <= 253 && name.bytes().all(|b| b.is_ascii_graphic()) {
            Ok(Self(name))
        } else {
            Err(format!(
                "an endpoint's name is 1 to 253 printable characters without blanks, not {name:?}"
            ))
        }
    }
}

impl TryFrom<u16> for Port {
    type Error = String;

    fn try_from(port: u16) -> Result<Self, String> {
        if port > 0 { Ok(Self(port)) } else { Err("a port is 1 to 65535, not 0".to_owned()) }
    }
}

impl Default for Weight {
    fn default() -> Self {
        Self(1.0)
    }
}

impl TryFrom<f64> for Weight {
    type Error = String;

    fn try_from(weight: f64) -> Result<Self, String> {
        endpoint::weight(weight).map(Self)
    }
}

impl TryFrom<String> for EngineName {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        let known: Vec<&str> = Engine::NAMES.iter().map(|&(name, _)| name).collect();
        let found = Engine::NAMES.iter().find(|(known, _)| *known == name);
        found.map(|&(_, engine)| Self(engine)).ok_or_else(|| yaml::unknown("engine", &name, &known))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_endpoints_is_read_with_its_defaults() {
        let text = "endpoints:\n- {name: b, address: 'fd00::5', port: 8000, weight: 2, engine: vllm}\n- {name: a, address: 10.0.0.1, port: 8000}\n";
        let endpoints = parse(text).unwrap();
        assert_eq!(endpoints[0].address.to_string(), "[fd00::5]:8000");
        assert_eq!((endpoints[0].weight, endpoints[0].engine), (2.0, Engine::Vllm));
        assert_eq!((endpoints[1].weight, endpoints[1].engine), (1.0, Engine::Unknown));
    }

    #[test]
    fn a_wrong_file_says_where_and_what_to_do() {
        for (text, part) in [
            (
                "endpoints:\n- {name: a, adress: 10.0.0.1, port: 1}",
                "2:13: unknown key `adress` in `endpoints[0]`, did you mean `address`?",
            ),
            ("endpoints:\n- {name: a, address: llm.local, port: 1}", "invalid IP address"),
            ("endpoints:\n- {name: a, address: 10.0.0.1, port: 0}", "1 to 65535"),
            ("endpoints:\n- {name: a, address: 10.0.0.1, port: 1, weight: 0}", "remove it"),
            (
                "endpoints:\n- {name: a, address: 10.0.0.1, port: 1, engine: vlm}",
                "did you mean `vllm`?",
            ),
            ("endpoints:\n- {name: '', address: 10.0.0.1, port: 1}", "1 to 253"),
            ("endpoint: []", "did you mean `endpoints`?"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(part), "{text:?} gives {error:?}");
        }
        let twice = "endpoints:\n- {name: a, address: 10.0.0.1, port: 1}\n- {name: a, address: 10.0.0.2, port: 1}";
        assert!(
            endpoints(Path::new("f"), twice).unwrap_err().contains("two endpoints are named `a`")
        );
    }
}
