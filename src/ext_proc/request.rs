//! Reads from a request body only what routing needs, while its chunks pass by, and never refuses one.

use std::fmt;
use std::sync::Arc;

use super::inflate::{Inflate, Sink, Stopped};
use super::json::{Status, Tokenizer};
use crate::pool::{PromptSize, TextBlocks};
use facts::{Facts, Place};

mod facts;
mod opening;

/// The parts of the configuration that steer reading.
#[derive(Debug, Clone, Copy)]
pub struct ReadOptions {
    /// How many bytes of the decoded body are read at most.
    pub(crate) max_decoded_bytes: u64,
    /// Whether `user` names a session. It often names a whole application instead.
    pub(crate) use_user_field: bool,
    /// Bytes of the blocks that the prompt's text is hashed in; 0 is not at all.
    pub(crate) block_bytes: u32,
    /// Whether what a compressed body decodes to is kept, to tell its tokens.
    pub(crate) keep_decoded: bool,
}

/// Whether the body has more to come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    Whole,
    Partial,
}

/// What a request body says about its route.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reading {
    pub(crate) completeness: Completeness,
    /// The model asked for; the last one if there are several, as in the engines' own reader.
    pub(crate) model: Option<String>,
    /// UTF-8 bytes the engine will tokenize; of a body that cannot be read, its raw bytes.
    pub(crate) text_bytes: u64,
    /// Chat messages and items, or prompts of a batch.
    pub(crate) messages: u64,
    /// Prompt tokens given as ids.
    pub(crate) token_ids: u64,
    /// Images, audio, video and files; their bytes are not in `text_bytes`.
    pub(crate) media: u64,
    /// The longest answer the client lets the engine give.
    pub(crate) max_tokens: Option<u64>,
    /// A session's name given by the client.
    pub(crate) key: Option<BodyKey>,
    /// A hash over what stays the same while a conversation grows: the model, the cache salt, the system text,
    /// the tools and the first user turn.
    pub(crate) opening: Option<u64>,
    /// The prompt's text in blocks, if that is wanted and the body was read whole.
    pub(crate) text: Option<Arc<TextBlocks>>,
    /// Hash of the cache salt.
    pub(crate) salt: Option<u64>,
}

impl Reading {
    /// Returns what the prompt is made of, as far as it was read.
    #[must_use]
    pub fn prompt(&self) -> PromptSize {
        PromptSize {
            text_bytes: self.text_bytes,
            messages: self.messages,
            token_ids: self.token_ids,
            exact: None,
            media: self.media,
            unread: false,
        }
    }
}

/// How much of the body stands behind a [`Reading`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Completeness {
    /// All of it, or all there is to know of a body that is not ours to read.
    Whole,
    /// What has come so far.
    Partial,
    /// What came before the fault, if anything.
    Unreadable(Why),
}

/// Why a body could not be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// Its content type or its first byte is not that of a JSON object.
    NotJson,
    /// It begins as a JSON object and is broken or cut short.
    Malformed,
    /// Its content coding is unknown.
    Encoding,
    /// It decodes to more than the limit.
    TooLarge,
    /// It is not what its content coding says.
    Corrupt,
}

impl Why {
    /// A metric label.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::NotJson => "not-json",
            Self::Malformed => "malformed",
            Self::Encoding => "encoding",
            Self::TooLarge => "too-large",
            Self::Corrupt => "corrupt",
        }
    }
}

impl From<Stopped> for Why {
    fn from(stopped: Stopped) -> Self {
        match stopped {
            Stopped::TooLarge => Self::TooLarge,
            Stopped::Corrupt => Self::Corrupt,
            Stopped::Unsupported => Self::Encoding,
        }
    }
}

/// A client's own name for a session, the most specific one it gave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BodyKey {
    PromptCacheKey(String),
    User(String),
    PreviousResponseId(String),
}

/// Reads one request body, chunk by chunk, in bounded memory.
pub(crate) struct RequestReader {
    raw_bytes: u64,
    body: Body,
}

enum Body {
    /// Not one of the APIs whose fields are known, or not JSON.
    Unread(Completeness),
    Read(Box<Inflate<Document>>),
}

impl RequestReader {
    /// `path` may have a query, and may be empty if the proxy sends none.
    pub(crate) fn new(
        path: &[u8],
        content_type: Option<&[u8]>,
        content_encoding: Option<&[u8]>,
        options: &ReadOptions,
    ) -> Self {
        let body = if !has_known_fields(path) {
            Body::Unread(Completeness::Whole)
        } else if !may_be_json(content_type) {
            Body::Unread(Completeness::Unreadable(Why::NotJson))
        } else {
            let document = Document {
                tokenizer: Tokenizer::new(Place::Root),
                facts: Facts::new(options.use_user_field, options.block_bytes),
                kept: None,
            };
            let limit = options.max_decoded_bytes;
            let mut inflate = Inflate::new(content_encoding, limit, document);
            if options.keep_decoded && !inflate.is_identity() {
                inflate.sink_mut().kept = Some(Vec::new());
            }
            Body::Read(Box::new(inflate))
        };
        Self { raw_bytes: 0, body }
    }

