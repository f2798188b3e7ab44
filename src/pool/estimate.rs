//! How many tokens a prompt has where no tokenizer tells: bytes times a ratio that each model's own answers correct.

use std::num::NonZeroUsize;

use lru::LruCache;

use super::{MOST_TOKENS, PromptSize};
use crate::index::hash;

/// Tokens a byte of text before anything is known: about four bytes a token in English.
const FIRST_RATIO: f64 = 0.25;
/// Tokens that a chat template adds to each message.
const MESSAGE_TOKENS: u64 = 4;
/// Tokens of an image of unknown size: 640 × 360 pixels at 1,024 a token.
const MEDIA_TOKENS: u64 = 225;
/// Beyond these a ratio is a misreading: a token is rarely longer than 16 bytes and never shorter than half a byte.
const RATIO_BOUNDS: (f64, f64) = (1.0 / 16.0, 2.0);
/// The first answers are averaged; from the tenth on, new ones count a tenth.
const LEARNING_WINDOW: u32 = 10;
/// Models with a ratio of their own; names come from clients, so their number is bounded.
const MODELS: NonZeroUsize = NonZeroUsize::new(1000).expect("1000 is not 0");

/// Estimates prompt tokens, one ratio a model.
#[derive(Debug)]
pub struct TokenEstimator {
    models: LruCache<u64, Ratio>,
}

#[derive(Debug, Clone, Copy)]
struct Ratio {
    tokens_per_byte: f64,
    answers: u32,
}

/// An estimate, with what it rests on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    /// Tokens of the prompt, at least 1.
    pub tokens: u64,
    /// The ratio that was used, tokens a byte, and how many answers of this model have corrected it, at most 10;
    /// `None` of a number that is exact.
    pub ratio: Option<(f64, u32)>,
}

impl Default for TokenEstimator {
    fn default() -> Self {
        Self { models: LruCache::new(MODELS) }
    }
}

impl TokenEstimator {
    /// Estimates the tokens of a prompt for `model`; what a tokenizer counted is taken as it is.
    ///
    /// A conversation's last prompt, which the engine has counted, is the better part of its next one: then only
    /// what was added is estimated.
    pub fn estimate(
        &mut self,
        model: Option<&str>,
        prompt: &PromptSize,
        counted: Option<(PromptSize, u64)>,
    ) -> Estimate {
        if let Some(exact) = prompt.exact {
            return Estimate { tokens: exact.clamp(1, MOST_TOKENS), ratio: None };
        }
        let ratio = self
            .models
            .get(&key(model))
            .copied()
            .unwrap_or(Ratio { tokens_per_byte: FIRST_RATIO, answers: 0 });
        let (added, before) = counted
            .and_then(|(last, tokens)| Some((grown(prompt, &last)?, tokens)))
            .unwrap_or((*prompt, 0));
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "bodies are limited to far less than 2^52 bytes"
        )]
        let text = (added.text_bytes as f64 * ratio.tokens_per_byte).round() as u64;
        let tokens =
            before.saturating_add(text).saturating_add(beside_text(&added)).clamp(1, MOST_TOKENS);
        Estimate { tokens, ratio: Some((ratio.tokens_per_byte, ratio.answers)) }
    }

    /// Learns from the number of tokens that the engine counted in the same prompt, exact or not: the next one may be
    /// of a kind that no tokenizer here can tell.
    pub fn learn(&mut self, model: Option<&str>, prompt: &PromptSize, counted: u64) {
        // Media differ too much in size to learn from, and short texts are mostly template.
        if prompt.unread || prompt.media > 0 || prompt.text_bytes < 64 {
            return;
        }
        #[expect(clippy::cast_precision_loss, reason = "a ratio of counts far below 2^52")]
        let seen = (counted.saturating_sub(beside_text(prompt)) as f64 / prompt.text_bytes as f64)
            .clamp(RATIO_BOUNDS.0, RATIO_BOUNDS.1);
        let ratio = self
            .models
            .get_or_insert_mut(key(model), || Ratio { tokens_per_byte: seen, answers: 0 });
        ratio.answers = (ratio.answers + 1).min(LEARNING_WINDOW);
        ratio.tokens_per_byte += (seen - ratio.tokens_per_byte) / f64::from(ratio.answers);
    }
}

