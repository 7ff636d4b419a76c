//! How jobs start: what ranks get, and that a mistake starts nothing.

// They look for processes in /proc.
#![cfg(target_os = "linux")]

use std::fs;
use std::io::Write;
use std::net::TcpStream;
use std::process::Command;

use crate::common::{Run, Scratch, horovodrun, run, shell};

#[test]
fn starts_no_more_processes_than_asked() {
    let ended = run(horovodrun([
        "-np",
        "2",
        "-H",
        "localhost:4",
        "sh",
        "-c",
        "echo $HOROVOD_RANK/$HOROVOD_SIZE $HOROVOD_LOCAL_RANK/$HOROVOD_LOCAL_SIZE \
         $HOROVOD_CROSS_RANK/$HOROVOD_CROSS_SIZE $HOROVOD_HOSTNAME $HOROVOD_CONTROLLER",
    ]));
    assert_eq!(
        ended.sorted(),
        [
            "[0]<stdout>:0/2 0/2 0/1 localhost gloo",
            "[1]<stdout>:1/2 1/2 0/1 localhost gloo"
        ]
    );
}

#[test]
fn the_launchers_values_win_and_the_rest_is_passed_on() {
    let mut command = horovodrun([
        "-np",
        "1",
        "--cycle-time-ms",
        "2",
        "sh",
        "-c",
        "echo $HOROVOD_RANK $HOROVOD_CYCLE_TIME $MINE $CUDA_VISIBLE_DEVICES $PYTHONUNBUFFERED $PWD",
    ]);
    command
        .env("HOROVOD_RANK", "77")
        .env("HOROVOD_CYCLE_TIME", "9")
        .env("MINE", "x");
    command
        .env("CUDA_VISIBLE_DEVICES", "3")
        .env("PYTHONUNBUFFERED", "")
        .current_dir("/");
    assert_eq!(run(command).text(), "[0]<stdout>:0 2.0 x 3 1 /\n");
}

#[test]
fn own_names_are_this_host() {
    let ended = run(horovodrun([
        "-np",
        "2",
        "-H",
        "127.0.1.1:1,127.0.0.1:1",
        "sh",
        "-c",
        "echo $HOROVOD_HOSTNAME",
    ]));
    assert_eq!(
        ended.sorted(),
        ["[0]<stdout>:127.0.1.1", "[1]<stdout>:127.0.0.1"],
        "{}",
        ended.err
    );
}

/// Runs `horovodrun WORDS sh -c 'touch FILE'`: it must fail, say so, and start nothing.
#[track_caller]
fn refuses(words: &[&str], code: i32, with: &[&str]) {
    let scratch = Scratch::new();
    let file = scratch.file("a rank ran");
    let mut command = horovodrun(words);
    command.args([
        "sh".as_ref(),
        "-c".as_ref(),
        "touch \"$0\"".as_ref(),
        file.as_os_str(),
    ]);
    let ended = run(command);
    assert_eq!(ended.code, code, "{words:?}: {}", ended.err);
    for text in with {
        assert!(
            ended.err.contains(text),
            "{words:?}: {text:?} is not in {}",
            ended.err
        );
    }
    assert!(!file.exists(), "{words:?}");
    assert_eq!(ended.out, b"");
}

