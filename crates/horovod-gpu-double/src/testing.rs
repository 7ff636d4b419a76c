//! Functions of the double itself (`double_*`): a framework's memory, streams and kernels, and what the double saw.
//!
//! They need no current context, and what they do takes part in the happens-before check like any kernel.
#![expect(
    clippy::missing_safety_doc,
    reason = "pointers are valid for what the function reads or writes; its documentation says how much"
)]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::time::Duration;

use crate::config::Config;
use crate::driver::memory::{allocate, copy_work, free, free_in_stream, write_work};
use crate::driver::stream::synchronize;
use crate::handles::{Handle, Sort, decode};
use crate::memory::{Access, MemoryKind};
use crate::scheduler;
use crate::state::{Limits, Locked, lock};
use crate::stream::{Capture, StreamWork};
use crate::thread;

/// Memory of a device; 0: there is none left.
#[unsafe(no_mangle)]
pub extern "C" fn double_alloc(device: c_int, bytes: usize) -> u64 {
    let mut state = lock();
    allocate(&mut state, bytes.max(1) as u64, device, MemoryKind::Device).unwrap_or(0)
}

/// The host gives memory back; it must have seen all use of it end. 0: done.
#[unsafe(no_mangle)]
pub extern "C" fn double_free(address: u64) -> c_int {
    free(
        &mut lock(),
        address,
        "double_free",
        MemoryKind::is_on_device,
    )
    .err()
    .unwrap_or(0)
}

/// Memory goes back in the order of a stream, as a framework's caching allocator does it. 0: done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn double_free_on(address: u64, stream: Handle) -> c_int {
    let mut state = lock();
    with_stream(
        &mut state,
        stream,
        address,
        "double_free_on",
        |state, id| free_in_stream(state, address, id, "double_free_on"),
    )
}

/// Host memory of a test poses as a device's. 0: done, 1: it overlaps memory that is known.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn double_register(
    memory: *mut c_void,
    bytes: usize,
    device: c_int,
) -> c_int {
    let mut state = lock();
    c_int::from(
        !state
            .memory
            .insert(memory as u64, bytes as u64, device, MemoryKind::Posing),
    )
}

/// [`double_free`] of memory that poses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn double_unregister(memory: *mut c_void) -> c_int {
    let is_posing = |kind| kind == MemoryKind::Posing;
    free(&mut lock(), memory as u64, "double_unregister", is_posing)
        .err()
        .unwrap_or(0)
}

/// A framework's stream: not ordered with the default stream. The framework has retained the device's context.
#[unsafe(no_mangle)]
pub extern "C" fn double_stream_create(device: c_int) -> Handle {
    scheduler::start();
    let mut state = lock();
    if let Some(retained) = state.contexts.get_mut(device as usize) {
        *retained = (*retained).max(1);
    }
    state.create_stream(device, false, 0)
}

/// The stream of `handle`; null is the default stream of the device that `address` lies on, or of the current context, or
/// of device 0.
fn with_stream(
    state: &mut Locked,
    handle: Handle,
    address: u64,
    what: &str,
    body: impl FnOnce(&mut Locked, u64) -> Result<(), i32>,
) -> c_int {
    scheduler::start();
    let near = state.memory.containing(address).map(|a| a.device);
    let device = near.or_else(thread::context).unwrap_or(0);
    let id = state.stream_of(handle, device, what);
    id.and_then(|id| body(state, id)).err().unwrap_or(0)
}

/// A kernel that writes `bytes` bytes, which are read from `from` at once. 0: done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn double_stream_write(
    stream: Handle,
    to: u64,
    from: *const c_void,
    bytes: usize,
) -> c_int {
    // SAFETY: the caller's promise.
    let data = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), bytes) }.to_vec();
    let mut state = lock();
    with_stream(
        &mut state,
        stream,
        to,
        "double_stream_write",
        |state, id| {
            let access = Access::write(to, bytes as u64);
            state.submit(id, "double_stream_write", &[access], write_work(to, data))?;
            Ok(())
        },
    )
}

/// A kernel that reads `bytes` bytes into host memory, which must stay until the stream has come there. 0: done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn double_stream_read(
    stream: Handle,
    to: *mut c_void,
    from: u64,
    bytes: usize,
) -> c_int {
    let mut state = lock();
    with_stream(
        &mut state,
        stream,
        from,
        "double_stream_read",
        |state, id| {
            let access = Access::read(from, bytes as u64);
            let work = copy_work(to as u64, from, bytes);
            state.submit(id, "double_stream_read", &[access], work)?;
            Ok(())
        },
    )
}

/// A kernel that takes so many microseconds. 0: done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn double_stream_sleep(stream: Handle, microseconds: u64) -> c_int {
    let mut state = lock();
    let duration = Duration::from_micros(microseconds);
    with_stream(&mut state, stream, 0, "double_stream_sleep", |state, id| {
        let limits = Limits::AtLeast(duration);
        state.submit_within(id, "double_stream_sleep", &[], StreamWork::Nothing, limits)?;
        Ok(())
    })
}