/// Returns what `prompt` has more than `last`; `None` where it has less of something: the history was edited.
fn grown(prompt: &PromptSize, last: &PromptSize) -> Option<PromptSize> {
    Some(PromptSize {
        text_bytes: prompt.text_bytes.checked_sub(last.text_bytes)?,
        messages: prompt.messages.checked_sub(last.messages)?,
        token_ids: prompt.token_ids.checked_sub(last.token_ids)?,
        media: prompt.media.checked_sub(last.media)?,
        unread: prompt.unread,
        exact: None,
    })
}

fn beside_text(prompt: &PromptSize) -> u64 {
    prompt
        .token_ids
        .saturating_add(prompt.messages.saturating_mul(MESSAGE_TOKENS))
        .saturating_add(prompt.media.saturating_mul(MEDIA_TOKENS))
}

fn key(model: Option<&str>) -> u64 {
    hash::hash(model.unwrap_or_default().as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROMPT: PromptSize = PromptSize {
        text_bytes: 4000,
        messages: 5,
        token_ids: 0,
        exact: None,
        media: 0,
        unread: false,
    };

    #[test]
    fn starts_at_four_bytes_a_token_and_follows_the_engine() {
        let mut estimator = TokenEstimator::default();
        assert_eq!(estimator.estimate(Some("m"), &PROMPT, None).tokens, 1020);
        for _ in 0..20 {
            estimator.learn(Some("m"), &PROMPT, 2020);
        }
        assert_eq!(estimator.estimate(Some("m"), &PROMPT, None).tokens, 2020);
        assert_eq!(
            estimator.estimate(Some("other"), &PROMPT, None).tokens,
            1020,
            "a model learns for itself"
        );
    }

    #[test]
    fn absurd_counts_are_clamped() {
        let mut estimator = TokenEstimator::default();
        estimator.learn(None, &PROMPT, u64::MAX);
        assert_eq!(estimator.estimate(None, &PROMPT, None).tokens, 8020);
        estimator.learn(Some("zero"), &PROMPT, 0);
        assert_eq!(estimator.estimate(Some("zero"), &PROMPT, None).tokens, 270);
    }

    #[test]
    fn a_next_turn_is_the_counted_last_one_and_what_was_added() {
        let mut estimator = TokenEstimator::default();
        let next = PromptSize { text_bytes: 4400, messages: 7, ..PROMPT };
        assert_eq!(estimator.estimate(None, &next, Some((PROMPT, 1500))).tokens, 1500 + 100 + 8);
        let edited = PromptSize { text_bytes: 3000, ..PROMPT };
        assert_eq!(estimator.estimate(None, &edited, Some((PROMPT, 1500))).tokens, 770);
    }

    #[test]
    fn an_exact_count_is_taken_as_it_is_and_its_answer_teaches_the_text_beside_it() {
        let mut estimator = TokenEstimator::default();
        let exact = PromptSize { exact: Some(1234), ..PROMPT };
        let estimate = estimator.estimate(Some("m"), &exact, Some((PROMPT, 1100)));
        assert_eq!(estimate, Estimate { tokens: 1234, ratio: None });
        estimator.learn(Some("m"), &exact, 2020);
        let next = estimator.estimate(Some("m"), &PROMPT, None);
        assert_eq!((next.tokens, next.ratio), (2020, Some((0.5, 1))));
        // A turn that no tokenizer tells grows from one that it did.
        let grown = PromptSize { text_bytes: 4400, ..PROMPT };
        assert_eq!(estimator.estimate(Some("m"), &grown, Some((exact, 1234))).tokens, 1234 + 200);
        let most = PromptSize { exact: Some(u64::MAX), ..PROMPT };
        assert_eq!(estimator.estimate(None, &most, None).tokens, MOST_TOKENS);
    }

    #[test]
    fn token_ids_are_counted_as_they_are() {
        let prompt = PromptSize { token_ids: 77, messages: 1, ..PromptSize::default() };
        assert_eq!(TokenEstimator::default().estimate(None, &prompt, None).tokens, 81);
        assert_eq!(
            TokenEstimator::default().estimate(None, &PromptSize::default(), None).tokens,
            1
        );
    }
}
