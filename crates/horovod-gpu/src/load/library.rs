//! A shared library of this process: opening, looking up, never closing.

use std::ffi::{CStr, CString, c_int, c_void};
use std::mem::transmute_copy;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// An open library. It stays open: its functions may be called until the process ends.
pub(crate) struct Library(*mut c_void);

// SAFETY: the dynamic loader's functions may be called from any thread.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

impl Library {
    /// Loads it by path, or by name as the dynamic loader finds it.
    pub(crate) fn open(path: &Path) -> Result<Self, String> {
        Self::with_flags(path, libc::RTLD_NOW | libc::RTLD_LOCAL)
    }

    /// Only if the process has it already, under this name of its own (soname).
    pub(super) fn open_loaded(name: &Path) -> Result<Self, String> {
        Self::with_flags(name, libc::RTLD_NOW | libc::RTLD_LOCAL | libc::RTLD_NOLOAD)
            .map_err(|_| "not loaded by anybody else".to_owned())
    }

    fn with_flags(path: &Path, flags: c_int) -> Result<Self, String> {
        let name = CString::new(path.as_os_str().as_bytes())
            .map_err(|_| "a path with a NUL character".to_owned())?;
        // SAFETY: a C string. Initialisers of the library run; it is one that the user has installed for that.
        let handle = unsafe { libc::dlopen(name.as_ptr(), flags) };
        if handle.is_null() {
            return Err(last_error());
        }
        Ok(Self(handle))
    }

    /// The address of a symbol.
    pub(crate) fn address(&self, name: &CStr) -> Option<*mut c_void> {
        // SAFETY: an open library and a C string.
        let found = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        (!found.is_null()).then_some(found)
    }

    /// A function.
    ///
    /// # Safety
    /// `T` is a function pointer of the type that the symbol has, if it is there.
    pub(crate) unsafe fn function<T: Copy>(&self, name: &CStr) -> Option<T> {
        const { assert!(size_of::<T>() == size_of::<*mut c_void>()) };
        let address = self.address(name)?;
        // SAFETY: an address that is not null, as the type that the caller names.
        Some(unsafe { transmute_copy(&address) })
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

fn last_error() -> String {
    // SAFETY: the text of this thread's last failure, which stays until its next call.
    unsafe {
        let text = libc::dlerror();
        if text.is_null() {
            "it cannot be opened".to_owned()
        } else {
            CStr::from_ptr(text).to_string_lossy().into_owned()
        }
    }
}
