//! The flags and variables of the upstream endpoint picker, so that its chart's arguments start this one: those that
//! mean something here set a key, those that cannot are named in a warning, and those that it would be wrong to ignore
//! are refused.
//!
//! As of llm-d-router 0.10 and the inference extension 1.5 (`pkg/epp/server/options.go` of both).

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use serde_yaml::Value;

use crate::config::Overrides;

/// What the upstream picker's flags mean here. Booleans are `--flag` or `--flag=false`, as upstream.
#[derive(Debug, Args)]
#[command(next_help_heading = "In Kubernetes, as the upstream picker")]
pub(super) struct Upstream {
    /// InferencePool whose pods are the endpoints [kubernetes.pool]
    #[arg(long, value_name = "NAME")]
    pool_name: Option<String>,
    /// Namespace of the pool and its pods [kubernetes.namespace]
    #[arg(long, value_name = "NAMESPACE")]
    pool_namespace: Option<String>,
    /// API group of the pool: there is one
    #[arg(long, value_name = "GROUP", value_parser = ["inference.networking.k8s.io"])]
    pool_group: Option<String>,
    /// Instead of a pool: label selector of pods [kubernetes.selector]
    #[arg(long, value_name = "SELECTOR")]
    endpoint_selector: Option<String>,
    /// Ports of those pods, 1 to 8 [kubernetes.target_ports]
    #[arg(long, value_name = "PORTS", value_delimiter = ',')]
    endpoint_target_ports: Vec<u16>,
    /// One of several pickers leads, by a Lease [kubernetes.leader_election]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = boolean)]
    ha_enable_leader_election: Option<bool>,
    /// From SIGTERM until no new request is taken, such as 30s [drain.linger_seconds]
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    drain_timeout: Option<Duration>,
    /// TLS on the ext_proc port; false is the same as --tls off
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = boolean)]
    secure_serving: Option<bool>,
    /// Folder with tls.crt and tls.key [tls.cert, tls.key]
    #[arg(long, value_name = "FOLDER")]
    cert_path: Option<PathBuf>,
    /// false: no traces, whatever the environment says
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = boolean)]
    tracing: Option<bool>,
    /// Pick from the whole pool, whatever subset the gateway allows [requests.use_subset]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = boolean)]
    disable_endpoint_subset_filter: Option<bool>,
    /// Verbosity: up to 3 is info, 4 debug, more trace [log.level]
    #[arg(long, short, value_name = "N")]
    v: Option<u8>,
    /// json, or console for people [log.format]
    #[arg(long, value_name = "ENCODER", value_parser = ["json", "console"])]
    zap_encoder: Option<String>,
}

/// A boolean as Go reads it.
fn boolean(text: &str) -> Result<bool, String> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        _ => Err("true or false".to_owned()),
    }
}

impl Upstream {
    /// Adds what the flags set.
    pub(super) fn into(self, overrides: &mut Overrides) {
        let mut set = |path, from, value: Option<Value>| {
            overrides.extend(value.map(|value| (path, from, value)));
        };
        set("kubernetes.pool", "--pool-name", self.pool_name.map(Value::from));
        set("kubernetes.namespace", "--pool-namespace", self.pool_namespace.map(Value::from));
        set("kubernetes.selector", "--endpoint-selector", self.endpoint_selector.map(Value::from));
        let ports = (!self.endpoint_target_ports.is_empty()).then(|| {
            Value::Sequence(self.endpoint_target_ports.into_iter().map(Value::from).collect())
        });
        set("kubernetes.target_ports", "--endpoint-target-ports", ports);
        let election = self.ha_enable_leader_election.map(Value::from);
        set("kubernetes.leader_election", "--ha-enable-leader-election", election);
        let linger = self
            .drain_timeout
            .map(|time| Value::from(time.as_secs() + u64::from(time.subsec_nanos() > 0)));
        set("drain.linger_seconds", "--drain-timeout", linger);
        if let Some(folder) = self.cert_path {
            let file = |name| Some(Value::from(folder.join(name).display().to_string()));
            set("tls.cert", "--cert-path", file("tls.crt"));
            set("tls.key", "--cert-path", file("tls.key"));
            set("tls.mode", "--cert-path", Some(Value::from("files")));
        }
        if self.secure_serving == Some(false) {
            set("tls.mode", "--secure-serving", Some(Value::from("off")));
        }
        if self.tracing == Some(false) {
            set("tracing.otlp_endpoint", "--tracing", Some(Value::Null));
        }
        let subset = self.disable_endpoint_subset_filter.map(|disabled| Value::from(!disabled));
        set("requests.use_subset", "--disable-endpoint-subset-filter", subset);
        let level = self.v.map(|v| match v {
            0..=3 => "info",
            4 => "debug",
            5.. => "trace",
        });
        set("log.level", "--v", level.map(Value::from));
        let format = self.zap_encoder.map(|it| if it == "json" { "json" } else { "human" });
        set("log.format", "--zap-encoder", format.map(Value::from));
    }
}

