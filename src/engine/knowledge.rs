//! What is known of each engine, for whoever decides: its load by its metrics, its cache by its KV events, and where it
//! tells none, what it should have by what was sent there.
//!
//! There are two indexes with the same holders in both. One holds what engines report, by token ids; it is asked for
//! requests whose tokens are known. The other holds blocks of text, of our own doing alone: each endpoint is modelled
//! as a cache of its size that forgets what was used least recently. Neither is believed beyond what it has kept: each
//! prediction is compared with what the answer says was cached.
//!
//! Nothing here waits, reads a clock or asks anybody: [`super::follow`] brings what is heard.

use std::collections::{BTreeSet, HashMap};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use arc_swap::ArcSwap;

use super::dialect::Signals;
use super::kv_stream::ClearReason;
use super::kv_subscribe::{Change, Counts};
use super::kv_wire::{self, Attention, KvEvent};
use super::scrape::{Slot, Status};
use crate::index::block::{self, BlockKey, Extra, Identity, Item, Unit};
use crate::index::prefix::{self, EngineHash, Holder, Match, PrefixIndex, Source, Stored, Tier};
use crate::index::trust::Trust;
use crate::pool::{
    Adapters, EndpointId, InferenceRequest, Outcome, PoolSnapshot, TextBlocks, request,
};
use crate::scheduling::{Evidence, Guess};

/// Blocks that are entered at a time: a pick waits no longer than for these.
const BATCH: usize = 256;
/// Bytes that a token of an engine's memory is taken to be, for the size of its cache in text.
const BYTES_PER_TOKEN: u64 = 4;

/// What is to be known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Whether engines are asked for their metrics.
    pub metrics: bool,
    /// Whether engines' KV events are heard.
    pub events: bool,
    /// Whether caches are guessed from the text that was sent.
    pub text: bool,
    /// Bytes of a block of text.
    pub block_bytes: u32,
    /// Tokens of a block; blocks of engines must be a multiple of it.
    pub block_tokens: u32,
    /// Bytes that each of the two indexes may take.
    pub budget: usize,
    /// Tokens that an engine has room for if it does not say.
    pub capacity_tokens: u64,
    /// How long a prompt is believed to be on its way without another word.
    pub speculation: Duration,
    /// A secret of this process.
    pub seed: u64,
}

impl Settings {
    /// Tells whether anything at all is to be known.
    #[must_use]
    pub fn any(&self) -> bool {
        self.metrics || self.events || self.text
    }
}

/// What is known of all engines.
#[derive(Debug)]
pub struct Knowledge {
    settings: Settings,
    members: ArcSwap<Members>,
    /// Numbers of holders that are free, and the first that was never used.
    free: Mutex<(Vec<u32>, u32)>,
    text: RwLock<PrefixIndex>,
    told: RwLock<PrefixIndex>,
    /// Adapters that events have named: a model of such a name is one.
    adapters: RwLock<BTreeSet<Box<str>>>,
    /// Events that could not be entered.
    refused: AtomicU64,
    /// Updates of engines that are no endpoints, or not any more, or of an earlier connection.
    late: AtomicU64,
    counts: Mutex<Counts>,
}

#[derive(Debug, Default)]
struct Members {
    version: u64,
    list: Vec<Arc<Member>>,
    places: HashMap<EndpointId, usize>,
}

/// One life of one endpoint.
#[derive(Debug)]
struct Member {
    id: EndpointId,
    name: String,
    address: SocketAddr,
    holder: Holder,
    slot: Option<Arc<Slot>>,
    ranks: Mutex<Vec<Rank>>,
    kept: Mutex<Kept>,
    /// Its holders' numbers may be another's by now.
    gone: AtomicBool,
}

/// A data-parallel rank that tells what it has.
#[derive(Debug, Clone)]
struct Rank {
    rank: u32,
    holder: Holder,
    generation: u64,
    /// All it has is known: it began empty, and nothing was missed since.
    whole: bool,
    /// Cache groups whose blocks do not stand for the whole prefix.
    partial: BTreeSet<u32>,
}

/// What an endpoint's predictions have come to.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Kept {
    /// By what it told.
    pub told: Promises,
    /// By what was sent there.
    pub guessed: Promises,
    /// Hits of its cache at the last look: fewer are another process.
    hits: Option<u64>,
    /// Whether its metrics were believed at the last look.
    fresh: bool,
}

