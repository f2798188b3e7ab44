//! Everything that can be configured: one YAML file, a few flags, and each default once, here or in a policy's file.

mod source;

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::ext_proc::reply::ErrorFormat;
use crate::pool::{self, Release};
use crate::scheduling::{ALIASES, POLICIES, Policies, named};
use crate::telemetry::init::LogFormat;
use crate::tokens::{EngineApi, ModelOptions};
use crate::yaml;

pub use source::{ConfigError, File, Loaded, Origin, Overrides, load};

/// The whole configuration.
#[derive(Debug, Clone, PartialEq, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Where the picker listens.
    pub server: Server,
    /// TLS of the ext_proc port.
    pub tls: Tls,
    /// Endpoints from a file.
    pub endpoints: Endpoints,
    /// Endpoints from Kubernetes.
    pub kubernetes: Kubernetes,
    /// How endpoints that join a pool at work rise to their share.
    pub warmup: Warmup,
    /// The policy in use, one of `policies`.
    pub policy: PolicyName,
    /// The parameters of every policy.
    pub policies: Policies,
    /// The hash ring.
    pub ring: Ring,
    /// Placement memory.
    pub memory: Memory,
    /// How load is booked.
    pub load: Load,
    /// What work costs on an engine of this pool.
    pub prices: Prices,
    /// What engines' metrics say.
    pub metrics: Metrics,
    /// What engines' KV events say.
    pub events: Events,
    /// What is kept of caches.
    pub prefix: Prefix,
    /// When requests are turned away.
    pub admission: Admission,
    /// When requests wait in the picker for an endpoint to have less to do.
    pub hold: Hold,
    /// How requests are read.
    pub requests: Requests,
    /// What tells the tokens of prompts.
    pub tokenizers: Tokenizers,
    /// What goes back.
    pub answers: Answers,
    /// The log.
    pub log: Log,
    /// Records of requests, for deciding them again.
    pub records: Records,
    /// OpenTelemetry traces.
    pub tracing: Tracing,
    /// The end.
    pub drain: Drain,
}

impl Config {
    /// Tells whether endpoints come from Kubernetes.
    #[must_use]
    pub fn in_kubernetes(&self) -> bool {
        self.kubernetes.pool.is_some() || self.kubernetes.selector.is_some()
    }
}

/// Where the picker listens.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Server {
    /// Address of all ports.
    pub address: IpAddr,
    /// ext_proc and health, for Envoy.
    pub grpc_port: u16,
    /// Health and the decision service, plaintext, for the kubelet and `llm-ring watch`.
    pub health_port: u16,
    /// `/metrics`, `/livez` and `/readyz` over HTTP.
    pub metrics_port: u16,
    /// Threads that serve; 0 is one a core. One is cheapest, and serves thousands of requests a second.
    pub threads: usize,
    /// HTTP/2 window of one stream, in bytes.
    pub stream_window_bytes: Window,
    /// HTTP/2 window of one connection of Envoy, in bytes: it carries many streams, so it is far larger.
    pub connection_window_bytes: Window,
}

/// TLS of the ext_proc port.
#[derive(Debug, Clone, PartialEq, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Tls {
    /// `self-signed` (gateways do not verify pickers), `files` or `off`.
    pub mode: TlsMode,
    /// PEM certificate chain, with `files`; read again when it changes.
    pub cert: Option<PathBuf>,
    /// PEM private key, with `files`.
    pub key: Option<PathBuf>,
}

/// How the ext_proc port is secured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum TlsMode {
    /// A certificate made at the start.
    #[default]
    SelfSigned,
    /// `cert` and `key`.
    Files,
    /// Plaintext.
    Off,
}

/// Endpoints from a file, without Kubernetes.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Endpoints {
    /// A YAML file with a list `endpoints`.
    pub file: Option<PathBuf>,
    /// How often the file is looked at, in milliseconds, 10 or more.
    pub poll_ms: Ranged<10, 3_600_000>,
}

