//! The scheduler that started this process, if not `horovodrun`: one table of the variables that schedulers set.
//!
//! What is read here only says who is who, and what the scheduler knows of the others. How the ranks then find
//! each other, and with which key, is decided in `crate::bootstrap`.

use horovod_settings as settings;

use super::hints;
use super::reader::Reader;
use crate::error::Error;

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
    },
];

/// What a scheduler says of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Started {
    /// Who started it, for messages.
    pub by: &'static str,
    /// Its rank.
    pub rank: u32,
    /// Number of ranks.
    pub size: u32,
    /// Whether all ranks are known to run on this host.
    pub one_host: bool,
    /// What tells this job from others on this host, as far as variables do.
    pub job: Vec<String>,
    /// Name of a process above this one whose number completes that.
    pub ancestor: Option<&'static str>,
    /// A random value that only ranks of this job have.
    pub secret: Option<String>,
    /// Host and port where rank 0 can listen and be found.
    pub rank0: Option<(String, u16)>,
}

/// Whether a scheduler started this process as one of several; `HOROVOD_RANK` and `HOROVOD_SIZE` count most.
///
/// Whatever tells of more than one member ends in a job of that size or in an error: training alone, once per
/// process, would go unnoticed for long.
pub(super) fn detect(r: &Reader<'_>) -> Result<Option<Started>, Error> {
    let told_size = settings::SIZE.is_set(r.env);
    if told_size && (settings::RANK.is_set(r.env) || settings::SIZE.read(r.env)? == 1) {
        return Ok(None);
    }
    for scheduler in SCHEDULERS {
        if let Some(started) = scheduler.read(r)? {
            return Ok(Some(started));
        }
    }
    if let Some(address) = settings::RANK0_ADDRESS.read(r.env)? {
        return Err(Error::Init(format!(
            "HOROVOD_RANK0_ADDRESS={address} is set, so this is to be one of several ranks, but nothing says which of \
             how many: set HOROVOD_RANK and HOROVOD_SIZE (in a Kubernetes indexed job HOROVOD_SIZE, to its \
             completions), or HOROVOD_SIZE=1 to train alone"
        )));
    }
    match hints::of_several(r) {
        Some(why) => Err(Error::Init(why)),
        None => Ok(None),
    }
}

impl Scheduler {
    fn read(&self, r: &Reader<'_>) -> Result<Option<Started>, Error> {
        if self.needs.iter().any(|name| r.text(name).is_none()) {
            return Ok(None);
        }
        let size_told = r.text(self.size).and_then(|text| text.trim().parse().ok());
        if self.is_common && size_told.is_none_or(|size: u32| size <= 1) {
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
                return Err(Error::Init(format!(
                    "{set} is set but {unset} is not: this looks like {}, but is incomplete; set HOROVOD_RANK and \
                     HOROVOD_SIZE in every process, or HOROVOD_SIZE=1 to train alone",
                    self.name
                )));
            }
        };
        if size == 0 || rank >= size {
            return Err(Error::Init(format!(
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
        }))
    }

    /// Whether half of rank and size is a mistake.
    fn is_strict(&self) -> bool {
        self.needs.is_empty() && !self.is_common
    }
}

