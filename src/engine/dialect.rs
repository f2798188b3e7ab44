//! What the metrics of each kind of model server are called, and what they say of its load and its cache.
//!
//! The names are those of the upstream endpoint picker's engine mappings, with llama.cpp and the counters of prefix
//! caches beside them. One of them is left out: Triton's `nv_inference_exec_count` counts executions since the start,
//! so that it says nothing of what runs now.
//!
//! Missing is `None` and never 0: an engine of which nothing is known is not idle.

use std::sync::Arc;

use super::exposition::{self, Labels, Names, Text};
use crate::pool::Engine;

/// What an engine says of itself; `None` is no evidence.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Signals {
    /// Requests that wait in the engine.
    pub waiting: Option<u64>,
    /// Requests that the engine works on.
    pub running: Option<u64>,
    /// Share of the KV cache in use, in [0, 1]. Over ranks it is the mean: requests go where there is room.
    pub kv_usage: Option<f64>,
    /// Tokens in a block of the KV cache.
    pub block_size: Option<u64>,
    /// Blocks of the KV cache on the accelerator.
    pub blocks: Option<u64>,
    /// LoRA adapters in use. That one is not listed does not mean that it is not loaded.
    pub adapters: Option<Arc<Adapters>>,
    /// Since the engine's start, what was looked up in its prefix cache: tokens, or blocks for TensorRT-LLM. A ratio
    /// of differences with `prefix_hits` has no unit.
    pub prefix_queries: Option<u64>,
    /// Since the engine's start, what of `prefix_queries` was there.
    pub prefix_hits: Option<u64>,
}

impl Signals {
    /// Tells whether nothing at all is known.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// LoRA adapters of requests in an engine.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Adapters {
    /// How many fit into a batch; `None` if not said.
    pub most: Option<u64>,
    /// Adapters of running requests.
    pub active: Vec<String>,
    /// Adapters of waiting requests.
    pub waiting: Vec<String>,
}

/// What is made of the series of several data-parallel ranks on one page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Ranks {
    /// The endpoint stands for all of them: requests and blocks add up, usage is the mean.
    #[default]
    Summed,
    /// The endpoint is the port of one rank, by number. A page with series of one rank only is that rank's own,
    /// whatever its number: engines behind ports of their own often count from 0.
    Rank(u32),
}

/// What a page said.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Reading {
    /// The signals.
    pub signals: Signals,
    /// Lines that could not be read.
    pub unread: u32,
    /// Values that cannot be: negative, NaN, infinite; a block of 0 tokens. Their signal is `None`.
    pub nonsense: u32,
}

/// Reads the pages of one endpoint; keeps its buffers, so that reading the same page again allocates nothing.
#[derive(Debug)]
pub struct Reader {
    named: Engine,
    engine: Engine,
    /// Of the engine's rows, one each.
    names: Names,
    ranks: Ranks,
    points: Vec<Point>,
    adapters: Option<Arc<Adapters>>,
}

/// A sample of a signal.
#[derive(Debug, Clone, Copy)]
struct Point {
    row: usize,
    rank: Option<u32>,
    /// `None` is nonsense.
    value: Option<f64>,
}

/// So many samples of one page are looked at; a server of 128 ranks has about as many.
const MOST_POINTS: usize = 1024;
/// Above it a float does not count by ones. A clamp, so that a cast is exact.
const MOST: f64 = 9_007_199_254_740_992.0;

impl Reader {
    /// Makes a reader of an engine's pages; those of [`Engine::Unknown`] are recognised by their names.
    #[must_use]
    pub fn new(engine: Engine, ranks: Ranks) -> Self {
        let names = names(engine);
        Self { named: engine, engine, names, ranks, points: Vec::new(), adapters: None }
    }

    /// Returns the engine that was named, or recognised in the last page; [`Engine::Unknown`] if it was not.
    #[must_use]
    pub fn engine(&self) -> Engine {
        self.engine
    }

    /// Reads a page.
    pub fn read(&mut self, page: &[u8]) -> Reading {
        let before = self.engine;
        if before == Engine::Unknown {
            self.turn_to(recognise(page));
        }
        let reading = self.signals(page);
        if self.named == before || !reading.signals.is_empty() {
            return reading;
        }
        // Another engine may be at the address by now.
        self.turn_to(recognise(page));
        if self.engine == before { reading } else { self.signals(page) }
    }

