use std::collections::BTreeMap;

use proptest::prelude::*;
use rmp::encode as pack;

use super::*;
use crate::engine::kv_wire::KvEvent;

/// What happens to one block.
#[derive(Debug, Clone, Copy)]
enum Happens {
    Stored(u64),
    Removed(u64),
    Cleared,
}

/// Writes a batch as vLLM 0.23 does.
fn payload(at: f64, events: &[Happens]) -> Vec<u8> {
    let mut out = Vec::new();
    pack::write_array_len(&mut out, 3).unwrap();
    pack::write_f64(&mut out, at).unwrap();
    pack::write_array_len(&mut out, u32::try_from(events.len()).unwrap()).unwrap();
    for event in events {
        let (name, block) = match event {
            Happens::Stored(block) => ("BlockStored", Some(block)),
            Happens::Removed(block) => ("BlockRemoved", Some(block)),
            Happens::Cleared => ("AllBlocksCleared", None),
        };
        pack::write_array_len(&mut out, 1 + u32::from(block.is_some())).unwrap();
        pack::write_str(&mut out, name).unwrap();
        if let Some(block) = block {
            pack::write_array_len(&mut out, 1).unwrap();
            pack::write_uint(&mut out, *block).unwrap();
        }
    }
    pack::write_nil(&mut out).unwrap();
    out
}

/// Blocks and how many copies there are of each.
type Blocks = BTreeMap<u64, u32>;

fn happen(blocks: &mut Blocks, event: Happens) {
    match event {
        Happens::Stored(block) => *blocks.entry(block).or_default() += 1,
        Happens::Removed(block) => {
            if let Some(copies) = blocks.get_mut(&block) {
                *copies -= 1;
                if *copies == 0 {
                    blocks.remove(&block);
                }
            }
        }
        Happens::Cleared => blocks.clear(),
    }
}

/// A consumer of actions.
#[derive(Debug, Default)]
struct Held(Blocks);

impl Held {
    fn apply(&mut self, batch: &KvBatch) {
        for event in &batch.events {
            match event {
                KvEvent::Stored(stored) => {
                    for hash in &stored.hashes {
                        happen(&mut self.0, Happens::Stored(hash.get()));
                    }
                }
                KvEvent::Removed { hashes, .. } => {
                    for hash in hashes {
                        happen(&mut self.0, Happens::Removed(hash.get()));
                    }
                }
                KvEvent::Cleared => happen(&mut self.0, Happens::Cleared),
            }
        }
    }
}

fn frame(seq: u64) -> Frame {
    Frame::new(seq, &payload(seq as f64, &[Happens::Stored(seq)]))
}

fn secs(count: u64) -> Duration {
    Duration::from_secs(count)
}

/// What actions say, in short.
fn short(actions: &mut Vec<Action>) -> Vec<String> {
    let said = actions.drain(..).map(|action| match action {
        Action::Apply(batch) => format!("apply {}", batch.at),
        Action::Clear(reason) => format!("clear {}", reason.name()),
        Action::AskReplay { from } => format!("ask {from}"),
        Action::StopReplay => "stop".to_owned(),
    });
    said.collect()
}

/// A message of another engine.
fn other(seq: u64) -> Frame {
    Frame::new(seq, &payload(1000.0 + seq as f64, &[Happens::Stored(seq)]))
}

struct Rig {
    stream: KvStream,
    out: Vec<Action>,
    now: Duration,
}

impl Rig {
    fn new(replay: bool) -> Self {
        let settings = StreamSettings { replay, held_frames: 4, ..StreamSettings::default() };
        let mut rig = Self { stream: KvStream::new(settings), out: Vec::new(), now: secs(1) };
        rig.stream.connected(rig.now, &mut rig.out);
        rig
    }

    /// One that has applied 0 and 1.
    fn warm(replay: bool) -> Self {
        let mut rig = Self::new(replay);
        if replay {
            assert_eq!(rig.end(), ["ask 0"]);
        }
        assert_eq!(rig.live(0), ["apply 0"]);
        assert_eq!(rig.live(1), ["apply 1"]);
        rig
    }

