//! Common steps of NCCL's calls, and the progress of communicators and groups.

use std::fmt;

use super::communicator::{Communicator, CommunicatorPhase};
use super::group::{Group, Queued};
use super::{IN_PROGRESS, INVALID_ARGUMENT, INVALID_USAGE, UNHANDLED_CUDA_ERROR};
use crate::call::{self, Call, CallOutcome};
use crate::handles::{Handle, Sort, decode};
use crate::state::lock;
use crate::thread;

/// From this version on communicators are aborted and destroyed together in a group.
const TOGETHER_SINCE: i32 = 22200;

/// One call of NCCL that came with version `since` (as `ncclGetVersion` tells it).
pub(crate) fn nccl(
    name: &'static str,
    since: i32,
    arguments: fmt::Arguments<'_>,
    body: impl FnOnce(&mut Call) -> CallOutcome,
) -> i32 {
    if call::is_forked() {
        return UNHANDLED_CUDA_ERROR;
    }
    let mut call = Call {
        state: lock(),
        name,
        device: -1,
    };
    let is_host_function = thread::with(|thread| thread.in_host_function);
    let entered = call.enter();
    let entered = if is_host_function {
        entered.map_err(|_| INVALID_USAGE)
    } else {
        entered
    };
    let outcome = entered
        .and_then(|()| call.exists_since(since))
        .and_then(|()| body(&mut call));
    let code = outcome.err().unwrap_or(0);
    if code != 0 && code != IN_PROGRESS {
        call.last_error = format!("{name}: {}", error_text(code).to_string_lossy());
    }
    call.leave(arguments, code);
    code
}

/// Result of `ncclGetErrorString`.
pub(crate) fn error_text(code: i32) -> &'static std::ffi::CStr {
    match code {
        0 => c"no error",
        1 => c"unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        2 => c"unhandled system error (run with NCCL_DEBUG=INFO for details)",
        3 => c"internal error - please report this issue to the NCCL developers",
        4 => c"invalid argument (run with NCCL_DEBUG=WARN for details)",
        5 => c"invalid usage (run with NCCL_DEBUG=WARN for details)",
        6 => c"remote process exited or there was a network error",
        7 => c"NCCL operation in progress",
        8 => c"operation timed out",
        _ => c"unknown result code",
    }
}

impl Call {
    fn exists_since(&mut self, since: i32) -> CallOutcome {
        let version = self.config.nccl_version;
        if version >= since {
            return Ok(());
        }
        let text = format!("{} came with {since}, this is {version}", self.name);
        self.violation("version", &text);
        Err(INVALID_USAGE)
    }

    /// The number of a communicator that exists.
    pub(crate) fn communicator(&mut self, handle: Handle) -> Result<u64, i32> {
        let name = self.name;
        match decode(Sort::Communicator, handle) {
            Some(id) if self.communicators.contains_key(&id) => Ok(id),
            Some(id) => {
                self.gone(name, "communicator", id);
                Err(INVALID_ARGUMENT)
            }
            None => {
                let text = format!("{name}: {:#x} is no communicator", handle as u64);
                self.violation("invalid handle", &text);
                Err(INVALID_ARGUMENT)
            }
        }
    }

    /// A communicator for a call that only its own thread may make, and only when nothing is in progress.
    pub(crate) fn own_communicator(&mut self, handle: Handle) -> Result<u64, i32> {
        let id = self.communicator(handle)?;
        self.note_thread(id, true);
        match self.progress(id, false) {
            0 => Ok(id),
            IN_PROGRESS => {
                let name = self.name;
                let text = format!("{name} while communicator {id} is in progress (7)");
                self.violation("in progress", &text);
                Err(INVALID_ARGUMENT)
            }
            code => Err(code),
        }
    }

