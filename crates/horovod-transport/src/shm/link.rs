//! A link between two ranks of one host: a byte ring each way and the peer's doorbell.

use super::{
    arena::{Bell, RingMemory},
    ring::{Consumer, Producer},
};
use crate::link::{Link, LinkError, PeerName};

/// Both directions to one peer.
pub(crate) struct ShmLink {
    peer: PeerName,
    outgoing: Producer<RingMemory>,
    incoming: Consumer<RingMemory>,
    bell: Bell,
}

const BROKEN: &str = "impossible position in a shared ring";
const FORKED: &str = "this process was forked off and has no part in the job";

impl ShmLink {
    pub(crate) fn new(
        peer: PeerName,
        outgoing: RingMemory,
        incoming: RingMemory,
        bell: Bell,
    ) -> Self {
        let (outgoing, incoming) = (Producer::new(outgoing), Consumer::new(incoming));
        Self {
            peer,
            outgoing,
            incoming,
            bell,
        }
    }
}

impl Link for ShmLink {
    fn try_send(&mut self, bytes: &[u8]) -> Result<usize, LinkError> {
        if self.bell.region.is_foreign() {
            return Err(self.peer.lost(FORKED));
        }
        let n = self
            .outgoing
            .push(bytes)
            .map_err(|_| self.peer.corrupt(BROKEN))?;
        if n > 0 {
            self.bell.ring();
        }
        Ok(n)
    }

    fn try_recv(&mut self, buf: &mut [u8]) -> Result<usize, LinkError> {
        if self.bell.region.is_foreign() {
            return Err(self.peer.lost(FORKED));
        }
        let n = self
            .incoming
            .pop(buf)
            .map_err(|_| self.peer.corrupt(BROKEN))?;
        if n > 0 && self.incoming.producer_waits() {
            self.bell.ring();
        }
        Ok(n)
    }
}
