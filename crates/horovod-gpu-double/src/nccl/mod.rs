//! NCCL's functions (`libnccl.so.2`), under their names, and what is behind them.
//!
//! The process that makes a unique id listens at the address in it ([`hub`]); every rank, its own included, connects
//! there, sends what it puts into a collective and receives what it gets out of it.

mod calls;
pub mod collectives;
pub(crate) mod communicator;
pub mod exports;
pub(crate) mod group;
mod hub;
mod part;
mod reduction;
mod wire;

// Codes of NCCL (`ncclResult_t`).
pub(crate) const UNHANDLED_CUDA_ERROR: i32 = 1;
pub(crate) const SYSTEM_ERROR: i32 = 2;
pub(crate) const INVALID_ARGUMENT: i32 = 4;
pub(crate) const INVALID_USAGE: i32 = 5;
pub(crate) const REMOTE_ERROR: i32 = 6;
pub(crate) const IN_PROGRESS: i32 = 7;
