//! Fuzz targets: everything that reads bytes from outside, as functions that any bytes may be given to.
//!
//! A target panics where a promise is broken. `fuzz/` runs the targets under a fuzzer (`make fuzz`); the test
//! `corpus` of this crate runs them over the inputs kept in `corpus/`, on every machine.
//!
//! Deliberately absent: sockets to other hosts, clocks, threads.

mod control;
mod launcher;
mod negotiation;
mod runtime;

use horovod_transport::testing::parsers;

/// A name and what is to survive any bytes.
pub type Target = (&'static str, fn(&[u8]));

/// All targets; `fuzz/fuzz_targets/` has a file for each, `corpus/` a folder.
pub const TARGETS: &[Target] = &[
    ("handshake", parsers::handshake),
    ("framing", parsers::framing),
    ("rendezvous", parsers::rendezvous),
    ("rendezvous_server", parsers::rendezvous_server),
    ("payloads", parsers::payloads),
    ("control", control::messages),
    ("negotiation", negotiation::steps),
    ("launcher_frames", launcher::frames),
    ("launcher_words", launcher::words),
    ("config_file", launcher::config_file),
    ("metrics", horovod_metrics::testing::messages),
    ("runtime", runtime::messages),
    ("rendezvous_file", horovod::testing::rendezvous_file),
    ("stall_report", horovod_diagnosis::testing::stall_report),
    ("replica_report", horovod_diagnosis::testing::replica_report),
];

/// Runs one target.
///
/// # Panics
/// If there is none of that name, or it finds a broken promise.
pub fn run(name: &str, bytes: &[u8]) {
    let found = TARGETS.iter().find(|(known, _)| *known == name);
    let (_, target) = found.unwrap_or_else(|| panic!("no target {name:?}"));
    target(bytes);
}
