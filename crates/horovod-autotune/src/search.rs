//! The course of a search: warm up, explore, confirm against the defaults, end. Pure: scores go in, settings come out.
//!
//! Exploring may be misled by noise; confirming may not. Whatever exploring proposes has to beat the defaults in a
//! paired comparison, or the defaults stay.

use super::ab_comparison::{AbComparison, Side, median};
use super::gaussian::{Observation, Process, expected_improvement};
use super::space::{Point, Space, Values};

/// Samples whose median is one score.
const SAMPLES_PER_ROUND: usize = 5;
/// A round whose first two samples are both below this share of the defaults' score ends there.
const ABANDON_BELOW: f64 = 0.6;
/// Worse than this (as a logarithm) is all the same: half the speed.
const FLOOR: f64 = -0.7;
/// Scores of rounds differ by this much at least even when their samples agree: the machine drifts.
const DRIFT: f64 = 0.01;
/// Exploring ends when no point promises more than this gain.
const PROMISE_MIN: f64 = 0.002;
/// A challenger must be expected to gain this much to be worth a comparison.
const CHALLENGE_MIN: f64 = 0.01;
/// A parameter goes back to its default if that is expected to cost less than this.
const INDIFFERENT: f64 = 0.004;
/// Challengers that are compared.
const COMPARISONS: usize = 2;
/// Up to this many points are all considered in each proposal, from a larger space a random part.
const CANDIDATES: usize = 2048;

/// The user's wishes.
#[derive(Clone, Debug)]
pub(crate) struct SearchPlan {
    /// Rounds that are thrown away at the start.
    pub(crate) warmup_rounds: u32,
    /// Proposals to try beside the defaults.
    pub(crate) proposals: u32,
    /// Noise of scores as a share of their spread; `None`: taken from the samples.
    pub(crate) noise: Option<f64>,
    /// Decides what is left to chance.
    pub(crate) seed: u64,
}

/// Where in the plan a score was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScorePhase {
    Search,
    Confirm,
    Best,
}

/// News for the report.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum News {
    WarmingUp {
        remaining: u32,
    },
    Scored {
        phase: ScorePhase,
        values: Values,
        score: f64,
    },
}

/// Next step after a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Measure on with the same values.
    Stay,
    /// Measure with these.
    Run(Values),
    /// Keep these; tuning has ended.
    Finished(Values),
}

enum SearchStage {
    WarmUp {
        remaining: u32,
    },
    Explore,
    Confirm {
        challenger: Point,
        comparison: AbComparison,
    },
    Finished,
}

/// One scored point.
struct Round {
    point: Point,
    score: f64,
    /// Logarithm of the score over the defaults'.
    gain: f64,
    /// Standard deviation of `gain` from the samples' spread; `None`: too few samples.
    spread: Option<f64>,
    /// From an A/B comparison, hence more certain.
    confirmed: bool,
}

pub(crate) struct Search {
    space: Space,
    plan: SearchPlan,
    random: Random,
    stage: SearchStage,
    /// Where the current samples come from.
    here: Point,
    samples: Vec<f64>,
    rounds: Vec<Round>,
    comparisons: usize,
    news: Vec<News>,
}

impl Search {
    pub(crate) fn new(space: Space, plan: SearchPlan) -> Self {
        let stage = match plan.warmup_rounds {
            0 => SearchStage::Explore,
            remaining => SearchStage::WarmUp { remaining },
        };
        let mut news = Vec::new();
        if let SearchStage::WarmUp { remaining } = stage {
            news.push(News::WarmingUp { remaining });
        }
        Self {
            here: space.origin(),
            random: Random(plan.seed),
            space,
            plan,
            stage,
            samples: Vec::new(),
            rounds: Vec::new(),
            comparisons: 0,
            news,
        }
    }

    /// News since the last call.
    pub(crate) fn take_news(&mut self) -> Vec<News> {
        std::mem::take(&mut self.news)
    }

    /// The state of a search that has not ended.
    pub(crate) fn unfinished(&self) -> Option<String> {
        match &self.stage {
            SearchStage::WarmUp { remaining } => {
                Some(format!("warmed up (rounds remaining: {remaining})"))
            }
            SearchStage::Explore => {
                let tried = self.rounds.len();
                Some(format!("tried settings out ({tried} tried)"))
            }
            SearchStage::Confirm { .. } => {
                Some("compared the best settings with the defaults".into())
            }
            SearchStage::Finished => None,
        }
    }

