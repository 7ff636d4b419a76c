//! The k-way reduction as loops over blocks that fit the first-level cache.
//!
//! Each instruction set compiles these generic loops for itself. Results pass through a local block
//! rather than straight to the destination: the compiler then knows that nothing overlaps and
//! vectorises also when the destination is one of the sources.

use std::mem::MaybeUninit;
use std::ptr;

use crate::element::{Bf16, Binary, Bool, Element, F16, Wide};
use crate::half::Convert;
use crate::spec::Source;

/// Elements per block: 8 KiB of the widest accumulator.
pub(crate) const BLOCK: usize = 1024;

/// Operands and factors of one reduction; [`crate::Spec`] with the types taken out.
pub(crate) struct KernelTask<'a> {
    pub(crate) srcs: &'a [Source],
    pub(crate) dst: *mut u8,
    pub(crate) second: Option<*mut u8>,
    /// Elements before this are done.
    pub(crate) start: usize,
    /// All elements, those before `start` included.
    pub(crate) elems: usize,
    pub(crate) pre: f64,
    pub(crate) divisor: u32,
    pub(crate) post: f64,
}

/// How blocks of an element move between memory and accumulators.
pub(crate) trait Load: Element {
    /// # Safety
    /// `src` is readable and `acc` writable for `n` elements, without overlap.
    unsafe fn load<C: Convert>(src: *const Self, acc: *mut Self::Acc, n: usize);
    /// # Safety
    /// `acc` is readable and `dst` writable for `n` elements, without overlap.
    unsafe fn store<C: Convert>(acc: *const Self::Acc, dst: *mut Self, n: usize);
}

macro_rules! direct {
    ($($t:ty),*) => { $(
        impl Load for $t {
            #[inline(always)]
            unsafe fn load<C: Convert>(src: *const Self, acc: *mut Self, n: usize) {
                // SAFETY: the caller's promise; bytes, so alignment does not matter.
                unsafe { ptr::copy_nonoverlapping(src.cast::<u8>(), acc.cast(), n * size_of::<Self>()) }
            }
            #[inline(always)]
            unsafe fn store<C: Convert>(acc: *const Self, dst: *mut Self, n: usize) {
                // SAFETY: the caller's promise; bytes, so alignment does not matter.
                unsafe { ptr::copy_nonoverlapping(acc.cast::<u8>(), dst.cast(), n * size_of::<Self>()) }
            }
        }
    )* };
}
direct!(u8, i8, u16, i16, u32, i32, u64, i64, f32, f64, Bool);

macro_rules! wide {
    ($($t:ty),*) => { $(
        impl Load for Wide<$t> {
            #[inline(always)]
            unsafe fn load<C: Convert>(src: *const Self, acc: *mut Self::Acc, n: usize) {
                for i in 0..n {
                    // SAFETY: i < n; the source may be unaligned.
                    unsafe { acc.add(i).write(src.add(i).read_unaligned().0.into()) };
                }
            }
            #[inline(always)]
            unsafe fn store<C: Convert>(acc: *const Self::Acc, dst: *mut Self, n: usize) {
                for i in 0..n {
                    // SAFETY: i < n; the destination may be unaligned.
                    unsafe { dst.add(i).write_unaligned(Wide(acc.add(i).read() as $t)) };
                }
            }
        }
    )* };
}
wide!(u8, i8, u16, i16, u32, i32, u64, i64);

impl Load for F16 {
    #[inline(always)]
    unsafe fn load<C: Convert>(src: *const Self, acc: *mut f32, n: usize) {
        // SAFETY: the caller's promise, passed on.
        unsafe { C::f16_to_f32(src.cast(), acc, n) }
    }
    #[inline(always)]
    unsafe fn store<C: Convert>(acc: *const f32, dst: *mut Self, n: usize) {
        // SAFETY: the caller's promise, passed on.
        unsafe { C::f32_to_f16(acc, dst.cast(), n) }
    }
}

impl Load for Bf16 {
    #[inline(always)]
    unsafe fn load<C: Convert>(src: *const Self, acc: *mut f32, n: usize) {
        // SAFETY: the caller's promise, passed on.
        unsafe { C::bf16_to_f32(src.cast(), acc, n) }
    }
    #[inline(always)]
    unsafe fn store<C: Convert>(acc: *const f32, dst: *mut Self, n: usize) {
        // SAFETY: the caller's promise, passed on.
        unsafe { C::f32_to_bf16(acc, dst.cast(), n) }
    }
}

/// Runs one job for one element type and operation.
///
/// # Safety
/// - Every source is readable, `dst` and `second` are writable for `elems` elements.
/// - A destination is exactly a source or overlaps none; the two destinations do not overlap.
/// - The CPU has what `C` was compiled for.
#[inline(always)]
pub(crate) unsafe fn run<E: Load, O: Binary<E>, C: Convert>(task: &KernelTask<'_>) {
    let mut acc = [MaybeUninit::<E::Acc>::uninit(); BLOCK];
    let mut tmp = [MaybeUninit::<E::Acc>::uninit(); BLOCK];
    let (acc, tmp) = (
        acc.as_mut_ptr().cast::<E::Acc>(),
        tmp.as_mut_ptr().cast::<E::Acc>(),
    );
    let mut start = task.start;
    while start < task.elems {
        let n = BLOCK.min(task.elems - start);
        // SAFETY: start + n <= elems, and acc and tmp hold BLOCK >= n elements; all elements of acc
        // below n are written before they are read.
        unsafe {
            gather::<E, O, C>(task, start, n, acc, tmp);
            match (task.divisor != 1, task.post != 1.0) {
                (true, true) => {
                    map::<E>(acc, n, |a| E::divide_and_scale(a, task.divisor, task.post))
                }
                (true, false) => map::<E>(acc, n, |a| E::divide(a, task.divisor)),
                (false, true) => map::<E>(acc, n, |a| E::scale(a, task.post)),
                (false, false) => {}
            }
            E::store::<C>(acc, task.dst.cast::<E>().add(start), n);
            if let Some(second) = task.second {
                E::store::<C>(acc, second.cast::<E>().add(start), n);
            }
        }
        start += n;
    }
}

