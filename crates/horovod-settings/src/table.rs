//! The table: every `HOROVOD_*` setting, declared.

use std::sync::LazyLock;

use crate::declaration::{Declaration, Declared, Whose};
use crate::kinds::{Addresses, Decimal, Flag, List, Optional, PortRange, Text, Whole, Words};

/// Most of any of the sizes of the data plane.
const SIZE_MAX: usize = 1 << 30;

/// Severity of a difference between replicas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConsistencyAction {
    /// Worth a warning.
    Warn,
    /// An error.
    Error,
}

/// The consequence if ranks begin to train with different parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckReplicas {
    /// They are not compared.
    Off,
    /// Rank 0 logs a warning.
    Warn,
    /// The job ends with an error.
    Error,
}

/// By what `Average` divides while ranks have joined.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum JoinAverage {
    /// By all members, so that every sample keeps its weight.
    #[default]
    Members,
    /// By those that contribute, so that the scale stays that of the data.
    Contributors,
}

/// Library that carries out operations on GPU tensors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GpuOperations {
    /// NCCL where all ranks have it, host memory otherwise.
    #[default]
    Auto,
    /// NCCL; where it cannot be used, operations fail.
    Nccl,
    /// Host memory.
    Host,
    /// The same, asked for by the name of what is not there: see [`GpuOperations::meant`].
    Mpi,
}

impl GpuOperations {
    /// The implementation used.
    #[must_use]
    pub fn meant(self) -> Self {
        match self {
            Self::Mpi => Self::Host,
            other => other,
        }
    }
}

/// When rank 0 prints a summary of the whole job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SummaryWhen {
    /// After a measured job that ran for a while.
    Auto,
    /// After every job, which is therefore measured.
    Always,
    /// Never.
    Never,
}

/// How allreduce is carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    /// As suits the sizes.
    Auto,
    /// In shared memory; one host only.
    Staged,
    /// Hosts exchange whole vectors.
    Exchange,
    /// Each host sends to each.
    Pairwise,
    /// Hosts form a ring.
    Ring,
}

/// Least severe messages that are logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the words of the setting")]
pub enum LogLevel {
    Trace,
    Debug,
    Info,
    Warning,
    Error,
    Fatal,
}

