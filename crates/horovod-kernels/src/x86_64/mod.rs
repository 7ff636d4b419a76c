//! x86-64: one file per instruction set above the baseline, and the sums of floats that they share.

pub(crate) mod avx2;
pub(crate) mod avx512;
mod entry;
pub(crate) mod sums;
