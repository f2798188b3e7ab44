//! The policies of others, as their documents and their code say, each with its true knobs; and those of the first study.
//!
//! They get better signals here than most have in life: exact token counts, and cache events without loss unless a knob
//! says otherwise. What each is known for is tested in `rivals/tests.rs`.

mod dynamo;
mod hashed;
mod index;
mod lmetric;
mod loadaware;
mod oracle;
mod plain;
mod preble;
mod predicted;
mod rec;
mod scorers;
mod sglang;
#[cfg(test)]
mod tests;

use anyhow::bail;

pub(crate) use index::UnderWay;

use super::random::Random;
use super::sim::{Router, Setup};

/// The policies of others that the comparison is about, and what they are.
pub(crate) const PUBLISHED: &[(&str, &str)] = &[
    (
        "loadaware-0.5",
        "loadaware: share of the prompt that is cached, less half the excess of requests over the mean",
    ),
    ("loadaware-1.0", "the same with the whole excess"),
    ("kvaware", "vLLM production stack: the longest cached prefix, whatever the load"),
    (
        "gaie-4k",
        "Inference Extension until 2026: queue 2, KV use 2, own prefix index 3, of the first 4,096 tokens",
    ),
    ("gaie", "the same with an index of the first 131,072 tokens"),
    (
        "optimized-baseline",
        "llm-d: the same, and prompts that nobody has seen go where none went longest",
    ),
    ("precise-2:1:1", "llm-d: KV use 1, queue 1, prefix by cache events 2"),
    ("precise", "llm-d: 3:2:2, and prompts under way count as cached"),
    (
        "predicted-latency",
        "llm-d: filters of affinity, then weighted chance by predicted latency; the predictions are good",
    ),
    ("dynamo", "NVIDIA Dynamo: blocks to compute and blocks in use"),
    (
        "sglang",
        "SGLang's gateway: an approximate tree, unless loads differ by 64 requests and half",
    ),
    ("lmetric", "LMetric: tokens to compute times requests in flight"),
    ("lmetric-q", "the same with the queue's tokens"),
    (
        "preble",
        "Preble E2, simplified: exploit what is mostly cached, else the cheapest of three minutes' work",
    ),
];

/// The same with other weights.
pub(crate) const RETUNED: &[(&str, &str)] = &[
    ("loadaware-0.25", "loadaware with a quarter of the excess"),
    ("loadaware-2.0", "loadaware with twice the excess"),
    ("precise-3:2:2", "precise without the prompts under way"),
    ("precise-6:2:2", "precise with a heavier prefix"),
    ("precise-1:1:1", "precise with equal weights"),
    ("precise-3:2:0", "precise without KV use"),
    ("dynamo-3", "dynamo with blocks to compute counted three times"),
    ("dynamo-10", "ten times"),
    ("dynamo-30", "thirty times"),
    ("sglang-16", "sglang with a difference of 16 requests"),
    ("sglang-8", "sglang with a difference of 8 requests and a fifth"),
];

/// References: the first study's own policies and the first llm-ring's, and what perfect knowledge does.
pub(crate) const REFERENCES: &[(&str, &str)] = &[
    ("proto-random", "by chance"),
    ("proto-round-robin", "in turn"),
    ("proto-least-request", "the fewest requests in flight"),
    ("proto-consistent", "the first llm-ring's ring"),
    ("proto-bounded", "the first llm-ring's bounded loads"),
    ("proto-llm-aware", "the first llm-ring's token loads and placement memory"),
    ("oracle", "the least true time to the first token, whatever it costs others"),
    ("fin", "the first study's rule before it priced memory"),
    ("rec", "the first study's rule: seconds of queue, work and their price for others"),
    (
        "rec-fcfs",
        "the same, held back while its endpoint has 0.3 s of work; first come, first served",
    ),
    ("rec-sjf", "the same, the shortest first, aged over ten seconds"),
];

