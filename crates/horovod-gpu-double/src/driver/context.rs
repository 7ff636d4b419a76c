//! Initialisation, devices, contexts, texts of errors.

use std::ffi::{c_char, c_int, c_uint};

use crate::call::{self, Call, CallOutcome, Need, driver, put};
use crate::codes;
use crate::handles::{Handle, Sort, decode, encode};
use crate::scheduler;
use crate::thread;

/// `cuInit`.
#[unsafe(no_mangle)]
pub extern "C" fn cuInit(flags: c_uint) -> c_int {
    if call::is_forked() {
        return codes::NOT_INITIALIZED;
    }
    driver("cuInit", Need::Nothing, format_args!("{flags}"), |call| {
        if call.config.init != 0 {
            return Err(call.config.init);
        }
        call::note_initialised();
        scheduler::start();
        Ok(())
    })
}

/// `cuDriverGetVersion`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> c_int {
    driver(
        "cuDriverGetVersion",
        Need::Nothing,
        format_args!(""),
        |call| {
            // SAFETY: the caller's promise.
            unsafe { put(version, call.config.driver_version) }
        },
    )
}

/// `cuGetErrorName`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(code: c_int, name: *mut *const c_char) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { error_text(code, name, |(name, _)| name) }
}

/// `cuGetErrorString`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(code: c_int, text: *mut *const c_char) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { error_text(code, text, |(_, text)| text) }
}

type Text = &'static std::ffi::CStr;

/// # Safety
/// As of `cuGetErrorName`.
unsafe fn error_text(code: c_int, to: *mut *const c_char, of: fn((Text, Text)) -> Text) -> c_int {
    let found = codes::texts(code).map_or(std::ptr::null(), |texts| of(texts).as_ptr());
    // SAFETY: the caller's promise.
    match unsafe { put(to, found) } {
        Ok(()) if !found.is_null() => codes::SUCCESS,
        _ => codes::INVALID_VALUE,
    }
}

/// `cuDeviceGetCount`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> c_int {
    driver(
        "cuDeviceGetCount",
        Need::Initialised,
        format_args!(""),
        |call| {
            // SAFETY: the caller's promise.
            unsafe { put(count, call.config.devices) }
        },
    )
}

fn check_device(call: &Call, device: c_int) -> CallOutcome {
    if (0..call.config.devices).contains(&device) {
        Ok(())
    } else {
        Err(codes::INVALID_DEVICE)
    }
}

/// `cuDeviceGet`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> c_int {
    driver(
        "cuDeviceGet",
        Need::Initialised,
        format_args!("{ordinal}"),
        |call| {
            check_device(call, ordinal)?;
            // SAFETY: the caller's promise.
            unsafe { put(device, ordinal) }
        },
    )
}

/// `cuDeviceGetAttribute`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetAttribute(
    value: *mut c_int,
    attribute: c_int,
    device: c_int,
) -> c_int {
    let arguments = format_args!("{attribute} {device}");
    driver(
        "cuDeviceGetAttribute",
        Need::Initialised,
        arguments,
        |call| {
            check_device(call, device)?;
            let found = match attribute {
                // Threads of a block; of a warp; multiprocessors; a bus address for each device.
                1 => 1024,
                10 => 32,
                16 => 132,
                33 => device + 1,
                34 | 50 => 0,
                // Unified addresses; compute capability; virtual memory; pools; multicast.
                41 | 102 => 1,
                75 => call.config.compute_capability / 10,
                76 => call.config.compute_capability % 10,
                115 => c_int::from(call.config.pools),
                132 => 0,
                _ => return Err(codes::INVALID_VALUE),
            };
            // SAFETY: the caller's promise.
            unsafe { put(value, found) }
        },
    )
}

/// `cuDeviceGetName`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, length: c_int, device: c_int) -> c_int {
    driver(
        "cuDeviceGetName",
        Need::Initialised,
        format_args!("{device}"),
        |call| {
            check_device(call, device)?;
            if name.is_null() || length < 1 {
                return Err(codes::INVALID_VALUE);
            }
            let text = b"Double of a GPU";
            let shown = text.len().min(length as usize - 1);
            // SAFETY: the caller's promise: `length` bytes.
            unsafe {
                std::ptr::copy_nonoverlapping(text.as_ptr(), name.cast(), shown);
                name.add(shown).write(0);
            }
            Ok(())
        },
    )
}

/// `cuDeviceTotalMem_v2`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) -> c_int {
    driver(
        "cuDeviceTotalMem_v2",
        Need::Initialised,
        format_args!("{device}"),
        |call| {
            check_device(call, device)?;
            // SAFETY: the caller's promise.
            unsafe { put(bytes, call.config.memory as usize) }
        },
    )
}

/// `cuDeviceGetUuid_v2`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) -> c_int {
    driver(
        "cuDeviceGetUuid_v2",
        Need::Initialised,
        format_args!("{device}"),
        |call| {
            check_device(call, device)?;
            // SAFETY: the caller's promise.
            unsafe { put(uuid, call.config.uuid_of(device)) }
        },
    )
}

/// `cuDeviceGetUuid`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetUuid(uuid: *mut [u8; 16], device: c_int) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { cuDeviceGetUuid_v2(uuid, device) }
}

