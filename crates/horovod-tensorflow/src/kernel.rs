//! Kernels: what TensorFlow makes of a node, with its attributes read, and the functions that TensorFlow calls.

use std::ffi::{CStr, CString, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::collective;
use crate::names;
use crate::operations::{ALL, COUNT, Computes, Operation};
use crate::tf::construction::Construction;
use crate::tf::context::Context;
use crate::tf::functions::{CreateFn, TfConstruction, TfContext};
use crate::tf::status::{Code, Failure};
use crate::topology;
use crate::wait_history::WaitHistory;

/// One node, or all eager calls with the same attributes.
#[derive(Debug)]
pub(crate) struct Kernel {
    pub(crate) operation: &'static Operation,
    /// The ranks' operations find each other by it.
    pub(crate) name: CString,
    pub(crate) reduce_op: u8,
    pub(crate) prescale: f64,
    pub(crate) postscale: f64,
    pub(crate) process_set: u32,
    pub(crate) root: u32,
    pub(crate) wait_history: Arc<WaitHistory>,
}

impl Kernel {
    fn new(operation: &'static Operation, construction: Construction) -> Result<Self, Failure> {
        let int = |name: &CStr, otherwise| {
            if operation.has(&name.to_string_lossy()) {
                construction.int(name)
            } else {
                Ok(otherwise)
            }
        };
        let factor = |name: &CStr, bits: &CStr| -> Result<f64, Failure> {
            if !operation.has(&name.to_string_lossy()) {
                return Ok(1.0);
            }
            match construction.int(bits)? {
                0 => Ok(f64::from(construction.float(name)?)),
                bits => Ok(f64::from_bits(bits.cast_unsigned())),
            }
        };
        let ignore_scope =
            operation.has("ignore_name_scope") && construction.bool(c"ignore_name_scope")?;
        let reduce_op = int(c"reduce_op", 1)?;
        let root = int(c"root_rank", 0)?;
        let name = construction.name();
        Ok(Self {
            operation,
            name: CString::new(names::of_node(&name, ignore_scope)).unwrap_or_default(),
            reduce_op: u8::try_from(reduce_op).map_err(|_| {
                invalid(format!(
                    "reduce_op={reduce_op} is not an operator of Horovod"
                ))
            })?,
            prescale: factor(c"prescale_factor", c"prescale_bits")?,
            postscale: factor(c"postscale_factor", c"postscale_bits")?,
            // The core refuses a set that there cannot be.
            process_set: u32::try_from(int(c"process_set_id", 0)?).unwrap_or(u32::MAX),
            root: u32::try_from(root).map_err(|_| {
                invalid(format!(
                    "broadcast received invalid root rank {root} for provided process set"
                ))
            })?,
            wait_history: Arc::default(),
        })
    }
}

fn invalid(text: String) -> Failure {
    Failure::new(Code::InvalidArgument, text)
}

/// Functions that differ between the operations' kernels: TensorFlow's calls do not name the operation.
#[derive(Clone, Copy)]
pub(crate) struct KernelFunctions {
    pub(crate) create: CreateFn,
}

/// Those of [`ALL`], in the same order.
pub(crate) static FUNCTIONS: [KernelFunctions; COUNT] = [
    of::<0>(),
    of::<1>(),
    of::<2>(),
    of::<3>(),
    of::<4>(),
    of::<5>(),
    of::<6>(),
    of::<7>(),
    of::<8>(),
    of::<9>(),
    of::<10>(),
    of::<11>(),
    of::<12>(),
    of::<13>(),
];

const fn of<const INDEX: usize>() -> KernelFunctions {
    KernelFunctions {
        create: create::<INDEX>,
    }
}

/// Makes the kernel of a node; null, with the failure reported, if its attributes have no meaning.
///
/// # Safety
/// As TensorFlow calls it.
unsafe extern "C" fn create<const INDEX: usize>(construction: *mut TfConstruction) -> *mut c_void {
    // SAFETY: TensorFlow's, for the length of this call.
    let construction = unsafe { Construction::new(construction) };
    let kernel = catch_unwind(AssertUnwindSafe(|| Kernel::new(&ALL[INDEX], construction)));
    match kernel {
        Ok(Ok(kernel)) => return Box::into_raw(Box::new(kernel)).cast(),
        Ok(Err(failure)) => construction.fail(&failure),
        Err(_) => construction.fail(&panicked()),
    }
    std::ptr::null_mut()
}

/// Deletes a kernel.
///
/// # Safety
/// As TensorFlow calls it.
pub(crate) unsafe extern "C" fn delete(kernel: *mut c_void) {
    if !kernel.is_null() {
        // SAFETY: made by `create`, deleted once.
        drop(unsafe { Box::from_raw(kernel.cast::<Kernel>()) });
    }
}

/// Starts a collective operation; `done` is called when it has ended.
///
/// # Safety
/// As TensorFlow calls it.
pub(crate) unsafe extern "C" fn compute_collective(
    kernel: *mut c_void,
    context: *mut TfContext,
    done: *mut c_void,
) {
    // SAFETY: made by `create`; TensorFlow keeps it while it runs.
    let kernel = unsafe { &*kernel.cast::<Kernel>() };
    // SAFETY: TensorFlow's, until `done` is called, which is the last that is done.
    let context = unsafe { Context::new(context) };
    // SAFETY: this call's.
    unsafe { collective::start(kernel, context, done) };
}

/// Answers a query.
///
/// # Safety
/// As TensorFlow calls it.
pub(crate) unsafe extern "C" fn compute_query(kernel: *mut c_void, context: *mut TfContext) {
    // SAFETY: made by `create`; TensorFlow keeps it while it runs.
    let kernel = unsafe { &*kernel.cast::<Kernel>() };
    // SAFETY: TensorFlow's, for the length of this call.
    let context = unsafe { Context::new(context) };
    let answered = catch_unwind(AssertUnwindSafe(|| match kernel.operation.computes {
        Computes::Query(query) => topology::answer(query, kernel.process_set, context),
        Computes::Collective(_) => Ok(()),
    }));
    match answered {
        Ok(Ok(())) => {}
        Ok(Err(failure)) => context.fail(&failure),
        Err(_) => context.fail(&panicked()),
    }
}

/// A mistake of ours, which ends the operation alone.
pub(crate) fn panicked() -> Failure {
    Failure::new(
        Code::Internal,
        "an operation of Horovod panicked; please report this with the log above",
    )
}
