//! MXNet 1.9's C functions, found in the library that Python has loaded, and the arrays and errors they work on.

use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::mem::{ManuallyDrop, MaybeUninit};
use std::os::unix::ffi::OsStrExt;
use std::ptr::{null, null_mut};
use std::sync::OnceLock;

use horovod_engine::DType::{
    self, BF16, Bool, F16, F32, F64, I8, I16, I32, I64, U8, U16, U32, U64,
};
use horovod_engine::TensorMeta;
use libloading::os::unix::{Library as OpenLibrary, RTLD_NOW};

use super::Pending;
use crate::dlpack::RawTensor;

/// `NDArrayHandle`: an `NDArray*`.
pub(super) type Handle = *mut c_void;

/// `MXEnginePushAsyncND`: function, its parameter, what deletes that, context, arrays that are read, arrays that are
/// written, property, priority, name, whether somebody waits for a variable.
type Push = unsafe extern "C" fn(
    unsafe extern "C" fn(*mut c_void, *const OnComplete, *mut Pending),
    *mut Pending,
    unsafe extern "C" fn(*mut Pending),
    *const [i32; 2],
    *const Handle,
    c_int,
    *const Handle,
    c_int,
    *const c_int,
    c_int,
    *const c_char,
    bool,
) -> c_int;

/// Element types by MXNet's numbers.
const DTYPES: [DType; 13] = [
    F32, F64, F16, U8, I32, I8, I64, Bool, I16, U16, U32, U64, BF16,
];

/// `mxnet::engine::CallbackOnComplete`, which may be copied and called once, from any thread.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct OnComplete {
    function: unsafe extern "C" fn(*mut c_void, *mut c_void, *const RuntimeError),
    engine: *mut c_void,
    opaque: *mut c_void,
}

// SAFETY: its pointers only go back to MXNet, which asks nothing of the thread that calls.
unsafe impl Send for OnComplete {}

/// `std::runtime_error`, and `dmlc::Error`, which adds nothing to it.
#[repr(C, align(8))]
struct RuntimeError(MaybeUninit<[u8; 16]>);

/// `DLManagedTensor`.
#[repr(C)]
struct ManagedTensor {
    tensor: RawTensor,
    manager: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

/// The functions that are used here.
pub(super) struct Library {
    pub(super) push: Push,
    shape: unsafe extern "C" fn(Handle, *mut c_int, *mut *const i64) -> c_int,
    dtype: unsafe extern "C" fn(Handle, *mut c_int) -> c_int,
    detach: unsafe extern "C" fn(Handle, *mut Handle) -> c_int,
    free: unsafe extern "C" fn(Handle) -> c_int,
    to_dlpack: unsafe extern "C" fn(Handle, *mut *mut ManagedTensor) -> c_int,
    last_error: unsafe extern "C" fn() -> *const c_char,
    /// `NDArray::Reorder2DefaultAsync() const`; builds without MKL-DNN lack it, and need it not.
    reorder: Option<unsafe extern "C" fn(Handle)>,
    new_error: unsafe extern "C" fn(*mut RuntimeError, *const c_char),
    drop_error: unsafe extern "C" fn(*mut RuntimeError),
}

static LIBRARY: OnceLock<Library> = OnceLock::new();

impl Library {
    /// Looks the functions up in the library of this path, which must be loaded already.
    pub(super) fn load(path: &CStr) -> Result<(), String> {
        let file = OsStr::from_bytes(path.to_bytes());
        // SAFETY: with RTLD_NOLOAD nothing is loaded, and none of its code runs.
        let opened = unsafe { OpenLibrary::open(Some(file), RTLD_NOW | libc::RTLD_NOLOAD) };
        let Ok(library) = opened else {
            return Err(format!("{path:?} is not loaded; import mxnet first"));
        };
        // It is never closed: its functions may be called until the process ends.
        let library = &*ManuallyDrop::new(library);
        // SAFETY: these are the declarations of MXNet 1.9's c_api.h and ndarray.h, and of libstdc++.
        let found = unsafe {
            Self {
                push: symbol(library, c"MXEnginePushAsyncND")?,
                shape: symbol(library, c"MXNDArrayGetShapeEx64")?,
                dtype: symbol(library, c"MXNDArrayGetDType")?,
                detach: symbol(library, c"MXNDArrayDetach")?,
                free: symbol(library, c"MXNDArrayFree")?,
                to_dlpack: symbol(library, c"MXNDArrayToDLPack")?,
                last_error: symbol(library, c"MXGetLastError")?,
                reorder: symbol(library, c"_ZNK5mxnet7NDArray20Reorder2DefaultAsyncEv").ok(),
                new_error: symbol(library, c"_ZNSt13runtime_errorC1EPKc")?,
                drop_error: symbol(library, c"_ZNSt13runtime_errorD1Ev")?,
            }
        };
        LIBRARY.get_or_init(|| found);
        Ok(())
    }

    pub(super) fn get() -> Result<&'static Self, &'static str> {
        LIBRARY.get().ok_or("horovod.mxnet has not been imported")
    }

