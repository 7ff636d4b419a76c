//! The figures of a rank and of a host at one moment, and how they travel. Each figure is declared once: its key, unit
//! and meaning in `hvd.stats()`, in the exported text and in the documentation follow from the table.

use std::time::Duration;

use horovod_protocol::wire::{Reader, Writer};
use horovod_protocol::{DecodeError, LATE_SETS_MAX, Lateness, SetKey, SetLateness};

use crate::kinds::{KINDS, LINKS};

/// The unit of a figure, as users see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// A number of things.
    Count,
    /// Seconds; the figure holds nanoseconds.
    Seconds,
    /// Bytes.
    Bytes,
}

/// The behaviour of a figure over time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Course {
    /// It only grows while the rank lives.
    Counter,
    /// It rises and falls.
    Gauge,
}

/// One declared figure of a `T`.
#[derive(Debug)]
pub struct Figure<T> {
    /// Its key in `hvd.stats()`, which ends with the unit.
    pub key: &'static str,
    /// The behaviour over time.
    pub course: Course,
    /// The unit.
    pub unit: Unit,
    /// Its meaning in one line.
    pub help: &'static str,
    /// Reads the figure.
    pub get: fn(&T) -> u64,
}

impl<T> Figure<T> {
    /// The value in the unit, as users see it.
    #[must_use]
    pub fn value(&self, of: &T) -> f64 {
        in_unit(self.unit, (self.get)(of))
    }
}

/// A raw figure in its unit.
#[must_use]
pub fn in_unit(unit: Unit, raw: u64) -> f64 {
    match unit {
        Unit::Seconds => raw as f64 / 1e9,
        Unit::Count | Unit::Bytes => raw as f64,
    }
}

