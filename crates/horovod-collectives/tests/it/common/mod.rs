//! Ranks as threads: clusters of every kind, values that are exact in any order, and the oracle.
#![allow(dead_code, reason = "each test binary uses its part")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use horovod_collectives::{
    CollectiveError, Ctx, HostGroups, Outgoing, Scratch, SetLayout, Tuning, exchange_rows,
    exchange_sizes,
};
use horovod_kernels::{Combine, Isa, Source, Spec, reduce_with};
use horovod_protocol::{DType, Rank, ReduceOp, Scale, Seq};
use horovod_transport::testing::Cluster;
use horovod_transport::{Aborted, Data, Idle, Mesh, Topology, Waiter};

/// No operation takes longer than this, not even on a machine that does much else.
const LIMIT: Duration = Duration::from_secs(240);

/// Where ranks are.
#[derive(Clone, Debug)]
pub(crate) struct World {
    /// The pretended host of each rank.
    pub(crate) hosts: Vec<usize>,
    pub(crate) shm: bool,
    /// Bytes of each staging area.
    pub(crate) staging: usize,
    /// Most bytes a link moves per call.
    pub(crate) drip: Option<usize>,
}

impl World {
    pub(crate) fn shm(n: usize) -> Self {
        Self {
            hosts: vec![0; n],
            shm: true,
            staging: 16 << 10,
            drip: None,
        }
    }

    pub(crate) fn tcp(n: usize) -> Self {
        Self {
            shm: false,
            ..Self::shm(n)
        }
    }

    /// Hosts with these numbers of ranks.
    pub(crate) fn hosts(counts: &[usize]) -> Self {
        let hosts = counts
            .iter()
            .enumerate()
            .flat_map(|(host, n)| vec![host; *n])
            .collect();
        Self {
            hosts,
            ..Self::shm(1)
        }
    }

    /// Every kind of world the matrix runs over.
    pub(crate) fn all() -> Vec<Self> {
        let counts = [1, 2, 3, 4, 5, 7, 8];
        let mut worlds: Vec<Self> = counts.iter().map(|n| Self::shm(*n)).collect();
        worlds.extend(counts.iter().map(|n| Self::tcp(*n)));
        worlds.extend(
            [[2, 2], [2, 1], [1, 3]]
                .iter()
                .map(|counts| Self::hosts(counts)),
        );
        // Hosts whose ranks are not consecutive.
        worlds.push(Self {
            hosts: vec![0, 1, 0, 1, 2],
            ..Self::shm(1)
        });
        worlds
    }

    pub(crate) fn size(&self) -> usize {
        self.hosts.len()
    }

    /// Runs `body` on every rank and returns what each returned.
    pub(crate) fn run<T: Send>(&self, body: impl Fn(&mut Node) -> T + Sync) -> Vec<T> {
        let mut cluster = Cluster::new(self.size())
            .shm(self.shm)
            .staging(self.staging);
        cluster = cluster.hosts(&self.hosts);
        if let Some(most) = self.drip {
            cluster = cluster.drip(most);
        }
        let aborted = Arc::new(AtomicBool::new(false));
        std::thread::scope(|scope| {
            let ranks: Vec<_> = cluster
                .build()
                .into_iter()
                .map(|mesh| {
                    let (body, aborted) = (&body, aborted.clone());
                    scope.spawn(move || {
                        // A rank that fails must not leave the others waiting.
                        let _guard = AbortOnPanic(aborted.clone());
                        body(&mut Node::new(mesh, aborted))
                    })
                })
                .collect();
            ranks
                .into_iter()
                .map(|rank| rank.join().expect("a rank failed"))
                .collect()
        })
    }
}

struct AbortOnPanic(Arc<AtomicBool>);
impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.store(true, Ordering::SeqCst);
        }
    }
}

/// Waits on the real waiter, with a bound.
pub(crate) struct IdleTimeout {
    waiter: Waiter,
    pub(crate) aborted: Arc<AtomicBool>,
    deadline: Instant,
}

impl Idle for IdleTimeout {
    fn idle(&mut self, spins: u32) -> Result<(), Aborted> {
        if self.aborted.load(Ordering::SeqCst) {
            return Err(Aborted("a peer is gone".into()));
        }
        assert!(Instant::now() < self.deadline, "waited too long");
        self.waiter.idle(spins, Some(Duration::from_millis(50)));
        Ok(())
    }
}

