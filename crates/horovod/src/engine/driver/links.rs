//! The links of a rank to its neighbours in the tree: what it says to them and hears, and where it waits for them.

use std::sync::Arc;
use std::time::Duration;

use horovod_protocol::{DecodeError, Rank, Response, Time, ToCoordinator, ToWorker, Tree};
use horovod_transport::{Control, ControlEvent, LinkError, Topology, Waiter};

use crate::engine::relay::{OutOfBandMessage, Relay};

/// Parts of the mesh that the driver needs: all but the links for data.
pub(super) struct ControlPlane {
    /// Ranks and their hosts.
    pub(super) topology: Topology,
    /// Control tree: which ranks exchange negotiation messages.
    pub(super) tree: Tree,
    /// The links along that tree.
    pub(super) control: Control,
    /// How long one of them may be silent; `None`: for ever.
    pub(super) heartbeat: Option<Duration>,
    /// Where to wait for all of them.
    pub(super) waiter: Waiter,
}

/// The links of this rank.
pub(super) struct Links {
    topology: Topology,
    tree: Tree,
    control: Control,
    /// How long a neighbour may be silent; `None`: for ever.
    heartbeat: Option<Duration>,
    waiter: Waiter,
    relay: Relay,
    frame: Vec<u8>,
    /// The last messages; the next are read into their memory.
    from_children: ToCoordinator,
    from_parent: ToWorker,
    spare_responses: Vec<Arc<Response>>,
}

impl Links {
    /// `now` by the clock of the engine.
    pub(super) fn new(plane: ControlPlane, now: Time) -> Self {
        let ControlPlane {
            topology,
            tree,
            mut control,
            heartbeat,
            waiter,
        } = plane;
        if let Some(timeout) = heartbeat {
            control.watch(timeout, now);
        }
        Self {
            relay: Relay::new(topology.rank, tree.clone()),
            topology,
            tree,
            control,
            heartbeat,
            waiter,
            frame: Vec::new(),
            from_children: ToCoordinator::empty(),
            from_parent: ToWorker::empty(),
            spare_responses: Vec::new(),
        }
    }

    // -- who there is

    pub(super) fn me(&self) -> Rank {
        self.topology.rank
    }

    pub(super) fn topology(&self) -> &Topology {
        &self.topology
    }

    pub(super) fn tree(&self) -> &Tree {
        &self.tree
    }

    pub(super) fn parent(&self) -> Option<Rank> {
        self.tree.parent(self.topology.rank)
    }

    pub(super) fn host_of(&self, rank: Rank) -> String {
        self.topology
            .peers
            .get(rank.index())
            .map(|p| p.hostname.to_string())
            .unwrap_or_default()
    }

    // -- where to wait

    pub(super) fn waiter(&mut self) -> &mut Waiter {
        &mut self.waiter
    }

    /// Whether ranks outnumber the cores of this host.
    pub(super) fn is_oversubscribed(&self) -> bool {
        self.waiter.is_oversubscribed()
    }

    // -- the negotiation's messages

    /// The next event of any link.
    pub(super) fn poll(&mut self) -> Option<ControlEvent> {
        self.control.poll()
    }

    /// The memory of what has come.
    pub(super) fn give_back(&mut self, bytes: Vec<u8>) {
        self.control.give_back(bytes);
    }

    /// Reads what the parent has said.
    pub(super) fn read_from_above(&mut self, bytes: &[u8]) -> Result<&ToWorker, DecodeError> {
        let message = &mut self.from_parent;
        message.decode_with(bytes, &mut self.spare_responses)?;
        Ok(message)
    }

    /// Reads what a child has said.
    pub(super) fn read_from_below(&mut self, bytes: &[u8]) -> Result<&ToCoordinator, DecodeError> {
        self.from_children.decode_from(bytes)?;
        Ok(&self.from_children)
    }

    /// Another message begins.
    pub(super) fn new_frame(&mut self) {
        self.frame.clear();
    }

    /// Sends the message to this neighbour. `encode` writes it, if it is not yet written.
    pub(super) fn send(
        &mut self,
        to: Rank,
        encode: impl FnOnce(&mut Vec<u8>),
    ) -> Result<(), LinkError> {
        if self.frame.is_empty() {
            encode(&mut self.frame);
        }
        self.control.send(to, &self.frame)
    }

    pub(super) fn has_unsent(&self) -> bool {
        self.control.has_unsent()
    }

    /// Takes leave of all neighbours; what is queued may take so long.
    pub(super) fn goodbye(&mut self, timeout: Duration) {
        self.control.goodbye(timeout);
    }

    // -- out-of-band messages

    /// Such a message has come from a neighbour; `Some` if it is for this rank.
    pub(super) fn receive<'a>(
        &mut self,
        neighbour: Rank,
        bytes: &'a [u8],
    ) -> Option<OutOfBandMessage<'a>> {
        self.relay.receive(&mut self.control, neighbour, bytes)
    }

    /// The relay and the control links that carry such messages.
    pub(super) fn out_of_band(&mut self) -> (&Relay, &mut Control) {
        (&self.relay, &mut self.control)
    }

    /// Passes on what waits. `true`: something was sent.
    pub(super) fn carry(&mut self) -> bool {
        self.relay.carry(&mut self.control)
    }

    /// A neighbour will pass on nothing more: the ranks from which nothing more can come.
    pub(super) fn gone(&mut self, neighbour: Rank) -> Vec<Rank> {
        self.relay.gone(neighbour)
    }

    /// Whether everything from below has been passed on, or it was waited for long enough.
    pub(super) fn is_settled(&mut self) -> bool {
        self.relay.is_settled()
    }

    // -- signs of life

    /// How long a neighbour may be silent; `None`: for ever.
    pub(super) fn heartbeat(&self) -> Option<Duration> {
        self.heartbeat
    }

    /// When to look after the neighbours.
    pub(super) fn heartbeat_due(&self) -> Option<Time> {
        self.control.heartbeat_due()
    }

    /// Tells the neighbours that this rank lives and sees whether they do, if it is time. `true`: there may be news.
    pub(super) fn check_neighbours(&mut self, now: Time) -> bool {
        self.control.check_neighbours(now)
    }

    /// Tells the launcher that a rank is silent.
    pub(super) fn report_silent(&mut self, rank: Rank) {
        self.control.report_silent(rank);
    }

    /// Tells the launcher which training state this process holds.
    pub(super) fn send_training_state(&mut self, state: u8) {
        self.control.send_training_state(state);
    }
}
