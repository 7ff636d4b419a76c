//! TensorFlow's status: a code and a text.

use std::ffi::CString;

use super::functions::TfStatus;
use crate::found::tf;
use crate::loaded_objects::text;

/// The codes that are used here, as `tf.errors` has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum Code {
    Unknown = 2,
    InvalidArgument = 3,
    FailedPrecondition = 9,
    Aborted = 10,
    Internal = 13,
    DataLoss = 15,
}

/// A code with its text.
#[derive(Debug)]
pub(crate) struct Failure {
    code: i32,
    text: String,
}

impl Failure {
    /// One of our own.
    pub(crate) fn new(code: Code, text: impl Into<String>) -> Self {
        Self {
            code: code as i32,
            text: text.into(),
        }
    }
}

/// An owned status.
#[derive(Debug)]
pub(crate) struct Status(*mut TfStatus);

impl Status {
    /// Without an error.
    pub(crate) fn new() -> Self {
        // SAFETY: TensorFlow's own constructor.
        Self(unsafe { (tf().new_status)() })
    }

    /// With an error.
    pub(crate) fn of(failure: &Failure) -> Self {
        let status = Self::new();
        // SAFETY: this one's own status.
        unsafe { write(status.0, failure) };
        status
    }

    /// For TensorFlow's functions.
    pub(crate) fn as_ptr(&self) -> *mut TfStatus {
        self.0
    }

    /// The result that a function of TensorFlow has stored here.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        // SAFETY: this one's own status.
        let code = unsafe { (tf().get_code)(self.0) };
        if code == 0 {
            return Ok(());
        }
        Err(Failure {
            code,
            // SAFETY: a C string of the status.
            text: unsafe { text((tf().message)(self.0)) },
        })
    }
}

impl Drop for Status {
    fn drop(&mut self) {
        // SAFETY: made by `new`, deleted once.
        unsafe { (tf().delete_status)(self.0) }
    }
}

/// Writes a failure into a status of TensorFlow's.
///
/// # Safety
/// `status` is valid.
pub(crate) unsafe fn write(status: *mut TfStatus, failure: &Failure) {
    let text = CString::new(failure.text.replace('\0', " ")).unwrap_or_default();
    // SAFETY: as the caller promises, and a C string.
    unsafe { (tf().set_status)(status, failure.code, text.as_ptr()) }
}
