//! The operations that are registered: inputs, outputs and attributes, as TensorFlow's users see them.

use crate::dtypes;

/// Kind of an operation; the numbers are those of the core's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum OperationCode {
    Allreduce = 0,
    Allgather = 1,
    Broadcast = 2,
    Alltoall = 3,
    Reducescatter = 4,
    Join = 6,
}

impl OperationCode {
    /// Whether the outputs' sizes are known late, so that they are allocated then.
    pub(crate) fn is_late(self) -> bool {
        matches!(self, Self::Allgather | Self::Alltoall | Self::Reducescatter)
    }
}

/// A number that an operation gives when it is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Query {
    Size,
    LocalSize,
    Rank,
    LocalRank,
    ProcessSetIncluded,
}

/// How the shapes of the outputs follow from those of the inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shapes {
    /// Each output is as its input.
    Same,
    /// Dimension 0 is known late.
    UnknownRows,
    /// As [`Shapes::UnknownRows`]; beside it the rows received from each member.
    Exchanged,
    /// One number.
    Scalar,
}

/// Implementation of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Computes {
    /// The members of a process set, together.
    Collective(OperationCode),
    /// This process alone.
    Query(Query),
}

/// One operation type.
#[derive(Debug)]
pub(crate) struct Operation {
    /// Its type; Python's function is the same in lower case.
    pub(crate) name: &'static str,
    pub(crate) computes: Computes,
    /// Several tensors as one operation.
    pub(crate) grouped: bool,
    pub(crate) inputs: &'static [&'static str],
    pub(crate) outputs: &'static [&'static str],
    pub(crate) attributes: &'static [&'static str],
    pub(crate) shapes: Shapes,
    /// TensorFlow neither removes nor merges it, and runs those of a function in program order.
    pub(crate) stateful: bool,
}

const REDUCE_OP: &str = "reduce_op: int";
const PRESCALE: &str = "prescale_factor: float";
const POSTSCALE: &str = "postscale_factor: float";
/// The bits of the factors as 64-bit numbers, where a 32-bit attribute would round them; 0: see the other attribute.
const PRESCALE_BITS: &str = "prescale_bits: int = 0";
const POSTSCALE_BITS: &str = "postscale_bits: int = 0";
const IGNORE_SCOPE: &str = "ignore_name_scope: bool = False";
const PROCESS_SET: &str = "process_set_id: int = 0";
const ROOT: &str = "root_rank: int";
const NUMBER: &str = "num_tensors: int >= 1";
const TYPE: &str = dtypes::ATTRIBUTE;

const REDUCING: &[&str] = &[
    TYPE,
    REDUCE_OP,
    PRESCALE,
    POSTSCALE,
    IGNORE_SCOPE,
    PROCESS_SET,
    PRESCALE_BITS,
    POSTSCALE_BITS,
];
const GROUP_REDUCING: &[&str] = &[
    TYPE,
    REDUCE_OP,
    PRESCALE,
    POSTSCALE,
    IGNORE_SCOPE,
    PROCESS_SET,
    NUMBER,
    PRESCALE_BITS,
    POSTSCALE_BITS,
];
const GATHERING: &[&str] = &[TYPE, IGNORE_SCOPE, PROCESS_SET];
const GROUP_GATHERING: &[&str] = &[TYPE, IGNORE_SCOPE, PROCESS_SET, NUMBER];

const fn collective(
    name: &'static str,
    kind: OperationCode,
    inputs: &'static [&'static str],
    outputs: &'static [&'static str],
    attributes: &'static [&'static str],
    shapes: Shapes,
) -> Operation {
    Operation {
        name,
        computes: Computes::Collective(kind),
        grouped: false,
        inputs,
        outputs,
        attributes,
        shapes,
        // Others would run one after another: see docs/tensorflow.md.
        stateful: false,
    }
}

const fn grouped(operation: Operation) -> Operation {
    Operation {
        grouped: true,
        ..operation
    }
}