    fn live(&mut self, seq: u64) -> Vec<String> {
        self.stream.live(frame(seq), self.now, &mut self.out);
        short(&mut self.out)
    }

    fn back(&mut self, frame: Frame) -> Vec<String> {
        self.stream.replayed(Replayed::Frame(frame), self.now, &mut self.out);
        short(&mut self.out)
    }

    fn end(&mut self) -> Vec<String> {
        self.stream.replayed(Replayed::End, self.now, &mut self.out);
        short(&mut self.out)
    }

    fn tick(&mut self, later: Duration) -> Vec<String> {
        self.now += later;
        self.stream.tick(self.now, &mut self.out);
        short(&mut self.out)
    }
}

const NOTHING: [&str; 0] = [];

#[test]
fn a_gap_is_filled_in_order_while_live_messages_wait() {
    let mut rig = Rig::warm(true);
    assert_eq!(rig.live(5), ["ask 1"]);
    assert_eq!(rig.live(6), NOTHING);
    assert_eq!(rig.back(frame(1)), NOTHING, "the proof that it is the same engine");
    for seq in 2..6 {
        assert_eq!(rig.back(frame(seq)), [format!("apply {seq}")]);
    }
    assert_eq!(rig.end(), ["apply 6"]);
    assert_eq!(rig.live(7), ["apply 7"]);
    let counts = rig.stream.counts();
    assert_eq!((counts.gaps, counts.clears, counts.duplicates), (1, 0, 1));
}

#[test]
fn a_gap_without_a_replay_clears() {
    let mut rig = Rig::warm(false);
    assert_eq!(rig.live(5), ["clear gap", "apply 5"]);
    assert_eq!(rig.live(4), ["clear restart", "apply 4"], "nothing tells it from a new engine");
    assert_eq!(rig.live(6), ["clear gap", "apply 6"]);
    assert_eq!(rig.live(1 << 63), ["clear gap", "apply 9223372036854776000"]);
    assert_eq!(rig.stream.counts().missing, 3 + 1 + (1 << 63) - 7);
}

#[test]
fn copies_are_dropped() {
    let mut rig = Rig::warm(false);
    for seq in [1, 0, 1] {
        assert_eq!(rig.live(seq), NOTHING);
    }
    assert_eq!(rig.live(2), ["apply 2"]);
    assert_eq!(rig.stream.counts().duplicates, 3);
}

#[test]
fn a_new_engine_is_seen_without_a_replay() {
    let mut rig = Rig::warm(false);
    let again = other(0);
    rig.stream.live(again, rig.now, &mut rig.out);
    assert_eq!(short(&mut rig.out), ["clear restart", "apply 1000"]);
    rig.stream.disconnected(&mut rig.out);
    assert_eq!(short(&mut rig.out), ["clear disconnected"]);
    rig.stream.disconnected(&mut rig.out);
    assert_eq!(short(&mut rig.out), NOTHING);
}

#[test]
fn a_new_engine_at_the_expected_number_is_found_out() {
    let mut rig = Rig::warm(true);
    rig.stream.disconnected(&mut rig.out);
    rig.stream.connected(rig.now, &mut rig.out);
    assert_eq!(short(&mut rig.out), ["ask 1"]);
    let again = other(2);
    rig.stream.live(again, rig.now, &mut rig.out);
    let past = other(1);
    assert_eq!(rig.back(past), ["clear restart", "ask 0"]);
    let past = [other(0), other(1)];
    assert_eq!(past.map(|frame| rig.back(frame)).concat(), ["apply 1000", "apply 1001"]);
    assert_eq!(rig.end(), ["apply 1002"]);
}

#[test]
fn a_new_engine_that_is_not_as_far_is_found_out() {
    let mut rig = Rig::warm(true);
    rig.stream.disconnected(&mut rig.out);
    rig.stream.connected(rig.now, &mut rig.out);
    assert_eq!(short(&mut rig.out), ["ask 1"]);
    assert_eq!(rig.end(), ["clear restart", "ask 0"]);
    assert_eq!(rig.end(), NOTHING);
}

