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
