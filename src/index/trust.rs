//! How far the predictions about one holder came true: cached tokens delivered for cached tokens predicted.

/// Share of the newest sample in the average, at full weight.
const ALPHA: f64 = 0.1;
/// Predicted tokens from which a sample counts fully; a miss of one block says little.
const FULL: f64 = 512.0;
/// The factor never falls below this, so that a holder can win requests and earn its trust back.
const FLOOR: f64 = 0.05;

/// An exponentially weighted average of delivered over predicted, in `0..=1`; full trust until told otherwise.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Trust {
    ratio: f64,
    samples: u64,
}

impl Default for Trust {
    fn default() -> Self {
        Self { ratio: 1.0, samples: 0 }
    }
}

impl Trust {
    /// Takes one answer: tokens predicted as cached and tokens that the engine reported as cached.
    ///
    /// Nothing predicted says nothing. More delivered than predicted counts as a promise kept.
    pub fn observe(&mut self, predicted: u64, delivered: u64) {
        if predicted == 0 {
            return;
        }
        #[expect(clippy::cast_precision_loss, reason = "a prompt has far fewer tokens than 2^53")]
        let (predicted, delivered) = (predicted as f64, delivered as f64);
        let sample = (delivered / predicted).min(1.0);
        let weight = ALPHA * (predicted / FULL).min(1.0);
        self.ratio = (self.ratio + weight * (sample - self.ratio)).clamp(0.0, 1.0);
        self.samples = self.samples.saturating_add(1);
    }

    /// Returns the average itself, in `0..=1`.
    #[must_use]
    pub const fn ratio(&self) -> f64 {
        self.ratio
    }

    /// Returns how many answers went into the average.
    #[must_use]
    pub const fn samples(&self) -> u64 {
        self.samples
    }

    /// Returns what to multiply predicted tokens by, from 0.05 to 1.
    #[must_use]
    pub const fn factor(&self) -> f64 {
        self.ratio.max(FLOOR)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn the_factor_stays_in_its_bounds(samples in prop::collection::vec((any::<u64>(), any::<u64>()), 0..200)) {
            let mut trust = Trust::default();
            for (predicted, delivered) in samples {
                trust.observe(predicted, delivered);
                prop_assert!((FLOOR..=1.0).contains(&trust.factor()));
            }
        }
    }

    #[test]
    fn broken_promises_lower_it_and_kept_ones_raise_it() {
        let mut trust = Trust::default();
        assert_eq!(trust.factor().to_bits(), 1f64.to_bits());
        for _ in 0..50 {
            trust.observe(10_000, 0);
        }
        assert!(trust.ratio() < 0.01 && trust.factor() >= FLOOR, "{trust:?}");
        for _ in 0..50 {
            trust.observe(10_000, 12_000);
        }
        assert!(trust.factor() > 0.99, "{trust:?}");
        assert_eq!(trust.samples(), 100);
    }

    #[test]
    fn a_small_prediction_weighs_little_and_an_empty_one_nothing() {
        let (mut small, mut large, mut none) =
            (Trust::default(), Trust::default(), Trust::default());
        small.observe(16, 0);
        large.observe(4096, 0);
        none.observe(0, 4096);
        assert!(small.ratio() > 0.99 && large.ratio() < 0.91);
        assert_eq!(none, Trust::default());
    }
}
