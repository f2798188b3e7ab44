use std::io::Write as _;

use proptest::prelude::*;

use super::*;

const JSON: &str = "application/json";
const EVENTS: &str = "text/event-stream; charset=utf-8";

fn read(content_type: &str, encoding: Option<&[u8]>, body: &[u8], chunk: usize) -> (bool, Usage) {
    let mut reader = ResponseReader::new(Some(content_type.as_bytes()), encoding, 1 << 20);
    for piece in body.chunks(chunk) {
        reader.push(piece);
    }
    (reader.first_token(), reader.finish())
}

fn tokens(prompt: Option<u64>, completion: Option<u64>, cached: Option<u64>) -> Usage {
    Usage {
        prompt_tokens: prompt,
        completion_tokens: completion,
        cached_tokens: cached,
        response_id: None,
    }
}

#[track_caller]
fn check(content_type: &str, body: &str, expected: &Usage) {
    for chunk in [1, 7, 4096] {
        let (_, usage) = read(content_type, None, body.as_bytes(), chunk);
        assert_eq!(&usage, expected, "in chunks of {chunk}: {body}");
    }
}

/// Frames each document as an event.
fn events(documents: &[&str]) -> String {
    documents.iter().map(|document| format!("data: {document}\n\n")).collect()
}

const CHAT_ROLE: &str = r#"{"choices":[{"finish_reason":null,"index":0,"delta":{"role":"assistant","content":null}}],"created":1796005575,"id":"chatcmpl-TwAc","model":"tiny","system_fingerprint":"b0-unknown","object":"chat.completion.chunk"}"#;
const CHAT_TEXT: &str = r#"{"choices":[{"finish_reason":null,"index":0,"delta":{"content":" implementation"}}],"created":1796005575,"id":"chatcmpl-TwAc","model":"tiny","system_fingerprint":"b0-unknown","object":"chat.completion.chunk"}"#;
const CHAT_STOP: &str = r#"{"choices":[{"finish_reason":"length","index":0,"delta":{}}],"created":1796005575,"id":"chatcmpl-TwAc","model":"tiny","object":"chat.completion.chunk"}"#;
const CHAT_USAGE: &str = r#"{"choices":[],"created":1796005575,"id":"chatcmpl-TwAc","model":"tiny","object":"chat.completion.chunk","usage":{"completion_tokens":3,"prompt_tokens":16,"total_tokens":19,"prompt_tokens_details":{"cached_tokens":5}},"timings":{"cache_n":0,"prompt_n":11,"prompt_ms":2.34,"predicted_n":3,"predicted_ms":1.024}}"#;
const PROGRESS: &str = r#"{"choices":[{"finish_reason":null,"index":0,"delta":{"role":"assistant","content":null}}],"object":"chat.completion.chunk","timings":{"cache_n":15,"prompt_n":0,"predicted_n":0},"prompt_progress":{"total":16,"cache":15,"processed":15,"time_ms":0}}"#;
const LLAMA_TEXT: &str = r#"{"index":0,"content":" descriptors","tokens":[1927],"stop":false,"id_slot":-1,"tokens_predicted":1,"tokens_evaluated":6}"#;
const LLAMA_LAST: &str = r#"{"index":0,"content":"","tokens":[],"id_slot":0,"stop":true,"tokens_predicted":2,"generation_settings":{"stop":[],"n_predict":2},"prompt":"Hello world","tokens_cached":7,"timings":{"cache_n":5,"prompt_n":1,"prompt_ms":0.431,"predicted_n":2}}"#;

