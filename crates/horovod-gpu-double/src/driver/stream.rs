//! Streams and events.

use std::ffi::{c_int, c_uint, c_void};

use crate::call::{Call, Need, driver, put};
use crate::codes;
use crate::driver::context::GREATEST_PRIORITY;
use crate::handles::{Handle, Sort, encode};
use crate::state::{DriverState, Limits};
use crate::stream::{EVENT_DISABLE_TIMING, Event, Stream, StreamWork};

/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: c_uint = 1;
/// Flags of events that there are.
const EVENT_FLAGS: c_uint = 7;

impl DriverState {
    pub(crate) fn create_stream(
        &mut self,
        device: i32,
        is_blocking: bool,
        priority: i32,
    ) -> Handle {
        let (agent, id) = (self.new_agent(), self.new_id());
        let stream = Stream::new(agent, device, is_blocking, priority);
        self.streams.insert(id, stream);
        encode(Sort::Stream, id)
    }
}

/// `cuStreamCreate`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreate(stream: *mut Handle, flags: c_uint) -> c_int {
    driver(
        "cuStreamCreate",
        Need::Context,
        format_args!("{flags}"),
        |call| {
            let device = call.device;
            let made = call.create_stream(device, flags & NON_BLOCKING == 0, 0);
            // SAFETY: the caller's promise.
            unsafe { put(stream, made) }
        },
    )
}

/// `cuStreamCreateWithPriority`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreateWithPriority(
    stream: *mut Handle,
    flags: c_uint,
    priority: c_int,
) -> c_int {
    let arguments = format_args!("{flags} {priority}");
    driver(
        "cuStreamCreateWithPriority",
        Need::Context,
        arguments,
        |call| {
            if flags > NON_BLOCKING {
                return Err(codes::INVALID_VALUE);
            }
            // Numbers beyond the range are moved into it, as the real one does.
            let priority = priority.clamp(GREATEST_PRIORITY, 0);
            let device = call.device;
            let made = call.create_stream(device, flags & NON_BLOCKING == 0, priority);
            // SAFETY: the caller's promise.
            unsafe { put(stream, made) }
        },
    )
}

/// `cuStreamGetPriority`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamGetPriority(stream: Handle, priority: *mut c_int) -> c_int {
    driver(
        "cuStreamGetPriority",
        Need::Context,
        format_args!("{stream:?}"),
        |call| {
            let id = find(call, stream)?;
            let found = call.streams.get(&id).map_or(0, |stream| stream.priority);
            // SAFETY: the caller's promise.
            unsafe { put(priority, found) }
        },
    )
}

/// `cuStreamDestroy_v2`: what it holds still runs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamDestroy_v2(stream: Handle) -> c_int {
    driver(
        "cuStreamDestroy_v2",
        Need::Context,
        format_args!("{stream:?}"),
        |call| {
            let id = find(call, stream)?;
            let Some(found) = call.streams.get_mut(&id) else {
                return Err(codes::INVALID_HANDLE);
            };
            if found.is_default {
                return Err(codes::INVALID_HANDLE);
            }
            found.is_destroyed = true;
            if found.is_idle() {
                call.streams.remove(&id);
            }
            Ok(())
        },
    )
}

fn find(call: &mut Call, stream: Handle) -> Result<u64, i32> {
    let (device, name) = (call.device, call.name);
    call.stream_of(stream, device, name)
}

/// Fails where `stream` is being captured, for what a capture does not allow, and invalidates the capture.
fn not_captured(call: &mut Call, id: u64) -> Result<(), i32> {
    let name = call.name;
    if let Some(capture) = call.streams.get_mut(&id).and_then(|s| s.capture.as_mut()) {
        capture.is_invalid = true;
        call.violation("capture", &format!("{name} of a stream that is captured"));
        return Err(codes::CAPTURE_UNSUPPORTED);
    }
    Ok(())
}

/// `cuStreamQuery`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamQuery(stream: Handle) -> c_int {
    driver(
        "cuStreamQuery",
        Need::NoCapture,
        format_args!("{stream:?}"),
        |call| {
            let id = find(call, stream)?;
            not_captured(call, id)?;
            let Some(found) = call.streams.get(&id) else {
                return Err(codes::INVALID_HANDLE);
            };
            if !found.is_idle() {
                return Err(codes::NOT_READY);
            }
            let clock = found.clock.clone();
            call.host_learns(&clock);
            Ok(())
        },
    )
}