/// Predictions of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Promises {
    /// Tokens that were predicted to be cached.
    pub predicted: u64,
    /// Those of them that answers said were.
    pub delivered: u64,
    /// How far they are believed.
    pub trust: Trust,
}

impl Promises {
    fn observe(&mut self, predicted: u64, delivered: u64) {
        self.predicted = self.predicted.saturating_add(predicted);
        self.delivered = self.delivered.saturating_add(delivered.min(predicted));
        self.trust.observe(predicted, delivered);
    }
}

/// A request's prompt as the indexes name it.
#[derive(Debug, Clone, Default)]
pub struct Prompt {
    text: Option<Arc<TextBlocks>>,
    told: Vec<BlockKey>,
}

impl Prompt {
    /// Returns what names its first half: prompts of the same value begin alike.
    #[must_use]
    pub fn beginning(&self) -> Option<u64> {
        let text = self.text.as_ref().map_or(&[][..], |text| &text.keys);
        let keys = if self.told.is_empty() { text } else { &self.told };
        keys.get(keys.len() / 2).map(|key| key.0)
    }
}

/// What is known for one request, by slot of one version of the pool.
#[derive(Debug, Clone, Default)]
pub struct Facts {
    version: u64,
    cached: Vec<Option<u64>>,
    coming: Vec<Option<u64>>,
    guessed: Vec<Guess>,
    memory: Vec<Option<f64>>,
    waiting: Vec<Option<u64>>,
    running: Vec<Option<u64>>,
    adapters: Vec<Option<Adapters>>,
    /// The predictions themselves, before trust: tokens told, share guessed.
    raw: HashMap<EndpointId, (Option<u64>, f64)>,
}

impl Facts {
    /// Lends it for a decision.
    #[must_use]
    pub fn evidence(&self) -> Evidence<'_> {
        Evidence {
            version: Some(self.version),
            cached: &self.cached,
            coming: &self.coming,
            memory: &self.memory,
            waiting: &self.waiting,
            running: &self.running,
            adapters: &self.adapters,
            guessed: &self.guessed,
        }
    }
}

/// A request on its way, with what was predicted of it.
#[derive(Debug)]
#[must_use = "what becomes of the request is to be told"]
pub struct Promise {
    member: Arc<Member>,
    prompt: Arc<Prompt>,
    told: Option<u64>,
    share: f64,
}

/// How an endpoint is known, for operators.
#[derive(Debug, Clone, PartialEq)]
pub struct Known {
    /// Its name.
    pub name: String,
    /// How asking for metrics goes, if it is asked.
    pub metrics: Option<Status>,
    /// Whether what its metrics said was believed at the last tick.
    pub fresh: bool,
    /// What its predictions came to.
    pub kept: Kept,
}

/// How all is known, for operators.
#[derive(Debug, Clone, PartialEq)]
pub struct Overview {
    /// By endpoint.
    pub endpoints: Vec<Known>,
    /// What was counted of events on their way here.
    pub events: Counts,
    /// Events that could not be entered.
    pub refused: u64,
    /// Updates of engines that are no endpoints, or not any more, or of an earlier connection.
    pub late: u64,
    /// What the index of events holds.
    pub told: prefix::Stats,
    /// What the index of text holds.
    pub text: prefix::Stats,
}

fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Knowledge {
    /// Knows nothing yet.
    #[must_use]
    pub fn new(settings: Settings) -> Self {
        let index = |block| {
            let defaults = prefix::Settings::default();
            RwLock::new(PrefixIndex::new(prefix::Settings {
                block,
                budget: settings.budget,
                orphans: defaults.orphans.min(settings.budget / 8),
                seed: settings.seed,
                ..defaults
            }))
        };
        Self {
            text: index(1),
            told: index(settings.block_tokens),
            settings,
            members: ArcSwap::default(),
            free: Mutex::default(),
            adapters: RwLock::default(),
            refused: AtomicU64::new(0),
            late: AtomicU64::new(0),
            counts: Mutex::default(),
        }
    }

    /// Returns what is to be known.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Follows the pool; `slots` is where the metrics of its endpoints are heard, by slot, where they are.
    pub fn adopt(&self, pool: &PoolSnapshot, slots: &[Arc<Slot>]) {
        let before = self.members.load_full();
        let mut list = Vec::with_capacity(pool.ids().len());
        for (at, (endpoint, &id)) in pool.endpoints().iter().zip(pool.ids()).enumerate() {
            let slot = slots.get(at).cloned();
            let known = before.places.get(&id).map(|&at| Arc::clone(&before.list[at]));
            let same = |it: &Arc<Member>| match (&it.slot, &slot) {
                (None, None) => true,
                (Some(a), Some(b)) => Arc::ptr_eq(a, b),
                (None, Some(_)) | (Some(_), None) => false,
            };
            if let Some(known) = known.as_ref().filter(|it| same(it)) {
                list.push(Arc::clone(known));
                continue;
            }
            // Of more endpoints than there are numbers, the rest stay unknown.
            let Some(holder) = self.number() else { continue };
            if self.settings.text {
                let capacity = self.blocks(self.settings.capacity_tokens);
                write(&self.text).set_source(holder, Source::Model { capacity });
            }
            list.push(Arc::new(Member {
                id,
                name: endpoint.name.clone(),
                address: endpoint.address,
                holder,
                slot,
                ranks: Mutex::default(),
                kept: Mutex::default(),
                gone: AtomicBool::new(false),
            }));
        }
        let places = list.iter().enumerate().map(|(at, member)| (member.id, at)).collect();
        let after = Arc::new(Members { version: pool.version(), list, places });
        self.members.store(Arc::clone(&after));
        for member in &before.list {
            let stays = after.places.get(&member.id);
            if stays.is_none_or(|&at| !Arc::ptr_eq(&after.list[at], member)) {
                self.remove(member);
            }
        }
    }

    fn remove(&self, member: &Member) {
        member.gone.store(true, Ordering::SeqCst);
        write(&self.text).remove_holder(member.holder);
        let ranks = std::mem::take(&mut *lock(&member.ranks));
        for rank in &ranks {
            write(&self.told).remove_holder(rank.holder);
        }
        let holders = ranks.iter().map(|rank| rank.holder.number());
        lock(&self.free).0.extend(holders.chain([member.holder.number()]));
    }

    fn number(&self) -> Option<Holder> {
        let (free, next) = &mut *lock(&self.free);
        let number = free.pop().unwrap_or_else(|| {
            *next += 1;
            *next - 1
        });
        Holder::new(number)
    }

    /// Blocks of text that so many tokens are.
    fn blocks(&self, tokens: u64) -> u32 {
        let bytes = tokens.saturating_mul(BYTES_PER_TOKEN);
        u32::try_from(bytes / u64::from(self.settings.block_bytes.max(1)))
            .unwrap_or(u32::MAX)
            .max(1)
    }

    /// Names a request's prompt; `None` when no cache is known of, or nothing of the prompt.
    #[must_use]
    pub fn prompt(&self, request: &InferenceRequest) -> Option<Arc<Prompt>> {
        let text = request.text.clone().filter(|_| self.settings.text);
        // Images stand in the tokens by placeholders that are the same for all of them.
        let tokens =
            request.tokens.as_ref().filter(|_| self.settings.events && request.prompt.media == 0);
        let told = tokens.map_or_else(Vec::new, |tokens| {
            let model = request.model.as_deref();
            let adapter = model.filter(|&model| read(&self.adapters).contains(model));
            let size = self.settings.block_tokens;
            block::keys(self.root(adapter, request.salt), tokens, size, &[])
        });
        (text.is_some() || !told.is_empty()).then(|| Arc::new(Prompt { text, told }))
    }

    /// A pool serves one model, whatever its name, and adapters of it.
    fn root(&self, adapter: Option<&str>, salt: Option<u64>) -> BlockKey {
        let salt = salt.map(|salt| format!("{salt:016x}"));
        Identity { model: "", adapter, salt: salt.as_deref() }
            .root(Unit::Tokens, self.settings.block_tokens)
    }

    /// Returns what is known of the endpoints of a pool: for a prompt if there is one, and with what `metrics` say if
    /// they are looked at. `None` if there is nothing to look for. `now` is since the start.
    #[must_use]
    pub fn look(
        &self,
        (pool, metrics): (&PoolSnapshot, bool),
        prompt: Option<&Prompt>,
        now: Duration,
    ) -> Option<Facts> {
        let metrics = metrics && self.settings.metrics;
        if !metrics && prompt.is_none() {
            return None;
        }
        let members = self.members.load();
        let in_step = members.version == pool.version() && members.list.len() == pool.ids().len();
        let found: Vec<Option<&Member>> = pool
            .ids()
            .iter()
            .enumerate()
            .map(|(at, id)| {
                let at = if in_step { Some(at) } else { members.places.get(id).copied() };
                at.map(|at| &*members.list[at])
            })
            .collect();
        let mut facts = Facts { version: pool.version(), ..Facts::default() };
        if metrics {
            look_at_metrics(&found, now, &mut facts);
        }
        if let Some(prompt) = prompt {
            if let Some(text) = &prompt.text {
                self.guess(&found, text, &mut facts);
            }
            if !prompt.told.is_empty() {
                self.ask(&found, &prompt.told, &mut facts);
            }
        }
        Some(facts)
    }

    fn guess(&self, found: &[Option<&Member>], text: &TextBlocks, facts: &mut Facts) {
        let holders: Vec<Holder> = found.iter().flatten().map(|member| member.holder).collect();
        let matches = read(&self.text).matches(&text.keys, &holders);
        let mut matches = matches.into_iter();
        facts.guessed = found
            .iter()
            .map(|member| {
                // Only those that are known were asked about.
                let Some(member) = member else { return Guess::default() };
                let Some(found) = matches.next() else { return Guess::default() };
                if found.blocks == 0 {
                    return Guess::default();
                }
                let factor = lock(&member.kept).guessed.trust.factor();
                let held = text.share(found.blocks - on_their_way(&found));
                facts.raw.insert(member.id, (None, held));
                Guess { held: held * factor, coming: text.share(found.blocks) * factor }
            })
            .collect();
    }

    fn ask(&self, found: &[Option<&Member>], keys: &[BlockKey], facts: &mut Facts) {
        let ranks: Vec<Vec<(Holder, bool)>> = found
            .iter()
            .map(|member| {
                let ranks = member.map(|member| lock(&member.ranks));
                ranks.map_or_else(Vec::new, |ranks| {
                    ranks.iter().map(|rank| (rank.holder, rank.whole)).collect()
                })
            })
            .collect();
        let holders: Vec<Holder> = ranks.iter().flatten().map(|(holder, _)| *holder).collect();
        if holders.is_empty() {
            return;
        }
        let mut matches = read(&self.told).matches(keys, &holders).into_iter();
        let size = u64::from(self.settings.block_tokens);
        for (member, ranks) in found.iter().zip(&ranks) {
            let matches: Vec<Match> = matches.by_ref().take(ranks.len()).collect();
            let whole = ranks.iter().all(|(_, whole)| *whole);
            let told = member.filter(|_| !ranks.is_empty());
            // Where something was missed, nothing known is not nothing there.
            let told = told.filter(|_| whole || matches.iter().any(|it| it.blocks > 0));
            let Some(member) = told else {
                facts.cached.push(None);
                facts.coming.push(None);
                continue;
            };
            // Which rank it goes to is the engine's choice, and it does not look at their caches.
            let mean = |of: &dyn Fn(&Match) -> u32| {
                let sum: u64 = matches.iter().map(|it| u64::from(of(it)) * size).sum();
                sum / matches.len().max(1) as u64
            };
            let cached = mean(&|it| it.blocks - on_their_way(it));
            let coming = mean(&|it| it.blocks);
            let factor = lock(&member.kept).told.trust.factor();
            facts.raw.entry(member.id).or_default().0 = Some(cached);
            facts.cached.push(Some(weighed(cached, factor)));
            facts.coming.push(Some(weighed(coming, factor)));
        }
    }

    /// Notes that a request goes to an endpoint, of which `facts` were known.
    pub fn chosen(
        &self,
        endpoint: EndpointId,
        prompt: Arc<Prompt>,
        facts: Option<&Facts>,
        now: Duration,
    ) -> Option<Promise> {
        let members = self.members.load();
        let member = Arc::clone(&members.list[*members.places.get(&endpoint)?]);
        let (told, share) =
            facts.and_then(|facts| facts.raw.get(&endpoint).copied()).unwrap_or_default();
        let ends = now + self.settings.speculation;
        if let Some(text) = &prompt.text {
            note(&self.text, &member, |index| {
                index.speculate(member.holder, &text.keys, now, ends);
            });
        }
        if !prompt.told.is_empty()
            && let Some(holder) = member.only_rank()
        {
            note(&self.told, &member, |index| {
                index.speculate(holder, &prompt.told, now, ends);
            });
        }
        Some(Promise { member, prompt, told, share })
    }

    /// Notes what became of a request.
    pub fn served(&self, promise: Promise, outcome: &Outcome, now: Duration) {
        let Promise { member, prompt, told, share } = promise;
        let answered = outcome.status.is_none_or(|status| (200..300).contains(&status));
        let elsewhere = outcome.served.filter(|&address| address != member.address);
        // A client that has gone in the middle of an answer leaves a prompt that was computed.
        let computed = answered && (outcome.succeeded() || outcome.status.is_some());
        if !computed || elsewhere.is_some() {
            self.forget(&member, &prompt);
        }
        if !computed {
            return;
        }
        let usage = &outcome.usage;
        let served = match elsewhere {
            None => {
                if let (Some(prompt), Some(cached)) = (usage.prompt_tokens, usage.cached_tokens) {
                    let mut kept = lock(&member.kept);
                    kept.guessed.observe(part(prompt, share), cached);
                    if let Some(told) = told {
                        kept.told.observe(told, cached);
                    }
                }
                Some(member)
            }
            Some(address) => {
                let members = self.members.load();
                members.list.iter().find(|it| it.address == address).cloned()
            }
        };
        let Some(member) = served else { return };
        let cached = usage.cached_tokens.unwrap_or(0);
        if let Some(text) = &prompt.text {
            #[expect(
                clippy::cast_precision_loss,
                reason = "a prompt has far fewer tokens than 2^52"
            )]
            let share = cached as f64 / usage.prompt_tokens.unwrap_or(0).max(1) as f64;
            note(&self.text, &member, |index| {
                index.served(member.holder, &text.keys, text.within(share), now, None);
            });
        }
        if !prompt.told.is_empty()
            && let Some(holder) = member.only_rank()
        {
            let blocks = cached / u64::from(self.settings.block_tokens.max(1));
            let blocks = usize::try_from(blocks).unwrap_or(usize::MAX).min(prompt.told.len());
            let ends = now + self.settings.speculation;
            note(&self.told, &member, |index| {
                index.served(holder, &prompt.told, blocks, now, Some(ends));
            });
        }
    }

    fn forget(&self, member: &Member, prompt: &Prompt) {
        if let Some(text) = &prompt.text {
            note(&self.text, member, |index| index.forget(member.holder, &text.keys));
        }
        if !prompt.told.is_empty()
            && let Some(holder) = member.only_rank()
        {
            note(&self.told, member, |index| index.forget(holder, &prompt.told));
        }
    }

    /// Notes what an engine told; `generation` tells its connections apart. One thread alone calls this and
    /// [`Self::adopt`].
    pub fn hear(
        &self,
        endpoint: EndpointId,
        rank: u32,
        generation: u64,
        change: &Change,
        now: Duration,
    ) {
        let members = self.members.load();
        let Some(&at) = members.places.get(&endpoint) else {
            self.late.fetch_add(1, Ordering::Relaxed);
            return;
        };
        let member = &members.list[at];
        let mut ranks = lock(&member.ranks);
        if member.gone.load(Ordering::SeqCst) {
            return;
        }
        let at = match ranks.iter().position(|it| it.rank == rank) {
            Some(at) => at,
            None => {
                let Some(holder) = self.number() else { return };
                write(&self.told).set_source(holder, Source::Events);
                let partial = BTreeSet::new();
                ranks.push(Rank { rank, holder, generation, whole: false, partial });
                ranks.len() - 1
            }
        };
        let mut rank = ranks[at].clone();
        // A pick that looks at the ranks does not wait until a batch is entered; nobody else changes them.
        drop(ranks);
        if generation < rank.generation {
            self.late.fetch_add(1, Ordering::Relaxed);
            return;
        }
        if generation > rank.generation {
            (rank.generation, rank.whole) = (generation, false);
            rank.partial.clear();
            write(&self.told).cleared(rank.holder);
        }
        match change {
            Change::Clear(reason) => {
                rank.whole = *reason == ClearReason::Restart;
                rank.partial.clear();
                write(&self.told).cleared(rank.holder);
                if *reason == ClearReason::Restart {
                    self.forget_text(member);
                }
            }
            Change::Apply(batch) => {
                for event in &batch.events {
                    self.enter(&mut rank, event, now);
                }
            }
        }
        lock(&member.ranks)[at] = rank;
    }

    /// Counts an update of an engine that is no endpoint.
    pub fn unheard(&self) {
        self.late.fetch_add(1, Ordering::Relaxed);
    }

    fn enter(&self, rank: &mut Rank, event: &KvEvent, now: Duration) {
        match event {
            KvEvent::Stored(stored) if stored.attention != Attention::Whole => {
                rank.partial.insert(stored.group);
            }
            KvEvent::Stored(stored) => self.store(rank.holder, stored, now),
            KvEvent::Removed { hashes, tier, group } => {
                if rank.partial.contains(group) {
                    return;
                }
                let tier = tier_of(*tier);
                for hashes in hashes.chunks(BATCH) {
                    let hashes: Vec<EngineHash> = hashes.iter().copied().map(hash_of).collect();
                    write(&self.told).removed(rank.holder, &hashes, tier);
                }
            }
            KvEvent::Cleared => {
                rank.whole = true;
                write(&self.told).cleared(rank.holder);
            }
        }
    }

    fn store(&self, holder: Holder, stored: &kv_wire::Stored, now: Duration) {
        let mut salt = None;
        let mut extras = Vec::new();
        for (at, extra) in &stored.extra {
            let identity = match extra {
                kv_wire::Extra::Text(text) if *at == 0 && stored.parent.is_none() => {
                    salt = Some(request::salt(text));
                    continue;
                }
                kv_wire::Extra::Text(text) | kv_wire::Extra::Item(text, _) => {
                    Item::identity(text.as_bytes())
                }
                kv_wire::Extra::Other(hash) => *hash,
            };
            extras.resize(stored.hashes.len(), Extra::default());
            if let Some(extra) = extras.get_mut(*at as usize) {
                *extra = extra.with(identity);
            }
        }
        let numbered;
        let adapter = match &stored.adapter {
            None => None,
            Some(kv_wire::Adapter::Name(name)) => {
                if !read(&self.adapters).contains(name) {
                    write(&self.adapters).insert(name.clone());
                }
                Some(&**name)
            }
            // No request calls it so: kept apart, and never found.
            Some(kv_wire::Adapter::Id(number)) => {
                numbered = format!("#{number}");
                Some(numbered.as_str())
            }
        };
        let root = self.root(adapter, salt);
        let page = stored.tokens.len() / stored.hashes.len().max(1);
        let even = page * stored.hashes.len() == stored.tokens.len();
        if !even {
            self.refused.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let mut parent = stored.parent.map(hash_of);
        for (at, hashes) in stored.hashes.chunks(BATCH).enumerate() {
            let from = at * BATCH;
            let hashes: Vec<EngineHash> = hashes.iter().copied().map(hash_of).collect();
            let tokens = &stored.tokens[from * page..(from + hashes.len()) * page];
            let extras =
                if extras.is_empty() { &[][..] } else { &extras[from..from + hashes.len()] };
            let part = Stored {
                hashes: &hashes,
                parent,
                root,
                tokens,
                extras,
                tier: tier_of(stored.tier),
            };
            if write(&self.told).stored(holder, &part, now).is_err() {
                self.refused.fetch_add(1, Ordering::Relaxed);
                return;
            }
            parent = hashes.last().copied();
        }
    }

    /// Drops what was guessed of an engine that has started again.
    fn forget_text(&self, member: &Member) {
        if self.settings.text {
            note(&self.text, member, |index| index.cleared(member.holder));
        }
    }

    /// Drops what has ended, follows the sizes of caches, and finds engines that have started again; to be called about
    /// once a second, with what was counted of events.
    pub fn tick(&self, now: Duration, counts: Counts) {
        *lock(&self.counts) = counts;
        if self.settings.events {
            write(&self.told).expire(now);
        }
        if self.settings.text {
            write(&self.text).expire(now);
        }
        for member in &self.members.load().list {
            let said = member.slot.as_ref().and_then(|slot| slot.signals(now));
            lock(&member.kept).fresh = said.is_some();
            let Some(said) = said.filter(|_| self.settings.text) else { continue };
            let before = std::mem::replace(&mut lock(&member.kept).hits, said.prefix_hits);
            if before.zip(said.prefix_hits).is_some_and(|(before, now)| now < before) {
                self.forget_text(member);
            }
            if let (Some(blocks), Some(size)) = (said.blocks, said.block_size) {
                let capacity = self.blocks(blocks.saturating_mul(size));
                note(&self.text, member, |index| {
                    index.set_source(member.holder, Source::Model { capacity });
                });
            }
        }
    }

    /// Returns how all is known.
    #[must_use]
    pub fn overview(&self) -> Overview {
        let known = |member: &Arc<Member>| {
            let kept = *lock(&member.kept);
            let metrics = member.slot.as_ref().map(|slot| slot.status());
            Known { name: member.name.clone(), metrics, fresh: kept.fresh, kept }
        };
        Overview {
            endpoints: self.members.load().list.iter().map(known).collect(),
            events: *lock(&self.counts),
            refused: self.refused.load(Ordering::Relaxed),
            late: self.late.load(Ordering::Relaxed),
            told: read(&self.told).stats(),
            text: read(&self.text).stats(),
        }
    }
}

