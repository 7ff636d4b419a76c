//! Results that the core allocated, as Python sees them: an object with the buffer protocol.

use std::ffi::{CStr, c_int, c_void};

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

const FORMAT: &CStr = c"B";

/// Host memory owned by the core, 64-byte aligned, writable, exported through the buffer protocol.
#[pyclass(frozen, module = "horovod._core")]
pub(crate) struct Buffer {
    memory: horovod_engine::Buffer,
    len: ffi::Py_ssize_t,
}

impl Buffer {
    pub(crate) fn new(memory: horovod_engine::Buffer) -> PyResult<Self> {
        let len = ffi::Py_ssize_t::try_from(memory.len())
            .map_err(|_| PyBufferError::new_err("the result is too large for a Python buffer"))?;
        Ok(Self { memory, len })
    }
}

#[pymethods]
impl Buffer {
    fn __len__(&self) -> usize {
        self.memory.len()
    }

    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        if view.is_null() {
            return Err(PyBufferError::new_err("a buffer view is needed"));
        }
        let this = slf.get();
        let (ptr, len) = (this.memory.as_mut_ptr(), this.len);
        // SAFETY: `view` is the caller's valid Py_buffer; the memory lives as long as `slf`, to which the
        // view holds a reference until it is released. `PyBuffer_FillInfo` fills every field of a
        // one-dimensional byte view.
        let rc = unsafe {
            ffi::PyBuffer_FillInfo(view, slf.as_ptr(), ptr.cast::<c_void>(), len, 0, flags)
        };
        if rc != 0 {
            return Err(PyErr::fetch(slf.py()));
        }
        // SAFETY: as above; the format string is static and only set where it was asked for.
        unsafe {
            if flags & ffi::PyBUF_FORMAT == ffi::PyBUF_FORMAT {
                (*view).format = FORMAT.as_ptr().cast_mut();
            }
        }
        Ok(())
    }

    #[expect(clippy::unused_self, reason = "the protocol's signature")]
    unsafe fn __releasebuffer__(&self, _view: *mut ffi::Py_buffer) {}
}
