//! Whether a difference is more than chance: paired seeds, intervals, exact tests, and ratios over workloads.
//!
//! One seed is one observation: it draws the same arrivals, lengths and conversations for every policy, so the policies'
//! results are compared seed by seed.

use serde::Serialize;
use thiserror::Error;

use crate::metrics::{Better, Measured, Metric, digest, mean, quantile, sorted, whole};

/// Declared before anything was measured; Holm corrects for their number.
pub(crate) const PRIMARIES: [Metric; 4] =
    [Metric::TtftMean, Metric::TtftP95, Metric::E2eMean, Metric::Goodput];
/// Ratios within this of 1 are a tie.
pub(crate) const TIE: f64 = 0.01;
/// Error rates that are further apart make latencies incomparable: the failed ones have none.
pub(crate) const ERROR_GAP: f64 = 0.01;
/// The level of every interval.
const LEVEL: f64 = 0.95;
const RESAMPLES: usize = 2000;
/// Sign flips that are drawn, once all of them are more than that.
const FLIPS: u32 = 10_000;
/// Added to both shares of a ratio of SLO misses: where one policy misses nothing, the ratio would say everything.
const MISSES_FLOOR: f64 = 0.005;

/// A mean with its interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Interval {
    pub(crate) mean: f64,
    pub(crate) lo: f64,
    pub(crate) hi: f64,
}

/// When clients send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Arrivals {
    /// At times that the workload fixes.
    Open,
    /// When their last answer is there: the policy has a part in it.
    Closed,
}

/// Why runs are not compared.
#[derive(Debug, Clone, PartialEq, Error)]
pub(crate) enum Refusal {
    #[error("no seed was run under both")]
    NoCommonSeed,
    #[error("seed {seed}: different workloads, {ours} and {theirs}")]
    Workload { seed: u64, ours: String, theirs: String },
    #[error("seed {seed}: different SLOs")]
    Slo { seed: u64 },
    #[error("seed {seed}: endpoints were added at different times")]
    Scale { seed: u64 },
    #[error("seed {seed}: {ours} requests and {theirs}")]
    Rows { seed: u64, ours: usize, theirs: usize },
    #[error("seed {seed}: different requests")]
    Requests { seed: u64 },
    #[error("seed {seed}: sent at different times")]
    Times { seed: u64 },
    #[error("seed {seed}: {:.1} % failed and {:.1} %", ours * 100.0, theirs * 100.0)]
    Errors { seed: u64, ours: f64, theirs: f64 },
}

impl Refusal {
    /// Says what to do about it.
    pub(crate) fn advice(&self) -> &'static str {
        match self {
            Self::NoCommonSeed => "run both policies with the same --seeds",
            Self::Workload { .. } | Self::Slo { .. } | Self::Scale { .. } => {
                "the workload was changed in between: run both policies again with one command"
            }
            Self::Rows { .. } | Self::Requests { .. } => {
                "run both policies again with one command; where what \
                 clients send depends on when they are answered, as in `agent`, `ichat` and `mrqa`, there are no pairs: set means \
                 over many seeds side by side"
            }
            Self::Times { .. } => {
                "run both policies again with one command, on arrivals that the workload fixes"
            }
            Self::Errors { .. } => {
                "times of those that were answered say nothing about the others: look in \
                 requests.csv for what failed, or lower the load until neither fails"
            }
        }
    }
}

/// Two runs of the same requests.
pub(crate) type Pair<'a> = (&'a Measured, &'a Measured);

/// Pairs the runs of two policies on a workload by their seeds; refuses all of them if one pair is not of the same
/// requests, since to leave out a seed is to choose.
pub(crate) fn pair<'a>(
    ours: &[&'a Measured],
    theirs: &[&'a Measured],
    arrivals: Arrivals,
) -> Result<Vec<Pair<'a>>, Refusal> {
    let mut pairs = Vec::new();
    for our in ours {
        if let Some(their) = theirs.iter().find(|run| run.seed == our.seed) {
            comparable(our, their, arrivals)?;
            pairs.push((*our, *their));
        }
    }
    pairs.sort_by_key(|(our, _)| our.seed);
    if pairs.is_empty() { Err(Refusal::NoCommonSeed) } else { Ok(pairs) }
}

