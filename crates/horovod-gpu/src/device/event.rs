//! Events: positions in streams, from a pool per device.

use std::ffi::c_uint;
use std::ptr::null_mut;
use std::sync::{Mutex, PoisonError};

use crate::device::Device;
use crate::device::stream::RawStream;
use crate::driver::{Driver, Handle, NOT_READY, SUCCESS};
use crate::error::GpuError;
use crate::load::check_process;

/// `CU_EVENT_BLOCKING_SYNC`: who waits on the host sleeps.
const BLOCKING_SYNC: c_uint = 1;
/// `CU_EVENT_DISABLE_TIMING`.
const DISABLE_TIMING: c_uint = 2;

/// Whether an event knows when it passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Timing {
    Off,
    On,
}

/// Events of one kind that nobody holds. They are made when none is left, and never destroyed.
#[derive(Debug, Default)]
pub(crate) struct EventPool(Mutex<Vec<RawEvent>>);

#[derive(Clone, Copy, Debug)]
struct RawEvent(Handle);

// SAFETY: a name for something of the driver's, whose functions may be called from any thread.
unsafe impl Send for RawEvent {}
// SAFETY: as above.
unsafe impl Sync for RawEvent {}

/// A position in a stream. Dropped, it goes back to its pool: whoever was told to wait for it still does, for waiting is
/// bound to the position at the time of the call.
#[derive(Debug)]
pub struct Event {
    raw: RawEvent,
    device: &'static Device,
    pool: &'static EventPool,
    timing: Timing,
}

impl Event {
    pub(crate) fn record(
        device: &'static Device,
        pool: &'static EventPool,
        timing: Timing,
        stream: RawStream,
    ) -> Result<Self, GpuError> {
        device.entered(|| {
            let table = &device.driver().table;
            let free = {
                let mut free = pool.0.lock().unwrap_or_else(PoisonError::into_inner);
                free.pop()
            };
            let raw = match free {
                Some(raw) => raw,
                None => RawEvent(create(device.driver(), timing)?),
            };
            let event = Self {
                raw,
                device,
                pool,
                timing,
            };
            // SAFETY: an event of this context, and the caller's stream of it.
            let code = unsafe { (table.event_record)(raw.0, stream.0) };
            device.driver().checked("cuEventRecord", code)?;
            Ok(event)
        })
    }

    /// Whether all work before it is done.
    pub fn has_passed(&self) -> Result<bool, GpuError> {
        self.device.entered_relaxed(|| {
            let driver = self.device.driver();
            // SAFETY: an event that exists.
            let code = unsafe { (driver.table.event_query)(self.raw.0) };
            driver.ready("cuEventQuery", code)
        })
    }

    /// Makes later work of the stream wait for it; does not block.
    pub fn order(&self, stream: RawStream) -> Result<(), GpuError> {
        self.device.entered(|| {
            let driver = self.device.driver();
            // SAFETY: an event that exists, and the caller's stream.
            let code = unsafe { (driver.table.stream_wait_event)(stream.0, self.raw.0, 0) };
            driver.checked("cuStreamWaitEvent", code)
        })
    }

    /// Blocks until it has passed.
    pub fn wait(&self) -> Result<(), GpuError> {
        self.device.entered_relaxed(|| {
            let driver = self.device.driver();
            // SAFETY: an event that exists.
            let code = unsafe { (driver.table.event_synchronize)(self.raw.0) };
            driver.checked("cuEventSynchronize", code)
        })
    }

    /// The device of its stream.
    pub fn device(&self) -> &'static Device {
        self.device
    }

    /// Time between two events that have passed, both of [`Device::record_timed`] on one device, in milliseconds.
    pub fn milliseconds_since(&self, earlier: &Self) -> Result<f32, GpuError> {
        if self.timing == Timing::Off || earlier.timing == Timing::Off {
            return Err(GpuError::Invalid(
                "an event without timing has no time; record it with `record_timed`".to_owned(),
            ));
        }
        self.device.entered(|| {
            let driver = self.device.driver();
            let mut milliseconds = 0.0;
            // SAFETY: two events that exist, and a place for one number.
            let code = unsafe {
                (driver.table.event_elapsed_time)(&raw mut milliseconds, earlier.raw.0, self.raw.0)
            };
            driver.checked("cuEventElapsedTime", code)?;
            Ok(milliseconds)
        })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // The lock may have been held by another thread when this process was forked.
        if check_process().is_ok() {
            let mut free = self.pool.0.lock().unwrap_or_else(PoisonError::into_inner);
            free.push(self.raw);
        }
    }
}

fn create(driver: &Driver, timing: Timing) -> Result<Handle, GpuError> {
    let flags = match timing {
        Timing::Off => BLOCKING_SYNC | DISABLE_TIMING,
        Timing::On => BLOCKING_SYNC,
    };
    let mut event = null_mut();
    // SAFETY: writes one handle; a context is current.
    let code = unsafe { (driver.table.event_create)(&raw mut event, flags) };
    driver.checked("cuEventCreate", code)?;
    Ok(event)
}

impl Driver {
    /// The answer of a query: done, not yet, or an error of earlier work.
    pub(crate) fn ready(&self, call: &'static str, code: i32) -> Result<bool, GpuError> {
        match code {
            SUCCESS => Ok(true),
            NOT_READY => Ok(false),
            _ => Err(self.error(call, code)),
        }
    }
}
