//! The diagnosis of stalled jobs: each rank describes itself twice, and rank 0 concludes which ranks hold up others.
//! Also the comparison of [`replicas`] that differ.
//!
//! Rank 0 asks a rank only while some tensor waits for that rank. The answer is cheap, and never needs the threads that
//! may be stuck: names come from the engine, runnable time from the system, and stacks from a registered [`Stacks`].
//!
//! An internal part of horovod-rs: programs use the crate `horovod`, and this interface may change in any version.
#![forbid(unsafe_code)]

mod device;
mod device_facts;
mod device_report;
mod leader;
mod messages;
pub mod replicas;
mod report;
mod report_file;
mod runnable;
#[cfg(test)]
mod simulation;
mod soft;
#[cfg(feature = "testing")]
pub mod testing;
mod verdict;

use std::sync::{Arc, OnceLock};

use horovod_transport::compact;
use serde::{Deserialize, Serialize};

pub use device::{DeviceInquiry, DeviceStep, DeviceWatch, Watched};
pub use device_facts::{Complaint, DeviceDiagnosis, DevicePhase, DeviceStanding, OnDevice};
pub use device_report::{render_device, summary_device};
pub use leader::{Leader, LeaderStep};
pub use messages::{Message, is_message};
pub use report::{JobView, render, summary};
pub use report_file::ReportFile;
pub use runnable::runnable_ms;
pub use soft::{LetGo, Requests, SoftStep, SoftWatch};
pub use verdict::{Diagnosis, Late};

/// Frames kept of one thread; the innermost count.
pub const FRAMES_MAX: usize = 12;
/// Threads told of one process.
pub const THREADS_MAX: usize = 32;
/// Bytes of one name or path in a description.
const STACK_TEXT_MAX: usize = 512;
/// Names of operations told of one rank.
const NAMES_MAX: usize = 32;

/// One line of a stack.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Frame {
    /// Source file.
    #[serde(
        serialize_with = "compact::put_text::<STACK_TEXT_MAX, _>",
        deserialize_with = "compact::text::<STACK_TEXT_MAX, _>"
    )]
    pub file: String,
    /// Line in it, from 1.
    pub line: u32,
    /// Function.
    #[serde(
        serialize_with = "compact::put_text::<STACK_TEXT_MAX, _>",
        deserialize_with = "compact::text::<STACK_TEXT_MAX, _>"
    )]
    pub function: String,
}

/// Where one thread of the script stands.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThreadStack {
    /// Its name.
    #[serde(
        serialize_with = "compact::put_text::<STACK_TEXT_MAX, _>",
        deserialize_with = "compact::text::<STACK_TEXT_MAX, _>"
    )]
    pub name: String,
    /// Innermost first, at most [`FRAMES_MAX`].
    #[serde(
        serialize_with = "compact::put_list::<FRAMES_MAX, _, _>",
        deserialize_with = "compact::list::<FRAMES_MAX, _, _>"
    )]
    pub frames: Vec<Frame>,
}

/// Finds out where the threads of the script stand. Called on a thread of its own, and may block: what needs an
/// interpreter's lock comes late when somebody keeps that.
pub type Stacks = dyn Fn() -> Vec<ThreadStack> + Send + Sync;

static STACKS: OnceLock<Arc<Stacks>> = OnceLock::new();

/// Registers how to find stacks; the first counts.
pub fn tell_stacks(stacks: impl Fn() -> Vec<ThreadStack> + Send + Sync + 'static) {
    let _ = STACKS.set(Arc::new(stacks));
}

/// How to find stacks, if anybody has said how.
pub fn stacks() -> Option<Arc<Stacks>> {
    STACKS.get().cloned()
}

/// A pending operation by the number of its process set and its name.
pub type Key = (u32, Arc<str>);

