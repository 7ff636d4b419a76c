//! Kinds of operations and of links, by which operations and bytes are counted.

use horovod_protocol::Op;

/// A kind of operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperationKind {
    /// Allreduce, Adasum included.
    Allreduce,
    /// Allgather.
    Allgather,
    /// Broadcast.
    Broadcast,
    /// Alltoall.
    Alltoall,
    /// Reducescatter.
    Reducescatter,
    /// Barriers, joins, and changes of process sets: no tensor travels.
    Control,
}

impl OperationKind {
    /// All kinds, in the order of their numbers.
    pub const ALL: [Self; KINDS] = [
        Self::Allreduce,
        Self::Allgather,
        Self::Broadcast,
        Self::Alltoall,
        Self::Reducescatter,
        Self::Control,
    ];

    /// The kind of an operation.
    #[must_use]
    pub fn of(op: &Op) -> Self {
        match op {
            Op::Allreduce { .. } => Self::Allreduce,
            Op::Allgather => Self::Allgather,
            Op::Broadcast { .. } => Self::Broadcast,
            Op::Alltoall => Self::Alltoall,
            Op::Reducescatter { .. } => Self::Reducescatter,
            Op::Barrier | Op::Join | Op::AddProcessSet { .. } | Op::RemoveProcessSet { .. } => {
                Self::Control
            }
        }
    }

    /// Its name as a label.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Allreduce => "allreduce",
            Self::Allgather => "allgather",
            Self::Broadcast => "broadcast",
            Self::Alltoall => "alltoall",
            Self::Reducescatter => "reducescatter",
            Self::Control => "control",
        }
    }
}

/// Number of kinds of operations.
pub const KINDS: usize = 6;

/// The link of an operation: between hosts if its members are on several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// All members are on one host.
    Host,
    /// Some members are on another host.
    Network,
    /// The library of a device moves the bytes, inside a host or between hosts.
    Device,
}

impl Link {
    /// All kinds, in the order of their numbers.
    pub const ALL: [Self; LINKS] = [Self::Host, Self::Network, Self::Device];

    /// Its name as a label.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Network => "network",
            Self::Device => "device",
        }
    }
}

/// Number of kinds of links.
pub const LINKS: usize = 3;
