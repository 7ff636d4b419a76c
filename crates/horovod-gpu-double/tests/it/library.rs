//! The built library: what it exports, and ranks in processes of their own that load it as the product does.
#![allow(clippy::unwrap_used, reason = "a test ends where something is missing")]

use std::collections::BTreeSet;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::fs;
use std::io::{Read, Write};
use std::mem::ManuallyDrop;
use std::process::{Command, Stdio};
use std::ptr::null_mut;

use horovod_gpu_double::nccl::exports::UniqueId;

/// Every function that the product may ask the two libraries for: those that it cannot do without.
const REQUIRED: &[&str] = &[
    "cuInit",
    "cuDriverGetVersion",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuDeviceGet",
    "cuDeviceGetCount",
    "cuDeviceGetAttribute",
    "cuDeviceGetUuid_v2",
    "cuDeviceGetUuid",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuCtxGetDevice",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuCtxGetStreamPriorityRange",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy_v2",
    "cuStreamQuery",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuStreamIsCapturing",
    "cuStreamGetCtx",
    "cuThreadExchangeStreamCaptureMode",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuEventElapsedTime",
    "cuLaunchHostFunc",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyBatchAsync_v2",
    "cuMemsetD8Async",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemAllocAsync",
    "cuMemFreeAsync",
    "cuMemGetInfo_v2",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuPointerGetAttribute",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuModuleGetFunction",
    "cuLaunchKernel",
    "ncclGetVersion",
    "ncclGetErrorString",
    "ncclGetLastError",
    "ncclGetUniqueId",
    "ncclCommInitRank",
    "ncclCommInitRankConfig",
    "ncclCommSplit",
    "ncclCommFinalize",
    "ncclCommDestroy",
    "ncclCommAbort",
    "ncclCommGetAsyncError",
    "ncclCommCount",
    "ncclCommUserRank",
    "ncclCommCuDevice",
    "ncclAllReduce",
    "ncclReduce",
    "ncclReduceScatter",
    "ncclAllGather",
    "ncclBroadcast",
    "ncclSend",
    "ncclRecv",
    "ncclAlltoAll",
    "ncclGroupStart",
    "ncclGroupEnd",
    "ncclRedOpCreatePreMulSum",
    "ncclRedOpDestroy",
];

/// The library, loaded. It stays open: its threads may run until the process ends.
struct Library(ManuallyDrop<libloading::os::unix::Library>);

impl Library {
    fn open() -> Self {
        let path = horovod_gpu_double::library().unwrap();
        // SAFETY: a library of ours.
        let library = unsafe { libloading::os::unix::Library::new(path) };
        Self(ManuallyDrop::new(library.unwrap()))
    }

    fn has(&self, name: &str) -> bool {
        // SAFETY: the address is not used.
        unsafe { self.0.get::<*mut c_void>(name.as_bytes()) }.is_ok()
    }

    /// # Safety
    /// `F` is the type of the function.
    unsafe fn get<F: Copy>(&self, name: &str) -> F {
        // SAFETY: the caller's promise.
        *unsafe { self.0.get::<F>(name.as_bytes()) }.unwrap()
    }
}

