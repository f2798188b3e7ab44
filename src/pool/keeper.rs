//! The one writer of a pool: takes what a source of endpoints says, lets newcomers warm up, and makes snapshots.
//!
//! An endpoint that joins a pool at work has an empty cache. Given its full share at once, it would take over that
//! share of all conversations, and every one of them would be computed anew on the one endpoint that is coldest. So its
//! weight rises in steps, and with it its points on the ring and its share of the load: each step moves only about one
//! step's part of its share, and to it alone.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Endpoint, EndpointId, PoolError, PoolSnapshot};

/// How long an endpoint that left is known for what it was, when it comes back as the same instance.
const REMEMBERED: Duration = Duration::from_secs(600);

/// How newcomers rise to their full weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Warmup {
    /// From joining to full weight; zero is at once.
    pub time: Duration,
    /// Steps on the way, at least one.
    pub steps: u32,
}

/// Keeps the membership of one pool.
#[derive(Debug)]
pub struct PoolKeeper {
    points: u32,
    warmup: Warmup,
    pool: Arc<PoolSnapshot>,
    /// With full weights.
    members: Vec<Endpoint>,
    known: HashMap<EndpointId, Known>,
    /// When the pool last came to be out of nothing.
    founded: Option<Instant>,
    /// When steps were last taken: all that warm up take theirs together, since each makes a new ring.
    stepped: Option<Instant>,
}

/// What is remembered of an endpoint.
#[derive(Debug, Clone, Copy)]
struct Known {
    /// When it joined a pool at work; `None` was there from the first.
    joined: Option<Instant>,
    left: Option<Instant>,
}

/// A new state of the pool.
#[derive(Debug, Clone)]
pub struct Change {
    /// The new state.
    pub pool: Arc<PoolSnapshot>,
    /// Names of those that joined.
    pub joined: Vec<String>,
    /// Names of those that left.
    pub left: Vec<String>,
    /// How many are below their full weight.
    pub warming: usize,
}

impl PoolKeeper {
    /// Starts with an empty pool whose ring has `points` virtual nodes for each unit of weight.
    #[must_use]
    pub fn new(points: u32, warmup: Warmup) -> Self {
        let warmup = Warmup { steps: warmup.steps.max(1), ..warmup };
        let pool = Arc::new(PoolSnapshot::empty(points));
        Self {
            points,
            warmup,
            pool,
            members: Vec::new(),
            known: HashMap::new(),
            founded: None,
            stepped: None,
        }
    }

    /// Returns the current state.
    #[must_use]
    pub fn pool(&self) -> Arc<PoolSnapshot> {
        Arc::clone(&self.pool)
    }

    /// Takes over what the source says now; `None` if nothing changes.
    ///
    /// # Errors
    /// They do not make a pool; the one before stays.
    pub fn update(
        &mut self,
        mut endpoints: Vec<Endpoint>,
        now: Instant,
    ) -> Result<Option<Change>, PoolError> {
        endpoints.sort_by(|a, b| a.name.cmp(&b.name));
        if endpoints == self.members {
            return Ok(None);
        }
        PoolSnapshot::check(&endpoints)?;
        let before = std::mem::replace(&mut self.members, endpoints);
        let was: HashSet<EndpointId> = before.iter().map(Endpoint::id).collect();
        if before.is_empty() {
            self.founded = Some(now);
        }
        // The pods of a new pool become ready one after the other: they are all as cold as the first.
        let founding = self.founded.is_some_and(|founded| now < founded + self.warmup.time);
        let joined_at = (!before.is_empty() && !founding).then_some(now);
        let mut joined = Vec::new();
        let mut is = HashSet::with_capacity(self.members.len());
        for member in &self.members {
            let id = member.id();
            is.insert(id);
            if was.contains(&id) {
                continue;
            }
            joined.push(member.name.clone());
            let known = self.known.entry(id).or_insert(Known { joined: joined_at, left: None });
            // It goes on from where it was: what it did not serve meanwhile did not warm it.
            if let Some(left) = known.left.take() {
                known.joined = known.joined.map(|joined| joined + now.duration_since(left));
            }
        }
        let mut left = Vec::new();
        for endpoint in &before {
            let id = endpoint.id();
            if !is.contains(&id) {
                left.push(endpoint.name.clone());
                if let Some(known) = self.known.get_mut(&id) {
                    known.left = Some(now);
                }
            }
        }
        #[expect(clippy::disallowed_methods, reason = "what goes does not depend on the order")]
        self.known.retain(|_, known| known.left.is_none_or(|left| now < left + REMEMBERED));
        // Where nobody is warm there is nothing to protect, and the coldest must not get what the others leave.
        let ids: Vec<EndpointId> = self.members.iter().map(Endpoint::id).collect();
        if ids.iter().all(|id| self.step(*id, now) < self.warmup.steps) {
            for id in &ids {
                self.known.entry(*id).and_modify(|known| known.joined = None);
            }
        }
        Ok(Some(self.publish(joined, left, now)))
    }

