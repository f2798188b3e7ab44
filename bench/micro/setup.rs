//! Pools, conversations and load that the benchmarks and the instruction count share.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use llm_ring::pool::{
    Conversation, Ending, Endpoint, InferenceRequest, KeySource, Outcome, PoolSnapshot, PromptSize,
    Release, Usage,
};
use llm_ring::scheduling::{
    Admission, Booking, Detail, Moment, Policies, Reason, Scheduler, Settings,
};

/// Conversations that take turns.
pub(crate) const CONVERSATIONS: u64 = 1024;
/// Virtual nodes an endpoint, as the default is.
pub(crate) const POINTS: u32 = 100;
/// Requests in flight on each endpoint: enough for one more to fit under the cap.
const IN_FLIGHT: usize = 8;

/// What the scheduler meets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Case {
    /// Conversations that were never served.
    New,
    /// Conversations whose place is remembered.
    Remembered,
    /// Conversations whose home is full, so that they overflow.
    HomeFull,
    /// Requests so large that no endpoint has room, which all carry the same.
    AllFull,
}

/// A scheduler under load, and the requests to ask it for.
pub(crate) struct Bench {
    scheduler: Arc<Scheduler>,
    requests: Vec<InferenceRequest>,
    at: usize,
    /// What is in flight.
    _held: Vec<Booking>,
}

pub(crate) fn endpoints(n: usize) -> Vec<Endpoint> {
    (0..n)
        .map(|i| {
            let address = format!("10.0.{}.{}:8000", i / 250, i % 250 + 1);
            Endpoint::new(format!("llm-{i:04}"), address.parse().expect("an address"))
        })
        .collect()
}

fn request(conversation: u64, text_bytes: u64) -> InferenceRequest {
    let source = KeySource::Header("x-session-id".to_owned());
    InferenceRequest {
        id: "4c6f1c5e-7c1e-4f7d-9e57-0d2f9c1b7a11".to_owned(),
        conversation: Some(Conversation::named(format!("session-{conversation}"), source)),
        model: Some("meta-llama/Llama-3.1-8B-Instruct".to_owned()),
        prompt: PromptSize { text_bytes, messages: 8, ..PromptSize::default() },
        max_tokens: Some(256),
        ..InferenceRequest::default()
    }
}

impl Bench {
    pub(crate) fn new(policy: &str, n: usize, case: Case) -> Self {
        let scheduler = scheduler(policy, n);
        // Distinct conversations of one size: bounded loads spread them evenly.
        let mut held: Vec<Booking> = (0..(n * IN_FLIGHT) as u64)
            .map(|i| book(&scheduler, &request(1_000_000 + i, 2000), i).1)
            .collect();
        let requests: Vec<InferenceRequest> = match case {
            Case::New | Case::Remembered => (0..CONVERSATIONS).map(|i| request(i, 4000)).collect(),
            Case::AllFull => (0..CONVERSATIONS).map(|i| request(i, 400_000)).collect(),
            Case::HomeFull => {
                // Its own requests fill the home of a conversation.
                loop {
                    let (reason, booking) = book(&scheduler, &request(7, 400), 0);
                    held.push(booking);
                    if reason == Reason::Overflow {
                        break vec![request(7, 400)];
                    }
                    assert!(reason == Reason::Home, "{reason:?}");
                }
            }
        };
        if case == Case::Remembered {
            for request in &requests {
                book(&scheduler, request, 0).1.finish(&served(), Duration::ZERO);
            }
        }
        Self { scheduler, requests, at: 0, _held: held }
    }

    /// Makes one decision, books it and releases it.
    pub(crate) fn pick(&mut self) -> Reason {
        self.at = (self.at + 1) % self.requests.len();
        let (reason, booking) = book(&self.scheduler, &self.requests[self.at], self.at as u64);
        drop(booking);
        reason
    }
}

fn book(scheduler: &Arc<Scheduler>, request: &InferenceRequest, seed: u64) -> (Reason, Booking) {
    let (decision, booking) = scheduler
        .schedule(request, Moment { seed, ..Moment::default() }, Detail::Normal)
        .expect("there are endpoints");
    (decision.reason, booking)
}

fn scheduler(policy: &str, n: usize) -> Arc<Scheduler> {
    let (policy_name, policy) = Policies::default().get(policy).expect("a policy of that name");
    let settings = Settings {
        policy_name,
        policy,
        admission: Admission::default(),
        release: Release::FirstToken,
        prices: llm_ring::pool::Prices::default(),
        default_max_tokens: 256,
        destinations: NonZeroUsize::MIN,
        memory_entries: NonZeroUsize::new(50_000).expect("not 0"),
        trace_sights: false,
    };
    let pool = PoolSnapshot::new(0, endpoints(n), POINTS).expect("the names are distinct");
    Arc::new(Scheduler::new(settings, Arc::new(pool)))
}

fn served() -> Outcome {
    let usage = Usage {
        prompt_tokens: Some(1000),
        completion_tokens: Some(100),
        cached_tokens: Some(0),
        response_id: None,
    };
    Outcome { ending: Ending::Complete, status: Some(200), served: None, usage }
}
