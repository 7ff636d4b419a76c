//! Communicators and groups.
#![expect(
    clippy::missing_safety_doc,
    reason = "the contracts are NCCL's: pointers are valid for what the call reads or writes"
)]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::net::{Ipv4Addr, SocketAddrV4};

use super::calls::{error_text, nccl};
use super::collectives::note_in_group;
use super::communicator::connect;
use super::hub;
use super::reduction::dtype_of;
use super::wire::{Magic, Message};
use super::{IN_PROGRESS, INVALID_ARGUMENT, INVALID_USAGE, SYSTEM_ERROR};
use crate::call::{Call, CallOutcome, put};
use crate::handles::{Handle, Sort, encode};
use crate::state::lock;
use crate::thread;

/// `ncclUniqueId`: a magic number, then the root's address.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UniqueId(pub [u8; 128]);

impl UniqueId {
    fn new(magic: Magic, address: SocketAddrV4) -> Self {
        let mut bytes = [0; 128];
        bytes[..8].copy_from_slice(&magic);
        // A `sockaddr_in`.
        bytes[8..10].copy_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
        bytes[10..12].copy_from_slice(&address.port().to_be_bytes());
        bytes[12..16].copy_from_slice(&address.ip().octets());
        Self(bytes)
    }

    fn read(&self) -> Option<(Magic, SocketAddrV4)> {
        let magic = *self.0.first_chunk()?;
        let family = u16::from_ne_bytes([self.0[8], self.0[9]]);
        let port = u16::from_be_bytes([self.0[10], self.0[11]]);
        let ip = Ipv4Addr::new(self.0[12], self.0[13], self.0[14], self.0[15]);
        let is_sound = i32::from(family) == libc::AF_INET && port != 0;
        is_sound.then(|| (magic, SocketAddrV4::new(ip, port)))
    }
}

/// The fields of `ncclConfig_t` that the double looks at, at their offsets.
#[derive(Clone, Copy, Debug)]
struct Settings {
    blocking: Option<c_int>,
}

/// `NCCL_CONFIG_UNDEF_INT`.
const UNDEFINED: c_int = c_int::MIN;
const CONFIG_MAGIC: u32 = 0xcafe_beef;
/// Bytes of the structure as it came, with version 2.14.
const CONFIG_BYTES_MIN: usize = 24;

impl Settings {
    /// # Safety
    /// `config` is null or points to as many bytes as its first field says.
    unsafe fn read(config: *const c_void) -> Result<Self, i32> {
        if config.is_null() {
            return Ok(Self { blocking: None });
        }
        let bytes = config.cast::<u8>();
        // SAFETY: the caller's promise; every one has these fields.
        let (size, magic, version) = unsafe {
            (
                bytes.cast::<usize>().read_unaligned(),
                bytes.add(8).cast::<u32>().read_unaligned(),
                bytes.add(12).cast::<u32>().read_unaligned(),
            )
        };
        if magic != CONFIG_MAGIC || size < CONFIG_BYTES_MIN {
            return Err(INVALID_ARGUMENT);
        }
        let field = |offset: usize, since: u32| {
            if offset + 4 > size || version < since {
                return None;
            }
            // SAFETY: the field lies within the size that the structure says.
            let value = unsafe { bytes.add(offset).cast::<c_int>().read_unaligned() };
            (value != UNDEFINED).then_some(value)
        };
        let blocking = field(16, 21400);
        let (least, most) = (field(24, 21700), field(28, 21700));
        let are_sound = blocking.is_none_or(|v| v == 0 || v == 1)
            && least.is_none_or(|v| v > 0)
            && most.is_none_or(|v| v > 0)
            && !matches!((least, most), (Some(least), Some(most)) if least > most);
        if are_sound {
            Ok(Self { blocking })
        } else {
            Err(INVALID_ARGUMENT)
        }
    }
}

