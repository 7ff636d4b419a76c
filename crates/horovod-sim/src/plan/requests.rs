//! Random requests, and small mistakes in them that the ranks must be told of.

use crate::rng::Rng;
use horovod_protocol::{
    DType, Device, MemoryOrder, Op, ProcessSetId, Rank, ReduceOp, Request, Scale, TensorMeta,
};

/// A valid request on a set. Rows of gathers are set by [`own_form`].
pub(super) fn random(rng: &mut Rng, set: ProcessSetId, members: &[Rank], name: &str) -> Request {
    let scale = if rng.chance(80) {
        Scale::NONE
    } else {
        Scale {
            pre: 0.5,
            post: rng.below(4) as f64,
        }
    };
    let op = match rng.below(10) {
        0..=4 => {
            let code = rng.below(6) as u8;
            Op::Allreduce {
                op: ReduceOp::from_code(code).unwrap_or(ReduceOp::Sum),
                scale,
            }
        }
        5 => Op::Allgather,
        6 => Op::Broadcast {
            root: *rng.pick(members),
        },
        7 => Op::Alltoall,
        8 => {
            let op = if rng.chance(50) {
                ReduceOp::Sum
            } else {
                ReduceOp::Average
            };
            Op::Reducescatter { op, scale }
        }
        _ => Op::Barrier,
    };
    let count = match op {
        Op::Barrier => 0,
        _ if rng.chance(70) => 1,
        _ => 2 + rng.index(3),
    };
    let has_rows = matches!(op, Op::Allgather | Op::Alltoall | Op::Reducescatter { .. });
    let dims_min = usize::from(has_rows);
    let dtypes = [
        DType::F32,
        DType::F32,
        DType::F32,
        DType::F16,
        DType::BF16,
        DType::I64,
    ];
    let tensors = (0..count)
        .map(|_| {
            let dtype = *rng.pick(&dtypes);
            let shape: Vec<u64> = (0..dims_min + rng.index(3)).map(|_| rng.below(6)).collect();
            let order = if has_own_order(&op) && rng.chance(20) {
                random_order(rng, &shape)
            } else {
                MemoryOrder::ROW_MAJOR
            };
            TensorMeta::new(dtype, shape).in_order(order)
        })
        .collect();
    let device = if rng.chance(90) {
        Device::Cpu
    } else {
        Device::Gpu
    };
    Request {
        set,
        name: name.into(),
        op,
        device,
        tensors,
    }
}

/// Whether every rank may bring its own rows.
pub(super) fn has_own_rows(op: &Op) -> bool {
    matches!(op, Op::Allgather | Op::Alltoall)
}

/// Whether tensors may lie in any order in memory.
pub(super) fn has_own_order(op: &Op) -> bool {
    matches!(op, Op::Allreduce { .. } | Op::Broadcast { .. })
}

fn random_order(rng: &mut Rng, shape: &[u64]) -> MemoryOrder {
    let mut dims: Vec<usize> = (0..shape.len()).collect();
    rng.shuffle(&mut dims);
    let mut strides = vec![0; shape.len()];
    let mut step = 1;
    for dim in dims {
        strides[dim] = step;
        step *= shape[dim] as i64;
    }
    MemoryOrder::of(shape, &strides).unwrap_or_default()
}

/// The request with this rank's own rows or order in memory, where those are free.
pub(super) fn own_form(rng: &mut Rng, request: &Request) -> Request {
    let mut request = request.clone();
    if has_own_order(&request.op) && rng.chance(10) {
        for tensor in &mut request.tensors {
            tensor.order = random_order(rng, &tensor.shape);
        }
    }
    if has_own_rows(&request.op) {
        for tensor in &mut request.tensors {
            if let Some(rows) = tensor.shape.first_mut() {
                *rows = rng.below(9);
            }
        }
    }
    request
}

/// Changes a request so that it no longer agrees with the others, and says with which text the
/// ranks must learn of it.
pub(super) fn mistake(rng: &mut Rng, request: &mut Request, members: &[Rank]) -> &'static str {
    // Orders are of a shape, and of few operations.
    for tensor in &mut request.tensors {
        tensor.order = MemoryOrder::ROW_MAJOR;
    }
    if request.tensors.is_empty() {
        request.op = Op::Allreduce {
            op: ReduceOp::Sum,
            scale: Scale::NONE,
        };
        request.tensors.push(TensorMeta::new(DType::F32, [1]));
        return "Mismatched operations";
    }
    let at = rng.index(request.tensors.len());
    match rng.below(6) {
        0 => {
            let tensor = &mut request.tensors[at];
            tensor.dtype = if tensor.dtype == DType::U8 {
                DType::I8
            } else {
                DType::U8
            };
            "Mismatched data types"
        }
        1 => {
            request.device = match request.device {
                Device::Cpu => Device::Gpu,
                Device::Gpu | Device::Other(_) => Device::Cpu,
            };
            "CPU/GPU device selection"
        }
        2 => {
            let extra = request.tensors[at].clone();
            request.tensors.push(extra);
            "Mismatched group sizes"
        }
        3 => {
            let shape = &mut request.tensors[at].shape;
            *shape = shape.iter().copied().chain([7]).collect();
            "tensor shapes"
        }
        4 => {
            let (op, text) = match &request.op {
                Op::Allreduce { .. } => {
                    (Op::Broadcast { root: members[0] }, "Mismatched operations")
                }
                Op::Broadcast { root } if members.len() > 1 => {
                    let root = if *root == members[0] {
                        members[1]
                    } else {
                        members[0]
                    };
                    (Op::Broadcast { root }, "Mismatched BROADCAST root ranks")
                }
                Op::Reducescatter { op, scale } => {
                    let op = if *op == ReduceOp::Sum {
                        ReduceOp::Average
                    } else {
                        ReduceOp::Sum
                    };
                    (
                        Op::Reducescatter { op, scale: *scale },
                        "Mismatched reduction operation",
                    )
                }
                _ => (
                    Op::Allreduce {
                        op: ReduceOp::Sum,
                        scale: Scale::NONE,
                    },
                    "Mismatched operations",
                ),
            };
            request.op = op;
            text
        }
        _ => match &mut request.op {
            Op::Allreduce { scale, .. } | Op::Reducescatter { scale, .. } => {
                scale.pre = 3.0;
                "Mismatched prescale and/or postscale factors"
            }
            _ => {
                let tensor = &mut request.tensors[at];
                tensor.dtype = if tensor.dtype == DType::U8 {
                    DType::I8
                } else {
                    DType::U8
                };
                "Mismatched data types"
            }
        },
    }
}
