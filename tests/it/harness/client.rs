//! A client that can do what clients do: both HTTP versions, slow bodies, trailers, and hanging up.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::client::conn::{http1, http2};
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::{AbortOnDrop, within};

pub(crate) type Body = BoxBody<Bytes, Infallible>;

/// A request to send.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    pub(crate) id: String,
    method: &'static str,
    path: String,
    headers: Vec<(&'static str, String)>,
    payload: Payload,
    http: Http,
}

#[derive(Debug, Clone)]
enum Payload {
    /// With a `content-length`.
    Whole(Bytes),
    /// Chunked: each after a pause, then trailers, or no end at all.
    Chunks { pause: Duration, chunks: Vec<Bytes>, end: End },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    Plain,
    /// With the trailer `x-checksum: of-the-request`.
    Trailers,
    /// It stops, and never ends.
    Never,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Http {
    One,
    Two,
}

/// An answer, whole.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    pub(crate) trailers: Option<HeaderMap>,
}

/// An answer of which the headers have come; dropping it hangs up.
pub(crate) struct Streaming {
    response: Response<Incoming>,
    _link: Arc<AbortOnDrop>,
}

/// An HTTP/2 connection, which is open as long as it or one of its streams is held.
pub(crate) struct Connection {
    sender: http2::SendRequest<Body>,
    link: Arc<AbortOnDrop>,
}

/// The trailer that requests and answers end with.
pub(crate) const CHECKSUM: HeaderName = HeaderName::from_static("x-checksum");

pub(crate) fn get(path: &str) -> Call {
    call("GET", path)
}

pub(crate) fn head(path: &str) -> Call {
    call("HEAD", path)
}

pub(crate) fn post(path: &str, body: impl Into<Bytes>) -> Call {
    Call { payload: Payload::Whole(body.into()), ..call("POST", path) }
}

/// A chat completion.
pub(crate) fn chat(text: &str) -> Call {
    post("/v1/chat/completions", chat_body(text)).header("content-type", "application/json")
}

pub(crate) fn chat_body(text: &str) -> String {
    let messages = [serde_json::json!({ "role": "user", "content": text })];
    serde_json::json!({ "model": "test", "max_tokens": 8, "messages": messages }).to_string()
}

/// Text of that many bytes that no run-length trick could pass off as whole.
pub(crate) fn noise(bytes: usize) -> String {
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    let mut text = String::with_capacity(bytes + 16);
    while text.len() < bytes {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        text.push_str(&format!("{state:016x}"));
    }
    text.truncate(bytes);
    text
}

fn new_id() -> String {
    static MADE: AtomicUsize = AtomicUsize::new(0);
    format!("test-{}-{}", std::process::id(), MADE.fetch_add(1, Ordering::Relaxed))
}

fn call(method: &'static str, path: &str) -> Call {
    Call {
        id: new_id(),
        method,
        path: path.to_owned(),
        headers: Vec::new(),
        payload: Payload::Whole(Bytes::new()),
        http: Http::One,
    }
}

impl Call {
    /// The same under an id of its own.
    pub(crate) fn again(&self) -> Self {
        Self { id: new_id(), ..self.clone() }
    }

    pub(crate) fn header(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }

    /// Tells the upstream how to answer, see [`super::upstream`].
    pub(crate) fn answered(self, how: &str) -> Self {
        self.header("x-answer", how)
    }

    pub(crate) fn conversation(self, id: &str) -> Self {
        self.header("x-conversation-id", id)
    }

    pub(crate) fn over(self, http: Http) -> Self {
        Self { http, ..self }
    }

    /// Sends the body in chunks, a pause before each.
    pub(crate) fn chunked(self, chunks: &[&str], pause: Duration, end: End) -> Self {
        let chunks = chunks.iter().map(|chunk| Bytes::from((*chunk).to_owned())).collect();
        Self { payload: Payload::Chunks { pause, chunks, end }, ..self }
    }

    /// What the upstream has to receive.
    pub(crate) fn sent(&self) -> Vec<u8> {
        match &self.payload {
            Payload::Whole(body) => body.to_vec(),
            Payload::Chunks { chunks, .. } => chunks.concat(),
        }
    }

