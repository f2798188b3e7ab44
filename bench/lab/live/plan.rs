//! What is decided before anything runs: who plays when, and what happens to the pool meanwhile.

use std::collections::BTreeMap;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Result, bail, ensure};

use crate::workload::{Change, What};

/// A change that a command line asks for, such as `20s:+1`, `30s:-1`, `25s:kill:1` or `40s:return:1`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Scaling {
    at: Duration,
    what: Scaled,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scaled {
    More(usize),
    Fewer(usize),
    Kill(usize),
    Return(usize),
}

impl FromStr for Scaling {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "`{text}` is none of `20s:+1` (one more), `30s:-1` (one fewer, which ends what it has), \
                 `25s:kill:1` and `40s:return:1` (of endpoint 1)"
            )
        };
        let number = |text: &str| text.parse::<usize>().or(Err(wrong()));
        let (at, what) = text.split_once(':').ok_or_else(wrong)?;
        let what = if let Some(more) = what.strip_prefix('+') {
            Scaled::More(number(more)?)
        } else if let Some(fewer) = what.strip_prefix('-') {
            Scaled::Fewer(number(fewer)?)
        } else if let Some(which) = what.strip_prefix("kill:") {
            Scaled::Kill(number(which)?)
        } else if let Some(which) = what.strip_prefix("return:") {
            Scaled::Return(number(which)?)
        } else {
            return Err(wrong());
        };
        if matches!(what, Scaled::More(0) | Scaled::Fewer(0)) {
            return Err(wrong());
        }
        Ok(Self { at: humantime::parse_duration(at).or(Err(wrong()))?, what })
    }
}

/// An endpoint that may be chosen: its number, and the process that is it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Member {
    pub(crate) endpoint: usize,
    pub(crate) process: usize,
}

/// The pool over time.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Plan {
    /// Engines that are started before the first request: those that join later are ready by then.
    pub(crate) processes: usize,
    /// Endpoints that there are at one time or another, numbered from 0.
    pub(crate) endpoints: usize,
    pub(crate) start: Vec<Member>,
    pub(crate) steps: Vec<Step>,
}

/// A change, with what it leaves.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Step {
    /// Seconds after the start.
    pub(crate) at: f64,
    pub(crate) members: Vec<Member>,
    /// The process that is killed.
    pub(crate) kill: Option<usize>,
    /// The endpoint that is new or back.
    pub(crate) added: Option<usize>,
}

impl Plan {
    /// Plans the changes that a workload brings with it, its times multiplied by `stretch`.
    ///
    /// # Errors
    /// A change cannot be made with real engines, or leaves none.
    pub(crate) fn of_workload(replicas: usize, changes: &[Change], stretch: f64) -> Result<Self> {
        let mut pool = Pool::of(replicas)?;
        for Change { at, what } in changes {
            let at = at * stretch;
            match *what {
                What::Join(1.0) => pool.join(at),
                What::Join(speed) => {
                    bail!("an endpoint of speed {speed} joins: real engines are all of speed 1")
                }
                What::Leave(endpoint) => pool.go(at, endpoint, false)?,
                What::Crash(endpoint) => pool.go(at, endpoint, true)?,
                What::Return(endpoint) => pool.come_back(at, endpoint)?,
            }
        }
        Ok(pool.plan())
    }

    /// Plans the changes that a command line asks for.
    ///
    /// # Errors
    /// A change is of an endpoint that is not there, or leaves none.
    pub(crate) fn of_scaling(replicas: usize, scaling: &[Scaling]) -> Result<Self> {
        let mut pool = Pool::of(replicas)?;
        let mut scaling = scaling.to_vec();
        scaling.sort_by_key(|it| it.at);
        for Scaling { at, what } in scaling {
            let at = at.as_secs_f64();
            match what {
                Scaled::More(count) => (0..count).for_each(|_| pool.join(at)),
                Scaled::Fewer(count) => {
                    for _ in 0..count {
                        // The last to come is the first to go, as in a StatefulSet.
                        let last = pool.there.keys().next_back().copied().unwrap_or(0);
                        pool.go(at, last, false)?;
                    }
                }
                Scaled::Kill(endpoint) => pool.go(at, endpoint, true)?,
                Scaled::Return(endpoint) => pool.come_back(at, endpoint)?,
            }
        }
        Ok(pool.plan())
    }
}

