//! Lookup tables for the hot path: hashed with a fixed function and deliberately not iterable, so
//! that no decision can depend on hash order; and a slab whose order is the order of insertion.

use std::borrow::Borrow;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hash, Hasher};

/// A map that only answers questions about single keys.
#[derive(Debug)]
pub(crate) struct Lookup<K, V> {
    map: HashMap<K, V, BuildHasherDefault<FixedHasher>>,
}

impl<K, V> Default for Lookup<K, V> {
    fn default() -> Self {
        Self {
            map: HashMap::default(),
        }
    }
}

impl<K: Hash + Eq, V> Lookup<K, V> {
    pub(crate) fn get<Q: Hash + Eq + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        self.map.get(key)
    }

    pub(crate) fn insert(&mut self, key: K, value: V) -> Option<V> {
        self.map.insert(key, value)
    }

    pub(crate) fn remove<Q: Hash + Eq + ?Sized>(&mut self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
    {
        self.map.remove(key)
    }
}

/// Multiply-and-fold over eight bytes at a time. Keys come from members of the job, so there is
/// no stranger who could choose colliding ones; the same input hashes alike everywhere.
#[derive(Default)]
pub(crate) struct FixedHasher {
    state: u64,
}

impl FixedHasher {
    fn mix(&mut self, word: u64) {
        let product =
            u128::from(self.state ^ word ^ 0x9e37_79b9_7f4a_7c15) * 0xd6e8_feb8_6659_fd93_u128;
        self.state = (product as u64) ^ ((product >> 64) as u64);
    }
}

impl Hasher for FixedHasher {
    fn write(&mut self, bytes: &[u8]) {
        let mut chunks = bytes.chunks_exact(8);
        for chunk in &mut chunks {
            let mut word = [0; 8];
            word.copy_from_slice(chunk);
            self.mix(u64::from_le_bytes(word));
        }
        let rest = chunks.remainder();
        let mut word = [0; 8];
        word[..rest.len()].copy_from_slice(rest);
        self.mix(u64::from_le_bytes(word) ^ ((bytes.len() as u64) << 56));
    }

    fn write_u8(&mut self, value: u8) {
        self.state ^= u64::from(value);
    }

    fn write_u64(&mut self, value: u64) {
        self.mix(value);
    }

    fn finish(&self) -> u64 {
        self.state
    }
}

/// Values under small reusable indices.
#[derive(Debug)]
pub(crate) struct Slab<T> {
    items: Vec<Option<T>>,
    free: Vec<usize>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self {
            items: Vec::new(),
            free: Vec::new(),
        }
    }
}

impl<T> Slab<T> {
    pub(crate) fn insert(&mut self, value: T) -> usize {
        match self.free.pop() {
            Some(index) => {
                self.items[index] = Some(value);
                index
            }
            None => {
                self.items.push(Some(value));
                self.items.len() - 1
            }
        }
    }

    pub(crate) fn get(&self, index: usize) -> Option<&T> {
        self.items.get(index)?.as_ref()
    }

    pub(crate) fn get_mut(&mut self, index: usize) -> Option<&mut T> {
        self.items.get_mut(index)?.as_mut()
    }

    pub(crate) fn remove(&mut self, index: usize) -> Option<T> {
        let value = self.items.get_mut(index)?.take()?;
        self.free.push(index);
        Some(value)
    }

    /// By index.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (usize, &T)> {
        self.items
            .iter()
            .enumerate()
            .filter_map(|(i, item)| Some((i, item.as_ref()?)))
    }

    /// By index.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (usize, &mut T)> {
        self.items
            .iter_mut()
            .enumerate()
            .filter_map(|(i, item)| Some((i, item.as_mut()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn names_that_differ_slightly_hash_apart() {
        let hash = |name: &str| {
            let mut hasher = FixedHasher::default();
            name.hash(&mut hasher);
            hasher.finish()
        };
        let hashes: BTreeSet<u64> = (0..10_000)
            .map(|i| hash(&format!("allreduce.layer.{i}.weight")))
            .collect();
        assert_eq!(hashes.len(), 10_000);
        let low_bits: BTreeSet<u64> = hashes.iter().map(|h| h & 0xfff).collect();
        assert!(
            low_bits.len() > 3000,
            "low bits take only {} of 4096 values",
            low_bits.len()
        );
        assert_eq!(hash("a"), hash("a"));
    }

    #[test]
    fn slab_indices_are_reused() {
        let mut slab = Slab::default();
        let (a, b) = (slab.insert('a'), slab.insert('b'));
        assert_eq!(slab.remove(a), Some('a'));
        assert_eq!(slab.remove(a), None);
        assert_eq!(slab.insert('c'), a);
        assert_eq!(
            slab.iter().map(|(i, c)| (i, *c)).collect::<Vec<_>>(),
            [(a, 'c'), (b, 'b')]
        );
    }
}
