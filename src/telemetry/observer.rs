#![allow(
    clippy::disallowed_methods,
    reason = "records carry the wall-clock time of their decision"
)]
//! Watches requests from their decision to their end, and tells the log, the metrics, the spans and the watchers.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::broadcast;

use super::init::LogFormat;
use super::lines::Lines;
use super::log::{self, Line};
use super::metrics::{Ended, Metrics, Why, status_class};
use super::records::{self, Recorder};
use super::spans::{RequestSpan, Tracing};
use super::{explain, pb};
use crate::pool::{InferenceRequest, Outcome, PoolSnapshot};
use crate::scheduling::{Decision, Moment};

/// Records that a slow watcher may fall behind before it loses the oldest.
const WATCH_BACKLOG: usize = 1024;

/// Everything that wants to know of requests.
#[derive(Debug)]
pub struct Observer {
    /// The metrics.
    pub metrics: Arc<Metrics>,
    tracing: Option<Tracing>,
    log: Option<Lines<Line>>,
    records: Option<Recorder>,
    watchers: broadcast::Sender<Arc<pb::Record>>,
}

/// One request under observation.
#[derive(Debug)]
pub struct Observation {
    started: Instant,
    first_token: Option<Instant>,
    expected_cached: u64,
    decided: Option<Arc<Decided>>,
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
    /// Where there are records: what else they hold.
    asked: Option<Box<pb::Asked>>,
}

/// A request at its decision.
#[derive(Debug, Clone, Copy)]
pub struct Asking<'a> {
    /// What was read of it.
    pub request: &'a InferenceRequest,
    /// What it was decided with.
    pub moment: Moment<'a>,
    /// How far its body was read.
    pub body: &'static str,
    /// When it was decided, which is the moment's time.
    pub begun: Instant,
    /// How long that took.
    pub took: Duration,
}

impl Decided {
    pub(super) fn record(&self) -> pb::Record {
        self.with(explain::record(&self.decision))
    }

    /// The same for a file of records: without the steps, and with all that a decision anew needs.
    pub(super) fn facts(&self) -> pb::Record {
        let asked = self.asked.as_deref().cloned();
        pb::Record { asked, ..self.with(explain::facts(&self.decision)) }
    }

    pub(super) fn pool(&self) -> &PoolSnapshot {
        &self.decision.pool
    }

    fn with(&self, record: pb::Record) -> pb::Record {
        pb::Record {
            time: time(self.at),
            request_id: self.request_id.clone(),
            trace_id: self.trace_id.clone(),
            body: self.body.to_owned(),
            ..record
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
    /// Puts the parts together; `log` and `records` write a line for each request that ended.
    #[must_use]
    pub fn new(
        metrics: Arc<Metrics>,
        tracing: Option<Tracing>,
        log: Option<LogFormat>,
        records: Option<records::Settings>,
    ) -> Self {
        let log = log.map(log::start);
        let records = records.map(|settings| Recorder::new(settings, metrics.records_lost.clone()));
        Self { metrics, tracing, log, records, watchers: broadcast::channel(WATCH_BACKLOG).0 }
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
        Observation { started, first_token: None, expected_cached: 0, decided: None, span }
    }

    /// Notes a decision.
    pub fn decided(&self, observation: &mut Observation, decision: Decision, asking: Asking<'_>) {
        let Asking { request, moment, body, begun, took } = asking;
        self.metrics.decisions.get_or_create(&Why { reason: decision.reason.as_str() }).inc();
        self.metrics.decision_seconds.observe(took.as_secs_f64());
        observation.expected_cached = decision.cached;
        let sampled = observation.span.as_ref().is_some_and(RequestSpan::is_recording);
        if !(self.log.is_some() || self.records.is_some() || sampled || self.is_watched()) {
            return;
        }
        let asked = self.records.as_ref().map(|records| {
            Box::new(pb::Asked { at_ns: records.time(begun), ..explain::asked(request, &moment) })
        });
        let decided = Decided {
            decision,
            at: SystemTime::now(),
            request_id: request.id.clone(),
            trace_id: observation.span.as_ref().map(RequestSpan::trace_id).unwrap_or_default(),
            body,
            asked,
        };
        if sampled || self.is_watched() {
            let record = decided.record();
            if let Some(span) = &mut observation.span {
                span.decided(&record, decided.at - took, took);
            }
            self.publish(record);
        }
        observation.decided = Some(Arc::new(decided));
    }

    /// Notes that a request was turned away, be it after its decision, which was taken back then.
    pub fn rejected(
        &self,
        observation: &mut Observation,
        (why, text): (&'static str, &str),
        request_id: &str,
        ended: Instant,
    ) {
        self.metrics.rejections.get_or_create(&Why { reason: why }).inc();
        let now = SystemTime::now();
        if self.log.is_some() || self.records.is_some() || self.is_watched() {
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
            if let Some(records) = &self.records {
                let times = (observation.first_token, ended);
                records.refused(observation.decided.take(), &record, times);
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
        observation.first_token = Some(now);
        self.metrics.ttft_seconds.observe((now - observation.started).as_secs_f64());
    }

    /// Notes the end of a request.
    pub fn ended(&self, observation: Observation, outcome: &Outcome, now: Instant) {
        let Observation { started, first_token, expected_cached, decided, span } = observation;
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
        let ttft = first_token.map(|first| ms(first - started));
        let outcome = explain::outcome(outcome, ttft, ms(now - started));
        if let Some(span) = span {
            span.end(Some(&outcome), at(now));
        }
        let Some(decided) = decided else { return };
        if self.is_watched() {
            self.publish(pb::Record { outcome: Some(outcome.clone()), ..decided.record() });
        }
        if let Some(records) = &self.records {
            records.ended(Arc::clone(&decided), outcome.clone(), (first_token, now));
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
