//! Frames between launcher and host agents, over the agent's stdin and stdout.
//!
//! A frame is a length (four bytes, little endian) and a message that starts with its tag. Before its first
//! frame an agent writes `MAGIC`, so that whatever a remote shell prints first can be told apart.

#[cfg(any(test, feature = "testing"))]
pub mod samples;
mod task;

use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;

use horovod_protocol::wire::DecodeError;
use horovod_transport::compact;
use serde::{Deserialize, Serialize};

pub use crate::threads::Threads;
pub use horovod_doctor::{Answer, Question};
pub use horovod_transport::unreached::Unreached;

pub use self::task::DialedTask;

/// First bytes of an agent's output.
pub const MAGIC: &[u8; 16] = b"\0horovod-agent1\n";
/// Bytes of one frame; a job's environment and command are far below.
pub const FRAME_BYTES_MAX: usize = 16 << 20;
/// Ranks of one host.
pub const HOST_RANKS_MAX: usize = 1 << 14;
/// Variables or command words of one job.
pub const WORDS_MAX: usize = 1 << 16;
/// First byte of [`FromAgent::Hello`].
const HELLO: u8 = 0;
/// Bytes of rank output in one frame.
pub const OUTPUT_BYTES_MAX: usize = 64 << 10;

/// One of a rank's two output streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

impl Stream {
    /// Both, in the order of [`Stream::index`].
    pub const BOTH: [Self; 2] = [Self::Stdout, Self::Stderr];

    /// 0 for stdout, 1 for stderr.
    pub fn index(self) -> usize {
        self as usize
    }

    /// `stdout` or `stderr`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stdout => "stdout",
            Self::Stderr => "stderr",
        }
    }
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExitStatus {
    /// With this exit code.
    Code(i32),
    /// By this signal.
    Signal(i32),
    /// By SIGKILL, from the kernel, because memory had run out.
    OutOfMemory,
}

impl ExitStatus {
    /// Returns whether SIGKILL ended the process, or the program that a shell ran as its last command.
    pub(crate) fn is_kill(self) -> bool {
        matches!(self, Self::Signal(libc::SIGKILL)) || self == Self::Code(128 + libc::SIGKILL)
    }
}

impl From<std::process::ExitStatus> for ExitStatus {
    fn from(status: std::process::ExitStatus) -> Self {
        match (status.code(), status.signal()) {
            (None, Some(signal)) => Self::Signal(signal),
            (code, _) => Self::Code(code.unwrap_or(1)),
        }
    }
}

/// How to end the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Stop {
    /// SIGINT; SIGTERM if that is not enough.
    Interrupt,
    /// SIGTERM; SIGKILL if that is not enough.
    Terminate,
    /// SIGKILL, to everything that descends from the ranks.
    Kill,
}

/// Environment variables.
pub type Variables = Vec<(OsString, OsString)>;

/// One rank that an agent starts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankSpec {
    /// Position in the job.
    pub rank: u32,
    /// Environment of this rank alone.
    #[serde(deserialize_with = "compact::list::<WORDS_MAX, _, _>")]
    pub env: Variables,
}

/// Everything an agent needs to start its ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobSpec {
    /// Lay `env` over the agent's own environment (another host) instead of replacing it.
    pub inherit_env: bool,
    /// Environment of every rank.
    #[serde(deserialize_with = "compact::list::<WORDS_MAX, _, _>")]
    pub env: Variables,
    /// Variables with the highest precedence.
    #[serde(deserialize_with = "compact::list::<WORDS_MAX, _, _>")]
    pub on_top: Variables,
    /// The agent's own working directory stays, and its own environment wins over `env`.
    pub stays: bool,
    /// Working directory.
    #[serde(
        serialize_with = "compact::put_path",
        deserialize_with = "compact::path"
    )]
    pub cwd: PathBuf,
    /// Program and arguments; an empty program is the Python that started the agent.
    #[serde(deserialize_with = "compact::list::<WORDS_MAX, _, _>")]
    pub command: Vec<OsString>,
    /// End the ranks after this many seconds without a word from the launcher; 0 means never.
    pub silence_max_s: u32,
    /// Seconds from SIGTERM to SIGKILL.
    pub terminate_timeout_s: u32,
    /// The ranks of this host that start together.
    #[serde(deserialize_with = "compact::list::<HOST_RANKS_MAX, _, _>")]
    pub ranks: Vec<RankSpec>,
    /// More may be started one by one, and ended one by one: the host is done only when told so.
    pub is_open: bool,
}

