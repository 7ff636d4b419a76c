//! A paired comparison of two settings, run in alternation so that drift of the machine hits both alike.

/// Pairs of legs after which the comparison may be decided, or goes on if the challenger is ahead without proof.
const ROUNDS: [usize; 2] = [12, 24];
/// Pairs after which a challenger that is behind has lost.
const LOST_AFTER: usize = 6;
/// One in this many pairs is left out at either end before means are compared: samples now and then catch a pause.
const TRIMMED: usize = 6;
/// Yuen's t for trimmed means must exceed this: the one-sided level of 2.5 % for 12 pairs, less for 24.
const PROOF: f64 = 2.365;
/// Least gain worth leaving the defaults for: the logarithm of 1.02.
const WORTHWHILE: f64 = 0.019_802_627;

/// The settings of a leg.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Defaults,
    Challenger,
}

/// How it ended.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ComparisonResult {
    pub(crate) challenger_won: bool,
    /// Median logarithm of challenger over defaults.
    pub(crate) gain: f64,
    /// Median scores.
    pub(crate) defaults: f64,
    pub(crate) challenger: f64,
}

/// The scores so far, in the order of the legs.
#[derive(Default)]
pub(crate) struct AbComparison {
    legs: Vec<f64>,
}

impl AbComparison {
    /// The next side: A B B A, so that neither is always first.
    pub(crate) fn next_side(&self) -> Side {
        match self.legs.len() % 4 {
            0 | 3 => Side::Defaults,
            _ => Side::Challenger,
        }
    }

    /// One leg's score; the outcome once it is settled.
    pub(crate) fn record(&mut self, score: f64) -> Option<ComparisonResult> {
        self.legs.push(score.max(f64::MIN_POSITIVE));
        if self.legs.len() % 2 == 1 {
            return None;
        }
        let (mut defaults, mut challenger) = (Vec::new(), Vec::new());
        for (i, pair) in self.legs.chunks_exact(2).enumerate() {
            let first_is_defaults = i % 2 == 0;
            let (d, c) = if first_is_defaults {
                (pair[0], pair[1])
            } else {
                (pair[1], pair[0])
            };
            defaults.push(d);
            challenger.push(c);
        }
        let gains: Vec<f64> = challenger
            .iter()
            .zip(&defaults)
            .map(|(c, d)| (c / d).ln())
            .collect();
        let (gain, proof) = (median(&gains), trimmed_t(&gains));
        let (pairs, [middle, last]) = (gains.len(), ROUNDS);
        let lost = pairs >= LOST_AFTER && gain <= 0.0;
        let won = (pairs == middle || pairs >= last) && gain >= WORTHWHILE && proof >= PROOF;
        let futile = pairs == middle && gain < WORTHWHILE;
        if !(won || lost || futile || pairs >= last) {
            return None;
        }
        Some(ComparisonResult {
            challenger_won: won,
            gain,
            defaults: median(&defaults),
            challenger: median(&challenger),
        })
    }
}

/// Yuen 1974: the trimmed mean over its standard error, which comes from the winsorised variance.
#[expect(clippy::cast_precision_loss, reason = "a few dozen")]
fn trimmed_t(gains: &[f64]) -> f64 {
    let mut sorted = gains.to_vec();
    sorted.sort_by(f64::total_cmp);
    let cut = sorted.len() / TRIMMED;
    let kept = &sorted[cut..sorted.len() - cut];
    let (Some(&low), Some(&high)) = (kept.first(), kept.last()) else {
        return 0.0;
    };
    let (n, h) = (sorted.len() as f64, kept.len() as f64);
    let mean = kept.iter().sum::<f64>() / h;
    let pulled = sorted.iter().map(|g| g.clamp(low, high));
    let middle = pulled.clone().sum::<f64>() / n;
    let squares: f64 = pulled.map(|g| (g - middle) * (g - middle)).sum();
    let error = (squares / (h * (h - 1.0).max(1.0))).sqrt();
    // Without any spread a gain proves itself.
    mean / error.max(1e-9)
}

/// The middle value; 0 of nothing.
pub(crate) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[n / 2],
        n => f64::midpoint(sorted[n / 2 - 1], sorted[n / 2]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a comparison whose pair `i` has the challenger at `gain(i)` times the defaults.
    fn run(gain: impl Fn(usize) -> f64) -> (ComparisonResult, usize) {
        let mut comparison = AbComparison::default();
        for leg in 0.. {
            let score = match comparison.next_side() {
                Side::Defaults => 100.0,
                Side::Challenger => 100.0 * gain(leg / 2),
            };
            if let Some(outcome) = comparison.record(score) {
                return (outcome, leg / 2 + 1);
            }
        }
        unreachable!()
    }

    #[test]
    fn a_clear_winner_wins_after_all_pairs() {
        let (outcome, pairs) = run(|_| 1.1);
        assert!(outcome.challenger_won);
        assert_eq!(pairs, 12);
        assert!((outcome.gain - 1.1f64.ln()).abs() < 1e-9);
        assert!((outcome.challenger - 110.0).abs() < 1e-9);
    }

    #[test]
    fn a_few_bad_pairs_do_not_turn_a_winner_into_a_loser() {
        let won = run(|i| if i == 3 { 0.98 } else { 1.1 }).0;
        assert!(won.challenger_won);
    }

    #[test]
    fn equal_is_not_clearly_better() {
        assert!(!run(|_| 1.0).0.challenger_won);
        assert!(
            !run(|i| if i % 2 == 0 { 1.05 } else { 0.96 })
                .0
                .challenger_won
        );
    }

    #[test]
    fn better_by_less_than_it_is_worth_loses() {
        assert!(!run(|_| 1.01).0.challenger_won);
    }

    #[test]
    fn a_loser_is_recognised_early() {
        let (outcome, pairs) = run(|_| 0.8);
        assert!(!outcome.challenger_won);
        assert!(pairs <= 6, "{pairs}");
    }

    #[test]
    fn a_challenger_ahead_without_proof_gets_more_pairs() {
        let (outcome, pairs) = run(|i| if i % 4 == 0 { 0.95 } else { 1.06 });
        assert_eq!(pairs, 24);
        assert!(outcome.challenger_won);
    }

    #[test]
    fn trimmed_t_ignores_what_is_far_out() {
        let mut gains = vec![
            0.1, 0.11, 0.09, 0.1, 0.12, 0.08, 0.1, 0.1, 0.11, 0.09, 0.1, 0.1,
        ];
        let clean = trimmed_t(&gains);
        gains[0] = -9.0;
        assert!(clean > 10.0 && trimmed_t(&gains) > 10.0);
        let noise = [0.1, -0.1, 0.2, -0.2, 0.05, -0.06];
        assert!(trimmed_t(&noise).abs() < 1.0);
        assert!(trimmed_t(&[]).abs() < 1e-12);
    }

    #[test]
    fn medians() {
        assert!((median(&[3.0, 1.0, 2.0]) - 2.0).abs() < 1e-12);
        assert!((median(&[4.0, 1.0]) - 2.5).abs() < 1e-12);
        assert!(median(&[]).abs() < 1e-12);
    }
}
