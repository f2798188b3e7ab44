//! The rules of the policies, and what holds for all of them.
#![allow(clippy::wildcard_enum_match_arm, reason = "a test looks for one kind")]

mod published;

use std::num::{NonZeroU64, NonZeroUsize};
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;

use super::decision::Verdict;
use super::*;
use crate::pool::{
    Conversation, Ending, Endpoint, InferenceRequest, KeySource, Load, Outcome, PromptSize,
    Release, Usage,
};
use crate::yaml;

fn endpoints(weights: &[f64]) -> Vec<Endpoint> {
    (0u16..)
        .zip(weights)
        .map(|(n, &weight)| {
            let address = format!("10.0.{}.{}:8000", n / 256, n % 256).parse().unwrap();
            Endpoint { weight, ..Endpoint::new(format!("llm-{n}"), address) }
        })
        .collect()
}

fn pool(weights: &[f64]) -> Arc<PoolSnapshot> {
    Arc::new(PoolSnapshot::new(0, endpoints(weights), 100).unwrap())
}

fn scheduler_with(
    policies: &str,
    policy: &str,
    weights: &[f64],
    admission: Admission,
) -> Arc<Scheduler> {
    let policies: Policies = yaml::parse(policies).unwrap();
    let (policy_name, policy) = policies.get(policy).unwrap();
    let settings = Settings {
        policy_name,
        policy,
        admission,
        release: Release::FirstToken,
        prices: crate::pool::Prices::default(),
        default_max_tokens: 100,
        destinations: NonZeroUsize::MIN,
        memory_entries: NonZeroUsize::new(1000).unwrap(),
        trace_sights: false,
    };
    Arc::new(Scheduler::new(settings, pool(weights)))
}

fn scheduler(policy: &str, n: usize) -> Arc<Scheduler> {
    scheduler_with("", policy, &vec![1.0; n], Admission::default())
}

fn request(conversation: &str, tokens: u64) -> InferenceRequest {
    let source = KeySource::Header("x-session-id".to_owned());
    InferenceRequest {
        conversation: Some(Conversation::named(conversation.to_owned(), source)),
        prompt: PromptSize { token_ids: tokens, ..PromptSize::default() },
        ..InferenceRequest::default()
    }
}

fn served(prompt: u64, cached: u64) -> Outcome {
    let usage =
        Usage { prompt_tokens: Some(prompt), cached_tokens: Some(cached), ..Usage::default() };
    Outcome { ending: Ending::Complete, status: Some(200), served: None, usage }
}

fn moment(seed: u64) -> Moment<'static> {
    Moment { seed, ..Moment::default() }
}

fn pick(scheduler: &Arc<Scheduler>, request: &InferenceRequest, seed: u64) -> (Decision, Booking) {
    scheduler.schedule(request, moment(seed), Detail::Full).unwrap()
}

fn total(scheduler: &Scheduler) -> Load {
    scheduler.loads().1.iter().fold(Load::default(), |a, b| Load {
        requests: a.requests + b.requests,
        tokens: a.tokens + b.tokens,
    })
}

#[track_caller]
fn example(policies: &str, policy: &str) -> Decision {
    let policies: Policies = yaml::parse(policies).unwrap();
    let (name, policy) = policies.get(policy).unwrap();
    Scenario::example().decide(name, &*policy).unwrap()
}

/// The numbers of a trace, rounded to a tenth as they are shown.
fn capacity(trace: &Trace) -> (u64, f64, f64) {
    let tenth = |x: f64| (x * 10.0).round() / 10.0;
    trace
        .steps
        .iter()
        .find_map(|step| match step {
            Step::Capacity { total, average, cap, .. } => {
                Some((*total, tenth(*average), tenth(*cap)))
            }
            _ => None,
        })
        .unwrap()
}

#[test]
fn the_worked_example_stays_at_home_since_its_long_cache_is_there() {
    let decision = example("", "llm-aware");
    assert_eq!((decision.reason, decision.target(), decision.cached), (Reason::HomeLong, 0, 820));
    let cost = decision.trace.steps.iter().find_map(|step| match step {
        Step::Cost { new_tokens, max_tokens, cost, .. } => Some((*new_tokens, *max_tokens, *cost)),
        _ => None,
    });
    assert_eq!(cost, Some((40, 48, 88)));
    assert_eq!(capacity(&decision.trace), (4288, 1429.3, 1786.7));
    let long = decision.trace.steps.iter().find_map(|step| match step {
        Step::LongApplies { cap, .. } => Some((cap * 10.0).round() / 10.0),
        _ => None,
    });
    assert_eq!(long, Some(2858.7));
}

