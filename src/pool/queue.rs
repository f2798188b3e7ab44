//! What goes on at one engine, told from here: requests whose first token has not come back, in the order they were
//! dispatched, and answers that are being written. It is never stale, for it is made of our own dispatches.

use std::collections::VecDeque;
use std::time::Duration;

/// For how long dispatched work counts in the long-run balance.
const BALANCE: Duration = Duration::from_secs(90);
/// An engine's pace is believed to be within this factor of the pool's.
const PACE_BOUND: f64 = 3.0;
/// Least share of an answer's time without prompts beside it from which its pace is learned.
const ALONE: f64 = 0.3;

/// A request on its way to its first token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Flight {
    /// The conversation, by its place on the ring.
    pub conversation: Option<u64>,
    /// What begins as its prompt does, as far as to its middle.
    pub prefix: Option<u64>,
    /// Tokens of its prompt.
    pub prompt: f64,
    /// Those of them that were not believed to be cached when it was dispatched.
    pub uncached: f64,
    /// Tokens that it is expected to generate.
    pub output: f64,
    /// Seconds to its first token once it is at the head of the queue, by the prices.
    pub seconds: f64,
    /// Seconds of work that it brings in all, by the prices.
    pub work: f64,
}

/// The requests of one engine.
#[derive(Debug, Clone, Default)]
pub struct EngineQueue {
    waiting: VecDeque<(u64, Flight)>,
    backlog: f64,
    /// When the engine began with the head of the queue.
    head_since: Option<Duration>,
    answers: u32,
    contexts: f64,
    balance: Decaying,
    /// Seconds in which there were prompts to compute.
    busy: f64,
    pace: Pace,
    next: u64,
    /// The last decision that gave it a prompt of which nothing was cached anywhere.
    cold: Option<u64>,
}

/// What is seen of an engine by who has to choose: all that a cost is made of, and what a record of it holds.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Sight {
    /// Seconds until it would begin with a request that comes now.
    pub backlog: f64,
    /// Requests that wait for their first token.
    pub waiting: f64,
    /// Answers that are being written.
    pub answers: f64,
    /// Tokens that they look back on.
    pub contexts: f64,
    /// Seconds of work a second that were dispatched to it lately.
    pub balance: f64,
    /// How many times the price a prompt takes there.
    pub prompt_pace: f64,
    /// How many times the price an answer's step takes there.
    pub answer_pace: f64,
    /// Tokens of the prompt that are, or will be, in its cache.
    pub cached: f64,
    /// Share of its KV memory in use.
    pub memory: f64,
    /// Requests that wait for memory, as the engine says.
    pub stuck: f64,
    /// Tokens of the prompt that are in its cache now, as the engine says or else as we remember.
    pub held: f64,
    /// Prompt tokens that it has still to compute, of requests that wait for their first token.
    pub uncached: f64,
    /// The last decision that gave it a prompt of which nothing was cached anywhere.
    pub cold: Option<u64>,
    /// What the engine says itself.
    pub said: Said,
}

/// What an engine says of itself; what it does not say is unknown, and neither 0 nor none.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Said {
    /// Tokens of the prompt in its cache.
    pub cached: Option<f64>,
    /// Requests that wait there.
    pub waiting: Option<f64>,
    /// Requests that run there.
    pub running: Option<f64>,
    /// Share of its KV memory in use.
    pub memory: Option<f64>,
    /// Where the adapter that the request asks for is.
    pub adapter: Option<AdapterState>,
}

/// How near an engine is to serving a LoRA adapter, the nearest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdapterState {
    /// It is loaded.
    Active,
    /// It is not, and there is room for one more.
    Room,
    /// It waits to be loaded.
    Waiting,
    /// There is no room for it.
    Full,
}

/// The LoRA adapters of one engine, as it says.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Adapters {
    /// Those that are loaded.
    pub active: Vec<String>,
    /// Those that requests wait for.
    pub waiting: Vec<String>,
    /// How many there may be at once.
    pub most: usize,
}

impl AdapterState {
    /// Every state, with the name that records have for it.
    pub const NAMES: [(&'static str, Self); 4] = [
        ("active", Self::Active),
        ("room", Self::Room),
        ("waiting", Self::Waiting),
        ("full", Self::Full),
    ];

    /// Returns its name.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Room => "room",
            Self::Waiting => "waiting",
            Self::Full => "full",
        }
    }
}

