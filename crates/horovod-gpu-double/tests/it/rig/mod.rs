//! Common to the tests: a device that is set up, streams, events, violations that the double found.
#![allow(clippy::unwrap_used, reason = "a test ends where something is missing")]

pub(crate) mod ranks;

use std::ffi::{CString, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::{Mutex, MutexGuard, PoisonError};

use horovod_gpu_double::Handle;
use horovod_gpu_double::driver::context::{
    cuCtxSetCurrent, cuDevicePrimaryCtxRetain, cuInit, cuThreadExchangeStreamCaptureMode,
};
use horovod_gpu_double::driver::stream::{
    cuEventCreate, cuEventRecord, cuStreamCreateWithPriority, cuStreamWaitEvent,
};
use horovod_gpu_double::testing::{
    double_configure, double_counts, double_reset, double_stream_create, double_violations,
};

/// The double's state is the process's: one test at a time.
pub(crate) struct Rig {
    _alone: MutexGuard<'static, ()>,
}

/// A fresh double with these settings, the context of device 0 on this thread.
pub(crate) fn rig(settings: &str) -> Rig {
    static ONE: Mutex<()> = Mutex::new(());
    let guard = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    double_reset();
    configure(settings);
    adopt(0);
    Rig { _alone: guard }
}

pub(crate) fn configure(settings: &str) {
    let text = CString::new(settings).unwrap();
    // SAFETY: a C string.
    assert_eq!(unsafe { double_configure(text.as_ptr()) }, 0, "{settings}");
}

/// The context of a device, on this thread, for good.
pub(crate) fn adopt(device: c_int) {
    assert_eq!(cuInit(0), 0);
    let (mut context, mut mode) = (null_mut(), 0);
    // SAFETY: places for what is written.
    unsafe {
        assert_eq!(cuDevicePrimaryCtxRetain(&raw mut context, device), 0);
        assert_eq!(cuCtxSetCurrent(context), 0);
        // A thread of the test runner may have another from a test before.
        assert_eq!(cuThreadExchangeStreamCaptureMode(&raw mut mode), 0);
    }
}

impl Rig {
    /// Kinds of the rules broken so far, and the texts.
    pub(crate) fn violations(&self) -> Vec<String> {
        violations()
    }

    /// Nothing was broken.
    pub(crate) fn is_clean(&self) {
        assert_eq!(violations(), Vec::<String>::new());
    }

    /// One rule was broken, of this kind and with this text.
    pub(crate) fn broke(&self, kind: &str, text: &str) {
        let all = violations();
        let [only] = all.as_slice() else {
            panic!("one violation of kind {kind} was expected, not {all:#?}");
        };
        assert!(only.starts_with(&format!("{kind}: ")), "{kind}: {only}");
        assert!(only.contains(text), "{text}: {only}");
    }
}

pub(crate) fn violations() -> Vec<String> {
    let mut text = vec![0u8; 1 << 20];
    // SAFETY: so many bytes.
    let count = unsafe { double_violations(text.as_mut_ptr().cast::<c_char>(), text.len()) };
    let end = text.iter().position(|b| *b == 0).unwrap();
    let text = String::from_utf8(text[..end].to_vec()).unwrap();
    let lines: Vec<String> = text.lines().map(str::to_owned).collect();
    assert_eq!(lines.len() as u64, count.min(1000));
    lines
}

/// How many rules were broken so far.
pub(crate) fn violation_count() -> u64 {
    // SAFETY: null asks for no text.
    unsafe { double_violations(null_mut(), 0) }
}

pub(crate) fn counts(call: &str) -> u64 {
    let name = CString::new(call).unwrap();
    // SAFETY: a C string.
    unsafe { double_counts(name.as_ptr()) }
}

/// The product's kind of stream.
pub(crate) fn own_stream() -> Handle {
    let mut stream = null_mut();
    // SAFETY: a place for one handle.
    let code = unsafe { cuStreamCreateWithPriority(&raw mut stream, 1, -5) };
    assert_eq!(code, 0);
    stream
}

/// A framework's.
pub(crate) fn user_stream() -> Handle {
    double_stream_create(0)
}

pub(crate) fn event() -> Handle {
    let mut event = null_mut();
    // SAFETY: a place for one handle.
    assert_eq!(unsafe { cuEventCreate(&raw mut event, 2) }, 0);
    event
}

/// Orders all later work of `later` after the work submitted to `earlier` so far.
pub(crate) fn order(earlier: Handle, later: Handle) {
    let event = event();
    // SAFETY: handles that exist.
    unsafe {
        assert_eq!(cuEventRecord(event, earlier), 0);
        assert_eq!(cuStreamWaitEvent(later, event, 0), 0);
    }
}

/// A pointer to the bytes of values.
pub(crate) fn bytes_of<T>(values: &[T]) -> *const c_void {
    values.as_ptr().cast()
}
