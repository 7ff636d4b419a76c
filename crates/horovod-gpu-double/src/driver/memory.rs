//! Memory: of devices, pinned, and copies between them.

use std::ffi::{c_int, c_uchar, c_uint, c_void};

use crate::call::{Call, CallOutcome, Need, driver, put};
use crate::clock::HOST;
use crate::codes;
use crate::driver::stream::synchronize;
use crate::handles::Handle;
use crate::memory::{Access, Accessor, Memory, MemoryKind};
use crate::state::Locked;
use crate::stream::StreamWork;

/// New memory of a device, or pinned.
pub(crate) fn allocate(
    state: &mut Locked,
    bytes: u64,
    device: i32,
    kind: MemoryKind,
) -> Result<u64, i32> {
    if kind == MemoryKind::Device {
        let used = state.memory.used_by(device);
        if used.saturating_add(bytes) > state.config.memory {
            return Err(codes::OUT_OF_MEMORY);
        }
    }
    state
        .memory
        .allocate(bytes, device, kind)
        .ok_or(codes::OUT_OF_MEMORY)
}

/// The host gives back what starts at `start`.
pub(crate) fn free(
    state: &mut Locked,
    start: u64,
    what: &str,
    is_right: impl Fn(MemoryKind) -> bool,
) -> CallOutcome {
    // Copies in progress end first: the pages are about to be unmapped.
    state.wait_until(|state| state.touching == 0);
    let kind = state.memory.at(start).map(|a| a.kind);
    if kind.is_some_and(|kind| !is_right(kind)) {
        state.violation(
            "memory",
            &format!("{what}: {start:#x} is memory of another kind"),
        );
        return Err(codes::INVALID_VALUE);
    }
    let host = state.host.clone();
    let by = Accessor {
        agent: HOST,
        step: 0,
        clock: &host,
        what,
    };
    match state.memory.free(start, &by, &host) {
        Ok((gone, complaints)) => {
            for complaint in complaints {
                state.violation("memory", &complaint);
            }
            Memory::give_back(&gone);
            Ok(())
        }
        Err(complaint) => {
            state.violation("memory", &complaint);
            Err(codes::INVALID_VALUE)
        }
    }
}

/// A stream gives back what starts at `start`: at its place, after all that happened before.
pub(crate) fn free_in_stream(
    state: &mut Locked,
    start: u64,
    stream: u64,
    what: &str,
) -> CallOutcome {
    state.wait_until(|state| state.touching == 0);
    let Some((id, bytes)) = state.memory.at(start).map(|a| (a.id, a.bytes)) else {
        return free(state, start, what, MemoryKind::is_on_device);
    };
    // It is checked like a write of everything.
    let all = [Access::write(start, bytes)];
    let place = state.submit(stream, what, &all, StreamWork::EndOf(id))?;
    let Some(found) = state.streams.get(&stream) else {
        return Err(codes::INVALID_HANDLE);
    };
    let (agent, clock, host) = (found.agent, found.clock.clone(), state.host.clone());
    let by = Accessor {
        agent,
        step: place.1,
        clock: &clock,
        what,
    };
    // Complaints were made by the write.
    if let Ok((gone, _)) = state.memory.free(start, &by, &host) {
        state.memory.doom(gone);
    }
    Ok(())
}

/// `cuMemAlloc_v2`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> c_int {
    driver(
        "cuMemAlloc_v2",
        Need::NoCapture,
        format_args!("{bytes}"),
        |call| {
            if bytes == 0 {
                return Err(codes::INVALID_VALUE);
            }
            let device = call.device;
            let made = allocate(call, bytes as u64, device, MemoryKind::Device)?;
            // SAFETY: the caller's promise.
            unsafe { put(address, made) }
        },
    )
}

