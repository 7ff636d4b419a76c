//! Findings on the network between hosts.

use horovod_transport::probe::Obstacle;

use super::super::chart::{Chart, Tried};
use super::{Findings, Severity};

/// A way is slow when others are this much faster.
const MUCH_SLOWER: f64 = 3.0;
/// Measured ways from which on there is something to compare with.
const ROUTES_TO_COMPARE: usize = 6;
/// Rate of a network of 1 Gbit/s, and a little more.
const GIGABIT: f64 = 0.13e9;
/// From this round trip on, the number of messages counts more than the bandwidth.
const FAR_NS: u64 = 4_000_000;
/// Delay at every start for an address that swallows everything.
const ATTEMPT_S: usize = 3;

pub(super) fn judge(chart: &Chart, found: &mut Findings) {
    for host in &chart.hosts {
        if let Some(Err(why)) = &host.listens {
            let what = format!("ranks could not listen for others: {why}");
            let fix = "check `ip addr` there, and the names given with --network-interfaces";
            found.add(Severity::Fatal, &host.name, what, fix);
        }
    }
    for &(from, to) in chart.routes.keys() {
        judge_route(chart, from, to, found);
    }
    judge_paces(chart, found);
}

/// Whether a job connects in this direction: every rank to the launcher, and later hosts to earlier ones.
fn is_needed(chart: &Chart, from: usize, to: usize) -> bool {
    let has_ranks = chart.hosts[to].slots > 0;
    chart.launcher() == Some(to) || (has_ranks && from >= to)
}

fn judge_route(chart: &Chart, from: usize, to: usize, found: &mut Findings) {
    let tried = &chart.routes[&(from, to)];
    let (a, b) = (&chart.hosts[from].name, &chart.hosts[to].name);
    let Some(works) = tried.iter().position(|(_, result)| result.is_ok()) else {
        return judge_blocked(chart, from, to, found);
    };
    let good = chart.interface(to, tried[works].0.ip());
    let swallowed: Vec<String> = tried[..works]
        .iter()
        .filter(|(_, result)| matches!(result, Err(Obstacle::Silence | Obstacle::Handshake(_))))
        .map(|(at, _)| format!("{} ({})", at.ip(), chart.interface(to, at.ip())))
        .collect();
    let is_same = |(at, _): &Tried| chart.interface(to, at.ip()) == good;
    if !swallowed.is_empty() && is_needed(chart, from, to) {
        let what = format!(
            "{} of {b} leads nowhere from {a}: each start takes up to {} s longer",
            swallowed.join(", "),
            ATTEMPT_S * swallowed.len()
        );
        let fix = match tried[..works].iter().any(is_same) {
            true => "take that address from the interface, or let its packets through".to_owned(),
            false => format!("--network-interfaces {good}"),
        };
        found.add(Severity::Slow, a, what, fix);
    }
}

fn judge_blocked(chart: &Chart, from: usize, to: usize, found: &mut Findings) {
    let tried = &chart.routes[&(from, to)];
    let (a, b) = (&chart.hosts[from].name, &chart.hosts[to].name);
    let Some((_, Err(first))) = tried.first() else {
        return;
    };
    let list = list(chart, to, tried);
    if from == to {
        let what = format!("the host cannot connect to itself: {list}");
        let fix = "bring the loopback up: `ip link set lo up`; a sandbox may forbid it";
        return found.add(Severity::Fatal, a, what, fix);
    }
    let (severity, note) = match is_needed(chart, from, to) {
        true => (Severity::Fatal, ""),
        false => (
            Severity::Risk,
            " (with the hosts in this order, ranks connect in the other direction only)",
        ),
    };
    let what = format!("no connection from {a} to {b}: {list}{note}");
    found.add(severity, a, what, fix_of(chart, first, from, to));
}

fn list(chart: &Chart, to: usize, tried: &[Tried]) -> String {
    let parts = tried.iter().filter_map(|(at, result)| {
        let why = result.as_ref().err()?;
        let interface = chart.interface(to, at.ip());
        Some(format!("{} ({interface}) {why}", at.ip()))
    });
    parts.collect::<Vec<_>>().join("; ")
}

