//! What a run's rows say, in numbers: the definitions that every table and every chart shares.

use std::collections::BTreeMap;

use crate::record::{Row, Run, Slo};

/// How long after an endpoint was added the caches of follow-ups are looked at, in seconds.
const AFTER_SCALE: f64 = 60.0;
/// Windows of equal length in the hit rate over time.
const WINDOWS: usize = 40;
/// Points of a kept distribution, besides its minimum.
const STEPS: usize = 400;
/// Goodput is also told for these multiples of the time to the first token that is asked for.
const SWEEP: [f64; 14] = [0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0, 1.5, 2.0, 5.0, 10.0, 20.0];

/// A number of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Metric {
    /// Tokens found in a cache, of all prompt tokens that were served.
    HitRate,
    /// The same for turns after a conversation's first.
    FollowupHitRate,
    TtftMean,
    TtftP50,
    TtftP95,
    TtftP99,
    E2eMean,
    E2eP50,
    E2eP95,
    ItlMean,
    /// Requests within the SLO, of all that were sent: one that failed waited for ever.
    Goodput,
    /// The others.
    SloMisses,
    /// Requests that did not end well, of all that were sent.
    Failed,
    /// Computed seconds of the busiest endpoint over their mean, warm-up included.
    Imbalance,
    /// Mean requests in flight on the endpoint that had the most over those on the one that had the least, of those
    /// that count; not told of a pool that grew or of an endpoint without any.
    InFlight,
    /// Prompt tokens that another endpoint had in its cache and the chosen one had not, of all that were served.
    Avoidable,
    /// Turns that were served elsewhere than the turn before.
    Redirects,
    /// Conversations that changed their endpoint between their last turn before and their first one after an endpoint
    /// was added, of those that have both.
    MovedAfterScale,
    /// `FollowupHitRate` in the minute after an endpoint was added, or as long as a run on real engines looks.
    HitAfterScale,
    /// The added endpoint's part of the tokens that were computed for requests sent after it was there.
    NewShare,
    Preemptions,
    /// Generated tokens a second from the first to the last arrival: what drains afterwards is outside.
    OutputTokensPerSecond,
}

/// How a metric is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unit {
    Seconds,
    Share,
    Plain,
    Count,
    Rate,
}

/// Which way is good.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Better {
    Less,
    More,
    /// It explains other metrics, and is no aim of its own.
    Neither,
}

impl Metric {
    pub(crate) const ALL: [Self; 22] = [
        Self::HitRate,
        Self::FollowupHitRate,
        Self::TtftMean,
        Self::TtftP50,
        Self::TtftP95,
        Self::TtftP99,
        Self::E2eMean,
        Self::E2eP50,
        Self::E2eP95,
        Self::ItlMean,
        Self::Goodput,
        Self::SloMisses,
        Self::Failed,
        Self::Imbalance,
        Self::InFlight,
        Self::Avoidable,
        Self::Redirects,
        Self::MovedAfterScale,
        Self::HitAfterScale,
        Self::NewShare,
        Self::Preemptions,
        Self::OutputTokensPerSecond,
    ];

