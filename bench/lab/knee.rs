//! `knee`: the highest rate at which a policy still keeps most requests within the SLO, by halving.

use std::sync::atomic::AtomicBool;

use anyhow::{Context as _, Result, ensure};
use clap::Args;

use crate::chart::short;
use crate::metrics::{Metric, mean};
use crate::report::plain;
use crate::{Runs, grid};

/// Halving ends when the two ends are this close, as a share of the upper one.
const CLOSE: f64 = 0.01;

#[derive(Debug, Args)]
pub(crate) struct Knee {
    #[command(flatten)]
    runs: Runs,
    /// The lowest value of the workload's parameter: where it says `x`, as in `mrqa:x:90`, or else its first
    #[arg(long, value_name = "X")]
    from: f64,
    /// The highest one
    #[arg(long, value_name = "X")]
    to: f64,
    /// The share of requests that is to be within the SLO
    #[arg(long, value_name = "SHARE", default_value_t = 0.95)]
    goodput: f64,
}

/// Where goodput falls below what is asked for.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Found {
    /// It is too low from the start.
    Below,
    /// It holds to the end.
    Above,
    /// It holds at the first value, and no more at the second.
    Between(f64, f64),
}

impl Knee {
    /// Prints a line for each workload and policy. Goodput is taken to fall as the parameter grows.
    ///
    /// # Errors
    /// A run failed, or the ends are none.
    pub(crate) fn run(&self) -> Result<()> {
        let (from, to) = (self.from, self.to);
        ensure!(0.0 < from && from < to && to.is_finite(), "--from {from} --to {to} is no range");
        let stop = grid::stop_on_ctrl_c()?;
        let goodput = plain(self.goodput * 100.0, 3);
        crate::print(&format!("most with goodput of at least {goodput} %, means over seeds\n"))?;
        for workload in &self.runs.workload {
            for policy in &self.runs.policy {
                let found = halve((from, to), |x| {
                    Ok(self.goodput_at(workload, policy, x, &stop)? >= self.goodput)
                })?;
                let said = match found {
                    Found::Below => format!("less than {}", short(from)),
                    Found::Above => format!("more than {}", short(to)),
                    Found::Between(holds, _) => short(holds),
                };
                crate::print(&format!("{workload}  {policy:<32} {said}\n"))?;
            }
        }
        Ok(())
    }

    fn goodput_at(&self, workload: &str, policy: &str, x: f64, stop: &AtomicBool) -> Result<f64> {
        let (runs, _) = self.runs.make_of(&[at(workload, x)], &[policy.to_owned()], stop)?;
        let shares = runs.iter().filter_map(|run| run.get(Metric::Goodput));
        mean(shares).context("no request counts")
    }
}

/// A workload's name with a value for its parameter.
fn at(workload: &str, x: f64) -> String {
    let value = short(x);
    if workload.split(':').skip(1).any(|word| word == "x") {
        let words = workload.split(':');
        words.map(|word| if word == "x" { &value } else { word }).collect::<Vec<_>>().join(":")
    } else {
        format!("{workload}:{value}")
    }
}

/// Halves a range until it is narrow; values are rounded, so that their runs are found again.
fn halve((from, to): (f64, f64), holds: impl Fn(f64) -> Result<bool>) -> Result<Found> {
    if !holds(from)? {
        return Ok(Found::Below);
    }
    if holds(to)? {
        return Ok(Found::Above);
    }
    let (mut low, mut high) = (from, to);
    while high - low > CLOSE * high {
        let middle = (f64::midpoint(low, high) * 1e3).round() / 1e3;
        if middle <= low || middle >= high {
            break;
        }
        if holds(middle)? { low = middle } else { high = middle }
    }
    Ok(Found::Between(low, high))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halving_finds_where_it_ends() {
        let limit = |limit: f64| move |x: f64| Ok(x <= limit);
        assert_eq!(halve((4.0, 30.0), limit(2.0)).unwrap(), Found::Below);
        assert_eq!(halve((4.0, 30.0), limit(30.0)).unwrap(), Found::Above);
        for end in [4.0, 4.01, 11.3, 29.99] {
            let Found::Between(low, high) = halve((4.0, 30.0), limit(end)).unwrap() else {
                panic!("{end}");
            };
            assert!(low <= end && end < high && high - low <= CLOSE * high, "{low} {end} {high}");
        }
        assert!(halve((4.0, 30.0), |_| anyhow::bail!("no")).is_err());
    }

    #[test]
    fn a_value_stands_where_the_name_says() {
        assert_eq!(at("loadaware", 17.0), "loadaware:17");
        assert_eq!(at("mrqa:x:90", 2.5), "mrqa:2.5:90");
    }
}