/// `ncclGetVersion`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetVersion(version: *mut c_int) -> c_int {
    nccl("ncclGetVersion", 0, format_args!(""), |call| {
        // SAFETY: the caller's promise.
        unsafe { put(version, call.config.nccl_version) }.map_err(|_| INVALID_ARGUMENT)
    })
}

/// `ncclGetErrorString`.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetErrorString(code: c_int) -> *const c_char {
    error_text(code).as_ptr()
}

/// `ncclGetLastError`: the text stays valid until the thread asks again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetLastError(communicator: Handle) -> *const c_char {
    thread_local! {
        static TEXT: std::cell::RefCell<CString> = std::cell::RefCell::default();
    }
    let state = lock();
    let id = crate::handles::decode(Sort::Communicator, communicator);
    let own = id.and_then(|id| state.communicators.get(&id));
    let own = own.map(|c| c.last_error.clone()).filter(|t| !t.is_empty());
    let text = own.unwrap_or_else(|| state.last_error.clone());
    drop(state);
    TEXT.with(|kept| {
        *kept.borrow_mut() = CString::new(text).unwrap_or_default();
        kept.borrow().as_ptr()
    })
}

/// `ncclGetUniqueId`: this process is the root.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetUniqueId(id: *mut UniqueId) -> c_int {
    nccl("ncclGetUniqueId", 0, format_args!(""), |_| {
        let (magic, address) = hub::open().map_err(|_| SYSTEM_ERROR)?;
        // SAFETY: the caller's promise.
        unsafe { put(id, UniqueId::new(magic, address)) }.map_err(|_| INVALID_ARGUMENT)
    })
}

/// # Safety
/// As of `ncclCommInitRankConfig`.
unsafe fn init(
    call: &mut Call,
    communicator: *mut Handle,
    size: c_int,
    id: &UniqueId,
    rank: c_int,
    config: *const c_void,
) -> CallOutcome {
    if communicator.is_null() || size < 1 || !(0..size).contains(&rank) {
        return Err(INVALID_ARGUMENT);
    }
    // SAFETY: the caller's promise.
    let settings = unsafe { Settings::read(config) }?;
    let (magic, address) = id.read().ok_or(INVALID_ARGUMENT)?;
    let is_blocking = settings.blocking != Some(0);
    let new = call.new_communicator(size, rank, is_blocking, address)?;
    connect(&mut call.state, new, address, magic);
    // SAFETY: not null; the caller's promise.
    unsafe { communicator.write(encode(Sort::Communicator, new)) };
    call.begun(new)
}

/// `ncclCommInitRank`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRank(
    communicator: *mut Handle,
    size: c_int,
    id: UniqueId,
    rank: c_int,
) -> c_int {
    let arguments = format_args!("{size} {rank}");
    let code = nccl("ncclCommInitRank", 0, arguments, |call| {
        // SAFETY: the caller's promise.
        unsafe { init(call, communicator, size, &id, rank, std::ptr::null()) }
    });
    note_in_group(code)
}

/// `ncclCommInitRankConfig`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRankConfig(
    communicator: *mut Handle,
    size: c_int,
    id: UniqueId,
    rank: c_int,
    config: *const c_void,
) -> c_int {
    let arguments = format_args!("{size} {rank}");
    let code = nccl("ncclCommInitRankConfig", 21400, arguments, |call| {
        // SAFETY: the caller's promise.
        unsafe { init(call, communicator, size, &id, rank, config) }
    });
    note_in_group(code)
}

/// `ncclCommInitRankScalable`: all meet at the first id.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRankScalable(
    communicator: *mut Handle,
    size: c_int,
    rank: c_int,
    ids: c_int,
    id: *const UniqueId,
    config: *const c_void,
) -> c_int {
    let arguments = format_args!("{size} {rank} {ids}");
    let code = nccl("ncclCommInitRankScalable", 22300, arguments, |call| {
        if id.is_null() || ids < 1 {
            return Err(INVALID_ARGUMENT);
        }
        // SAFETY: not null; the caller's promise.
        unsafe { init(call, communicator, size, &*id, rank, config) }
    });
    note_in_group(code)
}