/// `cuMemFree_v2`. The real one may or may not wait for the device, so the host must have seen that all use has ended.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemFree_v2(address: u64) -> c_int {
    driver(
        "cuMemFree_v2",
        Need::NoCapture,
        format_args!("{address:#x}"),
        |call| {
            if address == 0 {
                return Ok(());
            }
            free(call, address, "cuMemFree_v2", |kind| {
                kind == MemoryKind::Device
            })
        },
    )
}

/// `cuMemAllocAsync`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAllocAsync(address: *mut u64, bytes: usize, stream: Handle) -> c_int {
    let arguments = format_args!("{bytes} {stream:?}");
    driver("cuMemAllocAsync", Need::Context, arguments, |call| {
        if !call.config.pools {
            return Err(codes::NOT_SUPPORTED);
        }
        if bytes == 0 {
            return Err(codes::INVALID_VALUE);
        }
        let (device, name) = (call.device, call.name);
        let id = call.stream_of(stream, device, name)?;
        let made = allocate(call, bytes as u64, device, MemoryKind::Device)?;
        // It exists from this place of the stream on: like a write.
        call.submit(
            id,
            name,
            &[Access::write(made, bytes as u64)],
            StreamWork::Nothing,
        )?;
        // SAFETY: the caller's promise.
        unsafe { put(address, made) }
    })
}

/// `cuMemFreeAsync`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFreeAsync(address: u64, stream: Handle) -> c_int {
    let arguments = format_args!("{address:#x} {stream:?}");
    driver("cuMemFreeAsync", Need::Context, arguments, |call| {
        let (device, name) = (call.device, call.name);
        let id = call.stream_of(stream, device, name)?;
        free_in_stream(call, address, id, name)
    })
}

/// `cuMemGetInfo_v2`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> c_int {
    driver("cuMemGetInfo_v2", Need::Context, format_args!(""), |call| {
        let all = call.config.memory;
        let used = call.memory.used_by(call.device);
        // SAFETY: the caller's promise.
        unsafe {
            put(free, all.saturating_sub(used) as usize)?;
            put(total, all as usize)
        }
    })
}

/// `cuMemHostAlloc`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostAlloc(
    memory: *mut *mut c_void,
    bytes: usize,
    flags: c_uint,
) -> c_int {
    let arguments = format_args!("{bytes} {flags}");
    driver("cuMemHostAlloc", Need::NoCapture, arguments, |call| {
        if bytes == 0 {
            return Err(codes::INVALID_VALUE);
        }
        let device = call.device;
        if call.config.pinning_waits {
            call.wait_until(|state| state.device_is_idle(device));
        }
        let made = allocate(call, bytes as u64, device, MemoryKind::Pinned)?;
        // SAFETY: the caller's promise.
        unsafe { put(memory, made as *mut c_void) }
    })
}

/// `cuMemFreeHost`, which waits for the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFreeHost(memory: *mut c_void) -> c_int {
    driver(
        "cuMemFreeHost",
        Need::NoCapture,
        format_args!("{memory:?}"),
        |call| {
            let device = call.device;
            call.wait_until(|state| state.device_is_idle(device));
            free(call, memory as u64, "cuMemFreeHost", |kind| {
                kind == MemoryKind::Pinned
            })
        },
    )
}

/// `cuMemHostRegister_v2`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostRegister_v2(
    memory: *mut c_void,
    bytes: usize,
    flags: c_uint,
) -> c_int {
    let arguments = format_args!("{memory:?} {bytes} {flags}");
    driver("cuMemHostRegister_v2", Need::NoCapture, arguments, |call| {
        /// `CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED`.
        const ALREADY: i32 = 712;
        let device = call.device;
        let is_new = call.memory.insert(
            memory as u64,
            bytes as u64,
            device,
            MemoryKind::HostRegistered,
        );
        if is_new { Ok(()) } else { Err(ALREADY) }
    })
}

/// `cuMemHostUnregister`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostUnregister(memory: *mut c_void) -> c_int {
    driver(
        "cuMemHostUnregister",
        Need::NoCapture,
        format_args!("{memory:?}"),
        |call| {
            free(call, memory as u64, "cuMemHostUnregister", |kind| {
                kind == MemoryKind::HostRegistered
            })
        },
    )
}