/// A kernel that ends when [`double_gate_open`] is called with the number returned; 0: it could not be launched.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn double_stream_gate(stream: Handle) -> u64 {
    let mut state = lock();
    let gate = state.new_id();
    state.closed_gates.insert(gate);
    let code = with_stream(&mut state, stream, 0, "double_stream_gate", |state, id| {
        state.submit(id, "double_stream_gate", &[], StreamWork::Gate(gate))?;
        Ok(())
    });
    if code == 0 { gate } else { 0 }
}

/// Lets a stream go on.
#[unsafe(no_mangle)]
pub extern "C" fn double_gate_open(gate: u64) {
    lock().closed_gates.remove(&gate);
    crate::state::notify();
}

/// The host waits for all that the stream holds. 0: done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn double_stream_synchronize(stream: Handle) -> c_int {
    let mut state = lock();
    with_stream(
        &mut state,
        stream,
        0,
        "double_stream_synchronize",
        |state, id| {
            synchronize(state, id);
            Ok(())
        },
    )
}

/// Begins a capture of the stream by the calling thread: mode 0 global, 1 thread-local, 2 relaxed. 0: done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn double_stream_begin_capture(stream: Handle, mode: c_int) -> c_int {
    let mut state = lock();
    with_stream(
        &mut state,
        stream,
        0,
        "double_stream_begin_capture",
        |state, id| {
            if let Some(found) = state.streams.get_mut(&id) {
                found.capture = Some(Capture {
                    mode,
                    thread: thread::number(),
                    is_invalid: false,
                    nodes: 0,
                });
            }
            Ok(())
        },
    )
}

/// Ends a capture: how many operations it caught; -1: it was invalidated, or there was none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn double_stream_end_capture(stream: Handle) -> i64 {
    let mut state = lock();
    let mut nodes = -1;
    with_stream(
        &mut state,
        stream,
        0,
        "double_stream_end_capture",
        |state, id| {
            let found = state.streams.get_mut(&id).and_then(|s| s.capture.take());
            nodes = found.filter(|c| !c.is_invalid).map_or(-1, |c| c.nodes);
            Ok(())
        },
    );
    nodes
}

/// How many rules were broken since the start; the first of them as lines of text, as many as fit, NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn double_violations(text: *mut c_char, bytes: usize) -> u64 {
    let state = lock();
    if !text.is_null() && bytes > 0 {
        let lines = state.violations.join("\n");
        let shown = lines.len().min(bytes - 1);
        // SAFETY: the caller's promise: `bytes` writable bytes.
        unsafe {
            std::ptr::copy_nonoverlapping(lines.as_ptr(), text.cast(), shown);
            text.add(shown).write(0);
        }
    }
    state.violation_count
}

/// How often a function was called; of `pageable`, how many copies were from or to memory that is not pinned.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn double_counts(call: *const c_char) -> u64 {
    if call.is_null() {
        return 0;
    }
    // SAFETY: not null; a C string by the caller's promise.
    let name = unsafe { CStr::from_ptr(call) }.to_string_lossy();
    lock().counts.get(&*name).copied().unwrap_or(0)
}

/// How many there are of `streams`, `events`, `allocations`, `modules`, `communicators`, `contexts`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn double_live(what: *const c_char) -> u64 {
    if what.is_null() {
        return 0;
    }
    // SAFETY: not null; a C string by the caller's promise.
    let what = unsafe { CStr::from_ptr(what) }.to_string_lossy();
    let state = lock();
    let found = match &*what {
        "streams" => {
            let streams = state.streams.values();
            streams.filter(|s| !s.is_default && !s.is_destroyed).count()
        }
        "events" => state.events.len(),
        "allocations" => state.memory.live_allocations(),
        "modules" => state.modules.len(),
        "communicators" => state.communicators.len(),
        "contexts" => state.contexts.iter().map(|count| *count as usize).sum(),
        _ => 0,
    };
    found as u64
}

/// Other settings (as `GPU_DOUBLE`) from now on; counts, violations and a sticky error are forgotten, handles and
/// memory stay. 0: done; 1: no such settings, nothing was changed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn double_configure(settings: *const c_char) -> c_int {
    if settings.is_null() {
        return 1;
    }
    // SAFETY: not null; a C string by the caller's promise.
    let text = unsafe { CStr::from_ptr(settings) }.to_string_lossy();
    let Ok(config) = Config::parse(&text) else {
        return 1;
    };
    lock().configure(config);
    0
}

/// Everything anew with the settings that it has: communicators are aborted, streams emptied, handles and memory invalid,
/// counts and violations forgotten. Contexts stay retained.
#[unsafe(no_mangle)]
pub extern "C" fn double_reset() {
    let mut state = lock();
    let communicators: Vec<u64> = state.communicators.keys().copied().collect();
    for id in communicators {
        state.remove_communicator(id);
    }
    state.closed_gates.clear();
    for stream in state.streams.values_mut() {
        stream.queue.clear();
    }
    state.wait_until(|state| {
        state.touching == 0 && state.streams.values().all(|stream| !stream.is_running)
    });
    state.restart();
}

/// The number in a handle, as messages show it; for tests that look for them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn double_number(handle: Handle) -> u64 {
    [Sort::Stream, Sort::Event, Sort::Communicator]
        .into_iter()
        .find_map(|sort| decode(sort, handle))
        .unwrap_or(0)
}
