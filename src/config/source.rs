//! Defaults, then the file, then flags: reads them, says where each value is from, and explains what is wrong.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use serde_yaml::Value;

use super::{Config, TlsMode};
use crate::scheduling::named;
use crate::yaml;

/// The configuration, with where it is from.
#[derive(Debug, Clone)]
pub struct Loaded {
    /// What is in force.
    pub config: Config,
    /// What was read and is not in force, for a person to know.
    pub warnings: Vec<String>,
    /// How to read it again, where it has a file that can change.
    pub origin: Option<Origin>,
    file: Option<String>,
    /// Paths that something else than a default has set.
    sources: BTreeMap<String, Source>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    File,
    /// A flag or a variable, as it is shown.
    Named(&'static str),
}

/// A configuration's file, and what it was put together with.
#[derive(Debug, Clone)]
pub struct Origin {
    /// The file.
    pub path: PathBuf,
    environment: Overrides,
    flags: Overrides,
}

impl Origin {
    /// Notes where a configuration is from.
    #[must_use]
    pub fn new(path: PathBuf, environment: Overrides, flags: Overrides) -> Self {
        Self { path, environment, flags }
    }

    /// Puts the configuration together anew from what the file says now.
    ///
    /// # Errors
    /// As [`load`].
    pub fn load(&self, text: String) -> Result<Config, ConfigError> {
        let file = File { name: self.path.display().to_string(), text };
        load(Some(file), &self.environment, &self.flags).map(|loaded| loaded.config)
    }
}

/// Why a configuration is not one.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ConfigError(String);

/// Values from variables or flags, the weaker first: the path in the document, what it is from (`--policy`,
/// `env NAMESPACE`), the value.
pub type Overrides = Vec<(&'static str, &'static str, Value)>;

/// A document, with the name that errors about it begin with.
#[derive(Debug, Clone)]
pub struct File {
    /// Its path, or the flag that it was given in.
    pub name: String,
    /// What it says.
    pub text: String,
}

impl File {
    /// Reads a file.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let name = path.display().to_string();
        let text = std::fs::read_to_string(path)
            .map_err(|error| ConfigError(format!("{name}: cannot be read: {error}")))?;
        Ok(Self { name, text })
    }
}

/// Puts the configuration together: flags are stronger than the file, and the file than the environment.
///
/// # Errors
/// A key that does not exist or a value that cannot be; the text says where and what to do.
pub fn load(
    file: Option<File>,
    environment: &Overrides,
    flags: &Overrides,
) -> Result<Loaded, ConfigError> {
    let mut sources = BTreeMap::new();
    let mut warnings = Vec::new();
    let mut config = Config::default();
    if let Some(File { name, text }) = &file {
        let document = serde_yaml::from_str::<Value>(text).unwrap_or_default();
        if let Some(plugins) = upstream_plugins(&document) {
            warnings.push(format!(
                "{name} is an EndpointPickerConfig, the upstream picker's: its plugins ({plugins}) are not used; `policy` and the keys of `llm-ring config` say what is"
            ));
        } else {
            config = yaml::parse(text).map_err(|error| ConfigError(format!("{name}:{error}")))?;
            leaves("", &document, &mut |at, _| {
                sources.insert(shown(at), Source::File);
            });
            // What follows from a value of the file is from there too, such as the scorers of a profile.
            let defaults = serde_yaml::to_value(Config::default()).unwrap_or_default();
            let effective = serde_yaml::to_value(&config).unwrap_or_default();
            leaves("", &effective, &mut |at, value| {
                if find(&defaults, at) != Some(value) {
                    sources.entry(at.to_owned()).or_insert(Source::File);
                }
            });
        }
    }
    let mut document =
        serde_yaml::to_value(&config).map_err(|error| ConfigError(error.to_string()))?;
    let unset = |(path, ..): &&(&'static str, &'static str, Value)| !sources.contains_key(*path);
    let environment: Vec<_> = environment.iter().filter(unset).cloned().collect();
    for (path, from, value) in environment.iter().chain(flags) {
        set(&mut document, path, value.clone());
        sources.insert((*path).to_owned(), Source::Named(from));
        config = serde_yaml::from_value(document.clone()).map_err(|error| {
            ConfigError(format!("{from}: {}", yaml::without_location(&error.to_string())))
        })?;
    }
    let file = file.map(|file| file.name);
    check(&config).map_err(|error| match &file {
        Some(name) => ConfigError(format!("{name}: {}", error.0)),
        None => error,
    })?;
    Ok(Loaded { config, warnings, origin: None, file, sources })
}

/// Returns the plugins that the upstream picker's configuration names, if it is one.
fn upstream_plugins(document: &Value) -> Option<String> {
    if document.get("kind")?.as_str()? != "EndpointPickerConfig" {
        return None;
    }
    let plugins = document.get("plugins").and_then(Value::as_sequence);
    let types = plugins.into_iter().flatten().filter_map(|it| it.get("type")?.as_str());
    Some(types.collect::<Vec<_>>().join(", "))
}

