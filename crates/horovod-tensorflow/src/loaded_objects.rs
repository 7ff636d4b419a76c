//! Look-ups in what the process has loaded: libraries by name, functions in them, whether an address holds code.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library as OpenLibrary, RTLD_NOW};

/// A library that was loaded already; it stays loaded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Library(&'static OpenLibrary);

impl Library {
    /// By its name or path; `None` if the process has no such library.
    pub(crate) fn loaded(name: impl AsRef<Path>) -> Option<Self> {
        // SAFETY: with RTLD_NOLOAD nothing is loaded and no code runs.
        let opened =
            unsafe { OpenLibrary::open(Some(name.as_ref()), RTLD_NOW | libc::RTLD_NOLOAD) };
        Some(Self(Box::leak(Box::new(opened.ok()?))))
    }

    /// The address of a function of it.
    pub(crate) fn symbol(self, name: &CStr) -> Option<*mut c_void> {
        // SAFETY: the address is only compared, or used by the caller under its own promise.
        let found = unsafe { self.0.get::<*mut c_void>(name.to_bytes_with_nul()) };
        let address = found.ok()?.into_raw();
        (!address.is_null()).then_some(address)
    }

    /// A function of it, as a pointer of type `F`.
    ///
    /// # Safety
    /// `F` is the function pointer's type as the library declares it.
    pub(crate) unsafe fn function<F: Copy>(self, name: &CStr) -> Option<F> {
        const { assert!(size_of::<Option<F>>() == size_of::<*mut c_void>()) };
        // SAFETY: the caller's promise. A symbol may be null, as a function pointer is not.
        let found = unsafe { self.0.get::<Option<F>>(name.to_bytes_with_nul()) };
        found.ok().and_then(|symbol| *symbol)
    }
}

/// Paths of the libraries that the process has loaded.
pub(crate) fn paths() -> Vec<PathBuf> {
    let mut paths = Vec::new();
    each_object(|info| {
        // SAFETY: the loader's name of the object, a C string or null.
        let name = (!info.dlpi_name.is_null()).then(|| unsafe { CStr::from_ptr(info.dlpi_name) });
        if let Some(name) = name.filter(|name| !name.is_empty()) {
            paths.push(PathBuf::from(
                String::from_utf8_lossy(name.to_bytes()).into_owned(),
            ));
        }
        false
    });
    paths
}

/// The path of this library itself.
pub(crate) fn own_path() -> Option<PathBuf> {
    // SAFETY: zeroes are a value of a structure of pointers.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: any address may be asked for; `info` is writable.
    let found = unsafe { libc::dladdr(own_path as *const c_void, &raw mut info) };
    if found == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the loader's name of the object, a C string.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(PathBuf::from(name.to_str().ok()?))
}

/// Whether the address lies in the executable part of something that is loaded.
pub(crate) fn is_code(address: usize) -> bool {
    let mut found = false;
    each_object(|info| {
        // SAFETY: the loader's list of segments, of this length.
        let segments =
            unsafe { std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)) };
        found = segments.iter().any(|segment| {
            let start = (info.dlpi_addr as usize).wrapping_add(segment.p_vaddr as usize);
            segment.p_type == libc::PT_LOAD
                && segment.p_flags & libc::PF_X != 0
                && (start..start.wrapping_add(segment.p_memsz as usize)).contains(&address)
        });
        found
    });
    found
}

/// Calls `visit` with each loaded object until it says that it has enough.
fn each_object<F: FnMut(&libc::dl_phdr_info) -> bool>(mut visit: F) {
    unsafe extern "C" fn call<F: FnMut(&libc::dl_phdr_info) -> bool>(
        info: *mut libc::dl_phdr_info,
        _size: usize,
        visit: *mut c_void,
    ) -> c_int {
        // SAFETY: the loader's description, and the closure that the call below passes.
        let (info, visit) = unsafe { (&*info, &mut *visit.cast::<F>()) };
        c_int::from(visit(info))
    }
    // SAFETY: `call` gets the closure, which outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(call::<F>), (&raw mut visit).cast()) };
}

/// Text of a C string that is not kept; empty for null.
///
/// # Safety
/// `text` is null or a C string.
pub(crate) unsafe fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: as the caller promises.
    unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_are_code_and_data_are_not() {
        static DATA: [u64; 4] = [1, 2, 3, 4];
        let local = 0_u8;
        assert!(is_code(is_code as *const () as usize));
        assert!(is_code(libc::strlen as *const () as usize));
        assert!(!is_code((&raw const DATA) as usize));
        assert!(!is_code((&raw const local) as usize));
        assert!(!is_code(0));
    }

    #[test]
    fn the_c_library_is_found_and_its_functions() {
        let libc = Library::loaded("libc.so.6").unwrap();
        assert!(libc.symbol(c"strlen").is_some());
        assert!(libc.symbol(c"no_such_function").is_none());
        assert!(Library::loaded("libnothing.so.99").is_none());
        assert!(paths().iter().any(|path| path.ends_with("libc.so.6")));
    }

    #[test]
    fn own_path_is_this_file() {
        let own = own_path().unwrap();
        assert!(own.to_string_lossy().contains("horovod"), "{own:?}");
    }
}
