//! Tests of what is known, with events and answers as engines give them.

use super::*;
use crate::engine::kv_wire::KvBatch;
use crate::pool::{Ending, Endpoint, PromptSize, Usage};

const SECOND: Duration = Duration::from_secs(1);

fn settings() -> Settings {
    Settings {
        metrics: true,
        events: true,
        text: true,
        block_bytes: 16,
        block_tokens: 4,
        budget: 1 << 20,
        capacity_tokens: 1000,
        speculation: Duration::from_secs(60),
        seed: 7,
    }
}

fn endpoint(name: &str, n: u8, instance: &str) -> Endpoint {
    let address = SocketAddr::from(([10, 0, 0, n], 8000));
    Endpoint { instance: instance.to_owned(), ..Endpoint::new(name, address) }
}

fn pool(version: u64, endpoints: Vec<Endpoint>) -> PoolSnapshot {
    PoolSnapshot::new(version, endpoints, 10).unwrap()
}

fn two() -> (Knowledge, PoolSnapshot) {
    let knowledge = Knowledge::new(settings());
    let pool = pool(1, vec![endpoint("a", 1, "x"), endpoint("b", 2, "x")]);
    knowledge.adopt(&pool, &[]);
    (knowledge, pool)
}

/// A prompt of so many blocks of text, in all of which two prompts with the same start are alike.
fn text(start: u64, blocks: u64) -> InferenceRequest {
    let keys = (0..blocks).map(|i| BlockKey(start * 1000 + i)).collect();
    let text = TextBlocks { keys, block: 16, head: 0, bytes: blocks * 16 };
    InferenceRequest { text: Some(Arc::new(text)), ..InferenceRequest::default() }
}

fn tokens(tokens: impl IntoIterator<Item = u32>) -> InferenceRequest {
    InferenceRequest { tokens: Some(tokens.into_iter().collect()), ..InferenceRequest::default() }
}

fn outcome(prompt: u64, cached: u64) -> Outcome {
    let usage =
        Usage { prompt_tokens: Some(prompt), cached_tokens: Some(cached), ..Usage::default() };
    Outcome { ending: Ending::Complete, status: Some(200), served: None, usage }
}

fn stored(first: u64, parent: Option<u64>, tokens: std::ops::Range<u32>) -> kv_wire::Stored {
    let tokens: Vec<u32> = tokens.collect();
    kv_wire::Stored {
        hashes: (0..tokens.len() as u64 / 4).map(|i| (first + i).into()).collect(),
        parent: parent.map(Into::into),
        tokens,
        block_size: 4,
        tier: kv_wire::Tier::Gpu,
        adapter: None,
        extra: Vec::new(),
        group: 0,
        attention: Attention::Whole,
    }
}

fn apply(events: Vec<KvEvent>) -> Change {
    Change::Apply(KvBatch { at: 0.0, rank: None, events, unknown: 0, malformed: 0 })
}

fn cached(
    knowledge: &Knowledge,
    pool: &PoolSnapshot,
    request: &InferenceRequest,
) -> Vec<Option<u64>> {
    let prompt = knowledge.prompt(request).unwrap();
    knowledge.look((pool, true), Some(&prompt), SECOND).unwrap().cached
}

fn guessed(
    knowledge: &Knowledge,
    pool: &PoolSnapshot,
    request: &InferenceRequest,
) -> Vec<(f64, f64)> {
    let prompt = knowledge.prompt(request).unwrap();
    let facts = knowledge.look((pool, true), Some(&prompt), SECOND).unwrap();
    facts.guessed.iter().map(|it| (it.held, it.coming)).collect()
}

/// Sends a request to the endpoint in a slot.
fn send(
    knowledge: &Knowledge,
    pool: &PoolSnapshot,
    slot: usize,
    request: &InferenceRequest,
) -> Promise {
    let prompt = knowledge.prompt(request).unwrap();
    let facts = knowledge.look((pool, true), Some(&prompt), SECOND).unwrap();
    knowledge.chosen(pool.ids()[slot], prompt, Some(&facts), SECOND).unwrap()
}

