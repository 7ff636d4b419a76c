//! How jobs end: exit codes, reports, signals, and that no process is left behind.

// They look for processes in /proc.
#![cfg(target_os = "linux")]

use std::fs;

use crate::common::{Run, Scratch, command_line, horovodrun, processes, run, shell, signal, until};

/// Prints its process id and its rank and goes on for ever, with a child that `sys.argv` may change.
const FOR_EVER: &str = "import os, subprocess, sys, threading\n\
subprocess.Popen([*sys.argv[1:], 'sleep', '1000'])\n\
print('pid of', os.environ['HOROVOD_RANK'], 'is', os.getpid(), flush=True)\n\
threading.Event().wait()\n";

/// Puts a child into a session of its own, where the platform can find such children.
const OWN_SESSION: &str = if cfg!(horovod_portable) {
    "env"
} else {
    "setsid"
};

fn for_ever(count: u32) -> Run {
    let run = Run::start(horovodrun([
        "-np",
        &count.to_string(),
        "python3",
        "-c",
        FOR_EVER,
        OWN_SESSION,
    ]));
    for rank in 0..count {
        run.wait_for(&[&format!("pid of {rank} is ")]);
    }
    run
}

fn pid_of(run: &Run, rank: u32) -> u32 {
    run.after(&format!("pid of {rank} is "))
        .trim()
        .parse()
        .expect("a pid")
}

/// The launcher's own lines.
fn own(err: &str) -> Vec<&str> {
    err.lines().filter(|line| !line.starts_with('[')).collect()
}

#[test]
fn gives_the_failing_ranks_code_and_names_it_first() {
    let script = "if [ $HOROVOD_RANK = 1 ]; then i=0; while [ $i -lt 30 ]; do echo why $i >&2; i=$((i+1)); done; \
                  exit 3; fi; exec sleep 1000";
    let ended = run(shell(3, script));
    assert_eq!(ended.code, 3);
    let own = own(&ended.err);
    assert!(
        own[0].contains("rank 1 on host localhost exited with code 3"),
        "{own:?}"
    );
    let tail: Vec<_> = own.iter().filter(|line| line.starts_with("    ")).collect();
    assert_eq!(
        (tail.len(), *tail[0], *tail[19]),
        (20, "    why 10", "    why 29")
    );
    let last = own.last().expect("a line");
    assert!(last.contains("ranks 0, 2 ended by horovodrun"), "{last}");
}

#[test]
fn shows_stdout_when_stderr_is_empty() {
    let ended = run(shell(1, "echo last words; exit 4"));
    assert_eq!(ended.code, 4);
    assert!(
        ended
            .err
            .contains("Last lines of its stdout:\n    last words"),
        "{}",
        ended.err
    );
}

#[test]
fn names_the_signal_that_killed_a_rank() {
    let run = for_ever(3);
    signal(pid_of(&run, 2), "KILL");
    let ended = run.end();
    assert_eq!(ended.code, 137);
    assert!(
        own(&ended.err)[0].contains("rank 2 on host localhost was killed by signal 9 (SIGKILL)"),
        "{}",
        ended.err
    );
}

#[test]
fn does_not_blame_a_rank_that_lost_a_peer() {
    let scratch = Scratch::new();
    let file = scratch.file("pid");
    // Rank 0 complains and ends; only when it is gone, rank 1 shows the true cause.
    let script = format!(
        "if [ $HOROVOD_RANK = 0 ]; then echo 'HorovodInternalError: rank 1 ...' >&2; echo $$ >{0}.tmp; \
         mv {0}.tmp {0}; exit 1; fi; while [ ! -e {0} ]; do sleep 0.01; done; \
         while kill -0 $(cat {0}) 2>/dev/null; do sleep 0.01; done; exit 5",
        file.display()
    );
    let ended = run(shell(2, &script));
    assert!(
        own(&ended.err)[0].contains("rank 1 on host localhost exited with code 5"),
        "{}",
        ended.err
    );
    assert_eq!(ended.code, 5);
}

#[test]
fn a_rank_that_ends_well_does_not_end_the_others() {
    let scratch = Scratch::new();
    let file = scratch.file("go");
    let script = format!(
        "[ $HOROVOD_RANK = 0 ] && {{ echo done; exit 0; }}; while [ ! -e {} ]; do sleep 0.01; done; echo too",
        file.display()
    );
    let run = Run::start(shell(2, &script));
    run.wait_for(&["[0]<stdout>:done"]);
    fs::write(file, "").expect("written");
    let ended = run.end();
    assert_eq!((ended.code, ended.err.as_str()), (0, ""));
    assert!(ended.text().contains("[1]<stdout>:too"));
}

