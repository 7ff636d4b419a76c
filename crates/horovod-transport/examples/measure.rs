//! Measures links between two processes: control round trips, flag round trips, ring bandwidth.
//!
//! `cargo run --release -p horovod-transport --example measure`
#![expect(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a measuring program, not a product"
)]

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    process::Command,
    time::{Duration, Instant},
};

use horovod_protocol::Rank;
use horovod_transport::{
    ControlEvent, JobKey, Mesh, MeshConfig, connect,
    rendezvous::{Server, ServerConfig},
};

const ROUNDS: usize = 10_000;
const WARM_UP: usize = 1_000;
const LIMIT: Duration = Duration::from_secs(30);

fn main() {
    let args: Vec<String> = std::env::args().collect();
    if let [_, at, key, kind] = &args[..] {
        let mut mesh = join(1, at.parse().unwrap(), JobKey::from_hex(key).unwrap(), kind);
        return second(&mut mesh);
    }
    let bind = vec![IpAddr::V4(Ipv4Addr::LOCALHOST)];
    for kind in ["shm", "tcp", "checked", "sealed"] {
        let key = JobKey::random().unwrap();
        let server = Server::start(ServerConfig::new(bind.clone(), key.clone(), 2)).unwrap();
        let at = server.addrs()[0];
        // A key of this measurement only; a product must not put one on a command line.
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([&at.to_string(), &key.to_hex(), kind])
            .spawn()
            .unwrap();
        let started = Instant::now();
        let mut mesh = join(0, at, key, kind);
        println!(
            "{kind}: connected in {:.1} ms",
            started.elapsed().as_secs_f64() * 1e3
        );
        first(&mut mesh, kind);
        assert!(child.wait().unwrap().success());
    }
}

fn join(rank: u32, at: SocketAddr, key: JobKey, kind: &str) -> Mesh {
    let mut config = MeshConfig::new(Rank(rank), 2, key, vec![at]);
    config.shm = kind == "shm";
    config.encrypt = kind == "sealed";
    config.checksums = kind == "checked";
    if kind != "shm" {
        // The payload path between hosts: a different host name for each rank makes two hosts of this one.
        config.hostname = format!("measure{rank}");
    }
    connect(&config).unwrap()
}

fn until(mesh: &mut Mesh, mut done: impl FnMut(&mut Mesh) -> bool) {
    let mut n = 0;
    while !done(mesh) {
        mesh.waiter.idle(n, Some(LIMIT));
        n += 1;
    }
}

fn frame(mesh: &mut Mesh) -> Vec<u8> {
    let mut got = None;
    until(mesh, |mesh| {
        got = mesh.control.poll();
        got.is_some()
    });
    match got {
        Some(ControlEvent::Frame { bytes, .. }) => bytes,
        other => panic!("{other:?}"),
    }
}

/// Sends and receives `len` bytes at the same time.
fn exchange(mesh: &mut Mesh, peer: Rank, out: &[u8], buf: &mut [u8], both: bool) {
    let (mut sent, mut got) = (0, 0);
    let want = if both || mesh.topology.rank == Rank(1) {
        buf.len()
    } else {
        0
    };
    let give = if both || mesh.topology.rank == Rank(0) {
        out.len()
    } else {
        0
    };
    until(mesh, |mesh| {
        loop {
            let link = mesh.data.link(peer);
            let n = link.try_send(&out[sent..give]).unwrap();
            let m = link.try_recv(&mut buf[got..want]).unwrap();
            sent += n;
            got += m;
            if n + m == 0 {
                break;
            }
        }
        sent == give && got == want
    });
}

/// Spins and yields before sleeping.
const WAIT_POLICIES: [(u32, u32); 6] =
    [(200, 100), (0, 0), (200, 0), (2000, 0), (200, 10), (0, 100)];
const BULK: usize = 64 << 20;
const BULK_ROUNDS: usize = 8;

fn first(mesh: &mut Mesh, kind: &str) {
    for (spins, yields) in WAIT_POLICIES {
        mesh.waiter.set_wait_policy(spins, yields);
        let rounds = ROUNDS;
        let mut times = Vec::new();
        for round in 0..rounds + WARM_UP {
            let start = Instant::now();
            mesh.control.send(Rank(1), b"ping").unwrap();
            frame(mesh);
            if round >= WARM_UP {
                times.push(start.elapsed());
            }
        }
        report(
            kind,
            &format!("control round trip, {spins} spins, {yields} yields"),
            &mut times,
        );
    }
    mesh.waiter.set_wait_policy(200, 100);
    if let Some(arena) = mesh.data.arena().cloned() {
        let mut times = Vec::new();
        for round in 1..=(ROUNDS + WARM_UP) as u64 {
            let start = Instant::now();
            arena.publish(0, round, &[1]);
            until(mesh, |_| arena.peek(1, 0) >= round);
            times.push(start.elapsed());
        }
        report(kind, "flag round trip", &mut times);
    }
    let (out, mut buf) = (vec![1; BULK], vec![0; BULK]);
    for both in [false, true] {
        let mut best = f64::MAX;
        for _ in 0..BULK_ROUNDS {
            let start = Instant::now();
            exchange(mesh, Rank(1), &out, &mut buf, both);
            frame(mesh);
            best = best.min(start.elapsed().as_secs_f64());
        }
        let direction = if both { "each way" } else { "one way" };
        println!(
            "{kind}: {direction} {:.2} GB/s (best of {BULK_ROUNDS})",
            BULK as f64 / best / 1e9
        );
    }
    mesh.control.goodbye(LIMIT);
}

fn second(mesh: &mut Mesh) {
    for (spins, yields) in WAIT_POLICIES {
        mesh.waiter.set_wait_policy(spins, yields);
        for _ in 0..ROUNDS + WARM_UP {
            let bytes = frame(mesh);
            mesh.control.send(Rank(0), &bytes).unwrap();
        }
    }
    mesh.waiter.set_wait_policy(200, 100);
    if let Some(arena) = mesh.data.arena().cloned() {
        for round in 1..=(ROUNDS + WARM_UP) as u64 {
            until(mesh, |_| arena.peek(0, 0) >= round);
            arena.publish(0, round, &[0]);
        }
    }
    let (out, mut buf) = (vec![1; BULK], vec![0; BULK]);
    for both in [false, true] {
        for _ in 0..BULK_ROUNDS {
            exchange(mesh, Rank(0), &out, &mut buf, both);
            mesh.control.send(Rank(0), b"done").unwrap();
        }
    }
    until(mesh, |mesh| {
        matches!(mesh.control.poll(), Some(ControlEvent::Left { .. }))
    });
    mesh.control.goodbye(LIMIT);
}

fn report(kind: &str, what: &str, times: &mut [Duration]) {
    times.sort_unstable();
    let at = |part: usize| times[(times.len() - 1) * part / 100].as_secs_f64() * 1e6;
    println!(
        "{kind}: {what}: median {:.1} us, p99 {:.1} us",
        at(50),
        at(99)
    );
}
