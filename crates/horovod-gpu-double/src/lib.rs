//! The functions of `libcuda.so.1` and `libnccl.so.2` on host memory, which check their caller.

mod call;
mod clock;
mod codes;
mod config;
pub mod driver;
mod handles;
mod kernels;
mod memory;
mod module;
pub mod nccl;
mod random;
mod scheduler;
mod state;
mod stream;
pub mod testing;
mod thread;

pub use handles::Handle;
