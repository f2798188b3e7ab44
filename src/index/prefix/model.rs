//! What holders should have by our own doing: routed there, served there, confirmed by answers.

use std::cmp::Reverse;
use std::time::Duration;

use super::guess::{NEVER, Origin};
use super::marks::EVENT;
use super::{Holder, NONE, PrefixIndex, Source, stamp};
use crate::index::block::BlockKey;

impl PrefixIndex {
    /// Says where knowledge about a holder comes from; without it a holder is a model of the set capacity.
    pub fn set_source(&mut self, holder: Holder, source: Source) {
        self.of(holder).source = Some(source);
        if source == Source::Events {
            let guesses = &self.of(holder).guesses;
            let inferred: Vec<u32> = guesses
                .blocks()
                .into_iter()
                .filter(|&block| {
                    guesses.get(block).is_some_and(|guess| guess.0 == Origin::Inferred)
                })
                .collect();
            for block in inferred {
                self.drop_guess(holder, block);
            }
        }
        self.outgrow(holder);
    }

    /// Notes that a request with these blocks goes to a holder now; without another word that ends at `ends`.
    pub fn speculate(&mut self, holder: Holder, keys: &[BlockKey], now: Duration, ends: Duration) {
        let ends = end(ends);
        self.guess(holder, keys, now, |_| Some((Origin::Speculative, ends)));
    }

    /// Takes back what [`PrefixIndex::speculate`] noted, for a request that never got there.
    ///
    /// Other requests on their way with the same blocks lose the note too.
    pub fn forget(&mut self, holder: Holder, keys: &[BlockKey]) {
        let ids: Vec<u32> = self.walk(keys).collect();
        for &block in ids.iter().rev() {
            let guess = self.of(holder).guesses.get(block);
            if guess.is_some_and(|(origin, _)| origin == Origin::Speculative) {
                self.drop_guess(holder, block);
            }
        }
    }

    /// Notes that a holder served a request, of which it reported the first `cached` blocks as cached.
    ///
    /// With a stream of events only the cached ones are noted, the others come as events. What is noted ends at `ends`
    /// if given, else when the model of the holder has no room left.
    pub fn served(
        &mut self,
        holder: Holder,
        keys: &[BlockKey],
        cached: usize,
        now: Duration,
        ends: Option<Duration>,
    ) {
        let ends = ends.map_or(NEVER, end);
        let live = self.of(holder).source == Some(Source::Events);
        let keys = if live { &keys[..cached.min(keys.len())] } else { keys };
        self.guess(holder, keys, now, |i| {
            Some((if i < cached { Origin::Confirmed } else { Origin::Inferred }, ends))
        });
    }

    /// Notes that these blocks were used on a holder, as far as they are known; adds nothing.
    pub fn touch(&mut self, holder: Holder, keys: &[BlockKey], now: Duration) {
        let stamp = stamp(now);
        let ids: Vec<u32> = self.walk(keys).collect();
        for &block in ids.iter().rev() {
            self.touch_block(block, stamp);
            self.of(holder).guesses.touch(block);
        }
    }

    /// Drops what has ended by `now`.
    pub fn expire(&mut self, now: Duration) {
        let stamp = stamp(now);
        while let Some(&Reverse((ends, holder, block))) = self.ends.peek() {
            if ends > stamp {
                break;
            }
            self.ends.pop();
            // It may have been renewed, or be gone and the slot another's.
            let guess = self.of(holder).guesses.get(block);
            if guess.is_some_and(|(_, ends)| ends <= stamp) {
                self.drop_guess(holder, block);
                self.stats.expired += 1;
            }
        }
    }

    fn guess(
        &mut self,
        holder: Holder,
        keys: &[BlockKey],
        now: Duration,
        what: impl Fn(usize) -> Option<(Origin, u32)>,
    ) {
        let stamp = stamp(now);
        let mut last = NONE;
        let mut ids = Vec::with_capacity(keys.len());
        for &key in keys {
            let Some(id) = self.make(last, key, stamp) else {
                break;
            };
            ids.push(id);
            last = id;
        }
        for (i, &block) in ids.iter().enumerate().rev() {
            let mark = self.arena.get(block).marks.get(holder);
            // What the engine reports makes a guess moot.
            let Some((mut origin, mut ends)) = what(i).filter(|_| mark & EVENT == 0) else {
                continue;
            };
            let guesses = &mut self.of(holder).guesses;
            let old = guesses.get(block);
            if let Some((was, until)) = old {
                if origin == Origin::Speculative && was < origin {
                    (origin, ends) = (was, until);
                }
                ends = ends.max(until);
            }
            guesses.put(block, origin, ends);
            if old.is_none() {
                self.stats.guesses += 1;
            }
            if ends != NEVER && old.is_none_or(|(_, until)| until != ends) {
                self.ends.push(Reverse((ends, holder, block)));
            }
            if mark != origin.bit() {
                self.set_mark(block, holder, origin.bit());
            }
        }
        self.outgrow(holder);
        self.settle(keys.len());
    }

    /// Drops the least recent guesses of a holder that has no room for them.
    fn outgrow(&mut self, holder: Holder) {
        let capacity = match self.of(holder).source {
            Some(Source::Model { capacity }) => capacity.max(1),
            Some(Source::Events) | None => self.settings.capacity.max(1),
        };
        while self.of(holder).guesses.len() > capacity as usize
            && let Some(block) = self.of(holder).guesses.oldest()
        {
            self.drop_guess(holder, block);
            self.stats.outgrown += 1;
        }
    }

    pub(super) fn drop_guess(&mut self, holder: Holder, block: u32) {
        if self.of(holder).guesses.remove(block).is_some() {
            self.stats.guesses -= 1;
            let mark = self.arena.get(block).marks.get(holder);
            self.set_mark(block, holder, mark & EVENT);
            self.tidy(block);
        }
    }
}

/// The first step of the clock at which a time has passed.
fn end(time: Duration) -> u32 {
    u32::try_from(time.as_millis().div_ceil(125)).unwrap_or(NEVER).min(NEVER)
}
