//! A shared library of this process: opening, looking up, never closing.

use std::ffi::{CStr, c_int, c_void};
use std::mem::ManuallyDrop;
use std::path::Path;

use libloading::os::unix::{Library as OpenLibrary, RTLD_LOCAL, RTLD_NOW};

/// An open library. It stays open: its functions may be called until the process ends.
pub(crate) struct Library(ManuallyDrop<OpenLibrary>);

impl Library {
    /// Loads it by path, or by name as the dynamic loader finds it.
    pub(crate) fn open(path: &Path) -> Result<Self, String> {
        Self::with_flags(path, RTLD_NOW | RTLD_LOCAL).map_err(|error| error.to_string())
    }

    /// Only if the process has it already, under this name of its own (soname).
    pub(super) fn open_loaded(name: &Path) -> Result<Self, String> {
        Self::with_flags(name, RTLD_NOW | RTLD_LOCAL | libc::RTLD_NOLOAD)
            .map_err(|_| "this process has not loaded it".to_owned())
    }

    fn with_flags(path: &Path, flags: c_int) -> Result<Self, libloading::Error> {
        // SAFETY: initialisers of the library run; the user has installed it for that.
        let library = unsafe { OpenLibrary::open(Some(path), flags) }?;
        Ok(Self(ManuallyDrop::new(library)))
    }

    /// The address of a symbol.
    pub(crate) fn address(&self, name: &CStr) -> Option<*mut c_void> {
        // SAFETY: the address is only compared, or used by the caller under its own promise.
        let found = unsafe { self.0.get::<*mut c_void>(name.to_bytes_with_nul()) };
        let address = found.ok()?.into_raw();
        (!address.is_null()).then_some(address)
    }

    /// A function.
    ///
    /// # Safety
    /// `T` is a function pointer of the type that the symbol has, if it is there.
    pub(crate) unsafe fn function<T: Copy>(&self, name: &CStr) -> Option<T> {
        const { assert!(size_of::<Option<T>>() == size_of::<*mut c_void>()) };
        // SAFETY: the caller's promise. A symbol may be null, as a function pointer is not.
        let found = unsafe { self.0.get::<Option<T>>(name.to_bytes_with_nul()) };
        found.ok().and_then(|symbol| *symbol)
    }
}

/// The file that the code at an address comes from.
pub(crate) fn file_of(address: *const c_void) -> Option<String> {
    // SAFETY: zeros are a valid value of this C struct.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: any address may be asked for; the answer's strings belong to the loader and stay, for nothing is closed.
    unsafe {
        if libc::dladdr(address, &raw mut info) == 0 || info.dli_fname.is_null() {
            return None;
        }
        Some(
            CStr::from_ptr(info.dli_fname)
                .to_string_lossy()
                .into_owned(),
        )
    }
}
