//! Names of `HOROVOD_*` variables that are no settings of this table: of the original's build, of the launcher and of the
//! Python packages.

use crate::{Environment, TABLE, find, nearest_of};

/// Variables that the launcher or the Python packages read or set for ranks, and the original's run-time settings.
const READ_ELSEWHERE: &[&str] = &[
    "HOROVOD_ADASUM_MPI_CHUNK_SIZE",
    "HOROVOD_BATCH_D2D_MEMCOPIES",
    "HOROVOD_CCL_CACHE",
    "HOROVOD_CONTROLLER",
    "HOROVOD_CPU_OPERATIONS",
    "HOROVOD_CUDA_HOME",
    "HOROVOD_DISABLE_NVTX_RANGES",
    "HOROVOD_ENABLE_XLA_OPS",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR",
    "HOROVOD_GLOO_RENDEZVOUS_PORT",
    "HOROVOD_MPI_THREADS_DISABLE",
    "HOROVOD_NCCL_HOME",
    "HOROVOD_NCCL_LIB",
    "HOROVOD_NUM_NCCL_STREAMS",
    "HOROVOD_RAY_LOG_KEY",
    "HOROVOD_RAY_LOG_SOCKET",
    "HOROVOD_ROCM_HOME",
    "HOROVOD_SPARK_GPU_ADDRESSES",
    "HOROVOD_SPARK_PYTHONPATH",
    "HOROVOD_SPARK_START_TIMEOUT",
    "HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX",
    "HOROVOD_SPARK_WORK_DIR",
    "HOROVOD_START_TIMEOUT",
    "HOROVOD_TERMINATE_TIMEOUT",
    "HOROVOD_THREAD_AFFINITY",
];

/// Variables that only the original's `setup.py` reads, beside `HOROVOD_WITH_*` and `HOROVOD_WITHOUT_*`.
const OF_A_BUILD: &[&str] = &[
    "HOROVOD_ALLOW_MIXED_GPU_IMPL",
    "HOROVOD_BUILD_ARCH_FLAGS",
    "HOROVOD_BUILD_CUDA_CC_LIST",
    "HOROVOD_BUILD_FLAGS",
    "HOROVOD_CMAKE",
    "HOROVOD_DEBUG",
    "HOROVOD_GPU",
    "HOROVOD_GPU_ALLGATHER",
    "HOROVOD_GPU_ALLREDUCE",
    "HOROVOD_GPU_ALLTOALL",
    "HOROVOD_GPU_BROADCAST",
    "HOROVOD_GPU_REDUCESCATTER",
    "HOROVOD_LOCAL_VERSION",
    "HOROVOD_MPICXX_SHOW",
    "HOROVOD_NCCL_INCLUDE",
    "HOROVOD_NCCL_LINK",
    "HOROVOD_NVTX_INCLUDE",
    "HOROVOD_SKIP_COMPILE",
];

/// Whether this variable steers the original's build: without effect here, where nothing is built.
pub fn steers_a_build(name: &str) -> bool {
    OF_A_BUILD.contains(&name)
        || name.starts_with("HOROVOD_WITH_")
        || name.starts_with("HOROVOD_WITHOUT_")
}

/// Names of set `HOROVOD_*` variables that nothing reads: most often a misspelling.
pub fn unknown_settings(env: &dyn Environment) -> Vec<String> {
    let mut names: Vec<String> = env
        .names()
        .into_iter()
        .filter(|n| n.starts_with("HOROVOD_"))
        .filter(|n| find(n).is_none() && !steers_a_build(n))
        .filter(|n| !READ_ELSEWHERE.contains(&n.as_str()))
        .collect();
    names.sort();
    names
}

/// The setting whose name differs least from this unknown one, if they are alike; the prefix that all have does not count.
pub fn nearest_setting(unknown: &str) -> Option<&'static str> {
    const PREFIX: &str = "HOROVOD_";
    let rest = unknown.strip_prefix(PREFIX)?;
    let names = TABLE.iter().map(|declared| declared.name());
    let nearest = nearest_of(rest, names.clone().filter_map(|n| n.strip_prefix(PREFIX)))?;
    names
        .into_iter()
        .find(|name| name.strip_prefix(PREFIX) == Some(nearest))
}
