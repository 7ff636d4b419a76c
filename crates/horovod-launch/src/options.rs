//! The one table of `horovodrun`'s options: names, groups, effects and help.

use std::ffi::{OsStr, OsString};

use crate::args::{Options, text};

type SetValue = fn(&mut Options, &OsStr) -> Result<(), String>;

/// What an option does.
pub(crate) enum Action {
    /// Takes no value.
    Flag(fn(&mut Options)),
    /// Takes one value: its name in the help, and what to do with it.
    Value(&'static str, SetValue),
    /// Known from Horovod, refused until a later version has it.
    Later,
}

/// One option.
pub(crate) struct OptionSpec {
    pub(crate) names: &'static [&'static str],
    pub(crate) group: &'static str,
    /// At most one option of a named set may be given.
    pub(crate) exclusive: Option<&'static str>,
    /// Works, but is not advertised.
    pub(crate) hidden: bool,
    pub(crate) action: Action,
    pub(crate) help: &'static str,
}

impl OptionSpec {
    /// The names as argparse shows them: `-np/--num-proc`.
    pub(crate) fn title(&self) -> String {
        self.names.join("/")
    }

    pub(crate) fn is_available(&self) -> bool {
        !matches!(self.action, Action::Later)
    }

    const fn only(mut self, set: &'static str) -> Self {
        self.exclusive = Some(set);
        self
    }

    const fn hide(mut self) -> Self {
        self.hidden = true;
        self
    }
}

const fn option(
    group: &'static str,
    names: &'static [&'static str],
    action: Action,
    help: &'static str,
) -> OptionSpec {
    OptionSpec {
        names,
        group,
        exclusive: None,
        hidden: false,
        action,
        help,
    }
}

const fn later(names: &'static [&'static str]) -> OptionSpec {
    option("later", names, Action::Later, "")
}

const GENERAL: &str = "general";
const HOSTS: &str = "hosts";
const OUTPUT: &str = "output";
const TUNING: &str = "settings of the ranks";

/// Only passed on with a file to record into.
pub(crate) const TIMELINE_MARK_CYCLES: &str = "HOROVOD_TIMELINE_MARK_CYCLES";

