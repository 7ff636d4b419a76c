//! Element-wise reduction, scaling and conversion.
//!
//! Everything works on raw pointers, because the operands are tensors of other libraries and shared
//! memory that peers write to between synchronisation points; neither may be seen as `&[T]`.
//! No pointer needs any alignment. The instruction set is chosen once per process ([`chosen`]);
//! all of them, and the oracle in `scalar.rs`, give bit-identical results, save for which bits a NaN
//! carries.
//!
//! Numerics, the same for every instruction set:
//! - `f16` and `bf16` are widened to `f32`, combined there, and rounded (to nearest, ties to even)
//!   once, when the result is stored; subnormals are kept.
//! - Integers wrap on overflow, save for a sum that is divided: it is added up in a wider type, so that
//!   an average is always right. Scaling them goes through `f64` and truncates toward zero, saturating;
//!   a factor of exactly 1 touches nothing. Dividing by the divisor of an average is an exact integer
//!   division that truncates toward zero; with a factor on the result, both happen in `f64`, the factor
//!   first, and the result is truncated once.
//! - Floats are scaled in `f32` (`f64` for `f64`) and divided by true division.
//! - Minimum and maximum propagate NaN: if any operand is NaN, the result is NaN.
//! - All this is so in the default floating-point mode: threads that may have another enter it first ([`DefaultMode`]).
//! - `bool` is a byte, zero or not; results are 0 or 1. Sum and maximum are *or*, product and minimum
//!   are *and*; there is nothing to average, so the divisor is ignored.
//!
//! An internal part of horovod-rs: programs use the crate `horovod`, and this interface may change in any version.

mod adasum;
mod adasum_blocks;
mod blocks;
mod checksum;
mod copy;
mod copy_loop;
mod dispatch;
mod element;
mod fill;
mod float_mode;
mod half;
mod scalar;
mod spec;
mod strided;

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

pub use adasum::{DotNorms, Weighted, adasum_coefficients, adasum_combine, adasum_dot_norms};
pub use checksum::checksum;
pub use copy::{copy_out_and_in, copy_streaming, copy_taking, copy_taking_streaming};
pub use dispatch::{Isa, chosen, reduce, reduce_with, scale};
pub use fill::fill_identity;
pub use float_mode::DefaultMode;
pub use spec::{Combine, Source, Spec};
pub use strided::Reordering;
