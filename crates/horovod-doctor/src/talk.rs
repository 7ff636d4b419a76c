//! Questions of the doctor to the agents, and their answers.

use std::ffi::OsString;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use horovod_transport::compact;
use horovod_transport::probe::Obstacle;
use serde::{Deserialize, Serialize};

use super::LIST_MAX;
use super::facts::HostFacts;

/// In whose place to look: the environment, the folder and the command of the ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scene {
    /// Lay `env` over the agent's own environment (another host) instead of replacing it.
    pub inherit_env: bool,
    /// Environment of every rank.
    #[serde(deserialize_with = "compact::list::<LIST_MAX, _, _>")]
    pub env: Vec<(OsString, OsString)>,
    /// Working directory.
    #[serde(
        serialize_with = "compact::put_path",
        deserialize_with = "compact::path"
    )]
    pub cwd: PathBuf,
    /// Program and arguments of every rank; empty if none were given.
    #[serde(deserialize_with = "compact::list::<LIST_MAX, _, _>")]
    pub command: Vec<OsString>,
    /// Names of the hosts, to be resolved.
    #[serde(deserialize_with = "compact::list::<LIST_MAX, _, _>")]
    pub names: Vec<String>,
    /// How long all of it may take.
    pub within_ms: u32,
}

/// How a host listens for probes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listening {
    /// This examination's key, in hexadecimal digits.
    pub key: String,
    /// The number of the host that listens.
    pub me: u32,
    /// Interfaces to listen on; empty means all.
    #[serde(deserialize_with = "compact::list::<LIST_MAX, _, _>")]
    pub interfaces: Vec<String>,
    /// First and last port to listen on; none means any.
    pub ports: Option<(u32, u32)>,
    /// Listen on the loopback alone.
    pub is_local: bool,
    /// Encrypt what is sent to others, as the job will.
    pub encrypt: bool,
}

/// A measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Errand {
    /// Which host.
    pub to: u32,
    /// Where it listens.
    pub at: SocketAddr,
    /// How long to send in each direction.
    pub window_ms: u32,
}

/// How good a way between two hosts is.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pace {
    /// There and back again, in nanoseconds.
    pub round_trip_ns: u64,
    /// Bytes per second from who measured to the other.
    #[serde(deserialize_with = "compact::finite")]
    pub there: f64,
    /// And from the other one.
    #[serde(deserialize_with = "compact::finite")]
    pub back: f64,
}

/// A connection that stood.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stood {
    /// Address of who connected.
    pub local: IpAddr,
    /// Nanoseconds until it was proved.
    pub took_ns: u64,
}

/// Result of an attempt to connect to host and address.
pub(crate) type ProbeOutcome = ((u32, SocketAddr), Result<Stood, Obstacle>);

/// Launcher to agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Question {
    /// What time is it? With the launcher's own mark.
    Clock(u64),
    /// What is this host like?
    Facts(Scene),
    /// Listen for probes.
    Listen(Listening),
    /// Connect to all these at the same time, within so many milliseconds.
    Reach(
        #[serde(deserialize_with = "compact::list::<LIST_MAX, _, _>")] Vec<(u32, SocketAddr)>,
        u32,
    ),
    /// Measure the way to one host.
    Measure(Errand),
}

/// Agent to launcher.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Answer {
    /// The mark of the question, and nanoseconds since 1970.
    Clock(u64, u64),
    /// This is what it is like.
    Facts(Box<HostFacts>),
    /// Interface and address of each listener, or why there is none.
    Listening(
        #[serde(deserialize_with = "compact::list_or_error::<LIST_MAX, _, _, _>")]
        Result<Vec<(String, SocketAddr)>, String>,
    ),
    /// Result for each address.
    Reached(#[serde(deserialize_with = "compact::list::<LIST_MAX, _, _>")] Vec<ProbeOutcome>),
    /// The host that was measured, and the result.
    Measured(u32, Result<Pace, Obstacle>),
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
            compact::encode(&want, &mut bytes);
            assert_eq!(compact::decode(&bytes), Ok(want));
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
            compact::encode(&want, &mut bytes);
            assert_eq!(compact::decode(&bytes), Ok(want));
        }
        assert!(compact::decode::<Answer>(&[9]).is_err());
        assert!(compact::decode::<Question>(&[3, 0xff, 0xff, 3]).is_err());
    }
}
