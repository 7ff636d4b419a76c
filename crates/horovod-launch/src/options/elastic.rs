//! Options of elastic jobs.

use std::ffi::OsStr;

use horovod_settings as settings;

use super::given::{ElasticOptions, text};
use super::{Action, OptionSpec, Options, Wrong, at_least_zero, option, too_large, whole};

const ELASTIC: &str = "elastic jobs (with --min-np or --host-discovery-script)";

impl ElasticOptions {
    /// Whether the job is elastic.
    pub fn is_on(&self) -> bool {
        self.script.is_some() || self.min_np.is_some()
    }

    /// The options that have no effect because the job is not elastic; Horovod takes them, too.
    pub(crate) fn idle(&self) -> Vec<&'static str> {
        let given = [
            (self.max_np.is_some(), "--max-np"),
            (self.slots_per_host.is_some(), "--slots-per-host"),
            (self.timeout.is_some(), "--elastic-timeout"),
            (self.reset_limit.is_some(), "--reset-limit"),
            (self.cooldown.is_some(), "--blacklist-cooldown-range"),
        ];
        let idle = given.iter().filter(|(given, _)| *given && !self.is_on());
        idle.map(|(_, name)| *name).collect()
    }

    /// Checks what no single option can know; `np` is `-np`. The error says what is wrong.
    pub(crate) fn check(&self, np: u32) -> Result<(), String> {
        if !self.is_on() {
            return Ok(());
        }
        let min = self.min_np.unwrap_or(np);
        if min > np {
            return Err(format!("--min-np {min} is more than -np {np}"));
        }
        if let Some(max) = self.max_np.filter(|max| *max < np) {
            return Err(format!("--max-np {max} is less than -np {np}"));
        }
        Ok(())
    }
}

fn at_least_one(value: &OsStr) -> Result<u32, Wrong> {
    let number = whole(value)?;
    if number < 1 {
        return Err(format!("must be at least 1, got {number}").into());
    }
    u32::try_from(number).map_err(|_| too_large(value))
}

fn count(value: &OsStr) -> Result<u32, Wrong> {
    u32::try_from(at_least_zero(value)?).map_err(|_| too_large(value))
}

/// Longest time for which a host may be left alone, in seconds.
const COOLDOWN_MAX_S: u32 = 3600;

fn cooldown(options: &mut Options, first: &OsStr, most: &OsStr) -> Result<(), Wrong> {
    let (first, most) = (at_least_one(first)?, at_least_one(most)?);
    if most > COOLDOWN_MAX_S || first > most {
        return Err(format!(
            "expected two numbers of seconds from 1 to {COOLDOWN_MAX_S}, the smaller one first, got {first} {most}"
        )
        .into());
    }
    options.elastic.cooldown = Some((first, most));
    Ok(())
}

pub(super) static OPTIONS: &[OptionSpec] = &[
    option(
        ELASTIC,
        &["--min-np", "--min-num-proc"],
        Action::Value("N", |o, v| {
            o.elastic.min_np = Some(at_least_one(v)?);
            Ok(())
        }),
        "processes needed to go on when some are lost (-np: needed to begin)",
    ),
    option(
        ELASTIC,
        &["--max-np", "--max-num-proc"],
        Action::Value("N", |o, v| {
            o.elastic.max_np = Some(at_least_one(v)?);
            Ok(())
        }),
        "most processes; without it, all slots there are",
    ),
    option(
        ELASTIC,
        &["--host-discovery-script"],
        Action::Value("COMMAND", |o, v| {
            o.elastic.script = Some(text(v)?.to_owned());
            Ok(())
        }),
        "run every second; prints the hosts there are now, one `name` or `name:slots` a line",
    )
    .only("hosts"),
    option(
        ELASTIC,
        &["--slots-per-host"],
        Action::Value("N", |o, v| {
            o.elastic.slots_per_host = Some(at_least_one(v)?);
            Ok(())
        }),
        "slots of hosts that the script names without a number",
    ),
    option(
        ELASTIC,
        &["--elastic-timeout"],
        Action::Value("SECONDS", |o, v| {
            o.elastic.timeout = Some(count(v)?);
            Ok(())
        }),
        "",
    )
    .about(&settings::ELASTIC_TIMEOUT),
    option(
        ELASTIC,
        &["--reset-limit"],
        Action::Value("N", |o, v| {
            o.elastic.reset_limit = Some(count(v)?);
            Ok(())
        }),
        "most changes of the members; one more ends the job",
    ),
    option(
        ELASTIC,
        &["--blacklist-cooldown-range"],
        Action::Pair("MIN MAX", cooldown),
        "seconds for which a failed host is left alone, first and at most; without it, for good (one that was lost: 10 to 300)",
    ),
];