/// `cuStreamSynchronize`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamSynchronize(stream: Handle) -> c_int {
    driver(
        "cuStreamSynchronize",
        Need::NoCapture,
        format_args!("{stream:?}"),
        |call| {
            let id = find(call, stream)?;
            not_captured(call, id)?;
            synchronize(call, id);
            Ok(())
        },
    )
}

/// The host waits for what the stream holds now.
pub(crate) fn synchronize(call: &mut crate::state::Locked, id: u64) {
    let Some(stream) = call.streams.get(&id) else {
        return;
    };
    let (place, clock) = ((id, stream.submitted), stream.clock.clone());
    call.wait_until(|state| state.has_passed(place));
    call.host_learns(&clock);
}

/// `cuStreamWaitEvent`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamWaitEvent(stream: Handle, event: Handle, flags: c_uint) -> c_int {
    let arguments = format_args!("{stream:?} {event:?} {flags}");
    driver("cuStreamWaitEvent", Need::Context, arguments, |call| {
        let name = call.name;
        let id = find(call, stream)?;
        let event = call.event_of(event, name)?;
        let Some(event) = call.events.get(&event) else {
            return Err(codes::INVALID_HANDLE);
        };
        let is_capturing = call.streams.get(&id).is_some_and(|s| s.capture.is_some());
        if event.is_captured != is_capturing {
            let text = "a stream waits for an event across the border of a capture";
            call.violation("capture", text);
            return Err(codes::CAPTURE_ISOLATION);
        }
        // One that was never recorded holds nobody up.
        let after: Vec<_> = event.recorded.clone().into_iter().collect();
        call.submit_within(id, name, &[], StreamWork::Nothing, Limits::After(&after))?;
        Ok(())
    })
}

/// `cuStreamIsCapturing`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamIsCapturing(stream: Handle, status: *mut c_int) -> c_int {
    driver(
        "cuStreamIsCapturing",
        Need::Context,
        format_args!("{stream:?}"),
        |call| {
            let id = find(call, stream)?;
            let capture = call.streams.get(&id).and_then(|s| s.capture);
            let found = capture.map_or(0, |c| if c.is_invalid { 2 } else { 1 });
            // SAFETY: the caller's promise.
            unsafe { put(status, found) }
        },
    )
}

/// `cuStreamGetCtx`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamGetCtx(stream: Handle, context: *mut Handle) -> c_int {
    driver(
        "cuStreamGetCtx",
        Need::Initialised,
        format_args!("{stream:?}"),
        |call| {
            let id = find(call, stream)?;
            let device = call.streams.get(&id).map_or(call.device, |s| s.device);
            // SAFETY: the caller's promise.
            unsafe { put(context, encode(Sort::Context, device as u64)) }
        },
    )
}

/// `cuLaunchHostFunc`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLaunchHostFunc(
    stream: Handle,
    function: Option<extern "C" fn(*mut c_void)>,
    argument: *mut c_void,
) -> c_int {
    driver(
        "cuLaunchHostFunc",
        Need::Context,
        format_args!("{stream:?}"),
        |call| {
            let name = call.name;
            let id = find(call, stream)?;
            let function = function.ok_or(codes::INVALID_VALUE)?;
            let work = StreamWork::HostFunction(function, argument as usize);
            call.submit(id, name, &[], work)?;
            Ok(())
        },
    )
}

/// `cuEventCreate`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventCreate(event: *mut Handle, flags: c_uint) -> c_int {
    driver(
        "cuEventCreate",
        Need::Context,
        format_args!("{flags}"),
        |call| {
            if flags > EVENT_FLAGS {
                return Err(codes::INVALID_VALUE);
            }
            let id = call.new_id();
            let device = call.device;
            call.events.insert(
                id,
                Event {
                    device,
                    flags,
                    recorded: None,
                    reached: None,
                    is_captured: false,
                },
            );
            // SAFETY: the caller's promise.
            unsafe { put(event, encode(Sort::Event, id)) }
        },
    )
}

