//! Remote hosts: which ones are this machine, and how ssh starts an agent on the others.

use std::ffi::OsString;
use std::net::{IpAddr, ToSocketAddrs, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::agent;
use crate::environment;
use crate::frames::ExitStatus;
use crate::hosts::Host;
use crate::report::Cause;

/// Keep-alive messages of ssh that may stay unanswered before ssh ends the connection; the least seconds between two.
const ALIVE_COUNT: u32 = 3;
const ALIVE_INTERVAL_MIN_S: u32 = 5;

/// Returns the seconds between two keep-alive messages of ssh. ssh never ends a connection earlier than a rank declares
/// a peer lost. Returns 0, no messages, if ranks wait for silent peers without limit.
pub(crate) fn alive_interval(heartbeat_s: Option<u32>) -> u32 {
    heartbeat_s.map_or(0, |seconds| {
        seconds.div_ceil(ALIVE_COUNT).max(ALIVE_INTERVAL_MIN_S)
    })
}

/// Seconds between two heartbeats from the launcher to other hosts, and the least silence that ends the ranks there.
pub(crate) const PING_INTERVAL_S: u32 = 10;
const SILENCE_MIN_S: u32 = 60;

/// Returns after how many seconds without a heartbeat from the launcher the ranks of a host are ended: later than a
/// rank declares a peer lost. Returns 0, never, on the launcher's own host and if ranks wait for silent peers without limit.
pub(crate) fn silence_max(is_local: bool, heartbeat_s: Option<u32>) -> u32 {
    // The last heartbeat may have been early, and the next one late.
    let after = |seconds: u32| seconds + 2 * PING_INTERVAL_S;
    let limit = heartbeat_s.map_or(0, |seconds| after(seconds).max(SILENCE_MIN_S));
    if is_local { 0 } else { limit }
}

/// Returns for each host whether it is this machine. A name that does not resolve may be an alias of ssh, and counts as
/// another machine.
pub(crate) fn are_local(hosts: &[&Host], within: Duration) -> Vec<bool> {
    let deadline = Instant::now() + within;
    let (sender, answers) = mpsc::channel();
    let own = environment::hostname();
    let mut local = vec![false; hosts.len()];
    let mut open = 0;
    for (index, host) in hosts.iter().enumerate() {
        let name = host.address().to_owned();
        if host.name.contains('@') {
            // Another user is reached by ssh, on this machine too.
            continue;
        }
        if name == "localhost" || name == own {
            local[index] = true;
            continue;
        }
        open += 1;
        let sender = sender.clone();
        // A name server may answer late: all names are looked up at once, until the deadline.
        let lookup = std::thread::Builder::new().name("lookup".to_owned());
        let started = lookup.spawn(move || {
            let addresses = (name.as_str(), 0).to_socket_addrs();
            let here = addresses.is_ok_and(|mut found| found.any(|a| is_own_address(a.ip())));
            let _ = sender.send((index, here));
        });
        if started.is_err() {
            // Without a thread the host counts as another machine.
            open -= 1;
        }
    }
    for _ in 0..open {
        let left = deadline.saturating_duration_since(Instant::now());
        match answers.recv_timeout(left) {
            Ok((index, here)) => local[index] = here,
            Err(_) => break,
        }
    }
    local
}

/// Returns whether the address is one of this machine: no other can be bound.
fn is_own_address(address: IpAddr) -> bool {
    !address.is_unspecified() && UdpSocket::bind((address, 0)).is_ok()
}

/// How to reach other hosts.
#[derive(Clone, Debug)]
pub(crate) struct Ssh {
    pub(crate) port: Option<u16>,
    pub(crate) identity: Option<PathBuf>,
    pub(crate) connect_timeout_s: u32,
    /// See [`alive_interval`].
    pub(crate) alive_interval_s: u32,
}

impl Ssh {
    /// `ssh` with everything but host and command.
    fn base(&self) -> Command {
        let mut ssh = Command::new("ssh");
        ssh.args([
            "-T",
            "-x",
            "-o",
            "BatchMode=yes",
            "-o",
            "ClearAllForwardings=yes",
        ]);
        ssh.arg("-o")
            .arg(format!("ConnectTimeout={}", self.connect_timeout_s));
        ssh.arg("-o")
            .arg(format!("ServerAliveInterval={}", self.alive_interval_s));
        ssh.arg("-o")
            .arg(format!("ServerAliveCountMax={ALIVE_COUNT}"));
        if let Some(port) = self.port {
            ssh.arg("-p").arg(port.to_string());
        }
        if let Some(identity) = &self.identity {
            ssh.arg("-i").arg(identity);
        }
        ssh
    }

    /// Asks ssh for each host whether the user's configuration says how to treat unknown host keys.
    pub(crate) fn new_host_keys_are_settled(&self, hosts: &[&Host]) -> Vec<bool> {
        let asked: Vec<_> = hosts
            .iter()
            .map(|host| {
                let mut ssh = self.base();
                ssh.arg("-G").arg(Self::target(host));
                ssh.stdin(Stdio::null())
                    .stdout(Stdio::piped())
                    .stderr(Stdio::null())
                    .spawn()
            })
            .collect();
        asked
            .into_iter()
            .map(|child| {
                let output = child.and_then(std::process::Child::wait_with_output);
                let text = output.map(|o| o.stdout).unwrap_or_default();
                let text = String::from_utf8_lossy(&text).to_lowercase();
                let setting = text
                    .lines()
                    .find_map(|l| l.strip_prefix("stricthostkeychecking "));
                // `ask` is ssh's default, which needs a terminal.
                setting.is_some_and(|value| value.trim() != "ask")
            })
            .collect()
    }

    /// The command that runs an agent on `host`, talking over its stdin and stdout.
    pub(crate) fn agent(&self, host: &Host, keys_settled: bool, program: &Path) -> Command {
        let mut ssh = self.base();
        if !keys_settled {
            ssh.args(["-o", "StrictHostKeyChecking=accept-new"]);
        }
        ssh.arg("--")
            .arg(Self::target(host))
            .arg(remote_command(program));
        without_sigterm(&ssh)
    }

    fn target(host: &Host) -> String {
        host.name.replace(['[', ']'], "")
    }
}

/// The command, which ignores SIGTERM. A batch system sends that to all processes of a job, also to ssh. If ssh ended, the
/// agent of the other host would end its ranks at once. The launcher itself ends ssh by SIGKILL or by the end of its input.
fn without_sigterm(command: &Command) -> Command {
    let mut shell = Command::new("sh");
    shell
        .args(["-c", "trap '' TERM; exec \"$0\" \"$@\""])
        .arg(command.get_program())
        .args(command.get_args());
    shell
}

/// Returns a line that any login shell accepts. It starts the same file as on this host, or else the one on `PATH`.
fn remote_command(program: &Path) -> OsString {
    let script = format!(
        "if [ -x \"$0\" ]; then exec \"$0\" {sub}; fi; \
         if command -v horovodrun >/dev/null 2>&1; then exec horovodrun {sub}; fi; \
         echo \"neither $0 nor a horovodrun on the PATH was found: install horovod-rs there\" >&2; exit 127",
        sub = agent::SUBCOMMAND
    );
    let mut line = OsString::from(format!("exec sh -c '{script}' "));
    line.push(shell_quoted(&program.to_string_lossy()));
    line
}

/// Quotes a text so that a shell reads it as one word.
pub(crate) fn shell_quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}