    pub(crate) fn push(&mut self, chunk: &[u8]) {
        self.raw_bytes += chunk.len() as u64;
        match &mut self.body {
            Body::Unread(_) => {}
            Body::Read(inflate) => inflate.push(chunk),
        }
    }

    /// Whether the body is one that is read at all.
    pub(crate) fn reads(&self) -> bool {
        matches!(self.body, Body::Read(_))
    }

    /// Returns how many bytes are kept of what the body decodes to.
    pub(crate) fn kept_bytes(&self) -> u64 {
        match &self.body {
            Body::Unread(_) => 0,
            Body::Read(inflate) => inflate.sink().kept.as_ref().map_or(0, |kept| kept.len() as u64),
        }
    }

    /// Takes what the body decodes to; `None` where that is the body itself, or nothing was kept.
    pub(crate) fn take_decoded(&mut self) -> Option<Vec<u8>> {
        match &mut self.body {
            Body::Unread(_) => None,
            Body::Read(inflate) => inflate.sink_mut().kept.take(),
        }
    }

    /// Returns what is known so far; after [`End::Whole`], nothing more may be pushed.
    pub(crate) fn reading(&mut self, end: End) -> Reading {
        let inflate = match &mut self.body {
            Body::Unread(completeness) => return Reading::unread(*completeness, self.raw_bytes),
            Body::Read(inflate) => inflate,
        };
        if end == End::Whole {
            inflate.finish();
        }
        let Document { tokenizer, facts, kept: _ } = inflate.sink();
        let whole = match end {
            End::Whole => Completeness::Whole,
            End::Partial => Completeness::Partial,
        };
        let completeness = match (inflate.stopped(), tokenizer.status()) {
            (Some(stopped), _) => Completeness::Unreadable(stopped.into()),
            (None, _) if self.raw_bytes == 0 => whole,
            (None, Status::Complete) if facts.is_object => whole,
            (None, Status::Running) if end == End::Partial => whole,
            (None, _) if facts.is_object => Completeness::Unreadable(Why::Malformed),
            (None, _) => Completeness::Unreadable(Why::NotJson),
        };
        if facts.is_object {
            facts.reading(completeness)
        } else {
            Reading::unread(completeness, self.raw_bytes)
        }
    }
}

impl fmt::Debug for RequestReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RequestReader").field("raw_bytes", &self.raw_bytes).finish_non_exhaustive()
    }
}

impl Reading {
    fn unread(completeness: Completeness, raw_bytes: u64) -> Self {
        Self {
            completeness,
            model: None,
            text_bytes: raw_bytes,
            messages: 0,
            token_ids: 0,
            media: 0,
            max_tokens: None,
            key: None,
            opening: None,
            text: None,
            salt: None,
        }
    }
}

/// Whether the API behind `path` is one whose fields [`Facts`] knows; the names collide so little that one schema
/// serves all of them, and a request without a path as well.
fn has_known_fields(path: &[u8]) -> bool {
    let path = path.split(|&byte| byte == b'?').next().unwrap_or_default();
    let mut segments = path.rsplit(|&byte| byte == b'/').skip_while(|segment| segment.is_empty());
    matches!(
        segments.next(),
        None | Some(b"completions" | b"responses" | b"embeddings" | b"messages" | b"completion")
    )
}

/// Whether a body of this type may be a JSON object; its first byte decides.
fn may_be_json(content_type: Option<&[u8]>) -> bool {
    let value = content_type.unwrap_or_default();
    let essence = value.split(|&byte| byte == b';').next().unwrap_or_default();
    let essence = essence.trim_ascii().to_ascii_lowercase();
    essence.is_empty() || essence == b"text/plain" || essence.ends_with(b"json")
}

struct Document {
    tokenizer: Tokenizer<Place>,
    facts: Facts,
    /// What a compressed body decodes to, where it is kept.
    kept: Option<Vec<u8>>,
}

impl Sink for Document {
    fn take(&mut self, piece: &[u8]) {
        self.tokenizer.push(piece, &mut self.facts);
        if let Some(kept) = &mut self.kept {
            kept.extend_from_slice(piece);
        }
    }
}

#[cfg(test)]
mod tests;
