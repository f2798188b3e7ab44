//! One ext_proc stream as a state machine without I/O: messages of Envoy go in, effects come out.
//!
//! Envoy's rules it keeps: headers are answered before bodies and bodies before trailers; in
//! `FULL_DUPLEX_STREAMED` the pick waits for the whole body, and every byte goes back; the end of the stream says
//! nothing, only the end of the answer does. The caller does what the effects say, in order, and answers
//! [`Effect::Schedule`] with [`Exchange::scheduled`] or [`Exchange::refused`] before it feeds the next message.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use envoy_types::pb::envoy::config::core::v3::{HeaderMap, Metadata};
use envoy_types::pb::envoy::service::ext_proc::v3 as pb;
use envoy_types::pb::google::protobuf::{Struct, Value, value::Kind};
use pb::processing_request::Request;

use super::reply::{self, ErrorFormat, Rejection, Routing, Side};
use super::request::{BodyKey, Completeness, End, ReadOptions, Reading, RequestReader};
use super::response::ResponseReader;
use crate::pool::{Conversation, Ending, InferenceRequest, KeySource, Outcome};
use crate::scheduling::Refusal;

/// The key under which Envoy sends attributes.
const ATTRIBUTES: &str = "envoy.filters.http.ext_proc";

/// What an exchange needs to know.
#[derive(Debug, Clone)]
pub struct ExchangeSettings {
    /// Headers that name the conversation, strongest first, lower-case.
    pub conversation_headers: Vec<String>,
    /// Largest request body, in bytes.
    pub max_body_bytes: u64,
    /// How request bodies are read.
    pub read: ReadOptions,
    /// How refusals look.
    pub errors: ErrorFormat,
    /// Whether a subset that the gateway allows is kept to.
    pub use_subset: bool,
    /// Whether whole bodies go with their requests, to tell their tokens.
    pub keep_bodies: bool,
}

/// What the exchange asks its caller to do.
#[derive(Debug)]
pub enum Effect {
    /// Send this to Envoy.
    Send(Box<pb::ProcessingResponse>),
    /// Decide this request, then call [`Exchange::scheduled`] or [`Exchange::refused`].
    Schedule(Box<ToSchedule>),
    /// The request was turned away without a decision.
    Rejected(Rejection),
    /// The first token of the answer has passed.
    FirstToken,
    /// The request is over; comes at most once.
    Finish(Outcome),
    /// End the stream.
    Close(Close),
}

/// A request to decide.
#[derive(Debug)]
pub struct ToSchedule {
    /// The request.
    pub request: InferenceRequest,
    /// How far its body was read.
    pub body: &'static str,
    /// What its tokens are told from: with [`ExchangeSettings::keep_bodies`], and where the body was read whole.
    pub prompt: Option<Prompt>,
}

/// A request's body, whole.
#[derive(Debug)]
pub struct Prompt {
    /// The path of the request.
    pub path: String,
    /// The body, decoded.
    pub body: Bytes,
}

/// How the stream is to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Close {
    /// All is said.
    Done,
    /// The request was cut off in the middle.
    Truncated,
}

/// One HTTP request and its answer.
#[derive(Debug)]
pub struct Exchange {
    settings: Arc<ExchangeSettings>,
    modes: Modes,
    phase: Phase,
    answer: Answer,
    explanation: Vec<(&'static str, String)>,
    effects: VecDeque<Effect>,
    finished: bool,
    /// The peer follows Envoy's protocol to its end; one that sends no `protocol_config` only asks for a pick.
    envoy: bool,
    duplicates: u64,
    /// Bytes of the request's body that have come.
    received: u64,
    /// Those of them that are among the effects.
    queued: u64,
    request_id: String,
    traceparent: Option<String>,
}

/// How bodies are exchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    None,
    Streamed,
    Buffered,
    Duplex,
}

#[derive(Debug, Clone, Copy)]
struct Modes {
    request: Mode,
    response: Mode,
}

#[derive(Debug)]
enum Phase {
    /// Nothing has come.
    Start,
    /// The request's body is on its way.
    Gathering(Box<Gathering>),
    /// Waiting for the decision.
    Deciding(Held),
    /// The request is decided and its body still passes.
    Passing,
    /// The request is answered.
    Answered,
    /// The client has an answer of ours.
    Rejected,
}

