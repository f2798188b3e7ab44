//! One model's tokenizer: from text to the ids its engine works on.

use std::fmt;
use std::fs;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use aho_corasick::{AhoCorasick, MatchKind};
use jiff::Timestamp;
use minijinja::Value;
use serde::{Deserialize, Serialize};
use tokenizers::Tokenizer;

use super::Failure;
use super::body::{Ask, Body};
use super::chat::{self, Dialect};
use super::memo::{Key, Memo};
use super::template::{ContentFormat, Template};

/// Pieces shorter than this are tokenized with the text after them: finding them again would cost more than it saves.
const MIN_PIECE_BYTES: usize = 256;

/// How a model's prompts are made.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ModelOptions {
    /// A folder with `tokenizer.json`, and `tokenizer_config.json` and `chat_template.jinja` as far as there are.
    pub folder: PathBuf,
    /// Whose reading of a request counts.
    #[serde(default)]
    pub dialect: Dialect,
    /// A chat template in place of the folder's own.
    #[serde(default)]
    pub chat_template: Option<PathBuf>,
    /// What the template takes as content; found out from the template if not given.
    #[serde(default)]
    pub content_format: Option<ContentFormat>,
}

/// Why a model folder cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// A file is missing or cannot be read.
    #[error("{}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What is the matter with it.
        #[source]
        source: io::Error,
    },
    /// A file is there and makes no sense.
    #[error("{}: {reason}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// What is the matter with it.
        reason: String,
    },
}

/// The tokenizer of one model.
pub(crate) struct Model {
    number: u32,
    tokenizer: Tokenizer,
    cuts: Option<Cuts>,
    /// The ids put around every prompt that is not a chat; `None` if a prompt cannot be told from them.
    around: Option<(Vec<u32>, Vec<u32>)>,
    template: Option<Template>,
    /// The template for requests with tools, if it is another one.
    tool_template: Option<Template>,
    /// The variables of the special tokens, such as `bos_token`.
    specials: Vec<(String, Value)>,
    dialect: Dialect,
}

/// Finds the places in a text where it may be cut, and both parts tokenized on their own.
///
/// Such a place is right after a token that is found in the text before anything else is done to it. The text between
/// two such tokens is normalized, split and merged by itself.
struct Cuts {
    finder: AhoCorasick,
    /// Of each pattern: its id, or `None` if there can be no cut after it.
    ids: Vec<Option<u32>>,
}

/// A piece of a text that is tokenized on its own.
#[derive(Debug, Clone, Copy)]
struct Piece<'t> {
    text: &'t str,
    /// The token before it: its length in bytes, and its id.
    lead: Option<(usize, u32)>,
}

impl Model {
    /// Reads a model folder; `number` tells its pieces in the memo from those of other models.
    ///
    /// # Errors
    /// If a file cannot be read or understood.
    pub(crate) fn load(number: u32, options: &ModelOptions) -> Result<Self, LoadError> {
        let path = options.folder.join("tokenizer.json");
        let bytes = read(&path)?.ok_or_else(|| missing(&path))?;
        let content = |reason: String| LoadError::Content { path: path.clone(), reason };
        let mut tokenizer =
            Tokenizer::from_bytes(&bytes).map_err(|error| content(error.to_string()))?;
        // The engines set both anew for every prompt, to none.
        tokenizer.with_truncation(None).map_err(|error| content(error.to_string()))?;
        tokenizer.with_padding(None);
        let cuts = Cuts::new(&tokenizer).map_err(|error| content(error.to_string()))?;
        let around = around(&tokenizer);

        let config_path = options.folder.join("tokenizer_config.json");
        let config: Config = match read(&config_path)? {
            None => Config::default(),
            Some(bytes) => serde_json::from_slice(&bytes).map_err(|error| LoadError::Content {
                path: config_path.clone(),
                reason: error.to_string(),
            })?,
        };
        let specials = config.specials();
        let (source_path, source, tool_source) = match &options.chat_template {
            Some(path) => {
                (path.clone(), Some(read_text(path)?.ok_or_else(|| missing(path))?), None)
            }
            None => {
                let path = options.folder.join("chat_template.jinja");
                match read_text(&path)? {
                    Some(text) => (path, Some(text), None),
                    None => {
                        let (text, tools) = config.templates();
                        (config_path, text, tools)
                    }
                }
            }
        };
        let compile = |source: String| {
            let mut template =
                Template::new(&source, options.dialect.floats()).map_err(|error| {
                    LoadError::Content { path: source_path.clone(), reason: error.to_string() }
                })?;
            template.content = options.content_format.unwrap_or(template.content);
            Ok(template)
        };
        Ok(Self {
            number,
            tokenizer,
            cuts,
            around,
            template: source.map(&compile).transpose()?,
            tool_template: tool_source.map(&compile).transpose()?,
            specials,
            dialect: options.dialect,
        })
    }