/// Every option of Horovod's launcher.
pub(crate) static OPTIONS: &[OptionSpec] = &[
    option(
        GENERAL,
        &["-h", "--help"],
        Action::Flag(|o| o.help = true),
        "show this help",
    ),
    option(
        GENERAL,
        &["-v", "--version"],
        Action::Flag(|o| o.version = true),
        "show the version",
    ),
    option(
        GENERAL,
        &["-np", "--num-proc"],
        Action::Value("NUM_PROC", |o, v| {
            let count = whole(v)?;
            if count < 1 {
                return Err(format!("must be at least 1, got {count}"));
            }
            o.num_proc = Some(u32::try_from(count).map_err(|_| not_whole(v))?);
            Ok(())
        }),
        "number of processes to start",
    ),
    option(
        GENERAL,
        &["-cb", "--check-build"],
        Action::Flag(|o| o.check_build = true),
        "show which frameworks and transports were found",
    ),
    option(
        GENERAL,
        &["--start-timeout"],
        Action::Value("SECONDS", |o, v| {
            o.start_timeout = Some(u32::try_from(at_least_zero(v)?).map_err(|_| too_large(v))?);
            Ok(())
        }),
        "until all hosts must have answered (HOROVOD_START_TIMEOUT, else 30)",
    ),
    option(
        GENERAL,
        &["--verbose"],
        Action::Flag(|o| o.verbose = true),
        "say what is done",
    ),
    option(
        GENERAL,
        &["--disable-cache"],
        Action::Flag(|_| ()),
        "accepted; nothing is cached between runs",
    ),
    option(
        HOSTS,
        &["-H", "--hosts"],
        Action::Value("HOST:SLOTS,...", |o, v| {
            o.hosts = Some(text(v)?.to_owned());
            Ok(())
        }),
        "hosts with their number of processes; default localhost:NUM_PROC",
    )
    .only("hosts"),
    option(
        HOSTS,
        &["-hostfile", "--hostfile"],
        Action::Value("FILE", |o, v| {
            o.hostfile = Some(v.into());
            Ok(())
        }),
        "one host per line: `name slots=n`, `name:n` or `name`",
    )
    .only("hosts"),
    option(
        HOSTS,
        &["-p", "--ssh-port"],
        Action::Value("PORT", |o, v| {
            let port = u16::try_from(whole(v)?).ok().filter(|port| *port > 0);
            o.ssh_port = Some(port.ok_or_else(|| {
                format!(
                    "must be a port from 1 to 65535, got {}",
                    v.to_string_lossy()
                )
            })?);
            Ok(())
        }),
        "ssh port of all hosts",
    ),
    option(
        HOSTS,
        &["-i", "--ssh-identity-file"],
        Action::Value("FILE", |o, v| {
            o.ssh_identity_file = Some(v.into());
            Ok(())
        }),
        "private key for ssh",
    ),
    option(
        HOSTS,
        &["--network-interfaces"],
        Action::Value("NAME,...", interfaces),
        "interfaces to use between hosts; default all that are up",
    ),
    option(
        HOSTS,
        &["--network-interface"],
        Action::Value("NAME", interfaces),
        "the same, one by one",
    ),
    option(
        HOSTS,
        &["--gloo"],
        Action::Flag(|_| ()),
        "accepted: it means this package's own transport, the only one",
    )
    .only("controller"),
    option(
        OUTPUT,
        &["--output-filename"],
        Action::Value("DIR", |o, v| {
            o.output_filename = Some(v.into());
            Ok(())
        }),
        "also write DIR/rank.N/stdout and DIR/rank.N/stderr",
    ),
    option(
        OUTPUT,
        &["-prefix-timestamp", "--prefix-output-with-timestamp"],
        Action::Flag(|o| o.prefix_timestamp = true),
        "put the local time before each line",
    ),
    option(
        TUNING,
        &["--fusion-threshold-mb"],
        Action::Value("MB", |o, v| {
            let bytes = at_least_zero(v)?
                .checked_mul(1 << 20)
                .ok_or_else(|| too_large(v))?;
            o.knobs
                .push(("HOROVOD_FUSION_THRESHOLD", bytes.to_string()));
            Ok(())
        }),
        "most bytes of tensors that travel together (128)",
    ),
    option(
        TUNING,
        &["--cycle-time-ms"],
        Action::Value("MS", |o, v| {
            let ms = number(v)?;
            if !ms.is_finite() || ms < 0.0 {
                return Err(format!("must be >= 0, got {ms}"));
            }
            // `{:?}` writes 3 as 3.0, as Horovod does.
            o.knobs.push(("HOROVOD_CYCLE_TIME", format!("{ms:?}")));
            Ok(())
        }),
        "longest wait to batch more tensors",
    ),
    option(
        TUNING,
        &["--cache-capacity"],
        Action::Value("N", |o, v| knob(o, "HOROVOD_CACHE_CAPACITY", v)),
        "tensors whose negotiation is remembered (1024); 0 turns it off",
    ),
    option(
        TUNING,
        &["--autotune"],
        Action::Flag(|o| o.knobs.push(("HOROVOD_AUTOTUNE", "1".into()))),
        "try settings out while the job runs, keep what is clearly faster",
    )
    .only("autotune"),
    // Cannot overrule HOROVOD_AUTOTUNE=1 in the environment, as in Horovod.
    option(TUNING, &["--no-autotune"], Action::Flag(|_| ()), "")
        .only("autotune")
        .hide(),
    option(
        TUNING,
        &["--autotune-log-file"],
        Action::Value("FILE", |o, v| {
            o.knobs.push(("HOROVOD_AUTOTUNE_LOG", text(v)?.to_owned()));
            Ok(())
        }),
        "write the scores there as CSV",
    ),
    option(
        TUNING,
        &["--autotune-warmup-samples"],
        Action::Value("N", |o, v| knob(o, "HOROVOD_AUTOTUNE_WARMUP_SAMPLES", v)),
        "rounds of five samples to throw away at the start (3)",
    ),
    option(
        TUNING,
        &["--autotune-steps-per-sample"],
        Action::Value("N", |o, v| knob(o, "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", v)),
        "training steps to measure at a time (10)",
    ),
    option(
        TUNING,
        &["--autotune-bayes-opt-max-samples"],
        Action::Value("N", |o, v| {
            knob(o, "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", v)
        }),
        "settings to try (20)",
    ),
    option(
        TUNING,
        &["--autotune-gaussian-process-noise"],
        Action::Value("SHARE", |o, v| {
            let noise = number(v)?;
            if !(0.0..=1.0).contains(&noise) {
                return Err(format!("must be in [0, 1], got {noise}"));
            }
            o.knobs
                .push(("HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", noise.to_string()));
            Ok(())
        }),
        "noise of scores as a share of their spread, 0 to 1 (measured)",
    ),
    option(
        TUNING,
        &["--timeline-filename"],
        Action::Value("FILE", |o, v| {
            o.knobs.push(("HOROVOD_TIMELINE", text(v)?.to_owned()));
            Ok(())
        }),
        "record what happens to each tensor into FILE of rank 0's host",
    ),
    option(
        TUNING,
        &["--timeline-mark-cycles"],
        Action::Flag(|o| o.knobs.push((TIMELINE_MARK_CYCLES, "1".into()))),
        "mark each batch of answers of the coordinator in it",
    )
    .only("timeline cycles"),
    option(
        TUNING,
        &["--no-timeline-mark-cycles"],
        Action::Flag(|o| o.knobs.push((TIMELINE_MARK_CYCLES, "0".into()))),
        "",
    )
    .only("timeline cycles")
    .hide(),
    option(
        TUNING,
        &["--no-stall-check"],
        Action::Flag(|o| o.knobs.push(("HOROVOD_STALL_CHECK_DISABLE", "1".into()))),
        "do not warn about ranks that are late",
    )
    .only("stall"),
    option(
        TUNING,
        &["--stall-check"],
        Action::Flag(|o| o.knobs.push(("HOROVOD_STALL_CHECK_DISABLE", "0".into()))),
        "",
    )
    .only("stall")
    .hide(),
    option(
        TUNING,
        &["--stall-check-warning-time-seconds"],
        Action::Value("SECONDS", |o, v| {
            knob(o, "HOROVOD_STALL_CHECK_TIME_SECONDS", v)
        }),
        "when to warn about ranks that are late (60)",
    ),
    option(
        TUNING,
        &["--stall-check-shutdown-time-seconds"],
        Action::Value("SECONDS", |o, v| {
            knob(o, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", v)
        }),
        "when to give up on them (0: never)",
    ),
    option(
        TUNING,
        &["--gloo-timeout-seconds"],
        Action::Value("SECONDS", |o, v| knob(o, "HOROVOD_GLOO_TIMEOUT_SECONDS", v)),
        "until all ranks must have met (30)",
    ),
    option(
        TUNING,
        &["--log-level"],
        Action::Value("LEVEL", |o, v| {
            const LEVELS: [&str; 6] = ["TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL"];
            let level = text(v)?;
            if !LEVELS.contains(&level) {
                return Err(format!(
                    "invalid choice: {level:?} (choose from {})",
                    LEVELS.join(", ")
                ));
            }
            o.knobs.push(("HOROVOD_LOG_LEVEL", level.to_owned()));
            Ok(())
        }),
        "TRACE, DEBUG, INFO, WARNING, ERROR or FATAL",
    ),
    option(
        TUNING,
        &["--log-without-timestamp"],
        Action::Flag(|o| o.knobs.push(("HOROVOD_LOG_HIDE_TIME", "1".into()))),
        "log lines without the time",
    )
    .only("log time"),
    option(
        TUNING,
        &["--log-with-timestamp"],
        Action::Flag(|o| o.knobs.push(("HOROVOD_LOG_HIDE_TIME", "0".into()))),
        "",
    )
    .only("log time")
    .hide(),
    option(
        TUNING,
        &["--log-hide-timestamp"],
        Action::Flag(|o| o.knobs.push(("HOROVOD_LOG_HIDE_TIME", "1".into()))),
        "",
    )
    .only("log time")
    .hide(),
    option(
        TUNING,
        &["--no-log-hide-timestamp"],
        Action::Flag(|o| o.knobs.push(("HOROVOD_LOG_HIDE_TIME", "0".into()))),
        "",
    )
    .only("log time")
    .hide(),
    later(&["--mpi"]),
    later(&["--jsrun"]),
    later(&["--config-file"]),
    later(&["--host-discovery-script"]),
    later(&["--min-np", "--min-num-proc"]),
    later(&["--max-np", "--max-num-proc"]),
    later(&["--slots-per-host"]),
    later(&["--elastic-timeout"]),
    later(&["--reset-limit"]),
    later(&["--blacklist-cooldown-range"]),
    option(
        TUNING,
        &["--hierarchical-allreduce"],
        Action::Flag(|o| o.knobs.push(("HOROVOD_HIERARCHICAL_ALLREDUCE", "1".into()))),
        "add up inside each host before passing results between hosts (this is the default)",
    )
    .only("hierarchical allreduce"),
    option(
        TUNING,
        &["--no-hierarchical-allreduce"],
        Action::Flag(|o| o.knobs.push(("HOROVOD_HIERARCHICAL_ALLREDUCE", "0".into()))),
        "take no account of hosts",
    )
    .only("hierarchical allreduce"),
    option(
        TUNING,
        &["--hierarchical-allgather"],
        Action::Flag(|o| o.knobs.push(("HOROVOD_HIERARCHICAL_ALLGATHER", "1".into()))),
        "gather inside each host before passing blocks between hosts (this is the default)",
    )
    .only("hierarchical allgather"),
    option(
        TUNING,
        &["--no-hierarchical-allgather"],
        Action::Flag(|o| o.knobs.push(("HOROVOD_HIERARCHICAL_ALLGATHER", "0".into()))),
        "take no account of hosts",
    )
    .only("hierarchical allgather"),
    option(
        TUNING,
        &["--torus-allreduce"],
        Action::Flag(|o| o.knobs.push(("HOROVOD_TORUS_ALLREDUCE", "1".into()))),
        "the same as --hierarchical-allreduce",
    )
    .only("torus allreduce"),
    option(
        TUNING,
        &["--no-torus-allreduce"],
        Action::Flag(|o| o.knobs.push(("HOROVOD_TORUS_ALLREDUCE", "0".into()))),
        "",
    )
    .only("torus allreduce")
    .hide(),
    later(&["--mpi-threads-disable"]),
    later(&["--no-mpi-threads-disable"]).hide(),
    later(&["--mpi-args"]),
    later(&["--tcp"]),
    later(&["--binding-args"]),
    later(&["--num-nccl-streams"]),
    later(&["--thread-affinity"]),
];

fn interfaces(options: &mut Options, value: &OsStr) -> Result<(), String> {
    for name in text(value)?.split(',').map(str::trim) {
        if name.is_empty() {
            return Err(format!(
                "empty interface name in {:?}",
                value.to_string_lossy()
            ));
        }
        if !options.network_interfaces.iter().any(|known| known == name) {
            options.network_interfaces.push(name.to_owned());
        }
    }
    Ok(())
}

fn knob(options: &mut Options, variable: &'static str, value: &OsStr) -> Result<(), String> {
    options
        .knobs
        .push((variable, at_least_zero(value)?.to_string()));
    Ok(())
}

fn number(value: &OsStr) -> Result<f64, String> {
    let invalid = |_| format!("invalid number: {:?}", value.to_string_lossy());
    text(value)?.parse().map_err(invalid)
}

fn not_whole(value: &OsStr) -> String {
    format!(
        "invalid whole number: {:?}",
        OsString::from(value).to_string_lossy()
    )
}

fn too_large(value: &OsStr) -> String {
    format!("{} is too large", value.to_string_lossy())
}

fn whole(value: &OsStr) -> Result<i64, String> {
    text(value)?.trim().parse().map_err(|_| not_whole(value))
}

fn at_least_zero(value: &OsStr) -> Result<i64, String> {
    let number = whole(value)?;
    if number < 0 {
        Err(format!("must be >= 0, got {number}"))
    } else {
        Ok(number)
    }
}
