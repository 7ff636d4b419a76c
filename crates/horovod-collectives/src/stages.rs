//! Time stamps of the parts of an operation, for whoever wants to show them.

use std::time::Instant;

/// Stages kept of one operation; what comes after is not recorded.
const STAGES_MAX: usize = 64;

/// A part of an operation that has a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StageTime {
    /// Name of the stage.
    pub name: &'static str,
    /// When it began.
    pub begin: Instant,
    /// When it ended.
    pub end: Instant,
}

/// The stages of the operation that runs; records nothing unless told to.
#[derive(Debug, Default)]
pub struct Stages {
    on: bool,
    list: Vec<StageTime>,
    /// How many have begun; fewer than there are while an operation that was broken off comes to where it was.
    begun: usize,
}

/// A stage that has begun; given back to [`Stages::end`].
#[must_use]
pub(crate) struct Begun(usize);

impl Stages {
    /// Forgets what was recorded, and whether to record from now on.
    pub fn record(&mut self, on: bool) {
        self.on = on;
        self.list.clear();
        self.begun = 0;
    }

    /// The recorded stages, in the order in which they began: the first is the algorithm as a whole.
    pub fn recorded(&self) -> &[StageTime] {
        &self.list
    }

    pub(crate) fn begin(&mut self, name: &'static str) -> Begun {
        let at = self.begun;
        self.begun += 1;
        if self.on && at == self.list.len() && at < STAGES_MAX {
            let now = Instant::now();
            self.list.push(StageTime {
                name,
                begin: now,
                end: now,
            });
        }
        Begun(at)
    }

    /// How many have begun.
    pub(crate) fn begun(&self) -> usize {
        self.begun
    }

    /// The next to begin is the one with this number; if it has begun before, that counts.
    pub(crate) fn skip_to(&mut self, begun: usize) {
        self.begun = begun;
    }

    pub(crate) fn end(&mut self, begun: Begun) {
        if self.on
            && let Some(stage) = self.list.get_mut(begun.0)
        {
            stage.end = Instant::now();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_nest_and_keep_their_order() {
        let mut stages = Stages::default();
        let ignored = stages.begin("nobody asked");
        stages.end(ignored);
        assert!(stages.recorded().is_empty());

        stages.record(true);
        let outer = stages.begin("outer");
        let inner = stages.begin("inner");
        stages.end(inner);
        stages.end(outer);
        let [outer, inner] = stages.recorded() else {
            panic!("{stages:?}")
        };
        assert_eq!((outer.name, inner.name), ("outer", "inner"));
        assert!(outer.begin <= inner.begin && inner.end <= outer.end);
    }

    #[test]
    fn what_goes_on_began_when_it_first_began() {
        let mut stages = Stages::default();
        stages.record(true);
        let ended = stages.begin("ended");
        stages.end(ended);
        let _ = stages.begin("broken off");
        let first = stages.recorded().to_vec();
        stages.skip_to(1);
        let again = stages.begin("broken off");
        stages.end(again);
        let [ended, again] = stages.recorded() else {
            panic!("{stages:?}")
        };
        assert_eq!((*ended, again.begin), (first[0], first[1].begin));
        assert!(again.end > first[1].end);
    }

    #[test]
    fn there_is_an_end_to_what_is_kept() {
        let mut stages = Stages::default();
        stages.record(true);
        for _ in 0..2 * STAGES_MAX {
            let stage = stages.begin("again");
            stages.end(stage);
        }
        assert_eq!(stages.recorded().len(), STAGES_MAX);
    }
}
