//! Who has a block, and by what evidence: inline for few holders, a list for some, bitmaps for many.

use super::Holder;

/// Kinds of evidence, one bit each in a mark: the tiers of [`super::Tier`], then confirmed, inferred, speculative.
pub(super) const KINDS: usize = 7;
/// Bits of the kinds that events give.
pub(super) const EVENT: u8 = 0b1111;

/// Holders that fit without memory of their own.
const INLINE: usize = 5;
/// A list grows by this many holders at a time.
const STEP: usize = 4;
/// Wide marks with this many holders or fewer go back inline.
const SHRINK: u64 = 3;

/// The marks of all holders of a block.
///
/// An entry is the holder in the high 24 bits and its mark in the low 8; a mark of 0 is a free place.
#[derive(Debug)]
pub(super) enum Marks {
    Few([u32; INLINE]),
    List(Box<[u32]>),
    /// A header, then one bitmap of holders for each kind present (see [`Wide`]).
    Wide(Box<[u64]>),
}

impl Default for Marks {
    fn default() -> Self {
        Self::Few([0; INLINE])
    }
}

/// Reads wide marks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wide<'a> {
    /// Kinds that have a bitmap, one bit each; bitmaps stand in the order of the kinds.
    pub(super) kinds: u8,
    /// Words of a bitmap.
    pub(super) words: usize,
    holders: u64,
    pub(super) bits: &'a [u64],
}

impl<'a> Wide<'a> {
    #[expect(clippy::cast_possible_truncation, reason = "the fields are cut to their width")]
    pub(super) fn new(wide: &'a [u64]) -> Self {
        let header = wide[0];
        Self {
            kinds: header as u8,
            words: (header >> 8) as usize & 0xff_ffff,
            holders: header >> 32,
            bits: &wide[1..],
        }
    }

    /// Index of the first word of a kind's bitmap; the kind must be present.
    pub(super) const fn start(&self, kind: usize) -> usize {
        (self.kinds & ((1 << kind) - 1)).count_ones() as usize * self.words
    }

    fn get(&self, holder: Holder) -> u8 {
        let (word, bit) = place(holder);
        let mut mark = 0;
        if word < self.words {
            let mut at = word;
            for kind in ones(self.kinds) {
                if self.bits[at] & bit != 0 {
                    mark |= 1 << kind;
                }
                at += self.words;
            }
        }
        mark
    }
}

const fn header(kinds: u8, words: usize, holders: u64) -> u64 {
    kinds as u64 | (words as u64) << 8 | holders << 32
}

pub(super) const fn place(holder: Holder) -> (usize, u64) {
    (holder.0 as usize / 64, 1 << (holder.0 % 64))
}

/// The set bits of a mark, lowest first.
pub(super) fn ones(mut mark: u8) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        if mark == 0 {
            return None;
        }
        let bit = mark.trailing_zeros() as usize;
        mark &= mark - 1;
        Some(bit)
    })
}

const fn entry(holder: Holder, mark: u8) -> u32 {
    holder.0 << 8 | mark as u32
}

#[expect(clippy::cast_possible_truncation, reason = "the low 8 bits are the mark")]
pub(super) const fn split(entry: u32) -> (Holder, u8) {
    (Holder(entry >> 8), entry as u8)
}

impl Marks {
    pub(super) fn is_empty(&self) -> bool {
        // Lists and bitmaps go back inline before they are empty.
        matches!(self, Self::Few(few) if few.iter().all(|&entry| entry == 0))
    }

    /// Bytes beyond the marks' own size.
    pub(super) const fn heap_bytes(&self) -> usize {
        match self {
            Self::Few(_) => 0,
            Self::List(list) => list.len() * 4 + 16,
            Self::Wide(wide) => wide.len() * 8 + 16,
        }
    }

    pub(super) fn get(&self, holder: Holder) -> u8 {
        let among = |entries: &[u32]| {
            entries
                .iter()
                .map(|&entry| split(entry))
                .find(|&(of, mark)| of == holder && mark != 0)
                .map_or(0, |(_, mark)| mark)
        };
        match self {
            Self::Few(few) => among(few),
            Self::List(list) => among(list),
            Self::Wide(wide) => Wide::new(wide).get(holder),
        }
    }

    /// Every holder with its mark, in no order that means anything.
    pub(super) fn collect(&self) -> Vec<(Holder, u8)> {
        let of = |entries: &[u32]| {
            entries.iter().map(|&entry| split(entry)).filter(|&(_, mark)| mark != 0).collect()
        };
        match self {
            Self::Few(few) => of(few),
            Self::List(list) => of(list),
            Self::Wide(wide) => {
                let wide = Wide::new(wide);
                let mut all = Vec::new();
                for (word, base) in (0..wide.words).zip((0u32..).step_by(64)) {
                    let mut any = 0;
                    for kind in ones(wide.kinds) {
                        any |= wide.bits[wide.start(kind) + word];
                    }
                    while any != 0 {
                        let holder = Holder(base + any.trailing_zeros());
                        all.push((holder, wide.get(holder)));
                        any &= any - 1;
                    }
                }
                all
            }
        }
    }

