//! Clock offsets: how the clocks of other ranks relate to that of rank 0.
//!
//! Ranks of one host read the same clock, so their differences are known exactly. Elsewhere rank 0 asks for the
//! time: the answer was given at some moment between question and arrival, so half of that span bounds the error.

use std::collections::VecDeque;

use super::report::Nanos;

/// Answers remembered: the clocks drift, so old ones are worth less however quick they were.
const ANSWERS_KEPT: usize = 16;

/// State of one rank's clock.
#[derive(Clone, Debug, Default)]
pub(super) struct Clock {
    /// Difference and error of recent answers.
    answers: VecDeque<(i64, Nanos)>,
    exact: Option<i64>,
}

impl Clock {
    /// The rank reads the same clock, and its zero lies this much later than ours.
    pub(super) fn same_host(&mut self, shift: i64) {
        self.exact = Some(shift);
    }

    /// Asked at `sent` and answered at `now` by our clock; the rank's clock said `here`.
    pub(super) fn answered(&mut self, sent: Nanos, here: Nanos, now: Nanos) {
        let span = now.saturating_sub(sent);
        let middle = sent.saturating_add(span / 2);
        if self.answers.len() >= ANSWERS_KEPT {
            self.answers.pop_front();
        }
        let shift = middle.wrapping_sub(here).cast_signed();
        self.answers.push_back((shift, span.div_ceil(2)));
    }

    /// Number of answers so far, as far as they are remembered.
    pub(super) fn answers(&self) -> usize {
        self.answers.len()
    }

    /// Difference that converts the rank's times to ours, and its error bound.
    pub(super) fn shift(&self) -> (i64, Nanos) {
        match self.exact {
            Some(shift) => (shift, 0),
            None => self
                .answers
                .iter()
                .copied()
                .min_by_key(|(_, error)| *error)
                .unwrap_or((0, Nanos::MAX)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_quickest_answer_counts_and_its_error_bounds_the_truth() {
        // The other clock is ahead by 1,000,000.
        let mut clock = Clock::default();
        for (sent, out, back) in [
            (0, 90_000, 10_000),
            (200_000, 3_000, 5_000),
            (300_000, 0, 50_000),
        ] {
            clock.answered(sent, sent + out + 1_000_000, sent + out + back);
        }
        let (shift, error) = clock.shift();
        assert_eq!((shift, error), (-999_000, 4_000));
        assert!((shift + 1_000_000).unsigned_abs() <= error);
    }

    #[test]
    fn old_answers_are_forgotten() {
        let mut clock = Clock::default();
        clock.answered(0, 0, 2);
        for i in 0..ANSWERS_KEPT as u64 {
            clock.answered(1000 * i, 1000 * i, 1000 * i + 100);
        }
        assert_eq!(clock.shift(), (50, 50));
    }

    #[test]
    fn the_clock_of_the_same_host_is_known() {
        let mut clock = Clock::default();
        clock.answered(0, 0, 2_000);
        clock.same_host(77);
        assert_eq!(clock.shift(), (77, 0));
    }
}
