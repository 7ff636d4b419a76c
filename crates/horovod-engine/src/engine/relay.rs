//! The relay of out-of-band messages (timeline, inspection) between rank 0 and the others, along the tree.
//!
//! Out-of-band messages are sent only while no message of the negotiation waits. They may therefore accumulate where
//! many pass through one rank. The relay then drops the events in them and counts the dropped events.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Instant;

use horovod_protocol::{Rank, Tree};
use horovod_timeline::{self as timeline, LAST_EVENTS_TIMEOUT, MessageKind};
use horovod_transport::{Control, LinkError};

/// Above so many waiting bytes, events in further messages are dropped.
const RELAYED_BYTES_MAX: usize = 4 << 20;
/// Above so many waiting messages, further messages are dropped.
const RELAYED_MESSAGES_MAX: usize = 1 << 16;
/// Bytes of an envelope before a message: sender and addressee.
const ENVELOPE: usize = 8;

/// Relay of one rank.
pub(super) struct Relay {
    me: Rank,
    tree: Tree,
    /// Messages that could not be forwarded yet, in envelopes, by the next neighbour on their path.
    waiting: BTreeMap<Rank, VecDeque<Vec<u8>>>,
    messages: usize,
    bytes: usize,
    /// Ranks below that record and have not sent their last events.
    recording: BTreeSet<Rank>,
    deadline: Option<Instant>,
}

/// An out-of-band message for this rank.
pub(super) struct OutOfBandMessage<'a> {
    pub(super) from: Rank,
    pub(super) message: &'a [u8],
}

impl Relay {
    pub(super) fn new(me: Rank, tree: Tree) -> Self {
        Self {
            me,
            tree,
            waiting: BTreeMap::new(),
            messages: 0,
            bytes: 0,
            recording: BTreeSet::new(),
            deadline: None,
        }
    }

    /// Sends a message of this rank. Returns `false` if it cannot be sent now.
    pub(super) fn send(
        &self,
        control: &mut Control,
        to: Rank,
        message: &[u8],
    ) -> Result<bool, LinkError> {
        let Some(next) = self.next(to) else {
            return Err(LinkError::NoLink { rank: to });
        };
        control.send_out_of_band(next, [&envelope(self.me, to), message])
    }

    /// Handles an out-of-band message from a neighbour. Returns the message if it is for this rank; forwards it
    /// otherwise, now or later.
    pub(super) fn receive<'a>(
        &mut self,
        control: &mut Control,
        neighbour: Rank,
        bytes: &'a [u8],
    ) -> Option<OutOfBandMessage<'a>> {
        let (from, to, message) = open(bytes)?;
        let size = self.tree.size();
        if from.0 >= size || to.0 >= size || self.next(from) != Some(neighbour) {
            tracing::debug!("{neighbour} passed on what {from} cannot have sent that way");
            return None;
        }
        if to == self.me {
            return Some(OutOfBandMessage { from, message });
        }
        let next = self.next(to).filter(|next| *next != neighbour)?;
        match timeline::kind_of(message) {
            MessageKind::Start => {
                self.recording.insert(to);
            }
            MessageKind::End => {
                self.recording.remove(&from);
            }
            MessageKind::Other => {}
        }
        let busy = self.waiting.contains_key(&next);
        // The driver detects a lost peer elsewhere; here only events are missing.
        if busy || matches!(control.send_out_of_band(next, [bytes, &[]]), Ok(false)) {
            self.keep(next, bytes);
        }
        None
    }

    fn keep(&mut self, next: Rank, bytes: &[u8]) {
        let (head, message) = bytes.split_at(ENVELOPE);
        let kept = if self.bytes + bytes.len() <= RELAYED_BYTES_MAX {
            bytes.to_vec()
        } else {
            match timeline::emptied(message) {
                Some(empty) => [head, &empty].concat(),
                None => bytes.to_vec(),
            }
        };
        if self.messages < RELAYED_MESSAGES_MAX {
            self.messages += 1;
            self.bytes += kept.len();
            self.waiting.entry(next).or_default().push_back(kept);
        } else {
            tracing::debug!("a message of the timeline is lost: too many wait for {next}");
        }
    }

    /// Forwards waiting messages where possible. Returns whether something was sent.
    pub(super) fn carry(&mut self, control: &mut Control) -> bool {
        let before = self.messages;
        self.waiting.retain(|next, queue| {
            while let Some(bytes) = queue.front()
                && !matches!(control.send_out_of_band(*next, [bytes, &[]]), Ok(false))
            {
                self.messages -= 1;
                self.bytes -= bytes.len();
                queue.pop_front();
            }
            !queue.is_empty()
        });
        self.messages < before
    }

    /// Notes that a neighbour will forward nothing more. Returns the ranks from which nothing more can arrive.
    pub(super) fn gone(&mut self, neighbour: Rank) -> Vec<Rank> {
        let towards = |rank: &Rank| self.tree.child_towards(self.me, *rank) == Some(neighbour);
        let gone: Vec<Rank> = (0..self.tree.size()).map(Rank).filter(towards).collect();
        for rank in &gone {
            self.recording.remove(rank);
        }
        gone
    }

    /// Returns whether everything from below was forwarded, or this rank has waited for it long enough. Called when the
    /// job has stopped.
    pub(super) fn is_settled(&mut self) -> bool {
        if self.recording.is_empty() && self.waiting.is_empty() {
            return true;
        }
        let now = Instant::now();
        now >= *self.deadline.get_or_insert(now + LAST_EVENTS_TIMEOUT)
    }

    /// Returns the neighbour on the path to a rank.
    fn next(&self, to: Rank) -> Option<Rank> {
        let below = self.tree.child_towards(self.me, to);
        below
            .or_else(|| self.tree.parent(self.me))
            .filter(|_| to != self.me)
    }
}

