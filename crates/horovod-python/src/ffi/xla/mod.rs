//! Handlers of XLA's typed foreign functions: collectives as custom calls inside compiled programs, on the host; those on
//! CUDA are in `device`.
//!
//! JAX and TensorFlow register the exported functions by their addresses; nothing is linked. One call with several
//! operands is one grouped operation. The attributes are those of [`call::Attributes`]; ranks match calls by `name`.
//!
//! **Waiting.** A handler first waits itself, for a moment that grows with the operands ([`wait_timeout`]): the thread that
//! waits makes the progress, which costs no wake-up. When the moment is over it leaves an XLA future behind and returns,
//! and the core's callback thread completes that. So no thread of XLA's is held for ever: ranks whose programs begin
//! disjoint calls on all of their threads would otherwise wait for each other.

mod abi;
mod answer;
mod call;
mod device;
mod places;
mod report;

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use horovod_engine::gpu::Ready;
use horovod_engine::{
    Engine, Error, Handle, Op, OpResult, ProcessSetId, ReduceOp, Scale, Shape, Submission, Tensor,
    Tensors, Waited,
};

use self::abi::{CallFrame, EXECUTE, METADATA, MetadataExtension, sized};
use self::answer::Xla;
use self::call::{Attributes, CallOperand, invalid};
use super::{guarded, wait_timeout};
use crate::submit::operation_of;

/// Versions of XLA's interface whose table has futures begin with this one.
const OLDEST_MINOR: i32 = 1;

/// One kind of operation.
#[derive(Clone, Copy)]
struct XlaOperation {
    code: u8,
    prefix: &'static str,
    grouped_prefix: &'static str,
    /// Results are as large as operands.
    same_shape: bool,
}

const ALLREDUCE: XlaOperation = XlaOperation {
    code: 0,
    prefix: "allreduce",
    grouped_prefix: "grouped_allreduce",
    same_shape: true,
};
const ALLGATHER: XlaOperation = XlaOperation {
    code: 1,
    prefix: "allgather",
    grouped_prefix: "grouped_allgather",
    same_shape: false,
};
const BROADCAST: XlaOperation = XlaOperation {
    code: 2,
    prefix: "broadcast",
    grouped_prefix: "grouped_broadcast",
    same_shape: true,
};
const ALLTOALL: XlaOperation = XlaOperation {
    code: 3,
    prefix: "alltoall",
    grouped_prefix: "grouped_alltoall",
    same_shape: false,
};
const REDUCESCATTER: XlaOperation = XlaOperation {
    code: 4,
    prefix: "reducescatter",
    grouped_prefix: "grouped_reducescatter",
    same_shape: false,
};

macro_rules! handler {
    ($name:ident, $kind:expr, $doc:literal) => {
        #[doc = $doc]
        ///
        /// # Safety
        /// Called by XLA, with a frame of its own that lives until the answer, or until the future is completed.
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(frame: *mut CallFrame) -> *mut abi::Error {
            // SAFETY: as the caller promises.
            unsafe { handle(frame, $kind) }
        }
    };
}

handler!(
    horovod_xla_allreduce,
    ALLREDUCE,
    "Allreduce of all operands."
);
handler!(
    horovod_xla_allgather,
    ALLGATHER,
    "Allgather of all operands, of which every rank has equally many rows."
);
handler!(
    horovod_xla_broadcast,
    BROADCAST,
    "Broadcast of all operands."
);
handler!(
    horovod_xla_alltoall,
    ALLTOALL,
    "Alltoall of one operand, of which every rank sends equally many rows to each."
);
handler!(
    horovod_xla_reducescatter,
    REDUCESCATTER,
    "Reduce-scatter of all operands into parts of equally many rows."
);

/// Refuses calls on devices whose memory the core does not reach.
///
/// # Safety
/// As of the others.
#[unsafe(no_mangle)]
unsafe extern "C" fn horovod_xla_elsewhere(frame: *mut CallFrame) -> *mut abi::Error {
    // SAFETY: as the caller promises.
    unsafe {
        answer(frame, |_, _| {
            Err(invalid(
                "the program with this operation runs on a device that Horovod does not reach from compiled programs, which \
                 are the CPU and NVIDIA's GPUs: set JAX_PLATFORMS=cpu, compile for it with \
                 jax.default_device(jax.devices(\"cpu\")[0]), or call the operation outside of jit, which copies through \
                 host memory",
            ))
        })
    }
}

unsafe fn handle(frame: *mut CallFrame, kind: XlaOperation) -> *mut abi::Error {
    // SAFETY: as the caller promises; the frame is XLA's.
    unsafe { answer(frame, |frame, xla| execute(frame, xla, kind)) }
}

