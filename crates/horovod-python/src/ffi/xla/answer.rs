//! Answers to XLA: errors, and futures that complete a call after it has returned.

use std::ffi::{CStr, CString, c_int, c_void};

use horovod_engine::gpu::RawStream;
use horovod_engine::{Error, StopReason};

use super::abi::{
    self, API_WITH_DEVICES, API_WITH_ERRORS, API_WITH_FUTURES, API_WITH_RUN_IDS, Api, ApiVersion,
    DeviceOrdinalGetArgs, ErrorCreateArgs, ErrorDestroyArgs, ErrorGetMessageArgs, FutureCreateArgs,
    FutureSetAvailableArgs, FutureSetErrorArgs, Head, RunIdGetArgs, StreamGetArgs, sized,
};

// In TensorFlow these are the classes that its custom operations raise.
const UNKNOWN: c_int = 2;
const INVALID_ARGUMENT: c_int = 3;
const FAILED_PRECONDITION: c_int = 9;
const ABORTED: c_int = 10;
const DATA_LOSS: c_int = 15;

/// XLA's functions.
#[derive(Clone, Copy)]
pub(super) struct Xla(&'static Api);

impl Xla {
    /// Of a table, if it has what is needed to answer.
    ///
    /// # Safety
    /// The table is null or XLA's, which lives as long as the process.
    pub(super) unsafe fn of(api: *const Api) -> Option<Self> {
        // SAFETY: as the caller promises.
        unsafe { sized(api, API_WITH_ERRORS) }.ok().map(Self)
    }

    /// XLA's form of an error. The text begins with the name of the Python exception that it stands for, for XLA's own
    /// does not tell.
    pub(super) fn error(self, error: &Error) -> *mut abi::Error {
        let (code, class) = match error {
            Error::NotInitialized => (FAILED_PRECONDITION, "ValueError"),
            Error::Capturing(_) => (FAILED_PRECONDITION, "RuntimeError"),
            Error::Stopped {
                why: StopReason::Deadlock { .. },
                ..
            } => (ABORTED, "HorovodStalledError"),
            Error::Stopped {
                why: StopReason::ReplicasDiffer { .. },
                ..
            } => (DATA_LOSS, "ReplicasDifferError"),
            other if other.is_invalid() => (INVALID_ARGUMENT, "ValueError"),
            Error::Refused(_) => (FAILED_PRECONDITION, "HorovodInternalError"),
            _ => (UNKNOWN, "HorovodInternalError"),
        };
        let text = format!("{class}: {error}").replace('\0', " ");
        let message = CString::new(text).unwrap_or_default();
        let mut args = ErrorCreateArgs {
            head: Head::of::<ErrorCreateArgs>(),
            message: message.as_ptr(),
            code,
        };
        // SAFETY: XLA's function, which copies the text.
        unsafe { (self.0.error_create)(&raw mut args) }
    }

    /// The number of the run of a program that a call belongs to, if this version of XLA tells.
    ///
    /// # Safety
    /// `context` is that of a call that has not returned.
    pub(super) unsafe fn run_id(self, context: *mut c_void) -> Option<i64> {
        if self.0.head.struct_size < API_WITH_RUN_IDS {
            return None;
        }
        let mut args = RunIdGetArgs {
            head: Head::of::<RunIdGetArgs>(),
            context,
            run_id: 0,
        };
        // SAFETY: XLA's function, which the table has.
        let error = unsafe { (self.0.run_id_get)(&raw mut args) };
        // SAFETY: of XLA's function, and nobody else's.
        unsafe { self.checked(error) }.ok().map(|()| args.run_id)
    }

    /// The number of the GPU that a call runs on, as XLA counts in this process, and its stream; else why they are not
    /// told.
    ///
    /// # Safety
    /// `context` is that of a call that has not returned.
    pub(super) unsafe fn place(self, context: *mut c_void) -> Result<(i32, RawStream), String> {
        if self.0.head.struct_size < API_WITH_DEVICES {
            let ApiVersion { major, minor, .. } = self.0.version;
            return Err(format!(
                "its interface, of version {major}.{minor}, does not have it"
            ));
        }
        let mut device = DeviceOrdinalGetArgs {
            head: Head::of::<DeviceOrdinalGetArgs>(),
            context,
            device_ordinal: 0,
        };
        let mut stream = StreamGetArgs {
            head: Head::of::<StreamGetArgs>(),
            context,
            stream: std::ptr::null_mut(),
        };
        // SAFETY: XLA's functions, which the table has; their errors are nobody else's.
        unsafe {
            self.checked((self.0.device_ordinal_get)(&raw mut device))?;
            self.checked((self.0.stream_get)(&raw mut stream))?;
        }
        Ok((device.device_ordinal, RawStream(stream.stream)))
    }

    /// The text of an error of XLA's, which ends here.
    ///
    /// # Safety
    /// `error` is null or the caller's.
    unsafe fn checked(self, error: *mut abi::Error) -> Result<(), String> {
        if error.is_null() {
            return Ok(());
        }
        let mut args = ErrorGetMessageArgs {
            head: Head::of::<ErrorGetMessageArgs>(),
            error,
            message: std::ptr::null(),
            code: 0,
        };
        // SAFETY: XLA's function.
        unsafe { (self.0.error_get_message)(&raw mut args) };
        let text = if args.message.is_null() {
            String::new()
        } else {
            // SAFETY: a text of XLA's, which ends with its error.
            let text = unsafe { CStr::from_ptr(args.message) };
            text.to_string_lossy().into_owned()
        };
        let mut args = ErrorDestroyArgs {
            head: Head::of::<ErrorDestroyArgs>(),
            error,
        };
        // SAFETY: as above; nobody uses the error later.
        unsafe { (self.0.error_destroy)(&raw mut args) };
        Err(text)
    }

    /// A new future, if this version of XLA has them.
    pub(super) fn future(self) -> Option<Future> {
        if self.0.head.struct_size < API_WITH_FUTURES {
            return None;
        }
        let mut args = FutureCreateArgs {
            head: Head::of::<FutureCreateArgs>(),
            future: std::ptr::null_mut(),
        };
        // SAFETY: XLA's function, which the table has.
        let error = unsafe { (self.0.future_create)(&raw mut args) };
        (error.is_null() && !args.future.is_null()).then_some(Future(self, args.future))
    }
}

/// A future that is not completed. XLA owns it once the call that left it in its frame has returned.
pub(super) struct Future(Xla, *mut abi::Future);

// SAFETY: XLA's futures are made to be completed by any thread.
unsafe impl Send for Future {}

impl Future {
    pub(super) fn get(&self) -> *mut abi::Future {
        self.1
    }

    /// Completes the future; its waiters may resume on this thread.
    pub(super) fn complete(self, outcome: Result<(), Error>) {
        let Self(xla, future) = self;
        let refused = match outcome {
            Ok(()) => {
                let mut args = FutureSetAvailableArgs {
                    head: Head::of::<FutureSetAvailableArgs>(),
                    future,
                };
                // SAFETY: XLA's function, which the table has, for it has made this future.
                unsafe { (xla.0.future_set_available)(&raw mut args) }
            }
            Err(error) => {
                let mut args = FutureSetErrorArgs {
                    head: Head::of::<FutureSetErrorArgs>(),
                    future,
                    error: xla.error(&error),
                };
                // SAFETY: as above; the error becomes XLA's.
                unsafe { (xla.0.future_set_error)(&raw mut args) }
            }
        };
        if !refused.is_null() {
            tracing::error!("XLA does not take the end of a call");
        }
    }
}
