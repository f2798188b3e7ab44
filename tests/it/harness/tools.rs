//! The real parts: Envoy, llama.cpp, an OpenTelemetry collector, Kubernetes. Found or set up once, or loudly skipped.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Envoy, and an engine with its model.
#[derive(Debug)]
pub(crate) struct Tools {
    pub(crate) envoy: PathBuf,
    engine: Vec<(String, String)>,
    model: String,
    /// The folder of the model's tokenizer; `None` for a model of somebody's own.
    pub(crate) tokenizer: Option<String>,
}

impl Tools {
    /// Returns them, or says that the test is skipped.
    pub(crate) fn get() -> Option<&'static Self> {
        static FOUND: OnceLock<Result<Tools, String>> = OnceLock::new();
        let found = FOUND.get_or_init(|| {
            let mut parts = parts(&[])?;
            let mut take = |name: &str| parts.remove(name).ok_or(format!("there is no {name}"));
            let (envoy, model) = (take("ENVOY")?.into(), take("MODEL")?);
            let tokenizer = parts.remove("TOKENIZER");
            Ok(Self { envoy, model, tokenizer, engine: parts.into_iter().collect() })
        });
        or_skip(found.as_ref())
    }

    /// Returns the command of a llama.cpp server.
    pub(crate) fn engine(&self, port: u16, slots: u32, context: u32) -> Command {
        let named = |name: &str| self.engine.iter().find(|(found, _)| found == name);
        let python = named("LLAMA_PYTHON").map_or("python3", |(_, python)| python.as_str());
        let mut command = Command::new(python);
        command.arg(demo().join("engine.py")).args([
            &self.model,
            &port.to_string(),
            &slots.to_string(),
            &context.to_string(),
            "0",
        ]);
        if let Some((name, server)) = named("LLAMA_SERVER") {
            command.env(name, server);
        }
        command
    }
}

/// An API server and what it needs.
#[derive(Debug)]
pub(crate) struct Kubernetes {
    pub(crate) apiserver: PathBuf,
    pub(crate) etcd: PathBuf,
    pub(crate) helm: PathBuf,
    /// A folder.
    pub(crate) crds: PathBuf,
}

impl Kubernetes {
    /// Returns them, or says that the test is skipped.
    pub(crate) fn get() -> Option<&'static Self> {
        static FOUND: OnceLock<Result<Kubernetes, String>> = OnceLock::new();
        let found = FOUND.get_or_init(|| {
            let mut parts = parts(&["--kubernetes"])?;
            let mut take = |name: &str| match parts.remove(name) {
                Some(path) => Ok(path.into()),
                None => Err(format!("there is no {name}")),
            };
            Ok(Self {
                apiserver: take("KUBE_APISERVER")?,
                etcd: take("ETCD")?,
                helm: take("HELM")?,
                crds: take("CRDS")?,
            })
        });
        or_skip(found.as_ref())
    }
}

/// Returns the collector's binary, or says that the test is skipped.
pub(crate) fn collector() -> Option<&'static str> {
    static FOUND: OnceLock<Result<String, String>> = OnceLock::new();
    let found = FOUND.get_or_init(|| {
        parts(&["--collector"])?.remove("OTELCOL").ok_or("there is no OTELCOL".to_owned())
    });
    or_skip(found.as_ref()).map(String::as_str)
}

/// A test without its real part passes on a laptop; in CI it fails.
fn or_skip<'a, T>(found: Result<&'a T, &String>) -> Option<&'a T> {
    found
        .inspect_err(|error| {
            let test = std::thread::current().name().unwrap_or_default().to_owned();
            assert!(std::env::var_os("CI").is_none(), "CI skips nothing: {error}");
            // Not eprintln: that is only seen when a test fails.
            drop(writeln!(std::io::stderr(), "SKIPPED: {test}: {error}"));
        })
        .ok()
}

/// Runs `parts.py` and reads its lines `NAME=value`.
fn parts(arguments: &[&str]) -> Result<BTreeMap<String, String>, String> {
    let script = demo().join("parts.py");
    let output = Command::new("python3")
        .arg(&script)
        .args(arguments)
        .output()
        .map_err(|error| format!("python3 cannot be run: {error}"))?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).trim().to_owned());
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let line = |line: &str| {
        let (name, value) = line.split_once('=')?;
        // As Python's shlex.quote writes it.
        let value = value.strip_prefix('\'').and_then(|v| v.strip_suffix('\'')).unwrap_or(value);
        Some((name.to_owned(), value.replace("'\"'\"'", "'")))
    };
    Ok(text.lines().filter_map(line).collect())
}

fn demo() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/bench/demo"))
}