impl Adapters {
    /// Tells how near the engine is to serving `model`.
    #[must_use]
    pub fn state_of(&self, model: Option<&str>) -> AdapterState {
        let is_in = |list: &[String]| model.is_some_and(|model| list.iter().any(|it| it == model));
        // Engines count an adapter that runs and is waited for in both lists.
        let queued = self.waiting.iter().filter(|it| !self.active.contains(it)).count();
        if is_in(&self.active) {
            AdapterState::Active
        } else if self.active.len() + queued < self.most {
            AdapterState::Room
        } else if is_in(&self.waiting) {
            AdapterState::Waiting
        } else {
            AdapterState::Full
        }
    }
}

/// A claim on an [`EngineQueue`], from dispatch to end.
#[derive(Debug)]
pub struct Place {
    id: u64,
    flight: Flight,
    answering: Option<Answering>,
}

/// How things were at an answer's first token.
#[derive(Debug, Clone, Copy)]
struct Answering {
    since: Duration,
    /// Seconds that a step was to take, by the prices.
    step: f64,
    /// Seconds that the engine had spent on prompts.
    busy: f64,
}

/// A sum that fades.
#[derive(Debug, Clone, Copy, Default)]
pub struct Decaying {
    sum: f64,
    at: Duration,
}

impl Decaying {
    /// Returns what is left of it.
    #[must_use]
    pub fn at(&self, now: Duration, time: Duration) -> f64 {
        let age = now.saturating_sub(self.at).as_secs_f64();
        self.sum * (-age / time.as_secs_f64()).exp()
    }

    /// Adds to it.
    pub fn add(&mut self, amount: f64, now: Duration, time: Duration) {
        *self = Self { sum: self.at(now, time) + amount, at: now };
    }
}

/// How long things take, as a multiple of the prices: learned from what they took.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Pace {
    prompt: Learned,
    answer: Learned,
}

/// Seconds that things took, and what they were priced at; old ones fade.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
struct Learned {
    took: f64,
    priced: f64,
    samples: f64,
}

impl Learned {
    /// What is left of a sample when the next one comes.
    const KEPT: f64 = 0.98;
    /// Samples of which half of what they say is believed.
    const HALF: f64 = 4.0;
    /// A difference up to this factor is chance.
    const CHANCE: f64 = 1.25;

    fn learn(&mut self, took: f64, priced: f64) {
        if took.is_finite() && priced > 0.0 {
            self.took = self.took * Self::KEPT + took.max(0.0);
            self.priced = self.priced * Self::KEPT + priced;
            self.samples = self.samples * Self::KEPT + 1.0;
        }
    }

    /// Returns what things took for each second that they were priced at; 1 while that is not known.
    fn factor(self) -> f64 {
        let known = self.samples >= 1.0 && self.took > 0.0;
        if known { (self.took / self.priced).clamp(1e-3, 1e3) } else { 1.0 }
    }

    /// Returns how many times longer things take here than in the pool: 1 unless that is more than chance.
    fn apart(self, pool: Self) -> f64 {
        let sure = self.samples / (self.samples + Self::HALF);
        let apart = (self.factor() / pool.factor()).ln() * sure;
        // From chance to twice as much it comes in bit by bit, so that nothing jumps.
        let beyond = (2.0 * (apart.abs() - Self::CHANCE.ln())).clamp(0.0, apart.abs());
        (beyond.min(PACE_BOUND.ln()) * apart.signum()).exp()
    }
}

impl Pace {
    /// Returns how many times the price a prompt takes on an engine of the pool.
    #[must_use]
    pub fn prompt(&self, pool: &Self) -> f64 {
        pool.scale() * self.prompt.apart(pool.prompt)
    }

    /// Returns how many times the price an answer's step takes there. What prompts and answers cost beside each other is
    /// the prices' to say: what is learned of it under load is mostly the load.
    #[must_use]
    pub fn answer(&self, pool: &Self) -> f64 {
        pool.scale() * self.answer.apart(pool.answer)
    }