/// Endpoints from Kubernetes: the pods of an InferencePool, or those of a selector.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Kubernetes {
    /// Name of the InferencePool (`inference.networking.k8s.io/v1`).
    pub pool: Option<String>,
    /// Namespace of the pool and its pods; absent: the picker's own.
    pub namespace: Option<String>,
    /// Instead of a pool: a label selector of pods, such as `app=llm,tier in (a,b)`. It needs no CRD.
    pub selector: Option<String>,
    /// With `selector`: 1 to 8 ports, each an endpoint of each pod.
    pub target_ports: Vec<u16>,
    /// Which address of a pod is dialled: `primary`, `ipv4` or `ipv6`.
    pub address_family: AddressFamily,
    /// Label of pods with their weight, above 0 and at most 100; without it a pod weighs 1.
    pub weight_label: String,
    /// Label of pods with their role; `prefill`, `encode` and `encode-prefill` take no requests from clients.
    pub role_label: String,
    /// Whether InferenceObjectives give requests their priority, where their CRD is installed.
    pub objectives: bool,
    /// How long one watch lasts before it is asked for anew, in seconds. A connection that goes silent is given up 5 s
    /// after that, and a server that takes connections and never answers within about twice that.
    pub watch_seconds: Ranged<2, 290>,
    /// Whether one of several pickers leads, by a Lease, and the others are not ready.
    pub leader_election: bool,
    /// Name of the Lease; absent: `epp-NAMESPACE-POOL.llm-d.ai`, as the upstream picker's.
    pub lease: Option<String>,
    /// How long the Lease holds without being renewed, in seconds.
    pub lease_seconds: Ranged<3, 300>,
    /// Who we are in the Lease; absent: the host's name.
    pub identity: Option<String>,
}

/// Which address of a pod is dialled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum AddressFamily {
    /// The one that Kubernetes calls the pod's.
    #[default]
    Primary,
    /// The first of IPv4.
    Ipv4,
    /// The first of IPv6.
    Ipv6,
}

/// How endpoints that join a pool at work rise to their share: their caches are empty.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Warmup {
    /// From joining to full weight, in seconds; 0 is at once.
    pub seconds: Ranged<0, 3600>,
    /// Steps on the way; each moves about one step's part of the newcomer's share of conversations.
    pub steps: Ranged<1, 100>,
}

/// The name of a policy that exists.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(try_from = "String", into = "String")]
pub struct PolicyName(String);

/// The hash ring.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Ring {
    /// Virtual nodes for each unit of weight, 1 to 10,000.
    pub points: Points,
}

/// A number of `MIN` to `MAX`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(try_from = "u64", into = "u64")]
pub struct Ranged<const MIN: u64, const MAX: u64>(u64);

/// Virtual nodes for each unit of weight; 100 spread keys within about 10 %.
pub type Points = Ranged<1, 10_000>;
/// An HTTP/2 window, in bytes: the protocol's limits.
pub type Window = Ranged<65_535, 0x7fff_ffff>;

/// Placement memory.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Memory {
    /// Conversations remembered, 1 to 10,000,000, least recently served forgotten first.
    pub conversations: Ranged<1, 10_000_000>,
}

/// How load is booked.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Load {
    /// When a prompt's tokens are released: at the `first-token`, or with the rest at the `end`.
    pub release_prompt: ReleaseName,
    /// Tokens that a request is taken to generate when it sets no limit.
    pub default_max_tokens: u64,
}

