//! The search on made-up machines: how fast each setting is, how noisy measurements are, and where it ends.

use std::f64::consts::TAU;

use super::search::{News, Next, Random, ScorePhase, Search, SearchPlan};
use super::space::Parameter::{
    Chunk, CycleTime, DirectMax, ExchangeMax, FusionThreshold, WireChunk,
};
use super::space::{Parameter, Space, Values};

/// The logarithm of the speed at given coordinates.
type Surface = fn(&[f64]) -> f64;

/// A machine: the logarithm of its speed at the given coordinates, and how measurements stray.
struct Machine {
    speed: Surface,
    disturbance: Disturbance,
}

/// Disturbances of measurements.
#[derive(Clone, Copy, Debug)]
struct Disturbance {
    /// Standard deviation of a sample.
    noise: f64,
    /// One sample in this many takes three times as long; 0: none.
    hiccups: usize,
    /// Slow change: amplitude, with a period of 150 samples.
    drift: f64,
}

/// How a search ended: true logarithmic gain over the defaults, samples it took.
struct Ended {
    gain: f64,
    samples: usize,
    values: Values,
}

fn space(parameters: &[Parameter]) -> Space {
    let defaults = Values::new(|p| match p {
        FusionThreshold => 128 << 20,
        CycleTime => 0,
        Chunk => 64 << 10,
        DirectMax => 8 << 10,
        ExchangeMax => 32 << 10,
        WireChunk => 128 << 10,
        Parameter::Hierarchical => 1,
    });
    Space::new(defaults, parameters)
}

const HOST: [Parameter; 4] = [FusionThreshold, CycleTime, Chunk, DirectMax];
const HOSTS: [Parameter; 7] = Parameter::ALL;

fn plan(seed: u64) -> SearchPlan {
    SearchPlan {
        warmup_rounds: 3,
        proposals: 20,
        noise: None,
        seed,
    }
}

/// Coordinates of values, which the search itself never tells.
fn place(space: &Space, values: &Values) -> Vec<f64> {
    let mut point = space.origin();
    for (axis, parameter) in space.parameters().enumerate() {
        for level in 0..space.shape()[axis] {
            point.0[axis] = level;
            if space.values(&point).get(parameter) == values.get(parameter) {
                break;
            }
        }
    }
    space.coordinates(&point)
}

fn run(machine: &Machine, parameters: &[Parameter], plan: SearchPlan) -> Ended {
    let ruler = space(parameters);
    let mut random = Random(plan.seed.wrapping_mul(77) + 5);
    let mut uniform = move || (random.below(1 << 30) as f64 + 1.0) / f64::from(1 << 30);
    let defaults = ruler.values(&ruler.origin());
    let mut search = Search::new(space(parameters), plan);
    let mut values = defaults;
    let true_speed = |v: &Values| (machine.speed)(&place(&ruler, v));
    for samples in 0..100_000usize {
        let normal = (-2.0 * uniform().ln()).sqrt() * (TAU * uniform()).cos();
        let mut log = true_speed(&values) + machine.disturbance.noise * normal;
        log += machine.disturbance.drift * (TAU * samples as f64 / 150.0).sin();
        if machine.disturbance.hiccups > 0 && uniform() * (machine.disturbance.hiccups as f64) < 1.0
        {
            log -= 3f64.ln();
        }
        match search.handle_sample(1000.0 * log.exp()) {
            Next::Stay => {}
            Next::Run(next) => values = next,
            Next::Finished(last) => {
                return Ended {
                    gain: true_speed(&last) - true_speed(&defaults),
                    samples: samples + 1,
                    values: last,
                };
            }
        }
    }
    panic!("the search does not end");
}

/// Each parameter has its best value, apart from the defaults.
fn separable(x: &[f64]) -> f64 {
    let best = [0.5, 0.0, 0.8, 0.75, 0.66, 0.5, 1.0];
    let weight = [0.3, 0.5, 0.4, 0.1, 0.2, 0.2, 0.1];
    (0..x.len())
        .map(|i| -weight[i] * (x[i] - best[i]).powi(2))
        .sum()
}

/// Two parameters help only together.
fn entangled(x: &[f64]) -> f64 {
    let near = |a: f64, b: f64| (-8.0 * (a - b) * (a - b)).exp();
    0.3 * near(x[0], 0.3) * near(x[2], 1.0) - 0.4 * x[1]
}

/// Nothing matters.
fn flat(_: &[f64]) -> f64 {
    0.0
}

/// The defaults are best, everything else is worse.
fn default_is_best(x: &[f64]) -> f64 {
    let space = space(&HOST);
    let origin = space.coordinates(&space.origin());
    let origin = origin.iter().chain(&[0.5, 0.5, 0.5]);
    -0.4 * x
        .iter()
        .zip(origin)
        .map(|(a, b)| (a - b).powi(2))
        .sum::<f64>()
}

/// Mostly terrible.
fn cliffs(x: &[f64]) -> f64 {
    let bad = f64::from(u8::from(x[1] > 0.3)) + f64::from(u8::from(x[0] < 0.2));
    -2.0 * bad + 0.2 * x[2]
}

const SURFACES: [(&str, Surface); 5] = [
    ("separable", separable),
    ("entangled", entangled),
    ("flat", flat),
    ("default is best", default_is_best),
    ("cliffs", cliffs),
];