#[test]
fn the_worked_example_overflows_under_bounded_loads_in_tokens() {
    let decision = example("bounded: { load: tokens }", "bounded");
    assert_eq!(decision.reason, Reason::Overflow);
    assert_ne!(decision.target(), 0);
    assert_eq!(capacity(&decision.trace), (5108, 1702.7, 2128.3));
    let tests: Vec<(u64, u64, Verdict)> = decision
        .trace
        .steps
        .iter()
        .filter_map(|step| match step {
            Step::Tested { load, cost, verdict, .. } => Some((*load, *cost, *verdict)),
            _ => None,
        })
        .collect();
    assert_eq!(tests, [(2400, 908, Verdict::Over), (900, 908, Verdict::Fits)]);
}

#[test]
fn each_switch_of_llm_aware_takes_its_part_away() {
    for (switches, reason) in [
        ("long_stickiness: false", Reason::Overflow),
        // Without a memory the whole prompt is new: 2400 + 908 = 3308, within the long cap of 3405.3.
        ("placement_memory: false", Reason::HomeLong),
        ("placement_memory: false, long_epsilon: 0.9", Reason::Overflow),
        ("token_load: false", Reason::HomeLong),
        ("long_threshold_tokens: 861", Reason::Overflow),
        ("long_threshold_tokens: 860", Reason::HomeLong),
    ] {
        let decision = example(&format!("llm-aware: {{ {switches} }}"), "llm-aware");
        assert_eq!(decision.reason, reason, "{switches}: {:#?}", decision.trace.steps);
    }
}

#[test]
fn a_conversation_goes_where_it_was_last_served_even_if_that_is_not_its_home() {
    let scheduler = scheduler("llm-aware", 3);
    let (first, booking) = pick(&scheduler, &request("c", 500), 0);
    assert_eq!(first.reason, Reason::Home);
    let home = first.target();
    // While home is busy, the conversation's next turn overflows; from then on it lives there.
    booking.finish(&Outcome::default(), Duration::ZERO);
    let (_, blocker) = pick(&scheduler, &request("c", 50_000), 0);
    let (moved, booking) = pick(&scheduler, &request("c", 500), 0);
    assert_eq!(moved.reason, Reason::Overflow);
    assert_ne!(moved.target(), home);
    booking.finish(&served(500, 0), Duration::ZERO);
    drop(blocker);
    let (back, _booking) = pick(&scheduler, &request("c", 600), 0);
    assert_eq!((back.reason, back.target(), back.cached), (Reason::Sticky, moved.target(), 500));
}

#[test]
fn in_a_quiet_pool_a_cache_is_not_left_for_a_few_tokens() {
    for (floor, reason) in [("0", Reason::Overflow), ("512", Reason::Home)] {
        let scenario = Scenario {
            endpoints: endpoints(&[1.0; 3])
                .into_iter()
                .zip([30, 0, 0])
                .map(|(endpoint, tokens)| (endpoint, Load { requests: 1, tokens }))
                .collect(),
            prompt_tokens: 500,
            placed: Some(("llm-0".to_owned(), 490)),
            max_tokens: 24,
            ..Scenario::example()
        };
        let policies: Policies =
            yaml::parse(&format!("llm-aware: {{ floor_tokens: {floor} }}")).unwrap();
        let (name, policy) = policies.get("llm-aware").unwrap();
        assert_eq!(scenario.decide(name, &*policy).unwrap().reason, reason, "floor {floor}");
    }
}

#[test]
fn a_request_that_is_no_turn_teaches_nothing() {
    let scheduler = scheduler("llm-aware", 3);
    let (_, booking) = pick(&scheduler, &request("c", 500), 0);
    booking.finish(&served(500, 0), Duration::ZERO);
    let listing = InferenceRequest { max_tokens: Some(0), ..request("c", 0) };
    let unread = InferenceRequest {
        prompt: PromptSize { text_bytes: 30, ..PromptSize::default() },
        ..request("c", 0)
    };
    for request in [listing, unread] {
        let (_, booking) = pick(&scheduler, &request, 0);
        booking.finish(&Outcome { usage: Usage::default(), ..served(0, 0) }, Duration::ZERO);
        let (turn, booking) = pick(&scheduler, &self::request("c", 600), 0);
        assert_eq!(turn.cached, 500);
        drop(booking);
    }
}

