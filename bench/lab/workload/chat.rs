//! Closed loops of users that talk in turns: chats and agents, and rounds at a fixed pace.

use std::sync::Arc;

use serde::Deserialize;

use super::{Clients, Ids, Length, Request, prompt};
use crate::engine::{Block, Params};
use crate::random::Random;

/// Users that each hold one conversation after another.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Chat {
    users: usize,
    /// Conversations in all, for each user.
    conversations_per_user: f64,
    /// Seconds in which users arrive.
    ramp: f64,
    /// Tokens that all conversations begin with.
    #[serde(default)]
    shared: i64,
    /// Tokens that a conversation begins with after them.
    opening: Length,
    turns: Length,
    /// Tokens that each turn adds, and that it is answered with.
    input: Length,
    output: Length,
    #[serde(default)]
    think: Think,
}

/// The pause between an answer and the next turn.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Think {
    pub(super) mean: f64,
    pub(super) most: f64,
}

/// Users that send one turn every so often, as long as the test lasts.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Rounds {
    users: usize,
    rounds: u32,
    /// Requests a second of all users together.
    rate: f64,
    /// Tokens that all prompts begin with, those of a user's history, and those of a turn and of its answer.
    shared: i64,
    history: i64,
    input: i64,
    output: i64,
    /// When users stop sending, in seconds.
    until: f64,
}

/// A conversation's prompt as it grows.
#[derive(Debug, Clone)]
pub(super) struct Context {
    pub(super) blocks: Vec<Block>,
    pub(super) tokens: i64,
}

impl Context {
    /// Adds a turn: its prompt, its answer, and all of it to the context.
    pub(super) fn turn(
        &mut self,
        p: &Params,
        ids: &mut Ids,
        (input, output): (i64, i64),
    ) -> (i64, Arc<[Block]>, Arc<[Block]>) {
        let tokens = self.tokens + input;
        let new = p.blocks(tokens).saturating_sub(self.blocks.len());
        let blocks = prompt(&self.blocks, ids.take(new));
        let whole = p.whole_blocks(tokens);
        let answer: Arc<[Block]> =
            ids.take(p.whole_blocks(tokens + output).saturating_sub(whole)).collect();
        // Only whole blocks are ever found again.
        self.blocks = blocks[..whole].to_vec();
        self.blocks.extend(answer.iter());
        self.tokens = tokens + output;
        (tokens, blocks, answer)
    }
}

/// Names the turn of a conversation by one number.
pub(super) fn turn_id(conversation: u64, turn: u32) -> u64 {
    conversation << 16 | u64::from(turn)
}

pub(super) struct ChatClients {
    chat: Chat,
    p: Params,
    random: Random,
    ids: Ids,
    shared: Vec<Block>,
    total: usize,
    conversations: Vec<Conversation>,
}

struct Conversation {
    key: Arc<str>,
    turn: u32,
    turns: i64,
    opening: i64,
    context: Context,
}

impl Chat {
    pub(super) fn clients(&self, p: &Params, seed: u64) -> ChatClients {
        let mut ids = Ids::default();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a number of conversations"
        )]
        let total = (self.users as f64 * self.conversations_per_user) as usize;
        ChatClients {
            p: *p,
            random: Random::new(seed),
            shared: ids.take(p.whole_blocks(self.shared)).collect(),
            ids,
            total,
            conversations: Vec::new(),
            chat: self.clone(),
        }
    }
}

impl ChatClients {
    /// Opens conversations until one fits the engine.
    fn open(&mut self, at: f64) -> Option<Request> {
        while self.conversations.len() < self.total {
            let opening = self.chat.opening.draw(&mut self.random);
            let turns = self.chat.turns.draw(&mut self.random);
            let number = self.conversations.len() + 1;
            self.conversations.push(Conversation {
                key: format!("c{number}").into(),
                turn: 0,
                turns,
                opening,
                context: Context { blocks: self.shared.clone(), tokens: self.chat.shared },
            });
            if let Some(request) = self.turn(number - 1, at) {
                return Some(request);
            }
        }
        None
    }

