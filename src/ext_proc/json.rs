//! A push tokenizer for JSON: bodies pass by in chunks of any size, so it holds no tree, no text and no recursion.

use memchr::memchr2;

/// Levels of nesting a visitor gets to see; what lies deeper is only counted, so depth costs neither stack nor memory.
const VISIBLE_DEPTH: usize = 128;

/// Longest part of a name or scalar that is kept: longer than any field name or number a visitor asks for.
const HELD_BYTES: usize = 64;

/// Learns from the values of one document while they pass.
///
/// A visitor knows its schema as places: it says which place a member or an element takes,
/// and gets that place back with everything the value consists of.
pub(crate) trait Visitor {
    /// Where a value sits in the document.
    type Place: Copy;

    /// Returns the place of the value that follows `name` (decoded, cut at 64 bytes) in an object.
    fn member(&mut self, object: Self::Place, name: &[u8]) -> Self::Place;
    /// Returns the place of the elements of an array.
    fn element(&mut self, array: Self::Place) -> Self::Place;
    /// An object or array begins.
    fn begin(&mut self, at: Self::Place, kind: Kind);
    /// The object or array ends.
    fn end(&mut self, at: Self::Place, kind: Kind);
    /// The next decoded bytes of a string; how it is cut into pieces depends on the chunks.
    fn text(&mut self, at: Self::Place, piece: &[u8]);
    /// The string ends.
    fn text_end(&mut self, at: Self::Place);
    /// A number, literal or other bare word, cut at 64 bytes.
    fn scalar(&mut self, at: Self::Place, token: &[u8]);
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Object,
    Array,
}

/// How far a document has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Status {
    Running,
    /// One top-level value has ended, and only white space came after it.
    Complete,
    /// The structure is broken; the visitor hears nothing from there on.
    Malformed,
}

/// Cuts chunks of JSON text into calls of a [`Visitor`].
///
/// It is a reader and not a validator: bare words, control characters and invalid UTF-8 in strings pass,
/// and a lone surrogate escape decodes to its three bytes as if it were a character.
#[derive(Debug)]
pub(crate) struct Tokenizer<P> {
    state: State,
    role: Role,
    /// The place of the value that is expected or running.
    place: P,
    root: P,
    depth: usize,
    /// The places of the open containers, outermost first.
    places: [P; VISIBLE_DEPTH],
    /// One bit a level: set for an object.
    objects: u128,
    held: [u8; HELD_BYTES],
    held_len: usize,
    /// The code unit of a `\u` escape so far.
    unit: u16,
    /// A high surrogate whose partner may follow.
    high: Option<u16>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Start,
    /// The next byte of the byte order mark.
    Mark(u8),
    Value,
    FirstValue,
    Name,
    FirstName,
    Colon,
    AfterValue,
    Text,
    Escape,
    /// Hex digits of a `\u` escape still to come.
    Hex(u8),
    Bare,
    /// Below the visible depth.
    Deep,
    Complete,
    Malformed,
}

/// What the running string is.
#[derive(Debug, Clone, Copy)]
enum Role {
    Name,
    Value,
    Deep,
}

impl<P: Copy> Tokenizer<P> {
    pub(crate) fn new(root: P) -> Self {
        Self {
            state: State::Start,
            role: Role::Value,
            place: root,
            root,
            depth: 0,
            places: [root; VISIBLE_DEPTH],
            objects: 0,
            held: [0; HELD_BYTES],
            held_len: 0,
            unit: 0,
            high: None,
        }
    }

    /// Makes ready for the next document.
    pub(crate) fn restart(&mut self) {
        self.state = State::Start;
        self.place = self.root;
        self.depth = 0;
        self.held_len = 0;
        self.high = None;
    }

    pub(crate) fn status(&self) -> Status {
        if self.state == State::Complete {
            Status::Complete
        } else if self.state == State::Malformed {
            Status::Malformed
        } else {
            Status::Running
        }
    }

