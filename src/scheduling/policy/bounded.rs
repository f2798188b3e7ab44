//! `bounded`: consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2016), weights in the cap.

use serde::{Deserialize, Serialize};

use super::plain;
use crate::scheduling::decision::Verdict;
use crate::scheduling::{Choice, Cx, Policy, Reason, Step, Trace, Unit};

/// Walks the ring from home and takes the first endpoint whose load with this request stays within
/// `(1 + epsilon)` times its fair share; an idle endpoint always takes it.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Bounded {
    /// What load is counted in: `requests` or `tokens`.
    pub load: Unit,
    /// Slack over the fair share, above 0.
    pub epsilon: Slack,
}

/// Slack over a fair share: a finite number above 0.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize)]
#[serde(try_from = "f64", into = "f64")]
pub struct Slack(f64);

/// The slack with which most published comparisons are made.
pub(super) const EPSILON: Slack = Slack(0.25);

impl Slack {
    /// Takes a slack whose validity is plain to see.
    pub(super) const fn constant(epsilon: f64) -> Self {
        Self(epsilon)
    }

    /// Returns ε.
    #[must_use]
    pub fn get(self) -> f64 {
        self.0
    }
}

impl TryFrom<f64> for Slack {
    type Error = String;

    fn try_from(epsilon: f64) -> Result<Self, String> {
        if epsilon.is_finite() && epsilon > 0.0 {
            Ok(Self(epsilon))
        } else {
            Err(format!(
                "epsilon is a finite number above 0 (0.25 allows a quarter over the average), not {epsilon}"
            ))
        }
    }
}

impl From<Slack> for f64 {
    fn from(slack: Slack) -> Self {
        slack.0
    }
}

impl Default for Bounded {
    fn default() -> Self {
        Self { load: Unit::Requests, epsilon: EPSILON }
    }
}

impl Policy for Bounded {
    fn choose(&self, cx: &Cx<'_>, trace: &mut Trace) -> Choice {
        let cost = match self.load {
            Unit::Requests => 1,
            Unit::Tokens => cx.prompt_tokens.saturating_add(cx.max_tokens),
        };
        let bound = Bound::new(cx, self.load, cost, self.epsilon);
        let home = cx.home();
        trace.steps.push(Step::Cost {
            endpoint: home,
            new_tokens: cx.prompt_tokens,
            max_tokens: cx.max_tokens,
            cost,
            unit: self.load,
        });
        trace.steps.push(bound.step());
        match bound.first_with_room(cx, cx.ring_order(), trace) {
            Some(slot) if slot == home => plain(slot, Reason::Home),
            Some(slot) => plain(slot, Reason::Overflow),
            None => least_loaded(cx, self.load, trace),
        }
    }
}

/// Full endpoints that the walk passes before it asks whether any has room.
const WALKED: usize = 8;

/// What the endpoints may carry, one request included.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bound {
    unit: Unit,
    cost: u64,
    epsilon: f64,
    total: u64,
    average: f64,
    floor: u64,
}

impl Bound {
    /// The bound for a request that would add `cost` to whichever endpoint takes it.
    pub(super) fn new(cx: &Cx<'_>, unit: Unit, cost: u64, epsilon: Slack) -> Self {
        let total = cx.total(unit).saturating_add(cost);
        #[expect(clippy::cast_precision_loss, reason = "loads stay far below 2^52 tokens")]
        let average = total as f64 / cx.candidates.len() as f64;
        Self { unit, cost, epsilon: epsilon.get(), total, average, floor: 0 }
    }

    /// Sets what an endpoint of average weight may always carry.
    pub(super) fn with_floor(self, floor: u64) -> Self {
        Self { floor, ..self }
    }

    /// Tells whether the floor is above what the average allows.
    pub(super) fn is_floor(&self) -> bool {
        #[expect(clippy::cast_precision_loss, reason = "a floor is a few thousand tokens")]
        let floor = self.floor as f64;
        floor > (1.0 + self.epsilon) * self.average
    }

    /// Returns what an endpoint of `weight` times the average weight may carry.
    pub(super) fn cap(&self, weight: f64) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "a floor is a few thousand tokens")]
        let cap = ((1.0 + self.epsilon) * self.average).max(self.floor as f64) * weight;
        match self.unit {
            // A cap of 5 that arithmetic made 5.000000001 is 5.
            Unit::Requests => (cap - 1e-6).ceil(),
            Unit::Tokens => cap,
        }
    }

    /// Finds the first endpoint in `order` that takes the request, and writes the tests down.
    ///
    /// After a few that are full it looks at all before it walks on: in a pool that is full everywhere the walk
    /// would pass each virtual node.
    pub(super) fn first_with_room(
        &self,
        cx: &Cx<'_>,
        order: impl Iterator<Item = u32>,
        trace: &mut Trace,
    ) -> Option<u32> {
        for (tested, slot) in order.enumerate() {
            if tested == WALKED && self.all_full(cx) {
                return None;
            }
            let weight = cx.relative_weight(slot);
            if self.test(cx, slot, (self.cap(weight), weight), trace) != Verdict::Over {
                return Some(slot);
            }
        }
        None
    }

    /// Tests an endpoint of that relative weight against its cap, and writes the test down.
    pub(super) fn test(
        &self,
        cx: &Cx<'_>,
        slot: u32,
        (cap, weight): (f64, f64),
        trace: &mut Trace,
    ) -> Verdict {
        let load = cx.load(slot, self.unit);
        let verdict = self.verdict(load, cap);
        trace.steps.push(Step::Tested {
            endpoint: slot,
            load,
            cost: self.cost,
            cap,
            weight,
            verdict,
        });
        verdict
    }

    fn verdict(&self, load: u64, cap: f64) -> Verdict {
        #[expect(clippy::cast_precision_loss, reason = "loads stay far below 2^52 tokens")]
        if load.saturating_add(self.cost) as f64 <= cap {
            Verdict::Fits
        } else if load == 0 {
            Verdict::Idle
        } else {
            Verdict::Over
        }
    }

    fn all_full(&self, cx: &Cx<'_>) -> bool {
        cx.candidates.iter().all(|slot| {
            let cap = self.cap(cx.relative_weight(slot));
            self.verdict(cx.load(slot, self.unit), cap) == Verdict::Over
        })
    }

    /// Returns the bound as a step of the trace.
    pub(super) fn step(&self) -> Step {
        Step::Capacity {
            total: self.total,
            average: self.average,
            epsilon: self.epsilon,
            cap: self.cap(1.0),
            floor: self.is_floor().then_some(self.floor),
            unit: self.unit,
        }
    }
}

/// Takes the least loaded candidate when none has room; equal ones in the order of the ring.
pub(super) fn least_loaded(cx: &Cx<'_>, unit: Unit, trace: &mut Trace) -> Choice {
    let least = cx.least_loaded(unit, |_| 0);
    let level = cx.relative_load(least, unit);
    let as_light = |slot: &u32| cx.relative_load(*slot, unit) <= level;
    // Equal ones in the order of the ring, so that pickers agree; the walk is long, so only where there are any.
    let tied = cx.candidates.iter().filter(as_light).nth(1).is_some();
    let slot = if tied { cx.ring_order().find(as_light) } else { None }.unwrap_or(least);
    trace.steps.push(Step::AllOver { endpoint: slot, load: cx.load(slot, unit) });
    plain(slot, Reason::FallbackLeastLoaded)
}