    /// One sample's score under the values in force.
    pub(crate) fn handle_sample(&mut self, score: f64) -> Next {
        match &mut self.stage {
            SearchStage::Finished => Next::Stay,
            SearchStage::Confirm { comparison, .. } => match comparison.record(score) {
                None => self.next_leg(),
                Some(outcome) => self.end_comparison(&outcome),
            },
            SearchStage::WarmUp { remaining } => {
                self.samples.push(score);
                if self.samples.len() < SAMPLES_PER_ROUND {
                    return Next::Stay;
                }
                self.samples.clear();
                *remaining -= 1;
                if *remaining == 0 {
                    self.stage = SearchStage::Explore;
                } else {
                    self.news.push(News::WarmingUp {
                        remaining: *remaining,
                    });
                }
                Next::Stay
            }
            SearchStage::Explore => {
                self.samples.push(score);
                if self.samples.len() < SAMPLES_PER_ROUND && !self.is_abandoned() {
                    return Next::Stay;
                }
                self.end_round();
                self.explore()
            }
        }
    }

    fn is_abandoned(&self) -> bool {
        self.rounds.first().is_some_and(|defaults| {
            self.samples.len() >= 2
                && self
                    .samples
                    .iter()
                    .all(|s| *s < ABANDON_BELOW * defaults.score)
        })
    }

    fn end_round(&mut self) {
        let samples = std::mem::take(&mut self.samples);
        let score = median(&samples).max(f64::MIN_POSITIVE);
        let defaults = self.rounds.first().map_or(score, |r| r.score);
        self.rounds.push(Round {
            point: self.here.clone(),
            score,
            gain: (score / defaults).ln().max(FLOOR),
            spread: spread(&samples, score),
            confirmed: false,
        });
        self.news.push(News::Scored {
            phase: ScorePhase::Search,
            values: self.space.values(&self.here),
            score,
        });
    }

    /// The next proposal, or on to the comparisons.
    fn explore(&mut self) -> Next {
        if self.rounds.len() <= self.plan.proposals as usize
            && let Some(point) = self.propose()
        {
            return self.go_to(point);
        }
        self.challenge()
    }

    fn go_to(&mut self, point: Point) -> Next {
        if point == self.here {
            return Next::Stay;
        }
        self.here = point;
        Next::Run(self.space.values(&self.here))
    }

    /// The rounds as observations of the process.
    fn observations(&self) -> Vec<Observation> {
        let noise = match self.plan.noise {
            Some(share) => share * standard_deviation(self.rounds.iter().map(|r| r.gain)),
            None => {
                let spreads: Vec<f64> = self.rounds.iter().filter_map(|r| r.spread).collect();
                median(&spreads)
            }
        };
        let rounds = self.rounds.iter();
        rounds
            .map(|round| Observation {
                at: self.space.coordinates(&round.point),
                value: round.gain,
                noise: if round.confirmed {
                    DRIFT
                } else {
                    noise.max(DRIFT)
                },
            })
            .collect()
    }

    /// The untried point that promises most; `None` when nothing is promising or all was tried.
    fn propose(&mut self) -> Option<Point> {
        let process = Process::fit(&self.observations());
        let at = |point: &Point| process.predict(&self.space.coordinates(point));
        let best = self
            .rounds
            .iter()
            .map(|r| at(&r.point).0)
            .fold(f64::NEG_INFINITY, f64::max);
        let candidates = candidates(&self.space, &self.rounds, &mut self.random);
        let promises = candidates.into_iter().map(|point| {
            let (mean, deviation) = at(&point);
            let promise = expected_improvement(mean, deviation, best);
            (promise, point)
        });
        promises
            .max_by(|(a, _), (b, _)| a.total_cmp(b))
            .filter(|(promise, _)| *promise >= PROMISE_MIN)
            .map(|(_, point)| point)
    }

    /// The tried point with the best prospects meets the defaults; if none has any, they stay.
    fn challenge(&mut self) -> Next {
        let process = Process::fit(&self.observations());
        let mean = |point: &Point| process.predict(&self.space.coordinates(point)).0;
        let origin = self.space.origin();
        let best = self
            .rounds
            .iter()
            .filter(|round| round.point != origin)
            .map(|round| (mean(&round.point), &round.point))
            .max_by(|(a, _), (b, _)| a.total_cmp(b))
            .filter(|(expected, _)| expected - mean(&origin) >= CHALLENGE_MIN)
            .filter(|_| self.comparisons < COMPARISONS);
        let Some((expected, point)) = best else {
            return self.finish(origin, self.rounds.first().map(|r| r.score));
        };
        // A parameter that makes no difference keeps its value.
        let (mut challenger, mut expected) = (point.clone(), expected);
        for axis in 0..origin.0.len() {
            let mut simpler = challenger.clone();
            simpler.0[axis] = origin.0[axis];
            let then = mean(&simpler);
            if simpler != challenger && simpler != origin && then >= expected - INDIFFERENT {
                (challenger, expected) = (simpler, then);
            }
        }
        self.comparisons += 1;
        self.stage = SearchStage::Confirm {
            challenger,
            comparison: AbComparison::default(),
        };
        self.next_leg()
    }