/// A request of which more is to come.
#[derive(Debug)]
struct Gathering {
    head: Head,
    reader: RequestReader,
    chunks: Vec<Vec<u8>>,
}

/// What the request's headers say.
#[derive(Debug, Default)]
struct Head {
    request: InferenceRequest,
    header_key: Option<Conversation>,
    content_length: Option<u64>,
    remove: Vec<String>,
    /// The path, where bodies are kept.
    path: Option<String>,
}

/// A request's answer in waiting: what goes out after the pick.
#[derive(Debug, Default)]
struct Held {
    carrier: Carrier,
    chunks: Vec<Vec<u8>>,
    /// The chunks in one, while somebody else reads them too.
    shared: Option<Bytes>,
    /// Bytes held here and there.
    bytes: u64,
    end: BodyEnd,
    remove: Vec<String>,
}

/// The message that carries the pick.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Carrier {
    #[default]
    Headers,
    Body,
    Trailers,
}

/// How the body ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum BodyEnd {
    /// There is none, or none that we see.
    #[default]
    Absent,
    /// With its last chunk.
    Chunk,
    /// With trailers.
    Trailers,
    /// Not yet.
    Open,
}

/// What has been seen of the answer.
#[derive(Debug, Default)]
struct Answer {
    started: bool,
    status: Option<u16>,
    served: Option<SocketAddr>,
    reader: Option<ResponseReader>,
    first_token: bool,
    ended: bool,
}

impl Exchange {
    /// Starts before the first message.
    #[must_use]
    pub fn new(settings: Arc<ExchangeSettings>) -> Self {
        Self {
            settings,
            modes: Modes { request: Mode::Duplex, response: Mode::Duplex },
            phase: Phase::Start,
            answer: Answer::default(),
            explanation: Vec::new(),
            effects: VecDeque::new(),
            finished: false,
            envoy: false,
            duplicates: 0,
            received: 0,
            queued: 0,
            request_id: String::new(),
            traceparent: None,
        }
    }

    /// Takes the next effect.
    pub fn next_effect(&mut self) -> Option<Effect> {
        let effect = self.effects.pop_front();
        if let Some(Effect::Send(message)) = &effect {
            self.queued -= reply::request_bytes(message);
        }
        effect
    }

