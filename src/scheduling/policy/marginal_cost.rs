//! `marginal-cost`: the endpoint where this request costs least, in seconds: what it waits for itself, and what its
//! work takes from everybody else.
//!
//! Others are its corners. The first two terms alone are the greedy choice of the shortest own wait, which wastes work
//! that somebody else pays for; the price of uncached work times the answers under way is LMetric's; load counted as
//! new tokens where a conversation is cached is `llm-aware`'s; the balance is Preble's window.

use serde::{Deserialize, Serialize};

use super::{look, record, whole};
use crate::pool::{Prices, Sight};
use crate::scheduling::decision::Terms;
use crate::scheduling::scheduler::new_tokens;
use crate::scheduling::{Choice, Cx, Policy, Reason, Step, Trace};

/// How much each part of the cost counts; 1 is its seconds. The optimum is flat: half or twice as much hardly matters.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct MarginalCost {
    /// What uncached prompt work takes from an answer that is being written beside it.
    slows: Factor,
    /// What it takes from requests that wait, here or elsewhere.
    delays: Factor,
    /// What its own answer costs, and takes from the others, for a prompt that nobody else has.
    answer: Factor,
    /// The same for a prompt that many have.
    hot_answer: Factor,
    /// Long-run balance, for the part of the prompt that is not cached.
    balance: Factor,
    /// Waiting for KV memory, and for a place among the running.
    admission: Factor,
    /// One more copy of a prompt, where memory is short in all the pool.
    copies: Factor,
}

/// A factor, 0 to 1000.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize)]
#[serde(try_from = "f64", into = "f64")]
struct Factor(f64);

impl Default for MarginalCost {
    fn default() -> Self {
        Self {
            slows: Factor(0.1),
            delays: Factor(0.5),
            answer: Factor(0.03),
            hot_answer: Factor(0.3),
            balance: Factor(3.0),
            admission: Factor(1.0),
            copies: Factor(0.5),
        }
    }
}

impl TryFrom<f64> for Factor {
    type Error = String;

    fn try_from(factor: f64) -> Result<Self, String> {
        if (0.0..=1000.0).contains(&factor) {
            Ok(Self(factor))
        } else {
            Err(format!("a factor is 0 to 1000, not {factor}"))
        }
    }
}

impl From<Factor> for f64 {
    fn from(factor: Factor) -> Self {
        factor.0
    }
}

/// Share of the KV memory from which a request waits for it.
const FULL: f64 = 0.97;
/// Share, on average, from which the pool is short of memory.
const SHORT: f64 = 0.85;
/// Share from which the engine's own waiting requests are believed to wait for memory.
const NEARLY_FULL: f64 = 0.9;
/// Candidates whose terms a trace shows.
const SHOWN: usize = 3;

/// What is the same for all candidates.
struct Case<'a> {
    prices: &'a Prices,
    prompt: f64,
    output: f64,
    /// Requests that wait on an endpoint, on average.
    waiting: f64,
    /// How many times the price work takes in the pool.
    scale: f64,
    /// How short of memory the pool is, 0 to 1.
    short: f64,
    /// How hot the prompt's beginning is: requests of lately for each endpoint.
    hot: f64,
}