    /// Sets a holder's mark; 0 takes the holder out.
    pub(super) fn set(&mut self, holder: Holder, mark: u8) {
        match self {
            Self::Few(few) => {
                if !put(few, holder, mark) {
                    let mut list = vec![0; INLINE + STEP].into_boxed_slice();
                    list[..INLINE].copy_from_slice(few);
                    list[INLINE] = entry(holder, mark);
                    *self = Self::List(list);
                }
            }
            Self::List(list) => {
                if !put(list, holder, mark) {
                    let mut all = self.collect();
                    all.push((holder, mark));
                    *self = Self::build(&all);
                } else if mark == 0
                    && list.iter().filter(|&&entry| entry != 0).count() as u64 <= SHRINK
                {
                    *self = Self::build(&self.collect());
                }
            }
            Self::Wide(wide) => {
                if !put_wide(wide, holder, mark) {
                    let mut all = self.collect();
                    all.retain(|&(of, _)| of != holder);
                    if mark != 0 {
                        all.push((holder, mark));
                    }
                    *self = Self::build(&all);
                }
            }
        }
    }

    /// Takes the smallest form.
    fn build(all: &[(Holder, u8)]) -> Self {
        if all.len() <= INLINE {
            let mut few = [0; INLINE];
            for (place, &(holder, mark)) in few.iter_mut().zip(all) {
                *place = entry(holder, mark);
            }
            return Self::Few(few);
        }
        let kinds = all.iter().fold(0, |kinds, &(_, mark)| kinds | mark);
        let words = all.iter().map(|&(holder, _)| place(holder).0 + 1).max().unwrap_or(0);
        let length = all.len().next_multiple_of(STEP);
        let wide = 1 + kinds.count_ones() as usize * words;
        if length * 4 < wide * 8 {
            let mut list = vec![0; length].into_boxed_slice();
            for (place, &(holder, mark)) in list.iter_mut().zip(all) {
                *place = entry(holder, mark);
            }
            return Self::List(list);
        }
        let mut wide = vec![0; wide].into_boxed_slice();
        wide[0] = header(kinds, words, 0);
        for &(holder, mark) in all {
            put_wide(&mut wide, holder, mark);
        }
        Self::Wide(wide)
    }
}

/// Sets a mark among entries; `false` if there is no place left for it.
fn put(entries: &mut [u32], holder: Holder, mark: u8) -> bool {
    let mut free = None;
    for place in entries.iter_mut() {
        let (of, old) = split(*place);
        if old == 0 {
            free = free.or(Some(place));
        } else if of == holder {
            *place = if mark == 0 { 0 } else { entry(holder, mark) };
            return true;
        }
    }
    if mark == 0 {
        return true;
    }
    free.is_some_and(|place| {
        *place = entry(holder, mark);
        true
    })
}

/// Sets a mark in bitmaps; `false`, and nothing done, if they are too small or now hold too few.
fn put_wide(wide: &mut [u64], holder: Holder, mark: u8) -> bool {
    let view = Wide::new(wide);
    let (word, bit) = place(holder);
    let (kinds, words, holders) = (view.kinds, view.words, view.holders);
    let fits = word < words && mark & !kinds == 0;
    if !fits && (mark != 0 || word >= words) {
        return mark == 0;
    }
    let had = view.get(holder) != 0;
    let holders = holders + u64::from(mark != 0) - u64::from(had);
    if had && mark == 0 && holders <= SHRINK {
        return false;
    }
    let mut at = 1 + word;
    for kind in ones(kinds) {
        if mark & (1 << kind) == 0 {
            wide[at] &= !bit;
        } else {
            wide[at] |= bit;
        }
        at += words;
    }
    wide[0] = header(kinds, words, holders);
    true
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        #[test]
        fn it_is_a_map(steps in prop::collection::vec((prop_oneof![0u32..12, 0u32..200, 0u32..5000], 0u8..128, 0u8..3), 0..300)) {
            let mut marks = Marks::default();
            let mut model = BTreeMap::new();
            for (holder, mark, what) in steps {
                let mark = if what == 0 { 0 } else { mark };
                marks.set(Holder(holder), mark);
                if mark == 0 { model.remove(&holder); } else { model.insert(holder, mark); }
                prop_assert_eq!(marks.get(Holder(holder)), mark);
                prop_assert_eq!(marks.is_empty(), model.is_empty());
            }
            let mut all: Vec<(u32, u8)> = marks.collect().into_iter().map(|(holder, mark)| (holder.0, mark)).collect();
            all.sort_unstable();
            prop_assert_eq!(all, model.clone().into_iter().collect::<Vec<_>>());
            for holder in model.keys() {
                marks.set(Holder(*holder), 0);
            }
            prop_assert!(marks.is_empty() && marks.heap_bytes() == 0);
        }
    }

    #[test]
    fn many_holders_cost_a_bit_each() {
        let mut marks = Marks::default();
        for holder in 0..1024 {
            marks.set(Holder(holder), 1);
        }
        assert!(marks.heap_bytes() <= 1024 / 8 + 64, "{}", marks.heap_bytes());
    }
}