    fn turn_to(&mut self, engine: Engine) {
        if engine != self.engine {
            (self.engine, self.names) = (engine, names(engine));
        }
    }

    fn signals(&mut self, page: &[u8]) -> Reading {
        let rows = rows(self.engine);
        let points = &mut self.points;
        points.clear();
        let (mut nonsense, mut unread) = (0_u32, 0_u32);
        // The series with the latest time as its value is what holds now; the others are left over.
        let mut latest: Option<(f64, Labels<'_>)> = None;
        let scan = exposition::scan(page, &self.names, |name, labels, value| {
            let rank = rank(&labels);
            // The index of a name is that of the first row that has it.
            let family = rows[name].family;
            for (at, row) in rows.iter().enumerate().skip(name) {
                if row.family != family || !row.select.takes(&labels) {
                    continue;
                }
                let value = match row.take {
                    Take::Value => value,
                    Take::Label(label) => match labels.get(label).and_then(Text::number) {
                        Some(value) => value,
                        // `None`, as Python writes it: the engine does not know it yet.
                        None => continue,
                    },
                    Take::Adapters => {
                        if value.is_nan() {
                            nonsense = nonsense.saturating_add(1);
                        } else if latest.is_none_or(|(known, _)| value >= known) {
                            latest = Some((value, labels));
                        }
                        continue;
                    }
                };
                let sound = value.is_finite() && value >= row.signal.least();
                if !sound {
                    nonsense = nonsense.saturating_add(1);
                }
                if points.len() < MOST_POINTS {
                    points.push(Point { row: at, rank, value: sound.then_some(value) });
                } else {
                    unread = unread.saturating_add(1);
                }
            }
        });
        let adapters = latest.map(|(_, labels)| self.adapters(&labels));
        let signals = Signals { adapters, ..self.fold(rows) };
        Reading { signals, unread: scan.unread.saturating_add(unread), nonsense }
    }

    /// Joins the samples of each signal.
    fn fold(&mut self, rows: &[Row]) -> Signals {
        let mut found = [None; SIGNALS];
        // By rank, which is what `within` and `across` go by; stable, so that equal ones stay in the page's order.
        self.points.sort_by_key(|point| (point.row, point.rank));
        let only = match self.ranks {
            Ranks::Summed => None,
            Ranks::Rank(rank) => {
                let mut ranks = self.points.iter().filter_map(|point| point.rank);
                let first = ranks.next();
                ranks.any(|rank| Some(rank) != first).then_some(rank)
            }
        };
        for samples in self.points.chunk_by(|a, b| a.row == b.row) {
            let Row { signal, within, .. } = rows[samples[0].row];
            let ranked = samples.iter().any(|point| point.rank.is_some());
            let mut ranks = 0.0;
            let mut all = Some(0.0);
            for samples in samples.chunk_by(|a, b| a.rank == b.rank) {
                if only.is_some() && ranked && samples[0].rank != only {
                    continue;
                }
                // One that is nonsense leaves nothing: half of a sum is worse than none.
                let one =
                    samples.iter().map(|point| point.value).reduce(|a, b| within.join(a?, b?));
                all = all.zip(one.flatten()).and_then(|(a, b)| signal.across().join(a, b));
                ranks += 1.0;
            }
            if signal == Signal::KvUsage {
                all = all.map(|all| (all / f64::max(ranks, 1.0)).min(1.0));
            }
            let found = &mut found[signal as usize];
            if ranks > 0.0 && found.is_none() {
                *found = all;
            }
        }
        let value = |signal: Signal| found[signal as usize];
        let hits = value(Signal::PrefixHits);
        let looked_up = |misses: f64| hits.map(|hits| misses + hits);
        Signals {
            waiting: value(Signal::Waiting).map(count),
            running: value(Signal::Running).map(count),
            kv_usage: value(Signal::KvUsage),
            block_size: value(Signal::BlockSize).map(count),
            blocks: value(Signal::Blocks).map(count),
            adapters: None,
            prefix_queries: value(Signal::PrefixQueries)
                .or_else(|| value(Signal::PrefixMisses).and_then(looked_up))
                .map(count),
            prefix_hits: hits.map(count),
        }
    }

    /// Reads the adapters' names, unless they are the last page's.
    fn adapters(&mut self, labels: &Labels<'_>) -> Arc<Adapters> {
        let most = labels.get("max_lora").and_then(Text::number);
        let list = |label| labels.get(label).map(Text::text).unwrap_or_default();
        let (active, waiting) = (list("running_lora_adapters"), list("waiting_lora_adapters"));
        if let Some(known) = &self.adapters
            && known.most == most
            && listed(&active).eq(known.active.iter().map(String::as_str))
            && listed(&waiting).eq(known.waiting.iter().map(String::as_str))
        {
            return Arc::clone(known);
        }
        let owned = |list| listed(list).map(str::to_owned).collect();
        let adapters =
            Arc::new(Adapters { most, active: owned(&active), waiting: owned(&waiting) });
        self.adapters = Some(Arc::clone(&adapters));
        adapters
    }
}

/// The families of an engine, by row.
fn names(engine: Engine) -> Names {
    Names::new(rows(engine).iter().map(|row| row.family).collect())
}

/// The names in a list; a comma in a name cannot be told from one between names.
fn listed(list: &str) -> impl Iterator<Item = &str> {
    list.split(',').map(str::trim).filter(|name| !name.is_empty())
}

/// Returns the data-parallel rank of a series: vLLM's and SGLang's label.
fn rank(labels: &Labels<'_>) -> Option<u32> {
    labels.get("engine").or_else(|| labels.get("dp_rank")).and_then(Text::number)
}

/// What a number says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Signal {
    Waiting,
    Running,
    KvUsage,
    BlockSize,
    Blocks,
    PrefixQueries,
    PrefixHits,
    /// For engines that count these rather than the queries.
    PrefixMisses,
}

