#![allow(clippy::disallowed_methods, reason = "subscriptions own a clock, timers and tasks")]
//! The sockets of KV events: a connection to each rank of each engine that publishes at an address of its own, or one
//! address here that engines connect to. Each connection is a [`KvStream`]; what those make of it goes to one bounded
//! channel.
//!
//! The reader does not wait for a consumer that is slow: past a moment's patience updates are dropped, and the stream
//! they belong to is cleared and filled again. The clearing is kept until it can be told.

use std::collections::HashMap;
use std::future::{Future, pending};
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use super::kv_stream::{
    self, Action, ClearReason, Frame, FrameError, KvStream, Replayed, StreamCounts, StreamSettings,
};
use super::kv_wire::KvBatch;
use super::zmtp::{Connection, Error, Role};

/// Answers of one replay that wait to be applied.
const ANSWERS: usize = 64;

/// Whose events: one cache of one engine.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Source {
    /// The engine: as given to [`Subscriber::follow`], or as the topic names it.
    pub endpoint: Arc<str>,
    /// Its data-parallel rank.
    pub rank: u32,
    /// Tells this subscription from others of the same name: the first update of a higher one says that the older is
    /// over, and updates of the older that are still under way are to be dropped.
    pub generation: u64,
}

/// What became of a cache.
#[derive(Debug, Clone, PartialEq)]
pub enum Change {
    /// These events happened, after all those told since the last clearing.
    Apply(KvBatch),
    /// Nothing is known of it any more.
    Clear(ClearReason),
}

/// One change of one cache.
#[derive(Debug, Clone, PartialEq)]
pub struct KvUpdate {
    /// Whose.
    pub source: Source,
    /// Which.
    pub change: Change,
}

/// How engines are listened to.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Only topics that begin with this are wanted; all when it is empty.
    pub topic_prefix: String,
    /// The longest message taken, in bytes.
    pub max_message: usize,
    /// A connection and its greeting take no longer than this.
    pub connect_timeout: Duration,
    /// The wait before an engine is tried again, twice as long each time it is not there.
    pub reconnect_min: Duration,
    /// The longest such wait.
    pub reconnect_max: Duration,
    /// How long a full channel is waited for before updates are dropped.
    pub patience: Duration,
    /// Replays that run at a time, over all engines.
    pub replays: usize,
    /// Connections taken at once where engines connect to us.
    pub max_connections: usize,
    /// How each stream behaves; whether it has a replay is found from its addresses.
    pub stream: StreamSettings,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            topic_prefix: String::new(),
            max_message: 16 << 20,
            connect_timeout: Duration::from_secs(5),
            reconnect_min: Duration::from_millis(200),
            reconnect_max: Duration::from_secs(5),
            patience: Duration::from_millis(100),
            replays: 8,
            max_connections: 1024,
            stream: StreamSettings::default(),
        }
    }
}

/// What all subscriptions have counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// What their streams have.
    pub stream: StreamCounts,
    /// Connections for live events that were made,
    pub connected: u64,
    /// that could not be made, or were not with an engine,
    pub refused: u64,
    /// and that broke.
    pub disconnected: u64,
    /// Messages of a wrong number of parts,
    pub bad_parts: u64,
    /// without a sequence number,
    pub bad_sequence: u64,
    /// or too large.
    pub too_large: u64,
    /// Messages under another topic than the connection's first, or one that names no engine.
    pub bad_topic: u64,
    /// Updates dropped because the consumer was too slow.
    pub dropped: u64,
}

/// All subscriptions; dropping it ends them.
#[derive(Debug)]
pub struct Subscriber {
    shared: Arc<Shared>,
    followed: HashMap<Arc<str>, Vec<Task>>,
    listeners: Vec<Task>,
}

#[derive(Debug)]
struct Shared {
    settings: Settings,
    out: mpsc::Sender<KvUpdate>,
    replays: Arc<Semaphore>,
    start: Instant,
    counts: Mutex<Counts>,
    /// The subscriptions so far.
    generations: Mutex<u64>,
}