#[test]
fn bad_input_gets_one_clear_message_and_starts_nothing() {
    refuses(
        &["-np", "0"],
        2,
        &["error: ", "-np/--num-proc: must be at least 1, got 0"],
    );
    refuses(&["-np", "-1"], 2, &["must be at least 1, got -1"]);
    refuses(&[], 2, &["required: -np/--num-proc"]);
    refuses(
        &["-np", "3", "-H", "localhost:2"],
        2,
        &["more processes (3)", "slots (2)"],
    );
    refuses(
        &["-np", "1", "-H", "localhost:x"],
        2,
        &["Invalid host input \"localhost:x\""],
    );
    refuses(
        &["-np", "1", "--hostfile", "/no/such"],
        2,
        &["/no/such", "No such file"],
    );
    refuses(
        &["-np", "1", "--mpi", "--gloo"],
        2,
        &["argument --gloo: not allowed with argument --mpi"],
    );
    refuses(
        &["-np", "1", "--config-file", "/no/such.yaml"],
        2,
        &["the config file /no/such.yaml: cannot be read: No such file"],
    );
    refuses(
        &["-np", "1", "--sart-timeout", "3"],
        2,
        &["did you mean --start-timeout?"],
    );
    refuses(
        &["-np", "1", "-i", "/no/key", "-H", "x.invalid:1"],
        2,
        &["ssh key /no/key: No such file"],
    );
    refuses(
        &["-np", "3", "-H", "localhost:2", "--doctor"],
        2,
        &["more processes (3)", "slots (2)"],
    );
    for elastic in [&[][..], &["--min-np", "1"]] {
        let wrong = ["-np", "1", "--network-interfaces", "nosuch0"];
        refuses(
            &[&wrong, elastic].concat(),
            2,
            &[
                "--network-interfaces: no network interface \"nosuch0\"",
                "there are: ",
            ],
        );
    }
    refuses(
        &["-np", "1", "no-such-program"],
        127,
        &["command not found: no-such-program"],
    );
    refuses(
        &["-np", "1", "python3", "no-such.py"],
        2,
        &["no-such.py", "No such file"],
    );
    refuses(
        &["-np", "2", "--output-filename", "/dev/null/x"],
        1,
        &["cannot create /dev/null/x/rank.0"],
    );
}

/// The command line, then the file, then the environment.
#[test]
fn settings_come_from_options_the_config_file_and_the_environment_in_this_order() {
    let scratch = Scratch::new();
    let file = scratch.file("c.yaml");
    fs::write(
        &file,
        "params:\n  cycle_time_ms: 5\n  cache_capacity: 7\nno_such:\n  key: 1\n",
    )
    .expect("written");
    let mut command = horovodrun(["-np", "1", "--cycle-time-ms", "2", "--tcp", "--config-file"]);
    command.arg(&file).args([
        "sh",
        "-c",
        "echo $HOROVOD_CYCLE_TIME $HOROVOD_CACHE_CAPACITY $HOROVOD_FUSION_THRESHOLD $NCCL_IB_DISABLE",
    ]);
    for name in [
        "HOROVOD_CYCLE_TIME",
        "HOROVOD_CACHE_CAPACITY",
        "HOROVOD_FUSION_THRESHOLD",
    ] {
        command.env(name, "9");
    }
    let ended = run(command);
    assert_eq!(ended.text(), "[0]<stdout>:2.0 7 9 1\n");
    for note in [
        "horovodrun: note: --tcp: ",
        "horovodrun: note: the config file has a key no_such.key that means nothing",
    ] {
        assert!(ended.err.contains(note), "{note}: {}", ended.err);
    }
}

/// Of a pipe and of a file: rank 0 has it all, the others nothing, and nobody waits.
#[test]
fn standard_input_is_rank_0s() {
    let scratch = Scratch::new();
    let file = scratch.file("in");
    fs::write(&file, "one\ntwo\n").expect("written");
    let script = "cat; echo end of $HOROVOD_RANK";
    let want = [
        "[0]<stdout>:end of 0",
        "[0]<stdout>:one",
        "[0]<stdout>:two",
        "[1]<stdout>:end of 1",
        "[2]<stdout>:end of 2",
    ];
    let opened = fs::File::open(&file).expect("there");
    let ended = Run::start_with(shell(3, script), opened.into()).end();
    assert_eq!(ended.sorted(), want, "{}", ended.err);
    let (reader, mut writer) = std::io::pipe().expect("a pipe");
    writer.write_all(b"one\n").expect("room");
    let run = Run::start_with(shell(3, script), reader.into());
    // Later input reaches rank 0 as well.
    run.wait_for(&["[0]<stdout>:one", "[1]<stdout>:end", "[2]<stdout>:end"]);
    writer.write_all(b"two\n").expect("room");
    drop(writer);
    assert_eq!(run.end().sorted(), want);
}

