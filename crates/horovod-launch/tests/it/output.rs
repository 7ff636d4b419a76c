//! Output of the ranks as the user sees it.

// They look for processes in /proc.
#![cfg(target_os = "linux")]

use std::fs;

use crate::common::{Run, Scratch, horovodrun, run, shell};

#[test]
fn puts_rank_and_stream_before_every_line() {
    let ended = run(shell(
        3,
        "echo out $HOROVOD_RANK; echo err $HOROVOD_RANK >&2",
    ));
    assert_eq!(ended.code, 0);
    assert_eq!(
        ended.sorted(),
        [
            "[0]<stdout>:out 0",
            "[1]<stdout>:out 1",
            "[2]<stdout>:out 2"
        ]
    );
    let mut err: Vec<_> = ended.err.lines().collect();
    err.sort_unstable();
    assert_eq!(
        err,
        [
            "[0]<stderr>:err 0",
            "[1]<stderr>:err 1",
            "[2]<stderr>:err 2"
        ]
    );
}

#[test]
fn passes_on_bytes_that_are_no_text() {
    let ended = run(shell(1, r"printf 'a\377\376\nb\000c\n10%%\r20%%\rno end'"));
    assert_eq!(
        ended.out,
        b"[0]<stdout>:a\xff\xfe\n[0]<stdout>:b\0c\n[0]<stdout>:10%\r[0]<stdout>:20%\r[0]<stdout>:no end"
    );
}

#[test]
fn never_cuts_a_line_of_one_rank_with_another() {
    // Rank 0 prints 4 MB without an end of line, the others whole lines meanwhile.
    let script = r#"
if [ $HOROVOD_RANK = 0 ]; then head -c 4000000 /dev/zero | tr '\0' x; echo; else
i=0; while [ $i -lt 2000 ]; do echo "line $i of $HOROVOD_RANK."; i=$((i+1)); done; fi"#;
    let ended = run(shell(3, script));
    assert_eq!(ended.code, 0);
    let mut next = [0; 3];
    let mut characters = 0;
    for line in ended.text().lines() {
        let (rank, text) = line
            .split_once("]<stdout>:")
            .expect("a prefix on every line");
        let rank: usize = rank.trim_start_matches('[').parse().expect("a rank");
        if rank == 0 {
            assert!(text.bytes().all(|b| b == b'x'), "only rank 0's own bytes");
            characters += text.len();
        } else {
            assert_eq!(text, format!("line {} of {rank}.", next[rank]));
            next[rank] += 1;
        }
    }
    assert_eq!((characters, next[1], next[2]), (4_000_000, 2000, 2000));
}

#[test]
fn puts_the_time_before_the_rank() {
    let ended = run(horovodrun(["-np", "1", "-prefix-timestamp", "echo", "a"]));
    let text = ended.text();
    let (time, rest) = text.split_once('[').expect("a prefix");
    assert_eq!(rest, "0]<stdout>:a\n");
    assert_eq!(time.len(), "Sat Nov 21 00:28:04 2026".len(), "{time}");
    assert_eq!(time.matches(':').count(), 2, "{time}");
}

#[test]
fn writes_one_pair_of_files_per_rank() {
    for (count, width) in [(1, 1), (2, 1), (10, 1), (11, 2)] {
        let scratch = Scratch::new();
        let place = scratch.file("a/b");
        let mut command = horovodrun(["--output-filename".as_ref(), place.as_os_str()]);
        command.args([
            "-np",
            &count.to_string(),
            "sh",
            "-c",
            "echo out; printf err >&2",
        ]);
        let ended = run(command);
        assert_eq!(ended.code, 0, "{}", ended.err);
        assert_eq!(fs::read_dir(&place).expect("created").count(), count);
        for rank in 0..count {
            let folder = place.join(format!("rank.{rank:0width$}"));
            let read = |name| fs::read_to_string(folder.join(name)).expect(name);
            assert_eq!(read("stdout"), format!("[{rank}]<stdout>:out\n"));
            assert_eq!(read("stderr"), format!("[{rank}]<stderr>:err"));
        }
        assert_eq!(ended.sorted().len(), count, "the console has it too");
    }
}

