//! Watches an answer pass, to know when its first token came and what the engine says it cost.

use std::fmt;

use super::inflate::{Inflate, Sink};
use super::json::{self, Kept, Kind, Tokenizer, Visitor};
use crate::pool::Usage;
use lines::{Line, Lines};

mod lines;

/// Longest response id that is kept; a longer one could not come back as a session key either.
const ID_BYTES: usize = 512;

/// Longest `object` that is told apart.
const OBJECT_BYTES: usize = 16;

/// Reads one response body, chunk by chunk, in bounded memory and without holding it up.
pub(crate) struct ResponseReader {
    has_bytes: bool,
    body: Body,
}

enum Body {
    Unread,
    Read(Box<Inflate<Answer>>),
}

impl ResponseReader {
    pub(crate) fn new(
        content_type: Option<&[u8]>,
        content_encoding: Option<&[u8]>,
        max_decoded_bytes: u64,
    ) -> Self {
        // What is not compressed cannot expand: reading it costs no more than passing it on.
        let limit = content_encoding.map_or(u64::MAX, |_| max_decoded_bytes);
        let body = match Format::of(content_type) {
            None => Body::Unread,
            Some(format) => {
                Body::Read(Box::new(Inflate::new(content_encoding, limit, Answer::new(format))))
            }
        };
        Self { has_bytes: false, body }
    }

    pub(crate) fn push(&mut self, chunk: &[u8]) {
        self.has_bytes |= !chunk.is_empty();
        match &mut self.body {
            Body::Unread => {}
            Body::Read(inflate) => inflate.push(chunk),
        }
    }

    /// Whether the client was sent something the model generated; where that cannot be read, any byte counts.
    pub(crate) fn first_token(&self) -> bool {
        match &self.body {
            Body::Read(inflate) if inflate.stopped().is_none() => {
                let answer = inflate.sink();
                match answer.format {
                    Format::Json => self.has_bytes,
                    Format::Events => answer.facts.has_token,
                }
            }
            Body::Read(_) | Body::Unread => self.has_bytes,
        }
    }

    /// Ends the body and returns what it said.
    pub(crate) fn finish(&mut self) -> Usage {
        let inflate = match &mut self.body {
            Body::Unread => return Usage::default(),
            Body::Read(inflate) => inflate,
        };
        inflate.finish();
        let mut usage = inflate.sink().facts.usage();
        if inflate.stopped().is_some() {
            // A count that grows with the answer is too low where the answer was lost sight of.
            usage.completion_tokens = None;
        }
        usage
    }
}

impl fmt::Debug for ResponseReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseReader").field("has_bytes", &self.has_bytes).finish_non_exhaustive()
    }
}

#[derive(Debug, Clone, Copy)]
enum Format {
    Json,
    Events,
}

impl Format {
    fn of(content_type: Option<&[u8]>) -> Option<Self> {
        let essence = content_type?.split(|&byte| byte == b';').next()?;
        let essence = essence.trim_ascii().to_ascii_lowercase();
        if essence == b"text/event-stream" {
            Some(Self::Events)
        } else {
            essence.ends_with(b"json").then_some(Self::Json)
        }
    }
}

struct Answer {
    format: Format,
    lines: Lines,
    tokenizer: Tokenizer<Place>,
    facts: Facts,
}

impl Answer {
    fn new(format: Format) -> Self {
        Self {
            format,
            lines: Lines::default(),
            tokenizer: Tokenizer::new(Place::Root),
            facts: Facts::default(),
        }
    }
}

impl Sink for Answer {
    fn take(&mut self, piece: &[u8]) {
        let Self { format, lines, tokenizer, facts } = self;
        match format {
            Format::Json => tokenizer.push(piece, facts),
            Format::Events => lines.read(piece, |line| match line {
                Line::Data(data) => tokenizer.push(data, facts),
                Line::EventEnd => tokenizer.restart(),
            }),
        }
    }
}

/// Where a value sits in the answers of all known APIs.
#[derive(Debug, Clone, Copy)]
enum Place {
    Skipped,
    Root,
    /// The answer as an event of the Responses or the Messages API holds it.
    Response,
    Object,
    Id,
    Choices,
    Choice,
    /// What an event adds: a string in the Responses API.
    Delta,
    /// A string the model generated.
    Generated,
    ToolCalls,
    ToolCall,
    Usage,
    UsageDetails,
    Timings,
    Count(Count),
}

#[derive(Debug, Clone, Copy)]
enum Count {
    /// All of the prompt.
    Prompt,
    /// All of the prompt, or in the Messages API the part of it that no cache knew.
    Input,
    Completion,
    Cached,
    CacheRead,
    CacheCreation,
    /// llama.cpp's timings: the cached part, the rest and the answer.
    TimedCached,
    TimedPrompt,
    TimedCompletion,
}

#[derive(Default)]
struct Facts {
    has_token: bool,
    /// The last value of each count; streams may repeat them.
    counts: [Option<u64>; 9],
    response_id: Option<String>,
    object: Kept,
    id: Kept,
}

