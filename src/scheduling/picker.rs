//! What takes one endpoint by the scores.

use serde::{Deserialize, Serialize};

/// One picker, by its name upstream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, Serialize)]
pub enum Picker {
    /// The highest score; equal ones are told apart by chance.
    #[default]
    #[serde(rename = "max-score-picker")]
    MaxScore,
    /// Any, whatever the scores.
    #[serde(rename = "random-picker")]
    Random,
    /// By chance, in proportion to the scores; any if none is above 0.
    #[serde(rename = "weighted-random-picker")]
    WeightedRandom,
}

impl Picker {
    /// Returns the place of the one that is taken; `chances` are hashes drawn for this decision, one for each.
    ///
    /// # Panics
    /// There is nothing to take from, which no policy is ever called with.
    #[must_use]
    pub fn pick(self, scores: &[f64], chances: &[u64]) -> usize {
        let best = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        // Efraimidis and Spirakis: the greatest u^(1/w), as logarithms.
        let key = |i: usize| match self {
            Self::MaxScore => {
                if scores[i] >= best {
                    0.0
                } else {
                    f64::NEG_INFINITY
                }
            }
            Self::Random => 0.0,
            Self::WeightedRandom if best <= 0.0 => 0.0,
            Self::WeightedRandom if scores[i] <= 0.0 => f64::NEG_INFINITY,
            Self::WeightedRandom => unit(chances[i]).ln() / scores[i],
        };
        (0..scores.len())
            .max_by(|&a, &b| key(a).total_cmp(&key(b)).then(chances[a].cmp(&chances[b])))
            .expect("a policy is called with at least one candidate")
    }
}

/// Makes a number in (0, 1) of a hash.
#[must_use]
pub fn unit(hash: u64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "53 bits are what a float holds")]
    let number = (hash >> 11) as f64 + 0.5;
    number / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::hash::mix;

    /// How often each is taken of 20,000 draws.
    fn shares(picker: Picker, scores: &[f64]) -> Vec<f64> {
        let mut counts = vec![0.0; scores.len()];
        for draw in 0..20_000u64 {
            let chances: Vec<u64> = (1..).take(scores.len()).map(|i| mix(draw, i)).collect();
            counts[picker.pick(scores, &chances)] += 1.0 / 20_000.0;
        }
        counts
    }

    #[track_caller]
    fn check(picker: Picker, scores: &[f64], expected: &[f64]) {
        let shares = shares(picker, scores);
        let near = shares.iter().zip(expected).all(|(share, expected)| {
            let sure = *expected == 0.0 || *expected == 1.0;
            (share - expected).abs() < if sure { 1e-9 } else { 0.015 }
        });
        assert!(near, "{shares:?} and not {expected:?}");
    }

    #[test]
    fn each_picker_takes_as_it_says() {
        check(Picker::MaxScore, &[1.0, 3.0, 2.0], &[0.0, 1.0, 0.0]);
        check(Picker::MaxScore, &[3.0, 1.0, 3.0], &[0.5, 0.0, 0.5]);
        check(Picker::Random, &[9.0, 1.0, 0.0, 0.0], &[0.25; 4]);
        check(Picker::WeightedRandom, &[1.0, 3.0, 0.0], &[0.25, 0.75, 0.0]);
        check(Picker::WeightedRandom, &[0.0, 0.0], &[0.5; 2]);
    }
}
