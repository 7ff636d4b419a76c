//! Tests of the conclusions from facts. Each test changes one thing on hosts that nothing is wrong with.

mod gpus;

use std::net::SocketAddr;

use horovod_transport::probe::Obstacle;

use super::super::chart::{JobPlan, Patient, Skew};
use super::super::facts::tests::healthy;
use super::super::facts::{HostFacts, Space};
use super::super::render;
use super::super::talk::{Pace, Stood};
use super::*;

const GIB: u64 = 1 << 30;

fn address(host: usize) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, host as u8 + 1], 4000))
}

fn stood(host: usize) -> Stood {
    Stood {
        local: address(host).ip(),
        took_ns: 1000,
    }
}

fn pace(there: f64) -> Pace {
    Pace {
        round_trip_ns: 50_000,
        there,
        back: there,
    }
}

/// `count` hosts with two ranks each, of which the first is this one.
fn chart(count: usize) -> Chart {
    let patient = |host: usize| Patient {
        name: format!("h{host}"),
        slots: 2,
        is_local: host == 0,
        facts: Some(healthy()),
        listens: Some(Ok(vec![("eth0".into(), address(host))])),
        skew: Some(Skew {
            ahead_ns: 1000,
            uncertain_ns: 2000,
        }),
        ..Patient::default()
    };
    let mut chart = Chart {
        plan: JobPlan {
            size: 2 * count as u32,
            staging: 8 << 20,
            connections: 1,
            runs_python: true,
            cwd: "/work".into(),
            version: "0.1.0".into(),
            ..JobPlan::default()
        },
        hosts: (0..count).map(patient).collect(),
        ..Chart::default()
    };
    for from in 0..count {
        for to in (0..count).filter(|to| *to != from) {
            let route = vec![(address(to), Ok(stood(from)))];
            chart.routes.insert((from, to), route);
            if from > to {
                chart.paces.insert((from, to), Ok(pace(2e9)));
            }
        }
    }
    chart
}

fn facts(chart: &mut Chart, host: usize) -> &mut HostFacts {
    chart.hosts[host].facts.as_mut().expect("a healthy host")
}

/// The one finding, which must be this bad and say these things of these hosts.
#[track_caller]
fn only(chart: &Chart, severity: Severity, hosts: &str, what: &str, fix: &str) {
    let found = of(chart);
    assert_eq!(found.len(), 1, "{found:#?}");
    let one = &found[0];
    assert_eq!(one.severity, severity, "{one:?}");
    assert_eq!(one.hosts.join(","), hosts, "{one:?}");
    assert!(one.what.contains(what), "{one:?}");
    assert!(one.fix.contains(fix), "{one:?}");
    assert_eq!(would_stop(&found), severity == Severity::Fatal);
}

/// The one finding about a host that is healthy but for this.
#[track_caller]
fn check(spoil: fn(&mut HostFacts), severity: Severity, what: &str, fix: &str) {
    let mut chart = chart(2);
    spoil(facts(&mut chart, 1));
    only(&chart, severity, "h1", what, fix);
}

#[test]
fn nothing_is_wrong_with_healthy_hosts() {
    for count in [1, 2, 5] {
        let chart = chart(count);
        assert_eq!(of(&chart), []);
        assert!(chart.left_out().is_empty());
        let text = render::text(&chart, &[]);
        assert!(text.contains("nothing would stop a job"), "{text}");
    }
}

#[test]
fn a_host_that_cannot_be_reached_is_named_with_what_to_do() {
    #[track_caller]
    fn check(why: &str, fix: &str) {
        let mut chart = chart(2);
        chart.hosts[1] = Patient {
            name: "h1".into(),
            slots: 2,
            absent: Some(why.into()),
            ..Patient::default()
        };
        chart.routes.clear();
        chart.paces.clear();
        only(&chart, Severity::Fatal, "h1", why, fix);
    }
    check("no answer within 6 s", "firewall");
    check(
        "its name does not resolve (ssh: Could not ...)",
        "/etc/hosts",
    );
    check(
        "has horovod-rs 0.0.9, this host 0.1.0: install the same there",
        "install the same wheels",
    );
    check(
        "nothing listens on its ssh port (see -p) (...)",
        "start sshd",
    );
    check("its agent did not start (Welcome)", "by hand");
}

