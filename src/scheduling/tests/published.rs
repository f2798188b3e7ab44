//! The rules of others, by examples that can be worked out by hand.

use super::*;
use crate::pool::{Said, Sight};
use crate::scheduling::decision::Gate;

/// One endpoint of an example.
#[derive(Debug, Clone, Copy, Default)]
struct At {
    requests: u64,
    held: f64,
    uncached: f64,
    said: Said,
}

fn held(requests: u64, held: f64) -> At {
    At { requests, held, ..At::default() }
}

fn scenario(prompt_tokens: u64, ats: &[At]) -> Scenario {
    let endpoints = endpoints(&vec![1.0; ats.len()]);
    let sights = endpoints.iter().zip(ats).map(|(endpoint, at)| {
        let sight = Sight {
            held: at.held,
            cached: at.held,
            uncached: at.uncached,
            said: at.said,
            ..Sight::default()
        };
        (endpoint.name.clone(), sight)
    });
    Scenario {
        sights: sights.collect(),
        endpoints: endpoints
            .into_iter()
            .zip(ats)
            .map(|(endpoint, at)| (endpoint, Load { requests: at.requests, tokens: 0 }))
            .collect(),
        prompt_tokens,
        placed: None,
        ..Scenario::example()
    }
}

#[track_caller]
fn decide(policy: &str, parameters: &str, scenario: &Scenario) -> Decision {
    let policies: Policies = yaml::parse(&format!("{policy}: {parameters}")).unwrap();
    let (name, policy) = policies.get(policy).unwrap();
    scenario.decide(name, &*policy).unwrap()
}

/// The scores in a trace, by endpoint.
fn scores(decision: &Decision) -> Vec<(u32, f64)> {
    let mut scores: Vec<(u32, f64)> = decision
        .trace
        .steps
        .iter()
        .filter_map(|step| match step {
            Step::Scores { endpoint, parts, .. } => Some((*endpoint, Score::total(parts))),
            _ => None,
        })
        .collect();
    scores.sort_by_key(|&(endpoint, _)| endpoint);
    scores
}

#[track_caller]
fn check_load_aware(beta: f64, prompt: u64, ats: &[At], target: u32, expected: &[f64]) {
    let decision = decide("load-aware", &format!("{{ beta: {beta} }}"), &scenario(prompt, ats));
    assert_eq!(decision.target(), target, "{:?}", decision.trace.steps);
    let scores = scores(&decision);
    for (&(_, score), expected) in scores.iter().zip(expected) {
        assert!((score - expected).abs() < 1e-9, "{scores:?} and not {expected:?}");
    }
    assert_eq!(scores.len(), expected.len());
}

#[test]
fn load_aware_weighs_the_cached_share_against_the_excess_of_requests() {
    // Equal loads: the warmest.
    check_load_aware(1.0, 1000, &[held(3, 200.0), held(3, 900.0)], 1, &[0.2, 0.9]);
    // 12 and 0 requests are +1 and -1 of the mean of 6.
    let busy = [held(12, 1000.0), held(0, 0.0)];
    check_load_aware(1.0, 1000, &busy, 1, &[0.0, 1.0]);
    check_load_aware(0.01, 1000, &busy, 0, &[0.99, 0.01]);
    check_load_aware(0.0, 1000, &busy, 0, &[1.0, 0.0]);
    // As many times as many requests are the same.
    check_load_aware(1.0, 1000, &[held(4, 500.0), held(1, 0.0)], 1, &[-0.1, 0.6]);
    check_load_aware(1.0, 1000, &[held(400, 500.0), held(100, 0.0)], 1, &[-0.1, 0.6]);
    // Eight requests on one of four are three means too many.
    let fleet = [held(8, 1000.0), held(0, 0.0), held(0, 1.0)];
    let four = [fleet.as_slice(), &[held(0, 0.0)]].concat();
    check_load_aware(0.1, 1000, &four, 0, &[0.7, 0.1, 0.101]);
    check_load_aware(1.0, 1000, &four, 2, &[1.0, 1.001, 1.0]);
    // A mean below 1 counts as 1: one request on one of four is .75 too many, and not 3.
    let idle = [held(1, 1000.0), held(0, 0.0), held(0, 0.0), held(0, 0.0)];
    check_load_aware(0.5, 1000, &idle, 0, &[0.625, 0.125, 0.125]);
    // No more than the prompt can be cached.
    check_load_aware(1.0, 100, &[held(1, 100.0), held(1, 5000.0)], 0, &[1.0, 1.0]);
    check_load_aware(1.0, 100, &[held(7, 40.0)], 0, &[0.4]);
    // A break-even for two servers: .5 over the mean at beta 1 is worth a whole prompt against none.
    check_load_aware(1.0, 1000, &[held(3, 1000.0), held(1, 0.0)], 0, &[0.5, 0.5]);
}

