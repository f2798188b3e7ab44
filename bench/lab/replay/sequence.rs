//! The recorded arrivals, decided anew one after the other: each picker's own scheduler, with the load and the memory
//! that its own decisions make, over engines whose times are the recorded ones and what is estimated to change.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use llm_ring::app;
use llm_ring::config::Config;
use llm_ring::pool::{Endpoint, EndpointId, InferenceRequest, MOST_TOKENS, Outcome, PoolSnapshot};
use llm_ring::scheduling::{Booking, Detail, Evidence, Moment, Scheduler};
use llm_ring::telemetry::{explain, pb, recall};

use super::engines::{Engines, Fitted, Held, Task, View};
use super::recording::{Members, Recorded, Recording, nanoseconds};
use super::tally::{Modelled, Now, Row, Side, Tally};

/// A request, ready to be decided.
struct Case<'a> {
    recorded: &'a Recorded,
    run: usize,
    /// The pool's members as they were.
    members: &'a Members,
    request: InferenceRequest,
    outcome: Option<Outcome>,
    seed: u64,
    prefix: Option<u64>,
    /// Where it was served, and whether that is where it was sent to.
    then: EndpointId,
    succeeded: bool,
    prompt: u64,
    output: u64,
    /// Tokens that its engine found in the cache, where it said so.
    measured: Option<u64>,
    /// At the first turn in the recording: where its conversation was before, and the tokens cached there.
    remembered: Option<(EndpointId, u64)>,
}

/// What happens, in this order at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Happens {
    EndThen,
    EndNow,
    FirstThen,
    FirstNow,
    Arrival,
}

type Due = Reverse<(u64, Happens, usize)>;

/// One picker anew.
struct Picker {
    scheduler: Arc<Scheduler>,
    version: Option<u64>,
    /// Ring points, where a configuration of its own says so.
    points: Option<u32>,
}

/// A request under way in the new world.
struct Live {
    booking: Booking,
    at: EndpointId,
    moved: bool,
    /// What its engine is estimated to find, where that is not what was recorded.
    cached: Option<u64>,
}

/// Decides everything again. `configs` has one for each run; `points` says whether rings are made anew as they say.
///
/// # Errors
/// A configuration names no policy.
pub(crate) fn replay(
    recording: &mut Recording,
    files: &[PathBuf],
    configs: &[Config],
    points: bool,
) -> Result<Tally> {
    let decisions = std::mem::take(&mut recording.decisions);
    let mut cases = Vec::with_capacity(decisions.len());
    let mut bad = Vec::new();
    for recorded in &decisions {
        match case(recorded, recording) {
            Ok(case) => cases.push(case),
            Err((why, detail)) => bad.push((why, recorded.place, detail)),
        }
    }
    let (mut priorities, mut met) = (HashMap::new(), HashSet::new());
    for case in &mut cases {
        if !case.key().is_some_and(|key| met.insert((case.run, key))) {
            case.remembered = None;
        }
        if let Some(name) = &case.request.objective {
            priorities.insert(name.clone(), case.recorded.record.priority);
        }
    }
    let mut pickers = Vec::new();
    for config in configs {
        let points = points.then(|| config.ring.points.get());
        let empty = Arc::new(PoolSnapshot::empty(points.unwrap_or(1)));
        let scheduler = Arc::new(Scheduler::new(app::settings(config)?, empty));
        scheduler.set_objectives(priorities.clone());
        pickers.push(Picker { scheduler, version: None, points });
    }
    let mut fitted = Fitted::default();
    fit(&cases, &mut fitted, Pass::Paces);
    fitted.fit();
    fit(&cases, &mut fitted, Pass::Waits);
    fitted.fit_waits();
    let tally = anew(&cases, &mut pickers, &fitted)?;
    drop(cases);
    for (why, place, detail) in bad {
        recording.skip(why, files, place, &detail);
    }
    Ok(tally)
}