impl Shared {
    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    fn count(&self, change: impl FnOnce(&mut Counts)) {
        change(&mut self.counts.lock().unwrap_or_else(PoisonError::into_inner));
    }

    fn generation(&self) -> u64 {
        let mut generations = self.generations.lock().unwrap_or_else(PoisonError::into_inner);
        *generations += 1;
        *generations
    }
}

/// A task that ends when this is dropped.
#[derive(Debug)]
struct Task(JoinHandle<()>);

impl Task {
    fn spawn(future: impl Future<Output = ()> + Send + 'static) -> Self {
        Self(tokio::spawn(future))
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Subscriber {
    /// Makes one without subscriptions, whose updates go to `out`. It belongs to the runtime it is made on.
    #[must_use]
    pub fn new(settings: Settings, out: mpsc::Sender<KvUpdate>) -> Self {
        let replays = Arc::new(Semaphore::new(settings.replays));
        let shared = Shared {
            settings,
            out,
            replays,
            start: Instant::now(),
            counts: Mutex::default(),
            generations: Mutex::default(),
        };
        Self { shared: Arc::new(shared), followed: HashMap::new(), listeners: Vec::new() }
    }

    /// What was counted so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        *self.shared.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Listens to one rank of an engine at `live` (host:port of its PUB socket), asking at `replay` (of its ROUTER
    /// socket), if it has one, for what was missed. An engine that is not there yet is awaited. Gives the generation
    /// its updates have.
    pub fn follow(
        &mut self,
        endpoint: &Arc<str>,
        rank: u32,
        live: String,
        replay: Option<String>,
    ) -> u64 {
        let generation = self.shared.generation();
        let source = Source { endpoint: Arc::clone(endpoint), rank, generation };
        let mut settings = self.shared.settings.stream;
        settings.replay = replay.is_some();
        let reader = Reader::new(Arc::clone(&self.shared), source, settings, replay);
        let task = Task::spawn(follow(reader, live));
        self.followed.entry(Arc::clone(endpoint)).or_default().push(task);
        generation
    }

    /// Stops listening to all ranks of an engine. Nothing is told of it: what is known of them is the consumer's to
    /// drop, with what is still in the channel.
    pub fn forget(&mut self, endpoint: &str) {
        self.followed.remove(endpoint);
    }

    /// Takes connections at `address` from engines whose topics name them: `kv@engine@model`. They are not asked for
    /// replays: nothing but their own word says where, and who they are. Gives the address in use.
    ///
    /// # Errors
    /// The address cannot be had.
    pub async fn listen(&mut self, address: SocketAddr) -> io::Result<SocketAddr> {
        let listener = TcpListener::bind(address).await?;
        let address = listener.local_addr()?;
        self.listeners.push(Task::spawn(listen(Arc::clone(&self.shared), listener)));
        Ok(address)
    }
}

/// Makes one connection after the other.
async fn follow(mut reader: Reader, live: String) {
    let shared = Arc::clone(&reader.shared);
    let settings = &shared.settings;
    let mut wait = settings.reconnect_min;
    loop {
        match connect(&shared, &live, Role::Sub).await {
            Ok(connection) => {
                shared.count(|counts| counts.connected += 1);
                let since = Instant::now();
                let error = reader.read(connection).await;
                shared.count(|counts| counts.disconnected += 1);
                tracing::debug!(%live, %error, "KV events ended");
                if since.elapsed() >= settings.reconnect_max {
                    wait = settings.reconnect_min;
                }
            }
            Err(error) => {
                shared.count(|counts| counts.refused += 1);
                tracing::debug!(%live, %error, "no KV events");
            }
        }
        // What could not be told yet is told while nothing else happens.
        let (_, ()) = tokio::join!(timeout(wait, reader.told()), sleep(wait));
        wait = (wait * 2).min(settings.reconnect_max);
    }
}

async fn connect(shared: &Shared, address: &str, role: Role) -> Result<Connection, Error> {
    let settings = &shared.settings;
    let opened = async {
        let stream = TcpStream::connect(address).await?;
        let mut connection = Connection::open(stream, role, settings.max_message).await?;
        if role == Role::Sub {
            connection.subscribe(settings.topic_prefix.as_bytes()).await?;
        }
        Ok(connection)
    };
    match timeout(settings.connect_timeout, opened).await {
        Ok(opened) => opened,
        Err(_) => Err(io::Error::from(io::ErrorKind::TimedOut).into()),
    }
}

/// The connections of engines that came by themselves, by engine and rank.
type Taken = Arc<tokio::sync::Mutex<HashMap<(Arc<str>, u32), (u64, tokio::task::AbortHandle)>>>;

async fn listen(shared: Arc<Shared>, listener: TcpListener) {
    let taken = Taken::default();
    let mut tasks = tokio::task::JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, peer)) if tasks.len() < shared.settings.max_connections => {
                    tasks.spawn(take(Arc::clone(&shared), stream, peer, Arc::clone(&taken)));
                }
                Ok(_) => shared.count(|counts| counts.refused += 1),
                // Out of sockets, most likely: that passes.
                Err(error) => {
                    tracing::warn!(%error, "an engine's connection was not taken");
                    sleep(Duration::from_millis(100)).await;
                }
            },
            Some(_) = tasks.join_next() => {}
        }
    }
}

