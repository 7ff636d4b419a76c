//! Settings of operations on GPU tensors, and where their libraries are looked for.

use std::path::PathBuf;
use std::time::Duration;

use horovod_settings as settings;
pub use horovod_settings::GpuOperations;

use horovod_gpu::Search;
use settings::Environment;

use crate::error::Error;

/// Settings of operations on GPU tensors.
#[derive(Clone, Debug)]
pub struct GpuSettings {
    /// Their implementation: never [`GpuOperations::Mpi`].
    pub operations: GpuOperations,
    /// Whether it was asked for by the name of MPI, which is not there.
    pub names_mpi: bool,
    /// How long one may be on the GPU; `None`: for ever.
    pub timeout: Option<Duration>,
    /// Whether `synchronize` leaves it to the stream to wait.
    pub asynchronous: bool,
    /// Thread blocks of NCCL's kernels at most; `None`: NCCL's choice.
    pub max_ctas: Option<i32>,
    /// Several ranks may use one GPU.
    pub shares_gpus: bool,
    /// Where libraries are looked for.
    pub search: Search,
}

impl GpuSettings {
    pub(crate) fn read(env: &dyn Environment) -> Result<Self, Error> {
        let timeout = settings::GPU_TIMEOUT.read(env)?;
        let max_ctas = settings::NCCL_MAX_CTAS.read(env)?;
        let asked = settings::GPU_OPERATIONS.read(env)?;
        Ok(Self {
            operations: asked.meant(),
            names_mpi: asked == GpuOperations::Mpi,
            timeout: (timeout > 0.0).then(|| Duration::from_secs_f64(timeout)),
            asynchronous: settings::ENABLE_ASYNC_COMPLETION.read(env)?,
            max_ctas: i32::try_from(max_ctas).ok().filter(|max| *max > 0),
            shares_gpus: env
                .get("NCCL_MULTI_RANK_GPU_ENABLE")
                .is_some_and(|value| value.trim() == "1"),
            search: search(env, Vec::new(), Vec::new())?,
        })
    }
}

/// Implementation of operations on GPU tensors.
pub fn operations(env: &dyn Environment) -> Result<GpuOperations, Error> {
    Ok(settings::GPU_OPERATIONS.read(env)?.meant())
}

/// Where CUDA's driver and NCCL, or AMD's libraries, are looked for: as set, and in these folders of packages.
pub fn search(
    env: &dyn Environment,
    wheel_folders: Vec<PathBuf>,
    rocm_folders: Vec<PathBuf>,
) -> Result<Search, Error> {
    let folders = |names: &[&str]| {
        let set = names.iter().filter_map(|name| env.get(name));
        set.filter(|value| !value.is_empty())
            .map(PathBuf::from)
            .collect()
    };
    Ok(Search {
        cuda_library: settings::CUDA_LIBRARY.read(env)?.map(PathBuf::from),
        nccl_library: settings::NCCL_LIBRARY.read(env)?.map(PathBuf::from),
        wheel_folders,
        nccl_homes: folders(&["HOROVOD_NCCL_LIB", "HOROVOD_NCCL_HOME"]),
        cuda_homes: folders(&["HOROVOD_CUDA_HOME", "CUDA_HOME"]),
        rocm_folders,
        rocm_homes: folders(&["HOROVOD_ROCM_HOME", "ROCM_HOME", "ROCM_PATH"]),
    })
}
