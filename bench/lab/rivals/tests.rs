//! What each policy is known for: its documents' worked examples, and its known failures.

use super::*;
use crate::engine::Block;
use crate::record::Run;
use crate::sim::{Knobs, World, run};
use crate::workload::tests::{inline, library};
use crate::workload::{Point, Request, Traces};

fn setup(endpoints: usize) -> Setup {
    let params = crate::engine::Params::named("h100").unwrap();
    Setup { params, endpoints, seed: 8, unseen: 1 }
}

fn router(name: &str, endpoints: usize) -> Box<dyn Router> {
    build(name, &setup(endpoints)).unwrap()
}

/// A request of these blocks, of 64 tokens each.
fn request(key: &str, blocks: impl IntoIterator<Item = Block>) -> Request {
    let blocks: std::sync::Arc<[Block]> = blocks.into_iter().collect();
    Request {
        index: 0,
        id: 0,
        sent: 0.0,
        prompt: blocks.len() as i64 * 64,
        output: 48,
        blocks,
        answer: None,
        key: key.into(),
        conversation: None,
        turn: 1,
        counts: true,
    }
}

/// Asks a router about a request, and sends it where it says.
fn send(router: &mut dyn Router, world: &mut World, request: Request) -> usize {
    let request = world.ask(request);
    let endpoint = router.choose(&request, 0.0, world).unwrap();
    router.on_dispatch(&request, endpoint, 0.0, world);
    endpoint
}

/// Asks a router about requests that all are alike.
fn answers(name: &str, world: &mut World, count: usize, alike: &Request) -> Vec<usize> {
    let mut router = router(name, world.endpoints());
    (0..count).map(|_| send(&mut *router, world, alike.clone())).collect()
}

fn run_on(point: &Point, policy: &str) -> Run {
    let traces = Traces::default();
    run(point, (policy, 1), &traces, Knobs::default(), |setup| build(policy, setup)).unwrap()
}

fn mean_ttft(run: &Run) -> f64 {
    let rows = run.rows.iter().filter(|row| row.counts);
    let ttft: Vec<f64> = rows.filter_map(|row| row.ttft).collect();
    ttft.iter().sum::<f64>() / ttft.len() as f64
}

fn hit(run: &Run) -> f64 {
    let sum = |of: fn(&crate::record::Row) -> u32| {
        run.rows.iter().filter(|row| row.counts).map(|row| f64::from(of(row))).sum::<f64>()
    };
    sum(|row| row.cached) / sum(|row| row.prompt)
}

#[test]
fn every_name_is_a_policy() {
    for (name, _) in PUBLISHED.iter().chain(RETUNED).chain(REFERENCES) {
        router(name, 3);
    }
    assert!(build("best", &setup(3)).is_err());
}

#[test]
fn chance_spreads_and_turns_alternate() {
    let mut world = World::of(4);
    let drawn = answers("proto-random", &mut world, 400, &request("k", 0..10));
    assert!((0..4).all(|i| (70..130).contains(&drawn.iter().filter(|&&it| it == i).count())));
    assert_eq!(answers("proto-round-robin", &mut world, 5, &request("k", 0..10)), [1, 2, 3, 0, 1]);
}

#[test]
fn least_request_counts_requests_and_nothing_else() {
    let mut world = World::of(3);
    world.load(&[2, 1, 3]);
    world.cache(2, 0..100);
    assert_eq!(answers("proto-least-request", &mut world, 1, &request("k", 0..100)), [1]);
}

#[test]
fn a_key_has_one_home_however_busy_it_is() {
    let mut world = World::of(3);
    let home = answers("proto-consistent", &mut world, 1, &request("chat-1", 0..10))[0];
    let mut load = [0; 3];
    load[home] = 1000;
    world.load(&load);
    let homes = answers("proto-consistent", &mut world, 9, &request("chat-1", 0..10));
    assert_eq!(homes, [home; 9]);
}

