//! The scheduler that started this process, if not `horovodrun`: one table of the variables that schedulers set.
//!
//! This crate only finds the rank of this process, and the scheduler's facts about the others. The module `bootstrap` of
//! `horovod-engine` decides how the ranks then find each other, and with which key.
//!
//! An internal part of horovod-rs: programs use the crate `horovod`, and this interface may change in any version.
#![forbid(unsafe_code)]

mod hints;
mod reader;
mod sagemaker;

use horovod_settings::{self as settings, Environment};

use reader::Reader;

/// Variables of a scheduler that make no job; the text names them and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct NoJob(String);

impl From<settings::Refused> for NoJob {
    fn from(refused: settings::Refused) -> Self {
        Self(refused.to_string())
    }
}

/// One way to be started.
struct Scheduler {
    name: &'static str,
    /// Without these it is another scheduler, or none.
    needs: &'static [&'static str],
    /// Its names are common words, which scripts set, too: half of them or a size of 1 says nothing.
    is_common: bool,
    rank: &'static str,
    size: &'static str,
    /// Ranks on this host.
    local_size: LocalSize,
    /// All of these together tell this job from any other on the same host.
    job: &'static [&'static str],
    /// A process that all ranks of this host descend from, if the variables do not suffice for that.
    ancestor: Option<&'static str>,
    /// A random value that only ranks of this job get.
    secret: Option<&'static str>,
    /// Where rank 0 runs.
    rank0: Rank0,
    /// Whether an MPI library in its processes finds the others by itself.
    starts_mpi: bool,
}