/// Builds a policy by its name.
///
/// # Errors
/// There is none of that name.
pub(crate) fn build(name: &str, setup: &Setup) -> anyhow::Result<Box<dyn Router>> {
    let chance = || Random::new(setup.seed);
    let n = setup.endpoints;
    Ok(match name {
        "proto-random" => Box::new(plain::Chance(chance())),
        "proto-round-robin" => Box::new(plain::Turn::default()),
        "proto-least-request" => Box::new(plain::LeastRequest(chance())),
        "proto-consistent" => Box::new(hashed::Consistent::new(n)),
        "proto-bounded" => Box::new(hashed::Bounded::new(n)),
        "proto-llm-aware" => Box::new(hashed::LlmAware::new(n)),
        "loadaware-0.25" => Box::new(loadaware::LoadAware::new(0.25, chance())),
        "loadaware-0.5" => Box::new(loadaware::LoadAware::new(0.5, chance())),
        "loadaware-1.0" => Box::new(loadaware::LoadAware::new(1.0, chance())),
        "loadaware-2.0" => Box::new(loadaware::LoadAware::new(2.0, chance())),
        "kvaware" => Box::new(loadaware::KvAware::new(chance())),
        "gaie-4k" => Box::new(scorers::Gaie::new(4096, setup)),
        "gaie" => Box::new(scorers::Gaie::new(131_072, setup)),
        "optimized-baseline" => Box::new(scorers::OptimizedBaseline::new(setup)),
        "precise-2:1:1" => Box::new(scorers::Precise::new([2.0, 1.0, 1.0], false, setup)),
        "precise" => Box::new(scorers::Precise::new([3.0, 2.0, 2.0], true, setup)),
        "precise-3:2:2" => Box::new(scorers::Precise::new([3.0, 2.0, 2.0], false, setup)),
        "precise-6:2:2" => Box::new(scorers::Precise::new([6.0, 2.0, 2.0], true, setup)),
        "precise-1:1:1" => Box::new(scorers::Precise::new([1.0, 1.0, 1.0], true, setup)),
        "precise-3:2:0" => Box::new(scorers::Precise::new([3.0, 2.0, 0.0], true, setup)),
        "predicted-latency" => Box::new(predicted::PredictedLatency::new(chance())),
        "dynamo" => Box::new(dynamo::Dynamo::new(1.0, setup)),
        "dynamo-3" => Box::new(dynamo::Dynamo::new(3.0, setup)),
        "dynamo-10" => Box::new(dynamo::Dynamo::new(10.0, setup)),
        "dynamo-30" => Box::new(dynamo::Dynamo::new(30.0, setup)),
        "sglang" => Box::new(sglang::Sglang::new(64, 1.5, n)),
        "sglang-16" => Box::new(sglang::Sglang::new(16, 1.5, n)),
        "sglang-8" => Box::new(sglang::Sglang::new(8, 1.2, n)),
        "lmetric" => Box::new(lmetric::Lmetric::new(false, n)),
        "lmetric-q" => Box::new(lmetric::Lmetric::new(true, n)),
        "preble" => Box::new(preble::Preble::new(n)),
        "oracle" => Box::new(oracle::Oracle(chance())),
        "fin" => Box::new(rec::Rec::new(0.0, setup)),
        "rec" => Box::new(rec::Rec::new(rec::MEMORY_PRICE, setup)),
        "rec-fcfs" => Box::new(rec::Held::new(rec::Order::Fcfs, setup)),
        "rec-sjf" => Box::new(rec::Held::new(rec::Order::Shortest, setup)),
        _ => bail!("there is no policy `{name}`"),
    })
}

/// Returns the place of the highest score; equal ones are told apart by chance.
fn highest(random: &mut Random, scores: &[f64]) -> usize {
    let best = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let equal: Vec<usize> = (0..scores.len()).filter(|&i| scores[i] == best).collect();
    match equal[..] {
        [only] => only,
        _ => equal[random.below(equal.len())],
    }
}

/// Returns the place of the lowest score; equal ones are told apart by chance.
fn lowest(random: &mut Random, scores: &[f64]) -> usize {
    let negated: Vec<f64> = scores.iter().map(|score| -score).collect();
    highest(random, &negated)
}

/// Returns the place of the first of the least.
fn first_least(scores: &[f64]) -> usize {
    (0..scores.len()).min_by(|&a, &b| scores[a].total_cmp(&scores[b])).unwrap_or(0)
}

/// Makes a list of what is kept for each endpoint long enough for one more.
pub(crate) fn room_for<T: Default>(list: &mut Vec<T>, endpoint: usize) -> &mut T {
    if list.len() <= endpoint {
        list.resize_with(endpoint + 1, T::default);
    }
    &mut list[endpoint]
}