/// One rank.
pub(crate) struct Node {
    pub(crate) rank: usize,
    pub(crate) size: usize,
    pub(crate) tuning: Tuning,
    pub(crate) idle: IdleTimeout,
    data: Option<Data>,
    scratch: Scratch,
    topology: Topology,
    seq: u64,
    control: Option<horovod_transport::Control>,
}

impl Node {
    fn new(mesh: Mesh, aborted: Arc<AtomicBool>) -> Self {
        let Mesh {
            topology,
            control,
            data,
            waiter,
            ..
        } = mesh;
        let deadline = Instant::now() + LIMIT;
        Self {
            rank: topology.rank.index(),
            size: topology.size as usize,
            tuning: small_tuning(),
            idle: IdleTimeout {
                waiter,
                aborted,
                deadline,
            },
            data: Some(data),
            scratch: Scratch::new(),
            topology,
            seq: 1,
            control: Some(control),
        }
    }

    /// Closes all connections, as the end of the process would.
    pub(crate) fn drop_links(&mut self) {
        self.data = None;
        self.control = None;
    }

    /// All ranks by host.
    pub(crate) fn host_groups(&self) -> HostGroups {
        let all: Vec<Rank> = (0..self.size).map(|rank| Rank(rank as u32)).collect();
        HostGroups::new(&self.topology, &all)
    }