    /// Returns the ids of a request's prompt. Takes as long as its new text is long: not for an async thread.
    pub(crate) fn tokens(
        &self,
        body: &Body,
        memo: &Mutex<Memo>,
        now: Timestamp,
        max_bytes: usize,
    ) -> Result<Arc<[u32]>, Failure> {
        // Neither library promises not to panic on strange text, and a request must not fail with its tokenizer.
        // Nothing is left half done: both only read, and the memo is locked for single steps on it.
        catch_unwind(AssertUnwindSafe(|| self.tokens_unguarded(body, memo, now, max_bytes)))
            .unwrap_or(Err(Failure::Panicked))
    }

    fn tokens_unguarded(
        &self,
        body: &Body,
        memo: &Mutex<Memo>,
        now: Timestamp,
        max_bytes: usize,
    ) -> Result<Arc<[u32]>, Failure> {
        let (text, add_special) = match body.ask()? {
            Ask::Ids(ids) => return Ok(ids.into()),
            Ask::Text(text) => (text.to_owned(), body.add_special_tokens.unwrap_or(true)),
            Ask::Chat(chat) => {
                let template = match &self.tool_template {
                    Some(template) if chat.has_tools() => template,
                    Some(_) | None => self.template.as_ref().ok_or(Failure::NoTemplate)?,
                };
                let text = chat::render(&chat, template, &self.specials, self.dialect, now)?;
                (text, self.dialect.adds_special_tokens(body.add_special_tokens))
            }
        };
        if text.len() > max_bytes {
            return Err(Failure::TooLarge);
        }
        let text =
            self.dialect.without_second_bos(&text, &self.specials, add_special && self.adds_bos());
        self.encode(text, add_special, memo)
    }

    fn adds_bos(&self) -> bool {
        self.around.as_ref().is_some_and(|(before, _)| !before.is_empty())
    }

    /// Returns the ids of `text`, the same as if it was tokenized in one go.
    pub(crate) fn encode(
        &self,
        text: &str,
        add_special: bool,
        memo: &Mutex<Memo>,
    ) -> Result<Arc<[u32]>, Failure> {
        let (before, after): (&[u32], &[u32]) = match (&self.around, add_special) {
            (_, false) => (&[], &[]),
            (Some((before, after)), true) => (before, after),
            (None, true) => return self.encode_whole(text, true).map(Into::into),
        };
        let Some(cuts) = &self.cuts else {
            return Ok([before, &self.encode_whole(text, false)?, after].concat().into());
        };
        let pieces = cuts.pieces(text);
        let keys: Vec<Key> = pieces
            .iter()
            .map(|piece| Key::new(self.number, piece.lead.map(|(_, id)| id), piece.text))
            .collect();
        let mut found: Vec<Option<Arc<[u32]>>> = {
            let mut memo = memo.lock().unwrap_or_else(PoisonError::into_inner);
            keys.iter().map(|key| memo.get(*key)).collect()
        };
        let mut new = Vec::new();
        let mut start = 0;
        for ((piece, key), ids) in pieces.iter().zip(&keys).zip(&mut found) {
            let end = start + piece.text.len();
            if ids.is_none() {
                let Some(made) = self.encode_piece(text, start, end, piece)? else {
                    // The piece did not begin with its token: a rule of this tokenizer that is not known here.
                    return Ok([before, &self.encode_whole(text, false)?, after].concat().into());
                };
                if piece.text.len() >= MIN_PIECE_BYTES {
                    new.push((*key, Arc::clone(&made)));
                }
                *ids = Some(made);
            }
            start = end;
        }
        if !new.is_empty() {
            let mut memo = memo.lock().unwrap_or_else(PoisonError::into_inner);
            for (key, ids) in new {
                memo.put(key, ids);
            }
        }
        let found: Vec<&[u32]> =
            found.iter().map(|ids| ids.as_deref().unwrap_or_default()).collect();
        Ok([before, &found.concat(), after].concat().into())
    }

    /// Tokenizes a piece together with the token before it, so that it begins as it does in the whole text, and takes
    /// that token off again.
    fn encode_piece(
        &self,
        text: &str,
        start: usize,
        end: usize,
        piece: &Piece<'_>,
    ) -> Result<Option<Arc<[u32]>>, Failure> {
        let Some((length, id)) = piece.lead else {
            return Ok(Some(self.encode_whole(&text[..end], false)?.into()));
        };
        let ids = self.encode_whole(&text[start - length..end], false)?;
        Ok(ids.split_first().filter(|(first, _)| **first == id).map(|(_, rest)| rest.into()))
    }

