//! The start of a collective operation: inputs, outputs whose size is known, submission to the core.

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::core_functions::{CoreTensor, Described};
use crate::done::Done;
use crate::dtypes::{Dtype, INT32};
use crate::found::{core, tf};
use crate::kernel::{Kernel, panicked};
use crate::operations::{Computes, OperationCode};
use crate::pending::{self, End, Latch, PendingOperation};
use crate::tf::context::Context;
use crate::tf::status::{Code, Failure};
use crate::tf::tensor::Tensor;

/// Starts an operation and returns; `done` is called when it has ended. Where it cannot be moved this waits for it.
///
/// # Safety
/// `done` is what TensorFlow has passed to the call of a kernel that has not returned, and belongs to `context`.
pub(crate) unsafe fn start(kernel: &Kernel, context: Context, done: *mut c_void) {
    let Computes::Collective(kind) = kernel.operation.computes else {
        return;
    };
    // SAFETY: as the caller promises.
    if let Some(moved) = unsafe { Done::take(done) } {
        launch(kernel, kind, context, End::Calls(moved));
        return;
    }
    let latch = Latch::new();
    launch(kernel, kind, context, End::Releases(latch.clone()));
    latch.wait();
    // SAFETY: this call has not returned: it is where TensorFlow has put it.
    unsafe { (tf().run_done)(done) };
}

fn launch(kernel: &Kernel, kind: OperationCode, context: Context, end: End) {
    let prepared = catch_unwind(AssertUnwindSafe(|| prepare(kernel, kind, context)));
    let prepared = prepared.unwrap_or_else(|_| Err(panicked()));
    let operands = match prepared {
        Ok(operands) => operands,
        Err(failure) => {
            context.fail(&failure);
            end.run();
            return;
        }
    };
    let tensors: Vec<CoreTensor> = operands
        .tensors
        .iter()
        .map(CoreOperand::described)
        .collect();
    // The kernel may be gone when the operation has ended, perhaps before this returns.
    let may_wait = matches!(kind, OperationCode::Allreduce | OperationCode::Broadcast);
    let (started_run, may_wait) = kernel.wait_history.clone().start(may_wait);
    let described = Described {
        kind,
        reduce_op: kernel.reduce_op,
        process_set: kernel.process_set,
        root: kernel.root,
        name: &kernel.name,
        prescale: kernel.prescale,
        postscale: kernel.postscale,
        splits: operands.splits.as_deref(),
        may_wait,
    };
    let pending = PendingOperation::new(kernel.operation.name, kind, context, end, started_run)
        .with_operands(operands.handles, operands.tensors.len());
    // SAFETY: the pending operation holds handles on the memory of all operands until `ended` is called.
    unsafe { pending::submit(core(), &described, &tensors, pending) };
}

/// The tensors of an operation.
struct Operands {
    tensors: Vec<CoreOperand>,
    /// On all of their memory.
    handles: Vec<Tensor>,
    splits: Option<Vec<i64>>,
}

/// One tensor as the core shall see it.
struct CoreOperand {
    dtype: Dtype,
    dims: Vec<i64>,
    input: *const c_void,
    /// Null: its size is known late.
    output: *mut c_void,
}

impl CoreOperand {
    fn described(&self) -> CoreTensor {
        CoreTensor::new(self.dtype.core(), &self.dims, self.input, self.output)
    }
}

/// `HOROVOD_AVERAGE` and `HOROVOD_SUM` of the header.
const SCATTERED: [u8; 2] = [0, 1];

fn prepare(kernel: &Kernel, kind: OperationCode, context: Context) -> Result<Operands, Failure> {
    // The core's refusal does not tell it from a lost rank, after which elastic training would try again.
    if kind == OperationCode::Reducescatter && !SCATTERED.contains(&kernel.reduce_op) {
        let text = "Reducescatter currently only supports AVERAGE and SUM.";
        return Err(Failure::new(Code::InvalidArgument, text));
    }
    let count = match kind {
        OperationCode::Alltoall => 1,
        _ => context.input_count(),
    };
    let mut operands = Operands {
        tensors: Vec::with_capacity(count),
        handles: Vec::with_capacity(2 * count),
        splits: None,
    };
    for index in 0..count {
        let input = context.input(index)?;
        match kind {
            OperationCode::Allreduce => operands.push_reduced(context, index, input)?,
            OperationCode::Broadcast => {
                let is_root = u32::try_from(core().rank()) == Ok(kernel.root);
                operands.push_broadcast(context, index, input, is_root)?;
            }
            _ => operands.push_late(input)?,
        }
    }
    if kind == OperationCode::Alltoall {
        operands.splits = splits(&context.input(1)?)?;
    }
    Ok(operands)
}

impl Operands {
    /// Its output takes the input's memory where nobody else needs that.
    fn push_reduced(
        &mut self,
        context: Context,
        index: usize,
        input: Tensor,
    ) -> Result<(), Failure> {
        let (dtype, dims) = (known_dtype(&input)?, input.dims());
        // A handle on it would be somebody else.
        drop(input);
        let (output, forwarded) = context.forward_or_allocate(index, &dims)?;
        let to = output.data();
        self.handles.push(output);
        let from = if forwarded {
            to
        } else {
            let input = context.input(index)?;
            let from = input.data();
            self.handles.push(input);
            from
        };
        self.push(dtype, dims, from, to);
        Ok(())
    }

    /// The root's output is its input.
    fn push_broadcast(
        &mut self,
        context: Context,
        index: usize,
        input: Tensor,
        is_root: bool,
    ) -> Result<(), Failure> {
        if !is_root {
            return self.push_reduced(context, index, input);
        }
        context.set_output(index, &input)?;
        let (dtype, dims, data) = (known_dtype(&input)?, input.dims(), input.data());
        self.handles.push(input);
        self.push(dtype, dims, data, data);
        Ok(())
    }

    /// Its output is allocated when the core knows how large it is.
    fn push_late(&mut self, input: Tensor) -> Result<(), Failure> {
        let (dtype, dims, data) = (known_dtype(&input)?, input.dims(), input.data());
        self.handles.push(input);
        self.push(dtype, dims, data, std::ptr::null_mut());
        Ok(())
    }

    fn push(&mut self, dtype: Dtype, dims: Vec<i64>, input: *const c_void, output: *mut c_void) {
        self.tensors.push(CoreOperand {
            dtype,
            dims,
            input,
            output,
        });
    }
}

fn known_dtype(tensor: &Tensor) -> Result<Dtype, Failure> {
    let code = tensor.dtype();
    Dtype::from_tensorflow(code).ok_or_else(|| {
        let text = format!("Horovod has no element type for TensorFlow's type number {code}");
        Failure::new(Code::InvalidArgument, text)
    })
}

/// Rows for each member; `None`: as many for each.
fn splits(tensor: &Tensor) -> Result<Option<Vec<i64>>, Failure> {
    let dims = tensor.dims();
    let [count] = dims[..] else {
        return Err(Failure::new(
            Code::InvalidArgument,
            "alltoall expects a 1D splits tensor",
        ));
    };
    if count == 0 || tensor.dtype() != INT32.tensorflow() {
        return Ok(None);
    }
    let count = usize::try_from(count).unwrap_or(0);
    // SAFETY: the tensor has so many elements of this type.
    let rows = unsafe { std::slice::from_raw_parts(tensor.data().cast::<i32>(), count) };
    Ok(Some(rows.iter().copied().map(i64::from).collect()))
}