    pub(crate) fn push<V: Visitor<Place = P>>(&mut self, chunk: &[u8], visitor: &mut V) {
        let mut rest = chunk;
        while let Some(&byte) = rest.first() {
            let used = match self.state {
                State::Text => self.text(rest, visitor),
                State::Bare => self.bare(rest, visitor),
                State::Deep => self.deep(rest),
                State::Escape => self.escape(byte, visitor),
                State::Hex(left) => self.hex(byte, left, visitor),
                State::Malformed => return,
                State::Start
                | State::Mark(_)
                | State::Value
                | State::FirstValue
                | State::Name
                | State::FirstName
                | State::Colon
                | State::AfterValue
                | State::Complete => self.structure(byte, &rest[1..], visitor),
            };
            rest = &rest[used..];
        }
    }

    /// Takes one byte between values; a bare word's first byte is left for [`Self::bare`].
    fn structure<V: Visitor<Place = P>>(
        &mut self,
        byte: u8,
        after: &[u8],
        visitor: &mut V,
    ) -> usize {
        if matches!(byte, b' ' | b'\t' | b'\n' | b'\r') {
            return 1;
        }
        self.state = match (self.state, byte) {
            (State::Start, 0xef) => State::Mark(0xbb),
            (State::Mark(0xbb), 0xbb) => State::Mark(0xbf),
            (State::Mark(0xbf), 0xbf) => State::Value,
            (State::FirstValue, b']') => self.close(visitor),
            (State::Start | State::Value | State::FirstValue, _) => match byte {
                b'"' => self.open_text(Role::Value),
                b'{' => self.open(Kind::Object, visitor),
                b'[' => self.open(Kind::Array, visitor),
                b'-' | b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' => {
                    self.held_len = 0;
                    self.state = State::Bare;
                    return 0;
                }
                _ => State::Malformed,
            },
            (State::FirstName, b'}') => self.close(visitor),
            (State::FirstName | State::Name, b'"') => self.open_text(Role::Name),
            (State::Colon, b':') => State::Value,
            (State::AfterValue, b',' | b'}' | b']') => match (byte, self.kind()) {
                (b',', Kind::Object) => State::Name,
                (b',', Kind::Array) => {
                    self.place = visitor.element(self.places[self.depth - 1]);
                    State::Value
                }
                (b'}', Kind::Object) | (b']', Kind::Array) => self.close(visitor),
                _ => State::Malformed,
            },
            _ => State::Malformed,
        };
        // Compact JSON goes on with a string nearly always; taking its quote at once spares a fifth of the time.
        match (self.state, after.first()) {
            (State::Name, Some(b'"')) => self.state = self.open_text(Role::Name),
            (State::Value, Some(b'"')) => self.state = self.open_text(Role::Value),
            _ => return 1,
        }
        2
    }

    fn open<V: Visitor<Place = P>>(&mut self, kind: Kind, visitor: &mut V) -> State {
        if self.depth == VISIBLE_DEPTH {
            self.depth += 1;
            return State::Deep;
        }
        let bit = 1 << self.depth;
        self.places[self.depth] = self.place;
        self.depth += 1;
        visitor.begin(self.place, kind);
        match kind {
            Kind::Object => {
                self.objects |= bit;
                State::FirstName
            }
            Kind::Array => {
                self.objects &= !bit;
                self.place = visitor.element(self.place);
                State::FirstValue
            }
        }
    }

    fn close<V: Visitor<Place = P>>(&mut self, visitor: &mut V) -> State {
        let kind = self.kind();
        self.depth -= 1;
        visitor.end(self.places[self.depth], kind);
        self.after_value()
    }

    /// The kind of the innermost container; one is open whenever this is asked.
    fn kind(&self) -> Kind {
        if (self.objects >> (self.depth - 1)) & 1 == 1 { Kind::Object } else { Kind::Array }
    }

    fn after_value(&self) -> State {
        if self.depth == 0 { State::Complete } else { State::AfterValue }
    }

    fn open_text(&mut self, role: Role) -> State {
        self.role = role;
        self.held_len = 0;
        State::Text
    }

    /// Takes the bytes up to the next quote or backslash: nearly all bytes of a body go through here.
    fn text<V: Visitor<Place = P>>(&mut self, rest: &[u8], visitor: &mut V) -> usize {
        let length = text_length(rest);
        let (piece, after) = rest.split_at(length);
        let ends = after.first() == Some(&b'"');
        if ends || length > 0 {
            self.emit_lone_surrogate(visitor);
        }
        match self.role {
            // A name that lies whole in this chunk, as nearly all do, is not copied.
            Role::Name if ends && self.held_len == 0 => self.end_name(piece, visitor),
            Role::Name | Role::Value | Role::Deep => {
                if length > 0 {
                    self.emit(piece, visitor);
                }
                if ends {
                    self.end_text(visitor);
                }
            }
        }
        match after.first() {
            None => length,
            Some(b'"') => length + 1,
            Some(_) => {
                self.state = State::Escape;
                length + 1
            }
        }
    }

    fn end_text<V: Visitor<Place = P>>(&mut self, visitor: &mut V) {
        match self.role {
            Role::Name => {
                let held = self.held;
                self.end_name(&held[..self.held_len], visitor);
            }
            Role::Value => {
                visitor.text_end(self.place);
                self.state = self.after_value();
            }
            Role::Deep => self.state = State::Deep,
        }
    }

    fn end_name<V: Visitor<Place = P>>(&mut self, name: &[u8], visitor: &mut V) {
        let name = &name[..name.len().min(HELD_BYTES)];
        self.place = visitor.member(self.places[self.depth - 1], name);
        self.state = State::Colon;
    }

    fn emit<V: Visitor<Place = P>>(&mut self, piece: &[u8], visitor: &mut V) {
        match self.role {
            Role::Name => self.hold(piece),
            Role::Value => visitor.text(self.place, piece),
            Role::Deep => {}
        }
    }

    fn hold(&mut self, piece: &[u8]) {
        let length = piece.len().min(HELD_BYTES - self.held_len);
        self.held[self.held_len..][..length].copy_from_slice(&piece[..length]);
        self.held_len += length;
    }

    fn escape<V: Visitor<Place = P>>(&mut self, byte: u8, visitor: &mut V) -> usize {
        let decoded = match byte {
            b'u' => {
                self.unit = 0;
                self.state = State::Hex(4);
                return 1;
            }
            b'"' | b'\\' | b'/' => byte,
            b'n' => b'\n',
            b't' => b'\t',
            b'r' => b'\r',
            b'b' => 0x08,
            b'f' => 0x0c,
            _ => {
                self.state = State::Malformed;
                return 1;
            }
        };
        self.emit_lone_surrogate(visitor);
        self.emit(&[decoded], visitor);
        self.state = State::Text;
        1
    }

    fn hex<V: Visitor<Place = P>>(&mut self, byte: u8, left: u8, visitor: &mut V) -> usize {
        let digit = match byte {
            b'0'..=b'9' => byte - b'0',
            b'a'..=b'f' => byte - b'a' + 10,
            b'A'..=b'F' => byte - b'A' + 10,
            _ => {
                self.state = State::Malformed;
                return 1;
            }
        };
        self.unit = (self.unit << 4) | u16::from(digit);
        self.state = State::Hex(left - 1);
        if left == 1 {
            self.end_unit(visitor);
            self.state = State::Text;
        }
        1
    }

    fn end_unit<V: Visitor<Place = P>>(&mut self, visitor: &mut V) {
        if (0xd800..0xdc00).contains(&self.unit) {
            self.emit_lone_surrogate(visitor);
            self.high = Some(self.unit);
            return;
        }
        let units = self.high.take().into_iter().chain([self.unit]);
        for decoded in char::decode_utf16(units) {
            match decoded {
                Ok(character) => self.emit(character.encode_utf8(&mut [0; 4]).as_bytes(), visitor),
                Err(lone) => self.emit(&surrogate(lone.unpaired_surrogate()), visitor),
            }
        }
    }

    fn emit_lone_surrogate<V: Visitor<Place = P>>(&mut self, visitor: &mut V) {
        if let Some(high) = self.high.take() {
            self.emit(&surrogate(high), visitor);
        }
    }

    fn bare<V: Visitor<Place = P>>(&mut self, rest: &[u8], visitor: &mut V) -> usize {
        let is_bare =
            |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.');
        let length = rest.iter().position(|byte| !is_bare(byte));
        self.hold(&rest[..length.unwrap_or(rest.len())]);
        if length.is_some() {
            self.end_bare(visitor);
        }
        length.unwrap_or(rest.len())
    }

    fn end_bare<V: Visitor<Place = P>>(&mut self, visitor: &mut V) {
        visitor.scalar(self.place, &self.held[..self.held_len]);
        self.state = self.after_value();
    }

    /// Counts levels below the visible depth; only strings can hide a bracket.
    fn deep(&mut self, rest: &[u8]) -> usize {
        for (index, byte) in rest.iter().enumerate() {
            match byte {
                b'"' => {
                    self.state = self.open_text(Role::Deep);
                    return index + 1;
                }
                b'[' | b'{' => self.depth += 1,
                b']' | b'}' => {
                    self.depth -= 1;
                    if self.depth == VISIBLE_DEPTH {
                        self.state = State::AfterValue;
                        return index + 1;
                    }
                }
                _ => {}
            }
        }
        rest.len()
    }
}

