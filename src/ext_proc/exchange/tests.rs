//! Scripts of messages, as Envoy 1.40 sends them, against the state machine.
#![allow(clippy::wildcard_enum_match_arm, reason = "a test looks for one kind")]

use envoy_types::pb::envoy::config::core::v3::HeaderValue;
use envoy_types::pb::google::protobuf::ListValue;
use pb::processing_response::Response;
use proptest::prelude::*;

use super::*;

const DUPLEX: i32 = 4;
const CHAT: &str =
    r#"{"model":"m1","messages":[{"role":"user","content":"你好🦀 who are you"}],"max_tokens":7}"#;

/// Drives an exchange as the server does: one endpoint, always picked.
struct Script {
    exchange: Exchange,
    sent: Vec<Response>,
    scheduled: Vec<ToSchedule>,
    outcome: Option<Outcome>,
    first_token_after: Option<usize>,
    closed: Option<Close>,
    rejected: Option<Rejection>,
    modes: Option<(i32, i32)>,
    refuse: bool,
}

fn settings() -> ExchangeSettings {
    ExchangeSettings {
        conversation_headers: vec!["x-conversation-id".to_owned(), "x-session-id".to_owned()],
        max_body_bytes: 200_000,
        read: ReadOptions {
            max_decoded_bytes: 1 << 20,
            use_user_field: false,
            keep_decoded: false,
            block_bytes: 0,
        },
        keep_bodies: false,
        errors: ErrorFormat::Json,
        use_subset: true,
    }
}

fn script() -> Script {
    in_modes(Some((DUPLEX, DUPLEX)))
}

fn in_modes(modes: Option<(i32, i32)>) -> Script {
    with(settings(), modes)
}

/// One that keeps whole bodies with their requests.
fn keeping(request_mode: i32) -> Script {
    let mut settings = ExchangeSettings { keep_bodies: true, ..settings() };
    settings.read.keep_decoded = true;
    with(settings, Some((request_mode, DUPLEX)))
}

fn with(settings: ExchangeSettings, modes: Option<(i32, i32)>) -> Script {
    Script {
        exchange: Exchange::new(Arc::new(settings)),
        sent: Vec::new(),
        scheduled: Vec::new(),
        outcome: None,
        first_token_after: None,
        closed: None,
        rejected: None,
        modes,
        refuse: false,
    }
}

fn headers(entries: &[(&str, &str)], end_of_stream: bool) -> pb::HttpHeaders {
    let headers = entries
        .iter()
        .map(|&(key, value)| HeaderValue {
            key: key.to_owned(),
            raw_value: value.as_bytes().to_vec(),
            ..HeaderValue::default()
        })
        .collect();
    pb::HttpHeaders {
        headers: Some(HeaderMap { headers }),
        end_of_stream,
        ..pb::HttpHeaders::default()
    }
}

fn body(bytes: &[u8], end_of_stream: bool) -> pb::HttpBody {
    pb::HttpBody { body: bytes.to_vec(), end_of_stream, ..pb::HttpBody::default() }
}

impl Script {
    fn message(mut self, request: Request, metadata: Option<Metadata>) -> Self {
        let protocol_config = self.modes.take().map(|(request_body_mode, response_body_mode)| {
            pb::ProtocolConfiguration {
                request_body_mode,
                response_body_mode,
                ..Default::default()
            }
        });
        self.exchange.on(pb::ProcessingRequest {
            request: Some(request),
            protocol_config,
            metadata_context: metadata,
            ..pb::ProcessingRequest::default()
        });
        self.pump()
    }

    fn pump(mut self) -> Self {
        while let Some(effect) = self.exchange.next_effect() {
            match effect {
                Effect::Send(message) => self.sent.push(message.response.expect("a response")),
                Effect::Schedule(to_schedule) => {
                    self.scheduled.push(*to_schedule);
                    if self.refuse {
                        self.exchange.refused(Refusal::PoolEmpty);
                    } else {
                        self.exchange.scheduled(Routing {
                            destination: "10.0.0.1:8000".to_owned(),
                            traceparent: None,
                            explanation: vec![("x-routed-to", "llm-0".to_owned())],
                        });
                    }
                }
                Effect::Rejected(rejection) => self.rejected = Some(rejection),
                Effect::FirstToken => self.first_token_after = Some(self.sent.len()),
                Effect::Finish(outcome) => {
                    assert!(self.outcome.is_none(), "a request finishes once");
                    self.outcome = Some(outcome);
                }
                Effect::Close(close) => self.closed = Some(close),
            }
        }
        self
    }

