//! The GPU double, loaded as the product would load libcuda and libnccl: its memory, streams and what it saw.

pub(crate) mod ranks;

use std::ffi::{CString, c_char, c_int, c_void};
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex};

use horovod_engine::gpu::{RawStream, Ready, Search, set_search};
use horovod_engine::{Allocated, Allocator, DType, Output, Tensor, TensorMeta};
use libloading::os::unix::Library;

/// Variable with the settings of the double.
const SETTINGS: &str = "GPU_DOUBLE";

/// Run `body` with a double of these settings, in a process of its own, as the product loads libraries once: this test
/// again, of this name in the module where the body is written.
pub(crate) fn with_double<F: FnOnce(Double)>(test: &str, settings: &str, body: F) {
    #[expect(clippy::disallowed_methods, reason = "the double's own setting")]
    let set = std::env::var(SETTINGS).ok();
    match set {
        Some(set) if set == settings => {
            let double = Double::load();
            body(double);
            assert_eq!(double.violations(), "");
        }
        // Of another call in the same test.
        Some(_) => {}
        None => {
            let mut path = std::any::type_name::<F>().split("::").skip(1);
            let module = path.next().expect("a module of this binary");
            let test = format!("{module}::{test}");
            let this = std::env::current_exe().expect("this test");
            let run = Command::new(this)
                .args([&test, "--exact", "--nocapture"])
                .env(SETTINGS, settings)
                .output()
                .expect("runs");
            let (out, err) = (
                String::from_utf8_lossy(&run.stdout),
                String::from_utf8_lossy(&run.stderr),
            );
            assert!(
                run.status.success(),
                "{settings}: {}\n{out}\n{err}",
                run.status
            );
            assert!(
                out.contains("1 passed"),
                "{test} is not the name of this test:\n{out}"
            );
        }
    }
}