/// What work costs on an engine of this pool, for `marginal-cost` and `hold`: what matters are the proportions, for how
/// fast an endpoint really is gets learned. The defaults are a 32B model's on two H100.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Prices {
    /// Seconds that every step takes.
    pub overhead: Price,
    /// Seconds that the model's weights take to be read, in every step.
    pub floor: Price,
    /// Seconds for a prompt token.
    pub prefill: Price,
    /// Seconds for an answer in a step.
    pub decode: Price,
    /// Seconds for a prompt token and a token before it.
    pub quadratic: Price,
    /// Seconds for a token that answers look back on, in a step.
    pub context: Price,
    /// Tokens that a step computes at most.
    pub budget: Ranged<1, 1_000_000_000>,
    /// Requests that run at the same time at most: `--max-num-seqs`, or the slots of a llama.cpp server.
    pub sequences: Ranged<1, 1_000_000>,
    /// Tokens that the KV cache holds.
    pub capacity: Ranged<1, 1_000_000_000_000>,
}

/// Seconds, 0 to 1000.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize)]
#[serde(try_from = "f64", into = "f64")]
pub struct Price(f64);

impl TryFrom<f64> for Price {
    type Error = String;

    fn try_from(seconds: f64) -> Result<Self, String> {
        if (0.0..=1000.0).contains(&seconds) {
            Ok(Self(seconds))
        } else {
            Err(format!("a price is 0 to 1000 seconds, not {seconds}"))
        }
    }
}

impl From<Price> for f64 {
    fn from(price: Price) -> Self {
        price.0
    }
}

impl Default for Prices {
    fn default() -> Self {
        let prices = pool::Prices::default();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "the defaults are whole"
        )]
        let whole = |count: f64| count as u64;
        Self {
            overhead: Price(prices.overhead),
            floor: Price(prices.floor),
            prefill: Price(prices.prefill),
            decode: Price(prices.decode),
            quadratic: Price(prices.quadratic),
            context: Price(prices.context),
            budget: Ranged(whole(prices.budget)),
            sequences: Ranged(whole(prices.sequences)),
            capacity: Ranged(whole(prices.capacity)),
        }
    }
}

impl From<&Prices> for pool::Prices {
    fn from(prices: &Prices) -> Self {
        #[expect(clippy::cast_precision_loss, reason = "the ranges stay far below 2^52")]
        let (budget, sequences, capacity) =
            (prices.budget.0 as f64, prices.sequences.0 as f64, prices.capacity.0 as f64);
        Self {
            overhead: prices.overhead.0,
            floor: prices.floor.0,
            prefill: prices.prefill.0,
            decode: prices.decode.0,
            quadratic: prices.quadratic.0,
            context: prices.context.0,
            budget,
            sequences,
            capacity,
        }
    }
}

/// When a prompt's tokens are released.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReleaseName {
    /// At the first token of the answer.
    FirstToken,
    /// At the end of the answer.
    End,
}

/// Engines' own metrics: requests that run and wait there, memory in use, LoRA adapters.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Metrics {
    /// Whether engines are asked. Of those that do not answer nothing is known, and routing goes on.
    pub enabled: bool,
    /// Time between two questions to one engine, in milliseconds, 10 or more.
    pub interval_ms: Ranged<10, 60_000>,
    /// What was heard longer ago is not believed, in milliseconds; more than `interval_ms`.
    pub stale_ms: Ranged<20, 600_000>,
    /// Longest wait for a whole answer, in milliseconds.
    pub timeout_ms: Ranged<1, 60_000>,
    /// Largest answer, in bytes.
    pub max_bytes: Ranged<1024, 0x1000_0000>,
    /// Port of all engines' metrics; absent: each endpoint's own.
    pub port: Option<u16>,
    /// Path; absent: `/metrics`, and `/prometheus/metrics` of TensorRT-LLM.
    pub path: Option<String>,
    /// `off`, `verify` (certificates signed by `ca`) or `any` (encrypted, but from whom is not known).
    pub tls: MetricsTls,
    /// PEM file of the CA, with `verify`; read again when it changes.
    pub ca: Option<PathBuf>,
    /// Name in the engines' certificates; absent: the endpoint's address.
    pub server_name: Option<String>,
    /// File with a bearer token; read again when it changes.
    pub token_file: Option<PathBuf>,
}