#[test]
fn ties_of_load_aware_go_to_the_first_address_as_text() {
    let mut scenario = scenario(100, &[held(1, 50.0); 3]);
    for (i, address) in ["10.0.0.9:8000", "10.0.0.10:8000", "10.0.0.11:8000"].iter().enumerate() {
        scenario.endpoints[i].0.address = address.parse().unwrap();
    }
    assert_eq!(decide("load-aware", "{}", &scenario).target(), 1, "10 is before 9 as text");
}

#[test]
fn what_nobody_has_goes_where_the_fewest_requests_are_or_to_its_home() {
    let scenario = scenario(1000, &[held(5, 0.0), held(3, 0.0), held(4, 0.0)]);
    for policy in ["load-aware", "kv-aware"] {
        let decision = decide(policy, "{}", &scenario);
        assert_eq!((decision.target(), decision.reason), (1, Reason::Cold), "{policy}");
        // The example's conversation lives at llm-0.
        let decision = decide(policy, "{ session: true }", &scenario);
        assert_eq!((decision.target(), decision.reason), (0, Reason::Home), "{policy}");
        let alone = Scenario { conversation: None, ..scenario.clone() };
        let decision = decide(policy, "{ session: true }", &alone);
        assert_eq!((decision.target(), decision.reason), (1, Reason::Cold), "{policy}");
    }
}

#[test]
fn kv_aware_follows_the_cache_if_all_but_a_threshold_is_there() {
    for (prompt, ats, target, reason) in [
        (5000, [held(9, 3000.0), held(0, 0.0)], 0, Reason::Cached),
        (5000, [held(9, 2999.0), held(0, 0.0)], 1, Reason::LeastLoaded),
        // Of a short prompt anything is enough, and nothing is not.
        (1500, [held(9, 1.0), held(0, 0.0)], 0, Reason::Cached),
        (1500, [held(9, 0.0), held(0, 0.0)], 1, Reason::Cold),
        (5000, [held(0, 3500.0), held(9, 4000.0)], 1, Reason::Cached),
        (5000, [held(9, 4000.0), held(0, 4000.0)], 0, Reason::Cached),
    ] {
        let decision = decide("kv-aware", "{}", &scenario(prompt, &ats));
        assert_eq!((decision.target(), decision.reason), (target, reason), "{prompt}");
        assert_eq!(decision.cached as f64, ats[target as usize].held);
    }
    let strict = scenario(5000, &[held(9, 4999.0), held(0, 0.0)]);
    assert_eq!(decide("kv-aware", "{ threshold: 0 }", &strict).target(), 1);
    assert_eq!(decide("kv-aware", "{ threshold: 1 }", &strict).target(), 0);
}

