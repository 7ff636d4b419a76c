//! Devices other than the host, behind one interface: everything that depends on where a tensor lies.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use horovod_diagnosis::DeviceStanding;
use horovod_protocol::Device;

use super::backend::{Backend, Surroundings};
use crate::error::Error;
use crate::tensor::{Output, Tensor};

/// One kind of device on which tensors may lie. All threads share the accelerator; its [`Backend`] belongs to the
/// driver.
///
/// Any thread claims the tensors of its submission here. The members of a process set then agree once how they use
/// their devices. Each execution takes the route that follows from the agreement: it is launched on the device, goes
/// through host memory, or is refused. [`InFlight::failing`] reports a lost device.
///
/// [`InFlight::failing`]: super::backend::InFlight::failing
pub trait Accelerator: Send + Sync {
    /// Returns the kind of device, on which all ranks agree for each operation.
    fn kind(&self) -> Device;

    /// Checks tensors of one submission, all of this kind, and reserves the device on which they lie. Any thread calls
    /// this, before the operation is announced.
    ///
    /// # Errors
    /// The tensors cannot be used; the text names the mistake and the remedy.
    fn claim(&self, _: &[Tensor]) -> Result<(), Error> {
        Ok(())
    }

    /// Returns the number of the device in this process, once one is reserved.
    fn ordinal(&self) -> Option<i32> {
        None
    }

    /// Returns the state of the work on the device, for reports of stalls; `None` before the first launch.
    fn standing(&self) -> Option<DeviceStanding> {
        None
    }

    /// Returns how long one execution may be on the device; `None`: without limit.
    fn timeout(&self) -> Option<Duration> {
        None
    }

    /// Makes the driver's part, once for each engine.
    fn backend(self: Arc<Self>, surroundings: &Surroundings<'_>) -> Box<dyn Backend>;
}

/// The accelerators of this rank, and whether they are busy.
pub(super) struct Accelerators {
    list: Vec<Arc<dyn Accelerator>>,
    /// Number of executions on devices that have not ended, as of the last poll.
    in_flight: AtomicUsize,
}

impl Accelerators {
    /// # Errors
    /// Two accelerators serve one kind of device, or one serves the host.
    pub(super) fn new(list: Vec<Arc<dyn Accelerator>>) -> Result<Self, Error> {
        let mut kinds = vec![Device::Cpu];
        for accelerator in &list {
            let kind = accelerator.kind();
            if kinds.contains(&kind) {
                return Err(Error::Init(format!(
                    "two backends were given for tensors on a {}; give one for each kind of device, and none for a CPU",
                    kind.name()
                )));
            }
            kinds.push(kind);
        }
        let in_flight = AtomicUsize::new(0);
        Ok(Self { list, in_flight })
    }

    /// Makes the driver's backends; returns each with the kind of device that it serves.
    pub(super) fn backends(&self, surroundings: &Surroundings<'_>) -> Vec<DeviceBackend> {
        let list = self.list.iter();
        list.map(|accelerator| {
            let backend = accelerator.clone().backend(surroundings);
            (accelerator.kind(), backend)
        })
        .collect()
    }

    fn of(&self, kind: Device) -> Option<&dyn Accelerator> {
        let mut list = self.list.iter();
        list.find(|a| a.kind() == kind).map(|found| &**found)
    }

    /// Checks tensors of one submission that lie on this kind of device, and reserves the device.
    pub(super) fn claim(&self, kind: Device, tensors: &[Tensor]) -> Result<(), Error> {
        let accelerator = self.of(kind).ok_or_else(|| {
            Error::Invalid(format!(
                "the tensor lies on a {}, and nothing here moves the data of such tensors; copy it to host memory first",
                kind.name()
            ))
        })?;
        accelerator.claim(tensors)
    }

    /// Returns the number of this kind of device in this process, once one is reserved.
    pub(super) fn ordinal(&self, kind: Device) -> Option<i32> {
        self.of(kind)?.ordinal()
    }

    /// Returns the state of the work on the first device that has any; `None` before the first launch.
    pub(super) fn standing(&self) -> Option<DeviceStanding> {
        let mut standings = self.list.iter().filter_map(|a| a.standing());
        let first = standings.next()?;
        if first.at.is_some() {
            return Some(first);
        }
        Some(standings.find(|next| next.at.is_some()).unwrap_or(first))
    }

    /// Returns the shortest time limit of an execution on any device; `None`: without limit.
    pub(super) fn timeout(&self) -> Option<Duration> {
        self.list.iter().filter_map(|a| a.timeout()).min()
    }

    /// Stores the number of executions on devices that have not ended.
    pub(super) fn note_in_flight(&self, count: usize) {
        self.in_flight.store(count, Ordering::Release);
    }

    /// Returns whether all executions on devices have ended.
    pub(super) fn is_idle(&self) -> bool {
        self.in_flight.load(Ordering::Acquire) == 0
    }
}

/// A backend, and the kind of device that it serves.
pub(super) type DeviceBackend = (Device, Box<dyn Backend>);

/// Checks what holds on every device: tensors are in row-major order. With `must_have_outputs` the engine must not have
/// to allocate an output.
pub(super) fn check_layout(
    kind: Device,
    tensors: &[Tensor],
    must_have_outputs: bool,
) -> Result<(), Error> {
    if tensors.iter().any(|t| !t.meta.order.is_row_major()) {
        return Err(Error::Invalid(format!(
            "a tensor on a {} is not in row-major order in memory; pass a contiguous copy",
            kind.name()
        )));
    }
    let allocates = |tensor: &Tensor| tensor.output == Output::Allocate;
    if must_have_outputs && tensors.iter().any(allocates) {
        return Err(Error::Invalid(format!(
            "results on a {} are allocated by the submission, which came without an allocator",
            kind.name()
        )));
    }
    Ok(())
}
