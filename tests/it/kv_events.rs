//! KV events over real sockets: an engine stand-in whose PUB and ROUTER are another implementation of ZeroMQ.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use llm_ring::engine::kv_stream::{ClearReason, StreamSettings};
use llm_ring::engine::kv_subscribe::{Change, KvUpdate, Settings, Source, Subscriber};
use llm_ring::engine::kv_wire::KvEvent;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use zeromq::{PubSocket, RouterSocket, Socket as _, SocketRecv as _, SocketSend as _, ZmqMessage};

const TOPIC: &str = "kv@127.0.0.1:8000@tiny";

/// The payloads of the captured messages, in order.
pub(crate) fn captured() -> Vec<Vec<u8>> {
    let data = include_str!("../../src/engine/testdata/vllm_kv_events.json");
    let data: serde_json::Value = serde_json::from_str(data).unwrap();
    let messages = data["runs"][0]["messages"].as_array().unwrap();
    let hex = |text: &str| -> Vec<u8> {
        (0..text.len())
            .step_by(2)
            .map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap())
            .collect()
    };
    messages.iter().map(|message| hex(message["frames_hex"][2].as_str().unwrap())).collect()
}

/// The blocks that the captured messages leave, up to number `count`.
fn blocks(payloads: &[Vec<u8>]) -> BTreeMap<u64, u32> {
    let mut held = Held::default();
    for payload in payloads {
        held.apply(&llm_ring::engine::kv_wire::decode(payload).unwrap().events);
    }
    held.0
}

#[derive(Debug, Default)]
struct Held(BTreeMap<u64, u32>);

impl Held {
    fn apply(&mut self, events: &[KvEvent]) {
        for event in events {
            match event {
                KvEvent::Stored(stored) => {
                    for hash in &stored.hashes {
                        *self.0.entry(hash.get()).or_default() += 1;
                    }
                }
                KvEvent::Removed { hashes, .. } => {
                    for hash in hashes {
                        if let Some(copies) =
                            self.0.remove(&hash.get()).filter(|copies| *copies > 1)
                        {
                            self.0.insert(hash.get(), copies - 1);
                        }
                    }
                }
                KvEvent::Cleared => self.0.clear(),
            }
        }
    }
}

/// Addresses that were free a moment ago.
pub(crate) fn free<const N: usize>() -> [SocketAddr; N] {
    let listeners = [(); N].map(|()| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap());
    listeners.map(|listener| listener.local_addr().unwrap())
}

fn message(parts: &[&[u8]]) -> ZmqMessage {
    let mut message = ZmqMessage::from(parts[0].to_vec());
    for part in &parts[1..] {
        message.push_back(part.to_vec().into());
    }
    message
}

/// How a replay's answers are framed.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Framing {
    /// vLLM up to 0.25, `SGLang`.
    Short,
    /// vLLM since 0.26.
    WithTopic,
}

type Log = Arc<Mutex<Vec<(u64, Vec<u8>)>>>;

/// A model server's side.
pub(crate) struct Engine {
    publisher: PubSocket,
    log: Log,
    replays: tokio::task::JoinHandle<()>,
}

impl Engine {
    pub(crate) async fn start(live: SocketAddr, replay: SocketAddr, framing: Framing) -> Self {
        let mut publisher = PubSocket::new();
        publisher.bind(&format!("tcp://{live}")).await.unwrap();
        let log = Log::default();
        let mut router = RouterSocket::new();
        router.bind(&format!("tcp://{replay}")).await.unwrap();
        let past = Arc::clone(&log);
        let replays = tokio::spawn(async move {
            loop {
                let request = router.recv().await.unwrap().into_vec();
                let [peer, empty, from] = request.as_slice() else { panic!("{request:?}") };
                assert!(empty.is_empty());
                let from = u64::from_be_bytes(from.as_ref().try_into().unwrap());
                let past: Vec<_> =
                    past.lock().unwrap().iter().filter(|(seq, _)| *seq >= from).cloned().collect();
                for (seq, payload) in past.into_iter().chain([(u64::MAX, Vec::new())]) {
                    let seq = seq.to_be_bytes();
                    let answer = match framing {
                        Framing::Short => message(&[peer, b"", &seq, &payload]),
                        Framing::WithTopic => {
                            message(&[peer, b"", TOPIC.as_bytes(), &seq, &payload])
                        }
                    };
                    router.send(answer).await.unwrap();
                }
            }
        });
        Self { publisher, log, replays }
    }

