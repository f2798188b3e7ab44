use std::io::Write as _;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

const CHAT: &[u8] = b"/v1/chat/completions";
const OPTIONS: ReadOptions = ReadOptions {
    max_decoded_bytes: 1 << 24,
    use_user_field: true,
    block_bytes: 0,
    keep_decoded: false,
};

fn reader(headers: (Option<&str>, Option<&str>)) -> RequestReader {
    let [content_type, encoding] = [headers.0, headers.1].map(|value| value.map(str::as_bytes));
    RequestReader::new(CHAT, content_type, encoding, &OPTIONS)
}

fn read_with(headers: (Option<&str>, Option<&str>), body: &[u8], chunk: usize) -> Reading {
    let mut reader = reader(headers);
    for piece in body.chunks(chunk) {
        reader.push(piece);
    }
    reader.reading(End::Whole)
}

/// Reads `body` whole and byte by byte, which must not differ.
#[track_caller]
fn read(body: impl AsRef<[u8]>) -> Reading {
    let body = body.as_ref();
    let whole = read_with((None, None), body, body.len().max(1));
    assert_eq!(whole, read_with((None, None), body, 1), "byte by byte");
    whole
}

fn opening(body: impl AsRef<[u8]>) -> Option<u64> {
    read(body).opening
}

const UNREADABLE: fn(Why) -> Completeness = Completeness::Unreadable;

/// What a case expects: text bytes, messages, token ids, media.
type Counts = (u64, u64, u64, u64);

#[track_caller]
fn check(body: &str, expected: Counts) {
    let reading = read(body);
    assert_eq!(reading.completeness, Completeness::Whole, "{body}");
    assert_eq!(reading.model.as_deref(), Some("m1"), "{body}");
    let Reading { text_bytes, messages, token_ids, media, .. } = reading;
    assert_eq!((text_bytes, messages, token_ids, media), expected, "{body}");
}

