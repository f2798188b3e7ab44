//! What goes back to Envoy: the only file that knows HTTP status codes and header names of answers.

use std::collections::HashMap;

use envoy_types::pb::envoy::config::core::v3::header_value_option::HeaderAppendAction;
use envoy_types::pb::envoy::config::core::v3::{HeaderValue, HeaderValueOption};
use envoy_types::pb::envoy::service::ext_proc::v3 as pb;
use envoy_types::pb::envoy::r#type::v3::HttpStatus;
use envoy_types::pb::google::protobuf::{Struct, Value, value::Kind};
use pb::processing_response::Response;

use crate::scheduling::Refusal;

/// The header, and the key in `envoy.lb`, that carries the pick (endpoint-picker protocol, proposal 004).
pub const DESTINATION: &str = "x-gateway-destination-endpoint";
/// The metadata namespace that gateways read.
pub const LB_NAMESPACE: &str = "envoy.lb";
/// Largest body chunk sent to Envoy, in bytes: some data planes refuse gRPC messages of 64 KiB and more.
pub const CHUNK: usize = 62_000;
/// Upstream's header that names why a request was dropped.
const DROP_REASON: &str = "x-llm-d-request-dropped-reason";

/// How refusals look to the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ErrorFormat {
    /// An OpenAI-style JSON object.
    Json,
    /// The plain text of the upstream endpoint picker.
    Plain,
}

/// Where a request is to go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Routing {
    /// `ip:port`, or a comma list with fallbacks after it.
    pub destination: String,
    /// W3C trace context for the engine, if a span was started here.
    pub traceparent: Option<String>,
    /// Headers for the answer that explain the decision.
    pub explanation: Vec<(&'static str, String)>,
}

/// Why the picker itself turns a request away.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Rejection {
    /// No endpoint may serve it.
    Refused(Refusal),
    /// Its body is larger than the limit, in bytes.
    TooLarge(u64),
    /// Its body stopped coming.
    Stalled,
}

/// Answers the request's headers with the pick.
pub(crate) fn pick(routing: &Routing, remove: Vec<String>) -> pb::ProcessingResponse {
    let headers = pb::HeadersResponse { response: Some(common(routing, remove)) };
    with_metadata(Response::RequestHeaders(headers), routing)
}

/// Answers a buffered body with the pick.
pub(crate) fn pick_on_body(routing: &Routing, remove: Vec<String>) -> pb::ProcessingResponse {
    let body = pb::BodyResponse { response: Some(common(routing, remove)) };
    with_metadata(Response::RequestBody(body), routing)
}

/// Answers trailers with the pick, for a buffered request that has no body: metadata alone can carry it.
pub(crate) fn pick_on_trailers(routing: &Routing) -> pb::ProcessingResponse {
    with_metadata(Response::RequestTrailers(pb::TrailersResponse::default()), routing)
}

/// Counts the bytes of a request's body in a message.
pub(crate) fn request_bytes(message: &pb::ProcessingResponse) -> u64 {
    let Some(Response::RequestBody(body)) = &message.response else { return 0 };
    let mutation = body.response.as_ref().and_then(|common| common.body_mutation.as_ref());
    match mutation.and_then(|mutation| mutation.mutation.as_ref()) {
        Some(pb::body_mutation::Mutation::StreamedResponse(chunk)) => chunk.body.len() as u64,
        Some(pb::body_mutation::Mutation::Body(_) | pb::body_mutation::Mutation::ClearBody(_))
        | None => 0,
    }
}

fn common(routing: &Routing, remove: Vec<String>) -> pb::CommonResponse {
    let mut set_headers = vec![set(DESTINATION, routing.destination.clone())];
    set_headers.extend(routing.traceparent.clone().map(|value| set("traceparent", value)));
    pb::CommonResponse {
        header_mutation: Some(pb::HeaderMutation { set_headers, remove_headers: remove }),
        ..pb::CommonResponse::default()
    }
}

/// Sets the same destination as metadata: ORIGINAL_DST gateways read the header, Istio reads this.
fn with_metadata(response: Response, routing: &Routing) -> pb::ProcessingResponse {
    let text = Value { kind: Some(Kind::StringValue(routing.destination.clone())) };
    let lb = Struct { fields: HashMap::from([(DESTINATION.to_owned(), text)]) };
    let lb = Value { kind: Some(Kind::StructValue(lb)) };
    pb::ProcessingResponse {
        dynamic_metadata: Some(Struct { fields: HashMap::from([(LB_NAMESPACE.to_owned(), lb)]) }),
        ..message(response)
    }
}

/// Answers headers without changing them.
pub(crate) fn request_headers() -> pb::ProcessingResponse {
    message(Response::RequestHeaders(pb::HeadersResponse {
        response: Some(pb::CommonResponse::default()),
    }))
}

/// Answers the response's headers, adding the explanation.
pub(crate) fn response_headers(explanation: Vec<(&'static str, String)>) -> pb::ProcessingResponse {
    let set_headers: Vec<HeaderValueOption> =
        explanation.into_iter().map(|(name, value)| set(name, value)).collect();
    let header_mutation = (!set_headers.is_empty())
        .then(|| pb::HeaderMutation { set_headers, remove_headers: Vec::new() });
    let response = pb::CommonResponse { header_mutation, ..pb::CommonResponse::default() };
    message(Response::ResponseHeaders(pb::HeadersResponse { response: Some(response) }))
}

/// Which body a chunk belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    /// The client's.
    Request,
    /// The engine's.
    Response,
}