/// Checks what no single value can know.
fn check(config: &Config) -> Result<(), ConfigError> {
    if config.tls.mode == TlsMode::Files {
        config.tls.files().map_err(ConfigError)?;
    }
    if let Err(error) = tracing_subscriber::EnvFilter::try_new(&config.log.level) {
        return Err(ConfigError(format!(
            "log.level: `{}` is no level or filter such as `info` or `info,h2=debug`: {error}",
            config.log.level
        )));
    }
    check_endpoints(config)?;
    let server = &config.server;
    let ports = [server.grpc_port, server.health_port, server.metrics_port];
    for (i, port) in ports.iter().enumerate() {
        if *port != 0 && ports[..i].contains(port) {
            return Err(ConfigError(format!(
                "port {port} is given twice: server.grpc_port, server.health_port and server.metrics_port must differ"
            )));
        }
    }
    for header in &config.requests.conversation_headers {
        if header.is_empty()
            || header.chars().any(|c| c.is_ascii_uppercase() || c.is_whitespace() || c == ':')
        {
            return Err(ConfigError(format!(
                "requests.conversation_headers: `{header}` is not a lower-case header name"
            )));
        }
    }
    Ok(())
}

/// Checks that endpoints come from one place.
fn check_endpoints(config: &Config) -> Result<(), ConfigError> {
    let kubernetes = &config.kubernetes;
    let given = [
        ("endpoints.file", config.endpoints.file.is_some()),
        ("kubernetes.pool", kubernetes.pool.is_some()),
        ("kubernetes.selector", kubernetes.selector.is_some()),
    ];
    let given: Vec<&str> = given.iter().filter(|(_, given)| *given).map(|&(key, _)| key).collect();
    if given.len() > 1 {
        let given = given.join(" and ");
        return Err(ConfigError(format!("endpoints come from one place, and {given} are given")));
    }
    for (key, value) in [
        ("kubernetes.pool", &kubernetes.pool),
        ("kubernetes.namespace", &kubernetes.namespace),
        ("kubernetes.lease", &kubernetes.lease),
        ("kubernetes.identity", &kubernetes.identity),
    ] {
        if value.as_ref().is_some_and(|value| value.trim().is_empty()) {
            return Err(ConfigError(format!("{key} is empty: name it, or leave it out")));
        }
    }
    let ports = &kubernetes.target_ports;
    if kubernetes.selector.is_some() {
        if ports.is_empty() || ports.len() > 8 || ports.contains(&0) {
            return Err(ConfigError(format!(
                "kubernetes.selector needs kubernetes.target_ports (--endpoint-target-ports), 1 to 8 ports, not {ports:?}"
            )));
        }
        if kubernetes.selector.as_deref().is_some_and(|it| it.trim().is_empty()) {
            return Err(ConfigError(
                "kubernetes.selector is empty, which would select every pod of the namespace"
                    .to_owned(),
            ));
        }
    } else if !ports.is_empty() {
        return Err(ConfigError(
            "kubernetes.target_ports belong to kubernetes.selector; an InferencePool has its own ports"
                .to_owned(),
        ));
    }
    if kubernetes.leader_election && !config.in_kubernetes() {
        return Err(ConfigError(
            "kubernetes.leader_election needs kubernetes.pool or kubernetes.selector".to_owned(),
        ));
    }
    Ok(())
}

impl Loaded {
    /// Writes the effective whole as YAML, each value with its source.
    #[must_use]
    pub fn render(&self) -> String {
        let file = self.file.as_deref().unwrap_or("file");
        let mut out = String::new();
        for warning in &self.warnings {
            let _ = writeln!(out, "# warning: {warning}");
        }
        if let Ok(document) = serde_yaml::to_value(&self.config) {
            self.render_into(&mut out, "", &document, 0, file);
        }
        out
    }

    fn render_into(&self, out: &mut String, at: &str, value: &Value, depth: usize, file: &str) {
        let Value::Mapping(mapping) = value else {
            return;
        };
        for (key, value) in mapping {
            let key = key.as_str().unwrap_or_default();
            let path = join(at, key);
            let indent = "  ".repeat(depth);
            if let Value::Mapping(inner) = value {
                let braces = if inner.is_empty() { " {}" } else { "" };
                let _ = writeln!(out, "{indent}{key}:{braces}");
                self.render_into(out, &path, value, depth + 1, file);
                continue;
            }
            let text = serde_json::to_string(value).unwrap_or_default();
            let source = match self.sources.get(&path) {
                None => "default".to_owned(),
                Some(Source::File) => file.to_owned(),
                Some(Source::Named(name)) => (*name).to_owned(),
            };
            let _ = writeln!(out, "{:<58} # {source}", format!("{indent}{key}: {text}"));
        }
    }
}

/// Returns the path under which a value is shown: a policy may be called by another name.
fn shown(path: &str) -> String {
    let renamed = path.strip_prefix("policies.").and_then(|rest| {
        let (policy, rest) = rest.split_once('.')?;
        Some(format!("policies.{}.{rest}", named(policy)?))
    });
    renamed.unwrap_or_else(|| path.to_owned())
}

