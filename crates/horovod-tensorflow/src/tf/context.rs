//! One run of a kernel: its inputs and outputs.

use std::ffi::c_int;

use super::functions::TfContext;
use super::status::{Code, Failure, Status};
use super::tensor::Tensor;
use crate::dtypes::Dtype;
use crate::found::tf;

/// `TF_OpKernelContext`; TensorFlow keeps it until the run's `done` is called.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Context(*mut TfContext);

// SAFETY: TensorFlow lets any thread set the outputs of an asynchronous kernel, one at a time.
unsafe impl Send for Context {}

impl Context {
    /// Of a run that TensorFlow has begun.
    ///
    /// # Safety
    /// `context` is that of a run whose `done` is called after the last use of this, or of the call of a synchronous
    /// kernel that outlasts this.
    pub(crate) unsafe fn new(context: *mut TfContext) -> Self {
        Self(context)
    }

    /// How many inputs there are.
    pub(crate) fn input_count(self) -> usize {
        // SAFETY: valid, as `new` was promised; so below.
        let count = unsafe { (tf().num_inputs)(self.0) };
        usize::try_from(count).unwrap_or(0)
    }

    /// A handle on an input.
    pub(crate) fn input(self, index: usize) -> Result<Tensor, Failure> {
        let status = Status::new();
        let mut tensor = std::ptr::null_mut();
        // SAFETY: as above.
        unsafe { (tf().get_input)(self.0, as_int(index), &raw mut tensor, status.as_ptr()) };
        status.check()?;
        // SAFETY: without an error the handle is valid and ours.
        Ok(unsafe { Tensor::from_raw(tensor) })
    }

    /// Makes a tensor an output, without copying it.
    pub(crate) fn set_output(self, index: usize, tensor: &Tensor) -> Result<(), Failure> {
        let status = Status::new();
        // SAFETY: as above.
        unsafe { (tf().set_output)(self.0, as_int(index), tensor.as_ptr(), status.as_ptr()) };
        status.check()
    }

    /// Allocates an output.
    pub(crate) fn allocate_output(
        self,
        index: usize,
        dtype: Dtype,
        dims: &[i64],
    ) -> Result<Tensor, Failure> {
        let Some(bytes) = dtype.bytes_of(dims) else {
            let text = format!("shape {dims:?} is too large for this machine");
            return Err(Failure::new(Code::InvalidArgument, text));
        };
        let status = Status::new();
        // SAFETY: as above; the list of dimensions is as long as said.
        let tensor = unsafe {
            (tf().allocate_output)(
                self.0,
                as_int(index),
                dtype.tensorflow(),
                dims.as_ptr(),
                as_int(dims.len()),
                bytes,
                status.as_ptr(),
            )
        };
        status.check()?;
        checked(tensor)
    }

    /// Makes the memory of the input of the same number the output, if nobody else needs that input, or allocates
    /// the output: no handle on the input must be held meanwhile. Says whether the input's memory was taken.
    pub(crate) fn forward_or_allocate(
        self,
        index: usize,
        dims: &[i64],
    ) -> Result<(Tensor, bool), Failure> {
        let status = Status::new();
        let input = as_int(index);
        let mut forwarded: c_int = -1;
        // SAFETY: as above; the lists are as long as said.
        let tensor = unsafe {
            (tf().forward_or_allocate)(
                self.0,
                &raw const input,
                1,
                as_int(index),
                dims.as_ptr(),
                as_int(dims.len()),
                &raw mut forwarded,
                status.as_ptr(),
            )
        };
        status.check()?;
        Ok((checked(tensor)?, forwarded >= 0))
    }

    /// Ends the run with an error, when its `done` is called.
    pub(crate) fn fail(self, failure: &Failure) {
        let status = Status::of(failure);
        // SAFETY: as above.
        unsafe { (tf().context_failure)(self.0, status.as_ptr()) };
    }
}

fn checked(tensor: *mut super::functions::TfTensor) -> Result<Tensor, Failure> {
    if tensor.is_null() {
        return Err(Failure::new(
            Code::Internal,
            "TensorFlow allocated no output",
        ));
    }
    // SAFETY: without an error the handle is valid and ours.
    Ok(unsafe { Tensor::from_raw(tensor) })
}

/// TensorFlow counts inputs, outputs and dimensions in `int`.
fn as_int(number: usize) -> c_int {
    c_int::try_from(number).unwrap_or(c_int::MAX)
}
