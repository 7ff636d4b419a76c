//! What the tests need of the machine: files of Python's packages, a compiler of PTX, stubs of the libraries.

use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr::null_mut;

use crate::load::Library;

/// Says why a test did not run.
#[expect(clippy::print_stderr, reason = "a test that cannot run says so")]
pub(crate) fn skip(why: &str) {
    eprintln!("not run: {why}");
}

pub(crate) fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// A file of a package in the environment that `make` installs.
pub(crate) fn wheel_file(below: &str) -> Result<PathBuf, String> {
    let python = repository().join(".venv/bin/python");
    let output = Command::new(&python)
        .args(["-c", "import sys; print('\\n'.join(sys.path))"])
        .output()
        .map_err(|error| format!("{}: {error}", python.display()))?;
    let paths = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut files = paths.lines().map(|path| Path::new(path).join(below));
    files
        .find(|file| file.is_file())
        .ok_or_else(|| format!("{below} is not installed in .venv"))
}

/// NVIDIA's linker, which compiles PTX without a GPU.
pub(crate) struct NvJitLink {
    create: unsafe extern "C" fn(*mut *mut c_void, c_uint, *const *const c_char) -> c_int,
    add: unsafe extern "C" fn(*mut c_void, c_int, *const c_void, usize, *const c_char) -> c_int,
    complete: unsafe extern "C" fn(*mut c_void) -> c_int,
    log_size: unsafe extern "C" fn(*mut c_void, *mut usize) -> c_int,
    log: unsafe extern "C" fn(*mut c_void, *mut c_char) -> c_int,
    destroy: unsafe extern "C" fn(*mut *mut c_void) -> c_int,
}

/// `NVJITLINK_INPUT_PTX`.
const INPUT_PTX: c_int = 2;

impl NvJitLink {
    pub(crate) fn open(path: &Path) -> Self {
        let library = Library::open(path).expect("a library of the package");
        // SAFETY: declarations of nvJitLink.h.
        unsafe {
            Self {
                create: library.function(c"nvJitLinkCreate").expect("create"),
                add: library.function(c"nvJitLinkAddData").expect("add"),
                complete: library.function(c"nvJitLinkComplete").expect("complete"),
                log_size: library.function(c"nvJitLinkGetErrorLogSize").expect("size"),
                log: library.function(c"nvJitLinkGetErrorLog").expect("log"),
                destroy: library.function(c"nvJitLinkDestroy").expect("destroy"),
            }
        }
    }

    /// Compiles a text that ends with NUL; or says what is wrong with it.
    pub(crate) fn compile(&self, architecture: u32, ptx: &str) -> Result<(), String> {
        assert!(ptx.ends_with('\0'));
        let option = CString::new(format!("-arch=sm_{architecture}")).expect("no NUL");
        let options = [option.as_ptr()];
        let mut link = null_mut();
        // SAFETY: as nvJitLink.h asks; the link is destroyed once.
        unsafe {
            assert_eq!((self.create)(&raw mut link, 1, options.as_ptr()), 0);
            let name = c"kernels.ptx".as_ptr();
            let codes = [
                (self.add)(link, INPUT_PTX, ptx.as_ptr().cast(), ptx.len(), name),
                (self.complete)(link),
            ];
            let mut size = 0;
            (self.log_size)(link, &raw mut size);
            let mut log = vec![0u8; size + 1];
            (self.log)(link, log.as_mut_ptr().cast());
            (self.destroy)(&raw mut link);
            if codes == [0, 0] {
                Ok(())
            } else {
                let log = String::from_utf8_lossy(&log);
                Err(format!("{codes:?}: {}", log.trim_end_matches('\0')))
            }
        }
    }
}
