//! What a replay comes to: each request then and now, and all of them together.

use std::collections::BTreeMap;

use serde::Serialize;

use super::engines::View;
use super::recording::Recorded;
use crate::metrics::{mean, quantile, sorted};

/// Decisions that are shown one by one.
const SHOWN: usize = 10;

/// One request.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Row {
    pub(crate) time: String,
    pub(crate) request_id: String,
    pub(crate) conversation: String,
    pub(crate) model: String,
    pub(crate) sequence: u64,
    pub(crate) prompt_tokens: u64,
    pub(crate) completion_tokens: u64,
    /// Whether an engine served it.
    pub(crate) succeeded: bool,
    /// Whether the engine said what it had in its cache; otherwise `then` is an estimate too.
    pub(crate) measured: bool,
    pub(crate) then: Side,
    pub(crate) now: Side,
    /// Whether it goes elsewhere.
    pub(crate) elsewhere: bool,
}

/// A request as it went, or would go.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct Side {
    /// Empty where it is refused.
    pub(crate) endpoint: String,
    pub(crate) reason: String,
    pub(crate) cached_tokens: Option<u64>,
    /// Seconds from the pick to the first token.
    #[serde(rename = "ttft_seconds")]
    pub(crate) ttft: Option<f64>,
    /// How the engine looked before it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) view: Option<View>,
    /// Seconds from the pick to the end.
    pub(crate) seconds: f64,
}

/// What a decision anew is.
#[derive(Debug)]
pub(crate) enum Now {
    Goes(Side),
    Refused(&'static str),
}

/// What the model that changes are estimated with says of what was recorded.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Modelled {
    /// Cached tokens that an engine reported, and those it was expected to.
    pub(crate) cached: Option<(u64, u64)>,
    /// Seconds to the first token as they were, and by the prices.
    pub(crate) ttft: Option<(f64, f64)>,
}

/// Gathers rows.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) rows: Vec<Row>,
    pub(crate) models: Vec<Modelled>,
    /// The greatest differences, the greatest first: the row, and the steps of the decision anew.
    greatest: Vec<(usize, Vec<String>)>,
    /// Turns that come before the one they follow has ended.
    pub(crate) early: u64,
    /// How many times the price a prompt takes, and the share of its tokens that a conversation finds again.
    pub(crate) pace: Option<f64>,
    pub(crate) kept: Option<f64>,
    /// How much of the prompts before it a request waits for.
    pub(crate) behind: Option<f64>,
}

/// All of them together.
#[derive(Debug, Serialize)]
pub(crate) struct Summary {
    pub(crate) decisions: usize,
    pub(crate) elsewhere: usize,
    pub(crate) refused: usize,
    /// Of those that go elsewhere, by the reason then and the reason now.
    pub(crate) reasons: Vec<Count>,
    /// The same by the endpoint then and the endpoint now.
    pub(crate) moves: Vec<Count>,
    pub(crate) endpoints: BTreeMap<String, Loads>,
    /// Share of the prompt tokens of requests that were served which engines found cached; and how many of these
    /// requests have a number that the engine told.
    pub(crate) hit_rate: Option<Pair>,
    pub(crate) served: usize,
    pub(crate) measured: usize,
    /// Over requests that have a first token then and now.
    pub(crate) ttft_seconds: Ttft,
    pub(crate) error: ModelError,
    pub(crate) greatest: Vec<Greatest>,
}

/// How many go from one to the other.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Count {
    pub(crate) then: String,
    pub(crate) now: String,
    pub(crate) requests: usize,
}

/// Then and now.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub(crate) struct Pair<T = f64> {
    pub(crate) then: T,
    pub(crate) now: T,
}

/// What an endpoint has to do, then and now.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Loads {
    pub(crate) requests: Pair<u64>,
    /// Prompt tokens that are not cached.
    pub(crate) computed_tokens: Pair<u64>,
    pub(crate) generated_tokens: Pair<u64>,
    /// Requests in flight, on average over the recording.
    pub(crate) in_flight: Pair,
}

#[derive(Debug, Default, Serialize)]
pub(crate) struct Ttft {
    pub(crate) requests: usize,
    pub(crate) mean: Option<Pair>,
    pub(crate) p50: Option<Pair>,
    pub(crate) p95: Option<Pair>,
}

