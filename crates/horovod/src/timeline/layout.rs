//! From events of all ranks to the objects of a trace: which tracks there are, and what goes where.
//!
//! Two families of tracks. One "process" per tensor with rank 0's view of its life, as Horovod writes it: scripts
//! that read such files find what they know. And one process per rank, whose tracks are its real threads.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use horovod_protocol::{ProcessSetId, Rank};

use super::batch::Batch;
use super::report::{Event, Nanos, Report, Span, Stage, Stamp, Text, ThreadId};
use super::trace::{Trace, push_micros, push_number, push_string};

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
/// A queue this short is no news.
const QUEUE_SHOWN_FROM: Nanos = 1_000;

/// Who is who, for the names of tracks.
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
    tracks: HashMap<(ProcessSetId, Arc<str>), Track>,
    last_pid: u64,
    ranks: HashSet<u32>,
    threads: HashSet<(u32, ThreadId)>,
    /// By place in the job's order: executions that some members have reported.
    waiting: BTreeMap<u64, Waiting>,
    waiting_items: usize,
    line: Vec<u8>,
}

#[derive(Clone, Copy)]
struct Track {
    pid: u64,
    /// End of what was written last; later events begin no earlier, whatever other clocks say.
    end: Nanos,
}

#[derive(Default)]
struct Waiting {
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
            tracks: HashMap::new(),
            last_pid: 0,
            ranks: HashSet::new(),
            threads: HashSet::new(),
            waiting: BTreeMap::new(),
            waiting_items: 0,
            line: Vec::new(),
        };
        let mut args = b"\"start_time_since_epoch_in_micros\":".to_vec();
        push_number(&mut args, layout.cast.epoch_micros);
        layout.metadata("process_name", 0, None, &args)?;
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
        let mut args = b"\"name\":".to_vec();
        push_string(&mut args, name);
        self.metadata("thread_name", pid, Some(thread), &args)
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
        let mut line = self.open("i");
        line.extend_from_slice(b",\"name\":\"CYCLE_START\",\"ts\":");
        push_micros(&mut line, at);
        line.extend_from_slice(b",\"s\":\"g\"}");
        self.put(line)
    }

    /// Says that events of a rank are missing.
    pub(super) fn dropped(&mut self, rank: Rank, count: u64, at: Nanos) -> io::Result<()> {
        let mut args = b"\"count\":".to_vec();
        push_number(&mut args, count);
        self.note(rank, "EVENTS_DROPPED", at, &args)
    }

    /// How well the clock of a rank is known.
    pub(super) fn clock(&mut self, rank: Rank, shift: i64, error: Nanos) -> io::Result<()> {
        let pid = self.rank(rank)?;
        let args = format!("\"shift_ns\":{shift},\"error_at_most_ns\":{error}");
        self.metadata("clock_of_rank", pid, None, args.as_bytes())
    }

    fn note(&mut self, rank: Rank, name: &str, at: Nanos, args: &[u8]) -> io::Result<()> {
        let pid = self.rank(rank)?;
        let mut line = self.open("i");
        line.extend_from_slice(b",\"name\":");
        push_string(&mut line, name);
        line.extend_from_slice(b",\"ts\":");
        push_micros(&mut line, at);
        line.extend_from_slice(b",\"pid\":");
        push_number(&mut line, pid);
        line.extend_from_slice(b",\"s\":\"p\",\"args\":{");
        line.extend_from_slice(args);
        line.extend_from_slice(b"}}");
        self.put(line)
    }

    /// The process of a rank, introduced when it is first needed.
    fn rank(&mut self, rank: Rank) -> io::Result<u64> {
        let pid = RANK_PIDS + u64::from(rank.0);
        if self.ranks.insert(rank.0) {
            let (host, process) = match self.cast.ranks.get(rank.index()) {
                Some(member) => (member.hostname.clone(), member.pid),
                None => ("".into(), 0),
            };
            let mut args = b"\"name\":".to_vec();
            push_string(&mut args, &format!("rank {} on {host}", rank.0));
            self.metadata("process_name", pid, None, &args)?;
            let labels = format!("\"labels\":\"process {process}\"");
            self.metadata("process_labels", pid, None, labels.as_bytes())?;
            self.sort_index(pid, RANK_SORT + i64::from(rank.0))?;
        }
        Ok(pid)
    }

    /// The track of a tensor, introduced when it is first needed.
    fn track(&mut self, set: ProcessSetId, name: &Text) -> io::Result<Track> {
        let name: Arc<str> = match name {
            Text::Shared(name) => name.clone(),
            Text::Static(name) => (*name).into(),
        };
        let key = (set, name);
        if let Some(track) = self.tracks.get(&key) {
            return Ok(*track);
        }
        if self.tracks.len() >= TRACKS_MAX {
            self.tracks.clear();
        }
        self.last_pid += 1;
        let track = Track {
            pid: self.last_pid,
            end: 0,
        };
        let mut args = b"\"name\":".to_vec();
        if set == ProcessSetId::GLOBAL {
            push_string(&mut args, &key.1);
        } else {
            push_string(&mut args, &format!("{} (process set {})", key.1, set.0));
        }
        self.tracks.insert(key, track);
        self.metadata("process_name", track.pid, None, &args)?;
        self.sort_index(track.pid, track.pid.cast_signed())?;
        Ok(track)
    }

    /// What a rank's threads did for one execution.
    fn execution(&mut self, rank: Rank, report: &Report) -> io::Result<()> {
        let pid = self.rank(rank)?;
        for item in &report.items {
            if let Some(Stamp { at, thread }) = item.submitted {
                let mut line = self.open("i");
                line.extend_from_slice(b",\"name\":");
                push_string(&mut line, &item.name);
                line.extend_from_slice(b",\"cat\":\"submit\",\"ts\":");
                push_micros(&mut line, at);
                push_place(&mut line, pid, thread);
                line.extend_from_slice(b",\"s\":\"t\"}");
                self.put(line)?;
            }
        }
        let mut line = self.complete(&report.op, "operation", report.begin, report.end);
        push_place(&mut line, pid, report.thread);
        line.extend_from_slice(b",\"args\":{\"seq\":");
        push_number(&mut line, report.seq);
        line.extend_from_slice(b",\"process_set\":");
        push_number(&mut line, u64::from(report.set.0));
        line.extend_from_slice(b",\"tensors\":");
        push_number(&mut line, report.items.len() as u64);
        line.extend_from_slice(b",\"bytes\":");
        push_number(&mut line, report.bytes);
        line.extend_from_slice(b",\"queued_us\":");
        push_micros(&mut line, report.begin.saturating_sub(report.scheduled));
        push_algorithm(&mut line, &report.stages);
        line.extend_from_slice(b",\"names\":");
        let mut names = String::new();
        for (i, item) in report.items.iter().take(NAMES_SHOWN_MAX).enumerate() {
            names.push_str(if i == 0 { "" } else { ", " });
            names.push_str(&item.name);
        }
        if report.items.len() > NAMES_SHOWN_MAX {
            names.push_str(", ...");
        }
        push_string(&mut line, &names);
        line.extend_from_slice(b"}}");
        self.put(line)?;
        for stage in &report.stages {
            let mut line = self.complete(&stage.name, "stage", stage.begin, stage.end);
            push_place(&mut line, pid, report.thread);
            line.push(b'}');
            self.put(line)?;
        }
        Ok(())
    }

    fn span(&mut self, rank: Rank, span: &Span, shift: i64) -> io::Result<()> {
        let pid = self.rank(rank)?;
        let (begin, end) = (shifted(span.begin, shift), shifted(span.end, shift));
        let mut line = if begin == end {
            let mut line = self.open("i");
            line.extend_from_slice(b",\"name\":");
            push_string(&mut line, &span.name);
            line.extend_from_slice(b",\"s\":\"t\",\"ts\":");
            push_micros(&mut line, begin);
            line
        } else {
            self.complete(&span.name, "wait", begin, end)
        };
        push_place(&mut line, pid, span.thread);
        if !span.detail.is_empty() {
            line.extend_from_slice(b",\"args\":{\"detail\":");
            push_string(&mut line, &span.detail);
            line.push(b'}');
        }
        line.push(b'}');
        self.put(line)?;
        if rank == Rank(0) && &*span.name == "BARRIER" {
            let name = Text::Static("barrier.noname");
            let track = self.track(ProcessSetId::GLOBAL, &name)?;
            self.begin("NEGOTIATE_BARRIER", begin.max(track.end), track.pid)?;
            self.end(end.max(track.end), track.pid)?;
            self.set_end(ProcessSetId::GLOBAL, &name, end);
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
    fn tensors(&mut self, waiting: Waiting) -> io::Result<()> {
        let items: usize = waiting.ready.iter().map(|(_, items)| items.len()).sum();
        self.waiting_items = self.waiting_items.saturating_sub(items);
        // Without it there is nobody's view to show.
        let Some(report) = waiting.main else {
            return Ok(());
        };
        let negotiate = format!("NEGOTIATE_{}", &*report.op);
        for (index, item) in report.items.iter().enumerate() {
            let Track { pid, end: floor } = self.track(report.set, &item.name)?;
            let ready = waiting.ready.iter().filter_map(|(rank, items)| {
                let at = items.get(index).copied().flatten()?;
                Some((place_of(&report, *rank), at))
            });
            let scheduled = report.scheduled.max(floor);
            let mut ready: Vec<(usize, Nanos)> = ready
                .map(|(place, at)| (place, at.clamp(floor, scheduled)))
                .collect();
            ready.sort_unstable_by_key(|(place, at)| (*at, *place));
            let first = ready.first().map_or(scheduled, |(_, at)| *at);
            self.begin(&negotiate, first, pid)?;
            for (place, at) in ready {
                self.ready(place, at, pid)?;
            }
            self.end(scheduled, pid)?;

            self.begin(&report.op, scheduled, pid)?;
            let mut at = report.begin.max(scheduled);
            if at - scheduled >= QUEUE_SHOWN_FROM {
                self.begin("QUEUE", scheduled, pid)?;
                self.end(at, pid)?;
            }
            let mut open: Vec<Nanos> = Vec::new();
            for stage in &report.stages {
                while let Some(end) = open.pop_if(|end| *end <= stage.begin) {
                    at = at.max(end);
                    self.end(at, pid)?;
                }
                at = at.max(stage.begin);
                self.begin(&stage.name, at, pid)?;
                open.push(stage.end);
            }
            while let Some(end) = open.pop() {
                at = at.max(end);
                self.end(at, pid)?;
            }
            at = at.max(report.end);
            let mut line = self.open("E");
            line.extend_from_slice(b",\"ts\":");
            push_micros(&mut line, at);
            line.extend_from_slice(b",\"pid\":");
            push_number(&mut line, pid);
            if let Some(result) = &item.result {
                line.extend_from_slice(b",\"args\":{\"dtype\":");
                push_string(&mut line, &result.dtype);
                line.extend_from_slice(b",\"shape\":");
                push_string(&mut line, &result.shape);
                line.extend_from_slice(b",\"bytes\":");
                push_number(&mut line, result.bytes);
                push_algorithm(&mut line, &report.stages);
                line.extend_from_slice(b",\"fused_tensors\":");
                push_number(&mut line, report.items.len() as u64);
                line.extend_from_slice(b",\"seq\":");
                push_number(&mut line, report.seq);
                line.push(b'}');
            }
            line.push(b'}');
            self.put(line)?;
            self.set_end(report.set, &item.name, at);
        }
        Ok(())
    }

    fn set_end(&mut self, set: ProcessSetId, name: &Text, end: Nanos) {
        let name: Arc<str> = match name {
            Text::Shared(name) => name.clone(),
            Text::Static(name) => (*name).into(),
        };
        if let Some(track) = self.tracks.get_mut(&(set, name)) {
            track.end = track.end.max(end);
        }
    }

    fn begin(&mut self, name: &str, at: Nanos, pid: u64) -> io::Result<()> {
        let mut line = self.open("B");
        line.extend_from_slice(b",\"name\":");
        push_string(&mut line, name);
        line.extend_from_slice(b",\"ts\":");
        push_micros(&mut line, at);
        line.extend_from_slice(b",\"pid\":");
        push_number(&mut line, pid);
        line.push(b'}');
        self.put(line)
    }

    fn end(&mut self, at: Nanos, pid: u64) -> io::Result<()> {
        let mut line = self.open("E");
        line.extend_from_slice(b",\"ts\":");
        push_micros(&mut line, at);
        line.extend_from_slice(b",\"pid\":");
        push_number(&mut line, pid);
        line.push(b'}');
        self.put(line)
    }

    fn ready(&mut self, place: usize, at: Nanos, pid: u64) -> io::Result<()> {
        let mut line = self.open("X");
        line.extend_from_slice(b",\"name\":\"");
        push_number(&mut line, place as u64);
        line.extend_from_slice(b"\",\"ts\":");
        push_micros(&mut line, at);
        line.extend_from_slice(b",\"pid\":");
        push_number(&mut line, pid);
        line.extend_from_slice(b",\"dur\":0}");
        self.put(line)
    }

    fn metadata(
        &mut self,
        name: &str,
        pid: u64,
        thread: Option<ThreadId>,
        args: &[u8],
    ) -> io::Result<()> {
        let mut line = std::mem::take(&mut self.line);
        line.clear();
        line.extend_from_slice(b"{\"name\":");
        push_string(&mut line, name);
        line.extend_from_slice(b",\"ph\":\"M\",\"pid\":");
        push_number(&mut line, pid);
        if let Some(thread) = thread {
            line.extend_from_slice(b",\"tid\":");
            push_number(&mut line, u64::from(thread));
        }
        line.extend_from_slice(b",\"args\":{");
        line.extend_from_slice(args);
        line.extend_from_slice(b"}}");
        self.put(line)
    }

    fn sort_index(&mut self, pid: u64, index: i64) -> io::Result<()> {
        let args = format!("\"sort_index\":{index}");
        self.metadata("process_sort_index", pid, None, args.as_bytes())
    }

    /// A complete event: `X` with a beginning and a duration.
    fn complete(&mut self, name: &str, category: &str, begin: Nanos, end: Nanos) -> Vec<u8> {
        let mut line = self.open("X");
        line.extend_from_slice(b",\"name\":");
        push_string(&mut line, name);
        line.extend_from_slice(b",\"cat\":\"");
        line.extend_from_slice(category.as_bytes());
        line.extend_from_slice(b"\",\"ts\":");
        push_micros(&mut line, begin);
        line.extend_from_slice(b",\"dur\":");
        push_micros(&mut line, end.saturating_sub(begin));
        line
    }

    fn open(&mut self, phase: &str) -> Vec<u8> {
        let mut line = std::mem::take(&mut self.line);
        line.clear();
        line.extend_from_slice(b"{\"ph\":\"");
        line.extend_from_slice(phase.as_bytes());
        line.push(b'"');
        line
    }

    fn put(&mut self, line: Vec<u8>) -> io::Result<()> {
        let put = self.trace.event(&line);
        self.line = line;
        put
    }
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

fn push_place(line: &mut Vec<u8>, pid: u64, thread: ThreadId) {
    line.extend_from_slice(b",\"pid\":");
    push_number(line, pid);
    line.extend_from_slice(b",\"tid\":");
    push_number(line, u64::from(thread));
}

/// The algorithm is the outermost stage that says so: the first.
fn push_algorithm(line: &mut Vec<u8>, stages: &[Stage]) {
    if let Some(stage) = stages.first() {
        line.extend_from_slice(b",\"algorithm\":");
        push_string(line, &stage.name);
    }
}

#[cfg(test)]
mod tests;
