//! NCCL: its functions, and communicators that never block the thread which calls them.

mod communicator;
#[cfg(test)]
mod tests;

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::ptr::{null, null_mut};

use horovod_protocol::DType;

use crate::driver::Handle;
use crate::error::GpuError;
use crate::load::{Library, check_process, function_table};

pub use communicator::Communicator;

/// `ncclUniqueId`, which C passes by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct UniqueId([u8; 128]);

/// `ncclConfig_t` of 2.30.7. The library takes over what its own version knows of it.
#[repr(C)]
pub(crate) struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
    traffic_class: c_int,
    comm_name: *const c_char,
    collnet_enable: c_int,
    cta_policy: c_int,
    shrink_share: c_int,
    nvls_ctas: c_int,
    n_channels_per_net_peer: c_int,
    nvlink_centric_sched: c_int,
    graph_usage_mode: c_int,
    num_rma_ctx: c_int,
    max_p2p_peers: c_int,
    graph_stream_ordering: c_int,
}

/// The version whose `ncclConfig_t` is declared here.
const CONFIG_VERSION: i32 = 23007;
/// Tells the library that the struct was filled in.
const CONFIG_MAGIC: c_uint = 0xcafe_beef;
/// `NCCL_CONFIG_UNDEF_INT`.
const UNDEFINED: c_int = c_int::MIN;
/// The first version in which several communicators may be aborted in one group.
const ABORTS_IN_GROUPS: i32 = 22200;

/// The first version that heeds `NCCL_MULTI_RANK_GPU_ENABLE`; older ones refuse two ranks on one GPU.
pub const NCCL_SHARES_GPUS_SINCE: i32 = 23003;

const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 7;

function_table! {
    /// Functions of `libnccl.so.2`, all of them in 2.18, and of AMD's `librccl.so.1`, which has them by the same names.
    struct NcclTable;
    required {
        get_version = c"ncclGetVersion"(*mut c_int);
        get_error_string = c"ncclGetErrorString"(c_int) -> *const c_char;
        get_last_error = c"ncclGetLastError"(Handle) -> *const c_char;
        get_unique_id = c"ncclGetUniqueId"(*mut UniqueId);
        comm_init_rank_config = c"ncclCommInitRankConfig"(*mut Handle, c_int, UniqueId, c_int, *mut Config);
        comm_finalize = c"ncclCommFinalize"(Handle);
        comm_destroy = c"ncclCommDestroy"(Handle);
        comm_abort = c"ncclCommAbort"(Handle);
        comm_get_async_error = c"ncclCommGetAsyncError"(Handle, *mut c_int);
        all_reduce = c"ncclAllReduce"(*const c_void, *mut c_void, usize, c_int, c_int, Handle, Handle);
        reduce = c"ncclReduce"(*const c_void, *mut c_void, usize, c_int, c_int, c_int, Handle, Handle);
        reduce_scatter = c"ncclReduceScatter"(*const c_void, *mut c_void, usize, c_int, c_int, Handle, Handle);
        all_gather = c"ncclAllGather"(*const c_void, *mut c_void, usize, c_int, Handle, Handle);
        broadcast = c"ncclBroadcast"(*const c_void, *mut c_void, usize, c_int, c_int, Handle, Handle);
        send = c"ncclSend"(*const c_void, usize, c_int, c_int, Handle, Handle);
        recv = c"ncclRecv"(*mut c_void, usize, c_int, c_int, Handle, Handle);
        group_start = c"ncclGroupStart"();
        group_end = c"ncclGroupEnd"();
    }
    optional {}
}

impl NcclTable {
    /// The functions of a library, its version and the address of one of its functions.
    pub(crate) fn of_library(library: &Library) -> Result<(Self, i32, *const c_void), String> {
        let table = Self::read(library, Some)?;
        let mut version = 0;
        // SAFETY: writes one integer.
        let code = unsafe { (table.get_version)(&raw mut version) };
        if code != SUCCESS {
            let error = table.error("ncclGetVersion", code, null_mut());
            return Err(error.to_string());
        }
        let function = table.get_version as *const c_void;
        Ok((table, version, function))
    }

