//! The layout of a trace, from the events of all ranks: which tracks there are, and what goes where.
//!
//! Two families of tracks. One "process" per tensor with rank 0's view of its life, as Horovod writes it: scripts
//! that read such files find what they know. And one process per rank, whose tracks are its real threads.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use horovod_protocol::{ProcessSetId, Rank};

use super::batch::Batch;
use super::object::Object;
use super::report::{Event, Nanos, Report, Span, StageReport, Stamp, Text, ThreadId};
use super::trace::Trace;

/// The process of rank `r` is this number plus `r`: far above those of the tensors.
const RANK_PIDS: u64 = 1_000_000_000;
/// Ranks are shown above the tensors.
const RANK_SORT: i64 = -1_000_000;
/// Tensors whose tracks are remembered; a name that comes back after that gets another track.
const TRACKS_MAX: usize = 1 << 16;
/// Items of executions that wait for the reports of other ranks.
const WAITING_ITEMS_MAX: usize = 1 << 18;
/// Names of tensors that a fused operation shows.
const NAMES_SHOWN_MAX: usize = 8;
/// Events after which others get their turn: some 50 us.
const AT_A_STRETCH: u32 = 512;
/// A queue this short is no news.
const QUEUE_SHOWN_FROM: Nanos = 1_000;

/// Ranks and threads, for the names of tracks.
#[derive(Clone, Debug)]
pub(super) struct Cast {
    pub(super) ranks: Vec<Member>,
    /// The wall clock when the engine started, in microseconds since 1970.
    pub(super) epoch_micros: u64,
}

/// One rank of the cast.
#[derive(Clone, Debug)]
pub(super) struct Member {
    pub(super) hostname: Arc<str>,
    pub(super) pid: u32,
}

/// Writes one file.
pub(super) struct Layout {
    path: PathBuf,
    trace: Trace,
    cast: Cast,
    tracks: Vec<Track>,
    by_name: HashMap<(ProcessSetId, Arc<str>), usize>,
    /// Steps repeat, so this comes next.
    next_track: usize,
    last_pid: u64,
    ranks: HashSet<u32>,
    threads: HashSet<(u32, ThreadId)>,
    /// By place in the job's order: executions that some members have reported.
    waiting: BTreeMap<u64, WaitingReports>,
    waiting_items: usize,
    /// Events since others had their turn.
    written: u32,
}

struct Track {
    set: ProcessSetId,
    name: Arc<str>,
    pid: u64,
    /// End of what was written last; later events begin no earlier, whatever other clocks say.
    end: Nanos,
}

#[derive(Default)]
struct WaitingReports {
    /// The report of the member whose view is shown.
    main: Option<Report>,
    /// When each member submitted each item.
    ready: Vec<(Rank, Vec<Option<Nanos>>)>,
}

/// From a rank's clock to that of rank 0.
pub(super) fn shifted(at: Nanos, shift: i64) -> Nanos {
    at.saturating_add_signed(shift)
}

impl Layout {
    pub(super) fn create(path: &Path, cast: Cast) -> io::Result<Self> {
        let mut layout = Self {
            path: path.to_owned(),
            trace: Trace::create(path)?,
            cast,
            tracks: Vec::new(),
            by_name: HashMap::new(),
            next_track: 0,
            last_pid: 0,
            ranks: HashSet::new(),
            threads: HashSet::new(),
            waiting: BTreeMap::new(),
            waiting_items: 0,
            written: 0,
        };
        let began = layout.cast.epoch_micros;
        layout.metadata("process_name", 0, None, |args| {
            args.number("start_time_since_epoch_in_micros", began);
        })?;
        layout.sort_index(0, 0)?;
        layout.trace.flush()?;
        Ok(layout)
    }

