//! Frames between launcher and host agents, over the agent's stdin and stdout.
//!
//! A frame is a length (four bytes, little endian) and a message that starts with its tag. Before its first
//! frame an agent writes [`MAGIC`], so that whatever a remote shell prints first can be told apart.

mod task;

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;

use horovod_protocol::wire::{DecodeError, Reader, Writer};

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
/// Bytes of rank output in one frame.
pub const OUTPUT_BYTES_MAX: usize = 64 << 10;

/// One of a rank's two output streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitStatus {
    /// With this exit code.
    Code(i32),
    /// By this signal.
    Signal(i32),
    /// By SIGKILL, from the kernel, because memory had run out.
    OutOfMemory,
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
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
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankSpec {
    /// Position in the job.
    pub rank: u32,
    /// Environment of this rank alone.
    pub env: Variables,
}

/// Everything an agent needs to start its ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobSpec {
    /// Lay `env` over the agent's own environment (another host) instead of replacing it.
    pub inherit_env: bool,
    /// Environment of every rank.
    pub env: Variables,
    /// Variables with the highest precedence.
    pub on_top: Variables,
    /// The agent's own working directory stays, and its own environment wins over `env`.
    pub stays: bool,
    /// Working directory.
    pub cwd: PathBuf,
    /// Program and arguments; an empty program is the Python that started the agent.
    pub command: Vec<OsString>,
    /// End the ranks after this many seconds without a word from the launcher; 0 means never.
    pub silence_max_s: u32,
    /// Seconds from SIGTERM to SIGKILL.
    pub terminate_timeout_s: u32,
    /// The ranks of this host that start together.
    pub ranks: Vec<RankSpec>,
    /// More may be started one by one, and ended one by one: the host is done only when told so.
    pub is_open: bool,
}