    /// NCCL's texts for a code and for what went wrong last, on a communicator if there is one.
    fn error(&self, call: &'static str, code: c_int, comm: Handle) -> GpuError {
        // SAFETY: constant strings, or such as stay until the next call; null is no communicator.
        let [text, last] = unsafe {
            [(self.get_error_string)(code), (self.get_last_error)(comm)].map(|text| {
                if text.is_null() {
                    String::new()
                } else {
                    CStr::from_ptr(text).to_string_lossy().trim().to_owned()
                }
            })
        };
        let text = if last.is_empty() {
            text
        } else {
            format!("{text}: {last}")
        };
        GpuError::Nccl { call, code, text }
    }

    fn progress(
        &self,
        call: &'static str,
        code: c_int,
        comm: Handle,
    ) -> Result<Progress, GpuError> {
        match code {
            SUCCESS => Ok(Progress::Done),
            IN_PROGRESS => Ok(Progress::InProgress),
            _ => Err(self.error(call, code, comm)),
        }
    }
}

/// NCCL's element types, those that all supported versions have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
#[expect(missing_docs, reason = "the names are the documentation")]
pub enum NcclType {
    I8 = 0,
    U8 = 1,
    I32 = 2,
    U32 = 3,
    I64 = 4,
    U64 = 5,
    F16 = 6,
    F32 = 7,
    F64 = 8,
    Bf16 = 9,
}

impl NcclType {
    /// The type of the same arithmetic. None for 16-bit integers, which NCCL lacks, and for bools, which are bytes
    /// there.
    pub fn of(dtype: DType) -> Option<Self> {
        Some(match dtype {
            DType::U8 => Self::U8,
            DType::I8 => Self::I8,
            DType::I32 => Self::I32,
            DType::I64 => Self::I64,
            DType::F16 => Self::F16,
            DType::F32 => Self::F32,
            DType::F64 => Self::F64,
            DType::BF16 => Self::Bf16,
            DType::U32 => Self::U32,
            DType::U64 => Self::U64,
            DType::U16 | DType::I16 | DType::Bool => return None,
        })
    }
}

/// NCCL's reductions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
#[expect(missing_docs, reason = "the names are the documentation")]
pub enum NcclOp {
    Sum = 0,
    Product = 1,
    Max = 2,
    Min = 3,
}

/// How far a call is that need not be finished when it returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Progress {
    /// It is finished.
    Done,
    /// It goes on; until [`Communicator::progress`] says otherwise, the communicator takes no other call, and its
    /// stream no CUDA call.
    InProgress,
}

/// How a communicator shall be.
#[derive(Clone, Debug, Default)]
pub struct CommSettings {
    /// Its name in NCCL's log (from 2.27).
    pub name: String,
    /// Whether calls return only when they are finished: for versions whose other mode hangs (2.26).
    pub blocking: bool,
    /// At most so many thread blocks.
    pub max_ctas: Option<i32>,
}

/// NCCL.
pub struct Nccl {
    pub(crate) table: NcclTable,
    version: i32,
}

impl Nccl {
    pub(crate) fn new(table: &NcclTable, version: i32) -> Self {
        Self {
            table: table.clone(),
            version,
        }
    }

    /// 23007 is 2.30.7.
    pub fn version(&self) -> i32 {
        self.version
    }

    /// A new name for a communicator, for one of its members to make and to tell the others. This process listens at
    /// the address in it until they have met.
    pub fn unique_id(&self) -> Result<[u8; 128], GpuError> {
        check_process()?;
        refuse_fixed_address()?;
        let mut id = UniqueId([0; 128]);
        // SAFETY: writes one id.
        let code = unsafe { (self.table.get_unique_id)(&raw mut id) };
        self.checked("ncclGetUniqueId", code)?;
        Ok(id.0)
    }