/// Sends a chunk back as it came (`FULL_DUPLEX_STREAMED`).
pub(crate) fn streamed(side: Side, body: Vec<u8>, end_of_stream: bool) -> pb::ProcessingResponse {
    let chunk =
        pb::StreamedBodyResponse { body, end_of_stream, ..pb::StreamedBodyResponse::default() };
    let mutation =
        pb::BodyMutation { mutation: Some(pb::body_mutation::Mutation::StreamedResponse(chunk)) };
    body_message(
        side,
        pb::CommonResponse { body_mutation: Some(mutation), ..pb::CommonResponse::default() },
    )
}

/// Answers a chunk without touching it (`STREAMED` and the buffered modes).
pub(crate) fn unchanged(side: Side) -> pb::ProcessingResponse {
    body_message(side, pb::CommonResponse::default())
}

fn body_message(side: Side, response: pb::CommonResponse) -> pb::ProcessingResponse {
    let body = pb::BodyResponse { response: Some(response) };
    message(match side {
        Side::Request => Response::RequestBody(body),
        Side::Response => Response::ResponseBody(body),
    })
}

/// Answers trailers.
pub(crate) fn trailers(side: Side) -> pb::ProcessingResponse {
    message(match side {
        Side::Request => Response::RequestTrailers(pb::TrailersResponse::default()),
        Side::Response => Response::ResponseTrailers(pb::TrailersResponse::default()),
    })
}

/// Answers in the engine's place.
pub(crate) fn reject(rejection: &Rejection, format: ErrorFormat) -> pb::ProcessingResponse {
    let (status, kind, code, upstream) = match rejection {
        Rejection::Refused(Refusal::Saturated { .. }) => (
            429,
            "rate_limit_error",
            "saturated",
            ("ResourceExhausted", Some("rejected-saturated")),
        ),
        Rejection::Refused(Refusal::QueueFull { .. }) => (
            429,
            "rate_limit_error",
            "queue_full",
            ("ResourceExhausted", Some("rejected-capacity")),
        ),
        Rejection::Refused(
            Refusal::PoolEmpty | Refusal::SubsetEmpty | Refusal::SubsetUnmatched(_),
        ) => (
            503,
            "service_unavailable_error",
            "no_endpoints",
            ("ServiceUnavailable", Some("rejected-no-endpoints")),
        ),
        Rejection::TooLarge(_) => {
            (413, "invalid_request_error", "request_body_too_large", ("BadRequest", None))
        }
        Rejection::Stalled => {
            (408, "invalid_request_error", "request_body_timeout", ("BadRequest", None))
        }
    };
    let text = rejection.to_string();
    let (content_type, body) = match format {
        ErrorFormat::Json => (
            "application/json",
            serde_json::json!({ "error": { "message": text, "type": kind, "param": null, "code": code } })
                .to_string(),
        ),
        ErrorFormat::Plain => ("text/plain", format!("inference error: {} - {text}", upstream.0)),
    };
    let mut headers = vec![set("content-type", content_type.to_owned())];
    headers.extend(upstream.1.map(|reason| set(DROP_REASON, reason.to_owned())));
    if let Rejection::Refused(
        Refusal::Saturated { retry_after, .. } | Refusal::QueueFull { retry_after, .. },
    ) = rejection
    {
        headers.push(set("retry-after", retry_after.as_secs().max(1).to_string()));
    }
    message(Response::ImmediateResponse(pb::ImmediateResponse {
        status: Some(HttpStatus { code: status }),
        headers: Some(pb::HeaderMutation { set_headers: headers, remove_headers: Vec::new() }),
        body: body.into_bytes(),
        details: format!("llm_ring_{code}"),
        ..pb::ImmediateResponse::default()
    }))
}

impl std::fmt::Display for Rejection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Refused(refusal) => refusal.fmt(f),
            Self::TooLarge(limit) => {
                write!(f, "the request body is larger than the limit of {limit} bytes")
            }
            Self::Stalled => f.write_str("the request body stopped coming"),
        }
    }
}

impl Rejection {
    /// Returns the kind in a word, for labels.
    #[must_use]
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Refused(refusal) => refusal.as_str(),
            Self::TooLarge(_) => "body-too-large",
            Self::Stalled => "body-stalled",
        }
    }
}

/// Sets a header. `raw_value`, since Envoy ignores `value`; overwriting, since Envoy's default for an unset action
/// differs between data planes and a client's own value must not survive.
fn set(name: &str, value: String) -> HeaderValueOption {
    HeaderValueOption {
        header: Some(HeaderValue {
            key: name.to_owned(),
            raw_value: value.into_bytes(),
            ..HeaderValue::default()
        }),
        append_action: HeaderAppendAction::OverwriteIfExistsOrAdd.into(),
        ..HeaderValueOption::default()
    }
}

fn message(response: Response) -> pb::ProcessingResponse {
    pb::ProcessingResponse { response: Some(response), ..pb::ProcessingResponse::default() }
}
