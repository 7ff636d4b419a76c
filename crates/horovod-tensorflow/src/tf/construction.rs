//! The making of a kernel: its node's name and attributes.

use std::ffi::CStr;

use super::functions::TfConstruction;
use super::status::{Failure, Status};
use crate::found::tf;

/// `TF_OpKernelConstruction`, during the call that makes a kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Construction(*mut TfConstruction);

impl Construction {
    /// Of a call that makes a kernel.
    ///
    /// # Safety
    /// `construction` is what TensorFlow has passed, and the call outlasts this.
    pub(crate) unsafe fn new(construction: *mut TfConstruction) -> Self {
        Self(construction)
    }

    /// The node's name.
    pub(crate) fn name(self) -> String {
        // SAFETY: valid, as `new` was promised; so below.
        let view = unsafe { (tf().construction_name)(self.0) };
        if view.data.is_null() {
            return String::new();
        }
        // SAFETY: a text of this length, which lives as long as the kernel.
        let bytes = unsafe { std::slice::from_raw_parts(view.data.cast::<u8>(), view.len) };
        String::from_utf8_lossy(bytes).into_owned()
    }

    /// An attribute of type `int`.
    pub(crate) fn int(self, name: &CStr) -> Result<i64, Failure> {
        let (status, mut value) = (Status::new(), 0);
        // SAFETY: as above; a C string.
        unsafe {
            (tf().construction_int)(self.0, name.as_ptr(), &raw mut value, status.as_ptr());
        }
        status.check().map(|()| value)
    }

    /// An attribute of type `float`.
    pub(crate) fn float(self, name: &CStr) -> Result<f32, Failure> {
        let (status, mut value) = (Status::new(), 0.0);
        // SAFETY: as above; a C string.
        unsafe {
            (tf().construction_float)(self.0, name.as_ptr(), &raw mut value, status.as_ptr());
        }
        status.check().map(|()| value)
    }

    /// An attribute of type `bool`.
    pub(crate) fn bool(self, name: &CStr) -> Result<bool, Failure> {
        let (status, mut value) = (Status::new(), 0);
        // SAFETY: as above; a C string.
        unsafe {
            (tf().construction_bool)(self.0, name.as_ptr(), &raw mut value, status.as_ptr());
        }
        status.check().map(|()| value != 0)
    }

    /// Says that there will be no kernel.
    pub(crate) fn fail(self, failure: &Failure) {
        let status = Status::of(failure);
        // SAFETY: as above.
        unsafe { (tf().construction_failure)(self.0, status.as_ptr()) };
    }
}
