//! The tokenizers of this process, by model.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use jiff::Timestamp;

use super::Failure;
use super::body::{Api, Body};
use super::memo::Memo;
use super::model::{LoadError, Model, ModelOptions};

/// The name that stands for all models that have no tokenizer of their own, such as adapters of one base model.
const ANY: &str = "*";

/// Tokenizers by model name, and what they have tokenized before.
#[derive(Debug)]
pub struct LocalTokenizers {
    models: BTreeMap<String, Model>,
    memo: Mutex<Memo>,
    max_text_bytes: usize,
}

/// How full the memo is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoUse {
    /// Bytes held, of ids and of the table.
    pub bytes: usize,
    /// Pieces of text.
    pub entries: usize,
}

impl LocalTokenizers {
    /// Loads the tokenizers of all `models`, each a name that requests ask for, or `*` for all that are not named.
    /// Reads files: not for an async thread.
    ///
    /// At most `memo_bytes` are held of what was tokenized, and no text of more than `max_text_bytes` is tokenized.
    ///
    /// # Errors
    /// If a folder cannot be used: the model, and what is the matter.
    pub fn load(
        models: &BTreeMap<String, ModelOptions>,
        memo_bytes: usize,
        max_text_bytes: usize,
    ) -> Result<Self, (String, LoadError)> {
        let numbered = (0..).zip(models);
        let models = numbered
            .map(|(number, (name, options))| match Model::load(number, options) {
                Ok(model) => Ok((name.clone(), model)),
                Err(error) => Err((name.clone(), error)),
            })
            .collect::<Result<_, _>>()?;
        Ok(Self { models, memo: Mutex::new(Memo::new(memo_bytes)), max_text_bytes })
    }

    /// Whether there is a tokenizer for `model`.
    #[must_use]
    pub fn knows(&self, model: &str) -> bool {
        self.of(model).is_some()
    }

    fn of(&self, model: &str) -> Option<&Model> {
        self.models.get(model).or_else(|| self.models.get(ANY))
    }

    /// Returns the ids of the prompt in `body`, which is for `api`, at the time `now`.
    ///
    /// It takes as long as what is new in the prompt is long, a second for a megabyte: not for an async thread.
    ///
    /// # Errors
    /// If the ids cannot be known for sure.
    pub fn tokens(
        &self,
        model: &str,
        api: Api,
        body: &[u8],
        now: Timestamp,
    ) -> Result<Arc<[u32]>, Failure> {
        let model = self.of(model).ok_or(Failure::NoTokenizer)?;
        // JSON's escapes make a text up to six times as long; what is longer still is not worth reading.
        if body.len() / 8 > self.max_text_bytes {
            return Err(Failure::TooLarge);
        }
        let body = Body::read(api, body)?;
        model.tokens(&body, &self.memo, now, self.max_text_bytes)
    }

    /// Returns how full the memo is.
    #[must_use]
    pub fn memo_use(&self) -> MemoUse {
        let memo = self.memo.lock().unwrap_or_else(PoisonError::into_inner);
        MemoUse { bytes: memo.bytes(), entries: memo.len() }
    }
}