    /// Its name in files.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::HitRate => "hit_rate",
            Self::FollowupHitRate => "followup_hit_rate",
            Self::TtftMean => "ttft_mean",
            Self::TtftP50 => "ttft_p50",
            Self::TtftP95 => "ttft_p95",
            Self::TtftP99 => "ttft_p99",
            Self::E2eMean => "e2e_mean",
            Self::E2eP50 => "e2e_p50",
            Self::E2eP95 => "e2e_p95",
            Self::ItlMean => "itl_mean",
            Self::Goodput => "goodput",
            Self::SloMisses => "slo_misses",
            Self::Failed => "failed",
            Self::Imbalance => "imbalance",
            Self::InFlight => "in_flight",
            Self::Avoidable => "avoidable",
            Self::Redirects => "redirects",
            Self::MovedAfterScale => "moved_after_scale",
            Self::HitAfterScale => "hit_after_scale",
            Self::NewShare => "new_share",
            Self::Preemptions => "preemptions",
            Self::OutputTokensPerSecond => "output_tokens_per_second",
        }
    }

    pub(crate) fn unit(self) -> Unit {
        match self {
            Self::TtftMean
            | Self::TtftP50
            | Self::TtftP95
            | Self::TtftP99
            | Self::E2eMean
            | Self::E2eP50
            | Self::E2eP95
            | Self::ItlMean => Unit::Seconds,
            Self::HitRate
            | Self::FollowupHitRate
            | Self::Goodput
            | Self::SloMisses
            | Self::Failed
            | Self::Avoidable
            | Self::MovedAfterScale
            | Self::HitAfterScale
            | Self::NewShare => Unit::Share,
            Self::Imbalance | Self::InFlight => Unit::Plain,
            Self::Redirects | Self::Preemptions => Unit::Count,
            Self::OutputTokensPerSecond => Unit::Rate,
        }
    }

    pub(crate) fn better(self) -> Better {
        match self {
            Self::HitRate
            | Self::FollowupHitRate
            | Self::Goodput
            | Self::HitAfterScale
            | Self::OutputTokensPerSecond => Better::More,
            Self::TtftMean
            | Self::TtftP50
            | Self::TtftP95
            | Self::TtftP99
            | Self::E2eMean
            | Self::E2eP50
            | Self::E2eP95
            | Self::ItlMean
            | Self::SloMisses
            | Self::Failed
            | Self::Imbalance
            | Self::InFlight
            | Self::Avoidable
            | Self::Preemptions => Better::Less,
            Self::Redirects | Self::MovedAfterScale | Self::NewShare => Better::Neither,
        }
    }
}

/// What is kept of a run when its rows are gone.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Measured {
    pub(crate) workload: String,
    pub(crate) policy: String,
    pub(crate) seed: u64,
    pub(crate) slo: Slo,
    pub(crate) scaled_at: Option<f64>,
    /// Whether real engines answered.
    pub(crate) live: bool,
    /// Requests that count.
    pub(crate) sent: usize,
    pub(crate) values: BTreeMap<Metric, f64>,
    /// Goodput by the time to the first token that is asked for.
    pub(crate) sweep: Vec<(f64, f64)>,
    /// Times to the first token of those that had one, at equally spaced shares from the shortest to the longest.
    pub(crate) ttft: Vec<f64>,
    pub(crate) hits: Vec<Window>,
    pub(crate) manifest: Manifest,
}

/// A window of time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Window {
    /// Its middle.
    pub(crate) at: f64,
    /// Of the prompts that were sent in it; `None` if none was.
    pub(crate) hit_rate: Option<f64>,
}

/// What a workload asked for, so that only runs of the same requests are set side by side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Manifest {
    pub(crate) rows: usize,
    /// Of ids, conversations, turns, prompt lengths, and of what counts.
    pub(crate) requests: u64,
    /// Of the times at which they were sent, to the microsecond.
    pub(crate) times: u64,
}

impl Measured {
    pub(crate) fn of(run: &Run) -> Self {
        let counting: Vec<&Row> = run.rows.iter().filter(|row| row.counts).collect();
        let ttft = sorted(counting.iter().filter_map(|row| row.ttft));
        let rows = Rows { run, turns: turns(&run.rows), ttft: &ttft, counting: &counting };
        Self {
            workload: run.workload.clone(),
            policy: run.policy.clone(),
            seed: run.seed,
            slo: run.slo,
            scaled_at: run.scaled_at,
            live: run.live.is_some(),
            sent: counting.len(),
            values: Metric::ALL
                .into_iter()
                .filter_map(|metric| Some((metric, rows.value(metric)?)))
                .collect(),
            sweep: SWEEP
                .iter()
                .map(|by| run.slo.ttft * by)
                .filter_map(|ttft| Some((ttft, rows.goodput(Slo { ttft, ..run.slo })?)))
                .collect(),
            ttft: (0..=STEPS)
                .filter_map(|step| quantile(&ttft, step as f64 / STEPS as f64))
                .collect(),
            hits: rows.hits_over_time(),
            manifest: Manifest::of(&run.rows),
        }
    }

    pub(crate) fn get(&self, metric: Metric) -> Option<f64> {
        self.values.get(&metric).copied()
    }

    pub(crate) fn error_rate(&self) -> f64 {
        self.get(Metric::Failed).unwrap_or(0.0)
    }
}

/// A run's rows, and what several metrics need of them.
#[derive(Debug)]
struct Rows<'a> {
    run: &'a Run,
    counting: &'a [&'a Row],
    /// In order.
    ttft: &'a [f64],
    /// Each served turn that counts, after the served turn before it.
    turns: Vec<(&'a Row, &'a Row)>,
}

