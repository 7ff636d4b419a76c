//! Work for the executor: the operations of one launch, as addresses, lengths and members.

use std::sync::Arc;

use horovod_protocol::DType;

use crate::device::event::Event;
use crate::nccl::NcclOp;

/// Members that share a communicator, which the executor makes when the first work needs it.
#[derive(Clone, Debug)]
pub struct Group {
    /// Names the group in this executor.
    pub key: u64,
    /// Identity that one member has created and sent to all.
    pub id: [u8; 128],
    /// How many members there are.
    pub size: i32,
    /// Which one this is.
    pub rank: i32,
    /// For NCCL's log.
    pub name: String,
}

/// One operation on memory of the device. Addresses of operations without bytes are never followed.
#[derive(Clone, Debug, PartialEq)]
pub enum Call {
    /// Elements of all members are combined; all get the result.
    AllReduce(AllReduce),
    /// Bytes of one member go to all.
    Broadcast {
        /// Of the one; what others have here is not read.
        input: u64,
        /// May be the input.
        output: u64,
        /// Length of both.
        bytes: usize,
        /// That member.
        root: i32,
    },
    /// Bytes of all members, one after the other.
    AllGather {
        /// Of this member.
        input: u64,
        /// Of all.
        output: u64,
        /// Of each member.
        bytes: Vec<usize>,
    },
    /// Each member sends each other one its own bytes.
    AllToAll {
        /// Bytes to send, in the order of the members.
        input: u64,
        /// Room for received bytes, in the same order.
        output: u64,
        /// Bytes to each.
        send: Vec<usize>,
        /// Bytes from each.
        receive: Vec<usize>,
    },
    /// Elements of all members are combined; each gets its part.
    ReduceScatter(ReduceScatter),
    /// Bytes go to pinned memory of the host.
    ToHost {
        /// On the device.
        from: u64,
        /// Kept by the work's owner.
        to: HostMemory,
        /// Length.
        bytes: usize,
    },
    /// Bytes come from pinned memory of the host.
    ToDevice {
        /// Kept by the work's owner.
        from: HostMemory,
        /// On the device.
        to: u64,
        /// Length.
        bytes: usize,
    },
}

/// An address of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostMemory(pub *mut u8);

// SAFETY: an address; who follows it is bound by the contract of [`super::Executor::submit`].
unsafe impl Send for HostMemory {}

/// `post * combine(pre * x)`; factors are 1 for integers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reduction {
    /// How values combine.
    pub op: NcclOp,
    /// Applied to every input.
    pub pre: f64,
    /// Applied to the result.
    pub post: f64,
}

/// An allreduce of one tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct AllReduce {
    /// This member's operand.
    pub input: AllReduceInput,
    /// May be the input; of a member without a tensor: not looked at.
    pub output: u64,
    /// Elements.
    pub count: usize,
    /// Of the tensor; bool is one byte, 0 or 1.
    pub dtype: DType,
    /// Operation and scaling of the elements.
    pub reduction: Reduction,
}

/// A member's contribution to an allreduce.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AllReduceInput {
    /// A tensor's first byte.
    At(u64),
    /// Nothing: every element is this value, which changes no result.
    Identity([u8; 8]),
}

/// A reduce-scatter of one tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct ReduceScatter {
    /// All elements of this member's tensor.
    pub input: u64,
    /// This member's part.
    pub output: u64,
    /// Elements of each member's part, in order.
    pub counts: Vec<usize>,
    /// Of the tensor.
    pub dtype: DType,
    /// Operation and scaling of the elements.
    pub reduction: Reduction,
}

/// Calls that are launched together.
pub struct GpuWork {
    /// For who waits in vain.
    pub title: Arc<str>,
    /// Its place in the caller's order, for [`super::Executor::progress`].
    pub seq: u64,
    /// The process set that it is an operation of.
    pub set: u32,
    /// `None`: this member is the only one, or nothing is exchanged.
    pub group: Option<Arc<Group>>,
    /// Events that must have passed on the device before the launch.
    pub after: Vec<Arc<Event>>,
    /// In the same order on every member of the group.
    pub calls: Vec<Call>,
    /// Whether to find out when the device carries it out: [`super::Launch::times`]. Costs two events with a time.
    pub timed: bool,
}