/// Declares the settings, and collects them. The comment on each is the line of the documentation.
macro_rules! table {
    ($($(#[doc = $doc:literal])+ $id:ident: $kind:ty = $name:literal, $value:expr, $whose:ident;)+) => {
        $($(#[doc = $doc])+ pub static $id: Declaration<$kind> = Declaration {
            name: $name,
            kind: $value,
            whose: Whose::$whose,
            doc: concat!($($doc),+),
        };)+

        /// All settings, in the order of the documentation.
        pub static TABLE: &[&dyn Declared] = &[$(&$id),+];
    };
}

table! {
    /// rank of this process; set by the launcher
    RANK: Whole<u32> = "HOROVOD_RANK", Whole::any(0), Each;
    /// number of processes; set by the launcher
    SIZE: Whole<u32> = "HOROVOD_SIZE", Whole::any(1), Each;
    /// position among the processes of this host; set by the launcher
    LOCAL_RANK: Whole<u32> = "HOROVOD_LOCAL_RANK", Whole::any(0), Each;
    /// processes on this host; set by the launcher
    LOCAL_SIZE: Whole<u32> = "HOROVOD_LOCAL_SIZE", Whole::any(1), Each;
    /// position of this host among those that have this local rank; set by the launcher
    CROSS_RANK: Whole<u32> = "HOROVOD_CROSS_RANK", Whole::any(0), Each;
    /// number of hosts that have this local rank; set by the launcher
    CROSS_SIZE: Whole<u32> = "HOROVOD_CROSS_SIZE", Whole::any(1), Each;
    /// name of this host in messages; set by the launcher
    HOSTNAME: Optional<Text> = "HOROVOD_HOSTNAME", Optional::text("the system's"), Each;
    /// addresses of the launcher's rendezvous, `ip:port[,ip:port...]`; none means a single process
    RENDEZVOUS: Addresses = "HOROVOD_RENDEZVOUS", Addresses, Each;
    /// local socket of the host's agent, where a rank tells it that it cannot reach the launcher; set by the launcher
    AGENT_SOCKET: Optional<Text> = "HOROVOD_AGENT_SOCKET", Optional::text("none"), Each;
    /// 64 hex digits that authenticate every connection of the job
    JOB_KEY: Optional<Text> = "HOROVOD_JOB_KEY", Optional::text("none"), Each;
    /// file with the 64 hex digits instead; not for jobs of horovodrun
    JOB_KEY_FILE: Optional<Text> = "HOROVOD_JOB_KEY_FILE", Optional::text("none"), Each;
    /// host:port where rank 0 listens for the others; not for jobs of horovodrun
    RANK0_ADDRESS: Optional<Text> = "HOROVOD_RANK0_ADDRESS", Optional::text("what the scheduler says"), Each;
    /// folder that all ranks share, where rank 0 leaves its address and a key; not for jobs of horovodrun
    RENDEZVOUS_DIR: Optional<Text> = "HOROVOD_RENDEZVOUS_DIR", Optional::text("none"), Each;
    /// a sentence that turns authentication off, see running.md; not for jobs of horovodrun
    UNAUTHENTICATED_JOB: Optional<Text> = "HOROVOD_UNAUTHENTICATED_JOB", Optional::text("none"), Each;
    /// comma list of network interfaces to listen on and connect from between hosts
    GLOO_IFACE: List = "HOROVOD_GLOO_IFACE", List { empty: "all" }, Each;
    /// ports on which ranks, launcher and executors listen, `first-last`; enough for two of each rank of a host (clusters.md)
    PORT_RANGE: Optional<PortRange> = "HOROVOD_PORT_RANGE", Optional { kind: PortRange, unset: "of the system's choice" }, Each;
    /// seconds that init waits for the other ranks and their connections; an address that does not answer is given up
    /// after 6 s (failures.md)
    GLOO_TIMEOUT_SECONDS: Decimal = "HOROVOD_GLOO_TIMEOUT_SECONDS", Decimal::any(30.0), Each;
    /// seconds without a word after which a rank, or a connection, is given up and the job ends with an error
    HEARTBEAT_TIMEOUT_SECONDS: Decimal = "HOROVOD_HEARTBEAT_TIMEOUT_SECONDS", Decimal {
        default: 30.0,
        least: 1.0,
        most: 86_400.0,
        zero: Some("never"),
    }, Rank0;
    /// bytes of tensors that run as one collective; 0 disables fusion
    FUSION_THRESHOLD: Whole<u64> = "HOROVOD_FUSION_THRESHOLD", Whole::any(128 << 20), Rank0;
    /// milliseconds that the coordinator may hold back a response to batch more tensors
    CYCLE_TIME: Decimal = "HOROVOD_CYCLE_TIME", Decimal::any(0.0), Rank0;
    /// entries of the response cache; 0 disables it
    CACHE_CAPACITY: Whole<usize> = "HOROVOD_CACHE_CAPACITY", Whole::any(1024), Rank0;
    /// 1 keeps every grouped operation in a collective of its own
    DISABLE_GROUP_FUSION: Flag = "HOROVOD_DISABLE_GROUP_FUSION", Flag(false), Rank0;
    /// 1 turns the warnings about missing ranks off
    STALL_CHECK_DISABLE: Flag = "HOROVOD_STALL_CHECK_DISABLE", Flag(false), Rank0;
    /// seconds after which a tensor that some ranks have not submitted is reported
    STALL_CHECK_TIME_SECONDS: Decimal = "HOROVOD_STALL_CHECK_TIME_SECONDS", Decimal::any(60.0), Each;
    /// seconds after which such a tensor ends the job; 0 means never
    STALL_SHUTDOWN_TIME_SECONDS: Decimal = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", Decimal::any(0.0), Each;
    /// seconds of standstill after which rank 0 asks all concerned where they stand and reports; 0 means never
    STALL_DIAGNOSIS_SECONDS: Decimal = "HOROVOD_STALL_DIAGNOSIS_SECONDS", Decimal::any(10.0), Each;
    /// file to which rank 0 appends reports of standstills
    STALL_REPORT: Optional<Text> = "HOROVOD_STALL_REPORT", Optional::text("a temporary file with the script's name"), Each;
    /// 0 only reports when ranks wait for each other in a circle, instead of ending the job with an error
    DEADLOCK_ERROR: Flag = "HOROVOD_DEADLOCK_ERROR", Flag(true), Each;
    /// seconds after which a rank leaves the job if SIGTERM or SIGALRM arrived and the main thread waits in native code of a
    /// framework, so that the handler runs; 0 means never
    SIGNAL_GRACE_SECONDS: Decimal = "HOROVOD_SIGNAL_GRACE_SECONDS", Decimal::any(0.0), Each;
    /// every so many steps of a distributed optimizer the ranks compare checksums of its parameters; 0 means never
    CHECK_CONSISTENCY: Whole<u32> = "HOROVOD_CHECK_CONSISTENCY", Whole::any(0), Rank0;
    /// what happens if the ranks begin to train with different parameters, as without `broadcast_parameters`: rank 0 logs
    /// a warning (`warn`), the job ends with an error on every rank (`error`), or they are not compared (`off`); the same
    /// on all ranks
    CHECK_REPLICAS: Words<CheckReplicas> = "HOROVOD_CHECK_REPLICAS", Words {
        default: CheckReplicas::Warn,
        words: &[
            ("warn", CheckReplicas::Warn),
            ("error", CheckReplicas::Error),
            ("off", CheckReplicas::Off),
        ],
    }, Each;
    /// what carries out operations on GPU tensors: NCCL where all ranks have the same version of it, else host memory
    /// (`AUTO`), NCCL or an error (`NCCL`), or host memory (`HOST`, also as `MPI`); the same on all ranks
    GPU_OPERATIONS: Words<GpuOperations> = "HOROVOD_GPU_OPERATIONS", Words {
        default: GpuOperations::Auto,
        words: &[
            ("AUTO", GpuOperations::Auto),
            ("NCCL", GpuOperations::Nccl),
            ("HOST", GpuOperations::Host),
            ("MPI", GpuOperations::Mpi),
        ],
    }, Each;
    /// seconds that an operation may be on a GPU before the job ends with an error
    GPU_TIMEOUT: Decimal = "HOROVOD_GPU_TIMEOUT", Decimal {
        default: 600.0,
        least: 1.0,
        most: 86_400.0,
        zero: Some("never"),
    }, Each;
    /// 0 makes `synchronize` wait on the host until the GPU has finished, instead of making its stream wait
    ENABLE_ASYNC_COMPLETION: Flag = "HOROVOD_ENABLE_ASYNC_COMPLETION", Flag(true), Each;
    /// thread blocks that NCCL's kernels use at most; 0 leaves it to NCCL
    NCCL_MAX_CTAS: Whole<u32> = "HOROVOD_NCCL_MAX_CTAS", Whole::any(0), Each;
    /// file of CUDA's driver
    CUDA_LIBRARY: Optional<Text> = "HOROVOD_CUDA_LIBRARY", Optional::text("libcuda.so.1, searched for"), Each;
    /// file of NCCL
    NCCL_LIBRARY: Optional<Text> = "HOROVOD_NCCL_LIBRARY", Optional::text("libnccl.so.2, searched for"), Each;
    /// JAX on CPUs: operations in loops, branches and inner functions of a program keep the script's order, too; the same on
    /// all ranks
    JAX_ORDERED_CALLS: Flag = "HOROVOD_JAX_ORDERED_CALLS", Flag(false), Each;
    /// what a difference between the ranks is
    CONSISTENCY_ACTION: Words<ConsistencyAction> = "HOROVOD_CONSISTENCY_ACTION", Words {
        default: ConsistencyAction::Warn,
        words: &[
            ("warn", ConsistencyAction::Warn),
            ("error", ConsistencyAction::Error),
        ],
    }, Rank0;
    /// by how many Average divides while ranks have joined: all members of the process set, or only the contributors,
    /// which have not joined
    JOIN_AVERAGE: Words<JoinAverage> = "HOROVOD_JOIN_AVERAGE", Words {
        default: JoinAverage::Members,
        words: &[
            ("members", JoinAverage::Members),
            ("contributors", JoinAverage::Contributors),
        ],
    }, Rank0;
    /// 1 allows add_process_set and remove_process_set after init
    DYNAMIC_PROCESS_SETS: Flag = "HOROVOD_DYNAMIC_PROCESS_SETS", Flag(false), Each;
    /// 0 makes ranks of one host talk over TCP instead of shared memory
    SHM: Flag = "HOROVOD_SHM", Flag(true), Each;
    /// bytes of shared staging memory of each rank
    SHM_BYTES_PER_RANK: Whole<usize> =
        "HOROVOD_SHM_BYTES_PER_RANK", Whole::within(8 << 20, 4096, 64 << 20), Each;
    /// how allreduce is carried out (staged: one host only); see algorithms.md
    ALLREDUCE_ALGORITHM: Words<Algorithm> = "HOROVOD_ALLREDUCE_ALGORITHM", Words {
        default: Algorithm::Auto,
        words: &[
            ("auto", Algorithm::Auto),
            ("staged", Algorithm::Staged),
            ("exchange", Algorithm::Exchange),
            ("pairwise", Algorithm::Pairwise),
            ("ring", Algorithm::Ring),
        ],
    }, Rank0;
    /// 0 lets every rank of every host take part between hosts
    HIERARCHICAL_ALLREDUCE: Flag = "HOROVOD_HIERARCHICAL_ALLREDUCE", Flag(true), Rank0;
    /// 1 is the same as HOROVOD_HIERARCHICAL_ALLREDUCE=1
    TORUS_ALLREDUCE: Flag = "HOROVOD_TORUS_ALLREDUCE", Flag(false), Rank0;
    /// 0 lets every rank of every host take part between hosts
    HIERARCHICAL_ALLGATHER: Flag = "HOROVOD_HIERARCHICAL_ALLGATHER", Flag(true), Rank0;
    /// bytes that one rank stages for another at a time inside a host
    CHUNK_BYTES: Whole<usize> = "HOROVOD_CHUNK_BYTES", Whole::within(64 << 10, 1 << 10, SIZE_MAX), Rank0;
    /// bytes that pass between two hosts at a time
    WIRE_CHUNK_BYTES: Whole<usize> =
        "HOROVOD_WIRE_CHUNK_BYTES", Whole::within(128 << 10, 1 << 10, SIZE_MAX), Rank0;
    /// largest allreduce inside a host that every rank does by itself
    DIRECT_MAX_BYTES: Whole<usize> = "HOROVOD_DIRECT_MAX_BYTES", Whole::within(8 << 10, 0, SIZE_MAX), Rank0;
    /// bytes that a host may receive in an allreduce by exchange
    EXCHANGE_MAX_BYTES: Whole<usize> =
        "HOROVOD_EXCHANGE_MAX_BYTES", Whole::within(64 << 10, 0, SIZE_MAX), Rank0;
    /// hosts that send to each other in an allreduce; more form a ring
    PAIRWISE_MAX_HOSTS: Whole<usize> = "HOROVOD_PAIRWISE_MAX_HOSTS", Whole::within(64, 1, SIZE_MAX), Rank0;
    /// TCP connections for data between two ranks
    CONNECTIONS_PER_PEER: Whole<u8> = "HOROVOD_CONNECTIONS_PER_PEER", Whole::within(1, 1, 16), Rank0;
    /// congestion control of data over TCP: auto (the system's, but cubic for bbr where the round trip is under 4
    /// ms), system, or a name that the system allows
    TCP_CONGESTION: Text = "HOROVOD_TCP_CONGESTION", Text("auto"), Each;
    /// ranks of its host, and as many of others, that a rank listens to in the negotiation; larger jobs negotiate
    /// through a tree, see scaling.md
    CONTROL_FAN_OUT: Whole<u32> = "HOROVOD_CONTROL_FAN_OUT", Whole::within(16, 2, 1 << 16), Rank0;
    /// 0 leaves out the checksums (CRC32C) of what travels in clear between hosts
    DATA_CHECKSUM: Flag = "HOROVOD_DATA_CHECKSUM", Flag(true), Rank0;
    /// 1 encrypts the data that travels between hosts
    ENCRYPT: Flag = "HOROVOD_ENCRYPT", Flag(false), Each;
    /// 1 tries settings out while the job runs and keeps what is clearly faster
    AUTOTUNE: Flag = "HOROVOD_AUTOTUNE", Flag(false), Rank0;
    /// file that rank 0 writes its scores to, as CSV
    AUTOTUNE_LOG: Optional<Text> = "HOROVOD_AUTOTUNE_LOG", Optional::text("none"), Each;
    /// rounds of five samples that autotuning throws away at the start
    AUTOTUNE_WARMUP_SAMPLES: Whole<u32> = "HOROVOD_AUTOTUNE_WARMUP_SAMPLES", Whole::any(3), Each;
    /// training steps that autotuning measures at a time
    AUTOTUNE_STEPS_PER_SAMPLE: Whole<u32> = "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", Whole::from(10, 1), Each;
    /// settings that autotuning tries, beside those it begins with
    AUTOTUNE_BAYES_OPT_MAX_SAMPLES: Whole<u32> =
        "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", Whole::any(20), Each;
    /// noise of autotuning's scores as a share of their spread
    AUTOTUNE_GAUSSIAN_PROCESS_NOISE: Optional<Decimal> = "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", Optional {
        kind: Decimal { default: 0.0, least: 0.0, most: 1.0, zero: None },
        unset: "measured",
    }, Each;
    /// least severe messages that are logged; an unknown word means WARNING
    LOG_LEVEL: Words<LogLevel> = "HOROVOD_LOG_LEVEL", Words {
        default: LogLevel::Warning,
        words: &[
            ("TRACE", LogLevel::Trace),
            ("DEBUG", LogLevel::Debug),
            ("INFO", LogLevel::Info),
            ("WARNING", LogLevel::Warning),
            ("ERROR", LogLevel::Error),
            ("FATAL", LogLevel::Fatal),
        ],
    }, Each;
    /// 1 leaves the time out of log lines
    LOG_HIDE_TIME: Flag = "HOROVOD_LOG_HIDE_TIME", Flag(false), Each;
    /// 1 measures the job, for `hvd.stats()` and `horovodrun --status`; a port or a file for figures implies it, see watching.md
    METRICS: Flag = "HOROVOD_METRICS", Flag(false), Each;
    /// port where rank 0 shows the job's figures, as a page and as text for Prometheus; 0 means any free one
    METRICS_PORT: Optional<Whole<u16>> =
        "HOROVOD_METRICS_PORT", Optional { kind: Whole::any(0), unset: "none" }, Rank0;
    /// address where rank 0 listens on that port; 0.0.0.0 lets other hosts in, without encryption
    METRICS_ADDRESS: Text = "HOROVOD_METRICS_ADDRESS", Text("127.0.0.1"), Rank0;
    /// secret in the path of the page and the text: at least 16 letters, digits, `-` or `_`
    METRICS_TOKEN: Optional<Text> = "HOROVOD_METRICS_TOKEN", Optional::text("a random one"), Rank0;
    /// file that rank 0 writes the figures to every 5 seconds, for the textfile collector of node_exporter
    METRICS_TEXTFILE: Optional<Text> = "HOROVOD_METRICS_TEXTFILE", Optional::text("none"), Rank0;
    /// when rank 0 prints a summary at the end of a Python script: after measured jobs of at least 10 seconds, or always, which measures the job
    SUMMARY: Words<SummaryWhen> = "HOROVOD_SUMMARY", Words {
        default: SummaryWhen::Auto,
        words: &[
            ("auto", SummaryWhen::Auto),
            ("always", SummaryWhen::Always),
            ("never", SummaryWhen::Never),
        ],
    }, Each;
    /// file that rank 0 writes a timeline of all ranks to; DYNAMIC: only between start_timeline and stop_timeline
    TIMELINE: Optional<Text> = "HOROVOD_TIMELINE", Optional::text("none"), Each;
    /// 1 marks each batch of answers of the coordinator in the timeline
    TIMELINE_MARK_CYCLES: Flag = "HOROVOD_TIMELINE_MARK_CYCLES", Flag(false), Each;
    /// set to 1 by the launcher of an elastic job
    ELASTIC: Flag = "HOROVOD_ELASTIC", Flag(false), Each;
    /// number of this process in an elastic job; set by the launcher
    ELASTIC_WORKER: Optional<Whole<u32>> =
        "HOROVOD_ELASTIC_WORKER", Optional { kind: Whole::any(0), unset: "none" }, Each;
    /// seconds that an elastic job waits for enough processes, and for those that do not come out of a lost round
    ELASTIC_TIMEOUT: Whole<u64> = "HOROVOD_ELASTIC_TIMEOUT", Whole::any(600), Each;
    /// failures of one slot within a minute after which horovodrun leaves it alone for a while
    ELASTIC_SLOT_FAILURES: Whole<u32> = "HOROVOD_ELASTIC_SLOT_FAILURES", Whole::any(3), Each;
}

/// One line of the settings table, as users read it.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// Environment variable.
    pub name: &'static str,
    /// Default as shown to users.
    pub default: &'static str,
    /// Effect of the setting in one line: units, limits and whose value counts included.
    pub doc: &'static str,
}

/// All settings that the runtime reads. Identity and rendezvous are set by the launcher.
pub static SETTINGS: LazyLock<Vec<Setting>> = LazyLock::new(|| {
    let rows = TABLE.iter().map(|declared| Setting {
        name: declared.name(),
        // Once per process, so that a row is plain data.
        default: declared.default_text().leak(),
        doc: declared.description().leak(),
    });
    rows.collect()
});

/// The setting of this name.
pub fn find(name: &str) -> Option<&'static dyn Declared> {
    TABLE
        .iter()
        .copied()
        .find(|declared| declared.name() == name)
}
