//! The directions of dependencies, and the purity of the core, as tests: docs/architecture.md states them.

use std::path::{Path, PathBuf};

/// A module, and what it may name of ours besides itself. Nobody may name a module that is not listed for it.
const LAYERS: &[(&str, &[&str])] = &[
    ("index", &[]),
    ("pool", &["index"]),
    ("scheduling", &["index", "pool"]),
    ("yaml", &[]),
    ("engine", &["index", "pool", "scheduling"]),
    ("telemetry", &["engine", "index", "pool", "scheduling"]),
    ("tls", &[]),
    ("tokens", &[]),
    ("discovery", &["pool", "telemetry", "yaml"]),
    ("ext_proc", &["engine", "index", "pool", "scheduling", "telemetry", "tokens"]),
    ("admin", &["scheduling", "telemetry"]),
    ("config", &["ext_proc", "pool", "scheduling", "telemetry", "tokens", "yaml"]),
    (
        "app",
        &[
            "admin",
            "config",
            "discovery",
            "engine",
            "ext_proc",
            "pool",
            "scheduling",
            "telemetry",
            "tls",
            "tokens",
        ],
    ),
    (
        "cli",
        &[
            "app",
            "config",
            "discovery",
            "ext_proc",
            "index",
            "pool",
            "scheduling",
            "telemetry",
            "yaml",
        ],
    ),
    ("lib", &[]),
    ("main", &[]),
];

/// Modules, and files of adapters, that do no I/O, read no clock and wait for nothing.
const PURE: &[&str] = &[
    "index/",
    "pool/",
    "scheduling/",
    "yaml.rs",
    "discovery/reconcile",
    "engine/dialect.rs",
    "engine/exposition.rs",
    "engine/knowledge.rs",
    "engine/kv_stream.rs",
    "engine/kv_wire.rs",
    "ext_proc/exchange.rs",
    "ext_proc/reply.rs",
    "ext_proc/json",
    "ext_proc/inflate",
    "ext_proc/request",
    "ext_proc/response",
    "telemetry/explain.rs",
    "telemetry/recall.rs",
    "tokens/body.rs",
    "tokens/chat.rs",
    "tokens/memo.rs",
    "tokens/python.rs",
    "tokens/template.rs",
];
/// What a pure file may not name.
const IMPURE: &[&str] = &[
    "tokio::",
    "tonic::",
    "kube::",
    "tracing::",
    "opentelemetry::",
    "hyper::",
    "axum::",
    "std::fs",
    "std::net::Tcp",
    "std::thread",
    "Instant::now",
    "SystemTime",
    "rand::",
    "println!",
    "std::env",
];

fn source() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

/// Every source file, as its path under `src` and its text without tests.
fn files() -> Vec<(String, String)> {
    fn walk(directory: &Path, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { walk(&path, found) } else { found.push(path) }
        }
    }
    let mut found = Vec::new();
    walk(&source(), &mut found);
    found.sort();
    found
        .into_iter()
        .filter(|path| path.extension().is_some_and(|e| e == "rs") && !path.ends_with("tests.rs"))
        .map(|path| {
            let text = std::fs::read_to_string(&path).unwrap();
            let code = text.split("#[cfg(test)]").next().unwrap_or_default().to_owned();
            (path.strip_prefix(source()).unwrap().to_str().unwrap().to_owned(), code)
        })
        .collect()
}

fn module(file: &str) -> &str {
    file.split(['/', '.']).next().unwrap()
}

/// The modules that a text names as `crate::x` or `crate::{x, y::z}`; comments do not count.
fn named(text: &str) -> Vec<String> {
    let code: String = text
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"))
        .map(|line| format!("{line}\n"))
        .collect();
    let word = |text: &str| {
        text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>()
    };
    let mut found = Vec::new();
    for (at, _) in code.match_indices("crate::") {
        if code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_') {
            continue;
        }
        let rest = &code[at + "crate::".len()..];
        if let Some(group) = rest.strip_prefix('{') {
            let (mut depth, mut item) = (1, String::new());
            for c in group.chars() {
                match c {
                    '{' => depth += 1,
                    '}' => depth -= 1,
                    _ => {}
                }
                if depth == 0 || (c == ',' && depth == 1) {
                    found.push(word(item.trim()));
                    item.clear();
                } else {
                    item.push(c);
                }
                if depth == 0 {
                    break;
                }
            }
        } else {
            found.push(word(rest));
        }
    }
    found.retain(|name| !name.is_empty());
    found
}

fn forbidden(file: &str, text: &str) -> Vec<String> {
    let own = module(file);
    let Some((_, allowed)) = LAYERS.iter().find(|(name, _)| *name == own) else {
        return vec![format!("src/{file}: `{own}` is in no layer of tests/it/layering.rs")];
    };
    named(text)
        .into_iter()
        .filter(|name| LAYERS.iter().any(|(layer, _)| layer == name))
        .filter(|name| name != own && !allowed.contains(&name.as_str()))
        .map(|name| format!("src/{file}: `{own}` may not name `{name}`"))
        .collect()
}

fn impure(file: &str, text: &str) -> Vec<String> {
    if !PURE.iter().any(|pure| file.starts_with(pure)) {
        return Vec::new();
    }
    let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
    let mut found = Vec::new();
    for line in code {
        found.extend(
            IMPURE
                .iter()
                .filter(|word| line.contains(*word))
                .map(|word| format!("src/{file}: names {word}")),
        );
    }
    found
}

#[test]
fn each_module_names_only_the_modules_below_it() {
    let violations: Vec<String> =
        files().iter().flat_map(|(file, text)| forbidden(file, text)).collect();
    assert!(violations.is_empty(), "{violations:#?}");
}

#[test]
fn pure_files_touch_nothing() {
    let violations: Vec<String> =
        files().iter().flat_map(|(file, text)| impure(file, text)).collect();
    assert!(violations.is_empty(), "{violations:#?}");
}

#[test]
fn nobody_reaches_over_two_levels() {
    let reaching: Vec<String> = files()
        .into_iter()
        .filter(|(_, text)| text.contains("super::super"))
        .map(|(file, _)| file)
        .collect();
    assert!(
        reaching.is_empty(),
        "{reaching:?} use super::super; name the module from the crate's root"
    );
}

#[test]
fn a_planted_violation_is_found() {
    let upward = "use std::fmt;\nuse crate::{index::ring, ext_proc::{reply, server}};\n";
    assert_eq!(
        forbidden("pool/load.rs", upward),
        ["src/pool/load.rs: `pool` may not name `ext_proc`"]
    );
    assert_eq!(
        forbidden("pool/load.rs", "// crate::app is a word here\nuse crate::index::ring;"),
        [""; 0]
    );
    assert_eq!(forbidden("novel/x.rs", "").len(), 1);
    assert_eq!(
        impure("index/ring.rs", "let now = Instant::now();"),
        ["src/index/ring.rs: names Instant::now"]
    );
    assert_eq!(impure("app.rs", "let now = Instant::now();"), [""; 0]);
}

#[test]
fn every_file_that_is_listed_as_pure_exists() {
    for pure in PURE {
        let path = source().join(pure.trim_end_matches('/'));
        assert!(
            path.exists() || path.with_extension("rs").exists(),
            "{pure} is listed as pure but does not exist"
        );
    }
}
