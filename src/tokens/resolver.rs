//! Tries one way after the other to learn the tokens of a prompt.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::Uri;
use jiff::Timestamp;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout_at};

use super::body::{Api, Body};
use super::engine::Engine;
use super::local::LocalTokenizers;
use super::{Failure, Tokens};

/// A way to learn the tokens of a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The client gave ids.
    Given,
    /// A tokenizer of this process.
    Local,
    /// An engine's endpoint.
    Engine,
}

impl Step {
    /// A metric label.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Given => "given",
            Self::Local => "local",
            Self::Engine => "engine",
        }
    }
}

/// How tokens are learnt.
#[derive(Debug, Clone, Copy)]
pub struct ResolverOptions {
    /// Prompts tokenized in this process at a time; the others wait.
    pub parallel: usize,
    /// How long a prompt waits for its turn and its tokens in this process.
    pub local_timeout: Duration,
}

/// The prompt that is asked about.
#[derive(Debug, Clone)]
pub struct Question {
    /// The model that serves the request, after any rewriting of its name.
    pub model: String,
    /// The path of the request.
    pub path: String,
    /// Its whole body, decoded.
    pub body: Bytes,
    /// The time of day, which some templates print.
    pub now: Timestamp,
    /// An engine of the model that may be asked, such as `http://10.0.0.1:8000`.
    pub engine: Option<Uri>,
    /// When nobody waits for the answer any more, whatever the steps' own limits are.
    pub until: Instant,
}

/// What was learnt of a prompt's tokens, and how.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    pub tokens: Tokens,
    /// The step that told; `None` if all that is left is an estimate.
    pub step: Option<Step>,
    /// The steps that were tried before, each with what it failed for.
    pub failures: Vec<(Step, Failure)>,
}

/// Learns the tokens of prompts.
#[derive(Debug)]
pub struct Resolver {
    local: Option<Arc<LocalTokenizers>>,
    engine: Option<Engine>,
    turns: Arc<Semaphore>,
    local_timeout: Duration,
}

impl Resolver {
    /// Uses what there is of the two ways, in this order.
    #[must_use]
    pub fn new(
        local: Option<LocalTokenizers>,
        engine: Option<Engine>,
        options: ResolverOptions,
    ) -> Self {
        let turns = Arc::new(Semaphore::new(options.parallel.max(1)));
        Self { local: local.map(Arc::new), engine, turns, local_timeout: options.local_timeout }
    }

    /// Whether an engine may be asked.
    #[must_use]
    pub fn asks_engines(&self) -> bool {
        self.engine.is_some()
    }

    /// Returns the tokens of a prompt, or that they cannot be known.
    pub async fn tokens(&self, question: Question) -> Outcome {
        let mut failures = Vec::new();
        let Some(api) = Api::of(&question.path) else {
            failures.push((Step::Local, Failure::UnknownApi));
            return Outcome { tokens: Tokens::Estimate, step: None, failures };
        };
        let told = |step, ids, failures| Outcome {
            tokens: Tokens::Exact(ids),
            step: Some(step),
            failures,
        };
        if self.local.is_some() || api == Api::Completions {
            match self.here(api, &question).await {
                Ok((step, ids)) => return told(step, ids, failures),
                Err(Failure::NoTokenizer) if self.local.is_none() => {}
                Err(failure) => failures.push((Step::Local, failure)),
            }
        }
        if let (Some(engine), Some(address)) = (&self.engine, &question.engine) {
            let asking = engine.tokens(address, api, &question.body);
            match timeout_at(question.until, asking).await.unwrap_or(Err(Failure::Timeout)) {
                Ok(ids) => return told(Step::Engine, ids, failures),
                Err(failure) => failures.push((Step::Engine, failure)),
            }
        }
        Outcome { tokens: Tokens::Estimate, step: None, failures }
    }

    /// Does what can be done in this process, away from the threads that wait.
    #[expect(
        clippy::disallowed_methods,
        reason = "tokenizing is work, and async threads are for waiting; a wait ends by a clock"
    )]
    async fn here(&self, api: Api, question: &Question) -> Result<(Step, Arc<[u32]>), Failure> {
        let local = self.local.as_ref().filter(|local| local.knows(&question.model)).cloned();
        if local.is_none() && api != Api::Completions {
            return Err(Failure::NoTokenizer);
        }
        let work = async {
            let turn =
                Arc::clone(&self.turns).acquire_owned().await.map_err(|_closed| Failure::Busy)?;
            let (model, body, now) = (question.model.clone(), question.body.clone(), question.now);
            let work = tokio::task::spawn_blocking(move || {
                // The turn ends with the work, also when nobody waits for it any more.
                let _turn = turn;
                if api == Api::Completions
                    && let Some(ids) = Body::read(api, &body).ok().as_ref().and_then(Body::given)
                {
                    return Ok((Step::Given, ids.into()));
                }
                let local = local.ok_or(Failure::NoTokenizer)?;
                local.tokens(&model, api, &body, now).map(|ids| (Step::Local, ids))
            });
            work.await.unwrap_or(Err(Failure::Panicked))
        };
        let until = question.until.min(Instant::now() + self.local_timeout);
        timeout_at(until, work).await.unwrap_or(Err(Failure::Busy))
    }
}

#[cfg(test)]
mod tests;