/// How engines are asked for metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum MetricsTls {
    /// In plain text.
    #[default]
    Off,
    /// Over TLS, with certificates of a CA.
    Verify,
    /// Over TLS, with any certificate.
    Any,
}

/// Engines' KV events: which blocks are in their caches. They name blocks by tokens, so they serve requests whose token
/// ids are known.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Events {
    /// Whether engines are listened to.
    pub enabled: bool,
    /// Port of engines' PUB socket, of the first data-parallel rank; each further one's is one higher.
    pub port: u16,
    /// Port of their ROUTER socket, which sends again what was missed; absent: then all is forgotten instead.
    pub replay_port: Option<u16>,
    /// Data-parallel ranks of an engine.
    pub ranks: Ranged<1, 256>,
    /// Only topics that begin with this count.
    pub topic: String,
    /// Address on which engines connect to the picker, with topics `kv@ENDPOINT@MODEL`; then `port` is not used.
    pub listen: Option<SocketAddr>,
}

/// What is kept of caches.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Prefix {
    /// Whether caches are guessed from the text that was sent; for `marginal-cost`, `kv-aware`, `prefix-aware`,
    /// `load-aware` and `weighted`. `llm-aware` and the others do not look at guesses.
    pub text: bool,
    /// Bytes of a block of text.
    pub block_bytes: Ranged<16, 65_536>,
    /// Tokens of a block of events; the engines' block size must be a multiple of it.
    pub block_tokens: Ranged<1, 1024>,
    /// Bytes that each index, of text and of events, may take; what was used least recently goes first.
    pub budget_bytes: Ranged<65_536, 0x100_0000_0000>,
    /// Tokens that an engine has room for, where its metrics do not say.
    pub capacity_tokens: Ranged<1, 1_000_000_000>,
    /// How long a prompt that was sent counts as on its way, in milliseconds, if its answer does not say otherwise.
    pub speculation_ms: Ranged<1, 3_600_000>,
}

/// When requests are turned away.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Admission {
    /// Requests in flight on an endpoint for each unit of its weight; 0 is no limit. Beyond: 429.
    pub max_requests_per_endpoint: u64,
    /// The same for requests whose InferenceObjective has a negative priority; 0 is no limit of their own.
    pub max_sheddable_requests_per_endpoint: u64,
    /// What a refused client is told to wait, in seconds.
    pub retry_after_seconds: Ranged<1, 86_400>,
}

/// When requests wait in the picker for an endpoint to have less to do, and are decided anew when something has ended.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Hold {
    /// Work before it, on the endpoint it would go to, from which a request waits, in milliseconds; 0 is off. 300 is a
    /// good beginning.
    pub backlog_ms: Ranged<0, 600_000>,
    /// The longest wait, in milliseconds; keep it far below the gateway's idle timeout of streams.
    pub longest_ms: Ranged<1, 240_000>,
    /// Requests that wait at most. Beyond: 429.
    pub requests: Ranged<1, 1_000_000>,
}

/// How requests are read.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Requests {
    /// Headers that name the conversation, strongest first.
    pub conversation_headers: Vec<String>,
    /// Whether the body's `user` names the conversation; in many applications it is one for all users.
    pub use_user_field: bool,
    /// Largest request body, in bytes. Beyond: 413.
    pub max_body_bytes: u64,
    /// Bytes that a compressed body may expand to while it is read; beyond, it is routed by load.
    pub max_decoded_bytes: u64,
    /// From a request's headers to its pick, in milliseconds; then it is made on what has been read.
    pub decision_deadline_ms: u64,
    /// Silence in the middle of a body, in milliseconds. Beyond: 408.
    pub body_idle_timeout_ms: u64,
    /// Bytes of all bodies that wait for their pick; beyond, picks are made on what has been read.
    pub body_memory_bytes: u64,
    /// Whether a subset of endpoints that the gateway allows (`x-gateway-destination-endpoint-subset`) is kept to.
    pub use_subset: bool,
}

