//! The part of ZMTP 3.0 (ZeroMQ's wire protocol, rfc.zeromq.org/spec/23) that KV events come over: the subscriber's end
//! of PUB-SUB and the DEALER's of DEALER-ROUTER, without security, over TCP.
//!
//! Of our own, since what a header claims must not cost memory: the crates there are for it believe a frame that claims
//! a terabyte, which ends the process, and hide which connection a message came from.

use std::io;
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// Bytes asked of the socket at a time.
const READ: usize = 64 << 10;
/// The longest command taken: they carry a few short properties.
const COMMAND: usize = 4 << 10;
/// The most parts of a message: KV events have four at most.
const PARTS: usize = 16;

const MORE: u8 = 1;
const LONG: u8 = 2;
const IS_COMMAND: u8 = 4;

/// Which end of which pattern we are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// Takes messages whose first part begins with a prefix.
    Sub,
    /// Sends requests and takes any number of answers.
    Dealer,
}

impl Role {
    const fn name(self) -> &'static str {
        match self {
            Self::Sub => "SUB",
            Self::Dealer => "DEALER",
        }
    }

    fn talks_to(self, peer: &[u8]) -> bool {
        match self {
            Self::Sub => matches!(peer, b"PUB" | b"XPUB"),
            Self::Dealer => matches!(peer, b"ROUTER" | b"REP" | b"DEALER"),
        }
    }
}

/// Why a connection is of no use (any more).
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    /// The network's doing; an end without more words too.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The peer does not keep to the protocol, or speaks another.
    #[error("not the ZeroMQ peer wanted: {0}")]
    Peer(&'static str),
    /// A message exceeds the limit.
    #[error("a message of more than {0} bytes")]
    Size(usize),
}

/// One message: its parts.
pub(super) type Message = Vec<Vec<u8>>;

/// A connection after its handshake.
#[derive(Debug)]
pub(super) struct Connection {
    stream: TcpStream,
    decoder: Decoder,
}

impl Connection {
    /// Greets the peer of a new connection. No message may be longer than `limit` bytes.
    ///
    /// # Errors
    /// The connection broke, or the peer is another than expected.
    pub(super) async fn open(stream: TcpStream, role: Role, limit: usize) -> Result<Self, Error> {
        stream.set_nodelay(true)?;
        // A host that dies says nothing; a silent stream may be one of an idle engine.
        let alive = TcpKeepalive::new()
            .with_time(Duration::from_secs(15))
            .with_interval(Duration::from_secs(5))
            .with_retries(3);
        SockRef::from(&stream).set_tcp_keepalive(&alive)?;
        let mut connection = Self { stream, decoder: Decoder::new(limit) };
        connection.stream.write_all(&greeting()).await?;
        connection.read_until(Decoder::greeting).await?;
        connection.stream.write_all(&ready(role)).await?;
        let Frame::Command(command) = connection.read_until(Decoder::frame).await? else {
            return Err(Error::Peer("it speaks before it is ready"));
        };
        let peer = socket_type(&command)?;
        if !role.talks_to(&peer) {
            return Err(Error::Peer("it is a socket of another kind"));
        }
        Ok(connection)
    }

    /// Subscribes to all messages whose first part begins with `prefix`.
    ///
    /// # Errors
    /// The connection broke.
    pub(super) async fn subscribe(&mut self, prefix: &[u8]) -> Result<(), Error> {
        self.send(&[[&[1], prefix].concat()]).await
    }

    /// Sends one message.
    ///
    /// # Errors
    /// The connection broke.
    pub(super) async fn send(&mut self, parts: &[Vec<u8>]) -> Result<(), Error> {
        let mut bytes = Vec::new();
        for (at, part) in parts.iter().enumerate() {
            frame(if at + 1 < parts.len() { MORE } else { 0 }, part, &mut bytes);
        }
        Ok(self.stream.write_all(&bytes).await?)
    }

    /// Waits for the next message. May be dropped and called again without a loss.
    ///
    /// # Errors
    /// The connection broke, or the peer does not keep to the protocol or the limit.
    pub(super) async fn recv(&mut self) -> Result<Message, Error> {
        loop {
            match self.read_until(Decoder::frame).await? {
                Frame::Message(message) => return Ok(message),
                Frame::Command(command) => {
                    if let Some([_, _, context @ ..]) = command.strip_prefix(b"\x04PING") {
                        let mut pong = Vec::new();
                        frame(IS_COMMAND, &[b"\x04PONG", context].concat(), &mut pong);
                        self.stream.write_all(&pong).await?;
                    }
                }
            }
        }
    }