macro_rules! figures {
    ($(#[$meta:meta])* $name:ident, $table:ident:
     $($field:ident = $key:literal, $course:ident, $unit:ident, $help:literal;)+) => {
        $(#[$meta])*
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        pub struct $name {
            $(#[doc = $help] pub $field: u64,)+
        }

        impl $name {
            /// Counters never fall: where a later reading attributes time otherwise, the former value stays.
            pub fn keep_from_falling(&mut self, before: &Self) {
                $(if Course::$course == Course::Counter {
                    self.$field = self.$field.max(before.$field);
                })+
            }

            fn write(&self, w: &mut Writer<'_>) {
                $(w.varint(self.$field);)+
            }

            fn read(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
                Ok(Self { $($field: r.varint($key)?,)+ })
            }
        }

        /// All of them, in the order of the documentation.
        pub static $table: &[Figure<$name>] = &[
            $(Figure {
                key: $key,
                course: Course::$course,
                unit: Unit::$unit,
                help: $help,
                get: |figures| figures.$field,
            },)+
        ];
    };
}

figures! {
    /// Figures of one rank that are single numbers. Times are in nanoseconds.
    RankFigures, RANK_FIGURES:
    elapsed = "elapsed_seconds", Counter, Seconds, "time since the rank initialised: the sum of the next three";
    waiting = "waiting_seconds", Counter, Seconds, "time in which the script waited for an operation and none was carried out";
    communicating = "communicating_seconds", Counter, Seconds, "time in which the script waited for an operation and one was carried out";
    computing = "computing_seconds", Counter, Seconds, "time in which the script waited for no operation";
    carrying_out = "operation_seconds", Counter, Seconds, "time in which operations were carried out, also behind the script's back";
    collectives = "collectives", Counter, Count, "executions, each of one operation or of several fused ones";
    awaited = "awaited_seconds", Counter, Seconds, "time in which all other ranks had begun an operation and this rank had not";
    last = "came_last", Counter, Count, "times that this rank was the last to begin an operation";
    queued = "queued_operations", Gauge, Count, "operations that this rank has begun and the ranks have not agreed on yet";
    cache_hits = "cache_hits", Counter, Count, "operations that the ranks knew already";
    cache_misses = "cache_misses", Counter, Count, "operations that had to be described to the ranks";
    stalls = "stalls", Counter, Count, "stall warnings, on rank 0";
    steps = "steps", Counter, Count, "steps that the script has marked by hvd.step()";
    input = "input_seconds", Counter, Seconds, "time that the script has waited for input, in known loaders or marked by hvd.phase(\"data\")";
    cpu = "cpu_seconds", Counter, Seconds, "processor time of the process, all threads together";
    memory = "memory_bytes", Gauge, Bytes, "memory of the process";
    peak_memory = "peak_memory_bytes", Gauge, Bytes, "most memory that the process has had";
}

figures! {
    /// Figures of one host. Times are in nanoseconds, of all its processors together.
    HostFigures, HOST_FIGURES:
    processors = "processors", Gauge, Count, "processors of the host";
    busy = "busy_seconds", Counter, Seconds, "processor time that all processes of the host have used";
    steal = "steal_seconds", Counter, Seconds, "processor time that the hypervisor gave to others";
    memory = "memory_bytes", Gauge, Bytes, "memory of the host";
    available = "available_memory_bytes", Gauge, Bytes, "memory that is available without swapping";
    swapped = "swapped_bytes", Gauge, Bytes, "memory in swap";
    received = "received_bytes", Counter, Bytes, "bytes received by network interfaces other than loopback";
    sent = "sent_bytes", Counter, Bytes, "bytes sent by network interfaces other than loopback";
}

impl RankFigures {
    /// The figures with times that fit each other: the three add up to the time since the rank initialised, also where
    /// they are from two readings. Two sets, or two levels of the tree, may have waited for the rank at once.
    pub(crate) fn shown(&self) -> Self {
        let script = self.waiting.saturating_add(self.communicating);
        let elapsed = script.saturating_add(self.computing);
        Self {
            elapsed,
            awaited: self.awaited.min(elapsed),
            ..*self
        }
    }
}

/// Counts by kind of operation and kind of link.
pub type ByKind = [[u64; LINKS]; KINDS];

/// All figures of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The rank.
    pub rank: u32,
    /// Time since it was taken, when it is sent.
    pub age: Duration,
    /// Single numbers. Those of lateness follow from `late`.
    pub figures: RankFigures,
    /// The lateness in each process set.
    pub late: Vec<SetLateness>,
    /// Operations: each tensor, or group, counts.
    pub operations: ByKind,
    /// Bytes of this rank's tensors.
    pub bytes: ByKind,
    /// The rank's host; only from the first rank of each host.
    pub host: Option<HostFigures>,
}

impl Report {
    /// Bytes that one report may need at most: 10 per number.
    pub(crate) const BYTES_MAX: usize =
        10 * (5 + RANK_FIGURES_COUNT + 3 * LATE_SETS_MAX + 2 * KINDS * LINKS + HOST_FIGURES_COUNT);

    /// Adds lateness that another rank has found.
    pub(crate) fn add_late(&mut self, more: &[SetLateness]) {
        for SetLateness { set, lateness } in more {
            if let Some(of) = self.late.iter_mut().find(|of| of.set == *set) {
                let own = &mut of.lateness;
                own.awaited_ns = own.awaited_ns.saturating_add(lateness.awaited_ns);
                own.last = own.last.saturating_add(lateness.last);
            } else if self.late.len() < LATE_SETS_MAX {
                let (set, lateness) = (*set, *lateness);
                self.late.push(SetLateness { set, lateness });
            }
        }
    }

    /// Takes the figures of lateness from all process sets together.
    pub(crate) fn sum_late(&mut self) {
        let sum = |get: fn(&Lateness) -> u64| {
            let all = self.late.iter().map(|of| get(&of.lateness));
            all.fold(0, u64::saturating_add)
        };
        let (awaited, last) = (sum(|l| l.awaited_ns), sum(|l| l.last));
        self.figures.awaited = awaited;
        self.figures.last = last;
    }

    pub(crate) fn write(&self, age: Duration, w: &mut Writer<'_>) {
        w.varint(u64::from(self.rank));
        w.varint(u64::try_from(age.as_nanos()).unwrap_or(u64::MAX));
        self.figures.write(w);
        let late = &self.late[..self.late.len().min(LATE_SETS_MAX)];
        w.varint(late.len() as u64);
        for SetLateness { set, lateness } in late {
            [set.0, lateness.awaited_ns, lateness.last]
                .into_iter()
                .for_each(|n| w.varint(n));
        }
        for table in [&self.operations, &self.bytes] {
            table.iter().flatten().for_each(|n| w.varint(*n));
        }
        w.u8(u8::from(self.host.is_some()));
        if let Some(host) = &self.host {
            host.write(w);
        }
    }

    pub(crate) fn read(r: &mut Reader<'_>, size: u32) -> Result<Self, DecodeError> {
        let rank = r.varint_u32("rank")?;
        if rank >= size {
            return Err(DecodeError::BadValue {
                what: "rank",
                value: u64::from(rank),
            });
        }
        let age = Duration::from_nanos(r.varint("age")?);
        let figures = RankFigures::read(r)?;
        let mut late = Vec::new();
        for _ in 0..r.count(LATE_SETS_MAX, 3, "process sets")? {
            late.push(SetLateness {
                set: SetKey(r.varint("process set")?),
                lateness: Lateness {
                    awaited_ns: r.varint("time")?,
                    last: r.varint("count")?,
                },
            });
        }
        let mut tables = [ByKind::default(); 2];
        for n in tables.iter_mut().flatten().flatten() {
            *n = r.varint("count")?;
        }
        let [operations, bytes] = tables;
        let host = match r.u8("whether a host follows")? {
            0 => None,
            1 => Some(HostFigures::read(r)?),
            value => {
                return Err(DecodeError::BadValue {
                    what: "whether a host follows",
                    value: u64::from(value),
                });
            }
        };
        Ok(Self {
            rank,
            age,
            figures,
            late,
            operations,
            bytes,
            host,
        })
    }
}

const RANK_FIGURES_COUNT: usize = size_of::<RankFigures>() / size_of::<u64>();
const HOST_FIGURES_COUNT: usize = size_of::<HostFigures>() / size_of::<u64>();