    /// Returns how many times the price work takes in the pool.
    #[must_use]
    pub fn scale(&self) -> f64 {
        self.prompt.factor()
    }
}

impl EngineQueue {
    /// Counts the requests that wait for their first token.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Counts the answers that are being written.
    #[must_use]
    pub fn answers(&self) -> u32 {
        self.answers
    }

    /// Returns the tokens that those answers look back on.
    #[must_use]
    pub fn contexts(&self) -> f64 {
        self.contexts
    }

    /// Returns the seconds of prompts before one that comes now, at `pace` times the prices.
    #[must_use]
    pub fn backlog(&self, now: Duration, pace: f64) -> f64 {
        let Some((_, head)) = self.waiting.front() else {
            return 0.0;
        };
        let passed = self.head_since.map_or(0.0, |since| now.saturating_sub(since).as_secs_f64());
        (self.backlog * pace - (head.seconds * pace).min(passed)).max(0.0)
    }

    /// Returns the tokens of a prompt that will be in the cache when what waits here has been computed: a prompt of the
    /// same conversation whole, and of one that begins alike the half that is known to be alike.
    #[must_use]
    pub fn coming(&self, conversation: Option<u64>, prefix: Option<u64>, prompt: f64) -> f64 {
        let same = |a: Option<u64>, b: Option<u64>| a.is_some() && a == b;
        let tokens = |it: &Flight| {
            if same(it.conversation, conversation) {
                it.prompt
            } else if same(it.prefix, prefix) {
                it.prompt.min(prompt) * 0.5
            } else {
                0.0
            }
        };
        self.waiting.iter().map(|(_, it)| tokens(it)).fold(0.0, f64::max)
    }

    /// Returns the tokens of all prompts that wait.
    #[must_use]
    pub fn prompts(&self) -> f64 {
        self.waiting.iter().map(|(_, it)| it.prompt).sum()
    }

    /// Returns the tokens of those prompts that were not believed to be cached.
    #[must_use]
    pub fn uncached(&self) -> f64 {
        self.waiting.iter().map(|(_, it)| it.uncached).sum()
    }

    /// Returns the last decision that gave it a prompt of which nothing was cached anywhere.
    #[must_use]
    pub fn cold(&self) -> Option<u64> {
        self.cold
    }

    /// Notes that decision `sequence` gave it such a prompt.
    pub fn note_cold(&mut self, sequence: u64) {
        self.cold = Some(sequence);
    }

    /// Returns the seconds of work a second that were dispatched here lately.
    #[must_use]
    pub fn balance(&self, now: Duration) -> f64 {
        self.balance.at(now, BALANCE) / BALANCE.as_secs_f64()
    }

    /// Returns how long things take here.
    #[must_use]
    pub fn pace(&self) -> &Pace {
        &self.pace
    }

