use std::path::Path;

use proptest::prelude::*;
use rmp::encode as pack;
use serde_json::Value;

use super::*;

/// Messages as vLLM sent them.
fn captured() -> Value {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("src/engine/testdata/vllm_kv_events.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn unhex(text: &str) -> Vec<u8> {
    let digits: String = text.split_whitespace().collect();
    (0..digits.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap())
        .collect()
}

/// Every captured payload with what it decodes to in JSON.
fn payloads() -> Vec<(Vec<u8>, Value)> {
    let captured = captured();
    let mut found = Vec::new();
    for run in captured["runs"].as_array().unwrap() {
        for message in run["messages"].as_array().unwrap() {
            let payload = unhex(message["frames_hex"][2].as_str().unwrap());
            found.push((payload, message["decoded"].clone()));
        }
    }
    for version in captured["older_versions_encoded_with_their_own_structs"].as_array().unwrap() {
        for message in version["messages"].as_array().unwrap() {
            let payload = unhex(message["payload_hex"].as_str().unwrap());
            found.push((payload, message["decoded"].clone()));
        }
    }
    found
}

/// The same event read from its JSON, field by field, by name or by place.
fn expected(event: &Value) -> KvEvent {
    let field = |name: &str, at: usize| match event {
        Value::Array(fields) => fields.get(at).cloned().unwrap_or(Value::Null),
        _ => event[name].clone(),
    };
    let hash = |value: &Value| match value {
        Value::Number(number) => {
            EngineHash(number.as_u64().unwrap_or_else(|| number.as_i64().unwrap().cast_unsigned()))
        }
        value => {
            let bytes = unhex(value["bin"].as_str().unwrap());
            EngineHash(u64::from_be_bytes(bytes[bytes.len() - 8..].try_into().unwrap()))
        }
    };
    let hashes =
        || field("block_hashes", 1).as_array().unwrap().iter().map(hash).collect::<Vec<_>>();
    let small = |value: Value| u32::try_from(value.as_u64().unwrap_or(0)).unwrap();
    match field("type", 0).as_str().unwrap() {
        "BlockStored" => {
            let mut extra = Vec::new();
            for (block, keys) in field("extra_keys", 8).as_array().into_iter().flatten().enumerate()
            {
                for key in keys.as_array().into_iter().flatten() {
                    extra.push((
                        u32::try_from(block).unwrap(),
                        Extra::Text(key.as_str().unwrap().into()),
                    ));
                }
            }
            KvEvent::Stored(Stored {
                hashes: hashes(),
                parent: Some(field("parent_block_hash", 2))
                    .filter(|v| !v.is_null())
                    .map(|v| hash(&v)),
                tokens: field("token_ids", 3)
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|t| small(t.clone()))
                    .collect(),
                block_size: small(field("block_size", 4)),
                tier: Tier::Gpu,
                adapter: field("lora_name", 7).as_str().map(|name| Adapter::Name(name.into())),
                extra,
                group: small(field("group_idx", 9)),
                attention: Attention::Whole,
            })
        }
        "BlockRemoved" => {
            let group = match event {
                Value::Array(fields) => fields.get(3).cloned().unwrap_or(Value::Null),
                _ => event["group_idx"].clone(),
            };
            KvEvent::Removed { hashes: hashes(), tier: Tier::Gpu, group: small(group) }
        }
        "AllBlocksCleared" => KvEvent::Cleared,
        other => panic!("{other}"),
    }
}

#[test]
fn what_engines_sent_is_read_whole() {
    let payloads = payloads();
    assert!(payloads.len() > 20, "{}", payloads.len());
    for (payload, decoded) in payloads {
        let batch = decode(&payload).unwrap();
        // Whole microseconds: the JSON is not read to the last bit.
        assert!((batch.at - decoded[0].as_f64().unwrap()).abs() < 1e-6);
        assert_eq!(batch.rank.map(u64::from), decoded[2].as_u64());
        assert_eq!((batch.unknown, batch.malformed), (0, 0));
        let events: Vec<KvEvent> = decoded[1].as_array().unwrap().iter().map(expected).collect();
        assert_eq!(batch.events, events);
    }
}

#[test]
fn a_number_and_the_digest_it_is_made_of_are_one() {
    let digest = unhex("65ed372a00000000000000000000000000000000000000004e6beb53bea60dec");
    assert_eq!(EngineHash::of_bytes(&digest).get(), 5650868902379785708);
}

