//! The arithmetic of Adasum (Maleki et al., "Scaling Distributed Training with Adaptive Summation",
//! 2020): dot product and norms of two gradients, and their adaptive combination.
//!
//! Sums are kept in `f64`, in [`LANES`] interleaved lanes that are then added pairwise, so that the
//! result does not depend on the instruction set.

use std::mem::MaybeUninit;
use std::ops::AddAssign;

use horovod_protocol::DType;

use crate::blocks::{BLOCK, Load};
use crate::dispatch::{Isa, chosen};
use crate::element::{Bf16, F16};
use crate::half::{Convert, Portable};
use crate::scalar;

/// Independent partial sums; element `i` belongs to lane `i % LANES`.
pub(crate) const LANES: usize = 16;

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

/// An element type Adasum is defined for.
pub(crate) trait Float: Load<Acc: Into<f64>> {
    fn from_f64(value: f64) -> Self::Acc;
}
impl Float for f32 {
    #[inline(always)]
    fn from_f64(value: f64) -> f32 {
        value as f32
    }
}
impl Float for f64 {
    #[inline(always)]
    fn from_f64(value: f64) -> f64 {
        value
    }
}
impl Float for F16 {
    #[inline(always)]
    fn from_f64(value: f64) -> f32 {
        value as f32
    }
}
impl Float for Bf16 {
    #[inline(always)]
    fn from_f64(value: f64) -> f32 {
        value as f32
    }
}

/// Operands of [`block_dots`].
pub(crate) struct DotArgs {
    pub(crate) a: *const u8,
    pub(crate) b: *const u8,
    pub(crate) elems: usize,
}

/// Operands of [`block_combine`].
pub(crate) struct CombineArgs {
    pub(crate) a: *const u8,
    pub(crate) ca: f64,
    pub(crate) b: *const u8,
    pub(crate) cb: f64,
    pub(crate) dst: *mut u8,
    pub(crate) elems: usize,
}

/// Calls `$run::<Element>($args)` for a float type.
macro_rules! for_floats {
    ($dtype:expr, $run:ident, $args:expr) => {
        match $dtype {
            horovod_protocol::DType::F16 => $run::<$crate::element::F16>($args),
            horovod_protocol::DType::BF16 => $run::<$crate::element::Bf16>($args),
            horovod_protocol::DType::F32 => $run::<f32>($args),
            horovod_protocol::DType::F64 => $run::<f64>($args),
            other => panic!("Adasum is for floats, not {}", other.name()),
        }
    };
}
// Only the code for these instruction sets takes it from here.
#[cfg(target_arch = "x86_64")]
pub(crate) use for_floats;

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

/// Adds the lanes pairwise.
pub(crate) fn fold(lanes: &[f64; LANES]) -> f64 {
    let mut sums = *lanes;
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            sums[i] += sums[i + half];
        }
        half /= 2;
    }
    sums[0]
}

/// # Safety
/// Both operands are readable for `elems` elements; the CPU has what `C` was compiled for.
#[inline(always)]
pub(crate) unsafe fn block_dots<E: Float, C: Convert>(args: &DotArgs) -> [f64; 3] {
    let mut x = [MaybeUninit::<E::Acc>::uninit(); BLOCK];
    let mut y = [MaybeUninit::<E::Acc>::uninit(); BLOCK];
    let (x, y) = (
        x.as_mut_ptr().cast::<E::Acc>(),
        y.as_mut_ptr().cast::<E::Acc>(),
    );
    let mut lanes = [[0.0f64; LANES]; 3];
    let mut start = 0;
    while start < args.elems {
        let n = BLOCK.min(args.elems - start);
        // SAFETY: start + n <= elems; x and y hold BLOCK >= n elements and are written before read.
        unsafe {
            E::load::<C>(args.a.cast::<E>().add(start), x, n);
            E::load::<C>(args.b.cast::<E>().add(start), y, n);
            // Blocks are whole rows of lanes, so element i is in lane i % LANES throughout.
            for row in (0..n).step_by(LANES) {
                let (x, y, count) = (x.add(row), y.add(row), LANES.min(n - row));
                let at = |i| (x.add(i).read().into(), y.add(i).read().into());
                // Two calls, so that the usual one has a length the compiler knows.
                if count == LANES {
                    add_row(&mut lanes, LANES, at);
                } else {
                    add_row(&mut lanes, count, at);
                }
            }
        }
        start += n;
    }
    [fold(&lanes[0]), fold(&lanes[1]), fold(&lanes[2])]
}

/// Adds one element to each of the first `count` lanes.
#[inline(always)]
fn add_row(lanes: &mut [[f64; LANES]; 3], count: usize, at: impl Fn(usize) -> (f64, f64)) {
    let [dot, norm_a, norm_b] = lanes;
    let sums = dot.iter_mut().zip(norm_a).zip(norm_b);
    for (i, ((dot, norm_a), norm_b)) in sums.enumerate().take(count) {
        let (p, q) = at(i);
        *dot += p * q;
        *norm_a += p * p;
        *norm_b += q * q;
    }
}

/// # Safety
/// As [`adasum_combine`]; the CPU has what `C` was compiled for.
#[inline(always)]
pub(crate) unsafe fn block_combine<E: Float, C: Convert>(args: &CombineArgs) {
    let mut x = [MaybeUninit::<E::Acc>::uninit(); BLOCK];
    let mut y = [MaybeUninit::<E::Acc>::uninit(); BLOCK];
    let (x, y) = (
        x.as_mut_ptr().cast::<E::Acc>(),
        y.as_mut_ptr().cast::<E::Acc>(),
    );
    let mut start = 0;
    while start < args.elems {
        let n = BLOCK.min(args.elems - start);
        // SAFETY: start + n <= elems; x and y hold BLOCK >= n elements and are written before read.
        unsafe {
            E::load::<C>(args.a.cast::<E>().add(start), x, n);
            E::load::<C>(args.b.cast::<E>().add(start), y, n);
            for i in 0..n {
                let (p, q): (f64, f64) = (x.add(i).read().into(), y.add(i).read().into());
                x.add(i).write(E::from_f64(args.ca * p + args.cb * q));
            }
            E::store::<C>(x, args.dst.cast::<E>().add(start), n);
        }
        start += n;
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
