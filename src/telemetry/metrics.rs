//! Prometheus metrics: every handle is made at the start; labels come from closed sets, or from the pool's own names.

use std::sync::Arc;
use std::time::Instant;

use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use super::engines::EngineCollector;
use super::source::SourceStatus;
use crate::engine::knowledge::Knowledge;
use crate::scheduling::{Reason, Scheduler};

/// Label set of a metric with one label.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Why {
    /// The reason, of a closed set.
    pub reason: &'static str,
}

/// Label set of outcomes.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Ended {
    /// How the stream ended.
    pub ending: &'static str,
    /// Class of the HTTP status: `2xx` and so on, or `none`.
    pub status: &'static str,
}

/// Label set of ways to learn the tokens of a prompt.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Step {
    /// `given`, `local` or `engine`.
    pub step: &'static str,
}

/// Label set of ways that did not tell the tokens of a prompt.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Untold {
    /// `local` or `engine`.
    pub step: &'static str,
    /// Why, of a closed set.
    pub reason: &'static str,
}

/// The handles.
#[derive(Debug)]
pub struct Metrics {
    /// Decisions by reason.
    pub decisions: Family<Why, Counter>,
    /// Requests turned away, by reason.
    pub rejections: Family<Why, Counter>,
    /// Requests that ended, by how and by status class.
    pub outcomes: Family<Ended, Counter>,
    /// Request bodies that could not be read whole, by reason.
    pub unread_bodies: Family<Why, Counter>,
    /// Decisions made before the whole body had come, by reason.
    pub early_decisions: Family<Why, Counter>,
    /// Body messages after the end of a body.
    pub duplicate_body_messages: Counter,
    /// Changes of membership that could not be taken over.
    pub pool_errors: Counter,
    /// Requests that are missing in the file of records.
    pub records_lost: Counter,
    /// Streams open now.
    pub streams: Gauge,
    /// Bytes of request bodies that wait for their pick.
    pub held_body_bytes: Gauge,
    /// Requests that are held back.
    pub waiting: Gauge,
    /// Time that a pick and its booking take.
    pub decision_seconds: Histogram,
    /// Time from the request's headers to the first token.
    pub ttft_seconds: Histogram,
    /// Time from the request's headers to the end of the answer.
    pub duration_seconds: Histogram,
    /// Prompt tokens, as the engines counted them.
    pub prompt_tokens: Counter,
    /// Prompt tokens that the engines found in their caches.
    pub cached_tokens: Counter,
    /// Prompt tokens that were believed to be cached where the request went.
    pub expected_cached_tokens: Counter,
    /// Tokens generated.
    pub completion_tokens: Counter,
    /// Prompts whose tokens are known, by the step that told them.
    pub tokenized: Family<Step, Counter>,
    /// Steps that could not tell the tokens of a prompt, by reason.
    pub token_failures: Family<Untold, Counter>,
    /// Time that requests waited for their tokens.
    pub tokenize_seconds: Histogram,
}

/// Buckets of request durations, in seconds; the upstream picker's, thinned.
const DURATIONS: [f64; 16] =
    [0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 10.0, 20.0, 60.0, 180.0, 600.0, 3600.0];
/// Buckets of decision durations, in seconds.
const DECISIONS: [f64; 10] =
    [0.000_001, 0.000_002, 0.000_005, 0.000_01, 0.000_02, 0.000_05, 0.000_1, 0.000_5, 0.001, 0.01];
/// Buckets of the time until tokens are known, in seconds.
const TOKENIZING: [f64; 9] = [0.000_1, 0.000_3, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0];

/// Why requests are turned away.
const REJECTIONS: [&str; 8] = [
    "pool-empty",
    "subset-empty",
    "subset-unmatched",
    "queue-full",
    "left-while-held",
    "saturated",
    "body-too-large",
    "body-stalled",
];

