//! The thread that writes to stdout, stderr and the ranks' files.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::io::{Interest, wait};

/// Bytes that may wait to be written before no more is taken from the ranks.
const QUEUE_BYTES_MAX: usize = 4 << 20;

/// Where bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    Stdout,
    Stderr,
    /// By its number, see [`Writer::add_files`].
    File(usize),
    /// Programs that want to know, see [`Writer::add_events`].
    Events,
}

#[derive(Debug, Default)]
struct ConsoleQueue {
    queue: VecDeque<(Target, Vec<u8>)>,
    files: Vec<(PathBuf, File)>,
    events: Option<File>,
    bytes: usize,
    is_closed: bool,
    is_done: bool,
    is_stdout_gone: bool,
}

#[derive(Debug, Default)]
struct ConsoleState {
    state: Mutex<ConsoleQueue>,
    changed: Condvar,
}

impl ConsoleState {
    fn lock(&self) -> MutexGuard<'_, ConsoleQueue> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Hands bytes to the thread.
#[derive(Debug)]
pub(crate) struct Writer {
    shared: Arc<ConsoleState>,
    wake: UnixStream,
    notifier: UnixStream,
}

impl Writer {
    pub(crate) fn start(stdout: File, stderr: File) -> io::Result<Self> {
        let shared = Arc::new(ConsoleState::default());
        let (wake, ring) = UnixStream::pair()?;
        wake.set_nonblocking(true)?;
        ring.set_nonblocking(true)?;
        let notifier = ring.try_clone()?;
        let theirs = Arc::clone(&shared);
        std::thread::Builder::new()
            .name("output".to_owned())
            .spawn(move || {
                let files = Vec::new();
                Sinks {
                    shared: theirs,
                    ring,
                    stdout,
                    stderr,
                    files,
                    events: None,
                    has_warned: false,
                }
                .run();
            })?;
        Ok(Self {
            shared,
            wake,
            notifier,
        })
    }

    /// More files; they are numbered in the order in which they are added.
    pub(crate) fn add_files(&self, files: Vec<(PathBuf, File)>) {
        self.shared.lock().files.extend(files);
    }

    /// Where [`Target::Events`] is; without it they go nowhere.
    pub(crate) fn add_events(&self, sink: File) {
        self.shared.lock().events = Some(sink);
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Writing here makes [`Self::as_fd`] readable: for other threads with messages for the launcher's thread.
    pub(crate) fn notifier(&self) -> io::Result<UnixStream> {
        self.notifier.try_clone()
    }

    pub(crate) fn has_room(&self) -> bool {
        let mut bytes = [0; 64];
        while matches!((&self.wake).read(&mut bytes), Ok(count) if count > 0) {}
        self.shared.lock().bytes < QUEUE_BYTES_MAX
    }

    pub(crate) fn is_stdout_gone(&self) -> bool {
        self.shared.lock().is_stdout_gone
    }

    pub(crate) fn write(&self, target: Target, bytes: Vec<u8>) {
        let mut state = self.shared.lock();
        state.bytes += bytes.len();
        state.queue.push_back((target, bytes));
        drop(state);
        self.shared.changed.notify_all();
    }

    pub(crate) fn close(self, timeout: Option<Duration>) {
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        let mut state = self.shared.lock();
        state.is_closed = true;
        self.shared.changed.notify_all();
        while !state.is_done {
            let left = match deadline {
                None => Duration::from_secs(3600),
                Some(at) if at <= Instant::now() => return,
                Some(at) => at - Instant::now(),
            };
            let waited = self.shared.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// The thread's side.
struct Sinks {
    shared: Arc<ConsoleState>,
    ring: UnixStream,
    stdout: File,
    stderr: File,
    files: Vec<Option<(PathBuf, File)>>,
    events: Option<File>,
    has_warned: bool,
}

impl Sinks {
    fn run(mut self) {
        while let Some((target, bytes)) = self.next() {
            self.write(target, &bytes);
            let mut state = self.shared.lock();
            let was_full = state.bytes >= QUEUE_BYTES_MAX;
            state.bytes -= bytes.len();
            if was_full && state.bytes < QUEUE_BYTES_MAX {
                drop(state);
                self.ring();
            }
        }
        self.shared.lock().is_done = true;
        self.shared.changed.notify_all();
    }

    fn next(&mut self) -> Option<(Target, Vec<u8>)> {
        let mut state = self.shared.lock();
        loop {
            self.files.extend(state.files.drain(..).map(Some));
            if let Some(sink) = state.events.take() {
                self.events = Some(sink);
            }
            if let Some(task) = state.queue.pop_front() {
                return Some(task);
            }
            if state.is_closed {
                return None;
            }
            state = self
                .shared
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn ring(&self) {
        // A full socket has enough wake-ups in it.
        let _ = (&self.ring).write(&[1]);
    }

    fn write(&mut self, target: Target, bytes: &[u8]) {
        match target {
            Target::Stdout => {
                if let Err(error) = write_all(&self.stdout, bytes) {
                    if error.kind() == io::ErrorKind::BrokenPipe {
                        self.shared.lock().is_stdout_gone = true;
                        self.ring();
                    } else {
                        self.warn(&format!("stdout cannot be written: {error}"));
                    }
                }
            }
            // Where should the complaint go?
            Target::Stderr => drop(write_all(&self.stderr, bytes)),
            // A reader that has gone away wants no more.
            Target::Events => {
                self.events.take_if(|sink| write_all(sink, bytes).is_err());
            }
            Target::File(index) => {
                let Some(slot) = self.files.get_mut(index) else {
                    return;
                };
                let Some((path, file)) = slot else { return };
                if let Err(error) = write_all(file, bytes) {
                    let text = format!(
                        "{} cannot be written: {error}; its output is only on the console from here, \
                                        as for any other file that fails",
                        path.display()
                    );
                    *slot = None;
                    self.warn(&text);
                }
            }
        }
    }

    /// Once: a full disk hits every file.
    fn warn(&mut self, text: &str) {
        if !std::mem::replace(&mut self.has_warned, true) {
            let line = format!("horovodrun: warning: {text}; the job goes on\n");
            let _ = write_all(&self.stderr, line.as_bytes());
        }
    }
}

/// A console may be non-blocking because somebody else made it so.
fn write_all(mut file: &File, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match file.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => bytes = &bytes[count..],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                wait(&[Interest::write(file.as_fd())], None)?;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
