//! Collectives between ranks of one host, as threads: microseconds per operation, median and least.
//! `cargo bench -p horovod-collectives [-- RANKS [CASE]]`, the case being part of a name below.
#![expect(clippy::print_stdout, reason = "printing is what it is for")]

use std::sync::Barrier;
use std::time::{Duration, Instant};

use horovod_collectives::{
    ByteSegment, Ctx, GatherItem, Outgoing, Reduction, ScatterItem, Scratch, Segment, SetLayout,
    Tuning, allgather, allreduce, broadcast, exchange_rows, exchange_sizes, reduce_scatter,
};
use horovod_protocol::{DType, Rank, ReduceOp, Scale, Seq};
use horovod_transport::testing::Cluster;
use horovod_transport::{Aborted, Idle, Mesh, Waiter};

struct IdleWaiter(Waiter);

impl Idle for IdleWaiter {
    fn idle(&mut self, spins: u32) -> Result<(), Aborted> {
        self.0.idle(spins, Some(Duration::from_secs(1)));
        Ok(())
    }
}

/// The measured operation.
#[derive(Clone, Copy)]
enum Case {
    Allreduce(DType),
    Broadcast,
    /// So many bytes of each member.
    Allgather,
    ReduceScatter,
    Alltoall,
    /// As many tensors as the bytes make of 1 KiB each.
    Many,
}

fn operation(ctx: &mut Ctx<'_>, case: Case, data: &mut [u8], out: &mut [u8]) {
    let at = data.as_mut_ptr();
    let n = ctx.members.len();
    let whole = |dtype: DType| Segment {
        input: at,
        output: at,
        elems: data.len() / dtype.size(),
    };
    let red = |dtype| Reduction {
        dtype,
        op: ReduceOp::Sum,
        scale: Scale::NONE,
        divisor: 1,
    };
    // SAFETY: the data are this thread's own.
    let result = unsafe {
        match case {
            Case::Allreduce(dtype) => allreduce(ctx, &red(dtype), &[whole(dtype)]),
            Case::Broadcast => broadcast(
                ctx,
                0,
                &[ByteSegment {
                    input: at,
                    output: at,
                    bytes: data.len(),
                }],
            ),
            Case::Allgather => allgather(
                ctx,
                &[GatherItem {
                    input: at,
                    output: out.as_mut_ptr(),
                    bytes: vec![data.len(); n],
                }],
            ),
            Case::ReduceScatter => reduce_scatter(
                ctx,
                &red(DType::F32),
                &[ScatterItem {
                    input: at,
                    rows: data.len() / 4,
                    row_elems: 1,
                    output: out.as_mut_ptr(),
                }],
            ),
            Case::Alltoall => {
                let rows = vec![data.len() / n; n];
                let outgoing = Outgoing {
                    input: at,
                    rows: &rows,
                    row_bytes: 1,
                };
                exchange_sizes(ctx, &rows)
                    .and_then(|incoming| exchange_rows(ctx, outgoing, incoming, out.as_mut_ptr()))
            }
            Case::Many => {
                let tensors: Vec<Segment> = data
                    .chunks_mut(1024)
                    .map(|t| {
                        let output = t.as_mut_ptr();
                        Segment {
                            input: output,
                            output,
                            elems: 256,
                        }
                    })
                    .collect();
                allreduce(ctx, &red(DType::F32), &tensors)
            }
        }
    };
    result.expect("nobody aborts");
}

fn measure(ranks: usize, case: Case, bytes: usize, staging: usize) -> (f64, f64) {
    let reps = (400_000_000 / bytes.max(200_000)).clamp(15, 2000);
    let together = Barrier::new(ranks);
    let meshes = Cluster::new(ranks).staging(staging).build();
    let mut times = std::thread::scope(|scope| {
        let threads: Vec<_> = meshes
            .into_iter()
            .map(|mesh| {
                let together = &together;
                scope.spawn(move || {
                    let Mesh {
                        topology,
                        mut data,
                        waiter,
                        control,
                        ..
                    } = mesh;
                    let members: Vec<Rank> = (0..ranks).map(|rank| Rank(rank as u32)).collect();
                    let layout = SetLayout::new(&topology, &members);
                    let (mut idle, mut scratch) = (IdleWaiter(waiter), Scratch::new());
                    let tuning = Tuning::default();
                    let mut memory = vec![1u8; bytes];
                    let mut out = match case {
                        Case::Allgather => vec![1u8; ranks * bytes],
                        Case::ReduceScatter | Case::Alltoall => vec![1u8; bytes],
                        _ => Vec::new(),
                    };
                    let mut times = Vec::new();
                    for rep in 0..reps + 3 {
                        together.wait();
                        let start = Instant::now();
                        let mut ctx = Ctx {
                            tag: None,
                            data: &mut data,
                            idle: &mut idle,
                            members: &members,
                            me: topology.rank.index(),
                            seq: Seq(rep as u64 + 1),
                            layout: &layout,
                            tuning: &tuning,
                            scratch: &mut scratch,
                        };
                        operation(&mut ctx, case, &mut memory, &mut out);
                        times.push(start.elapsed().as_secs_f64() * 1e6);
                    }
                    drop(control);
                    times.split_off(3)
                })
            })
            .collect();
        let mut all = threads
            .into_iter()
            .map(|thread| thread.join().expect("a rank failed"));
        all.next().expect("at least one rank")
    });
    times.sort_by(f64::total_cmp);
    (times[times.len() / 2], times[0])
}

fn main() {
    let ranks = std::env::args()
        .filter_map(|arg| arg.parse().ok())
        .next()
        .unwrap_or(2);
    println!("{ranks} ranks, kernels: {}", horovod_kernels::chosen());
    let wanted = std::env::args()
        .skip(1)
        .find(|arg| arg.starts_with(char::is_alphabetic));
    let f32s = [
        4,
        1 << 10,
        4 << 10,
        8 << 10,
        16 << 10,
        64 << 10,
        256 << 10,
        1 << 20,
        8 << 20,
        64 << 20,
    ];
    let cases = f32s.map(|bytes| ("allreduce f32", Case::Allreduce(DType::F32), bytes));
    let more = [
        ("allreduce f16", Case::Allreduce(DType::F16), 32 << 20),
        ("allreduce bf16", Case::Allreduce(DType::BF16), 32 << 20),
        ("1000 tensors", Case::Many, 1000 << 10),
        ("broadcast", Case::Broadcast, 1 << 20),
        ("broadcast", Case::Broadcast, 64 << 20),
        ("allgather", Case::Allgather, 1 << 20),
        ("allgather", Case::Allgather, 16 << 20),
        ("reducescatter", Case::ReduceScatter, 1 << 20),
        ("reducescatter", Case::ReduceScatter, 32 << 20),
        ("alltoall", Case::Alltoall, 1 << 20),
        ("alltoall", Case::Alltoall, 32 << 20),
    ];
    for (name, case, bytes) in cases.into_iter().chain(more) {
        if wanted
            .as_ref()
            .is_some_and(|wanted| !name.contains(wanted.as_str()))
        {
            continue;
        }
        let (median, least) = measure(ranks, case, bytes, 8 << 20);
        println!(
            "{name:15} {:>8} KiB  median {median:9.1} us  least {least:9.1} us",
            bytes as f64 / 1024.0
        );
    }
}
