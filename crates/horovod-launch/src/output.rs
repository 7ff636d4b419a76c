//! The output of ranks: whole lines with their rank in front, on the console and in files.
//!
//! The launcher's thread cuts lines; a thread of its own writes them, so that a console or disk that does not
//! take more never keeps the launcher from hearing a signal. Bytes are passed on as they are.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use horovod_transport::output_file::{self, OpenMode};

use crate::console::{Target, Writer};
use crate::error_lines::Frames;
use crate::events::{Event, Events};
use crate::frames::Stream;
use crate::log::Log;
use crate::options::Options;
use crate::platform::{self, asctime};
use crate::run_folder;

/// A line longer than this is passed on in pieces.
pub(crate) const LINE_PIECE_BYTES: usize = 64 << 10;
/// Last lines of a rank that are kept for the report.
pub(crate) const TAIL_LINES: usize = 20;
/// Bytes kept of each of them.
pub(crate) const TAIL_LINE_BYTES_MAX: usize = 1000;

/// Lines under way and last lines of one stream of one rank.
#[derive(Debug, Default)]
struct StreamState {
    partial: Vec<u8>,
    /// A piece of the present line was passed on before.
    is_mid_line: bool,
    tail: VecDeque<Vec<u8>>,
    frames: Frames,
}

impl StreamState {
    fn remember(&mut self, piece: &[u8]) {
        // A progress bar draws over itself: keep its last state only. `\r\n` ends one line, though.
        let redraws = self.tail.back().is_some_and(|last| last.ends_with(b"\r"));
        let goes_on = self.is_mid_line || (redraws && piece == b"\n");
        if !goes_on {
            if !self.frames.are_worth(piece) {
                return;
            }
            if redraws {
                self.tail.pop_back();
            } else if self.tail.len() == TAIL_LINES {
                self.tail.pop_front();
            }
            self.tail.push_back(Vec::new());
        }
        if let Some(last) = self.tail.back_mut() {
            let room = TAIL_LINE_BYTES_MAX.saturating_sub(last.len());
            last.extend_from_slice(&piece[..piece.len().min(room)]);
        }
    }
}

/// The output of one process.
#[derive(Debug, Default)]
struct RankOutput {
    /// Label before its lines: its rank.
    label: u32,
    streams: [StreamState; 2],
    /// Its first file in the writer's list.
    files: Option<usize>,
}

/// The output of all ranks; processes are known by numbers, which in a job of fixed size are their ranks.
#[derive(Debug)]
pub(crate) struct Output {
    writer: Writer,
    ranks: BTreeMap<u32, RankOutput>,
    /// Where files go, and the digits of their names.
    directory: Option<(PathBuf, usize)>,
    /// First file of each label that has files.
    files: BTreeMap<u32, usize>,
    timestamps: bool,
    /// Whose line is open on stdout and stderr; one entry for both if they are the same file.
    open: [Option<(u32, Stream)>; 2],
    is_one_console: bool,
    log: Log,
    has_events: bool,
    /// Labels whose lines are shown, as first and last of each group; `None`: all.
    shown: Option<Vec<(u32, u32)>>,
}

impl Output {
    /// Output of `size` ranks; `timestamps` puts the local time before each line.
    pub(crate) fn new(size: u32, timestamps: bool) -> io::Result<Self> {
        let stdout = File::from(io::stdout().as_fd().try_clone_to_owned()?);
        let stderr = File::from(io::stderr().as_fd().try_clone_to_owned()?);
        Self::to(stdout, stderr, size, timestamps)
    }

    fn to(stdout: File, stderr: File, size: u32, timestamps: bool) -> io::Result<Self> {
        let rank = |label| RankOutput {
            label,
            ..RankOutput::default()
        };
        let ranks = (0..size).map(|label| (label, rank(label))).collect();
        let id = |file: &File| rustix::fs::fstat(file).map(|s| (s.st_dev, s.st_ino)).ok();
        Ok(Self {
            is_one_console: id(&stdout).is_some() && id(&stdout) == id(&stderr),
            writer: Writer::start(stdout, stderr)?,
            ranks,
            directory: None,
            files: BTreeMap::new(),
            timestamps,
            open: [None; 2],
            log: Log::default(),
            has_events: false,
            shown: None,
        })
    }