#[test]
fn claims_beyond_any_context_window_do_no_harm() {
    let scheduler = scheduler("llm-aware", 2);
    for _ in 0..3 {
        let request = InferenceRequest { max_tokens: Some(u64::MAX), ..request("c", u64::MAX) };
        let (_, mut booking) = pick(&scheduler, &request, 0);
        booking.first_token(Duration::ZERO);
        let usage = Usage {
            prompt_tokens: Some(u64::MAX),
            completion_tokens: Some(u64::MAX),
            ..Usage::default()
        };
        booking.finish(&Outcome { usage, ..served(0, 0) }, Duration::ZERO);
        assert_eq!(total(&scheduler), Load::default());
    }
}

#[test]
fn a_failed_turn_teaches_nothing() {
    let scheduler = scheduler("llm-aware", 3);
    for outcome in [
        Outcome { status: Some(500), ending: Ending::Complete, ..Outcome::default() },
        Outcome::default(),
    ] {
        let (_, booking) = pick(&scheduler, &request("c", 500), 0);
        booking.finish(&outcome, Duration::ZERO);
        assert_eq!(scheduler.remembered(), 0);
    }
}

#[test]
fn memory_follows_the_endpoint_that_envoy_says_it_used() {
    let scheduler = scheduler("llm-aware", 3);
    let (first, booking) = pick(&scheduler, &request("c", 500), 0);
    let other = (first.target() + 1) % 3;
    let served_by = first.pool.endpoint(other).address;
    booking.finish(&Outcome { served: Some(served_by), ..served(500, 0) }, Duration::ZERO);
    assert_eq!(pick(&scheduler, &request("c", 600), 0).0.target(), other);
}

#[test]
fn previous_response_id_leads_back_to_its_conversation() {
    let scheduler = scheduler("llm-aware", 16);
    let (first, booking) = pick(&scheduler, &request("c", 500), 0);
    let mut outcome = served(500, 0);
    outcome.usage.response_id = Some("resp_1".to_owned());
    booking.finish(&outcome, Duration::ZERO);
    for turn in 1..5 {
        let request = InferenceRequest {
            conversation: Some(Conversation::named(
                format!("resp_{turn}"),
                KeySource::PreviousResponse,
            )),
            ..request("", 500)
        };
        let (next, booking) = pick(&scheduler, &request, 0);
        assert_eq!(next.target(), first.target());
        outcome.usage.response_id = Some(format!("resp_{}", turn + 1));
        booking.finish(&outcome, Duration::ZERO);
    }
}

#[test]
fn only_endpoints_that_may_be_chosen_count() {
    // c is idle but outside the subset: the averages must not include it.
    let scheduler =
        scheduler_with("bounded: { load: requests }", "bounded", &[1.0; 3], Admission::default());
    let allowed = |slots: [usize; 2]| {
        let subset = slots.map(|slot| scheduler.pool().endpoints()[slot].address).to_vec();
        InferenceRequest { subset: Some(subset), ..request("k", 1) }
    };
    let bookings: Vec<Booking> = (0..10).map(|_| pick(&scheduler, &allowed([0, 1]), 0).1).collect();
    assert_eq!(scheduler.loads().1.iter().map(|load| load.requests).collect::<Vec<_>>()[2], 0);
    let (decision, _booking) = pick(&scheduler, &allowed([0, 1]), 0);
    assert_eq!(capacity(&decision.trace), (11, 5.5, 7.0));
    drop(bookings);
}