#[test]
fn prefix_aware_draws_among_the_holders_of_the_longest_prefix() {
    let drawn = |ats: &[At]| {
        let scenario = scenario(1000, ats);
        let of = |seed| {
            let scenario = Scenario { seed, ..scenario.clone() };
            decide("prefix-aware", "{}", &scenario).target()
        };
        (0..60).map(of).collect::<std::collections::BTreeSet<u32>>()
    };
    // 650 and 660 tokens are 20 whole chunks of 32; the load does not matter.
    let ats = [held(99, 650.0), held(0, 100.0), held(0, 660.0), held(0, 630.0)];
    assert_eq!(drawn(&ats), [0, 2].into());
    assert_eq!(drawn(&[held(5, 20.0), held(0, 0.0)]), [0, 1].into());
    let cold = decide("prefix-aware", "{}", &scenario(1000, &[held(5, 20.0), held(0, 0.0)]));
    assert_eq!(cold.reason, Reason::Cold);
}

fn said(waiting: f64, memory: f64, cached: f64) -> At {
    let said = Said { waiting: Some(waiting), memory: Some(memory), ..Said::default() };
    At { held: cached, said: Said { cached: Some(cached), ..said }, ..At::default() }
}

#[test]
fn the_default_profile_is_queue_2_memory_2_prefix_3() {
    let ats = [said(0.0, 0.5, 1000.0), said(2.0, 0.2, 0.0), said(4.0, 0.0, 500.0)];
    let decision = decide("weighted", "{}", &scenario(1000, &ats));
    assert_eq!((decision.target(), decision.reason), (0, Reason::BestScore));
    assert_eq!(decision.cached, 1000);
    let expected = [2.0 + 1.0 + 3.0, 1.0 + 1.6, 2.0 + 1.5];
    for ((_, score), expected) in scores(&decision).iter().zip(expected) {
        assert!((score - expected).abs() < 1e-9, "{score} and not {expected}");
    }
    // By cache events alone, one that says nothing of its cache has nothing, whatever is remembered.
    let quiet = At { held: 1000.0, ..At::default() };
    let scenario = scenario(1000, &[quiet, said(0.0, 0.9, 900.0)]);
    assert_eq!(decide("weighted", "{}", &scenario).target(), 0);
    assert_eq!(decide("weighted", "{ profile: precise }", &scenario).target(), 1);
}

#[test]
fn the_guide_keeps_to_the_cache_and_takes_the_fewest_uncached_tokens() {
    let at = |held, uncached| At { held, uncached, ..At::default() };
    let guide = |ats: &[At]| decide("weighted", "{ profile: guide }", &scenario(1000, ats));
    let gate = |decision: &Decision| {
        let gate = |step: &Step| match step {
            Step::Affinity { gate, .. } => Some(*gate),
            _ => None,
        };
        decision.trace.steps.iter().find_map(gate)
    };
    // Both have enough of it: 5000 + 100 uncached tokens against 4800 + 200.
    let decision = guide(&[at(900.0, 5000.0), at(800.0, 4800.0), at(0.0, 0.0)]);
    assert_eq!((decision.target(), gate(&decision)), (1, Some(Gate::Closed)));
    // Nobody has it: 0 + 1000 against 500 + 300.
    let decision = guide(&[at(0.0, 0.0), at(700.0, 500.0)]);
    assert_eq!((decision.target(), gate(&decision)), (1, Some(Gate::NobodyHasIt)));
    // 19 s of work at 15,928 tokens a second.
    let decision = guide(&[at(1000.0, 302_632.0), at(0.0, 0.0)]);
    assert_eq!((decision.target(), gate(&decision)), (1, Some(Gate::Open)));
}