/// `cuDevicePrimaryCtxRetain`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut Handle, device: c_int) -> c_int {
    driver(
        "cuDevicePrimaryCtxRetain",
        Need::Initialised,
        format_args!("{device}"),
        |call| {
            check_device(call, device)?;
            call.contexts[device as usize] += 1;
            // SAFETY: the caller's promise.
            unsafe { put(context, encode(Sort::Context, device as u64)) }
        },
    )
}

/// `cuDevicePrimaryCtxRelease_v2`.
#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> c_int {
    let arguments = format_args!("{device}");
    driver(
        "cuDevicePrimaryCtxRelease_v2",
        Need::Initialised,
        arguments,
        |call| {
            check_device(call, device)?;
            let count = &mut call.contexts[device as usize];
            *count = count.checked_sub(1).ok_or(codes::INVALID_CONTEXT)?;
            Ok(())
        },
    )
}

/// The device of a context that exists, or none for null.
fn context_device(call: &mut Call, context: Handle) -> Result<Option<i32>, i32> {
    if context.is_null() {
        return Ok(None);
    }
    let device = decode(Sort::Context, context).map(|id| id as i32);
    match device {
        Some(device) if check_device(call, device).is_ok() => {
            if call.contexts[device as usize] == 0 {
                let text = format!("{}: context of device {device}", call.name);
                call.violation("after destroy", &text);
                return Err(codes::INVALID_CONTEXT);
            }
            Ok(Some(device))
        }
        _ => Err(codes::INVALID_CONTEXT),
    }
}

/// `cuCtxGetCurrent`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetCurrent(context: *mut Handle) -> c_int {
    driver(
        "cuCtxGetCurrent",
        Need::Initialised,
        format_args!(""),
        |_| {
            let current = thread::context().map_or(std::ptr::null_mut(), |device| {
                encode(Sort::Context, device as u64)
            });
            // SAFETY: the caller's promise.
            unsafe { put(context, current) }
        },
    )
}

/// `cuCtxSetCurrent`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxSetCurrent(context: Handle) -> c_int {
    let arguments = format_args!("{context:?}");
    driver("cuCtxSetCurrent", Need::Initialised, arguments, |call| {
        let device = context_device(call, context)?;
        thread::with(|thread| {
            thread.contexts.pop();
            if device.is_some() {
                thread.contexts.push(device);
            }
        });
        Ok(())
    })
}

/// `cuCtxPushCurrent_v2`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxPushCurrent_v2(context: Handle) -> c_int {
    let arguments = format_args!("{context:?}");
    driver(
        "cuCtxPushCurrent_v2",
        Need::Initialised,
        arguments,
        |call| {
            let device = context_device(call, context)?.ok_or(codes::INVALID_CONTEXT)?;
            thread::with(|thread| thread.contexts.push(Some(device)));
            Ok(())
        },
    )
}

/// `cuCtxPopCurrent_v2`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxPopCurrent_v2(context: *mut Handle) -> c_int {
    driver(
        "cuCtxPopCurrent_v2",
        Need::Initialised,
        format_args!(""),
        |_| {
            let popped = thread::with(|thread| thread.contexts.pop()).flatten();
            let device = popped.ok_or(codes::INVALID_CONTEXT)?;
            if !context.is_null() {
                // SAFETY: not null; the caller's promise.
                unsafe { context.write(encode(Sort::Context, device as u64)) };
            }
            Ok(())
        },
    )
}

/// `cuCtxGetDevice`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetDevice(device: *mut c_int) -> c_int {
    driver("cuCtxGetDevice", Need::Context, format_args!(""), |call| {
        // SAFETY: the caller's promise.
        unsafe { put(device, call.device) }
    })
}

/// `cuCtxGetStreamPriorityRange`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetStreamPriorityRange(
    least: *mut c_int,
    greatest: *mut c_int,
) -> c_int {
    driver(
        "cuCtxGetStreamPriorityRange",
        Need::Context,
        format_args!(""),
        |_| {
            for (to, value) in [(least, 0), (greatest, GREATEST_PRIORITY)] {
                if !to.is_null() {
                    // SAFETY: not null; the caller's promise.
                    unsafe { to.write(value) };
                }
            }
            Ok(())
        },
    )
}

/// The greatest priority is the smallest number.
pub(crate) const GREATEST_PRIORITY: c_int = -5;

/// `cuCtxSynchronize`.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSynchronize() -> c_int {
    driver(
        "cuCtxSynchronize",
        Need::NoCapture,
        format_args!(""),
        |call| {
            let device = call.device;
            call.wait_until(|state| state.device_is_idle(device));
            let clocks: Vec<_> = call
                .streams
                .values()
                .filter(|s| s.device == device)
                .map(|s| s.clock.clone())
                .collect();
            for clock in clocks {
                call.host_learns(&clock);
            }
            Ok(())
        },
    )
}

/// `cuThreadExchangeStreamCaptureMode`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuThreadExchangeStreamCaptureMode(mode: *mut c_int) -> c_int {
    let name = "cuThreadExchangeStreamCaptureMode";
    driver(name, Need::Initialised, format_args!(""), |_| {
        if mode.is_null() {
            return Err(codes::INVALID_VALUE);
        }
        // SAFETY: not null; the caller's promise.
        let new = unsafe { mode.read() };
        if !(0..=2).contains(&new) {
            return Err(codes::INVALID_VALUE);
        }
        let old = thread::with(|thread| std::mem::replace(&mut thread.capture_mode, new));
        // SAFETY: as above.
        unsafe { put(mode, old) }
    })
}
