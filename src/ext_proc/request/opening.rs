//! Hashes the stable opening of a conversation, so that its later requests can be sent where the first one went.

use std::mem;

use xxhash_rust::xxh3::{Xxh3Default, xxh3_64};

use crate::ext_proc::json::Kind;

/// How much of a plain prompt, which has no first turn to stop at, makes up the opening.
///
/// Such a prompt grows at its end from call to call; hashed whole, it would never keep its opening.
/// One that is shorter than this does not keep it either, and has little cached text to lose.
pub(super) const PROMPT_OPENING_BYTES: u64 = 1024;

/// What a token id takes of [`PROMPT_OPENING_BYTES`]: about the text of one token.
pub(super) const TOKEN_ID_BYTES: u64 = 4;

/// The hashes of the opening's parts, kept apart so that the order of the members does not matter.
#[derive(Debug, Default)]
pub(super) struct Opening {
    pub(super) cache_salt: Option<u64>,
    pub(super) system: Option<u64>,
    pub(super) instructions: Option<u64>,
    pub(super) tools: Option<u64>,
    /// The system messages before the first user turn.
    preface: Option<u64>,
    first_turn: Option<u64>,
    has_first_turn: bool,
}

impl Opening {
    /// Whether the first user turn is still to come.
    pub(super) fn is_open(&self) -> bool {
        !self.has_first_turn
    }

    /// Forgets the turns: of a repeated member the last one counts.
    pub(super) fn restart_turns(&mut self) {
        self.preface = None;
        self.first_turn = None;
        self.has_first_turn = false;
    }

    pub(super) fn add_message(&mut self, role: Role, content: Option<u64>) {
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
            // An assistant's greeting is no part: some clients keep it out of later requests.
            Role::System | Role::Other => {}
        }
    }

    /// Returns `None` if there is no text to have in common with a later request.
    pub(super) fn hash(&self, model: Option<&str>) -> Option<u64> {
        let text = [self.system, self.instructions, self.preface, self.first_turn];
        text.iter().flatten().next()?;
        let model = model.map(|model| xxh3_64(model.as_bytes()));
        Some(combine([model, self.cache_salt, self.tools, Some(combine(text))]))
    }
}

/// Who says a message, as far as the opening depends on it.
#[derive(Debug, Clone, Copy)]
pub(super) enum Role {
    User,
    System,
    Other,
}

fn combine<const N: usize>(parts: [Option<u64>; N]) -> u64 {
    let bytes = parts.map(|part| part.unwrap_or_default().to_le_bytes());
    xxh3_64(bytes.as_flattened())
}

/// The hash of the running part of the opening; there is only one at a time.
#[derive(Default)]
pub(super) struct Unit {
    hash: Xxh3Default,
    /// How many bytes may still go in.
    room: u64,
    has_bytes: bool,
}

impl Unit {
    /// Starts a part of which the first `room` bytes count.
    pub(super) fn begin(&mut self, room: u64) {
        self.hash.reset();
        self.room = room;
        self.has_bytes = false;
    }

    /// Takes no more bytes.
    pub(super) fn pause(&mut self) {
        self.room = 0;
    }

    pub(super) fn add(&mut self, bytes: &[u8]) {
        let taken = usize::try_from(self.room).unwrap_or(usize::MAX).min(bytes.len());
        if taken > 0 {
            self.hash.update(&bytes[..taken]);
            self.room -= taken as u64;
            self.has_bytes = true;
        }
    }

    /// Adds a mark, which does not make the part a non-empty one.
    pub(super) fn mark(&mut self, mark: u8) {
        if self.room > 0 {
            self.hash.update(&[mark]);
        }
    }

    pub(super) fn add_token_id(&mut self, id: &[u8]) {
        if self.room > 0 {
            self.hash.update(id);
            self.hash.update(&[SCALAR_END]);
            self.room = self.room.saturating_sub(TOKEN_ID_BYTES);
            self.has_bytes = true;
        }
    }

    /// Ends the part; `None` if nothing was in it.
    pub(super) fn take(&mut self) -> Option<u64> {
        self.room = 0;
        mem::take(&mut self.has_bytes).then(|| self.hash.digest())
    }
}

/// Marks in the hashed opening where strings, names, numbers and containers end; no UTF-8 text holds these bytes.
pub(super) const TEXT_END: u8 = 0xff;
pub(super) const SCALAR_END: u8 = 0xfe;

/// The mark for the edge of a container in verbatim JSON.
pub(super) const fn bracket(kind: Kind, begins: bool) -> u8 {
    match (kind, begins) {
        (Kind::Object, true) => 0xf8,
        (Kind::Object, false) => 0xf9,
        (Kind::Array, true) => 0xfa,
        (Kind::Array, false) => 0xfb,
    }
}
