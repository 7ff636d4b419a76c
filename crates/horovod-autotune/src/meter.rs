//! The meter: recognises steps in the stream of collectives and measures bytes over time. No clock: time is passed in.

use std::collections::HashMap;
use std::sync::Arc;

use horovod_protocol::Time;

/// Names that are counted at a time. A job whose names never repeat reaches it; then counting begins anew.
const NAMES_MAX: usize = 1 << 16;

/// Measurements of one sample.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Sample {
    /// Bytes reduced.
    pub(crate) bytes: u64,
    pub(crate) nanos: u64,
}

impl Sample {
    /// Bytes per microsecond, the unit of all scores.
    #[expect(clippy::cast_precision_loss, reason = "a measurement")]
    pub(crate) fn score(&self) -> f64 {
        self.bytes as f64 * 1e3 / self.nanos.max(1) as f64
    }
}

/// Counts how often each tensor was seen. A sample begins when some tensor comes back: one whole step has passed under
/// the settings in force. It ends when some tensor has come back `steps` times more.
pub(crate) struct Meter {
    steps: u32,
    seen: HashMap<Arc<str>, u32>,
    bytes: u64,
    /// When something was first seen since the last change.
    restarted: Option<Time>,
    began: Option<Time>,
}

impl Meter {
    pub(crate) fn new(steps: u32) -> Self {
        Self {
            steps: steps.max(1),
            seen: HashMap::new(),
            bytes: 0,
            restarted: None,
            began: None,
        }
    }

    /// The settings have changed: forget what was seen before.
    pub(crate) fn restart(&mut self) {
        self.seen.clear();
        self.bytes = 0;
        self.restarted = None;
        self.began = None;
    }

    /// One collective has ended; `bytes` counts if it was a reduction. A sample that has taken longer than
    /// `overdue_after` nanoseconds, counted from the change of settings, ends early with what it has seen.
    pub(crate) fn observe<'a>(
        &mut self,
        now: Time,
        names: impl Iterator<Item = &'a Arc<str>> + Clone,
        bytes: u64,
        overdue_after: Option<u64>,
    ) -> Option<Sample> {
        let since = *self.restarted.get_or_insert(now);
        let most = self.count(names.clone());
        if self.seen.len() > NAMES_MAX {
            self.restart();
            return None;
        }
        self.bytes += bytes;
        let overdue = overdue_after.is_some_and(|p| now.0.saturating_sub(since.0) > p);
        match self.began {
            None if overdue => self.end(now, since, names),
            None if most > 1 => {
                self.begin(now, names);
                None
            }
            Some(began) if overdue || most > self.steps => self.end(now, began, names),
            _ => None,
        }
    }

    /// A sample of no bytes says nothing: the job only broadcasts, say.
    fn end<'a>(
        &mut self,
        now: Time,
        began: Time,
        names: impl Iterator<Item = &'a Arc<str>>,
    ) -> Option<Sample> {
        let sample = Sample {
            bytes: self.bytes,
            nanos: now.0.saturating_sub(began.0),
        };
        self.begin(now, names);
        (sample.bytes > 0).then_some(sample)
    }

    /// Begins a sample with the execution that ended the previous one.
    fn begin<'a>(&mut self, now: Time, names: impl Iterator<Item = &'a Arc<str>>) {
        self.seen.clear();
        self.bytes = 0;
        self.restarted = Some(now);
        self.began = Some(now);
        self.count(names);
    }

    /// The largest count among these names.
    fn count<'a>(&mut self, names: impl Iterator<Item = &'a Arc<str>>) -> u32 {
        let mut most = 0;
        for name in names {
            let count = match self.seen.get_mut(name) {
                Some(count) => count,
                None => self.seen.entry(name.clone()).or_insert(0),
            };
            *count += 1;
            most = most.max(*count);
        }
        most
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(of: &[&str]) -> Vec<Arc<str>> {
        of.iter().map(|n| Arc::from(*n)).collect()
    }

    /// Feeds `steps` steps, one collective per name, a nanosecond apart, and gives all samples.
    fn feed(meter: &mut Meter, clock: &mut u64, of: &[&str], steps: usize) -> Vec<Sample> {
        let of = names(of);
        let mut samples = Vec::new();
        for _ in 0..steps {
            for name in &of {
                *clock += 1;
                samples.extend(meter.observe(Time(*clock), std::iter::once(name), 8, None));
            }
        }
        samples
    }

    #[test]
    fn a_sample_is_exactly_its_steps_after_one_step_to_settle() {
        let mut meter = Meter::new(10);
        let mut clock = 0;
        assert_eq!(feed(&mut meter, &mut clock, &["a", "b", "c"], 11), []);
        let whole = Sample {
            bytes: 240,
            nanos: 30,
        };
        assert_eq!(feed(&mut meter, &mut clock, &["a", "b", "c"], 1), [whole]);
        assert_eq!(
            feed(&mut meter, &mut clock, &["a", "b", "c"], 20),
            [whole; 2]
        );
        meter.restart();
        assert_eq!(feed(&mut meter, &mut clock, &["a", "b", "c"], 11), []);
    }

    #[test]
    fn fused_tensors_count_together() {
        let mut meter = Meter::new(2);
        let fused = names(&["a", "b"]);
        let mut samples = Vec::new();
        for t in 0..6 {
            samples.extend(meter.observe(Time(t * 10), fused.iter(), 5, None));
        }
        assert_eq!(
            samples,
            [Sample {
                bytes: 10,
                nanos: 20
            }; 2]
        );
    }

    #[test]
    fn names_that_never_repeat_neither_sample_nor_grow_memory() {
        let mut meter = Meter::new(1);
        for t in 0..3 * NAMES_MAX as u64 {
            let name: Arc<str> = t.to_string().into();
            let sample = meter.observe(Time(t), std::iter::once(&name), 1, None);
            assert_eq!(sample, None);
            assert!(meter.seen.len() <= NAMES_MAX + 1);
        }
    }

    #[test]
    fn impatience_ends_a_sample_with_what_it_saw() {
        let mut meter = Meter::new(10);
        let name = names(&["a"]);
        let mut observe = |t| meter.observe(Time(t), name.iter(), 4, Some(100));
        assert_eq!(observe(0), None);
        assert_eq!(observe(60), None);
        assert_eq!(observe(120), None);
        assert_eq!(
            observe(170),
            Some(Sample {
                bytes: 8,
                nanos: 110
            })
        );
    }

    #[test]
    fn collectives_without_bytes_give_no_sample() {
        let mut meter = Meter::new(1);
        let name = names(&["a"]);
        for t in 0..10 {
            assert_eq!(meter.observe(Time(t), name.iter(), 0, None), None);
        }
    }

    #[test]
    fn the_score_is_bytes_per_microsecond() {
        let sample = Sample {
            bytes: 3000,
            nanos: 2000,
        };
        assert!((sample.score() - 1500.0).abs() < 1e-9);
    }
}
