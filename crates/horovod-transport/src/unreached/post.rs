//! The post of a host: where ranks that cannot reach the launcher tell that host's agent what they tried, and learn
//! what the launcher makes of it.
//!
//! A local socket whose name only this user's processes can use. A rank connects, writes its [`Unreached`] and its
//! end; the answer is a text, a byte 0 that says that all of it has come, and its end.

use std::{
    io,
    os::fd::BorrowedFd,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{ANSWER_WITHIN, Unreached};
use crate::{
    platform::{fd::Fd, net},
    tcp::stream::{Got, recv, send},
    wait::wait_for_any,
};

/// Longest message either way, in bytes.
const MESSAGE_MAX: usize = 64 << 10;
/// Ranks that may wait at the same time; the oldest go first.
const WAITING_MAX: usize = 1 << 10;
/// How long one of them may stay: longer than it waits for an answer.
const STAY: Duration = ANSWER_WITHIN.saturating_add(Duration::from_secs(5));
/// How long not to accept after the system refused to.
const REST: Duration = Duration::from_millis(100);
/// The last byte of an answer.
const END: char = '\0';
/// How often to ask whether the caller wants to leave.
const ASK_EVERY: Duration = Duration::from_millis(100);

/// A rank at the post.
struct Teller {
    fd: Arc<Fd>,
    bytes: Vec<u8>,
    /// All has come: it waits for the answer.
    has_reported: bool,
    /// When it is given up.
    until: Instant,
}

/// The agent's end.
pub struct Post {
    listener: net::UnixListener,
    tellers: Vec<Teller>,
    /// Until when not to accept, after the system refused to.
    rest: Option<Instant>,
}

impl std::fmt::Debug for Post {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Post").finish_non_exhaustive()
    }
}

impl Post {
    /// Listens.
    pub fn open() -> io::Result<Self> {
        Ok(Self {
            listener: net::unix_listen()?,
            tellers: Vec::new(),
            rest: None,
        })
    }

    /// The address of the socket, for the ranks' environment.
    pub fn name(&self) -> &str {
        &self.listener.name
    }

    /// Readable when there may be something to [`Self::take`].
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let tellers = self.tellers.iter().filter(|teller| !teller.has_reported);
        let fds = tellers.map(|teller| &teller.fd);
        let listener = self.rest.is_none().then_some(&self.listener.fd);
        fds.chain(listener).filter_map(|fd| fd.get().ok())
    }

    /// When to call [`Self::take`] at the latest.
    pub fn deadline(&self) -> Option<Instant> {
        let tellers = self.tellers.iter().map(|teller| teller.until);
        tellers.chain(self.rest).min()
    }

    fn accept(&mut self, now: Instant) {
        if self.rest.is_some_and(|until| now < until) {
            return;
        }
        self.rest = None;
        loop {
            match net::accept(&self.listener.fd) {
                Ok(Some((fd, _))) if net::is_same_user(&fd) => {
                    if self.tellers.len() == WAITING_MAX {
                        self.tellers.remove(0);
                    }
                    self.tellers.push(Teller {
                        fd,
                        bytes: Vec::new(),
                        has_reported: false,
                        until: now + STAY,
                    });
                }
                Ok(Some(_)) => {}
                Ok(None) => return,
                // Out of descriptors, say: leave it in the backlog and go on.
                Err(_) => {
                    self.rest = Some(now + REST);
                    return;
                }
            }
        }
    }

    /// The reports since the last call.
    pub fn take(&mut self, now: Instant) -> Vec<Unreached> {
        self.tellers.retain(|teller| now < teller.until);
        self.accept(now);
        let mut reports = Vec::new();
        self.tellers.retain_mut(|teller| match teller.read() {
            Ok(new) => {
                reports.extend(new);
                true
            }
            Err(_) => false,
        });
        reports
    }

    /// Answers every rank that waits.
    pub fn answer(&mut self, text: &str) {
        let text = format!("{text}{END}");
        for teller in self.tellers.extract_if(.., |teller| teller.has_reported) {
            // It fits into the buffer of a new socket; if it does not, the rank sees no end and keeps its own text.
            let _ = send(&teller.fd, text.as_bytes());
        }
    }
}

impl Teller {
    /// Its report, once the whole report has come.
    fn read(&mut self) -> io::Result<Option<Unreached>> {
        if self.has_reported {
            return Ok(None);
        }
        if !read_to_end(&self.fd, &mut self.bytes)? {
            return Ok(None);
        }
        self.has_reported = true;
        let report = Unreached::decode(&self.bytes).map_err(io::Error::other)?;
        self.bytes = Vec::new();
        Ok(Some(report))
    }
}

/// Reads what is there; true at the end.
fn read_to_end(fd: &Fd, bytes: &mut Vec<u8>) -> io::Result<bool> {
    let mut buffer = [0; 4 << 10];
    loop {
        match recv(fd, &mut buffer)? {
            Got::Bytes(count) if bytes.len() + count <= MESSAGE_MAX => {
                bytes.extend_from_slice(&buffer[..count]);
            }
            Got::Bytes(_) => return Err(io::Error::other("too long a message")),
            Got::Nothing => return Ok(false),
            Got::End => return Ok(true),
        }
    }
}

