//! The links of a rank to its neighbours in the tree: messages that it sends and receives, and the waiter for all of
//! them.

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
    /// The links along the control tree.
    pub(super) control: Control,
    /// How long a neighbour may be silent; `None`: without limit.
    pub(super) heartbeat: Option<Duration>,
    /// Waits for events of all links.
    pub(super) waiter: Waiter,
}

/// The links of this rank.
pub(super) struct Links {
    topology: Topology,
    tree: Tree,
    control: Control,
    /// How long a neighbour may be silent; `None`: without limit.
    heartbeat: Option<Duration>,
    waiter: Waiter,
    relay: Relay,
    frame: Vec<u8>,
    /// The last message of a child; the next message of each direction is decoded into the memory of the last.
    from_children: ToCoordinator,
    from_parent: ToWorker,
    spare_responses: Vec<Arc<Response>>,
}

impl Links {
    /// `now` is the time by the engine's clock.
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

    // -- the ranks

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

    // -- the waiter

    pub(super) fn waiter(&mut self) -> &mut Waiter {
        &mut self.waiter
    }

    /// Returns whether ranks outnumber the cores of this host.
    pub(super) fn is_oversubscribed(&self) -> bool {
        self.waiter.is_oversubscribed()
    }

    // -- the negotiation's messages

    /// Returns the next event of any link.
    pub(super) fn poll(&mut self) -> Option<ControlEvent> {
        self.control.poll()
    }

    /// Returns the memory of a received message to the links, which reuse it.
    pub(super) fn give_back(&mut self, bytes: Vec<u8>) {
        self.control.give_back(bytes);
    }

    /// Decodes a message of the parent.
    pub(super) fn read_from_above(&mut self, bytes: &[u8]) -> Result<&ToWorker, DecodeError> {
        let message = &mut self.from_parent;
        message.decode_with(bytes, &mut self.spare_responses)?;
        Ok(message)
    }

    /// Decodes a message of a child.
    pub(super) fn read_from_below(&mut self, bytes: &[u8]) -> Result<&ToCoordinator, DecodeError> {
        self.from_children.decode_from(bytes)?;
        Ok(&self.from_children)
    }

    /// Clears the frame, so that the next [`Self::send`] encodes its message.
    pub(super) fn new_frame(&mut self) {
        self.frame.clear();
    }

    /// Sends the message to this neighbour. `encode` writes the message, unless the frame has it already.
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

    /// Sends a goodbye to all neighbours; waits at most `timeout` until queued messages are sent.
    pub(super) fn goodbye(&mut self, timeout: Duration) {
        self.control.goodbye(timeout);
    }

    // -- out-of-band messages

    /// Handles an out-of-band message from a neighbour. Returns the message if it is for this rank.
    pub(super) fn receive<'a>(
        &mut self,
        neighbour: Rank,
        bytes: &'a [u8],
    ) -> Option<OutOfBandMessage<'a>> {
        self.relay.receive(&mut self.control, neighbour, bytes)
    }

    /// Returns the relay and the control links that carry out-of-band messages.
    pub(super) fn out_of_band(&mut self) -> (&Relay, &mut Control) {
        (&self.relay, &mut self.control)
    }

    /// Forwards queued out-of-band messages. Returns whether something was sent.
    pub(super) fn carry(&mut self) -> bool {
        self.relay.carry(&mut self.control)
    }

    /// Notes that a neighbour will forward nothing more. Returns the ranks from which nothing more can arrive.
    pub(super) fn gone(&mut self, neighbour: Rank) -> Vec<Rank> {
        self.relay.gone(neighbour)
    }

    /// Returns whether everything from below was forwarded, or this rank has waited for it long enough.
    pub(super) fn is_settled(&mut self) -> bool {
        self.relay.is_settled()
    }

    // -- signs of life

    /// How long a neighbour may be silent; `None`: without limit.
    pub(super) fn heartbeat(&self) -> Option<Duration> {
        self.heartbeat
    }

    /// Returns when [`Self::check_neighbours`] is due.
    pub(super) fn heartbeat_due(&self) -> Option<Time> {
        self.control.heartbeat_due()
    }

    /// If it is time, sends a heartbeat to the neighbours and checks theirs. Returns whether there may be an event.
    pub(super) fn check_neighbours(&mut self, now: Time) -> bool {
        self.control.check_neighbours(now)
    }

    /// Reports to the launcher that a rank is silent.
    pub(super) fn report_silent(&mut self, rank: Rank) {
        self.control.report_silent(rank);
    }

    /// Sends the launcher the number of the training state that this process has.
    pub(super) fn send_training_state(&mut self, state: u8) {
        self.control.send_training_state(state);
    }
}
