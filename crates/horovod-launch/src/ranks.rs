//! The ranks of one host as processes: spawn, read, signal, reap.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitOptions};

use crate::frames::{ExitStatus, JobSpec, OUTPUT_BYTES_MAX, RankSpec, Stop, Stream};
use crate::io::{Got, read_some, set_nonblocking};
use crate::platform::{SEES_DESCENDANTS, children, descendants, is_stopped, name_of};
use crate::rank_exec;

/// Bytes taken from a dead rank's pipe at most: more than a pipe holds unless a descendant goes on writing.
const LAST_BYTES_MAX: usize = 1 << 20;

#[derive(Debug)]
struct RankProcess {
    rank: u32,
    pid: Pid,
    status: Option<ExitStatus>,
    pipes: [Option<File>; 2],
    /// The hardest signal that its process group got.
    asked: Option<Stop>,
}

/// Something of a rank that has not ended.
#[derive(Clone, Debug)]
pub(crate) struct Living {
    /// The rank; `None` if a process has left the session of its rank.
    pub(crate) rank: Option<u32>,
    /// `None`: the rank's first process. Otherwise a descendant of it that outlives it.
    other: Option<Pid>,
}

/// Names what had not ended so long after SIGTERM, for the user.
pub(crate) fn killed(living: &[Living], timeout: Duration) -> String {
    let running: Vec<String> = living
        .iter()
        .filter(|one| one.other.is_none())
        .filter_map(|one| Some(one.rank?.to_string()))
        .collect();
    let mut names = match running.len() {
        0 => Vec::new(),
        1 => vec![format!("rank {}", running[0])],
        _ => vec![format!("ranks {}", running.join(", "))],
    };
    for one in living {
        let Some(pid) = one.other else { continue };
        let of = one.rank.map(|rank| format!(" of rank {rank}"));
        let number = pid.as_raw_nonzero();
        names.push(format!(
            "process {number} ({}){}",
            name_of(pid),
            of.unwrap_or_default()
        ));
    }
    let were = if living.len() == 1 { "was" } else { "were" };
    format!(
        "{} had not ended {} s after SIGTERM and {were} killed (--terminate-timeout or HOROVOD_TERMINATE_TIMEOUT \
         gives more time)",
        names.join(", "),
        timeout.as_secs()
    )
}

/// All of them.
#[derive(Debug, Default)]
pub(crate) struct Ranks {
    all: Vec<RankProcess>,
}

impl Ranks {
    /// Starts one rank; its process id.
    pub(crate) fn spawn(&mut self, job: &JobSpec, spec: &RankSpec) -> io::Result<u32> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg(rank_exec::SUBCOMMAND)
            .arg(std::process::id().to_string())
            .args(&job.command)
            .env_clear()
            .envs(job.env.iter().map(|(name, value)| (name, value)))
            .env("PWD", &job.cwd)
            .envs(spec.env.iter().map(|(name, value)| (name, value)))
            .current_dir(&job.cwd)
            .stdin(crate::stdin::of_rank(spec.rank))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let pipe = |fd: Option<OwnedFd>| -> io::Result<Option<File>> {
            let file = fd.map(File::from);
            file.as_ref().map(set_nonblocking).transpose()?;
            Ok(file)
        };
        let pipes = [
            pipe(child.stdout.take().map(OwnedFd::from))?,
            pipe(child.stderr.take().map(OwnedFd::from))?,
        ];
        // From here on it is reaped by `reap`, like everything that becomes a child of this process.
        let pid = Pid::from_child(&child);
        self.all.push(RankProcess {
            rank: spec.rank,
            pid,
            status: None,
            pipes,
            asked: None,
        });
        Ok(child.id())
    }

    /// Open pipes.
    pub(crate) fn pipes(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.all
            .iter()
            .flat_map(|rank| rank.pipes.iter().flatten().map(AsFd::as_fd))
    }

    /// One piece of each stream that has some.
    pub(crate) fn read(&mut self) -> Vec<(u32, Stream, Vec<u8>)> {
        let mut buffer = vec![0; OUTPUT_BYTES_MAX];
        let mut pieces = Vec::new();
        for rank in &mut self.all {
            for stream in Stream::BOTH {
                if let Some(bytes) = rank.read(stream, &mut buffer) {
                    pieces.push((rank.rank, stream, bytes));
                }
            }
        }
        pieces
    }

    /// The output left in the pipes of a rank that ended. The pipes stay open: a descendant may still write.
    pub(crate) fn drain(&mut self, rank: u32) -> Vec<(Stream, Vec<u8>)> {
        let mut buffer = vec![0; OUTPUT_BYTES_MAX];
        let mut pieces = Vec::new();
        for process in self.all.iter_mut().filter(|process| process.rank == rank) {
            for stream in Stream::BOTH {
                let mut total = 0;
                while total < LAST_BYTES_MAX
                    && let Some(bytes) = process.read(stream, &mut buffer)
                {
                    total += bytes.len();
                    pieces.push((stream, bytes));
                }
            }
        }
        pieces
    }

    /// Whether every rank has ended.
    pub(crate) fn all_ended(&self) -> bool {
        self.all.iter().all(|rank| rank.status.is_some())
    }

    /// Ranks that have not ended, and orphans of those that have: a shell may end before the program that it started.
    pub(crate) fn living(&self) -> Vec<Living> {
        let running = self.all.iter().filter(|rank| rank.status.is_none());
        let mut living: Vec<Living> = running
            .map(|rank| Living {
                rank: Some(rank.rank),
                other: None,
            })
            .collect();
        for pid in children() {
            let of = self.all.iter().find(|rank| rank.owns(pid));
            if self.all.iter().any(|rank| rank.pid == pid)
                || of.is_some_and(|rank| rank.status.is_none())
            {
                continue;
            }
            living.push(Living {
                rank: of.map(|rank| rank.rank),
                other: Some(pid),
            });
        }
        living
    }

    /// The same of one rank.
    pub(crate) fn living_of(&self, rank: u32) -> Vec<Living> {
        let mut living = self.living();
        living.retain(|one| one.rank == Some(rank));
        living
    }

    /// Whether anything that the ranks started still runs, once they have ended.
    pub(crate) fn has_leftovers(&self) -> bool {
        if SEES_DESCENDANTS {
            return !descendants().is_empty();
        }
        self.all
            .iter()
            .any(|rank| rustix::process::test_kill_process_group(rank.pid).is_ok())
    }

    /// Takes the exit statuses that came, also those of orphans that became children of this process.
    pub(crate) fn reap(&mut self) -> Vec<(u32, ExitStatus)> {
        let mut ended = Vec::new();
        while let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) {
            let status = match (status.exit_status(), status.terminating_signal()) {
                (Some(code), _) => ExitStatus::Code(code),
                (None, Some(signal)) => ExitStatus::Signal(signal),
                (None, None) => continue,
            };
            if let Some(rank) = self
                .all
                .iter_mut()
                .find(|r| r.pid == pid && r.status.is_none())
            {
                rank.status = Some(status);
                ended.push((rank.rank, status));
            }
        }
        ended
    }

    /// Drops what is known of ranks of which nothing runs and whose pipes are closed.
    pub(crate) fn forget_ended(&mut self) {
        let below = descendants();
        let is_open = |rank: &RankProcess| rank.pipes.iter().any(Option::is_some);
        self.all.retain(|rank| {
            rank.status.is_none() || is_open(rank) || below.iter().any(|pid| rank.owns(*pid))
        });
    }

    /// Signals the processes of one rank.
    pub(crate) fn signal_rank(&mut self, rank: u32, how: Stop) {
        let below = descendants();
        for process in self.all.iter_mut().filter(|process| process.rank == rank) {
            process.signal(how, &below);
        }
    }

    /// Returns whether a signal has stopped a rank. `pid` is the process that the rank reports: a script may have started
    /// it. In a container a process does not know its number outside, so then the process that was started here counts.
    pub(crate) fn is_stopped(&self, rank: u32, pid: u32) -> bool {
        let mut running = self.all.iter().filter(|r| r.status.is_none());
        let Some(process) = running.find(|r| r.rank == rank) else {
            return false;
        };
        let is_its_own = |pid: &Pid| process.owns(*pid) && descendants().contains(pid);
        let named = i32::try_from(pid).ok().and_then(Pid::from_raw);
        is_stopped(named.filter(is_its_own).unwrap_or(process.pid))
    }

    /// Signals the processes of every rank; once no rank runs, or to kill, all descendants.
    pub(crate) fn signal(&mut self, how: Stop) {
        let below = descendants();
        for rank in &mut self.all {
            rank.signal(how, &below);
        }
        if how == Stop::Kill || self.all_ended() {
            let others = below
                .iter()
                .filter(|pid| !self.all.iter().any(|rank| rank.owns(**pid)));
            for pid in others {
                let _ = rustix::process::kill_process(*pid, signal_to(*pid, how));
            }
        }
    }
}

