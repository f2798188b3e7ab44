//! N engines in one process that answer at once: JSON with usage, or 16 events to a body that begins with
//! `{"stream":true`. It prints the addresses it took, then serves.
//!
//! usage: `backend COUNT`
#![allow(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a program of the benchmark owns its tasks, and a fault may end it"
)]

use std::collections::VecDeque;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};

use http_body_util::BodyExt as _;
use hyper::body::{Body, Bytes, Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;

/// Events of a streamed answer, before the one with the usage.
const EVENTS: usize = 16;

/// The parts of an answer, each written to the socket before the next one is made.
struct Parts {
    left: VecDeque<String>,
    wrote: bool,
}

impl Body for Parts {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        // Hyper writes what it holds when a body makes it wait.
        if std::mem::take(&mut self.wrote) && !self.left.is_empty() {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        self.wrote = true;
        Poll::Ready(self.left.pop_front().map(|part| Ok(Frame::data(Bytes::from(part)))))
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        // One part is a JSON answer, which has a content-length.
        match self.left.len() {
            1 => hyper::body::SizeHint::with_exact(self.left[0].len() as u64),
            _ => hyper::body::SizeHint::default(),
        }
    }
}

async fn answer(
    mut request: Request<Incoming>,
    address: SocketAddr,
) -> Result<Response<Parts>, hyper::Error> {
    let (mut bytes, mut streamed) = (0, false);
    while let Some(frame) = request.body_mut().frame().await {
        if let Some(data) = frame?.data_ref() {
            streamed |= bytes == 0 && data.starts_with(b"{\"stream\":true");
            bytes += data.len();
        }
    }
    let (prompt, generated) = (bytes / 4, if streamed { EVENTS } else { 4 });
    let usage = format!(
        r#""usage":{{"prompt_tokens":{prompt},"completion_tokens":{generated},"total_tokens":{},"prompt_tokens_details":{{"cached_tokens":0}}}}"#,
        prompt + generated
    );
    let left = if streamed {
        let event = |rest: &str| {
            format!(
                "data: {{\"id\":\"c\",\"object\":\"chat.completion.chunk\",\"model\":\"tiny\",{rest}}}\n\n"
            )
        };
        let token = |i: usize| {
            event(&format!(r#""choices":[{{"index":0,"delta":{{"content":"word{i} "}}}}]"#))
        };
        let last = event(&format!(r#""choices":[],{usage}"#)) + "data: [DONE]\n\n";
        (0..EVENTS).map(token).chain([last]).collect()
    } else {
        VecDeque::from([format!(
            r#"{{"id":"c","object":"chat.completion","created":1,"model":"tiny","choices":[{{"index":0,"message":{{"role":"assistant","content":"hello"}},"finish_reason":"stop"}}],{usage}}}"#
        )])
    };
    let content_type = if streamed { "text/event-stream" } else { "application/json" };
    Ok(Response::builder()
        .header("content-type", content_type)
        .header("x-backend", address.to_string())
        .header("x-got", bytes)
        .body(Parts { left, wrote: false })
        .unwrap())
}

async fn serve(listener: TcpListener) {
    let address = listener.local_addr().unwrap();
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        stream.set_nodelay(true).unwrap();
        tokio::spawn(async move {
            let service = service_fn(|request| answer(request, address));
            let http = hyper::server::conn::http1::Builder::new();
            // A connection that the gateway closes is no fault.
            drop(http.serve_connection(TokioIo::new(stream), service).await);
        });
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let count: usize = std::env::args().nth(1).unwrap().parse().unwrap();
    let mut engines = tokio::task::JoinSet::new();
    for _ in 0..count {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        println!("{}", listener.local_addr().unwrap());
        engines.spawn(serve(listener));
    }
    println!("ready");
    engines.join_all().await;
}