    /// Tells whether nothing goes on.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.answers == 0
    }

    /// Adds a request.
    pub fn dispatch(&mut self, flight: Flight, now: Duration) -> Place {
        if self.waiting.is_empty() {
            self.head_since = Some(now);
        }
        let id = self.next;
        self.next += 1;
        self.backlog += flight.seconds;
        self.balance.add(flight.work, now, BALANCE);
        self.waiting.push_back((id, flight));
        Place { id, flight, answering: None }
    }

    /// Notes the first token of an answer; `step` is what a step takes now by the prices.
    pub fn first_token(&mut self, place: &mut Place, step: f64, now: Duration, pool: &mut Pace) {
        if place.answering.is_some() {
            return;
        }
        let since = self.head_since;
        self.leave(place.id, Some(now));
        self.head_since = Some(now);
        self.answers += 1;
        self.contexts += place.flight.context();
        if let Some(since) = since {
            let took = now.saturating_sub(since).as_secs_f64();
            self.busy += took;
            self.pace.prompt.learn(took, place.flight.seconds);
            pool.prompt.learn(took, place.flight.seconds);
        }
        place.answering = Some(Answering { since: now, step, busy: self.busy });
    }

    /// Notes the end of a request: when, if that is known, and the tokens that were generated, if it ended well.
    #[expect(clippy::needless_pass_by_value, reason = "a place is given up once")]
    pub fn end(
        &mut self,
        place: Place,
        generated: Option<u64>,
        now: Option<Duration>,
        pool: &mut Pace,
    ) {
        let Some(Answering { since, step, busy }) = place.answering else {
            self.leave(place.id, now);
            return;
        };
        self.answers = self.answers.saturating_sub(1);
        self.contexts = (self.contexts - place.flight.context()).max(0.0);
        if self.answers == 0 {
            // Sums of floats do not come back to where they were.
            self.contexts = 0.0;
        }
        // Few tokens are an answer's formatting and not its pace.
        if let (Some(generated @ 8..), Some(now)) = (generated, now) {
            #[expect(clippy::cast_precision_loss, reason = "answers are far shorter than 2^52")]
            let (took, tokens) =
                (now.saturating_sub(since).as_secs_f64(), generated.saturating_sub(1) as f64);
            // In a step that computes prompts an answer waits for them; too little else says nothing of its own pace.
            let alone = took - (self.busy - busy);
            if alone > ALONE * took {
                self.pace.answer.learn(alone, step * tokens);
                pool.answer.learn(alone, step * tokens);
            }
        }
    }

    fn leave(&mut self, id: u64, now: Option<Duration>) {
        if let Some(index) = self.waiting.iter().position(|(waiting, _)| *waiting == id)
            && let Some((_, flight)) = self.waiting.remove(index)
        {
            self.backlog -= flight.seconds;
            if index == 0 {
                // The next one begins now, and not when this one did.
                self.head_since = now;
            }
            if self.waiting.is_empty() {
                self.backlog = 0.0;
            }
        }
    }
}

impl Flight {
    /// Returns the tokens that its answer looks back on, on average.
    fn context(&self) -> f64 {
        self.prompt + self.output * 0.5
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flight(seconds: f64) -> Flight {
        Flight {
            conversation: Some(7),
            prefix: Some(1),
            prompt: 100.0,
            uncached: 60.0,
            output: 20.0,
            seconds,
            work: seconds,
        }
    }

    fn at(seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds)
    }

    #[test]
    fn a_backlog_is_worked_off_from_its_head() {
        let (mut queue, mut pool) = (EngineQueue::default(), Pace::default());
        let mut first = queue.dispatch(flight(2.0), at(10.0));
        let second = queue.dispatch(flight(3.0), at(10.5));
        assert!((queue.backlog(at(11.0), 1.0) - 4.0).abs() < 1e-9);
        // A head that takes longer than promised is as good as done, and no more than that.
        assert!((queue.backlog(at(99.0), 1.0) - 3.0).abs() < 1e-9);
        for (conversation, prefix, coming) in [
            (Some(7), None, 100.0),
            (Some(8), Some(1), 40.0),
            (Some(8), Some(2), 0.0),
            (None, None, 0.0),
        ] {
            assert!((queue.coming(conversation, prefix, 80.0) - coming).abs() < 1e-9);
        }
        queue.first_token(&mut first, 0.1, at(12.0), &mut pool);
        assert_eq!((queue.waiting(), queue.answers()), (1, 1));
        assert!((queue.uncached() - 60.0).abs() < 1e-9, "what is computed is no work any more");
        assert!((queue.backlog(at(13.0), 1.0) - 2.0).abs() < 1e-9);
        // One that ends without a word leaves nothing behind.
        queue.end(second, None, Some(at(13.0)), &mut pool);
        queue.end(first, Some(21), Some(at(16.0)), &mut pool);
        assert!(queue.is_idle() && queue.backlog(at(13.0), 1.0) == 0.0 && queue.contexts() == 0.0);
    }

    #[test]
    fn an_adapter_is_active_or_has_room_or_waits_or_has_none() {
        let list = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        let adapters = |active: &[&str], waiting: &[&str], most| {
            Adapters { active: list(active), waiting: list(waiting), most }.state_of(Some("a"))
        };
        assert_eq!(adapters(&["a", "b"], &[], 2), AdapterState::Active);
        assert_eq!(adapters(&["b"], &[], 2), AdapterState::Room);
        // One that is in both lists takes one place.
        assert_eq!(adapters(&["b"], &["b"], 2), AdapterState::Room);
        assert_eq!(adapters(&["b"], &["a"], 2), AdapterState::Waiting);
        assert_eq!(adapters(&["b", "c"], &[], 2), AdapterState::Full);
        assert_eq!(Adapters::default().state_of(None), AdapterState::Full);
        for (name, state) in AdapterState::NAMES {
            assert_eq!(state.as_str(), name);
        }
    }