    fn request_headers(self, extra: &[(&str, &str)], end: bool) -> Self {
        let mut entries = vec![
            (":method", "POST"),
            (":path", "/v1/chat/completions"),
            ("content-type", "application/json"),
        ];
        entries.extend(extra);
        self.message(Request::RequestHeaders(headers(&entries, end)), None)
    }

    fn request_body(self, bytes: &[u8], end: bool) -> Self {
        self.message(Request::RequestBody(body(bytes, end)), None)
    }

    fn request_trailers(self) -> Self {
        self.message(Request::RequestTrailers(pb::HttpTrailers::default()), None)
    }

    fn response_headers(self, status: &str, content_type: &str, end: bool) -> Self {
        let entries = [(":status", status), ("content-type", content_type)];
        self.message(Request::ResponseHeaders(headers(&entries, end)), None)
    }

    fn response_body(self, bytes: &[u8], end: bool) -> Self {
        self.message(Request::ResponseBody(body(bytes, end)), None)
    }

    fn half_close(mut self) -> Self {
        self.exchange.on_half_close();
        self.pump()
    }

    /// What was sent, in short: `H` headers, `B12` a chunk, `B12.` the last one, `B-` an untouched one, `T` trailers;
    /// lower case for the answer's, `!429` for an immediate response.
    fn sent(&self) -> String {
        let chunk = |body: &pb::BodyResponse, letter: &str| match &body
            .response
            .as_ref()
            .unwrap()
            .body_mutation
        {
            None => format!("{letter}-"),
            Some(pb::BodyMutation {
                mutation: Some(pb::body_mutation::Mutation::StreamedResponse(chunk)),
            }) => {
                format!(
                    "{letter}{}{}",
                    chunk.body.len(),
                    if chunk.end_of_stream { "." } else { "" }
                )
            }
            Some(other) => panic!("unexpected {other:?}"),
        };
        let words: Vec<String> = self
            .sent
            .iter()
            .map(|response| match response {
                Response::RequestHeaders(_) => "H".to_owned(),
                Response::RequestBody(body) => chunk(body, "B"),
                Response::RequestTrailers(_) => "T".to_owned(),
                Response::ResponseHeaders(_) => "h".to_owned(),
                Response::ResponseBody(body) => chunk(body, "b"),
                Response::ResponseTrailers(_) => "t".to_owned(),
                Response::ImmediateResponse(reply) => {
                    format!("!{}", reply.status.as_ref().unwrap().code)
                }
                Response::StreamedImmediateResponse(_) => "?".to_owned(),
            })
            .collect();
        words.join(" ")
    }

    fn echoed(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for response in &self.sent {
            if let Response::RequestBody(body) = response
                && let Some(mutation) = &body.response.as_ref().unwrap().body_mutation
                && let Some(pb::body_mutation::Mutation::StreamedResponse(chunk)) =
                    &mutation.mutation
            {
                assert!(chunk.body.len() <= reply::CHUNK);
                bytes.extend_from_slice(&chunk.body);
            }
        }
        bytes
    }

    /// The headers that the pick sets, and those that it removes.
    fn mutation(&self) -> (Vec<(String, String)>, Vec<String>) {
        let common = self.sent.iter().filter_map(|response| match response {
            Response::RequestHeaders(headers) => headers.response.as_ref(),
            Response::RequestBody(body) => body.response.as_ref(),
            _ => None,
        });
        let mutation =
            common.filter_map(|common| common.header_mutation.clone()).next().unwrap_or_default();
        let set = mutation
            .set_headers
            .into_iter()
            .map(|option| {
                assert_eq!(option.append_action, 2, "every header is overwritten");
                let header = option.header.unwrap();
                assert!(header.value.is_empty(), "Envoy ignores `value`");
                (header.key, String::from_utf8(header.raw_value).unwrap())
            })
            .collect();
        (set, mutation.remove_headers)
    }
}