/// In the launcher's pod of Kubeflow's MPI operator.
#[test]
fn the_hostfile_that_mpirun_would_take_is_taken() {
    let scratch = Scratch::new();
    let file = scratch.file("hosts");
    fs::write(&file, "127.0.1.1 slots=1\n127.0.0.1 slots=1\n").expect("written");
    let mut command = shell(2, "echo $HOROVOD_HOSTNAME");
    command.env("OMPI_MCA_orte_default_hostfile", &file);
    let ended = run(command);
    assert_eq!(
        ended.sorted(),
        ["[0]<stdout>:127.0.1.1", "[1]<stdout>:127.0.0.1"],
        "{}",
        ended.err
    );
    assert!(ended.err.contains("note: hosts from "), "{}", ended.err);
}

#[test]
fn a_bad_hostfile_line_is_quoted_with_its_number() {
    let scratch = Scratch::new();
    let file = scratch.file("hosts");
    fs::write(&file, "# mine\nlocalhost slots=1\nlocalhost slots=many\n").expect("written");
    let name = file.to_str().expect("text");
    refuses(
        &["-np", "1", "--hostfile", name],
        2,
        &[&format!("{name}, line 3: \"localhost slots=many\"")],
    );
}

#[test]
fn garbage_on_the_rendezvous_does_not_disturb_the_job() {
    let scratch = Scratch::new();
    let go = scratch.file("go");
    let script = format!(
        "echo at $HOROVOD_RENDEZVOUS; while [ ! -e {} ]; do sleep 0.01; done; echo end",
        go.display()
    );
    let run = Run::start(shell(2, &script));
    let place = run.after("[0]<stdout>:at ");
    assert!(
        place.starts_with("127.0.0.1:"),
        "a job on one host is not reachable from others: {place}"
    );
    let noise = vec![0xa5; 1 << 20];
    let mut silent = Vec::new();
    for attempt in 0..16 {
        let mut stream = TcpStream::connect(&place).expect("somebody listens");
        stream
            .set_write_timeout(Some(std::time::Duration::from_secs(5)))
            .expect("settable");
        // It may hang up at once; that is what it should do.
        let _ = stream.write_all(&noise[..1 << attempt]);
        silent.push(TcpStream::connect(&place).expect("still listens"));
    }
    fs::write(go, "").expect("written");
    let ended = run.end();
    assert_eq!(ended.code, 0, "{}", ended.err);
    assert_eq!(
        ended
            .sorted()
            .iter()
            .filter(|line| line.ends_with(":end"))
            .count(),
        2
    );
}

/// An `ssh` that runs the command here, tells what it was asked, and knows some hosts with troubles.
const FAKE_SSH: &str = r#"#!/bin/sh
for last; do :; done
case " $* " in
*" -G "*) echo "stricthostkeychecking ask"; exit 0;;
*closed.invalid*) echo "root@closed: Permission denied (publickey)." >&2; exit 255;;
*silent.invalid*) exec sleep 1000;;
esac
printf '%s\n' "$*" >>"$SSH_SEEN"
echo "Welcome to this machine"
cd / && exec sh -c "$last"
"#;

#[expect(
    clippy::disallowed_methods,
    reason = "the fake must come first on the PATH of the test"
)]
fn over_fake_ssh(scratch: &Scratch, words: &[&str]) -> Command {
    scratch.program("ssh", FAKE_SSH);
    let mut command = horovodrun(words);
    let path = std::env::var_os("PATH").expect("there is a PATH");
    let mut places = vec![scratch.0.clone()];
    places.extend(std::env::split_paths(&path));
    command.env("PATH", std::env::join_paths(places).expect("joinable"));
    command
        .env("SSH_SEEN", scratch.file("seen"))
        .current_dir(&scratch.0);
    command
}

