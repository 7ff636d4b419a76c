//! The launcher's end of one host: what leads to its agent (a child process, which is the agent itself or ssh, or a
//! stream of an agent that has dialed) and the frames that are exchanged.

use std::fs::File;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::{Duration, Instant};

use crate::frames::{DialedTask, ExitStatus, FrameBuffer, FromAgent, MAGIC, ToAgent};
use crate::hosts::{Host, Placement};
use crate::io::{Got, Interest, Outbox, read_some, set_nonblocking};
use crate::remote;

/// Output of a login shell that is skipped before the agent starts, at most.
const PREAMBLE_BYTES_MAX: usize = 64 << 10;
/// Bytes of ssh's or the agent's own words that are kept.
const WORDS_BYTES_MAX: usize = 8 << 10;
/// How long a process whose output has ended may take for its last lines and its end, together.
const LAST_LINES_TIMEOUT: Duration = Duration::from_millis(500);

/// How far a host has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum HostStage {
    Starting,
    Greeted,
    Ready,
    /// Its ranks and all their descendants have ended.
    Done,
    /// Gone without that.
    Lost,
}

/// Transport to an agent.
#[derive(Debug)]
enum Carrier {
    /// The agent itself, or ssh.
    Child(Child),
    /// The agent has dialed; the other end is a thread's, which ends when the agent has.
    Dialed(UnixStream),
}

/// One host.
#[derive(Debug)]
pub(crate) struct HostLink {
    pub(crate) placement: Placement,
    pub(crate) is_local: bool,
    pub(crate) stage: HostStage,
    /// Of an agent that has dialed, once it has said so.
    pub(crate) task: Option<DialedTask>,
    carrier: Carrier,
    stdin: Option<File>,
    stdout: Option<File>,
    stderr: Option<ChildStderr>,
    outbox: Outbox,
    inbox: FrameBuffer,
    /// Bytes before the agent's first frame; `None` once that has arrived.
    preamble: Option<Vec<u8>>,
    words: Vec<u8>,
}

impl HostLink {
    /// Starts the process that leads to the host's agent.
    pub(crate) fn open(
        placement: Placement,
        is_local: bool,
        mut command: Command,
    ) -> io::Result<Self> {
        let mut child = command
            // Away from the terminal's group: Ctrl-C is the launcher's to pass on.
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let stdin = child
            .stdin
            .take()
            .map(|pipe| File::from(OwnedFd::from(pipe)));
        let stdout = child.stdout.take();
        let stdout = stdout.map(|pipe| File::from(OwnedFd::from(pipe)));
        let stderr = child.stderr.take();
        stdin.as_ref().map(set_nonblocking).transpose()?;
        stdout.as_ref().map(set_nonblocking).transpose()?;
        stderr.as_ref().map(set_nonblocking).transpose()?;
        Ok(Self {
            placement,
            is_local,
            stage: HostStage::Starting,
            task: None,
            carrier: Carrier::Child(child),
            stdin,
            stdout,
            stderr,
            outbox: Outbox::default(),
            inbox: FrameBuffer::default(),
            preamble: Some(Vec::new()),
            words: Vec::new(),
        })
    }

    /// Of the agent of task `index` that has dialed, and has said nothing yet.
    pub(crate) fn dialed(index: u32, stream: UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        let copy = || stream.try_clone().map(OwnedFd::from).map(File::from);
        let host = Host {
            name: format!("task {index}"),
            slots: 1,
        };
        Ok(Self {
            placement: Placement {
                host,
                slots: Vec::new(),
            },
            is_local: false,
            stage: HostStage::Starting,
            task: None,
            stdin: Some(copy()?),
            stdout: Some(copy()?),
            stderr: None,
            carrier: Carrier::Dialed(stream),
            outbox: Outbox::default(),
            inbox: FrameBuffer::default(),
            preamble: Some(Vec::new()),
            words: Vec::new(),
        })
    }

    /// Whether its agent has dialed.
    pub(crate) fn is_dialed(&self) -> bool {
        matches!(self.carrier, Carrier::Dialed(_))
    }

    pub(crate) fn name(&self) -> &str {
        &self.placement.host.name
    }

    pub(crate) fn is_over(&self) -> bool {
        self.stage >= HostStage::Done
    }

    /// Queues a message; it travels with the next [`HostLink::exchange`].
    pub(crate) fn send(&mut self, message: &ToAgent) {
        if self.stdin.is_some() {
            message.encode(self.outbox.buffer());
            self.flush();
        }
    }

    pub(crate) fn has_unsent(&self) -> bool {
        self.outbox.len() > 0
    }

    fn flush(&mut self) {
        if let Some(stdin) = &mut self.stdin
            && self.outbox.flush(stdin).is_err()
        {
            // The end of its output tells the rest.
            self.stdin = None;
            self.outbox.clear();
        }
    }

