//! Prompt to chained block keys. A key names a block and everything before it, so one key is one whole prefix.
//!
//! `key = mix(parent, XXH3-64(content))`, the root made of the identity: what must agree before two caches can be
//! the same. The content of a block is hashed alone and then chained, so that hashing does not wait for the parent.

use xxhash_rust::xxh3::xxh3_64;

use super::hash;

/// The name of a block and of everything before it, equal in every picker and on every release.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockKey(pub u64);

/// What makes equal tokens different in the cache.
#[derive(Debug, Clone, Copy, Default)]
pub struct Identity<'a> {
    /// Name of the model that is served.
    pub model: &'a str,
    /// Name of the LoRA adapter.
    pub adapter: Option<&'a str>,
    /// Cache salt of the request; tenants with different salts never share blocks.
    pub salt: Option<&'a str>,
}

/// What a block is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Token ids.
    Tokens,
    /// Bytes of the prompt's text, where tokens are not known.
    Bytes,
}

impl Identity<'_> {
    /// Returns the key before the first block, for blocks of `size` units.
    ///
    /// Unit and size are part of it: keys made in different ways never match by chance.
    #[must_use]
    pub fn root(&self, unit: Unit, size: u32) -> BlockKey {
        let mut bytes = Vec::with_capacity(64);
        bytes.push(match unit {
            Unit::Tokens => 1,
            Unit::Bytes => 2,
        });
        bytes.extend_from_slice(&size.to_le_bytes());
        // Every field with its length, so that no two identities give the same bytes.
        for field in [Some(self.model), self.adapter, self.salt] {
            let length = field.map_or(u64::MAX, |text| text.len() as u64);
            bytes.extend_from_slice(&length.to_le_bytes());
            bytes.extend_from_slice(field.unwrap_or_default().as_bytes());
        }
        BlockKey(xxh3_64(&bytes))
    }
}

/// Something other than text in the prompt, an image or a sound, that stands at some placeholder tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Item {
    /// Hash of the engine's identifier of the content (see [`Item::identity`]).
    pub identity: u64,
    /// Index of its first placeholder token in the prompt.
    pub at: usize,
    /// Number of placeholder tokens.
    pub len: usize,
}

impl Item {
    /// Hashes the identifier that engines give to the content.
    #[must_use]
    pub fn identity(identifier: &[u8]) -> u64 {
        hash::hash(identifier)
    }
}

/// Identity beyond its tokens that one block has: the items that lie in it. The default is none.
///
/// Offsets are left out: some engines do not report them, and the placeholder tokens tell them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Extra(u64);

impl Extra {
    /// Adds one more item, in the order of the prompt.
    #[must_use]
    pub fn with(self, identity: u64) -> Self {
        // Never 0, which means none.
        Self(hash::mix(self.0, identity) | 1)
    }

    /// Collects the items that lie in the tokens `from..to`; `items` come in the order of the prompt.
    #[must_use]
    pub fn of(items: &[Item], from: usize, to: usize) -> Self {
        items
            .iter()
            .filter(|item| item.at < to && item.at.saturating_add(item.len) > from)
            .fold(Self::default(), |extra, item| extra.with(item.identity))
    }
}

/// Chains one block of tokens to `parent`.
#[must_use]
pub fn chain(parent: BlockKey, tokens: &[u32], extra: Extra) -> BlockKey {
    /// Tokens that fit the buffer on the stack; blocks of engines have 16 to 256.
    const SHORT: usize = 256;
    if tokens.len() <= SHORT {
        let mut buffer = [0u8; SHORT * 4];
        let bytes = &mut buffer[..tokens.len() * 4];
        for (bytes, token) in bytes.chunks_exact_mut(4).zip(tokens) {
            bytes.copy_from_slice(&token.to_le_bytes());
        }
        link(parent, bytes, extra)
    } else {
        let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        link(parent, &bytes, extra)
    }
}

fn link(parent: BlockKey, content: &[u8], extra: Extra) -> BlockKey {
    let content = xxh3_64(content);
    let content = if extra.0 == 0 { content } else { hash::mix(content, extra.0) };
    BlockKey(hash::mix(parent.0, content))
}

/// Returns the keys of all full blocks of a prompt; a block that is not full is never cached, so it has no key.
///
/// A `size` of 0 gives no keys.
#[must_use]
pub fn keys(root: BlockKey, tokens: &[u32], size: u32, items: &[Item]) -> Vec<BlockKey> {
    let size = size as usize;
    if size == 0 {
        return Vec::new();
    }
    let mut last = root;
    let mut from = 0;
    let mut keys = Vec::with_capacity(tokens.len() / size);
    for block in tokens.chunks_exact(size) {
        let extra =
            if items.is_empty() { Extra::default() } else { Extra::of(items, from, from + size) };
        last = chain(last, block, extra);
        keys.push(last);
        from += size;
    }
    keys
}

/// Keys from the bytes of a prompt as they come, in pieces of any size.
#[derive(Debug, Clone)]
pub struct ByteChain {
    last: BlockKey,
    size: usize,
    pending: Vec<u8>,
    keys: Vec<BlockKey>,
}

impl ByteChain {
    /// Starts at `root` with blocks of `size` bytes; 0 is taken as 1.
    #[must_use]
    pub fn new(root: BlockKey, size: u32) -> Self {
        Self { last: root, size: size.max(1) as usize, pending: Vec::new(), keys: Vec::new() }
    }

