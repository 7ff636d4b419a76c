//! Handlers for calls of XLA's programs on CUDA, which are ordered on XLA's own stream without a wait of the host for it.
//!
//! A call records an event of its stream, submits, waits until the operation was *launched* here, and has the stream
//! wait for its end; then it returns, and XLA puts the next kernels on the stream. So the host waits for the other ranks
//! to come to the same call, but for no GPU. No future is left behind: XLA would go on with the stream before the end is
//! ordered. XLA makes the calls of a GPU one after the other, in an order that it chooses when it compiles, in each
//! process anew. So adapters give a call one argument more, a result of the call before it (`after`); ranks must run the
//! same programs, and where they do not the report of stalls names the calls.
//!
//! TensorFlow's calls have the number of their function's call in the GPU's memory. To read it, the host waits for the
//! stream.
//!
//! The handlers say no trait (`tell_metadata`), so XLA does not record them into CUDA graphs, which replay what was
//! agreed on once. A stream that is being captured all the same is refused before anything is submitted.

use std::time::Duration;

use horovod_engine::gpu::Ready;
use horovod_engine::{Error, Waited};

use super::abi::{self, CallFrame};
use super::answer::Xla;
use super::call::invalid;
use super::{
    ALLGATHER, ALLREDUCE, ALLTOALL, BROADCAST, REDUCESCATTER, Submitted, XlaOperation, answer,
    submit,
};

macro_rules! handler {
    ($name:ident, $kind:expr, $doc:literal) => {
        #[doc = $doc]
        ///
        /// # Safety
        /// Called by XLA on CUDA, with a frame of its own that lives until the answer.
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(frame: *mut CallFrame) -> *mut abi::Error {
            // SAFETY: as the caller promises; the frame is XLA's.
            unsafe { answer(frame, |frame, xla| launch(frame, xla, $kind)) }
        }
    };
}

handler!(horovod_xla_cuda_allreduce, ALLREDUCE, "Allreduce on a GPU.");
handler!(horovod_xla_cuda_allgather, ALLGATHER, "Allgather on a GPU.");
handler!(horovod_xla_cuda_broadcast, BROADCAST, "Broadcast on a GPU.");
handler!(horovod_xla_cuda_alltoall, ALLTOALL, "Alltoall on a GPU.");
handler!(
    horovod_xla_cuda_reducescatter,
    REDUCESCATTER,
    "Reduce-scatter on a GPU."
);

/// Submits the operation, waits until it is launched, and orders the call's stream after it.
unsafe fn launch(frame: &CallFrame, xla: Xla, kind: XlaOperation) -> Result<(), Error> {
    // Before CUDA is looked for: not initialised is the well-known error, whatever is installed.
    horovod_engine::engine()?;
    if horovod_engine::in_callback() {
        // It would wait for what only this thread makes go on.
        return Err(Error::Internal(
            "XLA called an operation on a GPU from within the end of another one".into(),
        ));
    }
    // SAFETY: the context of this call.
    let (ordinal, stream) = unsafe { xla.place(frame.context) }.map_err(|why| {
        invalid(format!(
            "XLA does not tell this call its GPU and its stream, which operations in compiled programs need ({why}): use a \
             newer version of XLA, or call the operation outside of jit, which copies through host memory"
        ))
    })?;
    // The number is XLA's own, which is CUDA's only where each GPU is one device of XLA's, and none is hidden from it.
    let ready = Ready::record_on_its_device(stream, ordinal)?;
    // SAFETY: XLA's frame, of a call on that GPU; what XLA does next with its buffers comes later on the stream.
    let Submitted {
        engine,
        handle,
        expected,
        waited,
    } = unsafe { submit(frame, xla, kind, Some(&ready))? };
    let Waited::Ended { result, .. } = waited else {
        return Err(Error::Internal(format!("handle {} vanished", handle.0)));
    };
    let result = result?;
    let placed = expected.check(&result);
    let Some(end) = &result.end else {
        return placed;
    };
    let ordered = end.order(stream);
    // The stream must not go on with memory that is still in use, nor may the result be freed.
    let must_wait = ordered.is_err() || placed.is_err();
    while (must_wait || !engine.config().gpu.asynchronous)
        && !engine.wait_for_launch(&**end, Duration::MAX)?
    {}
    ordered?;
    placed
}
