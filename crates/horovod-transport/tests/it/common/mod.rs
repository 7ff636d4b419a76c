//! Common to the integration tests: a rank with bounded waits.
#![allow(
    dead_code,
    clippy::unwrap_used,
    reason = "each test binary uses its part; a test wants to fail at once, with the place"
)]

use std::time::{Duration, Instant};

use horovod_protocol::Rank;
use horovod_transport::{Control, ControlEvent, Data, Mesh, Topology, Waiter};

/// No wait of any test is longer, however loaded the machine.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(240);

/// One rank under test.
pub(crate) struct Rig {
    pub(crate) topology: Topology,
    pub(crate) control: Control,
    pub(crate) data: Data,
    pub(crate) waiter: Waiter,
}

impl Rig {
    pub(crate) fn new(mesh: Mesh) -> Self {
        let Mesh {
            topology,
            control,
            data,
            waiter,
            ..
        } = mesh;
        Self {
            topology,
            control,
            data,
            waiter,
        }
    }

    pub(crate) fn rank(&self) -> Rank {
        self.topology.rank
    }

    /// Waits as the engine does until `done`; panics when that takes for ever.
    pub(crate) fn until(&mut self, mut done: impl FnMut(&mut Self) -> bool) {
        let deadline = Instant::now() + TIMEOUT;
        let mut n = 0;
        while !done(self) {
            assert!(Instant::now() < deadline, "{}: nothing came", self.rank());
            self.waiter.idle(n, Some(TIMEOUT));
            n += 1;
        }
    }

    /// The next event.
    pub(crate) fn event(&mut self) -> ControlEvent {
        let mut event = None;
        self.until(|rig| {
            event = rig.control.poll();
            event.is_some()
        });
        event.unwrap()
    }

    /// The next event, which must be a frame.
    pub(crate) fn frame(&mut self) -> (Rank, Vec<u8>) {
        match self.event() {
            ControlEvent::Frame { from, bytes } => (from, bytes),
            other => panic!("{}: {other:?}", self.rank()),
        }
    }

    /// Sends `len` bytes to each other rank and receives as many from each, all at once.
    pub(crate) fn exchange(&mut self, len: usize) {
        let (me, size) = (self.rank(), self.topology.size);
        let others: Vec<Rank> = (0..size).map(Rank).filter(|r| *r != me).collect();
        let out: Vec<Vec<u8>> = others
            .iter()
            .map(|to| pattern(len, (me.0 * 16 + to.0) as u8))
            .collect();
        let mut sent = vec![0; others.len()];
        let mut got: Vec<(usize, Vec<u8>)> = others.iter().map(|_| (0, vec![0; len])).collect();
        self.until(|rig| {
            loop {
                let mut moved = 0;
                for (i, &peer) in others.iter().enumerate() {
                    let link = rig.data.link(peer);
                    let n = link.try_send(&out[i][sent[i]..]).unwrap();
                    sent[i] += n;
                    let (at, buf) = &mut got[i];
                    let m = link.try_recv(&mut buf[*at..]).unwrap();
                    *at += m;
                    moved += n + m;
                }
                if moved == 0 {
                    break;
                }
            }
            sent.iter().all(|n| *n == len) && got.iter().all(|(n, _)| *n == len)
        });
        for (i, peer) in others.iter().enumerate() {
            let want = pattern(len, (peer.0 * 16 + me.0) as u8);
            assert!(got[i].1 == want, "{peer} to {me}: other bytes");
        }
    }
}

pub(crate) fn rigs(meshes: Vec<Mesh>) -> Vec<Rig> {
    meshes.into_iter().map(Rig::new).collect()
}

/// Runs `body` on all ranks, each on its own thread. All stay alive until all are done, so that
/// nobody sees the end of a faster one.
pub(crate) fn on_all(kind: &str, meshes: Vec<Mesh>, body: impl Fn(&mut Rig) + Sync) {
    let mut rigs = rigs(meshes);
    std::thread::scope(|s| {
        for rig in &mut rigs {
            let name = format!("{kind}, {}", rig.rank());
            std::thread::Builder::new()
                .name(name)
                .spawn_scoped(s, || body(rig))
                .unwrap();
        }
    });
}

/// Bytes that differ by position and by seed.
pub(crate) fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len)
        .map(|i| (i as u8).wrapping_mul(31) ^ (i >> 8) as u8 ^ seed)
        .collect()
}