const ARRAYS: &str = "93 cb3ff8000000000000 93 9a ab426c6f636b53746f726564 91 cf4e6beb53bea60dec c0 94010203cd012c 04 c0 a3475055 c0 c0 c0 93 ac426c6f636b52656d6f766564 91 cf4e6beb53bea60dec a3475055 91 b0416c6c426c6f636b73436c6561726564 00";
const MAPS: &str = "93 cb3ff8000000000000 93 8a a474797065 ab426c6f636b53746f726564 ac626c6f636b5f686173686573 91 cf4e6beb53bea60dec b1706172656e745f626c6f636b5f68617368 c0 a9746f6b656e5f696473 94010203cd012c aa626c6f636b5f73697a65 04 a76c6f72615f6964 c0 a66d656469756d a3475055 a96c6f72615f6e616d65 c0 aa65787472615f6b657973 91c0 a967726f75705f696478 00 84 a474797065 ac426c6f636b52656d6f766564 ac626c6f636b5f686173686573 91 cf4e6beb53bea60dec a66d656469756d a3475055 a967726f75705f696478 00 81 a474797065 b0416c6c426c6f636b73436c6561726564 00";

#[test]
fn both_layouts_say_the_same() {
    let batch = decode(&unhex(ARRAYS)).unwrap();
    assert_eq!(batch.events.len(), 3);
    assert_eq!((batch.at, batch.rank), (1.5, Some(0)));
    assert_eq!(batch, decode(&unhex(MAPS)).unwrap());
}

