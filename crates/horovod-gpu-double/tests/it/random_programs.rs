//! Random programs of streams, events and the host: exactly those accesses are found that a search through the graph of
//! all operations finds, and correct programs compute what they compute in order, whatever the delays.
#![allow(clippy::unwrap_used, reason = "a test ends where something is missing")]

use crate::rig::{bytes_of, event, rig, user_stream, violation_count};
use horovod_gpu_double::Handle;
use horovod_gpu_double::driver::stream::{
    cuEventQuery, cuEventRecord, cuEventSynchronize, cuStreamCreate, cuStreamSynchronize,
    cuStreamWaitEvent,
};
use horovod_gpu_double::testing::{double_alloc, double_stream_read, double_stream_write};

const BYTES: usize = 32;

/// SplitMix64, not the double's.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) as usize % limit
    }
}

/// Operations that come before one, by number.
type Before = Vec<bool>;

struct Access {
    operation: usize,
    memory: usize,
    from: usize,
    to: usize,
    writes: bool,
}

/// A program while it is being made: what was submitted, and what comes before what.
struct Program {
    numbers: Numbers,
    streams: Vec<Handle>,
    /// The last operation of each stream.
    last: Vec<Option<usize>>,
    before: Vec<Before>,
    /// The stream of each operation.
    of: Vec<usize>,
    host: Vec<usize>,
    events: Vec<(Handle, Option<usize>)>,
    memory: Vec<u64>,
    accesses: Vec<Access>,
}

/// The first stream is the default one, the second is ordered with it.
const DEFAULT: usize = 0;
const BLOCKING: usize = 1;

impl Program {
    fn new(seed: u64) -> Self {
        let mut numbers = Numbers(seed);
        let mut blocking = std::ptr::null_mut();
        // SAFETY: a place for one handle.
        assert_eq!(unsafe { cuStreamCreate(&raw mut blocking, 0) }, 0);
        let mut streams = vec![std::ptr::null_mut(), blocking];
        streams.extend((0..1 + numbers.below(3)).map(|_| user_stream()));
        let memory = (0..1 + numbers.below(3))
            .map(|_| double_alloc(0, BYTES))
            .collect();
        Self {
            numbers,
            last: vec![None; streams.len()],
            streams,
            before: Vec::new(),
            of: Vec::new(),
            host: Vec::new(),
            events: (0..3).map(|_| (event(), None)).collect(),
            memory,
            accesses: Vec::new(),
        }
    }

    /// Operations that precede an operation submitted to a stream now.
    fn history(&self, stream: usize, also: Option<usize>) -> Before {
        let number = self.before.len();
        let mut direct: Vec<usize> = self.host.clone();
        direct.extend(also);
        direct.extend(self.last[stream]);
        match stream {
            DEFAULT => direct.extend(self.last[BLOCKING]),
            BLOCKING => direct.extend(self.last[DEFAULT]),
            _ => {}
        }
        let mut before = vec![false; number];
        for earlier in direct {
            before[earlier] = true;
            for (all, theirs) in before.iter_mut().zip(&self.before[earlier]) {
                *all |= *theirs;
            }
        }
        before
    }

    /// A new operation of a stream; what must come before it besides.
    fn operation(&mut self, stream: usize, also: Option<usize>) -> usize {
        let number = self.before.len();
        self.before.push(self.history(stream, also));
        self.of.push(stream);
        self.last[stream] = Some(number);
        number
    }

    /// Operations that conflict with an access and need not have ended before it.
    fn unordered(&self, before: &Before, access: &Access) -> Vec<usize> {
        self.accesses
            .iter()
            .filter(|other| other.memory == access.memory)
            .filter(|other| other.from < access.to && access.from < other.to)
            .filter(|other| other.writes || access.writes)
            .map(|other| other.operation)
            .filter(|other| !before[*other])
            .collect()
    }

    fn range(&mut self) -> (usize, usize, usize) {
        let memory = self.numbers.below(self.memory.len());
        let from = self.numbers.below(BYTES);
        (memory, from, from + 1 + self.numbers.below(BYTES - from))
    }

    fn any_stream(&mut self) -> usize {
        self.numbers.below(self.streams.len())
    }

    fn record(&mut self, stream: usize, event: usize) {
        // SAFETY: handles that exist.
        let code = unsafe { cuEventRecord(self.events[event].0, self.streams[stream]) };
        assert_eq!(code, 0);
        let operation = self.operation(stream, None);
        self.events[event].1 = Some(operation);
    }

    fn wait(&mut self, stream: usize, event: usize) {
        // SAFETY: handles that exist.
        let code = unsafe { cuStreamWaitEvent(self.streams[stream], self.events[event].0, 0) };
        assert_eq!(code, 0);
        let recorded = self.events[event].1;
        self.operation(stream, recorded);
    }

