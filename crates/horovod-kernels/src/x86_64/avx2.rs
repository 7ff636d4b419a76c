//! AVX2 with F16C: the generic loops compiled for 256-bit vectors, halves by hand.

use std::arch::x86_64::*;

use crate::half::{Convert, Portable};
use crate::x86_64::{entry::entry_points, sums};

entry_points!(
    /// AVX2 with F16C.
    Avx2,
    "avx2,f16c",
    register: __m256i,
    sums: [sums::F16x8, sums::Bf16x8, sums::F32x8, sums::F64x4]
);

/// # Safety
/// As [`Convert::f16_to_f32`], on a CPU with AVX2 and F16C.
#[target_feature(enable = "avx2,f16c")]
unsafe fn widen(src: *const u16, dst: *mut f32, n: usize) {
    let whole = n - n % 8;
    for i in (0..whole).step_by(8) {
        // SAFETY: i + 8 <= n.
        unsafe {
            let halves = _mm_loadu_si128(src.add(i).cast());
            _mm256_storeu_ps(dst.add(i), _mm256_cvtph_ps(halves));
        }
    }
    // SAFETY: the rest of both blocks.
    unsafe { Portable::f16_to_f32(src.add(whole), dst.add(whole), n - whole) };
}

/// # Safety
/// As [`Convert::f32_to_f16`], on a CPU with AVX2 and F16C.
#[target_feature(enable = "avx2,f16c")]
unsafe fn narrow(src: *const f32, dst: *mut u16, n: usize) {
    let whole = n - n % 8;
    for i in (0..whole).step_by(8) {
        // SAFETY: i + 8 <= n.
        unsafe {
            let halves = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm256_loadu_ps(src.add(i)));
            _mm_storeu_si128(dst.add(i).cast(), halves);
        }
    }
    // SAFETY: the rest of both blocks.
    unsafe { Portable::f32_to_f16(src.add(whole), dst.add(whole), n - whole) };
}
