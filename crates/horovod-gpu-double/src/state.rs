//! All that the double knows, behind one lock; and the submission of operations, where they are checked.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::io::Write;
use std::ops::{Deref, DerefMut};
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::clock::{Agent, Clock};
use crate::codes;
use crate::config::Config;
use crate::handles::{Handle, Sort, decode};
use crate::memory::{Access, Accessor, Memory};
use crate::module::Module;
use crate::nccl::communicator::Communicator;
use crate::random::Random;
use crate::stream::{Capture, Event, Operation, Position, Stream, StreamWork};
use crate::thread;

/// More complaints than these are only counted.
const VIOLATIONS_MAX: usize = 1000;

/// Limits of an operation beside the order of its stream.
pub(crate) enum Limits<'a> {
    None,
    /// It comes after these places in other streams.
    After(&'a [(Position, Clock)]),
    /// It takes at least so long.
    AtLeast(Duration),
}

pub(crate) struct DriverState {
    pub(crate) config: Config,
    log: Option<File>,
    pub(crate) violations: Vec<String>,
    pub(crate) violation_count: u64,
    pub(crate) counts: HashMap<String, u64>,
    /// Events known, by any thread, to have happened.
    pub(crate) host: Clock,
    next_agent: Agent,
    next_id: u64,
    pub(crate) streams: BTreeMap<u64, Stream>,
    pub(crate) events: HashMap<u64, Event>,
    pub(crate) modules: HashMap<u64, Module>,
    /// Entry and module of each function.
    pub(crate) functions: HashMap<u64, (String, u64)>,
    pub(crate) communicators: BTreeMap<u64, Communicator>,
    /// Retained primary contexts, by device.
    pub(crate) contexts: Vec<u32>,
    pub(crate) memory: Memory,
    pub(crate) closed_gates: BTreeSet<u64>,
    /// An error that every later call returns.
    pub(crate) sticky: Option<i32>,
    pub(crate) random: Random,
    /// Operations that are reading or writing memory at this moment.
    pub(crate) touching: usize,
    pub(crate) collectives: u64,
    pub(crate) last_error: String,
}

static STATE: LazyLock<Mutex<DriverState>> = LazyLock::new(|| {
    let (config, complaint) = match Config::from_environment() {
        Ok(config) => (config, None),
        Err(complaint) => (Config::default(), Some(complaint)),
    };
    let mut state = DriverState::new(config);
    if let Some(complaint) = complaint {
        state.violation("settings", &complaint);
    }
    Mutex::new(state)
});

/// Notified at every change that somebody may wait for.
static CHANGED: Condvar = Condvar::new();

/// The state, locked; it can be waited with.
pub(crate) struct Locked(Option<MutexGuard<'static, DriverState>>);

/// Locks the state.
pub(crate) fn lock() -> Locked {
    let guard = STATE.lock();
    Locked(Some(guard.unwrap_or_else(PoisonError::into_inner)))
}

impl Locked {
    /// Sleeps until something has changed.
    pub(crate) fn sleep(&mut self) {
        if let Some(guard) = self.0.take() {
            let guard = CHANGED.wait(guard);
            self.0 = Some(guard.unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// [`Locked::sleep`] with a limit.
    pub(crate) fn sleep_for(&mut self, limit: Duration) {
        if let Some(guard) = self.0.take() {
            let woken = CHANGED.wait_timeout(guard, limit);
            self.0 = Some(woken.unwrap_or_else(PoisonError::into_inner).0);
        }
    }

    /// Sleeps until `holds`.
    pub(crate) fn wait_until(&mut self, mut holds: impl FnMut(&mut DriverState) -> bool) {
        while !holds(self) {
            self.sleep();
        }
    }

    /// Runs `body` without the lock.
    pub(crate) fn unlocked<T>(&mut self, body: impl FnOnce() -> T) -> T {
        self.0 = None;
        let result = body();
        *self = lock();
        result
    }
}

impl Deref for Locked {
    type Target = DriverState;
    #[expect(
        clippy::expect_used,
        reason = "the guard is missing only within the methods above"
    )]
    fn deref(&self) -> &DriverState {
        self.0.as_ref().expect("locked")
    }
}

impl DerefMut for Locked {
    #[expect(
        clippy::expect_used,
        reason = "the guard is missing only within the methods above"
    )]
    fn deref_mut(&mut self) -> &mut DriverState {
        self.0.as_mut().expect("locked")
    }
}

fn open_log(config: &Config) -> Option<File> {
    let path = config.log.as_ref()?;
    File::options().create(true).append(true).open(path).ok()
}

impl DriverState {
    fn new(config: Config) -> Self {
        let log = open_log(&config);
        let mut state = Self {
            log,
            violations: Vec::new(),
            violation_count: 0,
            counts: HashMap::new(),
            host: Clock::default(),
            next_agent: 1,
            next_id: 1000,
            streams: BTreeMap::new(),
            events: HashMap::new(),
            modules: HashMap::new(),
            functions: HashMap::new(),
            communicators: BTreeMap::new(),
            contexts: Vec::new(),
            memory: Memory::default(),
            closed_gates: BTreeSet::new(),
            sticky: None,
            random: Random::new(config.seed),
            touching: 0,
            collectives: 0,
            last_error: String::new(),
            config,
        };
        state.add_devices();
        state
    }