/// Launcher to agent.
#[derive(Clone, Debug, PartialEq, Eq)]
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
#[derive(Clone, Debug, PartialEq)]
pub enum FromAgent {
    /// The agent runs.
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

fn put_word(writer: &mut Writer<'_>, word: &OsStr) {
    writer.bytes(word.as_bytes());
}

fn put_variables(writer: &mut Writer<'_>, variables: &Variables) {
    writer.varint(variables.len() as u64);
    for (name, value) in variables {
        put_word(writer, name);
        put_word(writer, value);
    }
}

fn word(reader: &mut Reader<'_>, what: &'static str) -> Result<OsString, DecodeError> {
    Ok(OsString::from_vec(
        reader.bytes(FRAME_BYTES_MAX, what)?.to_vec(),
    ))
}

fn variables(reader: &mut Reader<'_>) -> Result<Variables, DecodeError> {
    let count = reader.count(WORDS_MAX, 2, "environment")?;
    (0..count)
        .map(|_| Ok((word(reader, "variable")?, word(reader, "value")?)))
        .collect()
}

fn put_rank(writer: &mut Writer<'_>, rank: &RankSpec) {
    writer.varint(u64::from(rank.rank));
    put_variables(writer, &rank.env);
}

fn rank(reader: &mut Reader<'_>) -> Result<RankSpec, DecodeError> {
    Ok(RankSpec {
        rank: reader.varint_u32("rank")?,
        env: variables(reader)?,
    })
}

fn text(reader: &mut Reader<'_>, what: &'static str) -> Result<String, DecodeError> {
    Ok(reader.str(FRAME_BYTES_MAX, what)?.to_owned())
}

/// Appends one frame whose message `write` produces.
fn frame(out: &mut Vec<u8>, write: impl FnOnce(&mut Writer<'_>)) {
    let start = out.len();
    out.extend_from_slice(&[0; 4]);
    write(&mut Writer::new(out));
    let length = (out.len() - start - 4) as u32;
    out[start..start + 4].copy_from_slice(&length.to_le_bytes());
}

impl ToAgent {
    /// Appends this message as a frame.
    pub fn encode(&self, out: &mut Vec<u8>) {
        frame(out, |w| match self {
            Self::Job(job) => {
                w.u8(0);
                w.u8(u8::from(job.inherit_env));
                put_variables(w, &job.env);
                put_variables(w, &job.on_top);
                w.u8(u8::from(job.stays));
                put_word(w, job.cwd.as_os_str());
                w.varint(job.command.len() as u64);
                job.command.iter().for_each(|item| put_word(w, item));
                w.varint(u64::from(job.silence_max_s));
                w.varint(u64::from(job.terminate_timeout_s));
                w.varint(job.ranks.len() as u64);
                job.ranks.iter().for_each(|rank| put_rank(w, rank));
                w.u8(u8::from(job.is_open));
            }
            Self::Start => w.u8(1),
            Self::Stop(how) => {
                w.u8(2);
                w.u8(*how as u8);
            }
            Self::Ping => w.u8(3),
            Self::Spawn(rank) => {
                w.u8(4);
                put_rank(w, rank);
            }
            Self::End(rank) => {
                w.u8(5);
                w.varint(u64::from(*rank));
            }
            Self::Close => w.u8(6),
            Self::Examine(question) => {
                w.u8(7);
                question.put(w);
            }
            Self::CheckStopped { rank, pid } => {
                w.u8(8);
                w.varint(u64::from(*rank));
                w.varint(u64::from(*pid));
            }
            Self::Cause(text) => {
                w.u8(9);
                w.str(text);
            }
        });
    }

    /// Reads the message of one frame.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let r = &mut Reader::new(bytes);
        let message = match r.u8("tag")? {
            0 => {
                let inherit_env = r.u8("inherit_env")? != 0;
                let env = variables(r)?;
                let on_top = variables(r)?;
                let stays = r.u8("stays")? != 0;
                let cwd = word(r, "working directory")?.into();
                let count = r.count(WORDS_MAX, 1, "command")?;
                let command = (0..count)
                    .map(|_| word(r, "command"))
                    .collect::<Result<_, _>>()?;
                let silence_max_s = r.varint_u32("silence_max_s")?;
                let terminate_timeout_s = r.varint_u32("terminate_timeout_s")?;
                let count = r.count(HOST_RANKS_MAX, 2, "ranks")?;
                let ranks = (0..count).map(|_| rank(r)).collect::<Result<_, _>>()?;
                let is_open = r.u8("is_open")? != 0;
                Self::Job(JobSpec {
                    inherit_env,
                    env,
                    on_top,
                    stays,
                    cwd,
                    command,
                    silence_max_s,
                    terminate_timeout_s,
                    ranks,
                    is_open,
                })
            }
            1 => Self::Start,
            2 => Self::Stop(match r.u8("stop")? {
                0 => Stop::Interrupt,
                1 => Stop::Terminate,
                2 => Stop::Kill,
                other => {
                    return Err(DecodeError::BadValue {
                        what: "stop",
                        value: u64::from(other),
                    });
                }
            }),
            3 => Self::Ping,
            4 => Self::Spawn(rank(r)?),
            5 => Self::End(r.varint_u32("rank")?),
            6 => Self::Close,
            7 => Self::Examine(Question::get(r)?),
            8 => Self::CheckStopped {
                rank: r.varint_u32("rank")?,
                pid: r.varint_u32("pid")?,
            },
            9 => Self::Cause(text(r, "cause")?),
            other => {
                return Err(DecodeError::BadValue {
                    what: "tag",
                    value: u64::from(other),
                });
            }
        };
        r.clone().finish()?;
        Ok(message)
    }
}

impl FromAgent {
    /// Appends this message as a frame.
    pub fn encode(&self, out: &mut Vec<u8>) {
        frame(out, |w| match self {
            Self::Hello {
                version,
                hostname,
                task,
            } => {
                w.u8(0);
                w.str(version);
                w.str(hostname);
                w.u8(u8::from(task.is_some()));
                if let Some(task) = task {
                    task.put(w);
                }
            }
            Self::Ready => w.u8(1),
            Self::Refused { code, why } => {
                w.u8(2);
                w.u8(*code);
                w.str(why);
            }
            Self::Note(note) => {
                w.u8(3);
                w.str(note);
            }
            Self::Started { rank, pid } => {
                w.u8(4);
                w.varint(u64::from(*rank));
                w.varint(u64::from(*pid));
            }
            Self::Output {
                rank,
                stream,
                bytes,
            } => {
                w.u8(5);
                w.varint(u64::from(*rank));
                w.u8(*stream as u8);
                w.bytes(bytes);
            }
            Self::Exited { rank, status } => {
                w.u8(6);
                w.varint(u64::from(*rank));
                let (kind, number) = match status {
                    ExitStatus::Code(code) => (0, *code),
                    ExitStatus::Signal(signal) => (1, *signal),
                    ExitStatus::OutOfMemory => (2, 0),
                };
                w.u8(kind);
                w.signed(i64::from(number));
            }
            Self::Done => w.u8(7),
            Self::Found(answer) => {
                w.u8(8);
                answer.put(w);
            }
            Self::StoppedState { rank, is_stopped } => {
                w.u8(9);
                w.varint(u64::from(*rank));
                w.u8(u8::from(*is_stopped));
            }
            Self::Threads(report) => {
                w.u8(10);
                w.varint(u64::from(report.threads));
                w.varint(u64::from(report.cores));
                w.varint(u64::from(report.ranks));
                w.u8(u8::from(report.is_openmp));
            }
            Self::Unreached(report) => {
                w.u8(11);
                w.bytes(&report.encode());
            }
        });
    }

