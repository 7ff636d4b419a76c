//! A 64-bit checksum of memory, at memory speed: tells whether two ranks hold the same bytes.

/// Independent chains, so that the latency of the multiplication does not count.
const LANES: usize = 8;
const WORD: usize = size_of::<u64>();
/// Odd: the step of a chain can be undone, so a single word that differs always shows.
const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
/// Brings high bits down, which a multiplication moves up only: two signs that flip must not cancel.
const DOWN: u32 = 32;

/// Checksum of `bytes` bytes; the same on every machine. Not against forgery.
///
/// # Safety
/// `memory` is readable for `bytes`.
pub unsafe fn checksum(memory: *const u8, bytes: usize) -> u64 {
    let mut lanes: [u64; LANES] = std::array::from_fn(|lane| step(FACTOR, lane as u64));
    let blocks = bytes / (LANES * WORD);
    for block in 0..blocks {
        for (lane, chain) in lanes.iter_mut().enumerate() {
            let at = block * LANES * WORD + lane * WORD;
            // SAFETY: the block lies within `bytes`, which are readable; no alignment is asked for.
            let word = unsafe { memory.add(at).cast::<u64>().read_unaligned() };
            *chain = step(*chain, u64::from_le(word));
        }
    }
    let mut sum = bytes as u64;
    for chain in lanes {
        sum = step(sum, chain);
    }
    for at in blocks * LANES * WORD..bytes {
        // SAFETY: below `bytes`.
        sum = step(sum, u64::from(unsafe { memory.add(at).read() }));
    }
    sum
}

fn step(chain: u64, word: u64) -> u64 {
    let mixed = (chain ^ word).wrapping_mul(FACTOR);
    mixed ^ (mixed >> DOWN)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn of(bytes: &[u8]) -> u64 {
        // SAFETY: a slice is readable.
        unsafe { checksum(bytes.as_ptr(), bytes.len()) }
    }

    #[test]
    fn every_bit_and_the_length_count() {
        for len in [0, 1, 7, 8, 63, 64, 65, 200] {
            let mut bytes = vec![0u8; len];
            let mut seen = HashSet::from([of(&bytes)]);
            // Miri is some thousand times slower; it looks at what is read, not at bits.
            for bit in (0..len * 8).step_by(if cfg!(miri) { 97 } else { 1 }) {
                bytes[bit / 8] ^= 1 << (bit % 8);
                assert!(seen.insert(of(&bytes)), "bit {bit} of {len} bytes");
                bytes[bit / 8] ^= 1 << (bit % 8);
            }
        }
        let lengths: HashSet<u64> = (0..300).map(|len| of(&vec![0; len])).collect();
        assert_eq!(lengths.len(), 300);
    }

    #[test]
    #[cfg_attr(miri, ignore = "too slow there, and reads what the other tests read")]
    fn pairs_of_equal_changes_do_not_cancel() {
        let plain = of(&[0; 256]);
        for bit in [0, 22, 31, 54, 63] {
            let mut seen = HashSet::from([plain]);
            for first in 0..32 {
                for second in 0..first {
                    let mut words = [0u64; 32];
                    words[first] ^= 1 << bit;
                    words[second] ^= 1 << bit;
                    let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
                    assert!(seen.insert(of(&bytes)), "bit {bit} of {first} and {second}");
                }
            }
        }
    }

    #[test]
    fn neither_alignment_nor_the_machine_counts() {
        let bytes: Vec<u8> = (0..777u32).map(|i| (i * 31 % 251) as u8).collect();
        let want = of(&bytes);
        for shift in 1..16 {
            let mut moved = vec![0; shift];
            moved.extend_from_slice(&bytes);
            assert_eq!(of(&moved[shift..]), want);
        }
        assert_eq!(want, EXPECTED);
    }

    const EXPECTED: u64 = 0x4ba1_d1f8_cd06_ffc0;
}