/// Makes a case of a record.
fn case<'a>(
    recorded: &'a Recorded,
    recording: &'a Recording,
) -> Result<Case<'a>, (&'static str, String)> {
    let record = &recorded.record;
    let run =
        recorded.run.ok_or(("of a decision log: in sequence it takes records", String::new()))?;
    let members = recording.runs[run]
        .pools
        .get(&record.pool_version)
        .ok_or(("whose pool is not in the files", format!("version {}", record.pool_version)))?;
    let read = || -> Result<Case<'a>> {
        let outcome = record.outcome.as_ref().map(recall::outcome).transpose()?;
        let by = |found: &dyn Fn(&Endpoint) -> bool| {
            members.endpoints.iter().find(|endpoint| found(endpoint)).map(Endpoint::id)
        };
        let target = by(&|endpoint| endpoint.name == record.target)
            .with_context(|| format!("`{}` is not in its pool", record.target))?;
        let served = outcome.as_ref().and_then(|outcome| outcome.served);
        let served = served.and_then(|address| by(&|endpoint| endpoint.address == address));
        let usage = outcome.as_ref().map(|outcome| outcome.usage.clone()).unwrap_or_default();
        Ok(Case {
            run,
            members,
            request: recall::request(record, &recorded.asked)?,
            seed: recall::hash(&record.seed)?.unwrap_or(0),
            prefix: recall::hash(recorded.asked.prefix.as_deref().unwrap_or_default())?,
            then: served.unwrap_or(target),
            succeeded: outcome.as_ref().is_some_and(Outcome::succeeded),
            prompt: usage.prompt_tokens.unwrap_or(record.prompt_tokens).min(MOST_TOKENS),
            output: usage.completion_tokens.unwrap_or(0).min(MOST_TOKENS),
            measured: usage.cached_tokens.map(|cached| cached.min(MOST_TOKENS)),
            remembered: record.placement.as_ref().and_then(|placed| {
                let endpoint = by(&|endpoint| endpoint.name == placed.endpoint)?;
                Some((endpoint, placed.cached_tokens.min(MOST_TOKENS)))
            }),
            outcome,
            recorded,
        })
    };
    read().map_err(|error| ("with a value that cannot be read", format!("{error:#}")))
}

impl Case<'_> {
    fn key(&self) -> Option<u64> {
        self.request.conversation.as_ref().map(|conversation| conversation.key)
    }

    /// Seconds from the pick to the first token, if there was one.
    fn ttft(&self) -> Option<f64> {
        Some(seconds(self.recorded.first? - self.recorded.at))
    }

    fn task(&self, cached: u64) -> Task {
        let (conversation, prompt, output) = (self.key(), self.prompt, self.output);
        Task { conversation, prompt, cached: cached.min(prompt), output }
    }

    /// Notes in a picture what was cached before the recording began.
    fn recall(&self, engines: &mut Engines) {
        if let Some((at, tokens)) = self.remembered {
            engines.hold(at, self.key(), Held { tokens, by: usize::MAX, whole: true });
        }
    }

    /// Notes in a picture what is cached where: at the first token the prompt, at the end the answer too.
    fn hold(&self, engines: &mut Engines, at: EndpointId, by: usize, whole: bool) {
        if self.succeeded {
            let tokens = if whole { self.prompt + self.output } else { self.prompt };
            engines.hold(at, self.key(), Held { tokens, by, whole });
        }
    }
}

#[expect(
    clippy::cast_precision_loss,
    reason = "below 2^52 nanoseconds that are far less than a month"
)]
fn seconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1e9
}

/// What is learned from the recording, one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pass {
    Paces,
    Waits,
}

