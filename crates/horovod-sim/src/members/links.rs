//! Connections: reliable and ordered while they last, of any delay; cut off, they keep what was sent.

use std::collections::VecDeque;

use horovod_launch::elastic::WorkerId;

use super::{Happening, World};

/// A host, or the launcher's own, which nothing happens to.
pub(super) type LinkPlace = Option<usize>;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum LinkId {
    /// Between neighbours in the tree of a generation.
    Control {
        generation: u64,
        from: WorkerId,
        to: WorkerId,
    },
    /// Between a worker and the rendezvous.
    ToRendezvous(u64),
    FromRendezvous(u64),
    /// Between the launcher and the agent of a host, by the number of the agent.
    ToAgent(usize, u64),
    FromAgent(usize, u64),
}

#[derive(Debug)]
pub(super) enum Message {
    Bytes(Vec<u8>),
    /// The sender leaves in good order.
    Goodbye,
    /// The connection has ended.
    Closed,
    Start {
        worker: WorkerId,
        local: u32,
    },
    End(WorkerId),
    Exited(WorkerId, i32),
}

#[derive(Debug)]
pub(super) struct Link {
    from: LinkPlace,
    to: LinkPlace,
    queue: VecDeque<Message>,
    /// Deliveries that wait for the way to be open again.
    blocked: usize,
    last_at: u64,
}

/// From where to where something is said.
#[derive(Clone, Copy, Debug)]
pub(super) struct Route {
    /// Sender.
    pub(super) from: LinkPlace,
    /// Receiver.
    pub(super) to: LinkPlace,
}

impl World {
    /// Whether bytes get from one place to another.
    pub(super) fn is_open(&self, from: LinkPlace, to: LinkPlace) -> bool {
        let leaves = from.is_none_or(|host| !self.hosts[host].cut_out);
        let enters = to.is_none_or(|host| !self.hosts[host].cut_in);
        from == to || (leaves && enters)
    }

    pub(super) fn send(&mut self, id: LinkId, route: Route, message: Message) {
        let Route { from, to } = route;
        let delay = match from == to {
            true => self.rng.below(self.delay / 10 + 1),
            false => self.rng.below(self.delay + 1),
        };
        let now = self.now;
        let link = self.links.entry(id).or_insert_with(|| Link {
            from,
            to,
            queue: VecDeque::new(),
            blocked: 0,
            last_at: 0,
        });
        link.queue.push_back(message);
        link.last_at = link.last_at.max(now + delay);
        let at = link.last_at;
        self.at(at, Happening::Deliver(id));
    }

    /// The next message of a link arrives, if it can.
    pub(super) fn deliver(&mut self, id: LinkId) {
        let Some(link) = self.links.get(&id) else {
            return;
        };
        let (from, to) = (link.from, link.to);
        if !self.is_open(from, to) {
            if let Some(link) = self.links.get_mut(&id) {
                link.blocked += 1;
            }
            return;
        }
        let next = self
            .links
            .get_mut(&id)
            .and_then(|link| link.queue.pop_front());
        let Some(message) = next else { return };
        self.messages += 1;
        if let Err(message) = self.arrive(id, message)
            && let Some(link) = self.links.get_mut(&id)
        {
            // The receiver is not as far yet.
            link.queue.push_front(message);
            self.after(super::MS, Happening::Deliver(id));
        }
    }

    /// Delivers the messages that were held back.
    pub(super) fn unblock(&mut self) {
        let ids: Vec<LinkId> = self
            .links
            .iter()
            .filter(|(_, link)| link.blocked > 0)
            .map(|(id, _)| *id)
            .collect();
        for id in ids {
            let Some(link) = self.links.get(&id) else {
                continue;
            };
            let (from, to) = (link.from, link.to);
            if !self.is_open(from, to) {
                continue;
            }
            let now = self.now;
            if let Some(link) = self.links.get_mut(&id) {
                let count = std::mem::take(&mut link.blocked);
                link.last_at = link.last_at.max(now + 1);
                let at = link.last_at;
                for _ in 0..count {
                    self.at(at, Happening::Deliver(id));
                }
            }
        }
    }

    fn arrive(&mut self, id: LinkId, message: Message) -> Result<(), Message> {
        match (id, message) {
            (
                LinkId::Control {
                    generation,
                    from,
                    to,
                },
                message,
            ) => {
                return self.arrive_at_engine(generation, from, to, message);
            }
            (LinkId::ToRendezvous(client), Message::Bytes(bytes)) => {
                let done = self.rendezvous.handle(client, &bytes);
                self.rendezvous_did(done);
            }
            (LinkId::ToRendezvous(client), _) => {
                let done = self.rendezvous.gone(client, "it closed the connection");
                self.rendezvous_did(done);
                self.links.remove(&LinkId::FromRendezvous(client));
                self.links.remove(&id);
            }
            (LinkId::FromRendezvous(client), message) => {
                self.on_rendezvous_message(client, message)
            }
            (LinkId::ToAgent(host, agent), message) => self.on_agent_message(host, agent, message),
            (LinkId::FromAgent(host, agent), message) => {
                if let Message::Exited(worker, status) = message {
                    self.worker_exited(host, agent, worker, status);
                }
            }
        }
        Ok(())
    }
}
