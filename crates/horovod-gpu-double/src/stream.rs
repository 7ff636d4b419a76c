//! Streams as queues, events as positions in them.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::time::{Duration, Instant};

use crate::clock::{Agent, Clock};

/// A place in a stream: its number and that of the operation, from 1.
pub(crate) type Position = (u64, u64);

/// A capture that a stream takes part in.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Capture {
    /// As of `cuThreadExchangeStreamCaptureMode`.
    pub(crate) mode: i32,
    /// The thread that began it.
    pub(crate) thread: u64,
    pub(crate) is_invalid: bool,
    /// Operations captured so far.
    pub(crate) nodes: i64,
}

/// Effect of an operation when it is the stream's next.
pub(crate) enum StreamWork {
    /// Only its place counts: a wait.
    Nothing,
    /// Moves or computes bytes.
    Local(Box<dyn FnOnce() + Send>),
    /// Calls a function of the caller with its argument.
    HostFunction(extern "C" fn(*mut c_void), usize),
    /// The event with this number is reached.
    Record(u64),
    /// The allocation with this number goes.
    EndOf(u64),
    /// Waits until the gate with this number is opened.
    Gate(u64),
    /// A launched group of NCCL: its communicator and its number.
    Launch(u64, u64),
}

pub(crate) struct Operation {
    pub(crate) number: u64,
    pub(crate) work: StreamWork,
    /// Operations that must have ended before.
    pub(crate) after: Vec<Position>,
    /// Allocations that it uses.
    pub(crate) allocations: Vec<u64>,
    pub(crate) clock: Clock,
    /// It takes at least so long.
    pub(crate) duration: Duration,
}

pub(crate) struct Stream {
    pub(crate) agent: Agent,
    pub(crate) device: i32,
    /// Ordered with the legacy default stream.
    pub(crate) is_blocking: bool,
    pub(crate) is_default: bool,
    pub(crate) priority: i32,
    /// Events that happened before anything that is submitted from now on.
    pub(crate) clock: Clock,
    pub(crate) queue: VecDeque<Operation>,
    pub(crate) submitted: u64,
    pub(crate) completed: u64,
    /// The first of `queue` was taken out and is being carried out.
    pub(crate) is_running: bool,
    /// The first of `queue` may not start before; chosen when everything else allows it.
    pub(crate) not_before: Option<Instant>,
    pub(crate) is_destroyed: bool,
    pub(crate) capture: Option<Capture>,
}

impl Stream {
    pub(crate) fn new(agent: Agent, device: i32, is_blocking: bool, priority: i32) -> Self {
        Self {
            agent,
            device,
            is_blocking,
            is_default: false,
            priority,
            clock: Clock::default(),
            queue: VecDeque::new(),
            submitted: 0,
            completed: 0,
            is_running: false,
            not_before: None,
            is_destroyed: false,
            capture: None,
        }
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.completed == self.submitted
    }
}

/// Bits of an event's flags.
pub(crate) const EVENT_DISABLE_TIMING: u32 = 2;

pub(crate) struct Event {
    pub(crate) device: i32,
    pub(crate) flags: u32,
    /// Where it was recorded last, and what had happened by then.
    pub(crate) recorded: Option<(Position, Clock)>,
    /// When that place was reached.
    pub(crate) reached: Option<Instant>,
    /// Recorded last in a capture.
    pub(crate) is_captured: bool,
}