    fn next_leg(&mut self) -> Next {
        let point = match &self.stage {
            SearchStage::Confirm {
                challenger,
                comparison,
            } if comparison.next_side() == Side::Challenger => challenger.clone(),
            _ => self.space.origin(),
        };
        self.go_to(point)
    }

    fn end_comparison(&mut self, outcome: &super::ab_comparison::ComparisonResult) -> Next {
        let SearchStage::Confirm { challenger, .. } =
            std::mem::replace(&mut self.stage, SearchStage::Explore)
        else {
            return Next::Stay;
        };
        let origin = self.space.origin();
        for (point, score) in [
            (&origin, outcome.defaults),
            (&challenger, outcome.challenger),
        ] {
            self.news.push(News::Scored {
                phase: ScorePhase::Confirm,
                values: self.space.values(point),
                score,
            });
        }
        if outcome.challenger_won {
            return self.finish(challenger, Some(outcome.challenger));
        }
        // The loser may have been overrated: the choice of the next challenger takes this round into account.
        self.rounds.retain(|round| round.point != challenger);
        self.rounds.push(Round {
            point: challenger,
            score: outcome.challenger,
            gain: outcome.gain.max(FLOOR),
            spread: None,
            confirmed: true,
        });
        self.challenge()
    }

    fn finish(&mut self, point: Point, score: Option<f64>) -> Next {
        let values = self.space.values(&point);
        self.news.push(News::Scored {
            phase: ScorePhase::Best,
            values,
            score: score.unwrap_or(0.0),
        });
        self.stage = SearchStage::Finished;
        self.here = point;
        Next::Finished(values)
    }
}

/// Points worth considering that were not tried yet, in random order.
fn candidates(space: &Space, rounds: &[Round], random: &mut Random) -> Vec<Point> {
    let shape = space.shape();
    let size: usize = shape.iter().product();
    let mut points: Vec<Point> = Vec::new();
    if size <= CANDIDATES {
        points.extend((0..size).map(|index| nth(index, &shape)));
    } else {
        points.extend((0..CANDIDATES).map(|_| nth(random.below(size), &shape)));
        // One step along one axis from wherever we have been.
        for round in rounds {
            for (axis, &levels) in shape.iter().enumerate() {
                points.extend((0..levels).map(|level| {
                    let mut moved = round.point.clone();
                    moved.0[axis] = level;
                    moved
                }));
            }
        }
    }
    points.sort();
    points.dedup();
    points.retain(|point| rounds.iter().all(|round| round.point != *point));
    for i in (1..points.len()).rev() {
        points.swap(i, random.below(i + 1));
    }
    points
}

fn nth(mut index: usize, shape: &[usize]) -> Point {
    let digits = shape.iter().map(|&levels| {
        let digit = index % levels;
        index /= levels;
        digit
    });
    Point(digits.collect())
}

/// Standard deviation of the median of samples, as a share of it, from their median absolute deviation.
fn spread(samples: &[f64], median_score: f64) -> Option<f64> {
    if samples.len() < SAMPLES_PER_ROUND {
        return None;
    }
    let away: Vec<f64> = samples
        .iter()
        .map(|s| (s / median_score - 1.0).abs())
        .collect();
    #[expect(clippy::cast_precision_loss, reason = "a handful")]
    let root = (samples.len() as f64).sqrt();
    // 1.4826: from median deviation to standard deviation; 1.2533: from mean's to median's.
    Some(1.4826 * 1.2533 * median(&away) / root)
}

#[expect(clippy::cast_precision_loss, reason = "a few dozen")]
fn standard_deviation(values: impl Iterator<Item = f64> + Clone) -> f64 {
    let n = values.clone().count().max(1) as f64;
    let mean = values.clone().sum::<f64>() / n;
    (values.map(|v| (v - mean) * (v - mean)).sum::<f64>() / n).sqrt()
}

/// Splitmix64: small, and the same everywhere.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        usize::try_from(z % bound.max(1) as u64).unwrap_or(0)
    }
}
