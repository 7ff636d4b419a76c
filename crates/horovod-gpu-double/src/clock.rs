//! Vector clocks: what happened before what, among the host and the streams.

/// Owner of a component of a clock: the host (all its threads together) or a stream.
pub(crate) type Agent = usize;

/// The host. Its threads are one agent: a call that returned before another was made happened before it,
/// and how threads tell each other of it (channels, locks) is not seen from here.
pub(crate) const HOST: Agent = 0;

/// Component `i` counts the steps of agent `i` that are known to have happened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Clock(Vec<u64>);

impl Clock {
    pub(crate) fn get(&self, agent: Agent) -> u64 {
        self.0.get(agent).copied().unwrap_or(0)
    }

    /// One step more of `agent`.
    pub(crate) fn tick(&mut self, agent: Agent) -> u64 {
        if self.0.len() <= agent {
            self.0.resize(agent + 1, 0);
        }
        self.0[agent] += 1;
        self.0[agent]
    }

    /// Learns all that `other` knows.
    pub(crate) fn join(&mut self, other: &Self) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        for (own, theirs) in self.0.iter_mut().zip(&other.0) {
            *own = (*own).max(*theirs);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Clock, HOST};

    #[test]
    fn joining_keeps_the_later_of_each() {
        let (mut a, mut b) = (Clock::default(), Clock::default());
        a.tick(HOST);
        a.tick(HOST);
        b.tick(3);
        a.join(&b);
        assert_eq!((a.get(HOST), a.get(3), a.get(9)), (2, 1, 0));
        b.join(&a);
        assert_eq!(a, b);
    }
}