/// A value to be packed.
#[derive(Debug, Clone)]
enum V {
    Nil,
    N(u64),
    I(i64),
    S(&'static str),
    T(String),
    B(Vec<u8>),
    A(Vec<Self>),
    M(Vec<(&'static str, Self)>),
    F(f64),
}

fn put(value: &V, out: &mut Vec<u8>) {
    match value {
        V::Nil => pack::write_nil(out).unwrap(),
        V::N(number) => drop(pack::write_uint(out, *number).unwrap()),
        V::I(number) => drop(pack::write_sint(out, *number).unwrap()),
        V::S(text) => pack::write_str(out, text).unwrap(),
        V::T(text) => pack::write_str(out, text).unwrap(),
        V::B(bytes) => pack::write_bin(out, bytes).unwrap(),
        V::F(number) => pack::write_f64(out, *number).unwrap(),
        V::A(values) => {
            pack::write_array_len(out, u32::try_from(values.len()).unwrap()).unwrap();
            values.iter().for_each(|value| put(value, out));
        }
        V::M(entries) => {
            pack::write_map_len(out, u32::try_from(entries.len()).unwrap()).unwrap();
            for (name, value) in entries {
                pack::write_str(out, name).unwrap();
                put(value, out);
            }
        }
    }
}

fn packed(events: Vec<V>) -> Vec<u8> {
    let mut out = Vec::new();
    put(&V::A(vec![V::F(1.0), V::A(events), V::Nil]), &mut out);
    out
}

fn one(event: V) -> KvBatch {
    decode(&packed(vec![event])).unwrap()
}

fn stored(event: V) -> Stored {
    let batch = one(event);
    let [KvEvent::Stored(stored)] = batch.events.as_slice() else { panic!("{batch:?}") };
    stored.clone()
}

fn s() -> V {
    V::S("BlockStored")
}

fn numbers(numbers: &[u64]) -> V {
    V::A(numbers.iter().map(|number| V::N(*number)).collect())
}

#[test]
fn a_bad_event_costs_itself_alone() {
    let good = || V::A(vec![V::S("BlockRemoved"), numbers(&[1])]);
    let batch = decode(&packed(vec![
        good(),
        V::A(vec![V::S("BlockInactive"), V::A(vec![V::M(vec![("a", V::A(vec![V::Nil]))])])]),
        V::M(vec![("type", V::S("SomethingNew")), ("block_hashes", V::S("no"))]),
        V::A(vec![s(), V::N(5)]),
        V::A(vec![s(), V::A(vec![V::A(vec![V::N(1)])]), V::Nil, numbers(&[1]), V::N(1)]),
        // Tokens that do not fit their blocks.
        V::A(vec![s(), numbers(&[1, 2]), V::Nil, numbers(&[1, 2, 3]), V::N(2)]),
        V::A(vec![s(), V::A(vec![]), V::Nil, numbers(&[1]), V::N(0)]),
        V::A(vec![s(), numbers(&[1]), V::Nil, V::A(vec![V::I(-1)]), V::N(1)]),
        V::A(vec![]),
        V::M(vec![("block_hashes", numbers(&[1]))]),
        V::N(3),
        V::S("BlockStored"),
        good(),
    ]))
    .unwrap();
    assert_eq!(batch.events.len(), 2);
    assert_eq!((batch.unknown, batch.malformed), (2, 9));
}

#[test]
fn hashes_of_all_kinds_are_kept_apart() {
    let kinds = V::A(vec![
        V::I(-5368169219708349169),
        V::N(u64::MAX),
        V::B(vec![7; 32]),
        V::B(vec![8; 8]),
        V::B(vec![9; 16]),
        V::S("a text"),
        V::B(vec![7; 36]),
    ]);
    let batch = one(V::A(vec![V::S("BlockRemoved"), kinds]));
    let [KvEvent::Removed { hashes, .. }] = batch.events.as_slice() else { panic!("{batch:?}") };
    let mut apart = hashes.clone();
    apart.sort();
    apart.dedup();
    assert_eq!(apart.len(), 7);
    assert_eq!(hashes[0].get(), (-5368169219708349169_i64).cast_unsigned());
    assert_eq!(hashes[3].get(), 0x0808_0808_0808_0808);
}

#[test]
fn place_seven_is_what_its_type_says() {
    let at_seven = |seven: V, parent: V| {
        stored(V::A(vec![
            s(),
            numbers(&[123]),
            parent,
            numbers(&[1, 2]),
            V::N(2),
            V::N(4),
            V::S("CPU_PINNED"),
            seven,
        ]))
    };
    let salted = V::M(vec![("other", V::A(vec![V::Nil])), ("cache_salt", V::S("t-a"))]);
    let sglang = at_seven(salted.clone(), V::Nil);
    assert_eq!(sglang.extra, [(0, Extra::Text("t-a".into()))]);
    assert_eq!((sglang.tier, sglang.adapter), (Tier::Cpu, Some(Adapter::Id(4))));
    // Past the start of a chain its parent says it already.
    assert_eq!(at_seven(salted, V::N(7)).extra, []);
    assert_eq!(at_seven(V::S("lora-a"), V::Nil).adapter, Some(Adapter::Name("lora-a".into())));
    assert_eq!(at_seven(V::A(vec![V::N(1)]), V::Nil).adapter, Some(Adapter::Id(4)));
}

#[test]
fn extra_keys_keep_their_blocks_and_their_kinds() {
    let pair = V::A(vec![V::S("img"), V::I(-3)]);
    let event = stored(V::M(vec![
        (
            "extra_keys",
            V::A(vec![
                V::A(vec![V::S("lora-a"), V::S("salt")]),
                V::Nil,
                V::A(vec![
                    V::S("lora-a"),
                    pair,
                    V::B(vec![1]),
                    V::A(vec![V::N(1), V::N(2), V::N(3)]),
                ]),
            ]),
        ),
        ("block_hashes", numbers(&[1, 2, 3])),
        ("lora_name", V::S("lora-a")),
        ("token_ids", numbers(&[5, 6, 7])),
        ("block_size", V::N(1)),
        ("locality", V::S("LOCAL")),
        // Last, as no engine writes it.
        ("type", s()),
    ]));
    let [salt, item, other, tuple] = event.extra.as_slice() else { panic!("{event:?}") };
    assert_eq!(*salt, (0, Extra::Text("salt".into())));
    assert_eq!(*item, (2, Extra::Item("img".into(), -3)));
    assert!(matches!((other, tuple), ((2, Extra::Other(a)), (2, Extra::Other(b))) if a != b));
}

#[test]
fn tokenless_and_old_events_are_taken() {
    let moved = stored(V::A(vec![
        s(),
        numbers(&[1, 2]),
        V::N(0),
        V::A(vec![]),
        V::N(0),
        V::Nil,
        V::S("cpu"),
    ]));
    assert_eq!(
        (moved.parent, moved.tokens.len(), moved.block_size, moved.tier),
        (None, 0, 0, Tier::Cpu)
    );
    // The block's size can be told from the tokens.
    let short = stored(V::A(vec![s(), numbers(&[1, 2]), V::Nil, numbers(&[1, 2, 3, 4])]));
    assert_eq!(short.block_size, 2);
    let long = V::A(
        [
            s(),
            numbers(&[1]),
            V::Nil,
            numbers(&[1]),
            V::N(1),
            V::Nil,
            V::S("STORAGE"),
            V::Nil,
            V::Nil,
            V::N(3),
            V::S("sliding_window"),
            V::N(128),
        ]
        .into_iter()
        .chain((0..8).map(|_| V::A(vec![V::Nil])))
        .collect(),
    );
    let long = stored(long);
    assert_eq!((long.group, long.attention, long.tier), (3, Attention::Window(128), Tier::Storage));
    let mamba = stored(V::M(vec![
        ("type", s()),
        ("block_hashes", numbers(&[1])),
        ("kv_cache_spec_kind", V::S("mamba")),
        ("medium", V::S("EXTERNAL")),
    ]));
    assert_eq!((mamba.attention, mamba.tier), (Attention::Other, Tier::Other));
}

#[test]
fn envelopes_of_all_kinds_are_taken_and_others_refused() {
    let clear = || V::A(vec![V::A(vec![V::S("AllBlocksCleared")])]);
    let read = |value: &V| {
        let mut out = Vec::new();
        put(value, &mut out);
        decode(&out)
    };
    assert_eq!(read(&V::A(vec![V::N(3), clear()])).unwrap().at, 3.0);
    let map = V::M(vec![
        ("data_parallel_rank", V::N(2)),
        ("new", V::A(vec![V::Nil])),
        ("events", clear()),
        ("ts", V::F(4.0)),
    ]);
    let batch = read(&map).unwrap();
    assert_eq!(
        (batch.at, batch.rank, batch.events.as_slice()),
        (4.0, Some(2), [KvEvent::Cleared].as_slice())
    );
    assert_eq!(read(&V::A(vec![V::F(1.0)])), Err(WireError::NotABatch));
    assert_eq!(read(&V::A(vec![V::S("now"), clear()])), Err(WireError::NotABatch));
    assert_eq!(read(&V::A(vec![V::F(1.0), V::N(1)])), Err(WireError::NotABatch));
    assert_eq!(read(&V::N(1)), Err(WireError::NotABatch));
    assert_eq!(decode(b""), Err(WireError::Truncated));
    assert_eq!(decode(b"\xc1"), Err(WireError::NotMsgpack));
    // A list that claims four thousand million events, and events that claim as much.
    assert_eq!(decode(b"\x92\x01\xdd\xff\xff\xff\xff"), Err(WireError::Truncated));
    assert_eq!(
        decode(b"\x92\x01\x91\x92\xacBlockRemoved\xdd\xff\xff\xff\xff"),
        Err(WireError::Truncated)
    );
    // Deep nesting is passed over without a stack.
    let deep = [b"\x92\x01\x91\x92\xa1x".as_slice(), &vec![0x91; 1 << 20], &[0xc0]].concat();
    assert_eq!(decode(&deep).unwrap().unknown, 1);
}

fn event_strategy() -> impl Strategy<Value = Stored> {
    let extra = prop_oneof![
        "[a-z]{1,6}".prop_map(|text| Extra::Text(text.into())),
        ("[a-z]{1,6}", any::<i64>()).prop_map(|(id, at)| Extra::Item(id.into(), at)),
    ];
    let adapter = prop_oneof![
        Just(None),
        "[A-Z]{1,8}".prop_map(|name| Some(Adapter::Name(name.into()))),
        any::<i64>().prop_map(|id| Some(Adapter::Id(id))),
    ];
    let tier =
        prop_oneof![Just(Tier::Gpu), Just(Tier::Cpu), Just(Tier::Storage), Just(Tier::Other)];
    let attention = prop_oneof![
        Just(Attention::Whole),
        any::<u32>().prop_map(Attention::Window),
        Just(Attention::Other)
    ];
    let blocks = (prop::collection::vec(any::<u64>(), 1..6), 1_u32..5, any::<bool>());
    (
        blocks,
        prop::option::of(1..u64::MAX),
        tier,
        adapter,
        prop::collection::vec((0_u32..5, extra), 0..4),
        any::<u32>(),
        attention,
    )
        .prop_map(
            |(
                (hashes, block_size, tokenless),
                parent,
                tier,
                adapter,
                mut extra,
                group,
                attention,
            )| {
                extra.sort_by_key(|(block, _)| *block);
                let count =
                    if tokenless { 0 } else { u32::try_from(hashes.len()).unwrap() * block_size };
                Stored {
                    tokens: (0..count).map(|at| at.wrapping_mul(0x9e37_79b9)).collect(),
                    hashes: hashes.into_iter().map(EngineHash).collect(),
                    parent: parent.map(EngineHash),
                    block_size,
                    tier,
                    adapter,
                    extra,
                    group,
                    attention,
                }
            },
        )
}

/// How an engine writes hashes.
#[derive(Debug, Clone, Copy)]
enum Style {
    Unsigned,
    Signed,
    Bytes(usize),
}

/// Writes an event as some engine would.
fn written(event: &Stored, style: Style, map: bool) -> V {
    let hash = |hash: &EngineHash| match style {
        Style::Unsigned => V::N(hash.0),
        Style::Signed => V::I(hash.0.cast_signed()),
        Style::Bytes(count) => {
            let mut bytes = vec![0x5a; count - 8];
            bytes.extend_from_slice(&hash.0.to_be_bytes());
            V::B(bytes)
        }
    };
    let mut extra = vec![V::Nil; event.hashes.len().max(5)];
    for (block, key) in &event.extra {
        let key = match key {
            Extra::Text(text) => V::T(text.to_string()),
            Extra::Item(id, at) => V::A(vec![V::T(id.to_string()), V::I(*at)]),
            Extra::Other(_) => V::Nil,
        };
        match &mut extra[*block as usize] {
            V::A(keys) => keys.push(key),
            empty => *empty = V::A(vec![key]),
        }
    }
    let (id, name) = match &event.adapter {
        Some(Adapter::Name(name)) => (V::N(1), V::T(name.to_string())),
        Some(Adapter::Id(id)) => (V::I(*id), V::Nil),
        None => (V::Nil, V::Nil),
    };
    let medium = match event.tier {
        Tier::Gpu => "gpu",
        Tier::Cpu => "CPU_PINNED",
        Tier::Storage => "Disk",
        Tier::Other => "elsewhere",
    };
    let (kind, window) = match event.attention {
        Attention::Whole => ("mla_attention", V::Nil),
        Attention::Window(tokens) => ("sliding_window", V::N(tokens.into())),
        Attention::Other => ("mamba", V::Nil),
    };
    let fields = vec![
        ("type", s()),
        ("block_hashes", V::A(event.hashes.iter().map(hash).collect())),
        ("parent_block_hash", event.parent.as_ref().map_or(V::Nil, hash)),
        ("token_ids", V::A(event.tokens.iter().map(|token| V::N(u64::from(*token))).collect())),
        ("block_size", V::N(event.block_size.into())),
        ("lora_id", id),
        ("medium", V::S(medium)),
        ("lora_name", name),
        ("extra_keys", V::A(extra)),
        ("group_idx", V::N(event.group.into())),
        ("kv_cache_spec_kind", V::S(kind)),
        ("kv_cache_spec_sliding_window", window),
        ("session_id", V::S("later")),
    ];
    if map { V::M(fields) } else { V::A(fields.into_iter().map(|(_, value)| value).collect()) }
}

proptest! {
    #[test]
    fn what_is_written_is_read(
        events in prop::collection::vec((event_strategy(), any::<bool>()), 0..4),
        style in prop_oneof![Just(Style::Unsigned), Just(Style::Signed), Just(Style::Bytes(8)), Just(Style::Bytes(16)), Just(Style::Bytes(32))],
    ) {
        let payload = packed(events.iter().map(|(event, map)| written(event, style, *map)).collect());
        let batch = decode(&payload).unwrap();
        prop_assert_eq!((batch.unknown, batch.malformed), (0, 0));
        let expected: Vec<KvEvent> = events.into_iter().map(|(event, _)| KvEvent::Stored(event)).collect();
        prop_assert_eq!(batch.events, expected);
        // Cut anywhere, it is no batch.
        for cut in 0..payload.len() - 1 {
            prop_assert_eq!(decode(&payload[..cut]), Err(WireError::Truncated));
        }
    }

    #[test]
    fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _any = decode(&bytes);
    }
}

#[test]
fn no_change_of_what_engines_sent_panics() {
    let payloads: Vec<Vec<u8>> = payloads().into_iter().map(|(payload, _)| payload).collect();
    let mut runner = proptest::test_runner::TestRunner::default();
    let edits = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..3), 1..6);
    let strategy = (prop::sample::select(payloads), edits);
    runner
        .run(&strategy, |(mut payload, edits)| {
            for (at, byte, kind) in edits {
                let at = at.index(payload.len());
                match kind {
                    0 => payload[at] = byte,
                    1 => payload.truncate(at.max(1)),
                    _ => payload.insert(at, byte),
                }
            }
            if let Ok(batch) = decode(&payload) {
                for event in &batch.events {
                    if let KvEvent::Stored(stored) = event {
                        prop_assert!(
                            stored.tokens.is_empty()
                                || stored.tokens.len()
                                    == stored.hashes.len() * stored.block_size as usize
                        );
                    }
                }
            }
            Ok(())
        })
        .unwrap();
}