#[test]
fn consistent_hashing_collapses_past_the_memory_of_an_engine() {
    let hits = |prefixes: usize| {
        let point = inline(&format!(
            "{{engine: a10, endpoints: 2, slo: {{ttft: 1, itl: 1}}, traffic: {{kind: prefix-pool, prefixes: {prefixes}, \
             skew: 0, prefix: 1600, suffix: 16, output: 16, requests: 1500, rate: 4, \
             runs: {{first: 1, step: 1, count: 1}}, pause: 0, suffix_draws: 0}}}}"
        ));
        hit(&run_on(&point, "proto-consistent"))
    };
    assert!(hits(40) > 0.9, "{}", hits(40));
    assert!(hits(400) < 0.3, "{}", hits(400));
}

#[test]
fn bounded_loads_overflow_to_the_next_on_the_ring() {
    let mut world = World::of(3);
    let home = answers("proto-bounded", &mut world, 1, &request("chat-1", 0..10))[0];
    let mut load = [2; 3];
    load[home] = 3;
    world.load(&load);
    // ⌈1.25 × 8 / 3⌉ = 4 requests fit.
    assert_eq!(answers("proto-bounded", &mut world, 1, &request("chat-1", 0..10)), [home]);
    load[home] = 4;
    world.load(&load);
    assert_ne!(answers("proto-bounded", &mut world, 1, &request("chat-1", 0..10)), [home]);
    // An idle endpoint takes anything.
    load = [9; 3];
    load[home] = 0;
    world.load(&load);
    assert_eq!(answers("proto-bounded", &mut world, 1, &request("chat-1", 0..10)), [home]);
}

#[test]
fn a_long_cached_conversation_stays_where_a_short_one_overflows() {
    // The first llm-ring's worked example: loads of 2400, 900 and 900 tokens, 860 in the prompt and 820 of them cached.
    let overflows = |prompt: i64| {
        let (mut world, mut router) = (World::of(3), hashed::LlmAware::new(3));
        let first = Request { prompt: prompt - 40, ..request("chat-42", 0..10) };
        let home = send(&mut router, &mut world, first);
        router.finish_all(&world);
        let mut load = [900; 3];
        load[home] = 2400;
        router.preset(load);
        let next = Request { prompt, ..request("chat-42", 0..10) };
        send(&mut router, &mut world, next) != home
    };
    assert!(!overflows(860), "2488 tokens are below the cap of 2859 for long conversations");
    assert!(overflows(799), "and above that of 1787 for others");
}

#[test]
fn loadaware_weighs_a_cache_against_requests_in_flight() {
    let mut world = World::of(3);
    world.cache(0, 0..100);
    let warm = request("k", 0..100);
    // 1 − (2 − 5/3) / 5/3 > 0 − (1 − 5/3) / 5/3
    world.load(&[2, 1, 2]);
    assert_eq!(answers("loadaware-1.0", &mut world, 1, &warm), [0]);
    // 1 − (6 − 3) / 3 < 0 − (1 − 3) / 3, but with a quarter of the excess it is not.
    world.load(&[6, 1, 2]);
    assert_eq!(answers("loadaware-1.0", &mut world, 1, &warm), [1]);
    assert_eq!(answers("loadaware-0.25", &mut world, 1, &warm), [0]);
    // What nobody has goes by load.
    assert_eq!(answers("loadaware-0.25", &mut world, 1, &request("k", 500..600)), [1]);
}

#[test]
fn kvaware_piles_all_on_the_one_that_has_it() {
    let mut world = World::of(3);
    world.cache(1, 0..100);
    world.load(&[0, 1000, 0]);
    assert_eq!(answers("kvaware", &mut world, 5, &request("k", 0..100)), [1; 5]);
}

