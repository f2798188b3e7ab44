//! `llm-ring ring`: what hashing does to the endpoints, in numbers.

use std::fmt::Write as _;
use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use super::{Output, print};
use crate::config;
use crate::discovery;
use crate::index::hash;
use crate::index::rendezvous::Rendezvous;
use crate::index::ring::{HashRing, Member};
use crate::pool::PoolSnapshot;

#[derive(Debug, Args)]
pub(super) struct Ring {
    /// How many endpoints to make up, named llm-0, llm-1, ...
    #[arg(long, short = 'n', value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    count: u32,
    /// Take the endpoints and weights of this file instead
    #[arg(long, short, value_name = "FILE")]
    endpoints: Option<PathBuf>,
    /// Virtual nodes for each unit of weight [default: ring.points of the configuration]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    points: Option<u32>,
    /// Configuration with ring.points
    #[arg(long, short, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Keys to count with
    #[arg(long, value_name = "N", default_value_t = 100_000, value_parser = clap::value_parser!(u32).range(1..=100_000_000))]
    keys: u32,
    /// Conversation ids to look up
    #[arg(value_name = "ID")]
    ids: Vec<String>,
    /// How to print
    #[arg(long, short, value_enum, default_value_t = Output::Text)]
    output: Output,
}

/// What the ring looks like.
#[derive(Debug, Serialize)]
struct Report {
    points: u32,
    endpoints: Vec<Share>,
    /// Standard deviation of the shares for their weight, over their mean.
    spread: f64,
    busiest_over_average: f64,
    keys: u32,
    moved: Vec<Moved>,
    lookups: Vec<Lookup>,
}

#[derive(Debug, Serialize)]
struct Share {
    name: String,
    weight: f64,
    /// Share of the key space.
    share: f64,
    /// The same over the share that its weight deserves.
    of_fair: f64,
}

/// Share of keys that go elsewhere after a change.
#[derive(Debug, Serialize)]
struct Moved {
    change: String,
    ring: f64,
    rendezvous: f64,
    mod_n: f64,
    /// The least that any method must move.
    least: f64,
}

#[derive(Debug, Serialize)]
struct Lookup {
    id: String,
    key: String,
    /// Endpoints clockwise: home first.
    order: Vec<String>,
}

type Named = (String, f64);

/// A ring of more points takes gigabytes, and shows nothing new.
const MOST_POINTS: u64 = 10_000_000;

impl Ring {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let config = config::load(
            self.config.as_deref().map(config::File::read).transpose()?,
            &Vec::new(),
            &Vec::new(),
        )?
        .config;
        let points = self.points.unwrap_or(config.ring.points.get());
        anyhow::ensure!(
            self.endpoints.is_some() || u64::from(self.count) * u64::from(points) <= MOST_POINTS,
            "{} endpoints of {points} points are more than this tool draws ({MOST_POINTS} points)",
            self.count
        );
        let members: Vec<Named> = match &self.endpoints {
            None => (0..self.count).map(|i| (format!("llm-{i}"), 1.0)).collect(),
            Some(file) => {
                let pool = PoolSnapshot::new(
                    0,
                    discovery::file::read(file).map_err(anyhow::Error::msg)?,
                    points,
                )?;
                anyhow::ensure!(
                    !pool.endpoints().is_empty(),
                    "{}: holds no endpoints",
                    file.display()
                );
                pool.endpoints()
                    .iter()
                    .map(|endpoint| (endpoint.name.clone(), endpoint.weight))
                    .collect()
            }
        };
        let report = report(&members, points, self.keys, &self.ids);
        match self.output {
            Output::Json => print(&(serde_json::to_string_pretty(&report)? + "\n")),
            Output::Text => print(&text(&report)),
        }
    }
}

fn borrowed(members: &[Named]) -> impl Iterator<Item = Member<'_>> {
    members.iter().map(|(name, weight)| Member { name, weight: *weight })
}

#[expect(clippy::cast_precision_loss, reason = "counts of keys and endpoints")]
fn report(members: &[Named], points: u32, keys: u32, ids: &[String]) -> Report {
    let ring = HashRing::new(borrowed(members), points);
    let weight: f64 = members.iter().map(|(_, weight)| weight).sum();
    let endpoints: Vec<Share> = members
        .iter()
        .zip(ring.shares())
        .map(|((name, own), share)| Share {
            name: name.clone(),
            weight: *own,
            share: rounded(share),
            of_fair: rounded(share * weight / own),
        })
        .collect();
    let n = endpoints.len() as f64;
    let mean = endpoints.iter().map(|share| share.of_fair).sum::<f64>() / n;
    let variance = endpoints.iter().map(|share| (share.of_fair - mean).powi(2)).sum::<f64>() / n;

    // The next name in the row, as a StatefulSet would give it; past names that a file may have taken.
    let mut joined = members.to_vec();
    let name = (members.len()..)
        .map(|i| format!("llm-{i}"))
        .find(|name| members.iter().all(|(m, _)| m != name));
    joined.extend(name.map(|name| (name, 1.0)));
    let mut changes = vec![moved(members, &joined, points, keys)];
    if members.len() > 1 {
        changes.push(moved(members, &members[..members.len() - 1], points, keys));
    }
    let lookups = ids
        .iter()
        .map(|id| {
            let key = hash::hash(id.as_bytes());
            let order = ring.walk(key).map(|slot| members[slot as usize].0.clone()).collect();
            Lookup { id: id.clone(), key: format!("{key:016x}"), order }
        })
        .collect();
    Report {
        points,
        spread: rounded(variance.sqrt() / mean),
        busiest_over_average: rounded(
            endpoints.iter().map(|share| share.of_fair).fold(0.0, f64::max),
        ),
        endpoints,
        keys,
        moved: changes,
        lookups,
    }
}