    /// The file.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Everything that was added so far is in the file after this.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.trace.flush()
    }

    /// Writes what still waits for other ranks.
    pub(super) fn close(&mut self) -> io::Result<()> {
        while let Some((_, waiting)) = self.waiting.pop_first() {
            self.tensors(waiting)?;
        }
        self.trace.flush()
    }

    /// The name of a thread of a rank; the first counts.
    pub(super) fn thread(&mut self, rank: Rank, thread: ThreadId, name: &str) -> io::Result<()> {
        if thread == 0 || !self.threads.insert((rank.0, thread)) {
            return Ok(());
        }
        let pid = self.rank(rank)?;
        self.metadata("thread_name", pid, Some(thread), |args| {
            args.text("name", name);
        })
    }

    /// Events that another rank has sent.
    pub(super) fn batch(&mut self, rank: Rank, batch: Batch, shift: i64) -> io::Result<()> {
        for (thread, name) in batch.threads {
            self.thread(rank, thread, &name)?;
        }
        if batch.dropped > 0 {
            let at = batch.events.last().map_or(0, |event| match event {
                Event::Report(report) => report.end,
                Event::Span(span) => span.end,
            });
            self.dropped(rank, batch.dropped, shifted(at, shift))?;
        }
        for event in batch.events {
            self.event(rank, event, shift)?;
        }
        Ok(())
    }

    /// One event of one rank.
    pub(super) fn event(&mut self, rank: Rank, event: Event, shift: i64) -> io::Result<()> {
        match event {
            Event::Span(span) => self.span(rank, &span, shift),
            Event::Report(mut report) => {
                if shift != 0 {
                    report.shift(shift);
                }
                self.execution(rank, &report)?;
                self.wait_for_others(rank, report)
            }
        }
    }

    /// A batch of answers of the coordinator was about to be carried out.
    pub(super) fn cycle(&mut self, at: Nanos) -> io::Result<()> {
        self.put(|e| {
            e.text("ph", "i").text("name", "CYCLE_START");
            e.micros("ts", at).text("s", "g");
        })
    }

    /// Says that events of a rank are missing.
    pub(super) fn dropped(&mut self, rank: Rank, count: u64, at: Nanos) -> io::Result<()> {
        let pid = self.rank(rank)?;
        self.put(|e| {
            e.text("ph", "i").text("name", "EVENTS_DROPPED");
            e.micros("ts", at).number("pid", pid).text("s", "p");
            e.object("args", |args| {
                args.number("count", count);
            });
        })
    }

    /// How well the clock of a rank is known.
    pub(super) fn clock(&mut self, rank: Rank, shift: i64, error: Nanos) -> io::Result<()> {
        let pid = self.rank(rank)?;
        self.metadata("clock_of_rank", pid, None, |args| {
            args.signed("shift_ns", shift);
            args.number("error_at_most_ns", error);
        })
    }

    /// The process of a rank, introduced when it is first needed.
    fn rank(&mut self, rank: Rank) -> io::Result<u64> {
        let pid = RANK_PIDS + u64::from(rank.0);
        if self.ranks.insert(rank.0) {
            let (host, process) = match self.cast.ranks.get(rank.index()) {
                Some(member) => (member.hostname.clone(), member.pid),
                None => ("".into(), 0),
            };
            self.metadata("process_name", pid, None, |args| {
                args.text("name", &format!("rank {} on {host}", rank.0));
            })?;
            self.metadata("process_labels", pid, None, |args| {
                args.text("labels", &format!("process {process}"));
            })?;
            self.sort_index(pid, RANK_SORT + i64::from(rank.0))?;
        }
        Ok(pid)
    }

    /// The place in `tracks` of a tensor's, introduced when it is first needed.
    fn track(&mut self, set: ProcessSetId, name: &Text) -> io::Result<usize> {
        let same = |track: &Track| track.set == set && *track.name == **name;
        if self.tracks.get(self.next_track).is_some_and(same) {
            self.next_track += 1;
            return Ok(self.next_track - 1);
        }
        let name: Arc<str> = match name {
            Text::Shared(name) => name.clone(),
            Text::Static(name) => (*name).into(),
        };
        let key = (set, name);
        if let Some(&index) = self.by_name.get(&key) {
            self.next_track = index + 1;
            return Ok(index);
        }
        if self.tracks.len() >= TRACKS_MAX {
            self.tracks.clear();
            self.by_name.clear();
        }
        self.last_pid += 1;
        let (index, pid, name) = (self.tracks.len(), self.last_pid, key.1.clone());
        self.by_name.insert(key, index);
        self.tracks.push(Track {
            set,
            name: name.clone(),
            pid,
            end: 0,
        });
        self.next_track = index + 1;
        self.metadata("process_name", pid, None, |args| {
            if set == ProcessSetId::GLOBAL {
                args.text("name", &name);
            } else {
                args.text("name", &format!("{name} (process set {})", set.0));
            }
        })?;
        self.sort_index(pid, pid.cast_signed())?;
        Ok(index)
    }

    /// The work of a rank's threads for one execution.
    fn execution(&mut self, rank: Rank, report: &Report) -> io::Result<()> {
        let pid = self.rank(rank)?;
        for item in &report.items {
            if let Some(Stamp { at, thread }) = item.submitted {
                self.put(|e| {
                    e.text("ph", "i").text("name", &item.name);
                    e.text("cat", "submit").micros("ts", at);
                    place(e, pid, thread);
                    e.text("s", "t");
                })?;
            }
        }
        let mut names = String::new();
        for (i, item) in report.items.iter().take(NAMES_SHOWN_MAX).enumerate() {
            names.push_str(if i == 0 { "" } else { ", " });
            names.push_str(&item.name);
        }
        if report.items.len() > NAMES_SHOWN_MAX {
            names.push_str(", ...");
        }
        self.put(|e| {
            complete(e, &report.op, "operation", report.begin, report.end);
            place(e, pid, report.thread);
            e.object("args", |args| {
                args.number("seq", report.seq);
                args.number("process_set", u64::from(report.set.0));
                args.number("tensors", report.items.len() as u64);
                args.number("bytes", report.bytes);
                let queued = report.begin.saturating_sub(report.scheduled);
                args.micros("queued_us", queued);
                algorithm(args, &report.stages);
                args.text("names", &names);
            });
        })?;
        for stage in &report.stages {
            self.put(|e| {
                complete(e, &stage.name, "stage", stage.begin, stage.end);
                place(e, pid, report.thread);
            })?;
        }
        Ok(())
    }

    fn span(&mut self, rank: Rank, span: &Span, shift: i64) -> io::Result<()> {
        let pid = self.rank(rank)?;
        let (begin, end) = (shifted(span.begin, shift), shifted(span.end, shift));
        self.put(|e| {
            if begin == end {
                e.text("ph", "i").text("name", &span.name);
                e.text("s", "t").micros("ts", begin);
            } else {
                complete(e, &span.name, "wait", begin, end);
            }
            place(e, pid, span.thread);
            if !span.detail.is_empty() {
                e.object("args", |args| {
                    args.text("detail", &span.detail);
                });
            }
        })?;
        if rank == Rank(0) && &*span.name == "BARRIER" {
            let index = self.track(ProcessSetId::GLOBAL, &Text::Static("barrier.noname"))?;
            let Track {
                pid, end: floor, ..
            } = self.tracks[index];
            let (begin, end) = (begin.max(floor), end.max(floor));
            self.mark(&Mark::begin("NEGOTIATE_BARRIER", begin), 0, pid)?;
            self.mark(&Mark::end(end), 0, pid)?;
            self.tracks[index].end = end;
        }
        Ok(())
    }

    /// The track of a tensor shows when each member was ready: keep it until all have told.
    fn wait_for_others(&mut self, rank: Rank, report: Report) -> io::Result<()> {
        let seq = report.seq;
        let members = match &report.members {
            Some(members) => members.len(),
            None => self.cast.ranks.len(),
        };
        let waiting = self.waiting.entry(seq).or_default();
        let ready = report.items.iter().map(|i| i.submitted.map(|s| s.at));
        waiting.ready.push((rank, ready.collect()));
        self.waiting_items += report.items.len();
        if report.items.iter().any(|item| item.result.is_some()) {
            waiting.main = Some(report);
        }
        let mut next = (waiting.ready.len() >= members).then_some(seq);
        loop {
            if let Some(waiting) = next.and_then(|seq| self.waiting.remove(&seq)) {
                self.tensors(waiting)?;
            }
            if self.waiting_items <= WAITING_ITEMS_MAX {
                return Ok(());
            }
            next = self.waiting.keys().next().copied();
            if next.is_none() {
                return Ok(());
            }
        }
    }

    /// The tensors' own tracks.
    fn tensors(&mut self, waiting: WaitingReports) -> io::Result<()> {
        let items: usize = waiting.ready.iter().map(|(_, items)| items.len()).sum();
        self.waiting_items = self.waiting_items.saturating_sub(items);
        // Without it there is nobody's view to show.
        let Some(report) = waiting.main else {
            return Ok(());
        };
        let negotiate = format!("NEGOTIATE_{}", &*report.op);
        let scheduled = Mark::end(report.scheduled);
        let life = life(&report);
        let members: Vec<(u64, &[Option<Nanos>])> = waiting
            .ready
            .iter()
            .map(|(rank, items)| (place_of(&report, *rank) as u64, &items[..]))
            .collect();
        let mut ready: Vec<(u64, Nanos)> = Vec::new();
        for (index, item) in report.items.iter().enumerate() {
            let track = self.track(report.set, &item.name)?;
            let Track {
                pid, end: floor, ..
            } = self.tracks[track];
            let order = report.scheduled.max(floor);
            let at = |items: &[Option<Nanos>]| items.get(index).copied().flatten();
            let submitted = |(place, items): &(u64, &[Option<Nanos>])| {
                at(items).map(|at| (*place, at.clamp(floor, order)))
            };
            ready.clear();
            ready.extend(members.iter().filter_map(submitted));
            ready.sort_unstable_by_key(|(place, at)| (*at, *place));
            let first = ready.first().map_or(order, |(_, at)| *at);
            self.put(|e| {
                e.text("ph", "B").text("name", &negotiate);
                e.micros("ts", first).number("pid", pid);
            })?;
            for (place, at) in &ready {
                self.put(|e| {
                    e.text("ph", "X").decimal("name", *place);
                    e.micros("ts", *at).number("pid", pid).number("dur", 0);
                })?;
            }
            self.mark(&scheduled, floor, pid)?;
            for mark in &life {
                self.mark(mark, floor, pid)?;
            }
            let end = life
                .last()
                .map_or(order, |last| last.at)
                .max(report.end)
                .max(floor);
            self.put(|e| {
                e.text("ph", "E").micros("ts", end).number("pid", pid);
                if let Some(result) = &item.result {
                    e.object("args", |args| {
                        args.text("dtype", &result.dtype);
                        args.text("shape", &result.shape);
                        args.number("bytes", result.bytes);
                        algorithm(args, &report.stages);
                        args.number("fused_tensors", report.items.len() as u64);
                        args.number("seq", report.seq);
                    });
                }
            })?;
            self.tracks[track].end = end;
        }
        Ok(())
    }

    /// Puts a mark on a tensor's track, no earlier than what is there already.
    fn mark(&mut self, mark: &Mark<'_>, floor: Nanos, pid: u64) -> io::Result<()> {
        self.put(|e| {
            if mark.at >= floor {
                e.fields(&mark.text);
            } else {
                mark.fields(e, floor);
            }
            e.number("pid", pid);
        })
    }

    fn put(&mut self, fields: impl FnOnce(&mut Object<'_>)) -> io::Result<()> {
        self.written += 1;
        if self.written == AT_A_STRETCH {
            self.written = 0;
            // A low priority alone does not help those who wake up: what runs may go on for milliseconds.
            std::thread::yield_now();
        }
        self.trace.event(fields)
    }

    fn metadata(
        &mut self,
        name: &str,
        pid: u64,
        thread: Option<ThreadId>,
        args: impl FnOnce(&mut Object<'_>),
    ) -> io::Result<()> {
        self.put(|e| {
            e.text("name", name).text("ph", "M").number("pid", pid);
            if let Some(thread) = thread {
                e.number("tid", u64::from(thread));
            }
            e.object("args", args);
        })
    }

    fn sort_index(&mut self, pid: u64, index: i64) -> io::Result<()> {
        self.metadata("process_sort_index", pid, None, |args| {
            args.signed("sort_index", index);
        })
    }
}

/// A beginning or an end that many tracks have in common, so it is made once.
struct Mark<'a> {
    /// Name of the span that begins; `None` ends the last one.
    name: Option<&'a str>,
    at: Nanos,
    /// All of it but the track.
    text: Vec<u8>,
}