#[track_caller]
fn check(script: &Script, sent: &str, picks: usize) {
    assert_eq!((script.sent().as_str(), script.scheduled.len()), (sent, picks));
}

#[test]
fn the_pick_waits_for_the_body_and_goes_before_it() {
    let script = script().request_headers(&[], false).request_body(b"{\"prom", false);
    check(&script, "", 0);
    check(&script.request_body(b"pt\":1}", true), "H B12.", 1);
}

#[test]
fn a_body_can_end_with_its_last_chunk_an_empty_one_trailers_or_not_exist() {
    check(&script().request_headers(&[], false).request_body(b"{}", true), "H B2.", 1);
    check(
        &script().request_headers(&[], false).request_body(b"{}", false).request_body(b"", true),
        "H B2.",
        1,
    );
    check(
        &script().request_headers(&[], false).request_body(b"{}", false).request_trailers(),
        "H B2 T",
        1,
    );
    check(&script().request_headers(&[], false).request_trailers(), "H T", 1);
    check(&script().request_headers(&[], true), "H", 1);
    check(&script().request_headers(&[], false).request_body(b"", true), "H B0.", 1);
}

#[test]
fn what_comes_after_the_end_of_a_body_is_ignored() {
    let script = script().request_headers(&[], false).request_body(CHAT.as_bytes(), true);
    let before = script.sent();
    let script = script.request_body(CHAT.as_bytes(), true).request_body(b"", true);
    check(&script, &before, 1);
    assert_eq!(script.exchange.duplicates(), 2);
    let script = script
        .response_headers("200", "text/plain", false)
        .response_body(b"x", true)
        .response_body(b"x", true);
    assert_eq!(
        (script.exchange.duplicates(), script.outcome.unwrap().ending),
        (3, Ending::Complete)
    );
}

#[test]
fn each_mode_is_answered_as_it_needs() {
    let run = |modes| {
        in_modes(Some(modes))
            .request_headers(&[("x-session-id", "s")], false)
            .request_body(CHAT.as_bytes(), true)
            .response_headers("200", "application/json", false)
            .response_body(b"{}", true)
    };
    // NONE, STREAMED, BUFFERED, BUFFERED_PARTIAL, FULL_DUPLEX_STREAMED
    for (modes, sent) in [
        ((4, 4), format!("H B{}. h b2.", CHAT.len())),
        ((2, 2), "H B- h b-".to_owned()),
        ((3, 3), "H B- h b-".to_owned()),
        ((1, 1), "H B- h b-".to_owned()),
    ] {
        let script = run(modes);
        check(&script, &sent, 1);
        assert_eq!(
            script.mutation().0[0],
            (reply::DESTINATION.to_owned(), "10.0.0.1:8000".to_owned()),
            "{modes:?}"
        );
        assert_eq!(script.scheduled[0].request.conversation.as_ref().unwrap().id, "s");
        assert!(script.outcome.is_some());
    }
    let script = in_modes(Some((0, 0))).request_headers(&[], false).response_headers(
        "200",
        "text/plain",
        false,
    );
    check(&script, "H h", 1);
}

#[test]
fn a_buffered_body_is_read_and_carries_the_pick() {
    let script = in_modes(Some((2, 0))).request_headers(&[], false);
    check(&script, "H", 0);
    assert!(script.mutation().0.is_empty(), "the headers' answer carries no pick");
    let script = script.request_body(CHAT.as_bytes(), true);
    check(&script, "H B-", 1);
    let request = &script.scheduled[0].request;
    assert_eq!((request.model.as_deref(), request.max_tokens), (Some("m1"), Some(7)));
}

