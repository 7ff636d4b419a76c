//! Communicators of this process: their state, their launches, the threads that carry their messages.

use std::collections::{BTreeMap, HashMap};
use std::net::{Shutdown, SocketAddrV4, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};

use super::group::Queued;
use super::part::Part;
use super::wire::{Hello, Magic, Message};
use super::{IN_PROGRESS, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR};
use crate::clock::{Agent, Clock, HOST};
use crate::memory::Access;
use crate::state::{DriverState, Limits, Locked, lock, notify};
use crate::stream::{Position, StreamWork};

/// How far a communicator is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CommunicatorPhase {
    Connecting,
    Ready,
    /// Waits for its launches, then for the other ranks.
    Finalizing {
        is_announced: bool,
    },
    Finalized,
}

/// A group of collectives that are one operation of a stream.
#[derive(Debug)]
struct Launch {
    parts: Vec<Part>,
    position: Position,
    missing: usize,
    has_begun: bool,
}

pub(crate) struct Communicator {
    pub(crate) rank: i32,
    pub(crate) size: i32,
    pub(crate) device: i32,
    pub(crate) is_blocking: bool,
    pub(crate) phase: CommunicatorPhase,
    /// Error code of the communicator; 0 for none.
    pub(crate) error: i32,
    pub(crate) last_error: String,
    /// So often `ncclCommGetAsyncError` still answers 7.
    pub(crate) polls: u32,
    /// Work that is launched once those polls are over.
    pending: Vec<Queued>,
    /// The thread that used it first, and one that is inside.
    pub(crate) thread: Option<u64>,
    pub(crate) inside: Option<u64>,
    /// The thread that launched its collectives.
    pub(crate) launcher: Option<u64>,
    sequence: u64,
    launches: BTreeMap<u64, Launch>,
    next_launch: u64,
    last: Option<Position>,
    /// The stream's agent of the last launch, and its step there.
    last_step: Option<(Agent, u64)>,
    /// All that was launched.
    clock: Clock,
    pub(crate) operators: HashMap<i32, (i32, Vec<u8>)>,
    pub(crate) next_operator: i32,
    /// Splits asked for, and the communicator that each makes.
    pub(crate) splits: HashMap<u64, u64>,
    pub(crate) next_split: u64,
    address: SocketAddrV4,
    socket: Option<TcpStream>,
    writer: Option<Sender<Message>>,
}

impl Communicator {
    pub(crate) fn new(
        size: i32,
        rank: i32,
        device: i32,
        is_blocking: bool,
        address: SocketAddrV4,
    ) -> Self {
        Self {
            rank,
            size,
            device,
            is_blocking,
            phase: CommunicatorPhase::Connecting,
            error: 0,
            last_error: String::new(),
            polls: 0,
            pending: Vec::new(),
            thread: None,
            inside: None,
            launcher: None,
            sequence: 0,
            launches: BTreeMap::new(),
            next_launch: 0,
            last: None,
            last_step: None,
            clock: Clock::default(),
            operators: HashMap::new(),
            next_operator: super::reduction::FIRST_MADE,
            splits: HashMap::new(),
            next_split: 0,
            address,
            socket: None,
            writer: None,
        }
    }

    /// A launch that the caller must poll for uses this stream.
    pub(crate) fn is_launching_on(&self, stream: u64) -> bool {
        self.pending.iter().any(|queued| queued.stream == stream)
    }

    /// Whether all that was launched has ended, as far as a clock knows.
    pub(crate) fn has_ended_for(&self, clock: &Clock) -> bool {
        let has_seen = |(agent, step)| clock.get(agent) >= step;
        self.pending.is_empty() && self.last_step.is_none_or(has_seen)
    }

    pub(crate) fn has_launches(&self) -> bool {
        !self.launches.is_empty() || !self.pending.is_empty()
    }

    pub(crate) fn send(&mut self, message: Message) {
        if let Some(writer) = &self.writer {
            // A writer that is gone has seen the connection break, which the reader reports.
            let _ = writer.send(message);
        }
    }

    fn fail(&mut self, code: i32, text: &str) {
        if self.error == 0 {
            self.error = code;
            text.clone_into(&mut self.last_error);
        }
    }

