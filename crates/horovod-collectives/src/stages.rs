//! When the parts of an operation began and ended, for whoever wants to show them.

use std::time::Instant;

/// Stages kept of one operation; what comes after is not recorded.
const STAGES_MAX: usize = 64;

/// A part of an operation that has a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stage {
    /// What was done.
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
    list: Vec<Stage>,
}

/// A stage that has begun; given back to [`Stages::end`].
#[must_use]
pub(crate) struct Begun(usize);

impl Stages {
    /// Forgets what was recorded, and whether to record from now on.
    pub fn record(&mut self, on: bool) {
        self.on = on;
        self.list.clear();
    }

    /// What was recorded, in the order in which the stages began: the first is the algorithm as a whole.
    pub fn recorded(&self) -> &[Stage] {
        &self.list
    }

    pub(crate) fn begin(&mut self, name: &'static str) -> Begun {
        let at = self.list.len();
        if self.on && at < STAGES_MAX {
            let now = Instant::now();
            self.list.push(Stage {
                name,
                begin: now,
                end: now,
            });
        }
        Begun(at)
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