#[test]
fn a_subset_that_is_empty_or_unmatched_is_refused() {
    let scheduler = scheduler("round-robin", 2);
    let with = |subset| InferenceRequest { subset: Some(subset), ..InferenceRequest::default() };
    let refused =
        |subset| scheduler.schedule(&with(subset), moment(0), Detail::Normal).unwrap_err();
    assert_eq!(refused(vec![]), Refusal::SubsetEmpty);
    // The port counts: it is another endpoint.
    assert_eq!(refused(vec!["10.0.0.0:9000".parse().unwrap()]), Refusal::SubsetUnmatched(1));
    let only: std::net::SocketAddr = "10.0.0.1:8000".parse().unwrap();
    for _ in 0..4 {
        assert_eq!(pick(&scheduler, &with(vec![only]), 0).0.target(), 1);
    }
}

#[test]
fn an_empty_pool_is_refused() {
    let scheduler = scheduler("llm-aware", 0);
    assert_eq!(
        scheduler.schedule(&request("c", 1), moment(0), Detail::Normal).unwrap_err(),
        Refusal::PoolEmpty
    );
}

#[test]
fn a_full_pool_sheds_and_takes_requests_again_when_there_is_room() {
    let retry_after = Duration::from_secs(3);
    let limited = Admission { requests: NonZeroU64::new(2), retry_after, ..Admission::default() };
    let scheduler = scheduler_with("", "consistent", &[1.0, 2.0], limited);
    let mut bookings: Vec<Booking> =
        (0..6).map(|_| pick(&scheduler, &request("hot", 1), 0).1).collect();
    assert_eq!(scheduler.loads().1.iter().map(|load| load.requests).collect::<Vec<_>>(), [2, 4]);
    let refusal = scheduler.schedule(&request("hot", 1), moment(0), Detail::Normal).unwrap_err();
    assert_eq!(refusal, Refusal::Saturated { limit: 2, retry_after });
    bookings.pop();
    assert!(scheduler.schedule(&request("hot", 1), moment(0), Detail::Normal).is_ok());
}

/// A hold before one endpoint, and a first request that keeps it busy for seconds.
fn held_up(most: usize) -> (Arc<Scheduler>, Hold<u32>, Booking) {
    let scheduler = scheduler("marginal-cost", 1);
    let mut hold = Hold::new(HoldSettings {
        backlog: Duration::from_millis(300),
        longest: Duration::from_secs(2),
        most,
        retry_after: Duration::from_secs(1),
    });
    let first = hold.offer(&scheduler, &request("a", 50_000), || 0, at(0.0, 1), Detail::Full);
    let (_, booking) = first.unwrap().unwrap();
    (scheduler, hold, booking)
}

fn released(scheduler: &Arc<Scheduler>, hold: &mut Hold<u32>, now: f64) -> Option<(u32, Decided)> {
    let time = Duration::from_secs_f64(now);
    hold.forget(|owner| *owner == 13);
    hold.release(scheduler, time, |_| at(now, 1), Detail::Full)
}

#[test]
fn requests_wait_for_an_endpoint_to_have_less_to_do_first_come_first_served() {
    let (scheduler, mut hold, mut booking) = held_up(9);
    for owner in [1, 13, 2] {
        let asked = request(&format!("c{owner}"), 50_000);
        assert!(hold.offer(&scheduler, &asked, || owner, at(0.5, 1), Detail::Full).is_none());
    }
    assert!(released(&scheduler, &mut hold, 1.0).is_none());
    assert_eq!(total(&scheduler).requests, 1, "what waits is not booked");
    booking.first_token(Duration::from_secs_f64(1.5));
    let (owner, decided) = released(&scheduler, &mut hold, 1.5).unwrap();
    let (decision, second) = decided.unwrap();
    assert_eq!((owner, decision.trace.held), (1, Duration::from_secs(1)));
    // It keeps the endpoint busy in turn; who has gone is not asked; and nobody waits for ever.
    assert!(released(&scheduler, &mut hold, 2.0).is_none());
    let (owner, decided) = released(&scheduler, &mut hold, 2.5).unwrap();
    assert!(owner == 2 && decided.is_ok() && hold.is_empty());
    drop((booking, second, decided));
    assert_eq!(total(&scheduler), Load::default());
}

#[test]
fn an_open_hold_lets_all_go() {
    let (scheduler, mut hold, _booking) = held_up(9);
    assert!(hold.offer(&scheduler, &request("c", 10), || 1, at(0.5, 1), Detail::Full).is_none());
    hold.open();
    assert!(hold.offer(&scheduler, &request("d", 10), || 2, at(0.5, 1), Detail::Full).is_some());
    assert_eq!(released(&scheduler, &mut hold, 0.6).map(|(owner, _)| owner), Some(1));
}

