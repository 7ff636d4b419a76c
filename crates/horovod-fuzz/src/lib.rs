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
    ("rendezvous_file", horovod_engine::testing::rendezvous_file),
    ("stall_report", horovod_diagnosis::testing::stall_report),
    ("replica_report", horovod_diagnosis::testing::replica_report),
];

/// Valid inputs of a target.
pub type Seeds = (&'static str, fn() -> Vec<Vec<u8>>);

/// Targets whose messages follow from declarations of Rust types. Random bytes seldom are such messages, so the corpus
/// has these inputs; `cargo run -p horovod-fuzz` writes them anew after a change of a message.
pub const SEEDS: &[Seeds] = &[
    ("rendezvous", parsers::rendezvous_seeds),
    ("launcher_frames", launcher::frames_seeds),
    (
        "stall_report",
        horovod_diagnosis::testing::stall_report_seeds,
    ),
    (
        "replica_report",
        horovod_diagnosis::testing::replica_report_seeds,
    ),
];

/// The inputs of [`SEEDS`], each with its path below the corpus.
pub fn seeds() -> impl Iterator<Item = (String, Vec<u8>)> {
    SEEDS.iter().flat_map(|(target, seeds)| {
        let seeds = seeds().into_iter().enumerate();
        seeds.map(move |(i, bytes)| (format!("{target}/seed_{i:02}"), bytes))
    })
}

/// Runs one target.
///
/// # Panics
/// If there is none of that name, or it finds a broken promise.
pub fn run(name: &str, bytes: &[u8]) {
    let found = TARGETS.iter().find(|(known, _)| *known == name);
    let (_, target) = found.unwrap_or_else(|| panic!("no target {name:?}"));
    target(bytes);
}
