//! Reads from a request body only what routing needs, while its chunks pass by, and never refuses one.

use std::fmt;
use std::mem;

use xxhash_rust::xxh3::{Xxh3Default, xxh3_64};

use super::inflate::{Inflate, Sink, Stopped};
use super::json::{self, Kept, Kind, Status, Tokenizer, Visitor};

/// Longest model name that is kept: the Gateway API's own limit for one.
const MODEL_BYTES: usize = 256;

/// Longest session key that is kept as it is; a longer one is replaced by its hash.
const KEY_BYTES: usize = 512;

/// Longest role that is told apart.
const ROLE_BYTES: usize = 16;

/// How much of a plain prompt, which has no first turn to stop at, makes up the opening.
///
/// Such a prompt grows at its end from call to call; hashed whole, it would never keep its opening.
const PROMPT_OPENING_BYTES: u64 = 1024;

/// What a token id takes of [`PROMPT_OPENING_BYTES`]: about the text of one token.
const TOKEN_ID_BYTES: u64 = 4;

/// Marks in the hashed opening where strings, names, numbers and containers end; no UTF-8 text holds these bytes.
const TEXT_END: u8 = 0xff;
const SCALAR_END: u8 = 0xfe;

/// The parts of the configuration that steer reading.
#[derive(Debug, Clone, Copy)]
pub struct ReadOptions {
    /// How many bytes of the decoded body are read at most.
    pub(crate) max_decoded_bytes: u64,
    /// Whether `user` names a session. It often names a whole application instead.
    pub(crate) use_user_field: bool,
}

/// Whether the body has more to come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
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
}

/// How much of the body stands behind a [`Reading`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Completeness {
    /// All of it, or all there is to know of a body that is not ours to read.
    Whole,
    /// What has come so far.
    Partial,
    /// What came before the fault, if anything.
    Unreadable(Why),
}

/// Why a body could not be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Why {
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
            Self::NotJson => "not_json",
            Self::Malformed => "malformed",
            Self::Encoding => "encoding",
            Self::TooLarge => "too_large",
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
pub(crate) enum BodyKey {
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
                facts: Facts::new(options.use_user_field),
            };
            let limit = options.max_decoded_bytes;
            Body::Read(Box::new(Inflate::new(content_encoding, limit, document)))
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

    /// Returns what is known so far; after [`End::Whole`], nothing more may be pushed.
    pub(crate) fn reading(&mut self, end: End) -> Reading {
        let inflate = match &mut self.body {
            Body::Unread(completeness) => return Reading::unread(*completeness, self.raw_bytes),
            Body::Read(inflate) => inflate,
        };
        if end == End::Whole {
            inflate.finish();
        }
        let Document { tokenizer, facts } = inflate.sink();
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
        f.debug_struct("RequestReader")
            .field("raw_bytes", &self.raw_bytes)
            .finish_non_exhaustive()
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
        }
    }
}

/// Whether the API behind `path` is one whose fields [`Facts`] knows; the names collide so little that one schema
/// serves all of them, and a request without a path as well.
fn has_known_fields(path: &[u8]) -> bool {
    let path = path.split(|&byte| byte == b'?').next().unwrap_or_default();
    let mut segments = path
        .rsplit(|&byte| byte == b'/')
        .skip_while(|segment| segment.is_empty());
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
}

impl Sink for Document {
    fn take(&mut self, piece: &[u8]) {
        self.tokenizer.push(piece, &mut self.facts);
    }
}

/// Where a value sits in the schema shared by all known APIs.
#[derive(Debug, Clone, Copy)]
enum Place {
    Skipped,
    Root,
    Model,
    CacheSalt,
    Limit(Limit),
    Session(Session),
    /// System text beside the messages: a string or a list of parts.
    System(System),
    /// Tool definitions, opaque but for their hash.
    Tools,
    Messages,
    Message,
    /// `prompt` and `input`: a string, token ids, a list of either, or a list of messages.
    Input,
    Role,
    /// What a message says, down to its parts, calls and results.
    Content,
    /// JSON that is rendered into the prompt as it stands.
    Verbatim,
    Media,
    MediaData,
}

/// The names of the answer's length limit, the binding one first.
#[derive(Debug, Clone, Copy)]
enum Limit {
    MaxCompletionTokens,
    MaxTokens,
    MaxOutputTokens,
    Predict,
}

#[derive(Debug, Clone, Copy)]
enum Session {
    PromptCacheKey,
    User,
    PreviousResponseId,
}

#[derive(Debug, Clone, Copy)]
enum System {
    /// `system` of the Messages API.
    System,
    /// `instructions` of the Responses API.
    Instructions,
}

#[derive(Debug, Clone, Copy)]
enum Role {
    User,
    System,
    Other,
}

