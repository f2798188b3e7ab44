//! One stream of KV events, of one engine and rank, as a state machine: what was missed is asked for again, and what
//! cannot be had again costs the whole picture, never a part of it in silence.
//!
//! The promise to the consumer: after every action, the blocks it holds are blocks that the engine had at that point
//! of its stream. It may know fewer (nothing is known from before the last [`Action::Clear`] on), never more.
//!
//! Sequence numbers say little by themselves, since an engine that starts again counts from 0 and may be past us when
//! we hear of it. So the last applied messages are remembered by a hash of their payload (which holds a time): a number
//! seen before with the same payload is a copy, with another payload a new engine. A replay is asked for from the last
//! message applied, not from the one after it: its first answer proves that the engine is still the one we knew.

use std::collections::VecDeque;
use std::time::Duration;

use xxhash_rust::xxh3::xxh3_64;

use super::kv_wire::{self, KvBatch, WireError};

/// How many applied messages are remembered to tell copies from a new engine.
const REMEMBERED: usize = 256;

/// The sequence number that ends a replay (-1 as the engines write it).
const END: u64 = u64::MAX;

/// One message: its number, and what was in it.
#[derive(Debug, Clone)]
pub struct Frame {
    /// The sequence number.
    pub seq: u64,
    /// The events.
    pub batch: Result<KvBatch, WireError>,
    /// Tells this message from another of the same number.
    pub mark: u64,
    /// Bytes on the wire.
    pub size: usize,
}

impl Frame {
    /// Reads a payload.
    #[must_use]
    pub fn new(seq: u64, payload: &[u8]) -> Self {
        let batch = kv_wire::decode(payload);
        Self { seq, batch, mark: xxh3_64(payload), size: payload.len() }
    }
}

/// One answer to a request for a replay.
#[derive(Debug, Clone)]
pub enum Replayed {
    /// A message of before.
    Frame(Frame),
    /// That was all.
    End,
}

/// Why a multipart message is neither live nor replayed events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// It has too few or too many parts.
    #[error("a message of {0} parts")]
    Parts(usize),
    /// The sequence number has not 8 bytes, or is the one that ends replays.
    #[error("a sequence number that is none")]
    Sequence,
    /// The payload is larger than allowed.
    #[error("a payload of {0} bytes")]
    Size(usize),
}

fn sequence(part: &[u8]) -> Result<u64, FrameError> {
    let bytes = part.try_into().map_err(|_wrong_size| FrameError::Sequence)?;
    Ok(u64::from_be_bytes(bytes))
}

/// Reads a live message: topic, sequence number (8 bytes, big-endian), payload of at most `limit` bytes. Gives the
/// topic too.
///
/// # Errors
/// It is not made so. A payload that cannot be read is no error here but in the frame: its number counts.
pub fn live<'a>(parts: &[&'a [u8]], limit: usize) -> Result<(&'a [u8], Frame), FrameError> {
    let [topic, seq, payload] = *parts else {
        return Err(FrameError::Parts(parts.len()));
    };
    let seq = sequence(seq)?;
    if seq == END {
        return Err(FrameError::Sequence);
    }
    if payload.len() > limit {
        return Err(FrameError::Size(payload.len()));
    }
    Ok((topic, Frame::new(seq, payload)))
}

/// Reads one answer to a request for a replay, as a DEALER socket gets it: an empty part, in newer engines the topic,
/// the sequence number, and the payload, of at most `limit` bytes. The last has the number -1 and no payload; the first
/// engines ended with an empty part alone.
///
/// # Errors
/// It is not made so.
pub fn replayed(parts: &[&[u8]], limit: usize) -> Result<Replayed, FrameError> {
    let (seq, payload) = match *parts {
        [b""] | [b"", b""] => return Ok(Replayed::End),
        // The second alone would be a number and a payload without the empty part before them.
        [b"", seq, payload] | [seq, payload] | [_, _, seq, payload] => (seq, payload),
        [_, seq, payload] => (seq, payload),
        _ => return Err(FrameError::Parts(parts.len())),
    };
    let seq = sequence(seq)?;
    if seq == END || payload.is_empty() {
        return Ok(Replayed::End);
    }
    if payload.len() > limit {
        return Err(FrameError::Size(payload.len()));
    }
    Ok(Replayed::Frame(Frame::new(seq, payload)))
}

