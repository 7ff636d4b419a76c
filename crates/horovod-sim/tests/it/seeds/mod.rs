//! How much is tried.

/// How many seeds: some, or as many as are asked for, as `make nightly` does:
/// `HOROVOD_SIM_SEEDS=100000 cargo test -p horovod-sim --release [membership::]`.
#[expect(
    clippy::disallowed_methods,
    reason = "a test's own knob, not a setting of the runtime"
)]
pub(crate) fn seeds(default: u64) -> u64 {
    std::env::var("HOROVOD_SIM_SEEDS")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(default)
}
