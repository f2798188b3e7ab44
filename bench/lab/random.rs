//! Python's `random.Random`, number by number, so that a workload drawn here is the one that was drawn there.

use crate::digest;

const WORDS: usize = 624;
const SHIFT: usize = 397;

/// A Mersenne Twister (MT19937), with the distributions and the names of Python's `random`.
#[derive(Debug, Clone)]
pub(crate) struct Random {
    words: [u32; WORDS],
    at: usize,
    /// `gauss` draws two at once and keeps the second.
    spare: Option<f64>,
}

impl Random {
    /// Seeds as `Random(seed)` does with a whole number.
    pub(crate) fn new(seed: u64) -> Self {
        #[expect(clippy::cast_possible_truncation, reason = "the two halves")]
        let (low, high) = (seed as u32, (seed >> 32) as u32);
        let key = [low, high];
        Self::from_key(if high == 0 { &key[..1] } else { &key })
    }

    /// Seeds as `Random(seed)` does with a text.
    pub(crate) fn from_text(seed: &str) -> Self {
        let mut bytes = seed.as_bytes().to_vec();
        bytes.extend(digest::sha512(seed.as_bytes()));
        // Python reads these bytes as one big-endian number, of which the generator takes 32 bits at a time from below.
        let mut key: Vec<u32> = bytes
            .rchunks(4)
            .map(|chunk| chunk.iter().fold(0, |word, &byte| word << 8 | u32::from(byte)))
            .collect();
        while key.len() > 1 && key.last() == Some(&0) {
            key.pop();
        }
        Self::from_key(&key)
    }

    fn from_key(key: &[u32]) -> Self {
        let mut words = [0u32; WORDS];
        words[0] = 19_650_218;
        for i in 1..WORDS {
            let before = words[i - 1];
            words[i] = (before ^ (before >> 30)).wrapping_mul(1_812_433_253).wrapping_add(index(i));
        }
        let (mut i, mut j) = (1, 0);
        for _ in 0..WORDS.max(key.len()) {
            let before = words[i - 1];
            words[i] = (words[i] ^ (before ^ (before >> 30)).wrapping_mul(1_664_525))
                .wrapping_add(key[j])
                .wrapping_add(index(j));
            (i, j) = (step(&mut words, i), (j + 1) % key.len());
        }
        for _ in 1..WORDS {
            let before = words[i - 1];
            words[i] = (words[i] ^ (before ^ (before >> 30)).wrapping_mul(1_566_083_941))
                .wrapping_sub(index(i));
            i = step(&mut words, i);
        }
        words[0] = 0x8000_0000;
        Self { words, at: WORDS, spare: None }
    }

    fn word(&mut self) -> u32 {
        if self.at == WORDS {
            self.twist();
        }
        let mut y = self.words[self.at];
        self.at += 1;
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c_5680;
        y ^= (y << 15) & 0xefc6_0000;
        y ^ (y >> 18)
    }

    fn twist(&mut self) {
        for i in 0..WORDS {
            let y = (self.words[i] & 0x8000_0000) | (self.words[(i + 1) % WORDS] & 0x7fff_ffff);
            let odd = if y & 1 == 1 { 0x9908_b0df } else { 0 };
            self.words[i] = self.words[(i + SHIFT) % WORDS] ^ (y >> 1) ^ odd;
        }
        self.at = 0;
    }

    /// Draws from [0, 1).
    pub(crate) fn random(&mut self) -> f64 {
        let (high, low) = (self.word() >> 5, self.word() >> 6);
        (f64::from(high) * 67_108_864.0 + f64::from(low)) * (1.0 / 9_007_199_254_740_992.0)
    }

    /// Draws 64 bits.
    pub(crate) fn bits(&mut self) -> u64 {
        let low = u64::from(self.word());
        u64::from(self.word()) << 32 | low
    }

    /// Draws from [low, high].
    pub(crate) fn uniform(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.random()
    }

    /// Draws a waiting time at `rate` a second.
    pub(crate) fn expovariate(&mut self, rate: f64) -> f64 {
        -(1.0 - self.random()).ln() / rate
    }

    /// Draws from a normal distribution, as `gauss` does.
    pub(crate) fn gauss(&mut self, mean: f64, deviation: f64) -> f64 {
        let z = self.spare.take().unwrap_or_else(|| {
            let turn = self.random() * std::f64::consts::TAU;
            let radius = (-2.0 * (1.0 - self.random()).ln()).sqrt();
            self.spare = Some(turn.sin() * radius);
            turn.cos() * radius
        });
        mean + z * deviation
    }

    /// Draws from a log-normal distribution, whose logarithm has this mean and deviation.
    pub(crate) fn lognormvariate(&mut self, mean: f64, deviation: f64) -> f64 {
        self.normalvariate(mean, deviation).exp()
    }

    /// Draws from a normal distribution, as `normalvariate` does (Kinderman and Monahan), which is not `gauss`.
    fn normalvariate(&mut self, mean: f64, deviation: f64) -> f64 {
        let magic = 4.0 * (-0.5f64).exp() / 2.0f64.sqrt();
        loop {
            let first = self.random();
            let second = 1.0 - self.random();
            let z = magic * (first - 0.5) / second;
            if z * z / 4.0 <= -second.ln() {
                return mean + z * deviation;
            }
        }
    }