/// How far the model is from what was recorded.
#[derive(Debug, Default, Serialize)]
pub(crate) struct ModelError {
    /// Hit rate as engines told, and as the model expects it for the same requests.
    pub(crate) hit_rate: Option<Pair>,
    /// Seconds to the first token, of which half are nearer.
    pub(crate) ttft_median_error: Option<f64>,
    /// The sum of them by the prices over the sum of them as recorded.
    pub(crate) ttft_ratio: Option<f64>,
    pub(crate) prompt_pace: Option<f64>,
    pub(crate) kept: Option<f64>,
    pub(crate) waits: Option<f64>,
    /// Turns that come before the one they follow has ended.
    pub(crate) early_turns: u64,
}

/// A decision that differs much.
#[derive(Debug, Serialize)]
pub(crate) struct Greatest {
    #[serde(flatten)]
    pub(crate) row: Row,
    /// The steps of the decision anew.
    pub(crate) steps: Vec<String>,
}

impl Row {
    /// Begins the row of a request as it went.
    pub(crate) fn of(
        recorded: &Recorded,
        prompt: u64,
        output: u64,
        succeeded: bool,
        then: Side,
    ) -> Self {
        let record = &recorded.record;
        Self {
            time: record.time.clone(),
            request_id: record.request_id.clone(),
            conversation: record.conversation.as_ref().map(|it| it.id.clone()).unwrap_or_default(),
            model: record.model.clone(),
            sequence: record.sequence,
            prompt_tokens: prompt,
            completion_tokens: output,
            succeeded,
            measured: false,
            then,
            now: Side::default(),
            elsewhere: false,
        }
    }

    /// Says whether the cached tokens then are the engine's own number.
    pub(crate) fn measured(self, measured: bool) -> Self {
        Self { measured, ..self }
    }

    /// Ends the row.
    pub(crate) fn now(self, now: Now) -> Self {
        let now = match now {
            Now::Goes(side) => side,
            Now::Refused(why) => Side { reason: format!("refused: {why}"), ..Side::default() },
        };
        Self { elsewhere: now.endpoint != self.then.endpoint, now, ..self }
    }

    /// By how much it differs: in seconds, and where these are not known or the same, in tokens.
    fn difference(&self) -> (f64, u64) {
        let ttft = match (self.then.ttft, self.now.ttft) {
            (Some(then), Some(now)) => (now - then).abs(),
            (None, _) | (_, None) => 0.0,
        };
        let cached = |side: &Side| side.cached_tokens.unwrap_or(0);
        (ttft, cached(&self.then).abs_diff(cached(&self.now)))
    }
}

impl Tally {
    /// Adds a request, with the steps of its decision anew.
    pub(crate) fn add(&mut self, row: Row, steps: Vec<String>) {
        if row.elsewhere {
            let key = row.difference();
            let less = |&(other, _): &(usize, Vec<String>)| {
                let (ttft, cached) = self.rows[other].difference();
                ttft.total_cmp(&key.0).then(cached.cmp(&key.1)).is_ge()
            };
            let at = self.greatest.partition_point(less);
            if at < SHOWN {
                self.greatest.insert(at, (self.rows.len(), steps));
                self.greatest.truncate(SHOWN);
            }
        }
        self.rows.push(row);
    }

    /// Counts those that go elsewhere.
    pub(crate) fn elsewhere(&self) -> usize {
        self.rows.iter().filter(|row| row.elsewhere).count()
    }

    /// Puts all together; the recording takes so many seconds.
    pub(crate) fn summary(&self, span: f64) -> Summary {
        let (mut reasons, mut moves) = (BTreeMap::new(), BTreeMap::new());
        for row in self.rows.iter().filter(|row| row.elsewhere) {
            let pair =
                |part: fn(&Side) -> &str| (part(&row.then).to_owned(), part(&row.now).to_owned());
            *reasons.entry(pair(|side| &side.reason)).or_insert(0) += 1;
            *moves.entry(pair(|side| &side.endpoint)).or_insert(0) += 1;
        }
        let served = || self.rows.iter().filter(|row| row.succeeded);
        let known = || {
            served()
                .filter(|row| row.then.cached_tokens.is_some() && row.now.cached_tokens.is_some())
        };
        let cached = |side: fn(&Row) -> &Side| {
            known().map(|row| side(row).cached_tokens.unwrap_or(0).min(row.prompt_tokens)).sum()
        };
        let prompts: u64 = known().map(|row| row.prompt_tokens).sum();
        let rate = |cached: u64| share(cached, prompts);
        let hit_rate = rate(cached(|row| &row.then))
            .zip(rate(cached(|row| &row.now)))
            .map(|(then, now)| Pair { then, now });
        Summary {
            decisions: self.rows.len(),
            elsewhere: self.elsewhere(),
            refused: self.rows.iter().filter(|row| row.now.endpoint.is_empty()).count(),
            reasons: counts(reasons),
            moves: counts(moves),
            endpoints: self.loads(span),
            hit_rate,
            served: known().count(),
            measured: known().filter(|row| row.measured).count(),
            ttft_seconds: self.ttft(),
            error: self.error(),
            greatest: self
                .greatest
                .iter()
                .map(|(row, steps)| Greatest { row: self.rows[*row].clone(), steps: steps.clone() })
                .collect(),
        }
    }

