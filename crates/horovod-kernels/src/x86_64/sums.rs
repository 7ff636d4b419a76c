//! Sums of floats held in registers: each element is read once per source and written once per
//! destination, with nothing in between. The arithmetic is that of `element.rs`, lane by lane.

use std::arch::x86_64::*;

use crate::blocks::KernelTask;

/// A vector register full of one element type, in the type it is combined in.
pub(crate) trait Lanes {
    /// Elements of one register.
    const LANES: usize;
    /// Bytes of one element in memory.
    const SIZE: usize;
    type Vector: Copy;

    /// # Safety
    /// `LANES` elements at `src` are readable; the CPU has what the implementation uses. So for all.
    unsafe fn load(src: *const u8) -> Self::Vector;
    /// # Safety
    /// `LANES` elements at `dst` are writable.
    unsafe fn store(a: Self::Vector, dst: *mut u8);
    /// # Safety
    /// As above.
    unsafe fn add(a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// # Safety
    /// As above.
    unsafe fn multiply(a: Self::Vector, factor: f64) -> Self::Vector;
    /// # Safety
    /// As above.
    unsafe fn divide(a: Self::Vector, divisor: u32) -> Self::Vector;
}

/// Registers in flight at a time, so that the loads of one do not wait for the sums of another.
const UNROLLED: usize = 4;

/// Sums as many elements as fill whole rounds of registers; returns how many.
///
/// # Safety
/// As [`crate::blocks::run`], for elements of `L`.
#[inline(always)]
pub(crate) unsafe fn sum<L: Lanes>(task: &KernelTask<'_>) -> usize {
    let round = UNROLLED * L::LANES;
    let whole = task.elems - task.elems % round;
    let Some((first, rest)) = task.srcs.split_first() else {
        return 0;
    };
    let width = L::LANES * L::SIZE;
    let mut at = 0;
    while at < whole * L::SIZE {
        // SAFETY: at / SIZE + round <= whole <= elems, for which all operands are good. A destination
        // that is a source has been read here before it is written.
        unsafe {
            let mut sums = [L::load(first.ptr.add(at)); UNROLLED];
            for (j, sum) in sums.iter_mut().enumerate().skip(1) {
                *sum = L::load(first.ptr.add(at + j * width));
            }
            if first.pre && task.pre != 1.0 {
                sums = sums.map(|sum| L::multiply(sum, task.pre));
            }
            for source in rest {
                let scaled = source.pre && task.pre != 1.0;
                for (j, sum) in sums.iter_mut().enumerate() {
                    let mut value = L::load(source.ptr.add(at + j * width));
                    if scaled {
                        value = L::multiply(value, task.pre);
                    }
                    *sum = L::add(*sum, value);
                }
            }
            if task.divisor != 1 {
                sums = sums.map(|sum| L::divide(sum, task.divisor));
            }
            if task.post != 1.0 {
                sums = sums.map(|sum| L::multiply(sum, task.post));
            }
            for (j, sum) in sums.iter().enumerate() {
                L::store(*sum, task.dst.add(at + j * width));
            }
            if let Some(second) = task.second {
                for (j, sum) in sums.iter().enumerate() {
                    L::store(*sum, second.add(at + j * width));
                }
            }
        }
        at += round * L::SIZE;
    }
    whole
}

macro_rules! lanes {
    (
        $(#[$doc:meta])* $name:ident, $lanes:expr, $size:expr, $vector:ty, $float:ty,
        $add:ident, $mul:ident, $div:ident, $set:ident,
        |$src:ident| $load:expr, |$a:ident, $dst:ident| $store:expr
    ) => {
        $(#[$doc])*
        pub(crate) struct $name;
        impl Lanes for $name {
            const LANES: usize = $lanes;
            const SIZE: usize = $size;
            type Vector = $vector;
            #[inline(always)]
            unsafe fn load($src: *const u8) -> $vector {
                // SAFETY: the caller's promise.
                unsafe { $load }
            }
            #[inline(always)]
            unsafe fn store($a: $vector, $dst: *mut u8) {
                // SAFETY: the caller's promise.
                unsafe { $store }
            }
            #[inline(always)]
            unsafe fn add(a: $vector, b: $vector) -> $vector {
                // SAFETY: the caller's promise.
                unsafe { $add(a, b) }
            }
            #[inline(always)]
            unsafe fn multiply(a: $vector, factor: f64) -> $vector {
                // SAFETY: the caller's promise.
                unsafe { $mul(a, $set(factor as $float)) }
            }
            #[inline(always)]
            unsafe fn divide(a: $vector, divisor: u32) -> $vector {
                // SAFETY: the caller's promise.
                unsafe { $div(a, $set(divisor as $float)) }
            }
        }
    };
}

lanes! {
    /// AVX-512 F.
    F32x16, 16, 4, __m512, f32, _mm512_add_ps, _mm512_mul_ps, _mm512_div_ps, _mm512_set1_ps,
    |src| _mm512_loadu_ps(src.cast()), |a, dst| _mm512_storeu_ps(dst.cast(), a)
}
lanes! {
    /// AVX-512 F.
    F64x8, 8, 8, __m512d, f64, _mm512_add_pd, _mm512_mul_pd, _mm512_div_pd, _mm512_set1_pd,
    |src| _mm512_loadu_pd(src.cast()), |a, dst| _mm512_storeu_pd(dst.cast(), a)
}
lanes! {
    /// AVX-512 F.
    F16x16, 16, 2, __m512, f32, _mm512_add_ps, _mm512_mul_ps, _mm512_div_ps, _mm512_set1_ps,
    |src| _mm512_cvtph_ps(_mm256_loadu_si256(src.cast())),
    |a, dst| _mm256_storeu_si256(dst.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(a))
}
lanes! {
    /// AVX-512 F.
    Bf16x16, 16, 2, __m512, f32, _mm512_add_ps, _mm512_mul_ps, _mm512_div_ps, _mm512_set1_ps,
    |src| bf16_widened_512(src), |a, dst| _mm256_storeu_si256(dst.cast(), bf16_rounded_512(a))
}
lanes! {
    /// AVX.
    F32x8, 8, 4, __m256, f32, _mm256_add_ps, _mm256_mul_ps, _mm256_div_ps, _mm256_set1_ps,
    |src| _mm256_loadu_ps(src.cast()), |a, dst| _mm256_storeu_ps(dst.cast(), a)
}
lanes! {
    /// AVX.
    F64x4, 4, 8, __m256d, f64, _mm256_add_pd, _mm256_mul_pd, _mm256_div_pd, _mm256_set1_pd,
    |src| _mm256_loadu_pd(src.cast()), |a, dst| _mm256_storeu_pd(dst.cast(), a)
}
lanes! {
    /// AVX and F16C.
    F16x8, 8, 2, __m256, f32, _mm256_add_ps, _mm256_mul_ps, _mm256_div_ps, _mm256_set1_ps,
    |src| _mm256_cvtph_ps(_mm_loadu_si128(src.cast())),
    |a, dst| _mm_storeu_si128(dst.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(a))
}
lanes! {
    /// AVX2.
    Bf16x8, 8, 2, __m256, f32, _mm256_add_ps, _mm256_mul_ps, _mm256_div_ps, _mm256_set1_ps,
    |src| bf16_widened_256(src), |a, dst| _mm_storeu_si128(dst.cast(), bf16_rounded_256(a))
}

/// # Safety
/// 16 halves at `src` are readable; AVX-512 F.
#[inline(always)]
unsafe fn bf16_widened_512(src: *const u8) -> __m512 {
    // SAFETY: the caller's promise.
    unsafe {
        let halves = _mm512_cvtepu16_epi32(_mm256_loadu_si256(src.cast()));
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(halves))
    }
}

/// `half::f32_to_bf16` of 16 values. (The instruction for it flushes subnormals to zero.)
///
/// # Safety
/// AVX-512 F.
#[inline(always)]
unsafe fn bf16_rounded_512(a: __m512) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        let bits = _mm512_castps_si512(a);
        let high = _mm512_srli_epi32::<16>(bits);
        let odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
        let half_unit = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
        let rounded = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, half_unit));
        let quiet_nan = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
        let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(a, a);
        _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, is_nan, quiet_nan))
    }
}