/// `cuEventDestroy_v2`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventDestroy_v2(event: Handle) -> c_int {
    driver(
        "cuEventDestroy_v2",
        Need::Context,
        format_args!("{event:?}"),
        |call| {
            let name = call.name;
            let id = call.event_of(event, name)?;
            call.events.remove(&id);
            Ok(())
        },
    )
}

/// `cuEventRecord`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventRecord(event: Handle, stream: Handle) -> c_int {
    let arguments = format_args!("{event:?} {stream:?}");
    driver("cuEventRecord", Need::Context, arguments, |call| {
        let name = call.name;
        let stream = find(call, stream)?;
        let event = call.event_of(event, name)?;
        let device = call.streams.get(&stream).map(|s| s.device);
        if call.events.get(&event).map(|e| e.device) != device {
            call.violation(
                "invalid handle",
                "an event of one device in a stream of another",
            );
            return Err(codes::INVALID_HANDLE);
        }
        let place = call.submit(stream, name, &[], StreamWork::Record(event))?;
        let found = call.streams.get(&stream);
        let is_captured = found.is_some_and(|s| s.capture.is_some());
        let clock = found.map(|s| s.clock.clone()).unwrap_or_default();
        if let Some(event) = call.events.get_mut(&event) {
            event.is_captured = is_captured;
            event.recorded = (!is_captured).then_some((place, clock));
            event.reached = None;
        }
        Ok(())
    })
}

/// `cuEventQuery`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventQuery(event: Handle) -> c_int {
    driver(
        "cuEventQuery",
        Need::NoCapture,
        format_args!("{event:?}"),
        |call| {
            let Some((place, clock)) = recorded(call, event)? else {
                return Ok(());
            };
            if !call.has_passed(place) {
                return Err(codes::NOT_READY);
            }
            call.host_learns(&clock);
            Ok(())
        },
    )
}

/// `cuEventSynchronize`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventSynchronize(event: Handle) -> c_int {
    driver(
        "cuEventSynchronize",
        Need::NoCapture,
        format_args!("{event:?}"),
        |call| {
            let Some((place, clock)) = recorded(call, event)? else {
                return Ok(());
            };
            call.wait_until(|state| state.has_passed(place));
            call.host_learns(&clock);
            Ok(())
        },
    )
}

type Recorded = Option<(crate::stream::Position, crate::clock::Clock)>;

/// Where an event was recorded.
fn recorded(call: &mut Call, event: Handle) -> Result<Recorded, i32> {
    let name = call.name;
    let id = call.event_of(event, name)?;
    let Some(event) = call.events.get(&id) else {
        return Err(codes::INVALID_HANDLE);
    };
    if event.is_captured {
        call.violation(
            "capture",
            &format!("{name} of an event recorded in a capture"),
        );
        return Err(codes::CAPTURED_EVENT);
    }
    Ok(event.recorded.clone())
}

/// `cuEventElapsedTime`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventElapsedTime(
    milliseconds: *mut f32,
    start: Handle,
    end: Handle,
) -> c_int {
    let arguments = format_args!("{start:?} {end:?}");
    driver("cuEventElapsedTime", Need::Context, arguments, |call| {
        let name = call.name;
        let mut times = [None; 2];
        for (time, event) in times.iter_mut().zip([start, end]) {
            let id = call.event_of(event, name)?;
            let Some(event) = call.events.get(&id) else {
                return Err(codes::INVALID_HANDLE);
            };
            let is_recorded = event.recorded.is_some();
            if event.flags & EVENT_DISABLE_TIMING != 0 || !is_recorded {
                return Err(codes::INVALID_HANDLE);
            }
            *time = event.reached;
        }
        let [Some(start), Some(end)] = times else {
            return Err(codes::NOT_READY);
        };
        let between = match end.checked_duration_since(start) {
            Some(after) => after.as_secs_f32(),
            None => -(start - end).as_secs_f32(),
        };
        // SAFETY: the caller's promise.
        unsafe { put(milliseconds, between * 1000.0) }
    })
}