impl Member {
    /// The holder of an engine that has one rank: of several, which one serves a request is not known.
    fn only_rank(&self) -> Option<Holder> {
        match &**lock(&self.ranks) {
            [rank] => Some(rank.holder),
            [] | [_, ..] => None,
        }
    }
}

fn look_at_metrics(found: &[Option<&Member>], now: Duration, facts: &mut Facts) {
    let said: Vec<Option<Signals>> =
        found.iter().map(|member| member.as_ref()?.slot.as_ref()?.signals(now)).collect();
    if said.iter().all(Option::is_none) {
        return;
    }
    let each = |of: fn(&Signals) -> Option<u64>| said.iter().map(|it| of(it.as_ref()?)).collect();
    facts.waiting = each(|it| it.waiting);
    facts.running = each(|it| it.running);
    facts.memory = said.iter().map(|it| it.as_ref()?.kv_usage).collect();
    if said.iter().flatten().any(|it| it.adapters.is_some()) {
        let adapters = |it: &Option<Signals>| {
            let adapters = it.as_ref()?.adapters.as_ref()?;
            Some(Adapters {
                active: adapters.active.clone(),
                waiting: adapters.waiting.clone(),
                most: usize::try_from(adapters.most?).unwrap_or(usize::MAX),
            })
        };
        facts.adapters = said.iter().map(adapters).collect();
    }
}