    /// One thread uses a communicator, and never two at once.
    pub(crate) fn note_thread(&mut self, id: u64, is_owned: bool) {
        let (own, name) = (thread::number(), self.name);
        let Some(communicator) = self.communicators.get_mut(&id) else {
            return;
        };
        let first = *communicator.thread.get_or_insert(own);
        let inside = communicator.inside.filter(|thread| *thread != own);
        if let Some(other) = inside {
            let text =
                format!("{name} on thread {own} while thread {other} is inside communicator {id}");
            self.violation("threads", &text);
        } else if is_owned && first != own {
            let text =
                format!("{name} on thread {own}, communicator {id} belongs to thread {first}");
            self.violation("threads", &text);
        }
    }

    /// Waits, inside NCCL, until a communicator has nothing in progress; its error.
    pub(crate) fn wait_for(&mut self, id: u64) -> i32 {
        let own = thread::number();
        if let Some(communicator) = self.communicators.get_mut(&id) {
            communicator.inside = Some(own);
            communicator.polls = 0;
        }
        let mut result = IN_PROGRESS;
        self.wait_until(|state| {
            result = state.progress(id, true);
            result != IN_PROGRESS
        });
        if let Some(communicator) = self.communicators.get_mut(&id) {
            communicator.inside = None;
        }
        result
    }

    /// The calling thread launches on a device: others may only when the host has seen the end of what was launched by
    /// those before.
    fn note_launcher(&mut self, id: u64) {
        let own = thread::number();
        let Some(communicator) = self.communicators.get_mut(&id) else {
            return;
        };
        communicator.launcher = Some(own);
        let device = communicator.device;
        let others = self.communicators.values().filter(|c| c.device == device);
        let running = others.filter(|c| !c.has_ended_for(&self.host));
        let other = running
            .filter_map(|c| c.launcher)
            .find(|thread| *thread != own);
        if let Some(other) = other {
            let text = format!("threads {other} and {own} launch collectives on device {device}");
            self.violation("threads", &text);
        }
    }

    /// Carries out what a group holds.
    pub(crate) fn end_group(&mut self, group: Group) -> CallOutcome {
        let has_inits = !group.begun.is_empty();
        if has_inits && !group.queued.is_empty() {
            self.violation(
                "group",
                "communicators are made in a group with collectives",
            );
            return Err(INVALID_USAGE);
        }
        if let Some(code) = group.error {
            return Err(code);
        }
        let mut result = 0;
        for id in group.begun {
            result = self.settle(id).max(result);
        }
        let mut by_communicator: Vec<(u64, Vec<Queued>)> = Vec::new();
        for queued in group.queued {
            let id = queued.communicator;
            match by_communicator.iter_mut().find(|(known, _)| *known == id) {
                Some((_, list)) => list.push(queued),
                None => by_communicator.push((id, vec![queued])),
            }
        }
        for (id, queued) in by_communicator {
            result = self.start(id, queued).max(result);
        }
        self.abort_all(&group.aborted);
        for id in &group.destroyed {
            self.finish(*id);
        }
        self.remove_all(&group.destroyed);
        if result == 0 { Ok(()) } else { Err(result) }
    }

    /// Waits for a blocking communicator; what one that is not says now.
    pub(crate) fn settle(&mut self, id: u64) -> i32 {
        let is_blocking = self.communicators.get(&id).is_some_and(|c| c.is_blocking);
        if is_blocking {
            self.wait_for(id)
        } else {
            self.progress(id, false)
        }
    }

    /// Launches now, or when it was polled for.
    fn start(&mut self, id: u64, queued: Vec<Queued>) -> i32 {
        self.note_launcher(id);
        let polls = self.config.in_progress;
        let Some(communicator) = self.communicators.get_mut(&id) else {
            return INVALID_ARGUMENT;
        };
        if !communicator.is_blocking && polls > 0 {
            communicator.polls = polls;
            self.launch_later(id, queued);
            return IN_PROGRESS;
        }
        self.launch(id, queued).err().unwrap_or(0)
    }

