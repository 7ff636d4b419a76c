//! Every `HOROVOD_*` setting of the runtime in one table: its default and what it does.

use super::Environment;

/// One line of the settings table: what `docs/settings.md` and the "unknown setting" warning are made from.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// Environment variable.
    pub name: &'static str,
    /// Default as shown to users.
    pub default: &'static str,
    /// What it does, one line, units included.
    pub doc: &'static str,
}

/// All settings the runtime reads. Identity and rendezvous are set by the launcher.
pub const SETTINGS: &[Setting] = &[
    s(
        "HOROVOD_RANK",
        "0",
        "rank of this process; set by the launcher",
    ),
    s(
        "HOROVOD_SIZE",
        "1",
        "number of processes; set by the launcher",
    ),
    s(
        "HOROVOD_LOCAL_RANK",
        "0",
        "position among the processes of this host; set by the launcher",
    ),
    s(
        "HOROVOD_LOCAL_SIZE",
        "1",
        "processes on this host; set by the launcher",
    ),
    s(
        "HOROVOD_CROSS_RANK",
        "0",
        "position of this host among those that have this local rank; set by the launcher",
    ),
    s(
        "HOROVOD_CROSS_SIZE",
        "1",
        "number of hosts that have this local rank; set by the launcher",
    ),
    s(
        "HOROVOD_HOSTNAME",
        "the system's",
        "name of this host in messages; set by the launcher",
    ),
    s(
        "HOROVOD_RENDEZVOUS",
        "none",
        "addresses of the launcher's rendezvous, `ip:port[,ip:port...]`; none means a single process",
    ),
    s(
        "HOROVOD_JOB_KEY",
        "none",
        "64 hex digits that authenticate every connection of the job",
    ),
    s(
        "HOROVOD_JOB_KEY_FILE",
        "none",
        "file with the 64 hex digits instead; not for jobs of horovodrun",
    ),
    s(
        "HOROVOD_RANK0_ADDRESS",
        "what the scheduler says",
        "host:port where rank 0 listens for the others; not for jobs of horovodrun",
    ),
    s(
        "HOROVOD_RENDEZVOUS_DIR",
        "none",
        "folder that all ranks share, where rank 0 leaves its address and a key; not for jobs of horovodrun",
    ),
    s(
        "HOROVOD_UNAUTHENTICATED_JOB",
        "none",
        "a sentence that turns authentication off, see running.md; not for jobs of horovodrun",
    ),
    s(
        "HOROVOD_GLOO_IFACE",
        "all",
        "comma list of network interfaces to listen on and connect from between hosts",
    ),
    s(
        "HOROVOD_GLOO_TIMEOUT_SECONDS",
        "30",
        "seconds that init waits for the other ranks and their connections",
    ),
    s(
        "HOROVOD_HEARTBEAT_TIMEOUT_SECONDS",
        "30",
        "seconds without a word after which a rank, or a connection, is given up and the job ends with an error; 0 means never; rank 0's value counts",
    ),
    s(
        "HOROVOD_FUSION_THRESHOLD",
        "134217728",
        "bytes of tensors that run as one collective; 0 disables fusion; rank 0's value counts",
    ),
    s(
        "HOROVOD_CYCLE_TIME",
        "0",
        "milliseconds that the coordinator may hold back a response to batch more tensors; rank 0's value counts",
    ),
    s(
        "HOROVOD_CACHE_CAPACITY",
        "1024",
        "entries of the response cache; 0 disables it; rank 0's value counts",
    ),
    s(
        "HOROVOD_DISABLE_GROUP_FUSION",
        "0",
        "1 keeps every grouped operation in a collective of its own; rank 0's value counts",
    ),
    s(
        "HOROVOD_STALL_CHECK_DISABLE",
        "0",
        "1 turns the warnings about missing ranks off; rank 0's value counts",
    ),
    s(
        "HOROVOD_STALL_CHECK_TIME_SECONDS",
        "60",
        "seconds after which a tensor that some ranks have not submitted is reported",
    ),
    s(
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        "0",
        "seconds after which such a tensor ends the job; 0 means never",
    ),
    s(
        "HOROVOD_STALL_DIAGNOSIS_SECONDS",
        "10",
        "seconds of standstill after which rank 0 asks all concerned where they stand and reports; 0 means never",
    ),
    s(
        "HOROVOD_STALL_REPORT",
        "a new temporary file",
        "file to which rank 0 appends reports of standstills",
    ),
    s(
        "HOROVOD_DEADLOCK_ERROR",
        "1",
        "0 only reports when ranks wait for each other in a circle, instead of ending the job with an error",
    ),
    s(
        "HOROVOD_CHECK_CONSISTENCY",
        "0",
        "every so many steps of a distributed optimizer the ranks compare checksums of its parameters; 0 means never; rank 0's value counts",
    ),
    s(
        "HOROVOD_CONSISTENCY_ACTION",
        "warn",
        "what a difference between the ranks is: warn or error; rank 0's value counts",
    ),
    s(
        "HOROVOD_JOIN_AVERAGE",
        "members",
        "by what Average divides while ranks have joined: members (all of the process set) or contributors (those that have not); rank 0's value counts",
    ),
    s(
        "HOROVOD_DYNAMIC_PROCESS_SETS",
        "0",
        "1 allows add_process_set and remove_process_set after init",
    ),
    s(
        "HOROVOD_SHM",
        "1",
        "0 makes ranks of one host talk over TCP instead of shared memory",
    ),
    s(
        "HOROVOD_SHM_BYTES_PER_RANK",
        "8388608",
        "bytes of shared staging memory of each rank, at most 67108864",
    ),
    s(
        "HOROVOD_ALLREDUCE_ALGORITHM",
        "auto",
        "auto, staged (one host), exchange, pairwise or ring; see algorithms.md; rank 0's value counts",
    ),
    s(
        "HOROVOD_HIERARCHICAL_ALLREDUCE",
        "1",
        "0 lets every rank of every host take part between hosts; rank 0's value counts",
    ),
    s(
        "HOROVOD_TORUS_ALLREDUCE",
        "0",
        "1 is the same as HOROVOD_HIERARCHICAL_ALLREDUCE=1; rank 0's value counts",
    ),
    s(
        "HOROVOD_HIERARCHICAL_ALLGATHER",
        "1",
        "0 lets every rank of every host take part between hosts; rank 0's value counts",
    ),
    s(
        "HOROVOD_CHUNK_BYTES",
        "65536",
        "bytes that one rank stages for another at a time inside a host; rank 0's value counts",
    ),
    s(
        "HOROVOD_WIRE_CHUNK_BYTES",
        "131072",
        "bytes that pass between two hosts at a time; rank 0's value counts",
    ),
    s(
        "HOROVOD_DIRECT_MAX_BYTES",
        "8192",
        "largest allreduce inside a host that every rank does by itself; rank 0's value counts",
    ),
    s(
        "HOROVOD_EXCHANGE_MAX_BYTES",
        "65536",
        "bytes that a host may receive in an allreduce by exchange; rank 0's value counts",
    ),
    s(
        "HOROVOD_PAIRWISE_MAX_HOSTS",
        "64",
        "hosts that send to each other in an allreduce; more form a ring; rank 0's value counts",
    ),
    s(
        "HOROVOD_CONNECTIONS_PER_PEER",
        "1",
        "TCP connections for data between two ranks, 1 to 16; rank 0's value counts",
    ),
    s(
        "HOROVOD_TCP_CONGESTION",
        "auto",
        "congestion control of data over TCP: auto (the system's, but cubic for bbr where the round trip is under 4 ms), system, or a name that the system allows",
    ),
    s(
        "HOROVOD_CONTROL_FAN_OUT",
        "16",
        "ranks of its host, and as many of others, that a rank listens to in the negotiation, 2 to 65536; larger jobs negotiate through a tree; see scaling.md; rank 0's value counts",
    ),
    s(
        "HOROVOD_DATA_CHECKSUM",
        "1",
        "0 leaves out the checksums (CRC32C) of what travels in clear between hosts; rank 0's value counts",
    ),
    s(
        "HOROVOD_ENCRYPT",
        "0",
        "1 encrypts the data that travels between hosts",
    ),
    s(
        "HOROVOD_AUTOTUNE",
        "0",
        "1 tries settings out while the job runs and keeps what is clearly faster; rank 0's value counts",
    ),
    s(
        "HOROVOD_AUTOTUNE_LOG",
        "none",
        "file that rank 0 writes its scores to, as CSV",
    ),
    s(
        "HOROVOD_AUTOTUNE_WARMUP_SAMPLES",
        "3",
        "rounds of five samples that autotuning throws away at the start",
    ),
    s(
        "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE",
        "10",
        "training steps that autotuning measures at a time, at least 1",
    ),
    s(
        "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
        "20",
        "settings that autotuning tries, beside those it begins with",
    ),
    s(
        "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
        "measured",
        "noise of autotuning's scores as a share of their spread, 0 to 1",
    ),
    s(
        "HOROVOD_LOG_LEVEL",
        "WARNING",
        "trace, debug, info, warning, error or fatal; unknown means warning",
    ),
    s(
        "HOROVOD_LOG_HIDE_TIME",
        "0",
        "1 leaves the time out of log lines",
    ),
    s(
        "HOROVOD_TIMELINE",
        "none",
        "file that rank 0 writes a timeline of all ranks to; DYNAMIC: only between start_timeline and stop_timeline",
    ),
    s(
        "HOROVOD_TIMELINE_MARK_CYCLES",
        "0",
        "1 marks each batch of answers of the coordinator in the timeline",
    ),
    s(
        "HOROVOD_ELASTIC",
        "0",
        "set to 1 by the launcher of an elastic job",
    ),
    s(
        "HOROVOD_ELASTIC_WORKER",
        "none",
        "number of this process in an elastic job; set by the launcher",
    ),
    s(
        "HOROVOD_ELASTIC_TIMEOUT",
        "600",
        "seconds that an elastic job waits for enough processes, and for those that do not come out of a lost round",
    ),
    s(
        "HOROVOD_ELASTIC_SLOT_FAILURES",
        "3",
        "failures of one slot within a minute after which horovodrun leaves it alone for a while",
    ),
];