/// A loaded double.
#[derive(Clone, Copy)]
pub(crate) struct Double(&'static Library);

impl Double {
    fn load() -> Self {
        let path = path();
        set_search(Search {
            cuda_library: Some(path.clone()),
            nccl_library: Some(path.clone()),
            ..Search::default()
        });
        // SAFETY: a library of ours.
        let library = unsafe { Library::new(&path) }.expect("the double is loaded");
        Self(Box::leak(Box::new(library)))
    }

    /// # Safety
    /// The type is the function's.
    unsafe fn function<F: Copy>(self, name: &str) -> F {
        // SAFETY: the caller's promise.
        let function = unsafe { self.0.get::<F>(name.as_bytes()) };
        *function.unwrap_or_else(|why| panic!("{name} is missing: {why}"))
    }

    pub(crate) fn stream(self, device: i32) -> RawStream {
        // SAFETY: its type.
        let create: extern "C" fn(c_int) -> *mut c_void =
            unsafe { self.function("double_stream_create") };
        RawStream(create(device))
    }

    /// How often a function was called.
    pub(crate) fn count(self, call: &str) -> u64 {
        let call = CString::new(call).expect("no NUL");
        // SAFETY: its type.
        let counts: extern "C" fn(*const c_char) -> u64 = unsafe { self.function("double_counts") };
        counts(call.as_ptr())
    }

    /// How many of `what` there are: `communicators`, and what else the double knows.
    pub(crate) fn live(self, what: &str) -> u64 {
        let what = CString::new(what).expect("no NUL");
        // SAFETY: its type.
        let live: extern "C" fn(*const c_char) -> u64 = unsafe { self.function("double_live") };
        live(what.as_ptr())
    }

    /// Rules that were broken.
    pub(crate) fn violations(self) -> String {
        let mut text = vec![0u8; 1 << 14];
        // SAFETY: its type.
        let violations: extern "C" fn(*mut c_char, usize) -> u64 =
            unsafe { self.function("double_violations") };
        let count = violations(text.as_mut_ptr().cast(), text.len());
        let end = text.iter().position(|byte| *byte == 0).unwrap_or(0);
        let text = String::from_utf8_lossy(&text[..end]);
        if count == 0 {
            String::new()
        } else {
            format!("{count}: {text}")
        }
    }

    /// A kernel of the framework's that ends when [`Self::open`] is called.
    pub(crate) fn gate(self, stream: RawStream) -> u64 {
        // SAFETY: its type.
        let gate: extern "C" fn(*mut c_void) -> u64 =
            unsafe { self.function("double_stream_gate") };
        let gate = gate(stream.0);
        assert_ne!(gate, 0, "it could not be launched");
        gate
    }

    pub(crate) fn open(self, gate: u64) {
        // SAFETY: its type.
        let open: extern "C" fn(u64) = unsafe { self.function("double_gate_open") };
        open(gate);
    }

    /// Begin a capture of a stream into a graph; `false`: end it.
    pub(crate) fn capture(self, stream: RawStream, begin: bool) {
        // SAFETY: their types.
        unsafe {
            if begin {
                let capture: extern "C" fn(*mut c_void, c_int) -> c_int =
                    self.function("double_stream_begin_capture");
                assert_eq!(capture(stream.0, 0), 0);
            } else {
                let end: extern "C" fn(*mut c_void) -> i64 =
                    self.function("double_stream_end_capture");
                assert!(end(stream.0) >= 0, "the capture was invalidated");
            }
        }
    }
}

/// Beside this test: a library that a test depends on is built with it.
fn path() -> PathBuf {
    let mut path = std::env::current_exe().expect("this test");
    path.set_file_name(format!(
        "{}horovod_gpu_double{}",
        std::env::consts::DLL_PREFIX,
        std::env::consts::DLL_SUFFIX
    ));
    path
}

/// Memory of the double, as a framework has it: freed in the order of its stream.
pub(crate) struct Memory {
    double: Double,
    pub(crate) address: u64,
    stream: RawStream,
    bytes: usize,
}

// SAFETY: addresses; what is done with them the double checks.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    pub(crate) fn new(double: Double, device: i32, stream: RawStream, bytes: usize) -> Arc<Self> {
        // SAFETY: its type.
        let alloc: extern "C" fn(c_int, usize) -> u64 = unsafe { double.function("double_alloc") };
        let address = alloc(device, bytes);
        assert!(address != 0, "no memory");
        Arc::new(Self {
            double,
            address,
            stream,
            bytes,
        })
    }

    /// A kernel of the framework's fills it.
    pub(crate) fn write(&self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.bytes);
        // SAFETY: its type.
        let write: extern "C" fn(*mut c_void, u64, *const c_void, usize) -> c_int =
            unsafe { self.double.function("double_stream_write") };
        let from = bytes.as_ptr().cast();
        assert_eq!(write(self.stream.0, self.address, from, bytes.len()), 0);
    }

    /// The bytes that a kernel of the framework reads there.
    pub(crate) fn read(&self) -> Vec<u8> {
        let mut bytes = vec![0u8; self.bytes];
        // SAFETY: their types.
        unsafe {
            let read: extern "C" fn(*mut c_void, *mut c_void, u64, usize) -> c_int =
                self.double.function("double_stream_read");
            let to = bytes.as_mut_ptr().cast();
            assert_eq!(read(self.stream.0, to, self.address, bytes.len()), 0);
            let synchronize: extern "C" fn(*mut c_void) -> c_int =
                self.double.function("double_stream_synchronize");
            assert_eq!(synchronize(self.stream.0), 0);
        }
        bytes
    }

    /// A tensor of it, whose result goes to `output`.
    pub(crate) fn tensor(
        self: &Arc<Self>,
        dtype: DType,
        shape: &[u64],
        output: Option<&Arc<Self>>,
        ready: &Arc<Ready>,
    ) -> Tensor {
        let pointer =
            |memory: &Self| std::ptr::with_exposed_provenance_mut::<u8>(memory.address as usize);
        let to = output.map_or(Output::Allocate, |output| Output::At(pointer(output)));
        let meta = TensorMeta::new(dtype, shape);
        // SAFETY: the double's memory, kept by the owner; the double checks the rest.
        let tensor = unsafe { Tensor::new(meta, pointer(self), to).on_gpu(ready.clone()) };
        tensor.kept_by(Arc::new((self.clone(), output.cloned())))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: its type.
        let free: extern "C" fn(u64, *mut c_void) -> c_int =
            unsafe { self.double.function("double_free_on") };
        free(self.address, self.stream.0);
    }
}

/// Gives memory for outputs, which it leaves here.
pub(crate) fn allocator(
    double: Double,
    device: i32,
    stream: RawStream,
    made: Arc<Mutex<Vec<Arc<Memory>>>>,
) -> Allocator {
    struct Sent(RawStream);
    // SAFETY: a name of the double's.
    unsafe impl Send for Sent {}
    let stream = Sent(stream);
    Box::new(move |_, dtype, shape| {
        let stream = &stream;
        let elems: u64 = shape.iter().product();
        let bytes = elems as usize * dtype.size();
        let memory = Memory::new(double, device, stream.0, bytes);
        let allocated = Allocated {
            memory: std::ptr::with_exposed_provenance_mut(memory.address as usize),
            placement: Some(Ready::record(device, stream.0).map_err(|error| error.to_string())?),
        };
        made.lock().expect("no panic").push(memory);
        Ok(allocated)
    })
}
