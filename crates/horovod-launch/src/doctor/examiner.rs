//! The agent's side of an examination: answers questions until the launcher hangs up.
//!
//! What takes time runs in threads of its own, so that the question for the time is answered at once.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::mpsc;
use std::time::{Duration, SystemTime};

use horovod_transport::probe::{Obstacle, Prober, Server};
use horovod_transport::{JobKey, loopback, resolve_interfaces};

use super::gather;
use super::talk::{Answer, Errand, Listening, Outcome, Pace, Question, Stood};
use crate::frames::{FrameBuffer, FromAgent, ToAgent};
use crate::io::{Got, Interest, Outbox, read_some, set_nonblocking, wait};
use crate::platform;
use crate::signals::Signals;

/// How long to send echoes to learn the round trip.
const ECHO_TIME: Duration = Duration::from_millis(100);

/// An agent that is asked.
pub(crate) struct Examiner {
    stdin: File,
    stdout: File,
    signals: Signals,
    inbox: FrameBuffer,
    outbox: Outbox,
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
    pub(crate) fn new(
        stdin: File,
        stdout: File,
        signals: Signals,
        inbox: FrameBuffer,
        outbox: Outbox,
    ) -> io::Result<Self> {
        let (wake, ring) = UnixStream::pair()?;
        set_nonblocking(&wake)?;
        set_nonblocking(&ring)?;
        let (sender, answers) = mpsc::channel();
        Ok(Self {
            stdin,
            stdout,
            signals,
            inbox,
            outbox,
            answers,
            back: Back { sender, ring },
            wake,
            prober: None,
            _server: None,
        })
    }

    /// Answers these and all further questions; returns when the launcher is gone.
    pub(crate) fn run(mut self, first: Vec<Question>) -> io::Result<()> {
        for question in first {
            self.answer(question)?;
        }
        let mut buffer = vec![0; 64 << 10];
        while self.signals.take().is_empty() {
            while let Ok(answer) = self.answers.try_recv() {
                self.say(answer);
            }
            if self.outbox.flush(&mut self.stdout).is_err() {
                break;
            }
            match read_some(&mut self.stdin, &mut buffer) {
                Got::Bytes(count) => {
                    self.inbox.push(&buffer[..count]);
                    if !self.answer_all()? {
                        break;
                    }
                    continue;
                }
                Got::Nothing => {}
                Got::End => break,
            }
            let mut interests = vec![
                Interest::read(self.signals.as_fd()),
                Interest::read(self.stdin.as_fd()),
                Interest::read(self.wake.as_fd()),
            ];
            if self.outbox.len() > 0 {
                interests.push(Interest::write(self.stdout.as_fd()));
            }
            wait(&interests, None)?;
            let mut rings = [0; 64];
            while matches!(self.wake.read(&mut rings), Ok(count) if count > 0) {}
        }
        // A program that was asked and has not answered yet.
        for pid in platform::descendants() {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
        Ok(())
    }

    fn say(&mut self, answer: Answer) {
        FromAgent::Found(answer).encode(self.outbox.buffer());
    }

    /// False when what came is not from a launcher.
    fn answer_all(&mut self) -> io::Result<bool> {
        loop {
            let message = match self.inbox.next_frame() {
                Ok(Some(frame)) => ToAgent::decode(frame),
                Ok(None) => return Ok(true),
                Err(_) => return Ok(false),
            };
            match message {
                Ok(ToAgent::Examine(question)) => self.answer(question)?,
                Ok(_) => {}
                Err(_) => return Ok(false),
            }
        }
    }

    fn answer(&mut self, question: Question) -> io::Result<()> {
        match question {
            Question::Clock(mark) => {
                let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
                let now = now.unwrap_or_default().as_nanos() as u64;
                self.say(Answer::Clock(mark, now));
                self.outbox.flush(&mut self.stdout)
            }
            Question::Facts(scene) => self
                .back
                .spawn(move || Answer::Facts(Box::new(gather::look(&scene)))),
            Question::Listen(how) => {
                let result = self.listen(&how).map_err(|error| error.to_string());
                self.say(Answer::Listening(result));
                Ok(())
            }
            Question::Reach(targets, within_ms) => {
                let Some(prober) = self.prober.clone() else {
                    return Ok(());
                };
                let within = Duration::from_millis(within_ms.into());
                self.back.spawn(move || reach(&prober, targets, within))
            }
            Question::Measure(errand) => {
                let Some(prober) = self.prober.clone() else {
                    return Ok(());
                };
                self.back
                    .spawn(move || Answer::Measured(errand.to, measure(&prober, errand)))
            }
        }
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
        let server = Server::start(&bind, key.clone(), how.me)?;
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

fn reach(prober: &Prober, targets: Vec<(u32, SocketAddr)>, within: Duration) -> Answer {
    let results = prober.reach(&targets, within);
    let outcomes: Vec<Outcome> = targets
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