#[test]
fn the_conversation_comes_from_the_strongest_source() {
    let id = |entries: &[(&str, &str)], bytes: &str| {
        let script = script().request_headers(entries, false).request_body(bytes.as_bytes(), true);
        script.scheduled[0].request.conversation.clone().map(|c| (c.id, c.source))
    };
    let header = |name: &str| KeySource::Header(name.to_owned());
    let keyed = r#"{"prompt_cache_key":"k","previous_response_id":"r","messages":[{"role":"user","content":"x"}]}"#;
    let both = [("x-session-id", "weak"), ("x-conversation-id", "strong")];
    assert_eq!(id(&both, keyed), Some(("strong".to_owned(), header("x-conversation-id"))));
    assert_eq!(
        id(&[("x-session-id", "weak")], keyed),
        Some(("weak".to_owned(), header("x-session-id")))
    );
    assert_eq!(
        id(&[("x-session-id", "")], keyed),
        Some(("k".to_owned(), KeySource::Field("prompt_cache_key")))
    );
    let previous = r#"{"previous_response_id":"r","input":"x"}"#;
    assert_eq!(id(&[], previous), Some(("r".to_owned(), KeySource::PreviousResponse)));
    let (auto, source) = id(&[], CHAT).unwrap();
    assert!(auto.starts_with("auto-") && source == KeySource::Opening);
    assert_eq!(id(&[], "no json"), None);
    assert!(id(&[("x-session-id", "a\u{7f}b")], CHAT).unwrap().0.starts_with("hash-"));
}

#[test]
fn what_cannot_be_read_is_still_routed_and_weighs_what_it_is_long() {
    for (bytes, note) in [("not json at all", "not-json"), ("{\"a\":}}}", "malformed")] {
        let script = script().request_headers(&[], false).request_body(bytes.as_bytes(), true);
        check(&script, &format!("H B{}.", bytes.len()), 1);
        assert_eq!(
            (script.scheduled[0].body, script.scheduled[0].request.prompt.text_bytes),
            (note, bytes.len() as u64)
        );
    }
}

#[test]
fn a_body_over_the_limit_is_refused_as_soon_as_that_is_known() {
    check(&script().request_headers(&[("content-length", "200001")], false), "!413", 0);
    let at_limit = vec![b' '; 200_000];
    let script_at =
        |bytes: &[u8], end| script().request_headers(&[], false).request_body(bytes, end);
    assert_eq!(script_at(&at_limit, true).scheduled.len(), 1);
    check(
        &script_at(&at_limit, false).request_body(b"", true),
        "H B62000 B62000 B62000 B14000.",
        1,
    );
    let over = script_at(&at_limit, false).request_body(b"x", true);
    check(&over, "!413", 0);
    assert_eq!(over.rejected, Some(Rejection::TooLarge(200_000)));
    // Messages that were in flight are ignored; Envoy takes no second answer.
    check(&over.request_body(b"x", true).response_headers("413", "text/plain", true), "!413", 0);
}

#[test]
fn control_headers_of_the_client_are_removed_and_its_destination_overwritten() {
    let script = script().request_headers(
        &[
            (reply::DESTINATION, "169.254.169.254:80"),
            ("x-gateway-destination-endpoint-subset", "1.2.3.4:5"),
            ("x-prefiller-host-port", "10.0.0.9:22"),
            ("x-llm-d-inference-objective", "o"),
            ("x-harmless", "h"),
        ],
        true,
    );
    let (set, removed) = script.mutation();
    assert_eq!(set, [(reply::DESTINATION.to_owned(), "10.0.0.1:8000".to_owned())]);
    let expected = [
        "x-gateway-destination-endpoint-subset",
        "x-prefiller-host-port",
        "x-llm-d-inference-objective",
    ];
    assert_eq!(removed, expected);
}

#[test]
fn streams_that_do_not_begin_with_a_request_are_answered_and_pick_nothing() {
    check(&script().response_headers("400", "text/plain", true), "h", 0);
    check(
        &script().response_headers("400", "text/plain", false).response_body(b"x", true),
        "h b1.",
        0,
    );
    check(&script().request_trailers(), "T", 0);
    let mut script = script();
    script.exchange.on(pb::ProcessingRequest::default());
    check(&script.pump(), "", 0);
}