/// What tells the tokens of prompts, before their decision: tokenizers of this process, then an engine. Off as it is;
/// what they cannot tell is estimated.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Tokenizers {
    /// By the model's name in requests, or `*` for all others: its `folder` with `tokenizer.json`, its `dialect`
    /// (`vllm` or `llama-cpp`), and if need be a `chat_template` file and a `content_format` (`text` or `parts`).
    pub models: BTreeMap<String, ModelOptions>,
    /// Whether an engine of the pool is asked what no tokenizer here tells: `off`, `vllm-tokenize`, `vllm-render` or
    /// `llama-cpp`.
    pub engine: EngineTokens,
    /// Longest wait for a tokenizer of this process, in milliseconds, within `requests.decision_deadline_ms`.
    pub local_timeout_ms: Ranged<1, 60_000>,
    /// Longest wait for an engine, in milliseconds, within the same.
    pub engine_timeout_ms: Ranged<1, 60_000>,
    /// Bytes that are held of what was tokenized lately, so that of a growing conversation only what is new is work.
    pub memo_bytes: Ranged<0, 0x10_0000_0000>,
    /// Longest text of a prompt that is tokenized here, in bytes.
    pub max_text_bytes: Ranged<1, 0x1000_0000>,
    /// Prompts tokenized here at a time, each on a thread of its own.
    pub parallel: Ranged<1, 256>,
}

/// Which endpoint of an engine tells tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum EngineTokens {
    /// None is asked.
    #[default]
    Off,
    /// vLLM's `/tokenize`.
    VllmTokenize,
    /// vLLM's `/render`.
    VllmRender,
    /// llama.cpp's `/apply-template` and `/tokenize`.
    LlamaCpp,
}

/// What goes back.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Answers {
    /// Endpoints in the destination, fallbacks included. More than 1 only behind gateways that walk a list (Istio).
    pub destinations: NonZeroUsize,
    /// Whether answers carry `x-routed-to`, `x-route-reason`, `x-route-policy` and `x-conversation-id`.
    pub explain_headers: bool,
    /// How refusals look: `json` as OpenAI's, or `plain` as the upstream picker's.
    pub errors: ErrorFormat,
}

/// The log.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Log {
    /// `json` or `human`.
    pub format: LogFormat,
    /// A level, or a filter such as `info,h2=debug`.
    pub level: String,
    /// Whether each request is written with its decision and its outcome.
    pub decisions: bool,
    /// Whether traces hold the load of every endpoint in large pools too.
    pub full_detail: bool,
}

/// Records of requests, for deciding them again.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Records {
    /// File that gets a JSON line for each request that ended, without text of prompts, for `llm-ring-lab replay`;
    /// absent: no records.
    pub path: Option<PathBuf>,
    /// Bytes of one file, 65,536 or more; beyond them it becomes `PATH.1`, and a new one is begun.
    pub max_bytes: Ranged<65_536, 0x100_0000_0000>,
    /// Files that are kept, the one that is written among them, 1 to 1,000.
    pub files: Ranged<1, 1000>,
}

/// OpenTelemetry traces.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Tracing {
    /// OTLP receiver (gRPC), such as `http://collector:4317`; absent: no traces.
    pub otlp_endpoint: Option<String>,
    /// Share of requests traced when the caller has not decided, 0 to 1.
    pub sample: Share,
    /// `service.name` of the spans.
    pub service_name: String,
}

/// A share, 0 to 1.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize)]
#[serde(try_from = "f64", into = "f64")]
pub struct Share(f64);

/// The end.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Drain {
    /// From SIGTERM until no new request is taken, in seconds: gateways need a moment to learn that it is not ready.
    pub linger_seconds: u64,
    /// How long open streams may go on after that, in seconds.
    pub timeout_seconds: u64,
}

