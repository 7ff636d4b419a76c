//! x86-64: one file per instruction set above the baseline.

pub(crate) mod avx2;
pub(crate) mod avx512;
