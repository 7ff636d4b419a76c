//! The arithmetic of Adasum (Maleki et al., "Scaling Distributed Training with Adaptive Summation",
//! 2020): dot product and norms of two gradients, and their adaptive combination.
//!
//! Sums are kept in `f64`, in [`LANES`](crate::adasum_blocks::LANES) interleaved lanes that are then added pairwise, so that the
//! result does not depend on the instruction set.

use std::ops::AddAssign;

use horovod_protocol::DType;

use crate::adasum_blocks::{CombineArgs, DotArgs, Float, block_combine, block_dots, for_floats};
use crate::dispatch::{Isa, chosen};
use crate::half::Portable;
use crate::scalar;

/// `a·b`, `‖a‖²` and `‖b‖²` of (a slice of) two vectors; slices add up.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DotNorms {
    /// `a·b`.
    pub dot: f64,
    /// `‖a‖²`.
    pub norm_a: f64,
    /// `‖b‖²`.
    pub norm_b: f64,
}

impl AddAssign for DotNorms {
    fn add_assign(&mut self, other: Self) {
        self.dot += other.dot;
        self.norm_a += other.norm_a;
        self.norm_b += other.norm_b;
    }
}

/// `a·b`, `‖a‖²` and `‖b‖²` over `elems` elements, reproducible bit by bit.
///
/// # Safety
/// Both operands are readable for `elems` elements of `dtype`, and nobody writes to them meanwhile.
///
/// # Panics
/// When `dtype` is not a float type.
pub unsafe fn adasum_dot_norms(dtype: DType, a: *const u8, b: *const u8, elems: usize) -> DotNorms {
    // SAFETY: the caller's promise, passed on; `chosen` is available.
    unsafe { dot_norms_with(chosen(), dtype, &DotArgs { a, b, elems }) }
}

/// # Safety
/// As [`block_dots`]; the CPU has `isa`.
unsafe fn dot_norms_with(isa: Isa, dtype: DType, args: &DotArgs) -> DotNorms {
    // SAFETY: the caller's promise, passed on.
    let [dot, norm_a, norm_b] = unsafe {
        match isa {
            Isa::Scalar => scalar::dots(dtype, args),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => crate::x86_64::avx2::dots(dtype, args),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => crate::x86_64::avx512::dots(dtype, args),
            _ => for_floats!(dtype, portable_dots, args),
        }
    };
    DotNorms {
        dot,
        norm_a,
        norm_b,
    }
}

/// The factors of `a` and `b`: `1 - a·b / (2‖·‖²)`, or 1 where the norm is as good as zero.
pub fn adasum_coefficients(sums: DotNorms) -> (f64, f64) {
    // The square root of the least normal f64, as in the published implementation.
    let least = f64::MIN_POSITIVE.sqrt();
    let factor = |norm: f64| {
        if norm >= least {
            1.0 - sums.dot / (2.0 * norm)
        } else {
            1.0
        }
    };
    (factor(sums.norm_a), factor(sums.norm_b))
}

/// An operand of [`adasum_combine`] and its factor.
#[derive(Clone, Copy, Debug)]
pub struct Weighted {
    /// Its elements.
    pub data: *const u8,
    /// By what they are multiplied.
    pub factor: f64,
}

/// `dst = a.factor * a + b.factor * b`, computed in `f64` (halves then through `f32`) and rounded at the end.
///
/// # Safety
/// `a` and `b` are readable, `dst` is writable for `elems` elements of `dtype`; `dst` either is exactly
/// an operand or overlaps none; nobody else touches them meanwhile.
///
/// # Panics
/// When `dtype` is not a float type.
pub unsafe fn adasum_combine(dtype: DType, a: Weighted, b: Weighted, dst: *mut u8, elems: usize) {
    // SAFETY: the caller's promise, passed on; `chosen` is available.
    unsafe {
        combine_with(
            chosen(),
            dtype,
            &CombineArgs {
                a: a.data,
                ca: a.factor,
                b: b.data,
                cb: b.factor,
                dst,
                elems,
            },
        )
    }
}