    /// Reads the message of one frame.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let r = &mut Reader::new(bytes);
        let message = match r.u8("tag")? {
            0 => {
                let (version, hostname) = (text(r, "version")?, text(r, "hostname")?);
                if version != env!("CARGO_PKG_VERSION") {
                    // Another version may encode the rest differently; the version alone leads to its refusal.
                    let task = None;
                    return Ok(Self::Hello {
                        version,
                        hostname,
                        task,
                    });
                }
                let has_task = r.u8("task")? != 0;
                Self::Hello {
                    version,
                    hostname,
                    task: has_task.then(|| DialedTask::get(r)).transpose()?,
                }
            }
            1 => Self::Ready,
            2 => Self::Refused {
                code: r.u8("code")?,
                why: text(r, "reason")?,
            },
            3 => Self::Note(text(r, "note")?),
            4 => Self::Started {
                rank: r.varint_u32("rank")?,
                pid: r.varint_u32("pid")?,
            },
            5 => Self::Output {
                rank: r.varint_u32("rank")?,
                stream: match r.u8("stream")? {
                    0 => Stream::Stdout,
                    1 => Stream::Stderr,
                    other => {
                        let value = u64::from(other);
                        return Err(DecodeError::BadValue {
                            what: "stream",
                            value,
                        });
                    }
                },
                bytes: r.bytes(OUTPUT_BYTES_MAX, "output")?.to_vec(),
            },
            6 => {
                let rank = r.varint_u32("rank")?;
                let kind = r.u8("exit kind")?;
                let value = r.signed("exit status")?;
                let number = i32::try_from(value).map_err(|_| DecodeError::BadValue {
                    what: "exit status",
                    value: 0,
                })?;
                let status = match kind {
                    0 => ExitStatus::Code(number),
                    1 => ExitStatus::Signal(number),
                    _ => ExitStatus::OutOfMemory,
                };
                Self::Exited { rank, status }
            }
            7 => Self::Done,
            8 => Self::Found(Answer::get(r)?),
            9 => Self::StoppedState {
                rank: r.varint_u32("rank")?,
                is_stopped: r.u8("is_stopped")? != 0,
            },
            10 => Self::Threads(Threads {
                threads: r.varint_u32("threads")?,
                cores: r.varint_u32("cores")?,
                ranks: r.varint_u32("ranks")?,
                is_openmp: r.u8("is_openmp")? != 0,
            }),
            11 => Self::Unreached(Unreached::decode(
                r.bytes(FRAME_BYTES_MAX, "what was tried")?,
            )?),
            other => {
                return Err(DecodeError::BadValue {
                    what: "tag",
                    value: u64::from(other),
                });
            }
        };
        r.clone().finish()?;
        Ok(message)
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
