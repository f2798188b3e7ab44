//! What pieces of text have been tokenized to, the ones used last.

use std::sync::Arc;

use lru::LruCache;
use xxhash_rust::xxh3::xxh3_128_with_seed;

/// What an entry takes beside its ids, in bytes: key, pointers, counts and the table around them.
const ENTRY_BYTES: usize = 128;

/// A name of a piece of text and of what it depends on.
///
/// Two texts of one name are a matter of 2^-64 for billions of pieces, and would cost a worse placement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Key(u128);

impl Key {
    /// `model` is the tokenizer's number, `lead` the token right before the text, if any.
    pub(crate) fn new(model: u32, lead: Option<u32>, text: &str) -> Self {
        let lead = lead.map_or(0, |id| u64::from(id) + 1);
        Self(xxh3_128_with_seed(text.as_bytes(), (u64::from(model) << 33) ^ lead))
    }
}

/// Token ids by text, bounded in bytes; the entry not used for longest goes first.
#[derive(Debug)]
pub(crate) struct Memo {
    entries: LruCache<Key, Arc<[u32]>>,
    bytes: usize,
    max_bytes: usize,
}

impl Memo {
    pub(crate) fn new(max_bytes: usize) -> Self {
        Self { entries: LruCache::unbounded(), bytes: 0, max_bytes }
    }

    pub(crate) fn get(&mut self, key: Key) -> Option<Arc<[u32]>> {
        self.entries.get(&key).cloned()
    }

    pub(crate) fn put(&mut self, key: Key, ids: Arc<[u32]>) {
        let size = size(&ids);
        if size > self.max_bytes {
            return;
        }
        self.bytes += size;
        if let Some(old) = self.entries.put(key, ids) {
            self.bytes -= self::size(&old);
        }
        while self.bytes > self.max_bytes
            && let Some((_, old)) = self.entries.pop_lru()
        {
            self.bytes -= self::size(&old);
        }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }
}

fn size(ids: &[u32]) -> usize {
    size_of_val(ids) + ENTRY_BYTES
}
