//! Weighted highest-random-weight (rendezvous) hashing: exact weights, nothing to rebuild, minimal disruption.
//!
//! The score of a member is `w / -ln(u)` with `u` uniform from the hash (Schindelhauer and Schomaker 2005).
//! Within one weight the largest `u` also has the largest score, so one pass compares integers and takes one
//! logarithm a candidate of each weight class instead of one a member: the result is exactly the same.

use super::hash;
use super::ring::Member;

/// The members, grouped by weight.
#[derive(Debug, Clone, Default)]
pub struct Rendezvous {
    classes: Vec<Class>,
}

#[derive(Debug, Clone)]
struct Class {
    weight: f64,
    /// Hash of the member's name, and its slot.
    members: Vec<(u64, u32)>,
}

impl Rendezvous {
    /// Takes the members in slot order.
    #[must_use]
    pub fn new<'a>(members: impl IntoIterator<Item = Member<'a>>) -> Self {
        let mut classes: Vec<Class> = Vec::new();
        for (slot, member) in (0u32..).zip(members) {
            let entry = (hash::hash(member.name.as_bytes()), slot);
            match classes.iter_mut().find(|class| class.weight.total_cmp(&member.weight).is_eq()) {
                Some(class) => class.members.push(entry),
                None => classes.push(Class { weight: member.weight, members: vec![entry] }),
            }
        }
        Self { classes }
    }

    /// Returns the `d` members that score highest for `key` among those `eligible`, best first.
    #[must_use]
    pub fn top(&self, key: u64, d: usize, eligible: impl Fn(u32) -> bool) -> Vec<u32> {
        let mut best: Vec<(f64, u64, u32)> = Vec::new();
        let mut leaders: Vec<(u64, u32)> = Vec::with_capacity(d + 1);
        for class in &self.classes {
            leaders.clear();
            for &(name, slot) in &class.members {
                let draw = hash::mix(name, key);
                if leaders.len() == d && leaders.last().is_some_and(|last| draw <= last.0) {
                    continue;
                }
                if eligible(slot) {
                    let at = leaders.partition_point(|leader| leader.0 >= draw);
                    leaders.insert(at, (draw, slot));
                    leaders.truncate(d);
                }
            }
            best.extend(
                leaders.iter().map(|&(draw, slot)| (score(class.weight, draw), draw, slot)),
            );
        }
        best.sort_by(|a, b| b.0.total_cmp(&a.0).then(b.1.cmp(&a.1)));
        best.truncate(d);
        best.into_iter().map(|(_, _, slot)| slot).collect()
    }
}

/// Scores a draw in (0, 1): `w / -ln(u)`.
fn score(weight: f64, draw: u64) -> f64 {
    // 53 bits and a half, so that u is never 0 or 1 and the logarithm is finite and negative.
    #[expect(
        clippy::cast_precision_loss,
        reason = "shifted to 53 bits, which an f64 holds exactly"
    )]
    let u = ((draw >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
    weight / -u.ln()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn members(weights: &[f64]) -> (Vec<String>, Rendezvous) {
        let names: Vec<String> = (0..weights.len()).map(|i| format!("llm-{i}")).collect();
        let rendezvous = Rendezvous::new(
            names.iter().zip(weights).map(|(name, &weight)| Member { name, weight }),
        );
        (names, rendezvous)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]

        #[test]
        fn classes_give_what_scoring_every_member_gives(weights in prop::collection::vec(prop::sample::select(vec![0.5, 1.0, 2.0]), 1..30), key in any::<u64>(), d in 1usize..5) {
            let (names, rendezvous) = members(&weights);
            let mut naive: Vec<(f64, u32)> = (0u32..).zip(names.iter().zip(&weights))
                .map(|(slot, (name, &weight))| (score(weight, hash::mix(hash::hash(name.as_bytes()), key)), slot))
                .collect();
            naive.sort_by(|a, b| b.0.total_cmp(&a.0));
            let naive: Vec<u32> = naive.into_iter().take(d).map(|(_, slot)| slot).collect();
            prop_assert_eq!(rendezvous.top(key, d, |_| true), naive);
        }

        #[test]
        fn an_ineligible_loser_changes_nothing(n in 2usize..20, key in any::<u64>(), out in 0u32..20) {
            let (_, rendezvous) = members(&vec![1.0; n]);
            let winner = rendezvous.top(key, 1, |_| true)[0];
            let out = out % u32::try_from(n).unwrap();
            prop_assume!(out != winner);
            prop_assert_eq!(rendezvous.top(key, 1, |slot| slot != out), vec![winner]);
        }
    }

    #[test]
    fn shares_follow_the_weights() {
        let (_, rendezvous) = members(&[1.0, 1.0, 2.0]);
        let mut counts = [0u32; 3];
        for key in (0..40_000u64).map(|i| hash::hash(&i.to_le_bytes())) {
            counts[rendezvous.top(key, 1, |_| true)[0] as usize] += 1;
        }
        assert!((f64::from(counts[2]) / 40_000.0 - 0.5).abs() < 0.01, "{counts:?}");
    }
}