    /// Returns the bytes of the request's body that wait here: for the pick, or for Envoy to take them.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        match &self.phase {
            Phase::Gathering(gathering) => self.received + gathering.reader.kept_bytes(),
            Phase::Deciding(held) => held.bytes,
            Phase::Start | Phase::Passing | Phase::Answered | Phase::Rejected => self.queued,
        }
    }

    /// Tells whether the request's body is still to come, so that its silence counts against a time limit.
    #[must_use]
    pub fn awaits_body(&self) -> bool {
        match self.phase {
            // Envoy gathers a buffered body itself, and keeps its own time.
            Phase::Gathering(_) => self.modes.request != Mode::Buffered,
            Phase::Passing => true,
            Phase::Start | Phase::Deciding(_) | Phase::Answered | Phase::Rejected => false,
        }
    }

    /// Tells whether [`Self::hurry`] would decide: only in duplex mode can a body follow its pick.
    #[must_use]
    pub fn can_hurry(&self) -> bool {
        matches!(self.phase, Phase::Gathering(_)) && self.modes.request == Mode::Duplex
    }

    /// Returns the body messages that came after the end of a body and were ignored.
    #[must_use]
    pub fn duplicates(&self) -> u64 {
        self.duplicates
    }

    /// Returns the request's `x-request-id`, once it has come.
    #[must_use]
    pub fn request_id(&self) -> &str {
        &self.request_id
    }

    /// Returns the client's W3C trace context.
    #[must_use]
    pub fn traceparent(&self) -> Option<&str> {
        self.traceparent.as_deref()
    }

    /// Takes a message of Envoy.
    pub fn on(&mut self, message: pb::ProcessingRequest) {
        if message.observability_mode {
            return;
        }
        if let Some(config) = message.protocol_config {
            self.envoy = true;
            self.modes = Modes {
                request: Mode::from(config.request_body_mode),
                response: Mode::from(config.response_body_mode),
            };
        }
        // Messages without a request are of a newer protocol (flow control, for one): they need no answer.
        match message.request {
            Some(Request::RequestHeaders(headers)) => {
                self.on_request_headers(&headers, message.metadata_context.as_ref());
            }
            Some(Request::RequestBody(body)) => self.on_request_body(body),
            Some(Request::RequestTrailers(_)) => self.on_request_trailers(),
            Some(Request::ResponseHeaders(headers)) => {
                let served = served_endpoint(
                    message.metadata_context.as_ref(),
                    message.attributes.get(ATTRIBUTES),
                );
                self.on_response_headers(&headers, served);
            }
            Some(Request::ResponseBody(body)) => self.on_response_body(body),
            Some(Request::ResponseTrailers(_)) => self.on_response_trailers(),
            None => {}
        }
    }

    /// Takes the half-close of the stream.
    ///
    /// Envoy half-closes when the client has gone. A peer that only asks for a pick half-closes right after the
    /// request and waits for both the pick and our end of the stream.
    pub fn on_half_close(&mut self) {
        match &self.phase {
            Phase::Gathering(_) if self.envoy => {
                self.effects.push_back(Effect::Close(Close::Truncated));
            }
            Phase::Gathering(_) => {
                self.decide(BodyEnd::Chunk);
                self.effects.push_back(Effect::Close(Close::Done));
            }
            Phase::Start
            | Phase::Deciding(_)
            | Phase::Passing
            | Phase::Answered
            | Phase::Rejected => {
                self.effects.push_back(Effect::Close(Close::Done));
            }
        }
    }

    /// Decides on what is known, if the body can follow the pick.
    pub fn hurry(&mut self) {
        if self.can_hurry() {
            self.decide(BodyEnd::Open);
        }
    }

    /// Gives up on a body that has stopped coming.
    pub fn on_stalled_body(&mut self) {
        if self.awaits_body() {
            self.reject(Rejection::Stalled);
        }
    }

    /// Refuses a body that is larger than the limit.
    pub fn on_oversized(&mut self) {
        self.reject(Rejection::TooLarge(self.settings.max_body_bytes));
    }

    /// Answers [`Effect::Schedule`] with a pick.
    pub fn scheduled(&mut self, routing: Routing) {
        let Phase::Deciding(mut held) = std::mem::replace(&mut self.phase, Phase::Answered) else {
            return;
        };
        // Nobody else has it any more, so this is no copy.
        held.chunks.extend(held.shared.take().filter(|body| !body.is_empty()).map(Vec::from));
        match held.carrier {
            Carrier::Headers => self.send(reply::pick(&routing, held.remove)),
            Carrier::Body => self.send(reply::pick_on_body(&routing, held.remove)),
            Carrier::Trailers => self.send(reply::pick_on_trailers(&routing)),
        }
        self.explanation = routing.explanation;
        match held.end {
            BodyEnd::Absent => {}
            BodyEnd::Chunk => self.echo(Side::Request, held.chunks, true),
            BodyEnd::Trailers => {
                self.echo(Side::Request, held.chunks, false);
                self.send(reply::trailers(Side::Request));
            }
            BodyEnd::Open => {
                self.echo(Side::Request, held.chunks, false);
                self.phase = Phase::Passing;
            }
        }
    }

    /// Answers [`Effect::Schedule`] with a refusal.
    pub fn refused(&mut self, refusal: Refusal) {
        self.phase = Phase::Rejected;
        self.send(reply::reject(&Rejection::Refused(refusal), self.settings.errors));
    }

    /// Returns what is known of a request whose stream has ended; `None` if it was finished before.
    #[must_use]
    pub fn abandoned(&mut self) -> Option<Outcome> {
        if self.finished {
            return None;
        }
        self.finished = true;
        let observed = self.modes.response != Mode::None;
        let unobserved =
            (!self.envoy && !self.answer.started) || (self.answer.started && !observed);
        Some(self.outcome(if unobserved { Ending::Unobserved } else { Ending::Aborted }))
    }

    fn on_request_headers(&mut self, headers: &pb::HttpHeaders, metadata: Option<&Metadata>) {
        if !matches!(self.phase, Phase::Start) {
            self.duplicates += 1;
            return;
        }
        let mut head = Head {
            request: InferenceRequest {
                subset: subset_hint(metadata).filter(|_| self.settings.use_subset),
                ..Default::default()
            },
            ..Head::default()
        };
        let (mut path, mut content_type, mut encoding) = (&b""[..], None, None);
        let mut key_rank = usize::MAX;
        for (name, value) in entries(headers.headers.as_ref()) {
            match name {
                ":path" => path = value,
                "x-original-path" | "x-forwarded-path" if path.is_empty() => path = value,
                "content-type" => content_type = Some(value),
                "content-encoding" => encoding = Some(value),
                "content-length" => {
                    head.content_length =
                        std::str::from_utf8(value).ok().and_then(|v| v.parse().ok());
                }
                "x-request-id" => head.request.id = text(value),
                "x-llm-d-inference-objective" => head.request.objective = Some(text(value)),
                // The older name; the newer one is the stronger.
                "x-gateway-inference-objective" => {
                    head.request.objective.get_or_insert_with(|| text(value));
                }
                "traceparent" => self.traceparent = Some(text(value)),
                _ => {}
            }
            if is_control(name) {
                head.remove.push(name.to_owned());
            }
            if let Some(rank) =
                self.settings.conversation_headers.iter().position(|header| header == name)
                && rank < key_rank
                && !value.is_empty()
            {
                key_rank = rank;
                head.header_key =
                    Some(Conversation::named(identity(value), KeySource::Header(name.to_owned())));
            }
        }
        self.request_id.clone_from(&head.request.id);
        let reader = RequestReader::new(path, content_type, encoding, &self.settings.read);
        let no_body = headers.end_of_stream;
        let limit = self.settings.max_body_bytes;
        if !no_body && head.content_length.is_some_and(|length| length > limit) {
            self.on_oversized();
            return;
        }
        if no_body || is_embedding(path) {
            // Nothing is generated.
            head.request.max_tokens = Some(0);
        }
        head.path = self.settings.keep_bodies.then(|| text(path));
        let gathering = Gathering { head, reader, chunks: Vec::new() };
        self.phase = Phase::Gathering(Box::new(gathering));
        match self.modes.request {
            _ if no_body => self.decide(BodyEnd::Absent),
            Mode::None => self.decide(BodyEnd::Absent),
            // Envoy sends the body only after this answer, and waits for an answer to each chunk: too late to read.
            Mode::Streamed => self.decide(BodyEnd::Open),
            Mode::Buffered => self.send(reply::request_headers()),
            Mode::Duplex => {}
        }
    }

    fn on_request_body(&mut self, body: pb::HttpBody) {
        if self.awaits_body() || matches!(self.phase, Phase::Gathering(_)) {
            self.received += body.body.len() as u64;
            if self.received > self.settings.max_body_bytes {
                self.on_oversized();
                return;
            }
        }
        match &mut self.phase {
            Phase::Gathering(gathering) => {
                gathering.reader.push(&body.body);
                match (self.modes.request, gathering.chunks.last_mut()) {
                    // What is read again is held in one piece; it is cut as it goes out.
                    (_, Some(one)) if self.settings.keep_bodies => {
                        one.extend_from_slice(&body.body);
                    }
                    (_, None) if self.settings.keep_bodies => gathering.chunks.push(body.body),
                    (Mode::Duplex, _) => hold(&mut gathering.chunks, body.body),
                    (Mode::None | Mode::Streamed | Mode::Buffered, _) => {}
                }
                if body.end_of_stream || self.modes.request == Mode::Buffered {
                    self.decide(BodyEnd::Chunk);
                }
            }
            Phase::Passing => {
                self.pass(body.body, body.end_of_stream);
                if body.end_of_stream {
                    self.phase = Phase::Answered;
                }
            }
            // A gateway that does not show us headers: there is nothing to set a pick on.
            Phase::Start => self.pass(body.body, body.end_of_stream),
            // Envoy 1.35 and later can deliver a large body's last chunk twice; the first one counted.
            Phase::Deciding(_) | Phase::Answered | Phase::Rejected => self.duplicates += 1,
        }
    }

    /// Answers a chunk of the request's body that goes on as it is.
    fn pass(&mut self, bytes: Vec<u8>, end: bool) {
        match self.modes.request {
            Mode::Duplex => self.echo(Side::Request, vec![bytes], end),
            Mode::Streamed | Mode::Buffered | Mode::None => {
                self.send(reply::unchanged(Side::Request));
            }
        }
    }

    fn on_request_trailers(&mut self) {
        match self.phase {
            Phase::Gathering(_) => self.decide(BodyEnd::Trailers),
            Phase::Passing => {
                self.phase = Phase::Answered;
                self.send(reply::trailers(Side::Request));
            }
            Phase::Start | Phase::Answered => self.send(reply::trailers(Side::Request)),
            Phase::Deciding(_) | Phase::Rejected => {}
        }
    }

    fn on_response_headers(&mut self, headers: &pb::HttpHeaders, served: Option<SocketAddr>) {
        if matches!(self.phase, Phase::Rejected) {
            return;
        }
        // A local reply can come before the pick; then there is nothing to pick for any more.
        if matches!(self.phase, Phase::Start | Phase::Gathering(_)) {
            self.phase = Phase::Answered;
        }
        let (mut content_type, mut encoding) = (None, None);
        for (name, value) in entries(headers.headers.as_ref()) {
            match name {
                ":status" => {
                    self.answer.status =
                        std::str::from_utf8(value).ok().and_then(|v| v.parse().ok());
                }
                "content-type" => content_type = Some(value),
                "content-encoding" => encoding = Some(value),
                _ => {}
            }
        }
        self.answer.started = true;
        self.answer.served = served;
        if self.modes.response != Mode::None {
            self.answer.reader = Some(ResponseReader::new(
                content_type,
                encoding,
                self.settings.read.max_decoded_bytes,
            ));
        }
        let explanation = std::mem::take(&mut self.explanation);
        self.send(reply::response_headers(explanation));
        if headers.end_of_stream {
            self.finish();
        }
    }

    fn on_response_body(&mut self, body: pb::HttpBody) {
        if matches!(self.phase, Phase::Rejected) {
            return;
        }
        if self.answer.ended {
            self.duplicates += 1;
            return;
        }
        if let Some(reader) = &mut self.answer.reader {
            reader.push(&body.body);
            if !self.answer.first_token && reader.first_token() {
                self.answer.first_token = true;
                self.effects.push_back(Effect::FirstToken);
            }
        }
        match self.modes.response {
            Mode::Duplex => self.echo(Side::Response, vec![body.body], body.end_of_stream),
            Mode::Streamed | Mode::Buffered | Mode::None => {
                self.send(reply::unchanged(Side::Response));
            }
        }
        if body.end_of_stream {
            self.finish();
        }
    }

    fn on_response_trailers(&mut self) {
        if matches!(self.phase, Phase::Rejected) {
            return;
        }
        self.send(reply::trailers(Side::Response));
        self.finish();
    }

    /// Asks for a decision on the request that was gathered.
    fn decide(&mut self, end: BodyEnd) {
        let Phase::Gathering(gathering) = std::mem::replace(&mut self.phase, Phase::Start) else {
            return;
        };
        let Gathering { head, mut reader, mut chunks } = *gathering;
        let Head { mut request, header_key, content_length, remove, path } = head;
        let whole = matches!(end, BodyEnd::Chunk | BodyEnd::Trailers);
        let reading = reader.reading(if whole { End::Whole } else { End::Partial });
        let body = match (&reading.completeness, end) {
            (_, BodyEnd::Absent) => "none",
            (Completeness::Whole, _) => "whole",
            (Completeness::Partial, _) => "partial",
            (Completeness::Unreadable(why), _) => why.as_str(),
        };
        request.prompt = reading.prompt();
        if !whole || matches!(reading.completeness, Completeness::Unreadable(_)) {
            // What was not read weighs as much as it is long.
            let length = content_length.unwrap_or(0).max(self.received);
            request.prompt.text_bytes = request.prompt.text_bytes.max(length);
            request.prompt.unread = true;
        }
        request.max_tokens = request.max_tokens.or(reading.max_tokens);
        request.conversation = header_key.or_else(|| body_conversation(&reading));
        request.model = reading.model;
        (request.text, request.salt) = (reading.text, reading.salt);
        // In a buffered mode the headers are answered already, so the body's answer carries the pick.
        let (carrier, end) = match (self.modes.request, end) {
            (Mode::Buffered, BodyEnd::Chunk) => (Carrier::Body, BodyEnd::Absent),
            (Mode::Buffered, BodyEnd::Trailers) => (Carrier::Trailers, BodyEnd::Absent),
            _ => (Carrier::Headers, end),
        };
        let bytes = self.received + reader.kept_bytes();
        let is_told = body == "whole" && self.received > 0 && reader.reads();
        let path = path.filter(|_| is_told);
        let mut shared = None;
        let prompt = path.map(|path| {
            let body = reader.take_decoded().map_or_else(
                || shared.insert(Bytes::from(chunks.pop().unwrap_or_default())).clone(),
                Bytes::from,
            );
            Prompt { path, body }
        });
        self.phase = Phase::Deciding(Held { carrier, chunks, shared, bytes, end, remove });
        self.effects.push_back(Effect::Schedule(Box::new(ToSchedule { request, body, prompt })));
    }

    fn reject(&mut self, rejection: Rejection) {
        self.phase = Phase::Rejected;
        self.send(reply::reject(&rejection, self.settings.errors));
        self.effects.push_back(Effect::Rejected(rejection));
    }

    fn finish(&mut self) {
        self.answer.ended = true;
        if !self.finished {
            self.finished = true;
            let outcome = self.outcome(Ending::Complete);
            self.effects.push_back(Effect::Finish(outcome));
        }
    }

    fn outcome(&mut self, ending: Ending) -> Outcome {
        let usage = self.answer.reader.as_mut().map(ResponseReader::finish).unwrap_or_default();
        Outcome { ending, status: self.answer.status, served: self.answer.served, usage }
    }

    /// Sends chunks back, each at most [`reply::CHUNK`] bytes; the last one ends the stream if `end`.
    fn echo(&mut self, side: Side, chunks: Vec<Vec<u8>>, end: bool) {
        let last = chunks.len().saturating_sub(1);
        if chunks.is_empty() && end {
            self.send(reply::streamed(side, Vec::new(), true));
        }
        for (i, chunk) in chunks.into_iter().enumerate() {
            let end = end && i == last;
            if chunk.len() <= reply::CHUNK {
                self.send(reply::streamed(side, chunk, end));
                continue;
            }
            let mut pieces = chunk.chunks(reply::CHUNK).peekable();
            while let Some(piece) = pieces.next() {
                let end = end && pieces.peek().is_none();
                self.send(reply::streamed(side, piece.to_vec(), end));
            }
        }
    }

    fn send(&mut self, message: pb::ProcessingResponse) {
        self.queued += reply::request_bytes(&message);
        self.effects.push_back(Effect::Send(Box::new(message)));
    }
}