fn envelope(from: Rank, to: Rank) -> [u8; ENVELOPE] {
    (u64::from(from.0) | u64::from(to.0) << 32).to_le_bytes()
}

/// Splits an enveloped message into sender, addressee and message.
fn open(bytes: &[u8]) -> Option<(Rank, Rank, &[u8])> {
    let (head, message) = bytes.split_first_chunk::<ENVELOPE>()?;
    let both = u64::from_le_bytes(*head);
    Some((Rank(both as u32), Rank((both >> 32) as u32), message))
}

#[cfg(test)]
mod tests {
    use horovod_transport::ControlEvent;
    use horovod_transport::testing::Cluster;

    use super::*;

    /// Returns the out-of-band messages that have arrived.
    fn arrived(control: &mut Control) -> Vec<(Rank, Vec<u8>)> {
        let mut found = Vec::new();
        while let Some(event) = control.poll() {
            if let ControlEvent::OutOfBand { from, bytes } = event {
                found.push((from, bytes));
            }
        }
        found
    }

    #[test]
    fn messages_pass_through_ranks_in_between_both_ways() {
        // Rank 1 sends through rank 0, rank 3 through rank 1.
        let mut meshes = Cluster::new(4).fan_out(2).build();
        let mut relays: Vec<Relay> = meshes
            .iter()
            .map(|mesh| Relay::new(mesh.topology.rank, mesh.tree.clone()))
            .collect();
        for (from, to) in [(3, 0), (0, 3)] {
            let sent = relays[from].send(&mut meshes[from].control, Rank(to), b"hello");
            assert!(sent.expect("a link"));
            let [(neighbour, bytes)] = &arrived(&mut meshes[1].control)[..] else {
                panic!("one message");
            };
            assert_eq!(*neighbour, Rank(from as u32));
            assert!(
                relays[1]
                    .receive(&mut meshes[1].control, *neighbour, bytes)
                    .is_none()
            );
            let at = to as usize;
            let [(neighbour, bytes)] = &arrived(&mut meshes[at].control)[..] else {
                panic!("one message");
            };
            assert_eq!(*neighbour, Rank(1));
            let received = relays[at].receive(&mut meshes[at].control, *neighbour, bytes);
            let received = received.expect("it is for this rank");
            assert_eq!(
                (received.from, received.message),
                (Rank(from as u32), &b"hello"[..])
            );
        }
        // Rank 2 does not send through rank 1, and there is no rank 9.
        for (from, to) in [(2, 0), (9, 0), (3, 9)] {
            let forged = [&envelope(Rank(from), Rank(to))[..], b"x"].concat();
            assert!(
                relays[0]
                    .receive(&mut meshes[0].control, Rank(1), &forged)
                    .is_none()
            );
        }
        assert_eq!(relays[0].gone(Rank(1)), [1, 3].map(Rank));
    }

    #[test]
    fn what_waits_is_bounded_and_goes_on_in_order_when_there_is_room() {
        let mut meshes = Cluster::new(4).fan_out(2).build();
        let mut relay = Relay::new(Rank(1), meshes[1].tree.clone());
        let batch = timeline::testing::batch(1000);
        let bytes = [&envelope(Rank(3), Rank(0))[..], &batch].concat();
        let many = 2 * RELAYED_BYTES_MAX / bytes.len();
        for _ in 0..many {
            assert!(
                relay
                    .receive(&mut meshes[1].control, Rank(3), &bytes)
                    .is_none()
            );
        }
        assert!(
            relay.bytes <= RELAYED_BYTES_MAX + 100 * many,
            "{}",
            relay.bytes
        );
        assert!(!relay.is_settled());
        let mut received = Vec::new();
        while !relay.waiting.is_empty() || meshes[1].control.has_unsent() {
            relay.carry(&mut meshes[1].control);
            received.extend(arrived(&mut meshes[0].control));
            while meshes[1].control.poll().is_some() {}
        }
        received.extend(arrived(&mut meshes[0].control));
        assert_eq!(received.len(), many);
        let whole = received.iter().take_while(|(_, got)| *got == bytes).count();
        assert!(whole > 10 && received[whole..].iter().all(|(_, got)| got.len() < 100));
        assert!(relay.is_settled() && relay.bytes == 0);
    }
}
