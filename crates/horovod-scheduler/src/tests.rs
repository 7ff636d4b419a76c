//! Which environments are a job, which are one process alone, and which are refused.

use super::*;

pub(crate) struct Map(pub(crate) Vec<(&'static str, &'static str)>);
impl Environment for Map {
    fn get(&self, name: &str) -> Option<String> {
        let mut set = self.0.iter();
        let found = set.find(|(known, _)| *known == name);
        found.map(|(_, value)| (*value).into())
    }

    fn names(&self) -> Vec<String> {
        self.0.iter().map(|(known, _)| (*known).into()).collect()
    }
}

fn found(vars: &[(&'static str, &'static str)]) -> Result<Option<Started>, NoJob> {
    detect(&Map(vars.to_vec()))
}

#[track_caller]
fn check(vars: &[(&'static str, &'static str)], by: &str, rank: u32, size: u32, one_host: bool) {
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
    // Launchers set these for a single process, too.
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
    // A launcher started inside such a pod counts; a size that a script set for all does not hide Slurm's rank.
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
fn a_process_alone_that_has_initialised_open_mpi_is_alone() {
    let with = |rank, processes| {
        [
            ("PMIX_RANK", rank),
            ("PMIX_NAMESPACE", "7"),
            ("OMPI_MCA_orte_ess_num_procs", processes),
        ]
    };
    assert_eq!(found(&with("0", "1")), Ok(None));
    assert!(found(&with("1", "1")).is_err());
    assert!(found(&with("0", "2")).is_err());
    let pod = [("HOROVOD_SIZE", "4"), ("JOB_COMPLETION_INDEX", "2")];
    let started = found(&[&pod[..], &with("0", "1")[..]].concat());
    let started = started.unwrap().unwrap();
    assert_eq!((started.rank, started.size), (2, 4));
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
                ("SM_CURRENT_HOST", "algo-3"),
            ],
            "SM_CURRENT_HOST is none of them",
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
