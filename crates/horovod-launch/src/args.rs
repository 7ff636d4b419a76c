//! Parses `horovodrun`'s command line with the habits of Python's argparse.
//!
//! Single-dash options may be long (`-np 4`, `-np=4`, `-cb`), long options may be shortened to a unique
//! prefix, and the first word that is not an option starts the command, which is passed on untouched.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use crate::options::{Action, OPTIONS, OptionSpec, TIMELINE_MARK_CYCLES};

/// What the command line asks for.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Options {
    /// Number of processes to start.
    pub num_proc: Option<u32>,
    /// `-H`: hosts and slots as typed.
    pub hosts: Option<String>,
    /// File with hosts and slots.
    pub hostfile: Option<PathBuf>,
    /// ssh port of all hosts.
    pub ssh_port: Option<u16>,
    /// Private key for ssh.
    pub ssh_identity_file: Option<PathBuf>,
    /// Interfaces to use between hosts; empty means all.
    pub network_interfaces: Vec<String>,
    /// Directory for one pair of files per rank.
    pub output_filename: Option<PathBuf>,
    /// Put the local time before each line's rank.
    pub prefix_timestamp: bool,
    /// Say what is done.
    pub verbose: bool,
    /// Seconds until all hosts must have answered.
    pub start_timeout: Option<u32>,
    /// Only report what this installation can do.
    pub check_build: bool,
    /// Only print the version.
    pub version: bool,
    /// Only print the help.
    pub help: bool,
    /// Settings for the ranks: environment variable and value, in the order given.
    pub knobs: Vec<(&'static str, String)>,
    /// The command of every rank.
    pub command: Vec<OsString>,
}

/// Why a command line was refused; shown below the usage line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct UsageError(pub String);

fn refuse<T>(text: impl Into<String>) -> Result<T, UsageError> {
    Err(UsageError(text.into()))
}

/// Reads the words after the program's name.
pub fn parse(words: &[OsString]) -> Result<Options, UsageError> {
    let mut options = Options::default();
    let mut seen: Vec<&'static OptionSpec> = Vec::new();
    let mut rest = words.iter();
    while let Some(word) = rest.next() {
        let bytes = word.as_bytes();
        if bytes == b"--" {
            options.command = rest.cloned().collect();
            break;
        }
        if bytes.first() != Some(&b'-') || bytes.len() == 1 {
            options.command = std::iter::once(word).chain(rest).cloned().collect();
            break;
        }
        let (spec, attached) = find(bytes)?;
        if let Some(earlier) = seen.iter().find(|other| excludes(other, spec)) {
            return refuse(format!(
                "argument {}: not allowed with argument {}",
                spec.title(),
                earlier.title()
            ));
        }
        seen.push(spec);
        match spec.action {
            Action::Flag(set) => {
                if let Some(value) = attached {
                    return refuse(format!(
                        "argument {}: takes no value, got {:?}",
                        spec.title(),
                        value.to_string_lossy()
                    ));
                }
                set(&mut options);
                if options.help || options.version {
                    return Ok(options);
                }
            }
            Action::Value(_, set) => {
                let value = match attached {
                    Some(value) => value,
                    None => match rest.next() {
                        Some(next) if !looks_like_option(next.as_bytes()) => next.clone(),
                        _ => {
                            return refuse(format!(
                                "argument {}: expected one value",
                                spec.title()
                            ));
                        }
                    },
                };
                set(&mut options, &value)
                    .map_err(|why| UsageError(format!("argument {}: {why}", spec.title())))?;
            }
            Action::Later => {
                return refuse(format!(
                    "option {} is not available yet in this version",
                    spec.title()
                ));
            }
        }
    }
    complete(options)
}

/// Checks what no single option can know.
fn complete(mut options: Options) -> Result<Options, UsageError> {
    if !options.knobs.iter().any(|(n, _)| *n == "HOROVOD_TIMELINE") {
        options
            .knobs
            .retain(|(name, _)| *name != TIMELINE_MARK_CYCLES);
    }
    if options.check_build {
        return Ok(options);
    }
    if options.num_proc.is_none() {
        return refuse("the following arguments are required: -np/--num-proc");
    }
    if options.command.is_empty() {
        return refuse("no command given: what should each process run?");
    }
    Ok(options)
}

fn excludes(a: &OptionSpec, b: &OptionSpec) -> bool {
    !std::ptr::eq(a, b) && a.exclusive.is_some() && a.exclusive == b.exclusive
}

