//! Errors below the engine, as data; the text of an error names the call, the code and what to do.

use std::fmt::Write as _;

use crate::loss::context_was_lost;

/// A failure of loading, of CUDA's driver or of NCCL.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GpuError {
    /// No candidate for a library could be used.
    #[error("{}", not_loaded(library, tried))]
    NotLoaded {
        /// The library's name for the dynamic loader.
        library: &'static str,
        /// File or name, and why it was not that one, in the order of the search.
        tried: Vec<(String, String)>,
    },
    /// The library was found, but is older than what is supported.
    #[error(
        "{library} is version {found} ({path}), but at least {needed} is needed; {}",
        newer(library)
    )]
    TooOld {
        /// The library's name for the dynamic loader.
        library: &'static str,
        /// The file.
        path: String,
        /// Its version, as people write it.
        found: String,
        /// The oldest that is supported.
        needed: &'static str,
    },
    /// A function of the driver failed, or one of HIP's.
    #[error("{call} failed with {text} ({code}){}", driver_advice(call, *code))]
    Cuda {
        /// Its name.
        call: &'static str,
        /// `CUresult`, `hipError_t`.
        code: i32,
        /// The code's name and the driver's text for it.
        text: String,
    },
    /// There is no memory left for what was asked for.
    #[error("{call} failed with {text} (2): {}", out_of_memory(call, *place, *bytes, *free))]
    OutOfMemory {
        /// The function of the driver.
        call: &'static str,
        /// The code's name and the driver's text for it.
        text: String,
        /// Of which memory.
        place: MemoryPlace,
        /// How much was asked for.
        bytes: usize,
        /// Bytes that are free, and all; if the driver tells.
        free: Option<(usize, usize)>,
    },
    /// A function of NCCL failed, or an operation did that had been launched.
    #[error("{call} failed with {text} ({code}){}", nccl_advice(text))]
    Nccl {
        /// Its name.
        call: &'static str,
        /// `ncclResult_t`.
        code: i32,
        /// NCCL's texts: for the code, and for the last error.
        text: String,
    },
    /// This process is the child of one that had initialised CUDA, which cannot be used here.
    #[error(
        "CUDA was initialised before this process was forked from its parent, and cannot be used in the child; \
         start processes by `spawn` or `forkserver`, or fork before GPU tensors are used"
    )]
    Forked,
    /// The stream is being captured into a graph.
    #[error("the stream is being captured into a CUDA graph; communicate outside of the capture")]
    Capturing,
    /// The arguments are wrong.
    #[error("{0}")]
    Invalid(String),
}

/// Whose memory is used up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryPlace {
    /// The GPU's with this number.
    Device(i32),
    /// The host's, as far as it can be pinned.
    Pinned,
}

/// `CUDA_ERROR_OUT_OF_MEMORY`.
pub(crate) const OUT_OF_MEMORY: i32 = 2;

/// Soname of the driver. Never plain `libcuda.so`: toolkits have a stub of that name.
pub(crate) const CUDA: &str = "libcuda.so.1";
/// Soname of NCCL.
pub(crate) const NCCL: &str = "libnccl.so.2";

impl GpuError {
    /// Whether the context is lost: every later call fails in the same way, and only a new process can use the GPU.
    pub fn is_sticky(&self) -> bool {
        match self {
            Self::Cuda { code, .. } => is_sticky(*code),
            _ => false,
        }
    }
}

/// Have [`crate::loss()`] say so from now on, if a code means that the context is lost.
pub(crate) fn remember_if_sticky(code: i32) {
    if is_sticky(code) {
        context_was_lost(code);
    }
}

fn newer(library: &str) -> &'static str {
    if library == NCCL {
        "install a newer nvidia-nccl package or framework"
    } else if library == CUDA {
        "install a newer NVIDIA driver"
    } else {
        "install a newer ROCm or framework"
    }
}

