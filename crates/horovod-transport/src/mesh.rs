//! One rank's complete set of links, and how it is put together from connected parts.

mod assemble;
mod chosen;
mod config;
mod connect;
pub(crate) mod dial;
mod register;
mod talk;

pub(crate) use assemble::{Parts, SharedMemory};
pub(crate) use config::list;
pub use config::{
    CONNECTIONS_MAX, ConnectError, FAN_OUT, Finder, HEARTBEAT, Interrupt, Membership, MeshConfig,
    RendezvousPlace,
};
pub use connect::connect;

use std::time::Duration;

use horovod_protocol::Tree;

use crate::{Control, Data, Topology, Waiter, rendezvous::RankAssignment};

/// Everything through which one rank reaches the others in one generation. The fields move out
/// separately; all belong to one thread at a time.
#[derive(Debug)]
pub struct Mesh {
    /// Ranks of the generation and their hosts.
    pub topology: Topology,
    /// Control tree: which ranks exchange control messages.
    pub tree: Tree,
    /// Small messages to and from the parent and the children in the tree.
    pub control: Control,
    /// Links for tensor data.
    pub data: Data,
    /// Waiting for any of it.
    pub waiter: Waiter,
    /// Rank 0's [`MeshConfig::settings`].
    pub settings: Vec<u8>,
    /// How long a neighbour may be silent before it is to be given up ([`Control::watch`]), the same on all ranks;
    /// `None`: for ever.
    pub heartbeat: Option<Duration>,
    /// The place that the launcher of an elastic job gave this process.
    pub assignment: Option<RankAssignment>,
}
