//! Adasum of GPU tensors: of the averages inside the hosts where NCCL is found, else of all ranks, as of host tensors.

use std::ops::Range;
use std::sync::Arc;

use crate::gpu_double::ranks::{OnRank, finish, on_hosts};
use crate::gpu_double::{Memory, with_double};
use horovod_engine::config::{Config, GpuOperations, JoinAverage};
use horovod_engine::gpu::Ready;
use horovod_engine::{
    DType, Error, Op, Output, ProcessSetId, ReduceOp, Scale, Submission, Tensor, TensorMeta,
};

const ADASUM: Op = Op::Allreduce {
    op: ReduceOp::Adasum,
    scale: Scale {
        pre: 0.5,
        post: 4.0,
    },
};
const LENGTHS: [usize; 3] = [5, 0, 1000];

fn values(rank: usize, tensor: usize) -> Vec<f64> {
    let value = |i: usize| ((i * 7 + rank * 5 + tensor) % 11) as f64 - 4.0;
    (0..LENGTHS[tensor]).map(value).collect()
}

fn bytes(values: &[f64]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn numbers(bytes: &[u8]) -> Vec<f64> {
    let eight = bytes.as_chunks::<8>().0.iter();
    eight.map(|bytes| f64::from_le_bytes(*bytes)).collect()
}

/// One group of tensors on a GPU, in place.
fn on_gpu(on: &OnRank<'_>, name: &str, device: i32) -> Result<Vec<Vec<f64>>, Error> {
    let stream = on.double.stream(device);
    let memories = (0..LENGTHS.len()).map(|tensor| {
        let values = bytes(&values(on.rank, tensor));
        let memory = Memory::new(on.double, device, stream, values.len().max(1));
        if !values.is_empty() {
            memory.write(&values);
        }
        memory
    });
    let memories: Vec<Arc<Memory>> = memories.collect();
    let ready = Ready::record(device, stream)?;
    let tensors = memories.iter().zip(LENGTHS);
    let tensors = tensors.map(|(m, n)| m.tensor(DType::F64, &[n as u64], Some(m), &ready));
    let tensors: Vec<_> = tensors.collect();
    let set = ProcessSetId::GLOBAL;
    let submission = Submission::new("test", Some(name), ADASUM, set, tensors.into());
    finish(on.engine, submission)?
        .end
        .expect("launched")
        .order(stream)?;
    let read = memories.iter().zip(LENGTHS);
    Ok(read.map(|(m, n)| numbers(&m.read()[..8 * n])).collect())
}

/// The same on the host.
fn on_host(on: &OnRank<'_>, name: &str) -> Result<Vec<Vec<f64>>, Error> {
    let tensors = 0..LENGTHS.len();
    let mut tensors: Vec<_> = tensors
        .map(|tensor| bytes(&values(on.rank, tensor)))
        .collect();
    let described = tensors.iter_mut().zip(LENGTHS).map(|(bytes, elems)| {
        let memory = bytes.as_mut_ptr();
        let meta = TensorMeta::new(DType::F64, &[elems as u64][..]);
        // SAFETY: the memory lives until the operation has ended.
        unsafe { Tensor::new(meta, memory, Output::At(memory)) }
    });
    let described: Vec<_> = described.collect();
    let set = ProcessSetId::GLOBAL;
    let submission = Submission::new("test", Some(name), ADASUM, set, described.into());
    finish(on.engine, submission)?;
    Ok(tensors.iter().map(|bytes| numbers(bytes)).collect())
}

/// The pairwise rule.
fn pair(a: &[f64], b: &[f64]) -> Vec<f64> {
    let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
    let factor = |v: &[f64]| 1.0 - dot(a, b) / (2.0 * dot(v, v));
    let (ca, cb) = (factor(a), factor(b));
    a.iter().zip(b).map(|(a, b)| ca * a + cb * b).collect()
}

/// Adasum of up to four vectors: those beyond a power of two join before.
fn adasum(mut vectors: Vec<Vec<f64>>) -> Vec<f64> {
    let power = 1 << vectors.len().ilog2();
    for extra in power..vectors.len() {
        vectors[extra - power] = pair(&vectors[extra - power], &vectors[extra]);
    }
    vectors.truncate(power);
    while vectors.len() > 1 {
        vectors = vectors
            .chunks(2)
            .map(|two| pair(&two[0], &two[1]))
            .collect();
    }
    vectors.remove(0)
}

/// Expected result: the combined sums of these ranks, each sum divided by its number.
fn expected(groups: &[(Vec<usize>, usize)], tensor: usize) -> Vec<f64> {
    let vectors = groups.iter().map(|(ranks, divisor)| {
        let sum = |i: usize| {
            ranks
                .iter()
                .map(|rank| values(*rank, tensor)[i])
                .sum::<f64>()
        };
        let scaled = |i| 0.5 * sum(i) / *divisor as f64;
        (0..LENGTHS[tensor]).map(scaled).collect()
    });
    let combined = adasum(vectors.collect());
    combined.into_iter().map(|value| 4.0 * value).collect()
}

fn check(got: &[Vec<f64>], groups: &[(Vec<usize>, usize)]) {
    for (tensor, got) in got.iter().enumerate() {
        let want = expected(groups, tensor);
        assert_eq!(got.len(), want.len());
        for (got, want) in got.iter().zip(want) {
            assert!((got - want).abs() < 1e-9, "{tensor}: {got} {want}");
        }
    }
}

fn by_host(hosts: &[usize]) -> Vec<(Vec<usize>, usize)> {
    let last = hosts.iter().max().copied().unwrap_or(0);
    let on = |host| (0..hosts.len()).filter(move |rank| hosts[*rank] == host);
    let group = |host| (on(host).collect(), on(host).count());
    (0..=last).map(group).collect()
}

fn alone(ranks: Range<usize>) -> Vec<(Vec<usize>, usize)> {
    ranks.map(|rank| (vec![rank], 1)).collect()
}

#[test]
fn where_nccl_is_found_the_averages_of_the_hosts_combine() {
    let test = "where_nccl_is_found_the_averages_of_the_hosts_combine";
    with_double(test, "devices=5,delay=20", |double| {
        for hosts in [
            &[0][..],
            &[0, 0],
            &[0, 0, 0],
            &[0, 1],
            &[0, 0, 1, 1],
            &[0, 1, 0],
            &[0, 1, 0, 2, 1],
        ] {
            let (groups, n) = (by_host(hosts), hosts.len());
            on_hosts(
                double,
                hosts,
                |_| {},
                move |on| {
                    for name in ["new", "new", "known"] {
                        check(&on_gpu(on, name, on.rank as i32).expect("works"), &groups);
                    }
                    check(&on_host(on, "host").expect("works"), &alone(0..n));
                },
            );
        }
    });
}

#[test]
fn through_host_memory_as_asked_for_all_ranks_combine() {
    let test = "through_host_memory_as_asked_for_all_ranks_combine";
    with_double(test, "devices=4", |double| {
        for hosts in [&[0, 0][..], &[0, 0, 1, 1]] {
            let config = |config: &mut Config| config.gpu.operations = GpuOperations::Host;
            let n = hosts.len();
            on_hosts(double, hosts, config, move |on| {
                let got = on_gpu(on, "all", on.rank as i32).expect("works");
                check(&got, &alone(0..n));
            });
        }
    });
}

#[test]
fn ranks_that_share_a_gpu_are_told_of_nccl_too() {
    let test = "ranks_that_share_a_gpu_are_told_of_nccl_too";
    with_double(test, "devices=1", |double| {
        let hosts = [0, 0, 1];
        on_hosts(
            double,
            &hosts,
            |_| {},
            move |on| {
                check(&on_gpu(on, "shared", 0).expect("works"), &by_host(&hosts));
            },
        );
    });
}

#[test]
fn ranks_that_have_joined_count_as_everywhere() {
    for (case, average) in [JoinAverage::Members, JoinAverage::Contributors]
        .into_iter()
        .enumerate()
    {
        let test = "ranks_that_have_joined_count_as_everywhere";
        with_double(test, &format!("devices=4,seed={case}"), |double| {
            let hosts = [0, 0, 0, 1];
            let config = move |config: &mut Config| config.algorithms.join_average = average;
            on_hosts(double, &hosts, config, move |on| {
                let device = on.rank as i32;
                if on.rank != 1 {
                    let divisor = match average {
                        JoinAverage::Members => 3,
                        JoinAverage::Contributors => 2,
                    };
                    let got = on_gpu(on, "joined", device).expect("works");
                    check(&got, &[(vec![0, 2], divisor), (vec![3], 1)]);
                }
                on.engine.join::<Error>(|| Ok(())).expect("joins");
            });
        });
    }
}
