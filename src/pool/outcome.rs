//! What became of a request.

use std::net::SocketAddr;

/// How a request ended, and what its engine said about it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Outcome {
    /// How the stream ended.
    pub ending: Ending,
    /// HTTP status of the answer; `None` when no answer came.
    pub status: Option<u16>,
    /// The endpoint that Envoy says it used, which can be a fallback.
    pub served: Option<SocketAddr>,
    /// What the engine counted.
    pub usage: Usage,
}

/// How a stream ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Ending {
    /// The whole answer passed.
    Complete,
    /// The gateway does not show us answers; the stream ended after the headers.
    Unobserved,
    /// The client or the gateway went away first.
    #[default]
    Aborted,
}

/// Token counts that an engine reported; `None` where it said nothing.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Usage {
    /// Tokens of the prompt, cached ones included.
    pub prompt_tokens: Option<u64>,
    /// Tokens generated.
    pub completion_tokens: Option<u64>,
    /// Tokens of the prompt found in the cache.
    pub cached_tokens: Option<u64>,
    /// The id of a Responses API answer, which a later turn may name.
    pub response_id: Option<String>,
}

impl Outcome {
    /// Tells whether an engine served the request: a 2xx whose answer was not cut off, or, behind a gateway that
    /// shows no answers, the absence of any sign of failure.
    #[must_use]
    pub fn succeeded(&self) -> bool {
        match self.ending {
            Ending::Complete => self.status.is_some_and(is_success),
            Ending::Unobserved => self.status.is_none_or(is_success),
            Ending::Aborted => false,
        }
    }
}

fn is_success(status: u16) -> bool {
    (200..300).contains(&status)
}