#[test]
fn other_hosts_are_reached_through_ssh() {
    let scratch = Scratch::new();
    let mut command = over_fake_ssh(
        &scratch,
        &[
            "-np",
            "3",
            "-p",
            "2222",
            "-H",
            "a.invalid:2,localhost:1",
            "sh",
            "-c",
            "echo $HOROVOD_RANK $HOROVOD_LOCAL_RANK/$HOROVOD_LOCAL_SIZE $HOROVOD_HOSTNAME $SECRET ${CUDA_VISIBLE_DEVICES-none} $PWD",
        ],
    );
    command
        .env("SECRET", "s3cret")
        .env("CUDA_VISIBLE_DEVICES", "1");
    let ended = run(command);
    let here = fs::canonicalize(&scratch.0).expect("there");
    let here = here.display();
    assert_eq!(
        ended.sorted(),
        [
            // The fake ssh hands its own environment down, as no real one does; only what is forwarded counts.
            format!("[0]<stdout>:0 0/2 a.invalid s3cret 1 {here}"),
            format!("[1]<stdout>:1 1/2 a.invalid s3cret 1 {here}"),
            format!("[2]<stdout>:2 0/1 localhost s3cret 1 {here}"),
        ],
        "{}",
        ended.err
    );
    assert_eq!(ended.code, 0);
    let seen = fs::read_to_string(scratch.file("seen")).expect("ssh was used");
    assert_eq!(seen.lines().count(), 1, "once per host: {seen}");
    for part in [
        "-p 2222",
        "BatchMode=yes",
        "StrictHostKeyChecking=accept-new",
        "-- a.invalid ",
    ] {
        assert!(seen.contains(part), "{part}: {seen}");
    }
    assert!(
        !seen.contains("s3cret") && !seen.contains("HOROVOD_"),
        "{seen}"
    );
}

#[test]
fn a_host_with_trouble_is_named_and_nothing_starts() {
    let scratch = Scratch::new();
    let file = scratch.file("a rank ran");
    let touch = format!("touch '{}'", file.display());
    let fails = |hosts: &str, timeout: &str, with: &[&str]| {
        let words = [
            "-np",
            "2",
            "--start-timeout",
            timeout,
            "-H",
            hosts,
            "sh",
            "-c",
            &touch,
        ];
        let ended = run(over_fake_ssh(&scratch, &words));
        assert_eq!(ended.code, 1, "{}", ended.err);
        for text in with {
            assert!(
                ended.err.contains(text),
                "{hosts}: {text:?} is not in {}",
                ended.err
            );
        }
        assert!(!file.exists(), "{hosts}");
    };
    fails(
        "localhost:1,closed.invalid:1",
        "240",
        &["host closed.invalid: ssh was refused", "Permission denied"],
    );
    fails(
        "a.invalid:1,silent.invalid:1",
        "3",
        // On a slow machine the other host has not answered by then either.
        &["no answer within 3 s from ", "silent.invalid"],
    );
}

#[test]
fn a_command_that_only_other_hosts_lack_is_reported_with_the_host() {
    let scratch = Scratch::new();
    let words = [
        "-np",
        "2",
        "-H",
        "a.invalid:1,b.invalid:1",
        "no-such-program",
    ];
    let ended = run(over_fake_ssh(&scratch, &words));
    assert_eq!(ended.code, 127);
    assert!(
        ended
            .err
            .contains("host a.invalid: command not found: no-such-program"),
        "{}",
        ended.err
    );
    assert!(
        ended
            .err
            .contains("host b.invalid: command not found: no-such-program"),
        "{}",
        ended.err
    );
}

#[test]
fn nothing_outlives_a_launcher_of_other_hosts_killed_with_sigkill() {
    let scratch = Scratch::new();
    let words = [
        "-np",
        "2",
        "-H",
        "a.invalid:1,b.invalid:1",
        "sh",
        "-c",
        "echo up; exec sleep 1000",
    ];
    let run = Run::start(over_fake_ssh(&scratch, &words));
    run.wait_for(&["[0]<stdout>:up", "[1]<stdout>:up"]);
    run.signal("KILL");
    assert_eq!(run.end().code, 137);
}

#[test]
fn reports_need_no_job() {
    let ended = run(horovodrun(["--version"]));
    assert_eq!(
        (ended.code, ended.text()),
        (0, format!("{}\n", env!("CARGO_PKG_VERSION")))
    );
    let ended = run(horovodrun(["--check-build"]));
    assert_eq!(ended.code, 0);
    for part in [
        "Available Frameworks:\n    [",
        "Available Controllers:\n    [ ] MPI\n    [X] Gloo\n",
        // Whether NCCL is there depends on the machine.
        "] NCCL\n    [ ] DDL\n    [ ] CCL\n    [ ] MPI\n    [X] Gloo",
    ] {
        assert!(ended.text().contains(part), "{part}: {}", ended.text());
    }
    let ended = run(horovodrun(["--help"]));
    assert!(ended.text().contains("--output-filename DIR"));
}