impl Rows<'_> {
    fn value(&self, metric: Metric) -> Option<f64> {
        match metric {
            Metric::HitRate => hit_rate(self.counting.iter().copied()),
            Metric::FollowupHitRate => hit_rate(self.followups()),
            Metric::TtftMean => mean(self.ttft.iter().copied()),
            Metric::TtftP50 => quantile(self.ttft, 0.50),
            Metric::TtftP95 => quantile(self.ttft, 0.95),
            Metric::TtftP99 => quantile(self.ttft, 0.99),
            Metric::E2eMean => mean(self.counting.iter().filter_map(|row| row.e2e)),
            Metric::E2eP50 => self.e2e(0.50),
            Metric::E2eP95 => self.e2e(0.95),
            Metric::ItlMean => mean(self.counting.iter().filter_map(|row| itl(row))),
            Metric::Goodput => self.goodput(self.run.slo),
            Metric::SloMisses => Some(1.0 - self.goodput(self.run.slo)?),
            Metric::Failed => {
                let failed = self.counting.iter().filter(|row| row.e2e.is_none()).count();
                ratio(failed as f64, self.counting.len() as f64)
            }
            Metric::Imbalance => loads(self.run).into_iter().reduce(f64::max),
            Metric::InFlight => self.in_flight(),
            Metric::Avoidable => self.avoidable(),
            Metric::Redirects => {
                Some(self.turns.iter().filter(|(before, after)| moved(before, after)).count() as f64)
            }
            Metric::MovedAfterScale => self.moved_after_scale(),
            Metric::HitAfterScale => self.hit_after_scale(),
            Metric::NewShare => self.new_share(),
            Metric::Preemptions => {
                Some(self.run.endpoints.iter().map(|work| work.preemptions).sum::<u64>() as f64)
            }
            Metric::OutputTokensPerSecond => self.output_rate(),
        }
    }

    fn followups(&self) -> impl Iterator<Item = &Row> {
        self.counting.iter().copied().filter(|row| row.turn > 1 && row.conversation.is_some())
    }

    fn goodput(&self, slo: Slo) -> Option<f64> {
        let good = self.counting.iter().filter(|row| within(row, slo)).count();
        ratio(good as f64, self.counting.len() as f64)
    }

    fn avoidable(&self) -> Option<f64> {
        if self.run.live.is_some() {
            return None;
        }
        let missed = served(self.counting.iter().copied())
            .map(|row| row.best_cached.saturating_sub(row.cached));
        let prompts = served(self.counting.iter().copied()).map(|row| row.prompt);
        ratio(tokens(missed), tokens(prompts))
    }

    fn e2e(&self, share: f64) -> Option<f64> {
        quantile(&sorted(self.counting.iter().filter_map(|row| row.e2e)), share)
    }

    /// The time that all means are over is the same, and drops out.
    fn in_flight(&self) -> Option<f64> {
        if self.run.scaled_at.is_some() {
            return None;
        }
        let mut seconds = vec![0.0; self.run.endpoints.len()];
        for row in served(self.counting.iter().copied()) {
            let (Some(e2e), Some(dispatched)) = (row.e2e, row.dispatched) else { continue };
            let endpoint = usize::try_from(row.endpoint?).ok()?;
            *seconds.get_mut(endpoint)? += row.sent + e2e - dispatched;
        }
        let (least, most) =
            (seconds.iter().copied().reduce(f64::min)?, seconds.into_iter().reduce(f64::max)?);
        ratio(most, least)
    }

    fn moved_after_scale(&self) -> Option<f64> {
        let scaled = self.run.scaled_at?;
        let straddling = || {
            self.turns.iter().filter(|(before, after)| before.sent < scaled && scaled <= after.sent)
        };
        ratio(
            straddling().filter(|(before, after)| moved(before, after)).count() as f64,
            straddling().count() as f64,
        )
    }

    fn hit_after_scale(&self) -> Option<f64> {
        let scaled = self.run.scaled_at?;
        let window = self.run.live.map_or(AFTER_SCALE, |live| live.window);
        hit_rate(self.followups().filter(|row| (scaled..scaled + window).contains(&row.sent)))
    }

    fn new_share(&self) -> Option<f64> {
        let scaled = self.run.scaled_at?;
        let newest = match self.run.live {
            Some(live) => live.added?,
            None => u32::try_from(self.run.endpoints.len().checked_sub(1)?).ok()?,
        };
        let later = || served(self.counting.iter().copied()).filter(|row| row.sent >= scaled);
        ratio(
            tokens(later().filter(|row| row.endpoint == Some(newest)).map(computed)),
            tokens(later().map(computed)),
        )
    }

    fn output_rate(&self) -> Option<f64> {
        let (start, end) = span(self.counting)?;
        ratio(self.counting.iter().map(|row| generated_by(row, end)).sum(), end - start)
    }

    fn hits_over_time(&self) -> Vec<Window> {
        let Some((start, end)) = span(self.counting).filter(|(start, end)| start < end) else {
            return Vec::new();
        };
        let width = (end - start) / WINDOWS as f64;
        let mut sums = [(0.0, 0.0); WINDOWS];
        for row in served(self.counting.iter().copied()) {
            let sum = &mut sums[whole((row.sent - start) / width).min(WINDOWS - 1)];
            sum.0 += f64::from(row.cached);
            sum.1 += f64::from(row.prompt);
        }
        let window = |(number, (cached, prompt)): (usize, (f64, f64))| Window {
            at: start + (number as f64 + 0.5) * width,
            hit_rate: ratio(cached, prompt),
        };
        sums.into_iter().enumerate().map(window).collect()
    }
}

