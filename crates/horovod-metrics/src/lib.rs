//! The figures of a running job: each rank counts, once a second the reports travel up the control tree to rank 0,
//! and rank 0 shows them.
//!
//! The engine tells what it knows, and carries the messages. Nothing here knows the engine, nor any device.
//!
//! An internal part of horovod-rs: programs use the crate `horovod`, and this interface may change in any version.
#![forbid(unsafe_code)]

mod amounts;
mod clock;
mod counters;
mod figures;
mod hang;
mod host;
mod http;
mod kinds;
mod latest_reports;
mod openmetrics;
mod periodic;
mod publisher;
mod sampler;
mod slow;
mod snapshot;
pub mod status;
mod summary;
#[cfg(feature = "testing")]
pub mod testing;
mod text;
mod trace;

use std::borrow::Borrow;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use horovod_protocol::{DecodeError, Rank, SetLateness, StalledRequest};
use horovod_transport::Topology;

use clock::Activity;
use sampler::Sampler;

pub use amounts::{counted, in_bytes};
pub use counters::Counters;
pub use figures::{
    ByKind, Course, Figure, HOST_FIGURES, HostFigures, RANK_FIGURES, RankFigures, Report, Unit,
    in_unit,
};
pub use hang::Hang;
pub use kinds::{KINDS, LINKS, Link, OperationKind};
pub use latest_reports::{FoundLateness, Round, is_message};
pub use publisher::{PublishSettings, Publisher};
pub use slow::{Cause, Slow};
pub use snapshot::{HostRow, RankRow, Snapshot};
pub use summary::Summary;
pub use trace::{TRACE_MAX, Tracer};

/// The number of a rendezvous' first generation.
const FIRST_GENERATION: u64 = 1;
/// Time between two reports.
pub const REPORT_PERIOD_NS: u64 = 1_000_000_000;
/// Operations that ranks wait for are not shown if the driver's last report is older.
const HANGS_AGE_MAX: Duration = Duration::from_secs(5);

/// A wait or an execution, which counts until this is dropped.
#[must_use = "it counts until this is dropped"]
#[derive(Debug)]
pub struct Measured<M: Borrow<Metrics>> {
    metrics: M,
    /// `None`: there are too many of them.
    activity: Option<Activity>,
}

/// As [`Measured`], for what outlives the call that begins it.
pub type MeasuredOperation = Measured<Arc<Metrics>>;

impl<M: Borrow<Metrics>> Measured<M> {
    #[inline]
    fn begin(metrics: M, activity: Activity) -> Self {
        let of: &Metrics = metrics.borrow();
        let is_counted = of.counters.clock.begins(activity, of.now());
        let activity = is_counted.then_some(activity);
        Self { metrics, activity }
    }
}

impl<M: Borrow<Metrics>> Drop for Measured<M> {
    #[inline]
    fn drop(&mut self) {
        if let Some(activity) = self.activity {
            let of: &Metrics = self.metrics.borrow();
            of.counters.clock.ends(activity, of.now());
        }
    }
}

/// The measuring of one rank in one generation.
#[derive(Debug)]
pub struct Metrics {
    /// Counted by threads and the driver.
    pub counters: Counters,
    me: Rank,
    is_on_one_host: bool,
    restarts: u64,
    started: Instant,
    places: Vec<HostOfRank>,
    reports: Mutex<latest_reports::LatestReports>,
    slow_ranks: Mutex<slow::SlowRanks>,
    /// When the next report is due, in nanoseconds since the engine started.
    due: AtomicU64,
    /// Only on the first rank of a host.
    sampler: Option<Sampler>,
    /// The last figures of the driver, and when it gave them.
    from_driver: Mutex<(DriverFigures, Instant)>,
}

/// Where a rank is.
#[derive(Clone, Debug)]
struct HostOfRank {
    host: u32,
    hostname: Arc<str>,
}

/// The driver's part of a report.
#[derive(Clone, Debug, Default)]
pub struct DriverFigures {
    /// Operations that the ranks have not agreed on.
    pub queued: usize,
    /// Operations that the ranks knew already, and all operations.
    pub cache_hits: u64,
    /// Operations that had to be described.
    pub cache_misses: u64,
    /// This rank's own lateness, where a node of the tree counts it.
    pub lateness: Vec<SetLateness>,
    /// On rank 0: operations that some ranks have begun a while ago and others have not.
    pub incomplete: Vec<StalledRequest>,
}

impl Metrics {
    /// Measures from now on. `started` is the zero of the engine's clock.
    #[must_use]
    pub fn new(topology: &Topology, started: Instant) -> Self {
        let first = topology.peers.first().map(|peer| peer.host);
        Self {
            counters: Counters::default(),
            me: topology.rank,
            is_on_one_host: topology.peers.iter().all(|peer| Some(peer.host) == first),
            restarts: topology.generation.0.saturating_sub(FIRST_GENERATION),
            started,
            places: topology
                .peers
                .iter()
                .map(|peer| HostOfRank {
                    host: peer.host.0,
                    hostname: peer.hostname.clone(),
                })
                .collect(),
            reports: Mutex::new(latest_reports::LatestReports::new(topology.size)),
            slow_ranks: Mutex::default(),
            due: AtomicU64::new(0),
            sampler: (topology.local_rank() == 0).then(Sampler::start),
            from_driver: Mutex::new((DriverFigures::default(), started)),
        }
    }