fn not_loaded(library: &str, tried: &[(String, String)]) -> String {
    let mut text = format!("{library} could not be loaded");
    for (index, (candidate, why)) in tried.iter().enumerate() {
        let start = if index == 0 { "; tried " } else { "; " };
        let _ = write!(text, "{start}{candidate}: {why}");
    }
    text.push_str(if library == NCCL {
        ". Install the package nvidia-nccl-cu12 or nvidia-nccl-cu13, or set HOROVOD_NCCL_LIBRARY to the file"
    } else if library == CUDA {
        ". Install NVIDIA's driver, or make it visible in this container; HOROVOD_CUDA_LIBRARY names a file"
    } else {
        ". Install ROCm or a framework that brings it, or set HOROVOD_ROCM_HOME to its folder"
    });
    text
}

/// The tool that shows who uses a GPU.
fn tool(call: &str) -> &'static str {
    if is_of_hip(call) {
        "rocm-smi"
    } else {
        "nvidia-smi"
    }
}

fn is_of_hip(call: &str) -> bool {
    call.starts_with("hip")
}

fn out_of_memory(
    call: &str,
    place: MemoryPlace,
    bytes: usize,
    free: Option<(usize, usize)>,
) -> String {
    let free = free.map_or_else(String::new, |(free, all)| {
        format!(", of whose {all} bytes {free} are free")
    });
    match place {
        MemoryPlace::Device(ordinal) => format!(
            "{bytes} bytes are needed on GPU {ordinal}{free}; use a smaller batch, a smaller HOROVOD_FUSION_THRESHOLD, or \
             PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, which leaves less memory unused in PyTorch's cache, and \
             look with {} whether another process uses that GPU",
            tool(call)
        ),
        MemoryPlace::Pinned => format!(
            "{bytes} bytes of pinned host memory are needed, through which tensors of a GPU go without NCCL; give the \
             host or container more memory and a larger `ulimit -l`, or use a smaller HOROVOD_FUSION_THRESHOLD, or NCCL"
        ),
    }
}

/// Uncorrectable memory and link errors, contained errors; then what kernels do wrong; 718 is an invalid program counter,
/// 719 the driver's general "launch failed", 721 a leak of tensor memory.
fn is_sticky(code: i32) -> bool {
    matches!(
        code,
        214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 | 721
    )
}

/// Advice for those texts of NCCL that have one usual cause.
fn nccl_advice(text: &str) -> &'static str {
    match text.contains("out of memory") {
        true => {
            "; NCCL needs memory of the GPU beside the framework's: use a smaller batch, fewer process sets, a smaller \
             HOROVOD_NCCL_MAX_CTAS, or have the first operation run before the framework has taken all memory"
        }
        false => "",
    }
}

/// Advice for codes that have one usual cause; only some are also HIP's.
fn driver_advice(call: &str, code: i32) -> &'static str {
    match code {
        // Its codes are others, and its text says what is wrong.
        _ if call.starts_with("hiprtc") => "",
        OUT_OF_MEMORY if is_of_hip(call) => {
            "; look with rocm-smi whether another process uses that GPU"
        }
        OUT_OF_MEMORY => "; look with nvidia-smi whether another process uses that GPU",
        100 | 101 if is_of_hip(call) => {
            "; is HIP_VISIBLE_DEVICES or ROCR_VISIBLE_DEVICES empty, or /dev/kfd not usable by this user or in this \
             container?"
        }
        34 => {
            "; this libcuda is the stub of a toolkit, for linking only: take its folder out of LD_LIBRARY_PATH"
        }
        100 => "; is CUDA_VISIBLE_DEVICES empty, or the GPU not visible in this container?",
        222 => "; this driver is too old for the kernels",
        803 | 804 => "; the driver's library and its kernel module are of different versions",
        _ if is_sticky(code) => "; this process cannot use the GPU any more",
        _ => "",
    }
}
