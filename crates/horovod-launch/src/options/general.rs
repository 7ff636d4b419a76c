//! Options of the launcher itself: how many, where, through what, with what output.

use std::ffi::OsStr;

use super::given::{Shell, Starter, Wanted, text};
use super::{
    Action, Form, OptionSpec, Options, Wrong, at_least_zero, not_whole, option, too_large, whole,
};

use crate::hosts::without_last_comma;
use crate::trace::parse_time;
use horovod_doctor::Form as DoctorForm;
use horovod_settings as settings;

const GENERAL: &str = "general";
const HOSTS: &str = "hosts";
const OUTPUT: &str = "output";

pub(super) static OPTIONS: &[OptionSpec] = &[
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
                return Err(format!("must be at least 1, got {count}").into());
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
        &["--completion"],
        Action::Value("SHELL", |o, v| {
            let name = text(v)?;
            let shell = Shell::named(name);
            o.completion =
                Some(shell.ok_or_else(|| format!("must be bash, zsh or fish, got {name:?}"))?);
            Ok(())
        }),
        "print what bash, zsh or fish needs to complete command lines of horovodrun",
    ),
    option(
        GENERAL,
        &["--doctor"],
        Action::Either("json", |o, v| {
            o.doctor = Some(match text(v)? {
                "" => DoctorForm::Text,
                "json" => DoctorForm::Json,
                other => return Err(format!("must be `json` or nothing, got {other:?}").into()),
            });
            Ok(())
        }),
        "start nothing: look at hosts and network for 15 s at most, say what to mend",
    ),
    option(
        GENERAL,
        &["--status"],
        Action::Either("JOB", |o, v| {
            o.status = Some(job(v)?);
            Ok(())
        }),
        "start nothing: show the jobs of this user whose rank 0 runs on this host",
    ),
    option(
        GENERAL,
        &["--top"],
        Action::Either("JOB", |o, v| {
            o.top = Some(job(v)?);
            Ok(())
        }),
        "start nothing: show a running job in the terminal, until q is pressed",
    ),
    option(
        GENERAL,
        &["--trace"],
        Action::Value("TIME", |o, v| {
            o.trace = Some((parse_time(text(v)?)?, Wanted::All));
            Ok(())
        }),
        "start nothing: record the next TIME (5s, 500ms, 2m) of a running job as a timeline; a word after TIME chooses the job",
    ),
    option(
        GENERAL,
        &["--config-file"],
        Action::Value("FILE", |o, v| {
            o.config_file = Some(v.into());
            Ok(())
        }),
        "YAML file with settings of the ranks; options given here win",
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
        &["--terminate-timeout"],
        Action::Value("SECONDS", |o, v| {
            o.terminate_timeout = Some(u32::try_from(at_least_zero(v)?).map_err(|_| too_large(v))?);
            Ok(())
        }),
        "from SIGTERM to SIGKILL for ranks that shall end (HOROVOD_TERMINATE_TIMEOUT, else 30)",
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
        &["--dialed-agents"],
        Action::Flag(|o| o.dialed = true),
        "wait for agents that executors start and that dial this launcher",
    )
    .only("hosts")
    .hide(),
    option(
        HOSTS,
        &["--agents-port"],
        Action::Value("PORT", |o, v| {
            o.agents_port = Some(port(v)?);
            o.dialed = true;
            Ok(())
        }),
        "wait on this port for `python -m horovod.runner.join` on other hosts or in pods (key: HOROVOD_JOB_KEY_FILE)",
    )
    .only("hosts"),
    option(
        HOSTS,
        &["-p", "--ssh-port"],
        Action::Value("PORT", |o, v| {
            o.ssh_port = Some(port(v)?);
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
    .only("controller")
    .file("controller", Form::Words),
    option(
        HOSTS,
        &["--mpi"],
        Action::Flag(|o| o.mpi.starter = Starter::Mpi),
        "start the ranks with the mpirun on PATH; tensors take the same transport",
    )
    .only("controller")
    .file("controller", Form::Words),
    option(
        HOSTS,
        &["--jsrun"],
        Action::Flag(|o| o.mpi.starter = Starter::Jsrun),
        "start the ranks with LSF's jsrun; tensors take the same transport",
    )
    .only("controller")
    .file("controller", Form::Words),
    option(
        HOSTS,
        &["--mpi-args"],
        Action::Value("ARGS", |o, v| {
            o.mpi.args = Some(text(v)?.to_owned());
            Ok(())
        }),
        "further arguments of mpirun, or of jsrun's --smpiargs; use --mpi-args='...'",
    ),
    option(
        HOSTS,
        &["--binding-args"],
        Action::Value("ARGS", |o, v| {
            o.mpi.binding = Some(text(v)?.to_owned());
            Ok(())
        }),
        "arguments of mpirun or jsrun in place of those about processors",
    ),
    option(
        HOSTS,
        &["--tcp"],
        Action::Flag(|o| {
            o.mpi.tcp = true;
            o.knobs.push(("NCCL_IB_DISABLE", "1".to_owned()));
        }),
        "no InfiniBand for NCCL, and -tcp for Spectrum MPI",
    ),
    option(
        OUTPUT,
        &["--output-filename"],
        Action::Value("DIR", |o, v| {
            o.output_filename = Some(v.into());
            Ok(())
        }),
        "also write DIR/rank.N/stdout and DIR/rank.N/stderr",
    )
    .only("files"),
    option(
        OUTPUT,
        &["--log-dir"],
        Action::Value("DIR", |o, v| {
            o.log_dir = Some(v.into());
            Ok(())
        }),
        "the same in a new folder DIR/YYYYMMDD-HHMMSS of each run",
    )
    .only("files"),
    option(
        OUTPUT,
        &["--output-ranks"],
        Action::Value("RANK,...", |o, v| {
            o.output_ranks = Some(ranks(text(v)?)?);
            Ok(())
        }),
        "show the output of these ranks only, such as 0,3 or 0-3; files get that of all",
    ),
    option(
        OUTPUT,
        &["-prefix-timestamp", "--prefix-output-with-timestamp"],
        Action::Flag(|o| o.prefix_timestamp = true),
        "put the local time before each line",
    ),
    option(
        OUTPUT,
        &["--quiet"],
        Action::Flag(|o| {
            let never = "never".to_owned();
            o.knobs.push((settings::SUMMARY.name, never));
        }),
        "no summary of a measured job at its end",
    ),
];

/// The job that an option names by the process of its rank 0.
fn job(value: &OsStr) -> Result<Wanted, Wrong> {
    Ok(match text(value)? {
        "" => Wanted::All,
        pid => Wanted::Process(pid.parse().map_err(|_| {
            format!("must be the number of rank 0's process, or nothing, got {pid:?}")
        })?),
    })
}

fn port(value: &OsStr) -> Result<u16, Wrong> {
    let port = u16::try_from(whole(value)?).ok().filter(|port| *port > 0);
    let given = value.to_string_lossy();
    port.ok_or_else(|| format!("must be a port from 1 to 65535, got {given}").into())
}

fn interfaces(options: &mut Options, value: &OsStr) -> Result<(), Wrong> {
    for name in without_last_comma(text(value)?).split(',').map(str::trim) {
        if name.is_empty() {
            let given = value.to_string_lossy();
            return Err(format!("empty interface name in {given:?}").into());
        }
        if !options.network_interfaces.iter().any(|known| known == name) {
            options.network_interfaces.push(name.to_owned());
        }
    }
    Ok(())
}

/// Ranks and groups of them, as first and last.
fn ranks(list: &str) -> Result<Vec<(u32, u32)>, String> {
    let group = |item: &str| {
        let (first, last) = item.split_once('-').unwrap_or((item, item));
        let group = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        (group.0 <= group.1).then_some(group)
    };
    let items = without_last_comma(list).split(',');
    let groups = items.map(|item| {
        group(item).ok_or_else(|| format!("{item:?} is no rank and no group such as 0-3"))
    });
    groups.collect()
}