/// Whether a process cannot handle the signal: a stopped one handles only SIGKILL.
fn is_deaf(pid: Pid, how: Stop) -> bool {
    how == Stop::Terminate && is_stopped(pid)
}

fn signal_to(pid: Pid, how: Stop) -> Signal {
    match how {
        Stop::Terminate if is_stopped(pid) => Signal::KILL,
        Stop::Interrupt => Signal::INT,
        Stop::Terminate => Signal::TERM,
        Stop::Kill => Signal::KILL,
    }
}

impl RankProcess {
    /// Whether a descendant of this process is of the rank, which leads a session. While the session has members, its
    /// number belongs to nobody else.
    fn owns(&self, pid: Pid) -> bool {
        rustix::process::getsid(Some(pid)).is_ok_and(|session| session == self.pid)
    }

    /// Signals the rank's process group if the rank runs, and else those of its processes that have not got the signal.
    /// SIGKILL goes to all of its processes. `below` are all descendants of this process.
    fn signal(&mut self, how: Stop, below: &[Pid]) {
        let is_running = self.status.is_none();
        let has_signal = how != Stop::Kill && self.asked.is_some_and(|asked| asked >= how);
        let own = below.iter().copied();
        // Once the rank's first process has ended, its number may be that of a later process.
        for pid in own.filter(|pid| (*pid != self.pid || !is_running) && self.owns(*pid)) {
            let is_in_group = rustix::process::getpgid(Some(pid)) == Ok(self.pid);
            let has_it = is_running || has_signal && is_in_group;
            if how == Stop::Kill || !has_it || is_deaf(pid, how) {
                let _ = rustix::process::kill_process(pid, signal_to(pid, how));
            }
        }
        if (is_running || !SEES_DESCENDANTS) && !has_signal {
            let signal = signal_to(self.pid, how);
            if rustix::process::kill_process_group(self.pid, signal).is_err() && is_running {
                // It has not made its own group yet.
                let _ = rustix::process::kill_process(self.pid, signal);
            }
        }
        self.asked = self.asked.max(Some(how));
    }

    fn read(&mut self, stream: Stream, buffer: &mut [u8]) -> Option<Vec<u8>> {
        let slot = &mut self.pipes[stream.index()];
        match read_some(slot.as_mut()?, buffer) {
            Got::Bytes(count) => Some(buffer[..count].to_vec()),
            Got::Nothing => None,
            Got::End => {
                *slot = None;
                None
            }
        }
    }
}
