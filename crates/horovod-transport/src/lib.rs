//! Authenticated links between ranks: shared memory inside a host, TCP between hosts.
//!
//! [`connect`] turns a [`MeshConfig`] into a [`Mesh`]. Its [`Topology`] says which rank is where. [`Control`] carries small
//! ordered messages to and from rank 0. [`Data`] has byte links and the shared arena for tensor data. A rank sleeps for all
//! of them in one place, [`Waiter`]. The launcher runs the [`rendezvous`], through which the ranks find each other.
//!
//! Deliberately absent: any meaning of the bytes, algorithms, environment variables, threads (but
//! the rendezvous server's).
//!
//! An internal part of horovod-rs: programs use the crate `horovod`, and this interface may change in any version.

mod sync;

mod shm;

#[cfg(not(loom))]
pub mod agents;
#[cfg(not(loom))]
pub mod compact;
#[cfg(not(loom))]
mod congestion;
#[cfg(not(loom))]
mod control;
#[cfg(not(loom))]
mod core_migration;
#[cfg(not(loom))]
mod data;
#[cfg(not(loom))]
mod frame_stream;
mod framing;
#[cfg(not(loom))]
mod handshake;
#[cfg(not(loom))]
mod heartbeat;
#[cfg(not(loom))]
mod key;
#[cfg(not(loom))]
mod link;
#[cfg(not(loom))]
mod local_server;
#[cfg(not(loom))]
mod mesh;
#[cfg(not(loom))]
pub mod payload;
#[cfg(not(loom))]
mod platform;
#[cfg(not(loom))]
mod poller;
#[cfg(not(loom))]
mod ports;
#[cfg(not(loom))]
pub mod probe;
#[cfg(not(loom))]
pub mod rendezvous;
#[cfg(not(loom))]
pub mod sealing;
#[cfg(not(loom))]
mod server;
#[cfg(not(loom))]
mod tcp;
#[cfg(all(feature = "testing", not(loom)))]
pub mod testing;
#[cfg(not(loom))]
mod topology;
#[cfg(not(loom))]
pub mod unreached;
#[cfg(not(loom))]
mod wait;
#[cfg(not(loom))]
mod wait_policy;
#[cfg(not(loom))]
mod waiter;

#[cfg(not(loom))]
pub use self::{
    congestion::Congestion,
    control::{CONTROL_FRAME_MAX, CONTROL_QUEUE_MAX, Control, ControlEvent},
    data::Data,
    key::JobKey,
    link::{Aborted, Idle, Link, LinkError},
    local_server::{LocalConnection, LocalServer},
    mesh::{
        CONNECTIONS_MAX, ConnectError, FAN_OUT, Finder, HEARTBEAT, Interrupt, Membership, Mesh,
        MeshConfig, RendezvousPlace, connect,
    },
    platform::{
        MECHANISMS, Mechanisms, fd::fork_epoch, identity::host_identity, net::loopback,
        net::resolve_interfaces, output_file,
    },
    ports::Ports,
    shm::arena::Arena,
    topology::{HostId, PeerInfo, Topology},
    waiter::{Notifier, Sleeper, Waiter},
};
