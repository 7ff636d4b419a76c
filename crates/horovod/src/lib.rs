//! Data-parallel training across processes, for Rust.
//!
//! Several processes train one model, or compute one result. Each works on its own data, and the operations of this
//! crate combine their slices: [sums, means and more](Communicator::allreduce_in_place),
//! [copies of one rank's values](Communicator::broadcast_in_place), [rows of all ranks](Communicator::allgather). They
//! run over shared memory between processes of one host, and over TCP between hosts. No Python and no MPI is needed.
//!
//! # A program
//!
//! ```
//! use horovod::ReduceOp::Average;
//!
//! fn main() -> horovod::Result<()> {
//!     let hvd = horovod::init()?; // leaves the job when it is dropped
//!     let mut weights = vec![0.0f32; 10];
//!     hvd.broadcast_in_place(&mut weights, 0)?; // all ranks begin alike
//!     for _step in 0..3 {
//!         let mut gradient = vec![hvd.rank() as f32; 10]; // of this rank's part of the batch
//!         hvd.allreduce_in_place(&mut gradient, Average)?;
//!         for (weight, gradient) in weights.iter_mut().zip(&gradient) {
//!             *weight -= 0.1 * gradient;
//!         }
//!     }
//!     Ok(())
//! }
//! ```
//!
//! `horovodrun -np 4 target/release/train` runs it on four ranks; alone it is a job of one. The launcher is the program
//! of the crate `horovod-launch`, and is also in the Python package.
//!
//! # Several operations at once
//!
//! | memory | call | result |
//! | --- | --- | --- |
//! | borrowed, one operation | [`Communicator`]'s methods | when the call returns |
//! | borrowed, several | [`Communicator::scope`] | when the scope is left |
//! | owned | [`Communicator::allreduce_async`] and its kin | a future, [`Pending`] |
//!
//! # Members that change
//!
//! [`elastic::run`] calls a training function again, with the state of the last commit, after a rank was lost. Members
//! may also be added and removed.
//!
//! # Errors
//!
//! [`Error`] says what happened as data, and in a sentence. After a [mistake](Error::is_mistake) the job goes on. When a
//! rank is [lost](Error::is_lost) all other ranks get an error that names it. A program that returns the error from
//! `main` lets the launcher name the rank that failed first.

#![deny(unsafe_code)]
#![warn(clippy::missing_errors_doc, clippy::missing_panics_doc)]

mod communicator;
pub mod elastic;
mod element;
mod error;
#[doc(hidden)]
pub mod framework;
mod guard;
#[allow(unsafe_code, reason = "the only module with unsafe code")]
mod memory;
mod operation;
mod pending;
mod process_set;
mod reduction;
mod scope;
#[cfg(feature = "testing")]
#[doc(hidden)]
pub mod testing;

pub use communicator::{Communicator, Received};
pub use element::{Element, Reduce};
pub use error::{Error, Result};
pub use guard::{Horovod, init};
pub use pending::Pending;
pub use process_set::ProcessSet;
pub use reduction::{ReduceOp, Reduction};
pub use scope::Scope;

#[cfg(test)]
mod tests;

/// The blocks of the pages are tests.
#[cfg(doctest)]
#[path = "../tests/pages/mod.rs"]
mod pages;