#[test]
fn the_default_profile_follows_its_own_memory() {
    let mut world = World::of(4);
    let first = answers("gaie", &mut world, 6, &request("k", 0..100));
    assert!(first.iter().all(|&it| it == first[0]), "{first:?}");
    // With the old limit, what differs beyond 4,096 tokens is the same to it.
    let later = |name: &str| {
        let mut router = router(name, 4);
        let mut world = World::of(4);
        let places: Vec<usize> = (0..40)
            .map(|i| {
                let blocks = (0..64).chain(200 + i * 50..200 + (i + 1) * 50);
                send(&mut *router, &mut world, request("k", blocks))
            })
            .collect();
        places.iter().filter(|&&it| it == places[0]).count()
    };
    assert_eq!(later("gaie-4k"), 40);
    assert_eq!(later("gaie"), 40, "a common prefix draws it too");
}

#[test]
fn weighted_sums_starve_a_newcomer_of_running_chats() {
    let point = library().point("llmring-scale").unwrap();
    let share = |policy: &str| {
        let run = run_on(&point, policy);
        let later = || run.rows.iter().filter(|row| row.sent >= 300.0);
        let new = later().filter(|row| row.endpoint == Some(3)).count();
        new as f64 / later().count() as f64
    };
    for policy in ["gaie", "optimized-baseline", "precise"] {
        assert!(share(policy) < 0.02, "{policy}: {}", share(policy));
    }
    for policy in ["proto-consistent", "proto-bounded", "proto-llm-aware", "lmetric-q", "rec"] {
        assert!(share(policy) > 0.12, "{policy}: {}", share(policy));
    }
}

#[test]
fn cold_prompts_go_where_none_went_longest() {
    let mut world = World::of(4);
    let mut router = router("optimized-baseline", 4);
    let mut cold = |i: u32| send(&mut *router, &mut world, request("k", i * 100..i * 100 + 100));
    let mut first: Vec<usize> = (0..4).map(&mut cold).collect();
    let second: Vec<usize> = (4..8).map(&mut cold).collect();
    assert_eq!(first, second, "the one that was first is first again");
    first.sort_unstable();
    assert_eq!(first, [0, 1, 2, 3]);
}

#[test]
fn prompts_under_way_count_as_cached() {
    let together = |name: &str| {
        let mut world = World::of(8);
        let places = answers(name, &mut world, 8, &request("k", 0..100));
        places.iter().all(|&it| it == places[0])
    };
    assert!(together("precise"));
    assert!(!together("precise-3:2:2"));
}

#[test]
fn precise_beats_load_alone_and_chance_when_prefixes_are_long() {
    let ttft = |policy: &str| mean_ttft(&run_on(&library().point("shared:12").unwrap(), policy));
    let (precise, load, chance) =
        (ttft("precise"), ttft("proto-least-request"), ttft("proto-random"));
    assert!(precise * 100.0 < load.min(chance), "{precise} {load} {chance}");
    assert!(load / chance < 2.0 && chance / load < 2.0, "{load} {chance}");
}

#[test]
fn affinity_holds_until_it_costs_five_seconds() {
    let mut world = World::of(3);
    world.cache(0, 0..100);
    let warm = request("k", 0..100);
    let count = |world: &mut World| {
        let places = answers("predicted-latency", world, 200, &warm);
        places.iter().filter(|&&it| it == 0).count()
    };
    world.load(&[1, 1, 1]);
    assert!(count(&mut world) > 190, "a filter is left out once in a hundred times");
    for i in 0..10 {
        world.occupy(0, Request { prompt: 20_480, ..request("q", 200 + i * 320..520 + i * 320) });
    }
    assert!(count(&mut world) < 100, "its queue is beyond the gate");
}

#[test]
fn dynamo_flees_blocks_in_use_until_prefill_weighs_more() {
    let mut world = World::of(2);
    // The one that has the prompt computes a longer one.
    world.occupy(0, Request { prompt: 19_200, ..request("q", 200..500) });
    world.cache(0, 0..100);
    let warm = request("k", 0..100);
    assert_eq!(answers("dynamo", &mut world, 1, &warm), [1]);
    assert_eq!(answers("dynamo-10", &mut world, 1, &warm), [0]);
}

