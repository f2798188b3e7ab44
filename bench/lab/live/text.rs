//! Prompts as text: what a workload knows as blocks and lengths becomes words of which the model's tokenizer makes as
//! many tokens. The same block is the same text, so that engines find in their caches what the simulated ones do.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::engine::Block;
use crate::random::Random;
use crate::workload::Request;

/// The words of all texts: short ones, of which any tokenizer knows some as one token.
pub(crate) const WORDS: [&str; 64] = [
    "a", "about", "after", "all", "and", "as", "at", "be", "before", "but", "by", "can", "copy",
    "do", "each", "field", "first", "for", "found", "from", "given", "has", "have", "if", "in",
    "into", "is", "it", "last", "left", "line", "list", "made", "may", "more", "name", "new",
    "not", "of", "on", "one", "only", "or", "other", "read", "same", "so", "such", "than", "that",
    "the", "their", "then", "this", "time", "to", "two", "used", "was", "when", "which", "with",
    "would", "year",
];

/// What a model makes of texts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tokenizer {
    /// Words with the blank before them, of one token each.
    pub(crate) words: Vec<String>,
    /// Tokens that the template of chats puts around a first message, and around an answer and the next message.
    pub(crate) opening: u32,
    pub(crate) around: u32,
}

/// How a workload is made to fit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Sizes {
    /// Tokens are divided by it.
    pub(crate) shrink: f64,
    /// Tokens of a block, before.
    pub(crate) block: i64,
}

/// The conversations of a run, as their clients have them.
#[derive(Debug)]
pub(crate) struct Texts {
    tokenizer: Tokenizer,
    sizes: Sizes,
    seed: u64,
    transcripts: BTreeMap<u64, Transcript>,
}

#[derive(Debug)]
struct Transcript {
    messages: Vec<Value>,
    /// Tokens of all of it, as far as the engine has counted them.
    tokens: i64,
}

impl Sizes {
    /// Tokens that remain of so many; never none.
    #[expect(clippy::cast_possible_truncation, reason = "a number of tokens")]
    pub(crate) fn tokens(self, tokens: i64) -> i64 {
        ((tokens as f64 / self.shrink).round() as i64).max(1)
    }

    /// Tokens of a block: such that blocks with following numbers have together what they should.
    #[expect(clippy::cast_possible_truncation, reason = "a number of tokens")]
    fn of_block(self, block: Block) -> i64 {
        let until = |count: i64| (count as f64 * self.block as f64 / self.shrink) as i64;
        until(i64::from(block) + 1) - until(i64::from(block))
    }
}

impl Texts {
    pub(crate) fn new(tokenizer: Tokenizer, sizes: Sizes, seed: u64) -> Self {
        Self { tokenizer, sizes, seed, transcripts: BTreeMap::new() }
    }

    /// Makes the messages of a request. A turn that follows another repeats what was really said, as clients do.
    pub(crate) fn ask(&mut self, request: &Request) -> Vec<Value> {
        let tokens = self.sizes.tokens(request.prompt);
        let before = request.conversation.and_then(|id| self.transcripts.remove(&id));
        let (mut messages, text) = match before {
            Some(Transcript { messages, tokens: said }) => {
                let new = (tokens - said - i64::from(self.tokenizer.around)).max(1);
                (messages, self.filler(&format!("turn {}", request.id), new))
            }
            None => (Vec::new(), self.opening(request, tokens)),
        };
        messages.push(json!({ "role": "user", "content": text }));
        if let Some(id) = request.conversation {
            self.transcripts.insert(id, Transcript { messages: messages.clone(), tokens });
        }
        messages
    }

    /// Notes the answer to a conversation's last message, with the tokens that the engine counted of prompt and answer;
    /// `None` if there was no answer: the client goes on as if there had been one.
    pub(crate) fn answered(&mut self, request: &Request, answer: Option<(&str, u32, u32)>) {
        let output = self.sizes.tokens(request.output);
        let filler = self.filler(&format!("answer {}", request.id), output);
        let Some(transcript) = request.conversation.and_then(|id| self.transcripts.get_mut(&id))
        else {
            return;
        };
        let text = match answer {
            Some((text, prompt, completion)) => {
                transcript.tokens = i64::from(prompt) + i64::from(completion);
                text.to_owned()
            }
            None => {
                transcript.tokens += output;
                filler
            }
        };
        transcript.messages.push(json!({ "role": "assistant", "content": text }));
    }

    /// The text of a first message: that of its blocks, and of the last as much as is missing.
    fn opening(&self, request: &Request, tokens: i64) -> String {
        let mut left = (tokens - i64::from(self.tokenizer.opening)).max(1);
        let mut text = String::new();
        for &block in &*request.blocks {
            let size = self.sizes.of_block(block).min(left);
            text += &self.filler(&format!("block {block}"), size);
            left -= size;
        }
        text + &self.filler(&format!("rest {}", request.id), left)
    }