/// The parts of a request, from a DEALER socket, for a replay of everything from sequence number `from` on.
#[must_use]
pub fn request(from: u64) -> [Vec<u8>; 2] {
    [Vec::new(), from.to_be_bytes().to_vec()]
}

/// Why everything known is dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ClearReason {
    /// The engine is a new one: its cache began empty.
    Restart,
    /// Messages were missed that cannot be had again.
    Gap,
    /// A message could not be read, so that blocks may have gone unseen.
    Malformed,
    /// The connection broke, and there is no replay to tell what came of the engine.
    Disconnected,
    /// All is about to be told again from the start.
    Refill,
    /// The consumer was too slow, and missed changes.
    Overflow,
}

impl ClearReason {
    /// A short name, as a metric's label.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Restart => "restart",
            Self::Gap => "gap",
            Self::Malformed => "malformed",
            Self::Disconnected => "disconnected",
            Self::Refill => "refill",
            Self::Overflow => "overflow",
        }
    }
}

/// What is to be done now.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// These events happened.
    Apply(KvBatch),
    /// Nothing is known of this stream any more.
    Clear(ClearReason),
    /// Ask the engine to send everything from this number on again. Ends a replay that still runs.
    AskReplay {
        /// The first number wanted.
        from: u64,
    },
    /// Ends the replay that runs: its answers are of no use any more.
    StopReplay,
}

/// How a stream behaves.
#[derive(Debug, Clone, Copy)]
pub struct StreamSettings {
    /// Whether the engine can be asked for a replay.
    pub replay: bool,
    /// A replay without an answer for this long has failed.
    pub replay_idle: Duration,
    /// A replay that has not ended after this long has failed.
    pub replay_total: Duration,
    /// After a failed replay, the next waits this long; twice as long after each failure in a row.
    pub retry_min: Duration,
    /// The longest such wait.
    pub retry_max: Duration,
    /// Live messages held while a replay runs: so many,
    pub held_frames: usize,
    /// and of so many bytes on the wire in all.
    pub held_bytes: usize,
    /// A stream that was silent for this long is asked for its last message, which shows a connection that has died
    /// and messages that were lost at the end of a burst.
    pub probe_after: Duration,
}

impl Default for StreamSettings {
    fn default() -> Self {
        Self {
            replay: true,
            replay_idle: Duration::from_secs(5),
            replay_total: Duration::from_secs(120),
            retry_min: Duration::from_millis(500),
            retry_max: Duration::from_secs(60),
            held_frames: 10_000,
            held_bytes: 32 << 20,
            probe_after: Duration::from_secs(60),
        }
    }
}

/// What a stream has counted since it began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StreamCounts {
    /// Batches applied.
    pub applied: u64,
    /// Messages seen before, dropped.
    pub duplicates: u64,
    /// Times that messages were missing.
    pub gaps: u64,
    /// How many messages were missing in them.
    pub missing: u64,
    /// Engines seen to have started again.
    pub restarts: u64,
    /// Messages that could not be read.
    pub malformed: u64,
    /// Events of types not known here.
    pub unknown_events: u64,
    /// Events that could not be read.
    pub malformed_events: u64,
    /// Live messages dropped because a replay held back too many.
    pub held_dropped: u64,
    /// Replays asked for,
    pub replays: u64,
    /// of which failed.
    pub replays_failed: u64,
    /// Times that everything known was dropped.
    pub clears: u64,
}

impl StreamCounts {
    /// Adds what `now` has more than `before`.
    pub fn add(&mut self, now: &Self, before: &Self) {
        let each = |sum: &mut u64, field: fn(&Self) -> u64| *sum += field(now) - field(before);
        each(&mut self.applied, |counts| counts.applied);
        each(&mut self.duplicates, |counts| counts.duplicates);
        each(&mut self.gaps, |counts| counts.gaps);
        each(&mut self.missing, |counts| counts.missing);
        each(&mut self.restarts, |counts| counts.restarts);
        each(&mut self.malformed, |counts| counts.malformed);
        each(&mut self.unknown_events, |counts| counts.unknown_events);
        each(&mut self.malformed_events, |counts| counts.malformed_events);
        each(&mut self.held_dropped, |counts| counts.held_dropped);
        each(&mut self.replays, |counts| counts.replays);
        each(&mut self.replays_failed, |counts| counts.replays_failed);
        each(&mut self.clears, |counts| counts.clears);
    }
}

