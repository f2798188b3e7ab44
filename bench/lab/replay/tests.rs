//! Recordings that the picker's own recorder made of a small world, decided again.
#![allow(clippy::disallowed_methods, reason = "a test owns its clock")]

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap};
use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use llm_ring::app;
use llm_ring::pool::{
    Conversation, Ending, Endpoint, InferenceRequest, KeySource, Outcome, PoolSnapshot, PromptSize,
    Usage,
};
use llm_ring::scheduling::{Booking, Detail, Evidence, Moment, Scheduler};
use llm_ring::telemetry::metrics::Metrics;
use llm_ring::telemetry::observer::{Asking, Observation, Observer};
use llm_ring::telemetry::records;

use super::*;
use crate::random::Random;

/// A folder that goes away.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let name = format!("llm-ring-replay-{name}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        drop(std::fs::remove_dir_all(&path));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        drop(std::fs::remove_dir_all(&self.0));
    }
}

fn config(text: &str) -> Config {
    serde_yaml::from_str(text).unwrap()
}

fn pool(version: u64, members: &[(u8, f64)]) -> Arc<PoolSnapshot> {
    let member = |&(number, weight): &(u8, f64)| Endpoint {
        weight,
        instance: format!("life-{number}"),
        ..Endpoint::new(format!("llm-{number}"), format!("10.0.0.{number}:8000").parse().unwrap())
    };
    Arc::new(PoolSnapshot::new(version, members.iter().map(member).collect(), 50).unwrap())
}

/// What happens in the small world.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    End(usize),
    First(usize),
    Pool(usize),
    Arrival(usize),
}

struct Under {
    booking: Option<Booking>,
    observation: Option<Observation>,
    outcome: Outcome,
    endpoint: String,
    conversation: Option<u64>,
}

const REQUESTS: usize = 400;

