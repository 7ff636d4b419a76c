//! An operation that the core has: what TensorFlow needs when it ends, and its end.

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use crate::core_functions::{
    self, Allocate, CoreFunctions, CoreResult, CoreTensor, Described, OperationOutcome,
};
use crate::done::Done;
use crate::dtypes::Dtype;
use crate::found::{core, tf};
use crate::kernel::panicked;
use crate::operations::OperationCode;
use crate::tf::context::Context;
use crate::tf::status::{Code, Failure};
use crate::tf::tensor::Tensor;
use crate::topology::write_numbers;
use crate::wait_history::StartedRun;

/// How TensorFlow hears that an operation has ended.
#[derive(Debug)]
pub(crate) enum End {
    /// By its callback.
    Calls(Done),
    /// By the thread that waits in the kernel.
    Releases(Arc<Latch>),
}

impl End {
    /// Nothing of the operation may be used afterwards.
    pub(crate) fn run(self) {
        match self {
            Self::Calls(done) => done.run(tf().run_done),
            Self::Releases(latch) => latch.release(),
        }
    }
}

/// Lets a thread wait for one event.
#[derive(Debug, Default)]
pub(crate) struct Latch {
    released: Mutex<bool>,
    change: Condvar,
}

impl Latch {
    pub(crate) fn new() -> Arc<Self> {
        Arc::default()
    }

    fn release(&self) {
        *self.released.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.change.notify_all();
    }

