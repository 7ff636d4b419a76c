//! Options of elastic jobs.

use super::{Action, OptionSpec, option};

const fn later(names: &'static [&'static str]) -> OptionSpec {
    option("later", names, Action::Later, "")
}

pub(super) static OPTIONS: &[OptionSpec] = &[
    later(&["--host-discovery-script"]).only("hosts"),
    later(&["--min-np", "--min-num-proc"]),
    later(&["--max-np", "--max-num-proc"]),
    later(&["--slots-per-host"]),
    later(&["--elastic-timeout"]),
    later(&["--reset-limit"]),
    later(&["--blacklist-cooldown-range"]),
];
