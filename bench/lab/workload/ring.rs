//! The profile of the first llm-ring: chats of which some begin with a document, each drawn from a seed of its own.

use std::sync::Arc;

use serde::Deserialize;

use super::chat::{Context, number, turn_id};
use super::{Clients, Ids, Request};
use crate::engine::{Block, Params};
use crate::random::Random;

/// The profile's numbers, by its names, and how its texts become tokens.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LlmRing {
    conversations: usize,
    heavy_fraction: f64,
    turns_min: u32,
    turns_max: u32,
    arrival_window_s: f64,
    think_time_mean_s: f64,
    think_time_max_s: f64,
    heavy_document_words: usize,
    system_prompt_words: usize,
    max_tokens: i64,
    max_context_tokens: i64,
    /// With the texts that it draws from, the profile is drawn as its generator does; without, only lengths are.
    texts: Option<Texts>,
}

/// What prompts are made of.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Texts {
    openings: Vec<String>,
    questions: Vec<String>,
    words: Vec<String>,
    /// What stands before the words of the system prompt, and around a document.
    system: String,
    before_document: String,
    after_document: String,
    /// Characters of an answer.
    answer: i64,
}

/// A conversation that is drawn, before anything is sent.
#[derive(Debug)]
struct Plan {
    start: f64,
    thinks: Vec<f64>,
    /// Tokens of each turn's prompt; it ends where the next would not fit the context.
    prompts: Vec<i64>,
}

/// Tokens of a word of filler, as the lengths are drawn.
const TOKENS_A_WORD: f64 = 1.35;

impl LlmRing {
    pub(super) fn clients(&self, p: &Params, seed: u64) -> RingClients {
        let mut ids = Ids::default();
        let system = match &self.texts {
            None => self.system_tokens(),
            Some(texts) => tokens(texts.system_characters(self, seed), 1),
        };
        let shared: Vec<Block> = ids.take(p.whole_blocks(system)).collect();
        let conversations = (0..self.conversations)
            .map(|i| {
                let mut random = Random::from_text(&format!("{seed}-{i}"));
                let heavy = i < self.heavy();
                Conversation {
                    plan: match &self.texts {
                        None => self.lengths(&mut random, heavy, system),
                        Some(texts) => self.chat(&mut random, heavy, seed, texts),
                    },
                    key: format!("s{seed}-c{i:03}").into(),
                    turn: 0,
                    context: Context { blocks: shared.clone(), tokens: system },
                }
            })
            .collect();
        RingClients { p: *p, ids, output: self.max_tokens, conversations }
    }

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a share of a count"
    )]
    fn heavy(&self) -> usize {
        (self.conversations as f64 * self.heavy_fraction).round_ties_even() as usize
    }

    #[expect(clippy::cast_possible_truncation, reason = "a number of tokens")]
    fn system_tokens(&self) -> i64 {
        (25.0 + self.system_prompt_words as f64 * TOKENS_A_WORD) as i64
    }

    /// Draws turns, pauses and the arrival, and takes lengths for the texts.
    #[expect(clippy::cast_possible_truncation, reason = "a number of tokens")]
    fn lengths(&self, random: &mut Random, heavy: bool, system: i64) -> Plan {
        let turns = random.randint(self.turns_min, self.turns_max);
        random.random();
        let document = (self.heavy_document_words as f64 * TOKENS_A_WORD) as i64 + 16;
        let first = 14 + if heavy { document } else { 0 };
        let (thinks, start) = self.times(random, turns);
        let mut prompts = Vec::new();
        let mut length = system + first;
        while prompts.len() < turns as usize
            && length as f64 * 1.05 + self.max_tokens as f64 <= self.max_context_tokens as f64
        {
            prompts.push(length);
            length += self.max_tokens + 16;
        }
        Plan { start, thinks, prompts }
    }

    /// Draws a conversation with its texts, in the order of the first llm-ring's generator.
    fn chat(&self, random: &mut Random, heavy: bool, seed: u64, texts: &Texts) -> Plan {
        let turns = random.randint(self.turns_min, self.turns_max);
        let mut opening = characters(random.choice::<String>(&texts.openings));
        if heavy {
            opening += texts.filler(random, self.heavy_document_words)
                + characters(&texts.before_document)
                + characters(&texts.after_document);
        }
        let mut messages = vec![opening];
        messages.extend((1..turns).map(|_| characters(random.choice::<String>(&texts.questions))));
        let (thinks, start) = self.times(random, turns);
        let mut prompts = Vec::new();
        let (mut sum, mut count) = (texts.system_characters(self, seed), 1);
        for message in messages {
            (sum, count) = (sum + message, count + 1);
            let prompt = tokens(sum, count);
            if prompt + self.max_tokens > self.max_context_tokens {
                break;
            }
            prompts.push(prompt);
            (sum, count) = (sum + texts.answer, count + 1);
        }
        Plan { start, thinks, prompts }
    }

    fn times(&self, random: &mut Random, turns: u32) -> (Vec<f64>, f64) {
        let rate = 1.0 / self.think_time_mean_s;
        let thinks =
            (1..turns).map(|_| random.expovariate(rate).min(self.think_time_max_s)).collect();
        (thinks, random.uniform(0.0, self.arrival_window_s))
    }
}