#[test]
fn more_than_may_wait_are_turned_away() {
    let (scheduler, mut hold, _booking) = held_up(1);
    let asked = request("c", 10);
    assert!(hold.offer(&scheduler, &asked, || 1, at(0.5, 1), Detail::Full).is_none());
    let refused = hold.offer(&scheduler, &asked, || 2, at(0.5, 1), Detail::Full).unwrap();
    let retry_after = Duration::from_secs(1);
    assert_eq!(refused.unwrap_err(), Refusal::QueueFull { most: 1, retry_after });
}

#[test]
fn requests_of_negative_priority_are_shed_first() {
    let (sheddable, retry_after) = (NonZeroU64::new(1), Duration::from_secs(1));
    let limited = Admission { sheddable, retry_after, requests: NonZeroU64::new(2) };
    let scheduler = scheduler_with("", "consistent", &[1.0], limited);
    scheduler.set_objectives([("batch".to_owned(), -1), ("chat".to_owned(), 5)].into());
    let of = |objective: &str| {
        let objective = Some(objective.to_owned());
        let request = InferenceRequest { objective, ..request("one", 1) };
        scheduler.schedule(&request, moment(0), Detail::Normal)
    };
    let (decision, first) = of("batch").unwrap();
    assert_eq!(decision.trace.priority, -1);
    assert_eq!(of("batch").unwrap_err(), Refusal::Saturated { limit: 1, retry_after });
    let (decision, second) = of("chat").unwrap();
    assert_eq!(decision.trace.priority, 5);
    drop(first);
    assert!(of("batch").is_err(), "it is still busy with what matters more");
    // An objective that nobody has made is of priority 0.
    let third = of("unknown").unwrap();
    assert_eq!(third.0.trace.priority, 0);
    drop((second, third));
    assert!(of("batch").is_ok());
}

fn at(seconds: f64, seed: u64) -> Moment<'static> {
    Moment { now: Duration::from_secs_f64(seconds), seed, ..Moment::default() }
}

fn generated(tokens: u64) -> Outcome {
    let usage = Usage { completion_tokens: Some(tokens), ..Usage::default() };
    Outcome { ending: Ending::Complete, status: Some(200), served: None, usage }
}

/// The terms of the chosen endpoint.
fn terms(decision: &Decision) -> Terms {
    match decision.trace.steps[0] {
        Step::Costs { endpoint, terms, .. } => {
            assert_eq!(endpoint, decision.targets[0]);
            terms
        }
        ref step => panic!("{step:?}"),
    }
}

#[test]
fn the_cost_of_an_idle_endpoint_is_the_prompt_and_a_cached_one_costs_less() {
    let scheduler = scheduler("marginal-cost", 3);
    let (decision, booking) =
        scheduler.schedule(&request("a", 4000), at(0.0, 1), Detail::Full).unwrap();
    let first = terms(&decision);
    assert!(first.prompt > 0.3 && first.queue == 0.0 && first.others == 0.0, "{first:?}");
    let home = decision.targets[0];
    let mut booking = booking;
    booking.first_token(Duration::from_secs_f64(0.31));
    booking.finish(&generated(100), Duration::from_secs(2));
    // It comes back where it is cached, and is cheaper for it.
    let (decision, _) = scheduler.schedule(&request("a", 4200), at(3.0, 2), Detail::Full).unwrap();
    assert_eq!((decision.targets[0], decision.cached), (home, 4100));
    assert!(terms(&decision).prompt < first.prompt / 5.0);
}

#[test]
fn what_waits_counts_and_what_waits_of_the_same_conversation_is_as_good_as_cached() {
    let scheduler = scheduler("marginal-cost", 2);
    let (first, _held) = scheduler.schedule(&request("a", 8000), at(0.0, 1), Detail::Full).unwrap();
    let busy = first.targets[0];
    // Another conversation goes elsewhere, however they lie on the ring.
    for name in ["b", "c", "d", "e"] {
        let (decision, _) =
            scheduler.schedule(&request(name, 8000), at(0.1, 1), Detail::Full).unwrap();
        assert_ne!(decision.targets[0], busy, "{name}");
    }
    // The same one waits behind itself, for that is less than to compute it twice.
    let (decision, _) = scheduler.schedule(&request("a", 8100), at(0.1, 1), Detail::Full).unwrap();
    assert_eq!((decision.targets[0], decision.cached), (busy, 8000));
    assert!(terms(&decision).queue > 0.3);
}

