//! OpenTelemetry spans, made directly through its API: a request has one span, its decision a child.

use std::time::{Duration, SystemTime};

use opentelemetry::trace::{
    Span as _, SpanContext, SpanId, SpanKind, Status, TraceContextExt as _, TraceFlags, TraceId,
    TraceState, Tracer as _, TracerProvider as _,
};
use opentelemetry::{Context, KeyValue};
use opentelemetry_otlp::WithExportConfig as _;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{Sampler, SdkTracer, SdkTracerProvider, Span};

use super::{explain, pb};

/// Where spans go.
#[derive(Debug, Clone)]
pub struct Tracing {
    provider: SdkTracerProvider,
    tracer: SdkTracer,
}

/// The span of one request.
#[derive(Debug)]
pub struct RequestSpan {
    span: Span,
    tracer: SdkTracer,
}

impl Tracing {
    /// Exports to an OTLP receiver over gRPC; a request without a sampled parent is sampled with the given share.
    ///
    /// # Errors
    /// The address is not one.
    pub fn new(endpoint: &str, share: f64, service: &str) -> anyhow::Result<Self> {
        let exporter = opentelemetry_otlp::SpanExporter::builder()
            .with_tonic()
            .with_endpoint(endpoint)
            .with_timeout(Duration::from_secs(5))
            .build()?;
        let provider = SdkTracerProvider::builder()
            .with_batch_exporter(exporter)
            .with_sampler(Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(share))))
            .with_resource(Resource::builder().with_service_name(service.to_owned()).build())
            .build();
        let tracer = provider.tracer("llm-ring");
        Ok(Self { provider, tracer })
    }

    /// Starts the span of a request; the first well-formed W3C `traceparent` is its parent.
    #[must_use]
    pub fn start(&self, traceparents: [Option<&str>; 2], at: SystemTime) -> RequestSpan {
        let parent = traceparents
            .into_iter()
            .flatten()
            .find_map(parse_traceparent)
            .map_or_else(Context::new, |context| Context::new().with_remote_span_context(context));
        let span = self
            .tracer
            .span_builder("llm_ring.exchange")
            .with_kind(SpanKind::Server)
            .with_start_time(at)
            .start_with_context(&self.tracer, &parent);
        RequestSpan { span, tracer: self.tracer.clone() }
    }

    /// Sends what is waiting and stops.
    pub fn shutdown(&self) {
        if let Err(error) = self.provider.shutdown() {
            tracing::warn!(%error, "the last spans could not be sent");
        }
    }
}

impl RequestSpan {
    /// Tells whether the span is recorded.
    #[must_use]
    pub fn is_recording(&self) -> bool {
        self.span.is_recording()
    }

    /// Returns the trace's id in hex.
    #[must_use]
    pub fn trace_id(&self) -> String {
        self.span.span_context().trace_id().to_string()
    }

    /// Returns the W3C `traceparent` for whom the request goes to next.
    #[must_use]
    pub fn traceparent(&self) -> String {
        let context = self.span.span_context();
        format!(
            "00-{}-{}-{:02x}",
            context.trace_id(),
            context.span_id(),
            context.trace_flags().to_u8()
        )
    }

    /// Notes the decision, and how long it took.
    pub fn decided(&mut self, record: &pb::Record, at: SystemTime, took: Duration) {
        if !self.span.is_recording() {
            return;
        }
        let parent = Context::new().with_remote_span_context(self.span.span_context().clone());
        let mut schedule = self
            .tracer
            .span_builder("llm_ring.schedule")
            .with_kind(SpanKind::Internal)
            .with_start_time(at)
            .with_attributes([
                KeyValue::new("llm_ring.candidates", i64::from(record.candidates)),
                KeyValue::new("llm_ring.explanation", explain::render(record)),
            ])
            .start_with_context(&self.tracer, &parent);
        schedule.end_with_timestamp(at + took);
        self.span.set_attributes([
            KeyValue::new("llm_ring.policy", record.policy.clone()),
            KeyValue::new("llm_ring.reason", record.reason.clone()),
            KeyValue::new("llm_ring.target", record.target.clone()),
            KeyValue::new("llm_ring.prompt_tokens", integer(record.prompt_tokens)),
            KeyValue::new("llm_ring.expected_cached_tokens", integer(record.cached_tokens)),
            KeyValue::new("gen_ai.request.model", record.model.clone()),
        ]);
        if let Some(conversation) = &record.conversation {
            self.span
                .set_attribute(KeyValue::new("llm_ring.conversation", conversation.id.clone()));
        }
    }

    /// Notes that the request was turned away.
    pub fn rejected(&mut self, why: &'static str) {
        self.span.set_attribute(KeyValue::new("llm_ring.refusal", why));
        self.span.set_status(Status::error(why));
    }

    /// Notes the outcome and ends the span.
    pub fn end(mut self, outcome: Option<&pb::Outcome>, at: SystemTime) {
        if let Some(outcome) = outcome {
            self.span.set_attribute(KeyValue::new("llm_ring.ending", outcome.ending.clone()));
            let numbers = [
                ("http.response.status_code", outcome.status.map(i64::from)),
                ("gen_ai.usage.input_tokens", outcome.prompt_tokens.map(integer)),
                ("gen_ai.usage.output_tokens", outcome.completion_tokens.map(integer)),
                ("llm_ring.cached_tokens", outcome.cached_tokens.map(integer)),
            ];
            for (key, value) in numbers {
                if let Some(value) = value {
                    self.span.set_attribute(KeyValue::new(key, value));
                }
            }
            if let Some(ttft) = outcome.ttft_ms {
                self.span.set_attribute(KeyValue::new("llm_ring.ttft_ms", ttft));
            }
            if outcome.status.is_some_and(|status| status >= 500) {
                self.span.set_status(Status::error("the engine answered with a server error"));
            }
        }
        self.span.end_with_timestamp(at);
    }
}

/// Reads `00-<trace id>-<span id>-<flags>` (W3C Trace Context); anything else is no parent.
fn parse_traceparent(text: &str) -> Option<SpanContext> {
    let mut parts = text.trim().split('-');
    let (version, trace, span, flags) =
        (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    if version.len() != 2
        || version == "ff"
        || trace.len() != 32
        || span.len() != 16
        || flags.len() != 2
    {
        return None;
    }
    let context = SpanContext::new(
        TraceId::from_hex(trace).ok()?,
        SpanId::from_hex(span).ok()?,
        TraceFlags::new(u8::from_str_radix(flags, 16).ok()?),
        true,
        TraceState::NONE,
    );
    context.is_valid().then_some(context)
}

fn integer(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_well_formed_traceparent_is_a_parent() {
        let good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        assert!(parse_traceparent(good).is_some_and(|context| context.is_sampled()));
        for bad in [
            "",
            "00",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b716920333-01",
            "00-0af7651916cd43dd8448eb211c80319z-b7ad6b7169203331-01",
        ] {
            assert!(parse_traceparent(bad).is_none(), "{bad}");
        }
    }
}