#[test]
fn chat_messages_are_read_in_every_shape() {
    check(
        r#"{"model":"m1","temperature":0,"messages":[{"role":"user","content":"who are you"}]}"#,
        (11, 1, 0, 0),
    );
    check(
        r#"{"model":"m1","messages":[{"role":"user","content":[{"type":"text","text":"what is this"},{"type":"image_url","image_url":{"url":"https://example.invalid/a.png"}},{"type":"input_audio","input_audio":{"data":"UklGRg==","format":"wav"}},{"type":"brand_new_part","x":1}]}]}"#,
        (12, 1, 0, 2),
    );
    check(
        r#"{"model":"m1","messages":[{"role":"user","content":"n?"},{"role":"assistant","content":null,"tool_calls":[{"id":"c1","type":"function","function":{"name":"f","arguments":"{}"}}]},{"role":"tool","tool_call_id":"c1","content":"42"}]}"#,
        (7, 3, 0, 0),
    );
    check(
        r#"{"model":"m1","messages":[{"role":"assistant","content":"","tool_calls":null},{"role":"assistant","tool_calls":[]}]}"#,
        (0, 2, 0, 0),
    );
    check(
        r#"{"model":"m1","messages":[{"role":"tool","content":"r"},{"role":"assistant","tool_calls":[{"type":"function","function":{"name":"f","arguments":""}}]}]}"#,
        (2, 2, 0, 0),
    );
    check(
        r#"{"model":"m1","messages":[{"role":"assistant","reasoning":"abc","content":"d"},{"role":"assistant","reasoning_content":"ef"}]}"#,
        (6, 2, 0, 0),
    );
    check(r#"{"model":"m1","messages":[{"role":"user","content":"你好🦀\u00e9"}]}"#, (12, 1, 0, 0));
    for (messages, count) in [
        ("{}", 0),
        ("[null]", 0),
        ("[[]]", 0),
        (r#""x""#, 0),
        ("[{}]", 1),
        (r#"[{"role":["user"],"content":{"a":"b"}}]"#, 1),
    ] {
        check(&format!(r#"{{"model":"m1","messages":{messages}}}"#), (0, count, 0, 0));
    }
}

#[test]
fn messages_of_the_messages_api_are_read() {
    check(
        r#"{"model":"m1","system":"be brief","messages":[{"role":"user","content":[{"type":"text","text":"hi"},{"type":"image","source":{"type":"base64","media_type":"image/png","data":"iVBORw0KGgo="}}]},{"role":"assistant","content":[{"type":"thinking","thinking":"hm","signature":"xxxx"},{"type":"tool_use","id":"t1","name":"f","input":{"a":[1,"b"]}}]},{"role":"user","content":[{"type":"tool_result","tool_use_id":"t1","content":[{"type":"text","text":"42"}]}]}]}"#,
        (8 + 2 + 2 + 1 + 3 + 2, 3, 0, 1),
    );
    check(
        r#"{"model":"m1","system":[{"type":"text","text":"be","cache_control":{"type":"ephemeral"}},{"type":"text","text":"brief"}],"messages":[]}"#,
        (7, 0, 0, 0),
    );
}

#[test]
fn items_of_the_responses_api_are_read() {
    check(r#"{"model":"m1","input":[{"role":"user","content":"Hello"}]}"#, (5, 1, 0, 0));
    check(r#"{"model":"m1","input":"Hello"}"#, (5, 1, 0, 0));
    check(
        r#"{"model":"m1","input":[{"type":"message","role":"user","content":[{"type":"input_text","text":"hi"},{"type":"input_image","image_url":"data:image/png;base64,iVBORw0KGgo="}]}],"instructions":"be brief","previous_response_id":"resp_1"}"#,
        (10, 1, 0, 1),
    );
    check(
        r#"{"model":"m1","input":[{"type":"message","role":"assistant","content":[{"type":"output_text","text":"some text"}]},{"type":"function_call","call_id":"c1","name":"f","arguments":"{}"},{"type":"function_call_output","call_id":"c1","output":"1"},{"type":"reasoning","encrypted_content":"AAAA","summary":[]},{"type":"item_reference","id":"x"}]}"#,
        (13, 5, 0, 0),
    );
    check(
        r#"{"model":"m1","input":[{"role":"user","content":[{"type":"input_file","filename":"a.pdf","file_data":"AAAA"}]}]}"#,
        (0, 1, 0, 1),
    );
}

#[test]
fn prompts_are_counted_one_by_one() {
    check(r#"{"model":"m1","prompt":["a","b",""]}"#, (2, 3, 0, 0));
    check(r#"{"model":"m1","prompt":[]}"#, (0, 0, 0, 0));
    check(r#"{"model":"m1","prompt":""}"#, (0, 1, 0, 0));
    check(r#"{"model":"m1","prompt":null}"#, (0, 0, 0, 0));
    check(r#"{"model":"m1","prompt":NaN,"x":[Infinity,-Infinity]}"#, (0, 0, 0, 0));
    check(r#"{"model":"m1","prompt":"明月","stream":"true"}"#, (6, 1, 0, 0));
    check(r#"{"model":"m1","prompt":[1,2,3]}"#, (0, 1, 3, 0));
    check(r#"{"model":"m1","input":[[1,2,3],[4]]}"#, (0, 2, 4, 0));
    check(r#"{"model":"m1","input":[4294967294]}"#, (0, 1, 1, 0));
    check(r#"{"model":"m1","prompt":[0,4294967295]}"#, (0, 1, 2, 0));
    check(r#"{"model":"m1","prompt":[[]]}"#, (0, 0, 0, 0));
    check(r#"{"model":"m1","prompt":"x","stream_options":[]}"#, (1, 1, 0, 0));
}

#[test]
fn media_are_counted_and_not_measured() {
    for url in ["data:image/png;base64,!!!not base64", "data:;base64,", "", "x"] {
        let part =
            format!(r#"{{"type":"image_url","image_url":{{"url":"{url}","detail":"high"}}}}"#);
        check(
            &format!(
                r#"{{"model":"m1","messages":[{{"role":"user","content":[{part},{part},{{"type":"image_url","image_url":null}}]}}]}}"#
            ),
            (0, 1, 0, 2),
        );
    }
}

#[test]
fn tools_are_text_and_opaque() {
    check(
        r#"{"model":"m1","messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":{"name":"f"}},{"type":"web_search"},{"type":"custom","custom":{"name":"g","format":{"type":"text"}}}],"tool_choice":{"type":"function","function":{"name":"f"}}}"#,
        (1 + 25 + 14 + 35, 1, 0, 0),
    );
    let tools = |schema: &str| {
        opening(format!(r#"{{"messages":[{{"role":"user","content":"x"}}],"tools":[{schema}]}}"#))
    };
    assert_eq!(
        tools(r#"{"a":[1,true],"b":"c"}"#),
        tools("{ \"a\" : [ 1,\n true ] , \"\\u0062\":\"c\" }")
    );
    for other in [
        r#"{"a":[1,true],"b":"d"}"#,
        r#"{"a":[1],"b":"c"}"#,
        r#"{"a":["1",true],"b":"c"}"#,
        r#"{"a":{"1":true},"b":"c"}"#,
        r#"{"a":[1,true]},"b","c""#,
    ] {
        assert_ne!(tools(r#"{"a":[1,true],"b":"c"}"#), tools(other), "{other}");
    }
    for depth in [127, 128, 129, 1000] {
        let schema = format!("{}1{}", "[".repeat(depth), "]".repeat(depth));
        let reading = read(format!(r#"{{"tools":{schema},"model":"m1"}}"#));
        assert_eq!(
            (reading.completeness, reading.model.as_deref()),
            (Completeness::Whole, Some("m1")),
            "{depth} levels"
        );
    }
}

#[test]
fn the_last_of_several_models_counts() {
    let model = |body: &str| read(body).model;
    assert_eq!(
        model(r#"{"model":"cheap","model":"dear","stream":false,"stream":true}"#).as_deref(),
        Some("dear")
    );
    assert_eq!(model(r#"{"model":"a","MODEL":"b"}"#).as_deref(), Some("a"));
    assert_eq!(model(r#"{"model":"a","mod\u0065l":"b"}"#).as_deref(), Some("b"));
    assert_eq!(model(r#"{"\ud800":1,"model":"m1"}"#).as_deref(), Some("m1"));
    for name in ["org/llama-3.1-8b:v2@sha", "模型/α", "m1 ", "../../etc/passwd", "a\nb", "m1\0"]
    {
        assert_eq!(
            model(&json!({"model": name, "prompt": "x"}).to_string()).as_deref(),
            Some(name)
        );
    }
    for body in [
        r#"{"model":""}"#,
        r#"{"model":null}"#,
        r#"{"model":["m1"]}"#,
        r#"{"model":{"model":"m1"}}"#,
        r#"{"prompt":"x"}"#,
    ] {
        assert_eq!(model(body), None, "{body}");
    }
    for (length, kept) in [(256, true), (257, false), (10_000, false)] {
        assert_eq!(model(&format!(r#"{{"model":"{}"}}"#, "m".repeat(length))).is_some(), kept);
    }
}

#[test]
fn the_binding_length_limit_counts() {
    let cases = [
        (r#"{"max_tokens":1,"max_completion_tokens":2,"n_predict":3}"#, Some(2)),
        (r#"{"n_predict":3,"max_tokens":1,"max_output_tokens":4}"#, Some(1)),
        (r#"{"n_predict":3,"max_output_tokens":4}"#, Some(4)),
        (r#"{"n_predict":3}"#, Some(3)),
        (r#"{"n_predict":-1}"#, None),
        (r#"{"max_completion_tokens":null,"max_tokens":7}"#, Some(7)),
        (r#"{"max_tokens":"7"}"#, None),
        (r#"{"max_tokens":1e300}"#, None),
        (r#"{"max_tokens":99999999999999999999}"#, None),
        (r#"{"x":{"max_tokens":7}}"#, None),
    ];
    for (body, expected) in cases {
        assert_eq!(read(body).max_tokens, expected, "{body}");
    }
}

#[test]
fn the_most_specific_session_key_counts() {
    let all = r#"{"previous_response_id":"r","user":"u","prompt_cache_key":"k"}"#;
    assert_eq!(read(all).key, Some(BodyKey::PromptCacheKey("k".to_owned())));
    assert_eq!(
        read(r#"{"previous_response_id":"r","user":"u"}"#).key,
        Some(BodyKey::User("u".to_owned()))
    );
    assert_eq!(
        read(r#"{"previous_response_id":"r","user":""}"#).key,
        Some(BodyKey::PreviousResponseId("r".to_owned()))
    );
    assert_eq!(
        read(r#"{"user":{"a":1},"prompt_cache_key":5,"previous_response_id":["r"]}"#).key,
        None
    );
    let without_user = ReadOptions { use_user_field: false, ..OPTIONS };
    let mut reader = RequestReader::new(CHAT, None, None, &without_user);
    reader.push(br#"{"user":"u"}"#);
    assert_eq!(reader.reading(End::Whole).key, None);
}

#[test]
fn a_long_session_key_is_kept_as_its_hash() {
    let key = |length: usize, last: &str| match read(
        json!({"prompt_cache_key": "k".repeat(length) + last}).to_string(),
    )
    .key
    {
        Some(BodyKey::PromptCacheKey(key)) => key,
        other => panic!("{other:?}"),
    };
    assert_eq!(key(511, "x").len(), 512);
    assert_eq!(key(512, "x").len(), 16);
    assert_eq!(key(9999, "x"), key(9999, "x"));
    assert_ne!(key(9999, "x"), key(9999, "y"));
}

/// A conversation whose parts can be changed one at a time.
fn conversation() -> Value {
    json!({
        "model": "m1",
        "cache_salt": "t-a",
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "assistant", "content": "how can I help?"},
            {"role": "developer", "content": [{"type": "text", "text": "and kind"}]},
            {"role": "user", "content": [
                {"type": "text", "text": "hi"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO"}},
            ]},
        ],
    })
}

fn changed(pointer: &str, value: Value) -> Option<u64> {
    let mut body = conversation();
    *body.pointer_mut(pointer).unwrap() = value;
    opening(body.to_string())
}

#[test]
fn an_opening_changes_with_each_of_its_parts() {
    let original = opening(conversation().to_string());
    for (pointer, value) in [
        ("/model", json!("m2")),
        ("/cache_salt", json!("t-b")),
        ("/cache_salt", json!(5)),
        ("/tools/0/function/name", json!("g")),
        ("/messages/0/content", json!("be long")),
        ("/messages/2/content/0/text", json!("and mean")),
        ("/messages/3/content/0/text", json!("ho")),
        ("/messages/3/content/1/image_url/url", json!("data:image/png;base64,iVBP")),
        ("/messages/3/role", json!("assistant")),
    ] {
        assert_ne!(changed(pointer, value), original, "{pointer}");
    }
    let with = |name: &str, text: &str| {
        let mut body = conversation();
        body[name] = json!(text);
        opening(body.to_string())
    };
    assert_ne!(with("instructions", "x"), original);
    assert_ne!(with("instructions", "x"), with("system", "x"));
}

#[test]
fn an_opening_stays_while_a_conversation_grows() {
    let original = opening(conversation().to_string());
    let mut body = conversation();
    for (role, content) in
        [("assistant", "hello"), ("user", "and?"), ("system", "x"), ("assistant", "well")]
    {
        body["messages"].as_array_mut().unwrap().push(json!({"role": role, "content": content}));
        assert_eq!(opening(body.to_string()), original);
    }
    assert_eq!(changed("/messages/1/content", json!("yes?")), original);
    assert_eq!(changed("/messages/2/content", json!("and kind")), original);
    assert_eq!(changed("/messages/2/role", json!("system")), original);
    for (name, value) in [
        ("temperature", json!(1)),
        ("max_tokens", json!(5)),
        ("user", json!("u")),
        ("stream", json!(true)),
    ] {
        body[name] = value;
    }
    assert_eq!(opening(serde_json::to_string_pretty(&body).unwrap()), original);
}

#[test]
fn the_order_of_members_does_not_matter() {
    let pairs = [
        (
            r#"{"model":"m","messages":[{"role":"user","content":"x","name":"bob"}]}"#,
            r#"{"messages":[{"name":"bob","content":"x","role":"user"}],"model":"m"}"#,
        ),
        (
            r#"{"messages":[{"role":"user","content":[{"type":"text","text":"x"}]}]}"#,
            r#"{"messages":[{"content":[{"text":"x","type":"text"}],"role":"user"}]}"#,
        ),
        (
            r#"{"tools":[1],"system":"s","cache_salt":"c","messages":[{"role":"user","content":"x"}]}"#,
            r#"{"messages":[{"role":"user","content":"x"}],"cache_salt":"c","system":"s","tools":[1]}"#,
        ),
        (
            r#"{"instructions":"i","input":"x"}"#,
            r#"{"input":[{"role":"user","content":"x"}],"instructions":"i"}"#,
        ),
        (
            r#"{"messages":[{"role":"user","content":"a","content":"b"}]}"#,
            r#"{"messages":[{"role":"user","content":"b"}]}"#,
        ),
        (
            r#"{"messages":[{"role":"user","content":"a"}],"messages":[{"role":"user","content":"b"}]}"#,
            r#"{"messages":[{"role":"user","content":"b"}]}"#,
        ),
    ];
    for (one, other) in pairs {
        assert!(opening(one).is_some());
        assert_eq!(opening(one), opening(other), "{one}");
    }
}

#[test]
fn the_opening_of_a_plain_prompt_is_its_beginning() {
    let prompt = |length: usize| opening(json!({"prompt": "p".repeat(length)}).to_string());
    assert_ne!(prompt(1023), prompt(1024));
    assert_eq!(prompt(1024), prompt(1025));
    assert_eq!(prompt(1024), prompt(50_000));
    assert_eq!(prompt(0), None);
    let ids = |length: usize| opening(json!({"prompt": vec![7; length]}).to_string());
    assert_ne!(ids(255), ids(256));
    assert_eq!(ids(256), ids(257));
    assert_ne!(opening(r#"{"prompt":[1,23]}"#), opening(r#"{"prompt":[12,3]}"#));
    assert_eq!(opening(r#"{"prompt":["a","b"]}"#), opening(r#"{"prompt":"a"}"#));
    assert_eq!(opening(r#"{"prompt":[[1,2],[3]]}"#), opening(r#"{"prompt":[1,2]}"#));
}

#[test]
fn without_text_there_is_no_opening() {
    for body in [
        "{}",
        r#"{"model":"m1","tools":[{"a":1}],"cache_salt":"x"}"#,
        r#"{"messages":[{"role":"tool","content":"r"}]}"#,
        r#"{"messages":[{"role":"user","content":""},{"role":"system","content":""}]}"#,
        r#"{"prompt":[]}"#,
    ] {
        assert_eq!(opening(body), None, "{body}");
    }
}

const CONVERSATION: u64 = 6_000_345_259_056_349_182;
const TOKEN_IDS: u64 = 17_159_549_845_868_921_341;

#[test]
fn openings_are_the_same_in_every_release() {
    // A changed value here means that every conversation of every user moves on upgrade.
    assert_eq!(opening(conversation().to_string()), Some(CONVERSATION));
    assert_eq!(opening(r#"{"model":"m1","prompt":[1,2,3]}"#), Some(TOKEN_IDS));
}

#[test]
fn an_unreadable_body_keeps_what_was_learnt() {
    let cases: &[(&[u8], Completeness, Option<&str>)] = &[
        (b"", Completeness::Whole, None),
        (b"\xef\xbb\xbf{\"model\":\"m1\",\"prompt\":\"x\"}", Completeness::Whole, Some("m1")),
        (b"\xff\xfe{\0\"\0", UNREADABLE(Why::NotJson), None),
        (b"{\"model\":\"m1\",\"prompt\":\"\xff\xc3\x28\"}", Completeness::Whole, Some("m1")),
        (b"{\"model\":\"m1\",\"prompt\":\"x\"}garbage", UNREADABLE(Why::Malformed), Some("m1")),
        (b"{\"model\":\"m1\",\"prompt\":\"x\"}\n\n  \t", Completeness::Whole, Some("m1")),
        (
            b"{\"model\":\"m1\",\"prompt\":\"x\"}{\"model\":\"m2\"}",
            UNREADABLE(Why::Malformed),
            Some("m1"),
        ),
        (b"{\"model\":\"m1\",\"prompt\":\"x\",}", UNREADABLE(Why::Malformed), Some("m1")),
        (b"{'model':'m1'}", UNREADABLE(Why::Malformed), None),
        (b"// c\n{\"model\":\"m1\"}", UNREADABLE(Why::NotJson), None),
        (b"{\"model\":\"m1\",\"prompt\":\"x", UNREADABLE(Why::Malformed), Some("m1")),
        (b"model=m1&prompt=x", UNREADABLE(Why::NotJson), None),
        (b"[{\"model\":\"m1\"}]", UNREADABLE(Why::NotJson), None),
        (b"\0", UNREADABLE(Why::NotJson), None),
        (b" ", UNREADABLE(Why::NotJson), None),
    ];
    for (body, completeness, model) in cases {
        let reading = read(body);
        let shown = String::from_utf8_lossy(body);
        assert_eq!(
            (reading.completeness, reading.model.as_deref()),
            (*completeness, *model),
            "{shown}"
        );
        if *completeness == UNREADABLE(Why::NotJson) {
            assert_eq!(reading.text_bytes, body.len() as u64, "{shown}");
        }
    }
}

#[test]
fn lone_surrogates_are_three_bytes_of_text() {
    for (content, bytes) in
        [(r"emoji \ud83d", 9), (r"x \ude00 y", 7), (r"\ud83d\ud83d\ude00", 7), (r"\u0000", 1)]
    {
        check(
            &format!(r#"{{"model":"m1","messages":[{{"role":"user","content":"{content}"}}]}}"#),
            (bytes, 1, 0, 0),
        );
    }
}

#[test]
fn attacks_by_size_cost_linear_time_and_nothing_else() {
    let deep = [
        format!(r#"{{"model":"m1","messages":{}"#, "[".repeat(200_000)),
        format!(r#"{{"model":"m1","x":{}"#, "{\"a\":".repeat(100_000)),
    ];
    for body in deep {
        let reading = read(&body);
        assert_eq!(
            (reading.completeness, reading.model.as_deref()),
            (UNREADABLE(Why::Malformed), Some("m1"))
        );
    }
    let keys: String = (0..100_000).map(|key| format!("\"k{key}\":[],")).collect();
    assert_eq!(read(format!(r#"{{{keys}"model":"m1"}}"#)).model.as_deref(), Some("m1"));
    let escapes = format!(r#"{{"model":"m1","prompt":"{}"}}"#, r"\u0061".repeat(100_000));
    check(&escapes, (100_000, 1, 0, 0));
    assert!(size_of::<Inflate<Document>>() < 2048);
}

#[test]
fn the_path_decides_whether_a_body_is_read() {
    let model = |path: &str| {
        let mut reader = RequestReader::new(path.as_bytes(), None, None, &OPTIONS);
        reader.push(br#"{"model":"m1"}"#);
        let reading = reader.reading(End::Whole);
        assert_eq!(reading.completeness, Completeness::Whole, "{path}");
        assert!(
            reading.model.is_some() || reading == Reading::unread(Completeness::Whole, 14),
            "{path}"
        );
        reading.model
    };
    for path in [
        "/v1/chat/completions",
        "/chat/completions",
        "/openai/v1/chat/completions",
        "/v1/chat/completions/",
        "/v1/chat/completions?x=/y",
        "/v1/completions",
        "/v1/responses",
        "/v1/embeddings",
        "/v1/messages",
        "/completion",
        "",
        "/",
    ] {
        assert!(model(path).is_some(), "{path}");
    }
    for path in [
        "/v1/rerank",
        "/v1/score",
        "/tokenize",
        "/inference/v1/generate",
        "/v1/images/generations",
        "/pooling",
        "/v1/files",
        "/v1/messages/count_tokens",
        "/x?/v1/completions",
        "/xcompletions",
    ] {
        assert!(model(path).is_none(), "{path}");
    }
}

#[test]
fn the_content_type_decides_whether_a_body_may_be_json() {
    let body = br#"{"model":"m1"}"#;
    for header in [
        None,
        Some(""),
        Some("text/plain"),
        Some("APPLICATION/JSON"),
        Some("application/json; charset=utf-16"),
        Some("application/merge-patch+json"),
    ] {
        assert_eq!(read_with((header, None), body, 5).model.as_deref(), Some("m1"), "{header:?}");
    }
    for header in [
        "multipart/form-data; boundary=X",
        "application/x-www-form-urlencoded",
        "application/octet-stream",
    ] {
        assert_eq!(
            read_with((Some(header), None), body, 5),
            Reading::unread(UNREADABLE(Why::NotJson), 14),
            "{header}"
        );
    }
}

#[test]
fn a_compressed_body_is_read_as_its_plain_form() {
    let body = conversation().to_string();
    let plain = read(&body);
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(body.as_bytes()).unwrap();
    let gzip = gzip.finish().unwrap();
    let zstd = zstd::encode_all(body.as_bytes(), 1).unwrap();
    for chunk in [1, 10, 4096] {
        assert_eq!(read_with((None, Some("GZIP")), &gzip, chunk), plain);
        assert_eq!(read_with((None, Some("zstd")), &zstd, chunk), plain);
    }
    let why =
        |encoding: &str, body: &[u8]| read_with((None, Some(encoding)), body, 10).completeness;
    assert_eq!(why("gzip", &gzip[..gzip.len() - 9]), UNREADABLE(Why::Corrupt));
    assert_eq!(why("gzip", body.as_bytes()), UNREADABLE(Why::Corrupt));
    assert_eq!(why("gzip", b""), Completeness::Whole);
    for encoding in ["br", "gzip, gzip", "x-unknown"] {
        assert_eq!(
            read_with((None, Some(encoding)), &gzip, 10),
            Reading::unread(UNREADABLE(Why::Encoding), gzip.len() as u64)
        );
    }
}

#[test]
fn a_body_is_read_up_to_the_limit() {
    let body = json!({"model": "m1", "prompt": "p".repeat(100)}).to_string();
    let length = body.len() as u64;
    for (limit, completeness) in [
        (length + 1, Completeness::Whole),
        (length, Completeness::Whole),
        (length - 1, UNREADABLE(Why::TooLarge)),
        (length / 2, UNREADABLE(Why::TooLarge)),
    ] {
        let options = ReadOptions { max_decoded_bytes: limit, ..OPTIONS };
        let mut reader = RequestReader::new(CHAT, None, None, &options);
        reader.push(body.as_bytes());
        let reading = reader.reading(End::Whole);
        assert_eq!((reading.completeness, reading.model.as_deref()), (completeness, Some("m1")));
    }
}

#[test]
fn a_partial_body_gives_what_has_come() {
    let mut reader = reader((None, None));
    assert_eq!(reader.reading(End::Partial).completeness, Completeness::Partial);
    reader.push(br#"{"model":"m1","messages":[{"role":"user","content":"hi"}"#);
    let partial = reader.reading(End::Partial);
    assert_eq!((partial.completeness, partial.text_bytes), (Completeness::Partial, 2));
    reader.push(b"]}");
    assert_eq!(reader.reading(End::Partial).completeness, Completeness::Partial);
    assert_eq!(
        reader.reading(End::Whole),
        Reading { completeness: Completeness::Whole, ..partial }
    );
}

/// Bodies that are nearly requests, of the words that matter.
fn nearly() -> impl Strategy<Value = Value> {
    let name = prop::sample::select(vec![
        "model",
        "messages",
        "role",
        "content",
        "text",
        "prompt",
        "input",
        "tools",
        "system",
        "user",
        "arguments",
        "image_url",
        "url",
        "max_tokens",
    ]);
    let word = prop_oneof![Just("user".to_owned()), Just("system".to_owned()), ".{0,9}"];
    let leaf = prop_oneof![
        word.prop_map(Value::from),
        any::<i32>().prop_map(Value::from),
        Just(Value::Null)
    ];
    let value = leaf.prop_recursive(5, 40, 5, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((name.clone(), inner), 0..5).prop_map(|members| members
                .into_iter()
                .map(|(name, value)| (name.to_owned(), value))
                .collect()),
        ]
    });
    (value.clone(), value.clone(), value).prop_map(|(messages, input, system)| json!({"messages": messages, "input": input, "system": system, "model": "m1"}))
}

/// Bytes of all strings in messages that have only a role and a string, told by another parser.
fn simple_text(messages: &[(String, String)]) -> u64 {
    messages.iter().map(|(_, content)| content.len() as u64).sum()
}

proptest! {
    #[test]
    fn any_chunks_give_the_same_reading(body in nearly(), cuts in prop::collection::vec(1_usize..60, 1..20)) {
        let body = body.to_string();
        let whole = read_with((None, None), body.as_bytes(), body.len());
        let mut reader = reader((None, None));
        let mut rest = body.as_bytes();
        for cut in cuts.iter().cycle() {
            let (piece, after) = rest.split_at(rest.len().min(*cut));
            reader.push(piece);
            rest = after;
            if rest.is_empty() {
                break;
            }
        }
        prop_assert_eq!(reader.reading(End::Whole), whole);
    }

    #[test]
    fn layout_and_escapes_do_not_matter(body in nearly()) {
        let pretty = serde_json::to_string_pretty(&body).unwrap();
        prop_assert_eq!(read(body.to_string()), read(pretty));
    }

    #[test]
    fn plain_messages_are_counted_exactly(messages in prop::collection::vec(("user|system|assistant|tool", ".{0,30}"), 0..8), model in ".{0,20}") {
        let list: Vec<Value> = messages.iter().map(|(role, content)| json!({"role": role, "content": content})).collect();
        let reading = read(json!({"messages": list, "model": model}).to_string());
        prop_assert_eq!(reading.text_bytes, simple_text(&messages));
        prop_assert_eq!(reading.messages, messages.len() as u64);
        prop_assert_eq!(reading.model, Some(model).filter(|model| !model.is_empty()));
    }

    #[test]
    fn any_bytes_are_survived(bytes: Vec<u8>, text in "(\\{|\\}|\\[|\\]|:|,|\"|\"model\"|\"messages\"|\"prompt\"|\"role\"|\\\\u|1| ){0,40}") {
        for body in [bytes.as_slice(), text.as_bytes(), &[b"{".as_slice(), text.as_bytes()].concat()] {
            read(body);
            read_with((None, Some("gzip")), body, 3);
            read_with((None, Some("zstd")), body, 3);
        }
    }
}

fn blocks(body: &str) -> Arc<TextBlocks> {
    let options = ReadOptions { block_bytes: 16, ..OPTIONS };
    let mut reader = RequestReader::new(b"/v1/chat/completions", None, None, &options);
    for chunk in body.as_bytes().chunks(7) {
        reader.push(chunk);
    }
    reader.reading(End::Whole).text.expect("it was asked for, and the body is whole")
}

#[test]
fn a_growing_conversation_keeps_its_blocks_of_text_wherever_its_tools_stand() {
    let turn = |text: &str| format!(r#"{{"role":"user","content":"{text}"}}"#);
    let body = |turns: &[&str], rest: &str| {
        let turns: Vec<String> = turns.iter().map(|text| turn(text)).collect();
        format!(r#"{{"model":"m","messages":[{}]{rest}}}"#, turns.join(","))
    };
    let (long, more) = ("a".repeat(100), "b".repeat(60));
    let tools = r#","tools":[{"type":"function","function":{"name":"look up"}}]"#;
    let first = blocks(&body(&[&long], tools));
    let second = blocks(&body(&[&long, &more], tools));
    let shared = first.keys.len();
    assert_eq!(shared, 101 / 16);
    assert_eq!(first.keys[..], second.keys[..shared]);
    assert!(second.keys.len() > shared && first.head == second.head && first.head > 0);
    // The share of what is cached counts the tools, which come before the first block.
    #[expect(clippy::cast_precision_loss, reason = "small numbers")]
    let share = (first.head + shared as u64 * 16) as f64 / second.bytes as f64;
    assert!((second.share(u32::try_from(shared).unwrap()) - share).abs() < 1e-12);
    assert_eq!(second.within(share + 0.001), shared);
    for other in [
        body(&[&long], ""),
        body(&[&long], &format!(r#"{tools},"cache_salt":"s""#)),
        body(&[&long], tools).replace(r#""model":"m""#, r#""model":"n""#),
        body(&[&long], &tools.replace("look up", "look down")),
    ] {
        assert!(blocks(&other).keys.iter().all(|key| !first.keys.contains(key)), "{other}");
    }
}

#[test]
fn a_salt_is_the_same_hash_as_the_one_of_an_engine_s_event() {
    let body = br#"{"prompt":"x","cache_salt":"tenant a"}"#;
    let mut reader = RequestReader::new(b"/v1/completions", None, None, &OPTIONS);
    reader.push(&body[..30]);
    reader.push(&body[30..]);
    let reading = reader.reading(End::Whole);
    assert_eq!(reading.salt, Some(crate::pool::request::salt("tenant a")));
    assert_eq!(reading.text, None, "nobody wants blocks");
}
