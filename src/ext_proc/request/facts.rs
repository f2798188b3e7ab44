//! Tells the facts a route depends on from the rest of a body: one schema, with its places, for all known APIs.

use std::mem;
use std::sync::Arc;

use super::opening::{Opening, PROMPT_OPENING_BYTES, Role, SCALAR_END, TEXT_END, Unit, bracket};
use super::{BodyKey, Completeness, Reading};
use crate::ext_proc::json::{self, Kept, Kind, Visitor};
use crate::index::block::{self, BlockKey, ByteChain, Identity};
use crate::index::hash;
use crate::pool::TextBlocks;

/// Longest model name that is kept: the Gateway API's own limit for one.
const MODEL_BYTES: usize = 256;

/// Longest session key that is kept as it is; a longer one is replaced by its hash.
const KEY_BYTES: usize = 512;

/// Longest role that is told apart.
const ROLE_BYTES: usize = 16;

/// Where a value sits in the schema shared by all known APIs.
#[derive(Debug, Clone, Copy)]
pub(super) enum Place {
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
pub(super) enum Limit {
    MaxCompletionTokens,
    MaxTokens,
    MaxOutputTokens,
    Predict,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Session {
    PromptCacheKey,
    User,
    PreviousResponseId,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum System {
    /// `system` of the Messages API.
    System,
    /// `instructions` of the Responses API.
    Instructions,
}

/// What was learnt from the document so far.
pub(super) struct Facts {
    use_user_field: bool,
    pub(super) is_object: bool,
    model: Option<String>,
    text_bytes: u64,
    messages: u64,
    token_ids: u64,
    media: u64,
    limits: [Option<u64>; 4],
    sessions: [Option<String>; 3],
    opening: Opening,
    chain: Option<Chain>,
    /// The role of the running message; it may come after the content.
    role: Role,
    /// Whether the running array gave token ids: it is one prompt then.
    in_token_ids: bool,
    kept: Kept,
    unit: Unit,
}

/// The text of the prompt as it comes, in blocks.
struct Chain {
    size: u32,
    blocks: ByteChain,
    bytes: u64,
    tools: u64,
    /// Whether the running member at the top level is the tools.
    in_tools: bool,
}

impl Chain {
    fn new(size: u32) -> Self {
        // What the prompt is for may come after it, so it is mixed in at the end.
        Self {
            size,
            blocks: ByteChain::new(BlockKey(0), size),
            bytes: 0,
            tools: 0,
            in_tools: false,
        }
    }

    fn push(&mut self, bytes: &[u8]) {
        self.blocks.push(bytes);
        self.bytes += bytes.len() as u64;
    }

    /// Templates put tools first, wherever a body has them: they are part of every block's name instead.
    fn named(&self, model: Option<&str>, salt: Option<u64>, tools: Option<u64>) -> TextBlocks {
        let identity = Identity { model: model.unwrap_or_default(), adapter: None, salt: None };
        let root = [salt, tools]
            .iter()
            .fold(identity.root(block::Unit::Bytes, self.size).0, |root, part| {
                part.map_or(root.rotate_left(1), |part| hash::mix(root, part))
            });
        let keys = self.blocks.keys().iter().map(|key| BlockKey(hash::mix(root, key.0)));
        let bytes = self.bytes + self.tools;
        TextBlocks { keys: keys.collect(), block: self.size, head: self.tools, bytes }
    }
}

impl Facts {
    pub(super) fn new(use_user_field: bool, block_bytes: u32) -> Self {
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
            chain: (block_bytes > 0).then(|| Chain::new(block_bytes)),
            role: Role::Other,
            in_token_ids: false,
            kept: Kept::default(),
            unit: Unit::default(),
        }
    }

    pub(super) fn reading(&self, completeness: Completeness) -> Reading {
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
            // Equal texts around other images are other prompts.
            text: self
                .chain
                .as_ref()
                .filter(|_| completeness == Completeness::Whole && self.media == 0)
                .map(|chain| {
                    let Opening { cache_salt, tools, .. } = self.opening;
                    Arc::new(chain.named(self.model.as_deref(), cache_salt, tools))
                }),
            salt: self.opening.cache_salt,
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
        if let Some(chain) = &mut self.chain {
            chain.in_tools = matches!(place, Place::Tools);
        }
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
                self.unit.begin(if self.opening.is_open() { u64::MAX } else { 0 });
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
        match &mut self.chain {
            Some(chain) if chain.in_tools => chain.tools += text.len() as u64,
            Some(chain) => chain.push(text),
            None => {}
        }
    }

    /// Ends a text of the prompt: `ab` and `c` are not `a` and `bc`.
    fn end_text(&mut self, mark: u8) {
        if let Some(chain) = self.chain.as_mut().filter(|chain| !chain.in_tools) {
            chain.push(&[mark]);
        }
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
            Place::Input => {
                self.end_text(TEXT_END);
                self.unit.mark(TEXT_END);
                self.end_prompt();
            }
            Place::Media => {
                self.media += 1;
                self.unit.mark(TEXT_END);
            }
            Place::System(_) | Place::Tools | Place::Content | Place::Verbatim => {
                self.end_text(TEXT_END);
                self.unit.mark(TEXT_END);
            }
            Place::CacheSalt | Place::MediaData => self.unit.mark(TEXT_END),
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
                if token.first().is_some_and(|byte| !byte.is_ascii_alphabetic()) {
                    self.in_token_ids = true;
                    self.token_ids += 1;
                    self.unit.add_token_id(token);
                    if let Some(chain) = &mut self.chain {
                        chain.push(token);
                        chain.push(&[SCALAR_END]);
                    }
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