    /// Says a message, or loses it.
    pub(crate) async fn say(&mut self, payload: &[u8], heard: bool) {
        let seq = {
            let mut log = self.log.lock().unwrap();
            let seq = log.len() as u64;
            log.push((seq, payload.to_vec()));
            seq
        };
        if heard {
            let live = message(&[TOPIC.as_bytes(), &seq.to_be_bytes(), payload]);
            self.publisher.send(live).await.unwrap();
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.replays.abort();
    }
}

fn settings() -> Settings {
    Settings {
        topic_prefix: "kv@".to_owned(),
        reconnect_min: Duration::from_millis(20),
        reconnect_max: Duration::from_millis(100),
        stream: StreamSettings {
            retry_min: Duration::from_millis(50),
            probe_after: Duration::from_millis(300),
            ..StreamSettings::default()
        },
        ..Settings::default()
    }
}

/// Applies updates until the blocks held are those.
async fn until(
    updates: &mut mpsc::Receiver<KvUpdate>,
    held: &mut Held,
    blocks: &BTreeMap<u64, u32>,
) -> Vec<ClearReason> {
    let mut clears = Vec::new();
    let settled = async {
        while held.0 != *blocks {
            match updates.recv().await.unwrap().change {
                Change::Apply(batch) => held.apply(&batch.events),
                Change::Clear(reason) => {
                    clears.push(reason);
                    held.0.clear();
                }
            }
        }
    };
    if timeout(Duration::from_secs(20), settled).await.is_err() {
        panic!("held {:?}, wanted {blocks:?}, cleared for {clears:?}", held.0);
    }
    clears
}

/// Sends until something is heard, since a subscription takes a while to be known.
async fn connected(subscriber: &Subscriber, times: u64) {
    let wait = async {
        while subscriber.counts().connected < times {
            sleep(Duration::from_millis(10)).await;
        }
        sleep(Duration::from_millis(100)).await;
    };
    timeout(Duration::from_secs(20), wait).await.unwrap();
}

async fn loses_and_restarts(framing: Framing) {
    let payloads = captured();
    let [live, replay] = free();
    let (out, mut updates) = mpsc::channel(64);
    let mut subscriber = Subscriber::new(settings(), out);
    let engine = Arc::from("127.0.0.1:8000");
    // It is not there yet.
    let generation = subscriber.follow(&engine, 0, live.to_string(), Some(replay.to_string()));
    sleep(Duration::from_millis(100)).await;
    assert!(subscriber.counts().refused > 0);

    let mut held = Held::default();
    let mut model = Engine::start(live, replay, framing).await;
    // Said before anyone listens.
    model.say(&payloads[0], false).await;
    connected(&subscriber, 1).await;
    for (at, payload) in payloads[1..].iter().enumerate() {
        model.say(payload, at % 3 != 1).await;
    }
    let clears = until(&mut updates, &mut held, &blocks(&payloads)).await;
    assert!(clears.is_empty(), "{clears:?}");

    // A new one, whose first messages nobody hears.
    drop(model);
    sleep(Duration::from_millis(50)).await;
    let mut model = Engine::start(live, replay, framing).await;
    for payload in &payloads[..3] {
        model.say(payload, false).await;
    }
    connected(&subscriber, 2).await;
    model.say(&payloads[3], true).await;
    until(&mut updates, &mut held, &blocks(&payloads[..4])).await;
    // The last of a burst is lost; that is found out when it is silent for a while.
    model.say(&payloads[4], false).await;
    until(&mut updates, &mut held, &blocks(&payloads[..5])).await;

    subscriber.forget(&engine);
    sleep(Duration::from_millis(50)).await;
    while let Ok(update) = updates.try_recv() {
        assert_eq!(update.source, Source { endpoint: Arc::clone(&engine), rank: 0, generation });
    }
    model.say(&payloads[5], true).await;
    sleep(Duration::from_millis(100)).await;
    assert!(updates.try_recv().is_err(), "an engine that was forgotten is not heard");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_loses_messages_and_restarts_is_followed() {
    loses_and_restarts(Framing::WithTopic).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_with_the_old_framing_is_followed() {
    loses_and_restarts(Framing::Short).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_replay_what_is_missing_clears() {
    let payloads = captured();
    let [live, replay] = free();
    let (out, mut updates) = mpsc::channel(64);
    let mut subscriber = Subscriber::new(settings(), out);
    let mut model = Engine::start(live, replay, Framing::Short).await;
    subscriber.follow(&Arc::from("e"), 3, live.to_string(), None);
    connected(&subscriber, 1).await;
    let mut held = Held::default();
    model.say(&payloads[0], true).await;
    model.say(&payloads[1], true).await;
    until(&mut updates, &mut held, &blocks(&payloads[..2])).await;
    model.say(&payloads[2], false).await;
    model.say(&payloads[3], true).await;
    let clears = until(&mut updates, &mut held, &blocks(&payloads[3..4])).await;
    assert_eq!(clears, [ClearReason::Gap]);
    drop(model);
    let clears = until(&mut updates, &mut held, &BTreeMap::new()).await;
    assert_eq!(clears, [ClearReason::Disconnected]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_that_sleeps_is_cleared_and_filled_again() {
    let payloads = captured();
    let [live, replay] = free();
    let (out, mut updates) = mpsc::channel(2);
    let settings = Settings { patience: Duration::from_millis(5), ..settings() };
    let mut subscriber = Subscriber::new(settings, out);
    let mut model = Engine::start(live, replay, Framing::WithTopic).await;
    subscriber.follow(&Arc::from("e"), 0, live.to_string(), Some(replay.to_string()));
    connected(&subscriber, 1).await;
    for payload in &payloads {
        model.say(payload, true).await;
    }
    let dropped = async {
        while subscriber.counts().dropped == 0 {
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(Duration::from_secs(20), dropped).await.unwrap();
    let mut held = Held::default();
    let clears = until(&mut updates, &mut held, &blocks(&payloads)).await;
    assert!(clears.contains(&ClearReason::Overflow), "{clears:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn engines_that_connect_are_told_apart() {
    let payloads = captured();
    let (out, mut updates) = mpsc::channel(64);
    let mut subscriber = Subscriber::new(settings(), out);
    let address = subscriber.listen((Ipv4Addr::LOCALHOST, 0).into()).await.unwrap();
    let mut publishers = Vec::new();
    for _ in 0..2 {
        let mut publisher = PubSocket::new();
        publisher.connect(&format!("tcp://{address}")).await.unwrap();
        publishers.push(publisher);
    }
    connected(&subscriber, 2).await;
    let topics = ["kv@10.0.0.1:8000@tiny", "kv@10.0.0.2:8000@tiny"];
    let live = |topic: &str, seq: u64, payload: &[u8]| {
        message(&[topic.as_bytes(), &seq.to_be_bytes(), payload])
    };
    for seq in 0..3_u64 {
        for (publisher, topic) in publishers.iter_mut().zip(topics) {
            publisher
                .send(live(topic, seq, &payloads[usize::try_from(seq).unwrap()]))
                .await
                .unwrap();
        }
    }
    // Under another's name, and under none.
    publishers[0].send(live(topics[1], 3, &payloads[3])).await.unwrap();
    publishers[1].send(live("kv@10.0.0.2:8000", 3, &payloads[3])).await.unwrap();
    publishers[1].send(ZmqMessage::from("kv@alone")).await.unwrap();
    let mut held: BTreeMap<Arc<str>, Held> = BTreeMap::new();
    let wanted = blocks(&payloads[..3]);
    let both = async {
        while held.values().filter(|held| held.0 == wanted).count() < 2 {
            let update = updates.recv().await.unwrap();
            assert_eq!(update.source.rank, 0);
            if let Change::Apply(batch) = update.change {
                held.entry(update.source.endpoint).or_default().apply(&batch.events);
            }
        }
    };
    timeout(Duration::from_secs(20), both).await.unwrap();
    let names: Vec<&str> = held.keys().map(|name| &**name).collect();
    assert_eq!(names, ["10.0.0.1:8000", "10.0.0.2:8000"]);
    let counted = async {
        while (subscriber.counts().bad_topic, subscriber.counts().bad_parts) != (2, 1) {
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(Duration::from_secs(20), counted).await.unwrap();
    // One goes: its blocks go at once, the other's stay.
    publishers.remove(0);
    let gone = timeout(Duration::from_secs(20), updates.recv()).await.unwrap().unwrap();
    assert_eq!(
        (&*gone.source.endpoint, gone.change),
        ("10.0.0.1:8000", Change::Clear(ClearReason::Disconnected))
    );
}

/// What a peer may do that is no engine.
#[tokio::test(flavor = "multi_thread")]
async fn peers_that_are_no_engines_are_left() {
    let mut greeting = vec![0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0x7f, 3, 0];
    greeting.extend_from_slice(b"NULL");
    greeting.resize(64, 0);
    let ready = |kind: &str| {
        let mut body = b"\x05READY\x0bSocket-Type".to_vec();
        body.extend_from_slice(&u32::try_from(kind.len()).unwrap().to_be_bytes());
        body.extend_from_slice(kind.as_bytes());
        [&[4, u8::try_from(body.len()).unwrap()], body.as_slice()].concat()
    };
    let terabyte = [&[2], (1_u64 << 40).to_be_bytes().as_slice(), b"x"].concat();
    let words: [Vec<u8>; 5] = [
        b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(),
        [greeting.clone(), ready("PULL")].concat(),
        [greeting.clone(), ready("PUB"), terabyte].concat(),
        [greeting.clone(), ready("PUB"), [1, 0].repeat(100)].concat(),
        greeting[..20].to_vec(),
    ];
    let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let (out, _updates) = mpsc::channel(4);
    let mut settings = settings();
    settings.connect_timeout = Duration::from_millis(200);
    let mut subscriber = Subscriber::new(settings, out);
    subscriber.follow(&Arc::from("e"), 0, listener.local_addr().unwrap().to_string(), None);
    for words in words {
        let (mut stream, _) =
            timeout(Duration::from_secs(20), listener.accept()).await.unwrap().unwrap();
        stream.write_all(&words).await.unwrap();
        let mut all = Vec::new();
        let closed = timeout(Duration::from_secs(5), stream.read_to_end(&mut all)).await;
        assert!(closed.is_ok(), "not left: {words:?}");
    }
    let counts = subscriber.counts();
    assert_eq!((counts.connected, counts.stream.applied), (2, 0));
    assert!(counts.refused >= 2);
}
