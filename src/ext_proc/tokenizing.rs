//! Requests whose tokens are being asked for, between the end of their body and their decision.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use http::Uri;
use jiff::Timestamp;

use super::exchange::{Prompt, ToSchedule};
use crate::pool::InferenceRequest;
use crate::telemetry::metrics::{Metrics, Step, Untold};
use crate::tokens::{Outcome, Question, Resolver, Tokens};

/// The least time between two lines in the log about failures: a broken template breaks for every request.
const QUIET: Duration = Duration::from_secs(60);

/// What tells tokens, and notes where it could not.
#[derive(Debug)]
pub(super) struct Tokenizing {
    resolver: Arc<Resolver>,
    /// When a failure was last logged, in seconds since the epoch of the picker, plus one; 0 is never.
    said: AtomicU64,
}

/// A request that waits for its tokens.
pub(super) struct Asking {
    outcome: Pin<Box<dyn Future<Output = Outcome> + Send>>,
    to_schedule: Option<Box<ToSchedule>>,
    begun: Instant,
}

impl Tokenizing {
    pub(super) fn new(resolver: Arc<Resolver>) -> Self {
        Self { resolver, said: AtomicU64::new(0) }
    }

    /// Whether an engine may be asked.
    pub(super) fn asks_engines(&self) -> bool {
        self.resolver.asks_engines()
    }

    /// Asks for the tokens of a request, at the time `begun` and until `until` at most.
    pub(super) fn ask(
        &self,
        to_schedule: Box<ToSchedule>,
        prompt: Prompt,
        engine: Option<Uri>,
        (begun, until): (Instant, Instant),
    ) -> Asking {
        let question = Question {
            model: to_schedule.request.model.clone().unwrap_or_default(),
            path: prompt.path,
            body: prompt.body,
            now: Timestamp::now(),
            engine,
            until: until.into(),
        };
        let resolver = Arc::clone(&self.resolver);
        let outcome = Box::pin(async move { resolver.tokens(question).await });
        Asking { outcome, to_schedule: Some(to_schedule), begun }
    }

    /// Gives a request what was learnt of its tokens; a failure leaves it with the estimate.
    pub(super) fn told(
        &self,
        request: &mut InferenceRequest,
        outcome: Outcome,
        metrics: &Metrics,
        (took, now): (Duration, Duration),
    ) {
        metrics.tokenize_seconds.observe(took.as_secs_f64());
        for (step, failure) in &outcome.failures {
            let label = Untold { step: step.as_str(), reason: failure.as_str() };
            metrics.token_failures.get_or_create(&label).inc();
            if failure.is_a_fault() && self.may_say(now) {
                tracing::warn!(
                    step = step.as_str(),
                    reason = failure.as_str(),
                    details = failure.details(),
                    "the tokens of a prompt are not known and are estimated; \
                     llm_ring_token_failures_total counts further ones"
                );
            }
        }
        if let (Some(step), Tokens::Exact(tokens)) = (outcome.step, outcome.tokens) {
            metrics.tokenized.get_or_create(&Step { step: step.as_str() }).inc();
            request.set_tokens(tokens);
        }
    }

    fn may_say(&self, now: Duration) -> bool {
        let now = now.as_secs() + 1;
        let said = self.said.load(Ordering::Relaxed);
        let is_quiet = said == 0 || now.saturating_sub(said) >= QUIET.as_secs();
        is_quiet
            && self.said.compare_exchange(said, now, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

impl Asking {
    /// Waits for the tokens; returns the request, what was learnt, and since when it was asked. It is not polled again.
    pub(super) fn poll(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<(Box<ToSchedule>, Outcome, Instant)>> {
        let outcome = std::task::ready!(self.outcome.as_mut().poll(cx));
        Poll::Ready(self.to_schedule.take().map(|to_schedule| (to_schedule, outcome, self.begun)))
    }
}

impl fmt::Debug for Asking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Asking").field("to_schedule", &self.to_schedule).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::pool::PoolSnapshot;
    use crate::scheduling::Scheduler;
    use crate::tokens::{Failure, ResolverOptions, Step as By};

    fn tokenizing() -> (Tokenizing, Arc<Metrics>) {
        let options = ResolverOptions { parallel: 1, local_timeout: Duration::from_secs(1) };
        let config = crate::config::Config::default();
        let settings = crate::app::settings(&config).unwrap();
        let scheduler = Scheduler::new(settings, Arc::new(PoolSnapshot::default()));
        let (metrics, _) = Metrics::new(
            Arc::new(scheduler),
            Arc::default(),
            Arc::new(crate::app::knowledge(&config)),
        );
        (Tokenizing::new(Arc::new(Resolver::new(None, None, options))), metrics)
    }

    #[tokio::test]
    #[expect(clippy::disallowed_methods, reason = "a wait ends by a clock")]
    async fn a_request_comes_back_with_its_tokens() {
        let (tokenizing, metrics) = tokenizing();
        let to_schedule =
            ToSchedule { request: InferenceRequest::default(), body: "whole", prompt: None };
        let prompt = Prompt {
            path: "/v1/completions".to_owned(),
            body: Bytes::from_static(br#"{"prompt":[7,8,9]}"#),
        };
        let now = Instant::now();
        let times = (now, now + Duration::from_secs(60));
        let mut asking = tokenizing.ask(Box::new(to_schedule), prompt, None, times);
        let told = std::future::poll_fn(|cx| asking.poll(cx)).await;
        let (mut to_schedule, outcome, begun) = told.unwrap();
        assert_eq!((to_schedule.body, begun), ("whole", now));
        let took = (Duration::ZERO, Duration::ZERO);
        tokenizing.told(&mut to_schedule.request, outcome, &metrics, took);
        assert_eq!(to_schedule.request.tokens.as_deref(), Some(&[7, 8, 9][..]));
        assert_eq!(to_schedule.request.prompt.exact, Some(3));
        assert_eq!(metrics.tokenized.get_or_create(&Step { step: "given" }).get(), 1);
    }

    #[test]
    fn failures_are_counted_and_leave_the_estimate() {
        let (tokenizing, metrics) = tokenizing();
        let failures = vec![(By::Local, Failure::Media), (By::Engine, Failure::Status(503))];
        let outcome = Outcome { tokens: Tokens::Estimate, step: None, failures };
        let mut request = InferenceRequest::default();
        tokenizing.told(&mut request, outcome, &metrics, (Duration::ZERO, Duration::ZERO));
        assert_eq!((&request.tokens, request.prompt.exact), (&None, None));
        for (step, reason) in [("local", "media"), ("engine", "status")] {
            let label = Untold { step, reason };
            assert_eq!(metrics.token_failures.get_or_create(&label).get(), 1, "{label:?}");
        }
    }

    #[test]
    fn the_log_hears_of_a_failure_once_a_minute() {
        let (tokenizing, _) = tokenizing();
        let said = |seconds| tokenizing.may_say(Duration::from_secs(seconds));
        assert_eq!(
            [0, 1, 59, 60, 61, 119, 120].map(said),
            [true, false, false, true, false, false, true]
        );
    }
}