/// A picker serves requests over endpoints that come, warm up and go, and its recorder writes them down.
fn record(path: &Path, config: &Config, seed: u64, (max_bytes, files): (u64, u32)) {
    let pools = [
        pool(1, &[(0, 1.0), (1, 1.0), (2, 2.0)]),
        pool(2, &[(0, 1.0), (1, 1.0), (2, 2.0), (3, 0.3)]),
        pool(3, &[(1, 1.0), (2, 2.0), (3, 1.0)]),
    ];
    let settings = app::settings(config).unwrap();
    let settings = llm_ring::scheduling::Settings { trace_sights: true, ..settings };
    let scheduler = Arc::new(Scheduler::new(settings, Arc::clone(&pools[0])));
    scheduler.set_objectives(HashMap::from([("batch".to_owned(), -1)]));
    let knowledge = Arc::new(app::knowledge(config));
    let (metrics, _) = Metrics::new(Arc::clone(&scheduler), Arc::default(), knowledge);
    let decides = serde_json::to_value(config).unwrap();
    let settings = records::Settings { path: path.to_owned(), max_bytes, files, config: decides };
    let observer = Observer::new(metrics, None, None, Some(settings));
    let epoch = Instant::now();

    let mut random = Random::new(seed);
    let mut events = BinaryHeap::new();
    let ms = |ms: f64| nanos(ms / 1000.0);
    for number in 0..REQUESTS {
        let at = ms(number as f64 * 15.0 + random.random() * 14.0);
        events.push(Reverse((at, Event::Arrival(number))));
    }
    for (at, number) in [(2000.0, 1), (4000.0, 2)] {
        events.push(Reverse((ms(at), Event::Pool(number))));
    }
    let mut under: BTreeMap<usize, Under> = BTreeMap::new();
    let mut turns: HashMap<u64, u64> = HashMap::new();
    let mut caches: HashMap<(String, u64), u64> = HashMap::new();
    let mut free: HashMap<String, u64> = HashMap::new();
    while let Some(Reverse((time, event))) = events.pop() {
        let (now, instant) = (Duration::from_nanos(time), epoch + Duration::from_nanos(time));
        match event {
            Event::Pool(number) => scheduler.adopt(Arc::clone(&pools[number])),
            Event::Arrival(number) => {
                let conversation = (random.random() < 0.9).then(|| random.below(40) as u64);
                let turn = conversation.map_or(0, |it| {
                    let turn = turns.entry(it).or_insert(0);
                    *turn += 1;
                    *turn
                });
                let request = InferenceRequest {
                    id: format!("request-{number}"),
                    conversation: conversation.map(|it| {
                        let source = KeySource::Header("x-conversation-id".to_owned());
                        Conversation::named(format!("chat-{it}"), source)
                    }),
                    model: Some("m".to_owned()),
                    objective: (random.random() < 0.1).then(|| "batch".to_owned()),
                    prompt: PromptSize {
                        text_bytes: 800 + turn * 1500,
                        messages: turn,
                        exact: (turn % 3 == 0).then_some(turn * 411),
                        ..PromptSize::default()
                    },
                    tokens: None,
                    max_tokens: (random.random() < 0.5).then_some(64),
                    subset: (random.random() < 0.1).then(|| {
                        [1, 2].map(|n| format!("10.0.0.{n}:8000").parse().unwrap()).to_vec()
                    }),
                    ..InferenceRequest::default()
                };
                let waiting: Vec<Option<u64>> = (0..scheduler.pool().endpoints().len())
                    .map(|_| Some(random.bits() % 2))
                    .collect();
                let moment = Moment {
                    now,
                    seed: random.bits(),
                    evidence: Evidence { waiting: &waiting, ..Evidence::default() },
                    ..Moment::default()
                };
                let mut observation = observer.start(instant, [None, None]);
                let (decision, booking) = match scheduler.schedule(&request, moment, Detail::Normal)
                {
                    Ok(scheduled) => scheduled,
                    Err(refusal) => {
                        let why = (refusal.as_str(), "full");
                        observer.rejected(&mut observation, why, &request.id, instant);
                        continue;
                    }
                };
                let endpoint = decision.pool.endpoint(decision.target());
                let (name, address) = (endpoint.name.clone(), endpoint.address);
                let prompt = 200 + turn * 400;
                let held = conversation.and_then(|it| caches.get(&(name.clone(), it)).copied());
                let cached = held.map_or(48, |held| held.min(prompt) - held.min(prompt) % 16);
                // One prompt after the other; llm-2 is twice as fast, as its weight says.
                let speed = if name == "llm-2" { 2.0 } else { 1.0 };
                let own = (4.0 + 0.04 * (prompt - cached) as f64 + random.random()) / speed;
                let free = free.entry(name.clone()).or_insert(0);
                *free = time.max(*free) + ms(own);
                let ttft = *free - time;
                let output = 8 + random.bits() % 60;
                let first = time + ttft;
                let fate = random.random();
                let (outcome, end) = if fate < 0.05 {
                    // The client gives up, early or late.
                    (Outcome::default(), time + ms(40.0))
                } else {
                    let usage = Usage {
                        prompt_tokens: Some(prompt),
                        completion_tokens: Some(output),
                        cached_tokens: Some(cached),
                        response_id: None,
                    };
                    let (status, usage) =
                        if fate < 0.08 { (500, Usage::default()) } else { (200, usage) };
                    let served = Some(address);
                    let outcome =
                        Outcome { ending: Ending::Complete, status: Some(status), served, usage };
                    (outcome, first + ms(output as f64 * 2.0))
                };
                let asking = Asking {
                    request: &request,
                    moment,
                    body: "whole",
                    begun: instant,
                    took: Duration::ZERO,
                };
                observer.decided(&mut observation, decision, asking);
                if first < end {
                    events.push(Reverse((first, Event::First(number))));
                }
                events.push(Reverse((end, Event::End(number))));
                under.insert(
                    number,
                    Under {
                        booking: Some(booking),
                        observation: Some(observation),
                        outcome,
                        endpoint: name,
                        conversation,
                    },
                );
            }
            Event::First(number) => {
                let it = under.get_mut(&number).unwrap();
                it.booking.as_mut().unwrap().first_token(now);
                observer.first_token(it.observation.as_mut().unwrap(), instant);
            }
            Event::End(number) => {
                let mut it = under.remove(&number).unwrap();
                let mut observation = it.observation.take().unwrap();
                if number % 50 == 7 {
                    // Taken back after its pick, as a body that stalls is.
                    drop(it.booking.take());
                    observer.rejected(&mut observation, ("body-stalled", ""), "", instant);
                    continue;
                }
                if let (Some(conversation), Some(prompt)) =
                    (it.conversation, it.outcome.usage.prompt_tokens)
                {
                    let held = prompt + it.outcome.usage.completion_tokens.unwrap();
                    caches.insert((it.endpoint.clone(), conversation), held);
                }
                it.booking.take().unwrap().finish(&it.outcome, now);
                observer.ended(observation, &it.outcome, instant);
            }
        }
    }
}

