//! The figures of a host and of this process, from the system's tables in /proc. Where there are none, they are zero.

use std::fs::File;
use std::io::Read;

use crate::figures::{HostFigures, RankFigures};

/// Bytes of a table that are read at most; what is wanted stands at the beginning.
const TABLE_BYTES_MAX: usize = 64 << 10;
const PROC_PROCESSORS: &str = "/proc/stat";
const PROC_MEMORY: &str = "/proc/meminfo";
/// Of this process' network namespace.
const PROC_NETWORK: &str = "/proc/self/net/dev";
const PROC_STATUS: &str = "/proc/self/status";

/// The figures of this host now.
pub(crate) fn read_host() -> HostFigures {
    let mut host = HostFigures::default();
    let tick = 1_000_000_000 / rustix::param::clock_ticks_per_second().max(1);
    with_table(PROC_PROCESSORS, |text| processors(text, tick, &mut host));
    with_table(PROC_MEMORY, |text| memory(text, &mut host));
    with_table(PROC_NETWORK, |text| network(text, &mut host));
    host
}

/// Adds the figures of this process.
pub(crate) fn read_process(figures: &mut RankFigures) {
    use rustix::time::{ClockId, clock_gettime};
    let cpu = clock_gettime(ClockId::ProcessCPUTime);
    figures.cpu = cpu.tv_sec.cast_unsigned() * 1_000_000_000 + cpu.tv_nsec.cast_unsigned();
    with_table(PROC_STATUS, |text| {
        figures.memory = kilobytes(text, "VmRSS:");
        figures.peak_memory = kilobytes(text, "VmHWM:");
    });
}

fn with_table(path: &str, then: impl FnOnce(&str)) {
    let mut text = String::new();
    let file = File::open(path);
    let read = file.and_then(|file| file.take(TABLE_BYTES_MAX as u64).read_to_string(&mut text));
    if read.is_ok() {
        then(&text);
    }
}

/// `cpu  user nice system idle iowait irq softirq steal ...`, and one line for each processor.
fn processors(text: &str, tick: u64, host: &mut HostFigures) {
    let mut lines = text.lines().filter(|line| line.starts_with("cpu"));
    let all: Vec<u64> = lines.next().map_or_else(Vec::new, |line| {
        let numbers = line.split_ascii_whitespace().skip(1);
        numbers.map(|n| n.parse().unwrap_or(0)).collect()
    });
    let at = |i: usize| all.get(i).copied().unwrap_or(0);
    // Guests' time is in user and nice.
    host.busy = (at(0) + at(1) + at(2) + at(5) + at(6)) * tick;
    host.steal = at(7) * tick;
    host.processors = lines.count() as u64;
}

fn memory(text: &str, host: &mut HostFigures) {
    host.memory = kilobytes(text, "MemTotal:");
    host.available = kilobytes(text, "MemAvailable:");
    let free = kilobytes(text, "SwapFree:");
    host.swapped = kilobytes(text, "SwapTotal:").saturating_sub(free);
}

/// Bytes of a line `Name:   123 kB`.
fn kilobytes(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let number = line.and_then(|line| line.split_ascii_whitespace().next()?.parse::<u64>().ok());
    number.unwrap_or(0).saturating_mul(1024)
}

/// `name: bytes packets errs drop fifo frame compressed multicast bytes ...`, first received, then sent.
fn network(text: &str, host: &mut HostFigures) {
    for line in text.lines() {
        let Some((name, numbers)) = line.split_once(':') else {
            continue;
        };
        if name.trim() == "lo" {
            continue;
        }
        let mut numbers = numbers
            .split_ascii_whitespace()
            .map(|n| n.parse::<u64>().unwrap_or(0));
        host.received += numbers.next().unwrap_or(0);
        host.sent += numbers.nth(7).unwrap_or(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tables_are_read() {
        let mut host = HostFigures::default();
        let stat = "cpu  10 1 5 900 7 2 3 40 0 0\ncpu0 1 1 1 1\ncpu1 1 1 1 1\nintr 5 6\n";
        processors(stat, 10, &mut host);
        assert_eq!((host.processors, host.busy, host.steal), (2, 210, 400));
        let meminfo = "MemTotal:  2000 kB\nMemFree: 5 kB\nMemAvailable:  500 kB\nSwapTotal: 100 kB\nSwapFree: 60 kB\n";
        memory(meminfo, &mut host);
        let found = (host.memory, host.available, host.swapped);
        assert_eq!(found, (2_048_000, 512_000, 40_960));
        let dev = "Inter-|   Receive |  Transmit\n face |bytes packets\n    lo: 9 9 9 9 9 9 9 9 9 9\n  eth0: 100 1 0 0 0 0 0 0 200 2 0 0 0 0 0 0\n";
        network(dev, &mut host);
        assert_eq!((host.received, host.sent), (100, 200));
    }

    #[test]
    fn a_table_of_something_else_gives_nothing() {
        let mut host = HostFigures::default();
        for text in ["", "cpu", "cpu  x y\n:::\n", "eth0: x"] {
            processors(text, 10, &mut host);
            memory(text, &mut host);
            network(text, &mut host);
        }
        assert_eq!(host, HostFigures::default());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_host_and_process_have_figures() {
        let host = read_host();
        assert!(
            host.processors > 0 && host.memory > host.available && host.busy > 0,
            "{host:?}"
        );
        let mut figures = RankFigures::default();
        read_process(&mut figures);
        assert!(figures.cpu > 0 && figures.memory > 0, "{figures:?}");
        assert!(figures.peak_memory >= figures.memory, "{figures:?}");
    }
}