#[test]
fn a_local_reply_before_the_pick_ends_the_request_without_one() {
    let script = script()
        .request_headers(&[], false)
        .request_body(b"{", false)
        .response_headers("400", "text/plain", false)
        .response_body(b"bad", true);
    check(&script, "h b3.", 0);
    assert_eq!(script.outcome.unwrap().status, Some(400));
}

#[test]
fn half_close_ends_a_decided_stream_and_cuts_an_undecided_one() {
    let decided = script().request_headers(&[], false).request_body(b"{}", true).half_close();
    assert_eq!(decided.closed, Some(Close::Done));
    let mut cut = script().request_headers(&[], false).request_body(b"{", false).half_close();
    assert_eq!((cut.closed, cut.scheduled.len()), (Some(Close::Truncated), 0));
    assert_eq!(cut.exchange.abandoned().unwrap().ending, Ending::Aborted);
}

#[test]
fn a_peer_that_only_asks_for_a_pick_gets_it_and_the_end_of_the_stream() {
    // NGINX Gateway Fabric: no protocol_config, one body, half-close, then it reads until the end.
    for end in [true, false] {
        let mut script = in_modes(None)
            .request_headers(&[], false)
            .request_body(CHAT.as_bytes(), end)
            .half_close();
        check(&script, &format!("H B{}.", CHAT.len()), 1);
        assert_eq!(script.closed, Some(Close::Done));
        assert_eq!(script.exchange.abandoned().unwrap().ending, Ending::Unobserved);
    }
}

#[test]
fn an_end_is_told_from_an_abort_by_the_end_of_the_answer() {
    let asked = || script().request_headers(&[], false).request_body(CHAT.as_bytes(), true);
    let ending = |mut script: Script| script.exchange.abandoned().map(|outcome| outcome.ending);
    assert_eq!(ending(asked()), Some(Ending::Aborted));
    assert_eq!(
        ending(asked().response_headers("200", "text/event-stream", false)),
        Some(Ending::Aborted)
    );
    assert_eq!(ending(asked().response_headers("200", "text/plain", true)), None);
    assert_eq!(
        ending(asked().response_headers("200", "text/plain", false).response_body(b"x", true)),
        None
    );
    let trailers = Request::ResponseTrailers(pb::HttpTrailers::default());
    let trailed = asked()
        .response_headers("200", "text/plain", false)
        .response_body(b"x", false)
        .message(trailers, None);
    assert!(trailed.sent().ends_with("h b1 t"));
    assert_eq!(ending(trailed), None);
    let unseen = in_modes(Some((DUPLEX, 0))).request_headers(&[], true).response_headers(
        "200",
        "text/plain",
        false,
    );
    assert_eq!(ending(unseen), Some(Ending::Unobserved));
}

#[test]
fn the_first_token_and_the_usage_are_seen_in_passing() {
    let role = b"data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":null}}]}\n\n";
    let token = b"data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\" hi\"}}]}\n\n";
    let usage = b"data: {\"choices\":[],\"usage\":{\"prompt_tokens\":16,\"completion_tokens\":1,\"prompt_tokens_details\":{\"cached_tokens\":15}}}\n\ndata: [DONE]\n\n";
    let script = script()
        .request_headers(&[], false)
        .request_body(CHAT.as_bytes(), true)
        .response_headers("200", "text/event-stream", false)
        .response_body(role, false);
    assert_eq!(script.first_token_after, None);
    let sent = script.sent.len();
    let script =
        script.response_body(token, false).response_body(usage, false).response_body(b"", true);
    assert_eq!(script.first_token_after, Some(sent), "before its chunk goes on");
    let outcome = script.outcome.unwrap();
    assert_eq!((outcome.usage.prompt_tokens, outcome.usage.cached_tokens), (Some(16), Some(15)));
}

#[test]
fn a_hurried_exchange_decides_on_what_it_has_and_passes_the_rest_on() {
    let mut script = script()
        .request_headers(&[("content-length", "100000")], false)
        .request_body(b"{\"mod", false);
    assert!(script.exchange.can_hurry());
    script.exchange.hurry();
    let script = script.pump();
    check(&script, "H B5", 1);
    assert_eq!(
        (script.scheduled[0].body, script.scheduled[0].request.prompt.text_bytes),
        ("partial", 100_000)
    );
    let script = script.request_body(b"el\":1", false).request_body(b"}", true);
    check(&script, "H B5 B5 B1.", 1);
    check(&script.response_headers("200", "text/plain", true), "H B5 B5 B1. h", 1);
}