/// A pool while its changes are planned.
#[derive(Debug)]
struct Pool {
    processes: usize,
    endpoints: usize,
    /// The process of each endpoint that may be chosen.
    there: BTreeMap<usize, usize>,
    /// The processes of endpoints that left and still run.
    left: BTreeMap<usize, usize>,
    start: Vec<Member>,
    steps: Vec<Step>,
}

impl Pool {
    fn of(replicas: usize) -> Result<Self> {
        ensure!(replicas > 0, "there is at least one replica");
        let there: BTreeMap<usize, usize> = (0..replicas).map(|number| (number, number)).collect();
        let (left, steps) = (BTreeMap::new(), Vec::new());
        let start = members(&there);
        Ok(Self { processes: replicas, endpoints: replicas, there, left, start, steps })
    }

    fn step(&mut self, at: f64, kill: Option<usize>, added: Option<usize>) {
        self.steps.push(Step { at, members: members(&self.there), kill, added });
    }

    fn join(&mut self, at: f64) {
        let endpoint = self.endpoints;
        self.there.insert(endpoint, self.processes);
        (self.endpoints, self.processes) = (endpoint + 1, self.processes + 1);
        self.step(at, None, Some(endpoint));
    }

    fn go(&mut self, at: f64, endpoint: usize, killed: bool) -> Result<()> {
        let Some(process) = self.there.remove(&endpoint) else {
            bail!("endpoint {endpoint} is not there after {at} s");
        };
        ensure!(!self.there.is_empty(), "no endpoint is left after {at} s");
        if !killed {
            self.left.insert(endpoint, process);
        }
        self.step(at, killed.then_some(process), None);
        Ok(())
    }

    fn come_back(&mut self, at: f64, endpoint: usize) -> Result<()> {
        ensure!(
            endpoint < self.endpoints && !self.there.contains_key(&endpoint),
            "endpoint {endpoint} has not gone by {at} s, and cannot return"
        );
        let process = self.left.remove(&endpoint).unwrap_or_else(|| {
            self.processes += 1;
            self.processes - 1
        });
        self.there.insert(endpoint, process);
        self.step(at, None, Some(endpoint));
        Ok(())
    }

    fn plan(self) -> Plan {
        let Self { processes, endpoints, start, steps, .. } = self;
        Plan { processes, endpoints, start, steps }
    }
}

fn members(there: &BTreeMap<usize, usize>) -> Vec<Member> {
    there.iter().map(|(&endpoint, &process)| Member { endpoint, process }).collect()
}

