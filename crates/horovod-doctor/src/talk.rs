//! Questions of the doctor to the agents, and their answers.

use std::ffi::OsString;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use horovod_protocol::wire::{DecodeError, Reader, Writer};
use horovod_transport::probe::Obstacle;

use super::facts::HostFacts;
use super::wire::{Wire, bad, wired};

wired! {
    /// In whose place to look: the environment, the folder and the command of the ranks.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct Scene {
        /// Lay `env` over the agent's own environment (another host) instead of replacing it.
        pub inherit_env: bool,
        /// Environment of every rank.
        pub env: Vec<(OsString, OsString)>,
        /// Working directory.
        pub cwd: PathBuf,
        /// Program and arguments of every rank; empty if none were given.
        pub command: Vec<OsString>,
        /// Names of the hosts, to be resolved.
        pub names: Vec<String>,
        /// How long all of it may take.
        pub within_ms: u32,
    }
}

wired! {
    /// How a host listens for probes.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct Listening {
        /// This examination's key, in hexadecimal digits.
        pub key: String,
        /// The number of the host that listens.
        pub me: u32,
        /// Interfaces to listen on; empty means all.
        pub interfaces: Vec<String>,
        /// First and last port to listen on; none means any.
        pub ports: Option<(u32, u32)>,
        /// Listen on the loopback alone.
        pub is_local: bool,
        /// Encrypt what is sent to others, as the job will.
        pub encrypt: bool,
    }
}

wired! {
    /// A measurement.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Errand {
        /// Which host.
        pub to: u32,
        /// Where it listens.
        pub at: SocketAddr,
        /// How long to send in each direction.
        pub window_ms: u32,
    }
}

wired! {
    /// How good a way between two hosts is.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub struct Pace {
        /// There and back again, in nanoseconds.
        pub round_trip_ns: u64,
        /// Bytes per second from who measured to the other.
        pub there: f64,
        /// And from the other one.
        pub back: f64,
    }
}

wired! {
    /// A connection that stood.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Stood {
        /// Address of who connected.
        pub local: IpAddr,
        /// Nanoseconds until it was proved.
        pub took_ns: u64,
    }
}

/// Result of an attempt to connect to host and address.
pub(crate) type Outcome = ((u32, SocketAddr), Result<Stood, Obstacle>);

/// Launcher to agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Question {
    /// What time is it? With the launcher's own mark.
    Clock(u64),
    /// What is this host like?
    Facts(Scene),
    /// Listen for probes.
    Listen(Listening),
    /// Connect to all these at the same time, within so many milliseconds.
    Reach(Vec<(u32, SocketAddr)>, u32),
    /// Measure the way to one host.
    Measure(Errand),
}

/// Agent to launcher.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// The mark of the question, and nanoseconds since 1970.
    Clock(u64, u64),
    /// This is what it is like.
    Facts(Box<HostFacts>),
    /// Interface and address of each listener, or why there is none.
    Listening(Result<Vec<(String, SocketAddr)>, String>),
    /// Result for each address.
    Reached(Vec<Outcome>),
    /// The host that was measured, and the result.
    Measured(u32, Result<Pace, Obstacle>),
}

impl Question {
    /// Writes it.
    pub fn put(&self, w: &mut Writer<'_>) {
        Wire::put(self, w);
    }

    /// Reads it.
    pub fn get(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Wire::get(r)
    }
}

impl Answer {
    /// Writes it.
    pub fn put(&self, w: &mut Writer<'_>) {
        Wire::put(self, w);
    }

    /// Reads it.
    pub fn get(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Wire::get(r)
    }
}

impl Wire for Obstacle {
    fn put(&self, w: &mut Writer<'_>) {
        Self::put(self, w);
    }

    fn get(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Self::get(r)
    }
}

impl Wire for Question {
    fn put(&self, w: &mut Writer<'_>) {
        match self {
            Self::Clock(mark) => {
                w.u8(0);
                mark.put(w);
            }
            Self::Facts(scene) => {
                w.u8(1);
                scene.put(w);
            }
            Self::Listen(how) => {
                w.u8(2);
                how.put(w);
            }
            Self::Reach(targets, within_ms) => {
                w.u8(3);
                targets.put(w);
                within_ms.put(w);
            }
            Self::Measure(errand) => {
                w.u8(4);
                errand.put(w);
            }
        }
    }

