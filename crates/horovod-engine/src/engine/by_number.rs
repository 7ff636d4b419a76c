//! Maps whose keys are numbers that this process assigns itself.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A map by number. No outside party chooses the numbers, so the hash needs no defence against chosen keys.
pub(super) type ByNumber<V> = HashMap<u64, V, BuildHasherDefault<NumberHasher>>;

/// Hash by one multiplication: consecutive numbers fall into different buckets, and differ in the upper bits.
#[derive(Default)]
pub(super) struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0 ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