    /// MXNet's text, if a call of its functions returned this and that means failure.
    pub(super) fn checked(&self, status: c_int) -> Result<(), String> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: a C string of this thread's, as after every failure.
        let text = unsafe { CStr::from_ptr((self.last_error)()) };
        Err(text.to_string_lossy().into_owned())
    }
}

/// # Safety
/// `T` is a function pointer of the type that the symbol has, if it is there.
unsafe fn symbol<T: Copy>(library: &OpenLibrary, name: &CStr) -> Result<T, String> {
    const { assert!(size_of::<Option<T>>() == size_of::<*mut c_void>()) };
    // SAFETY: the caller's promise. A symbol may be null, as a function pointer is not.
    let found = unsafe { library.get::<Option<T>>(name.to_bytes_with_nul()) };
    let function = found.ok().and_then(|symbol| *symbol);
    function.ok_or_else(|| format!("this MXNet has no {name:?}; version 1.9 is needed"))
}

impl OnComplete {
    /// Ends the operation; with a text its outputs raise MXNetError when they are read.
    pub(super) fn call(self, library: &Library, error: Option<String>) {
        let Some(text) = error else {
            // SAFETY: MXNet's own function and pointers.
            return unsafe { (self.function)(self.engine, self.opaque, null()) };
        };
        let text = c_string(&text);
        let mut error = RuntimeError(MaybeUninit::uninit());
        // SAFETY: the constructor fills the memory of an object, which MXNet copies, and the destructor ends it.
        unsafe {
            (library.new_error)(&raw mut error, text.as_ptr());
            (self.function)(self.engine, self.opaque, &raw const error);
            (library.drop_error)(&raw mut error);
        }
    }
}

pub(super) fn c_string(text: &str) -> CString {
    CString::new(text.replace('\0', " ")).unwrap_or_default()
}

/// An array: a handle of our own, which shares its storage whatever becomes of Python's.
pub(super) struct Array {
    pub(super) handle: Handle,
    pub(super) meta: TensorMeta,
    library: &'static Library,
}

// SAFETY: MXNet's arrays may be used from any thread, and this handle is nobody else's.
unsafe impl Send for Array {}
// SAFETY: calls through a shared reference come from one thread at a time: that of the push, then the engine's.
unsafe impl Sync for Array {}

impl Array {
    /// # Safety
    /// `handle` is an array.
    pub(super) unsafe fn share(library: &'static Library, handle: Handle) -> Result<Self, String> {
        let (mut ndim, mut dims, mut flag, mut own) = (0, null(), 0, null_mut());
        // SAFETY: an array, and places for the answers.
        unsafe {
            library.checked((library.shape)(handle, &raw mut ndim, &raw mut dims))?;
            library.checked((library.dtype)(handle, &raw mut flag))?;
        }
        let shape: Option<Vec<u64>> = (0..ndim)
            // SAFETY: the list has so many numbers, and stays until this thread asks for a shape again.
            .map(|i| u64::try_from(unsafe { *dims.offset(i as isize) }).ok())
            .collect();
        let dtype = usize::try_from(flag).ok().and_then(|flag| DTYPES.get(flag));
        let (Some(shape), Some(dtype)) = (shape.filter(|_| ndim >= 0), dtype) else {
            return Err(format!(
                "an array has no shape yet, or an unknown type: {flag}"
            ));
        };
        // SAFETY: as above.
        library.checked(unsafe { (library.detach)(handle, &raw mut own) })?;
        Ok(Self {
            handle: own,
            meta: TensorMeta::new(*dtype, shape),
            library,
        })
    }

    /// Has MXNet bring it into row-major order, after the operations pushed so far: convolutions leave results and
    /// weights in orders of their own.
    pub(super) fn push_reorder(&self) {
        if let Some(reorder) = self.library.reorder {
            // SAFETY: a member function of the array, without arguments.
            unsafe { reorder(self.handle) }
        }
    }

    /// The storage it is a part of, equal for all its views: what MXNet's engine orders operations by.
    pub(super) fn storage(&self) -> *const c_void {
        // SAFETY: an NDArray begins with the shared pointer to its storage.
        unsafe { self.handle.cast::<*const c_void>().read() }
    }

    /// Where its values are. Of the functions that tell it this one never waits; it fails for other orders in memory.
    pub(super) fn address(&self) -> Result<*mut u8, String> {
        let mut managed: *mut ManagedTensor = null_mut();
        // SAFETY: an array, and a place for the answer, which is given back at once: the array keeps the memory.
        unsafe {
            let status = (self.library.to_dlpack)(self.handle, &raw mut managed);
            self.library.checked(status)?;
            let address = (*managed).tensor.data.cast();
            if let Some(deleter) = (*managed).deleter {
                deleter(managed);
            }
            Ok(address)
        }
    }
}

impl Drop for Array {
    fn drop(&mut self) {
        // SAFETY: our own handle, which nobody uses any more.
        unsafe { (self.library.free)(self.handle) };
    }
}
