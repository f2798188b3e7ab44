//! A model server that says what it received, and answers as the request asks it to in `x-answer`:
//!
//! ```text
//! (nothing)                  200, JSON: the method, the path, the body's length and hash
//! json bytes=5242880         200, JSON of about that length
//! usage prompt=9 cached=4    200, a chat completion that counts tokens
//! sse events=5 pause=20      200, a chat completion as events, the last one with the usage
//! trailers                   200, chunked, with a trailer
//! status code=500            that status, with a text
//! hold                       nothing, until the gate opens; then 200
//! hold-sse                   200 and one event at once, the rest when the gate opens
//! ```

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::header::{HeaderMap, HeaderValue};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;
use xxhash_rust::xxh3::Xxh3;

use super::AbortOnDrop;
use super::client::{Body, CHECKSUM, noise};

/// A running upstream.
pub(crate) struct Upstream {
    pub(crate) name: String,
    pub(crate) address: SocketAddr,
    seen: Arc<Mutex<Vec<Seen>>>,
    metrics: Arc<Mutex<Option<String>>>,
    _listening: AbortOnDrop,
}

/// A request that was received, whole.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) headers: HeaderMap,
    pub(crate) length: usize,
    pub(crate) hash: u64,
    pub(crate) trailers: Option<HeaderMap>,
}

/// What holds answers back; shared by the upstreams of a stack.
#[derive(Debug, Clone)]
pub(crate) struct Gate(watch::Sender<bool>);

impl Gate {
    pub(crate) fn closed() -> Self {
        Self(watch::Sender::new(false))
    }

    pub(crate) fn open(&self) {
        self.0.send_replace(true);
    }

    pub(crate) fn close(&self) {
        self.0.send_replace(false);
    }

    async fn passed(&self) {
        drop(self.0.subscribe().wait_for(|open| *open).await);
    }
}

impl Upstream {
    /// Listens on a port of its own, for HTTP/1.1 and HTTP/2.
    pub(crate) async fn start(name: &str, gate: &Gate) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        Self::on(name, listener, gate)
    }

    /// The same for one that is told where it listens.
    pub(crate) fn on(name: &str, listener: TcpListener, gate: &Gate) -> Self {
        let address = listener.local_addr().unwrap();
        let seen = Arc::<Mutex<Vec<Seen>>>::default();
        let metrics = Arc::<Mutex<Option<String>>>::default();
        let state = (name.to_owned(), Arc::clone(&seen), gate.clone(), Arc::clone(&metrics));
        let task = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                while connections.try_join_next().is_some() {}
                let Ok((stream, _)) = listener.accept().await else { continue };
                stream.set_nodelay(true).unwrap();
                let state = state.clone();
                connections.spawn(async move {
                    let service = service_fn(move |request| {
                        let (name, seen, gate, metrics) = state.clone();
                        async move {
                            if request.uri().path() == "/metrics" {
                                let page = metrics.lock().unwrap().clone();
                                return Ok(page.map_or_else(
                                    || text(404, "no metrics".to_owned()),
                                    |page| text(200, page),
                                ));
                            }
                            Ok::<_, Infallible>(answer(&name, &seen, gate, request).await)
                        }
                    });
                    let mut builder = auto::Builder::new(TokioExecutor::new());
                    // Envoy opens as many as it likes before it has heard of a limit.
                    builder.http2().max_concurrent_streams(None);
                    drop(builder.serve_connection(TokioIo::new(stream), service).await);
                });
            }
        });
        let name = name.to_owned();
        Self { name, address, seen, metrics, _listening: AbortOnDrop(task.abort_handle()) }
    }

    /// Says this at `/metrics` from now on; at first there are none.
    pub(crate) fn set_metrics(&self, page: Option<&str>) {
        *self.metrics.lock().unwrap() = page.map(str::to_owned);
    }

    /// Returns the requests with this id.
    pub(crate) fn seen(&self, id: &str) -> Vec<Seen> {
        let is_it = |seen: &&Seen| seen.headers.get("x-request-id").is_some_and(|v| v == id);
        self.seen.lock().unwrap().iter().filter(is_it).cloned().collect()
    }
}

pub(crate) fn hash(bytes: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64(bytes)
}