/// How many signals are numbers.
const SIGNALS: usize = Signal::PrefixMisses as usize + 1;

fn count(value: f64) -> u64 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "in [0, 2^53], and engines count in whole numbers"
    )]
    let count = value.clamp(0.0, MOST) as u64;
    count
}

impl Signal {
    /// A value below it is nonsense.
    fn least(self) -> f64 {
        match self {
            Self::BlockSize | Self::Blocks => 1.0,
            Self::Waiting
            | Self::Running
            | Self::KvUsage
            | Self::PrefixQueries
            | Self::PrefixHits
            | Self::PrefixMisses => 0.0,
        }
    }

    /// How ranks are joined.
    fn across(self) -> Join {
        match self {
            Self::BlockSize => Join::Max,
            Self::Waiting
            | Self::Running
            | Self::KvUsage
            | Self::Blocks
            | Self::PrefixQueries
            | Self::PrefixHits
            | Self::PrefixMisses => Join::Sum,
        }
    }
}

/// How two samples become one.
#[derive(Debug, Clone, Copy)]
enum Join {
    Sum,
    Max,
}

impl Join {
    fn join(self, a: f64, b: f64) -> Option<f64> {
        let joined = match self {
            Self::Sum => a + b,
            Self::Max => a.max(b),
        };
        joined.is_finite().then_some(joined)
    }
}

/// Where a signal is on the page of an engine. Of two rows of one signal the first that is there counts.
#[derive(Debug, Clone, Copy)]
struct Row {
    signal: Signal,
    family: &'static str,
    select: Select,
    take: Take,
    /// How samples of one rank are joined.
    within: Join,
}

/// Which series of a family.
#[derive(Debug, Clone, Copy)]
enum Select {
    All,
    Only(&'static str, &'static str),
    Not(&'static str, &'static str),
}

impl Select {
    fn takes(self, labels: &Labels<'_>) -> bool {
        let is =
            |label, value: &str| labels.get(label).is_some_and(|it| it.raw() == value.as_bytes());
        match self {
            Self::All => true,
            Self::Only(label, value) => is(label, value),
            Self::Not(label, value) => !is(label, value),
        }
    }
}

/// Where in a sample the number is.
#[derive(Debug, Clone, Copy)]
enum Take {
    Value,
    Label(&'static str),
    /// Nowhere: the labels are lists of adapters. The row's signal does not count.
    Adapters,
}

impl Row {
    const fn new(signal: Signal, family: &'static str) -> Self {
        Self { signal, family, select: Select::All, take: Take::Value, within: Join::Sum }
    }

    const fn only(self, label: &'static str, value: &'static str) -> Self {
        Self { select: Select::Only(label, value), ..self }
    }

    const fn not(self, label: &'static str, value: &'static str) -> Self {
        Self { select: Select::Not(label, value), ..self }
    }

