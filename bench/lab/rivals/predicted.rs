//! llm-d's predicted-latency profile: filters of affinity, then a weighted chance by predicted times.
//!
//! The predictions are the true model's with noise, which is better than a learned model has.

use crate::random::Random;
use crate::sim::{Router, World};
use crate::workload::Request;

/// Deviation of the noise's logarithm.
const NOISE: f64 = 0.15;
/// Shares of the prompt that must be cached, the stricter first.
const AFFINITY: [f64; 2] = [0.99, 0.80];
/// How often a filter is left out, to explore.
const EXPLORE: f64 = 0.01;
/// Seconds to the first token that affinity may cost.
const GATE: f64 = 5.0;
/// Weights of the time to the first token, and of that between tokens.
const WEIGHTS: (f64, f64) = (0.8, 0.2);

pub(super) struct PredictedLatency {
    random: Random,
}

impl PredictedLatency {
    pub(super) fn new(random: Random) -> Self {
        Self { random }
    }

    /// Leaves only endpoints that have most of the prompt, unless that costs too much time.
    fn filter(&mut self, candidates: Vec<usize>, share: &[f64], ttft: &[f64]) -> Vec<usize> {
        let mut left = candidates;
        for threshold in AFFINITY {
            if self.random.random() < EXPLORE {
                continue;
            }
            let (sticky, others): (Vec<usize>, Vec<usize>) =
                left.iter().partition(|&&k| share[k] >= threshold);
            if sticky.is_empty() {
                continue;
            }
            let least = |of: &[usize]| of.iter().map(|&k| ttft[k]).fold(f64::INFINITY, f64::min);
            if !others.is_empty() && least(&sticky) - least(&others) > GATE {
                continue;
            }
            left = sticky;
        }
        left
    }

    /// Draws one, the better the likelier.
    fn draw(&mut self, candidates: &[usize], ttft: &[f64], itl: &[f64]) -> usize {
        let bounds = |of: &[f64]| {
            let of = candidates.iter().map(|&k| of[k]);
            (of.clone().fold(f64::INFINITY, f64::min), of.fold(f64::NEG_INFINITY, f64::max))
        };
        let ((t0, t1), (p0, p1)) = (bounds(ttft), bounds(itl));
        let (first, between) = match WEIGHTS {
            _ if t1 - t0 < 1e-9 => (0.0, 1.0),
            _ if p1 - p0 < 1e-9 => (1.0, 0.0),
            weights => weights,
        };
        let within = |x: f64, low: f64, high: f64| {
            if high > low { (x - low) / (high - low) } else { 0.5 }
        };
        let weight = |&k: &usize| {
            let bad = first * within(ttft[k], t0, t1) + between * within(itl[k], p0, p1);
            ((1.0 - bad) * 99.0).trunc() + 2.0
        };
        let weights: Vec<f64> = candidates.iter().map(weight).collect();
        let mut drawn = self.random.random() * weights.iter().sum::<f64>();
        for (&k, weight) in candidates.iter().zip(weights) {
            drawn -= weight;
            if drawn <= 0.0 {
                return k;
            }
        }
        candidates[candidates.len() - 1]
    }
}

impl Router for PredictedLatency {
    fn choose(&mut self, request: &Request, _: f64, world: &World) -> Option<usize> {
        let (live, p) = (world.live(), &world.params);
        let prompt = request.prompt as f64;
        let share: Vec<f64> =
            live.iter().map(|&i| world.prefix_tokens(i, request) as f64 / prompt).collect();
        let mut noise = || self.random.gauss(0.0, NOISE).exp();
        let mut ttft = Vec::with_capacity(live.len());
        for (&i, share) in live.iter().zip(&share) {
            #[expect(clippy::cast_possible_truncation, reason = "a share of a prompt's tokens")]
            let new = (request.prompt - (share * prompt) as i64).max(16);
            let seconds = world.engine(i).prefill_seconds(new, share * prompt);
            ttft.push((world.queue_seconds(i) + seconds) * noise());
        }
        let mut itl = Vec::with_capacity(live.len());
        for &i in live {
            let engine = world.engine(i);
            let decoding = (engine.decoding() + 1) as f64;
            let contexts = (engine.contexts() + request.prompt) as f64;
            itl.push(p.decode_step(decoding, contexts) / engine.speed() * noise());
        }
        let mut candidates = self.filter((0..live.len()).collect(), &share, &ttft);
        let idle = |k: &&usize| world.in_flight()[live[**k]] == 0;
        let idle: Vec<usize> = candidates.iter().filter(idle).copied().collect();
        if !idle.is_empty() {
            candidates = idle;
        }
        Some(
            live[match candidates[..] {
                [only] => only,
                _ => self.draw(&candidates, &ttft, &itl),
            }],
        )
    }
}
