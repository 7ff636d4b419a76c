//! Checksums of memory that a caller describes, computed without the interpreter lock.

use pyo3::prelude::*;

/// Checksum of each region, given as address and length in bytes, which the caller keeps alive and unchanged.
#[pyfunction]
pub(crate) fn checksums(py: Python<'_>, regions: Vec<(usize, usize)>) -> Vec<i64> {
    py.detach(|| {
        regions
            .into_iter()
            .map(|(address, bytes)| {
                let memory = std::ptr::with_exposed_provenance(address);
                // SAFETY: the caller says that this memory is there; only the adapters call.
                unsafe { horovod_kernels::checksum(memory, bytes) }.cast_signed()
            })
            .collect()
    })
}