impl Metrics {
    /// Registers everything, the gauges of the scheduler's endpoints included.
    #[must_use]
    pub fn new(
        scheduler: Arc<Scheduler>,
        source: Arc<SourceStatus>,
        knowledge: Arc<Knowledge>,
    ) -> (Arc<Self>, Registry) {
        let metrics = Arc::new(Self {
            decisions: Family::default(),
            rejections: Family::default(),
            outcomes: Family::default(),
            unread_bodies: Family::default(),
            early_decisions: Family::default(),
            duplicate_body_messages: Counter::default(),
            pool_errors: Counter::default(),
            records_lost: Counter::default(),
            streams: Gauge::default(),
            held_body_bytes: Gauge::default(),
            waiting: Gauge::default(),
            decision_seconds: Histogram::new(DECISIONS),
            ttft_seconds: Histogram::new(DURATIONS),
            duration_seconds: Histogram::new(DURATIONS),
            prompt_tokens: Counter::default(),
            cached_tokens: Counter::default(),
            expected_cached_tokens: Counter::default(),
            completion_tokens: Counter::default(),
            tokenized: Family::default(),
            token_failures: Family::default(),
            tokenize_seconds: Histogram::new(TOKENIZING),
        });
        let mut registry = Registry::with_prefix("llm_ring");
        let m = &*metrics;
        // Series exist from the start, so that a rate over the first event is right.
        for reason in Reason::ALL {
            m.decisions.get_or_create(&Why { reason: reason.as_str() }).inc_by(0);
        }
        for reason in REJECTIONS {
            m.rejections.get_or_create(&Why { reason }).inc_by(0);
        }
        for reason in ["deadline", "memory"] {
            m.early_decisions.get_or_create(&Why { reason }).inc_by(0);
        }
        m.unread_bodies.get_or_create(&Why { reason: "not-json" }).inc_by(0);
        m.outcomes.get_or_create(&Ended { ending: "complete", status: "2xx" }).inc_by(0);
        registry.register("decisions", "Picks by reason", m.decisions.clone());
        registry.register("rejections", "Requests turned away by reason", m.rejections.clone());
        registry.register("outcomes", "Requests that ended", m.outcomes.clone());
        registry.register(
            "unread_bodies",
            "Bodies routed without being read whole",
            m.unread_bodies.clone(),
        );
        registry.register(
            "early_decisions",
            "Picks made before the whole body had come",
            m.early_decisions.clone(),
        );
        registry.register(
            "duplicate_body_messages",
            "Body messages ignored since they came after the body's end",
            m.duplicate_body_messages.clone(),
        );
        registry.register(
            "pool_errors",
            "Changes of membership that were refused",
            m.pool_errors.clone(),
        );
        registry.register(
            "records_lost",
            "Requests that are missing in the file of records",
            m.records_lost.clone(),
        );
        registry.register("streams", "ext_proc streams open now", m.streams.clone());
        registry.register("waiting_requests", "Requests held back now", m.waiting.clone());
        registry.register_with_unit(
            "held_body",
            "Request bodies waiting for their pick",
            Unit::Bytes,
            m.held_body_bytes.clone(),
        );
        let seconds = |registry: &mut Registry, name: &str, help: &str, histogram: &Histogram| {
            registry.register_with_unit(name, help, Unit::Seconds, histogram.clone());
        };
        seconds(
            &mut registry,
            "decision",
            "Time that a pick and its booking take",
            &m.decision_seconds,
        );
        seconds(
            &mut registry,
            "ttft",
            "From the request's headers to the first token",
            &m.ttft_seconds,
        );
        seconds(
            &mut registry,
            "request",
            "From the request's headers to the answer's end",
            &m.duration_seconds,
        );
        registry.register(
            "prompt_tokens",
            "Prompt tokens, as engines counted them",
            m.prompt_tokens.clone(),
        );
        registry.register(
            "cached_tokens",
            "Prompt tokens that engines found cached",
            m.cached_tokens.clone(),
        );
        registry.register(
            "expected_cached_tokens",
            "Prompt tokens believed to be cached where the request went",
            m.expected_cached_tokens.clone(),
        );
        registry.register("completion_tokens", "Tokens generated", m.completion_tokens.clone());
        m.register_tokens(&mut registry);
        registry.register_collector(Box::new(PoolCollector(scheduler)));
        registry.register_collector(Box::new(SourceCollector(source)));
        registry.register_collector(Box::new(EngineCollector(knowledge)));
        (metrics, registry)
    }
}

impl Metrics {
    fn register_tokens(&self, registry: &mut Registry) {
        for step in ["given", "local", "engine"] {
            self.tokenized.get_or_create(&Step { step }).inc_by(0);
        }
        for (step, reason) in [("local", "busy"), ("engine", "timeout")] {
            self.token_failures.get_or_create(&Untold { step, reason }).inc_by(0);
        }
        registry.register(
            "tokenized",
            "Prompts whose tokens are known, by what told them",
            self.tokenized.clone(),
        );
        registry.register(
            "token_failures",
            "Ways to learn a prompt's tokens that failed; what is left is an estimate",
            self.token_failures.clone(),
        );
        registry.register_with_unit(
            "tokenize",
            "Time that requests waited for their tokens",
            Unit::Seconds,
            self.tokenize_seconds.clone(),
        );
    }
}