#[test]
fn a_slow_endpoint_is_learned_to_be_slow() {
    let scheduler = scheduler("marginal-cost", 2);
    let mut counts = [0; 2];
    for round in 0..200u32 {
        let now = f64::from(round) * 10.0;
        let name = format!("c{round}");
        let (decision, mut booking) =
            scheduler.schedule(&request(&name, 4000), at(now, 1), Detail::Full).unwrap();
        let slot = decision.targets[0] as usize;
        counts[slot] += 1;
        let took = if slot == 0 { 2.0 } else { 0.5 };
        booking.first_token(Duration::from_secs_f64(now + took));
        booking.finish(&generated(50), Duration::from_secs_f64(now + took + 1.0));
    }
    assert!(counts[1] > 3 * counts[0], "{counts:?}");
}

#[test]
fn pickers_that_see_the_same_decide_the_same_whatever_they_draw() {
    let target = |seed| {
        let scheduler = scheduler("marginal-cost", 8);
        let mut targets = Vec::new();
        for name in 0..20 {
            let request = request(&name.to_string(), 100);
            let (decision, booking) =
                scheduler.schedule(&request, at(0.0, seed), Detail::Full).unwrap();
            targets.push(decision.targets[0]);
            drop(booking);
        }
        targets
    };
    let targets = target(1);
    assert_eq!(targets, target(2));
    assert!(targets.iter().collect::<std::collections::BTreeSet<_>>().len() > 3, "{targets:?}");
}

#[test]
fn a_request_without_a_conversation_goes_by_load() {
    for policy in ["mod-n", "consistent", "rendezvous", "bounded", "llm-aware"] {
        let scheduler = scheduler(policy, 4);
        let nobody = InferenceRequest::default();
        let bookings: Vec<Booking> = (0..40)
            .map(|seed| {
                let (decision, booking) = pick(&scheduler, &nobody, seed);
                assert_eq!(decision.reason, Reason::NoConversation, "{policy}");
                booking
            })
            .collect();
        assert!(scheduler.loads().1.iter().all(|load| load.requests == 10), "{policy}");
        drop(bookings);
    }
}

#[test]
fn a_burst_on_equal_endpoints_is_spread() {
    for policy in ["least-loaded", "round-robin"] {
        let scheduler = scheduler(policy, 8);
        let bookings: Vec<Booking> =
            (0..200).map(|i| pick(&scheduler, &request("x", 10), i).1).collect();
        assert!(scheduler.loads().1.iter().all(|load| load.requests == 25), "{policy}");
        drop(bookings);
    }
}

#[test]
fn ties_are_broken_by_chance_and_not_by_position() {
    let scheduler = scheduler("least-loaded", 8);
    let firsts: std::collections::BTreeSet<u32> =
        (0..200).map(|seed| pick(&scheduler, &request("x", 10), seed).0.target()).collect();
    assert_eq!(firsts.len(), 8);
}

#[test]
fn a_hot_key_in_a_large_quiet_pool_spills_over_its_neighbours() {
    // 300 endpoints and 25 requests of one key: a naive cap is below 1 and would send all of them home.
    let scheduler = scheduler("bounded", 300);
    let bookings: Vec<Booking> =
        (0..25).map(|_| pick(&scheduler, &request("hot", 10), 0).1).collect();
    assert!(scheduler.loads().1.iter().all(|load| load.requests <= 1));
    drop(bookings);
}

#[test]
fn weights_share_requests_out() {
    for policy in ["bounded", "least-loaded"] {
        let scheduler = scheduler_with("", policy, &[1.0, 3.0], Admission::default());
        let bookings: Vec<Booking> =
            (0..400).map(|i| pick(&scheduler, &request(&format!("c{i}"), 10), i).1).collect();
        let heavy = scheduler.loads().1[1].requests;
        assert!(
            (270..=330).contains(&heavy),
            "{policy}: {heavy} of 400 on the endpoint that weighs 3 of 4"
        );
        drop(bookings);
    }
}

