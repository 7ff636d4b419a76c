//! An agent that dials its launcher: a child of an executor's process, with which it ends.
//!
//! Its standard input is a pipe that the parent holds: first come the lines that say whom to dial, then nothing until
//! the parent has ended, however it did.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::net::{Shutdown, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use horovod_transport::JobKey;
use horovod_transport::agents::{Connection, Tries, dial};

use crate::environment;
use crate::frames::DialedTask;
use crate::io::{Got, Interest, is_readable, read_some, wait};
use crate::platform;

/// The word after the agent's subcommand.
pub(crate) const OPTION: &str = "--dial";
/// The same for an agent that MPI's launcher has started: the environment says whom to dial.
pub(crate) const STARTED_BY_MPI: &str = "--dial-from-mpi";
/// How long such an agent tries to reach the launcher.
const DIAL_LIMIT: Duration = Duration::from_secs(30);
/// Exit statuses of an agent that has dialed, besides 0 (the job is over, or needs this agent no more) and 1.
pub(crate) mod status {
    /// The launcher has ended the job otherwise than well.
    pub(crate) const STOPPED: u8 = 3;
    /// The connection has ended before the launcher said so.
    pub(crate) const LOST: u8 = 4;
    /// Nobody answered; a later attempt may succeed.
    pub(crate) const UNREACHED: u8 = 5;
}
/// Longest text that the parent says.
const WORDS_BYTES_MAX: u64 = 1 << 20;

/// Why an agent could not work, and its exit status then.
pub(crate) struct Failure {
    pub(crate) status: u8,
    pub(crate) why: String,
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self {
            status: 1,
            why: error.to_string(),
        }
    }
}

/// Instructions of the agent's parent process.
#[derive(Debug)]
struct Instructions {
    addresses: Vec<SocketAddr>,
    key: JobKey,
    index: u32,
    attempt: u32,
    /// In place of this machine's name and namespaces.
    host: String,
    python: OsString,
    python_version: String,
    parent: u32,
    timeout: Duration,
    tries: Tries,
}

impl Instructions {
    /// Lines `name=value`, up to an empty one.
    fn read(from: impl io::Read) -> Result<Self, String> {
        let mut values = std::collections::BTreeMap::new();
        for line in BufReader::new(from.take(WORDS_BYTES_MAX)).lines() {
            let line = line.map_err(|error| format!("standard input: {error}"))?;
            let Some((name, value)) = line.split_once('=') else {
                break;
            };
            values.insert(name.to_owned(), value.to_owned());
        }
        let mut text = |name: &str| {
            let value = values.remove(name);
            value.ok_or_else(|| format!("standard input does not say {name}"))
        };
        let number = |name: &str, value: String| -> Result<u32, String> {
            let wrong = |error| format!("{name}={value}: {error}");
            value.parse().map_err(wrong)
        };
        Ok(Self {
            addresses: parse_addresses(&text("addresses")?)?,
            key: match text("key")?.as_str() {
                // Its parent leaves the user's key to it.
                "" => environment::user_key()?,
                digits => JobKey::from_hex(digits).ok_or("the key is not 64 hex digits")?,
            },
            index: number("index", text("index")?)?,
            attempt: number("attempt", text("attempt")?)?,
            host: text("host")?,
            python: text("python")?.into(),
            python_version: text("python-version")?,
            parent: number("parent", text("parent")?)?,
            timeout: Duration::from_secs(number("timeout", text("timeout")?)?.into()),
            tries: match number("elastic", text("elastic")?)? {
                0 => Tries::WhileItMayHelp,
                _ => Tries::WholeTime,
            },
        })
    }

    /// From the environment of a process that MPI's launcher has started.
    fn of_mpi() -> Result<Self, String> {
        let (key, addresses) = environment::agent_of_mpi()?;
        Ok(Self {
            addresses: parse_addresses(&addresses)?,
            key: JobKey::from_hex(&key).ok_or("the key is not 64 hex digits")?,
            index: environment::rank_of_mpi()?,
            attempt: 0,
            host: String::new(),
            python: OsString::new(),
            python_version: String::new(),
            parent: std::os::unix::process::parent_id(),
            timeout: DIAL_LIMIT,
            tries: Tries::WhileItMayHelp,
        })
    }

    fn task(&self) -> DialedTask {
        let own = environment::hostname();
        let host_name = match self.host.is_empty() {
            true => own,
            false => self.host.clone(),
        };
        DialedTask {
            index: self.index,
            attempt: self.attempt,
            host: horovod_transport::host_identity(&host_name),
            host_name,
            pid: std::process::id(),
            python: self.python_version.clone(),
        }
    }
}

fn parse_addresses(text: &str) -> Result<Vec<SocketAddr>, String> {
    let parse = |at: &str| {
        at.parse()
            .map_err(|_| format!("addresses: {at:?} is not ip:port"))
    };
    text.split(',').map(parse).collect()
}