    /// Runs one operation of all ranks.
    pub(crate) fn op<T>(&mut self, f: impl FnOnce(&mut Ctx<'_>) -> T) -> T {
        let all: Vec<Rank> = (0..self.size).map(|rank| Rank(rank as u32)).collect();
        self.op_of(&all, f).expect("all are members")
    }

    /// Runs `times` operations of all ranks, making nothing anew in between.
    pub(crate) fn ops(&mut self, times: usize, mut f: impl FnMut(&mut Ctx<'_>)) {
        let members: Vec<Rank> = (0..self.size).map(|rank| Rank(rank as u32)).collect();
        let layout = SetLayout::new(&self.topology, &members);
        for _ in 0..times {
            self.seq += 1;
            self.idle.deadline = Instant::now() + LIMIT;
            f(&mut Ctx {
                data: self.data.as_mut().expect("the links are still there"),
                idle: &mut self.idle,
                members: &members,
                me: self.rank,
                seq: Seq(self.seq),
                layout: &layout,
                tag: None,
                tuning: &self.tuning,
                scratch: &mut self.scratch,
            });
        }
    }

    /// Runs one operation of `members`; others only count it.
    pub(crate) fn op_of<T>(
        &mut self,
        members: &[Rank],
        f: impl FnOnce(&mut Ctx<'_>) -> T,
    ) -> Option<T> {
        self.seq += 1;
        self.idle.deadline = Instant::now() + LIMIT;
        let me = members.iter().position(|rank| rank.index() == self.rank)?;
        let layout = SetLayout::new(&self.topology, members);
        Some(f(&mut Ctx {
            data: self.data.as_mut().expect("the links are still there"),
            idle: &mut self.idle,
            members,
            me,
            seq: Seq(self.seq),
            layout: &layout,
            tag: None,
            tuning: &self.tuning,
            scratch: &mut self.scratch,
        }))
    }
}

/// Chunks so small that a few kilobytes take every path.
pub(crate) fn small_tuning() -> Tuning {
    let mut tuning = Tuning::default();
    tuning.chunk_bytes = 256;
    tuning.chunk_min_bytes = 64;
    tuning.direct_max_bytes = 200;
    tuning.exchange_max_bytes = 300;
    tuning.wire_chunk_bytes = 192;
    tuning.chain_min_bytes = 512;
    tuning.stream_min_bytes = 4000;
    tuning
}

/// `n` elements of `dtype`, as bytes, that stay exact in every order of summing up to 8 of them, and
/// of multiplying them.
pub(crate) fn exact_values(dtype: DType, op: ReduceOp, n: usize, seed: usize) -> Vec<u8> {
    (0..n)
        .flat_map(|i| encode(dtype, exact_value(dtype, op, i, seed)))
        .collect()
}

fn exact_value(dtype: DType, op: ReduceOp, i: usize, seed: usize) -> f64 {
    let random = (i * 2_654_435_761 + seed * 40_503 + 12_345) % 1009;
    match (dtype, op) {
        (DType::Bool, _) => (random % 5 / 4) as f64,
        (_, ReduceOp::Product) if dtype.is_float() => [1.0, 2.0, 0.5, -1.0][random % 4],
        _ if dtype.is_float() => (random % 15) as f64 - 7.0,
        // Anything goes for integers: they wrap. The cast below cuts to the type.
        _ => (random * 7919 % 65_521) as f64,
    }
}

/// `n` finite floats without any special structure, as bytes.
pub(crate) fn rough_values(dtype: DType, n: usize, seed: usize) -> Vec<u8> {
    (0..n)
        .flat_map(|i| {
            let random = (i * 7_368_787 + seed * 1_299_709 + 17) % 100_003;
            encode(dtype, random as f64 / 50_000.0 - 1.0)
        })
        .collect()
}

fn encode(dtype: DType, value: f64) -> Vec<u8> {
    let int = value as i64;
    match dtype {
        DType::U8 | DType::I8 | DType::Bool => vec![int as u8],
        DType::U16 | DType::I16 => (int as u16).to_ne_bytes().to_vec(),
        DType::U32 | DType::I32 => (int as u32).to_ne_bytes().to_vec(),
        DType::U64 | DType::I64 => int.to_ne_bytes().to_vec(),
        DType::F32 => (value as f32).to_ne_bytes().to_vec(),
        DType::F64 => value.to_ne_bytes().to_vec(),
        DType::F16 => half::f16::from_f64(value).to_ne_bytes().to_vec(),
        DType::BF16 => half::bf16::from_f64(value).to_ne_bytes().to_vec(),
    }
}

/// Floats as `f64`.
pub(crate) fn decode(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    macro_rules! each {
        ($t:ty) => {
            bytes
                .chunks_exact(dtype.size())
                .map(|c| <$t>::from_ne_bytes(c.try_into().unwrap()).into())
                .collect()
        };
    }
    match dtype {
        DType::F32 => each!(f32),
        DType::F64 => each!(f64),
        DType::F16 => each!(half::f16),
        DType::BF16 => each!(half::bf16),
        _ => unreachable!("floats only"),
    }
}

/// The reduction of all inputs in their order, by the kernels' oracle.
pub(crate) fn oracle(dtype: DType, op: ReduceOp, scale: Scale, inputs: &[Vec<u8>]) -> Vec<u8> {
    let divisor = if op == ReduceOp::Average {
        inputs.len() as u32
    } else {
        1
    };
    let combine = Combine::of(op).expect("not Adasum");
    let spec = Spec {
        dtype,
        combine,
        pre: scale.pre,
        divisor,
        post: scale.post,
    };
    let sources: Vec<Source> = inputs
        .iter()
        .map(|input| Source::raw(input.as_ptr()))
        .collect();
    let mut out = vec![0u8; inputs[0].len()];
    let elems = out.len() / dtype.size();
    // SAFETY: all vectors have the same length.
    unsafe { reduce_with(Isa::Scalar, &spec, &sources, out.as_mut_ptr(), None, elems) };
    out
}

/// Cuts `elems` into tensors of uneven lengths, some empty.
pub(crate) fn uneven(elems: usize) -> Vec<usize> {
    let mut lens = vec![
        0,
        elems / 7,
        0,
        elems / 2,
        1.min(elems - elems / 7 - elems / 2),
    ];
    lens.push(elems - lens.iter().sum::<usize>());
    lens.push(0);
    lens
}

/// A whole alltoall, with memory from `alloc`, which is called once with the rows that each member sends here.
///
/// # Safety
/// As of [`exchange_rows`], for what `alloc` returns.
pub(crate) unsafe fn alltoall(
    ctx: &mut Ctx<'_>,
    outgoing: Outgoing<'_>,
    alloc: &mut dyn FnMut(&[usize]) -> Result<*mut u8, CollectiveError>,
) -> Result<(), CollectiveError> {
    let incoming = exchange_sizes(ctx, outgoing.rows)?;
    incoming.bytes(outgoing.row_bytes)?;
    let output = alloc(&incoming.rows)?;
    // SAFETY: as the caller promises.
    unsafe { exchange_rows(ctx, outgoing, incoming, output) }
}