#[test]
fn nothing_outlives_a_launcher_killed_with_sigkill() {
    let run = for_ever(2);
    until("launcher, agent, two ranks, two children run", || {
        run.members().len() >= 6
    });
    run.signal("KILL");
    assert_eq!(run.end().code, 137);
}

/// Elsewhere ranks outlive such an agent.
#[cfg(not(horovod_portable))]
#[test]
fn nothing_outlives_an_agent_killed_with_sigkill() {
    let run = for_ever(2);
    let members = run.members();
    let agent = members
        .iter()
        .find(|(_, line)| line.contains(" __agent"))
        .expect("an agent");
    signal(agent.0, "KILL");
    let ended = run.end();
    assert_eq!(ended.code, 1);
    assert!(
        own(&ended.err)[0].contains("rank 0 on host localhost was lost"),
        "{}",
        ended.err
    );
}

#[test]
fn ctrl_c_reaches_all_ranks_and_nobody_is_blamed() {
    let script = "import signal, sys, threading\n\
def stop(number, frame):\n    print('saw', number, flush=True)\n    sys.exit(7)\n\
signal.signal(signal.SIGINT, stop)\nsignal.signal(signal.SIGTERM, stop)\n\
print('ready', flush=True)\nthreading.Event().wait()\n";
    for (name, number) in [("INT", 2), ("TERM", 15), ("HUP", 15)] {
        let run = Run::start(horovodrun(["-np", "2", "python3", "-c", script]));
        run.wait_for(&["[0]<stdout>:ready", "[1]<stdout>:ready"]);
        run.signal(name);
        let ended = run.end();
        let code = match name {
            "INT" => 130,
            "TERM" => 143,
            _ => 129,
        };
        assert_eq!(ended.code, code, "{}", ended.err);
        assert!(!ended.err.contains("exited with code"), "{}", ended.err);
        for rank in 0..2 {
            let line = format!("[{rank}]<stdout>:saw {number}");
            assert!(ended.text().contains(&line), "{name}: {}", ended.text());
        }
    }
}

#[test]
fn the_second_ctrl_c_kills_what_does_not_listen() {
    let script = "import signal, threading\n\
for number in signal.SIGINT, signal.SIGTERM:\n    signal.signal(number, lambda n, f: print('saw', n, flush=True))\n\
print('ready', flush=True)\nwhile True: threading.Event().wait(0.1)\n";
    let run = Run::start(horovodrun(["-np", "2", "python3", "-c", script]));
    run.wait_for(&["[0]<stdout>:ready", "[1]<stdout>:ready"]);
    run.signal("INT");
    run.wait_for(&["[0]<stdout>:saw 2", "[1]<stdout>:saw 2"]);
    run.signal("INT");
    assert_eq!(run.end().code, 130);
}

#[test]
fn a_rank_that_does_not_listen_is_killed_after_the_grace() {
    let scratch = Scratch::new();
    let deaf = scratch.file("deaf");
    let script = format!(
        "if [ $HOROVOD_RANK = 0 ]; then while [ ! -e {0} ]; do sleep 0.01; done; exit 6; fi; \
         trap '' TERM; touch {0}; while :; do sleep 0.1; done",
        deaf.display()
    );
    let mut command = shell(2, &script);
    command.env("HOROVOD_TERMINATE_TIMEOUT", "1");
    let ended = run(command);
    assert_eq!(ended.code, 6);
    assert!(
        ended
            .err
            .contains("rank 1 ended by horovodrun (killed by signal 9"),
        "{}",
        ended.err
    );
}

#[test]
fn a_grandchild_that_holds_the_output_does_not_hold_the_launcher() {
    let ended = run(shell(
        2,
        &format!("sleep 1000 & {OWN_SESSION} sleep 1000 & echo end"),
    ));
    assert_eq!(ended.code, 0);
    assert_eq!(ended.sorted(), ["[0]<stdout>:end", "[1]<stdout>:end"]);
}

#[test]
fn the_job_key_is_on_no_command_line() {
    let run = Run::start(shell(
        2,
        "echo key of $HOROVOD_RANK is $HOROVOD_JOB_KEY; exec sleep 1000",
    ));
    let key = run.after("key of 0 is ");
    assert_eq!(key.len(), 64, "{key}");
    let seen: Vec<String> = processes()
        .map(command_line)
        .filter(|line| line.contains(&key))
        .collect();
    assert!(seen.is_empty(), "{seen:?}");
    run.signal("TERM");
    assert_eq!(run.end().code, 143);
}
