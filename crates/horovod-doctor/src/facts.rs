//! Facts that an agent finds on its host. Plain data: looked up in `gather`, judged in `findings`.

use std::net::IpAddr;

use horovod_transport::compact;
use serde::{Deserialize, Serialize};

use super::LIST_MAX;

/// A file system, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Space {
    /// All of it.
    pub size: u64,
    /// Bytes that this user may still write.
    pub free: u64,
}

/// Limits that ranks inherit (`ulimit`); `None` means unlimited.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Open files.
    pub nofile: Option<u64>,
    /// Open files, as far as a process may raise them itself.
    pub nofile_hard: Option<u64>,
    /// Locked memory, bytes.
    pub memlock: Option<u64>,
    /// Processes and threads of the user.
    pub nproc: Option<u64>,
    /// Bytes of a core file.
    pub core: Option<u64>,
}

/// The Python that ranks will run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Python {
    /// Its program.
    pub program: String,
    /// Its version.
    pub version: String,
    /// The C library's version, as Python sees it.
    pub libc: String,
    /// Version of this package there, or why it cannot be imported.
    pub horovod: Result<String, String>,
    /// Version of PyTorch, if it is installed.
    pub torch: Option<String>,
    /// The fault of this package's installation, if it is mixed.
    pub mixed: Option<String>,
    /// Version and file of CUDA's driver library, or why it cannot be used.
    pub cuda: Result<(String, String), String>,
    /// Version and file of AMD's library in its place, if that is what is used.
    pub rocm: Option<(String, String)>,
    /// Version and file of NCCL, or why it cannot be used.
    pub nccl: Result<(String, String), String>,
}

/// One host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HostFacts {
    /// `Debian GNU/Linux 12`.
    pub os: String,
    /// `Linux 6.1.0`.
    pub kernel: String,
    /// Processors that ranks may use.
    pub cpus: u32,
    /// Processes that wanted a processor, on average over a minute.
    #[serde(deserialize_with = "compact::finite_if_any")]
    pub load: Option<f64>,
    /// Bytes of memory, and how many of them are to be had.
    pub memory: Option<Space>,
    /// The control group's limit of memory, and what of it is free.
    pub memory_limit: Option<Space>,
    /// `/dev/shm`.
    pub shm: Option<Space>,
    /// Why shared memory (a memfd) cannot be made.
    pub memfd_problem: Option<String>,
    /// The folder for temporary files.
    pub tmp_folder: String,
    /// Its file system, or why it cannot be used.
    pub tmp: Result<Space, String>,
    /// Limits that ranks inherit.
    pub limits: Limits,
    /// First and last port that listeners get.
    pub ports: Option<(u32, u32)>,
    /// `OMP_NUM_THREADS` of ranks.
    pub omp_threads: Option<String>,
    /// The Python of the ranks, or why it does not answer.
    pub python: Result<Python, String>,
    /// One line per GPU that `nvidia-smi` knows.
    #[serde(deserialize_with = "compact::list::<LIST_MAX, _, _>")]
    pub gpus: Vec<String>,
    /// Error of `nvidia-smi`.
    pub gpu_problem: Option<String>,
    /// Pairs of GPUs that cannot read each other's memory, as `nvidia-smi` tells.
    #[serde(deserialize_with = "compact::list::<LIST_MAX, _, _>")]
    pub gpus_apart: Vec<String>,
    /// This host's own name.
    pub hostname: String,
    /// Each name, this host's own first, and what it resolves to here.
    #[serde(deserialize_with = "compact::list::<LIST_MAX, _, _>")]
    pub names: Vec<(String, Result<Vec<IpAddr>, String>)>,
    /// The working directory exists.
    pub has_cwd: bool,
    /// Why the command of the job cannot be run.
    pub command_problem: Option<String>,
}

impl HostFacts {
    /// Whether there are GPUs that can be told of: NVIDIA's, or the library for AMD's.
    pub(super) fn has_gpus(&self) -> bool {
        let python = self.python.as_ref().ok();
        !self.gpus.is_empty() || python.is_some_and(|python| python.rocm.is_some())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    /// A host that nothing is wrong with.
    pub(crate) fn healthy() -> HostFacts {
        let half = |size| Space {
            size,
            free: size / 2,
        };
        HostFacts {
            os: "Debian GNU/Linux 12".into(),
            kernel: "Linux 6.1.0".into(),
            cpus: 8,
            load: Some(0.5),
            memory: Some(half(64 * GIB)),
            memory_limit: None,
            shm: Some(half(32 * GIB)),
            memfd_problem: None,
            tmp_folder: "/tmp".into(),
            tmp: Ok(half(100 * GIB)),
            limits: Limits {
                nofile: Some(1024),
                nofile_hard: None,
                memlock: Some(8 << 20),
                nproc: None,
                core: Some(0),
            },
            ports: Some((32768, 60999)),
            omp_threads: Some("2".into()),
            python: Ok(Python {
                program: "/opt/bin/python3".into(),
                version: "3.11.2".into(),
                libc: "glibc 2.36".into(),
                horovod: Ok("0.1.0".into()),
                torch: Some("2.9.1+cpu".into()),
                mixed: None,
                cuda: Ok(("13.2".into(), "libcuda.so.1".into())),
                rocm: None,
                nccl: Ok(("2.30.7".into(), "libnccl.so.2".into())),
            }),
            gpus: Vec::new(),
            gpu_problem: None,
            gpus_apart: Vec::new(),
            hostname: "node".into(),
            names: vec![("node".into(), Ok(vec![IpAddr::from([10, 0, 0, 1])]))],
            has_cwd: true,
            command_problem: None,
        }
    }
}