/// A replay that runs.
#[derive(Debug)]
struct Replay {
    /// The first number asked for.
    from: u64,
    /// The message that has to come first, if the engine is still the one we knew; none when all is to be told anew.
    proof: Option<(u64, u64)>,
    /// The request is out, and this was when anything was last heard of it. Until then it waits for its turn.
    heard: Option<Duration>,
    since: Duration,
    /// An answer has come.
    answered: bool,
    held: VecDeque<Frame>,
    held_bytes: usize,
    /// How many of them, the first, came before the request: its answers are younger.
    older: usize,
}

/// One stream of events. Times are since any fixed start.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "facts of which any may hold with any other")]
pub struct KvStream {
    settings: StreamSettings,
    /// The number to come next; none as long as nothing was applied.
    next: Option<u64>,
    /// The last messages applied, by number and mark, oldest first.
    recent: VecDeque<(u64, u64)>,
    replay: Option<Replay>,
    connected: bool,
    /// The consumer may hold blocks.
    filled: bool,
    /// When to ask for everything again; none when that would tell nothing new.
    due: Option<Duration>,
    /// The consumer lacks what a whole replay would bring.
    partial: bool,
    /// The consumer has missed something since the replay that runs began.
    lost: bool,
    /// Replays in a row that failed, or that the consumer was too slow for.
    failures: u32,
    heard: Duration,
    counts: StreamCounts,
}

impl KvStream {
    /// Makes a stream that is not connected.
    #[must_use]
    pub fn new(settings: StreamSettings) -> Self {
        Self {
            settings,
            next: None,
            recent: VecDeque::new(),
            replay: None,
            connected: false,
            filled: false,
            due: None,
            partial: false,
            lost: false,
            failures: 0,
            heard: Duration::ZERO,
            counts: StreamCounts::default(),
        }
    }

    /// What was counted.
    #[must_use]
    pub const fn counts(&self) -> &StreamCounts {
        &self.counts
    }

    /// The number that is to come next, as far as messages were applied.
    #[must_use]
    pub const fn next(&self) -> Option<u64> {
        self.next
    }

    /// Whether a replay runs.
    #[must_use]
    pub const fn replaying(&self) -> bool {
        self.replay.is_some()
    }

    /// When [`KvStream::tick`] has something to do next.
    #[must_use]
    pub fn deadline(&self) -> Option<Duration> {
        let replay = self.replay.as_ref().and_then(|replay| {
            let idle = replay.heard? + self.settings.replay_idle;
            Some(idle.min(replay.since + self.settings.replay_total))
        });
        if replay.is_some() || self.replay.is_some() || !self.connected || !self.settings.replay {
            return replay;
        }
        let probe = self.heard + self.settings.probe_after;
        Some(self.due.map_or(probe, |due| due.min(probe)))
    }

    /// The connection for live messages stands (again).
    pub fn connected(&mut self, now: Duration, out: &mut Vec<Action>) {
        self.connected = true;
        self.heard = now;
        if self.settings.replay {
            self.begin(now, out);
        }
    }

    /// The connection for live messages is gone, and with it perhaps the engine.
    pub fn disconnected(&mut self, out: &mut Vec<Action>) {
        self.connected = false;
        self.due = None;
        if self.replay.take().is_some() {
            out.push(Action::StopReplay);
        }
        if !self.settings.replay {
            self.clear(ClearReason::Disconnected, out);
        }
    }

    /// The consumer has missed actions of this stream and was told to drop everything: it is to be filled again.
    pub fn lost(&mut self, now: Duration) {
        self.lost = self.replay.is_some();
        self.wait(now);
        self.failures = self.failures.saturating_add(1);
    }

    /// The request for the replay that runs is out.
    pub fn asked(&mut self, now: Duration) {
        if let Some(replay) = &mut self.replay {
            replay.heard = Some(now);
            replay.since = now;
        }
    }

    /// A live message came.
    pub fn live(&mut self, frame: Frame, now: Duration, out: &mut Vec<Action>) {
        self.heard = now;
        let Some(replay) = &mut self.replay else {
            self.in_order(frame, now, out);
            return;
        };
        if let Some(last) = replay.held.back()
            && frame.seq <= last.seq
        {
            if replay.held.iter().any(|held| held.seq == frame.seq && held.mark == frame.mark) {
                self.counts.duplicates += 1;
                return;
            }
            // It started again while the old one's past was being told.
            self.replay = None;
            self.restarted(out);
            self.ask(None, now, VecDeque::from([frame]), out);
            return;
        }
        replay.held_bytes += frame.size;
        replay.held.push_back(frame);
        // The oldest go: those the replay may still bring.
        while replay.held.len() > self.settings.held_frames
            || replay.held_bytes > self.settings.held_bytes
        {
            let Some(dropped) = replay.held.pop_front() else {
                break;
            };
            replay.held_bytes -= dropped.size;
            replay.older = replay.older.saturating_sub(1);
            self.counts.held_dropped += 1;
        }
    }

