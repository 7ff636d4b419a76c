//! Data-parallel training with burn: each rank computes gradients on its own part of a batch, and the optimizer steps
//! with their mean over all ranks.
//!
//! ```
//! use burn::nn::LinearConfig;
//! use burn::optim::{AdamWConfig, GradientsParams};
//! use burn::tensor::{Device, Tensor};
//! use horovod_burn::DistributedOptimizer;
//!
//! fn main() -> horovod_burn::Result<()> {
//!     let hvd = horovod::init()?; // leaves the job when it is dropped
//!     let device = Device::flex().autodiff();
//!     let model = LinearConfig::new(4, 1).init(&device);
//!     let mut model = horovod_burn::broadcast_parameters(&hvd, model, 0)?; // all ranks begin alike
//!     let mut optimizer = DistributedOptimizer::new(&hvd, AdamWConfig::new().init());
//!     for step in 0..3 {
//!         let part = Tensor::<2>::full([8, 4], (step + hvd.rank()) as f32, &device); // of this rank
//!         let loss = model.forward(part).square().mean();
//!         let gradients = GradientsParams::from_grads(loss.backward(), &model);
//!         model = optimizer.step(0.01, model, gradients)?; // mean over all ranks, step
//!     }
//!     Ok(())
//! }
//! ```
//!
//! `horovodrun -np 4 target/release/train` runs it on four ranks; alone it is a job of one. In a checkout
//! `cargo install --path crates/horovod-launch` installs `horovodrun`.
//!
//! | to | write |
//! | --- | --- |
//! | give each rank its share of the data | rows `hvd.rank()`, `hvd.rank() + hvd.size()`, … and the same number of steps on all ranks |
//! | step on a rank that has no rows left | `optimizer.step(rate, model, GradientsParams::new())?` |
//! | average a metric | `hvd.allreduce(&[sum, count], horovod::ReduceOp::Sum)?`, then divide |
//! | know the norm of the gradients | [`reduce`](DistributedOptimizer::reduce), then [`clip`](DistributedOptimizer::clip) with `f64::INFINITY` |
//! | write a checkpoint | `model.clone().into_record().save(path)?` and `optimizer.inner().save(path)?` on rank 0 |
//! | go on from it | load both on rank 0, then [`broadcast_parameters`] and [`broadcast_optimizer_state`] on all |
//!
//! Parameters pair by their paths in the module, such as `layer.weight`: burn's ids are random in each process.
//! Gradients of types `f64`, `f32`, `f16` and `bf16` are reduced, on the host; [`broadcast_parameters`] also sends integers,
//! booleans and running means. [`ElasticState`] is for trainings that go on when ranks are lost, come or go.
//!
//! The feature `train` has `LearnerStrategy`, by which burn's `Learner` trains on all ranks.
//!
//! # Errors
//! [`Error`] is one of this crate, of `horovod` or of burn.
#![forbid(unsafe_code)]

mod broadcast;
mod elastic;
mod error;
mod gradients;
#[cfg(feature = "train")]
mod learner;
mod optimizer;
mod parameters;
mod reducer;

pub use broadcast::{broadcast_optimizer_state, broadcast_parameters};
pub use elastic::ElasticState;
pub use error::{Error, Result};
#[cfg(feature = "train")]
pub use learner::LearnerStrategy;
pub use optimizer::DistributedOptimizer;

#[cfg(test)]
mod tests;

/// The blocks of the pages are tests.
#[cfg(doctest)]
#[path = "../tests/pages/mod.rs"]
mod pages;