/// What was learnt from the document so far.
struct Facts {
    use_user_field: bool,
    is_object: bool,
    model: Option<String>,
    text_bytes: u64,
    messages: u64,
    token_ids: u64,
    media: u64,
    limits: [Option<u64>; 4],
    sessions: [Option<String>; 3],
    opening: Opening,
    /// The role of the running message; it may come after the content.
    role: Role,
    /// Whether the running array gave token ids: it is one prompt then.
    in_token_ids: bool,
    kept: Kept,
    unit: Unit,
}

impl Facts {
    fn new(use_user_field: bool) -> Self {
        Self {
            use_user_field,
            is_object: false,
            model: None,
            text_bytes: 0,
            messages: 0,
            token_ids: 0,
            media: 0,
            limits: [None; 4],
            sessions: [const { None }; 3],
            opening: Opening::default(),
            role: Role::Other,
            in_token_ids: false,
            kept: Kept::default(),
            unit: Unit::default(),
        }
    }

    fn reading(&self, completeness: Completeness) -> Reading {
        let session = |session: Session| self.sessions[session as usize].clone();
        Reading {
            completeness,
            model: self.model.clone(),
            text_bytes: self.text_bytes,
            messages: self.messages,
            token_ids: self.token_ids,
            media: self.media,
            max_tokens: self.limits.into_iter().flatten().next(),
            key: session(Session::PromptCacheKey)
                .map(BodyKey::PromptCacheKey)
                .or_else(|| session(Session::User).map(BodyKey::User))
                .or_else(|| session(Session::PreviousResponseId).map(BodyKey::PreviousResponseId)),
            opening: self.opening.hash(self.model.as_deref()),
        }
    }

    fn root_member(&mut self, name: &[u8]) -> Place {
        let place = match name {
            b"model" => Place::Model,
            b"messages" => Place::Messages,
            b"prompt" | b"input" | b"token_ids" | b"input_ids" => Place::Input,
            b"system" => Place::System(System::System),
            b"instructions" => Place::System(System::Instructions),
            b"tools" | b"functions" => Place::Tools,
            b"cache_salt" => Place::CacheSalt,
            b"prompt_cache_key" => Place::Session(Session::PromptCacheKey),
            b"user" if self.use_user_field => Place::Session(Session::User),
            b"previous_response_id" => Place::Session(Session::PreviousResponseId),
            b"max_completion_tokens" => Place::Limit(Limit::MaxCompletionTokens),
            b"max_tokens" => Place::Limit(Limit::MaxTokens),
            b"max_output_tokens" => Place::Limit(Limit::MaxOutputTokens),
            b"n_predict" => Place::Limit(Limit::Predict),
            _ => Place::Skipped,
        };
        if matches!(place, Place::Messages | Place::Input) {
            self.opening.restart_turns();
            self.in_token_ids = false;
        }
        self.unit.begin(match name {
            b"prompt" | b"token_ids" | b"input_ids" => PROMPT_OPENING_BYTES,
            _ => u64::MAX,
        });
        place
    }

    /// Of a message only its content goes into the opening, so that the order of its members does not matter.
    fn message_member(&mut self, name: &[u8]) -> Place {
        match name {
            b"role" => Place::Role,
            b"content" => {
                self.unit
                    .begin(if self.opening.is_open() { u64::MAX } else { 0 });
                Place::Content
            }
            _ => {
                self.unit.pause();
                content_member(name)
            }
        }
    }

    fn begin_message(&mut self) {
        self.messages += 1;
        self.role = Role::Other;
        self.unit.begin(0);
    }

    fn end_message(&mut self) {
        let content = self.unit.take();
        self.opening.add_message(self.role, content);
    }

    fn end_prompt(&mut self) {
        self.messages += 1;
        let prompt = self.unit.take();
        self.opening.add_message(Role::User, prompt);
    }

    /// An array that gave ids itself is a prompt; one of strings or arrays is a batch of them.
    fn end_token_ids(&mut self) {
        if mem::take(&mut self.in_token_ids) {
            self.end_prompt();
        }
    }

    fn end_session(&mut self, session: Session) {
        let hash = self.unit.take();
        self.sessions[session as usize] = match self.kept.get() {
            Some(_) => self.kept.to_text(),
            None => hash.map(|hash| format!("{hash:016x}")),
        };
    }

    fn count_text(&mut self, text: &[u8]) {
        self.text_bytes += text.len() as u64;
        self.unit.add(text);
    }