/// State of one rank, by itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Standing {
    /// Its process.
    pub pid: u32,
    /// Operations submitted since the start.
    pub submitted: u64,
    /// How long threads of the process were runnable, in milliseconds.
    pub runnable_ms: u64,
    /// A collective is on its way.
    pub executes: bool,
    /// Every thread that has ever called an operation now waits for one, and no framework's thread calls any.
    pub blocked: bool,
    /// A framework's threads, which nobody sees, may compute what they submit next. If they do not, this rank waits for
    /// operations that its threads are seen to wait for or that end with a callback. None of these has been agreed on.
    pub waits_if_idle: bool,
    /// Operations for which its threads wait, or that end with a callback.
    #[serde(
        serialize_with = "messages::put_keys",
        deserialize_with = "messages::get_keys"
    )]
    pub waits_for: Vec<Key>,
    /// How many more that list would have, were it not bounded.
    pub untold: u64,
    /// Operations that all ranks have agreed on and this rank has not completed.
    pub in_hand: Unfinished,
    /// Where its GPU stands, if it has given it anything.
    pub device: Option<DeviceStanding>,
    /// Why there are no stacks; else empty.
    #[serde(
        serialize_with = "compact::put_text::<STACK_TEXT_MAX, _>",
        deserialize_with = "compact::text::<STACK_TEXT_MAX, _>"
    )]
    pub without_stacks: String,
    /// Where the threads of its script stand.
    #[serde(
        serialize_with = "compact::put_list::<THREADS_MAX, _, _>",
        deserialize_with = "compact::list::<THREADS_MAX, _, _>"
    )]
    pub threads: Vec<ThreadStack>,
}

/// Operations that all have agreed on, and that have not ended on one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unfinished {
    /// How many.
    pub count: u64,
    /// Some of them by name.
    #[serde(
        serialize_with = "messages::put_keys",
        deserialize_with = "messages::get_keys"
    )]
    pub names: Vec<Key>,
    /// Calls that are due or have not returned: of operations that have ended, and for the memory of others.
    pub callbacks: u64,
}

/// Facts about the threads that call a rank's operations, if no operation that they wait for has been agreed on.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    /// Those that it sees all wait, and there is at least one.
    pub all_wait: bool,
    /// A framework's threads, which it does not see, call too.
    pub has_guests: bool,
    /// Operations are pending that end with a callback.
    pub has_callbacks: bool,
}

impl Seen {
    /// For [`Standing::blocked`].
    pub fn blocked(self) -> bool {
        self.all_wait && !self.has_guests
    }

    /// For [`Standing::waits_if_idle`].
    pub fn waits_if_idle(self) -> bool {
        self.has_callbacks || self.all_wait && self.has_guests
    }
}

/// The waits of one rank alone, without delay.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Brief {
    /// As of a [`Standing`], and all waits are listed here.
    pub blocked: bool,
    /// Keys that its threads wait for; with the handle where the wait is a soft one, else 0.
    #[serde(
        serialize_with = "messages::put_waits",
        deserialize_with = "messages::get_waits"
    )]
    pub waits_for: Vec<(Key, u64)>,
    /// For each key of the question, whether this rank has asked for it.
    #[serde(
        serialize_with = "compact::put_list::<NAMES_MAX, _, _>",
        deserialize_with = "compact::list::<NAMES_MAX, _, _>"
    )]
    pub pending: Vec<bool>,
}

impl Brief {
    /// Truncates to the limits of a message. A rank with more waits than fit does not count as stuck.
    pub fn bounded(mut self) -> Self {
        self.blocked &= self.waits_for.len() <= NAMES_MAX;
        self.waits_for.truncate(NAMES_MAX);
        self.pending.truncate(NAMES_MAX);
        self
    }
}

impl Standing {
    /// Keep what a message may hold.
    pub fn bounded(mut self) -> Self {
        self.untold += self.waits_for.len().saturating_sub(NAMES_MAX) as u64;
        self.waits_for.truncate(NAMES_MAX);
        self.in_hand.names.truncate(NAMES_MAX);
        self.threads.truncate(THREADS_MAX);
        for thread in &mut self.threads {
            thread.frames.truncate(FRAMES_MAX);
        }
        self
    }
}
