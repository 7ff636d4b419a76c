//! Communicators: their operations, and their end.

use std::ffi::CString;
use std::ptr::null_mut;

use super::{ABORTS_IN_GROUPS, Nccl, NcclOp, NcclType, Progress, SUCCESS};
use crate::device::CAPTURE_MODE_RELAXED;
use crate::device::stream::Stream;
use crate::driver::Handle;
use crate::error::GpuError;
use crate::load::{check_process, driver};

/// This member's part of a communicator. One thread at a time uses it. It ends by [`Nccl::abort_all`] or
/// [`Nccl::destroy_all`]; dropped otherwise, it stays for the life of the process, for NCCL may block when it ends one.
#[derive(Debug)]
pub struct Communicator {
    nccl: &'static Nccl,
    handle: Handle,
    /// Why it could not be made.
    failure: Option<GpuError>,
    /// NCCL may keep the pointer.
    _name: CString,
}

// SAFETY: NCCL asks only that one thread at a time uses a communicator, with the device's context current.
unsafe impl Send for Communicator {}

/// Requirements of all operations. Buffers are memory of the communicator's device with room for the elements. Nobody
/// else uses the buffers in a way that the stream's order does not cover. All members make the same calls in the same
/// order.
macro_rules! operation {
    (
        $(#[$doc:meta])*
        $name:ident, $symbol:literal, ($($argument:ident: $type:ty),*) => ($($value:expr),*)
    ) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// Addresses are memory of the communicator's device with room for the elements, which nobody else uses in a
        /// way that the stream's order does not cover.
        #[allow(clippy::too_many_arguments, reason = "NCCL's")]
        pub unsafe fn $name(&self, $($argument: $type,)* stream: &Stream) -> Result<Progress, GpuError> {
            check_process()?;
            // SAFETY: a communicator, a stream, and the caller's promise for the rest.
            let code = unsafe {
                (self.nccl.table.$name)($($value,)* self.handle, stream.raw().0)
            };
            self.nccl.table.progress($symbol, code, self.handle)
        }
    };
}

impl Communicator {
    pub(super) fn new(
        nccl: &'static Nccl,
        handle: Handle,
        failure: Option<GpuError>,
        name: CString,
    ) -> Self {
        Self {
            nccl,
            handle,
            failure,
            _name: name,
        }
    }

    /// Whether the call before this is finished, and whether anything has gone wrong since.
    pub fn progress(&self) -> Result<Progress, GpuError> {
        check_process()?;
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        let mut state = SUCCESS;
        // SAFETY: a communicator, and a place for one integer.
        let code = unsafe { (self.nccl.table.comm_get_async_error)(self.handle, &raw mut state) };
        let table = &self.nccl.table;
        if code != SUCCESS {
            return Err(table.error("ncclCommGetAsyncError", code, self.handle));
        }
        table.progress("an operation of NCCL", state, self.handle)
    }

    operation! {
        /// Combines `count` elements of all members; each gets the result. `recv` may be `send`.
        all_reduce, "ncclAllReduce",
        (send: u64, recv: u64, count: usize, dtype: NcclType, op: NcclOp)
            => (send as _, recv as _, count, dtype as i32, op as i32)
    }

    operation! {
        /// The same with the result on one member only.
        reduce, "ncclReduce",
        (send: u64, recv: u64, count: usize, dtype: NcclType, op: NcclOp, root: i32)
            => (send as _, recv as _, count, dtype as i32, op as i32, root)
    }

    operation! {
        /// Combines `recv_count` elements for each member out of `recv_count` times the size.
        reduce_scatter, "ncclReduceScatter",
        (send: u64, recv: u64, recv_count: usize, dtype: NcclType, op: NcclOp)
            => (send as _, recv as _, recv_count, dtype as i32, op as i32)
    }

    operation! {
        /// Collects `send_count` elements of each member, in their order.
        all_gather, "ncclAllGather",
        (send: u64, recv: u64, send_count: usize, dtype: NcclType)
            => (send as _, recv as _, send_count, dtype as i32)
    }

    operation! {
        /// Copies `count` elements of one member to all.
        broadcast, "ncclBroadcast",
        (send: u64, recv: u64, count: usize, dtype: NcclType, root: i32)
            => (send as _, recv as _, count, dtype as i32, root)
    }

    operation! {
        /// Sends to a member that receives.
        send, "ncclSend",
        (send: u64, count: usize, dtype: NcclType, peer: i32)
            => (send as _, count, dtype as i32, peer)
    }