impl Rank0 {
    fn read(&self, r: &Reader<'_>) -> Result<Option<(String, u16)>, Error> {
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
mod tests {
    use super::super::tests::Map;
    use super::*;

    fn found(vars: &[(&'static str, &'static str)]) -> Result<Option<Started>, Error> {
        let env = Map(vars.to_vec());
        detect(&Reader { env: &env })
    }

    #[track_caller]
    fn check(
        vars: &[(&'static str, &'static str)],
        by: &str,
        rank: u32,
        size: u32,
        one_host: bool,
    ) {
        let started = found(vars).unwrap().unwrap();
        assert!(started.by.contains(by), "{started:?}");
        assert_eq!(
            (started.rank, started.size, started.one_host),
            (rank, size, one_host)
        );
    }

    const TORCHRUN: [(&str, &str); 6] = [
        ("RANK", "2"),
        ("WORLD_SIZE", "4"),
        ("LOCAL_RANK", "0"),
        ("LOCAL_WORLD_SIZE", "2"),
        ("MASTER_ADDR", "n1"),
        ("MASTER_PORT", "29500"),
    ];
    const OPEN_MPI: [(&str, &str); 5] = [
        ("OMPI_COMM_WORLD_RANK", "1"),
        ("OMPI_COMM_WORLD_SIZE", "3"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "3"),
        ("PMIX_NAMESPACE", "77"),
        ("OMPI_MCA_orte_precondition_transports", "a-b"),
    ];
    const SLURM: [(&str, &str); 6] = [
        ("SLURM_PROCID", "5"),
        ("SLURM_STEP_NUM_TASKS", "8"),
        ("SLURM_STEP_NUM_NODES", "2"),
        ("SLURM_STEP_NODELIST", "gpu[07-08]"),
        ("SLURM_JOB_ID", "41"),
        ("SLURM_STEP_ID", "0"),
    ];

    #[test]
    fn each_scheduler_is_known_by_its_variables() {
        check(&TORCHRUN, "torchrun", 2, 4, false);
        check(&OPEN_MPI, "Open MPI", 1, 3, true);
        check(&SLURM, "Slurm", 5, 8, false);
        check(
            &[
                ("PMI_RANK", "0"),
                ("PMI_SIZE", "2"),
                ("MPI_LOCALNRANKS", "2"),
            ],
            "MPICH",
            0,
            2,
            true,
        );
        check(
            &[
                ("JSM_NAMESPACE_RANK", "3"),
                ("JSM_NAMESPACE_SIZE", "4"),
                ("JSM_NAMESPACE_LOCAL_SIZE", "2"),
            ],
            "jsrun",
            3,
            4,
            false,
        );
        check(
            &[("JOB_COMPLETION_INDEX", "1"), ("HOROVOD_SIZE", "2")],
            "Kubernetes",
            1,
            2,
            false,
        );
    }

    #[test]
    fn what_is_started_inside_counts() {
        // torchrun under srun or mpirun, one per node; mpirun under a batch job's step.
        let all = [&TORCHRUN[..], &SLURM[..], &OPEN_MPI[..]].concat();
        check(&all, "torchrun", 2, 4, false);
        let mpi = [&SLURM[..], &OPEN_MPI[..]].concat();
        check(&mpi, "Open MPI", 1, 3, true);
        let own = [&all[..], &[("HOROVOD_RANK", "0"), ("HOROVOD_SIZE", "1")]].concat();
        assert_eq!(found(&own), Ok(None));
    }

    #[test]
    fn a_single_process_is_no_job() {
        assert_eq!(found(&[]), Ok(None));
        // A batch script of Slurm, and an allocation's shell.
        assert_eq!(
            found(&[
                ("SLURM_PROCID", "0"),
                ("SLURM_NTASKS", "8"),
                ("SLURM_STEP_ID", "0")
            ]),
            Ok(None)
        );
        assert_eq!(
            found(&[("SLURM_NTASKS", "8"), ("SLURM_NNODES", "2")]),
            Ok(None)
        );
        // One of an array job; a script that says that it is alone, in torch.distributed's words.
        assert_eq!(
            found(&[
                ("SLURM_ARRAY_TASK_ID", "3"),
                ("SLURM_ARRAY_TASK_COUNT", "9")
            ]),
            Ok(None)
        );
        assert_eq!(found(&[("RANK", "0"), ("WORLD_SIZE", "1")]), Ok(None));
        assert_eq!(found(&[("RANK", "captain")]), Ok(None));
        // What launchers set for a single process, too.
        for alone in [
            ("LOCAL_RANK", "0"),
            ("LOCAL_WORLD_SIZE", "1"),
            ("NODE_RANK", "0"),
            ("PET_NNODES", "1"),
            ("PET_NNODES", "1:1"),
            ("JAX_NUM_PROCESSES", "1"),
            ("VC_TASK_INDEX", "0"),
            ("SM_HOSTS", r#"["algo-1"]"#),
        ] {
            assert_eq!(found(&[alone]), Ok(None), "{alone:?}");
        }
    }

    #[test]
    fn an_operators_rank_and_size_are_a_job() {
        let pod = [
            ("RANK", "2"),
            ("WORLD_SIZE", "4"),
            ("MASTER_ADDR", "train-master-0"),
            ("MASTER_PORT", "23456"),
        ];
        check(&pod, "PyTorch", 2, 4, false);
        let started = found(&pod).unwrap().unwrap();
        assert_eq!(started.rank0, Some(("train-master-0".to_owned(), 23_457)));
        // Without a rendezvous point it is a job all the same: init says what to set.
        check(&pod[..2], "PyTorch", 2, 4, false);
        assert_eq!(found(&pod[..2]).unwrap().unwrap().rank0, None);
        // What is started inside such a pod counts; a size that a script set for all does not hide Slurm's rank.
        let inside = [&pod[..], &OPEN_MPI[..]].concat();
        check(&inside, "Open MPI", 1, 3, true);
        for common in [("WORLD_SIZE", "8"), ("WORLD_SIZE", "1")] {
            let step = [&SLURM[..], &[common]].concat();
            check(&step, "Slurm", 5, 8, false);
        }
        let step = [&SLURM[..], &[("RANK", "0"), ("WORLD_SIZE", "1")]].concat();
        check(&step, "Slurm", 5, 8, false);
    }

    #[test]
    fn other_launchers_of_several_processes() {
        let mvapich = [
            ("MV2_COMM_WORLD_RANK", "1"),
            ("MV2_COMM_WORLD_SIZE", "2"),
            ("MV2_COMM_WORLD_LOCAL_SIZE", "2"),
        ];
        check(&mvapich, "MVAPICH2", 1, 2, true);
        let flux = [
            ("FLUX_TASK_RANK", "3"),
            ("FLUX_JOB_SIZE", "4"),
            ("FLUX_JOB_NNODES", "1"),
            ("FLUX_JOB_ID", "f1"),
        ];
        check(&flux, "Flux", 3, 4, true);
        for rank in ["PMIX_RANK", "PALS_RANKID"] {
            check(&[(rank, "1"), ("HOROVOD_SIZE", "2")], "P", 1, 2, false);
        }
    }

    #[test]
    fn processes_of_a_jax_job() {
        let process = [
            ("JAX_PROCESS_ID", "1"),
            ("JAX_NUM_PROCESSES", "2"),
            ("JAX_COORDINATOR_ADDRESS", "n1:1234"),
        ];
        check(&process, "JAX", 1, 2, false);
        let inside = [&process[..], &OPEN_MPI[..]].concat();
        check(&inside, "Open MPI", 1, 3, true);
    }

    #[test]
    fn a_size_of_1_means_alone_whatever_a_launcher_has_set() {
        for launcher in [
            &TORCHRUN[..],
            &OPEN_MPI[..],
            &SLURM[..],
            &[("JOB_COMPLETION_INDEX", "1")],
            &[("RANK", "1"), ("WORLD_SIZE", "2")],
            &[("PMIX_RANK", "1")],
        ] {
            let alone = [launcher, &[("HOROVOD_SIZE", "1")]].concat();
            assert_eq!(found(&alone), Ok(None), "{launcher:?}");
        }
    }

    #[test]
    fn what_tells_of_several_is_never_one_process_alone() {
        for (vars, missing) in [
            (&[("JOB_COMPLETION_INDEX", "0")][..], "HOROVOD_SIZE to"),
            (&[("PMIX_RANK", "0")], "HOROVOD_SIZE to"),
            (&[("PALS_RANKID", "3")], "HOROVOD_SIZE to"),
            (&[("WORLD_SIZE", "2")], "RANK"),
            (&[("RANK", "0")], "WORLD_SIZE"),
            (&[("RANK", "0"), ("MASTER_ADDR", "a")], "WORLD_SIZE"),
            (&[("SLURM_PROCID", "1")], "SLURM_STEP_NUM_TASKS"),
            (&[("SLURM_STEP_NUM_TASKS", "2")], "SLURM_PROCID"),
            (&[("PMI_RANK", "0")], "PMI_SIZE"),
            (&[("FLUX_JOB_SIZE", "2")], "FLUX_TASK_RANK"),
            (&[("MV2_COMM_WORLD_RANK", "0")], "MV2_COMM_WORLD_SIZE"),
            (&[("HOROVOD_RANK", "0")], "HOROVOD_SIZE to"),
            (&[("HOROVOD_LOCAL_SIZE", "2")], "HOROVOD_RANK and"),
            (&[("LOCAL_RANK", "1")], "RANK and WORLD_SIZE"),
            (&[("LOCAL_WORLD_SIZE", "2")], "RANK and WORLD_SIZE"),
            (&[("NODE_RANK", "1")], "RANK and WORLD_SIZE"),
            (&[("PET_NNODES", "2")], "torchrun"),
            (&[("PET_NNODES", "1:4"), ("PET_NODE_RANK", "0")], "torchrun"),
            (&[("PET_NODE_RANK", "1")], "torchrun"),
            (&[("JAX_NUM_PROCESSES", "2")], "JAX_PROCESS_ID"),
            (&[("JAX_PROCESS_ID", "0")], "JAX_NUM_PROCESSES"),
            (
                &[("DMLC_NUM_WORKER", "2"), ("DMLC_ROLE", "worker")],
                "HOROVOD_RANK and",
            ),
            (&[("VC_TASK_INDEX", "1")], "HOROVOD_RANK and"),
            (
                &[
                    ("SM_HOSTS", r#"["algo-1", "algo-2"]"#),
                    ("SM_CURRENT_HOST", "algo-2"),
                ],
                "HOROVOD_RANK=1",
            ),
        ] {
            let error = found(vars).unwrap_err().to_string();
            let (name, _) = vars[0];
            for text in [name, missing, "HOROVOD_SIZE=1"] {
                assert!(error.contains(text), "{text} in: {error}");
            }
        }
    }

    #[test]
    fn half_a_job_is_refused() {
        let error = found(&[("PMI_SIZE", "2")]).unwrap_err().to_string();
        assert!(
            error.contains("PMI_SIZE is set but PMI_RANK is not"),
            "{error}"
        );
        let error = found(&[("PMI_SIZE", "2"), ("PMI_RANK", "2")])
            .unwrap_err()
            .to_string();
        assert!(error.contains("PMI_RANK=2 and PMI_SIZE=2"), "{error}");
        let pod = [
            ("JOB_COMPLETION_INDEX", "1"),
            ("HOROVOD_RANK0_ADDRESS", "job-0.train:29600"),
        ];
        let error = found(&pod).unwrap_err().to_string();
        assert!(error.contains("HOROVOD_SIZE, to its"), "{error}");
    }

    #[test]
    fn schedulers_say_where_rank_0_is_and_what_only_ranks_know() {
        let torchrun = found(&TORCHRUN).unwrap().unwrap();
        assert_eq!(torchrun.rank0, Some(("n1".to_owned(), 29_501)));
        let open_mpi = found(&OPEN_MPI).unwrap().unwrap();
        assert_eq!(open_mpi.secret.as_deref(), Some("a-b"));
        assert_eq!(open_mpi.job, ["77"]);
        let (node, port) = found(&SLURM).unwrap().unwrap().rank0.unwrap();
        assert_eq!(node, "gpu07");
        assert!((20_000..32_000).contains(&port));
    }

    #[test]
    fn the_first_of_slurms_nodes() {
        for (list, first) in [
            ("n1", "n1"),
            ("n1,n2", "n1"),
            ("gpu[07-08,11]", "gpu07"),
            ("a[3]", "a3"),
            ("r[1-2]-ib,x", "r1-ib"),
        ] {
            assert_eq!(first_node(list).as_deref(), Some(first), "{list}");
        }
        assert_eq!(first_node(""), None);
    }
}
