//! A Gaussian process over a few dozen points, and expected improvement on it.
//!
//! Our own, because none of the crates fits at its price: `friedrich` (35 crates with nalgebra, chrono and serde)
//! bounds its fitting by a clock, hence is not repeatable, and knows one noise for all points; `egobox-gp` brings 83
//! crates and `egobox-ego` 140. This needs a Cholesky decomposition of at most a few dozen rows.
//!
//! Method: Rasmussen and Williams, Gaussian Processes for Machine Learning, algorithm 2.1; Jones et al. 1998 for
//! expected improvement; the half-additive kernel after Duvenaud et al. 2011, for settings act mostly one by one.

/// A measured value.
#[derive(Clone, Debug)]
pub(crate) struct Observation {
    /// Coordinates from 0 to 1.
    pub(crate) at: Vec<f64>,
    pub(crate) value: f64,
    /// Standard deviation of the measurement.
    pub(crate) noise: f64,
}

/// Hyperparameters, chosen by likelihood: length scale, amplitude and noise.
#[derive(Clone, Copy)]
struct Shape {
    length: f64,
    amplitude: f64,
    /// How much noisier observations are than they say: the machine drifts between them.
    noise: f64,
}

/// How far all values may lie from 0 together: what they are compared with was measured only once, too.
const LEVEL: f64 = 0.1;
const LENGTHS: [f64; 4] = [0.15, 0.3, 0.6, 1.2];
const AMPLITUDES: [f64; 4] = [0.02, 0.05, 0.15, 0.4];
const NOISES: [f64; 2] = [1.0, 2.0];

impl Shape {
    /// Half a sum over the axes, half their product.
    fn kernel(&self, a: &[f64], b: &[f64]) -> f64 {
        let (mut sum, mut square) = (0.0, 0.0);
        for (x, y) in a.iter().zip(b) {
            let d = (x - y) / self.length;
            sum += (-0.5 * d * d).exp();
            square += d * d;
        }
        #[expect(clippy::cast_precision_loss, reason = "a handful of axes")]
        let axes = a.len().max(1) as f64;
        let varying = 0.5 * (sum / axes + (-0.5 * square).exp());
        LEVEL * LEVEL + self.amplitude * self.amplitude * varying
    }
}

/// The process after it has seen its observations.
pub(crate) struct Process {
    shape: Shape,
    at: Vec<Vec<f64>>,
    /// Lower triangle.
    cholesky: Vec<Vec<f64>>,
    weights: Vec<f64>,
    log_likelihood: f64,
}

impl Process {
    /// The most likely of a few shapes.
    pub(crate) fn fit(observations: &[Observation]) -> Self {
        let mut best: Option<Self> = None;
        let amplitudes = || AMPLITUDES.into_iter().flat_map(|a| NOISES.map(|n| (a, n)));
        let shapes = LENGTHS.into_iter().flat_map(|length| {
            amplitudes().map(move |(amplitude, noise)| Shape {
                length,
                amplitude,
                noise,
            })
        });
        for shape in shapes {
            let process = Self::with_shape(observations, shape);
            if best
                .as_ref()
                .is_none_or(|b| process.log_likelihood > b.log_likelihood)
            {
                best = Some(process);
            }
        }
        best.unwrap_or_else(|| unreachable!("there are shapes"))
    }

    fn with_shape(observations: &[Observation], shape: Shape) -> Self {
        let n = observations.len();
        let mut cholesky = vec![vec![0.0; n]; n];
        let mut log_determinant = 0.0;
        for i in 0..n {
            for j in 0..=i {
                let (a, b) = (&observations[i], &observations[j]);
                let mut sum = shape.kernel(&a.at, &b.at);
                if i == j {
                    sum += (shape.noise * a.noise).powi(2) + 1e-9;
                }
                let known = cholesky[i].iter().zip(&cholesky[j]).take(j);
                sum -= known.map(|(a, b)| a * b).sum::<f64>();
                cholesky[i][j] = if i == j {
                    sum.max(1e-12).sqrt()
                } else {
                    sum / cholesky[j][j]
                };
            }
            log_determinant += cholesky[i][i].ln();
        }
        let values: Vec<f64> = observations.iter().map(|o| o.value).collect();
        let half = forward(&cholesky, &values);
        let log_likelihood = -0.5 * half.iter().map(|x| x * x).sum::<f64>() - log_determinant;
        Self {
            shape,
            at: observations.iter().map(|o| o.at.clone()).collect(),
            weights: backward(&cholesky, &half),
            cholesky,
            log_likelihood,
        }
    }

    /// Mean and standard deviation at a place.
    pub(crate) fn predict(&self, at: &[f64]) -> (f64, f64) {
        let near: Vec<f64> = self
            .at
            .iter()
            .map(|seen| self.shape.kernel(seen, at))
            .collect();
        let mean = near.iter().zip(&self.weights).map(|(k, w)| k * w).sum();
        let half = forward(&self.cholesky, &near);
        let known: f64 = half.iter().map(|x| x * x).sum();
        let variance = self.shape.kernel(at, at) - known;
        (mean, variance.max(0.0).sqrt())
    }
}

