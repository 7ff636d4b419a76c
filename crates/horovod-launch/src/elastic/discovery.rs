//! The discovery of hosts: runs the user's script repeatedly in a separate thread, so that a slow script, name server
//! or ssh does not block the launcher.

use std::collections::BTreeMap;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};

use crate::hosts::{self, Host};
use crate::io::{Got, Interest, read_some, set_nonblocking, wait};
use crate::remote::{self, Ssh};

/// Interval between two starts of the script.
const INTERVAL: Duration = Duration::from_secs(1);
/// Time limit of one run of the script.
const SCRIPT_LIMIT: Duration = Duration::from_secs(60);
/// Maximum number of bytes that the script may print.
const SCRIPT_BYTES_MAX: usize = 4 << 20;
/// Time limit for the resolution of names.
const RESOLVE_LIMIT: Duration = Duration::from_secs(10);

/// Source of the list of hosts.
#[derive(Clone, Debug)]
pub(super) enum Source {
    /// A list that never changes.
    Fixed(Vec<Host>),
    /// A shell command, and the number of slots for hosts that it lists without a number.
    Script {
        command: String,
        default_slots: Option<u32>,
    },
}

/// A host on the list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Listed {
    pub(super) host: Host,
    /// Whether the host is this machine.
    pub(super) is_local: bool,
    /// Whether the user's ssh configuration already decides how unknown host keys are treated.
    pub(super) keys_settled: bool,
}

/// Result of one run of the discovery.
pub(super) type Found = Result<Vec<Listed>, String>;

/// The launcher's handle of the discovery thread. Dropping it ends the thread and the script.
#[derive(Debug)]
pub(super) struct Discovery {
    found: Receiver<Found>,
    /// Readable when there is a result; closing it ends the thread.
    notifier: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl Discovery {
    pub(super) fn start(source: Source, ssh: Ssh) -> std::io::Result<Self> {
        let (notifier, theirs) = UnixStream::pair()?;
        notifier.set_nonblocking(true)?;
        theirs.set_nonblocking(true)?;
        let (sender, found) = channel();
        let searcher = Searcher {
            source,
            ssh,
            notifier: theirs,
            sender,
            places: BTreeMap::new(),
            last: None,
        };
        let thread = std::thread::Builder::new()
            .name("discovery".to_owned())
            .spawn(move || searcher.run())?;
        Ok(Self {
            found,
            notifier: Some(notifier),
            thread: Some(thread),
        })
    }

    /// Returns a descriptor that is readable when there is a result.
    pub(super) fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        self.notifier.as_ref().map(AsFd::as_fd)
    }

    /// Returns the results since the last call: every change of the list, and every new failure to get it.
    pub(super) fn take(&self) -> Vec<Found> {
        let mut bytes = [0; 64];
        while let Some(Ok(count)) = self
            .notifier
            .as_ref()
            .map(|mut notifier| notifier.read(&mut bytes))
        {
            if count == 0 {
                break;
            }
        }
        self.found.try_iter().collect()
    }
}

impl Drop for Discovery {
    fn drop(&mut self) {
        self.notifier = None;
        if let Some(thread) = self.thread.take() {
            // The thread ends early only by a panic, which has been reported.
            let _ = thread.join();
        }
    }
}

struct Searcher {
    source: Source,
    ssh: Ssh,
    notifier: UnixStream,
    sender: Sender<Found>,
    /// For each name seen: whether it is this machine, and whether host keys are settled.
    places: BTreeMap<String, (bool, bool)>,
    last: Option<Found>,
}

/// The launcher has closed its end, so the thread must end.
struct Dismissed;

impl Searcher {
    fn run(mut self) {
        // A dismissal is the normal end of the search.
        let _ = self.search();
    }