enum LocalSize {
    Unknown,
    Variable(&'static str),
    /// A number of nodes: known only if that is one.
    AllIfOneNode(&'static str),
}

enum Rank0 {
    Unknown,
    /// Host and port of a service of the scheduler's own; the next port is taken.
    BesideService(&'static str, &'static str),
    /// The first of Slurm's list of nodes; the port follows from the job's number.
    FirstNode {
        nodes: &'static str,
        job: &'static str,
        step: &'static str,
    },
}

/// In the order in which they are looked for: what may be started inside another comes first.
const SCHEDULERS: &[Scheduler] = &[
    Scheduler {
        name: "torchrun",
        needs: &["LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"],
        is_common: false,
        rank: "RANK",
        size: "WORLD_SIZE",
        local_size: LocalSize::Variable("LOCAL_WORLD_SIZE"),
        job: &[
            "MASTER_ADDR",
            "MASTER_PORT",
            "TORCHELASTIC_RUN_ID",
            "TORCHELASTIC_RESTART_COUNT",
        ],
        // TORCHELASTIC_RUN_ID is chosen by the user, on a command line.
        ancestor: None,
        secret: None,
        rank0: Rank0::BesideService("MASTER_ADDR", "MASTER_PORT"),
        starts_mpi: false,
    },
    Scheduler {
        name: "Open MPI",
        needs: &[],
        is_common: false,
        rank: "OMPI_COMM_WORLD_RANK",
        size: "OMPI_COMM_WORLD_SIZE",
        local_size: LocalSize::Variable("OMPI_COMM_WORLD_LOCAL_SIZE"),
        job: &["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"],
        ancestor: None,
        // 128 bits from the system's randomness, made by mpirun for its ranks (version 4; 5 has none).
        secret: Some("OMPI_MCA_orte_precondition_transports"),
        rank0: Rank0::Unknown,
        starts_mpi: true,
    },
    Scheduler {
        name: "jsrun",
        needs: &[],
        is_common: false,
        rank: "JSM_NAMESPACE_RANK",
        size: "JSM_NAMESPACE_SIZE",
        local_size: LocalSize::Variable("JSM_NAMESPACE_LOCAL_SIZE"),
        job: &["LSB_JOBID", "JSM_NAMESPACE_ID", "PMIX_NAMESPACE"],
        ancestor: None,
        secret: None,
        rank0: Rank0::Unknown,
        starts_mpi: true,
    },
    Scheduler {
        name: "MPICH or another MPI with PMI",
        needs: &[],
        is_common: false,
        rank: "PMI_RANK",
        size: "PMI_SIZE",
        local_size: LocalSize::Variable("MPI_LOCALNRANKS"),
        job: &["SLURM_JOB_ID", "SLURM_STEP_ID", "FLUX_JOB_ID"],
        ancestor: Some("hydra_pmi_proxy"),
        secret: None,
        rank0: Rank0::Unknown,
        starts_mpi: true,
    },
    Scheduler {
        name: "MVAPICH2",
        needs: &[],
        is_common: false,
        rank: "MV2_COMM_WORLD_RANK",
        size: "MV2_COMM_WORLD_SIZE",
        local_size: LocalSize::Variable("MV2_COMM_WORLD_LOCAL_SIZE"),
        job: &["SLURM_JOB_ID", "SLURM_STEP_ID"],
        ancestor: Some("mpispawn"),
        secret: None,
        rank0: Rank0::Unknown,
        starts_mpi: true,
    },
    // Where the shell's PMI is off. With it, and with an MPI's own launcher inside, the row of PMI counts.
    Scheduler {
        name: "Flux",
        needs: &[],
        is_common: false,
        rank: "FLUX_TASK_RANK",
        size: "FLUX_JOB_SIZE",
        local_size: LocalSize::AllIfOneNode("FLUX_JOB_NNODES"),
        job: &["FLUX_JOB_ID"],
        ancestor: None,
        secret: None,
        rank0: Rank0::Unknown,
        starts_mpi: true,
    },
    // As operators of Kubernetes and scripts set them, one process per pod or per line. Local ranks follow from who
    // meets. The address of one rank may differ from that of the others (localhost), so it names no job.
    Scheduler {
        name: "a launcher of PyTorch's",
        needs: &[],
        is_common: true,
        rank: "RANK",
        size: "WORLD_SIZE",
        local_size: LocalSize::Unknown,
        job: &[],
        ancestor: None,
        secret: None,
        rank0: Rank0::BesideService("MASTER_ADDR", "MASTER_PORT"),
        starts_mpi: false,
    },
    Scheduler {
        name: "a launcher of JAX's",
        needs: &[],
        is_common: true,
        rank: "JAX_PROCESS_ID",
        size: "JAX_NUM_PROCESSES",
        local_size: LocalSize::Unknown,
        job: &[],
        ancestor: None,
        secret: None,
        rank0: Rank0::Unknown,
        starts_mpi: false,
    },
    Scheduler {
        name: "Slurm",
        needs: &["SLURM_STEP_ID"],
        is_common: false,
        rank: "SLURM_PROCID",
        // Of the step, set by srun only: a batch script itself is one process.
        size: "SLURM_STEP_NUM_TASKS",
        local_size: LocalSize::AllIfOneNode("SLURM_STEP_NUM_NODES"),
        job: &["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"],
        ancestor: None,
        secret: None,
        rank0: Rank0::FirstNode {
            nodes: "SLURM_STEP_NODELIST",
            job: "SLURM_JOB_ID",
            step: "SLURM_STEP_ID",
        },
        starts_mpi: true,
    },
    // These do not tell the size; see `hints` for what happens without it.
    Scheduler {
        name: "a launcher with PMIx",
        needs: &["HOROVOD_SIZE"],
        is_common: false,
        rank: "PMIX_RANK",
        size: "HOROVOD_SIZE",
        local_size: LocalSize::Unknown,
        job: &["PMIX_NAMESPACE"],
        ancestor: None,
        secret: None,
        rank0: Rank0::Unknown,
        starts_mpi: true,
    },
    Scheduler {
        name: "PALS",
        needs: &["HOROVOD_SIZE"],
        is_common: false,
        rank: "PALS_RANKID",
        size: "HOROVOD_SIZE",
        local_size: LocalSize::Unknown,
        job: &["PALS_APID"],
        ancestor: None,
        secret: None,
        rank0: Rank0::Unknown,
        starts_mpi: true,
    },
    Scheduler {
        name: "a Kubernetes indexed job",
        needs: &["HOROVOD_SIZE"],
        is_common: false,
        rank: "JOB_COMPLETION_INDEX",
        size: "HOROVOD_SIZE",
        local_size: LocalSize::Unknown,
        job: &[],
        ancestor: None,
        secret: None,
        rank0: Rank0::Unknown,
        starts_mpi: false,
    },
];

/// A scheduler's facts about this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Started {
    /// Name of the scheduler, for messages.
    pub by: &'static str,
    /// Its rank.
    pub rank: u32,
    /// Number of ranks.
    pub size: u32,
    /// Whether all ranks are known to run on this host.
    pub one_host: bool,
    /// Values that distinguish this job from others on this host, as far as variables do.
    pub job: Vec<String>,
    /// Name of a process above this one, whose process number completes `job`.
    pub ancestor: Option<&'static str>,
    /// A random value that only ranks of this job have.
    pub secret: Option<String>,
    /// Host and port where rank 0 can listen and be found.
    pub rank0: Option<(String, u16)>,
    /// The variable that tells the number of ranks.
    pub size_variable: &'static str,
    /// Whether an MPI library in its processes finds the others by itself.
    pub starts_mpi: bool,
}

/// Whether a scheduler started this process as one of several; `HOROVOD_RANK` and `HOROVOD_SIZE` count most.
///
/// A sign of more than one member ends in a job of that size or in an error: training alone, once per process, would go
/// unnoticed for long.
///
/// # Errors
/// The variables are incomplete, contradict each other, or tell of several members that cannot meet.
pub fn detect(env: &dyn Environment) -> Result<Option<Started>, NoJob> {
    let r = &Reader { env };
    let has_size = settings::SIZE.is_set(r.env);
    if has_size && (settings::RANK.is_set(r.env) || settings::SIZE.read(r.env)? == 1) {
        return Ok(None);
    }
    for scheduler in SCHEDULERS {
        if let Some(started) = scheduler.read(r)? {
            return Ok(Some(started));
        }
    }
    if let Some(started) = sagemaker::started(r) {
        return Ok(Some(started));
    }
    if let Some(address) = settings::RANK0_ADDRESS.read(r.env)? {
        return Err(NoJob(format!(
            "HOROVOD_RANK0_ADDRESS={address} is set, so this is to be one of several ranks, but nothing says which of \
             how many: set HOROVOD_RANK and HOROVOD_SIZE (in a Kubernetes indexed job HOROVOD_SIZE, to its \
             completions), or HOROVOD_SIZE=1 to train alone"
        )));
    }
    match hints::of_several(r) {
        Some(why) => Err(NoJob(why)),
        None => Ok(None),
    }
}

impl Scheduler {
    fn read(&self, r: &Reader<'_>) -> Result<Option<Started>, NoJob> {
        if self.needs.iter().any(|name| r.text(name).is_none()) {
            return Ok(None);
        }
        let size_value = r.text(self.size).and_then(|text| text.trim().parse().ok());
        if self.is_common && size_value.is_none_or(|size: u32| size <= 1) {
            return Ok(None);
        }
        let (rank, size) = match (r.text(self.rank), r.text(self.size)) {
            (None, None) => return Ok(None),
            // Slurm's batch scripts and Kubernetes' other pods have one of the two.
            (Some(_), None) | (None, Some(_)) if !self.is_strict() => return Ok(None),
            (Some(_), Some(_)) => (r.number(self.rank, 0u32)?, r.number(self.size, 1u32)?),
            (rank, _) => {
                let (set, unset) = match rank {
                    Some(_) => (self.rank, self.size),
                    None => (self.size, self.rank),
                };
                return Err(NoJob(format!(
                    "{set} is set but {unset} is not: this looks like {}, but is incomplete; set HOROVOD_RANK and \
                     HOROVOD_SIZE in every process, or HOROVOD_SIZE=1 to train alone",
                    self.name
                )));
            }
        };
        if size == 0 || rank >= size {
            return Err(NoJob(format!(
                "{}={rank} and {}={size} (from {}): the rank must be below the size",
                self.rank, self.size, self.name
            )));
        }
        let one_host = match self.local_size {
            LocalSize::Unknown => false,
            LocalSize::Variable(name) => r.number(name, 0u32)? == size,
            LocalSize::AllIfOneNode(name) => r.number(name, 0u32)? == 1,
        };
        let job = self.job.iter().filter_map(|name| r.text(name)).collect();
        Ok(Some(Started {
            by: self.name,
            rank,
            size,
            one_host,
            job,
            ancestor: self.ancestor,
            secret: self.secret.and_then(|name| r.text(name)),
            rank0: self.rank0.read(r)?,
            size_variable: self.size,
            starts_mpi: self.starts_mpi,
        }))
    }