#[test]
fn ranks_that_share_the_processors_start_one_thread_for_each_of_theirs() {
    let mut chart = chart(1);
    (chart.plan.size, chart.hosts[0].slots) = (64, 64);
    let found = facts(&mut chart, 0);
    (found.cpus, found.omp_threads, found.memory) = (64, None, None);
    (found.limits.nproc, found.limits.nofile) = (Some(4096), None);
    assert_eq!(of(&chart), []);
}

#[test]
fn what_a_job_needs_from_a_host() {
    check(
        |f| f.limits.nofile = Some(19),
        Severity::Fatal,
        "ulimit -n is 19: a process of the job needs about 20 open files",
        "ulimit -n 512",
    );
    check(
        |f| (f.limits.nofile, f.limits.nofile_hard) = (Some(64), Some(64)),
        Severity::Risk,
        "ulimit -n is 64",
        "raise the hard limit",
    );
    check(
        |f| f.limits.nproc = Some(10),
        Severity::Risk,
        "ulimit -u is 10: 2 ranks start about 36 threads",
        "nproc",
    );
    check(
        |f| {
            f.shm = Some(Space {
                size: 64 << 20,
                free: 60 << 20,
            })
        },
        Severity::Risk,
        "/dev/shm has 60 MiB free of 64 MiB: workers of PyTorch's DataLoader",
        "--shm-size",
    );
    check(
        |f| f.memfd_problem = Some("Function not implemented".into()),
        Severity::Fatal,
        "memfd_create: Function not implemented",
        "HOROVOD_SHM=0",
    );
    check(
        |f| {
            f.memory_limit = Some(Space {
                size: GIB,
                free: 10 << 20,
            })
        },
        Severity::Fatal,
        "2 ranks need 16 MiB of shared memory, 10 MiB of its control group's limit is free",
        "memory limit",
    );
    check(
        |f| {
            f.memory = Some(Space {
                size: GIB,
                free: 600 << 20,
            })
        },
        Severity::Risk,
        "only 600 MiB of its memory is free: 2 ranks with PyTorch",
        "fewer ranks",
    );
    check(
        |f| f.tmp = Err("No such file or directory".into()),
        Severity::Risk,
        "temporary files, /tmp, cannot be used",
        "TMPDIR",
    );
    check(
        |f| {
            f.tmp = Ok(Space {
                size: GIB,
                free: 1 << 20,
            })
        },
        Severity::Risk,
        "/tmp has only 1.0 MiB free",
        "make room",
    );
    check(
        |f| f.has_cwd = false,
        Severity::Risk,
        "/work does not exist there",
        "share the folder",
    );
    check(
        |f| f.command_problem = Some("command not found: x".into()),
        Severity::Fatal,
        "command not found: x",
        "install it there",
    );
    check(
        |f| f.python = Err("/x/python3: No such file".into()),
        Severity::Fatal,
        "Python does not answer: /x/python3: No such file",
        "at the same path",
    );
    check(
        |f| f.python.as_mut().expect("well").horovod = Err("ImportError: GLIBC_2.34".into()),
        Severity::Fatal,
        "/opt/bin/python3 cannot import horovod: ImportError: GLIBC_2.34",
        "/opt/bin/python3 -m pip install --find-links dist horovod-rs==0.1.0",
    );
    check(
        |f| f.python.as_mut().expect("well").mixed = Some("the original is there".into()),
        Severity::Risk,
        "/opt/bin/python3 has a mixed installation: the original is there",
        "/opt/bin/python3 -m pip uninstall -y horovod horovod-rs;",
    );
    check(
        |f| {
            let python = f.python.as_mut().expect("well");
            python.horovod = Err("ImportError: mpi_lib_v2".into());
            python.mixed = Some("the original is there".into());
        },
        Severity::Fatal,
        "/opt/bin/python3 has a mixed installation: the original is there",
        "/opt/bin/python3 -m pip uninstall -y horovod horovod-rs;",
    );
    check(
        |f| f.python.as_mut().expect("well").horovod = Ok("0.0.9".into()),
        Severity::Fatal,
        "has horovod-rs 0.0.9, this launcher is 0.1.0",
        "pip install",
    );
    check(
        |f| f.load = Some(9.3),
        Severity::Slow,
        "load 9 on 8 processors",
        "top",
    );
    check(
        |f| f.omp_threads = Some("8".into()),
        Severity::Slow,
        "OMP_NUM_THREADS is 8: 2 ranks with 8 threads each on 8 processors",
        "export OMP_NUM_THREADS=4",
    );
    check(
        |f| (f.cpus, f.omp_threads) = (1, Some("1".into())),
        Severity::Slow,
        "2 ranks share 1 processor",
        "1 slots",
    );
    check(
        |f| f.names.push(("h0".into(), Err("unknown".into()))),
        Severity::Note,
        "names that do not resolve there: h0",
        "/etc/hosts",
    );
}

