//! Finding and opening the driver's library and NCCL, each once per process: NVIDIA's, or AMD's for both.
//!
//! No lock is held anywhere here: two threads that come first at once do the same work, and one result stays. A lock
//! that another thread holds during a fork would be held for ever in the child.

mod library;
mod search;
mod table;
#[cfg(test)]
pub(crate) mod tests;

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::driver::{Driver, DriverFunctions};
use crate::error::GpuError;
use crate::nccl::{Nccl, NcclTable};

pub(crate) use library::{Library, file_of};
#[cfg(test)]
pub(crate) use table::Signature;
pub(crate) use table::function_table;

/// Where to look; empty lists leave the dynamic loader's own places.
#[derive(Clone, Debug, Default)]
pub struct Search {
    /// The driver's library; then no other place is tried.
    pub cuda_library: Option<PathBuf>,
    /// NCCL's library, or AMD's; then no other place is tried.
    pub nccl_library: Option<PathBuf>,
    /// Folders of the wheel of NCCL: `<site-packages>/nvidia/nccl`, or its `lib`.
    pub wheel_folders: Vec<PathBuf>,
    /// `HOROVOD_NCCL_LIB` (a folder of libraries) and `HOROVOD_NCCL_HOME` (a folder with `lib` or `lib64`).
    pub nccl_homes: Vec<PathBuf>,
    /// `HOROVOD_CUDA_HOME`, `CUDA_HOME`: folders with `lib64`. `/usr/local/cuda` is always the last.
    pub cuda_homes: Vec<PathBuf>,
    /// Folders of packages that have AMD's libraries: PyTorch's `lib`, those of ROCm's packages.
    pub rocm_folders: Vec<PathBuf>,
    /// `HOROVOD_ROCM_HOME`, `ROCM_HOME`, `ROCM_PATH`: folders with `lib`, before `rocm_folders`. `/opt/rocm` is always the
    /// last.
    pub rocm_homes: Vec<PathBuf>,
}

/// Whose GPUs a process uses: all of its libraries are of one of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stack {
    /// NVIDIA's: `libcuda.so.1` and `libnccl.so.2`.
    Cuda,
    /// AMD's: `libamdhip64.so` and `librccl.so.1`.
    Rocm,
}

impl std::fmt::Display for Stack {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Cuda => "CUDA",
            Self::Rocm => "ROCm",
        })
    }
}

/// A library that was found, and that fits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Its file.
    pub path: String,
    /// As the library tells it: 12080 is CUDA 12.8, 23007 is NCCL 2.30.7. Of ROCm as its file's name tells it:
    /// 70200000 is 7.2, and 0 is not known.
    pub version: i32,
}

/// A library that is open, with its functions.
struct Opened<T> {
    found: Found,
    table: T,
}

static SEARCH: OnceLock<Search> = OnceLock::new();
static DEFAULT_SEARCH: OnceLock<Search> = OnceLock::new();
/// The stack that the first framework with GPUs has chosen.
static CHOSEN: OnceLock<Stack> = OnceLock::new();
static OPENED_DRIVER: OnceLock<Opened<DriverFunctions>> = OnceLock::new();
static OPENED_NCCL: OnceLock<Opened<NcclTable>> = OnceLock::new();
static DRIVER: OnceLock<Result<Driver, GpuError>> = OnceLock::new();
static NCCL_FUNCTIONS: OnceLock<Result<Nccl, GpuError>> = OnceLock::new();
/// The process that has called `cuInit` with success, 0 for none. It is kept by forked children, which is how they know.
static INITIALISED_BY: AtomicU32 = AtomicU32::new(0);

/// Says where to look. False if that was said before, or something has been looked for already.
pub fn set_search(search: Search) -> bool {
    SEARCH.set(search).is_ok()
}

/// Says where to look unless [`set_search`] is called before the first look: by who knows only the settings, at a time
/// when an adapter has not told of its packages yet.
pub fn set_default_search(search: Search) {
    // The settings of a process do not change.
    let _ = DEFAULT_SEARCH.set(search);
}

fn search() -> &'static Search {
    SEARCH.get_or_init(|| DEFAULT_SEARCH.get().cloned().unwrap_or_default())
}

fn opened<T>(
    cell: &'static OnceLock<Opened<T>>,
    open: impl FnOnce(&Search) -> Result<Opened<T>, GpuError>,
) -> Result<&'static Opened<T>, GpuError> {
    if let Some(opened) = cell.get() {
        return Ok(opened);
    }
    let new = open(search())?;
    tracing::info!(path = new.found.path, version = new.found.version, "loaded");
    Ok(cell.get_or_init(|| new))
}

fn open_driver(search: &Search, stack: Stack) -> Result<Opened<DriverFunctions>, GpuError> {
    let candidates = search::driver_candidates(search, stack);
    let wanted = match stack {
        Stack::Cuda => &search::DRIVER,
        Stack::Rocm => &search::HIP_RUNTIME,
    };
    search::first(wanted, &candidates, |library| {
        DriverFunctions::of_library(stack, library)
    })
}