    fn loads(&self, span: f64) -> BTreeMap<String, Loads> {
        let mut endpoints: BTreeMap<String, Loads> = BTreeMap::new();
        for row in &self.rows {
            for (side, of) in [
                (&row.then, Pair::<u64>::then as fn(&mut Pair<u64>) -> &mut u64),
                (&row.now, Pair::<u64>::now),
            ] {
                if side.endpoint.is_empty() {
                    continue;
                }
                let loads = endpoints.entry(side.endpoint.clone()).or_default();
                *of(&mut loads.requests) += 1;
                if row.succeeded {
                    let cached = side.cached_tokens.unwrap_or(0);
                    *of(&mut loads.computed_tokens) += row.prompt_tokens.saturating_sub(cached);
                    *of(&mut loads.generated_tokens) += row.completion_tokens;
                }
            }
            let share = |side: &Side| if span > 0.0 { side.seconds / span } else { 0.0 };
            if let Some(loads) = endpoints.get_mut(&row.then.endpoint) {
                loads.in_flight.then += share(&row.then);
            }
            if let Some(loads) = endpoints.get_mut(&row.now.endpoint) {
                loads.in_flight.now += share(&row.now);
            }
        }
        endpoints
    }

    fn ttft(&self) -> Ttft {
        let both = || self.rows.iter().filter_map(|row| Some((row.then.ttft?, row.now.ttft?)));
        let then = sorted(both().map(|(then, _)| then));
        let now = sorted(both().map(|(_, now)| now));
        let pair =
            |of: &dyn Fn(&[f64]) -> Option<f64>| Some(Pair { then: of(&then)?, now: of(&now)? });
        Ttft {
            requests: then.len(),
            mean: pair(&|values| mean(values.iter().copied())),
            p50: pair(&|values| quantile(values, 0.5)),
            p95: pair(&|values| quantile(values, 0.95)),
        }
    }

    fn error(&self) -> ModelError {
        let cached = || {
            self.rows.iter().zip(&self.models).filter_map(|(row, modelled)| {
                let (told, expected) = modelled.cached?;
                Some((told.min(row.prompt_tokens), expected, row.prompt_tokens))
            })
        };
        let prompts: u64 = cached().map(|(_, _, prompt)| prompt).sum();
        let told = share(cached().map(|(told, _, _)| told).sum(), prompts);
        let expected = share(cached().map(|(_, expected, _)| expected).sum(), prompts);
        let ttft = || self.models.iter().filter_map(|modelled| modelled.ttft);
        let was: f64 = ttft().map(|(was, _)| was).sum();
        let is: f64 = ttft().map(|(_, is)| is).sum();
        ModelError {
            hit_rate: told.zip(expected).map(|(then, now)| Pair { then, now }),
            ttft_median_error: quantile(&sorted(ttft().map(|(was, is)| (is - was).abs())), 0.5),
            ttft_ratio: (was > 0.0).then_some(is / was),
            prompt_pace: self.pace,
            kept: self.kept,
            waits: self.behind,
            early_turns: self.early,
        }
    }
}

impl<T> Pair<T> {
    fn then(&mut self) -> &mut T {
        &mut self.then
    }

    fn now(&mut self) -> &mut T {
        &mut self.now
    }
}

#[expect(clippy::cast_precision_loss, reason = "tokens stay far below 2^52")]
fn share(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

/// The most frequent first.
fn counts(counts: BTreeMap<(String, String), usize>) -> Vec<Count> {
    let count = |((then, now), requests)| Count { then, now, requests };
    let mut counts: Vec<Count> = counts.into_iter().map(count).collect();
    counts.sort_by_key(|count| std::cmp::Reverse(count.requests));
    counts
}