#[test]
fn one_rank_shares_nothing() {
    let mut chart = chart(1);
    (chart.hosts[0].slots, chart.plan.size) = (1, 1);
    let spoiled = facts(&mut chart, 0);
    spoiled.memfd_problem = Some("no".into());
    spoiled.omp_threads = Some("9".into());
    spoiled.names.push(("h0".into(), Err("unknown".into())));
    assert_eq!(of(&chart), []);
}

#[test]
fn where_only_the_launcher_runs_little_is_needed() {
    let mut chart = chart(2);
    chart.hosts[0].slots = 0;
    let spoiled = facts(&mut chart, 0);
    spoiled.python = Err("none".into());
    spoiled.limits.nofile = Some(1);
    chart.paces.clear();
    assert_eq!(of(&chart), []);
    assert!(chart.left_out().is_empty());
}

#[test]
fn clocks_are_compared_beyond_what_is_uncertain() {
    let mut chart = chart(2);
    let mut skew = Skew {
        ahead_ns: -3_500_000_000,
        uncertain_ns: 1_000_000,
    };
    chart.hosts[1].skew = Some(skew);
    only(
        &chart,
        Severity::Note,
        "h1",
        "3.5 s behind the launcher's",
        "chrony",
    );
    skew.uncertain_ns = 3_000_000_000;
    chart.hosts[1].skew = Some(skew);
    assert_eq!(of(&chart), []);
}

#[test]
fn versions_that_differ_are_listed_with_their_hosts() {
    let mut chart = chart(3);
    let python = facts(&mut chart, 2).python.as_mut().expect("well");
    python.torch = None;
    only(
        &chart,
        Severity::Risk,
        "h0,h1,h2",
        "different versions of PyTorch: 2.9.1+cpu on h0, h1; none on h2",
        "the same everywhere",
    );
}

#[test]
fn routes_that_are_blocked_are_named_with_the_cause() {
    #[track_caller]
    fn check(obstacle: Obstacle, what: &str, fix: &str) {
        let mut chart = chart(2);
        chart.paces.clear();
        chart
            .routes
            .insert((1, 0), vec![(address(0), Err(obstacle))]);
        let what = format!("no connection from h1 to h0: 10.0.0.1 (eth0) {what}");
        only(&chart, Severity::Fatal, "h1", &what, fix);
        let text = render::text(&chart, &of(&chart));
        assert!(
            text.contains("BLOCKED") && text.contains("1 thing would stop a job"),
            "{text}"
        );
    }
    let allow = "allow TCP ports 32768 to 60999 from h1 to h0";
    check(
        Obstacle::Silence,
        "no answer in time",
        &format!("or the answers find no way back: {allow}"),
    );
    check(Obstacle::Refused, "connection refused", "rejects");
    check(Obstacle::NoRoute, "no route to host", "ip route get");
    check(
        Obstacle::Handshake("x".into()),
        "somebody else answers",
        "same address",
    );
    check(Obstacle::Other("y".into()), "y", "by hand");
}

#[test]
fn a_route_that_no_rank_takes_stops_nothing() {
    let mut chart = chart(3);
    // The launcher is on h0: h1 to h2 is the one way that no rank of a job in this order connects.
    chart
        .routes
        .insert((1, 2), vec![(address(2), Err(Obstacle::Silence))]);
    only(
        &chart,
        Severity::Risk,
        "h1",
        "in the other direction only",
        "allow",
    );
}

#[test]
fn a_loopback_that_is_down_is_told() {
    let mut chart = chart(1);
    let own = SocketAddr::from(([127, 0, 0, 1], 9));
    chart
        .routes
        .insert((0, 0), vec![(own, Err(Obstacle::NoRoute))]);
    only(
        &chart,
        Severity::Fatal,
        "h0",
        "cannot connect to itself",
        "ip link set lo up",
    );
}