#[test]
fn a_full_disk_is_warned_of_once_and_the_job_goes_on() {
    let scratch = Scratch::new();
    for rank in 0..2 {
        let folder = scratch.file(&format!("rank.{rank}"));
        fs::create_dir(&folder).expect("created");
        std::os::unix::fs::symlink("/dev/full", folder.join("stdout")).expect("linked");
    }
    let mut command = horovodrun(["--output-filename".as_ref(), scratch.0.as_os_str()]);
    command.args(["-np", "2", "sh", "-c", "echo a; echo b"]);
    let ended = run(command);
    assert_eq!(ended.code, 0);
    assert_eq!(ended.sorted().len(), 4, "nothing is missing on the console");
    assert_eq!(ended.err.matches("warning").count(), 1, "{}", ended.err);
    assert!(ended.err.contains("No space left"), "{}", ended.err);
}

#[test]
fn a_reader_that_goes_away_ends_the_job() {
    let scratch = Scratch::new();
    let horovodrun = env!("CARGO_BIN_EXE_horovodrun");
    let status = scratch.file("status");
    let line = format!(
        "{{ {horovodrun} -np 2 sh -c 'while :; do echo y; done'; echo $? >{}; }} | head -n 3",
        status.display()
    );
    let mut command = std::process::Command::new("sh");
    command.args(["-c", &line]);
    let ended = Run::start(command).end();
    assert_eq!(ended.text().lines().count(), 3);
    assert_eq!(fs::read_to_string(status).expect("written").trim(), "141");
}

#[test]
fn ranks_have_an_empty_stdin() {
    let ended = run(shell(2, "cat; echo end"));
    assert_eq!(ended.sorted(), ["[0]<stdout>:end", "[1]<stdout>:end"]);
}

#[test]
fn each_run_has_a_folder_of_its_own_in_the_folder_of_logs() {
    let scratch = Scratch::new();
    let logs = scratch.file("logs");
    for _ in 0..2 {
        let mut command = horovodrun(["--log-dir".as_ref(), logs.as_os_str()]);
        command.args(["-np", "2", "sh", "-c", "echo of $HOROVOD_RANK"]);
        let ended = run(command);
        assert!(
            ended
                .err
                .contains("horovodrun: the ranks' output is also written to "),
            "{}",
            ended.err
        );
    }
    let runs: Vec<_> = fs::read_dir(&logs).expect("made").collect();
    assert_eq!(runs.len(), 2);
    for folder in runs {
        let folder = folder.expect("readable").path();
        let text = fs::read_to_string(folder.join("rank.1/stdout")).expect("written");
        assert_eq!(text, "[1]<stdout>:of 1\n");
    }
    let both = horovodrun([
        "--log-dir",
        "a",
        "--output-filename",
        "b",
        "-np",
        "1",
        "true",
    ]);
    assert!(run(both).err.contains("not allowed with argument"));
}

#[test]
fn the_output_of_chosen_ranks_is_shown_and_that_of_all_is_written() {
    let scratch = Scratch::new();
    let mut command = horovodrun(["--output-filename".as_ref(), scratch.0.as_os_str()]);
    command.args([
        "--output-ranks",
        "0,2-3",
        "-np",
        "4",
        "sh",
        "-c",
        "echo of $HOROVOD_RANK",
    ]);
    let ended = run(command);
    assert_eq!(
        ended.sorted(),
        ["[0]<stdout>:of 0", "[2]<stdout>:of 2", "[3]<stdout>:of 3"]
    );
    let hidden = fs::read_to_string(scratch.0.join("rank.1/stdout")).expect("written");
    assert_eq!(hidden, "[1]<stdout>:of 1\n");
    // The report of a failure has the last lines of any rank.
    let failing = "[ $HOROVOD_RANK = 0 ] || { echo why >&2; exit 3; }";
    let ended = run(horovodrun([
        "--output-ranks",
        "0",
        "-np",
        "2",
        "sh",
        "-c",
        failing,
    ]));
    let lines: Vec<&str> = ended.err.lines().collect();
    assert!(
        !lines.iter().any(|line| line.starts_with("[1]")),
        "{}",
        ended.err
    );
    assert!(
        lines.iter().any(|line| line.contains("why")),
        "{}",
        ended.err
    );
    for (list, with) in [
        ("0,7", "there is no rank 7"),
        ("3-1", "is no rank"),
        ("a", "is no rank"),
    ] {
        let ended = run(horovodrun(["--output-ranks", list, "-np", "2", "true"]));
        assert!(ended.err.contains(with), "{list}: {}", ended.err);
    }
}
