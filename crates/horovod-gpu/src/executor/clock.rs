//! The clock of a device, read by events and told in the host's time: when timed work really ran.
//!
//! CUDA tells the time between two events. One of them is a *reference*, in a stream of its own that is empty, so that it
//! passes as soon as it is recorded: the host sees that some microseconds later. So what is told is never before it
//! happened, and little after.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::device::Device;
use crate::device::event::Event;
use crate::device::stream::Stream;
use crate::error::GpuError;

/// How long a reference is used: the two clocks drift apart, and CUDA counts in single precision, which after 16 s is
/// 1 us.
const RENEW_AFTER: Duration = Duration::from_secs(10);
/// How long its event may take to pass: then something else keeps the device from it.
const PASS_TIMEOUT: Duration = Duration::from_millis(100);
/// References made at a time, of which the most exact is taken, and how exact is enough.
const SAMPLES: usize = 3;
const EXACT: Duration = Duration::from_micros(20);

/// Where device and host met.
struct Reference {
    event: Event,
    /// When the host saw that it had passed.
    at: Instant,
    /// It passed at most so long before.
    width: Duration,
}

/// State of the conversion from the device's clock to the host's.
#[derive(Default)]
pub(super) struct DeviceClock {
    stream: Option<Stream>,
    reference: Option<Arc<Reference>>,
    renewed: Option<Instant>,
}

/// Timed work that the device has yet to end.
pub(super) struct Timed {
    reference: Arc<Reference>,
    begin: Event,
}

impl DeviceClock {
    /// Mark where work begins in the stream. `None`: its times cannot be told, which is no reason for it to fail.
    pub(super) fn begin(&mut self, device: &'static Device, stream: &Stream) -> Option<Timed> {
        let marked = self.reference(device).and_then(|reference| {
            let Some(reference) = reference else {
                return Ok(None);
            };
            let begin = device.record_timed(stream.raw())?;
            Ok(Some(Timed { reference, begin }))
        });
        marked.unwrap_or_else(|error| {
            tracing::debug!("the times of GPU operations are not known: {error}");
            None
        })
    }

    fn reference(&mut self, device: &'static Device) -> Result<Option<Arc<Reference>>, GpuError> {
        if self
            .renewed
            .is_none_or(|renewed| renewed.elapsed() >= RENEW_AFTER)
        {
            self.renewed = Some(Instant::now());
            self.reference = None;
            let stream = match self.stream.take() {
                Some(stream) => stream,
                None => device.create_stream()?,
            };
            self.reference = refer(device, &stream)?.map(Arc::new);
            self.stream = Some(stream);
        }
        Ok(self.reference.clone())
    }
}

/// The most exact of some references.
fn refer(device: &'static Device, stream: &Stream) -> Result<Option<Reference>, GpuError> {
    let mut best: Option<Reference> = None;
    let deadline = Instant::now() + PASS_TIMEOUT;
    for _ in 0..SAMPLES {
        let before = Instant::now();
        let event = device.record_timed(stream.raw())?;
        while !event.has_passed()? {
            if Instant::now() >= deadline {
                return Ok(best);
            }
            std::thread::yield_now();
        }
        let at = Instant::now();
        let width = at - before;
        if best.as_ref().is_none_or(|best| width < best.width) {
            best = Some(Reference { event, at, width });
        }
        if width <= EXACT {
            break;
        }
    }
    Ok(best)
}

impl Timed {
    /// When it began and ended, by the host's clock; its end has passed.
    pub(super) fn until(&self, end: &Event) -> Option<(Instant, Instant)> {
        let at = |event: &Event| {
            let milliseconds = event.milliseconds_since(&self.reference.event)?;
            let since = Duration::try_from_secs_f64(f64::from(milliseconds) / 1e3);
            Ok::<_, GpuError>(self.reference.at + since.unwrap_or_default())
        };
        match (at(&self.begin), at(end)) {
            (Ok(begin), Ok(end)) => {
                let end = end.min(Instant::now());
                Some((begin.min(end), end))
            }
            (Err(error), _) | (_, Err(error)) => {
                tracing::debug!("the times of a GPU operation are not known: {error}");
                None
            }
        }
    }
}
