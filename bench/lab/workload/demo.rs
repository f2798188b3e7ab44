//! The chats of `make demo`: conversations, turns, lengths and pauses as `bench/demo/chats.py` draws them.

use std::sync::Arc;

use serde::Deserialize;

use super::chat::{Context, Think, number, turn_id};
use super::{Clients, Ids, Request};
use crate::engine::{Block, Params};
use crate::random::Random;

/// The numbers of `chats.py`, and how its texts become tokens.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Demo {
    chats: u32,
    turns: Range,
    /// Every so manieth chat opens with a document.
    document_every: u32,
    document_words: Range,
    question_words: Range,
    /// Seconds in which chats begin.
    arrivals: f64,
    think: Think,
    /// Tokens of an answer.
    answer: i64,
    /// Tokens before the first question: the system message, and what the model's template puts around both.
    opening: i64,
    /// Tokens that the template puts around an answer and the next question.
    around: i64,
    tokens_a_character: f64,
    /// Characters that stand around a document.
    around_document: usize,
    words: Vec<String>,
}

/// Both ends belong to it.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
struct Range {
    least: u32,
    most: u32,
}

impl Range {
    fn draw(self, random: &mut Random) -> u32 {
        random.randint(self.least, self.most)
    }
}

/// A chat that is drawn, before anything is sent.
#[derive(Debug)]
struct Plan {
    begins: f64,
    /// Characters of each question, the first with its document.
    questions: Vec<usize>,
    thinks: Vec<f64>,
}

impl Demo {
    pub(super) fn clients(&self, p: &Params, seed: u64) -> DemoClients {
        let mut ids = Ids::default();
        let shared: Vec<Block> = ids.take(p.whole_blocks(self.opening)).collect();
        let chats = (0..self.chats)
            .map(|number| Chat {
                plan: self.chat(seed, number),
                key: format!("chat-{seed}.0-{number:02}").into(),
                turn: 0,
                context: Context { blocks: shared.clone(), tokens: self.opening },
            })
            .collect();
        DemoClients { demo: self.clone(), p: *p, ids, chats }
    }

    /// Draws a chat of the demo's first round with a seed.
    fn chat(&self, seed: u64, number: u32) -> Plan {
        let mut random = Random::from_text(&format!("{seed}.0/{number}"));
        let begins = random.uniform(0.0, self.arrivals);
        let (mut questions, mut thinks) = (Vec::new(), Vec::new());
        for _ in 0..self.turns.draw(&mut random) {
            let words = self.question_words.draw(&mut random);
            questions.push(self.prose(&mut random, words));
            thinks.push(random.expovariate(1.0 / self.think.mean).min(self.think.most));
        }
        if number.is_multiple_of(self.document_every) {
            let words = self.document_words.draw(&mut random);
            questions[0] += self.around_document + self.prose(&mut random, words);
        }
        Plan { begins, questions, thinks }
    }

    /// Returns the characters of sentences of so many words in all.
    fn prose(&self, random: &mut Random, mut words: u32) -> usize {
        let mut characters = 0;
        while words > 0 {
            let length = words.min(random.randint(7, 14));
            // With the blank or the full stop after each word, and a blank between sentences.
            characters += usize::from(characters > 0);
            for _ in 0..length {
                characters += random.choice::<String>(&self.words).chars().count() + 1;
            }
            words -= length;
        }
        characters
    }
}

pub(super) struct DemoClients {
    demo: Demo,
    p: Params,
    ids: Ids,
    chats: Vec<Chat>,
}

struct Chat {
    plan: Plan,
    key: Arc<str>,
    turn: u32,
    context: Context,
}

impl DemoClients {
    fn turn(&mut self, number: usize, at: f64) -> Option<Request> {
        let chat = &mut self.chats[number];
        let characters = *chat.plan.questions.get(chat.turn as usize)?;
        #[expect(clippy::cast_possible_truncation, reason = "a number of tokens")]
        let question = (characters as f64 * self.demo.tokens_a_character).round() as i64;
        let around = if chat.turn == 0 { 0 } else { self.demo.around };
        chat.turn += 1;
        let added = (question + around, self.demo.answer);
        let (prompt, blocks, answer) = chat.context.turn(&self.p, &mut self.ids, added);
        Some(Request {
            index: 0,
            id: turn_id(number as u64, chat.turn),
            sent: at,
            prompt,
            output: self.demo.answer,
            blocks,
            answer: Some(answer),
            key: Arc::clone(&chat.key),
            conversation: Some(number as u64),
            turn: chat.turn,
            counts: true,
        })
    }
}

impl Clients for DemoClients {
    fn start(&mut self) -> Vec<Request> {
        (0..self.chats.len())
            .filter_map(|number| self.turn(number, self.chats[number].plan.begins))
            .collect()
    }

    fn next(&mut self, ended: &Request, now: f64) -> Vec<Request> {
        let number = number(ended);
        let think = self.chats[number].plan.thinks[ended.turn as usize - 1];
        self.turn(number, now + think).into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use crate::workload::Kind;
    use crate::workload::tests::library;

    #[test]
    fn chats_are_drawn_as_the_demo_draws_them() {
        let point = library().point("demo").unwrap();
        let Kind::Demo(demo) = &point.kind else { panic!("{point:?}") };
        // What chats.py makes of the seed "1.0": a chat with a document, and one without.
        let (document, chat) = (demo.chat(1, 0), demo.chat(1, 4));
        assert_eq!(document.begins, 1.785_268_056_182_858_2);
        assert_eq!(document.questions, [4415, 164, 271, 152, 192, 214]);
        assert_eq!(document.thinks[..2], [1.226_038_462_249_908_5, 0.129_354_401_628_054_12]);
        assert_eq!(chat.begins, 2.724_989_865_895_897_5);
        assert_eq!(chat.questions, [191, 223, 138, 314, 251, 146, 203]);
        let turns: usize = (0..demo.chats).map(|chat| demo.chat(1, chat).questions.len()).sum();
        assert_eq!(turns, 85);
    }
}
