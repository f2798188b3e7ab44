//! The generated parts of `docs/`, compared with the source they are made from.
//!
//! `UPDATE_DOCS=1 cargo test --test it docs` writes them anew.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;

use llm_ring::config::Config;
use llm_ring::scheduling::{POLICIES, Policies};
use serde_yaml::Value;

const BEGIN: &str = "<!-- generated: UPDATE_DOCS=1 cargo test --test it docs -->";
const END: &str = "<!-- end of generated -->";

/// Compares the generated part of a page, or writes it.
#[track_caller]
fn check(page: &str, generated: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(page);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{page}: {error}"));
    let (head, rest) =
        text.split_once(BEGIN).unwrap_or_else(|| panic!("{page} has no generated part"));
    let (old, tail) =
        rest.split_once(END).unwrap_or_else(|| panic!("{page}: the generated part does not end"));
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, format!("{head}{BEGIN}\n\n{generated}\n{END}{tail}")).unwrap();
    } else {
        assert_eq!(
            old.trim(),
            generated.trim(),
            "{page} is stale: UPDATE_DOCS=1 cargo test --test it docs"
        );
    }
}

/// The doc line of each public field in a source file, by the name of its type and its own.
fn field_docs(file: &str) -> BTreeMap<(String, String), String> {
    let text = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).unwrap();
    let (mut owner, mut doc, mut docs) = (String::new(), String::new(), BTreeMap::new());
    for line in text.lines().map(str::trim) {
        if let Some(comment) = line.strip_prefix("/// ") {
            doc = if doc.is_empty() { comment.to_owned() } else { format!("{doc} {comment}") };
        } else if let Some(rest) = line.strip_prefix("pub struct ") {
            owner = rest.split([' ', '(']).next().unwrap().to_owned();
            doc.clear();
        } else if let Some((name, _)) = line.trim_start_matches("pub ").split_once(": ")
            && name.chars().all(|c| c.is_alphanumeric() || c == '_')
            && !doc.is_empty()
        {
            docs.insert((owner.clone(), name.to_owned()), std::mem::take(&mut doc));
        } else if !line.starts_with("#[") {
            doc.clear();
        }
    }
    docs
}

fn shown(value: &Value) -> String {
    format!("`{}`", serde_json::to_string(value).unwrap())
}

#[test]
fn configuration_page_lists_every_key_with_its_default() {
    let docs = field_docs("src/config/mod.rs");
    let document = serde_yaml::to_value(Config::default()).unwrap();
    let mut out = "| key | default | what it is |\n|---|---|---|\n".to_owned();
    for (section, value) in document.as_mapping().unwrap() {
        let section = section.as_str().unwrap();
        if section == "policies" {
            continue;
        }
        let owner: String = section[..1].to_uppercase() + &section[1..];
        match value {
            Value::Mapping(keys) => {
                for (key, value) in keys {
                    let key = key.as_str().unwrap();
                    let doc = docs.get(&(owner.clone(), key.to_owned()));
                    let doc = doc.unwrap_or_else(|| panic!("{owner}.{key} has no doc line"));
                    writeln!(out, "| `{section}.{key}` | {} | {doc} |", shown(value)).unwrap();
                }
            }
            Value::Null
            | Value::Bool(_)
            | Value::Number(_)
            | Value::String(_)
            | Value::Sequence(_)
            | Value::Tagged(_) => {
                let doc = &docs[&("Config".to_owned(), section.to_owned())];
                writeln!(out, "| `{section}` | {} | {doc} |", shown(value)).unwrap();
            }
        }
    }
    check("docs/configuration.md", &out);
}

#[test]
fn policies_page_lists_every_policy_with_its_parameters() {
    let defaults = serde_yaml::to_value(Policies::default()).unwrap();
    let mut out =
        "| policy | what it does | parameters, with their defaults |\n|---|---|---|\n".to_owned();
    let mut details = String::new();
    for (name, summary) in POLICIES {
        let parameters = defaults[*name].as_mapping().unwrap();
        let list: Vec<String> = parameters
            .iter()
            .map(|(key, value)| {
                format!("`{}: {}`", key.as_str().unwrap(), serde_json::to_string(value).unwrap())
            })
            .collect();
        let list = if list.is_empty() { "none".to_owned() } else { list.join(", ") };
        writeln!(out, "| `{name}` | {summary} | {list} |").unwrap();
        let docs = field_docs(&format!("src/scheduling/policy/{}.rs", name.replace('-', "_")));
        for key in parameters.keys().map(|key| key.as_str().unwrap()) {
            let doc = docs.iter().find(|((_, field), _)| field == key).map(|(_, doc)| doc);
            let doc = doc.unwrap_or_else(|| panic!("{name}.{key} has no doc line"));
            writeln!(details, "- `policies.{name}.{key}`: {doc}").unwrap();
        }
    }
    check("docs/policies.md", &format!("{out}\n{details}"));
}

#[test]
fn metrics_page_lists_every_metric() {
    let pool = Arc::new(llm_ring::pool::PoolSnapshot::default());
    let settings = llm_ring::app::settings(&Config::default()).unwrap();
    let scheduler = Arc::new(llm_ring::scheduling::Scheduler::new(settings, pool));
    let knowledge = Arc::new(llm_ring::app::knowledge(&Config::default()));
    let (metrics, registry) =
        llm_ring::telemetry::metrics::Metrics::new(scheduler, Arc::default(), knowledge);
    drop(metrics);
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
    let mut out = "| metric | type | what it is |\n|---|---|---|\n".to_owned();
    let types: BTreeMap<&str, &str> =
        text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' ')).collect();
    for line in text.lines() {
        if let Some((name, help)) =
            line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' '))
        {
            let suffix = if types[name] == "counter" { "_total" } else { "" };
            writeln!(
                out,
                "| `{name}{suffix}` | {} | {} |",
                types[name],
                help.trim_end_matches('.')
            )
            .unwrap();
        }
    }
    check("docs/operations.md", &out);
}