    /// A string, object or array at the top level that is a part of the opening ends.
    fn end_part(&mut self, at: Place) {
        let part = match at {
            Place::CacheSalt => &mut self.opening.cache_salt,
            Place::System(System::System) => &mut self.opening.system,
            Place::System(System::Instructions) => &mut self.opening.instructions,
            Place::Tools => &mut self.opening.tools,
            Place::Skipped
            | Place::Root
            | Place::Model
            | Place::Limit(_)
            | Place::Session(_)
            | Place::Messages
            | Place::Message
            | Place::Input
            | Place::Role
            | Place::Content
            | Place::Verbatim
            | Place::Media
            | Place::MediaData => return,
        };
        *part = self.unit.take();
    }
}

impl Visitor for Facts {
    type Place = Place;

    fn member(&mut self, object: Place, name: &[u8]) -> Place {
        match object {
            Place::Root => self.root_member(name),
            Place::Message | Place::Input => self.message_member(name),
            Place::System(_) | Place::Content => content_member(name),
            Place::Tools | Place::Verbatim => {
                self.count_text(name);
                self.unit.mark(TEXT_END);
                Place::Verbatim
            }
            Place::Media => match name {
                b"url" | b"data" | b"file_data" | b"file_id" => Place::MediaData,
                _ => Place::Skipped,
            },
            Place::Skipped
            | Place::Model
            | Place::CacheSalt
            | Place::Limit(_)
            | Place::Session(_)
            | Place::Messages
            | Place::Role
            | Place::MediaData => Place::Skipped,
        }
    }

    fn element(&mut self, array: Place) -> Place {
        match array {
            Place::Messages => Place::Message,
            Place::Input => Place::Input,
            Place::System(_) | Place::Content => Place::Content,
            Place::Tools | Place::Verbatim => Place::Verbatim,
            Place::Skipped
            | Place::Root
            | Place::Model
            | Place::CacheSalt
            | Place::Limit(_)
            | Place::Session(_)
            | Place::Message
            | Place::Role
            | Place::Media
            | Place::MediaData => Place::Skipped,
        }
    }

    fn begin(&mut self, at: Place, kind: Kind) {
        match (at, kind) {
            (Place::Root, Kind::Object) => self.is_object = true,
            (Place::Message | Place::Input, Kind::Object) => self.begin_message(),
            (Place::Media, Kind::Object) => self.media += 1,
            (Place::Tools | Place::Verbatim, _) => self.unit.mark(bracket(kind, true)),
            _ => {}
        }
    }

    fn end(&mut self, at: Place, kind: Kind) {
        match (at, kind) {
            (Place::Message | Place::Input, Kind::Object) => self.end_message(),
            (Place::Input, Kind::Array) => self.end_token_ids(),
            (Place::Tools | Place::Verbatim, _) => self.unit.mark(bracket(kind, false)),
            _ => {}
        }
        self.end_part(at);
    }

    fn text(&mut self, at: Place, piece: &[u8]) {
        match at {
            Place::Input | Place::System(_) | Place::Tools | Place::Content | Place::Verbatim => {
                self.count_text(piece);
            }
            Place::CacheSalt | Place::Media | Place::MediaData => self.unit.add(piece),
            Place::Model => self.kept.push(piece, MODEL_BYTES),
            Place::Role => self.kept.push(piece, ROLE_BYTES),
            Place::Session(_) => {
                self.kept.push(piece, KEY_BYTES);
                self.unit.add(piece);
            }
            Place::Skipped | Place::Root | Place::Limit(_) | Place::Messages | Place::Message => {}
        }
    }

    fn text_end(&mut self, at: Place) {
        match at {
            Place::Model => self.model = self.kept.to_text(),
            Place::Role => {
                self.role = match self.kept.get() {
                    Some(b"user") => Role::User,
                    Some(b"system" | b"developer") => Role::System,
                    Some(_) | None => Role::Other,
                };
            }
            Place::Session(session) => self.end_session(session),
            Place::Input => self.end_prompt(),
            Place::Media => {
                self.media += 1;
                self.unit.mark(TEXT_END);
            }
            Place::CacheSalt
            | Place::System(_)
            | Place::Tools
            | Place::Content
            | Place::Verbatim
            | Place::MediaData => self.unit.mark(TEXT_END),
            Place::Skipped | Place::Root | Place::Limit(_) | Place::Messages | Place::Message => {}
        }
        self.kept.clear();
        self.end_part(at);
    }

    fn scalar(&mut self, at: Place, token: &[u8]) {
        match at {
            Place::Limit(limit) => {
                if let Some(tokens) = json::count(token) {
                    self.limits[limit as usize] = Some(tokens);
                }
            }
            Place::Input => {
                if token
                    .first()
                    .is_some_and(|byte| !byte.is_ascii_alphabetic())
                {
                    self.in_token_ids = true;
                    self.token_ids += 1;
                    self.unit.add_token_id(token);
                }
            }
            Place::Verbatim => {
                self.count_text(token);
                self.unit.mark(SCALAR_END);
            }
            Place::Skipped
            | Place::Root
            | Place::Model
            | Place::CacheSalt
            | Place::Session(_)
            | Place::System(_)
            | Place::Tools
            | Place::Messages
            | Place::Message
            | Place::Role
            | Place::Content
            | Place::Media
            | Place::MediaData => {}
        }
    }
}