/// Adds what the environment sets, which is weaker than the file and the flags; returns what could not be read.
pub(super) fn environment(
    overrides: &mut Overrides,
    read: impl Fn(&str) -> Option<String>,
) -> Vec<String> {
    let read = |name: &str| read(name).filter(|value| !value.is_empty());
    let mut warnings = Vec::new();
    let mut set = |path, from, value: Option<Value>| {
        overrides.extend(value.map(|value| (path, from, value)));
    };
    set("kubernetes.namespace", "env NAMESPACE", read("NAMESPACE").map(Value::from));
    set("kubernetes.identity", "env POD_NAME", read("POD_NAME").map(Value::from));
    if read("OTEL_TRACES_EXPORTER").is_none_or(|exporter| exporter == "otlp") {
        let of = |name: &str, from| Some((read(name)?, from));
        let traces =
            of("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "env OTEL_EXPORTER_OTLP_TRACES_ENDPOINT");
        let all = || of("OTEL_EXPORTER_OTLP_ENDPOINT", "env OTEL_EXPORTER_OTLP_ENDPOINT");
        if let Some((endpoint, from)) = traces.or_else(all) {
            set("tracing.otlp_endpoint", from, Some(Value::from(endpoint)));
        }
    }
    let service = read("OTEL_SERVICE_NAME").map(Value::from);
    set("tracing.service_name", "env OTEL_SERVICE_NAME", service);
    let share = match read("OTEL_TRACES_SAMPLER").as_deref() {
        Some("always_on" | "parentbased_always_on") => Some(1.0),
        Some("always_off" | "parentbased_always_off") => Some(0.0),
        None | Some("traceidratio" | "parentbased_traceidratio") => read("OTEL_TRACES_SAMPLER_ARG")
            .and_then(|given| {
                let share = given.parse().ok().filter(|share| (0.0..=1.0).contains(share));
                if share.is_none() {
                    warnings.push(format!("OTEL_TRACES_SAMPLER_ARG={given} is no share, 0 to 1"));
                }
                share
            }),
        Some(other) => {
            warnings.push(format!(
                "OTEL_TRACES_SAMPLER={other} is not known; tracing.sample says what is traced"
            ));
            None
        }
    };
    set("tracing.sample", "env OTEL_TRACES_SAMPLER", share.map(Value::from));
    warnings
}

/// What becomes of a flag that sets nothing.
#[derive(Debug, Clone, Copy)]
enum Fate {
    /// It is always so here, or has no counterpart; worth a line in the log when it says more than the default.
    Ignored(&'static str),
    /// To go on as if it were heeded would be wrong.
    Refused(&'static str),
}
use Fate::{Ignored, Refused};

/// Whether a flag stands alone or has a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Takes {
    Bool,
    Value,
}
use Takes::{Bool, Value as Text};

const SCRAPE: &str = "this picker does not scrape model servers yet";
const PORT: &str = "the metrics port has neither TLS nor authentication; bind it apart with a NetworkPolicy and leave the flag out";

#[rustfmt::skip]
const OTHERS: [(&str, Takes, Fate); 32] = [
    ("allow-experimental-plugins", Bool, Ignored("there are no plugins")),
    ("cache-info-metric", Text, Ignored(SCRAPE)),
    ("emit-endpoint-scores", Bool, Ignored("the decision log and `llm-ring watch` have every number of a decision")),
    ("enable-cert-reload", Bool, Ignored("certificates are always read again when they change")),
    ("enable-grpc-stream-metrics", Bool, Ignored("streams are always counted")),
    ("enable-pprof", Bool, Ignored("there is no pprof")),
    ("grpc-max-recv-msg-size", Text, Ignored("requests.max_body_bytes sets it")),
    ("grpc-max-send-msg-size", Text, Ignored("messages are never larger than 64 KiB")),
    ("health-checking", Bool, Ignored("health is always on the ext_proc port too")),
    ("kv-cache-usage-percentage-metric", Text, Ignored(SCRAPE)),
    ("kv-cache-usage-metric", Text, Ignored(SCRAPE)),
    ("lora-info-metric", Text, Ignored(SCRAPE)),
    ("metrics-cert-dir", Text, Refused(PORT)),
    ("metrics-client-ca-file", Text, Refused(PORT)),
    ("metrics-endpoint-auth", Bool, Refused(PORT)),
    ("metrics-staleness-threshold", Text, Ignored(SCRAPE)),
    ("model-server-metrics-https-insecure-skip-verify", Bool, Ignored(SCRAPE)),
    ("model-server-metrics-path", Text, Ignored(SCRAPE)),
    ("model-server-metrics-port", Text, Ignored(SCRAPE)),
    ("model-server-metrics-scheme", Text, Ignored(SCRAPE)),
    ("refresh-metrics-interval", Text, Ignored(SCRAPE)),
    ("refresh-prometheus-metrics-interval", Text, Ignored("gauges are read when they are scraped")),
    ("tls-cipher-suites", Text, Refused("the suites are rustls's own; leave the flag out")),
    ("tls-min-version", Text, Refused("TLS 1.2 and 1.3 are spoken; leave the flag out")),
    ("total-queued-requests-metric", Text, Ignored(SCRAPE)),
    ("total-running-requests-metric", Text, Ignored(SCRAPE)),
    ("zap-devel", Bool, Ignored("there is one log format for all")),
    ("zap-log-level", Text, Ignored("--log-level sets it")),
    ("zap-stacktrace-level", Text, Ignored("there are no stack traces")),
    ("zap-time-encoding", Text, Ignored("times are RFC 3339")),
    ("add-dir-header", Bool, Ignored("there is one log format for all")),
    ("logtostderr", Bool, Ignored("the log goes to standard output")),
];

/// Takes the flags out that set nothing, and returns the rest with a warning for each that was ignored. Without a
/// command, flags are those of `serve`.
///
/// # Errors
/// A flag is there that it would be wrong to ignore.
pub(super) fn upstream(
    arguments: impl IntoIterator<Item = OsString>,
) -> Result<(Vec<OsString>, Vec<String>), String> {
    let mut arguments = arguments.into_iter().peekable();
    let mut kept: Vec<OsString> = arguments.next().into_iter().collect();
    let first = arguments.peek().and_then(|it| it.to_str()).unwrap_or_default();
    if first.starts_with('-') && !matches!(first, "-h" | "--help" | "-V" | "--version") {
        kept.push("serve".into());
    } else if !matches!(first, "serve" | "config") {
        kept.extend(arguments);
        return Ok((kept, Vec::new()));
    }
    let mut warnings = Vec::new();
    while let Some(argument) = arguments.next() {
        let text = argument.to_str().unwrap_or_default();
        let (name, value) = text
            .split_once('=')
            .map_or((text, None), |(name, value)| (name, Some(value.to_owned())));
        let found = name
            .strip_prefix("--")
            .and_then(|name| OTHERS.iter().find(|(known, ..)| *known == name));
        let Some(&(name, takes, fate)) = found else {
            kept.push(argument);
            continue;
        };
        let value = match takes {
            Bool => value.unwrap_or_else(|| "true".to_owned()),
            Text => match value {
                Some(value) => value,
                None => arguments.next().and_then(|it| it.into_string().ok()).unwrap_or_default(),
            },
        };
        match fate {
            Ignored(why) => warnings.push(format!("--{name} has no effect: {why}")),
            // What is asked for is what is the case.
            Refused(_) if takes == Bool && boolean(&value) == Ok(false) => {}
            Refused(_) if value.is_empty() || value == "VersionTLS12" => {}
            Refused(why) => return Err(format!("--{name}={value} cannot be had: {why}")),
        }
    }
    Ok((kept, warnings))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(arguments: &str) -> Result<(String, usize), String> {
        let (kept, warnings) = upstream(arguments.split(' ').map(OsString::from))?;
        let kept: Vec<String> = kept.into_iter().map(|it| it.into_string().unwrap()).collect();
        Ok((kept.join(" "), warnings.len()))
    }

    #[test]
    fn flags_without_a_command_are_those_of_serve() {
        for (given, kept) in [
            ("llm-ring --pool-name p", "llm-ring serve --pool-name p"),
            ("llm-ring -v=4", "llm-ring serve -v=4"),
            ("llm-ring --help", "llm-ring --help"),
            ("llm-ring config --policy random", "llm-ring config --policy random"),
            ("llm-ring ring -n 3", "llm-ring ring -n 3"),
            ("llm-ring", "llm-ring"),
        ] {
            assert_eq!(take(given), Ok((kept.to_owned(), 0)), "{given}");
        }
    }

    #[test]
    fn what_sets_nothing_is_taken_out_and_named() {
        let given = "llm-ring --zap-devel --refresh-metrics-interval 50ms --pool-name p --enable-pprof=false --tls-min-version=VersionTLS12 --metrics-endpoint-auth=false";
        assert_eq!(take(given), Ok(("llm-ring serve --pool-name p".to_owned(), 3)));
    }

    #[test]
    fn what_it_would_be_wrong_to_ignore_is_refused() {
        for flag in [
            "--metrics-endpoint-auth",
            "--metrics-client-ca-file ca.crt",
            "--tls-min-version=VersionTLS13",
        ] {
            let error = take(&format!("llm-ring {flag}")).unwrap_err();
            assert!(
                error.contains("cannot be had") && error.contains("leave the flag out"),
                "{error}"
            );
        }
    }

    #[test]
    fn the_environment_is_read_as_upstream_reads_it() {
        let variables = [
            ("NAMESPACE", "llm"),
            ("POD_NAME", ""),
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4317"),
            ("OTEL_TRACES_SAMPLER_ARG", "0.5"),
        ];
        let set = |more: &'static [(&str, &str)]| {
            let mut overrides = Overrides::new();
            let warnings = environment(&mut overrides, |name| {
                let all = variables.iter().chain(more);
                all.rev().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
            });
            let paths = overrides.iter().map(|(path, ..)| *path).collect::<Vec<_>>().join(" ");
            (paths, warnings.len())
        };
        let all = "kubernetes.namespace tracing.otlp_endpoint tracing.sample";
        assert_eq!(set(&[]), (all.to_owned(), 0));
        assert_eq!(set(&[("OTEL_TRACES_SAMPLER", "always_on")]), (all.to_owned(), 0));
        let without = "kubernetes.namespace tracing.otlp_endpoint";
        assert_eq!(set(&[("OTEL_TRACES_SAMPLER_ARG", "many")]), (without.to_owned(), 1));
        assert_eq!(set(&[("OTEL_TRACES_SAMPLER", "jaeger_remote")]), (without.to_owned(), 1));
        let quiet = "kubernetes.namespace tracing.sample";
        assert_eq!(set(&[("OTEL_TRACES_EXPORTER", "console")]), (quiet.to_owned(), 0));
    }
}