/// Solves L x = b.
fn forward(cholesky: &[Vec<f64>], b: &[f64]) -> Vec<f64> {
    let mut x = Vec::with_capacity(b.len());
    for (row, value) in cholesky.iter().zip(b) {
        let known: f64 = row.iter().zip(&x).map(|(l, x)| l * x).sum();
        x.push((value - known) / row[x.len()]);
    }
    x
}

/// Solves the transpose of L: Lᵀ x = b.
fn backward(cholesky: &[Vec<f64>], b: &[f64]) -> Vec<f64> {
    let n = b.len();
    let mut x = vec![0.0; n];
    for i in (0..n).rev() {
        let known: f64 = (i + 1..n).map(|k| cholesky[k][i] * x[k]).sum();
        x[i] = (b[i] - known) / cholesky[i][i];
    }
    x
}

/// How much a place is expected to exceed `best`, counting only what exceeds it.
pub(crate) fn expected_improvement(mean: f64, deviation: f64, best: f64) -> f64 {
    let gain = mean - best;
    if deviation < 1e-9 {
        return gain.max(0.0);
    }
    let z = gain / deviation;
    let density = (-0.5 * z * z).exp() / std::f64::consts::TAU.sqrt();
    (gain * normal_below(z) + deviation * density).max(0.0)
}

/// The normal distribution function; Abramowitz and Stegun 26.2.17, off by less than 1e-7.
fn normal_below(z: f64) -> f64 {
    let t = 1.0 / (1.0 + 0.231_641_9 * z.abs());
    let series = t
        * (0.319_381_530
            + t * (-0.356_563_782
                + t * (1.781_477_937 + t * (-1.821_255_978 + t * 1.330_274_429))));
    let above = (-0.5 * z * z).exp() / std::f64::consts::TAU.sqrt() * series;
    if z >= 0.0 { 1.0 - above } else { above }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(x: f64, value: f64, noise: f64) -> Observation {
        Observation {
            at: vec![x],
            value,
            noise,
        }
    }

    #[test]
    fn goes_through_exact_observations_and_is_unsure_elsewhere() {
        let all = [seen(0.0, 0.1, 1e-4), seen(1.0, -0.2, 1e-4)];
        let process = Process::fit(&all);
        for o in &all {
            let (mean, deviation) = process.predict(&o.at);
            assert!((mean - o.value).abs() < 1e-3, "{mean} for {}", o.value);
            assert!(deviation < 1e-3);
        }
        assert!(process.predict(&[0.5]).1 > 0.01);
    }

    #[test]
    fn noisy_observations_are_smoothed() {
        let all: Vec<Observation> = (0..20)
            .map(|i| {
                seen(
                    f64::from(i % 2),
                    if i % 4 < 2 { 0.1 } else { -0.1 } * f64::from(1 - i % 2),
                    0.1,
                )
            })
            .collect();
        let (mean, deviation) = Process::fit(&all).predict(&[0.0]);
        assert!(mean.abs() < 0.01, "{mean}");
        assert!(deviation < 0.1);
    }

    #[test]
    fn learns_axes_one_by_one() {
        // Each axis was moved alone; the process expects both gains together.
        let at = |x, y, value| Observation {
            at: vec![x, y],
            value,
            noise: 0.005,
        };
        let process = Process::fit(&[at(0.0, 0.0, 0.0), at(1.0, 0.0, 0.2), at(0.0, 1.0, 0.2)]);
        let ((both, _), (one, _)) = (process.predict(&[1.0, 1.0]), process.predict(&[1.0, 0.5]));
        assert!(both > 0.15 && both > one, "{both}, {one}");
    }

    #[test]
    fn the_same_observations_give_the_same_process() {
        let all: Vec<Observation> = (0..9)
            .map(|i| seen(f64::from(i) / 8.0, f64::from(i * i % 5) / 10.0, 0.02))
            .collect();
        assert_eq!(
            Process::fit(&all).predict(&[0.3]),
            Process::fit(&all).predict(&[0.3])
        );
    }

    #[test]
    fn distribution_function_is_right_where_tables_say() {
        for (z, p) in [
            (0.0, 0.5),
            (1.0, 0.841_344_746),
            (-1.96, 0.024_997_895),
            (3.0, 0.998_650_102),
        ] {
            assert!((normal_below(z) - p).abs() < 1e-6, "{z}");
        }
    }

    #[test]
    fn improvement_grows_with_mean_and_doubt_and_is_never_negative() {
        let sure = expected_improvement(0.1, 0.0, 0.0);
        assert!((sure - 0.1).abs() < 1e-12);
        assert!(expected_improvement(-0.1, 0.0, 0.0).abs() < 1e-12);
        assert!(expected_improvement(0.0, 0.2, 0.0) > expected_improvement(0.0, 0.1, 0.0));
        assert!(expected_improvement(-5.0, 0.1, 0.0) >= 0.0);
        // E[max(0, N(0, 1))] is the density at 0.
        let unit = expected_improvement(0.0, 1.0, 0.0);
        assert!((unit - 0.398_942_28).abs() < 1e-6);
    }
}