    /// Shows from now on what this process logs, at the level of these options.
    pub(crate) fn show_log(&mut self, options: &Options) -> io::Result<()> {
        self.log = Log::install(options, self.writer.notifier()?);
        Ok(())
    }

    /// Shows the lines of these ranks only, from now on. All are kept for reports and written to files.
    pub(crate) fn show_ranks(&mut self, groups: Option<Vec<(u32, u32)>>) {
        self.shown = groups;
    }

    fn is_shown(&self, label: u32) -> bool {
        let has = |(first, last): &(u32, u32)| (*first..=*last).contains(&label);
        self.shown
            .as_ref()
            .is_none_or(|groups| groups.iter().any(has))
    }

    /// Tells programs of events from now on, if one wants to know.
    pub(crate) fn show_events(&mut self, events: &Events) {
        if let Some(sink) = events.sink() {
            self.writer.add_events(sink);
            self.has_events = true;
        }
    }

    /// For programs.
    pub(crate) fn emit(&self, event: &Event) {
        if self.has_events {
            self.writer
                .write(Target::Events, event.to_line().into_bytes());
        }
    }

    fn note_log(&mut self) {
        for line in self.log.take() {
            self.note(&line);
        }
    }

    /// Opens the files that the options ask for, and says where they are if nobody can know it.
    pub(crate) fn open_files_of(&mut self, options: &Options, size: u32) -> Result<(), String> {
        let Some(directory) = run_folder::of(options)? else {
            return Ok(());
        };
        platform::raise_file_limit();
        self.open_files(&directory, size)?;
        if options.log_dir.is_some() {
            self.note(&format!(
                "horovodrun: the ranks' output is also written to {}",
                directory.display()
            ));
        }
        Ok(())
    }

    /// Creates `directory/rank.N/stdout` and `stderr` for every rank there is and for rank 0, with as many digits as
    /// `size` ranks need.
    pub(crate) fn open_files(&mut self, directory: &Path, size: u32) -> Result<(), String> {
        let width = size.saturating_sub(1).max(1).to_string().len();
        self.directory = Some((directory.to_owned(), width));
        // There is always a rank 0, so that a folder that cannot be used is noticed before anything starts.
        self.files_of(0)?;
        let labels: Vec<(u32, u32)> = self.ranks.iter().map(|(id, r)| (*id, r.label)).collect();
        for (id, label) in labels {
            let files = self.files_of(label)?;
            if let Some(rank) = self.ranks.get_mut(&id) {
                rank.files = files;
            }
        }
        Ok(())
    }

    /// The files of this label: emptied when the job uses them for the first time.
    fn files_of(&mut self, label: u32) -> Result<Option<usize>, String> {
        let Some((directory, width)) = &self.directory else {
            return Ok(None);
        };
        if let Some(first) = self.files.get(&label) {
            return Ok(Some(*first));
        }
        let place = directory.join(format!("rank.{label:0width$}"));
        output_file::create_folders(&place)
            .map_err(|error| format!("cannot create {}: {error}", place.display()))?;
        let mut files = Vec::new();
        for stream in Stream::BOTH {
            let file = place.join(stream.name());
            let opened = output_file::open(&file, OpenMode::Truncate)
                .map_err(|error| format!("cannot create {}: {error}", file.display()))?;
            files.push((file, opened));
        }
        let first = self.files.len() * files.len();
        self.writer.add_files(files);
        self.files.insert(label, first);
        Ok(Some(first))
    }

    /// One more process; its lines begin with `label`.
    pub(crate) fn add(&mut self, id: u32, label: u32) -> Result<(), String> {
        let files = self.files_of(label)?;
        let streams = Default::default();
        let rank = RankOutput {
            label,
            streams,
            files,
        };
        self.ranks.insert(id, rank);
        Ok(())
    }

    /// From here on a process has another rank. It stays with its files.
    pub(crate) fn relabel(&mut self, id: u32, label: u32) {
        if let Some(rank) = self.ranks.get_mut(&id) {
            rank.label = label;
        }
    }

    /// Forgets a process that has ended.
    pub(crate) fn remove(&mut self, id: u32) {
        self.ranks.remove(&id);
    }