#[test]
fn an_address_that_leads_nowhere_costs_time_at_every_start() {
    let mut chart = chart(2);
    let docker = SocketAddr::from(([172, 17, 0, 1], 1));
    let route = chart.routes.get_mut(&(1, 0)).expect("a way");
    route.insert(0, (docker, Err(Obstacle::Silence)));
    chart.hosts[0].listens = Some(Ok(vec![
        ("docker0".into(), docker),
        ("eth0".into(), address(0)),
    ]));
    only(
        &chart,
        Severity::Slow,
        "h1",
        "172.17.0.1 (docker0) of h0 leads nowhere from h1: each start takes up to 3 s longer",
        "--network-interfaces eth0",
    );
    // Ranks first try the address by which a host reaches the launcher; then nothing is lost.
    chart
        .routes
        .insert((0, 0), vec![(address(0), Ok(stood(0)))]);
    chart.sort_routes();
    assert_eq!(of(&chart), []);
}

#[test]
fn slow_routes_are_found_by_comparison() {
    let mut all_slow = chart(2);
    all_slow.paces.insert((1, 0), Ok(pace(0.1e9)));
    only(
        &all_slow,
        Severity::Slow,
        "h1,h0",
        "no more than 1 Gbit/s",
        "fp16",
    );

    let mut one_direction = chart(2);
    let halves = Pace {
        there: 0.4e9,
        ..pace(2e9)
    };
    one_direction.paces.insert((1, 0), Ok(halves));
    only(
        &one_direction,
        Severity::Slow,
        "h1",
        "from h1 to h0 only 0.40 GB/s get through, the other way 2.00 GB/s",
        "ethtool",
    );

    let mut one_pair = chart(4);
    one_pair.paces.insert((3, 1), Ok(pace(0.3e9)));
    let found = of(&one_pair);
    let texts: Vec<&str> = found.iter().map(|f| f.what.as_str()).collect();
    assert_eq!(texts.len(), 2, "{texts:?}");
    assert!(
        texts.iter().all(|t| t.contains("between others 2.00 GB/s")),
        "{texts:?}"
    );

    let mut far = chart(2);
    let slow = Pace {
        round_trip_ns: 30_000_000,
        ..pace(2e9)
    };
    far.paces.insert((1, 0), Ok(slow));
    only(
        &far,
        Severity::Slow,
        "h1",
        "h1 and h0 are far apart: 30.0 ms",
        "CONNECTIONS_PER_PEER",
    );
}

#[test]
fn data_that_do_not_get_through_point_to_the_mtu() {
    let mut chart = chart(2);
    let broken = Obstacle::Broken("nothing moved in time".into());
    chart.paces.insert((1, 0), Err(broken));
    only(
        &chart,
        Severity::Fatal,
        "h1",
        "connect, but data do not get through",
        "MTU",
    );
}

#[test]
fn pairs_that_were_left_out_are_listed() {
    let mut chart = chart(3);
    chart.paces.remove(&(2, 1));
    assert_eq!(chart.left_out(), [(1, 2)]);
    let text = render::text(&chart, &of(&chart));
    assert!(
        text.contains("not measured for lack of time: h1 and h2"),
        "{text}"
    );
}

#[test]
fn threads_that_the_launcher_sets_are_no_finding() {
    let mut chart = chart(1);
    facts(&mut chart, 0).omp_threads = None;
    assert!(of(&chart).is_empty());
}

#[test]
fn the_worst_comes_first_and_the_same_is_said_once() {
    let mut chart = chart(3);
    for host in 0..3 {
        facts(&mut chart, host).omp_threads = Some("8".into());
    }
    facts(&mut chart, 1).limits.nofile = Some(5);
    facts(&mut chart, 2).has_cwd = false;
    let found = of(&chart);
    let seen: Vec<(Severity, usize)> = found.iter().map(|f| (f.severity, f.hosts.len())).collect();
    let want = [
        (Severity::Fatal, 1),
        (Severity::Risk, 1),
        (Severity::Slow, 3),
    ];
    assert_eq!(seen, want);
    let text = render::text(&chart, &found);
    let first = text
        .find("  1. stops the job: h1: ulimit -n is 5")
        .expect("the first");
    assert!(
        text[first..].contains("  3. slow: h0, h1, h2: OMP_NUM_THREADS"),
        "{text}"
    );
    assert!(
        text.ends_with("1 thing would stop a job; 2 things worth a look (0.0 s)\n"),
        "{text}"
    );
    assert!(
        text.lines().all(|line| line.chars().count() <= 112),
        "{text}"
    );
    let json = render::json(&chart, &found);
    assert!(json.contains(r#""would_stop":true"#), "{json}");
    assert!(
        json.contains(r#""severity":"stops the job","hosts":["h1"]"#),
        "{json}"
    );
}
