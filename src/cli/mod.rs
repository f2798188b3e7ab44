#![allow(clippy::print_stderr, reason = "a command speaks to its user")]
//! The command line: the picker itself, and the tools that show what it does.

mod explain;
mod flags;
mod ring;
mod watch;

use std::ffi::OsString;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::builder::{PossibleValue, PossibleValuesParser};
use clap::{Args, Parser, Subcommand, ValueEnum};
use serde_yaml::Value;

use crate::config::{self, File, Loaded, Origin, Overrides};
use crate::scheduling::{ALIASES, POLICIES};
use crate::telemetry;

/// An endpoint picker for the Kubernetes Gateway API Inference Extension: consistent hashing with bounded loads,
/// adapted to LLM serving.
#[derive(Debug, Parser)]
#[command(name = "llm-ring", version, max_term_width = 100)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the picker: an ext_proc service for Envoy
    Serve(Settings),
    /// Print the effective configuration, each value with its source
    Config(Settings),
    /// Show how a decision is made: the worked example, a recorded decision, or a request body
    Explain(explain::Explain),
    /// Show the hash ring: shares, spread, and what moves when an endpoint joins or leaves
    Ring(ring::Ring),
    /// Follow the decisions of a running picker
    Watch(watch::Watch),
}

/// What can be set by hand; everything else is in the configuration file. Of a flag that comes twice the last counts,
/// as upstream: its chart writes some, and users write them again.
#[derive(Debug, Args)]
#[command(args_override_self = true)]
struct Settings {
    /// Configuration file (YAML); `llm-ring config` prints one with every key
    #[arg(long, short, visible_alias = "config-file", value_name = "FILE")]
    config: Option<PathBuf>,
    /// The same as text
    #[arg(long, value_name = "YAML", conflicts_with = "config")]
    config_text: Option<String>,
    /// Endpoints file (YAML), watched for changes [endpoints.file]
    #[arg(long, short, value_name = "FILE")]
    endpoints: Option<PathBuf>,
    /// Policy [policy]
    #[arg(long, short, value_name = "NAME", value_parser = policies())]
    policy: Option<String>,
    /// Address of all ports [server.address]
    #[arg(long, value_name = "IP")]
    address: Option<String>,
    /// Port of ext_proc [server.grpc_port]
    #[arg(long, value_name = "PORT")]
    grpc_port: Option<u16>,
    /// Port of gRPC health and the decision service [server.health_port]
    #[arg(long, value_name = "PORT")]
    grpc_health_port: Option<u16>,
    /// Port of /metrics [server.metrics_port]
    #[arg(long, value_name = "PORT")]
    metrics_port: Option<u16>,
    /// TLS on the ext_proc port [tls.mode]
    #[arg(long, value_name = "MODE", value_parser = ["self-signed", "files", "off"])]
    tls: Option<String>,
    /// Log level or filter [log.level]
    #[arg(long, value_name = "LEVEL")]
    log_level: Option<String>,
    /// Log format [log.format]
    #[arg(long, value_name = "FORMAT", value_parser = ["json", "human"])]
    log_format: Option<String>,
    /// OTLP receiver for traces, such as http://collector:4317 [tracing.otlp_endpoint]
    #[arg(long, value_name = "URL")]
    otlp_endpoint: Option<String>,
    #[command(flatten)]
    upstream: flags::Upstream,
}

/// How a tool prints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Output {
    /// For a person
    Text,
    /// For a program
    Json,
}

/// The names of policies, and what else they are called.
fn policies() -> PossibleValuesParser {
    let value = |&(name, _): &(&'static str, &str)| {
        let aliases = ALIASES.iter().filter(move |(_, of)| *of == name).map(|&(alias, _)| alias);
        PossibleValue::new(name).aliases(aliases)
    };
    PossibleValuesParser::new(POLICIES.iter().map(value))
}

/// Runs the command that the arguments are.
#[must_use]
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let result =
        flags::upstream(arguments).map_err(anyhow::Error::msg).and_then(|(arguments, ignored)| {
            match Cli::parse_from(arguments).command {
                Command::Serve(settings) => serve(settings, ignored),
                Command::Config(settings) => show(settings, ignored),
                Command::Explain(explain) => explain.run(),
                Command::Ring(ring) => ring.run(),
                Command::Watch(watch) => watch.run(),
            }
        });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Prints to standard output. A reader that has seen enough closes the pipe; that is no error.
fn print(text: &str) -> anyhow::Result<()> {
    match std::io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(error.into()),
        Ok(()) | Err(_) => Ok(()),
    }
}

fn show(settings: Settings, ignored: Vec<String>) -> anyhow::Result<()> {
    let mut loaded = settings.load()?;
    loaded.warnings.extend(ignored);
    print(&loaded.render())
}

fn serve(settings: Settings, ignored: Vec<String>) -> anyhow::Result<()> {
    let Loaded { config, warnings, origin, .. } = settings.load()?;
    telemetry::init::log(config.log.format, &config.log.level)?;
    for warning in warnings.into_iter().chain(ignored) {
        tracing::warn!("{warning}");
    }
    let mut runtime = match config.server.threads {
        1 => tokio::runtime::Builder::new_current_thread(),
        threads => {
            let mut builder = tokio::runtime::Builder::new_multi_thread();
            if threads > 0 {
                builder.worker_threads(threads);
            }
            builder
        }
    };
    runtime.enable_all().build()?.block_on(crate::app::serve(config, origin))
}

impl Settings {
    fn load(self) -> anyhow::Result<Loaded> {
        let path = |path: PathBuf| Value::from(path.display().to_string());
        let values: [(&'static str, &'static str, Option<Value>); 10] = [
            ("endpoints.file", "--endpoints", self.endpoints.map(path)),
            ("policy", "--policy", self.policy.map(Value::from)),
            ("server.address", "--address", self.address.map(Value::from)),
            ("server.grpc_port", "--grpc-port", self.grpc_port.map(Value::from)),
            ("server.health_port", "--grpc-health-port", self.grpc_health_port.map(Value::from)),
            ("server.metrics_port", "--metrics-port", self.metrics_port.map(Value::from)),
            ("tls.mode", "--tls", self.tls.map(Value::from)),
            ("log.level", "--log-level", self.log_level.map(Value::from)),
            ("log.format", "--log-format", self.log_format.map(Value::from)),
            ("tracing.otlp_endpoint", "--otlp-endpoint", self.otlp_endpoint.map(Value::from)),
        ];
        let mut environment = Overrides::new();
        let warnings = flags::environment(&mut environment, |name| std::env::var(name).ok());
        let mut overrides = Overrides::new();
        self.upstream.into(&mut overrides);
        // Of two flags that say the same, our own is the one that was meant.
        overrides.extend(
            values.into_iter().filter_map(|(path, from, value)| Some((path, from, value?))),
        );
        let file = match (&self.config, self.config_text) {
            (Some(path), _) => Some(File::read(path)?),
            (None, Some(text)) => Some(File { name: "--config-text".to_owned(), text }),
            (None, None) => None,
        };
        let mut loaded = config::load(file, &environment, &overrides)?;
        loaded.warnings.extend(warnings);
        loaded.origin = self.config.map(|path| Origin::new(path, environment, overrides));
        Ok(loaded)
    }
}