#[test]
fn fallbacks_follow_the_pick_clockwise() {
    let policies = Policies::default();
    let (policy_name, policy) = policies.get("consistent").unwrap();
    let settings = Settings {
        policy_name,
        policy,
        admission: Admission::default(),
        release: Release::End,
        prices: crate::pool::Prices::default(),
        default_max_tokens: 1,
        destinations: NonZeroUsize::new(3).unwrap(),
        memory_entries: NonZeroUsize::MIN,
        trace_sights: false,
    };
    let scheduler = Arc::new(Scheduler::new(settings, pool(&[1.0; 5])));
    let (decision, _booking) = pick(&scheduler, &request("c", 1), 0);
    let key = crate::index::hash::hash(b"c");
    assert_eq!(decision.targets, decision.pool.ring().walk(key).take(3).collect::<Vec<_>>());
}

#[test]
fn the_prompt_is_released_at_the_first_token_and_the_rest_at_the_end() {
    let scheduler = scheduler("llm-aware", 1);
    let (_, mut booking) = pick(&scheduler, &request("c", 500), 0);
    assert_eq!(total(&scheduler), Load { requests: 1, tokens: 600 });
    booking.first_token(Duration::ZERO);
    booking.first_token(Duration::ZERO);
    assert_eq!(total(&scheduler), Load { requests: 1, tokens: 100 });
    booking.finish(&served(500, 0), Duration::ZERO);
    assert_eq!(total(&scheduler), Load::default());
}

#[test]
fn the_estimate_follows_what_the_engine_counted() {
    let scheduler = scheduler("llm-aware", 1);
    let text = PromptSize { text_bytes: 4000, ..PromptSize::default() };
    let request = InferenceRequest { prompt: text, model: Some("m".to_owned()), ..request("c", 0) };
    let (before, booking) = pick(&scheduler, &request, 0);
    booking.finish(&served(2000, 0), Duration::ZERO);
    let (after, _booking) = pick(&scheduler, &request, 0);
    assert_eq!((before.trace.prompt_tokens, after.trace.prompt_tokens), (1000, 2000));
}

#[test]
fn every_policy_file_is_registered() {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/src/scheduling/policy");
    let mut files: Vec<String> = std::fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name != "mod.rs")
        .map(|name| name.trim_end_matches(".rs").replace('_', "-"))
        .collect();
    let mut names: Vec<&str> = POLICIES.iter().map(|&(name, _)| name).collect();
    files.sort_unstable();
    names.sort_unstable();
    assert_eq!(files, names, "each file in policy/ has one line in registry.rs");
}