unsafe fn answer(
    frame: *mut CallFrame,
    body: impl FnOnce(&mut CallFrame, Xla) -> Result<(), Error>,
) -> *mut abi::Error {
    // The future is not counted by any version so far.
    let counted = std::mem::offset_of!(CallFrame, future);
    // SAFETY: XLA's frame begins with its size.
    if unsafe { sized(frame.cast_const(), counted) }.is_err() {
        // Without a frame there is no table of functions, so nothing can be said.
        tracing::error!(
            "XLA called with a frame of a layout that is not known; results of the call are missing"
        );
        return std::ptr::null_mut();
    }
    // SAFETY: it has the length that is known; XLA leaves it to the handler.
    let frame = unsafe { &mut *frame };
    // SAFETY: as the caller promises.
    if unsafe { tell_metadata(frame) } {
        return std::ptr::null_mut();
    }
    // SAFETY: the table is XLA's.
    let Some(xla) = (unsafe { Xla::of(frame.api) }) else {
        tracing::error!(
            "XLA called with a table of functions that is not known; results of the call are missing"
        );
        return std::ptr::null_mut();
    };
    if frame.stage != EXECUTE {
        return std::ptr::null_mut();
    }
    let panicked = Err(Error::Internal("the core panicked; see its log".into()));
    match guarded(panicked, || body(frame, xla)) {
        Ok(()) => std::ptr::null_mut(),
        Err(error) => xla.error(&error),
    }
}

/// Answers XLA's question for the interface that this was written for, if it is one.
///
/// The versions differ in what is not used here, and each structure is read by its own size: so the answer is XLA's own
/// version, from the oldest that has all that is used.
unsafe fn tell_metadata(frame: &CallFrame) -> bool {
    let extension = frame.head.extension_start;
    // SAFETY: null, or an extension of XLA's.
    let Ok(MetadataExtension { base, metadata }) = (unsafe {
        sized(
            extension.cast_const().cast::<MetadataExtension>(),
            size_of::<abi::Extension>(),
        )
    }) else {
        return false;
    };
    if base.kind != METADATA || metadata.is_null() {
        return false;
    }
    // SAFETY: null, or XLA's table.
    let api = unsafe { sized(frame.api, abi::API_WITH_ERRORS) };
    let own = api.map_or((0, OLDEST_MINOR), |api| {
        (api.version.major, api.version.minor)
    });
    let (major, minor) = if own.0 == 0 {
        (0, own.1.max(OLDEST_MINOR))
    } else {
        (0, OLDEST_MINOR)
    };
    // SAFETY: XLA's, to be written; its layout up to `traits` is the same in all versions.
    unsafe {
        (**metadata).api_version.major = major;
        (**metadata).api_version.minor = minor;
        (**metadata).traits = 0;
    }
    true
}

/// A call whose operation was submitted, and waited for.
struct Submitted {
    engine: Arc<Engine>,
    handle: Handle,
    expected: Expected,
    waited: Waited,
}

/// Reads a call, submits its operation and waits for it: on the host for a moment, on a GPU until it was launched. `ready`,
/// of a call on a GPU, is where the stream was when it began.
///
/// # Safety
/// The frame is XLA's, its buffers are left alone until the operation has ended, and lie on the GPU of `ready`.
unsafe fn submit(
    frame: &CallFrame,
    xla: Xla,
    kind: XlaOperation,
    ready: Option<&Arc<Ready>>,
) -> Result<Submitted, Error> {
    // SAFETY: XLA's frame.
    let attributes = unsafe { Attributes::of(frame)? };
    let read = |at: *const i64| match ready {
        // SAFETY: an operand of the call, of one such number.
        Some(ready) => unsafe { horovod_engine::gpu::read_number(at, ready) },
        // SAFETY: the same, in host memory.
        None => Ok(unsafe { at.read_unaligned() }),
    };
    // SAFETY: XLA's frame.
    let (operands, call_site) = unsafe { CallOperand::all(frame, &attributes, read)? };
    let name = name_at(attributes.name, call_site);
    if let Some(is_unordered) = attributes.is_unordered
        // SAFETY: the context of this call.
        && let Some(run_id) = unsafe { xla.run_id(frame.context) }
    {
        let now = places::Use {
            run_id,
            place: frame.attrs.values.addr(),
            is_unordered,
        };
        if places::may_be_mixed_up(attributes.name, now) {
            return Err(invalid(format!(
                "the operation {} {SEVERAL_PLACES}",
                attributes.name
            )));
        }
    }
    let engine = horovod_engine::engine()?;
    let scale = Scale {
        pre: attributes.prescale,
        post: attributes.postscale,
    };
    let op = operation_of(kind.code, attributes.reduce_op, scale, attributes.root)?;
    let adasum = ReduceOp::Adasum;
    if ready.is_some() && matches!(op, Op::Allreduce { op, .. } if op == adasum) {
        // Through NCCL it averages inside hosts, and scripts set the learning rate by `nccl_built()`.
        return Err(invalid(
            "Adasum in programs that are compiled for a GPU is not supported, because hvd.nccl_built() is 0 here, which \
             means that Adasum combines all ranks: call it outside of the compiled program, or use another op",
        ));
    }
    if matches!(op, Op::Alltoall) && operands.len() > 1 {
        return Err(invalid("an alltoall has one operand"));
    }
    let tensor = |operand: &CallOperand| -> Result<Tensor, Error> {
        // SAFETY: XLA keeps operands and results until the call is over, or its future completed; on a GPU it uses them
        // in the order of the call's stream.
        unsafe {
            let tensor = if kind.same_shape {
                operand.same_shape()?
            } else {
                operand.even_rows()?
            };
            Ok(match ready {
                Some(ready) => tensor.on_gpu(ready.clone()),
                None => tensor,
            })
        }
    };
    let tensors: Tensors = match operands.as_slice() {
        [one] => tensor(one)?.into(),
        many => many
            .iter()
            .map(tensor)
            .collect::<Result<Vec<_>, _>>()?
            .into(),
    };
    let wait_timeout = match ready {
        Some(_) => Duration::MAX,
        // On the thread that runs callbacks no other is run meanwhile.
        None if horovod_engine::in_callback() => Duration::ZERO,
        None => wait_timeout(&tensors),
    };
    let prefix = if operands.len() > 1 {
        kind.grouped_prefix
    } else {
        kind.prefix
    };
    let set = ProcessSetId(attributes.process_set);
    let submission = Submission::new(prefix, Some(&name), op, set, tensors);
    let (handle, waited) = engine
        .as_guest(|engine| engine.submit_and_wait_for(submission, wait_timeout))
        .map_err(explained)?;
    let expected = Expected::of(kind, &name, operands);
    Ok(Submitted {
        engine,
        handle,
        expected,
        waited,
    })
}