    /// An answer came to the request for the replay that runs.
    pub fn replayed(&mut self, answer: Replayed, now: Duration, out: &mut Vec<Action>) {
        let Some(replay) = &mut self.replay else {
            return;
        };
        replay.heard = Some(now);
        let frame = match answer {
            Replayed::Frame(frame) => frame,
            Replayed::End => {
                self.ended(now, out);
                return;
            }
        };
        if frame.seq < replay.from {
            self.counts.duplicates += 1;
            return;
        }
        if !std::mem::replace(&mut replay.answered, true) {
            if let Some(last) = replay.proof {
                if (frame.seq, frame.mark) == last {
                    return;
                }
                if frame.seq == last.0 {
                    // A new engine, already past that number: what it sent before is wanted too.
                    self.restarted(out);
                    self.again(now, out);
                    return;
                }
                // What was missed has been forgotten; what follows is taken up from nothing.
                self.missed(last.0.saturating_add(1), frame.seq, out);
            } else {
                self.clear(ClearReason::Refill, out);
            }
        }
        match self.next {
            Some(next) if frame.seq < next => {
                self.counts.duplicates += 1;
                return;
            }
            // The engine itself lost some, or its memory rolled on under the replay.
            Some(next) if frame.seq > next => self.missed(next, frame.seq, out),
            _ => {}
        }
        self.apply(frame, out);
    }

    /// The replay that runs has failed: no connection, or it broke.
    pub fn replay_failed(&mut self, now: Duration, out: &mut Vec<Action>) {
        let Some(replay) = self.replay.take() else {
            return;
        };
        self.counts.replays_failed += 1;
        self.lost = false;
        self.wait(now);
        self.failures = self.failures.saturating_add(1);
        if !replay.answered && self.filled {
            // It was asked for because something was uncertain, and that stays so.
            self.clear(ClearReason::Gap, out);
        }
        for frame in replay.held {
            self.live(frame, now, out);
        }
    }

    /// Time passed.
    pub fn tick(&mut self, now: Duration, out: &mut Vec<Action>) {
        if let Some(replay) = &self.replay {
            let late = replay.heard.is_some_and(|heard| now >= heard + self.settings.replay_idle);
            let long = replay.heard.is_some() && now >= replay.since + self.settings.replay_total;
            if late || long {
                out.push(Action::StopReplay);
                self.replay_failed(now, out);
            }
            return;
        }
        if !self.connected || !self.settings.replay {
            return;
        }
        if self.due.is_some_and(|due| now >= due) {
            self.ask(None, now, VecDeque::new(), out);
        } else if now >= self.heard + self.settings.probe_after {
            self.heard = now;
            self.begin(now, out);
        }
    }

    /// Takes a live message while no replay runs.
    fn in_order(&mut self, frame: Frame, now: Duration, out: &mut Vec<Action>) {
        match self.next {
            Some(next) if frame.seq == next => {}
            Some(next) if frame.seq < next => {
                if self.recent.contains(&(frame.seq, frame.mark)) {
                    self.counts.duplicates += 1;
                    return;
                }
                self.restarted(out);
                self.due = None;
                if frame.seq > 0 && self.can_ask() {
                    self.ask(None, now, VecDeque::from([frame]), out);
                    return;
                }
            }
            Some(next) => {
                if self.can_ask() {
                    self.counts.gaps += 1;
                    let last = self.recent.back().copied();
                    self.ask(last, now, VecDeque::from([frame]), out);
                    return;
                }
                self.missed(next, frame.seq, out);
            }
            None if frame.seq > 0 && self.can_ask() => {
                self.ask(None, now, VecDeque::from([frame]), out);
                return;
            }
            None => {}
        }
        self.apply(frame, out);
    }

