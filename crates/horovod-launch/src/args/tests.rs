//! Command lines and what becomes of them.

use horovod_settings::Accepts;

use super::*;
use crate::options::Written;

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
fn the_doctor_needs_neither_a_count_nor_a_command() {
    let form = |line: &str| run(line).expect(line).doctor;
    assert_eq!(form("--doctor"), Some(DoctorForm::Text));
    assert_eq!(form("--doctor=json -H a:1"), Some(DoctorForm::Json));
    assert_eq!(form("--doct -np 2 python x.py"), Some(DoctorForm::Text));
    assert_eq!(form("-np 2 python --doctor"), None);
    assert_eq!(run("--doctor json").expect("a command").command, ["json"]);
    fails("--doctor=xml", "must be `json` or nothing, got \"xml\"");
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
    run("-np 1 -prefix-timestamp --log-without-timestamp x").expect("these two may be combined");
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
    sets("--no-autotune", "HOROVOD_AUTOTUNE", "0");
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
        "--check-consistency 100",
        "HOROVOD_CHECK_CONSISTENCY",
        "100",
    );
    sets(
        "--consistency-action error",
        "HOROVOD_CONSISTENCY_ACTION",
        "error",
    );
    sets("--check-replicas error", "HOROVOD_CHECK_REPLICAS", "error");
    fails("-np 1 --check-consistency -1 x", "must be >= 0");
    fails(
        "-np 1 --consistency-action stop x",
        "invalid choice: \"stop\" (choose from warn, error)",
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
fn what_means_nothing_here_is_accepted_with_a_note() {
    #[track_caller]
    fn notes(option: &str, note: &str, knobs: &[(&'static str, &str)]) {
        let options = run(&format!("-np 1 {option} x")).expect(option);
        let name = option.split(['=', ' ']).next().unwrap_or_default();
        assert_eq!(options.notes.len(), 1, "{option}");
        assert!(options.notes[0].contains(name), "{:?}", options.notes);
        assert!(options.notes[0].contains(note), "{:?}", options.notes);
        let found: Vec<_> = options
            .knobs
            .iter()
            .map(|(n, v)| (*n, v.as_str()))
            .collect();
        assert_eq!(found, knobs, "{option}");
    }
    notes("--mpi-args=--map-by", "without --mpi", &[]);
    notes("--binding-args=--bind-to", "without --mpi", &[]);
    notes("--tcp", "TCP in any case", &[("NCCL_IB_DISABLE", "1")]);
    notes(
        "--mpi-threads-disable",
        "MPI carries no tensors",
        &[("HOROVOD_MPI_THREADS_DISABLE", "1")],
    );
    notes(
        "--num-nccl-streams 2",
        "have one stream",
        &[("HOROVOD_NUM_NCCL_STREAMS", "2")],
    );
    notes(
        "--thread-affinity 0,2",
        "not pinned".trim_start_matches("not "),
        &[("HOROVOD_THREAD_AFFINITY", "0,2")],
    );
    fails("-np 1 --mpi --gloo x", "not allowed with argument --mpi");
    fails(
        "-np 1 --thread-affinity 0,-2 x",
        "thread_affinity=0,-2 must be >= 0",
    );
    fails(
        "-np 1 --num-nccl-streams -1 x",
        "num_nccl_streams=-1 must be >= 0",
    );
    assert_eq!(
        run("-np 1 --gloo --disable-cache x").expect("valid").notes,
        [""; 0]
    );
}

#[test]
fn processes_are_started_by_whom_the_options_say() {
    let of = |words: &str| run(&format!("-np 2 {words} x")).expect(words);
    assert_eq!(of("--mpi").mpi.starter, Starter::Mpi);
    assert_eq!(of("--jsrun").mpi.starter, Starter::Jsrun);
    assert_eq!(of("--gloo").mpi.starter, Starter::Own);
    let words = ["-np", "2", "--mpi", "--tcp", "--mpi-args=-x A", "x"].map(OsString::from);
    let options = parse(&words).expect("valid");
    assert_eq!(options.mpi.args.as_deref(), Some("-x A"));
    assert!(options.mpi.tcp);
    assert_eq!(options.notes, [""; 0]);
    fails("-np 2 --mpi --min-np 1 x", "cannot come and go");
    assert!(run("-np 1 python -").is_ok());
    fails("-np 1 --mpi python -", "which no rank gets with --mpi");
    let notes = of("--jsrun --network-interfaces eth0,eth1").notes;
    assert!(
        notes[0].contains("only Horovod's own links keep to eth0,eth1"),
        "{notes:?}"
    );
    fails(
        "-np 2 --jsrun --dialed-agents x",
        "not allowed with argument --dialed-agents",
    );
}

#[test]
fn range_errors_name_the_setting_as_horovod_does() {
    fails(
        "-np 1 --fusion-threshold-mb -1 x",
        "fusion_threshold_mb=-1 must be >= 0",
    );
    fails(
        "-np 1 --cycle-time-ms -1 x",
        "cycle_time_ms=-1 must be >= 0",
    );
    fails(
        "-np 1 --cache-capacity -1 x",
        "cache_capacity=-1 must be >= 0",
    );
    fails(
        "-np 1 --gloo-timeout-seconds -1 x",
        "gloo_timeout_seconds=-1 must be >= 0",
    );
    fails(
        "-np 1 --autotune-gaussian-process-noise 2 x",
        "autotune_gaussian_process_noise=2 must be in [0, 1]",
    );
}

#[test]
fn a_comma_may_stand_after_the_last_interface() {
    for line in [
        "-np 1 --network-interfaces eth0, x",
        "-np 1 --network-interface=eth0 x",
    ] {
        assert_eq!(run(line).expect(line).network_interfaces, ["eth0"]);
    }
    fails(
        "-np 1 --network-interfaces eth0,, x",
        "empty interface name",
    );
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
fn options_of_other_launchers_are_told_what_stands_for_them() {
    for (line, instead) in [
        ("--nproc_per_node 4 x", "option of torchrun; -np takes"),
        ("--nproc-per-node=4 x", "option of torchrun; -np takes"),
        (
            "-np 2 -x NCCL_DEBUG x",
            "ranks have the environment of horovodrun",
        ),
        ("-np 2 -map-by slot x", "-H name:slots"),
        (
            "-np 2 --bind-to none x",
            "leave it out: nothing here needs it",
        ),
        ("--ntasks 2 x", "-np takes the number of processes"),
        ("-np 2 -m package.train", "python -m MODULE"),
    ] {
        fails(line, "unknown option");
        fails(line, instead);
    }
    // An option of our own is never taken for one of theirs.
    for spec in options::all() {
        for name in spec.names {
            assert_eq!(options::foreign_advice(name), None, "{name}");
        }
    }
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
    for spec in options::all().filter(|spec| !spec.hidden) {
        assert!(
            spec.names.iter().any(|name| text.contains(name)),
            "{:?}",
            spec.names
        );
    }
}

#[test]
fn reads_the_options_of_elastic_jobs() {
    let line = "-np 2 --min-np 1 --max-num-proc 4 --reset-limit 0 --elastic-timeout 9 \
                --blacklist-cooldown-range 10 100 --slots-per-host 3 --host-discovery-script ./h x";
    let elastic = run(line).expect(line).elastic;
    let want = ElasticOptions {
        script: Some("./h".to_owned()),
        min_np: Some(1),
        max_np: Some(4),
        slots_per_host: Some(3),
        timeout: Some(9),
        reset_limit: Some(0),
        cooldown: Some((10, 100)),
    };
    assert_eq!(elastic, want);
    assert!(!run("-np 2 x").expect("fixed").elastic.is_on());
    fails(
        "-np 2 --min-np 1 --blacklist-cooldown-range 10",
        "expected two values",
    );
    fails(
        "-np 2 --min-np 1 --blacklist-cooldown-range 10 9 x",
        "the smaller one first",
    );
    fails("-np 2 --min-np 0 x", "must be at least 1");
    fails("-np 2 --min-np 3 x", "more than -np 2");
    // Without any of the two that make a job elastic the others mean nothing, and the job runs.
    let fixed = run("-np 2 --reset-limit 3 --max-np 1 x").expect("fixed");
    assert!(
        fixed.notes[0].starts_with("--max-np: no effect"),
        "{:?}",
        fixed.notes
    );
    assert!(
        fixed.notes[1].starts_with("--reset-limit: no effect"),
        "{:?}",
        fixed.notes
    );
    fails(
        "-np 2 -H a:1 --host-discovery-script ./h x",
        "not allowed with argument",
    );
}

#[test]
fn an_option_accepts_and_says_what_its_setting_does() {
    let mut settings = 0;
    for spec in options::all() {
        let (name, Some(setting)) = (spec.names[0], spec.setting()) else {
            continue;
        };
        settings += 1;
        let sent = |value: &str| {
            let mut options = Options::default();
            spec.apply(&mut options, value.as_ref())
                .map(|()| options.knobs)
        };
        match spec.action {
            options::Action::Turns(_, value) => {
                let knobs = sent("").expect(name);
                assert_eq!(knobs, [(setting.name(), value.to_owned())], "{name}");
                assert_eq!(setting.accepts(), Accepts::Flag, "{name}");
                assert!(spec.hidden || !spec.help().is_empty(), "{name}");
                let is_default = setting.is_default(value);
                assert_eq!(spec.help().contains("default"), is_default, "{name}");
            }
            options::Action::Setting(_, _, written) => {
                let scale = if written == Written::Mebibytes {
                    1 << 20
                } else {
                    1
                };
                let help = spec.help();
                if setting.has_default() {
                    let default = setting.default_text();
                    let typed = match scale {
                        1 => default,
                        scale => (default.parse::<u64>().expect(name) / scale).to_string(),
                    };
                    assert!(help.ends_with(&format!("({typed})")), "{name}: {help}");
                    let knobs = sent(&typed).expect(name);
                    assert!(setting.is_default(&knobs[0].1), "{name}: {knobs:?}");
                }
                for value in ["-1", "0", "1", "17", "0.5", "1e10", "nan", "5000000000"] {
                    for (variable, value) in sent(value).into_iter().flatten() {
                        assert_eq!(variable, setting.name());
                        assert_eq!(setting.check(&value), Ok(()), "{name}");
                    }
                    if written != Written::Text && setting.check(value).is_err() && scale == 1 {
                        assert!(sent(value).is_err(), "{name} {value}");
                    }
                }
            }
            _ => assert!(
                spec.help().contains(&setting.default_text()),
                "{name}: {}",
                spec.help()
            ),
        }
    }
    assert!(settings > 20, "{settings}");
}

#[test]
fn no_option_sets_a_setting_past_the_table() {
    for spec in options::all() {
        if let options::Action::Sets(variable, _) | options::Action::Count(_, variable) =
            spec.action
        {
            assert!(horovod_settings::find(variable).is_none(), "{variable}");
        }
    }
}

#[test]
fn agents_that_join_need_a_port_and_no_hosts() {
    let options = run("-np 4 --agents-port 29500 python train.py").expect("good");
    assert_eq!((options.agents_port, options.dialed), (Some(29500), true));
    fails(
        "-np 2 --agents-port 0 x",
        "argument --agents-port: must be a port from 1 to 65535, got 0",
    );
    fails(
        "-np 2 -H a:2 --agents-port 29500 x",
        "argument --agents-port: not allowed with argument -H/--hosts",
    );
}

#[test]
fn a_job_is_named_by_the_option_or_by_the_word_after_it() {
    for line in ["--top=7", "--top 7"] {
        assert_eq!(run(line).expect(line).top, Some(Wanted::Process(7)));
    }
    for line in ["--status=7", "--status 7"] {
        assert_eq!(run(line).expect(line).status, Some(Wanted::Process(7)));
    }
    assert_eq!(run("--top").expect("one job").top, Some(Wanted::All));
    fails("--top=7 8", "argument --top: the job is named twice");
    fails("--status train.py", "argument --status: the word");
    fails("--top 7 8", "argument --top: there is one job at most");
}
