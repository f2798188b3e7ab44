//! What routing knows of one request.

use std::net::SocketAddr;
use std::sync::Arc;

use crate::index::block::BlockKey;
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
    /// The ids of the prompt's tokens, as its engine will have them; `None` where no tokenizer told.
    pub tokens: Option<Arc<[u32]>>,
    /// The most tokens the client lets the engine generate.
    pub max_tokens: Option<u64>,
    /// The endpoints the gateway allows (`x-gateway-destination-endpoint-subset`); `None` allows all, and port 0 is any.
    pub subset: Option<Vec<SocketAddr>>,
    /// The prompt's text in blocks; `None` where nobody wants them.
    pub text: Option<Arc<TextBlocks>>,
    /// Hash of the cache salt, see [`salt`].
    pub salt: Option<u64>,
}

/// The text of a prompt as a chain of blocks, of a body that was read whole.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TextBlocks {
    /// Names of its full blocks; model, cache salt and tools are part of each.
    pub keys: Vec<BlockKey>,
    /// Bytes of a block.
    pub block: u32,
    /// Bytes before the first block, which all prompts with the same first block share: the tools.
    pub head: u64,
    /// Bytes in all.
    pub bytes: u64,
}

impl TextBlocks {
    /// Returns the share of the prompt that its first blocks make up.
    #[must_use]
    pub fn share(&self, blocks: u32) -> f64 {
        if blocks == 0 || self.bytes == 0 {
            return 0.0;
        }
        let first = self.head.saturating_add(u64::from(blocks) * u64::from(self.block));
        #[expect(clippy::cast_precision_loss, reason = "bodies are far smaller than 2^52 bytes")]
        let share = first as f64 / self.bytes as f64;
        share.min(1.0)
    }

    /// Returns how many whole blocks are within a share of the prompt.
    #[must_use]
    pub fn within(&self, share: f64) -> usize {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "bodies are far smaller than 2^52 bytes, and a cast stops at its bounds"
        )]
        let first = (share.clamp(0.0, 1.0) * self.bytes as f64) as u64;
        let blocks = first.saturating_sub(self.head) / u64::from(self.block.max(1));
        usize::try_from(blocks).unwrap_or(usize::MAX).min(self.keys.len())
    }
}

/// Hashes a cache salt, so that the salt itself is kept nowhere. A reader that gets it in pieces makes the same of it:
/// XXH3 of the bytes and of 0xff, which no UTF-8 text holds.
#[must_use]
pub fn salt(text: &str) -> u64 {
    hash::hash(&[text.as_bytes(), &[0xff]].concat())
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

impl InferenceRequest {
    /// Takes over what a tokenizer tells of the prompt.
    pub fn set_tokens(&mut self, tokens: Arc<[u32]>) {
        self.prompt.exact = Some(tokens.len() as u64);
        self.tokens = Some(tokens);
    }
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
    /// All tokens of the prompt, where a tokenizer told; the other fields are then for learning alone.
    pub exact: Option<u64>,
    /// Images, audio and other media.
    pub media: u64,
    /// The body was not read whole: `text_bytes` is its length, and nothing can be learned from it.
    pub unread: bool,
}