/// Tells the agent at the post of this name; its answer, if one comes in time.
pub(crate) fn send_report(
    name: &str,
    report: &Unreached,
    within: Duration,
    wants_to_leave: &dyn Fn() -> bool,
) -> Option<String> {
    let deadline = Instant::now() + within;
    let fd = net::unix_connect(name).ok()?;
    let bytes = report.encode();
    let mut sent = 0;
    let mut answer = Vec::new();
    loop {
        if sent < bytes.len() {
            sent += send(&fd, &bytes[sent..]).ok()?;
            if sent == bytes.len() {
                rustix::net::shutdown(fd.get().ok()?, rustix::net::Shutdown::Write).ok()?;
            }
        } else if read_to_end(&fd, &mut answer).ok()? {
            let text = String::from_utf8(answer).ok()?;
            return text.strip_suffix(END).map(str::to_owned);
        }
        let now = Instant::now();
        if now >= deadline || wants_to_leave() {
            return None;
        }
        let socket = [(&*fd, sent < bytes.len())];
        wait_for_any(socket.into_iter(), Some(deadline.min(now + ASK_EVERY)));
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Goal, tests::report};
    use super::*;
    use crate::probe::Obstacle;

    const SOON: Duration = Duration::from_secs(60);

    #[test]
    fn what_ranks_tell_arrives_and_all_get_the_same_answer() {
        let mut post = Post::open().unwrap();
        let name = post.name().to_owned();
        let tried = [("10.0.0.1:80", Obstacle::Silence)];
        let tellers: Vec<_> = [2, 3]
            .map(|rank| {
                let (name, report) = (name.clone(), report(rank, Goal::Launcher, &tried));
                std::thread::spawn(move || send_report(&name, &report, SOON, &|| false))
            })
            .into();
        let deadline = Instant::now() + SOON;
        let mut ranks = Vec::new();
        while ranks.len() < 2 {
            assert!(Instant::now() < deadline, "only {ranks:?}");
            ranks.extend(post.take(Instant::now()).iter().map(Unreached::rank));
            let mut fds: Vec<_> = post
                .fds()
                .map(|fd| rustix::event::PollFd::from_borrowed_fd(fd, rustix::event::PollFlags::IN))
                .collect();
            if ranks.len() < 2 {
                crate::wait::poll_until(&mut fds, Some(deadline));
            }
        }
        ranks.sort_unstable();
        assert_eq!(ranks, [2, 3]);
        post.answer("one cause");
        for teller in tellers {
            assert_eq!(teller.join().unwrap().as_deref(), Some("one cause"));
        }
    }

    #[test]
    fn without_an_agent_or_an_answer_there_is_none() {
        let report = report(1, Goal::Launcher, &[]);
        assert_eq!(send_report("no such post", &report, SOON, &|| false), None);
        let post = Post::open().unwrap();
        assert_eq!(send_report(post.name(), &report, SOON, &|| true), None);
        // Nobody answers: the connection ends with the post.
        let name = post.name().to_owned();
        let waits = std::thread::spawn(move || send_report(&name, &report, SOON, &|| false));
        drop(post);
        assert_eq!(waits.join().unwrap(), None);
    }

    #[test]
    fn garbage_is_not_taken() {
        let mut post = Post::open().unwrap();
        let fd = net::unix_connect(post.name()).unwrap();
        send(&fd, b"\xff\xff\xff").unwrap();
        drop(fd);
        assert!(post.take(Instant::now()).is_empty());
        assert_eq!(post.fds().count(), 1);
    }

    #[test]
    fn a_teller_that_gets_no_answer_is_given_up() {
        let mut post = Post::open().unwrap();
        let fd = net::unix_connect(post.name()).unwrap();
        send(&fd, &report(1, Goal::Launcher, &[]).encode()).unwrap();
        rustix::net::shutdown(fd.get().unwrap(), rustix::net::Shutdown::Write).unwrap();
        let now = Instant::now();
        assert_eq!(post.deadline(), None);
        assert_eq!(post.take(now).len(), 1);
        assert_eq!(post.deadline(), Some(now + STAY));
        post.take(now + STAY);
        assert_eq!(post.deadline(), None);
        assert!(matches!(recv(&fd, &mut [0; 8]), Ok(Got::End)));
    }

    #[test]
    fn a_part_of_an_answer_is_none() {
        let listener = net::unix_listen().unwrap();
        let report = report(1, Goal::Launcher, &[]);
        for (answer, taken) in [
            ("one ca", None),
            ("one cause\0", Some("one cause")),
            ("", None),
        ] {
            let name = listener.name.clone();
            let report = report.clone();
            let teller = std::thread::spawn(move || send_report(&name, &report, SOON, &|| false));
            wait_for_any(
                [(&*listener.fd, false)].into_iter(),
                Some(Instant::now() + SOON),
            );
            let (fd, _) = net::accept(&listener.fd).unwrap().unwrap();
            let mut received = Vec::new();
            while !read_to_end(&fd, &mut received).unwrap() {
                wait_for_any([(&*fd, false)].into_iter(), Some(Instant::now() + SOON));
            }
            send(&fd, answer.as_bytes()).unwrap();
            drop(fd);
            assert_eq!(teller.join().unwrap().as_deref(), taken);
        }
    }
}
