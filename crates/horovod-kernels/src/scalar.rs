//! The oracle: one element at a time, halves by the `half` crate, no blocks, nothing clever.

use horovod_protocol::DType;

use crate::adasum_blocks::{CombineArgs, DotArgs, LANES, fold};
use crate::blocks::KernelTask;
use crate::element::{Bf16, Binary, Bool, Element, F16, Wide};
use crate::spec::Spec;

/// Loads and stores of one element.
trait One: Element {
    fn widen(self) -> Self::Acc;
    fn narrow(acc: Self::Acc) -> Self;
}

macro_rules! same {
    ($($t:ty),*) => { $(
        impl One for $t {
            fn widen(self) -> Self { self }
            fn narrow(acc: Self) -> Self { acc }
        }
    )* };
}
same!(u8, i8, u16, i16, u32, i32, u64, i64, f32, f64, Bool);

macro_rules! wide {
    ($($t:ty),*) => { $(
        impl One for Wide<$t> {
            fn widen(self) -> Self::Acc { self.0.into() }
            fn narrow(acc: Self::Acc) -> Self { Self(acc as $t) }
        }
    )* };
}
wide!(u8, i8, u16, i16, u32, i32, u64, i64);

impl One for F16 {
    fn widen(self) -> f32 {
        half::f16::from_bits(self.0).to_f32()
    }
    fn narrow(acc: f32) -> Self {
        Self(half::f16::from_f32(acc).to_bits())
    }
}

impl One for Bf16 {
    fn widen(self) -> f32 {
        half::bf16::from_bits(self.0).to_f32()
    }
    fn narrow(acc: f32) -> Self {
        Self(half::bf16::from_f32(acc).to_bits())
    }
}

/// # Safety
/// As [`crate::blocks::run`].
unsafe fn typed<E: One, O: Binary<E>>(task: &KernelTask<'_>) {
    for i in 0..task.elems {
        // SAFETY: i < elems, for which every source is readable.
        let operands = task.srcs.iter().map(|source| unsafe {
            let value = source.ptr.cast::<E>().add(i).read_unaligned().widen();
            if source.pre && task.pre != 1.0 {
                E::scale(value, task.pre)
            } else {
                value
            }
        });
        let Some(mut value) = operands.reduce(O::apply) else {
            return;
        };
        value = match (task.divisor != 1, task.post != 1.0) {
            (true, true) => E::divide_and_scale(value, task.divisor, task.post),
            (true, false) => E::divide(value, task.divisor),
            (false, true) => E::scale(value, task.post),
            (false, false) => value,
        };
        let result = E::narrow(value);
        // SAFETY: i < elems, for which the destinations are writable.
        unsafe {
            task.dst.cast::<E>().add(i).write_unaligned(result);
            if let Some(second) = task.second {
                second.cast::<E>().add(i).write_unaligned(result);
            }
        }
    }
}

/// # Safety
/// As [`crate::blocks::run`].
pub(crate) unsafe fn reduce(spec: &Spec, task: &KernelTask<'_>) {
    // SAFETY: the caller's promise, passed on.
    unsafe { crate::blocks::for_types!(spec.dtype, spec.combine, typed, task) }
}

/// Sums of products in `f64`, in the lanes and the order that `adasum.rs` defines.
///
/// # Safety
/// As [`crate::adasum_blocks::block_dots`].
pub(crate) unsafe fn dots(dtype: DType, args: &DotArgs) -> [f64; 3] {
    let mut lanes = [[0.0f64; LANES]; 3];
    for i in 0..args.elems {
        // SAFETY: i < elems, for which both are readable.
        let (x, y) = unsafe { (value(dtype, args.a, i), value(dtype, args.b, i)) };
        for (sum, product) in lanes.iter_mut().zip([x * y, x * x, y * y]) {
            sum[i % LANES] += product;
        }
    }
    lanes.map(|lanes| fold(&lanes))
}

/// # Safety
/// As [`crate::adasum_blocks::block_combine`].
pub(crate) unsafe fn combine(dtype: DType, args: &CombineArgs) {
    for i in 0..args.elems {
        // SAFETY: i < elems, for which all are readable or writable.
        unsafe {
            let (x, y) = (value(dtype, args.a, i), value(dtype, args.b, i));
            let sum = args.ca * x + args.cb * y;
            match dtype {
                DType::F64 => args.dst.cast::<f64>().add(i).write_unaligned(sum),
                DType::F32 => args.dst.cast::<f32>().add(i).write_unaligned(sum as f32),
                DType::F16 => {
                    args.dst
                        .cast::<F16>()
                        .add(i)
                        .write_unaligned(F16::narrow(sum as f32));
                }
                _ => args
                    .dst
                    .cast::<Bf16>()
                    .add(i)
                    .write_unaligned(Bf16::narrow(sum as f32)),
            }
        }
    }
}

/// # Safety
/// `p` is readable at element `i` of the float type `dtype`.
unsafe fn value(dtype: DType, p: *const u8, i: usize) -> f64 {
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            DType::F16 => f64::from(p.cast::<F16>().add(i).read_unaligned().widen()),
            DType::BF16 => f64::from(p.cast::<Bf16>().add(i).read_unaligned().widen()),
            DType::F32 => f64::from(p.cast::<f32>().add(i).read_unaligned()),
            _ => p.cast::<f64>().add(i).read_unaligned(),
        }
    }
}
