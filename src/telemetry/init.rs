//! The log: JSON or human lines on standard output.

use std::io::IsTerminal as _;

use tracing_subscriber::EnvFilter;

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// One JSON object a line.
    Json,
    /// Lines for a person.
    Human,
}

/// The client of Kubernetes writes an error for each attempt on a server that is away; we say once that it is. A
/// filter that names these targets has them back.
const SAID_OTHERWISE: &str = "kube_client=off,kube_runtime=off";

/// Starts the log; `level` is a level or a filter such as `info,h2=debug`.
///
/// # Errors
/// The filter cannot be read, or a log was started before.
pub fn log(format: LogFormat, level: &str) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(format!("{SAID_OTHERWISE},{level}"))?;
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_target(false)
        .with_ansi(std::io::stdout().is_terminal());
    match format {
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
        LogFormat::Human => builder.try_init(),
    }
    .map_err(|error| anyhow::anyhow!("the log cannot be started: {error}"))
}