/// Combines one block of all sources into `acc`.
///
/// # Safety
/// As [`run`]; `start + n <= task.elems`; `acc` and `tmp` hold `n` elements.
#[inline(always)]
unsafe fn gather<E: Load, O: Binary<E>, C: Convert>(
    task: &KernelTask<'_>,
    start: usize,
    n: usize,
    acc: *mut E::Acc,
    tmp: *mut E::Acc,
) {
    let mut sources = task.srcs.iter().enumerate();
    if let ([a, b, ..], true) = (task.srcs, E::DIRECT && task.pre == 1.0) {
        // SAFETY: both are readable for elems >= start + n elements.
        unsafe {
            let (a, b) = (a.ptr.cast::<E::Acc>(), b.ptr.cast::<E::Acc>());
            zip_into::<E, O>(a.add(start), b.add(start), acc, n);
        }
        sources.nth(1);
    }
    for (k, source) in sources {
        // SAFETY: the source is readable for elems >= start + n elements.
        unsafe {
            let src = source.ptr.cast::<E>().add(start);
            let scaled = source.pre && task.pre != 1.0;
            if k == 0 || scaled || !E::DIRECT {
                let into = if k == 0 { acc } else { tmp };
                E::load::<C>(src, into, n);
                if scaled {
                    map::<E>(into, n, |a| E::scale(a, task.pre));
                }
                if k > 0 {
                    zip::<E, O>(acc, tmp, n);
                }
            } else {
                // Same representation, nothing to do before: combine straight from the source.
                zip::<E, O>(acc, src.cast::<E::Acc>(), n);
            }
        }
    }
}

/// # Safety
/// `acc` is readable and writable for `n` elements.
#[inline(always)]
unsafe fn map<E: Element>(acc: *mut E::Acc, n: usize, f: impl Fn(E::Acc) -> E::Acc) {
    for i in 0..n {
        // SAFETY: i < n.
        unsafe { acc.add(i).write(f(acc.add(i).read())) };
    }
}

/// # Safety
/// `acc` is readable and writable, `src` readable for `n` elements, without overlap.
#[inline(always)]
unsafe fn zip<E: Element, O: Binary<E>>(acc: *mut E::Acc, src: *const E::Acc, n: usize) {
    for i in 0..n {
        // SAFETY: i < n; the source may be unaligned.
        unsafe {
            acc.add(i)
                .write(O::apply(acc.add(i).read(), src.add(i).read_unaligned()))
        };
    }
}

/// # Safety
/// `a` and `b` are readable, `acc` is writable for `n` elements and overlaps neither.
#[inline(always)]
unsafe fn zip_into<E: Element, O: Binary<E>>(
    a: *const E::Acc,
    b: *const E::Acc,
    acc: *mut E::Acc,
    n: usize,
) {
    for i in 0..n {
        // SAFETY: i < n; the sources may be unaligned.
        unsafe {
            let value = O::apply(a.add(i).read_unaligned(), b.add(i).read_unaligned());
            acc.add(i).write(value);
        }
    }
}

/// Calls `$run::<Element, Operation>($task)` for a runtime type and operation.
macro_rules! for_types {
    ($dtype:expr, $combine:expr, $run:ident, $task:expr) => {{
        use horovod_protocol::DType;
        macro_rules! for_op {
            ($t:ty) => {
                match $combine {
                    $crate::spec::Combine::Sum => $run::<$t, $crate::element::Sum>($task),
                    $crate::spec::Combine::Min => $run::<$t, $crate::element::Min>($task),
                    $crate::spec::Combine::Max => $run::<$t, $crate::element::Max>($task),
                    $crate::spec::Combine::Product => $run::<$t, $crate::element::Product>($task),
                }
            };
        }
        macro_rules! for_int {
            ($t:ty) => {
                match $combine {
                    // A sum that is to be divided; nothing else is ever divided.
                    $crate::spec::Combine::Sum if $task.divisor != 1 => {
                        $run::<$crate::element::Wide<$t>, $crate::element::Sum>($task)
                    }
                    _ => for_op!($t),
                }
            };
        }
        match $dtype {
            DType::U8 => for_int!(u8),
            DType::I8 => for_int!(i8),
            DType::U16 => for_int!(u16),
            DType::I16 => for_int!(i16),
            DType::U32 => for_int!(u32),
            DType::I32 => for_int!(i32),
            DType::U64 => for_int!(u64),
            DType::I64 => for_int!(i64),
            DType::F16 => for_op!($crate::element::F16),
            DType::BF16 => for_op!($crate::element::Bf16),
            DType::F32 => for_op!(f32),
            DType::F64 => for_op!(f64),
            DType::Bool => for_op!($crate::element::Bool),
        }
    }};
}
pub(crate) use for_types;
