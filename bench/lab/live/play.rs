//! Plays one run: sends what is due, lets clients go on when their answers are there, and changes the pool meanwhile.
#![allow(clippy::disallowed_methods, reason = "it owns the clock of the run, and its tasks")]

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use hyper::body::Bytes;
use serde_json::json;
use tokio::task::JoinSet;

use super::client::{self, Reply};
use super::plan::Plan;
use super::stack::{self, Stack};
use super::text::{Sizes, Texts};
use crate::engine::Params;
use crate::record::{Row, Work};
use crate::sim::seconds_of_work;
use crate::workload::{Clients, Request, Traffic};

/// How long after an answer's request a rehearsal takes it to be there, in seconds.
const REHEARSED_ANSWER: f64 = 0.5;
/// More than that nobody plays.
const MOST_REQUESTS: usize = 1_000_000;
/// How often it is looked whether all parts still run.
const LOOK: Duration = Duration::from_millis(200);
/// Counts of prompt tokens that are further apart than this share are told.
const OFF: f64 = 0.03;

/// How a run's times stand to those of its workload.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Times {
    /// Times are multiplied by it.
    pub(crate) stretch: f64,
    /// What a workload would send later than this, in its own seconds, is not sent.
    pub(crate) until: f64,
}

/// What a run will be about.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Rehearsal {
    pub(crate) requests: usize,
    /// Those that are no warm-up.
    pub(crate) counting: usize,
    /// Seconds until the last one is sent.
    pub(crate) seconds: f64,
    /// Tokens of the longest prompt with its answer, before they are shrunk.
    pub(crate) longest: i64,
}

/// What there was.
#[derive(Debug)]
pub(crate) struct Played {
    /// In the order they were sent.
    pub(crate) rows: Vec<Row>,
    pub(crate) endpoints: Vec<Work>,
    /// What whoever reads the results has to know.
    pub(crate) remarks: Vec<String>,
}

/// Requests that are due, by their times in microseconds and the order in which they came.
#[derive(Default)]
struct Due {
    requests: BTreeMap<(u64, u64), Request>,
    order: u64,
}

impl Due {
    fn put(&mut self, requests: Vec<Request>, times: Times) {
        for request in requests.into_iter().filter(|request| request.sent <= times.until) {
            let at = Duration::from_secs_f64((request.sent * times.stretch).max(0.0));
            self.order += 1;
            self.requests
                .insert((u64::try_from(at.as_micros()).unwrap_or(u64::MAX), self.order), request);
        }
    }

    /// Takes the next one if it is due by then.
    fn take(&mut self, by: Duration) -> Option<(Duration, Request)> {
        let first = self.requests.first_entry()?;
        let at = Duration::from_micros(first.key().0);
        (at <= by).then(|| (at, first.remove()))
    }

    fn first(&self) -> Option<Duration> {
        self.requests.first_key_value().map(|((at, _), _)| Duration::from_micros(*at))
    }
}

fn started(traffic: Traffic, times: Times) -> (Due, Option<Box<dyn Clients>>) {
    let Traffic { arrivals, mut clients } = traffic;
    let mut due = Due::default();
    due.put(clients.as_mut().map(|clients| clients.start()).unwrap_or_default(), times);
    due.put(arrivals, times);
    (due, clients)
}

/// Goes through a run's requests with answers that take no time to speak of.
///
/// # Errors
/// They are too many, or none.
pub(crate) fn rehearse(traffic: Traffic, times: Times) -> Result<Rehearsal> {
    let (mut due, mut clients) = started(traffic, times);
    let mut rehearsal = Rehearsal { requests: 0, counting: 0, seconds: 0.0, longest: 0 };
    while let Some((at, request)) = due.take(Duration::MAX) {
        rehearsal.requests += 1;
        rehearsal.counting += usize::from(request.counts);
        ensure!(
            rehearsal.requests <= MOST_REQUESTS,
            "it has more than {MOST_REQUESTS} requests; send fewer with --until"
        );
        rehearsal.seconds = at.as_secs_f64();
        rehearsal.longest = rehearsal.longest.max(request.prompt + request.output);
        if let Some(clients) = &mut clients {
            due.put(clients.next(&request, request.sent + REHEARSED_ANSWER), times);
        }
    }
    ensure!(
        rehearsal.counting > 0,
        "of the {} requests that are sent, none counts: the rest is warm-up; send more with --until",
        rehearsal.requests
    );
    Ok(rehearsal)
}