fn fix_of(chart: &Chart, obstacle: &Obstacle, from: usize, to: usize) -> String {
    let (a, b) = (&chart.hosts[from].name, &chart.hosts[to].name);
    let facts = chart.hosts[to].facts.as_ref();
    let ports = facts.and_then(|facts| facts.ports).map_or_else(
        || "all TCP ports above 1023".to_owned(),
        |(first, last)| format!("TCP ports {first} to {last}"),
    );
    let allow = format!("allow {ports} from {a} to {b}");
    let other = "or name a network on which they reach each other with --network-interfaces";
    match obstacle {
        Obstacle::Silence => format!(
            "a firewall drops the packets (a cloud's security group, nftables, iptables), \
             or the answers find no way back: {allow}, {other}"
        ),
        Obstacle::Refused => format!(
            "a firewall rejects it, or addresses are translated on the way: {allow}, {other}"
        ),
        Obstacle::NoRoute => format!(
            "no route leads there (`ip route get` that address on {a}), or a firewall rejects the packets, as \
             firewalld does: {allow}, {other}"
        ),
        Obstacle::Handshake(_) => format!(
            "two hosts have the same address (docker0?), or a proxy is in between: remove it, {other}"
        ),
        Obstacle::Broken(_) | Obstacle::Other(_) => {
            format!("see why by hand on {a} (`ip route get`, `nc -vz`), {other}")
        }
    }
}

fn gigabytes(rate: f64) -> String {
    format!("{:.2} GB/s", rate / 1e9)
}

fn judge_paces(chart: &Chart, found: &mut Findings) {
    for (&(a, b), pace) in &chart.paces {
        if let Err(why) = pace {
            let (a, b) = (&chart.hosts[a].name, &chart.hosts[b].name);
            let what = format!("{a} and {b} connect, but data do not get through: {why}");
            let fix = format!(
                "often something on the way has a smaller MTU: `ping -M do -s 1472` from {a} to {b} and back; \
                 give the interfaces one that passes (`ip link set dev ... mtu 1400`)"
            );
            found.add(Severity::Fatal, a, what, fix);
        }
    }
    let pairs = chart.paces.keys();
    let routes: Vec<(usize, usize)> = pairs.flat_map(|&(a, b)| [(a, b), (b, a)]).collect();
    let rates = routes.iter().filter_map(|&(from, to)| chart.rate(from, to));
    let mut rates: Vec<f64> = rates.collect();
    rates.sort_by(f64::total_cmp);
    let Some(&median) = rates.get(rates.len() / 2) else {
        return;
    };
    for &(from, to) in &routes {
        let (Some(rate), Some(back)) = (chart.rate(from, to), chart.rate(to, from)) else {
            continue;
        };
        let than = if rate * MUCH_SLOWER < back {
            format!("the other way {}", gigabytes(back))
        } else if rates.len() >= ROUTES_TO_COMPARE && rate * MUCH_SLOWER < median {
            format!("between others {}", gigabytes(median))
        } else {
            continue;
        };
        let (a, b) = (&chart.hosts[from].name, &chart.hosts[to].name);
        let what = format!(
            "from {a} to {b} only {} get through, {than}: the slowest way sets the pace",
            gigabytes(rate)
        );
        let fix = "look for a bad cable or port (`ethtool`; `ip -s link` counts errors), for somebody else's \
                   traffic, or for a better interface (--network-interfaces)";
        found.add(Severity::Slow, a, what, fix);
    }
    if median < GIGABIT {
        let what = format!(
            "the network gives {}, no more than 1 Gbit/s: a gradient of 100 MB takes at least {:.1} s",
            gigabytes(median),
            0.1e9 / median
        );
        let fix = "use a faster interface if there is one (--network-interfaces), or send less: \
                   hvd.Compression.fp16, backward_passes_per_step";
        for &(from, _) in &routes {
            found.add(Severity::Slow, &chart.hosts[from].name, &*what, fix);
        }
    }
    for &(a, b) in chart.paces.keys() {
        if let Some(time) = chart.round_trip_ns(a, b).filter(|time| *time > FAR_NS) {
            let (name, other) = (&chart.hosts[a].name, &chart.hosts[b].name);
            let what = format!(
                "{name} and {other} are far apart: {:.1} ms there and back",
                time as f64 / 1e6
            );
            let fix = "use hosts of one site; HOROVOD_CONNECTIONS_PER_PEER=4 helps large tensors on long ways";
            found.add(Severity::Slow, name, what, fix);
        }
    }
}