impl Default for Server {
    fn default() -> Self {
        Self {
            address: IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            grpc_port: 9002,
            health_port: 9003,
            metrics_port: 9090,
            threads: 1,
            stream_window_bytes: Ranged(1 << 20),
            connection_window_bytes: Ranged(64 << 20),
        }
    }
}

impl Tls {
    /// Returns the certificate's and the key's file, which mode `files` needs.
    ///
    /// # Errors
    /// One of them is not named.
    pub fn files(&self) -> Result<(&Path, &Path), String> {
        match (&self.cert, &self.key) {
            (Some(cert), Some(key)) => Ok((cert, key)),
            (None, _) | (_, None) => {
                Err("tls.mode is `files`, so tls.cert and tls.key must name PEM files".to_owned())
            }
        }
    }
}

impl Default for Endpoints {
    fn default() -> Self {
        Self { file: None, poll_ms: Ranged(1000) }
    }
}

impl Default for Kubernetes {
    fn default() -> Self {
        Self {
            pool: None,
            namespace: None,
            selector: None,
            target_ports: Vec::new(),
            address_family: AddressFamily::default(),
            weight_label: "llm-ring/weight".to_owned(),
            role_label: "llm-d.ai/role".to_owned(),
            objectives: true,
            watch_seconds: Ranged(60),
            leader_election: false,
            lease: None,
            lease_seconds: Ranged(15),
            identity: None,
        }
    }
}

impl Default for Hold {
    fn default() -> Self {
        Self { backlog_ms: Ranged(0), longest_ms: Ranged(2000), requests: Ranged(1000) }
    }
}

impl Default for Warmup {
    fn default() -> Self {
        Self { seconds: Ranged(30), steps: Ranged(10) }
    }
}

impl Default for PolicyName {
    fn default() -> Self {
        Self("llm-aware".to_owned())
    }
}

impl Default for Ring {
    fn default() -> Self {
        Self { points: Ranged(100) }
    }
}

impl Default for Memory {
    fn default() -> Self {
        Self { conversations: Ranged(50_000) }
    }
}

impl Default for Load {
    fn default() -> Self {
        Self { release_prompt: ReleaseName::FirstToken, default_max_tokens: 256 }
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            enabled: true,
            interval_ms: Ranged(100),
            stale_ms: Ranged(2000),
            timeout_ms: Ranged(1000),
            max_bytes: Ranged(4 << 20),
            port: None,
            path: None,
            tls: MetricsTls::Off,
            ca: None,
            server_name: None,
            token_file: None,
        }
    }
}

impl Default for Events {
    fn default() -> Self {
        Self {
            enabled: false,
            port: 5557,
            replay_port: None,
            ranks: Ranged(1),
            topic: String::new(),
            listen: None,
        }
    }
}

impl Default for Prefix {
    fn default() -> Self {
        Self {
            text: false,
            block_bytes: Ranged(256),
            block_tokens: Ranged(16),
            budget_bytes: Ranged(256 << 20),
            capacity_tokens: Ranged(500_000),
            speculation_ms: Ranged(60_000),
        }
    }
}

impl Default for Admission {
    fn default() -> Self {
        Self {
            max_requests_per_endpoint: 0,
            max_sheddable_requests_per_endpoint: 0,
            retry_after_seconds: Ranged(1),
        }
    }
}

impl Default for Requests {
    fn default() -> Self {
        let headers = [
            "x-conversation-id",
            "x-session-id",
            "session-id",
            "x-claude-code-session-id",
            "x-session-affinity",
        ];
        Self {
            conversation_headers: headers.map(str::to_owned).to_vec(),
            use_user_field: false,
            max_body_bytes: 32 << 20,
            max_decoded_bytes: 64 << 20,
            decision_deadline_ms: 10_000,
            body_idle_timeout_ms: 60_000,
            body_memory_bytes: 512 << 20,
            use_subset: true,
        }
    }
}