/// An option cannot be the value of another, but a negative number can.
fn looks_like_option(word: &[u8]) -> bool {
    let number = word.len() > 1 && word[1..].iter().all(|b| b.is_ascii_digit() || *b == b'.');
    word.first() == Some(&b'-') && word.len() > 1 && !number
}

type Found = (&'static OptionSpec, Option<OsString>);

fn find(word: &[u8]) -> Result<Found, UsageError> {
    let named = |name: &[u8]| {
        OPTIONS
            .iter()
            .find(|spec| spec.names.iter().any(|n| n.as_bytes() == name))
    };
    if let Some(spec) = named(word) {
        return Ok((spec, None));
    }
    let (left, right) = match word.iter().position(|b| *b == b'=') {
        Some(at) => (
            &word[..at],
            Some(OsString::from_vec(word[at + 1..].to_vec())),
        ),
        None => (word, None),
    };
    if right.is_some()
        && let Some(spec) = named(left)
    {
        return Ok((spec, right));
    }
    let mut found: Vec<Found> = OPTIONS
        .iter()
        .filter(|spec| spec.names.iter().any(|n| n.as_bytes().starts_with(left)))
        .map(|spec| (spec, right.clone()))
        .collect();
    // `-p22`: a one-letter option with its value attached.
    if !word.starts_with(b"--")
        && word.len() > 2
        && let Some(spec) = named(&word[..2])
        && matches!(spec.action, Action::Value(..))
    {
        found.push((spec, Some(OsString::from_vec(word[2..].to_vec()))));
    }
    let typed = String::from_utf8_lossy(word).into_owned();
    match found.len() {
        1 => Ok(found.remove(0)),
        0 => refuse(match nearest(&typed) {
            Some(name) => format!("unknown option {typed} (did you mean {name}?)"),
            None => format!("unknown option {typed}"),
        }),
        _ => refuse(format!(
            "ambiguous option: {typed} could match {}",
            found
                .iter()
                .map(|(spec, _)| spec.title())
                .collect::<Vec<_>>()
                .join(", ")
        )),
    }
}

/// The option name that differs least from what was typed, unless it differs too much to help.
fn nearest(typed: &str) -> Option<&'static str> {
    let typed = typed.split('=').next().unwrap_or(typed);
    OPTIONS
        .iter()
        .filter(|spec| !spec.hidden)
        .flat_map(|spec| spec.names.iter().copied())
        .map(|name| (edit_distance(typed, name), name))
        .min()
        .filter(|(distance, name)| *distance * 3 <= name.len())
        .map(|(_, name)| name)
}

fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let substituted = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

/// One line for usage errors.
pub fn usage() -> &'static str {
    "usage: horovodrun -np NUM_PROC [-H HOST:SLOTS,... | --hostfile FILE] [options] command [args ...]\n       \
     horovodrun --check-build | --version | --help"
}

/// The whole help text, from the table.
pub fn help() -> String {
    let mut text = format!("{}\n", usage());
    let mut group = "";
    for spec in OPTIONS
        .iter()
        .filter(|spec| !spec.hidden && spec.is_available())
    {
        if spec.group != group {
            group = spec.group;
            text.push_str(&format!("\n{group}:\n"));
        }
        let mut left = spec.names.join(", ");
        if let Action::Value(meta, _) = spec.action {
            left = format!("{left} {meta}");
        }
        if left.len() > 28 {
            text.push_str(&format!("  {left}\n{:32}{}\n", "", spec.help));
        } else {
            text.push_str(&format!("  {left:<29} {}\n", spec.help));
        }
    }
    text.push_str("\nnot available yet in this version:\n");
    let mut line = String::from(" ");
    for spec in OPTIONS
        .iter()
        .filter(|spec| !spec.hidden && !spec.is_available())
    {
        let name = spec.names.last().copied().unwrap_or_default();
        if line.len() + name.len() > 96 {
            text.push_str(&line);
            text.push('\n');
            line = String::from(" ");
        }
        line.push(' ');
        line.push_str(name);
    }
    text.push_str(&line);
    text.push('\n');
    text
}