    fn search(&mut self) -> Result<(), Dismissed> {
        loop {
            let next = Instant::now() + INTERVAL;
            let found = match self.source.clone() {
                Source::Fixed(hosts) => Ok(hosts),
                Source::Script {
                    command,
                    default_slots,
                } => self
                    .run_script(&command)?
                    .and_then(|text| hosts::parse_discovered(&text, default_slots)),
            };
            let found = found.map(|hosts| self.place(hosts));
            if self.last.as_ref() != Some(&found) {
                self.last = Some(found.clone());
                self.sender.send(found).map_err(|_| Dismissed)?;
                // If the socket is full, it contains enough wake-ups.
                let _ = std::io::Write::write(&mut &self.notifier, &[1]);
            }
            let forever = matches!(self.source, Source::Fixed(_));
            while forever || Instant::now() < next {
                let until = (!forever).then_some(next);
                let _ = wait(&[Interest::read(self.notifier.as_fd())], until);
                self.check_ended()?;
            }
        }
    }

    /// Returns an error if the launcher has closed its end.
    fn check_ended(&self) -> Result<(), Dismissed> {
        match read_some(&mut &self.notifier, &mut [0; 8]) {
            Got::End => Err(Dismissed),
            Got::Bytes(_) | Got::Nothing => Ok(()),
        }
    }

    /// Returns the hosts with their places. Each name is resolved only once.
    fn place(&mut self, hosts: Vec<Host>) -> Vec<Listed> {
        let unknown = |host: &&Host| !self.places.contains_key(&host.name);
        let new: Vec<&Host> = hosts.iter().filter(unknown).collect();
        let local = remote::are_local(&new, RESOLVE_LIMIT);
        let places: Vec<_> = new
            .iter()
            .zip(local)
            .map(|(host, is_local)| {
                let settled = !is_local && self.ssh.new_host_keys_are_settled(&[host])[0];
                (host.name.clone(), (is_local, settled))
            })
            .collect();
        self.places.extend(places);
        hosts
            .into_iter()
            .map(|host| {
                let (is_local, keys_settled) = self.places[&host.name];
                Listed {
                    host,
                    is_local,
                    keys_settled,
                }
            })
            .collect()
    }

    /// Runs the script; returns its output, or an error that describes its failure.
    fn run_script(&self, command: &str) -> Result<Result<String, String>, Dismissed> {
        let script = format!("the host discovery script ({command})");
        let child = Command::new("/bin/sh")
            .arg("-c")
            .arg(command)
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn();
        let mut child = match child {
            Ok(child) => child,
            Err(error) => return Ok(Err(format!("{script} cannot be started: {error}"))),
        };
        let result = self.follow(&mut child);
        // This also kills the processes that the script has left in the background.
        let group = Pid::from_child(&child);
        if !matches!(child.try_wait(), Ok(Some(_))) {
            let _ = rustix::process::kill_process_group(group, Signal::KILL);
            let _ = child.wait();
        }
        Ok(result?.map_err(|why| format!("{script} {why}")))
    }

