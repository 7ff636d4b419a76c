//! The probe's server, on the host that is probed: listens, and does the errands of those who hold the key.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use super::{
    BLOCK, ECHO, ECHO_BYTES, ERRAND_TIME, Obstacle, POUR, SWALLOW, arriving, fill, pause, put,
};
use crate::{
    JobKey,
    handshake::{Binding, Purpose},
    platform::{self, fd::Fd, net},
    ports::Ports,
    tcp::{
        listener::{Gate, listen_all},
        stream::Stream,
    },
    wait::wait_for_any,
};

/// Errands at the same time; who comes when there are as many is sent away.
const ERRANDS_MAX: usize = 64;

/// Answers probes. Dropping it stops it.
#[derive(Debug)]
pub struct Server {
    addresses: Vec<(String, SocketAddr)>,
    stop: Arc<AtomicBool>,
    notifier: Arc<Fd>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Listens on these addresses (`0.0.0.0` and `::` mean all), as the host of this number.
    pub fn start(bind: &[IpAddr], ports: Ports, key: JobKey, me: u32) -> io::Result<Self> {
        let bound = listen_all(bind, ports)?;
        let addresses = with_names(&bound)?;
        let mut gate = Gate::default();
        for (fd, _) in bound {
            gate.add(fd);
        }
        let (notified_fd, notifier) = platform::notifier()?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::Builder::new()
            .name("hvd-probed".into())
            .spawn(move || serve(&key, me, gate, &notified_fd, &stopped))?;
        Ok(Self {
            addresses,
            stop,
            notifier,
            thread: Some(thread),
        })
    }

    /// Where others may reach it, with the interface of each address.
    pub fn addrs(&self) -> &[(String, SocketAddr)] {
        &self.addresses
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        platform::notify(&self.notifier);
        if let Some(thread) = self.thread.take() {
            // It only ends early by a panic, which has been reported.
            let _ = thread.join();
        }
    }
}

/// The addresses behind listeners that may be bound to all, without the loopback unless there is nothing else.
fn with_names(bound: &[(Arc<Fd>, SocketAddr)]) -> io::Result<Vec<(String, SocketAddr)>> {
    let mut found = Vec::new();
    let interfaces = net::interfaces()?;
    for (_, at) in bound {
        for interface in &interfaces {
            let ip = interface.address;
            let fits = if at.ip().is_unspecified() {
                ip.is_ipv4() == at.is_ipv4() && !ip.is_loopback()
            } else {
                ip == at.ip()
            };
            if fits {
                found.push((interface.name.clone(), SocketAddr::new(ip, at.port())));
            }
        }
    }
    found.sort_by_key(|(_, at)| at.is_ipv6());
    Ok(found)
}

fn serve(key: &JobKey, me: u32, mut gate: Gate, notified_fd: &Fd, stop: &AtomicBool) {
    let expected =
        |b: &Binding| b.purpose == Purpose::Probe && b.to == me && b.generation == 0 && b.lane == 0;
    let running = Arc::new(AtomicUsize::new(0));
    while !stop.load(Ordering::Acquire) {
        let sockets = [(notified_fd, false)].into_iter().chain(gate.waits());
        wait_for_any(sockets, gate.deadline());
        platform::silence(notified_fd);
        for (_, stream) in gate.step(Instant::now(), key, &expected) {
            if running.fetch_add(1, Ordering::AcqRel) >= ERRANDS_MAX {
                running.fetch_sub(1, Ordering::AcqRel);
                continue;
            }
            let count = running.clone();
            let errand = std::thread::Builder::new()
                .name("hvd-errand".into())
                .spawn(move || {
                    // Its end is the client's to report.
                    let _ = run_errand(stream);
                    count.fetch_sub(1, Ordering::AcqRel);
                });
            if errand.is_err() {
                running.fetch_sub(1, Ordering::AcqRel);
            }
        }
    }
}

fn run_errand(mut stream: Stream) -> Result<(), Obstacle> {
    let deadline = Instant::now() + ERRAND_TIME;
    let mut order = [0];
    fill(&mut stream, &mut order, deadline)?;
    match order[0] {
        ECHO => loop {
            let mut message = [0; ECHO_BYTES];
            fill(&mut stream, &mut message, deadline)?;
            put(&mut stream, &message, deadline)?;
        },
        SWALLOW => {
            let mut window = [0; 8];
            fill(&mut stream, &mut window, deadline)?;
            let window = Duration::from_nanos(u64::from_le_bytes(window)).min(ERRAND_TIME / 2);
            let rate = arriving(&mut stream, window, deadline)?;
            put(&mut stream, &(rate as u64).to_le_bytes(), deadline)?;
            // Until the client has read it and goes: closing with bytes unread would throw the answer away.
            let mut rest = vec![0; BLOCK];
            loop {
                fill(&mut stream, &mut rest, deadline)?;
            }
        }
        POUR => {
            let block = vec![0; BLOCK];
            let mut sent = 0;
            loop {
                match stream.try_send(&block[sent..])? {
                    0 => pause(&stream, true, deadline)?,
                    count => sent = (sent + count) % BLOCK,
                }
            }
        }
        _ => Ok(()),
    }
}