#[test]
fn usage_is_read_from_a_whole_answer() {
    check(
        JSON,
        r#"{"choices":[{"text":" d","index":0}],"object":"text_completion","usage":{"completion_tokens":3,"prompt_tokens":6,"total_tokens":9,"prompt_tokens_details":{"cached_tokens":5}},"id":"chatcmpl-q","timings":{"cache_n":1,"prompt_n":1,"predicted_n":1}}"#,
        &tokens(Some(6), Some(3), Some(5)),
    );
    check(JSON, LLAMA_LAST, &tokens(Some(6), Some(2), Some(5)));
    check(
        JSON,
        r#"{"usage":{"input_tokens":10,"cache_read_input_tokens":90,"cache_creation_input_tokens":5,"output_tokens":7},"type":"message","id":"msg_1"}"#,
        &tokens(Some(105), Some(7), Some(90)),
    );
    check(
        JSON,
        r#"{"usage":{"prompt_tokens":100,"input_tokens":10,"cache_read_input_tokens":90}}"#,
        &tokens(Some(100), None, Some(90)),
    );
    check(
        "application/problem+json",
        r#"{"usage":{"prompt_tokens":1}}"#,
        &tokens(Some(1), None, None),
    );
    check("text/plain", r#"{"usage":{"prompt_tokens":1}}"#, &tokens(None, None, None));
    check("", r#"{"usage":{"prompt_tokens":1}}"#, &tokens(None, None, None));
}

#[test]
fn only_a_response_object_gives_its_id() {
    let stored =
        |id: Option<&str>| Usage { response_id: id.map(str::to_owned), ..tokens(None, None, None) };
    check(JSON, r#"{"id":"resp_1","object":"response"}"#, &stored(Some("resp_1")));
    check(
        JSON,
        r#"{"object":"response","output":[{"id":"msg_1","object":"x"}],"id":"resp_1"}"#,
        &stored(Some("resp_1")),
    );
    check(JSON, r#"{"id":"chatcmpl-1","object":"chat.completion"}"#, &stored(None));
    check(JSON, r#"{"id":"resp_1"}"#, &stored(None));
    check(JSON, r#"{"id":7,"object":"response"}"#, &stored(None));
    check(JSON, &format!(r#"{{"id":"{}","object":"response"}}"#, "x".repeat(513)), &stored(None));
    check(
        EVENTS,
        &events(&[
            r#"{"type":"response.created","response":{"id":"resp_2","object":"response","usage":null}}"#,
        ]),
        &stored(Some("resp_2")),
    );
}

#[test]
fn usage_is_read_from_a_stream() {
    check(
        EVENTS,
        &events(&[CHAT_ROLE, CHAT_TEXT, CHAT_STOP, CHAT_USAGE, "[DONE]"]),
        &tokens(Some(16), Some(3), Some(5)),
    );
    check(EVENTS, &events(&[LLAMA_TEXT, LLAMA_LAST]), &tokens(Some(6), Some(2), Some(5)));
    check(EVENTS, &events(&[PROGRESS]), &tokens(Some(15), Some(0), Some(15)));
    check(
        EVENTS,
        &events(&[
            r#"{"usage":{"prompt_tokens":4,"completion_tokens":1}}"#,
            r#"{"usage":null}"#,
            r#"{"usage":{"prompt_tokens":4,"completion_tokens":2}}"#,
        ]),
        &tokens(Some(4), Some(2), None),
    );
    let anthropic = events(&[
        r#"{"type":"message_start","message":{"id":"msg_1","usage":{"input_tokens":10,"cache_read_input_tokens":90,"cache_creation_input_tokens":0,"output_tokens":1}}}"#,
        r#"{"type":"ping"}"#,
        r#"{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"Hi"}}"#,
        r#"{"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":15}}"#,
    ]);
    check(EVENTS, &anthropic, &tokens(Some(100), Some(15), Some(90)));
    let completed = r#"{"type":"response.completed","response":{"object":"response","id":"resp_1","usage":{"input_tokens":9,"input_tokens_details":{"cached_tokens":8},"output_tokens":3}}}"#;
    check(
        EVENTS,
        &events(&[completed]),
        &Usage { response_id: Some("resp_1".to_owned()), ..tokens(Some(9), Some(3), Some(8)) },
    );
}

#[test]
fn events_end_in_every_way_the_standard_allows() {
    let usage = tokens(Some(4), Some(2), None);
    for body in [
        "data: {\"usage\":{\"prompt_tokens\":4,\"completion_tokens\":2}}\n\n",
        "data:{\"usage\":{\"prompt_tokens\":4,\"completion_tokens\":2}}\r\r",
        ": c\r\nevent: x\r\ndata: {\"usage\":\r\ndata: {\"prompt_tokens\":4,\r\ndata: \"completion_tokens\":2}}\r\n\r\n",
        "data: {\"usage\":{\"prompt_tokens\":4,\"completion_tokens\":2}}",
        "datax: {\"usage\":1}\ndata\ndat\n\ndata: {\"usage\":{\"prompt_tokens\":1\ndata: }\n\ndata: {\"usage\":{\"prompt_tokens\":4,\"completion_tokens\":2}}\n\n",
        "data: oops\n\ndata: {\"usage\":{\"prompt_tokens\":4,\"completion_tokens\":2}}\n\n",
        "id: 1\ndata:  {\"usage\":{\"prompt_tokens\":4,\nretry: 5\ndata:\ndata: \"completion_tokens\":2}}\n\n",
    ] {
        check(EVENTS, body, &usage);
    }
}

#[test]
fn a_wrong_value_is_an_unknown_one() {
    let unknown = tokens(None, None, None);
    for body in [
        r#"{"usage":"oops"}"#,
        r#"{"usage":{"prompt_token_details":0}}"#,
        r#"{"usage":{"prompt_tokens":"1024"}}"#,
        r#"{"usage":{"prompt_tokens":-5}}"#,
        r#"{"usage":{"prompt_tokens":1e300}}"#,
        r#"{"usage":{"prompt_tokens":18446744073709551616}}"#,
        r#"{"usage":{"prompt_tokens":[1],"completion_tokens":{"a":1}}}"#,
        r#"{"usage":null}"#,
        r#"{"usage":[]}"#,
        r#"{"usage":[{"prompt_tokens":1}]}"#,
        r#"{"usage":{"prompt_tokens_details":5,"input_tokens":null}}"#,
        "[]",
        "",
        "oops",
    ] {
        check(JSON, body, &unknown);
    }
    let half = u64::MAX / 2;
    check(
        JSON,
        r#"{"usage":{"prompt_tokens":9223372036854775807,"completion_tokens":9223372036854775807}}"#,
        &tokens(Some(half), Some(half), None),
    );
    check(
        JSON,
        r#"{"usage":{"input_tokens":18446744073709551615,"cache_read_input_tokens":1}}"#,
        &tokens(None, None, Some(1)),
    );
    check(
        JSON,
        r#"{"timings":{"cache_n":18446744073709551615,"prompt_n":1}}"#,
        &tokens(None, None, Some(u64::MAX)),
    );
}

#[test]
fn the_first_token_is_the_first_generated_text() {
    let check = |documents: &[&str], expected: bool| {
        for chunk in [1, 9, 4096] {
            let (seen, _) = read(EVENTS, None, events(documents).as_bytes(), chunk);
            assert_eq!(seen, expected, "{documents:?}");
        }
    };
    check(&[CHAT_ROLE, PROGRESS, CHAT_STOP, CHAT_USAGE, "[DONE]"], false);
    check(
        &[r#"{"type":"ping"}"#, r#"{"choices":[{"delta":{"role":"assistant","content":""}}]}"#],
        false,
    );
    check(&[r#"{"type":"message_delta","delta":{"stop_reason":"end_turn"}}"#, LLAMA_LAST], false);
    check(&[r#"{"choices":[{"delta":{"tool_calls":[]}}],"error":"content"}"#], false);
    check(&[r#"{"type":"response.output_text.delta","delta":""}"#], false);
    check(&[CHAT_TEXT], true);
    check(&[LLAMA_TEXT], true);
    check(&[r#"{"choices":[{"text":"x"}]}"#], true);
    check(&[r#"{"choices":[{"delta":{"reasoning":"x"}}]}"#], true);
    check(&[r#"{"choices":[{"delta":{"reasoning_content":"x"}}]}"#], true);
    check(
        &[r#"{"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"name":"f"}}]}}]}"#],
        true,
    );
    check(&[r#"{"type":"response.output_text.delta","delta":"x"}"#], true);
    check(&[r#"{"type":"content_block_delta","delta":{"type":"text_delta","text":"x"}}"#], true);
    check(
        &[
            r#"{"type":"content_block_delta","delta":{"type":"input_json_delta","partial_json":"{"}}"#,
        ],
        true,
    );
}

#[test]
fn where_text_cannot_be_told_any_byte_is_the_first_token() {
    for (content_type, encoding) in
        [(JSON, None), ("text/vtt", None), (EVENTS, Some(b"br".as_slice())), (JSON, Some(b"br"))]
    {
        assert!(!read(content_type, encoding, b"", 1).0);
        assert_eq!(read(content_type, encoding, b" ", 1), (true, tokens(None, None, None)));
    }
}

fn gzip(body: &str) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(body.as_bytes()).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn a_compressed_answer_is_read_on_the_side() {
    let body = events(&[CHAT_ROLE, CHAT_TEXT, CHAT_USAGE]);
    let whole = (true, tokens(Some(16), Some(3), Some(5)));
    let zstd = zstd::encode_all(body.as_bytes(), 1).unwrap();
    for chunk in [1, 50, 4096] {
        assert_eq!(read(EVENTS, Some(b"gzip"), &gzip(&body), chunk), whole);
        assert_eq!(read(EVENTS, Some(b"zstd"), &zstd, chunk), whole);
    }
    assert_eq!(read(EVENTS, Some(b"gzip"), body.as_bytes(), 50), (true, tokens(None, None, None)));
}

#[test]
fn a_count_that_grows_is_unknown_once_the_answer_is_too_long_to_follow() {
    let usage = r#"{"usage":{"prompt_tokens":4,"completion_tokens":1}}"#;
    let body = events(&[usage, &format!(r#"{{"x":"{}"}}"#, "x".repeat(2 << 20))]);
    assert_eq!(read(EVENTS, Some(b"gzip"), &gzip(&body), 4096).1, tokens(Some(4), None, None));
    assert_eq!(read(EVENTS, None, body.as_bytes(), 4096).1, tokens(Some(4), Some(1), None));
}

proptest! {
    #[test]
    fn any_chunks_give_the_same_usage(order in prop::collection::vec(0_usize..7, 0..6), cuts in prop::collection::vec(1_usize..300, 1..20), end in 0_usize..3) {
        let documents = [CHAT_ROLE, CHAT_TEXT, CHAT_STOP, CHAT_USAGE, PROGRESS, LLAMA_TEXT, LLAMA_LAST];
        let chosen: Vec<&str> = order.iter().map(|&index| documents[index]).collect();
        let body = events(&chosen).replace('\n', ["\n", "\r", "\r\n"][end]);
        let whole = read(EVENTS, None, body.as_bytes(), body.len().max(1));
        let mut reader = ResponseReader::new(Some(EVENTS.as_bytes()), None, 1 << 20);
        let mut rest = body.as_bytes();
        for cut in cuts.iter().cycle() {
            let (piece, after) = rest.split_at(rest.len().min(*cut));
            reader.push(piece);
            rest = after;
            if rest.is_empty() {
                break;
            }
        }
        prop_assert_eq!((reader.first_token(), reader.finish()), whole);
    }

    #[test]
    fn any_bytes_are_survived(bytes: Vec<u8>, text in "(data|usage|:|\\{|\\}|\"|\n|\r|5| ){0,40}", chunk in 1_usize..30) {
        for body in [&bytes, text.as_bytes()] {
            for encoding in [None, Some(b"gzip".as_slice()), Some(b"zstd")] {
                read(EVENTS, encoding, body, chunk);
                read(JSON, encoding, body, chunk);
            }
        }
    }
}