fn policy_name() -> impl Strategy<Value = &'static str> {
    prop::sample::select(POLICIES.iter().map(|&(name, _)| name).collect::<Vec<_>>())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn load_returns_to_zero_for_any_sequence_of_picks_and_endings(
        policy in policy_name(),
        acts in prop::collection::vec((0u8..4, 0u16..20, 0u64..3000, any::<u64>()), 1..60),
        sizes in prop::collection::vec(1usize..6, 60),
    ) {
        let scheduler = scheduler(policy, 3);
        let mut open: Vec<Booking> = Vec::new();
        for (i, (act, conversation, tokens, seed)) in acts.into_iter().enumerate() {
            match act {
                0 | 1 => open.push(pick(&scheduler, &request(&format!("c{conversation}"), tokens), seed).1),
                2 if !open.is_empty() => {
                    let mut booking = open.swap_remove(usize::from(conversation) % open.len());
                    booking.first_token(Duration::ZERO);
                    if seed % 2 == 0 { booking.finish(&served(tokens, tokens / 2), Duration::ZERO) } else { drop(booking) }
                }
                3 => scheduler.adopt(pool(&vec![1.0; sizes[i]])),
                _ => {}
            }
        }
        drop(open);
        prop_assert_eq!(total(&scheduler), Load::default());
    }

    #[test]
    fn the_bound_holds_for_any_sequence_of_picks_and_endings(
        unit in prop::sample::select(vec!["requests", "tokens"]),
        weights in prop::collection::vec(prop::sample::select(vec![0.5, 1.0, 2.0]), 1..8),
        acts in prop::collection::vec((any::<bool>(), 0u16..6, 1u64..3000), 1..80),
    ) {
        let scheduler = scheduler_with(&format!("bounded: {{ load: {unit} }}"), "bounded", &weights, Admission::default());
        let in_requests = unit == "requests";
        let of = |load: Load| if in_requests { load.requests } else { load.tokens };
        let mut open: Vec<Booking> = Vec::new();
        for (end, conversation, tokens) in acts {
            if end && !open.is_empty() {
                drop(open.swap_remove(usize::from(conversation) % open.len()));
                continue;
            }
            let before = scheduler.loads().1;
            let (decision, booking) = pick(&scheduler, &request(&format!("c{conversation}"), tokens), 0);
            open.push(booking);
            let slot = decision.target() as usize;
            let after = scheduler.loads().1;
            let sum: u64 = after.iter().map(|&load| of(load)).sum();
            let cap = 1.25 * sum as f64 * weights[slot] / weights.iter().sum::<f64>();
            let cap = if in_requests { cap.ceil() } else { cap };
            let within = of(after[slot]) as f64 <= cap + 1e-6 || of(before[slot]) == 0;
            let fallback = decision.reason == Reason::FallbackLeastLoaded;
            prop_assert!(within || fallback, "{:?} {:?} {}", decision.reason, after, cap);
            if fallback {
                let relative = |i: usize| of(before[i]) as f64 / weights[i];
                prop_assert!((0..weights.len()).all(|i| relative(slot) <= relative(i)));
            }
        }
    }

    #[test]
    fn equal_input_gives_an_equal_decision_in_any_order_of_the_endpoints(
        policy in policy_name(),
        loads in prop::collection::vec(0u64..5000, 1..9),
        tokens in 1u64..4000,
        cached in prop::option::of(0u64..4000),
        seed in any::<u64>(),
        turn in 0usize..9,
    ) {
        let policies = Policies::default();
        let (name, policy) = policies.get(policy).unwrap();
        let endpoints: Vec<(Endpoint, Load)> = endpoints(&vec![1.0; loads.len()]).into_iter().zip(&loads)
            .map(|(endpoint, &tokens)| (endpoint, Load { requests: u64::from(tokens > 0), tokens })).collect();
        let mut scenario = Scenario {
            endpoints, prompt_tokens: tokens, seed, sequence: seed % 7,
            placed: cached.map(|cached| (format!("llm-{}", turn % loads.len()), cached)),
            ..Scenario::example()
        };
        let first = scenario.decide(name, &*policy).unwrap();
        prop_assert!((first.target() as usize) < loads.len());
        prop_assert_eq!(&scenario.decide(name, &*policy).unwrap().trace, &first.trace);
        let turn = turn % scenario.endpoints.len();
        scenario.endpoints.rotate_left(turn);
        let rotated = scenario.decide(name, &*policy).unwrap();
        prop_assert_eq!(rotated.trace, first.trace);
        prop_assert_eq!(rotated.targets, first.targets);
    }
}

#[test]
fn evidence_of_another_version_of_the_pool_is_none_and_a_guess_is_no_more_than_memory() {
    let scheduler = scheduler("kv-aware", 3);
    let prompt = InferenceRequest {
        prompt: PromptSize { token_ids: 8000, ..PromptSize::default() },
        ..InferenceRequest::default()
    };
    let some = Guess { held: 0.9, coming: 0.9 };
    let guessed = [Guess::default(), Guess::default(), some];
    let about =
        |version, cached| Evidence { version, cached, guessed: &guessed, ..Evidence::default() };
    let decide = |evidence, seed| {
        let moment = Moment { evidence, ..moment(seed) };
        let (decision, booking) = scheduler.schedule(&prompt, moment, Detail::Full).unwrap();
        drop(booking);
        (decision.target(), decision.cached)
    };
    // Of the pool in use: by version, or without one.
    for (version, seed) in [(Some(0), 1), (None, 2), (Some(0), 3)] {
        assert_eq!(decide(about(version, &[]), seed), (2, 7200));
    }
    assert!((0..8).all(|seed| decide(about(Some(7), &[]), seed).1 == 0));
    // What an engine says goes before every guess about it.
    let cached = [None, Some(7600), Some(0)];
    assert_eq!(decide(about(Some(0), &cached), 4), (1, 7600));
}
