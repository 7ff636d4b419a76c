//! The runtime of horovod-rs below its front ends: init, the engine, handles, settings.
//!
//! A process calls [`init`], submits operations to the [`Engine`] and waits for their [`Handle`]s. Nothing here
//! knows of Python or of a framework: tensors are pointers with a type, a shape and an owner.
//!
//! An internal part of horovod-rs: programs use the crate `horovod`, and this interface may change in any version.

// Under loom only the engine's driver lock is built, around a driver of its own.
#[cfg(not(loom))]
mod bootstrap;
#[cfg(not(loom))]
mod buffer;
#[cfg(not(loom))]
pub mod config;
#[cfg(all(loom, test))]
#[path = "engine/driver_lock.rs"]
mod driver_lock;
#[cfg(not(loom))]
mod engine;
#[cfg(not(loom))]
mod error;
/// Devices other than the host, and how to serve one more kind: see [`Engine::start_with`].
#[cfg(not(loom))]
pub mod accelerator {
    pub use crate::engine::Entry;
    pub use crate::engine::accelerator::Accelerator;
    pub use crate::engine::backend::{
        AdasumScope, Backend, DeviceStage, Failure, InFlight, Members, Outputs, RawStream, Results,
        Route, StageIn, Staged, Start, Started, Surroundings,
    };
    pub use crate::engine::placement::{LaunchEnd, Placement};
    pub use horovod_diagnosis::{DevicePhase, DeviceStanding, OnDevice};
    pub use horovod_protocol::{EntryId, ExecItem, Execution};
    pub use horovod_transport::{Aborted, Idle, Notifier, Topology};
}
#[cfg(not(loom))]
pub use engine::backend::gpu::adapter as gpu;
#[cfg(not(loom))]
mod init;
#[cfg(not(loom))]
mod tensor;
#[cfg(all(feature = "testing", not(loom)))]
pub mod testing;
#[cfg(not(loom))]
mod threads;

#[cfg(not(loom))]
pub use bootstrap::lacks_rendezvous;
#[cfg(not(loom))]
pub use buffer::{Buffer, BufferPool};
#[cfg(not(loom))]
pub use engine::{
    Allocated, Allocator, Callback, Engine, Handle, Kept, OpResult, SoftWait, Softly, Submission,
    Waited, WaitedFor, in_callback,
};
#[cfg(not(loom))]
pub use error::Error;
#[cfg(not(loom))]
pub use horovod_diagnosis::replicas::Replica;
#[cfg(not(loom))]
pub use horovod_diagnosis::{FRAMES_MAX, Frame, THREADS_MAX, ThreadStack, tell_stacks};
#[cfg(not(loom))]
pub use horovod_protocol::{
    Completion, DType, Device, Difference, Generation, Impossible, Leaving, LossCause, MemoryOrder,
    Mismatch, Op, PeerLost, ProcessSetId, Rank, ReduceOp, Refusal, Scale, Shape, StopReason,
    TensorMeta, printable,
};
#[cfg(not(loom))]
pub use horovod_timeline::TimelineSetting;
#[cfg(not(loom))]
pub use horovod_transport::{
    Interrupt, JobKey, loopback, output_file, payload, resolve_interfaces,
};
#[cfg(not(loom))]
pub use init::{
    TrainingState, engine, hold_state, init, init_interruptible, init_members, init_with,
    is_elastic, is_initialized, shutdown, shutdown_because, take_summary, transports, try_engine,
};
#[cfg(not(loom))]
pub use tensor::{Output, ReadyEvent, Tensor, Tensors};