    pub(crate) fn method(&self) -> &'static str {
        self.method
    }

    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    /// Sends it and takes the whole answer.
    pub(crate) async fn answer(&self, port: u16) -> Answer {
        self.stream(port).await.finish().await
    }

    /// Sends it and waits for the headers of the answer.
    pub(crate) async fn stream(&self, port: u16) -> Streaming {
        within("the answer's headers", async {
            match self.http {
                Http::One => self.stream_http1(port).await,
                Http::Two => Connection::open(port).await.stream(self).await,
            }
        })
        .await
    }

    async fn stream_http1(&self, port: u16) -> Streaming {
        let (mut sender, driver) = http1::handshake(connect(port).await).await.unwrap();
        let driver = tokio::spawn(async move { drop(driver.await) });
        let link = Arc::new(AbortOnDrop(driver.abort_handle()));
        let response = sender.send_request(self.request("")).await.unwrap();
        Streaming { response, _link: link }
    }

    fn request(&self, origin: &str) -> Request<Body> {
        let mut request = Request::builder()
            .method(self.method)
            .uri(format!("{origin}{}", self.path))
            .header("x-request-id", &self.id);
        if origin.is_empty() {
            request = request.header("host", "llm.test");
        }
        for (name, value) in &self.headers {
            request = request.header(*name, value);
        }
        if matches!(self.payload, Payload::Chunks { end: End::Trailers, .. }) {
            request = request.header("trailer", "x-checksum");
        }
        request.body(self.payload.body()).unwrap()
    }
}

impl Payload {
    fn body(&self) -> Body {
        let (pause, chunks, end) = match self {
            Self::Whole(body) => return Full::new(body.clone()).boxed(),
            Self::Chunks { pause, chunks, end } => (*pause, chunks.clone(), *end),
        };
        let (frames, body) = mpsc::channel(1);
        tokio::spawn(async move {
            for chunk in chunks {
                tokio::time::sleep(pause).await;
                if frames.send(Ok(Frame::data(chunk))).await.is_err() {
                    return;
                }
            }
            match end {
                End::Plain => {}
                End::Trailers => {
                    let value = HeaderValue::from_static("of-the-request");
                    let trailers = HeaderMap::from_iter([(CHECKSUM, value)]);
                    drop(frames.send(Ok(Frame::trailers(trailers))).await);
                }
                End::Never => frames.closed().await,
            }
        });
        BodyExt::boxed(StreamBody::new(ReceiverStream::new(body)))
    }
}

impl Connection {
    /// Opens an HTTP/2 connection.
    pub(crate) async fn open(port: u16) -> Self {
        let io = connect(port).await;
        let (sender, driver) = http2::handshake(TokioExecutor::new(), io).await.unwrap();
        let driver = tokio::spawn(async move { drop(driver.await) });
        Self { sender, link: Arc::new(AbortOnDrop(driver.abort_handle())) }
    }

    /// Sends a request and waits for the headers of its answer; dropping either cancels the stream alone.
    pub(crate) async fn stream(&self, call: &Call) -> Streaming {
        let response = self.sender.clone().send_request(call.request("http://llm.test"));
        let response = response.await.unwrap();
        Streaming { response, _link: Arc::clone(&self.link) }
    }
}

impl Streaming {
    /// Waits for more of the body, and returns it as text.
    pub(crate) async fn chunk(&mut self) -> String {
        let frame = within("a chunk", self.response.body_mut().frame()).await;
        let data = frame.expect("the body goes on").unwrap().into_data();
        String::from_utf8(data.expect("data").to_vec()).unwrap()
    }

    /// Takes the rest of the answer.
    pub(crate) async fn finish(self) -> Answer {
        let (head, body) = self.response.into_parts();
        let body = within("the answer's end", body.collect()).await.unwrap();
        let trailers = body.trailers().cloned();
        Answer { status: head.status, headers: head.headers, body: body.to_bytes(), trailers }
    }
}

impl Answer {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error}: {:?}", self.text()))
    }
}

async fn connect(port: u16) -> TokioIo<TcpStream> {
    let stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    stream.set_nodelay(true).unwrap();
    TokioIo::new(stream)
}