    /// Raises the weights of those that warm up; `None` if no step is due.
    pub fn tick(&mut self, now: Instant) -> Option<Change> {
        let due = self.members.iter().zip(self.pool.endpoints()).any(|(member, current)| {
            debug_assert_eq!(member.name, current.name);
            self.weight(member, now) != current.weight
        });
        due.then(|| {
            self.stepped = Some(now);
            self.publish(Vec::new(), Vec::new(), now)
        })
    }

    /// Tells when the next step is due.
    #[must_use]
    pub fn next_tick(&self, now: Instant) -> Option<Instant> {
        let next = |member: &Endpoint| {
            let step = self.step(member.id(), now);
            let joined = self.known.get(&member.id())?.joined?;
            (step < self.warmup.steps)
                .then(|| joined + self.warmup.time * step / (self.warmup.steps - 1))
        };
        let due = self.members.iter().filter_map(next).min()?;
        let apart = self.warmup.time / (self.warmup.steps - 1).max(1);
        Some(self.stepped.map_or(due, |stepped| due.max(stepped + apart)))
    }

    fn publish(&mut self, joined: Vec<String>, left: Vec<String>, now: Instant) -> Change {
        let endpoints: Vec<Endpoint> = self
            .members
            .iter()
            .map(|member| Endpoint { weight: self.weight(member, now), ..member.clone() })
            .collect();
        let warming = self
            .members
            .iter()
            .filter(|member| self.step(member.id(), now) < self.warmup.steps)
            .count();
        let pool = PoolSnapshot::new(self.pool.version() + 1, endpoints, self.points)
            .expect("the members were checked when they came");
        self.pool = Arc::new(pool);
        Change { pool: self.pool(), joined, left, warming }
    }

    fn weight(&self, member: &Endpoint, now: Instant) -> f64 {
        let step = self.step(member.id(), now);
        if step == self.warmup.steps {
            member.weight
        } else {
            member.weight * f64::from(step) / f64::from(self.warmup.steps)
        }
    }