fn best_gain(speed: Surface, parameters: &[Parameter]) -> f64 {
    let space = space(parameters);
    let shape = space.shape();
    let size: usize = shape.iter().product();
    let origin = speed(&space.coordinates(&space.origin()));
    (0..size)
        .map(|mut index| {
            let digits = shape.iter().map(|&n| {
                let digit = index % n;
                index /= n;
                digit
            });
            let point = super::space::Point(digits.collect());
            speed(&space.coordinates(&point)) - origin
        })
        .fold(0.0, f64::max)
}

/// Calm, ordinary and wild machines.
const CALM: Disturbance = Disturbance {
    noise: 0.01,
    drift: 0.0,
    hiccups: 0,
};
const ORDINARY: Disturbance = Disturbance {
    noise: 0.05,
    drift: 0.03,
    hiccups: 20,
};
const WILD: Disturbance = Disturbance {
    noise: 0.15,
    drift: 0.05,
    hiccups: 10,
};

const SEEDS: u64 = 8;

fn ends(speed: Surface, disturbance: Disturbance, parameters: &[Parameter]) -> Vec<Ended> {
    let machine = Machine { speed, disturbance };
    (0..SEEDS)
        .map(|seed| run(&machine, parameters, plan(seed)))
        .collect()
}

fn mean(ends: &[Ended]) -> f64 {
    ends.iter().map(|e| e.gain).sum::<f64>() / ends.len() as f64
}

#[test]
fn never_ends_slower_than_it_began() {
    for (name, speed) in SURFACES {
        for machine in [CALM, ORDINARY, WILD] {
            for (seed, end) in ends(speed, machine, &HOST).iter().enumerate() {
                assert!(
                    end.gain > -0.01,
                    "{name} {machine:?} seed {seed}: {:+.3} at {:?}",
                    end.gain,
                    end.values
                );
            }
        }
    }
}

#[test]
fn ends_at_the_defaults_where_no_setting_helps() {
    let space = space(&HOST);
    let defaults = space.values(&space.origin());
    for speed in [flat, default_is_best] {
        for machine in [CALM, ORDINARY] {
            for end in ends(speed, machine, &HOST) {
                assert_eq!(end.values, defaults);
            }
        }
    }
}

#[test]
fn comes_close_to_the_best_of_each_surface() {
    for (name, speed, machine, parameters, missing) in [
        ("separable", separable as Surface, CALM, &HOST[..], 0.02),
        ("separable", separable, ORDINARY, &HOST[..], 0.05),
        ("separable", separable, CALM, &HOSTS[..], 0.05),
        ("entangled", entangled, CALM, &HOST[..], 0.1),
        ("cliffs", cliffs, CALM, &HOST[..], 0.02),
        ("cliffs", cliffs, ORDINARY, &HOST[..], 0.03),
    ] {
        let best = best_gain(speed, parameters);
        let reached = mean(&ends(speed, machine, parameters));
        assert!(
            reached >= best - missing,
            "{name} {machine:?}, {} axes: {reached:.3} of {best:.3}",
            parameters.len()
        );
    }
}

#[test]
fn ends_within_its_budget() {
    // Warm-up, the defaults and the proposals, two comparisons.
    let most = 3 * 5 + 21 * 5 + 2 * 48;
    for (_, speed) in SURFACES {
        for machine in [ORDINARY, WILD] {
            assert!(
                ends(speed, machine, &HOST)
                    .iter()
                    .all(|e| e.samples <= most)
            );
        }
    }
}

#[test]
fn chance_is_decided_by_the_seed() {
    let machine = Machine {
        speed: separable,
        disturbance: Disturbance {
            noise: 0.05,
            ..CALM
        },
    };
    let [a, b] = [3, 3].map(|seed| run(&machine, &HOST, plan(seed)));
    assert_eq!((a.values, a.samples), (b.values, b.samples));
}

#[test]
fn the_users_noise_counts() {
    let machine = Machine {
        speed: separable,
        disturbance: CALM,
    };
    for noise in [0.0, 0.8, 1.0] {
        let plan = SearchPlan {
            noise: Some(noise),
            ..plan(1)
        };
        assert!(run(&machine, &HOST, plan).gain > -0.01);
    }
}

#[test]
fn with_everything_fixed_it_measures_once_and_ends() {
    let machine = Machine {
        speed: flat,
        disturbance: CALM,
    };
    assert_eq!(run(&machine, &[], plan(0)).samples, 3 * 5 + 5);
}

#[test]
fn reports_what_it_does_in_order() {
    let space = space(&HOST);
    let mut search = Search::new(
        space,
        SearchPlan {
            warmup_rounds: 2,
            proposals: 1,
            ..plan(0)
        },
    );
    let mut news = search.take_news();
    for _ in 0..100 {
        search.handle_sample(10.0);
        news.extend(search.take_news());
    }
    let phases: Vec<String> = news
        .iter()
        .map(|n| match n {
            News::WarmingUp { remaining } => format!("warming up {remaining}"),
            News::Scored { phase, score, .. } => format!("{phase:?} {score}"),
        })
        .collect();
    let expected = [
        "warming up 2",
        "warming up 1",
        "Search 10",
        "Search 10",
        "Best 10",
    ];
    assert_eq!(phases, expected);
    assert!(matches!(
        news.last(),
        Some(News::Scored {
            phase: ScorePhase::Best,
            ..
        })
    ));
}
