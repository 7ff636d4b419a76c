//! One message of each kind: for the round trip in the tests, and as inputs with which a fuzzer begins.

use std::time::Duration;

use horovod_protocol::Rank;

use super::{Common, MemberEntry, RankAssignment, ToClient, ToServer, Where};
use crate::{
    probe::Obstacle,
    unreached::{Goal, Unreached},
};

fn member() -> MemberEntry {
    MemberEntry {
        identity: "boot|h1".into(),
        hostname: "h1".into(),
        pid: 77,
        shm: true,
    }
}

fn common() -> Common {
    Common {
        connections: 4,
        fan_out: 300,
        heartbeat: Some(Duration::from_millis(70_000)),
        checksums: true,
        settings: vec![1, 2, 255],
    }
}

fn unreached() -> Unreached {
    let at = "10.0.0.1:80".parse().expect("an address");
    let goals = vec![(Goal::Launcher, vec![(at, Obstacle::Silence)])];
    Unreached::new(Rank(3), "h1", &[], goals)
}

fn place() -> Where {
    Where {
        addresses: vec![
            "10.0.0.1:80".parse().expect("an address"),
            "[::1]:65535".parse().expect("an address"),
        ],
        local: Some("horovod-1".into()),
    }
}

pub(crate) fn to_server() -> Vec<ToServer> {
    vec![
        ToServer::Hello {
            rank: 3,
            size: 4,
            wait_timeout_ms: 30_000,
            member: member(),
            common: common(),
        },
        ToServer::Ready(place()),
        ToServer::Ready(Where::default()),
        ToServer::Failed {
            text: "no memory".into(),
        },
        ToServer::Join {
            worker: 70_000,
            training_state: 2,
            timeout_ms: 30_000,
            member: member(),
            common: common(),
        },
        ToServer::StateChanged { training_state: 1 },
        ToServer::Silent { rank: 70_000 },
        ToServer::Unreached(unreached()),
    ]
}

pub(crate) fn to_client() -> Vec<ToClient> {
    vec![
        ToClient::Roster {
            generation: 9,
            members: vec![member(), member()],
            common: common(),
            assignment: None,
        },
        ToClient::Roster {
            generation: 9,
            members: vec![member()],
            common: common(),
            assignment: Some(RankAssignment {
                rank: 1,
                local_rank: 2,
                local_size: 3,
                cross_rank: 4,
                cross_size: 5,
                needs_sync: true,
            }),
        },
        ToClient::HostsUpdated {
            version: 1 << 40,
            kind: 3,
        },
        ToClient::Removed {
            text: "gone".into(),
        },
        ToClient::Table {
            places: vec![place(), Where::default()],
        },
        ToClient::Missing {
            ranks: vec![1, 300],
        },
        ToClient::Refused { text: "no".into() },
        ToClient::Aborted { text: "no".into() },
        ToClient::PeerDied {
            rank: 2,
            host: "h".into(),
            cause: "signal 9".into(),
        },
    ]
}
