//! Setup that users do once: defaults in their folder of settings, completion in their shell.

// They look for processes in /proc.
#![cfg(target_os = "linux")]

use std::fs;
use std::process::Command;

use crate::common::{Scratch, horovodrun, run};

#[test]
fn settings_of_the_user_count_less_than_all_that_is_said_for_a_job() {
    let scratch = Scratch::new();
    fs::create_dir(scratch.file("horovod")).expect("made");
    fs::write(
        scratch.file("horovod/config.yaml"),
        "params:\n  cycle_time_ms: 7\n  cache_capacity: 8\nlogging:\n  level: error\ntimeline:\n  mark_cycles: false\n",
    )
    .expect("written");
    let file = scratch.file("own.yaml");
    fs::write(&file, "params:\n  cache_capacity: 9\n").expect("written");
    let script = "echo $HOROVOD_CYCLE_TIME $HOROVOD_CACHE_CAPACITY $HOROVOD_LOG_LEVEL";
    let start = |more: &[&str]| {
        let mut command = horovodrun(more);
        command.env("XDG_CONFIG_HOME", &scratch.0);
        command.args(["-np", "1", "sh", "-c", script]);
        command
    };
    assert_eq!(run(start(&[])).sorted(), ["[0]<stdout>:7.0 8 ERROR"]);
    let own = file.to_str().expect("plain");
    assert_eq!(
        run(start(&["--config-file", own, "--cycle-time-ms", "6"])).sorted(),
        ["[0]<stdout>:6.0 9 ERROR"]
    );
    let mut command = start(&[]);
    command.env("HOROVOD_CYCLE_TIME", "5");
    assert_eq!(run(command).sorted(), ["[0]<stdout>:5 8 ERROR"]);
    // Mistakes are named with the file.
    fs::write(
        scratch.file("horovod/config.yaml"),
        "params:\n  cycle_time_ms: soon\n",
    )
    .expect("written");
    let ended = run(start(&[]));
    assert!(
        ended
            .err
            .contains("horovod/config.yaml: params.cycle_time_ms"),
        "{}",
        ended.err
    );
}

#[test]
fn shells_complete_options_and_their_words() {
    let refused = run(horovodrun(["--completion", "tcsh"]));
    assert!(
        refused.err.contains("must be bash, zsh or fish"),
        "{}",
        refused.err
    );
    let script = run(horovodrun(["--completion", "bash"])).text();
    // As the shell calls it for the last word of this line.
    let completed = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        let program = format!(
            "{script}\nCOMP_WORDS=({}); COMP_CWORD={}; _horovodrun; printf '%s\\n' \"${{COMPREPLY[@]}}\"",
            words
                .iter()
                .map(|word| format!("'{word}'"))
                .collect::<Vec<_>>()
                .join(" "),
            words.len() - 1
        );
        let output = Command::new("bash")
            .args(["-c", &program])
            .output()
            .expect("bash");
        assert!(
            output.status.success() && output.stderr.is_empty(),
            "{output:?}"
        );
        let text = String::from_utf8(output.stdout).expect("text");
        text.split_whitespace()
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    assert_eq!(completed("horovodrun --output-r"), ["--output-ranks"]);
    assert_eq!(completed("horovodrun -np 2 --log-level W"), ["WARNING"]);
    assert!(completed("horovodrun -np 2 ba").contains(&"bash".to_owned()));
    // The words of the command are its own.
    assert!(completed("horovodrun -np 2 python --output-r").is_empty());
    assert!(completed("horovodrun --hostfile -").is_empty());
}