/// Submits the operation, and waits for it or leaves a future in the frame.
unsafe fn execute(frame: &mut CallFrame, xla: Xla, kind: XlaOperation) -> Result<(), Error> {
    // SAFETY: XLA's frame, of a call on the host.
    let Submitted {
        engine,
        handle,
        expected,
        waited,
    } = unsafe { submit(frame, xla, kind, None)? };
    let checked = move |result: Result<OpResult, Error>| expected.check(&result?);
    if let Waited::Ended { result, .. } = waited {
        return checked(result);
    }
    let Some(future) = xla.future() else {
        tracing::warn!("XLA gives no future for a call, so a thread of its waits");
        return match engine.wait(handle, Duration::MAX) {
            Waited::Ended { result, .. } => checked(result),
            _ => Err(Error::Internal(format!("handle {} vanished", handle.0))),
        };
    };
    frame.future = future.get();
    let complete = move |result| future.complete(checked(result));
    engine.call_at_end(handle, Box::new(complete));
    Ok(())
}

/// The name of an operation in a function that a program calls at several places; 0 is where a program begins.
fn name_at(name: &str, call_site: i64) -> Cow<'_, str> {
    if call_site == 0 {
        return Cow::Borrowed(name);
    }
    Cow::Owned(format!("{name}@{}", call_site.cast_unsigned()))
}

/// Error text for a name that several calls of one program have, with the cure.
const SEVERAL_PLACES: &str = "stands at several places of one compiled program, which XLA may run in any order, so the \
    ranks could mix up their values: this is so when a function with its own jit (or the body of a scan) that has the \
    call in it is used more than once. Set HOROVOD_JAX_ORDERED_CALLS=1 (a function with its own jit must not be called \
    alone before then), give the function no jit of its own, or several operands at once";

/// A name that is under way already is not that of a second call of one place in the program: those do not overlap.
fn explained(error: Error) -> Error {
    let Error::DuplicateName { name } = &error else {
        return error;
    };
    invalid(format!("{error} (tensor {name}) It {SEVERAL_PLACES}"))
}

/// Where results of an operation are to be.
struct Expected {
    kind: XlaOperation,
    name: String,
    outputs: Vec<(Address, Shape)>,
}

/// Of an output; only compared.
struct Address(*mut u8);

// SAFETY: it is not followed.
unsafe impl Send for Address {}

impl Expected {
    fn of(kind: XlaOperation, name: &str, operands: Vec<CallOperand>) -> Self {
        if kind.same_shape {
            let (name, outputs) = (String::new(), Vec::new());
            return Self {
                kind,
                name,
                outputs,
            };
        }
        let outputs = operands.into_iter();
        Self {
            kind,
            name: name.to_owned(),
            outputs: outputs
                .map(|operand| (Address(operand.output), operand.output_shape))
                .collect(),
        }
    }

    /// Whether results are where the program looks for them; if not on one rank, then on none.
    fn check(&self, result: &OpResult) -> Result<(), Error> {
        for (i, (output, (at, shape))) in result.outputs.iter().zip(&self.outputs).enumerate() {
            let Some((buffer, got)) = output else {
                continue;
            };
            let is_there = buffer.is_empty() || buffer.as_mut_ptr() == at.0;
            if is_there && got == shape {
                continue;
            }
            return Err(invalid(format!(
                "{} {:?}, operand {i}: the result has shape {:?} where the compiled program has {:?}, because the ranks \
                 bring unequal numbers of rows, or their number is not that of when the program was traced. Inside \
                 compiled programs shapes are fixed: give every rank equally many rows (pad them), or call the operation \
                 outside of them; after a change of the number of ranks trace anew (JAX: jax.clear_caches())",
                self.kind.prefix,
                self.name,
                &got[..],
                &shape[..]
            )));
        }
        Ok(())
    }
}
