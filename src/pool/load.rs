//! Who is busy with what: requests and tokens booked on each endpoint, released exactly once.
//!
//! A counter belongs to one life of an endpoint ([`EndpointId`]) and outlives its membership while work is in
//! flight on it, so that an endpoint that flaps keeps its load and a release never hits another's counter.

use std::collections::HashMap;
use std::time::Duration;

use super::{EndpointId, EngineQueue, Flight, Pace, Place, PoolSnapshot, Prices, Said, Sight};

/// What is booked on one endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Load {
    /// Requests in flight.
    pub requests: u64,
    /// Tokens of work in flight: prompts still to be read and answers still to be written.
    pub tokens: u64,
}

/// The tokens of work that one request brings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Work {
    /// Prompt tokens that the endpoint must compute.
    pub prefill: u64,
    /// Tokens it may generate.
    pub decode: u64,
}

/// When the prompt's tokens leave the ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Release {
    /// At the first token: the prompt is computed by then.
    FirstToken,
    /// With everything else, at the end of the answer.
    End,
}

/// The right to give back what was booked. It must go back through [`LoadLedger::release`].
#[derive(Debug)]
#[must_use = "booked load must be released"]
pub struct Ticket {
    counter: u32,
    work: Work,
    place: Place,
}

/// More tokens than any context window, and few enough that sums over any number of requests stay exact. What a
/// client or an engine claims beyond it is not believed.
pub const MOST_TOKENS: u64 = 1 << 24;

/// The load of all endpoints, in slot order of the adopted snapshot.
#[derive(Debug, Default)]
pub struct LoadLedger {
    counters: Vec<Counter>,
    free: Vec<u32>,
    by_id: HashMap<EndpointId, u32>,
    by_slot: Vec<u32>,
    /// The members' loads once more, in slot order: policies scan them for every pick.
    loads: Vec<Load>,
    total: Load,
    prices: Prices,
    /// How long things take in the pool as a whole.
    pace: Pace,
}

#[derive(Debug, Clone)]
struct Counter {
    id: EndpointId,
    load: Load,
    queue: EngineQueue,
    /// The endpoint's slot in the adopted snapshot, if it is a member.
    slot: Option<u32>,
}

impl Work {
    /// Adds both parts.
    #[must_use]
    fn tokens(self) -> u64 {
        self.prefill + self.decode
    }
}

impl LoadLedger {
    /// Starts without load; work costs as `prices` say.
    #[must_use]
    pub fn new(prices: Prices) -> Self {
        Self { prices, ..Self::default() }
    }

    /// Follows a new snapshot: counters of endpoints that stay keep their load, new ones start at zero.
    pub fn adopt(&mut self, pool: &PoolSnapshot) {
        for &counter in &self.by_slot {
            self.counters[counter as usize].slot = None;
        }
        let by_slot: Vec<u32> = pool.ids().iter().map(|&id| self.counter_of(id)).collect();
        let left = std::mem::replace(&mut self.by_slot, by_slot);
        self.total = Load::default();
        self.loads.clear();
        for (slot, &counter) in (0u32..).zip(&self.by_slot) {
            let counter = &mut self.counters[counter as usize];
            counter.slot = Some(slot);
            self.loads.push(counter.load);
            self.total.requests += counter.load.requests;
            self.total.tokens += counter.load.tokens;
        }
        for counter in left {
            self.retire_if_idle(counter);
        }
    }

    /// Returns what is booked on the endpoint in `slot`.
    #[must_use]
    pub fn load(&self, slot: u32) -> Load {
        self.loads[slot as usize]
    }

    /// Returns what is booked on all endpoints of the snapshot.
    #[must_use]
    pub fn total(&self) -> Load {
        self.total
    }

    /// Books one request with its work on the endpoint in `slot`.
    pub fn book(&mut self, slot: u32, work: Work, flight: Flight, now: Duration) -> Ticket {
        let work =
            Work { prefill: work.prefill.min(MOST_TOKENS), decode: work.decode.min(MOST_TOKENS) };
        let counter = self.by_slot[slot as usize];
        self.add(counter, Load { requests: 1, tokens: work.tokens() });
        let place = self.counters[counter as usize].queue.dispatch(flight, now);
        Ticket { counter, work, place }
    }

    /// Returns what work costs.
    #[must_use]
    pub fn prices(&self) -> &Prices {
        &self.prices
    }