    operation! {
        /// Receives from a member that sends.
        recv, "ncclRecv",
        (recv: u64, count: usize, dtype: NcclType, peer: i32)
            => (recv as _, count, dtype as i32, peer)
    }

    /// Ends its work in good order, with all members; [`Nccl::destroy_all`] follows when that is done.
    pub fn finalize(&self) -> Result<Progress, GpuError> {
        check_process()?;
        // SAFETY: a communicator.
        let code = unsafe { (self.nccl.table.comm_finalize)(self.handle) };
        self.nccl
            .table
            .progress("ncclCommFinalize", code, self.handle)
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if !self.handle.is_null() && check_process().is_ok() {
            tracing::warn!("a communicator of NCCL was neither aborted nor destroyed");
        }
    }
}

/// A handle on its way to another thread.
#[derive(Clone, Copy)]
struct Sent(Handle);

// SAFETY: as for `Communicator`.
unsafe impl Send for Sent {}

impl Sent {
    // A closure that calls it captures the whole, which is `Send`, and not the pointer in it.
    fn handle(self) -> Handle {
        self.0
    }
}

impl Nccl {
    /// Whether several communicators may end in one call of NCCL, which need not be finished when it returns.
    pub(crate) fn ends_in_groups(&self) -> bool {
        self.version() >= ABORTS_IN_GROUPS
    }

    /// Stops what the communicators do and ends them, without the other members' help. All are in one call because
    /// ending one waits for kernels that may wait for another. It may block for long if the GPU does not come to rest.
    pub fn abort_all(&self, communicators: Vec<Communicator>) -> Result<(), GpuError> {
        check_process()?;
        if self.ends_in_groups() {
            return self.end_in_group("ncclCommAbort", self.table.comm_abort, communicators);
        }
        let driver = driver()?;
        let mut context = null_mut();
        // SAFETY: writes one handle.
        let code = unsafe { (driver.table.ctx_get_current)(&raw mut context) };
        driver.checked("cuCtxGetCurrent", code)?;
        let context = Sent(context);
        std::thread::scope(|scope| {
            let threads: Vec<_> = handles(communicators)
                .map(|communicator| {
                    scope.spawn(move || {
                        let mut mode = CAPTURE_MODE_RELAXED;
                        // SAFETY: a context of this process, an integer that is exchanged, and a communicator that nobody
                        // else has.
                        let code = unsafe {
                            (driver.table.ctx_set_current)(context.handle());
                            (driver.table.thread_exchange_stream_capture_mode)(&raw mut mode);
                            (self.table.comm_abort)(communicator.handle())
                        };
                        self.checked("ncclCommAbort", code)
                    })
                })
                .collect();
            threads.into_iter().try_for_each(|thread| {
                thread.join().unwrap_or_else(|_| {
                    Err(GpuError::Invalid(
                        "a thread of abort_all panicked".to_owned(),
                    ))
                })
            })
        })
    }

    /// Ends communicators in good order, after [`Communicator::finalize`] is done on each.
    pub fn destroy_all(&self, communicators: Vec<Communicator>) -> Result<(), GpuError> {
        check_process()?;
        if self.ends_in_groups() {
            return self.end_in_group("ncclCommDestroy", self.table.comm_destroy, communicators);
        }
        let mut result = Ok(());
        for Sent(handle) in handles(communicators) {
            // SAFETY: a communicator that nobody else has.
            let code = unsafe { (self.table.comm_destroy)(handle) };
            result = result.and(self.checked("ncclCommDestroy", code));
        }
        result
    }

    fn end_in_group(
        &self,
        call: &'static str,
        end: unsafe extern "C" fn(Handle) -> i32,
        communicators: Vec<Communicator>,
    ) -> Result<(), GpuError> {
        // SAFETY: the group is ended below by this thread, whatever happens in between.
        unsafe { self.group_start()? };
        let mut result = Ok(());
        for Sent(handle) in handles(communicators) {
            // SAFETY: a communicator that nobody else has.
            let code = unsafe { end(handle) };
            result = result.and(self.table.progress(call, code, null_mut()).map(|_| ()));
        }
        // SAFETY: begun above.
        result.and(unsafe { self.group_end() }.map(|_| ()))
    }
}

/// Takes the handles out, so that nobody has them any more.
fn handles(communicators: Vec<Communicator>) -> impl Iterator<Item = Sent> {
    communicators
        .into_iter()
        .map(|mut one| Sent(std::mem::replace(&mut one.handle, null_mut())))
        .filter(|sent| !sent.0.is_null())
}