/// Changes an index, unless the endpoint has gone meanwhile.
fn note(index: &RwLock<PrefixIndex>, member: &Member, change: impl FnOnce(&mut PrefixIndex)) {
    let mut index = write(index);
    if !member.gone.load(Ordering::SeqCst) {
        change(&mut index);
    }
}

/// Blocks of a match that are only on their way.
fn on_their_way(found: &Match) -> u32 {
    found.by_kind.last().copied().unwrap_or(0).min(found.blocks)
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "a prompt has far fewer tokens than 2^52"
)]
fn weighed(tokens: u64, factor: f64) -> u64 {
    (tokens as f64 * factor).round() as u64
}

/// Tokens that a share of a prompt is.
fn part(prompt: u64, share: f64) -> u64 {
    weighed(prompt, share.clamp(0.0, 1.0))
}

fn hash_of(hash: kv_wire::EngineHash) -> EngineHash {
    EngineHash::unsigned(hash.get())
}

fn tier_of(tier: kv_wire::Tier) -> Tier {
    match tier {
        kv_wire::Tier::Gpu => Tier::Gpu,
        kv_wire::Tier::Cpu => Tier::Cpu,
        kv_wire::Tier::Storage => Tier::Disk,
        kv_wire::Tier::Other => Tier::Other,
    }
}

#[cfg(test)]
mod tests;
