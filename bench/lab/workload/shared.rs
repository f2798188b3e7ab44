//! Prompts with common prefixes: groups under a ladder of rates, a pool of popular prefixes, and prompts that share nothing.

use std::sync::Arc;

use serde::Deserialize;

use super::{Clients, Ids, Request, Traffic, prompt};
use crate::engine::{Block, Params};
use crate::random::{self, Random};

/// Groups of prompts with a prefix each, in an order that is drawn once and then repeats, at a ladder of rates.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SharedPrefix {
    groups: usize,
    prompts_per_group: usize,
    /// Tokens of a group's prefix, of a prompt's own part, and of an answer.
    prefix: i64,
    question: i64,
    output: i64,
    /// Stages: requests a second, and seconds.
    ladder: Vec<(f64, f64)>,
    /// Requests at even distances, and not by chance.
    #[serde(default)]
    even: bool,
    /// Stages that do not count.
    #[serde(default)]
    warm_up_stages: usize,
    /// Seconds after a stage's last answer in which the next begins; without it, stages follow the clock.
    drain: Option<f64>,
}

/// A pool of prefixes of Zipf-like popularity, in runs of Poisson arrivals.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PrefixPool {
    prefixes: usize,
    /// The exponent of the popularity.
    skew: f64,
    /// Tokens of a prefix, of what follows it, and of an answer.
    prefix: i64,
    suffix: i64,
    output: i64,
    /// Requests of a run, and how many arrive in a second.
    requests: usize,
    rate: f64,
    runs: Runs,
    /// Seconds between two runs.
    pause: f64,
    /// Numbers drawn for the words of a suffix.
    suffix_draws: usize,
    warm_up: Option<WarmUp>,
}

/// The seeds of the runs: `first + step × seed` and those that follow.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
struct Runs {
    first: u64,
    step: u64,
    count: u64,
}

/// Every prefix in turn, before the first run.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
struct WarmUp {
    passes: usize,
    /// Seconds from one request to the next, and from the last to the first run.
    every: f64,
    pause: f64,
    output: i64,
}

/// Prompts that share nothing.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Unique {
    requests: usize,
    rate: f64,
    prompt: i64,
    output: i64,
}

/// Makes a request that is no turn of a conversation.
pub(super) fn single(
    id: usize,
    sent: f64,
    (prompt, output): (i64, i64),
    blocks: Arc<[Block]>,
    key: Arc<str>,
) -> Request {
    Request {
        index: 0,
        id: id as u64,
        sent,
        prompt,
        output,
        blocks,
        answer: None,
        key,
        conversation: None,
        turn: 1,
        counts: true,
    }
}

impl SharedPrefix {
    pub(super) fn traffic(&self, p: &Params, seed: u64) -> Traffic {
        let stages = self.stages(p, seed);
        match self.drain {
            None => Traffic::at(stages.into_iter().flatten().collect()),
            Some(pause) => Traffic::of(Stages { stages: stages.into(), pause, left: 0 }),
        }
    }

    /// Tells whether a stage begins when the one before has ended.
    pub(super) fn waits(&self) -> bool {
        self.drain.is_some()
    }

    fn stages(&self, p: &Params, seed: u64) -> Vec<Vec<Request>> {
        let mut random = Random::new(seed);
        let prompts = self.prompts(p, &mut random);
        let (mut at, mut sent) = (0.0, 0);
        let mut stages = Vec::new();
        for (stage, &(rate, seconds)) in self.ladder.iter().enumerate() {
            let mut requests = Vec::new();
            let end = at + seconds;
            for time in self.times(&mut random, at, (rate, seconds)) {
                let (key, blocks) = &prompts[sent % prompts.len()];
                let size = (self.prefix + self.question, self.output);
                let request = single(sent, time, size, Arc::clone(blocks), Arc::clone(key));
                requests.push(Request { counts: stage >= self.warm_up_stages, ..request });
                sent += 1;
            }
            at = end;
            stages.push(requests);
        }
        stages
    }

    fn prompts(&self, p: &Params, random: &mut Random) -> Vec<(Arc<str>, Arc<[Block]>)> {
        let mut ids = Ids::default();
        let whole = p.whole_blocks(self.prefix);
        let rest = p.blocks(self.prefix + self.question - whole as i64 * p.block);
        let prefixes: Vec<Vec<Block>> =
            (0..self.groups).map(|_| ids.take(whole).collect()).collect();
        let mut prompts = Vec::new();
        for (group, prefix) in prefixes.iter().enumerate() {
            let key: Arc<str> = format!("('g', {group})").into();
            for _ in 0..self.prompts_per_group {
                prompts.push((Arc::clone(&key), prompt(prefix, ids.take(rest))));
            }
        }
        random.shuffle(&mut prompts);
        prompts
    }

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a number of requests"
    )]
    fn times(&self, random: &mut Random, start: f64, (rate, seconds): (f64, f64)) -> Vec<f64> {
        if self.even {
            return (0..(rate * seconds) as u64).map(|k| start + k as f64 / rate).collect();
        }
        let (mut times, mut at) = (Vec::new(), start);
        loop {
            at += random.expovariate(rate);
            if at > start + seconds {
                return times;
            }
            times.push(at);
        }
    }
}