#[test]
fn the_limit_holds_for_a_body_that_follows_its_pick_and_held_bytes_return_to_zero() {
    let mut script = script().request_headers(&[], false).request_body(&[b' '; 150_000], false);
    assert_eq!(script.exchange.held_bytes(), 150_000);
    script.exchange.hurry();
    let held = script.exchange.held_bytes();
    assert_eq!(held, 150_000, "it waits for the decision, which may take a while");
    let script = script.pump();
    assert_eq!(script.exchange.held_bytes(), 0, "all went out");
    let script = script.request_body(&[b' '; 60_000], false);
    assert_eq!(
        (script.rejected, script.exchange.held_bytes()),
        (Some(Rejection::TooLarge(200_000)), 0)
    );
}

#[test]
fn a_buffered_request_without_a_body_is_picked_for_at_its_trailers() {
    check(&in_modes(Some((2, 2))).request_headers(&[], false).request_trailers(), "H T", 1);
}

#[test]
fn a_body_whose_headers_are_not_shown_goes_on_unpicked() {
    check(&script().request_body(b"ab", true), "B2.", 0);
    check(&in_modes(Some((1, 1))).request_body(b"ab", true), "B-", 0);
}

#[test]
fn time_runs_only_while_envoy_can_send() {
    assert!(script().request_headers(&[], false).exchange.awaits_body());
    assert!(
        !in_modes(Some((2, 2))).request_headers(&[], false).exchange.awaits_body(),
        "Envoy gathers it"
    );
}

#[test]
fn nothing_is_generated_for_embeddings_or_without_a_body() {
    let max = |script: &Script| script.scheduled[0].request.max_tokens;
    let embeddings = script()
        .message(Request::RequestHeaders(headers(&[(":path", "/v1/embeddings?x=1")], false)), None)
        .request_body(b"{\"input\":\"x\"}", true);
    assert_eq!(max(&embeddings), Some(0));
    assert_eq!(max(&script().request_headers(&[], true)), Some(0));
}

#[test]
fn a_body_that_stops_coming_is_given_up() {
    let mut script = script().request_headers(&[], false).request_body(b"{", false);
    assert!(script.exchange.awaits_body());
    script.exchange.on_stalled_body();
    let script = script.pump();
    check(&script, "!408", 0);
    assert!(!script.exchange.awaits_body());
}

#[test]
fn a_refusal_is_an_answer_of_ours() {
    let mut script = script().request_headers(&[], false);
    script.refuse = true;
    let script = script.request_body(b"{}", true);
    check(&script, "!503", 1);
    let Some(Response::ImmediateResponse(reply)) = script.sent.last() else { panic!() };
    let body: serde_json::Value = serde_json::from_slice(&reply.body).unwrap();
    assert_eq!(body["error"]["code"], "no_endpoints");
}

#[test]
fn header_values_are_read_from_either_field() {
    for (value, raw) in [("s", &b""[..]), ("", b"s"), ("s", b"s"), ("other", b"s")] {
        let header = HeaderValue {
            key: "x-session-id".to_owned(),
            value: value.to_owned(),
            raw_value: raw.to_vec(),
        };
        let headers = pb::HttpHeaders {
            headers: Some(HeaderMap { headers: vec![header] }),
            end_of_stream: true,
            ..pb::HttpHeaders::default()
        };
        let script = script().message(Request::RequestHeaders(headers), None);
        assert_eq!(script.scheduled[0].request.conversation.as_ref().unwrap().id, "s");
    }
    let binary = HeaderValue {
        key: "x-session-id".to_owned(),
        raw_value: vec![0xff, 0xfe],
        ..HeaderValue::default()
    };
    let headers = pb::HttpHeaders {
        headers: Some(HeaderMap { headers: vec![binary] }),
        end_of_stream: true,
        ..Default::default()
    };
    let script = script().message(Request::RequestHeaders(headers), None);
    assert!(script.scheduled[0].request.conversation.as_ref().unwrap().id.starts_with("hash-"));
}