fn nanos(seconds: f64) -> u64 {
    recording::nanoseconds(seconds)
}

fn replay(files: &[PathBuf], policy: Option<&str>, mode: Mode) -> Replay {
    Replay {
        files: files.to_vec(),
        policy: policy.map(ToOwned::to_owned),
        config: None,
        mode,
        format: Format::Text,
    }
}

const ONE: (u64, u32) = (1 << 30, 1);

#[test]
fn the_same_policy_decides_the_same() {
    let folder = Folder::new("same");
    for (number, (policy, _)) in POLICIES.iter().enumerate() {
        let path = folder.file(policy);
        // Limits, and parameters that are not the default.
        let text = format!(
            "policy: {policy}\npolicies: {{ llm-aware: {{ floor_tokens: 100 }} }}\n\
             admission: {{ max_requests_per_endpoint: 12, max_sheddable_requests_per_endpoint: 4 }}"
        );
        record(&path, &config(&text), 7 + number as u64, ONE);
        for mode in [Mode::Sequence, Mode::Alone] {
            let report = replay(std::slice::from_ref(&path), None, mode).make().unwrap();
            let (recorded, summary) = (&report.recorded, &report.summary);
            assert!(recorded.skipped.is_empty(), "{policy}: {:?}", recorded.skipped);
            let refused: u64 = recorded.refused.values().sum();
            assert_eq!(summary.decisions as u64 + refused, REQUESTS as u64, "{policy}");
            assert_eq!((recorded.missing, recorded.before, recorded.lost), (0, 0, 0));
            assert_eq!((summary.elsewhere, summary.refused), (0, 0), "{policy} {mode:?}");
            let same = |pair: Pair| assert!(pair.then == pair.now && pair.then > 0.0, "{pair:?}");
            same(summary.hit_rate.unwrap());
            let ttft = &summary.ttft_seconds;
            [ttft.mean, ttft.p50, ttft.p95].into_iter().for_each(|pair| same(pair.unwrap()));
            assert!(report.rows.iter().all(|row| row.then.reason == row.now.reason));
            for loads in summary.endpoints.values() {
                assert_eq!(loads.requests.then, loads.requests.now);
                assert_eq!(loads.computed_tokens.then, loads.computed_tokens.now);
                same(loads.in_flight);
            }
            // The pool changes in the middle: one has joined and one has left.
            assert!(policy == &"consistent" || summary.endpoints.len() == 4, "{policy}");
        }
    }
}

#[test]
fn what_forgets_conversations_is_estimated_to_find_less_in_caches() {
    let folder = Folder::new("other");
    let path = folder.file("records.jsonl");
    record(&path, &config("policy: llm-aware"), 3, ONE);
    for mode in [Mode::Sequence, Mode::Alone] {
        let report = replay(std::slice::from_ref(&path), Some("round-robin"), mode).make().unwrap();
        let summary = &report.summary;
        assert!(summary.elsewhere * 2 > summary.decisions, "{}", summary.elsewhere);
        let of_reasons: usize = summary.reasons.iter().map(|it| it.requests).sum();
        let of_moves: usize = summary.moves.iter().map(|it| it.requests).sum();
        assert_eq!((of_reasons, of_moves), (summary.elsewhere, summary.elsewhere));
        assert!(summary.moves.iter().all(|it| it.then != it.now));
        let (then, now) = summary.endpoints.values().fold((0, 0), |(then, now), loads| {
            (then + loads.requests.then, now + loads.requests.now)
        });
        assert_eq!((then, now), (summary.decisions as u64, summary.decisions as u64));
        let hits = summary.hit_rate.unwrap();
        assert!(hits.now < hits.then - 0.1, "{mode:?} {hits:?}");
        let ttft = summary.ttft_seconds.mean.unwrap();
        assert!(
            ttft.now > ttft.then * if mode == Mode::Sequence { 1.2 } else { 1.0 },
            "{mode:?} {ttft:?}"
        );
        assert_eq!(summary.greatest.len(), 10);
        let by: Vec<f64> = summary
            .greatest
            .iter()
            .map(|it| (it.row.then.ttft.unwrap() - it.row.now.ttft.unwrap()).abs())
            .collect();
        assert!(by.is_sorted_by(|a, b| a >= b), "{by:?}");
        assert!(summary.greatest.iter().all(|it| !it.steps.is_empty()));
        // And the other formats hold the same.
        let json: serde_json::Value =
            serde_json::from_str(&serde_json::to_string(&report).unwrap()).unwrap();
        assert_eq!(json["elsewhere"], summary.elsewhere);
        let csv = report.csv();
        let elsewhere = csv.lines().filter(|line| line.split(',').nth(9) == Some("true"));
        assert_eq!(
            (csv.lines().count(), elsewhere.count()),
            (summary.decisions + 1, summary.elsewhere)
        );
        let text = report.text();
        assert!(text.contains("Elsewhere: ") && text.contains("hit rate"), "{text}");
    }
}