#[test]
fn the_tree_draws_all_to_one_until_loads_differ_by_64() {
    let mut world = World::of(4);
    let mut router = router("sglang", 4);
    // A third of every prompt is shared.
    let mut next = |world: &mut World, i: u32| {
        send(&mut *router, world, request("k", (0..40).chain(50 + i * 60..110 + i * 60)))
    };
    let first = next(&mut world, 0);
    for i in 1..40 {
        assert_eq!(next(&mut world, i), first);
    }
    let mut load = [0; 4];
    load[first] = 64;
    world.load(&load);
    assert_eq!(next(&mut world, 40), first);
    load[first] = 65;
    world.load(&load);
    assert_ne!(next(&mut world, 41), first);
}

#[test]
fn the_tree_loses_to_turns_where_a_third_is_shared() {
    let point = inline(
        "{engine: a10, endpoints: 4, slo: {ttft: 1, itl: 1}, traffic: {kind: shared-prefix, groups: 1, \
         prompts_per_group: 500, prefix: 640, question: 1000, output: 64, ladder: [[16, 30]]}}",
    );
    let ttft = |policy: &str| mean_ttft(&run_on(&point, policy));
    let (tree, turns) = (ttft("sglang"), ttft("proto-round-robin"));
    assert!(tree > 1.5 * turns, "{tree} {turns}");
}

#[test]
fn lmetric_multiplies_new_tokens_and_requests() {
    let mut world = World::of(2);
    world.cache(0, 0..80);
    let warm = request("k", 0..100);
    // 1280 × (4 + 1) = 6400 × (0 + 1), and the fewer requests win.
    world.load(&[4, 0]);
    assert_eq!(answers("lmetric", &mut world, 1, &warm), [1]);
    world.load(&[3, 0]);
    assert_eq!(answers("lmetric", &mut world, 1, &warm), [0]);
    // With the queue, what was just sent there counts.
    world.load(&[0, 0]);
    assert_eq!(answers("lmetric", &mut world, 3, &request("k", 500..600)), [0, 0, 0]);
    assert_eq!(answers("lmetric-q", &mut world, 2, &request("k", 500..600)), [0, 1]);
}

#[test]
fn preble_exploits_what_is_mostly_cached_and_explores_else() {
    let mut world = World::of(2);
    world.cache(0, 0..60);
    let mut router = router("preble", 2);
    let mostly = request("k", 0..100);
    for _ in 0..20 {
        assert_eq!(send(&mut *router, &mut world, mostly.clone()), 0);
    }
    // A prompt of which less than half is there goes by the work of the last minutes.
    assert_eq!(send(&mut *router, &mut world, request("k", (0..40).chain(200..300))), 1);
}

#[test]
fn greed_with_perfect_knowledge_is_no_upper_bound() {
    let point = library().point("loadaware:17").unwrap();
    let ttft = |policy: &str| mean_ttft(&run_on(&point, policy));
    assert!(ttft("oracle") > 1.1 * ttft("rec"), "{} {}", ttft("oracle"), ttft("rec"));
}

#[test]
fn held_requests_all_go_in_the_end_and_the_short_ones_first() {
    let point = inline(
        "{engine: h100, endpoints: 2, slo: {ttft: 1, itl: 1}, traffic: {kind: chat, users: 60, conversations_per_user: 1, \
         ramp: 2, opening: {log_normal: {mean: 6000, deviation: 8000, low: 100, high: 60000}}, turns: 1, input: 10, output: 20}}",
    );
    let ttft = |policy: &str| {
        let run = run_on(&point, policy);
        assert!(run.rows.iter().all(|row| row.e2e.is_some()), "{policy}");
        mean_ttft(&run)
    };
    assert!(ttft("rec-sjf") < 0.8 * ttft("rec-fcfs"), "{} {}", ttft("rec-sjf"), ttft("rec-fcfs"));
}

