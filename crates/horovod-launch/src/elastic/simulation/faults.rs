//! Faults of a simulated job.

use super::super::events::{Event, WorkerId};
use super::{Happening, ProcessPlace, World};

impl World {
    pub(super) fn fault(&mut self) {
        let ids: Vec<WorkerId> = self.processes.keys().copied().collect();
        if self.dice.one_in(15) && !self.opened.is_empty() {
            let at = self.dice.below(self.opened.len() as u64) as usize;
            let host = self.opened.iter().nth(at).cloned().unwrap_or_default();
            self.opened.remove(&host);
            let mut broke = false;
            for id in ids {
                if self.processes[&id].host == host {
                    let p = self.processes.remove(&id);
                    broke |= p.is_some_and(|p| p.place == ProcessPlace::Round(self.round));
                }
            }
            let why = "connection lost".to_owned();
            self.feed(Event::HostLost { host, why, code: 1 });
            if broke {
                self.break_round();
            }
        } else if self.stands && !self.is_broken && !self.finishing && self.dice.one_in(3) {
            self.fall_silent();
        } else if !ids.is_empty() {
            let worker = ids[self.dice.below(ids.len() as u64) as usize];
            self.end(worker, 9);
        }
    }

    /// A member freezes, or it and another cannot reach each other any more; both notice it, each in its own time, and
    /// the others hear of it.
    fn fall_silent(&mut self) {
        let round = self.round;
        let [one, other] = [0, 1].map(|_| {
            let at = self.dice.below(self.members.len() as u64) as usize;
            self.members[at]
        });
        if one == other {
            return;
        }
        self.is_broken = true;
        let freezes = self.dice.one_in(2);
        for member in self.members.clone() {
            let after = self.dice.ms(1, 9000);
            match self.processes.get_mut(&member) {
                Some(p) if freezes && member == one => {
                    p.place = ProcessPlace::Hangs;
                    p.is_stopped = true;
                }
                _ => self.plan(after, Happening::Notices(member, round)),
            }
        }
        for (by, who) in [(one, other), (other, one)] {
            let after = self.dice.ms(1, 9000);
            self.plan(after, Happening::GivesUp(by, who, round));
        }
    }

    pub(super) fn change_hosts(&mut self, calm: bool) {
        let name = format!("h{}", self.dice.below(4));
        let slots = if calm { 3 } else { self.dice.below(4) as u32 };
        if calm {
            // Enough for everything at last.
            self.hosts = (0..4).map(|n| (format!("h{n}"), slots)).collect();
        } else if slots == 0 {
            self.hosts.remove(&name);
        } else {
            self.hosts.insert(name, slots);
        }
        let listed = self.hosts.iter().map(|(h, n)| (h.clone(), *n)).collect();
        self.feed(Event::Hosts(listed));
    }
}