/// Counts the bytes before the next quote or backslash.
///
/// Most strings are short, and for those a plain loop is faster than getting the wide search going.
fn text_length(rest: &[u8]) -> usize {
    let (head, tail) = rest.split_at(rest.len().min(16));
    match head.iter().position(|byte| matches!(byte, b'"' | b'\\')) {
        Some(length) => length,
        None => head.len() + memchr2(b'"', b'\\', tail).unwrap_or(tail.len()),
    }
}

/// The three bytes a surrogate code unit would have in UTF-8.
fn surrogate(unit: u16) -> [u8; 3] {
    let low_six = |bits: u16| 0x80 | (bits.to_le_bytes()[0] & 0x3f);
    [0xed, low_six(unit >> 6), low_six(unit)]
}

/// Reads a count; a sign, a fraction, an exponent or an overflow makes it unknown.
pub(crate) fn count(token: &[u8]) -> Option<u64> {
    let digits = token.iter().all(u8::is_ascii_digit);
    let text = std::str::from_utf8(token).ok().filter(|_| digits)?;
    text.parse().ok()
}

/// A short string put together from its pieces; one that is longer than its limit is not kept.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    bytes: Vec<u8>,
    too_long: bool,
}

impl Kept {
    pub(crate) fn clear(&mut self) {
        self.bytes.clear();
        self.too_long = false;
    }

    pub(crate) fn push(&mut self, piece: &[u8], limit: usize) {
        self.too_long |= self.bytes.len() + piece.len() > limit;
        if !self.too_long {
            self.bytes.extend_from_slice(piece);
        }
    }

    /// Returns the string unless it is too long.
    pub(crate) fn get(&self) -> Option<&[u8]> {
        (!self.too_long).then_some(&self.bytes)
    }

    /// Returns the string as text, with U+FFFD for what is not UTF-8; `None` if it is empty or too long.
    pub(crate) fn to_text(&self) -> Option<String> {
        let bytes = self.get().filter(|bytes| !bytes.is_empty())?;
        Some(String::from_utf8_lossy(bytes).into_owned())
    }
}

#[cfg(test)]
mod tests;