    /// Begins to make this member's part of a communicator, on the device of the current context. All `size` members
    /// call it; unless `blocking` it returns at once, and [`Communicator::progress`] says when they have met. That also
    /// says why NCCL could not make all of what it has begun to make, which is to be aborted.
    pub fn begin(
        &'static self,
        id: &[u8; 128],
        size: i32,
        rank: i32,
        settings: &CommSettings,
    ) -> Result<Communicator, GpuError> {
        check_process()?;
        refuse_fixed_address()?;
        let name = CString::new(settings.name.replace('\0', " ")).unwrap_or_default();
        let mut config = Config::new(self.version, settings, &name);
        let mut comm = null_mut();
        // SAFETY: a place for one handle, and a struct of its size; its texts live until the communicator is dropped.
        let code = unsafe {
            (self.table.comm_init_rank_config)(
                &raw mut comm,
                size,
                UniqueId(*id),
                rank,
                &raw mut config,
            )
        };
        let begun = self.table.progress("ncclCommInitRankConfig", code, comm);
        match begun.err() {
            Some(error) if comm.is_null() => Err(error),
            failure => Ok(Communicator::new(self, comm, failure, name)),
        }
    }

    /// Begins a group: calls until [`Self::group_end`] become one launch.
    ///
    /// # Safety
    /// A group belongs to a thread: the same one ends it, whatever happens in between.
    pub unsafe fn group_start(&self) -> Result<(), GpuError> {
        check_process()?;
        // SAFETY: no arguments.
        let code = unsafe { (self.table.group_start)() };
        self.checked("ncclGroupStart", code)
    }

    /// Ends a group and launches it. In progress means that every communicator in it may be.
    ///
    /// # Safety
    /// As [`Self::group_start`]; and what the calls of the group were promised about memory still holds.
    pub unsafe fn group_end(&self) -> Result<Progress, GpuError> {
        check_process()?;
        // SAFETY: no arguments.
        let code = unsafe { (self.table.group_end)() };
        self.table.progress("ncclGroupEnd", code, null_mut())
    }

    fn checked(&self, call: &'static str, code: c_int) -> Result<(), GpuError> {
        if code == SUCCESS {
            Ok(())
        } else {
            Err(self.table.error(call, code, null_mut()))
        }
    }
}

impl std::fmt::Debug for Nccl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Nccl")
            .field("version", &self.version)
            .finish_non_exhaustive()
    }
}

impl Config {
    fn new(library: i32, settings: &CommSettings, name: &CStr) -> Self {
        Self {
            size: size_of::<Self>(),
            magic: CONFIG_MAGIC,
            version: library.min(CONFIG_VERSION).unsigned_abs(),
            blocking: c_int::from(settings.blocking),
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: settings.max_ctas.unwrap_or(UNDEFINED),
            net_name: null(),
            split_share: UNDEFINED,
            traffic_class: UNDEFINED,
            comm_name: name.as_ptr(),
            collnet_enable: UNDEFINED,
            cta_policy: UNDEFINED,
            shrink_share: UNDEFINED,
            nvls_ctas: UNDEFINED,
            n_channels_per_net_peer: UNDEFINED,
            nvlink_centric_sched: UNDEFINED,
            graph_usage_mode: UNDEFINED,
            num_rma_ctx: UNDEFINED,
            max_p2p_peers: UNDEFINED,
            graph_stream_ordering: UNDEFINED,
        }
    }
}

/// With `NCCL_COMM_ID` all communicators would get one address, and members of different ones would meet.
fn refuse_fixed_address() -> Result<(), GpuError> {
    #[expect(
        clippy::disallowed_methods,
        reason = "NCCL's own setting, none of ours"
    )]
    let is_set = std::env::var_os("NCCL_COMM_ID").is_some();
    if !is_set {
        return Ok(());
    }
    Err(GpuError::Invalid(
        "NCCL_COMM_ID is set, so all communicators of NCCL would have one address; unset it"
            .to_owned(),
    ))
}