/// Error text for an agent of another version.
pub(crate) fn other_version(version: &str) -> Option<String> {
    let own = env!("CARGO_PKG_VERSION");
    (version != own)
        .then(|| format!("has horovod-rs {version}, this host {own}: install the same there"))
}

/// Returns why a host's agent did not start. `words` is the output of ssh or of the agent, `status` its exit status.
pub(crate) fn why_not_started(is_local: bool, words: &str, status: Option<ExitStatus>) -> String {
    let meaning = explain_ssh(words).filter(|_| !is_local);
    let (unexplained, who) = match is_local {
        true => ("the agent on this host did not start", "it"),
        false => ("its agent did not start", "ssh"),
    };
    let ending = status.filter(|_| meaning.is_none()).map(|status| {
        let was = matches!(status, ExitStatus::Signal(_)).then_some("was ");
        let how = Cause::Exit(status).text();
        format!("{who} {}{how}", was.unwrap_or_default())
    });
    let output = Some(words.to_owned()).filter(|words| !words.is_empty());
    let details: Vec<String> = output.into_iter().chain(ending).collect();
    let meaning = meaning.unwrap_or(unexplained);
    match details.is_empty() {
        true => meaning.to_owned(),
        false => format!("{meaning} ({})", details.join("; ")),
    }
}

