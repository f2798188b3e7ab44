//! What routing knows of one request.

use std::net::SocketAddr;

use crate::index::hash;

/// One request, as far as routing needs it.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct InferenceRequest {
    /// `x-request-id`, for the log; empty when none came.
    pub id: String,
    /// The conversation it belongs to; `None` is routed by load alone.
    pub conversation: Option<Conversation>,
    /// The model named in the body.
    pub model: Option<String>,
    /// The InferenceObjective named in its headers, which gives it its priority.
    pub objective: Option<String>,
    /// What the prompt is made of.
    pub prompt: PromptSize,
    /// The most tokens the client lets the engine generate.
    pub max_tokens: Option<u64>,
    /// The endpoints the gateway allows (`x-gateway-destination-endpoint-subset`); `None` allows all, and port 0 is any.
    pub subset: Option<Vec<SocketAddr>>,
}

/// A conversation's identity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conversation {
    /// What the client called it, or `auto-` and a hash of its opening.
    pub id: String,
    /// Its place on the ring.
    pub key: u64,
    /// Where the identity was found.
    pub source: KeySource,
}

/// Where a conversation's identity came from, strongest first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KeySource {
    /// A request header, by name.
    Header(String),
    /// A field of the body, by name.
    Field(&'static str),
    /// `previous_response_id`: resolved to the conversation whose answer had that id.
    PreviousResponse,
    /// A hash of the stable opening: system text, tools, first user turn.
    Opening,
}

impl Conversation {
    /// Makes a conversation of an identity that the client sent.
    #[must_use]
    pub fn named(id: String, source: KeySource) -> Self {
        Self { key: hash::hash(id.as_bytes()), id, source }
    }

    /// Makes a conversation of the hash of its opening.
    #[must_use]
    pub fn opening(opening: u64) -> Self {
        Self::named(format!("auto-{opening:016x}"), KeySource::Opening)
    }
}

/// The parts of a prompt that become tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PromptSize {
    /// Decoded UTF-8 bytes of text.
    pub text_bytes: u64,
    /// Chat messages, or prompts of a list.
    pub messages: u64,
    /// Tokens given as ids.
    pub token_ids: u64,
    /// Images, audio and other media.
    pub media: u64,
    /// The body was not read whole: `text_bytes` is its length, and nothing can be learned from it.
    pub unread: bool,
}