/// Learns from the recording as it went.
fn fit(cases: &[Case<'_>], fitted: &mut Fitted, pass: Pass) {
    let mut engines = Engines::default();
    let mut views: BTreeMap<usize, View> = BTreeMap::new();
    let mut due = recorded_times(cases);
    while let Some(Reverse((time, happens, index))) = due.pop() {
        let (case, now) = (&cases[index], Duration::from_nanos(time - origin(cases)));
        match happens {
            Happens::Arrival => {
                case.recall(&mut engines);
                let held = engines.held(case.then, case.key());
                let cached = case.measured.unwrap_or_else(|| held.map_or(0, |held| held.tokens));
                let task = case.task(cached);
                if case.measured.is_some() && case.succeeded && pass == Pass::Paces {
                    fitted.cached(held, &case.recorded.record.model, &task);
                }
                let pace = match pass {
                    Pass::Paces => (1.0, 1.0),
                    Pass::Waits => fitted.pace(case.then),
                };
                let view = engines.look(case.then, now, &task, pace);
                if let Some(ttft) = case.ttft().filter(|_| case.succeeded) {
                    match pass {
                        Pass::Paces => fitted.first_token(case.then, &view, ttft),
                        Pass::Waits => fitted.waited(&view, ttft),
                    }
                }
                engines.dispatch(index, case.then, now, (&task, &view));
                views.insert(index, view);
            }
            Happens::FirstThen => {
                engines.first_token(index, now);
                case.hold(&mut engines, case.then, index, false);
            }
            Happens::EndThen => {
                engines.end(index, now);
                case.hold(&mut engines, case.then, index, true);
                let view = views.remove(&index);
                if let (Some(view), Some(first)) = (view, case.recorded.first)
                    && case.succeeded
                    && pass == Pass::Paces
                {
                    let took = seconds(case.recorded.end - first);
                    fitted.answer(case.then, &view, (took, case.output));
                }
            }
            Happens::FirstNow | Happens::EndNow => {}
        }
    }
}

/// When the first request came.
fn origin(cases: &[Case<'_>]) -> u64 {
    cases.first().map_or(0, |case| case.recorded.at)
}

fn recorded_times(cases: &[Case<'_>]) -> BinaryHeap<Due> {
    let mut due = BinaryHeap::new();
    for (index, case) in cases.iter().enumerate() {
        due.push(Reverse((case.recorded.at, Happens::Arrival, index)));
        if let Some(first) = case.recorded.first {
            due.push(Reverse((first, Happens::FirstThen, index)));
        }
        due.push(Reverse((case.recorded.end, Happens::EndThen, index)));
    }
    due
}

/// Decides each of them anew.
fn anew(cases: &[Case<'_>], pickers: &mut [Picker], fitted: &Fitted) -> Result<Tally> {
    let mut tally = Tally::default();
    let (mut then, mut now) = (Engines::default(), Engines::default());
    let mut live: BTreeMap<usize, Live> = BTreeMap::new();
    // Turns under way of each conversation, then and now.
    let mut turns: HashMap<(usize, u64), (i64, i64)> = HashMap::new();
    let mut due = recorded_times(cases);
    while let Some(Reverse((time, happens, index))) = due.pop() {
        let case = &cases[index];
        let at = Duration::from_nanos(time - origin(cases));
        let turn = case.key().map(|key| (case.run, key));
        match happens {
            Happens::Arrival => {
                let came = arrive(case, index, at, pickers, (&mut then, &mut now), fitted)?;
                if let Some(turn) = turn {
                    let under_way = turns.entry(turn).or_default();
                    tally.early += u64::from(under_way.1 > under_way.0);
                    *under_way = (under_way.0 + 1, under_way.1 + i64::from(came.live.is_some()));
                }
                if let Some((first, end)) = came.times {
                    if let Some(first) = first {
                        due.push(Reverse((first, Happens::FirstNow, index)));
                    }
                    due.push(Reverse((end, Happens::EndNow, index)));
                }
                if let Some(new) = came.live {
                    live.insert(index, new);
                }
                tally.add(came.row, came.steps);
                tally.models.push(came.modelled);
            }
            Happens::FirstThen => {
                then.first_token(index, at);
                case.hold(&mut then, case.then, index, false);
            }
            Happens::EndThen => {
                then.end(index, at);
                case.hold(&mut then, case.then, index, true);
                if let Some(turn) = turn {
                    turns.entry(turn).or_default().0 -= 1;
                }
            }
            Happens::FirstNow => {
                now.first_token(index, at);
                if let Some(live) = live.get_mut(&index) {
                    live.booking.first_token(at);
                    case.hold(&mut now, live.at, index, false);
                }
            }
            Happens::EndNow => {
                now.end(index, at);
                if let Some(live) = live.remove(&index) {
                    case.hold(&mut now, live.at, index, true);
                    finish(case, live, at);
                }
                if let Some(turn) = turn {
                    turns.entry(turn).or_default().1 -= 1;
                }
            }
        }
    }
    tally.pace = fitted.pool_pace();
    tally.kept = fitted.kept();
    tally.behind = fitted.behind();
    Ok(tally)
}

/// What came of an arrival.
struct Came {
    row: Row,
    steps: Vec<String>,
    live: Option<Live>,
    times: Option<(Option<u64>, u64)>,
    modelled: Modelled,
}

fn arrive(
    case: &Case<'_>,
    index: usize,
    at: Duration,
    pickers: &mut [Picker],
    (then, now): (&mut Engines, &mut Engines),
    fitted: &Fitted,
) -> Result<Came> {
    let record = &case.recorded.record;
    let model = record.model.as_str();
    // As it went.
    case.recall(then);
    case.recall(now);
    let held = then.held(case.then, case.key());
    let expected = fitted.expected(held, model, case.prompt);
    let cached = case.measured.unwrap_or(expected).min(case.prompt);
    let task = case.task(cached);
    let view = then.look(case.then, at, &task, fitted.pace(case.then));
    then.dispatch(index, case.then, at, (&task, &view));
    let modelled = Modelled {
        cached: case.measured.filter(|_| case.succeeded).map(|measured| (measured, expected)),
        ttft: case.ttft().filter(|_| case.succeeded).map(|ttft| (ttft, view.first_token())),
    };
    let side = Side {
        endpoint: record.target.clone(),
        reason: record.reason.clone(),
        cached_tokens: Some(cached),
        ttft: case.ttft(),
        view: Some(view),
        seconds: seconds(case.recorded.end - case.recorded.at),
    };
    let row = Row::of(case.recorded, case.prompt, case.output, case.succeeded, side)
        .measured(case.measured.is_some());

    // And anew.
    let picker = &mut pickers[case.run];
    picker.follow(case)?;
    let said = Said::of(record, &picker.scheduler.pool());
    let moment = Moment {
        now: at,
        seed: case.seed,
        evidence: said.evidence(),
        prefix: case.prefix,
        ..Moment::default()
    };
    let (decision, booking) = match picker.scheduler.schedule(&case.request, moment, Detail::Normal)
    {
        Ok(scheduled) => scheduled,
        Err(refusal) => {
            let row = row.now(Now::Refused(refusal.as_str()));
            let steps = vec![refusal.to_string()];
            return Ok(Came { row, steps, live: None, times: None, modelled });
        }
    };
    let target = decision.pool.endpoint(decision.target());
    // Where nothing else is decided, nothing else happens: an endpoint that could not be reached is none anew.
    let moved = target.name != record.target;
    let place = if moved { target.id() } else { case.then };
    let held_now = now.held(place, case.key());
    let same = !moved && held_now == held;
    let cached_now = if same { cached } else { fitted.expected(held_now, model, case.prompt) };
    let task_now = case.task(cached_now);
    let view_now = now.look(place, at, &task_now, fitted.pace(place));
    now.dispatch(index, place, at, (&task_now, &view_now));
    let (first, end) =
        times(case, &view, (&view_now, fitted.answer_pace(place) / fitted.answer_pace(case.then)));
    let steps = if moved {
        explain::record(&decision).steps.into_iter().map(|step| step.text).collect()
    } else {
        Vec::new()
    };
    let row = row.now(Now::Goes(Side {
        endpoint: target.name.clone(),
        reason: decision.reason.as_str().to_owned(),
        cached_tokens: Some(task_now.cached),
        ttft: first.map(|first| seconds(first - case.recorded.at)),
        view: Some(view_now),
        seconds: seconds(end - case.recorded.at),
    }));
    let live = Live { booking, at: place, moved, cached: (!same).then_some(cached_now) };
    Ok(Came { row, steps, live: Some(live), times: Some((first, end)), modelled })
}

/// Estimates when the first token comes now, and the end: the recorded times, and what the pictures differ in.
fn times(case: &Case<'_>, then: &View, (now, pace): (&View, f64)) -> (Option<u64>, u64) {
    let Recorded { at, first, end, .. } = *case.recorded;
    let Some(was) = first else { return (None, end) };
    let change = now.first_token() - then.first_token();
    let first = if change == 0.0 {
        was
    } else {
        let took = seconds(was - at);
        // However much the estimate takes away, its own prompt has to be computed.
        let took = (took + change).max(took.min(now.idle));
        at.saturating_add(nanoseconds(took)).max(at.saturating_add(1))
    };
    if !case.succeeded {
        // Who gave up, or was cut off, does so at the same time.
        return (Some(first).filter(|&first| first < end), end);
    }
    let slower = now.step / then.step * pace;
    let answer = end - was;
    let answer = if slower == 1.0 { answer } else { nanoseconds(seconds(answer) * slower) };
    (Some(first), first.saturating_add(answer.max(1)))
}

fn finish(case: &Case<'_>, live: Live, at: Duration) {
    let Some(outcome) = &case.outcome else {
        // It was taken back.
        drop(live.booking);
        return;
    };
    let mut outcome = outcome.clone();
    if live.moved {
        outcome.served = None;
    }
    if let (Some(now), Some(cached)) = (live.cached, &mut outcome.usage.cached_tokens) {
        *cached = now;
    }
    live.booking.finish(&outcome, at);
}

impl Picker {
    /// Brings it to where the recorded picker was when the request came, as far as that is no decision's doing.
    fn follow(&mut self, case: &Case<'_>) -> Result<()> {
        let record = &case.recorded.record;
        if self.version != Some(record.pool_version) {
            let (endpoints, points) = (case.members.endpoints.clone(), case.members.points);
            let points = self.points.unwrap_or(points);
            let pool = PoolSnapshot::new(record.pool_version, endpoints, points)?;
            self.scheduler.adopt(Arc::new(pool));
            self.version = Some(record.pool_version);
        }
        self.scheduler.resume(record.sequence);
        // What was known of a conversation before the recording began.
        if let (Some(key), Some((endpoint, cached))) = (case.key(), case.remembered) {
            self.scheduler.remember(key, endpoint, cached);
        }
        Ok(())
    }
}

/// What the engines had said, by slot. Which adapters they had loaded is not recorded, but only what that meant for the
/// request.
struct Said {
    cached: Vec<Option<u64>>,
    coming: Vec<Option<u64>>,
    memory: Vec<Option<f64>>,
    waiting: Vec<Option<u64>>,
    running: Vec<Option<u64>>,
}

impl Said {
    fn of(record: &pb::Record, pool: &PoolSnapshot) -> Self {
        let sights: BTreeMap<&str, &pb::Sight> = record
            .loads
            .iter()
            .filter_map(|load| Some((load.name.as_str(), load.sight.as_ref()?)))
            .collect();
        let sights: Vec<Option<&pb::Sight>> = pool
            .endpoints()
            .iter()
            .map(|endpoint| sights.get(endpoint.name.as_str()).copied())
            .collect();
        fn each<T>(
            sights: &[Option<&pb::Sight>],
            of: impl Fn(&pb::Sight, &pb::Said) -> Option<T>,
        ) -> Vec<Option<T>> {
            let of = |sight: &Option<&pb::Sight>| {
                let sight = (*sight)?;
                of(sight, sight.said.as_ref()?)
            };
            sights.iter().map(of).collect()
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "it was made of a count"
        )]
        let whole = |count: f64| count as u64;
        Self {
            cached: each(&sights, |_, said| said.cached.map(whole)),
            coming: each(&sights, |sight, said| said.cached.map(|_| whole(sight.cached))),
            memory: each(&sights, |_, said| said.memory),
            waiting: each(&sights, |_, said| said.waiting.map(whole)),
            running: each(&sights, |_, said| said.running.map(whole)),
        }
    }

    fn evidence(&self) -> Evidence<'_> {
        let Self { cached, coming, memory, waiting, running } = self;
        Evidence { cached, coming, memory, waiting, running, adapters: &[], ..Evidence::default() }
    }
}