    /// Nanoseconds since the engine started.
    #[inline]
    #[must_use]
    pub fn now(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// A thread of the script waits for an operation until this is dropped.
    #[inline]
    pub fn wait(&self) -> Measured<&Self> {
        Measured::begin(self, Activity::Waiting)
    }

    /// A framework waits for an operation with a callback from its submission until this is dropped.
    #[inline]
    pub fn call(self: &Arc<Self>) -> MeasuredOperation {
        Measured::begin(self.clone(), Activity::Waiting)
    }

    /// An execution is carried out until this is dropped.
    #[inline]
    pub fn execution(self: &Arc<Self>) -> MeasuredOperation {
        Measured::begin(self.clone(), Activity::Executing)
    }

    /// The widest link between these ranks.
    #[must_use]
    pub fn link(&self, members: &[Rank]) -> Link {
        if self.is_on_one_host {
            return Link::Host;
        }
        let host = |rank: &Rank| self.places.get(rank.index()).map(|place| place.host);
        let first = members.first().and_then(host);
        if members.iter().all(|rank| host(rank) == first) {
            Link::Host
        } else {
            Link::Network
        }
    }

    /// Whether it is time for a report.
    #[inline]
    #[must_use]
    pub fn is_due(&self, now: u64) -> bool {
        now >= self.due.load(Relaxed)
    }

    /// Takes this rank's report. For the driver, when it is due, and at the end.
    pub fn report(&self, now: u64, from_driver: DriverFigures) {
        self.due
            .store(now.saturating_add(REPORT_PERIOD_NS), Relaxed);
        *lock(&self.from_driver) = (from_driver, Instant::now());
        let report = self.own_report(now);
        lock(&self.reports).put(report);
        if self.me == Rank(0) {
            self.compare_ranks();
        }
    }

    /// Finds out whether the other ranks wait for one rank all the time.
    fn compare_ranks(&self) {
        let row = |latest: &latest_reports::Latest| {
            let place = self.places.get(latest.report.rank as usize)?;
            Some(slow::Row {
                rank: latest.report.rank,
                host: place.host,
                hostname: place.hostname.clone(),
                figures: latest.report.figures.shown(),
                of_host: latest.report.host.clone(),
            })
        };
        let sample = lock(&self.reports).latest().filter_map(row).collect();
        let slow = lock(&self.slow_ranks).observe(sample).cloned();
        // No lock is held: whatever takes the log may ask for the figures.
        if let Some(slow) = slow {
            tracing::warn!("{slow}");
        }
    }

    fn own_report(&self, now: u64) -> Report {
        let (mut figures, operations, bytes) = self.counters.read(now);
        let late = {
            let (from_driver, _) = &*lock(&self.from_driver);
            figures.queued = from_driver.queued as u64;
            figures.cache_hits = from_driver.cache_hits;
            figures.cache_misses = from_driver.cache_misses;
            from_driver.lateness.clone()
        };
        host::read_process(&mut figures);
        Report {
            rank: self.me.0,
            age: Duration::ZERO,
            figures,
            late,
            operations,
            bytes,
            host: self.sampler.as_ref().map(Sampler::latest),
        }
    }

    /// Writes the message for the parent: the reports of this rank and of those that report through it. After the last
    /// one, what comes from below is to be passed on at once.
    pub fn write_message(&self, out: &mut Vec<u8>, round: Round) {
        let mut reports = lock(&self.reports);
        if round == Round::Last {
            reports.close();
        }
        reports.write(out, round);
    }

    /// A child of this rank in the tree reports. `true`: the reports are to be passed on at once.
    ///
    /// # Errors
    /// The message is not one of ours.
    pub fn take_message<F: Fn(Rank) -> Vec<SetLateness>>(
        &self,
        bytes: &[u8],
        found: &FoundLateness<F>,
    ) -> Result<bool, DecodeError> {
        let mut reports = lock(&self.reports);
        let round = reports.take(bytes, found)?;
        Ok(reports.is_closing() && round == Round::Last)
    }

    /// The figures now: on rank 0 of all ranks, elsewhere of this rank.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        let own = self.own_report(self.now());
        let mut reports = lock(&self.reports);
        reports.put(own);
        let is_shown = |rank: u32| self.me == Rank(0) || rank == self.me.0;
        let latest = reports.latest().filter(|l| is_shown(l.report.rank));
        let rows = latest.map(|latest| RankRow {
            hostname: self.hostname(latest.report.rank),
            age: latest.age(),
            report: Report {
                figures: latest.report.figures.shown(),
                ..latest.report.clone()
            },
        });
        let ranks: Vec<RankRow> = rows.collect();
        let hangs = {
            let (from_driver, at) = &*lock(&self.from_driver);
            let hostname = |rank: Rank| self.hostname(rank.0);
            let age = at.elapsed();
            // Older ones say nothing: the driver has ended the generation, and reports no more.
            match age <= HANGS_AGE_MAX {
                true => hang::grouped(&from_driver.incomplete, age, hostname),
                false => Vec::new(),
            }
        };
        let size = self.places.len() as u32;
        Snapshot {
            slow: lock(&self.slow_ranks).named().cloned(),
            ..Snapshot::new(self.me.0, size, self.restarts, ranks, hangs)
        }
    }

    fn hostname(&self, rank: u32) -> Arc<str> {
        let place = self.places.get(rank as usize);
        place.map_or_else(|| "".into(), |place| place.hostname.clone())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