/// `cuPointerGetAttribute`, of what the product asks for.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuPointerGetAttribute(
    value: *mut c_void,
    attribute: c_int,
    address: u64,
) -> c_int {
    let arguments = format_args!("{attribute} {address:#x}");
    driver(
        "cuPointerGetAttribute",
        Need::Initialised,
        arguments,
        |call| {
            let found = call.memory.containing(address);
            let (kind, device) = found
                .map(|a| (a.kind, a.device))
                .ok_or(codes::INVALID_VALUE)?;
            let answer = match attribute {
                2 => 1 + c_int::from(kind.is_on_device()),
                9 => device,
                _ => return Err(codes::INVALID_VALUE),
            };
            // SAFETY: the caller's promise: these two are ints.
            unsafe { put(value.cast::<c_int>(), answer) }
        },
    )
}

/// A plain copy, carried out when its place is reached.
pub(crate) fn copy_work(to: u64, from: u64, bytes: usize) -> StreamWork {
    StreamWork::Local(Box::new(move || {
        // SAFETY: both ranges were checked to be allocated, and are live as the scheduler found just before.
        unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) }
    }))
}

fn check_on_device(call: &mut Call, address: u64) -> CallOutcome {
    let kind = call.memory.containing(address).map(|a| a.kind);
    if kind.is_some_and(|kind| !kind.is_on_device()) {
        let text = format!("{}: {address:#x} is host memory", call.name);
        call.violation("memory", &text);
        return Err(codes::INVALID_VALUE);
    }
    Ok(())
}

/// Whether the driver knows this host memory: then copies of it are asynchronous.
fn is_pinned(call: &Call, address: u64) -> bool {
    let found = call.memory.containing(address);
    found.is_some_and(|a| !a.kind.is_on_device())
}

/// Counts a copy from or to memory that is not pinned, for which the host waits.
fn note_pageable(call: &mut Call) {
    *call.counts.entry("pageable".to_owned()).or_insert(0) += 1;
}

/// `cuMemcpyDtoDAsync_v2`.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: Handle) -> c_int {
    let arguments = format_args!("{to:#x} {from:#x} {bytes} {stream:?}");
    driver("cuMemcpyDtoDAsync_v2", Need::Context, arguments, |call| {
        let (device, name) = (call.device, call.name);
        let id = call.stream_of(stream, device, name)?;
        for address in [to, from] {
            check_on_device(call, address)?;
        }
        // As two parts: the ranges must not overlap.
        let accesses = [
            Access::read(from, bytes as u64),
            Access::write(to, bytes as u64).of_part(1),
        ];
        call.submit(id, name, &accesses, copy_work(to, from, bytes))?;
        Ok(())
    })
}

/// `cuMemcpyHtoDAsync_v2`. Memory that is not pinned is read at once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoDAsync_v2(
    to: u64,
    from: *const c_void,
    bytes: usize,
    stream: Handle,
) -> c_int {
    let arguments = format_args!("{to:#x} {from:?} {bytes} {stream:?}");
    driver("cuMemcpyHtoDAsync_v2", Need::Context, arguments, |call| {
        let (device, name) = (call.device, call.name);
        let id = call.stream_of(stream, device, name)?;
        check_on_device(call, to)?;
        let write = Access::write(to, bytes as u64);
        if is_pinned(call, from as u64) {
            let read = Access::read(from as u64, bytes as u64);
            call.submit(id, name, &[read, write], copy_work(to, from as u64, bytes))?;
        } else {
            note_pageable(call);
            // SAFETY: the caller's promise: `bytes` readable bytes.
            let staged = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), bytes) }.to_vec();
            call.submit(id, name, &[write], write_work(to, staged))?;
        }
        Ok(())
    })
}

