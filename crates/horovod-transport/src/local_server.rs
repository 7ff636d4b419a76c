//! A listener for short exchanges with programs beside the job: a browser, a collector of metrics, a command of the same
//! user. One connection at a time, each with a deadline; no forked child keeps any of them.

use std::io::{self, ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::platform::fd::Fd;
use crate::platform::{net, notifier, notify};
use crate::tcp::stream::SEND_FLAGS;
use crate::wait::{poll_until, wait_for_any};

/// How long not to accept after the system refused to.
const REST: Duration = Duration::from_millis(100);

/// A listener, and a signal that ends its wait.
#[derive(Debug)]
pub struct LocalServer {
    listener: Arc<Fd>,
    /// Removes the name where it is a file.
    _name: Option<net::UnixListener>,
    stop_receiver: Arc<Fd>,
    stop_sender: Arc<Fd>,
}

/// One program that has connected. It is read and written until its deadline, or until its server is stopped, then
/// with errors.
#[derive(Debug)]
pub struct LocalConnection {
    fd: Arc<Fd>,
    deadline: Instant,
    /// Of the server; it is readable once that has stopped.
    stop_receiver: Option<Arc<Fd>>,
}

/// The readiness that a connection waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Read,
    Write,
}

impl LocalServer {
    /// Listens on one address (port 0: any), which it returns.
    ///
    /// # Errors
    /// The system refuses the address.
    pub fn tcp(at: SocketAddr) -> io::Result<(Self, SocketAddr)> {
        let (fd, bound) = net::tcp_listen(at)?;
        Ok((Self::new(Arc::new(fd), None)?, bound))
    }

    /// Listens on a local socket of this name, for programs of this user and of root.
    ///
    /// # Errors
    /// The system refuses the name.
    pub fn unix(name: &str) -> io::Result<Self> {
        let listener = net::unix_listen_as(name.to_owned())?;
        Self::new(listener.fd.clone(), Some(listener))
    }

    fn new(listener: Arc<Fd>, name: Option<net::UnixListener>) -> io::Result<Self> {
        let (stop_receiver, stop_sender) = notifier()?;
        Ok(Self {
            listener,
            _name: name,
            stop_receiver,
            stop_sender,
        })
    }

    /// Waits for the next program, which then has `limit`; `None`: it was stopped.
    pub fn next(&self, limit: Duration) -> Option<LocalConnection> {
        loop {
            let both = [(&*self.listener, false), (&*self.stop_receiver, false)];
            wait_for_any(both.into_iter(), None);
            if readable(&self.stop_receiver) {
                return None;
            }
            match net::accept(&self.listener) {
                Ok(Some((fd, _))) if net::is_same_user(&fd) => {
                    let deadline = Instant::now() + limit;
                    return Some(LocalConnection {
                        fd,
                        deadline,
                        stop_receiver: Some(self.stop_receiver.clone()),
                    });
                }
                Ok(_) => {}
                // Out of descriptors, say: it stays in the backlog. A stop ends the pause.
                Err(_) => {
                    let stop = [(&*self.stop_receiver, false)];
                    wait_for_any(stop.into_iter(), Some(Instant::now() + REST));
                }
            }
        }
    }

    /// Has [`Self::next`] return `None` from now on, and ends the waits of the connection that it has returned.
    pub fn stop(&self) {
        notify(&self.stop_sender);
    }
}

fn readable(fd: &Fd) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let Ok(fd) = fd.get() else { return true };
    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    poll(&mut fds, Some(&now)).is_ok_and(|ready| ready > 0)
}

impl LocalConnection {
    /// Connects to the local socket of this name; the exchange has `limit`.
    ///
    /// # Errors
    /// Nobody listens there, or another user does.
    pub fn unix(name: &str, limit: Duration) -> io::Result<Self> {
        let fd = net::unix_connect(name)?;
        if !net::is_same_user(&fd) {
            let text = "the socket belongs to another user";
            return Err(io::Error::new(ErrorKind::PermissionDenied, text));
        }
        let deadline = Instant::now() + limit;
        Ok(Self {
            fd,
            deadline,
            stop_receiver: None,
        })
    }

    /// Replaces the deadline by one in this time from now.
    pub fn extend(&mut self, limit: Duration) {
        self.deadline = Instant::now() + limit;
    }

    /// Whether the program has closed its end. Bytes that it has sent before, and nobody has read, hide that.
    #[must_use]
    pub fn has_hung_up(&self) -> bool {
        use rustix::net::RecvFlags;
        let Ok(fd) = self.fd.get() else { return true };
        match rustix::net::recv(fd, &mut [0; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            Ok((_, received)) => received == 0,
            Err(e) => !matches!(
                io::Error::from(e).kind(),
                ErrorKind::WouldBlock | ErrorKind::Interrupted
            ),
        }
    }

    fn retry<T>(
        &mut self,
        direction: Direction,
        mut call: impl FnMut(&Fd) -> io::Result<T>,
    ) -> io::Result<T> {
        loop {
            match call(&self.fd) {
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                    if Instant::now() >= self.deadline {
                        return Err(ErrorKind::TimedOut.into());
                    }
                    self.wait(direction)?;
                }
                other => return other,
            }
        }
    }