impl Texts {
    fn system_characters(&self, profile: &LlmRing, seed: u64) -> i64 {
        // Every run has notes of its own, so that none finds another's in a cache.
        let mut random = Random::from_text(&format!("system-{seed}"));
        characters(&self.system) + self.filler(&mut random, profile.system_prompt_words)
    }

    /// Returns the characters of filler: sentences of 8 to 14 words, the length drawn anew with each word.
    fn filler(&self, random: &mut Random, words: usize) -> i64 {
        let (mut sum, mut sentence) = (0, 0);
        for _ in 0..words {
            // A word and the blank, or the full stop and the blank, after it.
            sum += characters(random.choice::<String>(&self.words)) + 1;
            sentence += 1;
            if sentence >= random.randint(8, 14) {
                (sum, sentence) = (sum + 1, 0);
            }
        }
        if sentence > 0 { sum } else { sum - 1 }
    }
}

fn characters(text: &str) -> i64 {
    i64::try_from(text.chars().count()).expect("a text")
}

/// Estimates tokens as the first llm-ring does.
fn tokens(characters: i64, messages: i64) -> i64 {
    (characters / 4 + 4 * messages).max(1)
}

pub(super) struct RingClients {
    p: Params,
    ids: Ids,
    output: i64,
    conversations: Vec<Conversation>,
}

struct Conversation {
    plan: Plan,
    key: Arc<str>,
    turn: u32,
    context: Context,
}

impl RingClients {
    fn turn(&mut self, number: usize, at: f64) -> Option<Request> {
        let conversation = &mut self.conversations[number];
        let prompt = *conversation.plan.prompts.get(conversation.turn as usize)?;
        conversation.turn += 1;
        let added = (prompt - conversation.context.tokens, self.output);
        let (prompt, blocks, answer) = conversation.context.turn(&self.p, &mut self.ids, added);
        Some(Request {
            index: 0,
            id: turn_id(number as u64, conversation.turn),
            sent: at,
            prompt,
            output: self.output,
            blocks,
            answer: Some(answer),
            key: Arc::clone(&conversation.key),
            conversation: Some(number as u64),
            turn: conversation.turn,
            counts: true,
        })
    }
}

impl Clients for RingClients {
    fn start(&mut self) -> Vec<Request> {
        (0..self.conversations.len())
            .filter_map(|number| self.turn(number, self.conversations[number].plan.start))
            .collect()
    }

    fn next(&mut self, ended: &Request, now: f64) -> Vec<Request> {
        let number = number(ended);
        let think = self.conversations[number].plan.thinks.get(ended.turn as usize - 1).copied();
        think.and_then(|think| self.turn(number, now + think)).into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use crate::random::Random;
    use crate::workload::Kind;
    use crate::workload::tests::library;

    #[test]
    fn the_profile_is_drawn_as_its_generator_draws_it() {
        let point = library().point("llm-ring").unwrap();
        let Kind::LlmRing(profile) = &point.kind else { panic!("{point:?}") };
        let texts = profile.texts.as_ref().unwrap();
        let plan = |i: usize| {
            let mut random = Random::from_text(&format!("1-{i}"));
            profile.chat(&mut random, i < profile.heavy(), 1, texts)
        };
        // What the generator draws for the first conversation, which begins with a document, and for one that does not.
        let (document, question) = (plan(0), plan(20));
        assert_eq!(document.start, 6.831_969_523_886_385);
        assert_eq!(document.thinks[..2], [1.136_494_780_427_449_7, 2.521_771_218_015_820_7]);
        assert_eq!(question.start, 3.534_774_235_044_958_2);
        assert_eq!(question.thinks[..2], [7.510_760_317_711_93, 4.830_918_649_760_345]);
        // 1039 characters of system prompt and 7787 of the document, and two messages.
        assert_eq!(document.prompts[0], (1039 + 7787) / 4 + 8);
        let requests: usize = (0..50).map(|i| plan(i).prompts.len()).sum();
        assert_eq!(requests, 728, "the published run with this seed had 732");
    }
}
