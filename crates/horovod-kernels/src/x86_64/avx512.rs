//! AVX-512 (F, BW, VL, DQ): the generic loops compiled for it, halves by hand.

use std::arch::x86_64::*;

use crate::half::{Convert, Portable};
use crate::x86_64::{entry::entry_points, sums};

entry_points!(
    /// AVX-512 (F, BW, VL, DQ).
    Avx512,
    "avx512f,avx512bw,avx512vl,avx512dq,f16c",
    register: __m512i,
    sums: [sums::F16x16, sums::Bf16x16, sums::F32x16, sums::F64x8]
);

/// # Safety
/// As [`Convert::f16_to_f32`], on a CPU with these features.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
unsafe fn widen(src: *const u16, dst: *mut f32, n: usize) {
    let whole = n - n % 16;
    for i in (0..whole).step_by(16) {
        // SAFETY: i + 16 <= n.
        unsafe {
            let halves = _mm256_loadu_si256(src.add(i).cast());
            _mm512_storeu_ps(dst.add(i), _mm512_cvtph_ps(halves));
        }
    }
    // SAFETY: the rest of both blocks.
    unsafe { Portable::f16_to_f32(src.add(whole), dst.add(whole), n - whole) };
}

/// # Safety
/// As [`Convert::f32_to_f16`], on a CPU with these features.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
unsafe fn narrow(src: *const f32, dst: *mut u16, n: usize) {
    let whole = n - n % 16;
    for i in (0..whole).step_by(16) {
        // SAFETY: i + 16 <= n.
        unsafe {
            let halves = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm512_loadu_ps(src.add(i)));
            _mm256_storeu_si256(dst.add(i).cast(), halves);
        }
    }
    // SAFETY: the rest of both blocks.
    unsafe { Portable::f32_to_f16(src.add(whole), dst.add(whole), n - whole) };
}
