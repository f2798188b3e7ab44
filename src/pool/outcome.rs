//! What became of a request.

/// How a request ended, and what its engine said about it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Outcome {
    /// How the stream ended.
    pub ending: Ending,
    /// HTTP status of the answer; `None` when no answer came.
    pub status: Option<u16>,
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
    /// Tells whether an engine served the request: a 2xx whose answer was not cut off.
    #[must_use]
    pub fn succeeded(&self) -> bool {
        self.status.is_some_and(|status| (200..300).contains(&status)) && self.ending != Ending::Aborted
    }
}