    async fn read_until<T>(
        &mut self,
        next: impl Fn(&mut Decoder) -> Result<Option<T>, Error>,
    ) -> Result<T, Error> {
        loop {
            if let Some(found) = next(&mut self.decoder)? {
                return Ok(found);
            }
            let room = self.decoder.room();
            if self.stream.read_buf(room).await? == 0 {
                return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
            }
        }
    }
}

/// What comes after the greeting.
#[derive(Debug, PartialEq)]
pub(super) enum Frame {
    Command(Vec<u8>),
    Message(Message),
}

/// Bytes -> frames. Keeps what has come of an unfinished message, and nothing for what is only claimed.
#[derive(Debug)]
pub(super) struct Decoder {
    buffer: Vec<u8>,
    /// Bytes of the buffer that are done with.
    done: usize,
    /// The parts of the message so far,
    parts: Message,
    /// and their bytes.
    size: usize,
    limit: usize,
}

impl Decoder {
    pub(super) const fn new(limit: usize) -> Self {
        Self { buffer: Vec::new(), done: 0, parts: Vec::new(), size: 0, limit }
    }

    /// The buffer, with room for more bytes at its end.
    pub(super) fn room(&mut self) -> &mut Vec<u8> {
        self.buffer.drain(..std::mem::take(&mut self.done));
        if self.buffer.is_empty() && self.buffer.capacity() > 4 * READ {
            self.buffer = Vec::new();
        }
        self.buffer.reserve(READ);
        &mut self.buffer
    }

    fn rest(&self) -> &[u8] {
        &self.buffer[self.done..]
    }

    /// Takes the 64 bytes each side begins with.
    ///
    /// # Errors
    /// They are none of ZMTP 3, or want security.
    pub(super) fn greeting(&mut self) -> Result<Option<()>, Error> {
        let rest = self.rest();
        if rest.first().is_some_and(|first| *first != 0xff) {
            return Err(Error::Peer("it does not greet"));
        }
        let Some(greeting) = rest.first_chunk::<64>() else {
            return Ok(None);
        };
        if greeting[9] != 0x7f || greeting[10] < 3 {
            return Err(Error::Peer("it is older than ZMTP 3"));
        }
        if !greeting[12..32].strip_prefix(b"NULL").is_some_and(|pad| pad.iter().all(|b| *b == 0)) {
            return Err(Error::Peer("it wants security"));
        }
        self.done += greeting.len();
        Ok(Some(()))
    }

    /// Takes the next command or whole message.
    ///
    /// # Errors
    /// What came is no frame, or exceeds the limit.
    pub(super) fn frame(&mut self) -> Result<Option<Frame>, Error> {
        loop {
            let rest = self.rest();
            let Some((&flags, after)) = rest.split_first() else {
                return Ok(None);
            };
            let (size, after) = if flags & LONG == 0 {
                let Some((size, after)) = after.split_first() else {
                    return Ok(None);
                };
                (u64::from(*size), after)
            } else {
                let Some((size, after)) = after.split_first_chunk::<8>() else {
                    return Ok(None);
                };
                (u64::from_be_bytes(*size), after)
            };
            let is_command = flags & IS_COMMAND != 0;
            if flags & !(MORE | LONG | IS_COMMAND) != 0 || (is_command && flags & MORE != 0) {
                return Err(Error::Peer("a frame of a kind that is not there"));
            }
            let room = if is_command { COMMAND } else { self.limit - self.size };
            let Some(size) = usize::try_from(size).ok().filter(|size| *size <= room) else {
                return Err(Error::Size(if is_command { COMMAND } else { self.limit }));
            };
            let Some(body) = after.get(..size) else {
                return Ok(None);
            };
            let (body, taken) = (body.to_vec(), rest.len() - after.len() + size);
            self.done += taken;
            if is_command {
                return Ok(Some(Frame::Command(body)));
            }
            if self.parts.len() == PARTS {
                return Err(Error::Peer("a message of too many parts"));
            }
            self.parts.push(body);
            self.size += size;
            if flags & MORE == 0 {
                self.size = 0;
                return Ok(Some(Frame::Message(std::mem::take(&mut self.parts))));
            }
        }
    }
}

fn greeting() -> [u8; 64] {
    let mut greeting = [0; 64];
    greeting[0] = 0xff;
    greeting[9] = 0x7f;
    // 3.0, so that subscriptions are messages, which every peer takes.
    greeting[10] = 3;
    greeting[12..16].copy_from_slice(b"NULL");
    greeting
}

