//! The stacks of Python threads, for reports of stalls.

use horovod_engine::{Frame, ThreadStack};
use pyo3::prelude::*;

type Found = Vec<(String, Vec<(String, u32, String)>)>;

/// Let the runtime know how to find stacks.
pub(crate) fn install() {
    horovod_engine::tell_stacks(|| {
        // Not during the interpreter's end, when there is nothing to tell any more.
        Python::try_attach(|py| find(py).unwrap_or_default()).unwrap_or_default()
    });
}

fn find(py: Python<'_>) -> PyResult<Vec<ThreadStack>> {
    let found: Found = py
        .import("horovod.common._stacks")?
        .call_method0("thread_stacks")?
        .extract()?;
    let frame = |(file, line, function)| Frame {
        file,
        line,
        function,
    };
    let thread = |(name, frames): (String, Vec<_>)| ThreadStack {
        name,
        frames: frames.into_iter().map(frame).collect(),
    };
    Ok(found.into_iter().map(thread).collect())
}