/// A ladder each stage of which ends before the next begins.
struct Stages {
    stages: std::collections::VecDeque<Vec<Request>>,
    pause: f64,
    /// Requests of this stage that have not ended.
    left: usize,
}

impl Stages {
    fn begin(&mut self, now: f64, pause: f64) -> Vec<Request> {
        let mut stage = self.stages.pop_front().unwrap_or_default();
        let first = stage.first().map_or(0.0, |request| request.sent);
        for request in &mut stage {
            request.sent = request.sent - first + now + pause;
        }
        self.left = stage.len();
        stage
    }
}

impl Clients for Stages {
    fn start(&mut self) -> Vec<Request> {
        self.begin(0.0, 0.0)
    }

    fn next(&mut self, _: &Request, now: f64) -> Vec<Request> {
        self.left -= 1;
        if self.left > 0 { Vec::new() } else { self.begin(now, self.pause) }
    }
}

impl PrefixPool {
    pub(super) fn arrivals(&self, p: &Params, seed: u64) -> Vec<Request> {
        let mut ids = Ids::default();
        let whole = p.whole_blocks(self.prefix);
        let length = self.prefix + self.suffix;
        let rest = p.blocks(length - whole as i64 * p.block);
        let prefixes: Vec<(Arc<str>, Vec<Block>)> = (0..self.prefixes)
            .map(|prefix| (format!("('p', {prefix})").into(), ids.take(whole).collect()))
            .collect();
        let mut arrivals = Vec::new();
        let mut send = |at: f64, prefix: usize, output: i64, counts: bool| {
            let (key, blocks) = &prefixes[prefix];
            let blocks = prompt(blocks, ids.take(rest));
            let request = single(arrivals.len(), at, (length, output), blocks, Arc::clone(key));
            arrivals.push(Request { counts, ..request });
        };
        let mut at = 0.0;
        if let Some(warm_up) = self.warm_up {
            for prefix in (0..warm_up.passes).flat_map(|_| 0..self.prefixes) {
                send(at, prefix, warm_up.output, false);
                at += warm_up.every;
            }
            at += warm_up.pause;
        }
        let first = self.runs.first + self.runs.step * seed;
        for run in first..first + self.runs.count {
            let mut random = Random::new(run);
            for prefix in self.popular(run) {
                send(at, prefix, self.output, true);
                at += random.expovariate(self.rate);
            }
            at += self.pause;
        }
        arrivals
    }

    /// Draws a run's prefixes.
    fn popular(&self, run: u64) -> Vec<usize> {
        let raw: Vec<f64> = (1..=self.prefixes).map(|k| 1.0 / (k as f64).powf(self.skew)).collect();
        let total: f64 = raw.iter().sum();
        let sums = random::sums(raw.iter().map(|weight| weight / total));
        let mut random = Random::new(run + 1);
        (0..self.requests)
            .map(|_| {
                let prefix = random.weighted(&sums);
                for _ in 0..self.suffix_draws {
                    random.random();
                }
                prefix
            })
            .collect()
    }
}

impl Unique {
    pub(super) fn arrivals(&self, p: &Params, seed: u64) -> Vec<Request> {
        let (mut random, mut ids) = (Random::new(seed), Ids::default());
        let (mut at, blocks) = (0.0, p.blocks(self.prompt));
        (0..self.requests)
            .map(|i| {
                let sent = at;
                at += random.expovariate(self.rate);
                let key = format!("('n', {i})").into();
                single(i, sent, (self.prompt, self.output), ids.take(blocks).collect(), key)
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {

    use crate::workload::tests::library;

    #[test]
    fn the_prefixes_are_those_of_the_study() {
        let Some(folder) = crate::workload::tests::traces() else { return };
        let text =
            std::fs::read_to_string(folder.join("loadaware_prefix_ids_20x500.json")).unwrap();
        let runs: std::collections::BTreeMap<String, Vec<usize>> =
            serde_json::from_str(&text).unwrap();
        let point = library().point("loadaware20").unwrap();
        let super::super::Kind::PrefixPool(pool) = &point.kind else { panic!("{point:?}") };
        assert_eq!(runs.len(), 20);
        for (run, prefixes) in runs {
            assert_eq!(pool.popular(run.parse().unwrap()), prefixes, "run {run}");
        }
    }
}