impl Default for Tokenizers {
    fn default() -> Self {
        Self {
            models: BTreeMap::new(),
            engine: EngineTokens::Off,
            local_timeout_ms: Ranged(1000),
            engine_timeout_ms: Ranged(1000),
            memo_bytes: Ranged(64 << 20),
            max_text_bytes: Ranged(4 << 20),
            parallel: Ranged(2),
        }
    }
}

impl Tokenizers {
    /// Whether anything is to tell tokens.
    #[must_use]
    pub fn are_used(&self) -> bool {
        !self.models.is_empty() || self.engine != EngineTokens::Off
    }
}

impl EngineTokens {
    /// Returns the endpoints that are asked, if any.
    #[must_use]
    pub const fn api(self) -> Option<EngineApi> {
        match self {
            Self::Off => None,
            Self::VllmTokenize => Some(EngineApi::VllmTokenize),
            Self::VllmRender => Some(EngineApi::VllmRender),
            Self::LlamaCpp => Some(EngineApi::LlamaCpp),
        }
    }
}

impl Default for Answers {
    fn default() -> Self {
        Self { destinations: NonZeroUsize::MIN, explain_headers: true, errors: ErrorFormat::Json }
    }
}

impl Default for Log {
    fn default() -> Self {
        Self {
            format: LogFormat::Json,
            level: "info".to_owned(),
            decisions: true,
            full_detail: false,
        }
    }
}

impl Default for Records {
    fn default() -> Self {
        Self { path: None, max_bytes: Ranged(64 << 20), files: Ranged(4) }
    }
}

impl Default for Tracing {
    fn default() -> Self {
        Self { otlp_endpoint: None, sample: Share(0.1), service_name: "llm-ring".to_owned() }
    }
}

impl Default for Drain {
    fn default() -> Self {
        Self { linger_seconds: 5, timeout_seconds: 60 }
    }
}

impl TryFrom<String> for PolicyName {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        if let Some(name) = named(&name) {
            return Ok(Self(name.to_owned()));
        }
        let known: Vec<&str> = POLICIES.iter().chain(ALIASES).map(|&(name, _)| name).collect();
        Err(yaml::unknown("policy", &name, &known))
    }
}

impl From<PolicyName> for String {
    fn from(name: PolicyName) -> Self {
        name.0
    }
}

impl PolicyName {
    /// Returns the name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl<const MIN: u64, const MAX: u64> TryFrom<u64> for Ranged<MIN, MAX> {
    type Error = String;

    fn try_from(number: u64) -> Result<Self, String> {
        if (MIN..=MAX).contains(&number) {
            Ok(Self(number))
        } else {
            Err(format!("it is {MIN} to {MAX}, not {number}"))
        }
    }
}

impl<const MIN: u64, const MAX: u64> From<Ranged<MIN, MAX>> for u64 {
    fn from(number: Ranged<MIN, MAX>) -> Self {
        number.0
    }
}

impl<const MIN: u64, const MAX: u64> Ranged<MIN, MAX> {
    /// Returns the number, for a range that a u32 holds.
    ///
    /// # Panics
    /// `MAX` is beyond a u32.
    #[must_use]
    pub fn get(self) -> u32 {
        u32::try_from(self.0).expect("the range's end is checked where the type is named")
    }
}

impl TryFrom<f64> for Share {
    type Error = String;

    fn try_from(share: f64) -> Result<Self, String> {
        if (0.0..=1.0).contains(&share) {
            Ok(Self(share))
        } else {
            Err(format!("a share is 0 to 1, not {share}"))
        }
    }
}

impl From<Share> for f64 {
    fn from(share: Share) -> Self {
        share.0
    }
}

impl From<ReleaseName> for Release {
    fn from(name: ReleaseName) -> Self {
        match name {
            ReleaseName::FirstToken => Self::FirstToken,
            ReleaseName::End => Self::End,
        }
    }
}