fn comparable(ours: &Measured, theirs: &Measured, arrivals: Arrivals) -> Result<(), Refusal> {
    let seed = ours.seed;
    let (our, their) = (ours.manifest, theirs.manifest);
    if ours.workload != theirs.workload {
        return Err(Refusal::Workload {
            seed,
            ours: ours.workload.clone(),
            theirs: theirs.workload.clone(),
        });
    }
    if ours.slo != theirs.slo {
        return Err(Refusal::Slo { seed });
    }
    if ours.scaled_at != theirs.scaled_at {
        return Err(Refusal::Scale { seed });
    }
    if our.rows != their.rows {
        return Err(Refusal::Rows { seed, ours: our.rows, theirs: their.rows });
    }
    if our.requests != their.requests {
        return Err(Refusal::Requests { seed });
    }
    if arrivals == Arrivals::Open && our.times != their.times {
        return Err(Refusal::Times { seed });
    }
    let (ours, theirs) = (ours.error_rate(), theirs.error_rate());
    if (ours - theirs).abs() > ERROR_GAP {
        return Err(Refusal::Errors { seed, ours, theirs });
    }
    Ok(())
}

/// The mean of a metric over seeds, with its interval; the draws depend on `names` alone.
pub(crate) fn mean_over_seeds(values: &[f64], names: &[&str]) -> Option<Interval> {
    let (mean, lo, hi) = bca(
        values,
        |values| mean(values.iter().copied()).unwrap_or(f64::NAN),
        &mut Draw::of(names),
    )?;
    Some(Interval { mean, lo, hi })
}

/// The median over seeds of (ours − theirs) / theirs, with a BCa interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Difference {
    pub(crate) median: f64,
    pub(crate) lo: f64,
    pub(crate) hi: f64,
}

/// One primary metric of one policy against another on one workload.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Test {
    pub(crate) metric: &'static str,
    pub(crate) seeds: usize,
    /// `None` if theirs is zero somewhere.
    pub(crate) difference: Option<Difference>,
    /// Seeds with no difference, which the rank test leaves out.
    pub(crate) equal: usize,
    /// One-sided: how probable so good a result of ours is if there is no difference.
    pub(crate) wilcoxon: f64,
    /// The same by flipping signs of the differences.
    pub(crate) sign_flip: f64,
    /// `wilcoxon`, corrected for the number of primaries.
    pub(crate) holm: f64,
    /// The same for so bad a result.
    pub(crate) holm_worse: f64,
}

