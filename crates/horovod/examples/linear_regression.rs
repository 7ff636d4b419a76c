//! Linear regression by hand, on any number of processes, with nothing but slices:
//!
//! ```sh
//! cargo build --release --example linear_regression
//! horovodrun -np 2 target/release/examples/linear_regression
//! ```
//!
//! Ten linear functions of the pixels learn to be 1 for their digit and 0 for the others. Each rank computes the
//! gradient of its part of a batch; the mean over all ranks is the gradient of the batch.
#![allow(clippy::print_stdout, reason = "the results of an example")]

mod digits;

use digits::{Digit, PIXELS};
use horovod::ReduceOp::{Average, Sum};

/// Images of one step, over all ranks.
const BATCH: usize = 96;
const STEPS: usize = 400;
const RATE: f32 = 0.1;
/// Weights of one digit: one for each pixel, and the constant.
const ROW: usize = PIXELS + 1;

fn main() -> horovod::Result<()> {
    let hvd = horovod::init()?;
    let (training, test) = digits::load();
    let mut weights = vec![0.0f32; 10 * ROW];
    hvd.broadcast_in_place(&mut weights, 0)?;

    let share = BATCH / hvd.size();
    let mut loss = [0.0f32];
    for step in 0..STEPS {
        let begin = step * BATCH % training.len() + hvd.rank() * share;
        let mut gradient = vec![0.0f32; weights.len()];
        loss = [add_gradient(
            &weights,
            &training[begin..begin + share],
            &mut gradient,
        )];
        hvd.grouped_allreduce_in_place(&mut [&mut gradient, &mut loss], Average)?;
        for (weight, gradient) in weights.iter_mut().zip(&gradient) {
            *weight -= RATE * gradient;
        }
    }

    // Each rank judges its part of the test.
    let own = test.iter().skip(hvd.rank()).step_by(hvd.size());
    let right = own.filter(|digit| best(&predict(&weights, digit)) == digit.label);
    let right = hvd.allreduce(&[right.count() as u64], Sum)?[0];
    let fingerprints = hvd.allgather(&[digits::fingerprint(&weights)], 1)?;
    let equal = fingerprints.iter().all(|other| *other == fingerprints[0]);
    if hvd.rank() == 0 {
        let accuracy = right as f32 / test.len() as f32;
        println!(
            "loss {} accuracy {accuracy} replicas equal: {equal}",
            loss[0]
        );
    }
    Ok(())
}

/// The ten functions of one image.
fn predict(weights: &[f32], digit: &Digit) -> [f32; 10] {
    std::array::from_fn(|class| {
        let row = &weights[class * ROW..(class + 1) * ROW];
        let products = row.iter().zip(&digit.pixels).map(|(w, x)| w * x);
        products.sum::<f32>() + row[PIXELS]
    })
}

/// Adds the mean gradient of these images, and returns their mean loss.
fn add_gradient(weights: &[f32], images: &[Digit], gradient: &mut [f32]) -> f32 {
    let each = 1.0 / images.len() as f32;
    let mut loss = 0.0;
    for digit in images {
        for (class, value) in predict(weights, digit).into_iter().enumerate() {
            let error = value - f32::from(u8::from(class == digit.label));
            loss += 0.5 * error * error * each;
            let row = &mut gradient[class * ROW..(class + 1) * ROW];
            for (sum, x) in row.iter_mut().zip(&digit.pixels) {
                *sum += error * x * each;
            }
            row[PIXELS] += error * each;
        }
    }
    loss
}

/// The place of the largest value.
fn best(values: &[f32]) -> usize {
    let order = (0..values.len()).max_by(|a, b| values[*a].total_cmp(&values[*b]));
    order.unwrap_or(0)
}