#[test]
fn the_estimate_comes_near_to_what_the_other_policy_really_did() {
    // The same world once under each policy; the replay of the one has to tell what the other has.
    let folder = Folder::new("truth");
    let (aware, turn) = (folder.file("aware"), folder.file("turn"));
    record(&aware, &config("policy: llm-aware"), 5, ONE);
    record(&turn, &config("policy: round-robin"), 5, ONE);
    let truth = replay(&[turn], None, Mode::Sequence).make().unwrap().summary;
    let told = replay(&[aware], Some("round-robin"), Mode::Sequence).make().unwrap().summary;
    let (is, was) = (told.hit_rate.unwrap().now, truth.hit_rate.unwrap().then);
    assert!((is - was).abs() < 0.05, "{is} for {was}");
    let ttft = |of: &Summary| of.ttft_seconds.mean.unwrap();
    let (is, was) = (ttft(&told).now, ttft(&truth).then);
    assert!(is / was > 0.7 && is / was < 1.4, "{is} for {was}");
    // Which is far from what was recorded.
    assert!(ttft(&told).then * 3.0 < was);
}

#[test]
fn files_of_several_pickers_and_of_a_rotation_come_together_in_any_order() {
    let folder = Folder::new("several");
    let (a, b) = (folder.file("a"), folder.file("b"));
    record(&a, &config("policy: llm-aware"), 1, (150_000, 100));
    record(&b, &config("policy: bounded"), 2, ONE);
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(&folder.0).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(files.len() > 4, "{files:?}");
    // One of them twice.
    files.push(a.clone());
    let report = replay(&files, None, Mode::Sequence).make().unwrap();
    assert_eq!((report.recorded.pickers, report.summary.decisions), (2, 2 * REQUESTS));
    assert_eq!(report.summary.elsewhere, 0);
    assert_eq!(report.recorded.policies.len(), 2);
    let twice = &report.recorded.skipped["there twice"];
    assert!(twice.lines > 0 && twice.first.starts_with("a:"), "{twice:?}");

    // The oldest are gone: the memory is taken from the records, the rest is said.
    files.retain(|path| path == &a || path.ends_with("a.1"));
    let report = replay(&files, None, Mode::Sequence).make().unwrap();
    let (recorded, summary) = (&report.recorded, &report.summary);
    let elsewhere = recorded.before + recorded.missing + summary.decisions as u64;
    assert!(recorded.before > 0 && elsewhere == REQUESTS as u64);
    assert!(summary.elsewhere * 5 < summary.decisions, "{}", summary.elsewhere);
    assert!(report.notes.iter().any(|note| note.contains("before the first one")));
}