#[test]
fn what_was_sent_is_coming_and_what_was_served_is_there() {
    let (knowledge, pool) = two();
    let promise = send(&knowledge, &pool, 0, &text(1, 4));
    assert_eq!(guessed(&knowledge, &pool, &text(1, 8)), [(0.0, 0.5), (0.0, 0.0)]);
    knowledge.served(promise, &outcome(64, 0), SECOND);
    assert_eq!(guessed(&knowledge, &pool, &text(1, 8)), [(0.5, 0.5), (0.0, 0.0)]);
    assert_eq!(guessed(&knowledge, &pool, &text(2, 8)), [(0.0, 0.0), (0.0, 0.0)]);
    // A text without tokens is no evidence of an engine.
    assert_eq!(cached(&knowledge, &pool, &text(1, 8)), []);
}

#[test]
fn what_failed_is_nowhere_and_what_fell_back_is_there() {
    let (knowledge, pool) = two();
    let promise = send(&knowledge, &pool, 0, &text(1, 4));
    knowledge.served(promise, &Outcome { status: Some(503), ..outcome(0, 0) }, SECOND);
    assert_eq!(guessed(&knowledge, &pool, &text(1, 4)), [(0.0, 0.0), (0.0, 0.0)]);
    let promise = send(&knowledge, &pool, 0, &text(1, 4));
    knowledge.served(promise, &Outcome::default(), SECOND);
    assert_eq!(guessed(&knowledge, &pool, &text(1, 4)), [(0.0, 0.0), (0.0, 0.0)]);
    let promise = send(&knowledge, &pool, 0, &text(1, 4));
    let elsewhere = Outcome { served: Some(pool.endpoint(1).address), ..outcome(64, 0) };
    knowledge.served(promise, &elsewhere, SECOND);
    assert_eq!(guessed(&knowledge, &pool, &text(1, 4)), [(0.0, 0.0), (1.0, 1.0)]);
}

#[test]
fn a_model_of_a_cache_forgets_what_it_has_no_room_for() {
    let (knowledge, pool) = two();
    // 1000 tokens are 250 blocks.
    for start in 0..10 {
        let promise = send(&knowledge, &pool, 0, &text(start, 50));
        knowledge.served(promise, &outcome(800, 0), SECOND);
    }
    assert_eq!(guessed(&knowledge, &pool, &text(9, 50))[0].0, 1.0);
    assert_eq!(guessed(&knowledge, &pool, &text(0, 50))[0].0, 0.0);
}

#[test]
fn broken_promises_weigh_down_what_is_believed() {
    let (knowledge, pool) = two();
    for _ in 0..60 {
        let promise = send(&knowledge, &pool, 0, &text(1, 100));
        knowledge.served(promise, &outcome(1600, 0), SECOND);
    }
    let believed = guessed(&knowledge, &pool, &text(1, 100))[0].0;
    assert!(believed < 0.1, "{believed}");
    let kept = knowledge.overview().endpoints[0].kept.guessed;
    assert_eq!((kept.predicted, kept.delivered), (59 * 1600, 0));
    let promise = send(&knowledge, &pool, 1, &text(1, 100));
    knowledge.served(promise, &outcome(1600, 0), SECOND);
    assert_eq!(guessed(&knowledge, &pool, &text(1, 100))[1].0, 1.0, "trust is an endpoint's own");
}

#[test]
fn events_tell_what_is_cached_and_go_before_guesses() {
    let (knowledge, pool) = two();
    let a = pool.ids()[0];
    let request = tokens(0..18);
    assert_eq!(cached(&knowledge, &pool, &request), [], "nobody tells anything yet");
    knowledge.hear(a, 0, 1, &apply(vec![KvEvent::Stored(stored(10, None, 0..12))]), SECOND);
    assert_eq!(cached(&knowledge, &pool, &request), [Some(12), None]);
    // Nothing of it is there, but it is not known whether something was there before.
    assert_eq!(cached(&knowledge, &pool, &tokens(100..120)), [None, None]);
    let removed =
        KvEvent::Removed { hashes: vec![11.into(), 12.into()], tier: kv_wire::Tier::Gpu, group: 0 };
    knowledge.hear(a, 0, 1, &apply(vec![removed]), SECOND);
    assert_eq!(cached(&knowledge, &pool, &request), [Some(4), None]);
    knowledge.hear(a, 0, 1, &apply(vec![KvEvent::Cleared]), SECOND);
    assert_eq!(cached(&knowledge, &pool, &request), [Some(0), None]);
    // What is on its way there is coming, and never cached.
    let promise = send(&knowledge, &pool, 0, &request);
    let prompt = knowledge.prompt(&request).unwrap();
    let facts = knowledge.look((&pool, true), Some(&prompt), SECOND).unwrap();
    assert_eq!((facts.cached[0], facts.coming[0]), (Some(0), Some(16)));
    knowledge.served(promise, &outcome(18, 0), SECOND);
}

