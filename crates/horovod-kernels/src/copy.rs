//! Copies that say how the caches shall be used. The bytes arrive the same either way.

use crate::copy_loop::out_and_in;
#[cfg(target_arch = "x86_64")]
use crate::dispatch::{Isa, chosen};

/// Copies past the caches: for destinations that are larger than the caches, or not read soon. Their
/// old content is not fetched, and what the caches hold stays there. Complete when this returns.
///
/// # Safety
/// `from` is readable and `to` writable for `bytes`, without overlap; nobody else touches either.
pub unsafe fn copy_streaming(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: the caller's promise, passed on.
    unsafe { imp::copy::<true, false>(from.cast_mut(), to, bytes) }
}

/// Copies, and writes the bytes back where they came from: on hardware where ownership of a cache line follows writes,
/// this rank's cache owns them afterwards. The peer that wrote them can then write there again without first revoking a
/// shared copy.
///
/// # Safety
/// `from` and `to` are readable and writable for `bytes`, without overlap; nobody else touches either.
pub unsafe fn copy_taking(from: *mut u8, to: *mut u8, bytes: usize) {
    // SAFETY: the caller's promise, passed on.
    unsafe { imp::copy::<false, true>(from, to, bytes) }
}

/// [`copy_taking`] and [`copy_streaming`] at once.
///
/// # Safety
/// As [`copy_taking`].
pub unsafe fn copy_taking_streaming(from: *mut u8, to: *mut u8, bytes: usize) {
    // SAFETY: the caller's promise, passed on.
    unsafe { imp::copy::<true, true>(from, to, bytes) }
}

/// Copies what lies in `slot` to `out`, and `next` to `slot`: each line of the slot comes to this rank's cache once for
/// both.
///
/// # Safety
/// `next` is readable, `slot` and `out` are writable for `bytes`, without overlap; nobody else touches any of them.
pub unsafe fn copy_out_and_in(out: *mut u8, slot: *mut u8, next: *const u8, bytes: usize) {
    // SAFETY: the caller's promise, passed on; the CPU has what is chosen.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        match chosen() {
            Isa::Avx2 => crate::x86_64::avx2::out_and_in(out, slot, next, bytes),
            Isa::Avx512 => crate::x86_64::avx512::out_and_in(out, slot, next, bytes),
            _ => out_and_in::<u128>(out, slot, next, bytes),
        }
        #[cfg(not(target_arch = "x86_64"))]
        out_and_in::<u128>(out, slot, next, bytes);
    }
}

#[cfg(target_arch = "x86_64")]
mod imp {
    use std::arch::x86_64::*;

    /// Streaming stores take whole aligned vectors; four at a time fill one line.
    const VECTOR: usize = 16;
    const LINE: usize = 64;

    /// # Safety
    /// As the public functions.
    pub(super) unsafe fn copy<const STREAM: bool, const TAKE: bool>(
        from: *mut u8,
        to: *mut u8,
        bytes: usize,
    ) {
        let head = to.align_offset(LINE).min(bytes);
        let whole = (bytes - head) / LINE * LINE;
        // SAFETY: head + whole <= bytes. SSE2 belongs to the architecture; `to + head` is aligned.
        unsafe {
            edge::<TAKE>(from, to, head);
            for at in (head..head + whole).step_by(LINE) {
                let from = from.add(at).cast::<__m128i>();
                let to = to.add(at).cast::<__m128i>();
                let line: [__m128i; LINE / VECTOR] =
                    std::array::from_fn(|i| _mm_loadu_si128(from.add(i)));
                for (i, vector) in line.into_iter().enumerate() {
                    if STREAM {
                        _mm_stream_si128(to.add(i), vector);
                    } else {
                        _mm_store_si128(to.add(i), vector);
                    }
                }
                if TAKE {
                    for (i, vector) in line.into_iter().enumerate() {
                        _mm_storeu_si128(from.add(i), vector);
                    }
                }
            }
            let tail = head + whole;
            edge::<TAKE>(from.add(tail), to.add(tail), bytes - tail);
            if STREAM {
                // Streaming stores are not ordered by a release; who is told next may look at once.
                _mm_sfence();
            }
        }
    }

    /// # Safety
    /// As the public functions.
    unsafe fn edge<const TAKE: bool>(from: *mut u8, to: *mut u8, bytes: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            to.copy_from_nonoverlapping(from, bytes);
            if TAKE {
                from.copy_from_nonoverlapping(to, bytes);
            }
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod imp {
    /// Other machines have no streaming stores that the compiler offers; nor has anybody measured
    /// there that taking a line pays.
    ///
    /// # Safety
    /// As the public functions.
    pub(super) unsafe fn copy<const STREAM: bool, const TAKE: bool>(
        from: *mut u8,
        to: *mut u8,
        bytes: usize,
    ) {
        // SAFETY: the caller's promise.
        unsafe { to.copy_from_nonoverlapping(from, bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn out_and_in_moves_every_length_and_nothing_else() {
        let variant: [unsafe fn(*mut u8, *mut u8, *const u8, usize); 2] =
            [copy_out_and_in, out_and_in::<u128>];
        for len in [0, 1, 15, 16, 63, 64, 65, 255, 256, 257, 600, 1000] {
            for skew in [0, 1, 4, 33] {
                for variant in variant {
                    let next: Vec<u8> = (0..1100u32).map(|i| (i * 7 % 251) as u8).collect();
                    let before: Vec<u8> = (0..1100u32).map(|i| (i * 5 % 241) as u8).collect();
                    let (mut slot, mut out) = (before.clone(), vec![0xa5; 1100]);
                    // SAFETY: twice the skew and the length fit all three.
                    unsafe {
                        let slot = slot.as_mut_ptr().add(2 * skew);
                        variant(out.as_mut_ptr().add(skew), slot, next.as_ptr(), len);
                    }
                    assert_eq!(out[skew..][..len], before[2 * skew..][..len]);
                    assert_eq!(slot[2 * skew..][..len], next[..len]);
                    let around = out[..skew].iter().chain(&out[skew + len..]);
                    assert!(around.copied().all(|byte| byte == 0xa5));
                    assert_eq!(slot[..2 * skew], before[..2 * skew]);
                    assert_eq!(slot[2 * skew + len..], before[2 * skew + len..]);
                }
            }
        }
    }

    #[test]
    fn every_length_and_misalignment_arrives_and_nothing_else_changes() {
        for len in [0, 1, 15, 63, 64, 65, 127, 128, 200, 1000] {
            for (skew_from, skew_to) in [(0, 0), (1, 0), (0, 1), (17, 63), (64, 32)] {
                let variants: [unsafe fn(*mut u8, *mut u8, usize); 3] = [
                    // SAFETY: what the caller of the function promises.
                    |from, to, n| unsafe { copy_streaming(from, to, n) },
                    copy_taking,
                    copy_taking_streaming,
                ];
                for variant in variants {
                    let mut from: Vec<u8> = (0..1200u32).map(|i| (i * 7 % 251) as u8).collect();
                    let before = from.clone();
                    let mut to = vec![0xa5; 1200];
                    // SAFETY: skew + len < 1200 for both vectors.
                    unsafe {
                        let from = from.as_mut_ptr().add(skew_from);
                        variant(from, to.as_mut_ptr().add(skew_to), len);
                    }
                    assert_eq!(from, before);
                    assert_eq!(to[skew_to..][..len], before[skew_from..][..len]);
                    let around = to[..skew_to].iter().chain(&to[skew_to + len..]);
                    assert!(around.copied().all(|byte| byte == 0xa5));
                }
            }
        }
    }
}