    /// Whether half of rank and size is a mistake.
    fn is_strict(&self) -> bool {
        self.needs.is_empty() && !self.is_common
    }
}

impl Rank0 {
    fn read(&self, r: &Reader<'_>) -> Result<Option<(String, u16)>, NoJob> {
        match self {
            Self::Unknown => Ok(None),
            Self::BesideService(host, port) => {
                let port: u16 = r.number(port, 0)?;
                Ok(r.text(host)
                    .zip(port.checked_add(1).filter(|port| *port > 1)))
            }
            Self::FirstNode { nodes, job, step } => {
                let Some(first) = r.text(nodes).as_deref().and_then(first_node) else {
                    return Ok(None);
                };
                let number = r.number(job, 0u32)?.wrapping_mul(31) ^ r.number(step, 0u32)?;
                // Above the usual services, below the ports that the system gives to connections.
                let port = 20_000 + (number % 12_000) as u16;
                Ok(Some((first, port)))
            }
        }
    }
}

/// A hint for an element of a job array whose ranks were given by hand and do not make a job, to be appended to an error.
pub fn job_array(env: &dyn Environment) -> Option<String> {
    hints::job_array(&Reader { env })
}

/// `n03` of `n[03-05,9],other`.
fn first_node(list: &str) -> Option<String> {
    let end = list.find([',', '[']).unwrap_or(list.len());
    let (name, rest) = list.split_at(end);
    let number = match rest.strip_prefix('[') {
        Some(ranges) => ranges.split([',', '-', ']']).next()?,
        None => "",
    };
    let after = rest.split_once(']').map_or("", |(_, after)| after);
    let suffix = after.split(',').next().unwrap_or_default();
    let node = format!("{name}{number}{suffix}");
    (!node.is_empty()).then_some(node)
}

#[cfg(test)]
mod tests;