#[test]
fn an_engine_that_has_started_again_has_nothing() {
    let (knowledge, pool) = two();
    let a = pool.ids()[0];
    let promise = send(&knowledge, &pool, 0, &text(1, 4));
    knowledge.served(promise, &outcome(64, 0), SECOND);
    knowledge.hear(a, 0, 1, &apply(vec![KvEvent::Stored(stored(10, None, 0..12))]), SECOND);
    knowledge.hear(a, 0, 1, &Change::Clear(ClearReason::Gap), SECOND);
    assert_eq!(cached(&knowledge, &pool, &tokens(0..12)), [None, None]);
    assert_eq!(guessed(&knowledge, &pool, &text(1, 4))[0].0, 1.0, "a gap says nothing of the rest");
    knowledge.hear(a, 0, 1, &Change::Clear(ClearReason::Restart), SECOND);
    assert_eq!(cached(&knowledge, &pool, &tokens(0..12)), [Some(0), None]);
    assert_eq!(guessed(&knowledge, &pool, &text(1, 4))[0].0, 0.0);
}

#[test]
fn what_an_older_connection_still_tells_is_dropped() {
    let (knowledge, pool) = two();
    let a = pool.ids()[0];
    let event = |first, tokens| apply(vec![KvEvent::Stored(stored(first, None, tokens))]);
    knowledge.hear(a, 0, 5, &event(10, 0..8), SECOND);
    knowledge.hear(a, 0, 6, &event(20, 100..108), SECOND);
    assert_eq!(cached(&knowledge, &pool, &tokens(0..8)), [None, None]);
    knowledge.hear(a, 0, 5, &event(30, 0..8), SECOND);
    assert_eq!(cached(&knowledge, &pool, &tokens(0..8)), [None, None]);
    assert_eq!(cached(&knowledge, &pool, &tokens(100..108)), [Some(8), None]);
    assert_eq!(knowledge.overview().late, 1);
}

#[test]
fn salt_and_adapter_keep_prompts_apart() {
    let (knowledge, pool) = two();
    let a = pool.ids()[0];
    let salted = kv_wire::Stored {
        extra: vec![(0, kv_wire::Extra::Text("tenant".into()))],
        ..stored(10, None, 0..8)
    };
    let adapted = kv_wire::Stored {
        adapter: Some(kv_wire::Adapter::Name("lora".into())),
        ..stored(20, None, 200..208)
    };
    let events = vec![KvEvent::Stored(salted), KvEvent::Stored(adapted)];
    knowledge.hear(a, 0, 1, &apply(events), SECOND);
    let mine = InferenceRequest { salt: Some(request::salt("tenant")), ..tokens(0..8) };
    assert_eq!(cached(&knowledge, &pool, &mine), [Some(8), None]);
    assert_eq!(cached(&knowledge, &pool, &tokens(0..8)), [None, None]);
    let lora = InferenceRequest { model: Some("lora".to_owned()), ..tokens(200..208) };
    let base = InferenceRequest { model: Some("base".to_owned()), ..tokens(200..208) };
    assert_eq!(cached(&knowledge, &pool, &lora), [Some(8), None]);
    assert_eq!(cached(&knowledge, &pool, &base), [None, None]);
    let image = PromptSize { media: 1, ..PromptSize::default() };
    assert!(knowledge.prompt(&InferenceRequest { prompt: image, ..tokens(0..8) }).is_none());
}