    /// Everything anew with the same settings. Handles and memory of before are gone, and known as such.
    pub(crate) fn restart(&mut self) {
        let memory = std::mem::take(&mut self.memory).emptied();
        let (next_id, contexts) = (self.next_id, std::mem::take(&mut self.contexts));
        *self = Self::new(self.config.clone());
        (self.next_id, self.memory) = (next_id, memory);
        for (count, before) in self.contexts.iter_mut().zip(contexts) {
            *count = before;
        }
        notify();
    }

    /// Other settings from now on; counts and complaints begin anew.
    pub(crate) fn configure(&mut self, config: Config) {
        self.log = open_log(&config);
        self.random = Random::new(config.seed);
        self.config = config;
        self.counts.clear();
        self.violations.clear();
        self.violation_count = 0;
        self.sticky = None;
        self.collectives = 0;
        self.add_devices();
        notify();
    }

    /// A context and a default stream for every device.
    fn add_devices(&mut self) {
        let devices = self.contexts.len().max(self.config.devices as usize);
        self.contexts.resize(devices, 0);
        for device in 0..self.config.devices {
            if !self.streams.contains_key(&(device as u64)) {
                let agent = self.new_agent();
                let mut stream = Stream::new(agent, device, true, 0);
                stream.is_default = true;
                self.streams.insert(device as u64, stream);
            }
        }
    }

    pub(crate) fn new_agent(&mut self) -> Agent {
        let agent = self.next_agent;
        self.next_agent += 1;
        agent
    }

    /// A number no other handle has.
    pub(crate) fn new_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// Whether a handle with this number was given out once.
    pub(crate) fn was_given_out(&self, id: u64) -> bool {
        (1001..=self.next_id).contains(&id)
    }

    /// Something that a correct caller does not do.
    pub(crate) fn violation(&mut self, kind: &str, text: &str) {
        if self.sticky.is_some() && kind == "memory" {
            // Nothing runs in a lost context, whatever becomes of its memory.
            return;
        }
        let line = format!("{kind}: {text}");
        self.write_log(&format!("violation {line}"));
        self.violation_count += 1;
        if self.violations.len() < VIOLATIONS_MAX {
            self.violations.push(line);
        }
    }

    pub(crate) fn is_logging(&self) -> bool {
        self.log.is_some()
    }

    pub(crate) fn write_log(&mut self, line: &str) {
        if let Some(log) = &mut self.log {
            let line = format!("{} {} {line}\n", std::process::id(), thread::number());
            // A log that cannot be written is missed by the test that reads it.
            let _ = log.write_all(line.as_bytes());
        }
    }

    /// The stream of a handle; null is the default stream of `device`.
    pub(crate) fn stream_of(
        &mut self,
        handle: Handle,
        device: i32,
        what: &str,
    ) -> Result<u64, i32> {
        /// `CU_STREAM_LEGACY`.
        const LEGACY: u64 = 1;
        let bits = handle as u64;
        if bits == 0 || bits == LEGACY {
            return Ok(device as u64);
        }
        let Some(id) = decode(Sort::Stream, handle) else {
            let text = format!("{what}: {bits:#x} is no stream");
            self.violation("invalid handle", &text);
            return Err(codes::INVALID_HANDLE);
        };
        match self.streams.get(&id) {
            Some(stream) if !stream.is_destroyed => Ok(id),
            _ => {
                self.gone(what, "stream", id);
                Err(codes::INVALID_HANDLE)
            }
        }
    }

    /// The event of a handle.
    pub(crate) fn event_of(&mut self, handle: Handle, what: &str) -> Result<u64, i32> {
        match decode(Sort::Event, handle) {
            Some(id) if self.events.contains_key(&id) => Ok(id),
            Some(id) => {
                self.gone(what, "event", id);
                Err(codes::INVALID_HANDLE)
            }
            None => {
                let text = format!("{what}: {:#x} is no event", handle as u64);
                self.violation("invalid handle", &text);
                Err(codes::INVALID_HANDLE)
            }
        }
    }

    /// Notes the use of what does not exist (any more).
    pub(crate) fn gone(&mut self, what: &str, sort: &str, id: u64) {
        if self.was_given_out(id) {
            self.violation(
                "after destroy",
                &format!("{what}: {sort} {id} was destroyed"),
            );
        } else {
            self.violation(
                "invalid handle",
                &format!("{what}: there is no {sort} {id}"),
            );
        }
    }

    pub(crate) fn has_passed(&self, (stream, number): Position) -> bool {
        self.streams
            .get(&stream)
            .is_none_or(|stream| stream.completed >= number)
    }

    /// The host has seen that a place was reached.
    pub(crate) fn host_learns(&mut self, clock: &Clock) {
        self.host.join(clock);
    }

