//! The driver's functions (`libcuda.so.1`), under their names; and under HIP's.
#![expect(
    clippy::missing_safety_doc,
    reason = "the contracts are those of CUDA's driver interface: pointers are valid for what the call reads or writes"
)]

pub mod context;
pub mod hip;
pub mod memory;
pub mod module;
pub mod stream;