#[test]
fn blocks_of_windows_are_neither_entered_nor_removed() {
    let (knowledge, pool) = two();
    let a = pool.ids()[0];
    let window =
        kv_wire::Stored { group: 1, attention: Attention::Window(8), ..stored(10, None, 0..8) };
    knowledge.hear(a, 0, 1, &apply(vec![KvEvent::Stored(window.clone())]), SECOND);
    assert_eq!(cached(&knowledge, &pool, &tokens(0..8)), [None, None]);
    let whole = KvEvent::Stored(stored(10, None, 0..8));
    let gone = KvEvent::Removed { hashes: window.hashes, tier: kv_wire::Tier::Gpu, group: 1 };
    knowledge.hear(a, 0, 1, &apply(vec![whole, gone]), SECOND);
    assert_eq!(cached(&knowledge, &pool, &tokens(0..8)), [Some(8), None]);
}

#[test]
fn a_long_event_is_entered_in_batches_of_one_chain() {
    let (knowledge, pool) = two();
    let blocks = u32::try_from(BATCH).unwrap() * 2 + 10;
    let long = KvEvent::Stored(stored(10, None, 0..blocks * 4));
    knowledge.hear(pool.ids()[1], 0, 1, &apply(vec![long]), SECOND);
    let expected = u64::from(blocks) * 4;
    assert_eq!(cached(&knowledge, &pool, &tokens(0..blocks * 4)), [None, Some(expected)]);
}

#[test]
fn of_several_ranks_the_mean_is_expected() {
    let (knowledge, pool) = two();
    let a = pool.ids()[0];
    let event = |tokens| apply(vec![KvEvent::Stored(stored(10, None, tokens))]);
    knowledge.hear(a, 0, 1, &event(0..16), SECOND);
    knowledge.hear(a, 1, 2, &event(0..8), SECOND);
    assert_eq!(cached(&knowledge, &pool, &tokens(0..16)), [Some(12), None]);
}

#[test]
fn another_life_of_an_endpoint_knows_nothing_of_the_last() {
    let (knowledge, before) = two();
    let promise = send(&knowledge, &before, 0, &text(1, 4));
    let late = send(&knowledge, &before, 0, &text(2, 4));
    knowledge.served(promise, &outcome(64, 0), SECOND);
    let event = apply(vec![KvEvent::Stored(stored(10, None, 0..8))]);
    knowledge.hear(before.ids()[0], 0, 1, &event, SECOND);
    let after = pool(2, vec![endpoint("a", 1, "y"), endpoint("b", 2, "x"), endpoint("c", 3, "x")]);
    knowledge.adopt(&after, &[]);
    assert_eq!(guessed(&knowledge, &after, &text(1, 4)), [(0.0, 0.0); 3]);
    // Its last answer and its last events come late: they are nobody's.
    knowledge.served(late, &outcome(64, 0), SECOND);
    knowledge.hear(before.ids()[0], 0, 1, &event, SECOND);
    assert_eq!(guessed(&knowledge, &after, &text(2, 4)), [(0.0, 0.0); 3]);
    assert_eq!(cached(&knowledge, &after, &tokens(0..8)), []);
    assert_eq!(knowledge.overview().late, 1);
    // Who still decides on the pool of before is told of that pool.
    let promise = send(&knowledge, &after, 1, &text(1, 4));
    knowledge.served(promise, &outcome(64, 0), SECOND);
    assert_eq!(guessed(&knowledge, &before, &text(1, 4)), [(0.0, 0.0), (1.0, 1.0)]);
    let prompt = knowledge.prompt(&text(1, 4)).unwrap();
    assert_eq!(
        knowledge.look((&before, true), Some(&prompt), SECOND).unwrap().evidence().version,
        Some(1)
    );
}

#[test]
fn what_is_switched_off_is_not_known() {
    let off = Settings { metrics: false, events: false, text: false, ..settings() };
    assert!(!off.any());
    let knowledge = Knowledge::new(off);
    assert!(knowledge.prompt(&text(1, 4)).is_none());
    assert!(knowledge.prompt(&tokens(0..8)).is_none());
    let pool = pool(1, vec![endpoint("a", 1, "x")]);
    assert!(knowledge.look((&pool, true), None, SECOND).is_none());
}
