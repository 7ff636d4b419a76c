//! AVX-512 (F, BW, VL, DQ): the generic loops compiled for it, halves by hand.

use std::arch::x86_64::*;

use horovod_protocol::DType;

use crate::adasum::{self, CombineArgs, DotArgs, Float, for_floats};
use crate::blocks::{self, Job, Load, for_types};
use crate::element::Binary;
use crate::half::{Convert, Portable};
use crate::spec::{Combine, Spec};
use crate::x86_64::sums::{self, Lanes, for_float_lanes};

pub(crate) struct Avx512;

impl Convert for Avx512 {
    #[inline(always)]
    unsafe fn f16_to_f32(src: *const u16, dst: *mut f32, n: usize) {
        // SAFETY: the caller's promise, passed on.
        unsafe { widen(src, dst, n) }
    }
    #[inline(always)]
    unsafe fn f32_to_f16(src: *const f32, dst: *mut u16, n: usize) {
        // SAFETY: the caller's promise, passed on.
        unsafe { narrow(src, dst, n) }
    }
}

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

/// # Safety
/// As [`blocks::run`], on a CPU with these features.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
unsafe fn typed<E: Load, O: Binary<E>>(job: &Job<'_>) {
    // SAFETY: the caller's promise, passed on.
    unsafe { blocks::run::<E, O, Avx512>(job) }
}

/// # Safety
/// As [`sums::sum`], on a CPU with these features.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
unsafe fn typed_sum<L: Lanes>(job: &Job<'_>) -> usize {
    // SAFETY: the caller's promise, passed on.
    unsafe { sums::sum::<L>(job) }
}

/// # Safety
/// As [`blocks::run`], on a CPU with these features.
pub(crate) unsafe fn reduce(spec: &Spec, job: &Job<'_>) {
    // SAFETY: the caller's promise, passed on; the rest of the operands lies within them.
    unsafe {
        let mut done = 0;
        if spec.combine == Combine::Sum {
            done = for_float_lanes!(
                spec.dtype,
                typed_sum,
                job,
                sums::F16x16,
                sums::Bf16x16,
                sums::F32x16,
                sums::F64x8
            );
        }
        if done < job.elems {
            let rest = Job {
                start: done,
                ..*job
            };
            for_types!(spec.dtype, spec.combine, typed, &rest)
        }
    }
}

/// # Safety
/// As [`adasum::block_dots`], on a CPU with these features.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
unsafe fn typed_dots<E: Float>(args: &DotArgs) -> [f64; 3] {
    // SAFETY: the caller's promise, passed on.
    unsafe { adasum::block_dots::<E, Avx512>(args) }
}

/// # Safety
/// As [`adasum::block_dots`], on a CPU with these features.
pub(crate) unsafe fn dots(dtype: DType, args: &DotArgs) -> [f64; 3] {
    // SAFETY: the caller's promise, passed on.
    unsafe { for_floats!(dtype, typed_dots, args) }
}

/// # Safety
/// As [`adasum::block_combine`], on a CPU with these features.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
unsafe fn typed_combine<E: Float>(args: &CombineArgs) {
    // SAFETY: the caller's promise, passed on.
    unsafe { adasum::block_combine::<E, Avx512>(args) }
}

/// # Safety
/// As [`adasum::block_combine`], on a CPU with these features.
pub(crate) unsafe fn combine(dtype: DType, args: &CombineArgs) {
    // SAFETY: the caller's promise, passed on.
    unsafe { for_floats!(dtype, typed_combine, args) }
}
