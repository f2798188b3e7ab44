//! `weighted`: filters, a weighted sum of scores, and a picker, as the Inference Extension's and llm-d's pickers have
//! them. A profile names a whole set of these; any list that is given takes the place of the profile's.

use serde::{Deserialize, Serialize};

use super::{look, record, whole};
use crate::index::hash::mix;
use crate::scheduling::filter::{Filter, PrefixCacheAffinity};
use crate::scheduling::picker::Picker;
use crate::scheduling::scorer::{Scene, Scorer, Seen};
use crate::scheduling::{Choice, Cx, Policy, Reason, Score, Step, Trace};

/// Filters the candidates in the filters' order, adds up weight times score for what is left, and picks.
///
/// Weights of endpoints do not count, as with its authors: an endpoint that warms up is one like the others.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(from = "Parameters", into = "Parameters")]
pub struct Weighted {
    profile: Profile,
    prefix: Prefix,
    filters: Vec<Filter>,
    scorers: Vec<Scorer>,
    picker: Picker,
}

/// The parameters as they are written down; what is absent is the profile's.
#[derive(Debug, Clone, PartialEq, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
struct Parameters {
    /// `default` is the Inference Extension's; `optimized-baseline` and `guide` are llm-d's until and since July 2026; `precise` is 3:2:2 by cache events alone.
    profile: Profile,
    /// What counts as cached: `source` is `best` (what engines say, else placement memory) or `engine` (what they say alone); `speculative` counts prompts that are under way there.
    prefix: Option<Prefix>,
    /// What takes endpoints out, in order: `prefix-cache-affinity-filter`.
    filters: Option<Vec<Filter>>,
    /// What is summed: `queue-scorer`, `kv-cache-utilization-scorer`, `prefix-cache-scorer`, `running-requests-size-scorer`, `lora-affinity-scorer`, `token-load-scorer`, `active-request-scorer`, `load-aware-scorer`, `no-hit-lru-scorer`, each with its `weight`.
    scorers: Option<Vec<Scorer>>,
    /// What takes one: `max-score-picker`, `random-picker` or `weighted-random-picker`.
    picker: Option<Picker>,
}

/// A set of filters, scorers and a picker that somebody has published.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Profile {
    /// What the upstream picker does without a configuration.
    #[default]
    Default,
    /// llm-d's guide of that name until July 2026.
    OptimizedBaseline,
    /// llm-d's guides since.
    Guide,
    /// llm-d's precise prefix scheduling until July 2026.
    Precise,
}

/// What counts as cached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
struct Prefix {
    /// Who is believed.
    source: Source,
    /// Whether prompts that are under way to an endpoint count as cached there.
    speculative: bool,
}

/// Who is believed about what is cached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Source {
    /// What engines say, and of those that say nothing what placement memory says.
    Best,
    /// What engines say alone; those that say nothing have nothing.
    Engine,
}

impl Default for Prefix {
    fn default() -> Self {
        Self { source: Source::Best, speculative: true }
    }
}

impl Default for Weighted {
    fn default() -> Self {
        Self::from(Parameters::default())
    }
}

impl From<Parameters> for Weighted {
    fn from(given: Parameters) -> Self {
        let Parameters { profile, prefix, filters, scorers, picker } = given;
        let (queue, memory) = (Scorer::queue(2.0), Scorer::kv_cache_utilization(2.0));
        let three = || vec![queue, memory, Scorer::prefix_cache(3.0)];
        let affinity = || vec![Filter::PrefixCacheAffinity(PrefixCacheAffinity::default())];
        let source = if profile == Profile::Precise { Source::Engine } else { Source::Best };
        Self {
            profile,
            prefix: prefix.unwrap_or(Prefix { source, ..Prefix::default() }),
            filters: filters.unwrap_or_else(|| match profile {
                Profile::Guide => affinity(),
                Profile::Default | Profile::OptimizedBaseline | Profile::Precise => Vec::new(),
            }),
            scorers: scorers.unwrap_or_else(|| match profile {
                Profile::Default | Profile::Precise => three(),
                Profile::OptimizedBaseline => [three(), vec![Scorer::no_hit_lru(2.0)]].concat(),
                Profile::Guide => vec![Scorer::token_load(1.0)],
            }),
            picker: picker.unwrap_or_default(),
        }
    }
}

