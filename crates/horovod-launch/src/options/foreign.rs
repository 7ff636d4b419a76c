//! Options of other launchers, and what stands for them here.

/// Names without dashes, with `_` for `-`; whose they are; what to do here.
const FOREIGN: &[(&[&str], &str, &str)] = &[
    (
        &["nproc_per_node"],
        "torchrun",
        "-np takes the number of all processes, -H name:slots,... or --hostfile the number for each host",
    ),
    (
        &["ntasks"],
        "another launcher",
        "-np takes the number of processes",
    ),
    (
        &[
            "nnodes",
            "nodes",
            "N",
            "npernode",
            "ppn",
            "ntasks_per_node",
            "map_by",
            "rankfile",
            "rf",
        ],
        "another launcher",
        "-H name:slots,... or --hostfile names the hosts and the number of processes on each, in the order of ranks",
    ),
    (
        &[
            "node_rank",
            "master_addr",
            "master_port",
            "rdzv_backend",
            "rdzv_endpoint",
            "rdzv_id",
            "rdzv_conf",
            "standalone",
        ],
        "torchrun",
        "leave it out: horovodrun is called once, on one host, and the ranks find each other",
    ),
    (
        &["max_restarts"],
        "torchrun",
        "elastic jobs (--min-np or --host-discovery-script) have --reset-limit",
    ),
    (
        &["m", "module"],
        "torchrun",
        "give the whole command: python -m MODULE",
    ),
    (
        &["x", "genv", "env", "export"],
        "another launcher",
        "leave it out: ranks have the environment of horovodrun, on other hosts, too; NAME=value horovodrun ... sets a variable",
    ),
    (
        &["machinefile", "f"],
        "mpirun",
        "--hostfile takes a file of hosts and slots",
    ),
    (
        &["nodelist", "w", "nodefile"],
        "another launcher",
        "-H name:slots,... names the hosts",
    ),
    (
        &[
            "allow_run_as_root",
            "mca",
            "bind_to",
            "report_bindings",
            "tag_output",
        ],
        "mpirun",
        "leave it out: nothing here needs it",
    ),
    (
        &["oversubscribe"],
        "mpirun",
        "-H name:slots,... takes as many slots as processes",
    ),
    (
        &["output_dir", "output"],
        "another launcher",
        "--output-filename takes the folder for the output of the ranks",
    ),
];

/// Advice for an option of another launcher; none for any other word.
pub(crate) fn advice(typed: &str) -> Option<String> {
    let name = typed.split('=').next().unwrap_or(typed);
    let name = name.trim_start_matches('-').replace('-', "_");
    let (_, whose, instead) = FOREIGN
        .iter()
        .find(|(names, ..)| names.contains(&name.as_str()))?;
    Some(format!("it is an option of {whose}; {instead}"))
}