/// Names that other programs of the family or the original read: known, so not worth a warning.
const KNOWN_ELSEWHERE: &[&str] = &[
    "HOROVOD_CONTROLLER",
    "HOROVOD_CPU_OPERATIONS",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR",
    "HOROVOD_GLOO_RENDEZVOUS_PORT",
    "HOROVOD_START_TIMEOUT",
    "HOROVOD_NUM_NCCL_STREAMS",
    "HOROVOD_THREAD_AFFINITY",
];

/// Prefixes of build-time variables of the original: harmless here; `horovodrun --check-build` mentions them.
const KNOWN_PREFIXES: &[&str] = &[
    "HOROVOD_WITH_",
    "HOROVOD_WITHOUT_",
    "HOROVOD_GPU",
    "HOROVOD_ALLOW_",
    "HOROVOD_CUDA_",
    "HOROVOD_ROCM_",
    "HOROVOD_NCCL_",
    "HOROVOD_NVTX_",
    "HOROVOD_BUILD_",
    "HOROVOD_CMAKE",
    "HOROVOD_DEBUG",
    "HOROVOD_SKIP_",
    "HOROVOD_LOCAL_VERSION",
    "HOROVOD_SPARK_",
    "HOROVOD_MPI_",
];

const fn s(name: &'static str, default: &'static str, doc: &'static str) -> Setting {
    Setting { name, default, doc }
}

/// Names of set `HOROVOD_*` variables that nothing reads: most often a misspelling.
pub fn unknown_settings(env: &dyn Environment) -> Vec<String> {
    let mut names: Vec<String> = env
        .names()
        .into_iter()
        .filter(|n| n.starts_with("HOROVOD_"))
        .filter(|n| !SETTINGS.iter().any(|s| s.name == n))
        .filter(|n| !KNOWN_ELSEWHERE.contains(&n.as_str()))
        .filter(|n| !KNOWN_PREFIXES.iter().any(|p| n.starts_with(p)))
        .collect();
    names.sort();
    names
}
