#![allow(
    clippy::disallowed_methods,
    reason = "records carry the wall-clock time of their decision"
)]
//! Watches requests from their decision to their end, and tells the log, the metrics, the spans and the watchers.

use std::io::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::broadcast;

use super::init::LogFormat;
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
    log: Option<LogFormat>,
    watchers: broadcast::Sender<Arc<pb::Record>>,
}

/// One request under observation.
#[derive(Debug)]
pub struct Observation {
    started: Instant,
    ttft: Option<Duration>,
    expected_cached: u64,
    record: Option<Box<pb::Record>>,
    span: Option<RequestSpan>,
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
        Self { metrics, tracing, log, watchers: broadcast::channel(WATCH_BACKLOG).0 }
    }

    /// Follows decisions and outcomes from now on.
    #[must_use]
    pub fn watch(&self) -> broadcast::Receiver<Arc<pb::Record>> {
        self.watchers.subscribe()
    }

    /// Starts to observe a request; `traceparent` comes from Envoy's call or else from the client.
    #[must_use]
    pub fn start(&self, started: Instant, traceparent: Option<&str>) -> Observation {
        let span = self.tracing.as_ref().map(|tracing| tracing.start(traceparent, at(started)));
        Observation { started, ttft: None, expected_cached: 0, record: None, span }
    }

    /// Notes a decision; the record is only made if someone will see it.
    pub fn decided(
        &self,
        observation: &mut Observation,
        decision: &Decision,
        request: (&str, &'static str),
        timing: (Instant, Duration),
    ) {
        let (request_id, body) = request;
        let (decided_at, took) = timing;
        self.metrics.decisions.get_or_create(&Why { reason: decision.reason.as_str() }).inc();
        self.metrics.decision_seconds.observe(took.as_secs_f64());
        observation.expected_cached = decision.cached;
        let sampled = observation.span.as_ref().is_some_and(RequestSpan::is_recording);
        let watched = self.watchers.receiver_count() > 0;
        if !(self.log.is_some() || sampled || watched) {
            return;
        }
        let record = pb::Record {
            time: time(at(decided_at)),
            request_id: request_id.to_owned(),
            trace_id: observation.span.as_ref().map(RequestSpan::trace_id).unwrap_or_default(),
            body: body.to_owned(),
            ..explain::record(decision)
        };
        if let Some(span) = &mut observation.span {
            span.decided(&record, at(decided_at), took);
        }
        if watched {
            // No receiver left by now is no error.
            drop(self.watchers.send(Arc::new(record.clone())));
        }
        observation.record = Some(Box::new(record));
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
        if let Some(span) = &mut observation.span {
            span.rejected(why);
        }
        if self.watchers.receiver_count() > 0 || self.log.is_some() {
            let record = pb::Record {
                time: time(SystemTime::now()),
                request_id: request_id.to_owned(),
                trace_id: observation.span.as_ref().map(RequestSpan::trace_id).unwrap_or_default(),
                refusal: format!("{why}: {text}"),
                ..pb::Record::default()
            };
            if let Some(format) = self.log {
                log(format, &record);
            }
            drop(self.watchers.send(Arc::new(record)));
        }
        if let Some(span) = observation.span.take() {
            span.end(None, SystemTime::now());
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
        let Observation { started, ttft, expected_cached, record, span } = observation;
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
        if record.is_none() && span.is_none() {
            return;
        }
        let ms = |duration: Duration| duration.as_secs_f64() * 1000.0;
        let outcome = explain::outcome(outcome, ttft.map(ms), ms(now - started));
        if let Some(mut record) = record {
            record.outcome = Some(outcome.clone());
            if let Some(format) = self.log {
                log(format, &record);
            }
            if self.watchers.receiver_count() > 0 {
                drop(self.watchers.send(Arc::from(record)));
            }
        }
        if let Some(span) = span {
            span.end(Some(&outcome), at(now));
        }
    }
}

/// Writes a record to the log: a JSON line, or the text that `explain` prints.
fn log(format: LogFormat, record: &pb::Record) {
    #[derive(serde::Serialize)]
    struct Line<'a> {
        timestamp: &'a str,
        level: &'static str,
        message: &'static str,
        decision: &'a pb::Record,
    }
    let line =
        Line { timestamp: &record.time, level: "INFO", message: "decision", decision: record };
    let text = match format {
        LogFormat::Json => serde_json::to_string(&line).map(|text| text + "\n"),
        LogFormat::Human => Ok(format!("{}  {}", record.time, explain::render(record))),
    };
    // A log that cannot be written must not stop the picker.
    drop(text.map(|text| std::io::stdout().lock().write_all(text.as_bytes())));
}

fn time(time: SystemTime) -> String {
    humantime::format_rfc3339_millis(time).to_string()
}

/// Returns the wall-clock time of a moment.
fn at(moment: Instant) -> SystemTime {
    SystemTime::now() - moment.elapsed()
}
