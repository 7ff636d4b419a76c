//! Data-parallel training with candle: each rank computes gradients on its own part of a batch, and the optimizer steps
//! with their mean over all ranks.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use candle_nn::{Module, Optimizer, SGD, VarBuilder, VarMap};
//! use horovod_candle::DistributedOptimizer;
//!
//! fn main() -> horovod_candle::Result<()> {
//!     let hvd = horovod::init()?; // leaves the job when it is dropped
//!     let map = VarMap::new();
//!     let vars = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
//!     let model = candle_nn::linear(4, 1, vars.pp("layer"))?;
//!     horovod_candle::broadcast_parameters(&hvd, &map, 0)?; // all ranks begin alike
//!     let inner = SGD::new(map.all_vars(), 0.1)?;
//!     let mut optimizer = DistributedOptimizer::new(&hvd, inner, &map)?;
//!     for step in 0..3 {
//!         let part = Tensor::full(step as f32 + hvd.rank() as f32, (8, 4), &Device::Cpu)?; // of this rank
//!         let loss = model.forward(&part)?.sqr()?.mean_all()?;
//!         optimizer.backward_step(&loss)?; // backward, mean over all ranks, step
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
//! | step on a rank that has no rows left | `optimizer.step(GradStore::default())?` |
//! | change the learning rate, alike on all ranks | `optimizer.set_learning_rate(rate)` |
//! | average a metric | `hvd.allreduce(&[sum, count], horovod::ReduceOp::Sum)?`, then divide |
//! | know the norm of the gradients | [`reduce`](DistributedOptimizer::reduce), then [`clip`](DistributedOptimizer::clip) with `f64::INFINITY` |
//! | write a checkpoint | `map.save(path)?` on rank 0 |
//! | go on from it | `map.load(path)?` on rank 0, then [`broadcast_parameters`] on all |
//! | use the GPU of this rank | `Device::new_cuda(hvd.local_rank())?` |
//!
//! Parameters pair by their names in the `VarMap`, so the order in which a rank made them does not matter. They and
//! their gradients are sent from candle's own memory, and results are written there: nothing is copied, unless
//! a tensor is strided, shares its memory with another one, or is on a GPU. Types are `f64`, `f32`, `f16` and `bf16`;
//! [`broadcast_parameters`] also sends integers. [`ElasticState`] is for trainings that go on when ranks are lost, come or go.
//!
//! # Errors
//! [`Error`] is one of this crate, of `horovod` or of candle. It converts into candle's, so `?` works in functions that
//! return `candle_core::Result`.
#![forbid(unsafe_code)]

mod broadcast;
mod elastic;
mod error;
mod gradients;
mod memory;
mod optimizer;
mod parameters;

pub use broadcast::broadcast_parameters;
pub use elastic::ElasticState;
pub use error::{Error, Result};
pub use optimizer::DistributedOptimizer;
pub use parameters::Parameters;

#[cfg(test)]
mod tests;

/// The blocks of the pages are tests.
#[cfg(doctest)]
#[path = "../tests/pages/mod.rs"]
mod pages;