    /// Returns how long things take in the pool as a whole.
    #[must_use]
    pub fn pace(&self) -> &Pace {
        &self.pace
    }

    /// Returns what is seen of the endpoint in `slot`, but for what its cache and its memory hold.
    #[must_use]
    pub fn sight(&self, slot: u32, now: Duration) -> Sight {
        let queue = self.queue(slot);
        let prompt_pace = queue.pace().prompt(&self.pace);
        #[expect(clippy::cast_precision_loss, reason = "requests stay far below 2^52")]
        Sight {
            backlog: queue.backlog(now, prompt_pace),
            waiting: queue.waiting() as f64,
            answers: f64::from(queue.answers()),
            contexts: queue.contexts(),
            balance: queue.balance(now),
            prompt_pace,
            answer_pace: queue.pace().answer(&self.pace),
            cached: 0.0,
            memory: (queue.contexts() + queue.prompts()) / self.prices.capacity,
            stuck: 0.0,
            held: 0.0,
            uncached: queue.uncached(),
            cold: queue.cold(),
            said: Said::default(),
        }
    }

    /// Returns the queue of the endpoint in `slot`.
    #[must_use]
    pub fn queue(&self, slot: u32) -> &EngineQueue {
        &self.counters[self.by_slot[slot as usize] as usize].queue
    }

    /// Notes that decision `sequence` gave the endpoint in `slot` a prompt of which nothing was cached anywhere.
    pub fn note_cold(&mut self, slot: u32, sequence: u64) {
        self.counters[self.by_slot[slot as usize] as usize].queue.note_cold(sequence);
    }

    /// Notes the first token of an answer. A second call does nothing.
    pub fn first_token(&mut self, ticket: &mut Ticket, now: Duration) {
        let queue = &mut self.counters[ticket.counter as usize].queue;
        let answers = f64::from(queue.answers() + 1);
        let step = self.prices.step(answers, queue.contexts());
        queue.first_token(&mut ticket.place, step, now, &mut self.pace);
    }

    /// Releases the prompt's tokens, at the first token of the answer. A second call does nothing.
    pub fn prefilled(&mut self, ticket: &mut Ticket) {
        self.subtract(ticket.counter, Load { requests: 0, tokens: ticket.work.prefill });
        ticket.work.prefill = 0;
    }

    /// Releases all that the ticket still holds: when, if that is known, and after how many tokens, if it ended well.
    pub fn release(&mut self, ticket: Ticket, now: Option<Duration>, generated: Option<u64>) {
        self.subtract(ticket.counter, Load { requests: 1, tokens: ticket.work.tokens() });
        let queue = &mut self.counters[ticket.counter as usize].queue;
        queue.end(ticket.place, generated, now, &mut self.pace);
        self.retire_if_idle(ticket.counter);
    }

    /// Sets the load of an idle endpoint to what a recorded decision saw. Nothing can release it.
    pub fn preset(&mut self, slot: u32, load: Load) {
        const MOST: u64 = MOST_TOKENS << 16;
        let load = Load { requests: load.requests.min(MOST), tokens: load.tokens.min(MOST) };
        self.add(self.by_slot[slot as usize], load);
    }

    fn counter_of(&mut self, id: EndpointId) -> u32 {
        if let Some(&counter) = self.by_id.get(&id) {
            return counter;
        }
        let queue = EngineQueue::default();
        let fresh = Counter { id, load: Load::default(), queue, slot: None };
        let counter = if let Some(counter) = self.free.pop() {
            self.counters[counter as usize] = fresh;
            counter
        } else {
            self.counters.push(fresh);
            u32::try_from(self.counters.len() - 1)
                .expect("a pool has far fewer than 2^32 endpoints")
        };
        self.by_id.insert(id, counter);
        counter
    }

    fn add(&mut self, counter: u32, load: Load) {
        let counter = &mut self.counters[counter as usize];
        counter.load.requests += load.requests;
        counter.load.tokens += load.tokens;
        if let Some(slot) = counter.slot {
            self.loads[slot as usize] = counter.load;
            self.total.requests += load.requests;
            self.total.tokens += load.tokens;
        }
    }

    fn subtract(&mut self, counter: u32, load: Load) {
        let counter = &mut self.counters[counter as usize];
        counter.load.requests -= load.requests;
        counter.load.tokens -= load.tokens;
        if let Some(slot) = counter.slot {
            self.loads[slot as usize] = counter.load;
            self.total.requests -= load.requests;
            self.total.tokens -= load.tokens;
        }
    }