impl From<i32> for Mode {
    /// Reads Envoy's `BodySendMode`; a mode that is not known is taken for a duplex one, as newer ones are.
    fn from(mode: i32) -> Self {
        match mode {
            0 => Self::None,
            1 => Self::Streamed,
            2 | 3 => Self::Buffered,
            _ => Self::Duplex,
        }
    }
}

/// Holds a chunk for later, joining small ones: a message costs more than a copy of a few kilobytes.
fn hold(chunks: &mut Vec<Vec<u8>>, chunk: Vec<u8>) {
    match chunks.last_mut() {
        Some(last) if last.len() + chunk.len() <= reply::CHUNK => last.extend_from_slice(&chunk),
        Some(_) if chunk.is_empty() => {}
        Some(_) | None => chunks.push(chunk),
    }
}

/// Returns the conversation that a body names, or that its opening stands for.
#[must_use]
pub fn body_conversation(reading: &Reading) -> Option<Conversation> {
    match &reading.key {
        Some(BodyKey::PromptCacheKey(id)) => {
            Some(Conversation::named(identity(id.as_bytes()), KeySource::Field("prompt_cache_key")))
        }
        Some(BodyKey::User(id)) => {
            Some(Conversation::named(identity(id.as_bytes()), KeySource::Field("user")))
        }
        Some(BodyKey::PreviousResponseId(id)) => {
            Some(Conversation::named(identity(id.as_bytes()), KeySource::PreviousResponse))
        }
        None => reading.opening.map(Conversation::opening),
    }
}

