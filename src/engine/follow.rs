#![allow(
    clippy::disallowed_methods,
    reason = "this file owns the thread on which engines are heard, and its clock"
)]
//! The thread on which engines are heard: their metrics and their KV events. It follows the pool, and brings what it
//! hears to [`Knowledge`]. When it hears nothing, what is known grows old and routing goes on without it.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, watch};

use super::dialect::Ranks;
use super::knowledge::Knowledge;
use super::kv_subscribe::{self, KvUpdate, Subscriber};
use super::scrape::{self, Scraper, SettingsError, Slot, Target};
use crate::pool::{EndpointId, PoolSnapshot};

/// Updates of events that wait to be entered.
const UPDATES: usize = 1024;
/// How often what has ended is dropped, and sizes of caches are looked at.
const TICK: Duration = Duration::from_secs(1);

/// Whom to hear, and how.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// How metrics are asked for, if they are.
    pub metrics: Option<scrape::Settings>,
    /// How events are heard, if they are.
    pub events: Option<Events>,
}

/// How KV events are heard.
#[derive(Debug, Clone)]
pub struct Events {
    /// Port of the first rank's PUB socket; each further rank's is one higher. `None`: engines connect to us.
    pub port: Option<u16>,
    /// Port of the first rank's ROUTER socket for replays; each further rank's is one higher.
    pub replay_port: Option<u16>,
    /// Data-parallel ranks of an engine.
    pub ranks: u32,
    /// Where engines connect to us.
    pub listen: Option<SocketAddr>,
    /// The rest.
    pub subscriber: kv_subscribe::Settings,
}

/// Why engines cannot be heard.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The settings of metrics contradict themselves.
    #[error(transparent)]
    Metrics(#[from] SettingsError),
    /// The address for engines' connections cannot be had.
    #[error("cannot listen for KV events on {0}: {1}")]
    Listen(SocketAddr, #[source] std::io::Error),
    /// The system has no thread for it.
    #[error("no thread for hearing engines: {0}")]
    Thread(#[from] std::io::Error),
}

/// Hears the engines of the pool on a thread of its own until the process ends; times are since `epoch`.
///
/// # Errors
/// See [`Error`].
pub fn start(
    settings: Settings,
    knowledge: Arc<Knowledge>,
    mut pool: watch::Receiver<Arc<PoolSnapshot>>,
    epoch: Instant,
) -> Result<(), Error> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let Settings { metrics, events } = settings;
    let handle = runtime.handle().clone();
    let mut scraper = metrics.map(|it| Scraper::new(it, epoch, handle)).transpose()?;
    let (updates, mut heard) = mpsc::channel(UPDATES);
    let mut ears = None;
    if let Some(events) = events {
        let entered = runtime.enter();
        let mut subscriber = Subscriber::new(events.subscriber.clone(), updates);
        drop(entered);
        if let Some(address) = events.listen {
            let listening = runtime.block_on(subscriber.listen(address));
            let address = listening.map_err(|error| Error::Listen(address, error))?;
            tracing::info!(%address, "engines may connect with KV events");
        }
        ears = Some(Ears { events, subscriber, followed: BTreeMap::new(), names: BTreeMap::new() });
    }
    let run = async move {
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        follow(&knowledge, &pool.borrow_and_update().clone(), scraper.as_mut(), ears.as_mut());
        loop {
            tokio::select! {
                changed = pool.changed() => {
                    // The pool is followed for as long as the picker runs.
                    if changed.is_err() {
                        return;
                    }
                    let pool = pool.borrow_and_update().clone();
                    follow(&knowledge, &pool, scraper.as_mut(), ears.as_mut());
                }
                Some(update) = heard.recv() => {
                    if let Some(ears) = &ears {
                        ears.tell(&knowledge, &update, epoch.elapsed());
                    }
                }
                _ = tick.tick() => {
                    let counts = ears.as_ref().map(|it| it.subscriber.counts());
                    knowledge.tick(epoch.elapsed(), counts.unwrap_or_default());
                }
            }
        }
    };
    std::thread::Builder::new().name("engines".to_owned()).spawn(move || runtime.block_on(run))?;
    Ok(())
}

fn follow(
    knowledge: &Knowledge,
    pool: &PoolSnapshot,
    scraper: Option<&mut Scraper>,
    ears: Option<&mut Ears>,
) {
    let target = |(endpoint, &id): (&crate::pool::Endpoint, &EndpointId)| Target {
        id,
        address: endpoint.address,
        engine: endpoint.engine,
        ranks: Ranks::Summed,
    };
    let targets: Vec<Target> = pool.endpoints().iter().zip(pool.ids()).map(target).collect();
    let slots: Vec<Arc<Slot>> = scraper.map_or_else(Vec::new, |scraper| scraper.set(&targets));
    knowledge.adopt(pool, &slots);
    if let Some(ears) = ears {
        ears.follow(pool);
    }
}

/// Who is listened to.
struct Ears {
    events: Events,
    subscriber: Subscriber,
    /// The lives of the endpoints that are followed, by name, and the first generation of each.
    followed: BTreeMap<Arc<str>, (EndpointId, u64)>,
    /// What engines that connect to us may call themselves.
    names: BTreeMap<String, EndpointId>,
}

impl Ears {
    fn follow(&mut self, pool: &PoolSnapshot) {
        let now: BTreeMap<Arc<str>, EndpointId> = pool
            .endpoints()
            .iter()
            .zip(pool.ids())
            .map(|(endpoint, &id)| (Arc::from(endpoint.name.as_str()), id))
            .collect();
        if self.events.listen.is_some() {
            self.names.clear();
            for (endpoint, &id) in pool.endpoints().iter().zip(pool.ids()) {
                let address = endpoint.address;
                self.names.entry(address.ip().to_string()).or_insert(id);
                self.names.insert(address.to_string(), id);
                self.names.insert(endpoint.name.clone(), id);
            }
        }
        let Some(port) = self.events.port else { return };
        self.followed.retain(|name, (id, _)| {
            let stays = now.get(name) == Some(id);
            if !stays {
                self.subscriber.forget(name);
            }
            stays
        });
        for (endpoint, &id) in pool.endpoints().iter().zip(pool.ids()) {
            let name: Arc<str> = Arc::from(endpoint.name.as_str());
            if self.followed.contains_key(&name) {
                continue;
            }
            for rank in 0..self.events.ranks {
                // Ports are checked to end below 65,536 when the settings are made.
                let offset = u16::try_from(rank).unwrap_or(u16::MAX);
                let at = |port: u16| {
                    SocketAddr::new(endpoint.address.ip(), port.saturating_add(offset)).to_string()
                };
                let replay = self.events.replay_port.map(at);
                let generation = self.subscriber.follow(&name, rank, at(port), replay);
                self.followed.entry(Arc::clone(&name)).or_insert((id, generation));
            }
        }
    }

    fn tell(&self, knowledge: &Knowledge, update: &KvUpdate, now: Duration) {
        let source = &update.source;
        // What an earlier life under this name told may still be under way.
        let followed = self.followed.get(&source.endpoint);
        let followed = followed.filter(|(_, first)| source.generation >= *first);
        let named = || self.names.get(&*source.endpoint);
        let Some(&id) = followed.map(|(id, _)| id).or_else(named) else {
            knowledge.unheard();
            return;
        };
        knowledge.hear(id, source.rank, source.generation, &update.change, now);
    }
}