impl Manifest {
    fn of(rows: &[Row]) -> Self {
        let mut by_id: Vec<&Row> = rows.iter().collect();
        by_id.sort_by_key(|row| row.id);
        let request = |row: &&Row| {
            let conversation = row.conversation.map_or(0, |id| id.wrapping_add(1));
            [
                row.id,
                conversation,
                u64::from(row.turn),
                u64::from(row.prompt),
                u64::from(row.counts),
            ]
        };
        Self {
            rows: rows.len(),
            requests: digest(by_id.iter().flat_map(request)),
            times: digest(by_id.iter().map(|row| (row.sent * 1e6).round().to_bits())),
        }
    }
}

/// Served turns with the served turn before them, a conversation at a time. The first of a pair may be warm-up: the
/// second is what is judged.
fn turns(rows: &[Row]) -> Vec<(&Row, &Row)> {
    let mut chats: BTreeMap<u64, Vec<&Row>> = BTreeMap::new();
    for row in served(rows.iter()) {
        if let Some(conversation) = row.conversation {
            chats.entry(conversation).or_default().push(row);
        }
    }
    for chat in chats.values_mut() {
        chat.sort_by_key(|row| (row.turn, row.id));
    }
    let pairs = chats.values().flat_map(|chat| chat.windows(2).map(|pair| (pair[0], pair[1])));
    pairs.filter(|(_, after)| after.counts).collect()
}

fn moved(before: &Row, after: &Row) -> bool {
    before.endpoint != after.endpoint
}

fn served<'a>(rows: impl Iterator<Item = &'a Row>) -> impl Iterator<Item = &'a Row> {
    rows.filter(|row| row.endpoint.is_some())
}

fn hit_rate<'a>(rows: impl Iterator<Item = &'a Row>) -> Option<f64> {
    let (cached, prompts) = served(rows).fold((0.0, 0.0), |(cached, prompts), row| {
        (cached + f64::from(row.cached), prompts + f64::from(row.prompt))
    });
    ratio(cached, prompts)
}

/// Tokens that a request cost its endpoint.
fn computed(row: &Row) -> u32 {
    row.prompt.saturating_sub(row.cached).saturating_add(row.output)
}

fn tokens(counts: impl Iterator<Item = u32>) -> f64 {
    counts.map(f64::from).sum()
}

/// Mean seconds between a request's tokens; `None` if it had fewer than two.
fn itl(row: &Row) -> Option<f64> {
    (row.output > 1).then_some((row.e2e? - row.ttft?) / f64::from(row.output - 1))
}

fn within(row: &Row, slo: Slo) -> bool {
    row.e2e.is_some()
        && row.ttft.is_some_and(|ttft| ttft <= slo.ttft)
        && itl(row).is_none_or(|itl| itl <= slo.itl)
}

/// Tokens of an answer that were out by `end`, as if they had come evenly.
fn generated_by(row: &Row, end: f64) -> f64 {
    let (Some(ttft), Some(e2e)) = (row.ttft, row.e2e) else { return 0.0 };
    let (first, last, output) = (row.sent + ttft, row.sent + e2e, f64::from(row.output));
    if last <= end {
        output
    } else if first > end {
        0.0
    } else {
        (1.0 + (output - 1.0) * (end - first) / (last - first)).clamp(0.0, output)
    }
}

