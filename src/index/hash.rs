//! The one stable hash: names, keys and ring points must agree in every picker, on every release.

use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// Hashes a name or key with XXH3-64.
#[must_use]
pub fn hash(bytes: &[u8]) -> u64 {
    xxh3_64(bytes)
}

/// Hashes `bytes` once for each `seed`: the virtual nodes of one endpoint.
#[must_use]
pub fn seeded(bytes: &[u8], seed: u64) -> u64 {
    xxh3_64_with_seed(bytes, seed)
}

/// Mixes two hashes into one, order mattering (the finaliser of splitmix64).
#[must_use]
pub fn mix(a: u64, b: u64) -> u64 {
    let mut z = a ^ b.rotate_left(32).wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_the_same_in_every_release() {
        // A changed value here means that every conversation of every user moves on upgrade.
        assert_eq!(
            [hash(b""), hash(b"llm-0"), seeded(b"llm-0", 99), mix(1, 2)],
            [3244421341483603138, 17486293357423580350, 17245183682378099331, 12739255125256291016]
        );
    }
}