/// `ncclCommSplit`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommSplit(
    communicator: Handle,
    color: c_int,
    key: c_int,
    new: *mut Handle,
    config: *const c_void,
) -> c_int {
    let arguments = format_args!("{communicator:?} {color} {key}");
    nccl("ncclCommSplit", 21800, arguments, |call| {
        let id = call.own_communicator(communicator)?;
        // SAFETY: the caller's promise.
        let settings = unsafe { Settings::read(config) }?;
        if new.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        let Some(parent) = call.communicators.get(&id) else {
            return Err(INVALID_ARGUMENT);
        };
        let is_blocking = settings.blocking.map_or(parent.is_blocking, |v| v == 1);
        let has_launches = parent.has_launches();
        if has_launches {
            call.violation(
                "split",
                "the communicator that is split has work outstanding",
            );
        }
        let made = if color >= 0 {
            // Its place is known when all have asked.
            let nowhere = SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 0);
            Some(call.new_communicator(0, 0, is_blocking, nowhere)?)
        } else {
            None
        };
        if let Some(parent) = call.communicators.get_mut(&id) {
            parent.next_split += 1;
            let number = parent.next_split;
            if let Some(made) = made {
                parent.splits.insert(number, made);
            }
            parent.send(Message::Split { number, color, key });
        }
        let handle = made.map_or(std::ptr::null_mut(), |id| encode(Sort::Communicator, id));
        // SAFETY: not null; the caller's promise.
        unsafe { new.write(handle) };
        made.map_or(Ok(()), |made| call.begun(made))
    })
}

/// `ncclCommFinalize`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommFinalize(communicator: Handle) -> c_int {
    nccl(
        "ncclCommFinalize",
        21400,
        format_args!("{communicator:?}"),
        |call| {
            if communicator.is_null() {
                return Ok(());
            }
            let id = call.own_communicator(communicator)?;
            call.finalize(id);
            match call.settle(id) {
                0 => Ok(()),
                code => Err(code),
            }
        },
    )
}

/// `ncclCommDestroy`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommDestroy(communicator: Handle) -> c_int {
    nccl(
        "ncclCommDestroy",
        0,
        format_args!("{communicator:?}"),
        |call| {
            if communicator.is_null() {
                return Ok(());
            }
            let id = call.communicator(communicator)?;
            call.note_thread(id, false);
            call.destroy(id);
            Ok(())
        },
    )
}

/// `ncclCommAbort`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommAbort(communicator: Handle) -> c_int {
    nccl(
        "ncclCommAbort",
        0,
        format_args!("{communicator:?}"),
        |call| {
            if communicator.is_null() {
                return Ok(());
            }
            let id = call.communicator(communicator)?;
            call.note_thread(id, false);
            call.abort(id);
            Ok(())
        },
    )
}

/// `ncclCommGetAsyncError`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommGetAsyncError(communicator: Handle, code: *mut c_int) -> c_int {
    nccl(
        "ncclCommGetAsyncError",
        0,
        format_args!("{communicator:?}"),
        |call| {
            let id = call.communicator(communicator)?;
            let found = call.progress(id, true);
            // SAFETY: the caller's promise.
            unsafe { put(code, found) }.map_err(|_| INVALID_ARGUMENT)
        },
    )
}

/// # Safety
/// As of `ncclCommCount`.
unsafe fn number(
    name: &'static str,
    communicator: Handle,
    to: *mut c_int,
    of: fn(&super::communicator::Communicator) -> i32,
) -> c_int {
    nccl(name, 0, format_args!("{communicator:?}"), |call| {
        let id = call.own_communicator(communicator)?;
        let found = call.communicators.get(&id).map_or(-1, of);
        // SAFETY: the caller's promise.
        unsafe { put(to, found) }.map_err(|_| INVALID_ARGUMENT)
    })
}

