//! Advice about threads where others start the ranks: `horovodrun` limits those of libraries, other launchers may not.

use std::sync::Once;

/// Says it once in this process's life, in the first rank of a host.
pub(crate) fn advise(local_rank: u32, local_size: u32) {
    static NOTED: Once = Once::new();
    if local_rank != 0 || local_size < 2 {
        return;
    }
    let usable = std::thread::available_parallelism().map_or(1, usize::from);
    // Where the system does not tell, what may be used counts.
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    let status = read("/proc/self/status");
    let mask = status
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    let visible = mask.and_then(count).unwrap_or(usable);
    let online = count(&read("/sys/devices/system/cpu/online")).unwrap_or(visible);
    if let Some(text) = advice(local_size as usize, visible, usable, online) {
        NOTED.call_once(|| tracing::warn!("{text}"));
    }
}

/// Advice for a host's ranks that each take a thread for every core of their mask.
///
/// Ranks that a launcher has bound to cores of their own see few cores each, and nothing is wrong; that cannot be told
/// from ranks that share a few, so those are compared with the whole machine.
fn advice(ranks: usize, visible: usize, usable: usize, online: usize) -> Option<String> {
    // A control group's quota is shared, other than a mask.
    let cores = if usable < visible { usable } else { online };
    (ranks > 1 && ranks * visible > cores).then(|| {
        format!(
            "OMP_NUM_THREADS is not set: the {ranks} ranks of this host may use {visible} threads each, on {cores} \
             cores, and be many times slower for it. OMP_NUM_THREADS={} for each of them avoids that (horovodrun sets it)",
            (cores / ranks).max(1)
        )
    })
}

/// How many numbers are in a list such as `0-3,8`.
fn count(list: &str) -> Option<usize> {
    let ranges = list.trim().split(',').map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        Some(last.checked_sub(first)? + 1)
    });
    ranges.sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_threads_than_cores_are_worth_a_line() {
        let text = advice(4, 8, 8, 8).expect("32 threads on 8 cores");
        assert!(text.contains("OMP_NUM_THREADS=2"), "{text}");
        // A quota of 2 on a large machine, also for ranks that see 4 of 64 cores.
        assert!(advice(2, 64, 2, 64).is_some_and(|t| t.contains("OMP_NUM_THREADS=1")));
        assert!(advice(2, 4, 2, 64).is_some());
        // Each has cores of its own; one rank.
        assert_eq!(advice(4, 2, 2, 8), None);
        assert_eq!(advice(1, 8, 8, 8), None);
    }

    #[test]
    fn lists_of_cores_are_counted() {
        assert_eq!(count("0-3,8\n"), Some(5));
        assert_eq!(count("0"), Some(1));
        assert_eq!(count(""), None);
        assert_eq!(count("3-1"), None);
    }
}