impl Policy for MarginalCost {
    fn choose(&self, cx: &Cx<'_>, trace: &mut Trace) -> Choice {
        let sights = look(cx);
        #[expect(clippy::cast_precision_loss, reason = "tokens and endpoints stay far below 2^52")]
        let (n, prompt) = (sights.len() as f64, cx.prompt_tokens as f64);
        let mean = |of: fn(&Sight) -> f64| sights.iter().map(|(_, it)| of(it)).sum::<f64>() / n;
        let case = Case {
            prices: cx.ledger.prices(),
            prompt,
            output: cx.output,
            waiting: mean(|sight| sight.waiting),
            scale: cx.scale,
            short: ((mean(|sight| sight.memory) - SHORT) / (1.0 - SHORT)).clamp(0.0, 1.0),
            hot: cx.hot / n,
        };
        let terms: Vec<Terms> = sights
            .iter()
            .map(|(slot, sight)| self.terms(&case, sight, cx.relative_weight(*slot)))
            .collect();
        let totals: Vec<f64> = terms.iter().map(Terms::total).collect();
        let least = totals.iter().copied().fold(f64::INFINITY, f64::min);
        let index_of = |slot: u32| sights.binary_search_by_key(&slot, |(slot, _)| *slot).ok();
        // Pickers that see the same decide the same.
        let is_least = |&slot: &u32| index_of(slot).is_some_and(|index| totals[index] <= least);
        let slot = cx.ring_order().find(is_least).unwrap_or_else(|| cx.home());
        // The chosen one first, also where it is one of several that cost the same.
        let mut ranked: Vec<usize> = (0..sights.len()).collect();
        let is_other = |index: usize| sights[index].0 != slot;
        ranked.sort_by(|&a, &b| {
            is_other(a).cmp(&is_other(b)).then_with(|| totals[a].total_cmp(&totals[b]))
        });
        let cached = whole(sights[ranked[0]].1.cached);
        for index in ranked.into_iter().take(SHOWN) {
            let (endpoint, sight) = sights[index];
            trace.steps.push(Step::Costs {
                endpoint,
                cached: whole(sight.cached),
                terms: terms[index],
            });
        }
        record(cx, sights, trace);
        Choice { slot, reason: Reason::LowestCost, cached }
    }

    fn asks_engines(&self) -> bool {
        true
    }

    fn needs_conversation(&self) -> bool {
        false
    }
}

impl MarginalCost {
    fn terms(&self, case: &Case<'_>, sight: &Sight, weight: f64) -> Terms {
        let Case { prices, prompt, output, .. } = *case;
        let (cached, answers, contexts) = (sight.cached, sight.answers, sight.contexts);
        let new = new_tokens(prompt, cached);
        // A prompt that many have should be in many caches: its work is not wasted.
        let (spread, heat) = (1.0 / (1.0 + case.hot), case.hot / (1.0 + case.hot));
        let own = prices.first_token(new, cached, answers, contexts) * sight.prompt_pace;
        let alone = prices.prompt(new, cached) * sight.prompt_pace;
        let answer = self.answer.0 + (self.hot_answer.0 - self.answer.0) * heat;
        let beside = answers + sight.waiting;
        let slower = prices.context * contexts
            + prices.decode * beside
            + (prices.decode + prices.context * prompt) * beside;
        // Memory that another copy takes is memory for the answers that would have run there.
        let copy = case.short * (new / output.max(256.0)) * output * prices.step(answers, contexts);
        Terms {
            queue: sight.backlog,
            prompt: own,
            others: alone * spread * (self.slows.0 * answers + self.delays.0 * case.waiting)
                / weight,
            answer: answer * output * slower * sight.answer_pace,
            balance: self.balance.0 * (new / prompt.max(1.0)) * sight.balance * case.scale / weight,
            admission: (self.admission.0 * admission(case, sight, new, beside)
                + self.copies.0 * copy)
                * sight.answer_pace,
        }
    }
}

/// Seconds until there is memory for it, or a place among the running.
fn admission(case: &Case<'_>, sight: &Sight, new: f64, beside: f64) -> f64 {
    let Case { prices, output, .. } = *case;
    let step = prices.step(sight.answers, sight.contexts);
    let too_many = beside + 1.0 - prices.sequences;
    if too_many > 0.0 {
        return too_many * output * step / sight.answers.min(prices.sequences).max(1.0);
    }
    let over = sight.memory + (new + output) / prices.capacity - FULL;
    let stuck = sight.stuck > 0.0;
    if over <= 0.0 && !stuck {
        return 0.0;
    }
    let endings = sight.answers.max(1.0) / (output * step).max(1e-3);
    let full = if stuck && sight.memory > NEARLY_FULL { 1.0 } else { 0.0 };
    (sight.stuck + 1.0) / endings * (over.max(0.0) * 20.0 + full).min(1.0)
}