    #[test]
    fn the_pace_of_an_engine_is_learned_and_kept_near_the_pool_s() {
        let (mut slow, mut quick, mut pool) =
            (EngineQueue::default(), EngineQueue::default(), Pace::default());
        for round in 0..50 {
            let now = at(f64::from(round) * 100.0);
            for (queue, took) in [(&mut slow, 50.0), (&mut quick, 5.0)] {
                let mut place = queue.dispatch(flight(1.0), now);
                queue.first_token(&mut place, 0.1, now + at(took), &mut pool);
                queue.end(place, Some(21), Some(now + at(took + 20.0 * 0.1)), &mut pool);
            }
        }
        let (slow, quick) = (slow.pace().prompt(&pool), quick.pace().prompt(&pool));
        assert!((4.0..=9.01).contains(&(slow / quick)), "{slow} and {quick}");
        let fresh = EngineQueue::default();
        let pace = fresh.pace().prompt(&pool);
        assert!((pace / 27.5 - 1.0).abs() < 0.05, "as the pool, until it is known: {pace}");
        // Answers are as quick here as they are there.
        assert!((fresh.pace().answer(&pool) / pace - 1.0).abs() < 1e-6);
    }

    #[test]
    fn a_head_that_goes_without_a_word_takes_its_time_with_it() {
        let (mut queue, mut pool) = (EngineQueue::default(), Pace::default());
        let first = queue.dispatch(flight(2.0), at(0.0));
        let mut second = queue.dispatch(flight(3.0), at(0.0));
        queue.end(first, None, Some(at(9.0)), &mut pool);
        assert!((queue.backlog(at(9.0), 1.0) - 3.0).abs() < 1e-9);
        queue.first_token(&mut second, 0.1, at(12.0), &mut pool);
        assert!((pool.prompt.factor() - 1.0).abs() < 1e-9, "{}", pool.prompt.factor());
        // When that was is not known: nothing is learned of the next one.
        let third = queue.dispatch(flight(1.0), at(20.0));
        let mut fourth = queue.dispatch(flight(1.0), at(20.0));
        queue.end(third, None, None, &mut pool);
        assert!((queue.backlog(at(99.0), 1.0) - 1.0).abs() < 1e-9);
        queue.first_token(&mut fourth, 0.1, at(99.0), &mut pool);
        assert!((pool.prompt.factor() - 1.0).abs() < 1e-9, "{}", pool.prompt.factor());
    }

    #[test]
    fn engines_that_differ_by_chance_are_equal() {
        let (mut a, mut b, mut pool) =
            (EngineQueue::default(), EngineQueue::default(), Pace::default());
        for round in 0..50 {
            let now = at(f64::from(round) * 100.0);
            for (queue, took) in [(&mut a, 1.1), (&mut b, 0.9)] {
                let mut place = queue.dispatch(flight(1.0), now);
                queue.first_token(&mut place, 0.1, now + at(took), &mut pool);
                queue.end(place, None, Some(now + at(took)), &mut pool);
            }
        }
        assert_eq!(a.pace().prompt(&pool), b.pace().prompt(&pool));
    }

    #[test]
    fn an_answer_s_pace_is_learned_without_the_prompts_beside_it() {
        let (mut queue, mut pool) = (EngineQueue::default(), Pace::default());
        let mut answer = queue.dispatch(flight(1.0), at(0.0));
        queue.first_token(&mut answer, 0.1, at(1.0), &mut pool);
        let mut prompt = queue.dispatch(flight(1.0), at(1.0));
        queue.first_token(&mut prompt, 0.1, at(2.0), &mut pool);
        // 20 tokens in 2 seconds, and a second for the other's prompt.
        queue.end(answer, Some(21), Some(at(4.0)), &mut pool);
        queue.end(prompt, None, Some(at(4.0)), &mut pool);
        assert!((pool.answer.factor() - 1.0).abs() < 1e-9, "{}", pool.answer.factor());
    }
}