/// Explanation of an error of ssh, if known.
fn explain_ssh(words: &str) -> Option<&'static str> {
    const MEANINGS: &[(&str, &str)] = &[
        ("Could not resolve hostname", "its name does not resolve"),
        (
            "Permission denied",
            "ssh was refused: no key that it accepts (see -i, and authorized_keys there)",
        ),
        (
            "Host key verification failed",
            "its host key is not the one that ssh knows",
        ),
        (
            "Connection refused",
            "nothing listens on its ssh port (see -p)",
        ),
        ("No route to host", "there is no route to it"),
        ("Network is unreachable", "its network cannot be reached"),
        ("timed out", "it did not answer ssh in time"),
        ("was found: install", "horovodrun is not installed there"),
        (
            "Too many authentication failures",
            "ssh was refused: too many keys tried (see -i)",
        ),
    ];
    MEANINGS
        .iter()
        .find(|(sign, _)| words.contains(sign))
        .map(|(_, meaning)| *meaning)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(name: &str) -> Host {
        Host {
            name: name.to_owned(),
            slots: 1,
        }
    }

    #[test]
    fn knows_this_machine_by_all_its_names() {
        let own = environment::hostname();
        let hosts = [
            host("localhost"),
            host(&own),
            host("127.0.0.1"),
            host("127.0.1.1"),
            host("192.0.2.1"),
            host("no-such-host.invalid"),
            host("root@localhost"),
        ];
        let hosts: Vec<&Host> = hosts.iter().collect();
        let local = are_local(&hosts, Duration::from_secs(20));
        assert_eq!(local, [true, true, true, true, false, false, false]);
    }

    #[test]
    fn builds_one_ssh_line_without_secrets() {
        let ssh = Ssh {
            port: Some(2222),
            identity: Some("/k y".into()),
            connect_timeout_s: 9,
            alive_interval_s: alive_interval(Some(300)),
        };
        let command = ssh.agent(&host("u@[fe80::1]"), false, Path::new("/o'p t/horovodrun"));
        let words: Vec<_> = command
            .get_args()
            .map(|w| w.to_string_lossy().into_owned())
            .collect();
        let line = words.join(" ");
        for part in [
            "BatchMode=yes",
            "-p 2222",
            "-i /k y",
            "ConnectTimeout=9",
            "ServerAliveInterval=100",
            "ServerAliveCountMax=3",
            "accept-new",
            "-- u@fe80::1",
        ] {
            assert!(line.contains(part), "{part}: {line}");
        }
        assert!(
            words
                .last()
                .expect("a command")
                .ends_with("'/o'\\''p t/horovodrun'"),
            "{line}"
        );
        let settled = ssh.agent(&host("h"), true, Path::new("/x"));
        assert!(
            !settled
                .get_args()
                .any(|word| word.to_string_lossy().contains("StrictHost"))
        );
    }

    #[test]
    fn ssh_is_never_less_patient_than_the_ranks() {
        for heartbeat in [1, 5, 14, 15, 16, 30, 31, 299, 300, 86_400] {
            let timeout = alive_interval(Some(heartbeat)) * ALIVE_COUNT;
            assert!(timeout >= heartbeat, "{timeout} s for {heartbeat} s");
        }
        assert_eq!(alive_interval(Some(30)), 10);
        assert_eq!(alive_interval(None), 0, "nobody is given up");
        let agents = [Some(30), Some(300), None].map(|heartbeat| silence_max(false, heartbeat));
        assert_eq!(agents, [60, 320, 0]);
        assert_eq!(silence_max(true, Some(30)), 0);
    }

    #[test]
    fn explains_ssh() {
        #[track_caller]
        fn check(words: &str, status: Option<ExitStatus>, expected: &str) {
            let why = why_not_started(false, words, status);
            assert_eq!(why, expected);
        }
        let failed = Some(ExitStatus::Code(255));
        check(
            "x: Permission denied (publickey).",
            failed,
            "ssh was refused: no key that it accepts (see -i, and authorized_keys there) (x: Permission denied (publickey).)",
        );
        check(
            "Could not resolve hostname q",
            None,
            "its name does not resolve (Could not resolve hostname q)",
        );
        // Unknown errors are shown in full.
        check(
            "??",
            failed,
            "its agent did not start (??; ssh exited with code 255)",
        );
        check(
            "",
            failed,
            "its agent did not start (ssh exited with code 255)",
        );
        check("", None, "its agent did not start");
        assert_eq!(
            why_not_started(true, "", Some(ExitStatus::Signal(libc::SIGKILL))),
            "the agent on this host did not start (it was killed by signal 9 (SIGKILL))"
        );
    }
}