fn find<'a>(document: &'a Value, path: &str) -> Option<&'a Value> {
    path.split('.').try_fold(document, |value, key| value.get(key))
}

fn join(at: &str, key: &str) -> String {
    if at.is_empty() { key.to_owned() } else { format!("{at}.{key}") }
}

fn leaves(at: &str, value: &Value, found: &mut dyn FnMut(&str, &Value)) {
    match value {
        Value::Mapping(mapping) => {
            for (key, value) in mapping {
                leaves(&join(at, key.as_str().unwrap_or_default()), value, found);
            }
        }
        Value::Null
        | Value::Bool(_)
        | Value::Number(_)
        | Value::String(_)
        | Value::Sequence(_)
        | Value::Tagged(_) => {
            found(at, value);
        }
    }
}

fn set(document: &mut Value, path: &str, value: Value) {
    let (head, rest) = path.split_once('.').map_or((path, None), |(head, rest)| (head, Some(rest)));
    if let Value::Mapping(mapping) = document {
        match rest {
            None => {
                mapping.insert(Value::String(head.to_owned()), value);
            }
            Some(rest) => {
                if let Some(inner) = mapping.get_mut(head) {
                    set(inner, rest, value);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config, String> {
        yaml::parse(text)
    }

    #[track_caller]
    fn error(text: &str) -> String {
        parse(text).expect_err("this document is wrong")
    }

    #[test]
    fn a_wrong_document_says_where_and_what_to_do() {
        for (text, parts) in [
            (
                "policies:\n  bounded:\n    load: tokens\n    epsilom: 1",
                &["4:5", "`epsilom`", "`policies.bounded`", "did you mean `epsilon`"][..],
            ),
            ("polcy: bounded", &["1:1", "`polcy`", "did you mean `polic"]),
            (
                "log: {}\npolicy: consistant",
                &["2:1", "no policy `consistant`", "did you mean `consistent`"],
            ),
            (
                "policies:\n  bounded:\n    load: tokens\n    epsilon: -1",
                &["4:5", "`policies.bounded.epsilon`", "above 0", "-1"],
            ),
            ("policies:\n  bounded:\n    epsilon: .nan", &["3:5", "above 0"]),
            (
                "policies:\n  llm-aware:\n    epsilon: 2",
                &["2:3", "long_epsilon (1)", "cannot be below epsilon (2)"],
            ),
            ("ring: { points: 0 }", &["1:9", "`ring.points`", "1 to 10000"]),
            ("tls:\n  mode: file", &["2:3", "`tls.mode`", "did you mean `files`"]),
            ("server:\n  stream_window_bytes: 4294967295", &["2:3", "2147483647"]),
            ("answers:\n  destinations: 0", &["2:3"]),
            ("server:\n  grpc_port: http", &["2:3", "grpc_port"]),
            ("policy: bounded\npolicy: random", &["duplicate"]),
            ("policy: bounded\n---\npolicy: random", &["two YAML documents"]),
            ("policy: bounded\n\tserver: {}", &["2:1"]),
            ("tracing: { sample: 1.5 }", &["1:12", "0 to 1"]),
        ] {
            let error = error(text);
            for part in parts {
                assert!(error.contains(part), "{text:?} gives {error:?}, which lacks {part:?}");
            }
        }
    }

    #[test]
    fn an_empty_document_is_the_defaults() {
        for text in ["", "\n", "# nothing\n", "{}"] {
            assert_eq!(parse(text), Ok(Config::default()), "{text:?}");
        }
    }

    #[test]
    fn what_is_printed_can_be_read_again_and_names_its_sources() {
        let loaded =
            load(None, &Vec::new(), &vec![("policy", "--policy", Value::from("bounded"))]).unwrap();
        let text = loaded.render();
        assert_eq!(parse(&text).unwrap(), loaded.config);
        assert!(text.lines().any(|line| line.starts_with("policy: \"bounded\"") && line.ends_with("# --policy")), "{text}");
        assert!(text.contains("# default"));
    }

    #[test]
    fn a_policy_s_other_name_is_the_same_policy_and_a_profile_is_shown_whole() {
        let text = "policy: kvaware\npolicies: { kvaware: { threshold: 5 }, weighted: { profile: guide } }";
        let file = File { name: "ring.yaml".to_owned(), text: text.to_owned() };
        let loaded = load(Some(file), &Vec::new(), &Vec::new()).unwrap();
        assert_eq!(loaded.config.policy.as_str(), "kv-aware");
        let shown = loaded.render();
        let from_file = |part: &str| {
            let line = shown.lines().find(|line| line.contains(part)).unwrap();
            assert!(line.ends_with("# ring.yaml"), "{line}");
        };
        for part in
            ["policy: \"kv-aware\"", "threshold: 5", "token-load-scorer", "affinity_threshold"]
        {
            from_file(part);
        }
        assert_eq!(parse(&shown).unwrap(), loaded.config);
    }

    #[test]
    fn a_wrong_flag_is_named() {
        let error = load(None, &Vec::new(), &vec![("policy", "--policy", Value::from("bound"))])
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with("--policy:") && error.contains("did you mean `bounded`"),
            "{error}"
        );
    }
}