    /// Takes the next bytes.
    pub fn push(&mut self, mut bytes: &[u8]) {
        if !self.pending.is_empty() {
            let missing = self.size - self.pending.len();
            let (head, rest) = bytes.split_at(missing.min(bytes.len()));
            self.pending.extend_from_slice(head);
            bytes = rest;
            if self.pending.len() < self.size {
                return;
            }
            self.last = link(self.last, &self.pending, Extra::default());
            self.keys.push(self.last);
            self.pending.clear();
        }
        let blocks = bytes.chunks_exact(self.size);
        self.pending.extend_from_slice(blocks.remainder());
        for block in blocks {
            self.last = link(self.last, block, Extra::default());
            self.keys.push(self.last);
        }
    }

    /// Returns the keys of the full blocks so far.
    #[must_use]
    pub fn keys(&self) -> &[BlockKey] {
        &self.keys
    }

    /// Returns the keys of all full blocks.
    #[must_use]
    pub fn finish(self) -> Vec<BlockKey> {
        self.keys
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    const PLAIN: Identity<'_> = Identity { model: "Qwen/Qwen3-32B", adapter: None, salt: None };

    #[test]
    fn keys_are_the_same_in_every_release() {
        // A changed value here means that pickers of two releases disagree, and what was recorded matches no more.
        let root = PLAIN.root(Unit::Tokens, 4);
        let image = Item { identity: Item::identity(b"image-1"), at: 5, len: 2 };
        let text = {
            let mut chain = ByteChain::new(PLAIN.root(Unit::Bytes, 8), 8);
            chain.push(b"You are a helpful assistant.");
            chain.finish()
        };
        let tokens = [1, 2, 3, 300, 5, 6, 7, 70000];
        let long: Vec<u32> = (0..300).collect();
        let mut golden = vec![root];
        golden.extend(keys(root, &tokens, 4, &[]));
        golden.push(keys(root, &tokens, 4, &[image])[1]);
        golden.push(Identity { adapter: Some("lora-a"), ..PLAIN }.root(Unit::Tokens, 4));
        golden.push(Identity { salt: Some("t-a"), ..PLAIN }.root(Unit::Tokens, 4));
        golden.push(chain(root, &long, Extra::default()));
        golden.extend(text);
        assert_eq!(golden.iter().map(|key| key.0).collect::<Vec<_>>(), GOLDEN);
    }

    const GOLDEN: [u64; 10] = [
        6209848339798589869,
        2059065025759702595,
        6798411074885909894,
        13153056326915225394,
        13618678140801800148,
        4923922262249176113,
        5314837233250996781,
        430282303867496518,
        7339718054186326942,
        6307854708327473362,
    ];

    #[test]
    fn identities_never_run_into_each_other() {
        let roots: BTreeSet<BlockKey> = [
            Identity { model: "a", adapter: None, salt: None },
            Identity { model: "a", adapter: Some(""), salt: None },
            Identity { model: "a", adapter: None, salt: Some("") },
            Identity { model: "a", adapter: Some("b"), salt: None },
            Identity { model: "a", adapter: None, salt: Some("b") },
            Identity { model: "ab", adapter: None, salt: None },
            Identity { model: "", adapter: Some("ab"), salt: None },
        ]
        .iter()
        .flat_map(|identity| {
            [(Unit::Tokens, 16), (Unit::Tokens, 64), (Unit::Bytes, 16)]
                .map(|(unit, size)| identity.root(unit, size))
        })
        .collect();
        assert_eq!(roots.len(), 21);
    }

    #[test]
    fn an_item_changes_its_own_block_and_those_after_it() {
        let root = PLAIN.root(Unit::Tokens, 4);
        let tokens = [9u32; 16];
        let plain = keys(root, &tokens, 4, &[]);
        let item = |id: &[u8], at, len| Item { identity: Item::identity(id), at, len };
        let one = keys(root, &tokens, 4, &[item(b"x", 4, 4)]);
        assert_eq!(one[0], plain[0]);
        assert!((1..4).all(|i| one[i] != plain[i]));
        // Ending at a boundary it does not reach into the next block; beginning in it it does.
        assert_eq!(Extra::of(&[item(b"x", 4, 4)], 8, 12), Extra::default());
        assert_ne!(Extra::of(&[item(b"x", 4, 5)], 8, 12), Extra::default());
        let two = [item(b"x", 4, 1), item(b"y", 5, 1)];
        let swapped = [item(b"y", 4, 1), item(b"x", 5, 1)];
        assert_ne!(keys(root, &tokens, 4, &two), keys(root, &tokens, 4, &swapped));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]

        #[test]
        fn any_cut_of_the_bytes_gives_the_same_keys(text in prop::collection::vec(any::<u8>(), 0..300), cuts in prop::collection::vec(0usize..300, 0..6), size in 0u32..40) {
            let root = PLAIN.root(Unit::Bytes, size);
            let mut whole = ByteChain::new(root, size);
            whole.push(&text);
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(text.len())).collect();
            cuts.push(text.len());
            cuts.sort_unstable();
            let mut pieces = ByteChain::new(root, size);
            let mut from = 0;
            for cut in cuts {
                pieces.push(&text[from..cut]);
                from = cut;
            }
            prop_assert_eq!(whole.keys().len(), text.len() / size.max(1) as usize);
            prop_assert_eq!(whole.finish(), pieces.finish());
        }

        #[test]
        fn equal_prefixes_give_equal_keys_and_nothing_else_does(a in prop::collection::vec(0u32..2, 0..40), b in prop::collection::vec(0u32..2, 0..40)) {
            let root = PLAIN.root(Unit::Tokens, 4);
            let shared = a.iter().zip(&b).take_while(|(a, b)| a == b).count();
            let (a, b) = (keys(root, &a, 4, &[]), keys(root, &b, 4, &[]));
            let equal = a.iter().zip(&b).take_while(|(a, b)| a == b).count();
            prop_assert_eq!(equal, shared / 4);
            // Once apart, no key meets again.
            prop_assert!(a.iter().skip(equal).all(|key| !b.contains(key)));
        }
    }
}
