//! The numbers of seeds.

use std::ops::Range;

/// The seeds of a test: `default` of them, divided by `divisor` in tests whose seeds take longer.
///
/// `HOROVOD_SIM_SEEDS=20000` asks for more, `HOROVOD_SIM_PART=3/8` for the third eighth of those, as `make test-all` does.
pub(crate) fn seeds(default: u64, divisor: u64) -> Range<u64> {
    let asked = variable("HOROVOD_SIM_SEEDS").map(|n| n.parse().expect("a number"));
    let all = asked.unwrap_or(default) / divisor;
    let Some(part) = variable("HOROVOD_SIM_PART") else {
        return 0..all;
    };
    let (part, parts): (u64, u64) = part
        .split_once('/')
        .and_then(|(part, parts)| Some((part.parse().ok()?, parts.parse().ok()?)))
        .filter(|(part, parts)| (1..=*parts).contains(part))
        .unwrap_or_else(|| panic!("HOROVOD_SIM_PART={part}: expected such as 3/8"));
    all * (part - 1) / parts..all * part / parts
}

#[expect(
    clippy::disallowed_methods,
    reason = "a test's own knob, not a setting of the runtime"
)]
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}