    /// Words of so many tokens; of a name's fewer words are the beginning of its more words.
    fn filler(&self, name: &str, tokens: i64) -> String {
        let mut random = Random::from_text(&format!("{} {name}", self.seed));
        (0..tokens).map(|_| random.choice::<String>(&self.tokenizer.words).as_str()).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn texts(shrink: f64) -> Texts {
        let words = WORDS.iter().map(|word| format!(" {word}")).collect();
        let tokenizer = Tokenizer { words, opening: 12, around: 14 };
        Texts::new(tokenizer, Sizes { shrink, block: 16 }, 1)
    }

    fn request(blocks: &[Block], prompt: i64, conversation: Option<u64>, turn: u32) -> Request {
        Request {
            index: 0,
            id: conversation.unwrap_or(99) << 16 | u64::from(turn),
            sent: 0.0,
            prompt,
            output: 10,
            blocks: blocks.into(),
            answer: None,
            key: Arc::from("k"),
            conversation,
            turn,
            counts: true,
        }
    }

    fn said(message: &Value) -> &str {
        message["content"].as_str().unwrap()
    }

    fn words(text: &str) -> i64 {
        i64::try_from(text.split_whitespace().count()).unwrap()
    }

    fn common(a: &str, b: &str) -> i64 {
        let same = a.split_whitespace().zip(b.split_whitespace()).take_while(|(a, b)| a == b);
        i64::try_from(same.count()).unwrap()
    }

    #[test]
    fn a_prompt_has_its_tokens_and_the_same_blocks_are_the_same_text() {
        for shrink in [1.0, 2.5, 7.0, 40.0] {
            let mut texts = texts(shrink);
            let mut ask = |blocks: &[Block], prompt| {
                let messages = texts.ask(&request(blocks, prompt, None, 1));
                assert_eq!(messages.len(), 1);
                said(&messages[0]).to_owned()
            };
            let shared: Vec<Block> = (0..100).collect();
            let with = |last: &[Block]| [&shared[..], last].concat();
            let one = ask(&with(&[100, 101]), 1625);
            let other = ask(&with(&[102, 103]), 1625);
            let tokens = texts.sizes.tokens(1625);
            assert_eq!(words(&one), tokens - 12, "{shrink}");
            let shared = texts.sizes.tokens(1600);
            let same = common(&one, &other);
            assert!((same - shared.min(tokens - 12)).abs() <= 3, "{same} {shared} {shrink}");
        }
    }

    #[test]
    fn blocks_that_follow_each_other_have_together_what_they_should() {
        let sizes = Sizes { shrink: 7.0, block: 16 };
        let sum: i64 = (0..700).map(|block| sizes.of_block(block)).sum();
        assert_eq!(sum, 1600);
        assert_eq!(sizes.tokens(3), 1, "never none");
    }

    #[test]
    fn a_turn_repeats_what_was_said_and_adds_what_is_missing() {
        let mut texts = texts(1.0);
        let first = request(&[0, 1, 2], 48, Some(5), 1);
        let opening = texts.ask(&first);
        texts.answered(&first, Some(("Yes.", 49, 10)));
        let second = texts.ask(&request(&[0, 1, 2, 3, 4, 5, 6], 110, Some(5), 2));
        assert_eq!(second[0], opening[0]);
        assert_eq!(second[1], json!({ "role": "assistant", "content": "Yes." }));
        assert_eq!(words(said(&second[2])), 110 - 49 - 10 - 14);
    }

    #[test]
    fn after_a_failure_a_turn_has_its_length_too() {
        let mut texts = texts(1.0);
        let first = request(&[0, 1, 2], 48, Some(5), 1);
        texts.ask(&first);
        texts.answered(&first, None);
        let second = texts.ask(&request(&[0, 1, 2, 3, 4, 5, 6], 110, Some(5), 2));
        assert_eq!(words(said(&second[1])), 10);
        assert_eq!(words(said(&second[2])), 110 - 48 - 10 - 14);
    }

    #[test]
    fn who_is_met_in_the_middle_has_a_history() {
        let messages = texts(1.0).ask(&request(&[0, 1, 2, 3], 64, Some(1), 7));
        assert_eq!((messages.len(), words(said(&messages[0]))), (1, 52));
    }

    #[test]
    fn another_seed_is_another_text() {
        let filler = |seed| {
            let Texts { tokenizer, sizes, .. } = texts(1.0);
            Texts::new(tokenizer, sizes, seed).filler("block 1", 50)
        };
        assert_eq!(filler(1), filler(1));
        assert_ne!(filler(1), filler(2));
    }
}