    fn get(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(match r.u8("question")? {
            0 => Self::Clock(u64::get(r)?),
            1 => Self::Facts(Scene::get(r)?),
            2 => Self::Listen(Listening::get(r)?),
            3 => Self::Reach(Vec::get(r)?, u32::get(r)?),
            4 => Self::Measure(Errand::get(r)?),
            other => return bad("question", other),
        })
    }
}

impl Wire for Answer {
    fn put(&self, w: &mut Writer<'_>) {
        match self {
            Self::Clock(mark, time) => {
                w.u8(0);
                mark.put(w);
                time.put(w);
            }
            Self::Facts(facts) => {
                w.u8(1);
                facts.put(w);
            }
            Self::Listening(result) => {
                w.u8(2);
                result.put(w);
            }
            Self::Reached(outcomes) => {
                w.u8(3);
                outcomes.put(w);
            }
            Self::Measured(host, result) => {
                w.u8(4);
                host.put(w);
                result.put(w);
            }
        }
    }

    fn get(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(match r.u8("answer")? {
            0 => Self::Clock(u64::get(r)?, u64::get(r)?),
            1 => Self::Facts(Box::new(HostFacts::get(r)?)),
            2 => Self::Listening(Result::get(r)?),
            3 => Self::Reached(Vec::get(r)?),
            4 => Self::Measured(u32::get(r)?, Result::get(r)?),
            other => return bad("answer", other),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at() -> SocketAddr {
        "[fd00::1]:4000".parse().expect("an address")
    }

    #[test]
    fn questions_survive_the_way() {
        let questions = [
            Question::Clock(7),
            Question::Facts(Scene {
                inherit_env: true,
                env: vec![("A".into(), "b c".into())],
                cwd: "/x".into(),
                command: vec!["python".into()],
                names: vec!["h".into()],
                within_ms: 9,
            }),
            Question::Listen(Listening {
                key: "ab".into(),
                me: 3,
                interfaces: vec!["eth0".into()],
                ports: Some((29_000, 29_100)),
                is_local: false,
                encrypt: true,
            }),
            Question::Reach(vec![(2, at())], 5),
            Question::Measure(Errand {
                to: 1,
                at: "10.0.0.1:5".parse().expect("an address"),
                window_ms: 1,
            }),
        ];
        for want in questions {
            let mut bytes = Vec::new();
            want.put(&mut Writer::new(&mut bytes));
            let mut reader = Reader::new(&bytes);
            assert_eq!(Question::get(&mut reader), Ok(want));
            assert_eq!(reader.finish(), Ok(()));
        }
    }

    #[test]
    fn answers_survive_the_way() {
        let stood = Stood {
            local: "10.0.0.2".parse().expect("an address"),
            took_ns: 3,
        };
        let pace = Pace {
            round_trip_ns: 1,
            there: 2.5,
            back: 0.1,
        };
        let answers = [
            Answer::Clock(7, u64::MAX),
            Answer::Facts(Box::new(super::super::facts::tests::healthy())),
            Answer::Listening(Ok(vec![("eth0".into(), at())])),
            Answer::Listening(Err("no".into())),
            Answer::Reached(vec![
                ((1, at()), Ok(stood)),
                ((1, at()), Err(Obstacle::Silence)),
                ((2, at()), Err(Obstacle::Handshake("x".into()))),
            ]),
            Answer::Measured(1, Ok(pace)),
            Answer::Measured(1, Err(Obstacle::Broken("y".into()))),
        ];
        for want in answers {
            let mut bytes = Vec::new();
            want.put(&mut Writer::new(&mut bytes));
            let mut reader = Reader::new(&bytes);
            assert_eq!(Answer::get(&mut reader), Ok(want));
            assert_eq!(reader.finish(), Ok(()));
        }
        assert!(Answer::get(&mut Reader::new(&[9])).is_err());
        assert!(Question::get(&mut Reader::new(&[3, 0xff, 0xff, 3])).is_err());
    }
}