/// The members of a message, a part, a tool call or a tool result, in the words of all known APIs.
fn content_member(name: &[u8]) -> Place {
    match name {
        b"content" | b"text" | b"output" | b"summary" => Place::Content,
        b"reasoning" | b"reasoning_content" | b"thinking" => Place::Content,
        b"tool_calls" | b"function_call" | b"function" | b"custom" | b"name" => Place::Content,
        b"arguments" | b"input" => Place::Verbatim,
        b"image_url" | b"audio_url" | b"video_url" | b"input_audio" => Place::Media,
        b"source" | b"file" | b"file_data" => Place::Media,
        _ => Place::Skipped,
    }
}

/// The hashes of the opening's parts, kept apart so that the order of the members does not matter.
#[derive(Debug, Default)]
struct Opening {
    cache_salt: Option<u64>,
    system: Option<u64>,
    instructions: Option<u64>,
    tools: Option<u64>,
    /// The system messages before the first user turn.
    preface: Option<u64>,
    first_turn: Option<u64>,
    has_first_turn: bool,
}

impl Opening {
    /// Whether the first user turn is still to come.
    fn is_open(&self) -> bool {
        !self.has_first_turn
    }

    /// Forgets the turns: of a repeated member the last one counts.
    fn restart_turns(&mut self) {
        self.preface = None;
        self.first_turn = None;
        self.has_first_turn = false;
    }

    fn add_message(&mut self, role: Role, content: Option<u64>) {
        if self.has_first_turn {
            return;
        }
        match role {
            Role::User => {
                self.first_turn = content;
                self.has_first_turn = true;
            }
            Role::System if content.is_some() => {
                self.preface = Some(combine([self.preface, content]));
            }
            // An answer to nothing is a client's habit, and no client keeps it from one conversation to the next.
            Role::System | Role::Other => {}
        }
    }

    /// Returns `None` if there is no text to have in common with a later request.
    fn hash(&self, model: Option<&str>) -> Option<u64> {
        let text = [
            self.system,
            self.instructions,
            self.preface,
            self.first_turn,
        ];
        text.iter().flatten().next()?;
        let model = model.map(|model| xxh3_64(model.as_bytes()));
        Some(combine([
            model,
            self.cache_salt,
            self.tools,
            Some(combine(text)),
        ]))
    }
}

fn combine<const N: usize>(parts: [Option<u64>; N]) -> u64 {
    let bytes = parts.map(|part| part.unwrap_or_default().to_le_bytes());
    xxh3_64(bytes.as_flattened())
}

/// The mark for the edge of a container in verbatim JSON.
const fn bracket(kind: Kind, begins: bool) -> u8 {
    match (kind, begins) {
        (Kind::Object, true) => 0xf8,
        (Kind::Object, false) => 0xf9,
        (Kind::Array, true) => 0xfa,
        (Kind::Array, false) => 0xfb,
    }
}

/// The hash of the running part of the opening; there is only one at a time.
#[derive(Default)]
struct Unit {
    hash: Xxh3Default,
    /// How many bytes may still go in.
    room: u64,
    is_empty: bool,
}

impl Unit {
    fn begin(&mut self, room: u64) {
        self.hash.reset();
        self.room = room;
        self.is_empty = true;
    }

    /// Takes no more bytes.
    fn pause(&mut self) {
        self.room = 0;
    }

    fn add(&mut self, bytes: &[u8]) {
        let taken = usize::try_from(self.room)
            .unwrap_or(usize::MAX)
            .min(bytes.len());
        if taken > 0 {
            self.hash.update(&bytes[..taken]);
            self.room -= taken as u64;
            self.is_empty = false;
        }
    }

    /// Adds a mark, which does not make the part a non-empty one.
    fn mark(&mut self, mark: u8) {
        if self.room > 0 {
            self.hash.update(&[mark]);
        }
    }

    fn add_token_id(&mut self, id: &[u8]) {
        if self.room > 0 {
            self.hash.update(id);
            self.hash.update(&[SCALAR_END]);
            self.room = self.room.saturating_sub(TOKEN_ID_BYTES);
            self.is_empty = false;
        }
    }

    /// Ends the part; `None` if nothing was in it.
    fn take(&mut self) -> Option<u64> {
        self.room = 0;
        let empty = mem::replace(&mut self.is_empty, true);
        (!empty).then(|| self.hash.digest())
    }
}

#[cfg(test)]
mod tests;