/// `ncclCommCount`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommCount(communicator: Handle, count: *mut c_int) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { number("ncclCommCount", communicator, count, |c| c.size) }
}

/// `ncclCommUserRank`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommUserRank(communicator: Handle, rank: *mut c_int) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { number("ncclCommUserRank", communicator, rank, |c| c.rank) }
}

/// `ncclCommCuDevice`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommCuDevice(communicator: Handle, device: *mut c_int) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { number("ncclCommCuDevice", communicator, device, |c| c.device) }
}

/// `ncclGroupStart`.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupStart() -> c_int {
    nccl("ncclGroupStart", 0, format_args!(""), |_| {
        thread::with(|thread| thread.group.depth += 1);
        Ok(())
    })
}

/// `ncclGroupEnd`.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupEnd() -> c_int {
    let mut members = Vec::new();
    let code = nccl("ncclGroupEnd", 0, format_args!(""), |call| {
        let depth = thread::with(|thread| {
            thread.group.depth = thread.group.depth.wrapping_sub(1);
            thread.group.depth
        });
        if depth == u32::MAX {
            thread::with(|thread| thread.group.depth = 0);
            call.violation("group", "ncclGroupEnd without ncclGroupStart");
            return Err(INVALID_USAGE);
        }
        if depth > 0 {
            return Ok(());
        }
        let group = thread::with(|thread| std::mem::take(&mut thread.group));
        members = group
            .queued
            .iter()
            .map(|queued| queued.communicator)
            .collect();
        call.end_group(group)
    });
    // A fault that was asked for ends the group as well.
    if !matches!(code, 0 | IN_PROGRESS) {
        let left = thread::with(|thread| std::mem::take(&mut thread.group));
        members.extend(left.queued.iter().map(|queued| queued.communicator));
        if !matches!(code, INVALID_ARGUMENT) {
            let mut state = lock();
            for id in members {
                if let Some(communicator) = state.communicators.get_mut(&id)
                    && communicator.error == 0
                {
                    communicator.error = code;
                }
            }
        }
    }
    code
}

/// `ncclRedOpCreatePreMulSum`. Of scalars only those in host memory (`ncclScalarHostImmediate`).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclRedOpCreatePreMulSum(
    operator: *mut c_int,
    scalar: *const c_void,
    dtype: c_int,
    residence: c_int,
    communicator: Handle,
) -> c_int {
    let arguments = format_args!("{dtype} {residence} {communicator:?}");
    nccl("ncclRedOpCreatePreMulSum", 21100, arguments, |call| {
        let id = call.own_communicator(communicator)?;
        let element = dtype_of(dtype).ok_or(INVALID_ARGUMENT)?;
        if scalar.is_null() || residence != 1 {
            return Err(INVALID_ARGUMENT);
        }
        // SAFETY: not null; the caller's promise: one element.
        let value = unsafe { std::slice::from_raw_parts(scalar.cast::<u8>(), element.size()) };
        let Some(found) = call.communicators.get_mut(&id) else {
            return Err(INVALID_ARGUMENT);
        };
        let made = found.next_operator;
        found.next_operator += 1;
        found.operators.insert(made, (dtype, value.to_vec()));
        // SAFETY: the caller's promise.
        unsafe { put(operator, made) }.map_err(|_| INVALID_ARGUMENT)
    })
}

/// `ncclRedOpDestroy`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclRedOpDestroy(operator: c_int, communicator: Handle) -> c_int {
    let arguments = format_args!("{operator} {communicator:?}");
    nccl("ncclRedOpDestroy", 21100, arguments, |call| {
        let id = call.own_communicator(communicator)?;
        let found = call.communicators.get_mut(&id);
        let removed = found.and_then(|c| c.operators.remove(&operator));
        removed.map(|_| ()).ok_or(INVALID_ARGUMENT)
    })
}

/// The text of a C string, for tests.
///
/// # Safety
/// `text` is a C string.
pub unsafe fn text_of(text: *const c_char) -> String {
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned()
}