/// The connection to the launcher, and what the agent says of itself.
pub(crate) struct Dialed {
    /// It has to stay until all others may end.
    pub(crate) is_of_mpi: bool,
    pub(crate) connection: Connection,
    pub(crate) task: DialedTask,
    pub(crate) python: OsString,
}

/// Does what standard input says.
pub(crate) fn start() -> Result<Dialed, Failure> {
    let stdin = File::from(io::stdin().as_fd().try_clone_to_owned()?);
    let instructions = Instructions::read(&stdin).map_err(io::Error::other)?;
    start_as(instructions, Some(stdin))
}

/// Does what the environment of a process of MPI's launcher says.
pub(crate) fn start_from_mpi() -> Result<Dialed, Failure> {
    // Its standard input ends whenever that launcher likes.
    start_as(Instructions::of_mpi().map_err(io::Error::other)?, None)
}

fn start_as(instructions: Instructions, stdin: Option<File>) -> Result<Dialed, Failure> {
    let is_of_mpi = stdin.is_none();
    let begun = Instant::now();
    let parent = platform::watch_parent(instructions.parent);
    let connection = dial(
        &instructions.addresses,
        &instructions.key,
        instructions.index,
        instructions.timeout,
        instructions.tries,
    )
    .map_err(|tried| {
        let index = instructions.index;
        Failure {
            // Another key, for example, stays another key.
            status: match begun.elapsed() >= instructions.timeout {
                true => status::UNREACHED,
                false => 1,
            },
            why: format!("task {index} cannot reach the launcher: {tried}"),
        }
    })?;
    let stream = connection.stream.try_clone()?;
    std::thread::Builder::new()
        .name("parent-watch".into())
        .spawn(move || watch(stdin.as_ref(), parent, &stream))?;
    Ok(Dialed {
        is_of_mpi,
        connection,
        task: instructions.task(),
        python: instructions.python,
    })
}

impl Dialed {
    /// Waits until the launcher hangs up. Some launchers of MPI end all others after the first process that is gone.
    pub(crate) fn await_hang_up(&self) -> io::Result<()> {
        let mut file = self.file()?;
        let mut buffer = [0; 4096];
        while read_some(&mut file, &mut buffer) != Got::End {
            wait(&[Interest::read(file.as_fd())], None)?;
        }
        Ok(())
    }

    /// The stream as a file.
    pub(crate) fn file(&self) -> io::Result<File> {
        Ok(OwnedFd::from(self.connection.stream.try_clone()?).into())
    }
}

/// Hangs up once the parent has ended: the agent takes it for the launcher's end.
fn watch(stdin: Option<&File>, parent: Option<OwnedFd>, stream: &UnixStream) {
    while stdin.is_some() || parent.is_some() {
        // A child of the parent may hold the pipe, too, and outlive it.
        let interests = stdin
            .iter()
            .map(AsFd::as_fd)
            .chain(parent.as_ref().map(AsFd::as_fd))
            .map(Interest::read)
            .collect::<Vec<_>>();
        let _ = wait(&interests, None);
        let has_ended = parent.as_ref().is_some_and(|fd| is_readable(fd.as_fd()));
        let is_let_go = |mut stdin: &File| read_some(&mut stdin, &mut [0; 64]) == Got::End;
        if has_ended || stdin.is_some_and(is_let_go) {
            let _ = stream.shutdown(Shutdown::Both);
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    fn lines(addresses: &str, host: &str) -> String {
        format!(
            "addresses={addresses}\nkey={KEY}\nindex=3\nattempt=1\nhost={host}\npython=/usr/bin/python3\n\
             python-version=3.11.7\nparent=77\ntimeout=30\nelastic=1\n\nrest"
        )
    }

    #[test]
    fn reads_what_the_parent_says() {
        let instructions =
            Instructions::read(lines("127.0.0.1:5,[::1]:6", "").as_bytes()).expect("good");
        assert_eq!(
            (
                instructions.index,
                instructions.attempt,
                instructions.parent
            ),
            (3, 1, 77)
        );
        assert_eq!(instructions.addresses.len(), 2);
        assert_eq!(instructions.tries, Tries::WholeTime);
        let task = instructions.task();
        assert_eq!(task.host_name, environment::hostname());
        let other = Instructions::read(lines("127.0.0.1:5", "node-b").as_bytes()).expect("good");
        assert_eq!(other.task().host_name, "node-b");
        assert_ne!(other.task().host, task.host);
    }

    #[test]
    fn says_what_is_wrong_and_never_the_key() {
        let wrong = |text: &str| Instructions::read(text.as_bytes()).expect_err("wrong");
        assert_eq!(
            wrong(&lines("here", "")),
            "addresses: \"here\" is not ip:port"
        );
        assert_eq!(wrong(""), "standard input does not say addresses");
        let bad_key = lines("127.0.0.1:5", "").replace(KEY, "0123");
        assert_eq!(wrong(&bad_key), "the key is not 64 hex digits");
    }
}
