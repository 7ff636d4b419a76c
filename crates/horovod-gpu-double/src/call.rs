//! Steps of every call: counts, the log, faults, and the rules that hold for all.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::codes;
use crate::state::{Locked, lock};
use crate::thread;

/// The process that called `cuInit`; 0 before.
static INITIALISED_BY: AtomicU32 = AtomicU32::new(0);

pub(crate) fn note_initialised() {
    INITIALISED_BY.store(std::process::id(), Ordering::Release);
}

pub(crate) fn is_initialised() -> bool {
    INITIALISED_BY.load(Ordering::Acquire) == std::process::id()
}

/// Whether CUDA was initialised before this process was forked: then nothing works, and no lock may be touched.
pub(crate) fn is_forked() -> bool {
    let by = INITIALISED_BY.load(Ordering::Acquire);
    by != 0 && by != std::process::id()
}

/// Requirement of a call of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Need {
    Nothing,
    Initialised,
    /// A current context.
    Context,
    /// And that no capture forbids what may synchronise.
    NoCapture,
}

/// A call that is being carried out.
pub(crate) struct Call {
    pub(crate) state: Locked,
    pub(crate) name: &'static str,
    /// Of the current context; -1 where none is needed.
    pub(crate) device: i32,
}

impl Deref for Call {
    type Target = Locked;
    fn deref(&self) -> &Locked {
        &self.state
    }
}

impl DerefMut for Call {
    fn deref_mut(&mut self) -> &mut Locked {
        &mut self.state
    }
}

/// How a call ended: the error code, if it failed.
pub(crate) type CallOutcome = Result<(), i32>;

/// One call of the driver.
pub(crate) fn driver(
    name: &'static str,
    need: Need,
    arguments: fmt::Arguments<'_>,
    body: impl FnOnce(&mut Call) -> CallOutcome,
) -> i32 {
    if is_forked() && need != Need::Nothing {
        return codes::NOT_INITIALIZED;
    }
    let mut call = Call {
        state: lock(),
        name,
        device: -1,
    };
    let outcome = call
        .enter()
        .and_then(|()| call.rules(need))
        .and_then(|()| body(&mut call));
    let code = outcome.err().unwrap_or(codes::SUCCESS);
    call.leave(arguments, code);
    code
}

impl Call {
    /// Counts the call; the fault that is due.
    pub(crate) fn enter(&mut self) -> CallOutcome {
        let name = self.name;
        let count = self.state.counts.entry(name.to_owned()).or_insert(0);
        *count += 1;
        let count = *count;
        if thread::with(|thread| thread.in_host_function) {
            self.state
                .violation("host function", &format!("{name} within a host function"));
            return Err(codes::NOT_PERMITTED);
        }
        let mut hangs = self.state.config.hangs.iter();
        if hangs.any(|(call, k)| call == name && *k == count) {
            self.state.wait_until(|_| false);
        }
        let fault = self.state.config.fails.iter().find(|fail| {
            fail.call == name && (fail.k == count || fail.and_later && count >= fail.k)
        });
        if let Some(code) = fault.map(|fail| fail.code) {
            if name.starts_with("cu") && codes::is_sticky(code) {
                self.state.sticky = Some(code);
            }
            return Err(code);
        }
        Ok(())
    }

    fn rules(&mut self, need: Need) -> CallOutcome {
        if need == Need::Nothing {
            return Ok(());
        }
        if !is_initialised() {
            return Err(codes::NOT_INITIALIZED);
        }
        if let Some(code) = self.state.sticky {
            return Err(code);
        }
        if need >= Need::Context {
            self.device = self.current_device().ok_or(codes::INVALID_CONTEXT)?;
        }
        if need == Need::NoCapture {
            self.forbid_in_capture()?;
        }
        Ok(())
    }

    /// The device of the current context, which must be there.
    pub(crate) fn current_device(&mut self) -> Option<i32> {
        let current = thread::context();
        let is_alive = current.is_some_and(|device| {
            let count = self.state.contexts.get(device as usize);
            count.is_some_and(|count| *count > 0)
        });
        if !is_alive {
            let what = if current.is_some() {
                "with a context that was released"
            } else {
                "without a current context"
            };
            let text = format!("{} {what} on thread {}", self.name, thread::number());
            self.state.violation("no context", &text);
            return None;
        }
        current
    }

    /// A call that may synchronise invalidates the captures that it would disturb.
    pub(crate) fn forbid_in_capture(&mut self) -> CallOutcome {
        let (mode, number) = thread::with(|thread| (thread.capture_mode, thread.number));
        let mut disturbed = 0;
        for capture in self.state.forbidding_captures(mode, number) {
            capture.is_invalid = true;
            disturbed += 1;
        }
        if disturbed == 0 {
            return Ok(());
        }
        let text = format!("{} on thread {number} invalidates a capture", self.name);
        self.state.violation("capture", &text);
        Err(codes::CAPTURE_UNSUPPORTED)
    }

    pub(crate) fn leave(&mut self, arguments: fmt::Arguments<'_>, code: i32) {
        if self.state.is_logging() {
            let line = format!("{} {arguments} = {code}", self.name);
            self.state.write_log(&line);
        }
    }
}

/// Writes a result through a pointer of the caller.
///
/// # Safety
/// `to` is null or valid for a write of `T`.
pub(crate) unsafe fn put<T>(to: *mut T, value: T) -> CallOutcome {
    if to.is_null() {
        return Err(codes::INVALID_VALUE);
    }
    // SAFETY: not null, and else the caller's promise.
    unsafe { to.write(value) };
    Ok(())
}