/// Tests the primaries on paired runs of one workload.
pub(crate) fn tests(pairs: &[Pair<'_>]) -> Vec<Test> {
    let mut tests: Vec<Test> =
        PRIMARIES.into_iter().filter_map(|metric| test(pairs, metric)).collect();
    let better: Vec<f64> = tests.iter().map(|test| test.holm).collect();
    let worse: Vec<f64> = tests.iter().map(|test| test.holm_worse).collect();
    for ((test, better), worse) in tests.iter_mut().zip(holm(&better)).zip(holm(&worse)) {
        (test.holm, test.holm_worse) = (better, worse);
    }
    tests
}

fn test(pairs: &[Pair<'_>], metric: Metric) -> Option<Test> {
    let (our, their) = pairs.first()?;
    let names = [our.workload.as_str(), &our.policy, &their.policy, metric.name()];
    let values = values(pairs, metric);
    let relative: Option<Vec<f64>> =
        values.iter().map(|(our, their)| relative(*our, *their)).collect();
    let difference = relative.and_then(|values| bca(&values, median, &mut Draw::of(&names)));
    let sign = if metric.better() == Better::More { 1.0 } else { -1.0 };
    let gains: Vec<f64> = values.iter().map(|(our, their)| sign * (our - their)).collect();
    let losses: Vec<f64> = gains.iter().map(|gain| -gain).collect();
    let (wilcoxon, worse) = (wilcoxon(&gains), wilcoxon(&losses));
    (!values.is_empty()).then_some(Test {
        metric: metric.name(),
        seeds: values.len(),
        difference: difference.map(|(median, lo, hi)| Difference { median, lo, hi }),
        equal: gains.iter().filter(|gain| **gain == 0.0).count(),
        wilcoxon,
        sign_flip: sign_flip(&gains, &mut Draw::of(&names)),
        holm: wilcoxon,
        holm_worse: worse,
    })
}

fn values(pairs: &[Pair<'_>], metric: Metric) -> Vec<(f64, f64)> {
    pairs.iter().filter_map(|(our, their)| Some((our.get(metric)?, their.get(metric)?))).collect()
}

/// By how much of theirs ours differs; two zeros do not.
fn relative(ours: f64, theirs: f64) -> Option<f64> {
    if ours == theirs { Some(0.0) } else { (theirs != 0.0).then(|| (ours - theirs) / theirs) }
}

/// How many times theirs ours is, turned so that below 1 is a win; `None` where a ratio says nothing.
pub(crate) fn ratio_of(pairs: &[Pair<'_>], metric: Metric) -> Option<f64> {
    let values = values(pairs, metric);
    let floor = if metric == Metric::SloMisses { MISSES_FLOOR } else { 0.0 };
    let ours = mean(values.iter().map(|(our, _)| our + floor))?;
    let theirs = mean(values.iter().map(|(_, their)| their + floor))?;
    let ratio = if metric.better() == Better::More { theirs / ours } else { ours / theirs };
    (ratio.is_finite() && ratio > 0.0).then_some(ratio)
}

/// A ratio at one workload.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Point {
    pub(crate) workload: String,
    pub(crate) ratio: f64,
}

/// Ratios over workloads.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Versus {
    pub(crate) points: usize,
    /// The geometric mean, with a bootstrap interval over the workloads.
    pub(crate) mean: f64,
    pub(crate) lo: f64,
    pub(crate) hi: f64,
    pub(crate) wins: usize,
    pub(crate) ties: usize,
    pub(crate) losses: usize,
    /// Where ours is worst.
    pub(crate) worst: Point,
}

/// Draws ratios over workloads together; the draws depend on `names` alone.
pub(crate) fn versus(points: &[Point], names: &[&str]) -> Option<Versus> {
    let logs: Vec<f64> = points.iter().map(|point| point.ratio.ln()).collect();
    let worst = points
        .iter()
        .reduce(|worst, point| if point.ratio > worst.ratio { point } else { worst })?;
    let average = |logs: &[f64]| mean(logs.iter().copied()).unwrap_or(f64::NAN);
    let means = resampled(&logs, average, &mut Draw::of(names));
    let outside = (1.0 - LEVEL) / 2.0;
    let wins = points.iter().filter(|point| point.ratio < 1.0 - TIE).count();
    let losses = points.iter().filter(|point| point.ratio > 1.0 + TIE).count();
    Some(Versus {
        points: points.len(),
        mean: average(&logs).exp(),
        lo: quantile(&means, outside)?.exp(),
        hi: quantile(&means, 1.0 - outside)?.exp(),
        wins,
        ties: points.len() - wins - losses,
        losses,
        worst: worst.clone(),
    })
}

/// The probability of a signed-rank sum at least this high if signs are chance: exact, with mean ranks for ties, and
/// without the differences that are zero. 1 if none is left.
pub(crate) fn wilcoxon(gains: &[f64]) -> f64 {
    let mut gains: Vec<f64> = gains.iter().copied().filter(|gain| *gain != 0.0).collect();
    gains.sort_by(|a, b| a.abs().total_cmp(&b.abs()));
    let ranks = doubled_ranks(&gains);
    let observed: usize =
        gains.iter().zip(&ranks).filter(|(gain, _)| **gain > 0.0).map(|(_, rank)| rank).sum();
    let mut chances = vec![1.0];
    for rank in ranks {
        let mut next = vec![0.0; chances.len() + rank];
        for (sum, chance) in chances.iter().enumerate() {
            next[sum] += chance / 2.0;
            next[sum + rank] += chance / 2.0;
        }
        chances = next;
    }
    chances[observed..].iter().sum::<f64>().min(1.0)
}

/// Twice the ranks of values that are sorted by size, so that the mean rank of a tie is whole.
fn doubled_ranks(sorted: &[f64]) -> Vec<usize> {
    let mut ranks = Vec::with_capacity(sorted.len());
    for tie in sorted.chunk_by(|a, b| a.abs() == b.abs()) {
        let first = ranks.len() + 1;
        ranks.extend(std::iter::repeat_n(2 * first + tie.len() - 1, tie.len()));
    }
    ranks
}

/// The probability of a sum at least this high if each sign is chance: of all flips if they are few, else of drawn ones.
pub(crate) fn sign_flip(gains: &[f64], draw: &mut Draw) -> f64 {
    let observed: f64 = gains.iter().sum();
    // Sums of the same numbers in other signs differ in their last bits.
    let least = observed - 1e-9 * gains.iter().map(|gain| gain.abs()).sum::<f64>();
    let reaches = |flips: u64| {
        let flipped =
            |(at, gain): (usize, &f64)| if flips >> (at % 64) & 1 == 1 { -gain } else { *gain };
        gains.iter().enumerate().map(flipped).sum::<f64>() >= least
    };
    match 1u64.checked_shl(u32::try_from(gains.len()).unwrap_or(u32::MAX)) {
        Some(all) if all <= u64::from(FLIPS) => {
            (0..all).filter(|flips| reaches(*flips)).count() as f64 / all as f64
        }
        Some(_) | None => {
            // What was seen is one of the possible flips.
            let reached = (0..FLIPS).filter(|_| reaches(draw.next())).count();
            (reached as f64 + 1.0) / (f64::from(FLIPS) + 1.0)
        }
    }
}

/// Holm's correction: the smallest level at which each is still significant beside the others.
pub(crate) fn holm(chances: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..chances.len()).collect();
    order.sort_by(|a, b| chances[*a].total_cmp(&chances[*b]));
    let mut corrected = vec![0.0; chances.len()];
    let mut least = 0.0f64;
    for (place, at) in order.into_iter().enumerate() {
        least = least.max((chances[at] * (chances.len() - place) as f64).min(1.0));
        corrected[at] = least;
    }
    corrected
}

fn median(values: &[f64]) -> f64 {
    quantile(&sorted(values.iter().copied()), 0.5).unwrap_or(f64::NAN)
}

/// A statistic with its bias-corrected and accelerated bootstrap interval. One value alone has no interval: both ends
/// are the value.
fn bca(
    values: &[f64],
    statistic: impl Fn(&[f64]) -> f64,
    draw: &mut Draw,
) -> Option<(f64, f64, f64)> {
    let first = values.first()?;
    let point = statistic(values);
    if values.iter().all(|value| value == first) {
        return Some((point, point, point));
    }
    let drawn = resampled(values, &statistic, draw);
    let below = drawn.iter().filter(|value| **value < point).count() as f64;
    let equal = drawn.iter().filter(|value| **value == point).count() as f64;
    let count = drawn.len() as f64;
    let bias =
        normal_quantile(((below + equal / 2.0) / count).clamp(0.5 / count, 1.0 - 0.5 / count));
    let acceleration = acceleration(values, &statistic);
    let bound = |share: f64| {
        let shifted = bias + normal_quantile(share);
        quantile(&drawn, normal(bias + shifted / (1.0 - acceleration * shifted)))
    };
    Some((point, bound((1.0 - LEVEL) / 2.0)?, bound(f64::midpoint(1.0, LEVEL))?))
}

/// How fast the spread of a statistic changes with it, from what it is without each of the values.
fn acceleration(values: &[f64], statistic: impl Fn(&[f64]) -> f64) -> f64 {
    let without = |left_out: usize| {
        let others: Vec<f64> = values
            .iter()
            .enumerate()
            .filter(|(at, _)| *at != left_out)
            .map(|(_, value)| *value)
            .collect();
        statistic(&others)
    };
    let parts: Vec<f64> = (0..values.len()).map(without).collect();
    let average = mean(parts.iter().copied()).unwrap_or(0.0);
    let power = |exponent| parts.iter().map(|part| (average - part).powi(exponent)).sum::<f64>();
    let spread = 6.0 * power(2).powf(1.5);
    if spread > 0.0 { power(3) / spread } else { 0.0 }
}

/// The statistic of resamples, sorted.
fn resampled(values: &[f64], statistic: impl Fn(&[f64]) -> f64, draw: &mut Draw) -> Vec<f64> {
    let mut sample = vec![0.0; values.len()];
    sorted((0..RESAMPLES).map(|_| {
        for slot in &mut sample {
            *slot = values[draw.below(values.len())];
        }
        statistic(&sample)
    }))
}

/// The share of a normal distribution below `z`.
fn normal(z: f64) -> f64 {
    // Abramowitz and Stegun 26.2.17, to 7.5e-8.
    let t = 1.0 / (1.0 + 0.231_641_9 * z.abs());
    let series = [0.319_381_530, -0.356_563_782, 1.781_477_937, -1.821_255_978, 1.330_274_429];
    let tail = (-z * z / 2.0).exp() / std::f64::consts::TAU.sqrt()
        * series.iter().rev().fold(0.0, |sum, factor| (sum + factor) * t);
    if z < 0.0 { tail } else { 1.0 - tail }
}

/// The inverse of `normal`, by halving: it is called a few times an interval.
fn normal_quantile(share: f64) -> f64 {
    let (mut low, mut high) = (-9.0, 9.0);
    for _ in 0..60 {
        let middle = f64::midpoint(low, high);
        if normal(middle) < share { low = middle } else { high = middle }
    }
    f64::midpoint(low, high)
}

/// Random numbers that are the same wherever the same things are compared (SplitMix64).
#[derive(Debug)]
pub(crate) struct Draw(u64);

impl Draw {
    pub(crate) fn of(names: &[&str]) -> Self {
        // 256 is no byte: it keeps ["ab", "c"] from ["a", "bc"].
        Self(digest(names.iter().flat_map(|name| name.bytes().map(u64::from).chain([256]))))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, count: usize) -> usize {
        let share = (self.next() >> 11) as f64 / (1u64 << 53) as f64;
        whole(share * count as f64).min(count - 1)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::metrics::made_up;

    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() < 1e-9
    }

    fn seeds(policy: &str, skill: f64, count: u64) -> Vec<Measured> {
        (1..=count).map(|seed| Measured::of(&made_up::run("chat", policy, seed, skill))).collect()
    }

    fn all(runs: &[Measured]) -> Vec<&Measured> {
        runs.iter().collect()
    }

    #[test]
    fn wilcoxon_knows_the_tables() {
        assert!(close(wilcoxon(&[1.0, 2.0, 3.0, 4.0, 5.0]), 1.0 / 32.0));
        assert!(close(wilcoxon(&[-1.0, 2.0, 3.0, 4.0, 5.0]), 2.0 / 32.0));
        assert!(close(wilcoxon(&[1.0, 2.0, -3.0, 4.0, 5.0]), 5.0 / 32.0));
        assert!(close(wilcoxon(&[-1.0, -2.0, -3.0]), 1.0));
        // The critical value at n = 10 and 0.025 one-sided is a smaller sum of 8: 47 of 55 on the other side.
        let ten = [-1.0, 2.0, 3.0, 4.0, 5.0, 6.0, -7.0, 8.0, 9.0, 10.0];
        assert!(close(wilcoxon(&ten), 25.0 / 1024.0), "{}", wilcoxon(&ten));
    }

    #[test]
    fn wilcoxon_drops_zeros_and_shares_ranks() {
        assert!(close(wilcoxon(&[0.0, 1.0, 0.0, 2.0]), 0.25));
        assert!(close(wilcoxon(&[0.0, 0.0]), 1.0));
        assert!(close(wilcoxon(&[]), 1.0));
        // Ranks 1.5, 1.5, 3: the sum is 4.5, and 6 alone is higher; two of eight signs give 4.5.
        assert!(close(wilcoxon(&[1.0, -1.0, 2.0]), 3.0 / 8.0));
        assert_eq!(doubled_ranks(&[1.0, 2.0, -2.0, 2.0, 5.0]), [2, 6, 6, 6, 10]);
    }

    #[test]
    fn sign_flips_are_all_tried_or_drawn() {
        assert!(close(sign_flip(&[1.0, 2.0, 3.0], &mut Draw::of(&["few"])), 1.0 / 8.0));
        assert!(close(sign_flip(&[1.0, -2.0, 3.0], &mut Draw::of(&["few"])), 3.0 / 8.0));
        let many: Vec<f64> = (0..20).map(|at| if at % 4 == 0 { -1.0 } else { 1.0 }).collect();
        let drawn = sign_flip(&many, &mut Draw::of(&["many"]));
        // At least 15 of 20 coins: 21,700 of 1,048,576.
        assert!((drawn - 0.0207).abs() < 0.006, "{drawn}");
    }

    #[test]
    fn holm_multiplies_and_never_falls() {
        let corrected = holm(&[0.04, 0.01, 0.03, 0.9]);
        for (got, expected) in corrected.iter().zip([0.09, 0.04, 0.09, 0.9]) {
            assert!(close(*got, expected), "{corrected:?}");
        }
        assert!(holm(&[]).is_empty());
    }

    #[test]
    fn the_normal_distribution_is_known() {
        assert!((normal(1.959_964) - 0.975).abs() < 1e-6);
        assert!((normal_quantile(0.025) + 1.959_964).abs() < 1e-5);
        assert!(normal_quantile(0.5).abs() < 1e-6);
    }

    #[test]
    fn an_interval_is_about_two_standard_errors_wide() {
        let values: Vec<f64> = (0..100).map(f64::from).collect();
        let interval = mean_over_seeds(&values, &["wide"]).unwrap();
        assert!(close(interval.mean, 49.5));
        let expected = 1.96 * 28.87 / 10.0;
        assert!((interval.hi - interval.mean - expected).abs() < 0.6, "{interval:?}");
        assert!((interval.mean - interval.lo - expected).abs() < 0.6, "{interval:?}");
        assert_eq!(
            mean_over_seeds(&values, &["wide"]),
            Some(interval),
            "the same names draw the same"
        );
        assert_eq!(
            mean_over_seeds(&[3.0], &["one"]),
            Some(Interval { mean: 3.0, lo: 3.0, hi: 3.0 })
        );
        assert_eq!(mean_over_seeds(&[], &["none"]), None);
    }

    #[test]
    fn the_better_policy_is_found_out() {
        let (good, poor) = (seeds("good", 0.9, 10), seeds("poor", 0.3, 10));
        let pairs = pair(&all(&good), &all(&poor), Arrivals::Open).unwrap();
        assert_eq!(pairs.len(), 10);
        let tests = tests(&pairs);
        assert_eq!(tests.len(), PRIMARIES.len());
        assert!(
            close(tests[0].wilcoxon, 1.0 / 1024.0) && close(tests[0].holm, 4.0 / 1024.0),
            "{tests:?}"
        );
        assert!(close(tests[0].holm_worse, 1.0));
        let Difference { median, lo, hi } = tests[0].difference.unwrap();
        assert!(lo <= median && median <= hi && hi < 0.0);
        assert!(ratio_of(&pairs, Metric::TtftMean).unwrap() < 0.8);
        assert!(ratio_of(&pairs, Metric::Goodput).unwrap() < 1.0, "turned, so that less is better");
    }

    #[test]
    fn only_the_same_requests_are_paired() {
        let (ours, theirs) = (seeds("a", 0.5, 3), seeds("b", 0.5, 3));
        let refuse = |change: &dyn Fn(&mut Measured), arrivals| {
            let mut theirs = theirs.clone();
            change(&mut theirs[1]);
            pair(&all(&ours), &all(&theirs), arrivals).err()
        };
        assert_eq!(refuse(&|_| (), Arrivals::Open), None);
        assert_eq!(
            refuse(&|run| run.manifest.requests += 1, Arrivals::Open),
            Some(Refusal::Requests { seed: 2 })
        );
        assert_eq!(
            refuse(&|run| run.manifest.times += 1, Arrivals::Open),
            Some(Refusal::Times { seed: 2 })
        );
        assert_eq!(
            refuse(&|run| run.manifest.times += 1, Arrivals::Closed),
            None,
            "a policy's answers make its times"
        );
        assert_eq!(
            refuse(&|run| run.manifest.rows = 7, Arrivals::Closed),
            Some(Refusal::Rows { seed: 2, ours: 600, theirs: 7 })
        );
        assert_eq!(
            refuse(&|run| run.slo.ttft = 9.0, Arrivals::Closed),
            Some(Refusal::Slo { seed: 2 })
        );
        assert_eq!(
            refuse(&|run| run.scaled_at = Some(9.0), Arrivals::Closed),
            Some(Refusal::Scale { seed: 2 })
        );
        let fail = |rate: f64| {
            move |run: &mut Measured| {
                run.values.insert(Metric::Failed, rate);
            }
        };
        let failing = refuse(&fail(0.027), Arrivals::Closed).unwrap();
        assert_eq!(failing.to_string(), "seed 2: 0.5 % failed and 2.7 %");
        assert_eq!(refuse(&fail(0.014), Arrivals::Closed), None);
        assert_eq!(pair(&all(&ours), &[], Arrivals::Open), Err(Refusal::NoCommonSeed));
    }

    #[test]
    fn ratios_over_workloads_are_drawn_together() {
        let points: Vec<Point> = [0.5, 1.005, 2.0, 0.9]
            .iter()
            .enumerate()
            .map(|(at, ratio)| Point { workload: format!("w{at}"), ratio: *ratio })
            .collect();
        let versus = versus(&points, &["ours", "theirs"]).unwrap();
        assert!(close(versus.mean, (0.5f64 * 1.005 * 2.0 * 0.9).powf(0.25)));
        assert!(versus.lo < versus.mean && versus.mean < versus.hi);
        assert_eq!((versus.wins, versus.ties, versus.losses), (2, 1, 1));
        assert_eq!(versus.worst.workload, "w2");
    }

    #[test]
    fn where_one_misses_nothing_the_ratio_is_no_infinity() {
        let (mut ours, mut theirs) = (seeds("a", 0.5, 1), seeds("b", 0.5, 1));
        ours[0].values.insert(Metric::SloMisses, 0.0);
        theirs[0].values.insert(Metric::SloMisses, 0.005);
        let pairs = pair(&all(&ours), &all(&theirs), Arrivals::Open).unwrap();
        assert!(close(ratio_of(&pairs, Metric::SloMisses).unwrap(), 0.5));
    }

    proptest! {
        #[test]
        fn both_directions_of_wilcoxon_meet(gains in prop::collection::vec(-5i32..=5, 0..14)) {
            let gains: Vec<f64> = gains.into_iter().map(f64::from).collect();
            let losses: Vec<f64> = gains.iter().map(|gain| -gain).collect();
            let (better, worse) = (wilcoxon(&gains), wilcoxon(&losses));
            prop_assert!(better > 0.0 && better <= 1.0);
            prop_assert!(better + worse >= 1.0 - 1e-9, "what was seen is in both");
            let mut reversed = gains;
            reversed.reverse();
            prop_assert!(close(wilcoxon(&reversed), better));
        }

        #[test]
        fn wilcoxon_is_the_share_of_all_signs(sizes in prop::collection::vec(1i32..=4, 1..9), signs in 0u32..256) {
            let signed = |signs: u32| -> Vec<f64> {
                let sign = |at: usize| if signs >> at & 1 == 1 { -1.0 } else { 1.0 };
                sizes.iter().enumerate().map(|(at, size)| sign(at) * f64::from(*size)).collect()
            };
            let sum = |gains: &[f64]| -> usize {
                let mut gains = gains.to_vec();
                gains.sort_by(|a, b| a.abs().total_cmp(&b.abs()));
                doubled_ranks(&gains).iter().zip(&gains).filter(|(_, gain)| **gain > 0.0).map(|(rank, _)| rank).sum()
            };
            let (observed, all) = (sum(&signed(signs)), 1u32 << sizes.len());
            let reached = (0..all).filter(|signs| sum(&signed(*signs)) >= observed).count();
            prop_assert!(close(wilcoxon(&signed(signs)), reached as f64 / f64::from(all)));
        }

        #[test]
        fn an_interval_holds_within_the_data(values in prop::collection::vec(-1e3..1e3f64, 1..12)) {
            let interval = mean_over_seeds(&values, &["any"]).unwrap();
            let least = values.iter().copied().reduce(f64::min).unwrap();
            let most = values.iter().copied().reduce(f64::max).unwrap();
            prop_assert!(interval.lo <= interval.hi);
            prop_assert!(least - 1e-9 <= interval.lo && interval.hi <= most + 1e-9);
        }

        #[test]
        fn holm_keeps_order_and_bounds(chances in prop::collection::vec(0.0..1.0f64, 0..6)) {
            let corrected = holm(&chances);
            for (chance, corrected) in chances.iter().zip(&corrected) {
                prop_assert!(chance <= corrected && *corrected <= 1.0);
            }
        }
    }
}