impl Facts {
    fn usage(&self) -> Usage {
        let count = |count: Count| self.counts[count as usize];
        let prompt = || match (count(Count::CacheRead), count(Count::CacheCreation)) {
            (None, None) => count(Count::Input),
            (read, creation) => count(Count::Input)?
                .checked_add(read.unwrap_or(0))?
                .checked_add(creation.unwrap_or(0)),
        };
        let timed = || count(Count::TimedPrompt)?.checked_add(count(Count::TimedCached)?);
        Usage {
            prompt_tokens: count(Count::Prompt).or_else(prompt).or_else(timed),
            completion_tokens: count(Count::Completion).or(count(Count::TimedCompletion)),
            cached_tokens: count(Count::Cached)
                .or(count(Count::CacheRead))
                .or(count(Count::TimedCached)),
            response_id: self.response_id.clone(),
        }
    }

    /// Ids of other objects name no state in the engine.
    fn note_response_id(&mut self) {
        if self.response_id.is_none() && self.object.get() == Some(b"response") {
            self.response_id = self.id.to_text();
        }
    }
}

impl Visitor for Facts {
    type Place = Place;

    fn member(&mut self, object: Place, name: &[u8]) -> Place {
        match (object, name) {
            (Place::Root, b"choices") => Place::Choices,
            (Place::Root, b"content") => Place::Generated,
            (Place::Root | Place::Choice, b"delta") => Place::Delta,
            (Place::Root, b"response" | b"message") => Place::Response,
            (Place::Root, b"timings") => Place::Timings,
            (Place::Root | Place::Response, b"usage") => Place::Usage,
            (Place::Root | Place::Response, b"object") => Place::Object,
            (Place::Root | Place::Response, b"id") => Place::Id,
            (Place::Choice, b"text") => Place::Generated,
            (Place::Delta, b"content" | b"text" | b"refusal") => Place::Generated,
            (Place::Delta, b"reasoning" | b"reasoning_content" | b"thinking") => Place::Generated,
            (Place::Delta, b"partial_json") => Place::Generated,
            (Place::Delta, b"tool_calls") => Place::ToolCalls,
            (Place::Usage, b"prompt_tokens") => Place::Count(Count::Prompt),
            (Place::Usage, b"input_tokens") => Place::Count(Count::Input),
            (Place::Usage, b"completion_tokens" | b"output_tokens") => {
                Place::Count(Count::Completion)
            }
            (Place::Usage, b"cache_read_input_tokens") => Place::Count(Count::CacheRead),
            (Place::Usage, b"cache_creation_input_tokens") => Place::Count(Count::CacheCreation),
            (Place::Usage, b"prompt_tokens_details" | b"input_tokens_details") => {
                Place::UsageDetails
            }
            (Place::UsageDetails, b"cached_tokens") => Place::Count(Count::Cached),
            (Place::Timings, b"cache_n") => Place::Count(Count::TimedCached),
            (Place::Timings, b"prompt_n") => Place::Count(Count::TimedPrompt),
            (Place::Timings, b"predicted_n") => Place::Count(Count::TimedCompletion),
            _ => Place::Skipped,
        }
    }

    fn element(&mut self, array: Place) -> Place {
        match array {
            Place::Choices => Place::Choice,
            Place::ToolCalls => Place::ToolCall,
            Place::Skipped
            | Place::Root
            | Place::Response
            | Place::Object
            | Place::Id
            | Place::Choice
            | Place::Delta
            | Place::Generated
            | Place::ToolCall
            | Place::Usage
            | Place::UsageDetails
            | Place::Timings
            | Place::Count(_) => Place::Skipped,
        }
    }

    fn begin(&mut self, at: Place, kind: Kind) {
        match (at, kind) {
            (Place::Root | Place::Response, Kind::Object) => {
                self.object.clear();
                self.id.clear();
            }
            (Place::ToolCall, Kind::Object) => self.has_token = true,
            _ => {}
        }
    }

    fn end(&mut self, _at: Place, _kind: Kind) {}

    fn text(&mut self, at: Place, piece: &[u8]) {
        match at {
            Place::Delta | Place::Generated => self.has_token = true,
            Place::Object => self.object.push(piece, OBJECT_BYTES),
            Place::Id => self.id.push(piece, ID_BYTES),
            Place::Skipped
            | Place::Root
            | Place::Response
            | Place::Choices
            | Place::Choice
            | Place::ToolCalls
            | Place::ToolCall
            | Place::Usage
            | Place::UsageDetails
            | Place::Timings
            | Place::Count(_) => {}
        }
    }

    fn text_end(&mut self, at: Place) {
        if matches!(at, Place::Object | Place::Id) {
            self.note_response_id();
        }
    }

    fn scalar(&mut self, at: Place, token: &[u8]) {
        let Place::Count(count) = at else { return };
        if let Some(tokens) = json::count(token) {
            self.counts[count as usize] = Some(tokens);
        }
    }
}

#[cfg(test)]
mod tests;
