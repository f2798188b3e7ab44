//! `llm-aware`: bounded loads for LLM serving. Load is tokens of actual work, a conversation goes where its cache is,
//! and the longer that cache is, the more load it tolerates before it moves.
//!
//! Three switches, each of which can be taken away to see what it is worth: `token_load`, `placement_memory`,
//! `long_stickiness`. With all three off this is `bounded` in requests.

use serde::{Deserialize, Serialize};

use super::bounded::{Bound, EPSILON, Slack, least_loaded};
use super::whole;
use crate::scheduling::decision::Verdict;
use crate::scheduling::{Choice, Cx, Policy, Reason, Sights, Step, Trace, Unit};

/// Prefers where the conversation was last served, else its home, within a cap on tokens of work.
#[derive(Debug, Clone, PartialEq, Default, Deserialize, Serialize)]
#[serde(try_from = "Parameters", into = "Parameters")]
pub struct LlmAware(Parameters);

/// The parameters, not yet checked against each other.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
struct Parameters {
    /// Slack over the fair share.
    epsilon: Slack,
    /// The same for long cached conversations; not below `epsilon`.
    long_epsilon: Slack,
    /// Prompt tokens from which a conversation is long.
    long_threshold_tokens: u64,
    /// Tokens of work that no endpoint of average weight is too busy for; 0 leaves the cap to the average alone.
    floor_tokens: u64,
    /// Count load in tokens of work; otherwise in requests.
    token_load: bool,
    /// Remember where each conversation was last served.
    placement_memory: bool,
    /// Let long cached conversations stay up to the higher cap.
    long_stickiness: bool,
}

/// In a quiet pool the average is a few tokens, and a cap made of it moves long caches out of the way of short answers.
const FLOOR_TOKENS: u64 = 512;

impl Default for Parameters {
    fn default() -> Self {
        Self {
            epsilon: EPSILON,
            long_epsilon: Slack::constant(1.0),
            long_threshold_tokens: 800,
            floor_tokens: FLOOR_TOKENS,
            token_load: true,
            placement_memory: true,
            long_stickiness: true,
        }
    }
}

impl TryFrom<Parameters> for LlmAware {
    type Error = String;

    fn try_from(parameters: Parameters) -> Result<Self, String> {
        let (epsilon, long) = (parameters.epsilon.get(), parameters.long_epsilon.get());
        if long < epsilon {
            return Err(format!(
                "long_epsilon ({long}) is the cap of long conversations and cannot be below epsilon ({epsilon})"
            ));
        }
        Ok(Self(parameters))
    }
}

impl From<LlmAware> for Parameters {
    fn from(policy: LlmAware) -> Self {
        policy.0
    }
}