    /// Makes the next turn of a conversation; `None` if it is too long for the engine by now.
    fn turn(&mut self, number: usize, at: f64) -> Option<Request> {
        let conversation = &mut self.conversations[number];
        conversation.turn += 1;
        let mut input = self.chat.input.draw(&mut self.random);
        let output = self.chat.output.draw(&mut self.random);
        if conversation.turn == 1 {
            input += conversation.opening;
        }
        if (conversation.context.tokens + input + output) as f64 > self.p.tokens as f64 * 0.9 {
            return None;
        }
        let (prompt, blocks, answer) =
            conversation.context.turn(&self.p, &mut self.ids, (input, output));
        Some(Request {
            index: 0,
            id: turn_id(number as u64, conversation.turn),
            sent: at,
            prompt,
            output,
            blocks,
            answer: Some(answer),
            key: Arc::clone(&conversation.key),
            conversation: Some(number as u64),
            turn: conversation.turn,
            counts: true,
        })
    }
}

impl Clients for ChatClients {
    fn start(&mut self) -> Vec<Request> {
        let ramp = self.chat.ramp;
        (0..self.chat.users)
            .filter_map(|_| {
                let at = self.random.uniform(0.0, ramp);
                self.open(at)
            })
            .collect()
    }

    fn next(&mut self, ended: &Request, now: f64) -> Vec<Request> {
        let Think { mean, most } = self.chat.think;
        let mut think = if mean > 0.0 { self.random.expovariate(1.0 / mean) } else { 0.0 };
        if most > 0.0 {
            think = think.min(most);
        }
        let number = number(ended);
        let conversation = &self.conversations[number];
        let goes_on = i64::from(conversation.turn) < conversation.turns;
        let turn = if goes_on { self.turn(number, now + think) } else { None };
        turn.or_else(|| self.open(now + think)).into_iter().collect()
    }
}

pub(super) struct RoundsClients {
    rounds: Rounds,
    p: Params,
    random: Random,
    ids: Ids,
    shared: Vec<Block>,
    /// Each user's conversations follow one another.
    users: Vec<User>,
}

struct User {
    key: Arc<str>,
    round: u32,
    context: Context,
    sent: f64,
}

impl Rounds {
    pub(super) fn clients(&self, p: &Params, seed: u64) -> RoundsClients {
        let mut ids = Ids::default();
        RoundsClients {
            p: *p,
            random: Random::new(seed),
            shared: ids.take(p.whole_blocks(self.shared)).collect(),
            ids,
            users: Vec::new(),
            rounds: self.clone(),
        }
    }

    /// Seconds between two turns of a user.
    fn pause(&self) -> f64 {
        self.users as f64 / self.rate
    }
}

impl RoundsClients {
    fn open(&mut self, at: f64, first: u32) -> Request {
        let number = self.users.len();
        let tokens = self.rounds.shared + self.rounds.history;
        self.users.push(User {
            key: format!("u{}", number + 1).into(),
            round: first - 1,
            context: Context { blocks: self.shared.clone(), tokens },
            sent: at,
        });
        self.turn(number, at)
    }

    fn turn(&mut self, number: usize, at: f64) -> Request {
        let user = &mut self.users[number];
        user.round += 1;
        user.sent = at;
        let (input, output) = (self.rounds.input, self.rounds.output);
        let (prompt, blocks, answer) = user.context.turn(&self.p, &mut self.ids, (input, output));
        Request {
            index: 0,
            id: turn_id(number as u64, user.round),
            sent: at,
            prompt,
            output,
            blocks,
            answer: Some(answer),
            key: Arc::clone(&user.key),
            conversation: Some(number as u64),
            turn: user.round,
            counts: true,
        }
    }
}

impl Clients for RoundsClients {
    fn start(&mut self) -> Vec<Request> {
        let pause = self.rounds.pause();
        (0..self.rounds.users)
            .map(|_| {
                // Users are met in the middle of their conversations.
                let at = self.random.uniform(0.0, pause);
                let first = self.random.randint(1, self.rounds.rounds);
                self.open(at, first)
            })
            .collect()
    }

    fn next(&mut self, ended: &Request, now: f64) -> Vec<Request> {
        let number = number(ended);
        let at = now.max(self.users[number].sent + self.rounds.pause());
        if at > self.rounds.until {
            return Vec::new();
        }
        if self.users[number].round < self.rounds.rounds {
            return vec![self.turn(number, at)];
        }
        vec![self.open(at, 1)]
    }
}

/// Returns the place of a request's conversation in its client's list.
pub(super) fn number(request: &Request) -> usize {
    let conversation = request.conversation.expect("these clients send nothing but conversations");
    usize::try_from(conversation).expect("a place in a list")
}