    /// Something that orders, at random.
    fn synchronise(&mut self) {
        let (stream, event) = (self.any_stream(), self.numbers.below(self.events.len()));
        match self.numbers.below(12) {
            0..5 => self.record(stream, event),
            5..9 => self.wait(stream, event),
            9 => {
                // SAFETY: an event that exists.
                if unsafe { cuEventQuery(self.events[event].0) } == 0 {
                    self.host.extend(self.events[event].1);
                }
            }
            10 => {
                // SAFETY: an event that exists.
                assert_eq!(unsafe { cuEventSynchronize(self.events[event].0) }, 0);
                self.host.extend(self.events[event].1);
            }
            _ => {
                // SAFETY: a stream that exists.
                assert_eq!(unsafe { cuStreamSynchronize(self.streams[stream]) }, 0);
                self.host.extend(self.last[stream]);
            }
        }
    }

    fn submit(&self, stream: usize, access: &Access, value: u8, into: &mut [u8]) {
        let address = self.memory[access.memory] + access.from as u64;
        let (handle, bytes) = (self.streams[stream], access.to - access.from);
        let code = if access.writes {
            // SAFETY: so many bytes.
            unsafe { double_stream_write(handle, address, bytes_of(&vec![value; bytes]), bytes) }
        } else {
            // SAFETY: so many bytes, which the test keeps until it has waited for all streams.
            unsafe { double_stream_read(handle, into.as_mut_ptr().cast(), address, bytes) }
        };
        assert_eq!(code, 0);
    }

    fn finish(&self) {
        for stream in &self.streams {
            // SAFETY: a stream that exists.
            assert_eq!(unsafe { cuStreamSynchronize(*stream) }, 0);
        }
    }
}

#[test]
fn exactly_the_unordered_accesses_are_found() {
    let (mut found, mut fine) = (0, 0);
    for seed in 0..1000 {
        let rig = rig(&format!("seed={seed},delay={}", seed % 3 * 5));
        let mut program = Program::new(seed);
        let mut read = vec![[0u8; BYTES]; 40];
        for (value, into) in read.iter_mut().enumerate() {
            program.synchronise();
            let stream = program.any_stream();
            let (memory, from, to) = program.range();
            let writes = program.numbers.below(2) == 0;
            let before = violation_count();
            let operation = program.operation(stream, None);
            let access = Access {
                operation,
                memory,
                from,
                to,
                writes,
            };
            program.submit(stream, &access, value as u8, into);
            let is_wrong = !program
                .unordered(&program.before[operation], &access)
                .is_empty();
            assert_eq!(
                violation_count() > before,
                is_wrong,
                "seed {seed}, access {value}"
            );
            found += usize::from(is_wrong);
            fine += usize::from(!is_wrong);
            program.accesses.push(access);
        }
        program.finish();
        drop(rig);
    }
    assert!(found > 1000 && fine > 1000, "{found} {fine}");
}

#[test]
fn correct_programs_have_no_violations_and_right_results() {
    for seed in 0..1000 {
        let rig = rig(&format!("seed={seed},delay={}", seed % 4 * 10));
        let mut program = Program::new(seed);
        let mut expected = vec![[0u8; BYTES]; program.memory.len()];
        for memory in 0..program.memory.len() {
            let operation = program.operation(DEFAULT, None);
            let access = Access {
                operation,
                memory,
                from: 0,
                to: BYTES,
                writes: true,
            };
            program.submit(DEFAULT, &access, 0, &mut []);
            program.accesses.push(access);
        }
        let mut read = vec![[0u8; BYTES]; 30];
        let mut wanted = Vec::new();
        for (value, into) in read.iter_mut().enumerate() {
            program.synchronise();
            let stream = program.any_stream();
            let (memory, from, to) = program.range();
            let writes = program.numbers.below(2) == 0;
            // Conflicting accesses come first: the stream waits for them.
            loop {
                let history = program.history(stream, None);
                let access = Access {
                    operation: history.len(),
                    memory,
                    from,
                    to,
                    writes,
                };
                let missing = program.unordered(&history, &access);
                let Some(first) = missing.first() else {
                    break;
                };
                program.record(program.of[*first], 0);
                program.wait(stream, 0);
            }
            let operation = program.operation(stream, None);
            let access = Access {
                operation,
                memory,
                from,
                to,
                writes,
            };
            program.submit(stream, &access, value as u8, into);
            program.accesses.push(access);
            if writes {
                expected[memory][from..to].fill(value as u8);
            } else {
                wanted.push((value, expected[memory][from..to].to_vec()));
            }
        }
        program.finish();
        rig.is_clean();
        for (at, bytes) in wanted {
            assert_eq!(read[at][..bytes.len()], bytes, "seed {seed}, access {at}");
        }
    }
}
