//! AMD's compiler for kernels, `libhiprtc.so`: what CUDA's driver does with PTX by itself.

use std::ffi::{CStr, c_char, c_int};
use std::path::{Path, PathBuf};
use std::ptr::{null, null_mut};

use crate::driver::Handle;
use crate::error::GpuError;
use crate::load::{Library, driver_path, function_table};

/// Its names, as those of HIP.
const NAMES: [&str; 4] = [
    "libhiprtc.so.7",
    "libhiprtc.so.6",
    "libhiprtc.so.5",
    "libhiprtc.so",
];

function_table! {
    /// Functions of the compiler; compared with `hiprtc.h` of HIP 5.2.3.
    struct Compiler;
    required {
        get_error_string = c"hiprtcGetErrorString"(c_int) -> *const c_char;
        create_program = c"hiprtcCreateProgram"(
            *mut Handle, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char
        );
        compile_program = c"hiprtcCompileProgram"(Handle, c_int, *const *const c_char);
        get_program_log_size = c"hiprtcGetProgramLogSize"(Handle, *mut usize);
        get_program_log = c"hiprtcGetProgramLog"(Handle, *mut c_char);
        get_code_size = c"hiprtcGetCodeSize"(Handle, *mut usize);
        get_code = c"hiprtcGetCode"(Handle, *mut c_char);
        destroy_program = c"hiprtcDestroyProgram"(*mut Handle);
    }
    optional {}
}

/// Machine code of a program: for the GPU of the current context unless an option names another.
pub(crate) fn compile(source: &CStr, options: &[&CStr]) -> Result<Vec<u8>, GpuError> {
    let of_hip = driver_path().unwrap_or_else(|| PathBuf::from(NAMES[3]));
    Compiler::beside(&of_hip)?.compile(source, options)
}

impl Compiler {
    /// Of the same installation as HIP's library, which has the functions itself before ROCm 6.
    pub(crate) fn beside(of_hip: &Path) -> Result<Self, GpuError> {
        let mut files: Vec<PathBuf> = NAMES
            .iter()
            .map(|name| of_hip.with_file_name(name))
            .collect();
        files.retain(|file| file.exists());
        files.push(of_hip.to_owned());
        let mut tried = Vec::new();
        for file in files {
            let opened = Library::open(&file).and_then(|library| Self::read(&library, Some));
            match opened {
                Ok(compiler) => return Ok(compiler),
                Err(why) => tried.push((file.display().to_string(), why)),
            }
        }
        Err(GpuError::NotLoaded {
            library: NAMES[3],
            tried,
        })
    }

    pub(crate) fn compile(&self, source: &CStr, options: &[&CStr]) -> Result<Vec<u8>, GpuError> {
        let options: Vec<_> = options.iter().map(|option| option.as_ptr()).collect();
        let mut program = null_mut();
        // SAFETY: C strings, counts of what the pointers lead to, and a place for one handle.
        let code = unsafe {
            (self.create_program)(
                &raw mut program,
                source.as_ptr(),
                c"horovod.hip".as_ptr(),
                0,
                null(),
                null(),
            )
        };
        self.checked("hiprtcCreateProgram", code, None)?;
        // SAFETY: a program, and so many C strings.
        let code =
            unsafe { (self.compile_program)(program, options.len() as c_int, options.as_ptr()) };
        let mut compiled = self.checked("hiprtcCompileProgram", code, Some(program));
        let mut machine_code = Vec::new();
        if compiled.is_ok() {
            let mut size = 0;
            // SAFETY: a program that was compiled; writes one size, then so many bytes.
            compiled = unsafe {
                let code = (self.get_code_size)(program, &raw mut size);
                self.checked("hiprtcGetCodeSize", code, None)
                    .and_then(|()| {
                        machine_code.resize(size, 0u8);
                        let code = (self.get_code)(program, machine_code.as_mut_ptr().cast());
                        self.checked("hiprtcGetCode", code, None)
                    })
            };
        }
        // SAFETY: a program of ours, which nobody uses any more.
        unsafe { (self.destroy_program)(&raw mut program) };
        compiled.map(|()| machine_code)
    }

    /// With what the compiler has to say of a program that it refuses.
    fn checked(
        &self,
        call: &'static str,
        code: c_int,
        program: Option<Handle>,
    ) -> Result<(), GpuError> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: a constant string, or none.
        let text = unsafe { (self.get_error_string)(code) };
        let text = match text.is_null() {
            true => "an unknown error".into(),
            // SAFETY: a C string, as was looked at.
            false => unsafe { CStr::from_ptr(text) }.to_string_lossy(),
        };
        let log = program.map(|program| self.log(program)).unwrap_or_default();
        Err(GpuError::Cuda {
            call,
            code,
            text: [text.trim(), log.trim()].join(" ").trim().to_owned(),
        })
    }

    fn log(&self, program: Handle) -> String {
        let mut size = 0;
        // SAFETY: a program; writes one size, then so many bytes.
        let log = unsafe {
            (self.get_program_log_size)(program, &raw mut size);
            let mut log = vec![0u8; size + 1];
            (self.get_program_log)(program, log.as_mut_ptr().cast());
            log
        };
        CStr::from_bytes_until_nul(&log)
            .map(|log| log.to_string_lossy().into_owned())
            .unwrap_or_default()
    }
}
