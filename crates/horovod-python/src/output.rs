//! Files that Python's parts write where users say.

use std::os::fd::{IntoRawFd, RawFd};
use std::path::PathBuf;

use horovod_engine::output_file::{self, OpenMode};
use pyo3::prelude::*;

/// A descriptor of this file, which is emptied, or made if it is not there.
#[pyfunction]
pub(crate) fn open_output(path: PathBuf) -> PyResult<RawFd> {
    let opened = output_file::open(&path, OpenMode::Truncate);
    opened.map(IntoRawFd::into_raw_fd).map_err(|error| {
        std::io::Error::new(error.kind(), format!("{}: {error}", path.display())).into()
    })
}