/// Plays a run to its end; `tell` is called for each request that has ended.
///
/// # Errors
/// A part of the stack ended, no request was answered, or the last one ended before the pool changed.
pub(crate) async fn play(
    stack: &mut Stack,
    traffic: Traffic,
    (plan, times): (&Plan, Times),
    (mut texts, sizes): (Texts, Sizes),
    prices: &Params,
    tell: &dyn Fn(),
) -> Result<Played> {
    let (mut due, mut clients) = started(traffic, times);
    let mut steps = plan.steps.iter().peekable();
    let mut under_way = JoinSet::new();
    let mut ended = Vec::new();
    let start = Instant::now();
    let mut looked = start;
    while due.first().is_some() || !under_way.is_empty() {
        let step = steps.peek().map(|step| Duration::from_secs_f64(step.at));
        let next = [due.first(), step].into_iter().flatten().min();
        let wake = next.map_or(looked + LOOK, |next| (start + next).min(looked + LOOK));
        tokio::select! {
            Some(done) = under_way.join_next() => {
                let (request, at, reply): (Request, Duration, Reply) = done?;
                let usage = reply.answer.counted().ok().filter(|_| reply.failure.is_none());
                let answer = usage.map(|it| (reply.answer.text.as_str(), it.prompt, it.completion));
                texts.answered(&request, answer);
                if let Some(clients) = &mut clients {
                    let now = start.elapsed().as_secs_f64() / times.stretch;
                    due.put(clients.next(&request, now), times);
                }
                ended.push(Ended { request, at, reply });
                tell();
            }
            () = tokio::time::sleep_until(wake.into()) => {
                let now = start.elapsed();
                while let Some(step) = steps.next_if(|step| Duration::from_secs_f64(step.at) <= now) {
                    if let Some(process) = step.kill {
                        stack.kill(process);
                    }
                    stack.set_members(&step.members)?;
                }
                while let Some((at, request)) = due.take(now) {
                    let body = body(&mut texts, &request, sizes);
                    let (port, at_once) = (stack.port, start + at);
                    under_way.spawn(async move {
                        let reply = client::chat(port, &request.key, body, at_once).await;
                        (request, at, reply)
                    });
                }
                if looked.elapsed() >= LOOK {
                    stack.check()?;
                    looked = Instant::now();
                }
            }
        }
    }
    if let Some(step) = steps.next() {
        bail!(
            "the last request ended after {:.1} s, and the pool changes at {} s: change it earlier, or send more",
            start.elapsed().as_secs_f64(),
            step.at
        );
    }
    played(ended, plan, sizes, prices).map_err(|error| error.context(stack.tails()))
}

fn body(texts: &mut Texts, request: &Request, sizes: Sizes) -> Bytes {
    let body = json!({
        "model": "tiny",
        "messages": texts.ask(request),
        "max_tokens": sizes.tokens(request.output),
        "temperature": 0,
        // Answers have the length that the workload gives them.
        "ignore_eos": true,
        "stream": true,
        "stream_options": { "include_usage": true },
    });
    Bytes::from(body.to_string())
}

/// A request that has ended, well or not.
struct Ended {
    request: Request,
    /// When it was due.
    at: Duration,
    reply: Reply,
}

fn played(mut ended: Vec<Ended>, plan: &Plan, sizes: Sizes, prices: &Params) -> Result<Played> {
    ended.sort_by_key(|it| (it.at, it.request.id));
    let (mut rows, mut remarks) = (Vec::new(), Vec::new());
    let mut work = vec![(0i64, 0i64); plan.endpoints];
    let (mut asked, mut counted) = (0.0, 0.0);
    let mut failures: Vec<String> = Vec::new();
    for Ended { request, at, reply } in ended {
        let row = row(&request, at, &reply, sizes);
        if let Some(failure) = &reply.failure {
            failures.push(failure.clone());
        } else if let Some(usage) = reply.answer.usage {
            asked += f64::from(row.prompt);
            counted += f64::from(usage.prompt);
            let place = row.endpoint.and_then(|endpoint| work.get_mut(endpoint as usize));
            let Some((prefill, decode)) = place else {
                bail!("an answer came from {:?}, which is no endpoint of this run", reply.endpoint);
            };
            *prefill += i64::from(usage.prompt.saturating_sub(row.cached));
            *decode += i64::from(usage.completion);
        }
        rows.push(row);
    }
    if let Some(first) = failures.first() {
        let (failed, all) = (failures.len(), rows.len());
        ensure!(failed < all, "none of {all} requests was answered; the first: {first}");
        remarks.push(format!("{failed} of {all} requests failed; the first: {first}"));
    }
    let off = counted / asked - 1.0;
    if off.abs() > OFF {
        remarks.push(format!(
            "the engines counted {:+.0} % prompt tokens beside what the workload asks for",
            off * 100.0
        ));
    }
    let endpoints = work
        .into_iter()
        .map(|(prefill, decode)| Work {
            seconds: seconds_of_work(prefill, decode, prices),
            prefill_tokens: prefill.unsigned_abs(),
            decode_tokens: decode.unsigned_abs(),
            preemptions: 0,
        })
        .collect();
    Ok(Played { rows, endpoints, remarks })
}