/// # Safety
/// As [`block_combine`]; the CPU has `isa`.
unsafe fn combine_with(isa: Isa, dtype: DType, args: &CombineArgs) {
    // SAFETY: the caller's promise, passed on.
    unsafe {
        match isa {
            Isa::Scalar => scalar::combine(dtype, args),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => crate::x86_64::avx2::combine(dtype, args),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => crate::x86_64::avx512::combine(dtype, args),
            _ => for_floats!(dtype, portable_combine, args),
        }
    }
}

/// # Safety
/// As [`block_dots`].
unsafe fn portable_dots<E: Float>(args: &DotArgs) -> [f64; 3] {
    // SAFETY: the caller's promise, passed on.
    unsafe { block_dots::<E, Portable>(args) }
}

/// # Safety
/// As [`block_combine`].
unsafe fn portable_combine<E: Float>(args: &CombineArgs) {
    // SAFETY: the caller's promise, passed on.
    unsafe { block_combine::<E, Portable>(args) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocks::BLOCK;

    /// Values of mixed size and sign; exact in no particular way.
    fn values(n: usize, seed: u64) -> Vec<f64> {
        (0..n as u64)
            .map(|i| ((i * 7919 + seed * 104_729) % 2003) as f64 / 512.0 - 1.5)
            .collect()
    }

    fn encode(dtype: DType, values: &[f64]) -> Vec<u8> {
        values
            .iter()
            .flat_map(|v| match dtype {
                DType::F64 => v.to_ne_bytes().to_vec(),
                DType::F32 => (*v as f32).to_ne_bytes().to_vec(),
                DType::F16 => half::f16::from_f64(*v).to_bits().to_ne_bytes().to_vec(),
                _ => half::bf16::from_f64(*v).to_bits().to_ne_bytes().to_vec(),
            })
            .collect()
    }

    #[test]
    fn every_implementation_gives_the_oracles_bits() {
        for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64] {
            for n in [0, 1, 7, 15, 16, 17, 100, BLOCK - 1, BLOCK, 2 * BLOCK + 5] {
                let (a, b) = (encode(dtype, &values(n, 1)), encode(dtype, &values(n, 2)));
                let args = DotArgs {
                    a: a.as_ptr(),
                    b: b.as_ptr(),
                    elems: n,
                };
                // SAFETY: both vectors hold n elements.
                let want = unsafe { dot_norms_with(Isa::Scalar, dtype, &args) };
                let (ca, cb) = adasum_coefficients(want);
                let run = |isa| {
                    let mut out = vec![0u8; a.len()];
                    let dst = out.as_mut_ptr();
                    let args = CombineArgs {
                        a: args.a,
                        ca,
                        b: args.b,
                        cb,
                        dst,
                        elems: n,
                    };
                    // SAFETY: all three vectors hold n elements.
                    unsafe { combine_with(isa, dtype, &args) };
                    out
                };
                for isa in Isa::available() {
                    // SAFETY: both vectors hold n elements.
                    let got = unsafe { dot_norms_with(isa, dtype, &args) };
                    assert_eq!(got, want, "{isa} {dtype:?} {n}");
                    assert_eq!(run(isa), run(Isa::Scalar), "{isa} {dtype:?} {n}");
                }
            }
        }
    }

    #[test]
    fn orthogonal_gradients_add_and_equal_ones_average() {
        let sums = DotNorms {
            dot: 0.0,
            norm_a: 2.0,
            norm_b: 3.0,
        };
        assert_eq!(adasum_coefficients(sums), (1.0, 1.0));
        let sums = DotNorms {
            dot: 5.0,
            norm_a: 5.0,
            norm_b: 5.0,
        };
        assert_eq!(adasum_coefficients(sums), (0.5, 0.5));
    }

    #[test]
    fn a_zero_gradient_leaves_the_other_alone() {
        let sums = DotNorms {
            dot: 0.0,
            norm_a: 0.0,
            norm_b: 3.0,
        };
        assert_eq!(adasum_coefficients(sums), (1.0, 1.0));
    }
}
