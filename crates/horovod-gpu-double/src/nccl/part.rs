//! One collective of one rank: what it reads, sends, receives and writes.

use horovod_protocol::DType;

use super::reduction::{self, AVERAGE, FIRST_MADE, dtype_of};
use super::wire::Shape;
use crate::memory::Access;

/// Function of NCCL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Function {
    AllReduce,
    Reduce,
    ReduceScatter,
    AllGather,
    Broadcast,
    AlltoAll,
    Send,
    Recv,
}

impl Function {
    pub(crate) const ALL: [Self; 8] = [
        Self::AllReduce,
        Self::Reduce,
        Self::ReduceScatter,
        Self::AllGather,
        Self::Broadcast,
        Self::AlltoAll,
        Self::Send,
        Self::Recv,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "ncclAllReduce",
            Self::Reduce => "ncclReduce",
            Self::ReduceScatter => "ncclReduceScatter",
            Self::AllGather => "ncclAllGather",
            Self::Broadcast => "ncclBroadcast",
            Self::AlltoAll => "ncclAlltoAll",
            Self::Send => "ncclSend",
            Self::Recv => "ncclRecv",
        }
    }

    pub(crate) fn is_collective(self) -> bool {
        !matches!(self, Self::Send | Self::Recv)
    }

    pub(crate) fn reduces(self) -> bool {
        matches!(self, Self::AllReduce | Self::Reduce | Self::ReduceScatter)
    }

    pub(crate) fn has_root(self) -> bool {
        matches!(
            self,
            Self::Reduce | Self::Broadcast | Self::Send | Self::Recv
        )
    }
}

/// A call, checked.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub(crate) function: Function,
    pub(crate) send: u64,
    pub(crate) receive: u64,
    pub(crate) count: u64,
    /// NCCL's numbers.
    pub(crate) dtype: i32,
    pub(crate) operator: i32,
    /// Or the peer; -1 where there is none.
    pub(crate) root: i32,
    /// Which collective of the communicator it is.
    pub(crate) sequence: u64,
    /// Every element is multiplied by it before it is sent.
    pub(crate) scalar: Option<Vec<u8>>,
    /// It is never begun.
    pub(crate) is_stuck: bool,
    /// The error that its communicator has from then on.
    pub(crate) raises: Option<i32>,
}

impl Part {
    pub(crate) fn element(&self) -> DType {
        dtype_of(self.dtype).unwrap_or(DType::U8)
    }

    pub(crate) fn shape(&self) -> Shape {
        Shape {
            function: self.function as u8,
            count: self.count,
            dtype: self.dtype,
            operator: self.operator.min(FIRST_MADE),
            root: self.root,
        }
    }

    /// Bytes read at `send` and written at `receive` by `rank` of `size`.
    pub(crate) fn lengths(&self, rank: i32, size: i32) -> (u64, u64) {
        let one = self.count * self.element().size() as u64;
        let all = one * size as u64;
        let is_root = rank == self.root;
        match self.function {
            Function::AllReduce => (one, one),
            Function::Reduce => (one, if is_root { one } else { 0 }),
            Function::Broadcast => (if is_root { one } else { 0 }, one),
            Function::ReduceScatter => (all, one),
            Function::AllGather => (one, all),
            Function::AlltoAll => (all, all),
            Function::Send => (one, 0),
            Function::Recv => (0, one),
        }
    }

    /// Memory accesses of the part, and whether the overlap of its two buffers is allowed.
    pub(crate) fn accesses(&self, rank: i32, size: i32, number: usize) -> (Vec<Access>, bool) {
        let (sent, received) = self.lengths(rank, size);
        let one = self.count * self.element().size() as u64;
        let own = one * rank as u64;
        let overlap = self.send < self.receive + received && self.receive < self.send + sent;
        let is_in_place = match self.function {
            Function::AllReduce | Function::Reduce | Function::Broadcast => {
                self.send == self.receive
            }
            Function::AllGather => self.send == self.receive + own,
            Function::ReduceScatter => self.receive == self.send + own,
            _ => false,
        };
        let accesses = vec![
            Access::read(self.send, sent).of_part(number),
            Access::write(self.receive, received).of_part(number),
        ];
        (
            accesses,
            !overlap || sent == 0 || received == 0 || is_in_place,
        )
    }

    /// Applies the scaling of the operator to the bytes to be sent.
    pub(crate) fn prepare(&self, data: &mut [u8], size: i32) {
        let dtype = self.element();
        if let Some(scalar) = &self.scalar {
            reduction::multiply(dtype, data, scalar);
        } else if self.operator == AVERAGE && dtype.is_float() && self.function.reduces() {
            let factor = reduction::reciprocal(dtype, size as usize);
            reduction::multiply(dtype, data, &factor);
        }
    }
}

/// Every rank's result of a collective whose parts have all arrived.
pub(crate) fn results(shape: Shape, parts: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let size = parts.len();
    let dtype = dtype_of(shape.dtype).unwrap_or(DType::U8);
    let one = shape.count as usize * dtype.size();
    let root = shape.root as usize;
    match Function::ALL[usize::from(shape.function)] {
        Function::AllReduce => vec![reduction::reduce(dtype, shape.operator, parts); size],
        Function::Reduce => {
            let mut all = vec![Vec::new(); size];
            all[root] = reduction::reduce(dtype, shape.operator, parts);
            all
        }
        Function::ReduceScatter => {
            let all = reduction::reduce(dtype, shape.operator, parts);
            (0..size)
                .map(|r| all[r * one..(r + 1) * one].to_vec())
                .collect()
        }
        Function::AllGather => vec![parts.concat(); size],
        Function::Broadcast => vec![parts[root].clone(); size],
        Function::AlltoAll => (0..size)
            .map(|r| {
                parts
                    .iter()
                    .flat_map(|p| &p[r * one..(r + 1) * one])
                    .copied()
                    .collect()
            })
            .collect(),
        // They are carried from peer to peer.
        Function::Send | Function::Recv => vec![Vec::new(); size],
    }
}