impl Policy for LlmAware {
    fn choose(&self, cx: &Cx<'_>, trace: &mut Trace) -> Choice {
        let unit = if self.0.token_load { Unit::Tokens } else { Unit::Requests };
        let home = cx.home();
        let remembered = if self.0.placement_memory { cx.placed } else { None };
        trace.steps.push(match (self.0.placement_memory, remembered) {
            (false, _) => Step::MemoryOff,
            (true, None) => Step::NotRemembered,
            (true, Some((slot, placed))) => {
                Step::Remembered { endpoint: slot, cached: placed.cached(), home: slot == home }
            }
        });
        let (preferred, believed) =
            remembered.map_or((home, 0), |(slot, placed)| (slot, placed.cached()));
        let told = ask(cx, preferred, trace);
        let cached = told.unwrap_or(believed);
        let new_tokens = cx.prompt_tokens.saturating_sub(cached).max(1);
        let cost = self.cost(new_tokens, cx.max_tokens);
        trace.steps.push(Step::Cost {
            endpoint: preferred,
            new_tokens,
            max_tokens: cx.max_tokens,
            cost,
            unit,
        });

        let bound = self.bound(cx, unit, cost, self.0.epsilon);
        trace.steps.push(bound.step());
        let weight = cx.relative_weight(preferred);
        let normal_cap = bound.cap(weight);
        let cap = self
            .long_cap(cx, (cached, told), cost, unit, trace)
            .map_or(normal_cap, |cap| cap * weight);

        let verdict = bound.test(cx, preferred, (cap, weight), trace);
        if verdict != Verdict::Over {
            #[expect(clippy::cast_precision_loss, reason = "loads stay far below 2^52 tokens")]
            let over_normal = verdict == Verdict::Fits
                && cx.load(preferred, unit).saturating_add(cost) as f64 > normal_cap;
            let reason = match (preferred == home, over_normal) {
                (true, false) => Reason::Home,
                (true, true) => Reason::HomeLong,
                (false, false) => Reason::Sticky,
                (false, true) => Reason::StickyLong,
            };
            return Choice { slot: preferred, reason, cached };
        }

        // Little is cached anywhere else, so every other endpoint is tested with the full cost.
        let cost = self.cost(cx.prompt_tokens, cx.max_tokens);
        let bound = self.bound(cx, unit, cost, self.0.epsilon);
        if cached > 0 {
            let (new_tokens, max_tokens) = (cx.prompt_tokens, cx.max_tokens);
            trace.steps.push(Step::CostElsewhere { new_tokens, max_tokens, cost, unit });
            trace.steps.push(bound.step());
        }
        let others = cx.ring_order().filter(|&slot| slot != preferred);
        match bound.first_with_room(cx, others, trace) {
            Some(slot) => {
                let cached = ask(cx, slot, trace).unwrap_or(0);
                Choice { slot, reason: Reason::Overflow, cached }
            }
            None => {
                let choice = least_loaded(cx, unit, trace);
                let cached = if choice.slot == preferred {
                    cached
                } else {
                    ask(cx, choice.slot, trace).unwrap_or(0)
                };
                Choice { cached, ..choice }
            }
        }
    }
}

/// Returns the tokens that the engine says to have cached, if it says so; that goes before what is remembered.
fn ask(cx: &Cx<'_>, slot: u32, trace: &mut Trace) -> Option<u64> {
    if let Sights::Now { evidence, .. } = cx.sights
        && evidence.cached.is_empty()
    {
        return None;
    }
    let sight = cx.sight(slot);
    sight.said.cached?;
    let cached = whole(sight.held);
    trace.steps.push(Step::Told { endpoint: slot, cached });
    if !trace.loads.is_empty() {
        trace.sights.push((slot, sight));
        (trace.output, trace.hot) = (cx.output, cx.hot);
    }
    Some(cached)
}

impl LlmAware {
    fn bound(&self, cx: &Cx<'_>, unit: Unit, cost: u64, epsilon: Slack) -> Bound {
        let floor = if self.0.token_load { self.0.floor_tokens } else { 0 };
        Bound::new(cx, unit, cost, epsilon).with_floor(floor)
    }

    fn cost(&self, new_tokens: u64, max_tokens: u64) -> u64 {
        if self.0.token_load { new_tokens.saturating_add(max_tokens) } else { 1 }
    }

    /// Returns the cap of a long cached conversation, or `None` where the normal one holds, and says why.
    fn long_cap(
        &self,
        cx: &Cx<'_>,
        (cached, told): (u64, Option<u64>),
        cost: u64,
        unit: Unit,
        trace: &mut Trace,
    ) -> Option<f64> {
        // Without a memory nothing is known, and home is where the cache most likely is.
        let cache_likely = cached > 0 || (told.is_none() && !self.0.placement_memory);
        let (step, cap) = if !self.0.long_stickiness {
            (Step::LongOff, None)
        } else if !cache_likely {
            (Step::LongNotCached, None)
        } else if cx.prompt_tokens < self.0.long_threshold_tokens {
            let threshold = self.0.long_threshold_tokens;
            (Step::LongTooShort { prompt_tokens: cx.prompt_tokens, threshold }, None)
        } else {
            let bound = self.bound(cx, unit, cost, self.0.long_epsilon);
            let (cap, floor) = (bound.cap(1.0), bound.is_floor());
            (Step::LongApplies { long_epsilon: self.0.long_epsilon.get(), cap, floor }, Some(cap))
        };
        trace.steps.push(step);
        cap
    }
}
