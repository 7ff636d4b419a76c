//! The runtime of horovod-rs and its Rust API: init, the engine, handles, settings.
//!
//! A process calls [`init`], submits operations to the [`Engine`] and waits for their [`Handle`]s. Nothing here
//! knows of Python or of a framework: tensors are pointers with a type, a shape and an owner.

mod autotune;
mod bootstrap;
mod buffer;
pub mod config;
mod engine;
mod error;
mod hang;
mod init;
mod tensor;
#[cfg(feature = "testing")]
pub mod testing;
mod timeline;

pub use buffer::{Buffer, BufferPool};
pub use engine::{Engine, Handle, OpResult, Submission, Waited};
pub use error::Error;
pub use hang::{FRAMES_MAX, Frame, THREADS_MAX, ThreadStack, tell_stacks};
pub use horovod_protocol::{
    Completion, DType, Device, Generation, Op, ProcessSetId, Rank, ReduceOp, Scale, TensorMeta,
};
pub use horovod_transport::{Interrupt, JobKey, parcel, resolve_interfaces};
pub use init::{
    HeldState, engine, hold_state, init, init_interruptible, init_with, is_elastic, is_initialized,
    shutdown, transports, try_engine,
};
pub use tensor::{Output, ReadyEvent, Tensor};
pub use timeline::TimelineSetting;