    /// Returns the step that an endpoint is on, from 1 to `warmup.steps`.
    fn step(&self, id: EndpointId, now: Instant) -> u32 {
        let steps = self.warmup.steps;
        let Some(joined) = self.known.get(&id).and_then(|known| known.joined) else {
            return steps;
        };
        let age = now.saturating_duration_since(joined);
        if age >= self.warmup.time {
            return steps;
        }
        // The first step is taken at once, and the last at the end of the time.
        let passed = age.as_nanos() * u128::from(steps - 1) / self.warmup.time.as_nanos();
        u32::try_from(passed).unwrap_or(steps).saturating_add(1).min(steps)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::index::hash;

    const WARMUP: Warmup = Warmup { time: Duration::from_secs(90), steps: 10 };

    #[expect(
        clippy::disallowed_methods,
        reason = "any instant will do, and there is no other way to one"
    )]
    fn start() -> Instant {
        Instant::now()
    }

    fn endpoint(n: u8, instance: &str) -> Endpoint {
        let address = format!("10.0.0.{n}:8000").parse().unwrap();
        Endpoint { instance: instance.to_owned(), ..Endpoint::new(format!("llm-{n}"), address) }
    }

    fn endpoints(of: impl IntoIterator<Item = u8>) -> Vec<Endpoint> {
        of.into_iter().map(|n| endpoint(n, "first")).collect()
    }

    fn weight_of(pool: &PoolSnapshot, name: &str) -> Option<f64> {
        pool.endpoints().iter().find(|it| it.name == name).map(|it| it.weight)
    }

    fn home(pool: &PoolSnapshot, key: u64) -> &str {
        &pool.endpoint(pool.ring().home(key).unwrap()).name
    }

    /// A pool that has been at work for long.
    fn at_work(of: impl IntoIterator<Item = u8>) -> (PoolKeeper, Instant) {
        let (mut keeper, start) = (PoolKeeper::new(100, WARMUP), start());
        let change = keeper.update(endpoints(of), start).unwrap().unwrap();
        assert_eq!(change.warming, 0);
        assert_eq!(keeper.next_tick(start), None);
        (keeper, start + WARMUP.time)
    }

    #[test]
    fn the_first_endpoints_are_warm_and_a_newcomer_rises_in_steps() {
        let (mut keeper, start) = at_work([1, 2]);
        let change = keeper.update(endpoints([1, 2, 3]), start).unwrap().unwrap();
        assert_eq!((change.joined, change.warming), (vec!["llm-3".to_owned()], 1));
        let mut seen = vec![weight_of(&change.pool, "llm-3").unwrap()];
        let mut now = start;
        while let Some(next) = keeper.next_tick(now) {
            assert!(next > now && keeper.tick(now).is_none());
            now = next;
            seen.push(weight_of(&keeper.tick(now).unwrap().pool, "llm-3").unwrap());
        }
        assert_eq!(seen, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]);
        assert_eq!(now - start, WARMUP.time);
        assert_eq!(keeper.update(endpoints([3, 2, 1]), now).unwrap().map(|_| ()), None);
    }

    #[test]
    fn an_endpoint_that_flaps_is_as_warm_as_it_was_and_its_successor_is_not() {
        let (mut keeper, start) = at_work([1, 2]);
        keeper.update(endpoints([1]), start).unwrap();
        let change = keeper.update(endpoints([1, 2]), start).unwrap().unwrap();
        assert_eq!(weight_of(&change.pool, "llm-2"), Some(1.0));
        let change = keeper.update(vec![endpoint(1, "first"), endpoint(2, "second")], start);
        let change = change.unwrap().unwrap();
        assert_eq!(
            (change.joined, change.left),
            (vec!["llm-2".to_owned()], vec!["llm-2".to_owned()])
        );
        assert_eq!(weight_of(&change.pool, "llm-2"), Some(0.1));
    }

    #[test]
    fn time_away_warms_nobody() {
        let (mut keeper, start) = at_work([1]);
        let second = Duration::from_secs(1);
        keeper.update(endpoints([1, 2]), start).unwrap();
        keeper.update(endpoints([1]), start + second).unwrap();
        let change = keeper.update(endpoints([1, 2]), start + 300 * second).unwrap().unwrap();
        assert_eq!(weight_of(&change.pool, "llm-2"), Some(0.1));
    }

    #[test]
    fn the_coldest_does_not_get_what_the_others_leave() {
        // A StatefulSet of two is rolled: the second is replaced, and while it warms up the first goes.
        let (mut keeper, start) = at_work([0, 1]);
        let second = Duration::from_secs(1);
        keeper.update(vec![endpoint(0, "old"), endpoint(1, "new")], start).unwrap();
        let change = keeper.update(vec![endpoint(1, "new")], start + second).unwrap().unwrap();
        assert_eq!(weight_of(&change.pool, "llm-1"), Some(1.0));
        let both = vec![endpoint(0, "new"), endpoint(1, "new")];
        let change = keeper.update(both, start + 6 * second).unwrap().unwrap();
        assert_eq!(weight_of(&change.pool, "llm-0"), Some(0.1));
        assert_eq!(weight_of(&change.pool, "llm-1"), Some(1.0));
        // The pods of a new pool become ready one after the other.
        let (mut keeper, start) = (PoolKeeper::new(100, WARMUP), self::start());
        for n in 1..5 {
            keeper.update(endpoints(0..n), start + u32::from(n) * second).unwrap();
        }
        assert!(keeper.pool().endpoints().iter().all(|it| it.weight == 1.0));
    }

    #[test]
    fn all_that_warm_up_take_their_steps_together() {
        let (mut keeper, start) = at_work([0]);
        for n in 1..9 {
            let now = start + Duration::from_secs(u64::from(n));
            keeper.update(endpoints(0..=n), now).unwrap();
        }
        let (mut now, mut steps) = (start + Duration::from_secs(9), 0);
        while let Some(next) = keeper.next_tick(now) {
            now = next;
            steps += u32::from(keeper.tick(now).is_some());
        }
        assert!(steps <= 11 && keeper.pool().weight() == 9.0, "{steps}");
    }

    #[test]
    fn what_is_no_pool_changes_nothing() {
        let (mut keeper, start) = (PoolKeeper::new(100, WARMUP), start());
        keeper.update(endpoints([1, 2]), start).unwrap();
        assert!(keeper.update(endpoints([1, 1]), start).is_err());
        assert_eq!(keeper.pool().endpoints().len(), 2);
        assert_eq!(keeper.pool().version(), 1);
    }

    #[test]
    fn an_instance_is_forgotten_in_the_end() {
        let (mut keeper, start) = (PoolKeeper::new(1, WARMUP), start());
        keeper.update(endpoints([1]), start).unwrap();
        for round in 0..50 {
            let now = start + Duration::from_secs(60) * round;
            keeper
                .update(vec![endpoint(1, "first"), endpoint(2, &round.to_string())], now)
                .unwrap();
        }
        assert!(keeper.known.len() <= 13, "{}", keeper.known.len());
    }

    proptest! {
        // Rings are built by the dozen in each case.
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn a_newcomer_takes_a_bounded_part_at_each_step_and_only_it_does(size in 2u8..20, salt: u64) {
            let (mut keeper, start) = at_work(0..size);
            let keys: Vec<u64> = (0..2000u64).map(|i| hash::mix(salt, i)).collect();
            let mut before = keeper.pool();
            keeper.update(endpoints(0..=size), start).unwrap();
            let name = format!("llm-{size}");
            let mut now = start;
            loop {
                let after = keeper.pool();
                let moved = keys.iter().filter(|&&key| home(&before, key) != home(&after, key));
                prop_assert!(moved.clone().all(|&key| home(&after, key) == name));
                // A tenth of its share, and what chance adds to it with ten points a step.
                let (moved, share) = (moved.count() as f64 / 2000.0, 1.0 / f64::from(size));
                prop_assert!(moved < 3.5 * share / 10.0 + 0.01, "{moved} of {share}");
                let Some(next) = keeper.next_tick(now) else { break };
                (now, before) = (next, after);
                keeper.tick(now);
            }
        }
    }
}