async fn answer(
    name: &str,
    seen: &Mutex<Vec<Seen>>,
    gate: Gate,
    request: Request<Incoming>,
) -> Response<Body> {
    let (head, mut body) = request.into_parts();
    let (mut length, mut hasher, mut trailers) = (0, Xxh3::new(), None);
    while let Some(frame) = body.frame().await {
        // A body that is cut off is not a request.
        let Ok(frame) = frame else { return text(400, "cut off".to_owned()) };
        match frame.into_data() {
            Ok(data) => {
                length += data.len();
                hasher.update(&data);
            }
            Err(frame) => trailers = frame.into_trailers().ok(),
        }
    }
    let received = Seen {
        method: head.method.to_string(),
        path: head.uri.path_and_query().map_or_else(String::new, ToString::to_string),
        headers: head.headers,
        length,
        hash: hasher.digest(),
        trailers,
    };
    let how = received.headers.get("x-answer").map_or("", |value| value.to_str().unwrap());
    let (kind, how) = how.split_once(' ').unwrap_or((how, ""));
    let number = |key: &str| -> Option<u64> {
        how.split(' ').find_map(|pair| pair.strip_prefix(key)?.strip_prefix('=')?.parse().ok())
    };
    let pause = Duration::from_millis(number("pause").unwrap_or(0));
    let events = number("events").unwrap_or(3);
    let response = match kind {
        // Over HTTP/2, hyper would send the body of an answer to HEAD.
        "" if received.method == "HEAD" => text(200, String::new()),
        "" => json(&serde_json::json!({
            "upstream": name, "method": received.method, "path": received.path,
            "length": length, "hash": format!("{:016x}", received.hash),
        })),
        "json" => {
            let text = noise(usize::try_from(number("bytes").unwrap_or(0)).unwrap());
            json(&serde_json::json!({ "upstream": name, "text": text }))
        }
        "usage" => json(&completion(number("prompt"), number("cached"))),
        "sse" => sse(events, pause, None),
        "hold-sse" => sse(events, pause, Some(gate)),
        "hold" => {
            seen.lock().unwrap().push(received);
            gate.passed().await;
            return json(&completion(None, None));
        }
        "trailers" => with_trailers(),
        "status" => text(u16::try_from(number("code").unwrap()).unwrap(), "as asked".to_owned()),
        other => text(400, format!("no such answer: {other}")),
    };
    seen.lock().unwrap().push(received);
    response
}

fn completion(prompt: Option<u64>, cached: Option<u64>) -> serde_json::Value {
    serde_json::json!({
        "object": "chat.completion",
        "choices": [{ "message": { "role": "assistant", "content": "yes" } }],
        "usage": usage(prompt.unwrap_or(11), cached.unwrap_or(0)),
    })
}

fn usage(prompt: u64, cached: u64) -> serde_json::Value {
    serde_json::json!({
        "prompt_tokens": prompt, "completion_tokens": 1, "total_tokens": prompt + 1,
        "prompt_tokens_details": { "cached_tokens": cached },
    })
}

/// The events of an answer, `[DONE]` not included.
pub(crate) fn event(number: u64) -> String {
    let choices = serde_json::json!([{ "delta": { "content": format!("word {number}") } }]);
    let chunk = serde_json::json!({ "object": "chat.completion.chunk", "choices": choices });
    format!("data: {chunk}\n\n")
}

fn sse(events: u64, pause: Duration, gate: Option<Gate>) -> Response<Body> {
    let (frames, body) = mpsc::channel(1);
    tokio::spawn(async move {
        let last = serde_json::json!({ "choices": [], "usage": usage(11, 5) });
        let texts = (0..events)
            .map(event)
            .chain([format!("data: {last}\n\n"), "data: [DONE]\n\n".to_owned()]);
        for (i, text) in texts.enumerate() {
            if i > 0 {
                tokio::time::sleep(pause).await;
            }
            if let (1, Some(gate)) = (i, &gate) {
                tokio::select! { () = gate.passed() => {}, () = frames.closed() => return }
            }
            if frames.send(Ok(Frame::data(Bytes::from(text)))).await.is_err() {
                return;
            }
        }
    });
    Response::builder()
        .header("content-type", "text/event-stream")
        .body(BodyExt::boxed(StreamBody::new(ReceiverStream::new(body))))
        .unwrap()
}

fn with_trailers() -> Response<Body> {
    let trailers = HeaderMap::from_iter([(CHECKSUM, HeaderValue::from_static("of-the-answer"))]);
    let frames = [Frame::data(Bytes::from_static(b"{\"object\": 1}")), Frame::trailers(trailers)];
    let frames = tokio_stream::iter(frames.map(Ok));
    Response::builder()
        .header("content-type", "application/json")
        .header("trailer", "x-checksum")
        .body(BodyExt::boxed(StreamBody::new(frames)))
        .unwrap()
}

fn json(value: &serde_json::Value) -> Response<Body> {
    Response::builder()
        .header("content-type", "application/json")
        .body(Full::from(value.to_string()).boxed())
        .unwrap()
}

fn text(status: u16, text: String) -> Response<Body> {
    Response::builder().status(status).body(Full::from(text).boxed()).unwrap()
}