/// Bytes that are written when their place is reached.
pub(crate) fn write_work(to: u64, bytes: Vec<u8>) -> StreamWork {
    StreamWork::Local(Box::new(move || {
        // SAFETY: the range was checked to be allocated, and is live as the scheduler found just before.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to as *mut u8, bytes.len()) }
    }))
}

/// `cuMemcpyDtoHAsync_v2`. With memory that is not pinned it returns when the bytes are there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoHAsync_v2(
    to: *mut c_void,
    from: u64,
    bytes: usize,
    stream: Handle,
) -> c_int {
    let arguments = format_args!("{to:?} {from:#x} {bytes} {stream:?}");
    driver("cuMemcpyDtoHAsync_v2", Need::Context, arguments, |call| {
        let (device, name) = (call.device, call.name);
        let id = call.stream_of(stream, device, name)?;
        check_on_device(call, from)?;
        let read = Access::read(from, bytes as u64);
        let work = copy_work(to as u64, from, bytes);
        if is_pinned(call, to as u64) {
            let write = Access::write(to as u64, bytes as u64);
            call.submit(id, name, &[read, write], work)?;
        } else {
            note_pageable(call);
            call.submit(id, name, &[read], work)?;
            synchronize(call, id);
        }
        Ok(())
    })
}

/// `cuMemcpyBatchAsync_v2`: copies between devices' memory, in no order among themselves.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyBatchAsync_v2(
    to: *const u64,
    from: *const u64,
    bytes: *const usize,
    count: usize,
    _attributes: *const c_void,
    _attribute_starts: *const usize,
    _attribute_count: usize,
    stream: Handle,
) -> c_int {
    let arguments = format_args!("{count} {stream:?}");
    driver("cuMemcpyBatchAsync_v2", Need::Context, arguments, |call| {
        let (device, name) = (call.device, call.name);
        let id = call.stream_of(stream, device, name)?;
        // The real one refuses the default stream.
        if (id as i32) < call.config.devices || count == 0 {
            return Err(codes::INVALID_VALUE);
        }
        let copies: Vec<(u64, u64, usize)> = (0..count)
            // SAFETY: the caller's promise: three arrays of `count`.
            .map(|i| unsafe { (*to.add(i), *from.add(i), *bytes.add(i)) })
            .collect();
        let accesses = batch_accesses(&copies);
        call.submit(id, name, &accesses, batch_work(copies))?;
        Ok(())
    })
}

/// Accesses of copies that have no order among themselves.
pub(crate) fn batch_accesses(copies: &[(u64, u64, usize)]) -> Vec<Access> {
    let of = |(i, &(to, from, bytes)): (usize, &(u64, u64, usize))| {
        [
            Access::read(from, bytes as u64).of_part(2 * i),
            Access::write(to, bytes as u64).of_part(2 * i + 1),
        ]
    };
    copies.iter().enumerate().flat_map(of).collect()
}

pub(crate) fn batch_work(copies: Vec<(u64, u64, usize)>) -> StreamWork {
    StreamWork::Local(Box::new(move || {
        for (to, from, bytes) in copies {
            // SAFETY: the ranges were checked, and are live as the scheduler found just before.
            unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) };
        }
    }))
}

/// `cuMemsetD8Async`.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD8Async(to: u64, value: c_uchar, bytes: usize, stream: Handle) -> c_int {
    let arguments = format_args!("{to:#x} {value} {bytes} {stream:?}");
    driver("cuMemsetD8Async", Need::Context, arguments, |call| {
        let (device, name) = (call.device, call.name);
        let id = call.stream_of(stream, device, name)?;
        check_on_device(call, to)?;
        let work = StreamWork::Local(Box::new(move || {
            // SAFETY: the range was checked, and is live as the scheduler found just before.
            unsafe { std::ptr::write_bytes(to as *mut u8, value, bytes) };
        }));
        call.submit(id, name, &[Access::write(to, bytes as u64)], work)?;
        Ok(())
    })
}
