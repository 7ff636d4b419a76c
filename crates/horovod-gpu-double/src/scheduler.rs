//! The thread that carries out what streams hold: one operation at a time, of a stream chosen by the seed among those
//! whose next operation may run, after a delay chosen by it.
//!
//! Collectives are only begun here and end when the other ranks have answered, so that streams overlap.

use std::sync::Once;
use std::time::{Duration, Instant};

use crate::nccl;
use crate::state::{DriverState, Locked, lock, notify};
use crate::stream::{Operation, StreamWork};
use crate::thread;

/// Starts the thread, once per process.
pub(crate) fn start() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let thread = std::thread::Builder::new().name("gpu-double".to_owned());
        // Without it nothing would ever end, which the tests' limits show.
        let _ = thread.spawn(run);
    });
}

fn run() {
    let mut state = lock();
    loop {
        match state.choose() {
            Ok((id, operation)) => carry_out(&mut state, id, operation),
            Err(Some(pause)) => state.sleep_for(pause),
            Err(None) => state.sleep(),
        }
    }
}

impl DriverState {
    /// Takes the next operation out of a stream; else how long to wait for the first that may run.
    fn choose(&mut self) -> Result<(u64, Operation), Option<Duration>> {
        let eligible: Vec<u64> = self
            .streams
            .iter()
            .filter(|(_, stream)| !stream.is_running)
            .filter(|(_, stream)| {
                stream.queue.front().is_some_and(|operation| {
                    let is_open = !matches!(operation.work, StreamWork::Gate(gate) if self.closed_gates.contains(&gate));
                    is_open && operation.after.iter().all(|place| self.has_passed(*place))
                })
            })
            .map(|(id, _)| *id)
            .collect();
        let now = Instant::now();
        let longest = self.config.delay.as_micros() as u64;
        let mut ready = Vec::new();
        let mut pause: Option<Duration> = None;
        for id in eligible {
            let delay = match longest {
                0 => 0,
                _ => self.random.below(longest + 1),
            };
            let Some(stream) = self.streams.get_mut(&id) else {
                continue;
            };
            let duration = stream.queue.front().map_or(Duration::ZERO, |o| o.duration);
            let start = *stream
                .not_before
                .get_or_insert(now + Duration::from_micros(delay) + duration);
            if start <= now {
                ready.push(id);
            } else {
                let wait = start - now;
                pause = Some(pause.map_or(wait, |p| p.min(wait)));
            }
        }
        if ready.is_empty() {
            return Err(pause);
        }
        let id = ready[self.random.below(ready.len() as u64) as usize];
        let stream = self.streams.get_mut(&id).ok_or(None)?;
        let operation = stream.queue.pop_front().ok_or(None)?;
        stream.is_running = true;
        stream.not_before = None;
        Ok((id, operation))
    }

    /// An operation has ended.
    pub(crate) fn complete(&mut self, id: u64, number: u64) {
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.completed = stream.completed.max(number);
            stream.is_running = false;
            if stream.is_destroyed && stream.is_idle() {
                self.streams.remove(&id);
            }
        }
        notify();
    }
}

fn carry_out(state: &mut Locked, id: u64, operation: Operation) {
    let all_live = operation
        .allocations
        .iter()
        .all(|allocation| state.memory.is_live(*allocation));
    match operation.work {
        StreamWork::Local(body) if all_live => {
            state.touching += 1;
            state.unlocked(body);
            state.touching -= 1;
            notify();
        }
        // Operations without their memory were reported as a violation when the memory was freed.
        StreamWork::EndOf(allocation) => state.memory.end(allocation),
        StreamWork::Nothing | StreamWork::Gate(_) | StreamWork::Local(_) => {}
        StreamWork::HostFunction(function, argument) => {
            state.host_learns(&operation.clock);
            state.unlocked(|| {
                thread::with(|thread| thread.in_host_function = true);
                function(argument as *mut std::ffi::c_void);
                thread::with(|thread| thread.in_host_function = false);
            });
        }
        StreamWork::Record(event) => {
            if let Some(event) = state.events.get_mut(&event)
                && event
                    .recorded
                    .as_ref()
                    .is_some_and(|(place, _)| *place == (id, operation.number))
            {
                event.reached = Some(Instant::now());
            }
        }
        StreamWork::Launch(communicator, launch) => {
            // It completes the operation when all parts have ended.
            if nccl::communicator::begin(state, communicator, launch, all_live) {
                return;
            }
        }
    }
    state.complete(id, operation.number);
}
