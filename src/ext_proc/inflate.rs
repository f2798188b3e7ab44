//! Undoes a content coding while a body passes by, so that a compressed body can be read without being held.

use std::fmt;
use std::io::{self, Write};
use std::mem;

use flate2::write::{MultiGzDecoder, ZlibDecoder};
use zstd::stream::{raw, write};

/// The largest zstd window that is allowed: 8 MiB, what RFC 9659 asks of every HTTP content coding.
const ZSTD_WINDOW_LOG: u32 = 23;

/// Takes the decoded bytes of a body, piece by piece.
pub(crate) trait Sink {
    fn take(&mut self, piece: &[u8]);
}

/// Why decoding ended before the body did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stopped {
    /// The body expands to more than the limit.
    TooLarge,
    /// The body is not what its header says, is cut short, or asks for too large a window.
    Corrupt,
    /// The content coding is not one that can be undone here.
    Unsupported,
}

/// Decodes a body into a sink until its end, its limit or its first fault.
pub(crate) struct Inflate<S: Sink> {
    decoder: Decoder<S>,
    begun: bool,
    stopped: Option<Stopped>,
}

enum Decoder<S: Sink> {
    Identity(Bounded<S>),
    Gzip(Box<MultiGzDecoder<Bounded<S>>>),
    Deflate(Box<ZlibDecoder<Bounded<S>>>),
    Zstd(Box<write::Decoder<'static, Bounded<S>>>),
}

impl<S: Sink> Inflate<S> {
    /// `coding` is the value of the `content-encoding` header; only a single coding is undone.
    pub(crate) fn new(coding: Option<&[u8]>, max_decoded_bytes: u64, sink: S) -> Self {
        let sink = Bounded { sink, left: max_decoded_bytes, exceeded: false };
        let coding = coding.unwrap_or_default().trim_ascii().to_ascii_lowercase();
        let decoder = match coding.as_slice() {
            b"" | b"identity" => Ok(Decoder::Identity(sink)),
            b"gzip" | b"x-gzip" => Ok(Decoder::Gzip(Box::new(MultiGzDecoder::new(sink)))),
            b"deflate" => Ok(Decoder::Deflate(Box::new(ZlibDecoder::new(sink)))),
            b"zstd" => match zstd_decoder() {
                Ok(raw) => Ok(Decoder::Zstd(Box::new(write::Decoder::with_decoder(sink, raw)))),
                Err(_) => Err(sink),
            },
            _ => Err(sink),
        };
        let stopped = decoder.is_err().then_some(Stopped::Unsupported);
        Self { decoder: decoder.unwrap_or_else(Decoder::Identity), begun: false, stopped }
    }

    /// Passes on what `chunk` decodes to, without holding back what can be decoded already.
    pub(crate) fn push(&mut self, chunk: &[u8]) {
        if self.stopped.is_some() || chunk.is_empty() {
            return;
        }
        self.begun = true;
        let writer: &mut dyn Write = match &mut self.decoder {
            Decoder::Identity(sink) => sink,
            Decoder::Gzip(gzip) => gzip,
            Decoder::Deflate(deflate) => deflate,
            Decoder::Zstd(zstd) => zstd,
        };
        let outcome = writer.write_all(chunk).and_then(|()| writer.flush());
        self.settle(&outcome);
    }

    /// Ends the body; an empty one is never corrupt.
    pub(crate) fn finish(&mut self) {
        if self.stopped.is_some() || !mem::take(&mut self.begun) {
            return;
        }
        let outcome = match &mut self.decoder {
            Decoder::Identity(_) => Ok(()),
            Decoder::Gzip(gzip) => gzip.try_finish(),
            Decoder::Deflate(deflate) => deflate.try_finish(),
            Decoder::Zstd(zstd) => zstd.do_finish(),
        };
        self.settle(&outcome);
    }

    pub(crate) fn stopped(&self) -> Option<Stopped> {
        self.stopped
    }

    pub(crate) fn sink(&self) -> &S {
        &self.bounded().sink
    }

    pub(crate) fn sink_mut(&mut self) -> &mut S {
        let bounded = match &mut self.decoder {
            Decoder::Identity(sink) => sink,
            Decoder::Gzip(gzip) => gzip.get_mut(),
            Decoder::Deflate(deflate) => deflate.get_mut(),
            Decoder::Zstd(zstd) => zstd.get_mut(),
        };
        &mut bounded.sink
    }

    /// Whether the body is what it decodes to.
    pub(crate) fn is_identity(&self) -> bool {
        matches!(self.decoder, Decoder::Identity(_))
    }

    fn bounded(&self) -> &Bounded<S> {
        match &self.decoder {
            Decoder::Identity(sink) => sink,
            Decoder::Gzip(gzip) => gzip.get_ref(),
            Decoder::Deflate(deflate) => deflate.get_ref(),
            Decoder::Zstd(zstd) => zstd.get_ref(),
        }
    }

    fn settle(&mut self, outcome: &io::Result<()>) {
        if outcome.is_err() {
            self.stopped =
                Some(if self.bounded().exceeded { Stopped::TooLarge } else { Stopped::Corrupt });
        }
    }
}

fn zstd_decoder() -> io::Result<raw::Decoder<'static>> {
    let mut decoder = raw::Decoder::new()?;
    decoder.set_parameter(raw::DParameter::WindowLogMax(ZSTD_WINDOW_LOG))?;
    Ok(decoder)
}

impl<S: Sink> fmt::Debug for Inflate<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inflate").field("stopped", &self.stopped).finish_non_exhaustive()
    }
}

/// Passes exactly the first `left` bytes on, so that the limit falls on the same byte for all chunkings.
struct Bounded<S> {
    sink: S,
    left: u64,
    exceeded: bool,
}

impl<S: Sink> Write for Bounded<S> {
    fn write(&mut self, piece: &[u8]) -> io::Result<usize> {
        let room = usize::try_from(self.left).unwrap_or(usize::MAX);
        let taken = piece.len().min(room);
        self.sink.take(&piece[..taken]);
        self.left -= taken as u64;
        if taken < piece.len() {
            self.exceeded = true;
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests;