/// Reads what an engine sends that has connected to us.
async fn take(shared: Arc<Shared>, stream: TcpStream, peer: SocketAddr, taken: Taken) {
    let settings = &shared.settings;
    let opened = async {
        let mut connection = Connection::open(stream, Role::Sub, settings.max_message).await?;
        connection.subscribe(settings.topic_prefix.as_bytes()).await?;
        Ok::<_, Error>(connection)
    };
    let Ok(Ok(mut connection)) = timeout(settings.connect_timeout, opened).await else {
        shared.count(|counts| counts.refused += 1);
        return;
    };
    shared.count(|counts| counts.connected += 1);
    let error = loop {
        let message = match connection.recv().await {
            Ok(message) => message,
            Err(error) => break error,
        };
        let Some((topic, first)) = shared.parse(&message) else {
            continue;
        };
        let Some(endpoint) = engine_of(topic) else {
            shared.count(|counts| counts.bad_topic += 1);
            continue;
        };
        let rank = first.batch.as_ref().ok().and_then(|batch| batch.rank).unwrap_or(0);
        let key = (Arc::<str>::from(endpoint), rank);
        let source = Source { endpoint: Arc::clone(&key.0), rank, generation: shared.generation() };
        let generation = source.generation;
        let mut stream = settings.stream;
        stream.replay = false;
        let mut reader = Reader::new(Arc::clone(&shared), source, stream, None);
        reader.topic = Some(topic.to_vec());
        // One that was there under this name is an older connection of the same engine: what it told is not true any
        // more.
        reader.owed = Some(ClearReason::Restart);
        let (send, mut ended) = mpsc::channel(1);
        let task = Task::spawn(async move {
            let _ended = send;
            reader.first(first).await;
            let error = reader.read(connection).await;
            tracing::debug!(%peer, %error, "KV events ended");
            reader.told().await;
        });
        let before = taken.lock().await.insert(key.clone(), (generation, task.0.abort_handle()));
        if let Some((_, before)) = before {
            before.abort();
        }
        // Ends with the task; and with this one, the task ends.
        let _none: Option<()> = ended.recv().await;
        let mut taken = taken.lock().await;
        if taken.get(&key).is_some_and(|(current, _)| *current == generation) {
            taken.remove(&key);
        }
        shared.count(|counts| counts.disconnected += 1);
        return;
    };
    tracing::debug!(%peer, %error, "a connection without KV events");
    shared.count(|counts| counts.disconnected += 1);
}

/// Finds the engine in a topic of three parts.
fn engine_of(topic: &[u8]) -> Option<&str> {
    let mut parts = std::str::from_utf8(topic).ok()?.split('@');
    let (Some("kv"), Some(engine), Some(_), None) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return None;
    };
    Some(engine).filter(|engine| !engine.is_empty())
}

