//! The loops of Adasum, the same for every instruction set: one block of elements after the other.

use std::mem::MaybeUninit;

use crate::blocks::{BLOCK, Load};
use crate::element::{Bf16, F16};
use crate::half::Convert;

/// Independent partial sums; element `i` belongs to lane `i % LANES`.
pub(crate) const LANES: usize = 16;

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
pub(crate) use for_floats;

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
/// As [`crate::adasum_combine`]; the CPU has what `C` was compiled for.
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