/// Launcher to agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToAgent {
    /// The job; the agent checks it but does not start it.
    Job(JobSpec),
    /// Every host is ready: start the ranks.
    Start,
    /// End the ranks.
    Stop(Stop),
    /// The launcher lives.
    Ping,
    /// Start one more rank; the number is not that of any before.
    Spawn(RankSpec),
    /// End this rank.
    End(u32),
    /// Is this rank stopped by a signal?
    CheckStopped {
        /// Which.
        rank: u32,
        /// Its process, as it calls itself.
        pid: u32,
    },
    /// No more ranks will come: done when the last has ended.
    Close,
    /// Why ranks cannot connect, as all ranks of the job are told.
    Cause(String),
    /// There is no job: this host is looked over, see `horovodrun --doctor`.
    Examine(Question),
}

/// Agent to launcher.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum FromAgent {
    /// The agent runs. It stays the first: other versions read its version and host name.
    Hello {
        /// Its version.
        version: String,
        /// Its host's own name.
        hostname: String,
        /// Of one that has dialed.
        task: Option<DialedTask>,
    },
    /// The job can be started here.
    Ready,
    /// The job cannot be started here (or could not).
    Refused {
        /// Exit code for the launcher, as a shell would give it.
        code: u8,
        /// The missing requirement.
        why: String,
    },
    /// Something the user should know.
    Note(String),
    /// A rank runs.
    Started {
        /// Which.
        rank: u32,
        /// Its process.
        pid: u32,
    },
    /// Bytes that a rank wrote.
    Output {
        /// Which.
        rank: u32,
        /// Where to.
        stream: Stream,
        /// As they were.
        #[serde(
            serialize_with = "compact::put_bytes",
            deserialize_with = "compact::bytes::<OUTPUT_BYTES_MAX, _>"
        )]
        bytes: Vec<u8>,
    },
    /// A rank ended; all it wrote before was sent before.
    Exited {
        /// Which.
        rank: u32,
        /// How.
        status: ExitStatus,
    },
    /// All ranks and all that descends from them have ended.
    Done,
    /// The answer to [`ToAgent::CheckStopped`].
    StoppedState {
        /// Which.
        rank: u32,
        /// It is.
        is_stopped: bool,
    },
    /// The answer to [`ToAgent::Examine`].
    Found(Answer),
    /// How many threads the ranks' libraries were told to use.
    Threads(Threads),
    /// A rank cannot reach the launcher; it waits for [`ToAgent::Cause`].
    Unreached(Unreached),
}

/// Appends one frame with this message.
fn frame(message: &impl Serialize, out: &mut Vec<u8>) {
    let start = out.len();
    out.extend_from_slice(&[0; 4]);
    compact::encode(message, out);
    let length = (out.len() - start - 4) as u32;
    out[start..start + 4].copy_from_slice(&length.to_le_bytes());
}

impl ToAgent {
    /// Appends this message as a frame.
    pub fn encode(&self, out: &mut Vec<u8>) {
        frame(self, out);
    }

    /// Reads the message of one frame.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        compact::decode(bytes)
    }
}

impl FromAgent {
    /// Appends this message as a frame.
    pub fn encode(&self, out: &mut Vec<u8>) {
        frame(self, out);
    }

    /// Reads the message of one frame.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        if let [HELLO, rest @ ..] = bytes {
            let (version, rest) = compact::decode_first::<String>(rest)?;
            if version != env!("CARGO_PKG_VERSION") {
                // Another version may encode the rest differently; the version alone leads to its refusal.
                let (hostname, _) = compact::decode_first(rest)?;
                let task = None;
                return Ok(Self::Hello {
                    version,
                    hostname,
                    task,
                });
            }
        }
        compact::decode(bytes)
    }
}

/// Collects bytes until frames are complete.
#[derive(Debug, Default)]
pub struct FrameBuffer {
    bytes: Vec<u8>,
    taken: usize,
}

impl FrameBuffer {
    /// Adds what was just received.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.taken > 0 {
            self.bytes.drain(..self.taken);
            self.taken = 0;
        }
        self.bytes.extend_from_slice(bytes);
    }

    /// The next complete message. An error means that the peer does not speak this language.
    pub fn next_frame(&mut self) -> Result<Option<&[u8]>, DecodeError> {
        let rest = &self.bytes[self.taken..];
        let Some((length, body)) = rest.split_first_chunk::<4>() else {
            return Ok(None);
        };
        let length = u32::from_le_bytes(*length) as usize;
        if length > FRAME_BYTES_MAX {
            let (len, max) = (length as u64, FRAME_BYTES_MAX as u64);
            return Err(DecodeError::TooLong {
                what: "frame",
                len,
                max,
            });
        }
        if body.len() < length {
            return Ok(None);
        }
        let start = self.taken + 4;
        self.taken = start + length;
        Ok(Some(&self.bytes[start..start + length]))
    }
}

#[cfg(test)]
mod tests;
