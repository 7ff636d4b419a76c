//! Jobs on all hosts and slots that a batch system gave.

// They look for processes in /proc.
#![cfg(target_os = "linux")]

use std::fs;
use std::process::Command;

use crate::common::{Scratch, horovodrun, run, shell};

#[test]
fn a_batch_job_of_lsf_needs_no_options() {
    let mut command = horovodrun(["sh", "-c", "echo $HOROVOD_RANK/$HOROVOD_SIZE"]);
    command
        .env("LSB_JOBID", "7")
        .env("LSB_MCPU_HOSTS", "localhost 2");
    assert_eq!(
        run(command).sorted(),
        ["[0]<stdout>:0/2", "[1]<stdout>:1/2"]
    );
}

#[test]
fn all_of_an_allocation_is_used_and_named_in_one_line() {
    let scratch = Scratch::new();
    let slots = scratch.file("slots");
    fs::write(&slots, "localhost\nlocalhost\n127.0.0.1\n").expect("written");
    let queue = scratch.file("queue");
    fs::write(
        &queue,
        "localhost 2 all.q@a UNDEFINED\n127.0.0.1 1 all.q@b UNDEFINED\n",
    )
    .expect("written");
    let path = |file: &std::path::Path| file.to_str().expect("plain").to_owned();
    let slurm = [
        ("SLURM_JOB_ID", "5".to_owned()),
        ("SLURM_JOB_NODELIST", "localhost,127.0.0.1".to_owned()),
        ("SLURM_TASKS_PER_NODE", "2,1".to_owned()),
    ];
    let lsf = [
        ("LSB_JOBID", "5".to_owned()),
        ("LSB_DJOB_HOSTFILE", path(&slots)),
    ];
    let cases: [(&str, &[(&str, String)]); 5] = [
        ("Slurm", &slurm),
        ("LSF", &lsf),
        ("PBS", &[("PBS_NODEFILE", path(&slots))]),
        ("Grid Engine", &[("PE_HOSTFILE", path(&queue))]),
        ("OAR", &[("OAR_NODEFILE", path(&slots))]),
    ];
    let script = "echo $HOROVOD_RANK/$HOROVOD_SIZE/$HOROVOD_LOCAL_SIZE";
    for (by, variables) in cases {
        let set = |mut command: Command| {
            command.envs(variables.iter().map(|(name, value)| (*name, value)));
            command
        };
        let ended = run(set(horovodrun(["sh", "-c", script])));
        assert_eq!(
            ended.sorted(),
            [
                "[0]<stdout>:0/3/2",
                "[1]<stdout>:1/3/2",
                "[2]<stdout>:2/3/1"
            ],
            "{by}: {}",
            ended.err
        );
        let line = format!(
            "horovodrun: note: uses the whole allocation of {by}, 3 slots on 2 hosts (localhost:2,127.0.0.1:1; from "
        );
        let notes: Vec<_> = ended
            .err
            .lines()
            .filter(|l| l.contains("allocation"))
            .collect();
        assert!(notes.len() == 1 && notes[0].starts_with(&line), "{notes:?}");
        // With a number of processes its hosts are filled in order, and nothing needs to be said.
        let ended = run(set(shell(2, script)));
        assert_eq!(
            ended.sorted(),
            ["[0]<stdout>:0/2/2", "[1]<stdout>:1/2/2"],
            "{by}"
        );
        assert!(!ended.err.contains("allocation"), "{}", ended.err);
        let ended = run(set(horovodrun(["-np", "4", "true"])));
        assert!(
            ended
                .err
                .contains("Requested more processes (4) than there are available slots (3)")
        );
        // Hosts of the command line win.
        let ended = run(set(horovodrun([
            "-np",
            "1",
            "-H",
            "localhost:1",
            "sh",
            "-c",
            script,
        ])));
        assert_eq!(ended.sorted(), ["[0]<stdout>:0/1/1"], "{by}");
    }
}

#[test]
fn on_the_only_host_of_an_allocation_more_processes_may_start_than_it_has_slots() {
    let mut command = shell(2, "echo $HOROVOD_SIZE");
    command
        .env("SLURM_JOB_ID", "5")
        .env("SLURM_JOB_NODELIST", "localhost")
        .env("SLURM_TASKS_PER_NODE", "1");
    assert_eq!(run(command).sorted(), ["[0]<stdout>:2", "[1]<stdout>:2"]);
}

#[test]
fn a_launcher_in_each_task_of_srun_is_refused() {
    let mut command = horovodrun(["true"]);
    command
        .env("SLURM_JOB_ID", "5")
        .env("SLURM_JOB_NODELIST", "localhost")
        .env("SLURM_TASKS_PER_NODE", "2")
        .env("SLURM_STEP_NUM_TASKS", "2");
    let ended = run(command);
    assert!(
        ended.err.contains("SLURM_STEP_NUM_TASKS=2"),
        "{}",
        ended.err
    );
}