const fn query(
    name: &'static str,
    query: Query,
    outputs: &'static [&'static str],
    attributes: &'static [&'static str],
) -> Operation {
    Operation {
        name,
        computes: Computes::Query(query),
        grouped: false,
        inputs: &[],
        outputs,
        attributes,
        shapes: Shapes::Scalar,
        stateful: true,
    }
}

/// How many there are.
pub(crate) const COUNT: usize = 14;

/// All of them.
pub(crate) static ALL: [Operation; COUNT] = [
    collective(
        "HorovodAllreduce",
        OperationCode::Allreduce,
        &["tensor: T"],
        &["sum: T"],
        REDUCING,
        Shapes::Same,
    ),
    grouped(collective(
        "HorovodGroupedAllreduce",
        OperationCode::Allreduce,
        &["tensors: num_tensors*T"],
        &["sum: num_tensors*T"],
        GROUP_REDUCING,
        Shapes::Same,
    )),
    collective(
        "HorovodAllgather",
        OperationCode::Allgather,
        &["tensor: T"],
        &["output: T"],
        GATHERING,
        Shapes::UnknownRows,
    ),
    grouped(collective(
        "HorovodGroupedAllgather",
        OperationCode::Allgather,
        &["tensors: num_tensors*T"],
        &["outputs: num_tensors*T"],
        GROUP_GATHERING,
        Shapes::UnknownRows,
    )),
    collective(
        "HorovodBroadcast",
        OperationCode::Broadcast,
        &["tensor: T"],
        &["output: T"],
        &[TYPE, ROOT, IGNORE_SCOPE, PROCESS_SET],
        Shapes::Same,
    ),
    collective(
        "HorovodAlltoall",
        OperationCode::Alltoall,
        &["tensor: T", "splits: int32"],
        &["output: T", "received_splits: int32"],
        GATHERING,
        Shapes::Exchanged,
    ),
    collective(
        "HorovodReducescatter",
        OperationCode::Reducescatter,
        &["tensor: T"],
        &["output: T"],
        REDUCING,
        Shapes::UnknownRows,
    ),
    grouped(collective(
        "HorovodGroupedReducescatter",
        OperationCode::Reducescatter,
        &["tensors: num_tensors*T"],
        &["outputs: num_tensors*T"],
        GROUP_REDUCING,
        Shapes::UnknownRows,
    )),
    // Without inputs, TensorFlow would take any two of one function for the same.
    Operation {
        stateful: true,
        ..collective(
            "HorovodJoin",
            OperationCode::Join,
            &[],
            &["output: int32"],
            &[],
            Shapes::Scalar,
        )
    },
    query("HorovodSize", Query::Size, &["size: int32"], &[PROCESS_SET]),
    query(
        "HorovodProcessSetIncluded",
        Query::ProcessSetIncluded,
        &["included: int32"],
        &[PROCESS_SET],
    ),
    query(
        "HorovodLocalSize",
        Query::LocalSize,
        &["local_size: int32"],
        &[],
    ),
    query("HorovodRank", Query::Rank, &["rank: int32"], &[]),
    query(
        "HorovodLocalRank",
        Query::LocalRank,
        &["local_rank: int32"],
        &[],
    ),
];

impl Operation {
    /// Whether it has an attribute of this name.
    pub(crate) fn has(&self, attribute: &str) -> bool {
        let name = |text: &&str| text.split(':').next().is_some_and(|n| n == attribute);
        self.attributes.iter().any(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_found_by_name() {
        let [allreduce, .., local_rank] = &ALL;
        assert!(allreduce.has("prescale_factor"));
        assert!(allreduce.has("T"));
        assert!(!allreduce.has("prescale"));
        assert!(!local_rank.has("T"));
    }

    #[test]
    fn groups_have_as_many_outputs_as_inputs() {
        for operation in ALL.iter().filter(|o| o.grouped) {
            assert!(operation.has("num_tensors"));
            assert!(operation.inputs[0].ends_with("num_tensors*T"));
            assert!(operation.outputs[0].ends_with("num_tensors*T"));
        }
    }
}
