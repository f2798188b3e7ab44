//! The token ids of a request's prompt, as its engine will work on them.
//!
//! Engines keep their prefix caches by token id. Whoever wants to know what an engine has of a prompt needs the same
//! ids: from a tokenizer in this process, else from an engine's own endpoint, else not at all.

use std::fmt;
use std::sync::Arc;

mod body;
mod chat;
mod engine;
mod local;
mod memo;
mod model;
mod python;
mod resolver;
mod template;

pub use body::Api;
pub use chat::Dialect;
pub use engine::{Engine, EngineApi};
pub use local::{LocalTokenizers, MemoUse};
pub use model::{LoadError, ModelOptions};
pub use resolver::{Outcome, Question, Resolver, ResolverOptions, Step};
pub use template::ContentFormat;

/// What is known of a prompt's tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Tokens {
    /// The ids, exactly as the engine will have them.
    Exact(Arc<[u32]>),
    /// Nothing: their number is estimated from the bytes of the text.
    Estimate,
}

/// Why a step could not tell the tokens of a prompt. None of these fails a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// No tokenizer is configured for the model.
    NoTokenizer,
    /// The model has no chat template.
    NoTemplate,
    /// The path is not one of the APIs whose prompts are known.
    UnknownApi,
    /// The body has no prompt.
    NoPrompt,
    /// The body is not JSON of the right types.
    Malformed,
    /// There are several prompts.
    Batch,
    /// There is more than text: images, audio, video, embeddings.
    Media,
    /// The body asks for something whose prompt only the engine can make.
    Unsupported(&'static str),
    /// There is more text than is tokenized at most.
    TooLarge,
    /// The template does not take the messages, or has a fault.
    Template(String),
    /// The tokenizer does not take the text.
    Encode(String),
    /// A library panicked.
    Panicked,
    /// Too many prompts were being tokenized, for longer than a request can wait.
    Busy,
    /// The engine did not answer in time.
    Timeout,
    /// The engine could not be reached, or its answer not be read.
    Transport(String),
    /// The engine answered with this HTTP status.
    Status(u16),
    /// The engine's answer is not what it should be.
    Reply(String),
}

impl Failure {
    /// A metric label.
    #[must_use]
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::NoTokenizer => "no-tokenizer",
            Self::NoTemplate => "no-template",
            Self::UnknownApi => "unknown-api",
            Self::NoPrompt => "no-prompt",
            Self::Malformed => "malformed",
            Self::Batch => "batch",
            Self::Media => "media",
            Self::Unsupported(_) => "unsupported",
            Self::TooLarge => "too-large",
            Self::Template(_) => "template",
            Self::Encode(_) => "encode",
            Self::Panicked => "panicked",
            Self::Busy => "busy",
            Self::Timeout => "timeout",
            Self::Transport(_) => "transport",
            Self::Status(_) => "status",
            Self::Reply(_) => "reply",
        }
    }
}

impl Failure {
    /// Whether something is wrong here or with an engine, rather than with what the client asks for.
    #[must_use]
    pub const fn is_a_fault(&self) -> bool {
        match self {
            Self::Template(_)
            | Self::Encode(_)
            | Self::Panicked
            | Self::Busy
            | Self::Timeout
            | Self::Transport(_)
            | Self::Status(_)
            | Self::Reply(_) => true,
            Self::NoTokenizer
            | Self::NoTemplate
            | Self::UnknownApi
            | Self::NoPrompt
            | Self::Malformed
            | Self::Batch
            | Self::Media
            | Self::Unsupported(_)
            | Self::TooLarge => false,
        }
    }

    /// What else may be logged of it: never what libraries say, which can hold text of the prompt.
    #[must_use]
    pub fn details(&self) -> String {
        match self {
            Self::Transport(text) => text.clone(),
            Self::Status(status) => status.to_string(),
            Self::Unsupported(what) => (*what).to_owned(),
            Self::NoTokenizer
            | Self::NoTemplate
            | Self::UnknownApi
            | Self::NoPrompt
            | Self::Malformed
            | Self::Batch
            | Self::Media
            | Self::TooLarge
            | Self::Template(_)
            | Self::Encode(_)
            | Self::Panicked
            | Self::Busy
            | Self::Timeout
            | Self::Reply(_) => String::new(),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())?;
        match self {
            Self::Unsupported(what) => write!(f, ": {what}"),
            Self::Template(text)
            | Self::Encode(text)
            | Self::Transport(text)
            | Self::Reply(text) => {
                write!(f, ": {text}")
            }
            Self::Status(status) => write!(f, ": {status}"),
            Self::NoTokenizer
            | Self::NoTemplate
            | Self::UnknownApi
            | Self::NoPrompt
            | Self::Malformed
            | Self::Batch
            | Self::Media
            | Self::TooLarge
            | Self::Panicked
            | Self::Busy
            | Self::Timeout => Ok(()),
        }
    }
}

impl std::error::Error for Failure {}