/// When the first and the last were sent.
fn span(rows: &[&Row]) -> Option<(f64, f64)> {
    let sent = || rows.iter().map(|row| row.sent);
    Some((sent().reduce(f64::min)?, sent().reduce(f64::max)?))
}

fn loads(run: &Run) -> Vec<f64> {
    let average = mean(run.endpoints.iter().map(|work| work.seconds)).unwrap_or(0.0);
    run.endpoints.iter().filter_map(|work| ratio(work.seconds, average)).collect()
}

pub(crate) fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values
}

pub(crate) fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, count) = values.fold((0.0, 0.0), |(sum, count), value| (sum + value, count + 1.0));
    ratio(sum, count)
}

/// The value that a share of the sorted values lies below, between two neighbours on the straight line.
pub(crate) fn quantile(sorted: &[f64], share: f64) -> Option<f64> {
    let last = sorted.len().checked_sub(1)?;
    let place = last as f64 * share.clamp(0.0, 1.0);
    let below = whole(place).min(last);
    let (low, high) = (sorted[below], sorted[(below + 1).min(last)]);
    Some(low + (high - low) * (place - below as f64))
}

fn ratio(part: f64, whole: f64) -> Option<f64> {
    (whole > 0.0).then_some(part / whole)
}

pub(crate) fn whole(value: f64) -> usize {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "saturates: below 0 is 0, and no list is as long as the other end"
    )]
    let whole = value as usize;
    whole
}

/// A stable hash (FNV-1a) of numbers in their order.
pub(crate) fn digest(numbers: impl Iterator<Item = u64>) -> u64 {
    let byte = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    numbers.flat_map(u64::to_le_bytes).fold(0xcbf2_9ce4_8422_2325, byte)
}

/// Runs that no simulator made, for tests.
#[cfg(test)]
pub(crate) mod made_up {
    use crate::record::{Row, Run, Slo, Work};