#[test]
fn lines_that_are_none_are_counted_and_named() {
    let folder = Folder::new("lines");
    let path = folder.file("records.jsonl");
    record(&path, &config("policy: llm-aware"), 4, ONE);
    let good = std::fs::read_to_string(&path).unwrap();
    let lines: Vec<&str> = good.lines().collect();
    let decision = lines.iter().position(|line| line.starts_with("{\"decision\"")).unwrap();
    let mut file = std::fs::File::create(&path).unwrap();
    // Before anything has begun, and then everything, and then what does not belong there.
    let newer = lines[decision].replacen("{\"decision\":{", "{\"decision\":{\"mood\":\"good\",", 1);
    let start = lines[0].replacen("\"format\":1", "\"format\":2", 1);
    assert!(newer != lines[decision] && start != lines[0]);
    writeln!(file, "{}", lines[decision]).unwrap();
    file.write_all(good.as_bytes()).unwrap();
    file.write_all(b"\n\xff\xfe\n[1, 2]\n{\"level\": \"info\"}\n{\"lost\":{\"requests\":3}}\n")
        .unwrap();
    writeln!(file, "{newer}\n{start}\n{}", lines[decision]).unwrap();
    file.write_all(&lines[decision].as_bytes()[..50]).unwrap();
    drop(file);
    for mode in [Mode::Sequence, Mode::Alone] {
        let report = replay(std::slice::from_ref(&path), None, mode).make().unwrap();
        let recorded = &report.recorded;
        assert_eq!((report.summary.elsewhere, recorded.lost), (0, 3));
        let after = lines.len() + 1;
        let skipped: Vec<(&str, u64, String)> = recorded
            .skipped
            .iter()
            .map(|(why, it)| {
                (why.as_str(), it.lines, it.first.split(':').nth(1).unwrap().to_owned())
            })
            .collect();
        let expected = [
            ("JSON that is no line of records", 2, after + 3),
            ("cut off", 1, after + 9),
            ("not JSON", 1, after + 2),
            ("of a run whose `start` is not before it in its file", 1, 1),
            ("with fields or values that this version does not know", 1, after + 6),
            ("written by a newer llm-ring", 2, after + 7),
        ]
        .map(|(why, lines, line)| (why, lines, line.to_string()));
        assert_eq!(skipped, expected);
        assert!(report.text().contains("Left out:"));
    }
    // A file with nothing in it is an error that says so.
    std::fs::write(&path, "what is this\n").unwrap();
    let error = replay(&[path], None, Mode::Sequence).make().unwrap_err().to_string();
    assert!(error.contains("no decision") && error.contains("records.jsonl:1"), "{error}");
}

#[test]
fn whatever_is_in_a_file_nothing_panics() {
    let folder = Folder::new("noise");
    let path = folder.file("records.jsonl");
    record(&path, &config("policy: marginal-cost"), 8, ONE);
    let good = std::fs::read(&path).unwrap();
    let end = good.iter().enumerate().filter(|(_, byte)| **byte == b'\n').nth(40).unwrap().0;
    let mut random = Random::new(9);
    for round in 0..60 {
        let mut bytes = good[..end].to_vec();
        for _ in 0..1 + round * 3 {
            let at = random.below(bytes.len());
            // Digits that become others pass the parser and reach everything behind it.
            bytes[at] = match bytes[at] {
                b'0'..=b'9' if random.below(8) > 0 => b"0123456789"[random.below(10)],
                b'0'..=b'9' => b'e',
                byte if round % 2 == 0 => byte,
                _ => random.below(256).to_le_bytes()[0],
            };
        }
        std::fs::write(&path, &bytes).unwrap();
        for mode in [Mode::Sequence, Mode::Alone] {
            let files = std::slice::from_ref(&path);
            drop(replay(files, Some("llm-aware"), mode).make().map(|report| report.text()));
        }
    }
}

#[test]
fn a_line_of_the_decision_log_can_be_decided_alone() {
    let folder = Folder::new("log");
    let path = folder.file("records.jsonl");
    record(&path, &config("policy: bounded"), 6, ONE);
    let mut log = String::new();
    for line in std::fs::read_to_string(&path).unwrap().lines() {
        let mut line: serde_json::Value = serde_json::from_str(line).unwrap();
        if let Some(decision) = line.get_mut("decision").and_then(|it| it.as_object_mut()) {
            decision.remove("asked");
            line["message"] = "decision".into();
            log.push_str(&format!("{line}\n"));
        }
    }
    std::fs::write(&path, log).unwrap();
    let files = [path];
    let alone = replay(&files, None, Mode::Alone).make().unwrap();
    assert_eq!((alone.summary.decisions, alone.summary.elsewhere), (REQUESTS, 0));
    let error = replay(&files, None, Mode::Sequence).make().unwrap_err().to_string();
    assert!(error.contains("of a decision log"), "{error}");
}

#[test]
fn parameters_come_on_top_of_what_was_recorded() {
    let recorded = config("policies: { llm-aware: { floor_tokens: 7, epsilon: 0.3 } }");
    let config = with_policy(recorded, "llm-aware{epsilon: 0.4}").unwrap();
    let policies = serde_yaml::to_value(config.policies).unwrap();
    assert_eq!(policies["llm-aware"]["floor_tokens"], 7);
    assert_eq!(policies["llm-aware"]["epsilon"], 0.4);
    for wrong in ["llm-awar", "llm-aware{epsilom: 1}", "llm-aware{"] {
        assert!(with_policy(Config::default(), wrong).is_err(), "{wrong}");
    }
}