    fn follow(&self, child: &mut Child) -> Result<Result<String, String>, Dismissed> {
        let deadline = Instant::now() + SCRIPT_LIMIT;
        let Some(mut stdout) = child.stdout.take() else {
            return Ok(Err("has no output".to_owned()));
        };
        if let Err(error) = set_nonblocking(&stdout) {
            return Ok(Err(format!("cannot be read: {error}")));
        }
        let mut text = Vec::new();
        let mut buffer = [0; 16 << 10];
        loop {
            match read_some(&mut stdout, &mut buffer) {
                Got::Bytes(count) => text.extend_from_slice(&buffer[..count]),
                Got::End => break,
                Got::Nothing => {
                    let interests =
                        [&stdout.as_fd(), &self.notifier.as_fd()].map(|fd| Interest::read(*fd));
                    let _ = wait(&interests, Some(deadline));
                    self.check_ended()?;
                }
            }
            if text.len() > SCRIPT_BYTES_MAX {
                return Ok(Err(format!("printed more than {SCRIPT_BYTES_MAX} bytes")));
            }
            if Instant::now() >= deadline {
                let limit = SCRIPT_LIMIT.as_secs();
                return Ok(Err(format!("did not end within {limit} s")));
            }
        }
        loop {
            match child.try_wait() {
                Ok(Some(status)) if status.success() => break,
                Ok(Some(status)) => {
                    return Ok(Err(match status.code() {
                        Some(code) => format!("failed with exit code {code}{}", meaning(code)),
                        None => format!("failed: {status}"),
                    }));
                }
                Ok(None) if Instant::now() >= deadline => {
                    let limit = SCRIPT_LIMIT.as_secs();
                    return Ok(Err(format!("did not end within {limit} s")));
                }
                Ok(None) => {
                    let soon = Instant::now() + Duration::from_millis(5);
                    let _ = wait(&[Interest::read(self.notifier.as_fd())], Some(soon));
                    self.check_ended()?;
                }
                Err(error) => return Ok(Err(format!("cannot be waited for: {error}"))),
            }
        }
        String::from_utf8(text)
            .map(Ok)
            .or_else(|_| Ok(Err("printed something that is not UTF-8".to_owned())))
    }
}

/// Returns a shell's reason for this exit code, and the remedy.
fn meaning(code: i32) -> &'static str {
    match code {
        126 => ": it, or a command in it, is not executable; chmod +x makes a file executable",
        127 => ": it, or a command in it, was not found; a file in this folder is called as ./NAME",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ssh() -> Ssh {
        Ssh {
            port: None,
            identity: None,
            connect_timeout_s: 1,
            alive_interval_s: 5,
        }
    }

    fn script(command: &str) -> Discovery {
        let source = Source::Script {
            command: command.to_owned(),
            default_slots: Some(3),
        };
        Discovery::start(source, ssh()).expect("starts")
    }

    fn next(discovery: &Discovery) -> Result<Vec<(String, u32)>, String> {
        let found = discovery.found.recv_timeout(Duration::from_secs(60));
        let found = found.expect("in time");
        found.map(|hosts| {
            let pair = |l: Listed| (l.host.name, l.host.slots);
            hosts.into_iter().map(pair).collect()
        })
    }

    #[test]
    fn keeps_the_order_of_the_script() {
        let found = next(&script("printf 'localhost:2\\n\\n 127.0.0.1 \\n'"));
        let want = [("localhost".to_owned(), 2), ("127.0.0.1".to_owned(), 3)];
        assert_eq!(found.expect("good"), want);
    }

    #[test]
    fn says_what_is_wrong_with_the_script() {
        let failure = |command| next(&script(command)).expect_err(command);
        assert!(failure("exit 7").contains("(exit 7) failed with exit code 7"));
        assert!(
            failure("/dev/null")
                .contains("exit code 126: it, or a command in it, is not executable; chmod +x")
        );
        assert!(failure("no-such-script.sh").contains("called as ./NAME"));
        assert!(failure("echo a b").contains("\"a b\""));
        assert!(failure("echo localhost:x").contains("localhost:x"));
        let none = Source::Script {
            command: "echo localhost".to_owned(),
            default_slots: None,
        };
        let discovery = Discovery::start(none, ssh()).expect("starts");
        assert!(
            next(&discovery)
                .expect_err("no slots")
                .contains("--slots-per-host")
        );
    }

    #[test]
    fn an_endless_script_ends_with_the_launcher() {
        let discovery = script("sleep 1000");
        drop(discovery);
    }

    #[test]
    fn a_fixed_list_is_found_once() {
        let host = Host {
            name: "localhost".to_owned(),
            slots: 2,
        };
        let discovery = Discovery::start(Source::Fixed(vec![host]), ssh()).expect("starts");
        assert_eq!(next(&discovery).expect("good").len(), 1);
        assert!(discovery.take().is_empty());
    }
}