/// Tells whether a path is one of embeddings.
fn is_embedding(path: &[u8]) -> bool {
    let path = path.split(|&byte| byte == b'?').next().unwrap_or_default();
    path.trim_ascii_end().ends_with(b"/embeddings") || path.ends_with(b"/embeddings/")
}

/// Makes an identity that is safe in a header and a log line: the value itself, or its hash.
fn identity(value: &[u8]) -> String {
    const LONGEST: usize = 128;
    match std::str::from_utf8(value) {
        Ok(text) if value.len() <= LONGEST && value.iter().all(u8::is_ascii_graphic) => {
            text.to_owned()
        }
        Ok(_) | Err(_) => format!("hash-{:016x}", crate::index::hash::hash(value)),
    }
}

/// Tells whether a header steers pickers or explains picks, so that a client's copy must not reach the engine.
fn is_control(name: &str) -> bool {
    const PREFIXES: [&str; 4] =
        ["x-llm-d-", "x-gateway-inference-", "x-gateway-model-", "x-gateway-destination-endpoint-"];
    const NAMES: [&str; 13] = [
        "x-prefiller-host-port",
        "x-prefiller-url",
        "x-encoder-hosts-ports",
        "x-kv-cache-source-host-port",
        "x-data-parallel-endpoint",
        "x-slo-ttft-ms",
        "x-slo-tpot-ms",
        "epp-profile",
        "test-epp-endpoint-selection",
        "x-session-token",
        "x-routed-to",
        "x-route-reason",
        "x-route-policy",
    ];
    PREFIXES.iter().any(|prefix| name.starts_with(prefix)) || NAMES.contains(&name)
}

