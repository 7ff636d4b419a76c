//! The agent's side of an examination: finds the answers.
//!
//! Slow checks run in threads of their own, so that a question for the time is answered at once.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc;
use std::time::{Duration, SystemTime};

use horovod_transport::probe::{Obstacle, Prober, Server};
use horovod_transport::{JobKey, Ports, loopback, resolve_interfaces};

use super::gather::{self, AgentEnvironment};
use super::talk::{Answer, Errand, Listening, Pace, ProbeOutcome, Question, Stood};

/// How long to send echoes to learn the round trip.
const ECHO_TIME: Duration = Duration::from_millis(100);

/// An agent that is asked.
pub struct Examiner {
    place: AgentEnvironment,
    answers: mpsc::Receiver<Answer>,
    back: Back,
    /// Readable when a thread has an answer.
    wake: UnixStream,
    prober: Option<Prober>,
    /// Listens for as long as the examination lasts.
    _server: Option<Server>,
}

/// How threads bring their answers.
struct Back {
    sender: mpsc::Sender<Answer>,
    ring: UnixStream,
}

impl Back {
    /// Runs `work` in a thread.
    fn spawn(&self, work: impl FnOnce() -> Answer + Send + 'static) -> io::Result<()> {
        let sender = self.sender.clone();
        let mut ring = self.ring.try_clone()?;
        std::thread::Builder::new().spawn(move || {
            let _ = sender.send(work());
            // Full: then it is notified already.
            let _ = ring.write(&[1]);
        })?;
        Ok(())
    }
}

impl Examiner {
    /// An agent there that was not asked anything yet.
    pub fn new(place: AgentEnvironment) -> io::Result<Self> {
        let (wake, ring) = UnixStream::pair()?;
        wake.set_nonblocking(true)?;
        ring.set_nonblocking(true)?;
        let (sender, answers) = mpsc::channel();
        Ok(Self {
            place,
            answers,
            back: Back { sender, ring },
            wake,
            prober: None,
            _server: None,
        })
    }

    /// Answers at once, or sends a thread for the answer: then it comes from [`Self::next_answer`].
    pub fn answer(&mut self, question: Question) -> io::Result<Option<Answer>> {
        match question {
            Question::Clock(mark) => {
                let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
                let now = now.unwrap_or_default().as_nanos() as u64;
                return Ok(Some(Answer::Clock(mark, now)));
            }
            Question::Facts(scene) => {
                let place = self.place.clone();
                self.back
                    .spawn(move || Answer::Facts(Box::new(gather::facts(&scene, &place))))?;
            }
            Question::Listen(how) => {
                let result = self.listen(&how).map_err(|error| error.to_string());
                return Ok(Some(Answer::Listening(result)));
            }
            Question::Reach(targets, within_ms) => {
                let Some(prober) = self.prober.clone() else {
                    return Ok(None);
                };
                let within = Duration::from_millis(within_ms.into());
                self.back.spawn(move || reach(&prober, targets, within))?;
            }
            Question::Measure(errand) => {
                let Some(prober) = self.prober.clone() else {
                    return Ok(None);
                };
                self.back
                    .spawn(move || Answer::Measured(errand.to, measure(&prober, errand)))?;
            }
        }
        Ok(None)
    }

    /// An answer that a thread has found.
    pub fn next_answer(&mut self) -> Option<Answer> {
        self.answers.try_recv().ok()
    }

    /// Takes note that [`Self::as_fd`] was readable.
    pub fn woken(&mut self) {
        let mut rings = [0; 64];
        while matches!(self.wake.read(&mut rings), Ok(count) if count > 0) {}
    }

    fn listen(&mut self, how: &Listening) -> io::Result<Vec<(String, SocketAddr)>> {
        let key = JobKey::from_hex(&how.key).ok_or_else(|| io::Error::other("a broken key"))?;
        let chosen = resolve_interfaces(&how.interfaces)?;
        let bind: Vec<IpAddr> = if how.is_local {
            vec![loopback()?]
        } else if chosen.is_empty() {
            vec![Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()]
        } else {
            chosen
        };
        let port = |number: u32| u16::try_from(number).ok();
        let range = how
            .ports
            .and_then(|(first, last)| Some((port(first)?, port(last)?)));
        let server = Server::start(&bind, Ports::within(range), key.clone(), how.me)?;
        let addresses = server.addrs().to_vec();
        if addresses.is_empty() {
            return Err(io::Error::other("no network interface is up"));
        }
        self._server = Some(server);
        self.prober = Some(Prober {
            key,
            me: how.me,
            encrypt: how.encrypt,
        });
        Ok(addresses)
    }
}

/// Readable when [`Examiner::next_answer`] has something.
impl AsFd for Examiner {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

fn reach(prober: &Prober, targets: Vec<(u32, SocketAddr)>, within: Duration) -> Answer {
    let results = prober.reach(&targets, within);
    let outcomes: Vec<ProbeOutcome> = targets
        .into_iter()
        .zip(results)
        .map(|(target, result)| {
            let stood = result.map(|reached| Stood {
                local: reached.local,
                took_ns: reached.took.as_nanos() as u64,
            });
            (target, stood)
        })
        .collect();
    Answer::Reached(outcomes)
}

fn measure(prober: &Prober, errand: Errand) -> Result<Pace, Obstacle> {
    let Errand { to, at, window_ms } = errand;
    let window = Duration::from_millis(window_ms.into());
    let round_trip = prober.round_trip(to, at, ECHO_TIME)?;
    Ok(Pace {
        round_trip_ns: round_trip.as_nanos() as u64,
        there: prober.push(to, at, window)?,
        back: prober.pull(to, at, window)?,
    })
}