    /// Readable when there is room again or stdout is gone.
    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.writer.as_fd()
    }

    /// Whether more output should be taken from the ranks. Says what was logged meanwhile.
    pub(crate) fn has_room(&mut self) -> bool {
        // The notifier is reset first: a notification after that wakes again.
        let has_room = self.writer.has_room();
        self.note_log();
        has_room
    }

    /// Whether nobody reads the launcher's stdout any more.
    pub(crate) fn is_stdout_gone(&self) -> bool {
        self.writer.is_stdout_gone()
    }

    /// Bytes that a rank wrote.
    pub(crate) fn push(&mut self, rank: u32, stream: Stream, bytes: &[u8]) {
        let Some(state) = self.ranks.get_mut(&rank) else {
            return;
        };
        let mut partial = std::mem::take(&mut state.streams[stream.index()].partial);
        let mut batch = Batch::default();
        for segment in bytes.split_inclusive(|byte| matches!(byte, b'\n' | b'\r')) {
            partial.extend_from_slice(segment);
            let is_line = matches!(segment.last(), Some(b'\n' | b'\r'));
            while partial.len() > LINE_PIECE_BYTES {
                let rest = partial.split_off(end_of_piece(&partial));
                self.pass_on(rank, stream, &partial, false, &mut batch);
                partial = rest;
            }
            if is_line {
                self.pass_on(rank, stream, &partial, true, &mut batch);
                partial.clear();
            }
        }
        if let Some(state) = self.ranks.get_mut(&rank) {
            state.streams[stream.index()].partial = partial;
        }
        self.send(rank, stream, batch);
    }

    /// A rank ended: its last line may have no end.
    pub(crate) fn finish(&mut self, rank: u32) {
        for stream in Stream::BOTH {
            let Some(state) = self.ranks.get_mut(&rank) else {
                return;
            };
            let partial = std::mem::take(&mut state.streams[stream.index()].partial);
            if !partial.is_empty() {
                let mut batch = Batch::default();
                self.pass_on(rank, stream, &partial, false, &mut batch);
                self.send(rank, stream, batch);
            }
        }
    }

    /// The launcher's own words, on stderr.
    pub(crate) fn note(&mut self, text: &str) {
        let mut bytes = Vec::new();
        self.close_line(Stream::Stderr, &mut bytes);
        bytes.extend_from_slice(text.as_bytes());
        bytes.push(b'\n');
        self.writer.write(Target::Stderr, bytes);
    }

    /// Last lines of a rank's stderr, or of its stdout if that is empty, and which of them it is.
    pub(crate) fn tail(&self, rank: u32) -> Option<(Stream, Vec<String>)> {
        let state = &self.ranks.get(&rank)?.streams;
        [Stream::Stderr, Stream::Stdout]
            .into_iter()
            .find_map(|stream| {
                let lines: Vec<String> = state[stream.index()]
                    .tail
                    .iter()
                    .map(|line| String::from_utf8_lossy(line).trim_end().to_owned())
                    .collect();
                lines
                    .iter()
                    .any(|line| !line.is_empty())
                    .then_some((stream, lines))
            })
    }

    /// Whether one of the last lines of a rank contains `text`.
    pub(crate) fn tail_contains(&self, rank: u32, text: &str) -> bool {
        self.ranks.get(&rank).is_some_and(|state| {
            state
                .streams
                .iter()
                .flat_map(|s| &s.tail)
                .any(|l| String::from_utf8_lossy(l).contains(text))
        })
    }

    /// Whether the last line of a rank's stderr is an interpreter's that found no program, or none that it could read.
    pub(crate) fn shows_no_start(&self, rank: u32) -> bool {
        let tail = self.tail(rank);
        let line = tail.as_ref().and_then(|(_, lines)| lines.last());
        line.is_some_and(|line| {
            let starts = [
                "ModuleNotFoundError: ",
                "SyntaxError: ",
                "IndentationError: ",
            ];
            let parts = [": No module named ", ": can't open file "];
            starts.iter().any(|start| line.starts_with(start))
                || parts.iter().any(|part| line.contains(part))
        })
    }

    /// Writes what is left, but does not wait for a reader that has stopped when `timeout` is over.
    pub(crate) fn close(mut self, timeout: Option<std::time::Duration>) {
        self.note_log();
        self.writer.close(timeout);
    }

    fn console(&self, stream: Stream) -> usize {
        if self.is_one_console {
            0
        } else {
            stream.index()
        }
    }

    /// Ends the line that another rank has left open.
    fn close_line(&mut self, stream: Stream, bytes: &mut Vec<u8>) {
        let console = self.console(stream);
        if self.open[console].take().is_some() {
            bytes.push(b'\n');
        }
    }

    fn pass_on(&mut self, rank: u32, stream: Stream, piece: &[u8], is_line: bool, to: &mut Batch) {
        let console = self.console(stream);
        let label = self.ranks.get(&rank).map(|rank| rank.label);
        let is_shown = label.is_some_and(|label| self.is_shown(label));
        let Some(RankOutput {
            label,
            streams,
            files,
        }) = self.ranks.get_mut(&rank)
        else {
            return;
        };
        let (label, has_files) = (*label, files.is_some());
        let state = &mut streams[stream.index()];
        state.remember(piece);
        let goes_on = std::mem::replace(&mut state.is_mid_line, !is_line);
        let prefix = format!(
            "{}[{label}]<{}>:",
            if self.timestamps {
                asctime(SystemTime::now())
            } else {
                String::new()
            },
            stream.name()
        );
        if is_shown {
            if self.open[console] != Some((rank, stream)) {
                self.close_line(stream, &mut to.console);
                to.console.extend_from_slice(prefix.as_bytes());
            }
            to.console.extend_from_slice(piece);
            // So that whatever reads lines gets some, each with its rank.
            let is_cut = piece.len() >= LINE_PIECE_BYTES;
            if is_cut && !is_line {
                to.console.push(b'\n');
            }
            self.open[console] = (!is_line && !is_cut).then_some((rank, stream));
        }
        if has_files {
            if !goes_on {
                to.file.extend_from_slice(prefix.as_bytes());
            }
            to.file.extend_from_slice(piece);
        }
    }

    fn send(&mut self, rank: u32, stream: Stream, batch: Batch) {
        let console = match stream {
            Stream::Stdout => Target::Stdout,
            Stream::Stderr => Target::Stderr,
        };
        if !batch.console.is_empty() {
            self.writer.write(console, batch.console);
        }
        let first = self.ranks.get(&rank).and_then(|rank| rank.files);
        if let Some(first) = first.filter(|_| !batch.file.is_empty()) {
            self.writer
                .write(Target::File(first + stream.index()), batch.file);
        }
    }
}