    /// Returns when it was released.
    pub(crate) fn wait(&self) {
        let mut released = self.released.lock().unwrap_or_else(PoisonError::into_inner);
        while !*released {
            released = (self.change.wait(released)).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// One operation under way.
#[derive(Debug)]
pub(crate) struct PendingOperation {
    /// The operation's type, for messages.
    operation: &'static str,
    kind: OperationCode,
    context: Context,
    end: End,
    /// On the memory of inputs and outputs.
    handles: Vec<Tensor>,
    /// Of each output that is allocated late, whether that was done.
    allocated: Vec<bool>,
    /// Why an output could not be allocated.
    failure: Option<Failure>,
    started_run: StartedRun,
}

impl PendingOperation {
    pub(crate) fn new(
        operation: &'static str,
        kind: OperationCode,
        context: Context,
        end: End,
        started_run: StartedRun,
    ) -> Self {
        Self {
            operation,
            kind,
            context,
            end,
            handles: Vec::new(),
            allocated: Vec::new(),
            failure: None,
            started_run,
        }
    }

    /// With handles on the memory of all operands, and the number of outputs.
    pub(crate) fn with_operands(mut self, handles: Vec<Tensor>, outputs: usize) -> Self {
        self.handles = handles;
        if self.kind.is_late() {
            self.allocated = vec![false; outputs];
        }
        self
    }

    fn allocate(&mut self, index: usize, dtype: u8, dims: &[u64]) -> *mut c_void {
        let dims: Vec<i64> = (dims.iter())
            .map(|dim| i64::try_from(*dim).unwrap_or(-1))
            .collect();
        let Some(dtype) = Dtype::from_core(dtype) else {
            return std::ptr::null_mut();
        };
        match self.context.allocate_output(index, dtype, &dims) {
            Ok(output) => {
                let data = output.data();
                self.handles.push(output);
                if let Some(allocated) = self.allocated.get_mut(index) {
                    *allocated = true;
                }
                data
            }
            Err(failure) => {
                self.failure = Some(failure);
                std::ptr::null_mut()
            }
        }
    }

    /// Sets what is still to be set, and tells TensorFlow.
    fn finish(mut self, outcome: OperationOutcome) {
        let set = catch_unwind(AssertUnwindSafe(|| self.set_outputs(outcome)));
        if let Err(failure) = set.unwrap_or_else(|_| Err(panicked())) {
            self.context.fail(&failure);
        }
        // So that whoever comes next in the graph is the only one who has the outputs.
        drop(self.handles);
        self.started_run.ends();
        self.end.run();
    }

    fn set_outputs(&mut self, outcome: OperationOutcome) -> Result<(), Failure> {
        if let Some(failure) = self.failure.take() {
            return Err(failure);
        }
        match outcome {
            OperationOutcome::Failed {
                status,
                text,
                refused,
            } => Err(failure_of(self.operation, status, text, refused)),
            OperationOutcome::Done { .. } if self.allocated.contains(&false) => Err(Failure::new(
                Code::Internal,
                "the core has ended an operation without an output",
            )),
            OperationOutcome::Done {
                received,
                last_joined,
            } => match self.kind {
                OperationCode::Join => write_numbers(self.context, 0, &[], &[last_joined]),
                OperationCode::Alltoall => {
                    let rows: Result<Vec<i32>, _> =
                        received.into_iter().map(i32::try_from).collect();
                    let rows = rows.map_err(|_| {
                        let text = "more rows were received than 32-bit splits can tell";
                        Failure::new(Code::InvalidArgument, text)
                    })?;
                    let count = i64::try_from(rows.len()).unwrap_or(0);
                    write_numbers(self.context, 1, &[count], &rows)
                }
                _ => Ok(()),
            },
        }
    }
}

/// TensorFlow's code for a status of the core. Operations that a lost rank has ended get `Unknown`, standstills `Aborted`,
/// replicas that differ `DataLoss`; these errors say the operation's type, by which elastic training recognises them also in graphs.
fn failure_of(operation: &str, status: i32, text: String, refused: bool) -> Failure {
    match status {
        core_functions::INVALID => Failure::new(Code::InvalidArgument, text),
        core_functions::NOT_INITIALIZED => Failure::new(Code::FailedPrecondition, text),
        core_functions::STALLED => Failure::new(Code::Aborted, format!("{text} [{operation}]")),
        core_functions::REPLICAS_DIFFER => {
            Failure::new(Code::DataLoss, format!("{text} [{operation}]"))
        }
        _ if refused => Failure::new(Code::FailedPrecondition, text),
        _ => Failure::new(Code::Unknown, format!("{text} [{operation}]")),
    }
}

/// Hands an operation to the core; its end is told in any case.
///
/// # Safety
/// The tensors are those that the pending operation has handles on.
pub(crate) unsafe fn submit(
    core: &CoreFunctions,
    described: &Described<'_>,
    tensors: &[CoreTensor],
    pending: PendingOperation,
) {
    let allocate: Option<Allocate> = described.kind.is_late().then_some(allocate);
    let pending = Box::into_raw(Box::new(pending));
    // SAFETY: `ended` takes the pending operation, whose handles keep the memory until then.
    let submitted = unsafe { core.enqueue(described, tensors, ended, allocate, pending.cast()) };
    if let Err((status, text)) = submitted {
        // SAFETY: the core has not taken it.
        let pending = unsafe { Box::from_raw(pending) };
        pending.finish(OperationOutcome::Failed {
            status,
            text,
            refused: false,
        });
    }
}

/// The core's call for an output's memory.
///
/// # Safety
/// `context` is a pending operation that has not ended; the rest as the header says.
unsafe extern "C" fn allocate(
    context: *mut c_void,
    index: usize,
    dtype: u8,
    dims: *const u64,
    ndim: usize,
) -> *mut c_void {
    // SAFETY: the core makes one call at a time.
    let pending = unsafe { &mut *context.cast::<PendingOperation>() };
    let dims = if dims.is_null() || ndim == 0 {
        &[]
    } else {
        // SAFETY: a list of this length.
        unsafe { std::slice::from_raw_parts(dims, ndim) }
    };
    let memory = catch_unwind(AssertUnwindSafe(|| pending.allocate(index, dtype, dims)));
    memory.unwrap_or(std::ptr::null_mut())
}

/// The core's call at an operation's end.
///
/// # Safety
/// `context` is a pending operation, which this ends; `result` lives as long as the call.
unsafe extern "C" fn ended(context: *mut c_void, result: *mut CoreResult) {
    // SAFETY: made by `submit`, and called once.
    let pending = unsafe { Box::from_raw(context.cast::<PendingOperation>()) };
    // SAFETY: as the core promises.
    let outcome = unsafe { core().outcome(result) };
    pending.finish(outcome);
}