#[test]
fn lists_take_the_place_of_the_profile_s_and_wrong_names_are_explained() {
    let policies = |text: &str| yaml::parse::<Policies>(&format!("weighted: {text}"));
    let custom =
        "{ profile: guide, scorers: [{type: queue-scorer, weight: 5}], picker: random-picker }";
    let shown = serde_yaml::to_value(policies(custom).unwrap()).unwrap();
    let shown = &shown["weighted"];
    assert_eq!(shown["filters"][0]["type"], "prefix-cache-affinity-filter");
    assert_eq!(shown["filters"][0]["affinity_threshold"], 0.8);
    assert_eq!(shown["scorers"].as_sequence().unwrap().len(), 1);
    assert_eq!(shown["scorers"][0]["weight"], 5.0);
    assert_eq!(shown["picker"], "random-picker");
    // What is shown can be read again.
    let text = serde_yaml::to_string(shown).unwrap().replace('\n', "\n  ");
    let again = yaml::parse::<Policies>(&format!("weighted:\n  {text}")).unwrap();
    assert_eq!(again.weighted, policies(custom).unwrap().weighted);
    for (text, parts) in [
        ("{ profile: gide }", &["`gide`", "did you mean `guide`"][..]),
        ("{ scorers: [{type: queue-scorr}] }", &["queue-scorr", "did you mean `queue-scorer`"]),
        ("{ picker: max-score }", &["max-score", "did you mean `max-score-picker`"]),
        (
            "{ filters: [{type: prefix-affinity-filter}] }",
            &["did you mean `prefix-cache-affinity-filter`"],
        ),
        ("{ scorers: [{type: queue-scorer, wieght: 2}] }", &["`wieght`", "did you mean `weight`"]),
        ("{ scorers: [{type: queue-scorer, weight: -1}] }", &["0 or more", "-1"]),
        (
            "{ filters: [{type: prefix-cache-affinity-filter, affinity_threshold: 80}] }",
            &["0 to 1"],
        ),
        ("{ scorer: [] }", &["`scorer`", "did you mean `scorers`"]),
    ] {
        let error = policies(text).unwrap_err();
        for part in parts {
            assert!(error.contains(part), "{text} gives {error:?}, which lacks {part:?}");
        }
    }
}

/// Schedules one request with what engines say of their caches.
fn scheduled(
    scheduler: &Arc<Scheduler>,
    request: &InferenceRequest,
    cached: &[Option<u64>],
) -> (Decision, Booking) {
    let moment = Moment { evidence: Evidence { cached, ..Evidence::default() }, ..moment(1) };
    scheduler.schedule(request, moment, Detail::Full).unwrap()
}

#[test]
fn cold_prompts_go_round_and_warm_ones_do_not_move_anybody() {
    let scheduler = scheduler_with(
        "weighted: { profile: optimized-baseline }",
        "weighted",
        &[1.0; 4],
        Admission::default(),
    );
    let mut bookings = Vec::new();
    let mut cold = |name: &str| {
        let (decision, booking) = scheduled(&scheduler, &request(name, 100), &[Some(0); 4]);
        bookings.push(booking);
        assert_eq!(decision.reason, Reason::Cold);
        decision.target()
    };
    let first: Vec<u32> = (0..4).map(|i| cold(&format!("a{i}"))).collect();
    assert_eq!(first.iter().collect::<std::collections::BTreeSet<_>>().len(), 4);
    // A warm prompt in between is none of it.
    let warm: Vec<Option<u64>> =
        (0..4).map(|i| Some(if i == first[0] { 100 } else { 0 })).collect();
    let (decision, _warm) = scheduled(&scheduler, &request("w", 100), &warm);
    assert_eq!((decision.target(), decision.reason), (first[0], Reason::BestScore));
    for name in ["b0", "b1", "b2", "b3"] {
        let expected = first[name[1..].parse::<usize>().unwrap()];
        assert_eq!(cold(name), expected, "the order of the first round");
    }
}

#[test]
fn uncached_tokens_are_booked_at_the_pick_and_leave_with_the_first_token() {
    let scheduler =
        scheduler_with("weighted: { profile: guide }", "weighted", &[1.0; 2], Admission::default());
    let (first, mut held) = scheduled(&scheduler, &request("a", 4000), &[Some(0), Some(0)]);
    // Another conversation goes elsewhere while it waits, wherever chance would have it.
    for name in ["b", "c", "d", "e"] {
        let (decision, _) = scheduled(&scheduler, &request(name, 100), &[Some(0), Some(0)]);
        assert_ne!(decision.target(), first.target());
    }
    held.first_token(Duration::ZERO);
    let (_, _held) = scheduled(&scheduler, &request("f", 10), &[Some(0), Some(0)]);
    let (decision, _) = scheduled(&scheduler, &request("g", 100), &[Some(0), Some(0)]);
    let uncached: f64 = decision.trace.sights.iter().map(|(_, sight)| sight.uncached).sum();
    assert_eq!(uncached, 10.0, "the first one's prompt is computed");
}

