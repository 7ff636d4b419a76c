//! Request validation: whether the ranks that asked for one name mean the same thing; Horovod's checks in their order.

use crate::groups::member_name;
use crate::limits::FIRST_DIMS_MAX;
use crate::refusal::{Difference, Impossible, Mismatch, Refusal};
use crate::signature::RequestSignature;
use crate::types::{Op, Rank, TensorMeta};

/// Request of one rank.
pub(crate) type Asked<'a> = (Rank, &'a RequestSignature);

/// Compares all requests for one name with the first; ascending ranks make the outcome deterministic.
pub(crate) fn compare(name: &str, asked: &[Asked<'_>]) -> Result<(), Refusal> {
    let Some(&first) = asked.first() else {
        return Ok(());
    };
    let count = first.1.tensors.len();
    let each = |check: &dyn Fn(Asked<'_>) -> Option<Difference>, of: &str| {
        let found = asked[1..]
            .iter()
            .find_map(|other| Some((other.0, check(*other)?)));
        match found {
            None => Ok(()),
            Some((other, difference)) => Err(Refusal::Mismatch(Box::new(Mismatch {
                tensor: of.to_owned(),
                ranks: [first.0, other],
                difference,
            }))),
        }
    };
    let dtype_of = |i: usize| {
        each(
            &|other| data_types(first.1.tensors.get(i)?, other.1.tensors.get(i)?),
            &member_name(name, i, count),
        )
    };
    dtype_of(0)?;
    each(&|other| operations(&first.1.op, &other.1.op), name)?;
    each(&|other| group_sizes(count, other.1.tensors.len()), name)?;
    for i in 0..count {
        dtype_of(i)?;
        each(
            &|other| shapes(&first.1.op, &first.1.tensors[i], &other.1.tensors[i]),
            &member_name(name, i, count),
        )?;
    }
    each(&|other| arguments(&first.1.op, &other.1.op), name)?;
    each(&|other| devices(first.1, other.1), name)
}

/// Refuses requests that cannot be carried out although all ranks agree: operations that a joined rank cannot take part
/// in, and tensors without the dimension that the operation works on.
pub(crate) fn possible(
    name: &str,
    signature: &RequestSignature,
    someone_joined: bool,
) -> Result<(), Refusal> {
    let joins = matches!(signature.op, Op::Allreduce { .. } | Op::Barrier | Op::Join);
    if someone_joined && !joins {
        let op = signature.op.clone();
        return Err(impossible(name, Impossible::Joined { op }));
    }
    let rows = matches!(
        signature.op,
        Op::Allgather | Op::Alltoall | Op::Reducescatter { .. }
    );
    if let (true, Some(i)) = (
        rows,
        signature.tensors.iter().position(|t| t.shape.is_empty()),
    ) {
        let op = signature.op.clone();
        let name = member_name(name, i, signature.tensors.len());
        return Err(impossible(&name, Impossible::NoRows { op }));
    }
    Ok(())
}

/// Bytes that the members gather together; also refuses what cannot be announced or addressed.
pub(crate) fn gathered_bytes(
    name: &str,
    signature: &RequestSignature,
    rows: &[u64],
    members: usize,
) -> Result<u64, Refusal> {
    if rows.len() > FIRST_DIMS_MAX {
        let why = Impossible::TooManyParts {
            tensors: signature.tensors.len() as u64,
            members: members as u64,
        };
        return Err(impossible(name, why));
    }
    let bytes = signature
        .tensors
        .iter()
        .zip(rows.chunks(members.max(1)))
        .try_fold(0u64, |sum, (tensor, rows)| {
            let all_rows = rows.iter().try_fold(0u64, |n, r| n.checked_add(*r))?;
            let row_elems = tensor
                .shape
                .iter()
                .skip(1)
                .try_fold(1u64, |n, d| n.checked_mul(*d))?;
            let bytes = all_rows
                .checked_mul(row_elems)?
                .checked_mul(tensor.dtype.size() as u64)?;
            sum.checked_add(bytes)
        });
    bytes.ok_or_else(|| impossible(name, Impossible::TooLarge))
}

fn impossible(tensor: &str, why: Impossible) -> Refusal {
    let tensor = tensor.to_owned();
    Refusal::Impossible { tensor, why }
}

fn data_types(a: &TensorMeta, b: &TensorMeta) -> Option<Difference> {
    (a.dtype != b.dtype).then_some(Difference::DataTypes([a.dtype, b.dtype]))
}

fn operations(a: &Op, b: &Op) -> Option<Difference> {
    (a.upper_name() != b.upper_name()).then(|| Difference::Operations([a.clone(), b.clone()]))
}

fn group_sizes(a: usize, b: usize) -> Option<Difference> {
    (a != b).then_some(Difference::GroupSizes([a as u64, b as u64]))
}

fn shapes(op: &Op, a: &TensorMeta, b: &TensorMeta) -> Option<Difference> {
    let (a, b) = (&a.shape, &b.shape);
    if !op.has_own_rows() {
        return (a != b).then(|| Difference::Shapes {
            op: op.clone(),
            shapes: [a.clone(), b.clone()],
        });
    }
    // Of requests that only differ in rows one stands for all, so nothing is said of rows.
    if a.len() != b.len() {
        return Some(Difference::Dimensions {
            op: op.clone(),
            counts: [a.len() as u64, b.len() as u64],
        });
    }
    let index = (1..a.len()).find(|index| a[*index] != b[*index])?;
    Some(Difference::Dimension {
        op: op.clone(),
        index: index as u64,
        sizes: [a[index], b[index]],
    })
}

fn arguments(a: &Op, b: &Op) -> Option<Difference> {
    match (a, b) {
        (Op::Allreduce { op: p, scale: s }, Op::Allreduce { op: q, scale: t })
        | (Op::Reducescatter { op: p, scale: s }, Op::Reducescatter { op: q, scale: t }) => {
            if s != t {
                return Some(Difference::Factors([*s, *t]));
            }
            (p != q).then_some(Difference::Reductions([*p, *q]))
        }
        (Op::Broadcast { root: p }, Op::Broadcast { root: q }) if p != q => {
            Some(Difference::Roots([*p, *q]))
        }
        (Op::AddProcessSet { ranks: p }, Op::AddProcessSet { ranks: q }) if p != q => {
            Some(Difference::NewSets([p.clone(), q.clone()]))
        }
        (Op::RemoveProcessSet { set: p }, Op::RemoveProcessSet { set: q }) if p != q => {
            Some(Difference::RemovedSets([*p, *q]))
        }
        _ => None,
    }
}

fn devices(a: &RequestSignature, b: &RequestSignature) -> Option<Difference> {
    (a.device != b.device).then(|| Difference::Devices {
        op: a.op.clone(),
        devices: [a.device, b.device],
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{DType, Device, ReduceOp, Scale};

    fn signature(op: Op, tensors: &[(DType, &[u64])]) -> RequestSignature {
        let meta = |t: &(DType, &[u64])| TensorMeta::new(t.0, t.1);
        RequestSignature {
            op,
            device: Device::Cpu,
            tensors: tensors.iter().map(meta).collect(),
        }
    }

    fn sum() -> Op {
        Op::Allreduce {
            op: ReduceOp::Sum,
            scale: Scale::NONE,
        }
    }

    #[track_caller]
    fn check(a: &RequestSignature, b: &RequestSignature, expected: &str) {
        let error = compare("x", &[(Rank(0), a), (Rank(1), a), (Rank(2), b)]).unwrap_err();
        assert_eq!(error.to_string(), expected);
    }

    const F32: DType = DType::F32;

    #[test]
    fn every_disagreement_has_horovods_text_and_names_tensor_and_ranks() {
        let base = signature(sum(), &[(F32, &[2, 3])]);
        check(
            &base,
            &signature(Op::Allgather, &[(DType::I64, &[2, 3])]),
            "Mismatched data types: One rank had type float32, but another rank had type int64. \
             (tensor x: rank 0 and rank 2)",
        );
        check(
            &base,
            &signature(Op::Allgather, &[(F32, &[2, 3])]),
            "Mismatched operations: One rank did an ALLREDUCE, but another rank did an ALLGATHER. \
             (tensor x: rank 0 and rank 2)",
        );
        check(
            &base,
            &signature(sum(), &[(F32, &[2, 4])]),
            "Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape [2, 3], but \
             another rank sent a tensor of shape [2, 4]. (tensor x: rank 0 and rank 2)",
        );
        let scaled = Op::Allreduce {
            op: ReduceOp::Sum,
            scale: Scale {
                pre: 0.5,
                post: 1.0,
            },
        };
        check(
            &base,
            &signature(scaled, &[(F32, &[2, 3])]),
            "Mismatched prescale and/or postscale factors: One rank sent factors (1, 1), but \
             another rank sent factors (0.5, 1). (tensor x: rank 0 and rank 2)",
        );
        let max = Op::Allreduce {
            op: ReduceOp::Max,
            scale: Scale::NONE,
        };
        check(
            &base,
            &signature(max, &[(F32, &[2, 3])]),
            "Mismatched reduction operation: One rank sent reduction op Sum, but another rank sent \
             reduction op Max. (tensor x: rank 0 and rank 2)",
        );
        check(
            &base,
            &RequestSignature {
                device: Device::Gpu,
                ..base.clone()
            },
            "Mismatched ALLREDUCE CPU/GPU device selection: One rank specified device CPU, but \
             another rank specified device GPU. (tensor x: rank 0 and rank 2)",
        );
        check(
            &signature(Op::Broadcast { root: Rank(0) }, &[(F32, &[2])]),
            &signature(Op::Broadcast { root: Rank(1) }, &[(F32, &[2])]),
            "Mismatched BROADCAST root ranks: One rank specified root rank 0, but another rank \
             specified root rank 1. (tensor x: rank 0 and rank 2)",
        );
    }

    #[test]
    fn gathers_may_differ_in_rows_only() {
        let base = signature(Op::Allgather, &[(F32, &[2, 3])]);
        assert_eq!(
            compare(
                "x",
                &[
                    (Rank(0), &base),
                    (Rank(1), &signature(Op::Allgather, &[(F32, &[9, 3])]))
                ]
            ),
            Ok(())
        );
        check(
            &base,
            &signature(Op::Allgather, &[(F32, &[2, 4])]),
            "Mismatched ALLGATHER tensor shapes: One rank sent a tensor with dimension 1 equal to \
             3, but another rank sent a tensor with dimension 1 equal to 4. \
             (tensor x: rank 0 and rank 2)",
        );
        check(
            &base,
            &signature(Op::Allgather, &[(F32, &[2])]),
            "Mismatched ALLGATHER tensor shapes: One rank sent a tensor of rank 2, but another \
             rank sent a tensor of rank 1. (tensor x: rank 0 and rank 2)",
        );
    }

    #[test]
    fn group_members_are_named_and_counts_are_compared() {
        let base = signature(sum(), &[(F32, &[2]), (F32, &[3])]);
        check(
            &base,
            &signature(sum(), &[(F32, &[2]), (F32, &[4])]),
            "Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape [3], but another \
             rank sent a tensor of shape [4]. (tensor x_2of2: rank 0 and rank 2)",
        );
        check(
            &base,
            &signature(sum(), &[(F32, &[2])]),
            "Mismatched group sizes: One rank submitted a group of 2 tensors, but another rank \
             submitted a group of 1 tensors. (tensor x: rank 0 and rank 2)",
        );
    }

    #[test]
    fn whatever_signature_equality_tells_apart_has_a_text() {
        // `RequestSignature::agrees` decides whether `compare` runs at all, so the two must match,
        // but for orders in memory.
        let scaled = Scale {
            pre: 2.0,
            post: 1.0,
        };
        let sets = |ranks: &[u32]| Op::AddProcessSet {
            ranks: ranks.iter().map(|r| Rank(*r)).collect(),
        };
        let ops = [
            sum(),
            Op::Allreduce {
                op: ReduceOp::Adasum,
                scale: Scale::NONE,
            },
            Op::Allreduce {
                op: ReduceOp::Sum,
                scale: scaled,
            },
            Op::Reducescatter {
                op: ReduceOp::Sum,
                scale: Scale::NONE,
            },
            Op::Reducescatter {
                op: ReduceOp::Average,
                scale: Scale::NONE,
            },
            Op::Reducescatter {
                op: ReduceOp::Average,
                scale: scaled,
            },
            Op::Allgather,
            Op::Alltoall,
            Op::Broadcast { root: Rank(0) },
            Op::Broadcast { root: Rank(1) },
            Op::Barrier,
            Op::Join,
            sets(&[0]),
            sets(&[1]),
            sets(&[0, 1]),
            Op::RemoveProcessSet {
                set: crate::ProcessSetId(1),
            },
            Op::RemoveProcessSet {
                set: crate::ProcessSetId(2),
            },
        ];
        let tensors: [&[(DType, &[u64])]; 7] = [
            &[],
            &[(F32, &[])],
            &[(F32, &[2])],
            &[(F32, &[2, 3])],
            &[(F32, &[5, 3])],
            &[(DType::F16, &[2, 3])],
            &[(F32, &[2, 3]), (F32, &[1])],
        ];
        let mut all = Vec::new();
        for op in &ops {
            for tensors in tensors {
                for device in [Device::Cpu, Device::Gpu] {
                    all.push(RequestSignature {
                        device,
                        ..signature(op.clone(), tensors)
                    });
                }
            }
        }
        for a in &all {
            for b in &all {
                let compared = compare("x", &[(Rank(0), a), (Rank(1), b)]);
                assert_eq!(compared.is_ok(), a.agrees(b), "{a:?}\n{b:?}\n{compared:?}");
            }
        }
    }

    #[test]
    fn memory_orders_may_differ_and_then_row_major_is_meant() {
        let base = signature(sum(), &[(F32, &[2, 3]), (F32, &[3])]);
        let order = crate::MemoryOrder::of(&[2, 3], &[1, 2]).unwrap();
        let transposed = RequestSignature {
            tensors: [
                TensorMeta::new(F32, [2, 3]).in_order(order),
                TensorMeta::new(F32, [3]),
            ]
            .into(),
            ..base.clone()
        };
        assert!(!base.agrees(&transposed));
        let asked = [(Rank(0), &transposed), (Rank(1), &base)];
        assert_eq!(compare("x", &asked), Ok(()));
        assert_eq!(transposed.in_row_major(), base);
        let run = |asked: &RequestSignature, decided: &RequestSignature| {
            asked.may_run_as(&decided.op, decided.device, &decided.tensors)
        };
        assert!(run(&transposed, &base) && run(&transposed, &transposed));
        assert!(!run(&base, &transposed));
        assert!(!run(
            &transposed,
            &signature(sum(), &[(F32, &[3, 2]), (F32, &[3])])
        ));
    }

    #[test]
    fn gathered_bytes_do_not_overflow() {
        let wide = signature(Op::Allgather, &[(F32, &[1, 1 << 40])]);
        assert_eq!(gathered_bytes("x", &wide, &[2, 3], 2), Ok(5 << 42));
        assert!(gathered_bytes("x", &wide, &[1 << 30, 1], 2).is_err());
        assert!(gathered_bytes("x", &wide, &vec![0; FIRST_DIMS_MAX + 1], 1 << 20).is_err());
    }
}