impl<'a> Mark<'a> {
    fn begin(name: &'a str, at: Nanos) -> Self {
        Self::new(Some(name), at)
    }

    fn end(at: Nanos) -> Self {
        Self::new(None, at)
    }

    fn new(name: Option<&'a str>, at: Nanos) -> Self {
        let mut mark = Self {
            name,
            at,
            text: Vec::new(),
        };
        mark.text = Object::part(|e| mark.fields(e, at));
        mark
    }

    fn fields(&self, e: &mut Object<'_>, at: Nanos) {
        match self.name {
            Some(name) => e.text("ph", "B").text("name", name),
            None => e.text("ph", "E"),
        };
        e.micros("ts", at);
    }
}

/// Spans of every tensor of an execution from the order to run it on, without the last end.
fn life(report: &Report) -> Vec<Mark<'_>> {
    let scheduled = report.scheduled;
    let mut marks = vec![Mark::begin(&report.op, scheduled)];
    let mut at = report.begin.max(scheduled);
    if at - scheduled >= QUEUE_SHOWN_FROM {
        marks.push(Mark::begin("QUEUE", scheduled));
        marks.push(Mark::end(at));
    }
    let mut open: Vec<Nanos> = Vec::new();
    for stage in &report.stages {
        while let Some(end) = open.pop_if(|end| *end <= stage.begin) {
            at = at.max(end);
            marks.push(Mark::end(at));
        }
        at = at.max(stage.begin);
        marks.push(Mark::begin(&stage.name, at));
        open.push(stage.end);
    }
    while let Some(end) = open.pop() {
        at = at.max(end);
        marks.push(Mark::end(at));
    }
    marks
}