    /// Descriptors to wait for; output only if there is room for it.
    pub(crate) fn interests(&self, has_room: bool) -> impl Iterator<Item = Interest<'_>> {
        let write = self.stdin.as_ref().filter(|_| self.outbox.len() > 0);
        let read = self.stdout.as_ref().filter(|_| has_room);
        write
            .map(|fd| Interest::write(fd.as_fd()))
            .into_iter()
            .chain(read.map(|fd| Interest::read(fd.as_fd())))
            .chain(self.stderr.as_ref().map(|fd| Interest::read(fd.as_fd())))
    }

    /// Sends what waits and reads what came. `Err` says why the host is lost; messages may precede it.
    pub(crate) fn exchange(&mut self, has_room: bool) -> (Vec<FromAgent>, Result<(), String>) {
        self.flush();
        self.read_words();
        let mut messages = Vec::new();
        if !has_room {
            return (messages, Ok(()));
        }
        let mut buffer = vec![0; 64 << 10];
        let Some(stdout) = &mut self.stdout else {
            return (messages, Ok(()));
        };
        match read_some(stdout, &mut buffer) {
            Got::Nothing => (messages, Ok(())),
            Got::Bytes(count) => {
                let result = self.take(&buffer[..count], &mut messages);
                (messages, result)
            }
            Got::End => {
                self.stdout = None;
                (
                    messages,
                    Err("the connection to its agent ended".to_owned()),
                )
            }
        }
    }

    fn take(&mut self, bytes: &[u8], messages: &mut Vec<FromAgent>) -> Result<(), String> {
        if let Some(preamble) = &mut self.preamble {
            preamble.extend_from_slice(bytes);
            let found = preamble
                .windows(MAGIC.len())
                .position(|window| window == MAGIC);
            match found {
                Some(at) => {
                    self.inbox.push(&preamble[at + MAGIC.len()..]);
                    self.preamble = None;
                }
                None if preamble.len() > PREAMBLE_BYTES_MAX => {
                    return Err("what answers is not a horovodrun of this version".to_owned());
                }
                None => return Ok(()),
            }
        } else {
            self.inbox.push(bytes);
        }
        while let Some(frame) = self
            .inbox
            .next_frame()
            .map_err(|error| format!("its agent sent nonsense: {error}"))?
        {
            let message = FromAgent::decode(frame)
                .map_err(|error| format!("its agent sent nonsense: {error}"))?;
            messages.push(message);
        }
        Ok(())
    }

    fn read_words(&mut self) {
        let mut buffer = [0; 4096];
        while let Some(stderr) = &mut self.stderr {
            match read_some(stderr, &mut buffer) {
                Got::Bytes(count) => {
                    self.words.extend_from_slice(&buffer[..count]);
                    let over = self.words.len().saturating_sub(WORDS_BYTES_MAX);
                    self.words.drain(..over);
                }
                Got::Nothing => break,
                Got::End => self.stderr = None,
            }
        }
    }

    /// Why the agent did not start, by what ssh or the agent itself said, or how that ended.
    pub(crate) fn why_not_started(&mut self) -> String {
        if self.is_dialed() {
            return "the connection to its agent ended".to_owned();
        }
        let deadline = Instant::now() + LAST_LINES_TIMEOUT;
        let words = self.words(deadline);
        // If its output has ended, it ends now.
        let mut status = None;
        if let Carrier::Child(child) = &mut self.carrier {
            let mut ended = child.try_wait();
            while matches!(ended, Ok(None)) && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(5));
                ended = child.try_wait();
            }
            status = ended.ok().flatten().map(ExitStatus::from);
        }
        remote::why_not_started(self.is_local, &words, status)
    }

    /// A reason, with what ssh or the agent itself said.
    pub(crate) fn with_words(&mut self, why: &str) -> String {
        match self.words(Instant::now() + LAST_LINES_TIMEOUT) {
            words if words.is_empty() => why.to_owned(),
            words => format!("{why} ({words})"),
        }
    }

    /// Error output of ssh or of the agent itself until the deadline, in one line. The last lines may arrive shortly
    /// after the end of the output.
    fn words(&mut self, deadline: Instant) -> String {
        loop {
            self.read_words();
            let Some(stderr) = &self.stderr else { break };
            let now = Instant::now();
            if now >= deadline
                || crate::io::wait(&[Interest::read(stderr.as_fd())], Some(deadline)).is_err()
            {
                break;
            }
        }
        let text = String::from_utf8_lossy(&self.words);
        text.lines()
            .map(str::trim)
            .filter(|line| !line.is_empty() && !line.contains("Permanently added"))
            .collect::<Vec<_>>()
            .join("; ")
    }

    /// Lets go: the agent sees the end of its stdin.
    pub(crate) fn hang_up(&mut self) {
        self.stdin = None;
        self.outbox.clear();
        if let Carrier::Dialed(stream) = &self.carrier {
            let _ = stream.shutdown(Shutdown::Write);
        }
    }

    /// Ends the process, or the connection, without ceremony.
    pub(crate) fn kill(&mut self) {
        self.hang_up();
        match &mut self.carrier {
            Carrier::Child(child) => drop(child.kill()),
            Carrier::Dialed(stream) => {
                let _ = stream.shutdown(Shutdown::Both);
                self.stdout = None;
            }
        }
    }

    /// Whether the process has ended (and is reaped), or the connection with all that the agent has said.
    pub(crate) fn has_ended(&mut self) -> bool {
        match &mut self.carrier {
            Carrier::Child(child) => !matches!(child.try_wait(), Ok(None)),
            Carrier::Dialed(_) => {
                let mut buffer = [0; 4096];
                while let Some(stdout) = &mut self.stdout {
                    match read_some(stdout, &mut buffer) {
                        Got::Bytes(_) => {}
                        Got::Nothing => return false,
                        Got::End => self.stdout = None,
                    }
                }
                true
            }
        }
    }
}