    /// Waits until the connection is ready for this direction. `false`: the deadline may have passed. Bytes of the program
    /// that nobody reads do not end a wait for writing.
    ///
    /// # Errors
    /// The server was stopped.
    fn wait(&self, direction: Direction) -> io::Result<bool> {
        use rustix::event::{PollFd, PollFlags};
        let flags = match direction {
            Direction::Read => PollFlags::IN,
            Direction::Write => PollFlags::OUT,
        };
        let stop = self.stop_receiver.as_deref().map(Fd::get).transpose()?;
        let mut fds = vec![PollFd::from_borrowed_fd(self.fd.get()?, flags)];
        fds.extend(stop.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        poll_until(&mut fds, Some(self.deadline));
        if fds.get(1).is_some_and(|stop| !stop.revents().is_empty()) {
            return Err(ErrorKind::ConnectionAborted.into());
        }
        Ok(!fds[0].revents().is_empty())
    }
}

impl Read for LocalConnection {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.retry(Direction::Read, |fd| {
            Ok(rustix::io::read(fd.get()?, &mut *buffer)?)
        })
    }
}

impl Write for LocalConnection {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.retry(Direction::Write, |fd| {
            Ok(rustix::net::send(fd.get()?, bytes, SEND_FLAGS)?)
        })
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{Ipv4Addr, TcpStream};

    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    #[test]
    fn a_program_is_read_and_answered() {
        let (server, at) = LocalServer::tcp((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
        let mut client = TcpStream::connect(at).unwrap();
        client.write_all(b"ping").unwrap();
        let mut connection = server.next(LIMIT).unwrap();
        let mut bytes = [0; 4];
        connection.read_exact(&mut bytes).unwrap();
        connection.write_all(&bytes).unwrap();
        drop(connection);
        let mut answer = String::new();
        client.read_to_string(&mut answer).unwrap();
        assert_eq!(answer, "ping");
    }

    #[test]
    fn a_stop_ends_the_wait_also_one_to_come() {
        let (server, _) = LocalServer::tcp((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| server.next(LIMIT).is_none());
            server.stop();
            assert!(waiting.join().unwrap());
        });
        assert!(server.next(LIMIT).is_none());
    }

    #[test]
    fn a_silent_program_is_given_up() {
        let (server, at) = LocalServer::tcp((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
        let _client = TcpStream::connect(at).unwrap();
        let mut connection = server.next(Duration::ZERO).unwrap();
        let error = connection.read(&mut [0; 4]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
    }

    #[test]
    fn a_stop_ends_the_wait_for_a_silent_program() {
        let (server, at) = LocalServer::tcp((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
        let _client = TcpStream::connect(at).unwrap();
        let mut connection = server.next(LIMIT).unwrap();
        std::thread::scope(|scope| {
            let reading = scope.spawn(|| connection.read(&mut [0; 4]).unwrap_err().kind());
            server.stop();
            assert_eq!(reading.join().unwrap(), ErrorKind::ConnectionAborted);
        });
    }

    /// A wait for writing that ends because there is something to read would be repeated at once, until the deadline.
    #[test]
    fn a_program_that_sends_and_takes_nothing_does_not_end_a_wait_for_writing() {
        let name = format!("horovod-test-writing-{}", std::process::id());
        let server = LocalServer::unix(&name).unwrap();
        let mut client = LocalConnection::unix(&name, LIMIT).unwrap();
        let mut connection = server.next(LIMIT).unwrap();
        let flags = SEND_FLAGS | rustix::net::SendFlags::DONTWAIT;
        let fd = connection.fd.clone();
        while rustix::net::send(fd.get().unwrap(), &[0; 1 << 12], flags).is_ok() {}
        client.write_all(b"more").unwrap();
        connection.deadline = Instant::now();
        assert!(connection.wait(Direction::Read).unwrap());
        assert!(!connection.wait(Direction::Write).unwrap());
    }

    #[test]
    fn a_program_that_has_gone_has_hung_up() {
        let (server, at) = LocalServer::tcp((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
        let mut client = TcpStream::connect(at).unwrap();
        let mut connection = server.next(LIMIT).unwrap();
        assert!(!connection.has_hung_up());
        client.write_all(b"more").unwrap();
        connection.read_exact(&mut [0; 4]).unwrap();
        assert!(!connection.has_hung_up());
        drop(client);
        // The end has come when a read sees it.
        assert_eq!(connection.read(&mut [0; 4]).unwrap(), 0);
        assert!(connection.has_hung_up());
    }

    #[test]
    fn a_local_socket_is_found_by_its_name() {
        let name = format!("horovod-test-{}", std::process::id());
        let server = LocalServer::unix(&name).unwrap();
        let mut client = LocalConnection::unix(&name, LIMIT).unwrap();
        client.write_all(b"ping").unwrap();
        let mut connection = server.next(LIMIT).unwrap();
        let mut bytes = [0; 4];
        connection.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"ping");
    }
}