fn row(request: &Request, at: Duration, reply: &Reply, sizes: Sizes) -> Row {
    let well = reply.failure.is_none();
    let usage = reply.answer.usage.filter(|_| well);
    // Equal under every policy, which what the engine counts is not to the last token: answers differ.
    let prompt = u32::try_from(sizes.tokens(request.prompt)).unwrap_or(u32::MAX);
    Row {
        id: request.id,
        conversation: request.conversation,
        turn: request.turn,
        counts: request.counts,
        sent: at.as_secs_f64(),
        // Only the picker knows.
        dispatched: None,
        ttft: reply.answer.first.map(|it| it.as_secs_f64()),
        e2e: reply.answer.last.filter(|_| well).map(|it| it.as_secs_f64()),
        prompt,
        output: usage.map_or(0, |usage| usage.completion),
        cached: usage.and_then(|usage| usage.cached).unwrap_or(0).min(prompt),
        best_cached: 0,
        endpoint: reply.endpoint.as_deref().and_then(stack::number),
    }
}

#[cfg(test)]
mod tests {
    use super::super::stream::{Answer, Usage};
    use super::*;
    use crate::workload::Traces;
    use crate::workload::tests::{inline, library};

    const TIMES: Times = Times { stretch: 1.0, until: f64::INFINITY };

    fn traffic(point: &str) -> Traffic {
        library().point(point).unwrap().traffic(1, &Traces::default()).unwrap()
    }

    #[test]
    fn a_rehearsal_counts_what_a_run_will_send() {
        let demo = rehearse(traffic("demo"), TIMES).unwrap();
        assert_eq!(demo.requests, 85);
        assert!((2000..4000).contains(&demo.longest), "{demo:?}");
        let slow = rehearse(traffic("demo"), Times { stretch: 2.0, ..TIMES }).unwrap();
        assert_eq!((slow.requests, slow.longest), (85, demo.longest));
        assert!((slow.seconds - 2.0 * demo.seconds).abs() < 1e-3);
        let short = rehearse(traffic("demo"), Times { until: 4.0, ..TIMES }).unwrap();
        assert!((12..85).contains(&short.requests) && short.seconds <= 4.0, "{short:?}");
        let none = rehearse(traffic("demo"), Times { until: -1.0, ..TIMES });
        assert!(none.unwrap_err().to_string().contains("none counts"));
        let warm_up = rehearse(traffic("loadaware"), Times { until: 20.0, ..TIMES });
        assert!(warm_up.unwrap_err().to_string().contains("of the 81 requests"));
    }

    #[test]
    fn what_is_due_comes_in_the_order_of_its_times() {
        let open = "{engine: cpu, endpoints: 2, slo: {ttft: 1, itl: 1}, \
                    traffic: {kind: unique, requests: 50, rate: 10, prompt: 100, output: 5}}";
        let (mut due, clients) =
            started(inline(open).traffic(1, &Traces::default()).unwrap(), TIMES);
        assert!(clients.is_none());
        assert!(due.take(Duration::ZERO).is_some(), "the first is due at once");
        assert!(due.take(Duration::ZERO).is_none(), "and no other");
        let times: Vec<Duration> =
            std::iter::from_fn(|| due.take(Duration::MAX)).map(|(at, _)| at).collect();
        assert!(times.len() == 49 && times.is_sorted());
    }

    fn ended(id: u64, failure: Option<&str>) -> Ended {
        let mut request = traffic("demo").clients.unwrap().start().remove(0);
        (request.id, request.prompt) = (id, 100);
        let ms = Duration::from_millis;
        let mut answer = Answer::default();
        answer.first = Some(ms(20));
        answer.last = Some(ms(70));
        answer.usage = Some(Usage { prompt: 110, completion: 24, cached: Some(60) });
        let failure = failure.map(str::to_owned);
        let reply = Reply { answer, endpoint: Some("llm-1".to_owned()), failure };
        Ended { request, at: ms(1500), reply }
    }

    fn played_of(ended: Vec<Ended>) -> Result<Played> {
        let sizes = Sizes { shrink: 1.0, block: 16 };
        played(ended, &Plan::of_scaling(2, &[]).unwrap(), sizes, &Params::named("tiny").unwrap())
    }

    #[test]
    fn rows_say_what_the_client_saw_and_the_engine_counted() {
        let played = played_of(vec![ended(2, Some("it broke")), ended(1, None)]).unwrap();
        let [well, badly] = &played.rows[..] else { panic!("{played:?}") };
        assert_eq!((well.id, well.sent, well.ttft, well.e2e), (1, 1.5, Some(0.02), Some(0.07)));
        assert_eq!((well.prompt, well.cached, well.output, well.endpoint), (100, 60, 24, Some(1)));
        assert_eq!((badly.e2e, badly.cached, badly.output), (None, 0, 0));
        let work: Vec<u64> = played.endpoints.iter().map(|it| it.prefill_tokens).collect();
        assert_eq!(work, [0, 50]);
        assert!(played.endpoints[1].seconds > 0.0);
        assert_eq!(played.remarks[0], "1 of 2 requests failed; the first: it broke");
        assert!(played.remarks[1].contains("+10 %"));
    }

    #[test]
    fn no_answer_at_all_is_an_error() {
        let error = played_of(vec![ended(1, Some("refused"))]).unwrap_err();
        assert_eq!(error.to_string(), "none of 1 requests was answered; the first: refused");
    }
}
