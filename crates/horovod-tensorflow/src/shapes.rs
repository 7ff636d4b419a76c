//! Shape functions: what is known of the outputs' shapes before anything runs.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::operations::{Operation, Shapes};
use crate::tf::functions::{ShapeFn, TfShapeContext, TfStatus};
use crate::tf::shape_context::ShapeContext;
use crate::tf::status::{self, Code, Failure};

/// The function of an operation.
pub(crate) fn function(operation: &Operation) -> ShapeFn {
    match operation.shapes {
        Shapes::Same => same,
        Shapes::UnknownRows if operation.has("reduce_op") && operation.grouped => grouped_scattered,
        Shapes::UnknownRows if operation.has("reduce_op") => scattered,
        Shapes::UnknownRows => gathered,
        Shapes::Exchanged => exchanged,
        Shapes::Scalar => scalar,
    }
}

/// Runs the body of a shape function.
///
/// # Safety
/// Both are what TensorFlow has passed to the function.
unsafe fn infer(
    context: *mut TfShapeContext,
    status: *mut TfStatus,
    body: impl FnOnce(ShapeContext) -> Result<(), Failure>,
) {
    // SAFETY: as the caller promises.
    let context = unsafe { ShapeContext::new(context) };
    let outcome = catch_unwind(AssertUnwindSafe(|| body(context)));
    let failure = match outcome {
        Ok(Ok(())) => return,
        Ok(Err(failure)) => failure,
        Err(_) => Failure::new(Code::Internal, "a shape function of Horovod panicked"),
    };
    // SAFETY: as the caller promises.
    unsafe { status::write(status, &failure) };
}

unsafe extern "C" fn same(context: *mut TfShapeContext, status: *mut TfStatus) {
    // SAFETY: as TensorFlow calls it.
    unsafe {
        infer(context, status, |context| {
            (0..context.input_count()).try_for_each(|i| context.set_output(i, &context.input(i)?))
        });
    }
}

unsafe extern "C" fn scalar(context: *mut TfShapeContext, status: *mut TfStatus) {
    // SAFETY: as TensorFlow calls it.
    unsafe {
        infer(context, status, |context| {
            context.set_output(0, &context.scalar())
        })
    };
}

unsafe extern "C" fn gathered(context: *mut TfShapeContext, status: *mut TfStatus) {
    const TEXT: &str = "Shape must be at least rank 1 but is rank 0: tensors are put together along their first dimension";
    // SAFETY: as TensorFlow calls it.
    unsafe {
        infer(context, status, |context| {
            (0..context.input_count()).try_for_each(|i| unknown_rows(context, i, TEXT))
        });
    }
}

unsafe extern "C" fn scattered(context: *mut TfShapeContext, status: *mut TfStatus) {
    const TEXT: &str = "HorovodReducescatter does not support scalar inputs.";
    // SAFETY: as TensorFlow calls it.
    unsafe { infer(context, status, |context| unknown_rows(context, 0, TEXT)) };
}

unsafe extern "C" fn grouped_scattered(context: *mut TfShapeContext, status: *mut TfStatus) {
    const TEXT: &str = "HorovodGroupedReducescatter does not support scalar inputs.";
    // SAFETY: as TensorFlow calls it.
    unsafe {
        infer(context, status, |context| {
            (0..context.input_count()).try_for_each(|i| unknown_rows(context, i, TEXT))
        });
    }
}

unsafe extern "C" fn exchanged(context: *mut TfShapeContext, status: *mut TfStatus) {
    const TEXT: &str =
        "Shape must be at least rank 1 but is rank 0: rows of the first dimension are exchanged";
    // SAFETY: as TensorFlow calls it.
    unsafe {
        infer(context, status, |context| {
            unknown_rows(context, 0, TEXT)?;
            let splits = context.input(1)?;
            // No splits ask for equal ones, and one number for each member comes out.
            let equal = context.rank(&splits) == Some(1) && context.dim(&splits, 0) == Some(0);
            let received = if equal {
                context.unknown_vector()
            } else {
                splits
            };
            context.set_output(1, &received)
        });
    }
}

fn unknown_rows(context: ShapeContext, index: usize, scalar_text: &str) -> Result<(), Failure> {
    let input = context.input(index)?;
    match context.rank(&input) {
        None => context.set_output(index, &input),
        Some(0) => Err(Failure::new(Code::InvalidArgument, scalar_text)),
        Some(rank) => context.set_output(index, &context.with_unknown_rows(&input, rank)?),
    }
}