    /// Draws a whole number below `n`, as `randrange` does.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        let bits = usize::BITS - n.leading_zeros();
        assert!((1..=32).contains(&bits), "a range of 1 to 2^32 - 1, not {n}");
        loop {
            let drawn = (self.word() >> (32 - bits)) as usize;
            if drawn < n {
                return drawn;
            }
        }
    }

    /// Draws a whole number from [low, high].
    pub(crate) fn randint(&mut self, low: u32, high: u32) -> u32 {
        let drawn = self.below((high - low) as usize + 1);
        low + u32::try_from(drawn).expect("below a difference of two u32")
    }

    /// Draws one of some.
    pub(crate) fn choice<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.below(of.len())]
    }

    /// Draws an index by weights that are added up already, as `choices` does.
    pub(crate) fn weighted(&mut self, sums: &[f64]) -> usize {
        let total = sums.last().copied().expect("there are weights to draw by");
        let drawn = self.random() * total;
        sums[..sums.len() - 1].partition_point(|&sum| sum <= drawn)
    }

    /// Puts a slice into an order by chance.
    pub(crate) fn shuffle<T>(&mut self, slice: &mut [T]) {
        for i in (1..slice.len()).rev() {
            let j = self.below(i + 1);
            slice.swap(i, j);
        }
    }
}

/// Adds up weights, for [`Random::weighted`].
pub(crate) fn sums(weights: impl IntoIterator<Item = f64>) -> Vec<f64> {
    let mut sum = None;
    weights.into_iter().map(|weight| *sum.insert(sum.map_or(weight, |sum| sum + weight))).collect()
}

fn step(words: &mut [u32; WORDS], i: usize) -> usize {
    if i + 1 < WORDS {
        return i + 1;
    }
    words[0] = words[WORDS - 1];
    1
}

fn index(i: usize) -> u32 {
    u32::try_from(i).expect("an index of a seed")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What Python 3.11 prints for `random() × 3, uniform(2, 5), expovariate(16), gauss(0, .15), gauss(1, 2),
    /// lognormvariate(3, .5), choices(range(4), weights=[6, 3, 2, 1])[0], choice([10, ..., 70]), randint(8, 14),
    /// randrange(8)`.
    fn python() -> Vec<(Random, [f64; 8], [usize; 4])> {
        let number = Random::new;
        let text = Random::from_text;
        vec![
            (
                number(0),
                [
                    0.8444218515250481,
                    0.7579544029403025,
                    0.420571580830845,
                    2.77675025087889,
                    0.04474717186044692,
                    -0.21706846896410484,
                    2.9686791024932964,
                    14.551073512795327,
                ],
                [1, 20, 12, 2],
            ),
            (
                number(1),
                [
                    0.13436424411240122,
                    0.8474337369372327,
                    0.763774618976614,
                    2.765207077218265,
                    0.04275367372872502,
                    -0.20694658609493147,
                    1.9063121254468807,
                    26.398551650993365,
                ],
                [0, 70, 11, 6],
            ),
            (
                number(8),
                [
                    0.2267058593810488,
                    0.9622950358343828,
                    0.12633089865085956,
                    4.114450768614824,
                    0.0055646070595122546,
                    0.009052972951347757,
                    8.506540284022167,
                    10.013917296385891,
                ],
                [0, 40, 11, 7],
            ),
            (
                number(1 << 40),
                [
                    0.1036394562812375,
                    0.6705558677439764,
                    0.4266543913526999,
                    3.163192318360736,
                    0.061550026905608894,
                    0.1989704190232695,
                    2.4129403920878953,
                    25.463072183473653,
                ],
                [2, 30, 8, 6],
            ),
            (
                text("1-0"),
                [
                    0.5733448956596993,
                    0.28713598374041327,
                    0.01519018574080988,
                    2.4622808602903423,
                    0.005841385973336727,
                    -0.21478834352991316,
                    -1.7460072198889711,
                    21.23014927962707,
                ],
                [2, 30, 14, 6],
            ),
            (
                text("7-12"),
                [
                    0.8892652038027571,
                    0.8247630449936969,
                    0.6912273187398846,
                    4.0497423675176085,
                    0.03361054131603988,
                    0.16649849925214974,
                    1.5814545981963455,
                    45.109033358416895,
                ],
                [0, 70, 11, 6],
            ),
        ]
    }

    #[test]
    fn it_draws_what_python_draws() {
        for (mut random, reals, wholes) in python() {
            let drawn = [
                random.random(),
                random.random(),
                random.random(),
                random.uniform(2.0, 5.0),
                random.expovariate(16.0),
                random.gauss(0.0, 0.15),
                random.gauss(1.0, 2.0),
                random.lognormvariate(3.0, 0.5),
            ];
            assert_eq!(drawn, reals);
            let drawn = [
                random.weighted(&sums([6.0, 3.0, 2.0, 1.0])),
                *random.choice(&[10, 20, 30, 40, 50, 60, 70]),
                random.randint(8, 14) as usize,
                random.below(8),
            ];
            assert_eq!(drawn, wholes);
        }
    }

    #[test]
    fn it_shuffles_as_python_does() {
        let mut random = Random::new(3);
        let mut order: Vec<u32> = (0..12).collect();
        random.shuffle(&mut order);
        assert_eq!(order, [1, 7, 10, 0, 6, 11, 4, 5, 2, 8, 9, 3]);
        assert_eq!(random.bits(), 15_448_577_805_145_100_959);
        let next: Vec<usize> = (0..12).map(|_| random.below(8)).collect();
        assert_eq!(next, [7, 4, 3, 3, 7, 7, 6, 2, 3, 2, 6, 0]);
    }

    #[test]
    fn it_goes_on_as_python_does_beyond_its_first_words() {
        let mut random = Random::new(3);
        for _ in 0..2000 {
            random.random();
        }
        assert_eq!(random.random(), 0.027308947309046983);
    }
}