/// Text of an option's value; the error names what was found.
pub(crate) fn text(value: &OsStr) -> Result<&str, String> {
    value
        .to_str()
        .ok_or_else(|| format!("{value:?} is not valid UTF-8"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(line: &str) -> Result<Options, UsageError> {
        let words: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
        parse(&words)
    }

    #[track_caller]
    fn fails(line: &str, with: &str) {
        let error = run(line).expect_err(line).0;
        assert!(error.contains(with), "{line}: {error}");
    }

    #[track_caller]
    fn np(line: &str, want: u32) {
        assert_eq!(run(line).expect(line).num_proc, Some(want), "{line}");
    }

    #[test]
    fn accepts_every_spelling_of_the_process_count() {
        np("-np 4 x", 4);
        np("-np=4 x", 4);
        np("-n 4 x", 4);
        np("--num-proc 4 x", 4);
        np("--num-proc=4 x", 4);
        np("--num-p 4 x", 4);
    }

    #[test]
    fn refuses_what_argparse_refuses() {
        fails("-np4 x", "unknown option -np4 (did you mean -np?)");
        fails("--np 4 x", "unknown option --np");
        fails("--num 4 x", "ambiguous option: --num could match");
        fails("-prefix -np 1 x", "ambiguous option: -prefix");
        fails("-np", "argument -np/--num-proc: expected one value");
        fails(
            "-np --verbose x",
            "argument -np/--num-proc: expected one value",
        );
        fails("-np four x", "invalid whole number");
        fails("-np 1 --verbose=1 x", "takes no value");
        fails("x", "required: -np/--num-proc");
        fails("-np 2", "no command");
    }

    #[test]
    fn refuses_counts_below_one() {
        fails(
            "-np 0 x",
            "argument -np/--num-proc: must be at least 1, got 0",
        );
        fails(
            "-np -1 x",
            "argument -np/--num-proc: must be at least 1, got -1",
        );
        fails("-np=-1 x", "must be at least 1, got -1");
        fails("-np 5000000000 x", "invalid whole number");
    }

    #[test]
    fn stops_at_the_command_and_passes_it_on() {
        let options = run("-np 2 python -u train.py --verbose -np 7 -- x").expect("valid");
        assert_eq!(
            options.command,
            [
                "python",
                "-u",
                "train.py",
                "--verbose",
                "-np",
                "7",
                "--",
                "x"
            ]
        );
        assert!(!options.verbose);
        let options = run("-np 2 -- --odd name").expect("valid");
        assert_eq!(options.command, ["--odd", "name"]);
    }

    #[test]
    fn reads_hosts_ssh_and_output_options() {
        let options = run(
            "-np 3 -H a:2,b:1 -p 2222 -i /k --network-interfaces eth0,eth1 --network-interface ib0 \
             --output-filename out -prefix-timestamp --verbose --start-timeout 7 --gloo --disable-cache x",
        )
        .expect("valid");
        assert_eq!(options.hosts.as_deref(), Some("a:2,b:1"));
        assert_eq!(options.ssh_port, Some(2222));
        assert_eq!(options.ssh_identity_file, Some("/k".into()));
        assert_eq!(options.network_interfaces, ["eth0", "eth1", "ib0"]);
        assert_eq!(options.output_filename, Some("out".into()));
        assert!(options.prefix_timestamp && options.verbose);
        assert_eq!(options.start_timeout, Some(7));
        assert_eq!(run("-np 1 -p22 x").expect("valid").ssh_port, Some(22));
        let file = run("-np 1 -hostfile f x").expect("valid").hostfile;
        assert_eq!(file, run("-np 1 --hostfile=f x").expect("valid").hostfile);
    }

    #[test]
    fn keeps_exclusive_options_apart() {
        fails(
            "-np 1 -H a:1 --hostfile f x",
            "argument -hostfile/--hostfile: not allowed with argument -H",
        );
        fails("-np 1 --stall-check --no-stall-check x", "not allowed with");
        fails(
            "-np 1 --log-with-timestamp --log-without-timestamp x",
            "not allowed with",
        );
        run("-np 1 -prefix-timestamp --log-without-timestamp x")
            .expect("these two may be combined");
    }

    #[test]
    fn turns_settings_into_environment() {
        #[track_caller]
        fn sets(option: &str, name: &str, value: &str) {
            let options = run(&format!("-np 1 {option} x")).expect(option);
            assert_eq!(options.knobs, [(name, value.to_owned())], "{option}");
        }
        sets(
            "--fusion-threshold-mb 3",
            "HOROVOD_FUSION_THRESHOLD",
            "3145728",
        );
        sets("--cycle-time-ms 3", "HOROVOD_CYCLE_TIME", "3.0");
        sets("--cycle-time-ms 0.5", "HOROVOD_CYCLE_TIME", "0.5");
        sets("--cache-capacity 0", "HOROVOD_CACHE_CAPACITY", "0");
        sets("--autotune", "HOROVOD_AUTOTUNE", "1");
        sets("--autotune-log-file a.csv", "HOROVOD_AUTOTUNE_LOG", "a.csv");
        sets(
            "--autotune-warmup-samples 0",
            "HOROVOD_AUTOTUNE_WARMUP_SAMPLES",
            "0",
        );
        sets(
            "--autotune-steps-per-sample 4",
            "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE",
            "4",
        );
        sets(
            "--autotune-bayes-opt-max-samples 7",
            "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
            "7",
        );
        sets(
            "--autotune-gaussian-process-noise 0.25",
            "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
            "0.25",
        );
        assert!(
            run("-np 1 --no-autotune x")
                .expect("valid")
                .knobs
                .is_empty()
        );
        fails("-np 1 --autotune --no-autotune x", "not allowed with");
        fails("-np 1 --autotune-warmup-samples -1 x", "must be >= 0");
        fails(
            "-np 1 --autotune-gaussian-process-noise 1.5 x",
            "must be in [0, 1]",
        );
        sets("--no-stall-check", "HOROVOD_STALL_CHECK_DISABLE", "1");
        sets("--stall-check", "HOROVOD_STALL_CHECK_DISABLE", "0");
        sets(
            "--stall-check-warning-time-seconds 5",
            "HOROVOD_STALL_CHECK_TIME_SECONDS",
            "5",
        );
        sets(
            "--stall-check-shutdown-time-seconds 6",
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
            "6",
        );
        sets(
            "--gloo-timeout-seconds 9",
            "HOROVOD_GLOO_TIMEOUT_SECONDS",
            "9",
        );
        sets("--timeline-filename t.json", "HOROVOD_TIMELINE", "t.json");
        for (option, value) in [("", "1"), ("no-", "0")] {
            let words = format!("-np 1 --{option}timeline-mark-cycles --timeline-filename t x");
            let knobs = run(&words).expect("valid").knobs;
            assert_eq!(knobs[0], ("HOROVOD_TIMELINE_MARK_CYCLES", value.into()));
        }
        let alone = run("-np 1 --timeline-mark-cycles x").expect("valid");
        assert_eq!(alone.knobs, []);
        sets("--log-level DEBUG", "HOROVOD_LOG_LEVEL", "DEBUG");
        sets("--log-without-timestamp", "HOROVOD_LOG_HIDE_TIME", "1");
        sets("--log-with-timestamp", "HOROVOD_LOG_HIDE_TIME", "0");
        fails("-np 1 --cycle-time-ms -1 x", "must be >= 0");
        fails("-np 1 --cycle-time-ms nan x", "must be >= 0");
        fails("-np 1 --fusion-threshold-mb -1 x", "must be >= 0");
        fails("-np 1 --fusion-threshold-mb 99999999999999 x", "too large");
        fails(
            "-np 1 --log-level LOUD x",
            "invalid choice: \"LOUD\" (choose from TRACE",
        );
    }

    #[test]
    fn says_what_is_not_there_yet() {
        for option in [
            "--mpi",
            "--jsrun",
            "--min-np=1",
            "--tcp",
            "--config-file=c",
            "--host-discovery-script=s",
            "--thread-affinity=1",
        ] {
            fails(
                &format!("-np 1 {option} x"),
                "is not available yet in this version",
            );
        }
    }

    #[test]
    fn suggests_the_nearest_name() {
        fails("-np 1 --verbos3 x", "did you mean --verbose?");
        fails("-np 1 --zzz x", "unknown option --zzz");
        fails(
            "-np 1 --outptu-filename d x",
            "did you mean --output-filename?",
        );
    }

    #[test]
    fn reports_need_no_command() {
        assert!(run("-cb").expect("valid").check_build);
        assert!(run("--check-build --verbose").expect("valid").check_build);
        assert!(run("-v").expect("valid").version);
        assert!(run("--version --nonsense").expect("stops at once").version);
        assert!(run("-h").expect("valid").help);
    }

    #[test]
    fn helps_with_every_available_option() {
        let text = help();
        for spec in OPTIONS.iter().filter(|spec| !spec.hidden) {
            assert!(
                spec.names.iter().any(|name| text.contains(name)),
                "{:?}",
                spec.names
            );
        }
    }
}