/// The order in which policies play with the so manieth seed: each is first as often as any other, second as often, and
/// so on, once there are as many seeds as policies or a multiple of that.
pub(crate) fn order<T>(policies: &[T], seed: usize) -> impl Iterator<Item = &T> {
    let first = seed % policies.len().max(1);
    policies[first..].iter().chain(&policies[..first])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(replicas: usize, scaling: &[&str]) -> Result<Plan> {
        let scaling: Vec<Scaling> = scaling.iter().map(|text| text.parse().unwrap()).collect();
        Plan::of_scaling(replicas, &scaling)
    }

    fn endpoints(step: &Step) -> Vec<usize> {
        step.members.iter().map(|member| member.endpoint).collect()
    }

    #[test]
    fn a_scaling_is_a_time_and_what_happens() {
        let parsed = |text: &str| text.parse::<Scaling>();
        let is = |at, what| Ok(Scaling { at: Duration::from_millis(at), what });
        assert_eq!(parsed("20s:+1"), is(20_000, Scaled::More(1)));
        assert_eq!(parsed("1m 30s:-2"), is(90_000, Scaled::Fewer(2)));
        assert_eq!(parsed("500ms:kill:1"), is(500, Scaled::Kill(1)));
        assert_eq!(parsed("25s:return:0"), is(25_000, Scaled::Return(0)));
        for wrong in ["", "20s", "20:+1", "20s:1", "20s:+0", "20s:+", "20s:kill", "s:+1", "20s:-x"]
        {
            assert!(parsed(wrong).unwrap_err().contains("`20s:+1`"), "{wrong}");
        }
    }

    #[test]
    fn one_more_joins_and_the_last_leaves() {
        let plan = plan(2, &["30s:-1", "20s:+1"]).unwrap();
        assert_eq!((plan.processes, plan.endpoints), (3, 3));
        assert_eq!(plan.steps.iter().map(|it| it.at).collect::<Vec<_>>(), [20.0, 30.0]);
        assert_eq!(
            plan.steps.iter().map(endpoints).collect::<Vec<_>>(),
            [vec![0, 1, 2], vec![0, 1]]
        );
        assert_eq!(plan.steps[0].added, Some(2));
        assert_eq!((plan.steps[1].kill, plan.steps[1].added), (None, None));
    }

    #[test]
    fn who_was_killed_returns_as_another_process_and_who_left_as_the_same() {
        let killed = plan(3, &["10s:kill:1", "20s:return:1"]).unwrap();
        assert_eq!(killed.processes, 4);
        assert_eq!(killed.steps[0].kill, Some(1));
        assert_eq!(killed.steps[1].members[1], Member { endpoint: 1, process: 3 });
        let left = plan(3, &["10s:-1", "20s:return:2"]).unwrap();
        assert_eq!((left.processes, left.steps[0].kill), (3, None));
        assert_eq!(left.steps[1].members[2], Member { endpoint: 2, process: 2 });
    }

    #[test]
    fn what_cannot_be_is_a_clear_error() {
        let error = |scaling: &[&str]| plan(2, scaling).unwrap_err().to_string();
        assert_eq!(error(&["1s:-2"]), "no endpoint is left after 1 s");
        assert_eq!(error(&["1s:kill:2"]), "endpoint 2 is not there after 1 s");
        assert_eq!(error(&["1s:return:0"]), "endpoint 0 has not gone by 1 s, and cannot return");
        assert!(plan(0, &[]).is_err());
        let fast = [Change { at: 1.0, what: What::Join(2.0) }];
        assert!(Plan::of_workload(2, &fast, 1.0).is_err());
    }

    #[test]
    fn the_changes_of_a_workload_are_stretched_with_it() {
        let changes = [
            Change { at: 10.0, what: What::Join(1.0) },
            Change { at: 20.0, what: What::Crash(0) },
            Change { at: 30.0, what: What::Return(0) },
        ];
        let plan = Plan::of_workload(2, &changes, 2.0).unwrap();
        assert_eq!(plan.steps.iter().map(|it| it.at).collect::<Vec<_>>(), [20.0, 40.0, 60.0]);
        assert_eq!((plan.processes, plan.endpoints), (4, 3));
    }

    #[test]
    fn over_as_many_seeds_as_policies_each_is_once_in_every_place() {
        let policies = ["a", "b", "c", "d"];
        let square: Vec<Vec<&str>> =
            (0..4).map(|seed| order(&policies, seed).copied().collect()).collect();
        for place in 0..4 {
            let mut column: Vec<&str> = square.iter().map(|row| row[place]).collect();
            column.sort_unstable();
            assert_eq!(column, policies);
        }
        assert_eq!(order(&policies, 5).copied().collect::<Vec<_>>(), square[1]);
        assert_eq!(order::<u8>(&[], 3).count(), 0);
    }
}
