//! Local sockets of running jobs: their names, and how a command asks one.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::time::Duration;

use horovod_transport::LocalConnection;

use crate::trace::LAST_EVENTS_LIMIT;

/// The path's first part on a local socket, where the system tells who asks and no secret is needed.
pub(crate) const LOCAL_TOKEN: &str = "local";
/// Time for a job's answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
/// Bytes of the head of an answer that are read at most.
const HEAD_BYTES_MAX: usize = 8 << 10;
/// Bytes of an answer that are read at most.
const ANSWER_BYTES_MAX: u64 = 64 << 20;
/// A line ends with the name of a socket; one that is no file begins with `@`.
const SOCKETS: &str = "/proc/net/unix";
const NAMES_ARE_FILES: bool = !cfg!(all(target_os = "linux", not(horovod_portable)));

/// A job of this user, whose rank 0 runs on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// The process of rank 0.
    pub pid: u32,
    name: String,
}

/// A name for the socket of a job. Processes of two containers may have one number and share the place of the names, and
/// a process may begin several jobs: a random part tells them apart.
pub(crate) fn socket_name(pid: u32) -> io::Result<String> {
    Ok(format!("{}{pid}-{}", prefix(), random_hex::<8>()?))
}

/// Random bytes as digits.
pub(crate) fn random_hex<const BYTES: usize>() -> io::Result<String> {
    use std::fmt::Write;
    let mut bytes = [0; BYTES];
    getrandom::fill(&mut bytes).map_err(|e| io::Error::other(e.to_string()))?;
    let mut digits = String::new();
    for byte in bytes {
        // A String takes everything.
        let _ = write!(digits, "{byte:02x}");
    }
    Ok(digits)
}

fn prefix() -> String {
    let user = rustix::process::geteuid().as_raw();
    let name = format!("horovod-status-{user}-");
    if NAMES_ARE_FILES {
        let path = std::env::temp_dir().join(name);
        return path.to_string_lossy().into_owned();
    }
    name
}

/// The jobs of this user on this host, ascending.
///
/// # Errors
/// The system does not list sockets.
pub fn jobs() -> io::Result<Vec<Job>> {
    let prefix = prefix();
    if !NAMES_ARE_FILES {
        let table = std::fs::read_to_string(SOCKETS)?;
        let names = table.lines().filter_map(|line| line.rsplit_once(" @"));
        return Ok(listed(names.map(|(_, name)| name), &prefix));
    }
    let mut names = Vec::new();
    for file in std::fs::read_dir(std::env::temp_dir())? {
        names.push(file?.path().to_string_lossy().into_owned());
    }
    Ok(listed(names.iter().map(String::as_str), &prefix))
}

/// The jobs whose sockets have these names.
fn listed<'a>(names: impl Iterator<Item = &'a str>, prefix: &str) -> Vec<Job> {
    let jobs = names.filter_map(|name| {
        let (pid, _) = name.strip_prefix(prefix)?.split_once('-')?;
        let pid = pid.parse().ok()?;
        let name = name.to_owned();
        Some(Job { pid, name })
    });
    let mut jobs: Vec<Job> = jobs.collect();
    jobs.sort_by(|a, b| (a.pid, &a.name).cmp(&(b.pid, &b.name)));
    jobs.dedup();
    jobs
}

impl Job {
    #[cfg(test)]
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    fn request(&self, resource: &str, limit: Duration) -> io::Result<LocalConnection> {
        let mut connection = LocalConnection::unix(&self.name, limit)?;
        write!(connection, "GET /{LOCAL_TOKEN}/{resource} HTTP/1.1\r\n\r\n")?;
        Ok(connection)
    }

    /// Writes a trace of the next `lasting` of the job to `to`; its bytes.
    ///
    /// # Errors
    /// The job has ended, does not answer, is another user's, or records something else; `to` takes nothing.
    pub fn trace(&self, lasting: Duration, to: &mut impl Write) -> io::Result<u64> {
        let limit = lasting + 2 * LAST_EVENTS_LIMIT;
        let resource = format!("trace/{}", lasting.as_millis());
        let mut answer = BufReader::new(self.request(&resource, limit)?);
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            // Beyond any head that a job sends.
            if head.len() > HEAD_BYTES_MAX || answer.read_until(b'\n', &mut head)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        let head = String::from_utf8_lossy(&head);
        if !head.starts_with("HTTP/1.1 200 ") {
            let mut why = String::new();
            answer.take(ANSWER_BYTES_MAX).read_to_string(&mut why)?;
            return Err(io::Error::other(why.trim_end().to_owned()));
        }
        let length = head
            .lines()
            .find_map(|line| line.strip_prefix("Content-Length: "));
        let length: u64 = length
            .and_then(|length| length.parse().ok())
            .ok_or(io::ErrorKind::InvalidData)?;
        match io::copy(&mut answer, to)? {
            all if all == length => Ok(length),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// Asks rank 0 of the job for a resource: `status`, `stats.json` or `metrics`.
    ///
    /// # Errors
    /// It has ended, does not answer, or is another user's.
    pub fn ask(&self, resource: &str) -> io::Result<String> {
        self.ask_within(resource, ANSWER_LIMIT)
    }

    /// As [`Self::ask`], with a limit for the answer.
    ///
    /// # Errors
    /// As those of [`Self::ask`].
    pub fn ask_within(&self, resource: &str, limit: Duration) -> io::Result<String> {
        let connection = self.request(resource, limit)?;
        let mut answer = String::new();
        connection
            .take(ANSWER_BYTES_MAX)
            .read_to_string(&mut answer)?;
        let body = answer.split_once("\r\n\r\n").map(|(_, body)| body);
        let body = body.filter(|_| answer.starts_with("HTTP/1.1 200 "));
        body.map(str::to_owned)
            .ok_or_else(|| io::ErrorKind::InvalidData.into())
    }
}

#[cfg(test)]
mod tests {
    use horovod_transport::LocalServer;

    use super::*;

    #[test]
    fn two_processes_of_one_number_can_both_be_found() {
        let [one, other] = [42, 42].map(|pid| socket_name(pid).expect("random bytes"));
        let servers = [&one, &other].map(|name| LocalServer::unix(name).expect("a free name"));
        let found = listed([&*one, &*other].into_iter(), &prefix());
        assert_eq!(
            found.iter().map(|job| job.pid).collect::<Vec<_>>(),
            [42, 42]
        );
        drop(servers);
    }

    #[test]
    fn jobs_are_found_by_the_names_of_their_sockets() {
        let names = [
            "horovod-status-7-42-0",
            "horovod-status-7-42-0",
            "horovod-status-70-9-0",
            "/run/horovod-status-7-9-0",
            "horovod-status-7-x-0",
            "horovod-status-7-8",
        ];
        let jobs = listed(names.into_iter(), "horovod-status-7-");
        let pids: Vec<u32> = jobs.iter().map(|job| job.pid).collect();
        assert_eq!(pids, [42]);
    }
}
