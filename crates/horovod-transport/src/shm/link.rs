//! A link between two ranks of one host: a byte ring each way and the peer's notifier.

use super::{
    arena::{RankNotifier, RingMemory},
    ring::{Consumer, Producer},
};
use crate::link::{Link, LinkError, PeerName};

/// Both directions to one peer.
pub(crate) struct ShmLink {
    peer: PeerName,
    outgoing: Producer<RingMemory>,
    incoming: Consumer<RingMemory>,
    notifier: RankNotifier,
}

const BROKEN: &str = "impossible position in a shared ring";
const FORKED: &str = "this process was forked off and has no part in the job";

impl ShmLink {
    pub(crate) fn new(
        peer: PeerName,
        outgoing: RingMemory,
        incoming: RingMemory,
        notifier: RankNotifier,
    ) -> Self {
        let (outgoing, incoming) = (Producer::new(outgoing), Consumer::new(incoming));
        Self {
            peer,
            outgoing,
            incoming,
            notifier,
        }
    }
}

impl Link for ShmLink {
    fn try_send(&mut self, bytes: &[u8]) -> Result<usize, LinkError> {
        if self.notifier.region.is_foreign() {
            return Err(self.peer.lost(FORKED));
        }
        let n = self
            .outgoing
            .push(bytes)
            .map_err(|_| self.peer.corrupt(BROKEN))?;
        if n > 0 {
            self.notifier.notify();
        }
        Ok(n)
    }

    fn try_recv(&mut self, buf: &mut [u8]) -> Result<usize, LinkError> {
        if self.notifier.region.is_foreign() {
            return Err(self.peer.lost(FORKED));
        }
        let n = self
            .incoming
            .pop(buf)
            .map_err(|_| self.peer.corrupt(BROKEN))?;
        if n > 0 && self.incoming.producer_waits() {
            self.notifier.notify();
        }
        Ok(n)
    }
}