/// Reads the pool's load when it is scraped, so that nothing is kept twice.
#[derive(Debug)]
struct PoolCollector(Arc<Scheduler>);

/// Label set of a metric of each endpoint.
#[derive(Debug, Clone, EncodeLabelSet)]
pub(super) struct EndpointLabel {
    pub(super) endpoint: String,
}

impl prometheus_client::collector::Collector for PoolCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let (pool, loads) = self.0.loads();
        let mut family = |name: &str, help: &str, of: &dyn Fn(usize) -> u64| {
            let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for (i, endpoint) in pool.endpoints().iter().enumerate() {
                let label = EndpointLabel { endpoint: endpoint.name.clone() };
                let value = i64::try_from(of(i)).unwrap_or(i64::MAX);
                ConstGauge::new(value).encode(metric.encode_family(&label)?)?;
            }
            Ok::<_, std::fmt::Error>(())
        };
        family("endpoint_requests", "Requests in flight on the endpoint", &|i| loads[i].requests)?;
        family("endpoint_tokens", "Tokens of work in flight on the endpoint", &|i| {
            loads[i].tokens
        })?;
        let mut gauge = |name: &str, help: &str, value: usize| {
            let metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX)).encode(metric)
        };
        gauge("endpoints", "Endpoints that may be picked", loads.len())?;
        gauge(
            "remembered_conversations",
            "Conversations in placement memory",
            self.0.remembered(),
        )?;
        let metric = encoder.encode_descriptor(
            "pool_version",
            "Changes of membership taken over",
            None,
            MetricType::Counter,
        )?;
        ConstCounter::new(pool.version()).encode(metric)
    }
}

/// Reads the state of what endpoints come from.
#[derive(Debug)]
struct SourceCollector(Arc<SourceStatus>);

impl prometheus_client::collector::Collector for SourceCollector {
    #[expect(
        clippy::disallowed_methods,
        reason = "a silence is as long as it is when it is asked for"
    )]
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let reading = self.0.reading(Instant::now());
        let mut family = encoder.encode_descriptor(
            "pods_absent",
            "Pods of the pool that are no endpoint, by reason",
            None,
            MetricType::Gauge,
        )?;
        for (reason, count) in &reading.absent {
            let label = Why { reason };
            ConstGauge::new(i64::try_from(*count).unwrap_or(i64::MAX))
                .encode(family.encode_family(&label)?)?;
        }
        let mut gauge = |name: &str, help: &str, unit: Option<&Unit>, value: f64| {
            let metric = encoder.encode_descriptor(name, help, unit, MetricType::Gauge)?;
            ConstGauge::new(value).encode(metric)
        };
        gauge(
            "pool_synced",
            "Whether the pool and its pods are known (1) or not yet (0)",
            None,
            f64::from(u8::from(reading.synced)),
        )?;
        gauge(
            "kubernetes_silent",
            "Since the API server last answered, while it does not",
            Some(&Unit::Seconds),
            reading.unreachable_seconds,
        )?;
        #[expect(clippy::cast_precision_loss, reason = "endpoints are far fewer than 2^52")]
        gauge(
            "warming_endpoints",
            "Endpoints below their full weight",
            None,
            reading.warming as f64,
        )?;
        let mut counter = |name: &str, help: &str, value: u64| {
            let metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            ConstCounter::new(value).encode(metric)
        };
        counter("kubernetes_lists", "Lists read whole from the API server", reading.relists)?;
        counter(
            "kubernetes_errors",
            "Lists and watches that failed or were refused",
            reading.errors,
        )?;
        counter(
            "homes_moved",
            "Remembered conversations whose home on the ring has moved",
            reading.homes_moved,
        )
    }
}

/// Names the class of a status.
#[must_use]
pub fn status_class(status: Option<u16>) -> &'static str {
    match status {
        None => "none",
        Some(200..=299) => "2xx",
        Some(300..=399) => "3xx",
        Some(400..=499) => "4xx",
        Some(500..=599) => "5xx",
        Some(_) => "other",
    }
}