/// Yields names and values; Envoy fills `raw_value`, others `value`.
fn entries(headers: Option<&HeaderMap>) -> impl Iterator<Item = (&str, &[u8])> {
    headers.into_iter().flat_map(|map| &map.headers).map(|header| {
        let raw = header.raw_value.as_slice();
        (header.key.as_str(), if raw.is_empty() { header.value.as_bytes() } else { raw })
    })
}

fn text(value: &[u8]) -> String {
    String::from_utf8_lossy(value).into_owned()
}

/// Reads `x-gateway-destination-endpoint-subset` (proposal 004): a list, or a string with commas as Envoy's
/// `header_to_metadata` makes it. An address alone stands for all its ports, as in the conformance suite; what is
/// neither matches nothing.
fn subset_hint(metadata: Option<&Metadata>) -> Option<Vec<SocketAddr>> {
    let hint = metadata?
        .filter_metadata
        .get("envoy.lb.subset_hint")?
        .fields
        .get("x-gateway-destination-endpoint-subset")?;
    let addresses = |text: &str| -> Vec<SocketAddr> {
        let any_port = |entry: &str| {
            let ip = entry.strip_prefix('[').and_then(|it| it.strip_suffix(']')).unwrap_or(entry);
            Some(SocketAddr::new(ip.parse().ok()?, 0))
        };
        let entries = text.split(',').map(str::trim);
        entries.filter_map(|entry| entry.parse().ok().or_else(|| any_port(entry))).collect()
    };
    match hint.kind.as_ref()? {
        Kind::StringValue(text) => Some(addresses(text)),
        Kind::ListValue(list) => {
            Some(list.values.iter().filter_map(string).flat_map(addresses).collect())
        }
        Kind::NullValue(_) | Kind::NumberValue(_) | Kind::BoolValue(_) | Kind::StructValue(_) => {
            Some(Vec::new())
        }
    }
}

/// Reads which endpoint Envoy used: the served-endpoint metadata, or the attribute `upstream.address`.
fn served_endpoint(metadata: Option<&Metadata>, attributes: Option<&Struct>) -> Option<SocketAddr> {
    let served = metadata
        .and_then(|metadata| metadata.filter_metadata.get(reply::LB_NAMESPACE))
        .and_then(|lb| lb.fields.get("x-gateway-destination-endpoint-served"))
        .or_else(|| attributes?.fields.get("upstream.address"))
        .and_then(string);
    served?.trim().parse().ok()
}

fn string(value: &Value) -> Option<&str> {
    match value.kind.as_ref()? {
        Kind::StringValue(text) => Some(text),
        Kind::NullValue(_)
        | Kind::NumberValue(_)
        | Kind::BoolValue(_)
        | Kind::StructValue(_)
        | Kind::ListValue(_) => None,
    }
}

#[cfg(test)]
mod tests;