impl Shared {
    /// Reads a live message, or counts why it is none.
    fn parse<'a>(&self, message: &'a [Vec<u8>]) -> Option<(&'a [u8], Frame)> {
        let parts: Vec<&[u8]> = message.iter().map(Vec::as_slice).collect();
        match kv_stream::live(&parts, self.settings.max_message) {
            Ok(found) => Some(found),
            Err(error) => {
                self.bad(error);
                None
            }
        }
    }

    fn bad(&self, error: FrameError) {
        self.count(|counts| match error {
            FrameError::Parts(_) => counts.bad_parts += 1,
            FrameError::Sequence => counts.bad_sequence += 1,
            FrameError::Size(_) => counts.too_large += 1,
        });
    }
}

/// What a replay's task tells.
#[derive(Debug)]
enum Told {
    Asked,
    Answer(Replayed),
}

/// A replay that runs.
#[derive(Debug)]
struct Asking {
    answers: mpsc::Receiver<Told>,
    _task: Task,
}

/// One stream and the way to its consumer.
#[derive(Debug)]
struct Reader {
    shared: Arc<Shared>,
    source: Source,
    stream: KvStream,
    /// Where to ask for replays.
    replay: Option<String>,
    asking: Option<Asking>,
    /// The one topic taken; any when none.
    topic: Option<Vec<u8>>,
    /// The consumer holds what is not so any more and has not been told.
    owed: Option<ClearReason>,
    counted: StreamCounts,
    actions: Vec<Action>,
}

impl Reader {
    fn new(
        shared: Arc<Shared>,
        source: Source,
        settings: StreamSettings,
        replay: Option<String>,
    ) -> Self {
        Self {
            shared,
            source,
            stream: KvStream::new(settings),
            replay,
            asking: None,
            topic: None,
            owed: None,
            counted: StreamCounts::default(),
            actions: Vec::new(),
        }
    }

    /// Takes a message that was read before it was known whose it is.
    async fn first(&mut self, frame: Frame) {
        self.stream.live(frame, self.shared.now(), &mut self.actions);
        self.perform().await;
    }

    /// Reads a connection until it breaks.
    async fn read(&mut self, mut connection: Connection) -> Error {
        self.stream.connected(self.shared.now(), &mut self.actions);
        let error = loop {
            self.perform().await;
            let wake = async {
                let now = self.shared.now();
                // What is owed is tried again when nothing else happens.
                let owed = self.owed.map(|_| now + self.shared.settings.patience);
                match (self.stream.deadline(), owed) {
                    (Some(at), None) | (None, Some(at)) => sleep(at.saturating_sub(now)).await,
                    (Some(at), Some(owed)) => sleep(at.min(owed).saturating_sub(now)).await,
                    (None, None) => pending().await,
                }
            };
            let answer = async {
                match &mut self.asking {
                    Some(asking) => asking.answers.recv().await,
                    None => pending().await,
                }
            };
            tokio::select! {
                message = connection.recv() => match message {
                    Ok(message) => self.take(&message),
                    Err(error) => break error,
                },
                told = answer => self.hear(told),
                () = wake => self.stream.tick(self.shared.now(), &mut self.actions),
            }
        };
        self.stream.disconnected(&mut self.actions);
        self.perform().await;
        error
    }

    fn take(&mut self, message: &[Vec<u8>]) {
        let Some((topic, frame)) = self.shared.parse(message) else {
            return;
        };
        if self.topic.as_ref().is_some_and(|expected| expected != topic) {
            self.shared.count(|counts| counts.bad_topic += 1);
            return;
        }
        self.stream.live(frame, self.shared.now(), &mut self.actions);
    }

    fn hear(&mut self, told: Option<Told>) {
        let now = self.shared.now();
        match told {
            Some(Told::Asked) => self.stream.asked(now),
            Some(Told::Answer(answer)) => self.stream.replayed(answer, now, &mut self.actions),
            None => {
                self.asking = None;
                self.stream.replay_failed(now, &mut self.actions);
            }
        }
        if !self.stream.replaying() {
            self.asking = None;
        }
    }