    fn retire_if_idle(&mut self, counter: u32) {
        let entry = &self.counters[counter as usize];
        // The map says whether this counter was retired before: a slot can leave twice in one adoption.
        if entry.slot.is_none()
            && entry.load == Load::default()
            && self.by_id.get(&entry.id) == Some(&counter)
        {
            self.by_id.remove(&entry.id);
            self.free.push(counter);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::pool::Endpoint;

    fn pool(names: &[u8]) -> PoolSnapshot {
        let endpoints = names
            .iter()
            .map(|n| Endpoint::new(format!("llm-{n}"), format!("10.0.0.{n}:8000").parse().unwrap()))
            .collect();
        PoolSnapshot::new(0, endpoints, 1).unwrap()
    }

    fn book(ledger: &mut LoadLedger, slot: u32, prefill: u64, decode: u64) -> Ticket {
        let flight = Flight {
            conversation: None,
            prefix: None,
            prompt: 1.0,
            uncached: 1.0,
            output: 1.0,
            seconds: 1.0,
            work: 1.0,
        };
        ledger.book(slot, Work { prefill, decode }, flight, Duration::ZERO)
    }

    #[test]
    fn an_endpoint_that_flaps_keeps_its_load_and_ends_at_zero() {
        let (both, one) = (pool(&[1, 2]), pool(&[2]));
        let mut ledger = LoadLedger::default();
        ledger.adopt(&both);
        let first = book(&mut ledger, 0, 10, 5);
        ledger.adopt(&one);
        assert_eq!(ledger.total(), Load::default());
        ledger.adopt(&both);
        assert_eq!(ledger.load(0), Load { requests: 1, tokens: 15 });
        let second = book(&mut ledger, 0, 1, 1);
        ledger.release(first, None, None);
        ledger.release(second, None, None);
        assert_eq!(ledger.load(0), Load::default());
    }

    #[derive(Debug, Clone)]
    enum Act {
        Adopt(Vec<u8>),
        Book(u8, u64, u64),
        First(usize),
        End(usize),
    }

    fn act() -> impl Strategy<Value = Act> {
        prop_oneof![
            prop::collection::btree_set(1u8..6, 1..6)
                .prop_map(|set| Act::Adopt(set.into_iter().collect())),
            (any::<u8>(), any::<u64>(), prop_oneof![0u64..500, any::<u64>()])
                .prop_map(|(slot, p, d)| Act::Book(slot, p, d)),
            any::<usize>().prop_map(Act::First),
            any::<usize>().prop_map(Act::End),
        ]
    }

    proptest! {
        #[test]
        fn load_returns_to_zero_whatever_happens(acts in prop::collection::vec(act(), 1..80)) {
            let mut ledger = LoadLedger::default();
            let mut members: Vec<u8> = vec![1, 2, 3];
            ledger.adopt(&pool(&members));
            let mut open: Vec<Ticket> = Vec::new();
            for act in acts {
                match act {
                    Act::Adopt(names) => { ledger.adopt(&pool(&names)); members = names; }
                    Act::Book(slot, prefill, decode) => {
                        let slot = u32::from(slot) % u32::try_from(members.len()).unwrap();
                        open.push(book(&mut ledger, slot, prefill, decode));
                    }
                    Act::First(i) if !open.is_empty() => {
                        let i = i % open.len();
                        ledger.prefilled(&mut open[i]);
                        ledger.first_token(&mut open[i], Duration::ZERO);
                    }
                    Act::End(i) if !open.is_empty() => { let i = i % open.len(); ledger.release(open.swap_remove(i), None, None); }
                    Act::First(_) | Act::End(_) => {}
                }
                let sum = (0..u32::try_from(members.len()).unwrap()).map(|slot| ledger.load(slot))
                    .fold(Load::default(), |a, b| Load { requests: a.requests + b.requests, tokens: a.tokens + b.tokens });
                prop_assert_eq!(sum, ledger.total());
            }
            for ticket in open { ledger.release(ticket, None, None); }
            for slot in 0..u32::try_from(members.len()).unwrap() {
                prop_assert!(ledger.queue(slot).is_idle());
            }
            prop_assert_eq!(ledger.total(), Load::default());
            ledger.adopt(&pool(&[]));
            prop_assert!(ledger.by_id.is_empty(), "idle counters of endpoints that left are freed");
        }
    }
}