fn ready(role: Role) -> Vec<u8> {
    let mut body = b"\x05READY".to_vec();
    for (name, value) in [("Socket-Type", role.name()), ("Identity", "")] {
        body.push(u8::try_from(name.len()).expect("a short name"));
        body.extend_from_slice(name.as_bytes());
        body.extend_from_slice(&u32::try_from(value.len()).expect("a short value").to_be_bytes());
        body.extend_from_slice(value.as_bytes());
    }
    let mut bytes = Vec::new();
    frame(IS_COMMAND, &body, &mut bytes);
    bytes
}

fn frame(flags: u8, body: &[u8], out: &mut Vec<u8>) {
    if let Ok(size) = u8::try_from(body.len()) {
        out.extend_from_slice(&[flags, size]);
    } else {
        out.push(flags | LONG);
        out.extend_from_slice(&(body.len() as u64).to_be_bytes());
    }
    out.extend_from_slice(body);
}

/// Reads the kind of socket out of a READY command.
pub(super) fn socket_type(command: &[u8]) -> Result<Vec<u8>, Error> {
    let Some(mut rest) = command.strip_prefix(b"\x05READY") else {
        return Err(Error::Peer("it refuses"));
    };
    let mut take = |size: usize| {
        let (taken, left) = rest.split_at_checked(size)?;
        rest = left;
        Some(taken)
    };
    let mut property = || {
        let size = take(1)?[0];
        let name = take(size.into())?;
        let size = u32::from_be_bytes(*take(4)?.first_chunk()?);
        Some((name, take(usize::try_from(size).ok()?)?))
    };
    while let Some((name, value)) = property() {
        if name.eq_ignore_ascii_case(b"Socket-Type") {
            return Ok(value.to_vec());
        }
    }
    Err(Error::Peer("it does not say what it is"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn feed(decoder: &mut Decoder, bytes: &[u8]) {
        decoder.room().extend_from_slice(bytes);
    }

    #[test]
    fn a_claimed_size_costs_nothing() {
        let mut decoder = Decoder::new(1 << 20);
        let mut bytes = vec![LONG];
        bytes.extend_from_slice(&(1_u64 << 40).to_be_bytes());
        feed(&mut decoder, &bytes);
        assert!(matches!(decoder.frame(), Err(Error::Size(_))));

        let mut decoder = Decoder::new(1 << 30);
        let mut bytes = vec![LONG];
        bytes.extend_from_slice(&(1_u64 << 29).to_be_bytes());
        feed(&mut decoder, &bytes);
        assert!(matches!(decoder.frame(), Ok(None)));
        assert!(decoder.room().capacity() < 4 * READ);
    }

    #[test]
    fn many_small_parts_are_refused() {
        let mut decoder = Decoder::new(1 << 20);
        feed(&mut decoder, &[MORE, 0].repeat(PARTS + 1));
        assert!(matches!(decoder.frame(), Err(Error::Peer(_))));
        // And so are parts that are too much together.
        let mut decoder = Decoder::new(300);
        feed(&mut decoder, &[[MORE, 200].as_slice(), &[7; 200], &[0, 101]].concat());
        assert!(matches!(decoder.frame(), Err(Error::Size(300))));
    }

    proptest! {
        #[test]
        fn frames_come_out_as_they_went_in_however_cut(
            messages in prop::collection::vec(
                prop::collection::vec(prop::collection::vec(any::<u8>(), 0..400), 1..5), 1..6),
            cut in 1_usize..700,
        ) {
            let mut bytes = Vec::new();
            for message in &messages {
                for (at, part) in message.iter().enumerate() {
                    frame(if at + 1 < message.len() { MORE } else { 0 }, part, &mut bytes);
                }
            }
            let mut decoder = Decoder::new(1 << 20);
            let mut found = Vec::new();
            for piece in bytes.chunks(cut) {
                feed(&mut decoder, piece);
                while let Some(frame) = decoder.frame().unwrap() {
                    let Frame::Message(message) = frame else { panic!("no command was sent") };
                    found.push(message);
                }
            }
            prop_assert_eq!(found, messages);
        }

        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let mut decoder = Decoder::new(1000);
            feed(&mut decoder, &bytes);
            while let Ok(Some(_)) = decoder.frame() {}
            let mut decoder = Decoder::new(1000);
            feed(&mut decoder, &bytes);
            let _greeting = decoder.greeting();
            let _kind = socket_type(&bytes);
            let _kind = socket_type(&[b"\x05READY".as_slice(), &bytes].concat());
        }
    }
}
