//! The client: a connection for each request, and the time at which each part of the answer came.
#![allow(clippy::disallowed_methods, reason = "it measures time, and owns its connection's task")]

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio::task::AbortHandle;
use tokio::time::timeout;

use super::stream::Answer;

/// After this long a request has failed: longer than anything that still works.
const PATIENCE: Duration = Duration::from_secs(600);
/// For short questions to the parts themselves.
const SHORT: Duration = Duration::from_secs(30);

/// The header that names the conversation. Not `x-conversation-id`: llama.cpp takes that for the name of a stream that
/// can be resumed, and ends one as soon as another of the same name begins.
const CONVERSATION: &str = "x-session-id";

/// What came of a request.
#[derive(Debug, Default)]
pub(crate) struct Reply {
    pub(crate) answer: Answer,
    /// The name of the endpoint that was chosen, as the picker's header says.
    pub(crate) endpoint: Option<String>,
    /// Why it did not end well.
    pub(crate) failure: Option<String>,
}

/// A connection that ends with its owner.
struct Connection {
    sender: http1::SendRequest<Full<Bytes>>,
    task: AbortHandle,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Connection {
    async fn open(port: u16) -> Result<Self> {
        let stream = TcpStream::connect(("127.0.0.1", port)).await?;
        stream.set_nodelay(true)?;
        let (sender, driver) = http1::handshake(TokioIo::new(stream)).await?;
        let task = tokio::spawn(async move { drop(driver.await) }).abort_handle();
        Ok(Self { sender, task })
    }

    async fn send(
        &mut self,
        path: &str,
        key: Option<&str>,
        body: Option<Bytes>,
    ) -> Result<Response<Incoming>> {
        let request = Request::builder().uri(path).header("host", "llm.lab");
        let request = match key {
            Some(key) => request.header(CONVERSATION, key),
            None => request,
        };
        let request = match body {
            Some(body) => request
                .method("POST")
                .header("content-type", "application/json")
                .body(Full::new(body))?,
            None => request.body(Full::default())?,
        };
        Ok(self.sender.send_request(request).await?)
    }
}

/// Sends a chat completion that streams, and reads its answer; times are since `due`.
pub(crate) async fn chat(port: u16, key: &str, body: Bytes, due: Instant) -> Reply {
    let mut reply = Reply::default();
    let read = read(port, key, body, due, &mut reply);
    reply.failure = match timeout(PATIENCE, read).await {
        Ok(Ok(())) => reply.answer.counted().err(),
        Ok(Err(error)) => Some(format!("{error:#}")),
        Err(_) => Some(format!("no answer within {} s", PATIENCE.as_secs())),
    };
    reply
}

async fn read(port: u16, key: &str, body: Bytes, due: Instant, reply: &mut Reply) -> Result<()> {
    let mut connection = Connection::open(port).await.context("no connection to the gateway")?;
    let mut response = connection.send("/v1/chat/completions", Some(key), Some(body)).await?;
    let routed = response.headers().get("x-routed-to").and_then(|name| name.to_str().ok());
    reply.endpoint = routed.map(str::to_owned);
    if response.status() != StatusCode::OK {
        let status = response.status();
        let body = response.into_body().collect().await?.to_bytes();
        let body: String = String::from_utf8_lossy(&body).chars().take(200).collect();
        anyhow::bail!("status {status}: {body}");
    }
    while let Some(frame) = response.body_mut().frame().await {
        let frame = frame.context("the answer broke off")?;
        if let Some(data) = frame.data_ref() {
            reply.answer.take(data, due.elapsed()).map_err(anyhow::Error::msg)?;
        }
    }
    Ok(())
}

/// Asks a part for a page: its status and its text.
pub(crate) async fn page(port: u16, path: &str) -> Result<(StatusCode, String)> {
    exchange(port, path, None).await
}

/// Posts JSON to a part, and reads its JSON.
pub(crate) async fn post(port: u16, path: &str, body: &Value) -> Result<Value> {
    let (status, text) = exchange(port, path, Some(Bytes::from(body.to_string()))).await?;
    anyhow::ensure!(status == StatusCode::OK, "{path}: status {status}: {text}");
    serde_json::from_str(&text).with_context(|| format!("{path} is no JSON"))
}

async fn exchange(port: u16, path: &str, body: Option<Bytes>) -> Result<(StatusCode, String)> {
    let exchange = async {
        let mut connection = Connection::open(port).await?;
        let response = connection.send(path, None, body).await?;
        let status = response.status();
        let body = response.into_body().collect().await?.to_bytes();
        Ok((status, String::from_utf8_lossy(&body).into_owned()))
    };
    timeout(SHORT, exchange).await.with_context(|| format!("{path}: no answer"))?
}
