//! The choice of the instruction set, made once.

use std::fmt;
use std::sync::OnceLock;

use horovod_protocol::DType;

use crate::blocks::{self, KernelTask, for_types};
use crate::half::Portable;
use crate::scalar;
use crate::spec::{Combine, Source, Spec};

/// An implementation of the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Isa {
    /// The oracle: one element at a time.
    Scalar,
    /// The generic loops, compiled for the least that the target has.
    Portable,
    /// AVX2 and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F, BW, VL and DQ.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// NEON.
    #[cfg(target_arch = "aarch64")]
    Neon,
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Scalar => "scalar",
            Self::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => "AVX2 with F16C",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => "AVX-512",
            #[cfg(target_arch = "aarch64")]
            Self::Neon => "NEON",
        })
    }
}

impl Isa {
    /// Whether this CPU can run it.
    pub fn is_available(self) -> bool {
        match self {
            Self::Scalar | Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "aarch64")]
            Self::Neon => true,
        }
    }

    /// All implementations this CPU can run, the best one last.
    pub fn available() -> Vec<Self> {
        let all = [
            Self::Scalar,
            Self::Portable,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2,
            #[cfg(target_arch = "x86_64")]
            Self::Avx512,
            #[cfg(target_arch = "aarch64")]
            Self::Neon,
        ];
        all.into_iter().filter(|isa| isa.is_available()).collect()
    }
}

/// The implementation used by this process: the best one available.
pub fn chosen() -> Isa {
    static CHOSEN: OnceLock<Isa> = OnceLock::new();
    *CHOSEN.get_or_init(|| Isa::available().pop().unwrap_or(Isa::Portable))
}

/// Combines `srcs` element by element, in their order, into `dst` and, in the same pass, `second`.
///
/// # Safety
/// - Every source is readable, `dst` and `second` are writable for `elems` elements of `spec.dtype`.
///   No pointer needs any alignment.
/// - A destination either is exactly one of the sources or overlaps none of them; the two
///   destinations do not overlap.
/// - Nobody writes to a source, or touches a destination, meanwhile.
///
/// # Panics
/// When there is no source, or the divisor is 0.
pub unsafe fn reduce(
    spec: &Spec,
    srcs: &[Source],
    dst: *mut u8,
    second: Option<*mut u8>,
    elems: usize,
) {
    // SAFETY: the caller's promise; `chosen` is available.
    unsafe { reduce_with(chosen(), spec, srcs, dst, second, elems) }
}

/// [`reduce`] by a given implementation; for tests and benchmarks.
///
/// # Safety
/// As [`reduce`].
///
/// # Panics
/// As [`reduce`], and when this CPU lacks `isa`.
pub unsafe fn reduce_with(
    isa: Isa,
    spec: &Spec,
    srcs: &[Source],
    dst: *mut u8,
    second: Option<*mut u8>,
    elems: usize,
) {
    assert!(!srcs.is_empty(), "a reduction needs at least one source");
    assert!(spec.divisor != 0, "an average needs a divisor");
    // There is nothing to average in `bool`, see the crate's documentation.
    let divisor = if spec.dtype == DType::Bool {
        1
    } else {
        spec.divisor
    };
    let task = KernelTask {
        srcs,
        dst,
        second,
        start: 0,
        elems,
        pre: spec.pre,
        divisor,
        post: spec.post,
    };
    assert!(isa.is_available(), "this CPU has no {isa}");
    // SAFETY: the caller's promise about the operands; the CPU has `isa`.
    unsafe {
        match isa {
            Isa::Scalar => scalar::reduce(spec, &task),
            Isa::Portable => portable(spec, &task),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => crate::x86_64::avx2::reduce(spec, &task),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => crate::x86_64::avx512::reduce(spec, &task),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => neon(spec, &task),
        }
    }
}

/// Multiplies `elems` elements of `src` by `factor` into `dst` (which may be `src`).
///
/// # Safety
/// As [`reduce`] with the one source `src`.
pub unsafe fn scale(dtype: DType, factor: f64, src: *const u8, dst: *mut u8, elems: usize) {
    let spec = Spec {
        post: factor,
        ..Spec::plain(dtype, Combine::Sum)
    };
    // SAFETY: the caller's promise, passed on.
    unsafe { reduce(&spec, &[Source::partial(src)], dst, None, elems) }
}

/// # Safety
/// As [`blocks::run`].
unsafe fn portable(spec: &Spec, task: &KernelTask<'_>) {
    /// # Safety
    /// As [`blocks::run`].
    unsafe fn typed<E: blocks::Load, O: crate::element::Binary<E>>(task: &KernelTask<'_>) {
        // SAFETY: the caller's promise, passed on.
        unsafe { blocks::run::<E, O, Portable>(task) }
    }
    // SAFETY: the caller's promise, passed on.
    unsafe { for_types!(spec.dtype, spec.combine, typed, task) }
}

/// # Safety
/// As [`blocks::run`].
#[cfg(target_arch = "aarch64")]
unsafe fn neon(spec: &Spec, task: &KernelTask<'_>) {
    /// # Safety
    /// As [`blocks::run`].
    unsafe fn typed<E: blocks::Load, O: crate::element::Binary<E>>(task: &KernelTask<'_>) {
        // SAFETY: the caller's promise, passed on; NEON is baseline.
        unsafe { blocks::run::<E, O, crate::aarch64::neon::Neon>(task) }
    }
    // SAFETY: the caller's promise, passed on.
    unsafe { for_types!(spec.dtype, spec.combine, typed, task) }
}