    /// Does what the stream wants done.
    async fn perform(&mut self) {
        let mut patience = self.shared.settings.patience;
        let mut lost = false;
        for action in std::mem::take(&mut self.actions) {
            let change = match action {
                Action::Apply(batch) => Change::Apply(batch),
                Action::Clear(reason) => {
                    // One clearing is enough.
                    self.owed = Some(self.owed.unwrap_or(reason));
                    continue;
                }
                Action::AskReplay { from } => {
                    self.asking = self.replay.clone().map(|at| ask(&self.shared, at, from));
                    continue;
                }
                Action::StopReplay => {
                    self.asking = None;
                    continue;
                }
            };
            if !self.tell_owed(&mut patience).await || !self.tell(change, &mut patience).await {
                self.owed = Some(ClearReason::Overflow);
                lost = true;
                self.shared.count(|counts| counts.dropped += 1);
            }
        }
        if lost {
            self.stream.lost(self.shared.now());
        }
        let mut none = Duration::ZERO;
        self.tell_owed(&mut none).await;
        let counts = *self.stream.counts();
        if counts != self.counted {
            self.shared.count(|all| all.stream.add(&counts, &self.counted));
            self.counted = counts;
        }
    }

    /// Tells of a clearing that has not been told, if there is one.
    async fn tell_owed(&mut self, patience: &mut Duration) -> bool {
        let Some(reason) = self.owed else {
            return true;
        };
        let told = self.tell(Change::Clear(reason), patience).await;
        if told {
            self.owed = None;
        }
        told
    }

    /// Waits until all that is owed is told.
    async fn told(&mut self) {
        if let Some(reason) = self.owed {
            let update = KvUpdate { source: self.source.clone(), change: Change::Clear(reason) };
            // No consumer is left when it fails.
            if self.shared.out.send(update).await.is_ok() {
                self.owed = None;
            }
        }
    }

    async fn tell(&self, change: Change, patience: &mut Duration) -> bool {
        let update = KvUpdate { source: self.source.clone(), change };
        match self.shared.out.try_send(update) {
            Ok(()) => true,
            Err(mpsc::error::TrySendError::Full(update)) if !patience.is_zero() => {
                let since = Instant::now();
                let sent = timeout(*patience, self.shared.out.send(update)).await;
                *patience = patience.saturating_sub(since.elapsed());
                matches!(sent, Ok(Ok(())))
            }
            Err(_) => false,
        }
    }
}

/// Asks an engine for a replay.
fn ask(shared: &Arc<Shared>, at: String, from: u64) -> Asking {
    let (tell, answers) = mpsc::channel(ANSWERS);
    let shared = Arc::clone(shared);
    let task = Task::spawn(async move {
        let Ok(_turn) = shared.replays.acquire().await else {
            return;
        };
        let error = match replay(&shared, &at, from, &tell).await {
            Ok(()) => return,
            Err(error) => error,
        };
        tracing::debug!(%at, from, %error, "no replay of KV events");
    });
    Asking { answers, _task: task }
}

async fn replay(
    shared: &Shared,
    at: &str,
    from: u64,
    tell: &mpsc::Sender<Told>,
) -> Result<(), Error> {
    let mut connection = connect(shared, at, Role::Dealer).await?;
    connection.send(&kv_stream::request(from)).await?;
    // A stream that does not listen any more has ended this task.
    let closed = || Error::Io(io::ErrorKind::BrokenPipe.into());
    tell.send(Told::Asked).await.map_err(|_nobody| closed())?;
    loop {
        let message = connection.recv().await?;
        let parts: Vec<&[u8]> = message.iter().map(Vec::as_slice).collect();
        let answer = match kv_stream::replayed(&parts, shared.settings.max_message) {
            Ok(answer) => answer,
            Err(error) => {
                shared.bad(error);
                continue;
            }
        };
        let ended = matches!(answer, Replayed::End);
        tell.send(Told::Answer(answer)).await.map_err(|_nobody| closed())?;
        if ended {
            return Ok(());
        }
    }
}