#[test]
fn a_subset_hint_is_parsed_as_socket_addresses() {
    let hint = |kind: Kind| {
        let value = Value { kind: Some(kind) };
        let fields = [("x-gateway-destination-endpoint-subset".to_owned(), value)].into();
        let metadata = Metadata {
            filter_metadata: [("envoy.lb.subset_hint".to_owned(), Struct { fields })].into(),
            ..Metadata::default()
        };
        subset_hint(Some(&metadata))
            .map(|subset| subset.iter().map(ToString::to_string).collect::<Vec<_>>().join(" "))
    };
    let text = |text: &str| Kind::StringValue(text.to_owned());
    let list = |entries: &[&str]| {
        let values = entries.iter().map(|entry| Value { kind: Some(text(entry)) }).collect();
        Kind::ListValue(ListValue { values })
    };
    assert_eq!(hint(text("10.0.0.1:1, 10.0.0.2:2")).as_deref(), Some("10.0.0.1:1 10.0.0.2:2"));
    assert_eq!(
        hint(list(&["[FD00::5]:8000", "[fd00:0:0:0:0:0:0:6]:8000"])).as_deref(),
        Some("[fd00::5]:8000 [fd00::6]:8000")
    );
    assert_eq!(hint(list(&[])).as_deref(), Some(""));
    assert_eq!(hint(text("")).as_deref(), Some(""));
    assert_eq!(
        hint(list(&["10.0.0.1", "[fd00::5]", "llm.local:80"])).as_deref(),
        Some("10.0.0.1:0 [fd00::5]:0"),
        "an address alone is any of its ports, and what is no address matches nothing"
    );
    assert_eq!(subset_hint(None), None);
    assert_eq!(subset_hint(Some(&Metadata::default())), None);
}

#[test]
fn observed_traffic_is_left_alone() {
    let mut script = script();
    script.exchange.on(pb::ProcessingRequest {
        observability_mode: true,
        request: Some(Request::RequestHeaders(headers(&[], true))),
        ..pb::ProcessingRequest::default()
    });
    check(&script.pump(), "", 0);
}

