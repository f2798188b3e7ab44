//! A compact hash table: open addressing with slots kept in the order of their hashes (ordered linear probing).
//!
//! It grows by an eighth and not by doubling, so at least 70 % of the slots are in use, and because the order of the
//! slots never depends on the size, growing copies straight through and a walk by hash survives any change.

/// A slot of a [`Table`]; small, and with one value that means empty.
pub(super) trait Slot: Copy {
    /// The empty slot.
    const EMPTY: Self;
    /// Whether this is the empty slot.
    fn is_empty(&self) -> bool;
    /// A well mixed hash: slots stand in its order.
    fn order(&self) -> u64;
}

/// Slots beyond the last home, so that probing need not wrap around; the last slot is always empty.
const SPILL: usize = 16;

#[derive(Debug)]
pub(super) struct Table<S> {
    slots: Vec<S>,
    homes: usize,
    len: usize,
}

impl<S> Default for Table<S> {
    fn default() -> Self {
        Self { slots: Vec::new(), homes: 0, len: 0 }
    }
}

impl<S: Slot> Table<S> {
    pub(super) const fn len(&self) -> usize {
        self.len
    }

    /// Bytes held, in use or not.
    pub(super) const fn capacity_bytes(&self) -> usize {
        self.slots.capacity() * size_of::<S>()
    }

    /// Finds the position of the slot of this order for which `is` holds.
    pub(super) fn find(&self, order: u64, is: impl Fn(&S) -> bool) -> Option<usize> {
        if self.homes == 0 {
            return None;
        }
        let mut at = home(order, self.homes);
        loop {
            let slot = self.slots.get(at)?;
            if slot.is_empty() || slot.order() > order {
                return None;
            }
            if slot.order() == order && is(slot) {
                return Some(at);
            }
            at += 1;
        }
    }

    pub(super) fn at(&self, at: usize) -> S {
        self.slots[at]
    }

    /// Replaces the slot at a position by one of the same order.
    pub(super) fn set(&mut self, at: usize, slot: S) {
        self.slots[at] = slot;
    }

    /// Adds a slot; the caller knows that it is not there.
    pub(super) fn insert(&mut self, slot: S) {
        // At most four fifths full.
        if (self.len + 1) * 5 > self.homes * 4 {
            self.resize((self.len + 1) * 45 / 32 + 4);
        }
        let order = slot.order();
        let mut at = home(order, self.homes);
        while !self.slots[at].is_empty() && self.slots[at].order() <= order {
            at += 1;
        }
        let mut end = at;
        while !self.slots[end].is_empty() {
            end += 1;
        }
        if end + 1 == self.slots.len() {
            self.slots.reserve_exact(SPILL);
            self.slots.extend([S::EMPTY; SPILL]);
        }
        self.slots.copy_within(at..end, at + 1);
        self.slots[at] = slot;
        self.len += 1;
    }

    /// Removes the slot at a position.
    pub(super) fn remove(&mut self, at: usize) {
        self.close(at);
        if self.len == 0 {
            *self = Self::default();
        } else if self.len * 5 < self.homes * 2 && self.homes > 64 {
            self.resize(self.len * 45 / 32 + 4);
        }
    }

    fn close(&mut self, at: usize) {
        let mut end = at + 1;
        while !self.slots[end].is_empty() && home(self.slots[end].order(), self.homes) < end {
            end += 1;
        }
        self.slots.copy_within(at + 1..end, at);
        self.slots[end - 1] = S::EMPTY;
        self.len -= 1;
    }

    /// Removes what `dead` tells among the slots from order `from` on, as far as `steps` reach; takes off the steps made.
    ///
    /// Returns the order to go on from, or `None` at the end.
    pub(super) fn sweep(
        &mut self,
        from: u64,
        steps: &mut usize,
        mut dead: impl FnMut(&S) -> bool,
    ) -> Option<u64> {
        if self.homes == 0 {
            return None;
        }
        let mut at = home(from, self.homes);
        let next = loop {
            let Some(slot) = self.slots.get(at) else {
                break None;
            };
            if slot.is_empty() {
                *steps = steps.saturating_sub(1);
                at += 1;
                continue;
            }
            let order = slot.order();
            if order < from {
                at += 1;
                continue;
            }
            if *steps == 0 {
                break Some(order);
            }
            *steps -= 1;
            if dead(slot) {
                self.close(at);
            } else {
                at += 1;
            }
        };
        if self.len == 0 {
            *self = Self::default();
        }
        next
    }

    /// Every slot, in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = &S> {
        self.slots.iter().filter(|slot| !slot.is_empty())
    }

    fn resize(&mut self, homes: usize) {
        let mut slots = Vec::with_capacity(homes + SPILL);
        for slot in self.iter() {
            let at = home(slot.order(), homes).max(slots.len());
            slots.resize(at, S::EMPTY);
            slots.push(*slot);
        }
        let end = (homes + SPILL).max(slots.len() + 1);
        slots.resize(end, S::EMPTY);
        self.slots = slots;
        self.homes = homes;
    }
}

/// Where a slot of this order would stand if there were no others: its share of the way through the table.
#[expect(clippy::cast_possible_truncation, reason = "the product shifted by 64 is below homes")]
const fn home(order: u64, homes: usize) -> usize {
    ((order as u128 * homes as u128) >> 64) as usize
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    impl Slot for u64 {
        const EMPTY: Self = 0;
        fn is_empty(&self) -> bool {
            *self == 0
        }
        fn order(&self) -> u64 {
            *self
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        #[test]
        fn it_is_a_set(steps in prop::collection::vec((0u8..4, 0u64..64, any::<bool>()), 0..400)) {
            let mut table = Table::<u64>::default();
            let mut model = BTreeSet::new();
            for (what, n, high) in steps {
                // Few orders, at both ends, so that they pile up.
                let n = if high { u64::MAX - n } else { n + 1 };
                let found = table.find(n, |_| true);
                prop_assert_eq!(found.is_some(), model.contains(&n));
                match (what, found) {
                    (0 | 1, None) => { table.insert(n); model.insert(n); }
                    (2, Some(at)) => { table.remove(at); model.remove(&n); }
                    (3, _) => {
                        let mut from = Some(0);
                        while let Some(order) = from {
                            from = table.sweep(order, &mut 3, |slot| slot % 3 == n % 3);
                        }
                        model.retain(|slot| slot % 3 != n % 3);
                    }
                    _ => {}
                }
                prop_assert_eq!(table.len(), model.len());
            }
            prop_assert!(table.iter().eq(model.iter()));
        }

        #[test]
        fn a_walk_by_hash_misses_nothing_while_the_table_changes(kept in prop::collection::btree_set(any::<u64>(), 1..300), churn in prop::collection::vec(any::<u64>(), 1..300), steps in 1usize..9) {
            let kept: BTreeSet<u64> = kept.into_iter().map(|n| n | 1).collect();
            let mut table = Table::<u64>::default();
            for &n in &kept {
                table.insert(n);
            }
            let mut seen = BTreeSet::new();
            let mut from = Some(0);
            let mut churn = churn.iter().map(|n| (n | 1) - 1).filter(|&n| n != 0).cycle().take(2000);
            while let Some(order) = from {
                from = table.sweep(order, &mut steps.clone(), |&slot| { seen.insert(slot); false });
                if let Some(n) = churn.next() {
                    match table.find(n, |_| true) {
                        Some(at) => table.remove(at),
                        None => table.insert(n),
                    }
                }
            }
            prop_assert!(kept.is_subset(&seen));
        }
    }
}