    /// A run of 600 requests in 60 conversations, 40 of them warm-up, that arrive as they would under any policy;
    /// `skill` of 0 is a poor policy and 1 is a good one.
    pub(crate) fn run(workload: &str, policy: &str, seed: u64, skill: f64) -> Run {
        let mut draw = seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut uniform = move || {
            draw = draw
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            ((draw >> 11) as f64) / (1u64 << 53) as f64
        };
        let mut sent = 0.0;
        let rows: Vec<Row> = (0..600u64)
            .map(|id| {
                sent += -0.5 * (1.0 - uniform()).ln();
                let turn = u32::try_from(id / 60).unwrap() + 1;
                let prompt = 800 + 400 * turn;
                let known = if turn == 1 { 0 } else { prompt - 400 };
                // Everything is drawn every time, so that policies meet the same arrivals.
                let hit = uniform() < 0.3 + 0.65 * skill;
                let elsewhere = u32::from(uniform() < 0.5);
                let cached = if hit { known } else { 0 };
                let wait = -(2.2 - 1.6 * skill) * 0.3 * (1.0 - uniform()).ln();
                let ttft = 0.02 + f64::from(prompt - cached) * 1e-4 + wait * (1.0 + sent / 300.0);
                let output = 100 + u32::try_from(id % 50).unwrap();
                let e2e = ttft + f64::from(output - 1) * (0.02 + 0.01 * uniform());
                let failed = id % 200 == 199;
                Row {
                    id,
                    conversation: Some(id % 60),
                    turn,
                    counts: id >= 40,
                    sent,
                    dispatched: Some(sent),
                    ttft: (!failed).then_some(ttft),
                    e2e: (!failed).then_some(e2e),
                    prompt,
                    output,
                    cached,
                    best_cached: known,
                    endpoint: Some(if hit { u32::try_from(id % 4).unwrap() } else { elsewhere }),
                }
            })
            .collect();
        let work = |number: u32| Work {
            seconds: 100.0 + (1.0 - skill) * f64::from(number * 40) + uniform() * 8.0,
            prefill_tokens: 100_000,
            decode_tokens: 20_000,
            preemptions: u64::from(number),
        };
        let endpoints = (0..4).map(work).collect();
        Run {
            workload: workload.to_owned(),
            policy: policy.to_owned(),
            seed,
            slo: Slo { ttft: 0.5, itl: 0.05 },
            scaled_at: None,
            live: None,
            rows,
            endpoints,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::record::Work;

    fn row(id: u64, conversation: u64, turn: u32, sent: f64, endpoint: u32) -> Row {
        Row {
            id,
            conversation: Some(conversation),
            turn,
            counts: true,
            sent,
            dispatched: Some(sent),
            ttft: Some(1.0),
            e2e: Some(2.0),
            prompt: 100,
            output: 11,
            cached: 40,
            best_cached: 60,
            endpoint: Some(endpoint),
        }
    }

    fn run(rows: Vec<Row>) -> Run {
        let work = |seconds| Work { seconds, prefill_tokens: 0, decode_tokens: 0, preemptions: 2 };
        Run {
            workload: "w".to_owned(),
            policy: "p".to_owned(),
            seed: 1,
            slo: Slo { ttft: 1.0, itl: 0.1 },
            scaled_at: None,
            live: None,
            rows,
            endpoints: vec![work(3.0), work(1.0)],
        }
    }

    fn value(run: &Run, metric: Metric) -> Option<f64> {
        Measured::of(run).get(metric)
    }

    #[test]
    fn quantiles_are_those_of_numpy() {
        let values = [1.0, 2.0, 4.0, 8.0];
        assert_eq!(quantile(&values, 0.0), Some(1.0));
        assert_eq!(quantile(&values, 0.5), Some(3.0));
        assert!((quantile(&values, 0.95).unwrap() - 7.4).abs() < 1e-12);
        assert_eq!(quantile(&values, 1.0), Some(8.0));
        assert_eq!(quantile(&[7.0], 0.99), Some(7.0));
        assert_eq!(quantile(&[], 0.5), None);
    }

    #[test]
    fn hit_rates_are_of_tokens_that_were_served() {
        let mut rows = vec![row(0, 0, 1, 0.0, 0), row(1, 0, 2, 1.0, 0), row(2, 1, 1, 2.0, 1)];
        rows[1].cached = 90;
        rows[2].endpoint = None;
        let run = run(rows);
        assert_eq!(value(&run, Metric::HitRate), Some(130.0 / 200.0));
        assert_eq!(value(&run, Metric::FollowupHitRate), Some(0.9));
        assert_eq!(value(&run, Metric::Avoidable), Some(20.0 / 200.0));
    }

    #[test]
    fn warm_up_does_not_count_but_is_remembered() {
        let mut rows = vec![row(0, 0, 1, 0.0, 0), row(1, 0, 2, 1.0, 1)];
        rows[0].counts = false;
        rows[0].ttft = Some(50.0);
        let run = run(rows);
        assert_eq!(value(&run, Metric::TtftMean), Some(1.0));
        assert_eq!(value(&run, Metric::Redirects), Some(1.0));
        assert_eq!(Measured::of(&run).sent, 1);
    }

    #[test]
    fn goodput_is_of_all_that_were_sent() {
        let mut rows: Vec<Row> = (0..5).map(|id| row(id, id, 1, id as f64, 0)).collect();
        rows[1].ttft = Some(1.5);
        rows[2].e2e = Some(2.5);
        rows[3].e2e = None;
        let run = run(rows);
        assert_eq!(value(&run, Metric::Goodput), Some(0.4));
        assert_eq!(value(&run, Metric::SloMisses), Some(0.6));
        assert_eq!(value(&run, Metric::Failed), Some(0.2));
        let sweep = Measured::of(&run).sweep;
        assert_eq!(sweep.first(), Some(&(0.05, 0.0)));
        assert_eq!(sweep.last(), Some(&(20.0, 0.6)));
    }

    #[test]
    fn an_answer_of_one_token_has_no_time_between_tokens() {
        let mut rows = vec![row(0, 0, 1, 0.0, 0)];
        rows[0].output = 1;
        let run = run(rows);
        assert_eq!(value(&run, Metric::ItlMean), None);
        assert_eq!(value(&run, Metric::Goodput), Some(1.0));
    }

    #[test]
    fn a_scale_up_is_seen_from_both_sides() {
        let mut run = run(vec![
            row(0, 0, 1, 0.0, 0),
            row(1, 1, 1, 1.0, 0),
            row(2, 2, 1, 2.0, 0),
            row(3, 0, 2, 10.0, 1),
            row(4, 1, 2, 11.0, 0),
            row(5, 1, 3, 80.0, 1),
        ]);
        run.scaled_at = Some(10.0);
        run.rows[5].cached = 0;
        assert_eq!(value(&run, Metric::MovedAfterScale), Some(0.5), "of conversations 0 and 1");
        assert_eq!(
            value(&run, Metric::HitAfterScale),
            Some(0.4),
            "conversation 1 comes back too late"
        );
        assert_eq!(value(&run, Metric::NewShare), Some(182.0 / 253.0));
    }

    #[test]
    fn imbalance_is_of_what_the_endpoints_computed() {
        let run = run(vec![row(0, 0, 1, 0.0, 0)]);
        assert_eq!(value(&run, Metric::Imbalance), Some(1.5));
        assert_eq!(value(&run, Metric::Preemptions), Some(4.0));
    }

    #[test]
    fn in_flight_is_the_busiest_over_the_least_busy() {
        let mut rows: Vec<Row> =
            (0..4).map(|id| row(id, id, 1, id as f64, u32::from(id == 3))).collect();
        // Held for a second of its two: it was in flight for one.
        rows[0].dispatched = Some(1.0);
        let mut run = run(rows);
        assert_eq!(value(&run, Metric::InFlight), Some((1.0 + 2.0 + 2.0) / 2.0));
        run.scaled_at = Some(1.0);
        assert_eq!(value(&run, Metric::InFlight), None);
        run.scaled_at = None;
        run.rows[3].endpoint = Some(0);
        assert_eq!(value(&run, Metric::InFlight), None, "the other had none");
    }

    #[test]
    fn output_that_drains_after_the_last_arrival_is_outside() {
        let run = run(vec![row(0, 0, 1, 0.0, 0), row(1, 1, 1, 1.5, 0)]);
        let rate = value(&run, Metric::OutputTokensPerSecond).unwrap();
        assert!((rate - (1.0 + 10.0 * 0.5) / 1.5).abs() < 1e-12, "{rate}");
    }

    #[test]
    fn nothing_is_said_of_no_rows() {
        let measured = Measured::of(&run(Vec::new()));
        let said: Vec<Metric> = measured.values.into_keys().collect();
        assert_eq!(said, [Metric::Imbalance, Metric::Redirects, Metric::Preemptions]);
        assert!(measured.hits.is_empty() && measured.ttft.is_empty());
    }

    #[test]
    fn a_manifest_knows_requests_and_times_but_not_their_order() {
        let rows = vec![row(0, 0, 1, 0.0, 0), row(1, 1, 1, 1.0, 1)];
        let manifest = Manifest::of(&rows);
        assert_eq!(manifest, Manifest::of(&[rows[1].clone(), rows[0].clone()]));
        let mut later = rows.clone();
        later[0].sent = 0.5;
        assert_eq!(Manifest { times: manifest.times, ..Manifest::of(&later) }, manifest);
        assert_ne!(Manifest::of(&later), manifest);
        let mut longer = rows;
        longer[1].prompt = 101;
        assert_ne!(Manifest::of(&longer).requests, manifest.requests);
    }

    proptest! {
        #[test]
        fn metrics_stay_in_their_bounds(seed in 0u64..1000, skill in 0.0..1.0f64) {
            let measured = Measured::of(&made_up::run("w", "p", seed, skill));
            for (metric, value) in &measured.values {
                prop_assert!(value.is_finite() && *value >= 0.0, "{metric:?} {value}");
                prop_assert!(metric.unit() != Unit::Share || *value <= 1.0, "{metric:?} {value}");
            }
            let get = |metric| measured.get(metric).unwrap();
            prop_assert!(get(Metric::Imbalance) >= 1.0 && get(Metric::InFlight) >= 1.0);
            prop_assert!(get(Metric::TtftP50) <= get(Metric::TtftP95));
            prop_assert!(get(Metric::TtftP95) <= get(Metric::TtftP99));
            prop_assert!(get(Metric::TtftMean) < get(Metric::E2eMean));
            prop_assert!(get(Metric::TtftP50) < get(Metric::E2eP50));
            prop_assert!(get(Metric::E2eP50) <= get(Metric::E2eP95));
            prop_assert!(measured.sweep.is_sorted_by(|a, b| a.1 <= b.1));
            prop_assert!(measured.ttft.is_sorted());
        }
    }
}