#[test]
fn llm_aware_believes_the_engine_before_its_memory() {
    let scheduler = scheduler("llm-aware", 3);
    let (first, booking) = pick(&scheduler, &request("c", 2000), 0);
    booking.finish(&served(2000, 0), Duration::ZERO);
    let home = first.target();
    let told = |tokens: Option<u64>| {
        let cached: Vec<Option<u64>> =
            (0..3).map(|slot| if slot == home { tokens } else { Some(0) }).collect();
        let (decision, _) = scheduled(&scheduler, &request("c", 2100), &cached);
        assert_eq!(decision.target(), home);
        let cost = decision.trace.steps.iter().find_map(|step| match step {
            Step::Cost { new_tokens, .. } => Some(*new_tokens),
            _ => None,
        });
        (decision.cached, cost.unwrap())
    };
    assert_eq!(told(None), (2000, 100), "it says nothing, so memory counts");
    assert_eq!(told(Some(500)), (500, 1600), "it has evicted most of it");
    assert_eq!(told(Some(9999)), (2100, 1), "it has no more than the prompt");
    // A new conversation may begin as others do.
    let (decision, _) = scheduled(&scheduler, &request("new", 2000), &[Some(1500); 3]);
    assert_eq!(decision.cached, 1500);
    assert!(!decision.trace.steps.contains(&Step::LongNotCached));
}

#[test]
fn an_engine_that_says_nothing_neither_draws_requests_nor_repels_them() {
    // One of five is not scraped: over many states of the others it gets about its share.
    let mut count = 0;
    for round in 0..400u64 {
        let state = |slot: u64| crate::index::hash::mix(round, slot) % 10;
        let mut ats: Vec<At> = (0..5)
            .map(|slot| said(state(slot) as f64, state(slot + 9) as f64 / 10.0, 0.0))
            .collect();
        ats[2].said = Said::default();
        let scenario = Scenario { seed: round, ..scenario(100, &ats) };
        count += u32::from(decide("weighted", "{}", &scenario).target() == 2);
    }
    assert!(count < 80, "{count} of 400, whose fair share is 80");
    let all = [At::default(); 5];
    let drawn: std::collections::BTreeSet<u32> = (0..100)
        .map(|seed| decide("weighted", "{}", &Scenario { seed, ..scenario(100, &all) }).target())
        .collect();
    assert_eq!(drawn.len(), 5, "where nobody says anything chance decides");
}

#[test]
fn another_policy_takes_over_with_load_and_memory_in_place() {
    let scheduler = scheduler("llm-aware", 3);
    let (first, booking) = pick(&scheduler, &request("c", 500), 0);
    booking.finish(&served(500, 0), Duration::ZERO);
    let (_, held) = pick(&scheduler, &request("d", 300), 0);
    let policies: Policies = yaml::parse("load-aware: { beta: 0 }").unwrap();
    let (name, policy) = policies.get("loadaware").unwrap();
    scheduler.set_policy(name, policy);
    assert_eq!(total(&scheduler).requests, 1);
    let (decision, _booking) = pick(&scheduler, &request("c", 600), 0);
    assert_eq!((decision.policy, decision.cached), ("load-aware", 500));
    assert_eq!(decision.target(), first.target());
    drop(held);
}

