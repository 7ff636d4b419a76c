//! The entry into one instruction set, the same for all: each generic loop compiled with the set's features, and the
//! choice of the loop for a type.

/// Makes `reduce`, `dots`, `combine`, `out_and_in` and the conversions of halves for an instruction set. `widen` and `narrow` stand
/// beside it, by hand.
macro_rules! entry_points {
    (
        $(#[$doc:meta])* $set:ident, $features:tt,
        register: $register:ty, sums: [$f16:ty, $bf16:ty, $f32:ty, $f64:ty]
    ) => {
        $(#[$doc])*
        pub(crate) struct $set;

        impl crate::half::Convert for $set {
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
        /// As [`crate::blocks::run`], on a CPU with these features.
        #[target_feature(enable = $features)]
        unsafe fn typed<E: crate::blocks::Load, O: crate::element::Binary<E>>(
            task: &crate::blocks::KernelTask<'_>,
        ) {
            // SAFETY: the caller's promise, passed on.
            unsafe { crate::blocks::run::<E, O, $set>(task) }
        }

        /// # Safety
        /// As [`crate::x86_64::sums::sum`], on a CPU with these features.
        #[target_feature(enable = $features)]
        unsafe fn typed_sum<L: crate::x86_64::sums::Lanes>(task: &crate::blocks::KernelTask<'_>) -> usize {
            // SAFETY: the caller's promise, passed on.
            unsafe { crate::x86_64::sums::sum::<L>(task) }
        }

        /// # Safety
        /// As [`crate::blocks::run`], on a CPU with these features.
        pub(crate) unsafe fn reduce(spec: &crate::spec::Spec, task: &crate::blocks::KernelTask<'_>) {
            // SAFETY: the caller's promise, passed on; the rest of the operands lies within them.
            unsafe {
                let mut done = 0;
                if spec.combine == crate::spec::Combine::Sum {
                    done = crate::x86_64::sums::for_float_lanes!(
                        spec.dtype, typed_sum, task, $f16, $bf16, $f32, $f64
                    );
                }
                if done < task.elems {
                    let rest = crate::blocks::KernelTask {
                        start: done,
                        ..*task
                    };
                    crate::blocks::for_types!(spec.dtype, spec.combine, typed, &rest)
                }
            }
        }

        /// # Safety
        /// As [`crate::copy_out_and_in`], on a CPU with these features.
        #[target_feature(enable = $features)]
        pub(crate) unsafe fn out_and_in(
            out: *mut u8,
            slot: *mut u8,
            next: *const u8,
            bytes: usize,
        ) {
            // SAFETY: the caller's promise, passed on.
            unsafe { crate::copy_loop::out_and_in::<$register>(out, slot, next, bytes) }
        }

        /// # Safety
        /// As [`crate::adasum_blocks::block_dots`], on a CPU with these features.
        #[target_feature(enable = $features)]
        unsafe fn typed_dots<E: crate::adasum_blocks::Float>(args: &crate::adasum_blocks::DotArgs) -> [f64; 3] {
            // SAFETY: the caller's promise, passed on.
            unsafe { crate::adasum_blocks::block_dots::<E, $set>(args) }
        }

        /// # Safety
        /// As [`crate::adasum_blocks::block_dots`], on a CPU with these features.
        pub(crate) unsafe fn dots(
            dtype: horovod_protocol::DType,
            args: &crate::adasum_blocks::DotArgs,
        ) -> [f64; 3] {
            // SAFETY: the caller's promise, passed on.
            unsafe { crate::adasum_blocks::for_floats!(dtype, typed_dots, args) }
        }

        /// # Safety
        /// As [`crate::adasum_blocks::block_combine`], on a CPU with these features.
        #[target_feature(enable = $features)]
        unsafe fn typed_combine<E: crate::adasum_blocks::Float>(args: &crate::adasum_blocks::CombineArgs) {
            // SAFETY: the caller's promise, passed on.
            unsafe { crate::adasum_blocks::block_combine::<E, $set>(args) }
        }

        /// # Safety
        /// As [`crate::adasum_blocks::block_combine`], on a CPU with these features.
        pub(crate) unsafe fn combine(
            dtype: horovod_protocol::DType,
            args: &crate::adasum_blocks::CombineArgs,
        ) {
            // SAFETY: the caller's promise, passed on.
            unsafe { crate::adasum_blocks::for_floats!(dtype, typed_combine, args) }
        }
    };
}
pub(crate) use entry_points;