/// The picker's own policy on the way of an emulation: what it chooses must be the best by the emulation's scores.
struct Beside<R> {
    ours: Box<dyn Router>,
    theirs: R,
    scores: fn(&R, &Request, &World) -> Vec<f64>,
    /// What a block of the prompt scores.
    blocks: f64,
}

impl<R: Router> Router for Beside<R> {
    fn choose(&mut self, request: &Request, now: f64, world: &World) -> Option<usize> {
        let scores = (self.scores)(&self.theirs, request, world);
        let chosen = self.ours.choose(request, now, world)?;
        let place = world.live().iter().position(|&endpoint| endpoint == chosen).unwrap();
        let best = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        // Theirs counts blocks of a prompt and ours tokens, and the last block is none if it is not full.
        let slack = self.blocks / request.blocks.len() as f64 + 1e-9;
        assert!(scores[place] >= best - slack, "{place} of {scores:?}, request {}", request.index);
        Some(chosen)
    }

    fn on_dispatch(&mut self, request: &Request, endpoint: usize, now: f64, world: &World) {
        self.ours.on_dispatch(request, endpoint, now, world);
        self.theirs.on_dispatch(request, endpoint, now, world);
    }

    fn on_first(&mut self, request: &Request, now: f64, world: &World) {
        self.ours.on_first(request, now, world);
        self.theirs.on_first(request, now, world);
    }

    fn on_finish(&mut self, request: &Request, now: f64, world: &World) {
        self.ours.on_finish(request, now, world);
        self.theirs.on_finish(request, now, world);
    }
}

/// Runs one of the picker's policies and looks at each choice with an emulation's eyes.
fn check_beside<R: Router + 'static>(
    (policy, blocks): (&str, f64),
    theirs: fn(&Setup) -> R,
    scores: fn(&R, &Request, &World) -> Vec<f64>,
) {
    for name in ["loadaware:17", "shared:9", "chat:96"] {
        let point = library().point(name).unwrap();
        let router = |setup: &Setup| -> anyhow::Result<Box<dyn Router>> {
            let ours = crate::production::build(policy, setup)?.unwrap();
            Ok(Box::new(Beside { ours, theirs: theirs(setup), scores, blocks }))
        };
        run(&point, (policy, 1), &Traces::default(), Knobs::default(), router).unwrap();
    }
}

/// What nobody has goes where the fewest requests are.
fn fewest(world: &World) -> Vec<f64> {
    world.live().iter().map(|&i| -(world.in_flight()[i] as f64)).collect()
}

#[test]
fn the_picker_s_own_weighted_policy_chooses_as_the_emulations_score() {
    check_beside(
        ("weighted{profile: precise}+events+metrics", 3.0),
        |setup| scorers::Precise::new([3.0, 2.0, 2.0], true, setup),
        |theirs, request, world| theirs.scores(request, world),
    );
    check_beside(
        ("weighted{prefix: {speculative: false}}+events+metrics", 3.0),
        |setup| scorers::Precise::new([3.0, 2.0, 2.0], false, setup),
        |theirs, request, world| theirs.scores(request, world),
    );
}

#[test]
fn the_picker_s_own_load_aware_and_kv_aware_choose_as_the_emulations_score() {
    check_beside(
        ("load-aware+events", 0.0),
        |setup| loadaware::LoadAware::new(1.0, Random::new(setup.seed)),
        |theirs, request, world| theirs.scores(request, world).unwrap_or_else(|| fewest(world)),
    );
    check_beside(
        ("kv-aware{threshold: 1000000}+events", 0.0),
        |setup| loadaware::KvAware::new(Random::new(setup.seed)),
        |_, request, world| {
            let cached = |&i: &usize| world.prefix_tokens(i, request) as f64;
            let cached: Vec<f64> = world.live().iter().map(cached).collect();
            if cached.iter().any(|&tokens| tokens > 0.0) { cached } else { fewest(world) }
        },
    );
}