/// Counts the keys that change their endpoint between two memberships, under three ways of hashing.
fn moved(before: &[Named], after: &[Named], points: u32, keys: u32) -> Moved {
    let rings = [before, after].map(|members| HashRing::new(borrowed(members), points));
    let rendezvous = [before, after].map(|members| Rendezvous::new(borrowed(members)));
    let lists = [before, after];
    let (mut by_ring, mut by_rendezvous, mut by_mod) = (0u32, 0u32, 0u32);
    for key in (0..keys).map(|i| hash::hash(&i.to_le_bytes())) {
        let differs = |of: &dyn Fn(usize) -> Option<u32>| {
            let name = |side: usize| of(side).map(|slot| lists[side][slot as usize].0.as_str());
            u32::from(name(0) != name(1))
        };
        by_ring += differs(&|side| rings[side].home(key));
        by_rendezvous += differs(&|side| rendezvous[side].top(key, 1, |_| true).first().copied());
        by_mod += differs(&|side| u32::try_from(key % lists[side].len() as u64).ok());
    }
    let total = |members: &[Named]| members.iter().map(|(_, weight)| weight).sum::<f64>();
    let (few, many) = (total(before).min(total(after)), total(before).max(total(after)));
    let share = |count: u32| rounded(f64::from(count) / f64::from(keys));
    let verb = if after.len() > before.len() { "joins" } else { "leaves" };
    let who = before.iter().chain(after).find(|m| !(before.contains(m) && after.contains(m)));
    let who = who.map_or("", |(name, _)| name.as_str());
    Moved {
        change: format!("{who} {verb} ({} to {} endpoints)", before.len(), after.len()),
        ring: share(by_ring),
        rendezvous: share(by_rendezvous),
        mod_n: share(by_mod),
        least: rounded((many - few) / many),
    }
}

fn rounded(x: f64) -> f64 {
    (x * 10_000.0).round() / 10_000.0
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

fn text(report: &Report) -> String {
    let mut out = String::new();
    const SHOWN: usize = 40;
    let _ = writeln!(
        out,
        "{} endpoints, {} points for each unit of weight\n",
        report.endpoints.len(),
        report.points
    );
    let width = report.endpoints.iter().map(|share| share.name.len()).max().unwrap_or(0).max(8);
    let _ = writeln!(out, "{:<width$}  weight   share   of its fair share", "endpoint");
    for share in report.endpoints.iter().take(SHOWN) {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a bar of a few characters"
        )]
        let bar = "█".repeat((share.of_fair * 20.0).round() as usize);
        let _ = writeln!(
            out,
            "{:<width$}  {:>6}  {:>6}  {:>7}  {bar}",
            share.name,
            share.weight,
            percent(share.share),
            percent(share.of_fair)
        );
    }
    if report.endpoints.len() > SHOWN {
        let _ = writeln!(out, "... and {} more", report.endpoints.len() - SHOWN);
    }
    let _ = writeln!(
        out,
        "\nspread {} (standard deviation over mean), busiest over average {:.2}",
        percent(report.spread),
        report.busiest_over_average
    );
    let _ = writeln!(out, "\nkeys that move ({} keys)", report.keys);
    let width = report.moved.iter().map(|moved| moved.change.len()).max().unwrap_or(0);
    let _ = writeln!(out, "{:<width$}     ring  rendezvous    mod-n  the least possible", "");
    for moved in &report.moved {
        let _ = writeln!(
            out,
            "{:<width$}  {:>7}  {:>10}  {:>7}  {:>18}",
            moved.change,
            percent(moved.ring),
            percent(moved.rendezvous),
            percent(moved.mod_n),
            percent(moved.least)
        );
    }
    if !report.lookups.is_empty() {
        let _ = writeln!(out, "\nwhere conversations go: home first, then clockwise");
        for lookup in &report.lookups {
            let _ = writeln!(out, "{}  →  {}", lookup.id, lookup.order.join(" → "));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made_up(n: usize) -> Vec<Named> {
        (0..n).map(|i| (format!("llm-{i}"), 1.0)).collect()
    }

    #[test]
    fn a_fifth_endpoint_moves_a_fifth_of_the_keys_on_a_ring_and_four_fifths_under_mod_n() {
        let report = report(&made_up(4), 100, 20_000, &[]);
        let join = &report.moved[0];
        assert!((join.ring - 0.2).abs() < 0.06, "{join:?}");
        assert!((join.rendezvous - 0.2).abs() < 0.02, "{join:?}");
        assert!((join.mod_n - 0.8).abs() < 0.02, "{join:?}");
    }

    #[test]
    fn a_hundred_points_spread_keys_within_about_a_tenth() {
        let spread = report(&made_up(100), 100, 1, &[]).spread;
        assert!((0.07..0.13).contains(&spread), "{spread}");
    }

    #[test]
    fn a_single_endpoint_has_everything() {
        let report = report(&made_up(1), 100, 100, &["a".to_owned()]);
        assert_eq!(report.endpoints[0].share, 1.0);
        assert_eq!(report.lookups[0].order, ["llm-0"]);
    }
}