#[test]
fn a_past_that_is_partly_forgotten_is_taken_from_nothing() {
    let mut rig = Rig::new(true);
    assert_eq!(short(&mut rig.out), ["ask 0"]);
    assert_eq!(rig.back(frame(8000)), ["apply 8000"]);
    assert_eq!(rig.end(), NOTHING);
    assert_eq!(rig.live(8001), ["apply 8001"]);
    assert_eq!(rig.live(9000), ["ask 8001"]);
    assert_eq!(rig.back(frame(8500)), ["clear gap", "apply 8500"]);
    assert_eq!(rig.back(frame(8501)), ["apply 8501"]);
    assert_eq!(rig.end(), ["clear gap", "apply 9000"]);
    assert_eq!(rig.live(9001), ["apply 9001"], "and no end of asking");
}

#[test]
fn a_replay_that_stops_answering_is_given_up_and_tried_again_later() {
    let mut rig = Rig::warm(true);
    assert_eq!(rig.live(5), ["ask 1"]);
    assert_eq!(rig.tick(secs(100)), NOTHING, "it waits for its turn");
    rig.stream.asked(rig.now);
    assert_eq!(rig.stream.deadline(), Some(rig.now + secs(5)));
    assert_eq!(rig.tick(secs(5)), ["stop", "clear gap", "apply 5"]);
    assert_eq!(rig.live(6), ["apply 6"]);
    assert_eq!(rig.live(9), ["clear gap", "apply 9"], "not asked while waiting");
    assert_eq!(rig.tick(secs(1)), ["ask 0"]);
    assert_eq!(rig.back(frame(0)), ["clear refill", "apply 0"]);
    assert_eq!(rig.stream.counts().replays_failed, 1);
}

#[test]
fn a_replay_that_never_ends_is_given_up() {
    let mut rig = Rig::new(true);
    rig.stream.asked(rig.now);
    assert_eq!(short(&mut rig.out), ["ask 0"]);
    let mut stopped = Vec::new();
    for seq in 0..200 {
        assert_eq!(rig.back(frame(seq)).len(), 1);
        stopped = rig.tick(secs(1));
        if !stopped.is_empty() {
            break;
        }
    }
    assert_eq!(stopped, ["stop"]);
    assert_eq!(rig.now, secs(121));
}

#[test]
fn too_many_held_messages_are_asked_for_again() {
    let mut rig = Rig::warm(true);
    assert_eq!(rig.live(3), ["ask 1"]);
    for seq in 4..10 {
        assert_eq!(rig.live(seq), NOTHING);
    }
    for seq in 1..4 {
        rig.back(frame(seq));
    }
    assert_eq!(rig.stream.counts().held_dropped, 3);
    assert_eq!(rig.end(), ["ask 3"]);
    for seq in 3..10 {
        rig.back(frame(seq));
    }
    assert_eq!(rig.end(), NOTHING);
    assert_eq!(rig.live(10), ["apply 10"]);
    assert_eq!(rig.stream.counts().clears, 0);
}

#[test]
fn an_unreadable_message_clears_and_its_number_counts() {
    let mut rig = Rig::warm(false);
    rig.stream.live(Frame::new(2, b"\xc1"), rig.now, &mut rig.out);
    assert_eq!(short(&mut rig.out), ["clear malformed"]);
    assert_eq!(rig.live(3), ["apply 3"]);
}

#[test]
fn a_silent_stream_is_looked_after() {
    let mut rig = Rig::warm(true);
    assert_eq!(rig.stream.deadline(), Some(rig.now + secs(60)));
    assert_eq!(rig.tick(secs(60)), ["ask 1"]);
    assert_eq!([rig.back(frame(1)), rig.end()].concat(), NOTHING);
    assert_eq!(rig.tick(secs(59)), NOTHING);
    assert_eq!(rig.tick(secs(1)), ["ask 1"]);
    assert_eq!(rig.back(frame(1)), NOTHING);
    assert_eq!(rig.back(frame(2)), ["apply 2"], "the last of a burst that was lost");
}

