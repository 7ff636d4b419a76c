//! CUDA's driver interface and NCCL, found at run time: nothing is linked, and without a GPU nothing of this runs. AMD's
//! libraries stand for them by other names of the same functions (`hip`).
//!
//! `load` finds the libraries and reads their functions into tables (`driver`, `nccl`). Above the tables are safe
//! handles: devices, streams, events, memory, communicators. Functions that take addresses of device memory stay
//! `unsafe`: no type knows the contents of an address, or its uses by other streams.
//!
//! A CUDA call in a forked child fails in ways that depend on the call; here every call of such a child is refused with
//! [`GpuError::Forked`], and what it drops is left to its parent.
//!
//! An internal part of horovod-rs: programs use the crate `horovod`, and this interface may change in any version.

mod device;
mod driver;
mod error;
mod executor;
mod hip;
mod hiprtc;
mod load;
mod loss;
mod nccl;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

pub use device::Device;
pub use device::event::Event;
pub use device::kernels::{DeviceCopy, Elements, Kernels};
pub use device::memory::{DeviceMemory, PinnedMemory};
pub use device::stream::{RawStream, Stream};
pub use driver::Driver;
pub use error::{GpuError, MemoryPlace};
pub use executor::{
    AllReduce, AllReduceInput, Call, Executor, ExecutorProgress, ExecutorSettings, GpuWork, Group,
    HostMemory, Launch, ReduceScatter, Reduction, WorkError, WorkPhase, WorkProgress,
};
pub use load::{
    Found, Search, Stack, choose_stack, driver, find_driver, find_nccl, is_initialised, nccl,
    set_default_search, set_search, stack,
};
pub use loss::{GpuLoss, loss};
pub use nccl::{
    CommSettings, Communicator, NCCL_SHARES_GPUS_SINCE, Nccl, NcclOp, NcclType, Progress,
};