    /// Takes the end of the replay that runs.
    fn ended(&mut self, now: Duration, out: &mut Vec<Action>) {
        let Some(replay) = &mut self.replay else {
            return;
        };
        if !replay.answered && replay.proof.is_some() {
            // It has not even come as far as what we know of it: a new one.
            self.restarted(out);
            self.again(now, out);
            return;
        }
        let (mut older, is_whole) = (replay.older, replay.proof.is_none());
        let mut held = std::mem::take(&mut replay.held);
        self.replay = None;
        if std::mem::take(&mut self.lost) {
            self.wait(now);
        } else {
            self.failures = 0;
            if is_whole {
                self.due = None;
                self.partial = false;
            }
        }
        while let Some(frame) = held.pop_front() {
            let is_older = older > 0;
            older = older.saturating_sub(1);
            let Some(next) = self.next else {
                self.apply(frame, out);
                continue;
            };
            if frame.seq < next {
                if is_older || self.recent.contains(&(frame.seq, frame.mark)) {
                    self.counts.duplicates += 1;
                    continue;
                }
                // The old engine told its past, and a new one has spoken since.
                self.restarted(out);
                held.push_front(frame);
                self.ask(None, now, held, out);
                return;
            }
            if frame.seq > next {
                if !is_older {
                    // Lost while the replay ran.
                    held.push_front(frame);
                    let last = self.recent.back().copied();
                    self.ask(last, now, held, out);
                    return;
                }
                // The engine had it all when it was asked, and it did not come: it is nowhere to be had.
                self.missed(next, frame.seq, out);
            }
            self.apply(frame, out);
        }
    }

    fn can_ask(&self) -> bool {
        self.settings.replay && self.connected && self.due.is_none()
    }

    /// Asks for what follows the last message applied, or for everything.
    fn begin(&mut self, now: Duration, out: &mut Vec<Action>) {
        let last = self.recent.back().copied().filter(|_| !self.partial);
        self.ask(last, now, VecDeque::new(), out);
    }

    /// Asks for everything anew, keeping what is held.
    fn again(&mut self, now: Duration, out: &mut Vec<Action>) {
        let held = self.replay.take().map(|replay| replay.held).unwrap_or_default();
        self.ask(None, now, held, out);
    }

    /// Asks for everything from the message `proof` on, or for all there is.
    fn ask(
        &mut self,
        proof: Option<(u64, u64)>,
        now: Duration,
        held: VecDeque<Frame>,
        out: &mut Vec<Action>,
    ) {
        self.counts.replays += 1;
        let from = proof.map_or(0, |(seq, _)| seq);
        let held_bytes = held.iter().map(|frame| frame.size).sum();
        self.replay = Some(Replay {
            from,
            proof,
            heard: None,
            since: now,
            answered: false,
            older: held.len(),
            held,
            held_bytes,
        });
        out.push(Action::AskReplay { from });
    }

    /// Puts the next request for everything off.
    fn wait(&mut self, now: Duration) {
        if self.settings.replay {
            let wait = self.settings.retry_min.saturating_mul(1 << self.failures.min(16));
            self.due = Some(now + wait.min(self.settings.retry_max));
            self.partial = true;
        }
    }

    fn restarted(&mut self, out: &mut Vec<Action>) {
        self.counts.restarts += 1;
        self.clear(ClearReason::Restart, out);
    }

    fn missed(&mut self, next: u64, came: u64, out: &mut Vec<Action>) {
        self.counts.gaps += 1;
        self.counts.missing = self.counts.missing.saturating_add(came.saturating_sub(next));
        self.clear(ClearReason::Gap, out);
    }

    fn clear(&mut self, reason: ClearReason, out: &mut Vec<Action>) {
        self.next = None;
        self.recent.clear();
        if std::mem::take(&mut self.filled) {
            self.counts.clears += 1;
            out.push(Action::Clear(reason));
        }
    }

    fn apply(&mut self, frame: Frame, out: &mut Vec<Action>) {
        match frame.batch {
            Ok(batch) => {
                self.counts.applied += 1;
                self.counts.unknown_events += batch.unknown as u64;
                self.counts.malformed_events += batch.malformed as u64;
                if !batch.events.is_empty() {
                    self.filled = true;
                    out.push(Action::Apply(batch));
                }
            }
            Err(_) => {
                self.counts.malformed += 1;
                self.clear(ClearReason::Malformed, out);
            }
        }
        // Below the number that ends replays, so there is one more.
        self.next = Some(frame.seq + 1);
        if self.recent.len() == REMEMBERED {
            self.recent.pop_front();
        }
        self.recent.push_back((frame.seq, frame.mark));
    }
}

#[cfg(test)]
mod tests;