/// Cuts `bytes` at the given places.
fn cut(bytes: &[u8], cuts: &[usize]) -> Vec<Vec<u8>> {
    let mut places: Vec<usize> = cuts.iter().map(|cut| cut % (bytes.len() + 1)).collect();
    places.extend([0, bytes.len()]);
    places.sort_unstable();
    places.windows(2).map(|pair| bytes[pair[0]..pair[1]].to_vec()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn any_chunking_gives_the_same_request_and_the_same_bytes_back(
        cuts in prop::collection::vec(any::<usize>(), 0..12),
        padding in prop::sample::select(vec![0usize, 10, 70_000]),
        trailers in any::<bool>(),
    ) {
        let text = format!("{}{}", CHAT, " ".repeat(padding));
        let whole = script().request_headers(&[], false).request_body(text.as_bytes(), true);
        let mut script = script().request_headers(&[], false);
        let chunks = cut(text.as_bytes(), &cuts);
        for (i, chunk) in chunks.iter().enumerate() {
            script = script.request_body(chunk, !trailers && i + 1 == chunks.len());
        }
        if trailers { script = script.request_trailers(); }
        prop_assert_eq!(script.scheduled.len(), 1);
        prop_assert_eq!(&script.scheduled[0].request, &whole.scheduled[0].request);
        prop_assert_eq!(script.echoed(), text.as_bytes());
    }

    #[test]
    fn no_order_of_messages_panics_or_finishes_twice(
        modes in (0i32..6, 0i32..6),
        acts in prop::collection::vec((0u8..9, any::<bool>(), prop::collection::vec(any::<u8>(), 0..40)), 0..20),
    ) {
        let mut script = in_modes(Some(modes));
        for (act, end, bytes) in acts {
            script = match act {
                0 | 1 => script.request_headers(&[], end),
                2 => script.request_body(&bytes, end),
                3 => script.request_trailers(),
                4 => script.response_headers("200", "application/json", end),
                5 => script.response_body(&bytes, end),
                6 => script.message(Request::ResponseTrailers(pb::HttpTrailers::default()), None),
                7 => { script.exchange.hurry(); script.pump() }
                _ => { script.exchange.on_stalled_body(); script.pump() }
            };
        }
        prop_assert!(script.scheduled.len() <= 1, "one stream, one pick");
        let finished = script.outcome.is_some();
        prop_assert_eq!(script.exchange.abandoned().is_none(), finished);
    }
}

/// What went along with the one decision.
fn kept(script: &Script) -> Option<(&str, &[u8])> {
    let [scheduled] = script.scheduled.as_slice() else { panic!("one decision") };
    scheduled.prompt.as_ref().map(|prompt| (prompt.path.as_str(), &prompt.body[..]))
}

#[test]
fn a_whole_body_goes_along_and_goes_out_as_it_came() {
    const PATH: &str = "/v1/chat/completions";
    let text = format!(r#"{{"messages":[{{"content":"{}"}}]}}"#, "x ".repeat(70_000));
    for (size, request_mode) in [(9, DUPLEX), (50_000, DUPLEX), (200_000, DUPLEX), (200_000, 2)] {
        let mut script = keeping(request_mode).request_headers(&[], false);
        let count = text.len().div_ceil(size);
        for (i, chunk) in text.as_bytes().chunks(size).enumerate() {
            assert!(script.exchange.held_bytes() <= (i * size) as u64);
            script = script.request_body(chunk, i + 1 == count);
        }
        assert_eq!(kept(&script), Some((PATH, text.as_bytes())), "{size}");
        if request_mode == DUPLEX {
            assert_eq!(script.echoed(), text.as_bytes(), "{size}");
            assert_eq!(script.sent(), format!("H B{0} B{0} B{1}.", 62_000, text.len() - 124_000));
        } else {
            assert_eq!(script.sent(), "H B-");
        }
    }
    let trailers = keeping(DUPLEX).request_headers(&[], false);
    let trailers = trailers.request_body(CHAT.as_bytes(), false).request_trailers();
    assert_eq!(kept(&trailers), Some((PATH, CHAT.as_bytes())));
    check(&trailers, &format!("H B{} T", CHAT.len()), 1);
    check(&keeping(DUPLEX).request_headers(&[], false).request_trailers(), "H T", 1);
    check(&keeping(DUPLEX).request_headers(&[], false).request_body(b"", true), "H B0.", 1);
}

#[test]
fn a_compressed_body_goes_along_decoded_and_out_compressed() {
    use std::io::Write as _;
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    gzip.write_all(CHAT.as_bytes()).unwrap();
    let packed = gzip.finish().unwrap();
    let (first, second) = packed.split_at(30);
    let script = keeping(DUPLEX).request_headers(&[("content-encoding", "gzip")], false);
    let script = script.request_body(first, false);
    assert!(script.exchange.held_bytes() >= 30);
    let script = script.request_body(second, true);
    assert_eq!(kept(&script), Some(("/v1/chat/completions", CHAT.as_bytes())));
    assert_eq!(script.echoed(), packed);
}

#[test]
fn what_was_not_read_whole_does_not_go_along() {
    let none = |script: &Script| assert_eq!(kept(script), None);
    none(&script().request_headers(&[], false).request_body(CHAT.as_bytes(), true));
    none(&keeping(DUPLEX).request_headers(&[], true));
    none(&keeping(DUPLEX).request_headers(&[], false).request_body(b"{\"a\":}", true));
    none(&keeping(DUPLEX).request_headers(&[], false).request_body(b"", true));
    let other = [(":path", "/v1/audio/transcriptions")];
    none(&keeping(DUPLEX).request_headers(&other, false).request_body(CHAT.as_bytes(), true));
    let mut early = keeping(DUPLEX).request_headers(&[], false).request_body(b"{\"model\":", false);
    early.exchange.hurry();
    let early = early.pump().request_body(b"\"m\"}", true);
    none(&early);
    assert_eq!(early.echoed(), b"{\"model\":\"m\"}");
}