    const fn label(self, label: &'static str) -> Self {
        Self { take: Take::Label(label), within: Join::Max, ..self }
    }

    const fn max(self) -> Self {
        Self { within: Join::Max, ..self }
    }

    const fn adapters(family: &'static str) -> Self {
        Self { take: Take::Adapters, ..Self::new(Signal::Running, family) }
    }
}

/// What names of families begin with. An engine that is higher up wins a page with names of two.
const PREFIXES: [(&[u8], Engine); 6] = [
    (b"vllm:", Engine::Vllm),
    (b"sglang:", Engine::Sglang),
    (b"llamacpp:", Engine::LlamaCpp),
    (b"trtllm_", Engine::TrtLlm),
    (b"nv_trt_llm_", Engine::Triton),
    (b"nv_inference_", Engine::Triton),
];

/// Tells which engine a page is of; [`Engine::Unknown`] if it has no name of a known one.
#[must_use]
pub fn recognise(page: &[u8]) -> Engine {
    let best = page
        .split(|&byte| byte == b'\n')
        .filter_map(|line| PREFIXES.iter().position(|(prefix, _)| line.starts_with(prefix)))
        .min();
    best.map_or(Engine::Unknown, |best| PREFIXES[best].1)
}

fn rows(engine: Engine) -> &'static [Row] {
    match engine {
        Engine::Unknown => &[],
        Engine::LlamaCpp => LLAMA_CPP,
        Engine::Vllm => VLLM,
        Engine::Sglang => SGLANG,
        Engine::TrtLlm => TRT_LLM,
        Engine::Triton => TRITON,
    }
}

/// It has no gauge of the KV cache: only its slots say how full they are.
const LLAMA_CPP: &[Row] = &[
    Row::new(Signal::Waiting, "llamacpp:requests_deferred"),
    Row::new(Signal::Running, "llamacpp:requests_processing"),
    Row::new(Signal::PrefixMisses, "llamacpp:prompt_tokens_total"),
    Row::new(Signal::PrefixHits, "llamacpp:prompt_tokens_cached_total"),
];

/// A series a rank, told apart by the label `engine`.
const VLLM: &[Row] = &[
    Row::new(Signal::Waiting, "vllm:num_requests_waiting"),
    Row::new(Signal::Running, "vllm:num_requests_running"),
    Row::new(Signal::KvUsage, "vllm:kv_cache_usage_perc").max(),
    // Its older name.
    Row::new(Signal::KvUsage, "vllm:gpu_cache_usage_perc").max(),
    Row::new(Signal::BlockSize, "vllm:cache_config_info").label("block_size"),
    Row::new(Signal::Blocks, "vllm:cache_config_info").label("num_gpu_blocks"),
    Row::new(Signal::PrefixQueries, "vllm:prefix_cache_queries_total"),
    Row::new(Signal::PrefixHits, "vllm:prefix_cache_hits_total"),
    Row::adapters("vllm:lora_requests_info"),
];

/// A series a scheduler, told apart by `dp_rank` and `tp_rank`: those of one data-parallel rank say the same. With
/// priorities there are a total and its parts. Hence the largest within a rank.
const SGLANG: &[Row] = &[
    Row::new(Signal::Waiting, "sglang:num_queue_reqs").max(),
    Row::new(Signal::Running, "sglang:num_running_reqs").max(),
    Row::new(Signal::KvUsage, "sglang:token_usage").max(),
    Row::new(Signal::BlockSize, "sglang:cache_config_info").label("page_size"),
    Row::new(Signal::Blocks, "sglang:cache_config_info").label("num_pages"),
    Row::new(Signal::PrefixQueries, "sglang:prompt_tokens_total"),
    // By tier; `total` stands beside the tiers or in their place.
    Row::new(Signal::PrefixHits, "sglang:cached_tokens_total").not("cache_source", "total"),
    Row::new(Signal::PrefixHits, "sglang:cached_tokens_total").only("cache_source", "total"),
];

const TRT_LLM: &[Row] = &[
    Row::new(Signal::Waiting, "trtllm_num_requests_waiting"),
    Row::new(Signal::Running, "trtllm_num_requests_running"),
    Row::new(Signal::KvUsage, "trtllm_kv_cache_utilization").max(),
    Row::new(Signal::BlockSize, "trtllm_kv_cache_tokens_per_block").max(),
    Row::new(Signal::Blocks, "trtllm_kv_cache_max_blocks").max(),
    Row::new(Signal::PrefixMisses, "trtllm_kv_cache_missed_blocks_total"),
    Row::new(Signal::PrefixHits, "trtllm_kv_cache_reused_blocks_total"),
];