    /// Checks and queues an operation of a stream.
    pub(crate) fn submit(
        &mut self,
        id: u64,
        what: &str,
        accesses: &[Access],
        work: StreamWork,
    ) -> Result<Position, i32> {
        self.submit_within(id, what, accesses, work, Limits::None)
    }

    /// [`DriverState::submit`] within limits.
    pub(crate) fn submit_within(
        &mut self,
        id: u64,
        what: &str,
        accesses: &[Access],
        work: StreamWork,
        limits: Limits<'_>,
    ) -> Result<Position, i32> {
        let (after, duration) = match limits {
            Limits::None => (&[][..], Duration::ZERO),
            Limits::After(places) => (places, Duration::ZERO),
            Limits::AtLeast(duration) => (&[][..], duration),
        };
        let (others, is_default) = self.implied_order(id, what)?;
        let host = self.host.clone();
        let Some(stream) = self.streams.get_mut(&id) else {
            return Err(codes::INVALID_HANDLE);
        };
        if let Some(capture) = &mut stream.capture {
            capture.nodes += 1;
            return Ok((id, 0));
        }
        stream.clock.join(&host);
        let mut positions = Vec::new();
        for (position, clock) in others.iter().chain(after) {
            stream.clock.join(clock);
            positions.push(*position);
        }
        let step = stream.clock.tick(stream.agent);
        let (agent, clock) = (stream.agent, stream.clock.clone());
        let name = format!("{what} in {}", stream_name(id, is_default));
        let accessor = Accessor {
            agent,
            step,
            clock: &clock,
            what: &name,
        };
        let allocations = match self.memory.check(accesses, &accessor, &host) {
            Ok((allocations, complaints)) => {
                for complaint in complaints {
                    self.violation("memory", &complaint);
                }
                allocations
            }
            Err(complaint) => {
                self.violation("memory", &complaint);
                return Err(codes::ILLEGAL_ADDRESS_AT_CALL);
            }
        };
        let Some(stream) = self.streams.get_mut(&id) else {
            return Err(codes::INVALID_HANDLE);
        };
        stream.submitted += 1;
        let number = stream.submitted;
        stream.queue.push_back(Operation {
            number,
            work,
            after: positions,
            allocations,
            clock,
            duration,
        });
        notify();
        Ok((id, number))
    }

    /// Implied dependencies of an operation on a stream: the legacy default stream orders itself with all blocking
    /// streams of its device. Also notes the use of a stream that NCCL is not done with.
    fn implied_order(
        &mut self,
        id: u64,
        what: &str,
    ) -> Result<(Vec<(Position, Clock)>, bool), i32> {
        let Some(stream) = self.streams.get(&id) else {
            return Err(codes::INVALID_HANDLE);
        };
        let (device, is_default) = (stream.device, stream.is_default);
        let is_blocking = stream.is_blocking;
        let launching = self
            .communicators
            .iter()
            .find(|(_, c)| c.is_launching_on(id))
            .map(|(id, _)| *id);
        if let Some(communicator) = launching {
            let text = format!(
                "{what} in {} while communicator {communicator} is in progress there (7)",
                stream_name(id, is_default)
            );
            self.violation("stream in progress", &text);
        }
        let is_related = |other: u64, s: &Stream| {
            s.device == device
                && other != id
                && is_blocking
                && s.is_blocking
                && (is_default || s.is_default)
        };
        let related: Vec<&Stream> = self
            .streams
            .iter()
            .filter(|(other, s)| is_related(**other, s))
            .map(|(_, s)| s)
            .collect();
        if is_default && related.iter().any(|s| s.capture.is_some()) {
            let text = format!("{what} in the legacy default stream during a capture");
            self.violation("capture", &text);
            return Err(codes::CAPTURE_IMPLICIT);
        }
        let order = self
            .streams
            .iter()
            .filter(|(other, s)| is_related(**other, s) && s.submitted > 0)
            .map(|(other, s)| ((*other, s.submitted), s.clock.clone()))
            .collect();
        Ok((order, is_default))
    }

    /// Captures that forbid what may synchronise, to a thread in mode `mode`.
    pub(crate) fn forbidding_captures(&mut self, mode: i32, thread: u64) -> Vec<&mut Capture> {
        self.streams
            .values_mut()
            .filter_map(|s| s.capture.as_mut())
            .filter(|c| match mode {
                0 => c.mode == 0 || (c.thread == thread && c.mode != 2),
                1 => c.thread == thread && c.mode != 2,
                _ => false,
            })
            .collect()
    }

    /// Whether all that was submitted to a device's streams has ended.
    pub(crate) fn device_is_idle(&self, device: i32) -> bool {
        self.streams
            .values()
            .filter(|s| s.device == device)
            .all(Stream::is_idle)
    }
}

fn stream_name(id: u64, is_default: bool) -> String {
    if is_default {
        format!("the default stream of device {id}")
    } else {
        format!("stream {id}")
    }
}

/// Wakes all who wait for a change.
pub(crate) fn notify() {
    CHANGED.notify_all();
}