/// Bytes of one call, for the console and for the rank's file.
#[derive(Debug, Default)]
struct Batch {
    console: Vec<u8>,
    file: Vec<u8>,
}

/// Where to cut a line that is too long: not within a character.
fn end_of_piece(line: &[u8]) -> usize {
    let is_start = |at: &usize| line[*at] & 0xc0 != 0x80;
    let longest = LINE_PIECE_BYTES + 3;
    // No character has more than four bytes; what is no text is cut anywhere.
    (LINE_PIECE_BYTES..line.len().min(longest + 1))
        .find(is_start)
        .unwrap_or(LINE_PIECE_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output(size: u32) -> Output {
        let null = || File::create("/dev/null").expect("there");
        Output::to(null(), null(), size, false).expect("starts")
    }

    /// Bytes on the console for pieces of output in this order.
    fn console(pieces: &[(u32, &[u8])]) -> Vec<u8> {
        let mut output = output(3);
        let mut seen = Vec::new();
        for (rank, bytes) in pieces {
            let mut batch = Batch::default();
            for segment in bytes.split_inclusive(|b| matches!(b, b'\n' | b'\r')) {
                let is_line = matches!(segment.last(), Some(b'\n' | b'\r'));
                output.pass_on(*rank, Stream::Stdout, segment, is_line, &mut batch);
            }
            seen.extend(batch.console);
        }
        seen
    }

    #[test]
    fn puts_the_rank_before_each_line() {
        let seen = console(&[(0, b"a\nb\n"), (1, b"\xff\xfe\n"), (2, b"10%\r20%\r\n")]);
        let want: &[u8] = b"[0]<stdout>:a\n[0]<stdout>:b\n[1]<stdout>:\xff\xfe\n\
            [2]<stdout>:10%\r[2]<stdout>:20%\r[2]<stdout>:\n";
        assert_eq!(seen, want);
    }

    #[test]
    fn ranks_that_are_not_shown_are_kept_for_reports() {
        let mut output = output(3);
        output.show_ranks(Some(vec![(0, 0), (2, 5)]));
        let mut batch = Batch::default();
        for rank in 0..3 {
            output.pass_on(rank, Stream::Stdout, b"a\n", true, &mut batch);
        }
        assert_eq!(batch.console, b"[0]<stdout>:a\n[2]<stdout>:a\n");
        assert_eq!(output.tail(1), Some((Stream::Stdout, vec!["a".to_owned()])));
    }

    #[test]
    fn never_mixes_ranks_within_a_line() {
        let seen = console(&[
            (0, b"long "),
            (0, b"er "),
            (1, b"b\n"),
            (0, b"rest\n"),
            (1, b"c\n"),
        ]);
        let want: &[u8] = b"[0]<stdout>:long er \n[1]<stdout>:b\n[0]<stdout>:rest\n[1]<stdout>:c\n";
        assert_eq!(seen, want);
    }

    #[test]
    fn each_piece_of_a_long_line_is_a_line_with_its_rank() {
        let mut output = output(1);
        let long = "é".repeat(LINE_PIECE_BYTES);
        let mut batch = Batch::default();
        let mut rest = long.as_bytes().to_vec();
        while rest.len() > LINE_PIECE_BYTES {
            let next = rest.split_off(end_of_piece(&rest));
            output.pass_on(0, Stream::Stdout, &rest, false, &mut batch);
            rest = next;
        }
        rest.push(b'\n');
        output.pass_on(0, Stream::Stdout, &rest, true, &mut batch);
        let text = String::from_utf8(batch.console).expect("cut between characters");
        assert!(text.lines().all(|line| line.starts_with("[0]<stdout>:é")));
        assert!(text.lines().count() >= 2);
        assert_eq!(text.replace("\n", "").replace("[0]<stdout>:", ""), long);
    }

    #[test]
    fn the_last_lines_are_the_error_not_the_threads() {
        let mut output = output(1);
        output.push(
            0,
            Stream::Stderr,
            b"epoch 1\nFatal Python error: Aborted\n\n",
        );
        for thread in 0..10 {
            output.push(
                0,
                Stream::Stderr,
                format!("Thread 0x{thread} (most recent call first):\n").as_bytes(),
            );
            for line in 0..10 {
                output.push(
                    0,
                    Stream::Stderr,
                    format!("  File \"a.py\", line {line} in wait\n").as_bytes(),
                );
            }
            output.push(0, Stream::Stderr, b"\n");
        }
        let (_, lines) = output.tail(0).expect("some");
        assert_eq!(
            lines.iter().filter(|l| !l.is_empty()).collect::<Vec<_>>(),
            ["epoch 1", "Fatal Python error: Aborted"]
        );
    }

    #[test]
    fn a_process_changes_its_rank() {
        let mut output = output(0);
        output.push(7, Stream::Stdout, b"of nobody\n");
        output.add(7, 3).expect("no files");
        let mut batch = Batch::default();
        output.pass_on(7, Stream::Stdout, b"a\n", true, &mut batch);
        output.relabel(7, 0);
        output.pass_on(7, Stream::Stdout, b"b\n", true, &mut batch);
        assert_eq!(batch.console, b"[3]<stdout>:a\n[0]<stdout>:b\n");
        output.remove(7);
        assert_eq!(output.tail(7), None);
    }

    #[test]
    fn keeps_the_last_lines_only() {
        let mut output = output(1);
        assert_eq!(output.tail(0), None);
        output.push(0, Stream::Stdout, b"out\n");
        assert_eq!(
            output.tail(0),
            Some((Stream::Stdout, vec!["out".to_owned()]))
        );
        for line in 0..50 {
            output.push(0, Stream::Stderr, format!("e{line}\n").as_bytes());
        }
        output.push(0, Stream::Stderr, b"dos\r\n1%\r2%\r3%\r");
        output.push(0, Stream::Stderr, &[b'x'; 5000]);
        output.finish(0);
        let (stream, lines) = output.tail(0).expect("some");
        assert_eq!((stream, lines.len()), (Stream::Stderr, TAIL_LINES));
        assert_eq!((lines[0].as_str(), lines[18].as_str()), ("e32", "dos"));
        assert_eq!(lines[19].len(), TAIL_LINE_BYTES_MAX);
        assert!(output.tail_contains(0, "e40") && !output.tail_contains(0, "e3\n"));
    }
}
