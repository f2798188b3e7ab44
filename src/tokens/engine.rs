//! Asks an engine what the tokens of a prompt are.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::uri::{Parts, PathAndQuery};
use http::{Method, Request, Uri};
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde::{Deserialize, Serialize};

use super::Failure;
use super::body::{Api, Body};

/// An answer is a list of numbers, of at most seven bytes each; this is enough for a million tokens.
const MAX_REPLY_BYTES: usize = 16 << 20;

/// Connections kept open to one engine.
const IDLE_CONNECTIONS: usize = 4;

/// The endpoints an engine has for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineApi {
    /// vLLM's `/tokenize`, which knows most of what a request can ask for.
    VllmTokenize,
    /// vLLM's `…/render` (0.21 and later, with `--enable-scale-out` where it serves too), which knows all of it.
    VllmRender,
    /// llama.cpp's `/apply-template` and `/tokenize`.
    LlamaCpp,
}

/// A client of engines' tokenizers.
#[derive(Debug, Clone)]
pub struct Engine {
    api: EngineApi,
    client: Client<HttpConnector, Full<Bytes>>,
    timeout: Duration,
}

impl Engine {
    /// `timeout` is for all that one prompt takes.
    #[must_use]
    pub fn new(api: EngineApi, timeout: Duration) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(timeout));
        let client = Client::builder(TokioExecutor::new())
            .pool_max_idle_per_host(IDLE_CONNECTIONS)
            .pool_idle_timeout(Duration::from_secs(30))
            .pool_timer(hyper_util::rt::TokioTimer::new())
            .build(connector);
        Self { api, client, timeout }
    }

    /// Asks the engine at `address`, such as `http://10.0.0.1:8000`, for the tokens of the prompt in `body`.
    ///
    /// # Errors
    /// If the ids cannot be known for sure.
    pub async fn tokens(
        &self,
        address: &Uri,
        api: Api,
        body: &Bytes,
    ) -> Result<Arc<[u32]>, Failure> {
        let asking = self.ask(address, api, body);
        let ids = tokio::time::timeout(self.timeout, asking)
            .await
            .map_err(|_elapsed| Failure::Timeout)??;
        Ok(ids.into())
    }

    async fn ask(&self, address: &Uri, api: Api, body: &Bytes) -> Result<Vec<u32>, Failure> {
        match self.api {
            EngineApi::VllmTokenize => {
                let Read { vllm_tokenize_knows, .. } = Read::new(api, body).await?;
                if !vllm_tokenize_knows {
                    return Err(Failure::Unsupported("a field that /tokenize does not know"));
                }
                let reply: Tokenized = self.post(address, "/tokenize", body.clone()).await?;
                reply.ids()
            }
            EngineApi::VllmRender => {
                let (path, many) = match api {
                    Api::Chat => ("/v1/chat/completions/render", false),
                    Api::Completions => ("/v1/completions/render", true),
                    Api::Responses => return Err(Failure::UnknownApi),
                };
                if many {
                    let reply: Vec<Rendered> = self.post(address, path, body.clone()).await?;
                    let [one] = <[Rendered; 1]>::try_from(reply).map_err(|_many| Failure::Batch)?;
                    one.text_ids()
                } else {
                    self.post::<Rendered>(address, path, body.clone()).await?.text_ids()
                }
            }
            EngineApi::LlamaCpp => {
                let text = match Read::new(api, body).await?.text {
                    Some(text) => text,
                    None if api == Api::Chat => {
                        self.post::<Templated>(address, "/apply-template", body.clone())
                            .await?
                            .prompt
                    }
                    None => return Err(Failure::UnknownApi),
                };
                let question =
                    ToTokenize { content: &text, add_special: true, parse_special: true };
                let question = serde_json::to_vec(&question)
                    .map_err(|error| Failure::Encode(error.to_string()))?;
                let reply: Tokenized = self.post(address, "/tokenize", question.into()).await?;
                reply.ids()
            }
        }
    }

    async fn post<R: for<'de> Deserialize<'de>>(
        &self,
        address: &Uri,
        path: &'static str,
        body: Bytes,
    ) -> Result<R, Failure> {
        let transport = |error: &dyn std::error::Error| Failure::Transport(with_causes(error));
        let mut parts = Parts::default();
        parts.scheme = address.scheme().cloned();
        parts.authority = address.authority().cloned();
        parts.path_and_query = Some(PathAndQuery::from_static(path));
        let uri = Uri::from_parts(parts).map_err(|error| transport(&error))?;
        let request = Request::builder()
            .method(Method::POST)
            .uri(uri)
            .header(CONTENT_TYPE, "application/json")
            .body(Full::new(body))
            .map_err(|error| transport(&error))?;
        let response = self.client.request(request).await.map_err(|error| transport(&error))?;
        if !response.status().is_success() {
            return Err(Failure::Status(response.status().as_u16()));
        }
        let body = Limited::new(response.into_body(), MAX_REPLY_BYTES).collect().await;
        let body = body.map_err(|error| transport(error.as_ref()))?.to_bytes();
        serde_json::from_slice(&body).map_err(|error| Failure::Reply(error.to_string()))
    }
}

/// What has to be known of a body before it is passed on as it is.
struct Read {
    /// The text of a completion.
    text: Option<String>,
    vllm_tokenize_knows: bool,
}

impl Read {
    #[expect(clippy::disallowed_methods, reason = "a large body takes its time to be read")]
    async fn new(api: Api, body: &Bytes) -> Result<Self, Failure> {
        let body = body.clone();
        let read = tokio::task::spawn_blocking(move || {
            let body = Body::read(api, &body)?;
            let text = body.text()?.map(str::to_owned);
            Ok(Self { text, vllm_tokenize_knows: api != Api::Responses && body.is_plain() })
        });
        read.await.unwrap_or(Err(Failure::Panicked))
    }
}

#[derive(Debug, Serialize)]
struct ToTokenize<'t> {
    content: &'t str,
    add_special: bool,
    parse_special: bool,
}

#[derive(Debug, Deserialize)]
struct Templated {
    prompt: String,
}

#[derive(Debug, Deserialize)]
struct Tokenized {
    tokens: Vec<u32>,
    count: Option<usize>,
}

impl Tokenized {
    fn ids(self) -> Result<Vec<u32>, Failure> {
        match self.count {
            Some(count) if count != self.tokens.len() => {
                Err(Failure::Reply("count and tokens differ".into()))
            }
            Some(_) | None => Ok(self.tokens),
        }
    }
}

#[derive(Debug, Deserialize)]
struct Rendered {
    token_ids: Vec<u32>,
    /// What stands behind placeholders of images and the like: ids alone do not tell such prompts apart.
    #[serde(default)]
    features: Option<serde_json::Value>,
}

impl Rendered {
    fn text_ids(self) -> Result<Vec<u32>, Failure> {
        match self.features {
            None => Ok(self.token_ids),
            Some(_) => Err(Failure::Media),
        }
    }
}

fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests;
