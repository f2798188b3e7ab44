//! Placement memory: where each conversation was last served, and how much of it is cached there.

use std::num::NonZeroUsize;

use lru::LruCache;

use super::{EndpointId, MOST_TOKENS, Outcome, PromptSize};
use crate::index::hash;

/// Where a conversation was served.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Placed {
    /// The endpoint that served it.
    pub endpoint: EndpointId,
    /// Tokens that were in its cache when the last answer ended.
    pub held: u64,
    /// Share of them that is believed to be there still, in [0, 1].
    pub kept: f64,
    /// The last prompt and its tokens, where the engine counted them.
    pub counted: Option<(PromptSize, u64)>,
}

/// The bounded memory: conversations by key, least recently served forgotten first.
#[derive(Debug)]
pub struct Placement {
    /// The endpoints that served each conversation, the latest first.
    served: LruCache<u64, Vec<Placed>>,
    /// Responses API: the conversation that an answer's id belongs to, so that `previous_response_id`, which
    /// changes with every turn, leads back to it.
    answers: LruCache<u64, u64>,
}

impl Placed {
    /// Returns the prompt tokens that the endpoint is believed to have cached.
    #[must_use]
    pub fn cached(&self) -> u64 {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "a share of a token count"
        )]
        let cached = (self.held as f64 * self.kept).round() as u64;
        cached
    }
}

impl Placement {
    /// Remembers at most `entries` conversations.
    #[must_use]
    pub fn new(entries: NonZeroUsize) -> Self {
        Self { served: LruCache::new(entries), answers: LruCache::new(entries) }
    }

    /// Returns where `conversation` was last served.
    pub fn find(&mut self, conversation: u64) -> Option<Placed> {
        self.served.get(&conversation)?.first().copied()
    }

    /// Returns all places where it was served, as far as they are remembered, the latest first.
    #[must_use]
    pub fn places(&self, conversation: u64) -> &[Placed] {
        self.served.peek(&conversation).map_or(&[], Vec::as_slice)
    }

    /// Returns the conversation whose answer had this id.
    pub fn conversation_of(&mut self, response_id: &str) -> Option<u64> {
        self.answers.get(&hash::hash(response_id.as_bytes())).copied()
    }

    /// Takes over what another memory knew of a conversation, unless it is remembered here.
    pub fn remember(&mut self, conversation: u64, placed: Placed) {
        self.served.get_or_insert(conversation, || vec![placed]);
    }

    /// Returns the keys of the remembered conversations, the latest first, at most so many.
    #[must_use]
    pub fn conversations(&self, most: usize) -> Vec<u64> {
        self.served.iter().take(most).map(|(&conversation, _)| conversation).collect()
    }

    /// Counts the remembered conversations.
    #[must_use]
    pub fn len(&self) -> usize {
        self.served.len()
    }

    /// Tells whether nothing is remembered.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.served.is_empty()
    }

    /// Learns from a request that `endpoint` served; anything but a success teaches nothing.
    ///
    /// The engine's own numbers go before ours: what it holds is its prompt and its answer, and where it found less
    /// in its cache than it held after the last turn, the same share is believed of what it holds now.
    pub fn learn(
        &mut self,
        conversation: u64,
        endpoint: EndpointId,
        (size, estimated): (PromptSize, u64),
        outcome: &Outcome,
    ) {
        if !outcome.succeeded() {
            return;
        }
        let usage = &outcome.usage;
        let prompt = usage.prompt_tokens.unwrap_or(estimated).min(MOST_TOKENS);
        let places = self.served.get_or_insert_mut(conversation, Vec::new);
        let before = places.iter().find(|placed| placed.endpoint == endpoint);
        let kept = match (before, usage.cached_tokens) {
            (Some(before), Some(cached)) => {
                let expected = before.held.min(prompt);
                #[expect(clippy::cast_precision_loss, reason = "a ratio of token counts")]
                let share =
                    if expected == 0 { 1.0 } else { (cached as f64 / expected as f64).min(1.0) };
                // An engine recomputes at least the last block of a prompt: nearly all is all.
                if share >= NEARLY_ALL { 1.0 } else { share }
            }
            (Some(before), None) => before.kept,
            (None, _) => 1.0,
        };
        let held = prompt + usage.completion_tokens.unwrap_or(0).min(MOST_TOKENS);
        let counted = usage.prompt_tokens.filter(|_| !size.unread).map(|_| (size, prompt));
        places.retain(|placed| placed.endpoint != endpoint);
        places.insert(0, Placed { endpoint, held, kept, counted });
        places.truncate(PLACES);
        if let Some(id) = &usage.response_id {
            self.answers.put(hash::hash(id.as_bytes()), conversation);
        }
    }
}

/// Places remembered of one conversation. A chat has one or two; a prompt that many share has as many as it is hot.
const PLACES: usize = 8;

/// From this share on a conversation counts as wholly kept: the last answer's tokens are often formatted anew.
const NEARLY_ALL: f64 = 0.9;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::{Ending, Endpoint, Usage};

    fn id(n: u8) -> EndpointId {
        Endpoint::new(format!("llm-{n}"), format!("10.0.0.{n}:1").parse().unwrap()).id()
    }

    fn served(prompt: u64, cached: u64) -> Outcome {
        Outcome {
            ending: Ending::Complete,
            status: Some(200),
            served: None,
            usage: Usage {
                prompt_tokens: Some(prompt),
                completion_tokens: Some(20),
                cached_tokens: Some(cached),
                response_id: None,
            },
        }
    }

    const SIZE: (PromptSize, u64) = (
        PromptSize {
            text_bytes: 360,
            messages: 0,
            token_ids: 0,
            exact: None,
            media: 0,
            unread: false,
        },
        90,
    );

    fn memory() -> Placement {
        Placement::new(NonZeroUsize::new(2).unwrap())
    }

    #[test]
    fn what_the_engine_found_is_what_is_believed_next() {
        let mut memory = memory();
        memory.learn(1, id(1), SIZE, &served(100, 0));
        assert_eq!(memory.find(1).unwrap().cached(), 120, "a first turn is held whole");
        memory.learn(1, id(1), SIZE, &served(200, 119));
        assert_eq!(memory.find(1).unwrap().cached(), 220);
        memory.learn(1, id(1), SIZE, &served(300, 0));
        assert_eq!(
            memory.find(1).unwrap().cached(),
            0,
            "an engine that evicts is not believed to keep"
        );
        memory.learn(1, id(1), SIZE, &served(400, 320));
        assert_eq!(memory.find(1).unwrap().cached(), 420, "and is believed again when it does");
        memory.learn(1, id(2), SIZE, &served(400, 0));
        assert_eq!(memory.find(1).unwrap().cached(), 420, "a new place has just computed it");
    }

    #[test]
    fn only_success_teaches() {
        let mut memory = memory();
        for (status, ending) in
            [(Some(500), Ending::Complete), (Some(200), Ending::Aborted), (None, Ending::Aborted)]
        {
            memory.learn(1, id(1), SIZE, &Outcome { ending, status, ..Outcome::default() });
            assert_eq!(memory.find(1), None);
        }
        memory.learn(1, id(1), SIZE, &Outcome { ending: Ending::Unobserved, ..Outcome::default() });
        assert_eq!(memory.find(1).unwrap().cached(), 90);
    }

    #[test]
    fn the_memory_is_bounded_and_forgets_the_oldest() {
        let mut memory = memory();
        for conversation in 1..=3 {
            memory.learn(conversation, id(1), SIZE, &served(100, 0));
        }
        assert_eq!((memory.len(), memory.find(1)), (2, None));
    }
}
