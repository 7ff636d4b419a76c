//! The functions of `libcuda.so.1` and `libnccl.so.2` on host memory, which check their caller: how the GPU path is
//! tested on machines without a GPU. For development; nothing of it is in a wheel.
//!
//! One library, `libhorovod_gpu_double.so`, stands for both: `HOROVOD_CUDA_LIBRARY` and `HOROVOD_NCCL_LIBRARY` name it
//! ([`library`]), and the product loads it as it loads the real ones. Rust tests may also call the functions as they are.
//! It has HIP's names for the same functions, too, and its compiler's: links to it that are called `libamdhip64.so.7` and
//! `librccl.so.1` stand for AMD's libraries.
//!
//! # What it does
//!
//! Streams are queues. One thread carries out one operation at a time, of a stream that the seed chooses, after a delay
//! that the seed chooses; host functions run there too. Device memory is host memory at addresses that are never given
//! out twice, filled with 0xa5 at first. Kernels are found by their names in the PTX text that was loaded, whose
//! parameter lists are compared, and carried out with the code of `horovod-kernels`. Ranks, in one process or several,
//! meet at the address in the unique id, and what a collective computes is right, in the type of the elements: halves
//! are rounded after each addition, in the order of the ranks; minimum and maximum skip what is no number.
//!
//! # What it checks
//!
//! A broken rule is recorded as a *violation* (`kind: text`), whatever the call returns. Tests end with none
//! ([`testing::double_violations`], or lines `violation` in the log).
//!
//! | kind | broken by |
//! | --- | --- |
//! | `memory` | `no order`: two accesses, one of which writes, with nothing that orders them (streams, events, what the host has seen); `after free`; `out of bounds`; `freed in use`; `freed twice`; buffers that overlap other than in place |
//! | `no context`, `device` | a call without a current context; streams, events and memory of another device |
//! | `invalid handle`, `after destroy`, `after finalize` | what never was, or is no more |
//! | `host function` | a call of CUDA or NCCL within a function of `cuLaunchHostFunc` |
//! | `capture` | what invalidates a capture, waits across its border, or lies in it and must not |
//! | `in progress`, `stream in progress` | a call on a communicator that has answered 7, a use of its stream, before `ncclCommGetAsyncError` says otherwise |
//! | `threads` | a communicator used by a second thread (asking, aborting and destroying are allowed), two threads that launch on one device while the host does not know that what the other has launched has ended |
//! | `launch order` | collectives of two communicators of one device with nothing that orders them |
//! | `mismatch` | calls that differ between the ranks: function, count, type, operator, root |
//! | `group`, `split`, `destroy`, `version` | making communicators among collectives; splitting with work outstanding; destroying what would hang; functions that the version does not have |
//! | `parameters`, `alignment` | kernels whose declaration or addresses are not what they need |
//! | `initialisation` | of HIP, by who only wants its version |
//! | `settings` | `GPU_DOUBLE` that is not understood |
//!
//! All threads of a process count as one host, because what orders them (channels, locks) is not seen. Freeing is strict:
//! the real `cuMemFree` may wait for the device, or not, so the host must have seen that all use has ended;
//! [`testing::double_free_on`] frees in the order of a stream, as a framework's caching allocator does.
//!
//! # Settings
//!
//! `GPU_DOUBLE`, a comma list; [`testing::double_configure`] changes them later.
//!
//! | setting | default | meaning |
//! | --- | --- | --- |
//! | `seed=N`, `delay=US` | 0, 0 | which stream goes on, and the longest random delay before an operation, in microseconds |
//! | `devices=N`, `host=NAME` | 1 | devices of the process; the machine's name, which with the ordinal makes the uuid: device 0 of two processes is one GPU unless their hosts differ |
//! | `driver_version=N`, `nccl_version=N`, `cc=N` | 13020, 23007, 90 | what the versions and the compute capability are |
//! | `memory=BYTES`, `pools=0` | 16 GiB, 1 | memory of a device; whether there is `cuMemAllocAsync` |
//! | `stub`, `no_device`, `init=CODE` | | what `cuInit` returns: 34, 100, another |
//! | `log=FILE` | | every call as a line `process thread call arguments = code`; `%p` is the process |
//! | `pinning_waits` | | `cuMemHostAlloc` waits for the device, as the real one may |
//! | `fail=CALL:K:CODE` | | the K-th call of a function fails, with `K+` every later one too; codes like 700 stay for good |
//! | `hang=CALL:K` | | the K-th call of a function does nothing and never returns |
//! | `in_progress=N` | 0 | communicators that do not block answer 7 to so many polls |
//! | `async=K:CODE` | | the K-th collective of the process is not begun, and its communicator has this error from then on |
//! | `never=K` | | the K-th collective is not begun: it ends with the abort |
//! | `abort_ms=N` | 0 | how long aborting takes |
//! | `lost=error`, `lost=hang` | error | whether ranks learn (code 6) that another is gone |

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

use std::path::PathBuf;

pub use handles::Handle;

/// The library that cargo built for the running test: of this crate, or of one that has it among its development
/// dependencies.
///
/// # Errors
/// Where it was looked for.
pub fn library() -> Result<PathBuf, String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let mut tried = Vec::new();
    // Tests lie in `deps`, programs and examples beside it.
    for folder in program.ancestors().skip(1).take(2) {
        for below in ["", "deps"] {
            let file = folder.join(below).join("libhorovod_gpu_double.so");
            if file.is_file() {
                return Ok(file);
            }
            tried.push(file.display().to_string());
        }
    }
    Err(format!(
        "the GPU double was not built: no {}",
        tried.join(", no ")
    ))
}
