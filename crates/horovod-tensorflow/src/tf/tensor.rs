//! TensorFlow's tensors: shared handles on a buffer with its shape.

use std::ffi::{c_int, c_void};

use super::functions::TfTensor;
use crate::found::tf;

/// A handle; the buffer lives as long as any handle on it.
#[derive(Debug)]
pub(crate) struct Tensor(*mut TfTensor);

// SAFETY: the buffer's count of handles is atomic, and a handle is used by one thread at a time.
unsafe impl Send for Tensor {}

impl Tensor {
    /// Takes over a handle.
    ///
    /// # Safety
    /// `tensor` is valid, and belongs to the caller.
    pub(crate) unsafe fn from_raw(tensor: *mut TfTensor) -> Self {
        Self(tensor)
    }

    /// For TensorFlow's functions.
    pub(crate) fn as_ptr(&self) -> *const TfTensor {
        self.0
    }

    /// TensorFlow's code of the element type.
    pub(crate) fn dtype(&self) -> i32 {
        // SAFETY: a valid handle; so below.
        unsafe { (tf().tensor_type)(self.0) }
    }

    /// Sizes of the dimensions.
    pub(crate) fn dims(&self) -> Vec<i64> {
        // SAFETY: as above.
        let count = unsafe { (tf().num_dims)(self.0) };
        (0..count.max(0))
            // SAFETY: as above, and there are so many.
            .map(|i: c_int| unsafe { (tf().dim)(self.0, i) })
            .collect()
    }

    /// Where the elements are; of no use if there are none.
    pub(crate) fn data(&self) -> *mut c_void {
        // SAFETY: as above.
        unsafe { (tf().tensor_data)(self.0) }
    }
}

impl Drop for Tensor {
    fn drop(&mut self) {
        // SAFETY: this handle belongs to us, and is deleted once.
        unsafe { (tf().delete_tensor)(self.0) }
    }
}
