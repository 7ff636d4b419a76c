//! Checksums of memory that a caller describes, computed without the interpreter lock, and reports made of them.

use horovod_engine::{ProcessSetId, Replica};
use pyo3::prelude::*;

use crate::exit::detached;

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

/// Whether parameters of an optimizer on this set are to be reported before its first update.
#[pyfunction]
pub(crate) fn checks_replicas(process_set: Option<u32>) -> bool {
    let set = process_set.map(ProcessSetId);
    set.is_some_and(|set| horovod_engine::engine().is_ok_and(|engine| engine.checks_replicas(set)))
}

/// Report parameters, whose names have this digest, to rank 0, which compares them with those of the other members. Does
/// not wait for any; does nothing without a job.
#[pyfunction]
pub(crate) fn report_replica(
    py: Python<'_>,
    process_set: u32,
    key: u64,
    names: Vec<String>,
    sums: Vec<i64>,
    advice: String,
) {
    let Ok(engine) = horovod_engine::engine() else {
        return;
    };
    let replica = Replica {
        key,
        names,
        sums: sums.into_iter().map(i64::cast_unsigned).collect(),
        advice,
    };
    detached(py, || {
        engine.report_replica(ProcessSetId(process_set), replica);
    });
}