impl Report {
    fn shift(&mut self, shift: i64) {
        for at in [&mut self.scheduled, &mut self.begin, &mut self.end] {
            *at = shifted(*at, shift);
        }
        for stage in &mut self.stages {
            stage.begin = shifted(stage.begin, shift);
            stage.end = shifted(stage.end, shift);
        }
        for stamp in self.items.iter_mut().filter_map(|i| i.submitted.as_mut()) {
            stamp.at = shifted(stamp.at, shift);
        }
    }
}

/// A rank's number in the process set of a report.
fn place_of(report: &Report, rank: Rank) -> usize {
    match &report.members {
        Some(members) => members.iter().position(|m| *m == rank).unwrap_or(0),
        None => rank.index(),
    }
}

/// A complete event: `X` with a beginning and a duration.
fn complete(e: &mut Object<'_>, name: &str, category: &str, begin: Nanos, end: Nanos) {
    e.text("ph", "X").text("name", name).text("cat", category);
    e.micros("ts", begin);
    e.micros("dur", end.saturating_sub(begin));
}

fn place(e: &mut Object<'_>, pid: u64, thread: ThreadId) {
    e.number("pid", pid).number("tid", u64::from(thread));
}

/// The algorithm is the outermost stage that says so: the first that is not only a copy.
fn algorithm(args: &mut Object<'_>, stages: &[StageReport]) {
    let mut stages = stages.iter();
    if let Some(stage) = stages.find(|stage| !stage.name.starts_with("MEMCPY_")) {
        args.text("algorithm", &stage.name);
    }
}

#[cfg(test)]
mod tests;