fn at() -> impl Strategy<Value = At> {
    let number = || prop::option::of((0u32..50).prop_map(f64::from));
    let share = || prop::option::of((0u32..=100).prop_map(|it| f64::from(it) / 100.0));
    let adapter = prop::option::of(prop::sample::select(vec![
        crate::pool::AdapterState::Active,
        crate::pool::AdapterState::Full,
    ]));
    (0u64..30, 0u32..4000, 0u32..90_000, (number(), number(), number(), share(), adapter)).prop_map(
        |(requests, held, uncached, (cached, waiting, running, memory, adapter))| At {
            requests,
            held: f64::from(held),
            uncached: f64::from(uncached),
            said: Said { cached, waiting, running, memory, adapter },
        },
    )
}

/// Policies and parameters that look at what engines say.
fn looking() -> impl Strategy<Value = (&'static str, &'static str)> {
    prop::sample::select(vec![
        ("weighted", "{}"),
        ("weighted", "{ profile: optimized-baseline }"),
        ("weighted", "{ profile: guide }"),
        ("weighted", "{ profile: precise, picker: weighted-random-picker }"),
        (
            "weighted",
            "{ scorers: [{type: running-requests-size-scorer}, {type: lora-affinity-scorer}, \
             {type: active-request-scorer}, {type: load-aware-scorer}], picker: random-picker }",
        ),
        ("load-aware", "{}"),
        ("load-aware", "{ beta: 0 }"),
        ("kv-aware", "{ session: true }"),
        ("kv-aware", "{ threshold: 100 }"),
        ("prefix-aware", "{}"),
        ("marginal-cost", "{}"),
        ("llm-aware", "{}"),
    ])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn the_order_of_endpoints_does_not_matter_whatever_is_seen_of_them(
        (policy, parameters) in looking(),
        ats in prop::collection::vec(at(), 1..8),
        prompt in 0u64..5000,
        seed in any::<u64>(),
        turn in 0usize..8,
    ) {
        let mut scenario = Scenario { seed, ..scenario(prompt, &ats) };
        let first = decide(policy, parameters, &scenario);
        prop_assert!((first.target() as usize) < ats.len());
        prop_assert!(first.cached <= prompt);
        for (_, score) in scores(&first) {
            prop_assert!(score.is_finite());
        }
        let turn = turn % ats.len();
        scenario.endpoints.rotate_left(turn);
        scenario.sights.reverse();
        let again = decide(policy, parameters, &scenario);
        prop_assert_eq!(again.trace, first.trace);
        prop_assert_eq!(again.targets, first.targets);
    }

    #[test]
    fn each_score_is_a_share_and_only_candidates_are_chosen(
        (policy, parameters) in looking(),
        cached in prop::collection::vec(prop::option::of(0u64..9000), 0..7),
        numbers in prop::collection::vec(prop::option::of(any::<u64>()), 0..7),
        memory in prop::collection::vec(prop::option::of(any::<f64>()), 0..7),
        subset in prop::collection::btree_set(0usize..6, 1..6),
        tokens in 0u64..9000,
    ) {
        let scheduler = scheduler_with(&format!("{policy}: {parameters}"), policy, &[1.0; 6], Admission::default());
        let evidence = Evidence { cached: &cached, coming: &cached, memory: &memory, waiting: &numbers, running: &numbers, adapters: &[], ..Evidence::default() };
        let addresses: Vec<_> = subset.iter().map(|&slot| scheduler.pool().endpoints()[slot].address).collect();
        let request = InferenceRequest { subset: Some(addresses), ..request("c", tokens) };
        for seed in 0..4 {
            let moment = Moment { evidence, ..moment(seed) };
            let (decision, _booking) = scheduler.schedule(&request, moment, Detail::Full).unwrap();
            prop_assert!(subset.contains(&(decision.target() as usize)));
            for step in &decision.trace.steps {
                if let Step::Scores { parts, .. } = step && policy == "weighted" {
                    prop_assert!(parts.iter().all(|part| (0.0..=1.0).contains(&part.score)), "{:?}", parts);
                }
            }
        }
        prop_assert_eq!(total(&scheduler), Load::default());
    }
}