#[test]
fn it_exports_what_the_product_needs() {
    let library = Library::open();
    let missing: BTreeSet<_> = REQUIRED.iter().filter(|n| !library.has(n)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

const RANK: &str = "GPU_DOUBLE_TEST_RANK";

type Handle = *mut c_void;
type Init = unsafe extern "C" fn(*mut Handle, c_int, UniqueId, c_int) -> c_int;
type AllReduce = unsafe extern "C" fn(u64, u64, usize, c_int, c_int, Handle, Handle) -> c_int;

/// One rank: reads the unique id, adds up `rank + 1` with the others, says the sum.
fn be_a_rank(rank: c_int, size: c_int) -> f32 {
    let library = Library::open();
    let mut bytes = [0; 128];
    if rank == 0 {
        // SAFETY: declarations of the interface, places for what is written.
        unsafe {
            let unique: unsafe extern "C" fn(*mut UniqueId) -> c_int =
                library.get("ncclGetUniqueId");
            let mut id = UniqueId(bytes);
            assert_eq!(unique(&raw mut id), 0);
            bytes = id.0;
        }
        let mut out = std::io::stdout().lock();
        out.write_all(b"id:").unwrap();
        out.write_all(&bytes).unwrap();
        out.flush().unwrap();
    } else {
        std::io::stdin().read_exact(&mut bytes).unwrap();
    }
    // SAFETY: declarations of the interface, places for what is written.
    unsafe {
        let call: unsafe extern "C" fn(u32) -> c_int = library.get("cuInit");
        assert_eq!(call(0), 0);
        let retain: unsafe extern "C" fn(*mut Handle, c_int) -> c_int =
            library.get("cuDevicePrimaryCtxRetain");
        let current: unsafe extern "C" fn(Handle) -> c_int = library.get("cuCtxSetCurrent");
        let create: unsafe extern "C" fn(*mut Handle, u32, c_int) -> c_int =
            library.get("cuStreamCreateWithPriority");
        let (mut context, mut stream, mut communicator) = (null_mut(), null_mut(), null_mut());
        assert_eq!(retain(&raw mut context, rank), 0);
        assert_eq!(current(context), 0);
        assert_eq!(create(&raw mut stream, 1, 0), 0);
        let init: Init = library.get("ncclCommInitRank");
        assert_eq!(init(&raw mut communicator, size, UniqueId(bytes), rank), 0);
        let alloc: unsafe extern "C" fn(c_int, usize) -> u64 = library.get("double_alloc");
        let put: unsafe extern "C" fn(u64, *const c_void, usize, Handle) -> c_int =
            library.get("cuMemcpyHtoDAsync_v2");
        let get: unsafe extern "C" fn(*mut c_void, u64, usize, Handle) -> c_int =
            library.get("cuMemcpyDtoHAsync_v2");
        let memory = alloc(rank, 4);
        let mut value = rank as f32 + 1.0;
        assert_eq!(put(memory, (&raw const value).cast(), 4, stream), 0);
        let all_reduce: AllReduce = library.get("ncclAllReduce");
        assert_eq!(all_reduce(memory, memory, 1, 7, 0, communicator, stream), 0);
        assert_eq!(get((&raw mut value).cast(), memory, 4, stream), 0);
        let destroy: unsafe extern "C" fn(Handle) -> c_int = library.get("ncclCommDestroy");
        assert_eq!(destroy(communicator), 0);
        let violations: unsafe extern "C" fn(*mut c_char, usize) -> u64 =
            library.get("double_violations");
        let mut text = [0; 4096];
        let count = violations(text.as_mut_ptr(), text.len());
        assert_eq!(count, 0, "{:?}", CStr::from_ptr(text.as_ptr()));
        value
    }
}

/// Not a test of its own: what the processes of the next one run.
#[test]
#[expect(
    clippy::disallowed_methods,
    reason = "how the test tells its processes what they are"
)]
fn one_rank() {
    let Ok(rank) = std::env::var(RANK) else {
        return;
    };
    let (rank, size) = rank.split_once('/').unwrap();
    let sum = be_a_rank(rank.parse().unwrap(), size.parse().unwrap());
    std::io::stdout()
        .write_all(format!("sum:{sum}\n").as_bytes())
        .unwrap();
}

#[test]
fn processes_are_ranks_too() {
    let log = std::env::temp_dir().join(format!("gpu-double-{}.log", std::process::id()));
    let settings = format!("devices=3,delay=50,seed=1,log={}", log.display());
    let start = |rank: usize| {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "library::one_rank", "--nocapture"])
            .env(RANK, format!("{rank}/3"))
            .env("GPU_DOUBLE", &settings)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let mut children: Vec<_> = (0..3).map(start).collect();
    // The root says its id after what the test runner prints.
    let mut received = Vec::new();
    let out = children[0].stdout.as_mut().unwrap();
    let id = loop {
        let mut byte = [0];
        out.read_exact(&mut byte).unwrap();
        received.extend(byte);
        if let Some(at) = received.windows(3).position(|w| w == b"id:")
            && received.len() == at + 3 + 128
        {
            break received[at + 3..].to_vec();
        }
    };
    for child in &mut children[1..] {
        child.stdin.take().unwrap().write_all(&id).unwrap();
    }
    for child in children {
        let output = child.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(
            output.status.success() && text.contains("sum:6\n"),
            "{text}"
        );
    }
    let lines = fs::read_to_string(&log).unwrap();
    fs::remove_file(&log).unwrap();
    assert_eq!(lines.matches(" ncclAllReduce ").count(), 3, "{lines}");
    assert!(!lines.contains("violation"), "{lines}");
}