#[test]
fn a_consumer_that_missed_something_is_told_all_again() {
    let mut rig = Rig::warm(true);
    rig.stream.lost(rig.now);
    assert_eq!(rig.live(2), ["apply 2"]);
    assert_eq!(rig.tick(secs(1)), ["ask 0"]);
    rig.stream.lost(rig.now);
    for seq in 0..3 {
        rig.back(frame(seq));
    }
    assert_eq!(rig.end(), NOTHING);
    assert_eq!(rig.tick(secs(2)), ["ask 0"], "what it missed in between too");
}

#[test]
fn messages_of_all_framings_are_read() {
    let (seq, end) = (7_u64.to_be_bytes(), u64::MAX.to_be_bytes());
    let body = payload(1.0, &[]);
    let limit = 1000;
    let (topic, frame) = live(&[b"kv@a@m", &seq, &body], limit).unwrap();
    assert_eq!((topic, frame.seq, frame.batch.is_ok()), (b"kv@a@m".as_slice(), 7, true));
    assert_eq!(live(&[&seq, &body], limit).unwrap_err(), FrameError::Parts(2));
    assert_eq!(live(&[b"", b"1", &body], limit).unwrap_err(), FrameError::Sequence);
    assert_eq!(live(&[b"", &end, b""], limit).unwrap_err(), FrameError::Sequence);
    assert_eq!(live(&[b"", &seq, &body], 5).unwrap_err(), FrameError::Size(body.len()));
    assert!(live(&[b"", &seq, b"junk"], limit).unwrap().1.batch.is_err());

    let data: [&[&[u8]]; 4] = [
        &[b"", &seq, &body],
        &[b"", b"kv@a@m", &seq, &body],
        &[b"kv@a@m", &seq, &body],
        &[&seq, &body],
    ];
    for parts in data {
        let Ok(Replayed::Frame(frame)) = replayed(parts, limit) else { panic!("{parts:?}") };
        assert_eq!((frame.seq, frame.batch.is_ok()), (7, true));
    }
    let ends: [&[&[u8]]; 6] = [
        &[b"", &end, b""],
        &[b"", b"", &end, b""],
        &[b"", b"kv@a@m", &end, b""],
        &[&end, b""],
        &[b""],
        &[b"", b""],
    ];
    for parts in ends {
        assert!(matches!(replayed(parts, limit), Ok(Replayed::End)), "{parts:?}");
    }
    assert_eq!(replayed(&[], limit).unwrap_err(), FrameError::Parts(0));
    assert_eq!(replayed(&[b"", b"x", &body], limit).unwrap_err(), FrameError::Sequence);
    assert_eq!(request(258), [vec![], vec![0, 0, 0, 0, 0, 0, 1, 2]]);
}

/// What becomes of a live message under way.
#[derive(Debug, Clone, Copy)]
enum Fate {
    Arrives,
    Lost,
    Twice,
    /// After the next one.
    Late,
    /// It arrives, and after it a copy of one of the last.
    WithCopy(usize),
}

#[derive(Debug, Clone)]
enum Op {
    Step(Vec<(u8, u64)>, Fate),
    Garbage,
    Restart,
    /// Without a word of the connection.
    SilentRestart,
    Disconnect,
    Connect,
    Answers(usize),
    FailReplay,
    Overflow,
    Wait(u64),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let fate = prop_oneof![
        8 => Just(Fate::Arrives),
        2 => Just(Fate::Lost),
        1 => Just(Fate::Twice),
        1 => Just(Fate::Late),
        1 => (0_usize..8).prop_map(Fate::WithCopy),
    ];
    let events = prop::collection::vec((0_u8..20, 0_u64..12), 0..4);
    let op = prop_oneof![
        20 => (events, fate).prop_map(|(events, fate)| Op::Step(events, fate)),
        1 => Just(Op::Garbage),
        1 => Just(Op::Restart),
        1 => Just(Op::SilentRestart),
        1 => Just(Op::Disconnect),
        2 => Just(Op::Connect),
        6 => (1_usize..6).prop_map(Op::Answers),
        1 => Just(Op::FailReplay),
        1 => Just(Op::Overflow),
        3 => (1_u64..90_000).prop_map(Op::Wait),
    ];
    prop::collection::vec(op, 1..120)
}