    /// Tokenizes in one go and remembers nothing.
    pub(crate) fn encode_whole(&self, text: &str, add_special: bool) -> Result<Vec<u32>, Failure> {
        let encoding = self.tokenizer.encode_fast(text, add_special);
        let encoding = encoding.map_err(|error| Failure::Encode(error.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }
}

impl fmt::Debug for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Model")
            .field("number", &self.number)
            .field("dialect", &self.dialect)
            .finish_non_exhaustive()
    }
}

impl Cuts {
    fn new(tokenizer: &Tokenizer) -> Result<Option<Self>, aho_corasick::BuildError> {
        let mut tokens: Vec<_> = tokenizer.get_added_tokens_decoder().into_iter().collect();
        tokens.retain(|(_, token)| !token.normalized && !token.content.is_empty());
        tokens.sort_by_key(|(id, _)| *id);
        if tokens.is_empty() {
            return Ok(None);
        }
        // All of them have to be looked for, as the tokenizer does: one may begin within another.
        let finder = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(tokens.iter().map(|(_, token)| token.content.as_str()))?;
        // A token that has to be a word of its own depends on the text on both sides.
        let ids = tokens.iter().map(|(id, token)| (!token.single_word).then_some(*id)).collect();
        Ok(Some(Self { finder, ids }))
    }

    fn pieces<'t>(&self, text: &'t str) -> Vec<Piece<'t>> {
        let mut pieces = Vec::new();
        let (mut start, mut lead) = (0, None);
        for found in self.finder.find_iter(text) {
            let end = found.end();
            let Some(id) = self.ids[found.pattern().as_usize()] else { continue };
            if end - start >= MIN_PIECE_BYTES {
                pieces.push(Piece { text: &text[start..end], lead });
                (start, lead) = (end, Some((found.len(), id)));
            }
        }
        if start < text.len() {
            pieces.push(Piece { text: &text[start..], lead });
        }
        pieces
    }
}

/// Finds the ids that are put before and after a prompt, from what becomes of a word.
fn around(tokenizer: &Tokenizer) -> Option<(Vec<u32>, Vec<u32>)> {
    let ids =
        |add| tokenizer.encode_fast("word", add).ok().map(|encoding| encoding.get_ids().to_vec());
    let (bare, full) = (ids(false)?, ids(true)?);
    if bare.is_empty() {
        return None;
    }
    let at = full.windows(bare.len()).position(|window| window == bare)?;
    Some((full[..at].to_vec(), full[at + bare.len()..].to_vec()))
}

/// The part of `tokenizer_config.json` that prompts are made with.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Config {
    chat_template: Option<Templates>,
    bos_token: Option<Special>,
    eos_token: Option<Special>,
    unk_token: Option<Special>,
    sep_token: Option<Special>,
    pad_token: Option<Special>,
    cls_token: Option<Special>,
    mask_token: Option<Special>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Templates {
    One(String),
    Named(Vec<Named>),
}

#[derive(Debug, Deserialize)]
struct Named {
    name: String,
    template: String,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Special {
    Plain(String),
    Token { content: String },
}

impl Config {
    fn specials(&self) -> Vec<(String, Value)> {
        [
            ("bos_token", &self.bos_token),
            ("eos_token", &self.eos_token),
            ("unk_token", &self.unk_token),
            ("sep_token", &self.sep_token),
            ("pad_token", &self.pad_token),
            ("cls_token", &self.cls_token),
            ("mask_token", &self.mask_token),
        ]
        .into_iter()
        .filter_map(|(name, token)| {
            let (Special::Plain(content) | Special::Token { content }) = token.as_ref()?;
            Some((name.to_owned(), Value::from(content.as_str())))
        })
        .collect()
    }

    /// The template, and the one for requests with tools if it is another.
    fn templates(self) -> (Option<String>, Option<String>) {
        match self.chat_template {
            None => (None, None),
            Some(Templates::One(template)) => (Some(template), None),
            Some(Templates::Named(named)) => {
                let mut both = (None, None);
                for Named { name, template } in named {
                    match name.as_str() {
                        "default" => both.0 = Some(template),
                        "tool_use" => both.1 = Some(template),
                        _ => {}
                    }
                }
                both
            }
        }
    }
}

/// Reads a file that need not be there.
fn read(path: &Path) -> Result<Option<Vec<u8>>, LoadError> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(LoadError::Read { path: path.to_owned(), source }),
    }
}

fn read_text(path: &Path) -> Result<Option<String>, LoadError> {
    let text = read(path)?.map(String::from_utf8).transpose();
    text.map_err(|error| LoadError::Content { path: path.to_owned(), reason: error.to_string() })
}

fn missing(path: &Path) -> LoadError {
    let source = io::Error::new(io::ErrorKind::NotFound, "there is no such file");
    LoadError::Read { path: path.to_owned(), source }
}

#[cfg(test)]
mod tests;
