//! Requirements of the tests: files of Python's packages, a compiler of PTX, stubs of the libraries.

use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::driver::DriverTable;
use crate::load::Library;
use crate::nccl::NcclTable;

/// Says why a test did not run.
#[allow(clippy::print_stderr, reason = "a test that cannot run says so")]
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

/// A folder of its own for one test, removed when dropped.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("horovod-gpu-test-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).expect("a temporary folder");
        Self(path)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A library of C functions that do nothing but answer.
#[derive(Clone)]
pub(crate) struct Stub {
    /// Version that `cuDriverGetVersion` tells.
    pub(crate) driver: i32,
    /// Version that `ncclGetVersion` tells.
    pub(crate) nccl: i32,
    /// Result of `cuInit`.
    pub(crate) init: i32,
    /// Functions that are left out.
    pub(crate) lacks: &'static [&'static str],
    /// The name of its own.
    pub(crate) soname: Option<&'static str>,
}

impl Default for Stub {
    fn default() -> Self {
        Self {
            driver: 12080,
            nccl: 23007,
            init: 0,
            lacks: &[],
            soname: None,
        }
    }
}

/// Functions of the stubs that answer something.
const ANSWERS: &str = r#"
#include <string.h>
int stub_init_calls;
unsigned char stub_id[128], stub_config[96];
int cuInit(unsigned flags) { stub_init_calls++; return INIT; }
int cuDriverGetVersion(int *version) { *version = DRIVER; return 0; }
int cuGetErrorName(int code, const char **text) { *text = "CUDA_ERROR_OF_STUB"; return 0; }
int cuGetErrorString(int code, const char **text) { *text = "a text"; return 0; }
int ncclGetVersion(int *version) { *version = NCCL; return 0; }
const char *ncclGetErrorString(int code) { return "internal error"; }
const char *ncclGetLastError(void *comm) { return "the last error"; }
struct id { char internal[128]; };
int ncclCommInitRankConfig(void **comm, int size, struct id id, int rank, void *config) {
    memcpy(stub_id, id.internal, 128);
    memcpy(stub_config, config, 96);
    *comm = 0;
    return size == 3 && rank == 2 ? 3 : 4;
}
"#;

impl Stub {
    /// Compiles it.
    pub(crate) fn build(&self, path: &Path) {
        let mut source = ANSWERS.to_owned();
        for (name, _, is_required) in [DriverTable::FUNCTIONS, NcclTable::FUNCTIONS].concat() {
            let name = name.to_str().expect("ASCII");
            if is_required && !ANSWERS.contains(&format!("{name}(")) && !self.lacks.contains(&name)
            {
                source += &format!("int {name}(void) {{ return 3; }}\n");
            }
        }
        let folder = path.parent().expect("a file in a folder");
        std::fs::create_dir_all(folder).expect("a folder");
        let file = path.with_extension("c");
        std::fs::write(&file, source).expect("a file");
        let mut gcc = Command::new("gcc");
        gcc.args(["-shared", "-fPIC", "-o"]).arg(path).arg(&file);
        gcc.arg(format!("-DDRIVER={}", self.driver));
        gcc.arg(format!("-DNCCL={}", self.nccl));
        gcc.arg(format!("-DINIT={}", self.init));
        if let Some(soname) = self.soname {
            gcc.arg(format!("-Wl,-soname,{soname}"));
        }
        let output = gcc.output().expect("gcc");
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{text}");
    }
}

/// Runs the body in a process of its own, this test binary again with more in its environment: for what is once per
/// process. The test is found by where the body is written.
pub(crate) fn alone<F: Fn()>(environment: &[(&str, PathBuf)], body: F) {
    const CHILD: &str = "GPU_TEST_CHILD";
    #[expect(clippy::disallowed_methods, reason = "from this function's other half")]
    let is_child = std::env::var_os(CHILD).is_some();
    if is_child {
        return body();
    }
    let name = std::any::type_name::<F>();
    let (_, name) = name.split_once("::").expect("a path in this crate");
    let name = name.trim_end_matches("::{{closure}}");
    let output = Command::new(std::env::current_exe().expect("this test binary"))
        .args([name, "--exact", "--nocapture"])
        .env(CHILD, "1")
        .envs(environment.iter().map(|(name, value)| (name, value)))
        .output()
        .expect("this test binary");
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}\n{errors}");
    assert!(text.contains("1 passed"), "{name} was not found: {text}");
}

/// Names a folder, or a file, of the parent for [`alone`].
pub(crate) const FOLDER: &str = "GPU_TEST_FOLDER";

/// The folder whose path the parent has passed in the environment.
pub(crate) fn folder_of_parent() -> PathBuf {
    #[expect(
        clippy::disallowed_methods,
        reason = "from the parent's half of the test"
    )]
    let folder = std::env::var_os(FOLDER);
    folder.expect("the parent sets it").into()
}

/// Result of the body in a forked child; `None` if the child ends otherwise.
pub(crate) fn in_fork(body: impl FnOnce() -> bool) -> Option<bool> {
    // SAFETY: no other thread of this process does anything that the child needs.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "fork");
    if child == 0 {
        let code = match std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)) {
            Ok(true) => 1,
            Ok(false) => 2,
            Err(_) => 3,
        };
        // SAFETY: ends the child without what else ends a process.
        unsafe { libc::_exit(code) };
    }
    let mut status = 0;
    // SAFETY: a child of this process.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(waited, child);
    match libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status)) {
        Some(1) => Some(true),
        Some(2) => Some(false),
        _ => None,
    }
}
