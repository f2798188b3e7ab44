//! Splits an event stream into the data of its events, whatever the chunks, and holds none of it.

use std::mem;

use memchr::memchr2;

/// Splits an event stream, cut at any byte, into the data of its events
/// (<https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream>).
#[derive(Default)]
pub(super) struct Lines {
    state: LineState,
    /// A line feed that comes next belongs to the line end before it.
    after_return: bool,
    /// The event has a data line already; a second one goes on after a line feed.
    has_data: bool,
}

#[derive(Clone, Copy)]
enum LineState {
    /// So many bytes of [`DATA_FIELD`] have come.
    Field(usize),
    /// One space may follow the colon.
    Space,
    Data,
    Ignored,
}

impl Default for LineState {
    fn default() -> Self {
        Self::Field(0)
    }
}

/// What a piece of the stream is to its event.
pub(super) enum Line<'a> {
    Data(&'a [u8]),
    EventEnd,
}

const DATA_FIELD: &[u8] = b"data:";

impl Lines {
    pub(super) fn read(&mut self, piece: &[u8], mut each: impl FnMut(Line<'_>)) {
        let mut rest = piece;
        while let Some(&byte) = rest.first() {
            if mem::take(&mut self.after_return) && byte == b'\n' {
                rest = &rest[1..];
                continue;
            }
            let used = match self.state {
                LineState::Field(0) if byte == b'\r' || byte == b'\n' => {
                    self.end_line(byte);
                    self.has_data = false;
                    each(Line::EventEnd);
                    1
                }
                LineState::Field(matched) if byte == DATA_FIELD[matched] => {
                    self.state = LineState::Field(matched + 1);
                    if matched + 1 == DATA_FIELD.len() {
                        self.state = LineState::Space;
                        if mem::replace(&mut self.has_data, true) {
                            each(Line::Data(b"\n"));
                        }
                    }
                    1
                }
                LineState::Field(_) => {
                    self.state = LineState::Ignored;
                    0
                }
                LineState::Space => {
                    self.state = LineState::Data;
                    usize::from(byte == b' ')
                }
                LineState::Data | LineState::Ignored => {
                    let length = memchr2(b'\r', b'\n', rest);
                    let line = &rest[..length.unwrap_or(rest.len())];
                    if matches!(self.state, LineState::Data) && !line.is_empty() {
                        each(Line::Data(line));
                    }
                    if let Some(length) = length {
                        self.end_line(rest[length]);
                    }
                    line.len() + usize::from(length.is_some())
                }
            };
            rest = &rest[used..];
        }
    }

    fn end_line(&mut self, end: u8) {
        self.state = LineState::Field(0);
        self.after_return = end == b'\r';
    }
}
