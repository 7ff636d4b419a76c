//! Ranks as threads of one process, each with a device, a stream and a communicator.
#![allow(clippy::unwrap_used, reason = "a test ends where something is missing")]

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

use horovod_gpu_double::Handle;
use horovod_gpu_double::driver::stream::cuStreamSynchronize;
use horovod_gpu_double::nccl::collectives::ncclAllReduce;
use horovod_gpu_double::nccl::exports::{
    UniqueId, ncclCommDestroy, ncclCommGetAsyncError, ncclCommInitRankConfig, ncclGetUniqueId,
};
use horovod_gpu_double::testing::{double_alloc, double_stream_read, double_stream_write};

use super::{adopt, bytes_of, own_stream};

/// `ncclConfig_t` of 2.30 with only what differs from the defaults.
#[repr(C)]
pub(crate) struct Config {
    pub(crate) size: usize,
    pub(crate) magic: u32,
    pub(crate) version: u32,
    pub(crate) blocking: c_int,
    pub(crate) cluster: c_int,
    pub(crate) least: c_int,
    pub(crate) most: c_int,
    pub(crate) net: usize,
    pub(crate) share: c_int,
    pub(crate) traffic: c_int,
    pub(crate) name: usize,
    pub(crate) rest: [c_int; 10],
}

impl Config {
    pub(crate) fn new(blocking: c_int) -> Self {
        let undefined = c_int::MIN;
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: 23007,
            blocking,
            cluster: undefined,
            least: undefined,
            most: undefined,
            net: 0,
            share: undefined,
            traffic: undefined,
            name: 0,
            rest: [undefined; 10],
        }
    }
}

pub(crate) fn unique_id() -> UniqueId {
    let mut id = UniqueId([0; 128]);
    // SAFETY: a place for it.
    assert_eq!(unsafe { ncclGetUniqueId(&raw mut id) }, 0);
    id
}

/// One rank.
pub(crate) struct Rank {
    pub(crate) rank: usize,
    pub(crate) stream: Handle,
    pub(crate) communicator: Handle,
}

/// The device type of a test's elements.
pub(crate) const F32: c_int = 7;

impl Rank {
    /// Connects the calling thread's rank. The device is the current one.
    pub(crate) fn join(id: UniqueId, size: usize, rank: usize, blocking: bool) -> Self {
        let (communicator, code) = join(id, size, rank, blocking);
        assert!(code == 0 || code == 7, "{code}");
        let joined = Self {
            rank,
            stream: own_stream(),
            communicator,
        };
        assert_eq!(joined.settle(), 0);
        joined
    }

    /// Polls until nothing is in progress.
    pub(crate) fn settle(&self) -> i32 {
        loop {
            match async_error(self.communicator) {
                7 => std::thread::yield_now(),
                code => return code,
            }
        }
    }

    /// Device memory with these values, which are there when the stream comes there.
    pub(crate) fn put(&self, values: &[f32]) -> u64 {
        let bytes = size_of_val(values);
        let memory = double_alloc(self.device(), bytes);
        // SAFETY: so many bytes.
        let code = unsafe { double_stream_write(self.stream, memory, bytes_of(values), bytes) };
        assert_eq!(code, 0);
        memory
    }

    pub(crate) fn device(&self) -> c_int {
        self.rank as c_int
    }

    pub(crate) fn get(&self, memory: u64, count: usize) -> Vec<f32> {
        let mut values = vec![0f32; count];
        // SAFETY: so many bytes, which stay until the stream has come there.
        unsafe {
            let to = values.as_mut_ptr().cast();
            assert_eq!(double_stream_read(self.stream, to, memory, 4 * count), 0);
            assert_eq!(cuStreamSynchronize(self.stream), 0);
        }
        values
    }

    pub(crate) fn leave(self) {
        // SAFETY: a communicator that exists.
        assert_eq!(unsafe { ncclCommDestroy(self.communicator) }, 0);
    }
}

pub(crate) fn join(id: UniqueId, size: usize, rank: usize, blocking: bool) -> (Handle, i32) {
    let mut communicator = null_mut();
    let config = Config::new(c_int::from(blocking));
    let (place, size, rank) = (&raw mut communicator, size as c_int, rank as c_int);
    // SAFETY: a place for one handle, and a configuration.
    let code = unsafe { ncclCommInitRankConfig(place, size, id, rank, (&raw const config).cast()) };
    (communicator, code)
}

pub(crate) fn async_error(communicator: Handle) -> i32 {
    let mut found = -1;
    // SAFETY: a place for an int.
    let code = unsafe { ncclCommGetAsyncError(communicator, &raw mut found) };
    assert_eq!(code, 0);
    found
}

/// Runs `body` as every rank of a job; what the ranks return.
pub(crate) fn ranks<T: Send>(
    size: usize,
    blocking: bool,
    body: impl Fn(Rank) -> T + Sync,
) -> Vec<T> {
    let id = unique_id();
    let body = &body;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..size)
            .map(|rank| {
                scope.spawn(move || {
                    adopt(rank as c_int);
                    body(Rank::join(id, size, rank, blocking))
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

/// The sum, among operators.
pub(crate) const SUM: c_int = 0;

pub(crate) fn pointer(address: u64) -> *mut c_void {
    address as *mut c_void
}

impl Rank {
    pub(crate) fn all_reduce(&self, memory: u64, count: usize) -> i32 {
        self.all_reduce_with(memory, count, SUM)
    }

    pub(crate) fn all_reduce_with(&self, memory: u64, count: usize, operator: c_int) -> i32 {
        let (buffer, communicator) = (pointer(memory), self.communicator);
        // SAFETY: memory of the device, a communicator and a stream, which exist.
        unsafe {
            ncclAllReduce(
                buffer,
                buffer,
                count,
                F32,
                operator,
                communicator,
                self.stream,
            )
        }
    }
}