    /// Begins to finalize.
    pub(crate) fn finalize(&mut self, id: u64) {
        let polls = self.config.in_progress;
        if let Some(communicator) = self.communicators.get_mut(&id)
            && communicator.phase == CommunicatorPhase::Ready
        {
            communicator.phase = CommunicatorPhase::Finalizing {
                is_announced: false,
            };
            if !communicator.is_blocking {
                communicator.polls = polls;
            }
        }
    }

    /// Finalizes what was not, as destroying does, and waits for the other ranks.
    fn finish(&mut self, id: u64) {
        let Some(communicator) = self.communicators.get(&id) else {
            return;
        };
        let (error, has_launches) = (communicator.error, communicator.has_launches());
        if error != 0 {
            if has_launches {
                let text = format!(
                    "communicator {id} has error {error} and work that never ends: it would hang"
                );
                self.violation("destroy", &text);
            }
            return;
        }
        self.finalize(id);
        self.wait_for(id);
    }

    /// Frees communicators whose work has ended or was cut off: waits for everything on their devices, as freeing memory
    /// does.
    pub(crate) fn remove_all(&mut self, ids: &[u64]) {
        if !ids.is_empty() {
            let _ = self.forbid_in_capture(); // tells of it
        }
        let mut devices = Vec::new();
        for id in ids {
            if let Some(communicator) = self.communicators.get(id) {
                devices.push(communicator.device);
            }
            self.remove_communicator(*id);
        }
        for device in devices {
            self.wait_until(|state| state.device_is_idle(device));
        }
    }

    /// Cuts communicators off, all of them before the first is freed.
    pub(crate) fn abort_all(&mut self, ids: &[u64]) {
        if ids.is_empty() {
            return;
        }
        let pause = self.config.abort;
        if !pause.is_zero() {
            self.unlocked(|| std::thread::sleep(pause));
        }
        self.remove_all(ids);
    }

    /// `ncclCommDestroy`.
    pub(crate) fn destroy(&mut self, id: u64) {
        if !self.is_together(|group| group.destroyed.push(id)) {
            self.finish(id);
            self.remove_all(&[id]);
        }
    }

    /// `ncclCommAbort`.
    pub(crate) fn abort(&mut self, id: u64) {
        if !self.is_together(|group| group.aborted.push(id)) {
            self.abort_all(&[id]);
        }
    }

    fn is_together(&self, add: impl FnOnce(&mut Group)) -> bool {
        let version = self.config.nccl_version;
        thread::with(|thread| {
            let waits = thread.group.depth > 0 && version >= TOGETHER_SINCE;
            if waits {
                add(&mut thread.group);
            }
            waits
        })
    }

    /// A new communicator of the current context's device.
    pub(crate) fn new_communicator(
        &mut self,
        size: i32,
        rank: i32,
        is_blocking: bool,
        address: std::net::SocketAddrV4,
    ) -> Result<u64, i32> {
        let device = self.current_device().ok_or(UNHANDLED_CUDA_ERROR)?;
        self.forbid_in_capture().map_err(|_| UNHANDLED_CUDA_ERROR)?;
        let id = self.new_id();
        let mut communicator = Communicator::new(size, rank, device, is_blocking, address);
        communicator.thread = Some(thread::number());
        if !is_blocking {
            communicator.polls = self.config.in_progress;
        }
        self.communicators.insert(id, communicator);
        Ok(id)
    }

    /// Ends a call that makes a communicator.
    pub(crate) fn begun(&mut self, id: u64) -> CallOutcome {
        let is_in_group = thread::with(|thread| {
            if thread.group.depth > 0 {
                thread.group.begun.push(id);
            }
            thread.group.depth > 0
        });
        if is_in_group {
            return Ok(());
        }
        match self.settle(id) {
            0 => Ok(()),
            code => Err(code),
        }
    }
}