fn open_nccl(search: &Search, stack: Stack) -> Result<Opened<NcclTable>, GpuError> {
    let candidates = search::nccl_candidates(search, stack);
    let wanted = match stack {
        Stack::Cuda => &search::COLLECTIVES,
        Stack::Rocm => &search::RCCL_COLLECTIVES,
    };
    search::first(wanted, &candidates, NcclTable::of_library)
}

/// Says whose GPUs the process's tensors are on: by who knows a tensor, or the framework that makes them. The first who
/// says it, or looks for a library before, is who counts. Nothing is opened.
pub fn choose_stack(stack: Stack) -> Result<(), GpuError> {
    let used = match OPENED_DRIVER.get() {
        Some(opened) => opened.table.stack,
        None => *CHOSEN.get_or_init(|| stack),
    };
    if used == stack {
        return Ok(());
    }
    Err(GpuError::Invalid(format!(
        "a tensor is on a GPU of {stack}, but this process has begun to use those of {used}: one process uses GPUs of one \
         kind; import the framework whose tensors are on GPUs first"
    )))
}

/// Whose GPUs this process uses, or would: as was said; else CUDA's, unless only what AMD's GPUs need is there.
pub fn stack() -> Stack {
    match (OPENED_DRIVER.get(), CHOSEN.get()) {
        (Some(opened), _) => opened.table.stack,
        (None, Some(chosen)) => *chosen,
        (None, None) => opened_driver().map_or(Stack::Cuda, |opened| opened.table.stack),
    }
}

fn opened_driver() -> Result<&'static Opened<DriverFunctions>, GpuError> {
    let of = |stack| opened(&OPENED_DRIVER, |search| open_driver(search, stack));
    match CHOSEN.get() {
        Some(chosen) => of(*chosen),
        None => of(Stack::Cuda).or_else(|why| match may_be_rocm(search()) {
            true => of(Stack::Rocm).map_err(|_| why),
            false => Err(why),
        }),
    }
}

/// Whether AMD's libraries are worth a look where nobody asks for them: there is what every process uses AMD's GPUs
/// through, or their place is set. Not where CUDA's is, which is the only place then.
fn may_be_rocm(search: &Search) -> bool {
    search.cuda_library.is_none()
        && (!search.rocm_homes.is_empty() || Path::new("/dev/kfd").exists())
}

fn opened_nccl() -> Result<&'static Opened<NcclTable>, GpuError> {
    let stack = stack();
    opened(&OPENED_NCCL, |search| open_nccl(search, stack))
}

/// Where the driver's library is, once it is open.
pub(crate) fn driver_path() -> Option<PathBuf> {
    let opened = OPENED_DRIVER.get()?;
    Some(PathBuf::from(&opened.found.path))
}

/// Opens the driver's library, if that has not been done, and tells which it is. CUDA is not initialised.
pub fn find_driver() -> Result<Found, GpuError> {
    opened_driver().map(|opened| opened.found.clone())
}

/// Opens NCCL, if that has not been done, and tells which it is. CUDA is not initialised.
pub fn find_nccl() -> Result<Found, GpuError> {
    opened_nccl().map(|opened| opened.found.clone())
}

/// The driver, with CUDA initialised. The first result stays, failure included; a forked child of a process that had
/// initialised CUDA is refused.
pub fn driver() -> Result<&'static Driver, GpuError> {
    check_process()?;
    if DRIVER.get().is_none() {
        let result = opened_driver().and_then(|opened| {
            // Before the call: a child that is forked during it cannot use CUDA either.
            INITIALISED_BY.store(std::process::id(), Ordering::SeqCst);
            let driver = Driver::initialise(&opened.table, opened.found.version);
            if driver.is_err() {
                INITIALISED_BY.store(0, Ordering::SeqCst);
            }
            driver
        });
        let _ = DRIVER.set(result);
    }
    first(&DRIVER)
}

/// NCCL. The first result stays, failure included. NCCL initialises CUDA when the first communicator is made.
pub fn nccl() -> Result<&'static Nccl, GpuError> {
    check_process()?;
    if NCCL_FUNCTIONS.get().is_none() {
        let result = opened_nccl().map(|opened| Nccl::new(&opened.table, opened.found.version));
        let _ = NCCL_FUNCTIONS.set(result);
    }
    first(&NCCL_FUNCTIONS)
}

/// A result that was set before.
fn first<T>(cell: &'static OnceLock<Result<T, GpuError>>) -> Result<&'static T, GpuError> {
    match cell.get() {
        Some(Ok(found)) => Ok(found),
        Some(Err(error)) => Err(error.clone()),
        None => Err(GpuError::Invalid("nothing was loaded".to_owned())),
    }
}

/// Whether this process has initialised CUDA through here.
pub fn is_initialised() -> bool {
    INITIALISED_BY.load(Ordering::SeqCst) == std::process::id()
}

/// Refuses children of a process that had initialised CUDA.
pub(crate) fn check_process() -> Result<(), GpuError> {
    let by = INITIALISED_BY.load(Ordering::SeqCst);
    if by == 0 || by == std::process::id() {
        Ok(())
    } else {
        Err(GpuError::Forked)
    }
}
