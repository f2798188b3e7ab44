//! A consistent-hash ring with virtual nodes (Karger 1997): a membership change moves only the changed member's keys.

use super::hash;

/// The points of all members, sorted by hash. Built when membership changes, never for a request.
#[derive(Debug, Clone, Default)]
pub struct HashRing {
    /// Point hashes, ascending. Kept apart from the owners so that the binary search touches few cache lines.
    hashes: Vec<u64>,
    owners: Vec<u32>,
    members: usize,
}

/// What a member brings to the ring.
#[derive(Debug, Clone, Copy)]
pub struct Member<'a> {
    /// The name that is hashed; it must not change while the member keeps its cache.
    pub name: &'a str,
    /// Relative capacity; a member gets `round(points × weight)` points, at least one.
    pub weight: f64,
}

impl HashRing {
    /// Places `points` virtual nodes for each unit of weight; slot `i` is the `i`th member.
    #[must_use]
    pub fn new<'a>(members: impl IntoIterator<Item = Member<'a>>, points: u32) -> Self {
        let mut placed: Vec<(u64, u32)> = Vec::new();
        let mut count = 0u32;
        for member in members {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "weights are validated: positive and at most 100, so a member has few thousand points"
            )]
            let own = (f64::from(points) * member.weight).round().max(1.0) as u64;
            placed.extend((0..own).map(|i| (hash::seeded(member.name.as_bytes(), i), count)));
            count += 1;
        }
        placed.sort_unstable();
        Self {
            hashes: placed.iter().map(|&(hash, _)| hash).collect(),
            owners: placed.iter().map(|&(_, owner)| owner).collect(),
            members: count as usize,
        }
    }

    /// Yields each member once, clockwise from `key`: its home first.
    #[must_use]
    pub fn walk(&self, key: u64) -> Walk<'_> {
        let start = self.hashes.partition_point(|&hash| hash <= key);
        Walk { ring: self, at: start, left: self.members, seen: Seen::default() }
    }

    /// Returns the first member clockwise from `key`, or `None` on an empty ring.
    #[must_use]
    pub fn home(&self, key: u64) -> Option<u32> {
        self.walk(key).next()
    }

    /// Returns the share of the key space that each member owns; the shares add up to 1.
    #[must_use]
    pub fn shares(&self) -> Vec<f64> {
        let mut shares = vec![0.0; self.members];
        let Some(&last) = self.hashes.last() else {
            return shares;
        };
        let mut previous = last;
        for (&point, &owner) in self.hashes.iter().zip(&self.owners) {
            // A key in (previous, point] belongs to this point; the first arc wraps around zero.
            #[expect(clippy::cast_precision_loss, reason = "a share needs no more than 53 bits")]
            let arc = point.wrapping_sub(previous) as f64 / u64::MAX as f64;
            shares[owner as usize] += if self.hashes.len() == 1 { 1.0 } else { arc };
            previous = point;
        }
        shares
    }
}

/// The members clockwise from a key, each once.
#[derive(Debug)]
pub struct Walk<'a> {
    ring: &'a HashRing,
    at: usize,
    left: usize,
    seen: Seen,
}

impl Iterator for Walk<'_> {
    type Item = u32;

    fn next(&mut self) -> Option<u32> {
        if self.left == 0 {
            return None;
        }
        loop {
            if self.at == self.ring.owners.len() {
                self.at = 0;
            }
            let owner = self.ring.owners[self.at];
            self.at += 1;
            if self.seen.insert(owner, self.ring.members) {
                self.left -= 1;
                return Some(owner);
            }
        }
    }
}

/// A set of slots that allocates only beyond 128 of them: most pools are smaller, and most walks end at the first step.
#[derive(Debug, Default)]
struct Seen {
    small: u128,
    large: Vec<u64>,
}

impl Seen {
    fn insert(&mut self, slot: u32, members: usize) -> bool {
        if members <= 128 {
            let bit = 1u128 << slot;
            let new = self.small & bit == 0;
            self.small |= bit;
            return new;
        }
        if self.large.is_empty() {
            self.large = vec![0; members.div_ceil(64)];
        }
        let word = &mut self.large[slot as usize / 64];
        let bit = 1u64 << (slot % 64);
        let new = *word & bit == 0;
        *word |= bit;
        new
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ring(names: &[String]) -> HashRing {
        HashRing::new(names.iter().map(|name| Member { name, weight: 1.0 }), 100)
    }

    fn names(range: std::ops::Range<usize>) -> Vec<String> {
        range.map(|i| format!("llm-{i}")).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn removing_a_member_moves_only_its_own_keys(n in 2usize..12, gone in 0usize..12, keys in prop::collection::vec(any::<u64>(), 50)) {
            let gone = gone % n;
            let all = names(0..n);
            let mut rest = all.clone();
            let removed = rest.remove(gone);
            let (before, after) = (ring(&all), ring(&rest));
            for key in keys {
                let was = &all[before.home(key).unwrap() as usize];
                let is = &rest[after.home(key).unwrap() as usize];
                prop_assert!(was == is || *was == removed);
            }
        }

        #[test]
        fn a_walk_yields_every_member_once(n in 1usize..200, key in any::<u64>()) {
            let ring = ring(&names(0..n));
            let mut slots: Vec<u32> = ring.walk(key).collect();
            prop_assert_eq!(slots.first().copied(), ring.home(key));
            slots.sort_unstable();
            prop_assert_eq!(slots, (0..u32::try_from(n).unwrap()).collect::<Vec<_>>());
        }
    }

    #[test]
    fn an_empty_ring_has_no_home() {
        assert_eq!(HashRing::new([], 100).home(7), None);
    }

    #[test]
    fn the_ring_depends_on_the_member_set_and_not_on_their_order() {
        let (forward, mut reversed) = (names(0..9), names(0..9));
        reversed.reverse();
        let (a, b) = (ring(&forward), ring(&reversed));
        for key in (0..1000u64).map(|i| hash::hash(&i.to_le_bytes())) {
            assert_eq!(
                forward[a.home(key).unwrap() as usize],
                reversed[b.home(key).unwrap() as usize]
            );
        }
    }

    #[test]
    fn shares_add_up_and_follow_the_weights() {
        let ring = HashRing::new(
            [Member { name: "a", weight: 1.0 }, Member { name: "b", weight: 3.0 }],
            1000,
        );
        let shares = ring.shares();
        assert!((shares.iter().sum::<f64>() - 1.0).abs() < 1e-9);
        assert!((shares[1] - 0.75).abs() < 0.03, "{shares:?}");
    }
}