/// An engine, the network to it, and a consumer.
#[expect(clippy::struct_excessive_bools, reason = "facts of which any may hold with any other")]
struct World {
    stream: KvStream,
    held: Held,
    now: Duration,
    connected: bool,
    replay: bool,
    /// Messages the engine remembers.
    memory: usize,
    blocks: Blocks,
    next: u64,
    clock: f64,
    log: VecDeque<(u64, Vec<u8>)>,
    late: Option<(u64, Vec<u8>)>,
    /// The next message arrives whatever its fate.
    sure: bool,
    asked: Option<u64>,
    answers: VecDeque<Option<(u64, Vec<u8>)>>,
    garbage: bool,
}

impl World {
    fn new(replay: bool, memory: usize) -> Self {
        let settings = StreamSettings { replay, held_frames: 6, ..StreamSettings::default() };
        Self {
            stream: KvStream::new(settings),
            held: Held::default(),
            now: Duration::ZERO,
            connected: false,
            replay,
            memory,
            blocks: Blocks::new(),
            next: 0,
            clock: 0.0,
            log: VecDeque::new(),
            late: None,
            sure: false,
            asked: None,
            answers: VecDeque::new(),
            garbage: false,
        }
    }

    fn act(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Apply(batch) => self.held.apply(&batch),
                Action::Clear(_) => self.held.0.clear(),
                Action::AskReplay { from } => {
                    assert!(self.replay && self.connected);
                    self.asked = Some(from);
                    self.answers.clear();
                }
                Action::StopReplay => {
                    self.asked = None;
                    self.answers.clear();
                }
            }
        }
        let asking = self.asked.is_some() || !self.answers.is_empty();
        assert_eq!(asking, self.stream.replaying());
    }

    fn arrives(&mut self, seq: u64, payload: &[u8]) {
        if !self.connected {
            return;
        }
        let mut out = Vec::new();
        self.stream.live(Frame::new(seq, payload), self.now, &mut out);
        self.act(out);
    }

    fn send(&mut self, payload: Vec<u8>, fate: Fate) {
        let seq = self.next;
        self.next += 1;
        self.log.push_back((seq, payload.clone()));
        while self.log.len() > self.memory {
            self.log.pop_front();
        }
        let late = self.late.take();
        let fate = if std::mem::take(&mut self.sure) { Fate::Arrives } else { fate };
        match fate {
            Fate::Arrives => self.arrives(seq, &payload),
            Fate::Lost => {}
            Fate::Twice => {
                self.arrives(seq, &payload);
                self.arrives(seq, &payload);
            }
            Fate::Late => self.late = Some((seq, payload)),
            Fate::WithCopy(back) => {
                self.arrives(seq, &payload);
                if let Some((seq, payload)) = self.log.iter().rev().nth(back).cloned() {
                    self.arrives(seq, &payload);
                }
            }
        }
        if let Some((seq, payload)) = late {
            self.arrives(seq, &payload);
        }
    }

    fn step(&mut self, wishes: &[(u8, u64)], fate: Fate) {
        let mut events = Vec::new();
        for (kind, block) in wishes {
            let event = match kind {
                0 => Happens::Cleared,
                1..=7 if self.blocks.contains_key(block) => Happens::Removed(*block),
                _ => Happens::Stored(*block),
            };
            happen(&mut self.blocks, event);
            events.push(event);
        }
        self.clock += 1.0;
        self.send(payload(self.clock, &events), fate);
    }

    fn answer(&mut self, count: usize) {
        if let Some(from) = self.asked.take() {
            self.stream.asked(self.now);
            let past = self.log.iter().filter(|(seq, _)| *seq >= from);
            self.answers = past.cloned().map(Some).chain([None]).collect();
        }
        for _ in 0..count {
            let Some(answer) = self.answers.pop_front() else {
                return;
            };
            let answer = answer
                .map_or(Replayed::End, |(seq, payload)| Replayed::Frame(Frame::new(seq, &payload)));
            let mut out = Vec::new();
            self.stream.replayed(answer, self.now, &mut out);
            self.act(out);
        }
    }

    fn disconnect(&mut self) {
        if self.connected {
            self.late = None;
            self.asked = None;
            self.answers.clear();
            let mut out = Vec::new();
            self.stream.disconnected(&mut out);
            self.connected = false;
            self.act(out);
        }
    }

    fn connect(&mut self) {
        if !self.connected {
            self.connected = true;
            let mut out = Vec::new();
            self.stream.connected(self.now, &mut out);
            self.act(out);
        }
    }

    fn restart(&mut self) {
        self.blocks.clear();
        self.log.clear();
        self.late = None;
        self.next = 0;
        self.answers.clear();
        self.asked = None;
        let mut out = Vec::new();
        self.stream.replay_failed(self.now, &mut out);
        self.act(out);
    }

    fn wait(&mut self, time: Duration) {
        self.now += time;
        let mut out = Vec::new();
        self.stream.tick(self.now, &mut out);
        self.act(out);
    }

    fn run(&mut self, op: &Op) {
        match op {
            Op::Step(wishes, fate) => self.step(wishes, *fate),
            Op::Garbage => {
                self.garbage = true;
                self.clock += 1.0;
                self.send(format!("\u{1}{}", self.clock).into_bytes(), Fate::Arrives);
            }
            Op::Restart => {
                self.disconnect();
                self.restart();
            }
            Op::SilentRestart => {
                self.restart();
                self.sure = true;
            }
            Op::Disconnect => self.disconnect(),
            Op::Connect => self.connect(),
            Op::Answers(count) => self.answer(*count),
            Op::FailReplay => {
                self.asked = None;
                self.answers.clear();
                let mut out = Vec::new();
                self.stream.replay_failed(self.now, &mut out);
                self.act(out);
            }
            Op::Overflow => {
                self.held.0.clear();
                self.stream.lost(self.now);
            }
            Op::Wait(millis) => self.wait(Duration::from_millis(*millis)),
        }
    }

    /// Answers all requests for replays.
    fn answer_all(&mut self) {
        for _ in 0..10_000 {
            if !self.stream.replaying() {
                return;
            }
            self.answer(1);
        }
        panic!("it asks for ever");
    }

    fn settle(&mut self) {
        self.connect();
        for round in 0..6 {
            self.answer_all();
            self.sure = true;
            self.step(&[(10, round)], Fate::Arrives);
            self.answer_all();
            self.wait(secs(61));
        }
        self.answer_all();
    }
}

fn survives(replay: bool, memory: usize, ops: &[Op]) {
    let mut world = World::new(replay, memory);
    for op in ops {
        world.run(op);
    }
    world.settle();
    for (block, copies) in &world.held.0 {
        let real = world.blocks.get(block).copied().unwrap_or(0);
        assert!(*copies <= real, "block {block}: {copies} held, {real} there");
    }
    assert_eq!(world.stream.next(), Some(world.next));
    // All that was told since the start of the engine is known, if it can be had.
    if replay && memory > 1000 && !world.garbage {
        assert_eq!(world.held.0, world.blocks);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn with_a_replay_all_is_known_in_the_end(ops in ops()) {
        survives(true, 1 << 20, &ops);
    }

    #[test]
    fn with_a_short_memory_nothing_false_is_known(ops in ops()) {
        survives(true, 3, &ops);
    }

    #[test]
    fn without_a_replay_nothing_false_is_known(ops in ops()) {
        survives(false, 0, &ops);
    }
}
