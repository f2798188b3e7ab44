#![allow(
    clippy::disallowed_methods,
    reason = "records carry the wall-clock time of their decision"
)]
//! Watches requests from their decision to their end, and tells the log, the metrics, the spans and the watchers.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::broadcast;

use super::init::LogFormat;
use super::log::{DecisionLog, Line};
use super::metrics::{Ended, Metrics, Why, status_class};
use super::spans::{RequestSpan, Tracing};
use super::{explain, pb};
use crate::pool::Outcome;
use crate::scheduling::Decision;

/// Records that a slow watcher may fall behind before it loses the oldest.
const WATCH_BACKLOG: usize = 1024;

/// Everything that wants to know of requests.
#[derive(Debug)]
pub struct Observer {
    /// The metrics.
    pub metrics: Arc<Metrics>,
    tracing: Option<Tracing>,
    log: Option<DecisionLog>,
    watchers: broadcast::Sender<Arc<pb::Record>>,
}

/// One request under observation.
#[derive(Debug)]
pub struct Observation {
    started: Instant,
    ttft: Option<Duration>,
    expected_cached: u64,
    decided: Option<Box<Decided>>,
    span: Option<RequestSpan>,
}

/// A decision with all that its record needs. The record itself is only made where somebody sees it.
#[derive(Debug)]
pub(super) struct Decided {
    decision: Decision,
    at: SystemTime,
    request_id: String,
    trace_id: String,
    body: &'static str,
}

impl Decided {
    pub(super) fn record(&self) -> pb::Record {
        pb::Record {
            time: time(self.at),
            request_id: self.request_id.clone(),
            trace_id: self.trace_id.clone(),
            body: self.body.to_owned(),
            ..explain::record(&self.decision)
        }
    }
}

impl Observation {
    /// Returns the trace context for whom the request goes to next, if a span was started for it.
    #[must_use]
    pub fn traceparent(&self) -> Option<String> {
        self.span.as_ref().map(RequestSpan::traceparent)
    }
}

impl Observer {
    /// Puts the parts together; `log` writes a line for each request that ended.
    #[must_use]
    pub fn new(metrics: Arc<Metrics>, tracing: Option<Tracing>, log: Option<LogFormat>) -> Self {
        let log = log.map(DecisionLog::new);
        Self { metrics, tracing, log, watchers: broadcast::channel(WATCH_BACKLOG).0 }
    }

    /// Follows decisions and outcomes from now on.
    #[must_use]
    pub fn watch(&self) -> broadcast::Receiver<Arc<pb::Record>> {
        self.watchers.subscribe()
    }

    /// Starts to observe a request; the first of the `traceparents` that is well formed is its parent.
    #[must_use]
    pub fn start(&self, started: Instant, traceparents: [Option<&str>; 2]) -> Observation {
        let span = self.tracing.as_ref().map(|tracing| tracing.start(traceparents, at(started)));
        Observation { started, ttft: None, expected_cached: 0, decided: None, span }
    }

    /// Notes a decision, which took so long and read the body so far.
    pub fn decided(
        &self,
        observation: &mut Observation,
        decision: Decision,
        request_id: &str,
        body: &'static str,
        took: Duration,
    ) {
        self.metrics.decisions.get_or_create(&Why { reason: decision.reason.as_str() }).inc();
        self.metrics.decision_seconds.observe(took.as_secs_f64());
        observation.expected_cached = decision.cached;
        let sampled = observation.span.as_ref().is_some_and(RequestSpan::is_recording);
        if !(self.log.is_some() || sampled || self.is_watched()) {
            return;
        }
        let decided = Decided {
            decision,
            at: SystemTime::now(),
            request_id: request_id.to_owned(),
            trace_id: observation.span.as_ref().map(RequestSpan::trace_id).unwrap_or_default(),
            body,
        };
        if sampled || self.is_watched() {
            let record = decided.record();
            if let Some(span) = &mut observation.span {
                span.decided(&record, decided.at - took, took);
            }
            self.publish(record);
        }
        observation.decided = Some(Box::new(decided));
    }

    /// Notes that a request was turned away.
    pub fn rejected(
        &self,
        observation: &mut Observation,
        why: &'static str,
        text: &str,
        request_id: &str,
    ) {
        self.metrics.rejections.get_or_create(&Why { reason: why }).inc();
        let now = SystemTime::now();
        if self.log.is_some() || self.is_watched() {
            let record = pb::Record {
                time: time(now),
                request_id: request_id.to_owned(),
                trace_id: observation.span.as_ref().map(RequestSpan::trace_id).unwrap_or_default(),
                refusal: format!("{why}: {text}"),
                ..pb::Record::default()
            };
            if let Some(log) = &self.log {
                log.push(Line::Refused(Box::new(record.clone())));
            }
            self.publish(record);
        }
        if let Some(mut span) = observation.span.take() {
            span.rejected(why);
            span.end(None, now);
        }
    }

    /// Notes the first token.
    pub fn first_token(&self, observation: &mut Observation, now: Instant) {
        let ttft = now - observation.started;
        observation.ttft = Some(ttft);
        self.metrics.ttft_seconds.observe(ttft.as_secs_f64());
    }

    /// Notes the end of a request.
    pub fn ended(&self, observation: Observation, outcome: &Outcome, now: Instant) {
        let Observation { started, ttft, expected_cached, decided, span } = observation;
        let metrics = &self.metrics;
        let ended = Ended {
            ending: explain::ending_name(outcome.ending),
            status: status_class(outcome.status),
        };
        metrics.outcomes.get_or_create(&ended).inc();
        metrics.duration_seconds.observe((now - started).as_secs_f64());
        if let Some(prompt) = outcome.usage.prompt_tokens {
            metrics.prompt_tokens.inc_by(prompt);
            metrics.expected_cached_tokens.inc_by(expected_cached.min(prompt));
        }
        metrics.cached_tokens.inc_by(outcome.usage.cached_tokens.unwrap_or(0));
        metrics.completion_tokens.inc_by(outcome.usage.completion_tokens.unwrap_or(0));
        if decided.is_none() && span.is_none() {
            return;
        }
        let ms = |duration: Duration| duration.as_secs_f64() * 1000.0;
        let outcome = explain::outcome(outcome, ttft.map(ms), ms(now - started));
        if let Some(span) = span {
            span.end(Some(&outcome), at(now));
        }
        let Some(decided) = decided else { return };
        if self.is_watched() {
            self.publish(pb::Record { outcome: Some(outcome.clone()), ..decided.record() });
        }
        if let Some(log) = &self.log {
            log.push(Line::Ended(decided, outcome));
        }
    }

    fn is_watched(&self) -> bool {
        self.watchers.receiver_count() > 0
    }

    fn publish(&self, record: pb::Record) {
        // That nobody listens any more is no error.
        drop(self.watchers.send(Arc::new(record)));
    }
}

/// Returns the wall-clock time of a moment.
fn at(moment: Instant) -> SystemTime {
    SystemTime::now() - moment.elapsed()
}

fn time(time: SystemTime) -> String {
    humantime::format_rfc3339_millis(time).to_string()
}