impl From<Weighted> for Parameters {
    fn from(policy: Weighted) -> Self {
        let Weighted { profile, prefix, filters, scorers, picker } = policy;
        Self {
            profile,
            prefix: Some(prefix),
            filters: Some(filters),
            scorers: Some(scorers),
            picker: Some(picker),
        }
    }
}

/// Candidates whose scores a trace shows.
const SHOWN: usize = 3;
/// Told apart from what ties are broken with.
const FILTERS: u64 = 0xf117_e250;

impl Policy for Weighted {
    fn choose(&self, cx: &Cx<'_>, trace: &mut Trace) -> Choice {
        let sights = look(cx);
        #[expect(clippy::cast_precision_loss, reason = "tokens stay far below 2^52")]
        let prompt = cx.prompt_tokens as f64;
        let see = |&(slot, sight)| {
            let requests = cx.ledger.load(slot).requests;
            Seen { slot, requests, cached: self.prefix.cached(&sight).min(prompt), sight }
        };
        let mut seen: Vec<Seen> = sights.iter().map(see).collect();
        let cold = seen.iter().all(|it| it.cached <= 0.0);
        for (number, filter) in (0..).zip(&self.filters) {
            let scene = Scene { prompt, cold, seen: &seen };
            seen = filter.keep(&scene, mix(cx.seed, FILTERS + number), trace);
        }
        let scene = Scene { prompt, cold, seen: &seen };
        let scores: Vec<Vec<f64>> = self.scorers.iter().map(|it| it.scores(&scene)).collect();
        let parts = |i: usize| -> Vec<Score> {
            let part = |(scorer, scores): (&Scorer, &Vec<f64>)| Score {
                name: scorer.name(),
                weight: scorer.weight(),
                score: scores[i],
            };
            self.scorers.iter().zip(&scores).map(part).collect()
        };
        let totals: Vec<f64> = (0..seen.len())
            .map(|i| {
                let each = self.scorers.iter().zip(&scores);
                each.map(|(scorer, scores)| scorer.weight() * scores[i]).sum()
            })
            .collect();
        let chances: Vec<u64> = seen.iter().map(|it| cx.chance(it.slot)).collect();
        let chosen = self.picker.pick(&totals, &chances);
        let mut ranked: Vec<usize> = (0..seen.len()).collect();
        ranked.sort_by(|&a, &b| {
            (b == chosen).cmp(&(a == chosen)).then_with(|| totals[b].total_cmp(&totals[a]))
        });
        for i in ranked.into_iter().take(SHOWN) {
            let (endpoint, cached) = (seen[i].slot, whole(seen[i].cached));
            trace.steps.push(Step::Scores { endpoint, cached, parts: parts(i) });
        }
        record(cx, sights, trace);
        let reason = match self.picker {
            _ if cold => Reason::Cold,
            Picker::MaxScore => Reason::BestScore,
            Picker::Random | Picker::WeightedRandom => Reason::Random,
        };
        Choice { slot: seen[chosen].slot, reason, cached: whole(seen[chosen].cached) }
    }

    fn asks_engines(&self) -> bool {
        true
    }

    fn needs_conversation(&self) -> bool {
        false
    }
}

impl Prefix {
    /// Returns the tokens that count as cached.
    fn cached(self, sight: &crate::pool::Sight) -> f64 {
        let now = match self.source {
            Source::Best => sight.held,
            Source::Engine => sight.said.cached.unwrap_or(0.0),
        };
        // What is under way is in `cached` together with what is remembered, and counts where it is more than that.
        let coming = if sight.cached > sight.held { sight.cached } else { 0.0 };
        if self.speculative { now.max(coming) } else { now }
    }
}
