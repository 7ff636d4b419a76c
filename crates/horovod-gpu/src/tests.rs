//! All of it over the double: libraries on host memory that check how they are called.

mod communicators;
mod devices;
mod executor;
mod launching;

use std::ffi::{CString, c_char, c_int, c_void};
use std::path::PathBuf;

use crate::load::{Library, Search, Stack, choose_stack, driver, find_driver, set_search};
use crate::testing::Folder;
use crate::{Device, RawStream};

/// The double, with what tests ask of it. One per process: call it in [`crate::testing::alone`].
pub(crate) struct Double(Library);

/// A function of the double, by its type.
macro_rules! function {
    ($double:expr, $name:literal, $type:ty) => {{
        // SAFETY: the declarations of the double's `testing.rs`.
        let found: Option<$type> = unsafe { $double.0.function($name) };
        found.expect("a function of the double")
    }};
}

impl Double {
    /// Loads it, with these settings (`GPU_DOUBLE`).
    pub(crate) fn start(settings: &str) -> Self {
        Self::start_with(settings, |path| Search {
            cuda_library: Some(path.clone()),
            nccl_library: Some(path),
            ..Search::default()
        })
    }

    /// The same as AMD's libraries.
    pub(crate) fn start_rocm(settings: &str) -> Self {
        let folder = Folder::new();
        let place = folder.path("libamdhip64.so.7");
        let double = Self::start_with(settings, |path| {
            std::os::unix::fs::symlink(&path, &place).expect("a link");
            Search {
                nccl_library: Some(path),
                rocm_folders: vec![place.with_file_name("")],
                ..Search::default()
            }
        });
        choose_stack(Stack::Rocm).expect("nothing is open");
        find_driver().expect("the double");
        double
    }

    fn start_with(settings: &str, search: impl FnOnce(PathBuf) -> Search) -> Self {
        // Cargo builds it beside this binary.
        let path = std::env::current_exe()
            .expect("this test binary")
            .with_file_name("libhorovod_gpu_double.so");
        let double = Self(Library::open(&path).expect("the double is built"));
        double.configure(settings);
        assert!(set_search(search(path)));
        double
    }

    /// Has other settings from now on, and counts anew.
    fn configure(&self, settings: &str) {
        let configure = function!(
            self,
            c"double_configure",
            unsafe extern "C" fn(*const c_char) -> c_int
        );
        let settings = CString::new(settings).expect("no NUL");
        // SAFETY: a C string.
        assert_eq!(unsafe { configure(settings.as_ptr()) }, 0, "{settings:?}");
    }

    /// A device, with its context current on this thread.
    pub(crate) fn adopted(ordinal: i32) -> &'static Device {
        let device = driver()
            .expect("the double")
            .device(ordinal)
            .expect("a device");
        device.adopt_thread().expect("a context");
        device
    }

    /// A framework's memory.
    pub(crate) fn alloc(&self, device: i32, bytes: usize) -> u64 {
        let alloc = function!(self, c"double_alloc", extern "C" fn(c_int, usize) -> u64);
        let address = alloc(device, bytes);
        assert_ne!(address, 0, "memory of the double");
        address
    }

    /// A framework's stream.
    fn stream(&self, device: i32) -> RawStream {
        let create = function!(
            self,
            c"double_stream_create",
            extern "C" fn(c_int) -> *mut c_void
        );
        RawStream(create(device))
    }

    /// A kernel of a framework that writes.
    fn write(&self, stream: RawStream, to: u64, bytes: &[u8]) {
        let write = function!(
            self,
            c"double_stream_write",
            unsafe extern "C" fn(*mut c_void, u64, *const c_void, usize) -> c_int
        );
        // SAFETY: so many bytes.
        let code = unsafe { write(stream.0, to, bytes.as_ptr().cast(), bytes.len()) };
        assert_eq!(code, 0);
    }

    /// The bytes that a framework's kernel would read at the current end of the stream.
    pub(crate) fn read(&self, stream: RawStream, from: u64, bytes: usize) -> Vec<u8> {
        let read = function!(
            self,
            c"double_stream_read",
            unsafe extern "C" fn(*mut c_void, *mut c_void, u64, usize) -> c_int
        );
        let synchronize = function!(
            self,
            c"double_stream_synchronize",
            unsafe extern "C" fn(*mut c_void) -> c_int
        );
        let mut found = vec![0; bytes];
        // SAFETY: so many bytes, which stay until the stream has come there.
        unsafe {
            assert_eq!(read(stream.0, found.as_mut_ptr().cast(), from, bytes), 0);
            assert_eq!(synchronize(stream.0), 0);
        }
        found
    }

    /// A kernel that ends when [`Self::open`] is called.
    fn gate(&self, stream: RawStream) -> u64 {
        let gate = function!(
            self,
            c"double_stream_gate",
            unsafe extern "C" fn(*mut c_void) -> u64
        );
        // SAFETY: a stream of the double.
        let gate = unsafe { gate(stream.0) };
        assert_ne!(gate, 0);
        gate
    }

    fn open(&self, gate: u64) {
        function!(self, c"double_gate_open", extern "C" fn(u64))(gate);
    }

    fn begin_capture(&self, stream: RawStream, mode: c_int) {
        let begin = function!(
            self,
            c"double_stream_begin_capture",
            unsafe extern "C" fn(*mut c_void, c_int) -> c_int
        );
        // SAFETY: a stream of the double.
        assert_eq!(unsafe { begin(stream.0, mode) }, 0);
    }

    /// How many operations a capture caught; none if it was invalidated.
    fn end_capture(&self, stream: RawStream) -> Option<u64> {
        let end = function!(
            self,
            c"double_stream_end_capture",
            unsafe extern "C" fn(*mut c_void) -> i64
        );
        // SAFETY: a stream of the double.
        u64::try_from(unsafe { end(stream.0) }).ok()
    }

    /// Calls of a function so far.
    fn calls(&self, name: &str) -> u64 {
        self.number(c"double_counts", name)
    }

    /// `streams`, `events`, `allocations`, `communicators`, `contexts` that exist.
    fn live(&self, what: &str) -> u64 {
        self.number(c"double_live", what)
    }

    fn number(&self, function: &std::ffi::CStr, argument: &str) -> u64 {
        let argument = CString::new(argument).expect("no NUL");
        // SAFETY: both functions that are asked for have this type; the argument is a C string.
        unsafe {
            let found: Option<unsafe extern "C" fn(*const c_char) -> u64> =
                self.0.function(function);
            found.expect("a function of the double")(argument.as_ptr())
        }
    }

    /// Nothing was done that a GPU might punish.
    pub(crate) fn assert_clean(&self) {
        let violations = function!(
            self,
            c"double_violations",
            unsafe extern "C" fn(*mut c_char, usize) -> u64
        );
        let mut text = vec![0u8; 4096];
        // SAFETY: so many bytes.
        let count = unsafe { violations(text.as_mut_ptr().cast(), text.len()) };
        let text = String::from_utf8_lossy(&text);
        assert_eq!(count, 0, "{}", text.trim_end_matches('\0'));
    }
}