    /// Leaves the hub: the other ranks see it go.
    pub(crate) fn disconnect(&mut self) {
        self.writer = None;
        if let Some(socket) = &self.socket {
            // It may be closed already.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

impl DriverState {
    /// Result of `ncclCommGetAsyncError`; also makes progress with the pending work.
    pub(crate) fn progress(&mut self, id: u64, is_poll: bool) -> i32 {
        let Some(communicator) = self.communicators.get_mut(&id) else {
            return INVALID_ARGUMENT;
        };
        if communicator.error != 0 {
            return communicator.error;
        }
        if communicator.phase == CommunicatorPhase::Connecting {
            return IN_PROGRESS;
        }
        if communicator.polls > 0 {
            communicator.polls -= u32::from(is_poll);
            return IN_PROGRESS;
        }
        let pending = std::mem::take(&mut communicator.pending);
        if !pending.is_empty()
            && let Err(code) = self.launch(id, pending)
        {
            return code;
        }
        let Some(communicator) = self.communicators.get_mut(&id) else {
            return INVALID_ARGUMENT;
        };
        if let CommunicatorPhase::Finalizing { is_announced } = communicator.phase {
            if !is_announced && communicator.launches.is_empty() {
                communicator.phase = CommunicatorPhase::Finalizing { is_announced: true };
                communicator.send(Message::Finalize);
            }
            return IN_PROGRESS;
        }
        if communicator.phase == CommunicatorPhase::Finalized {
            let clock = communicator.clock.clone();
            self.host_learns(&clock);
        }
        0
    }

    /// Launches later, when it was polled for.
    pub(crate) fn launch_later(&mut self, id: u64, queued: Vec<Queued>) {
        if let Some(communicator) = self.communicators.get_mut(&id) {
            communicator.pending = queued;
        }
    }

    /// Puts a group of collectives of one communicator into their streams: into the first; the others wait for it, and
    /// it for them.
    pub(crate) fn launch(&mut self, id: u64, queued: Vec<Queued>) -> Result<(), i32> {
        let Some(communicator) = self.communicators.get(&id) else {
            return Err(INVALID_ARGUMENT);
        };
        let (rank, size) = (communicator.rank, communicator.size);
        let (device, last) = (communicator.device, communicator.last);
        let mut streams: Vec<u64> = Vec::new();
        let mut parts = Vec::new();
        let mut accesses = Vec::new();
        for Queued {
            mut part, stream, ..
        } in queued
        {
            if !streams.contains(&stream) {
                streams.push(stream);
            }
            let (uses, lie_well) = part.accesses(rank, size, parts.len());
            if !lie_well {
                let text = format!(
                    "buffers of {} overlap otherwise than in place",
                    part.function.name()
                );
                self.violation("memory", &text);
            }
            accesses.extend(uses);
            self.number_part(id, &mut part);
            parts.push(part);
        }
        self.check_devices(device, &streams, &accesses)?;
        let Some((&first, others)) = streams.split_first() else {
            return Ok(());
        };
        let mut after: Vec<(Position, Clock)> = Vec::new();
        for other in others {
            if let Some(stream) = self.streams.get(other) {
                after.push(((*other, stream.submitted), stream.clock.clone()));
            }
        }
        // One communicator runs its launches in their order, which is no promise to the caller.
        after.extend(last.map(|place| (place, Clock::default())));
        let Some(communicator) = self.communicators.get_mut(&id) else {
            return Err(INVALID_ARGUMENT);
        };
        communicator.next_launch += 1;
        let number = communicator.next_launch;
        let what = match parts.as_slice() {
            [only] => format!("{} of communicator {id}", only.function.name()),
            _ => format!("a group of communicator {id}"),
        };
        let work = StreamWork::Launch(id, number);
        let position = self
            .submit_within(first, &what, &accesses, work, Limits::After(&after))
            .map_err(|_| INVALID_ARGUMENT)?;
        let found = self.streams.get(&first);
        let (agent, clock) = found.map_or((HOST, Clock::default()), |s| (s.agent, s.clock.clone()));
        self.check_launch_order(id, device, &clock);
        for other in others {
            let after = [(position, clock.clone())];
            self.submit_within(
                *other,
                &what,
                &[],
                StreamWork::Nothing,
                Limits::After(&after),
            )
            .map_err(|_| INVALID_ARGUMENT)?;
        }
        if let Some(communicator) = self.communicators.get_mut(&id) {
            communicator.last = Some(position);
            communicator.last_step = Some((agent, clock.get(agent)));
            communicator.clock.join(&clock);
            let missing = parts.len();
            communicator.launches.insert(
                number,
                Launch {
                    parts,
                    position,
                    missing,
                    has_begun: false,
                },
            );
        }
        Ok(())
    }

    /// Gives a collective its place in the sequence, and the faults that are due.
    fn number_part(&mut self, id: u64, part: &mut Part) {
        if !part.function.is_collective() {
            return;
        }
        if let Some(communicator) = self.communicators.get_mut(&id) {
            part.sequence = communicator.sequence;
            communicator.sequence += 1;
        }
        self.collectives += 1;
        let k = self.collectives;
        part.is_stuck = self.config.never.contains(&k);
        let raises = self.config.async_errors.iter().find(|(at, _)| *at == k);
        part.raises = raises.map(|(_, code)| *code);
    }

    /// Kernels of several communicators of one device must be ordered by streams.
    fn check_launch_order(&mut self, id: u64, device: i32, clock: &Clock) {
        let unordered = self
            .communicators
            .iter()
            .filter(|(other, c)| **other != id && c.device == device)
            .filter_map(|(other, c)| c.last_step.map(|step| (*other, step)))
            .find(|(_, (agent, step))| clock.get(*agent) < *step);
        if let Some((other, _)) = unordered {
            let text = format!(
                "communicators {other} and {id} of device {device} are launched with nothing that orders the two"
            );
            self.violation("launch order", &text);
        }
    }

    fn check_devices(
        &mut self,
        device: i32,
        streams: &[u64],
        accesses: &[Access],
    ) -> Result<(), i32> {
        for stream in streams {
            let found = self.streams.get(stream);
            if found.is_some_and(|s| s.capture.is_some()) {
                self.violation("capture", "a collective in a stream that is captured");
                return Err(INVALID_USAGE);
            }
            if found.is_none_or(|s| s.device != device) {
                let text = format!("a communicator of device {device} in a stream of another");
                self.violation("device", &text);
                return Err(INVALID_ARGUMENT);
            }
        }
        for access in accesses.iter().filter(|a| a.bytes > 0) {
            let found = self.memory.containing(access.address);
            let place = found.map(|a| (a.device, a.kind.is_on_device()));
            if place.is_some_and(|place| place != (device, true)) {
                let text = format!(
                    "{:#x} is no memory of device {device}, the communicator's",
                    access.address
                );
                self.violation("device", &text);
            }
        }
        Ok(())
    }

    /// Ends all that runs, with undefined results, and forgets the communicator.
    pub(crate) fn remove_communicator(&mut self, id: u64) {
        let Some(mut communicator) = self.communicators.remove(&id) else {
            return;
        };
        communicator.disconnect();
        for launch in communicator.launches.values().filter(|l| l.has_begun) {
            self.complete(launch.position.0, launch.position.1);
        }
        notify();
    }
}

/// Begins a launch whose place in its stream has come. The stream goes on when [`DriverState::complete`] is told.
pub(crate) fn begin(state: &mut Locked, id: u64, number: u64, all_live: bool) -> bool {
    let Some(communicator) = state.communicators.get_mut(&id) else {
        // It was aborted meanwhile.
        return false;
    };
    let (rank, size) = (communicator.rank, communicator.size);
    let Some(launch) = communicator.launches.get_mut(&number) else {
        return false;
    };
    launch.has_begun = true;
    let parts = launch.parts.clone();
    for (part, index) in parts.iter().zip(0..) {
        if let Some(code) = part.raises
            && let Some(communicator) = state.communicators.get_mut(&id)
        {
            communicator.fail(code, "an error was asked for (async)");
        }
        if part.is_stuck || part.raises.is_some() {
            continue;
        }
        let (bytes, _) = part.lengths(rank, size);
        let mut data = vec![0; bytes as usize];
        if all_live && bytes > 0 {
            state.touching += 1;
            state.unlocked(|| {
                let from = part.send as *const u8;
                // SAFETY: the range was checked at the call and found live just before; freeing waits for `touching`.
                unsafe { std::ptr::copy_nonoverlapping(from, data.as_mut_ptr(), data.len()) };
                part.prepare(&mut data, size);
            });
            state.touching -= 1;
            notify();
        }
        let message = Message::Part {
            launch: number,
            part: index,
            sequence: part.sequence,
            shape: part.shape(),
            data,
        };
        match state.communicators.get_mut(&id) {
            Some(communicator) => communicator.send(message),
            // Aborted meanwhile, which has completed the operation.
            None => return true,
        }
    }
    true
}

/// Connects a communicator on a thread of its own, which then reads what its hub says.
pub(crate) fn connect(state: &mut DriverState, id: u64, address: SocketAddrV4, magic: Magic) {
    let Some(communicator) = state.communicators.get_mut(&id) else {
        return;
    };
    let version = state.config.nccl_version;
    /// The first version that lets ranks share a GPU (`NCCL_MULTI_RANK_GPU_ENABLE`).
    const SHARING_SINCE: i32 = 23003;
    #[expect(
        clippy::disallowed_methods,
        reason = "the variable is NCCL's own, and the double stands for it"
    )]
    let is_enabled = std::env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_ok_and(|v| v == "1");
    let hello = Hello {
        magic,
        rank: communicator.rank as u32,
        size: communicator.size as u32,
        version,
        uuid: state.config.uuid_of(communicator.device),
        may_share: is_enabled && version >= SHARING_SINCE,
    };
    let (sender, receiver) = channel();
    communicator.writer = Some(sender);
    let thread = std::thread::Builder::new().name("gpu-double-comm".to_owned());
    let spawned = thread.spawn(move || run(id, address, hello, receiver));
    if spawned.is_err() {
        communicator.fail(super::SYSTEM_ERROR, "no thread");
    }
}

fn run(id: u64, address: SocketAddrV4, hello: Hello, messages: Receiver<Message>) {
    let connected = TcpStream::connect(address).and_then(|mut stream| {
        stream.set_nodelay(true)?;
        Message::Hello(hello).write(&mut stream)?;
        Ok((stream.try_clone()?, stream.try_clone()?, stream))
    });
    let (mut reader, mut writer, socket) = match connected {
        Ok(streams) => streams,
        Err(error) => {
            lost(
                id,
                &format!("connection to the root at {address}: {error}"),
                true,
            );
            return;
        }
    };
    {
        let mut state = lock();
        let Some(communicator) = state.communicators.get_mut(&id) else {
            return;
        };
        communicator.socket = Some(socket);
    }
    let thread = std::thread::Builder::new().name("gpu-double-send".to_owned());
    let spawned = thread.spawn(move || {
        for message in messages {
            if message.write(&mut writer).is_err() {
                return;
            }
        }
    });
    if spawned.is_err() {
        return;
    }
    loop {
        match Message::read(&mut reader) {
            Ok(message) => receive(id, message),
            Err(error) => {
                lost(id, &format!("connection to the root lost: {error}"), false);
                return;
            }
        }
    }
}

/// A rank is gone, or the root.
fn lost(id: u64, text: &str, is_always_error: bool) {
    let mut state = lock();
    let is_error = is_always_error || state.config.lost_is_error;
    if let Some(communicator) = state.communicators.get_mut(&id)
        && communicator.phase != CommunicatorPhase::Finalized
        && is_error
    {
        communicator.fail(REMOTE_ERROR, text);
    }
    notify();
}

fn receive(id: u64, message: Message) {
    let mut state = lock();
    match message {
        Message::Outcome { launch, part, data } => {
            outcome(&mut state, id, launch, part as usize, &data)
        }
        Message::Lost { text } => {
            drop(state);
            lost(id, &text, false);
        }
        Message::SplitDone {
            number,
            rank,
            size,
            magic,
        } => {
            let found = state.communicators.get_mut(&id);
            let split = found.and_then(|c| Some((c.splits.remove(&number)?, c.address)));
            let Some((new, address)) = split else {
                return;
            };
            if let Some(child) = state.communicators.get_mut(&new) {
                (child.rank, child.size) = (rank as i32, size as i32);
            }
            connect(&mut state, new, address, magic);
        }
        message => {
            let Some(communicator) = state.communicators.get_mut(&id) else {
                return;
            };
            match message {
                Message::Welcome => communicator.phase = CommunicatorPhase::Ready,
                Message::Refused { code, text } => communicator.fail(code, &text),
                Message::Finalized => communicator.phase = CommunicatorPhase::Finalized,
                Message::Mismatch { text } => {
                    communicator.fail(INVALID_USAGE, &text);
                    state.violation("mismatch", &format!("communicator {id}: {text}"));
                }
                _ => {}
            }
        }
    }
    notify();
}

/// Stores received data as the result of a part of a launch.
fn outcome(state: &mut Locked, id: u64, number: u64, index: usize, data: &[u8]) {
    let Some(launch) = state
        .communicators
        .get(&id)
        .and_then(|c| c.launches.get(&number))
    else {
        return;
    };
    let to = launch.parts.get(index).map_or(0, |part| part.receive);
    let found = state.memory.containing(to);
    let is_there = found.is_some_and(|a| to + data.len() as u64 <= a.start + a.bytes);
    if is_there && !data.is_empty() {
        state.touching += 1;
        state.unlocked(|| {
            // SAFETY: the range is live as found just before; freeing waits for `touching`.
            unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to as *mut u8, data.len()) };
        });
        state.touching -= 1;
        notify();
    }
    let Some(communicator) = state.communicators.get_mut(&id) else {
        return;
    };
    let Some(launch) = communicator.launches.get_mut(&number) else {
        return;
    };
    launch.missing -= 1;
    if launch.missing == 0 {
        let position = launch.position;
        communicator.launches.remove(&number);
        state.complete(position.0, position.1);
    }
}