const REQUESTS: &str = "nv_trt_llm_request_metrics";
const BLOCKS: &str = "nv_trt_llm_kv_cache_block_metrics";
const BLOCK: &str = "kv_cache_block_type";

/// The TensorRT-LLM backend's own families, and Triton's queue for models of other backends.
const TRITON: &[Row] = &[
    Row::new(Signal::Waiting, REQUESTS).only("request_type", "waiting"),
    Row::new(Signal::Waiting, "nv_inference_pending_request_count"),
    Row::new(Signal::Running, REQUESTS).only("request_type", "scheduled"),
    Row::new(Signal::KvUsage, BLOCKS).only(BLOCK, "fraction").max(),
    Row::new(Signal::BlockSize, BLOCKS).only(BLOCK, "tokens_per").max(),
    Row::new(Signal::Blocks, BLOCKS).only(BLOCK, "max"),
];

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const VLLM_PAGE: &[u8] = include_bytes!("testdata/vllm-0.32.0.txt");
    const LLAMA_PAGE: &[u8] = include_bytes!("testdata/llama.cpp-b11434.txt");

    fn read(engine: Engine, ranks: Ranks, page: &str) -> Reading {
        Reader::new(engine, ranks).read(page.as_bytes())
    }

    fn signals(page: &str) -> Signals {
        read(Engine::Unknown, Ranks::Summed, page).signals
    }

    #[test]
    fn real_vllm() {
        let mut reader = Reader::new(Engine::Unknown, Ranks::Summed);
        let expected = Signals {
            waiting: Some(0),
            running: Some(0),
            kv_usage: Some(0.0),
            block_size: Some(32),
            blocks: Some(16384),
            adapters: None,
            prefix_queries: Some(934),
            prefix_hits: Some(224),
        };
        assert_eq!(reader.read(VLLM_PAGE), Reading { signals: expected, unread: 0, nonsense: 0 });
        assert_eq!(reader.engine(), Engine::Vllm);
    }

    #[test]
    fn real_llama_cpp() {
        let mut reader = Reader::new(Engine::Unknown, Ranks::Summed);
        let expected = Signals {
            waiting: Some(0),
            running: Some(0),
            prefix_queries: Some(6077 + 9023),
            prefix_hits: Some(9023),
            ..Signals::default()
        };
        assert_eq!(reader.read(LLAMA_PAGE), Reading { signals: expected, unread: 0, nonsense: 0 });
        assert_eq!(reader.engine(), Engine::LlamaCpp);
    }

    const TWO_RANKS: &str = "\
vllm:num_requests_running{engine=\"1\",model_name=\"m1\"} 40
vllm:num_requests_running{engine=\"0\",model_name=\"m1\"} 0
vllm:num_requests_running{engine=\"0\",model_name=\"m2\"} 2
vllm:num_requests_waiting{engine=\"0\",model_name=\"m1\"} 3
vllm:num_requests_waiting{engine=\"1\",model_name=\"m1\"} 4
vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"m1\"} 0.25
vllm:kv_cache_usage_perc{engine=\"1\",model_name=\"m1\"} 0.75
vllm:cache_config_info{block_size=\"16\",engine=\"0\",num_gpu_blocks=\"100\"} 1
vllm:cache_config_info{block_size=\"16\",engine=\"1\",num_gpu_blocks=\"200\"} 1
";

    #[test]
    fn ranks_are_summed() {
        let expected = Signals {
            waiting: Some(7),
            running: Some(42),
            kv_usage: Some(0.5),
            block_size: Some(16),
            blocks: Some(300),
            ..Signals::default()
        };
        assert_eq!(signals(TWO_RANKS), expected);
        let backwards: String = TWO_RANKS.lines().rev().map(|line| format!("{line}\n")).collect();
        assert_eq!(signals(&backwards), expected);
    }

    #[test]
    fn or_kept_apart() {
        let rank = |rank| read(Engine::Vllm, Ranks::Rank(rank), TWO_RANKS).signals;
        let expected = |waiting, running, kv_usage, blocks| Signals {
            waiting: Some(waiting),
            running: Some(running),
            kv_usage: Some(kv_usage),
            block_size: Some(16),
            blocks: Some(blocks),
            ..Signals::default()
        };
        assert_eq!(rank(0), expected(3, 2, 0.25, 100));
        assert_eq!(rank(1), expected(4, 40, 0.75, 200));
        assert_eq!(rank(2), Signals::default());
        // An engine on a port of its own counts from 0.
        let own: String = TWO_RANKS
            .lines()
            .filter(|line| line.contains("\"0\""))
            .map(|it| format!("{it}\n"))
            .collect();
        assert_eq!(read(Engine::Vllm, Ranks::Rank(3), &own).signals, expected(3, 2, 0.25, 100));
        // Series without a rank are of all ranks.
        let shared = format!("{TWO_RANKS}vllm:prefix_cache_hits_total 5\n");
        assert_eq!(read(Engine::Vllm, Ranks::Rank(1), &shared).signals.prefix_hits, Some(5));
    }

    #[test]
    fn schedulers_of_one_rank_of_sglang_say_the_same() {
        let page = "\
sglang:num_running_reqs{dp_rank=\"0\",tp_rank=\"0\"} 2.0
sglang:num_running_reqs{dp_rank=\"0\",tp_rank=\"1\"} 2.0
sglang:num_running_reqs{dp_rank=\"1\",tp_rank=\"2\"} 5.0
sglang:num_running_reqs{dp_rank=\"1\",tp_rank=\"3\"} 5.0
sglang:num_queue_reqs{dp_rank=\"0\",priority=\"\"} 3
sglang:num_queue_reqs{dp_rank=\"0\",priority=\"1\"} 2
sglang:num_queue_reqs{dp_rank=\"0\",priority=\"2\"} 1
sglang:token_usage{dp_rank=\"0\"} 0.4
sglang:token_usage{dp_rank=\"1\"} 0.2
sglang:cache_config_info{dp_rank=\"0\",page_size=\"64\",num_pages=\"1000\"} 1
sglang:cache_config_info{dp_rank=\"1\",page_size=\"64\",num_pages=\"1000\"} 1
sglang:prompt_tokens_total{is_streaming=\"true\"} 700
sglang:prompt_tokens_total{is_streaming=\"false\"} 300
sglang:cached_tokens_total{cache_source=\"total\"} 240
sglang:cached_tokens_total{cache_source=\"device\"} 200
sglang:cached_tokens_total{cache_source=\"host\"} 40
";
        let found = signals(page);
        assert!((found.kv_usage.unwrap() - 0.3).abs() < 1e-9);
        let expected = Signals {
            waiting: Some(3),
            running: Some(7),
            kv_usage: found.kv_usage,
            block_size: Some(64),
            blocks: Some(2000),
            adapters: None,
            prefix_queries: Some(1000),
            prefix_hits: Some(240),
        };
        assert_eq!(found, expected);
        assert_eq!(
            signals("sglang:cached_tokens_total{cache_source=\"total\"} 9\n").prefix_hits,
            Some(9)
        );
    }

    #[test]
    fn tensorrt_llm() {
        let found = signals(
            "trtllm_num_requests_waiting{engine_type=\"trtllm\"} 2\ntrtllm_num_requests_running 3\n\
             trtllm_kv_cache_utilization 0.62\ntrtllm_kv_cache_tokens_per_block 32\n\
             trtllm_kv_cache_max_blocks 500\ntrtllm_kv_cache_reused_blocks_total 30\n\
             trtllm_kv_cache_missed_blocks_total 70\n",
        );
        let expected = Signals {
            waiting: Some(2),
            running: Some(3),
            kv_usage: Some(0.62),
            block_size: Some(32),
            blocks: Some(500),
            adapters: None,
            prefix_queries: Some(100),
            prefix_hits: Some(30),
        };
        assert_eq!(found, expected);
    }

    #[test]
    fn triton_with_and_without_the_tensorrt_llm_backend() {
        let plain = "nv_inference_exec_count{model=\"m\",version=\"1\"} 1234\n\
            nv_inference_pending_request_count{model=\"m\",version=\"1\"} 4\n\
            nv_inference_pending_request_count{model=\"n\",version=\"1\"} 1\n";
        assert_eq!(signals(plain), Signals { waiting: Some(5), ..Signals::default() });
        let backend = format!(
            "{plain}\
            nv_trt_llm_request_metrics{{model=\"m\",request_type=\"waiting\"}} 7\n\
            nv_trt_llm_request_metrics{{model=\"m\",request_type=\"scheduled\"}} 2\n\
            nv_trt_llm_request_metrics{{model=\"m\",request_type=\"max\"}} 512\n\
            nv_trt_llm_kv_cache_block_metrics{{kv_cache_block_type=\"fraction\"}} 0.1\n\
            nv_trt_llm_kv_cache_block_metrics{{kv_cache_block_type=\"tokens_per\"}} 64\n\
            nv_trt_llm_kv_cache_block_metrics{{kv_cache_block_type=\"max\"}} 6239\n"
        );
        let expected = Signals {
            waiting: Some(7),
            running: Some(2),
            kv_usage: Some(0.1),
            block_size: Some(64),
            blocks: Some(6239),
            ..Signals::default()
        };
        assert_eq!(signals(&backend), expected);
    }

    #[test]
    fn the_latest_list_of_adapters_holds_and_is_kept() {
        let page = |last: &str| {
            format!(
                "vllm:lora_requests_info{{max_lora=\"4\",running_lora_adapters=\"a\",waiting_lora_adapters=\"\"}} 1.7e9\n\
                 vllm:lora_requests_info{{max_lora=\"4\",running_lora_adapters=\"b, c\",waiting_lora_adapters=\"{last}\"}} 1.8e9\n\
                 vllm:lora_requests_info{{max_lora=\"4\",running_lora_adapters=\"\",waiting_lora_adapters=\"\"}} 1.6e9\n"
            )
        };
        let mut reader = Reader::new(Engine::Vllm, Ranks::Summed);
        let mut adapters = |last| reader.read(page(last).as_bytes()).signals.adapters.unwrap();
        let first = adapters("d");
        let expected = Adapters {
            most: Some(4),
            active: vec!["b".to_owned(), "c".to_owned()],
            waiting: vec!["d".to_owned()],
        };
        assert_eq!(*first, expected);
        assert!(Arc::ptr_eq(&first, &adapters("d")));
        assert_eq!(adapters("").waiting, Vec::<String>::new());
        assert_eq!(reader.read(b"vllm:num_requests_running 1\n").signals.adapters, None);
    }

    #[test]
    fn nonsense_is_no_evidence_and_is_counted() {
        for (value, kv_usage, nonsense) in [
            ("1.7", Some(1.0), 0),
            ("NaN", None, 1),
            ("+Inf", None, 1),
            ("-0.1", None, 1),
            ("1e309", None, 1),
        ] {
            let page = format!("vllm:kv_cache_usage_perc {value}\nvllm:num_requests_running 3\n");
            let reading = read(Engine::Vllm, Ranks::Summed, &page);
            let signals = Signals { running: Some(3), kv_usage, ..Signals::default() };
            assert_eq!(reading, Reading { signals, unread: 0, nonsense }, "{value}");
        }
        // Half of a sum would be worse than nothing.
        let reading = read(
            Engine::Vllm,
            Ranks::Summed,
            "vllm:num_requests_waiting{engine=\"0\"} 3\nvllm:num_requests_waiting{engine=\"1\"} NaN\n",
        );
        assert_eq!((reading.signals.waiting, reading.nonsense), (None, 1));
        // What is not known yet is no nonsense; a cache of no blocks is.
        let block = |blocks| {
            read(
                Engine::Vllm,
                Ranks::Summed,
                &format!(
                    "vllm:cache_config_info{{block_size=\"16\",num_gpu_blocks=\"{blocks}\"}} 1\n"
                ),
            )
        };
        assert_eq!((block("None").signals.blocks, block("None").nonsense), (None, 0));
        assert_eq!((block("0").signals.blocks, block("0").nonsense), (None, 1));
    }

    #[test]
    fn an_engine_that_takes_the_place_of_another_is_recognised() {
        let mut reader = Reader::new(Engine::Unknown, Ranks::Summed);
        assert!(reader.read(b"python_info 1\n").signals.is_empty());
        assert_eq!(reader.engine(), Engine::Unknown);
        reader.read(LLAMA_PAGE);
        assert_eq!(reader.read(VLLM_PAGE).signals.block_size, Some(32));
        assert_eq!(reader.engine(), Engine::Vllm);
        let mut named = Reader::new(Engine::Sglang, Ranks::Summed);
        assert!(named.read(VLLM_PAGE).signals.is_empty(), "a name is not second-guessed");
        assert_eq!(named.engine(), Engine::Sglang);
    }

    #[test]
    fn a_page_of_endless_series_is_bounded() {
        let page: String = (0..5000)
            .map(|it| format!("vllm:num_requests_running{{engine=\"{it}\"}} 1\n"))
            .collect();
        let mut reader = Reader::new(Engine::Vllm, Ranks::Summed);
        let reading = reader.read(page.as_bytes());
        assert_eq!(reading.unread as usize, 5000 - MOST_POINTS);
        assert!(reader.points.capacity() <= 2 * MOST_POINTS);
    }

    fn any_ranks() -> impl Strategy<Value = Ranks> {
        prop_oneof![Just(Ranks::Summed), (0..3_u32).prop_map(Ranks::Rank)]
    }

    proptest! {
        /// Sums and means as a naive model has them, whatever the order of the lines.
        #[test]
        fn ranks_add_up(
            ranks in prop::collection::vec((0..100_u64, 0..100_u64, 0.0..1.0_f64), 1..6),
            ranks_are in any_ranks(),
            seed in any::<u64>(),
        ) {
            let mut lines: Vec<String> = ranks
                .iter()
                .enumerate()
                .flat_map(|(rank, (waiting, running, usage))| {
                    [
                        format!("vllm:num_requests_waiting{{engine=\"{rank}\"}} {waiting}\n"),
                        format!("vllm:num_requests_running{{engine=\"{rank}\"}} {running}\n"),
                        format!("vllm:kv_cache_usage_perc{{engine=\"{rank}\"}} {usage}\n"),
                    ]
                })
                .collect();
            lines.sort_by_key(|line| crate::index::hash::seeded(line.as_bytes(), seed));
            let found = read(Engine::Vllm, ranks_are, &lines.concat()).signals;
            let mine: Vec<_> = match ranks_are {
                Ranks::Rank(rank) if ranks.len() > 1 =>
                    ranks.get(rank as usize).copied().into_iter().collect(),
                Ranks::Rank(_) | Ranks::Summed => ranks,
            };
            if mine.is_empty() {
                prop_assert_eq!(found, Signals::default());
            } else {
                prop_assert_eq!(found.waiting, Some(mine.iter().map(|it| it.0).sum()));
                prop_assert_eq!(found.running, Some(mine.iter().map(|it| it.1).sum()));
                let mean = mine.iter().map(|it| it.2).sum::<f64>() / mine.len() as f64;
                prop_assert!((found.kv_usage.unwrap() - mean).abs() < 1e-9);
            }
        }

        /// A real page, mutated: no panic, and what is said stays in its bounds.
        #[test]
        fn mutated_pages_are_survived(
            real in prop::bool::ANY,
            cuts in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..4_usize), 0..40),
            ranks in any_ranks(),
        ) {
            let mut page = if real { LLAMA_PAGE.to_vec() } else { TWO_RANKS.as_bytes().to_vec() };
            for (at, byte, kind) in cuts {
                let at = at.index(page.len());
                match kind {
                    0 => page[at] = byte,
                    1 => page.insert(at, byte),
                    2 => { page.remove(at); }
                    _ => page.rotate_left(at),
                }
                if page.is_empty() { break; }
            }
            let signals = Reader::new(Engine::Unknown, ranks).read(&page).signals;
            prop_assert!(signals.kv_usage.is_none_or(|it| (0.0..=1.0).contains(&it)));
            prop_assert!(signals.block_size.is_none_or(|it| it > 0));
        }

        #[test]
        fn any_text_of_wanted_names_is_survived(
            page in "((vllm:(num_requests_waiting|kv_cache_usage_perc|lora_requests_info|cache_config_info)|nv_trt_llm_request_metrics|sglang:token_usage)[{]?(engine=\"[0-9]{1,11}\"|block_size=\"[0-9a-]{0,30}\"|,)?[}]? ?([0-9.e-]{0,6}|NaN|[+]Inf)\n){0,12}",
            ranks in any_ranks(),
        ) {
            for (_, engine) in Engine::NAMES {
                let signals = Reader::new(engine, ranks).read(page.as_bytes()).signals;
                prop_assert!(signals.kv_usage.is_none_or(|it| (0.0..=1.0).contains(&it)));
            }
        }
    }
}