/// # Safety
/// 8 halves at `src` are readable; AVX2.
#[inline(always)]
unsafe fn bf16_widened_256(src: *const u8) -> __m256 {
    // SAFETY: the caller's promise.
    unsafe {
        let halves = _mm256_cvtepu16_epi32(_mm_loadu_si128(src.cast()));
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(halves))
    }
}

/// [`bf16_rounded_512`] of 8 values.
///
/// # Safety
/// AVX2.
#[inline(always)]
unsafe fn bf16_rounded_256(a: __m256) -> __m128i {
    // SAFETY: the caller's promise.
    unsafe {
        let bits = _mm256_castps_si256(a);
        let high = _mm256_srli_epi32::<16>(bits);
        let odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
        let half_unit = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
        let rounded = _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, half_unit));
        let quiet_nan = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
        let is_nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(a, a));
        let chosen = _mm256_blendv_epi8(rounded, quiet_nan, is_nan);
        // Packing works within 128-bit halves; both now fit 16 bits.
        let packed = _mm256_packus_epi32(chosen, chosen);
        _mm256_castsi256_si128(_mm256_permute4x64_epi64::<0b1000>(packed))
    }
}

/// Calls the typed function for a float type; 0 elements done for the others.
macro_rules! for_float_lanes {
    ($dtype:expr, $run:ident, $task:expr, $f16:ty, $bf16:ty, $f32:ty, $f64:ty) => {
        match $dtype {
            horovod_protocol::DType::F16 => $run::<$f16>($task),
            horovod_protocol::DType::BF16 => $run::<$bf16>($task),
            horovod_protocol::DType::F32 => $run::<$f32>($task),
            horovod_protocol::DType::F64 => $run::<$f64>($task),
            _ => 0,
        }
    };
}
pub(crate) use for_float_lanes;
