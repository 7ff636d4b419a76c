//! A softmax classifier on tokio: futures reduce the gradients of one part of a batch while the next part is computed.
//!
//! ```sh
//! cargo build --release --example async_softmax
//! horovodrun -np 2 target/release/examples/async_softmax
//! ```
#![allow(clippy::print_stdout, reason = "the results of an example")]

mod digits;

use digits::{Digit, PIXELS};
use horovod::ReduceOp::Average;

/// Images of one step, over all ranks and both parts.
const BATCH: usize = 192;
const STEPS: usize = 160;
const RATE: f32 = 0.5;

#[tokio::main(flavor = "current_thread")]
async fn main() -> horovod::Result<()> {
    let hvd = horovod::init()?;
    let (training, test) = digits::load();
    let mut weights = hvd.broadcast_async(vec![0.0f32; 10 * PIXELS], 0).await?;
    let share = BATCH / 2 / hvd.size();
    for step in 0..STEPS {
        let part = |part: usize| {
            let begin = (2 * step + part) * (BATCH / 2) % training.len() + hvd.rank() * share;
            gradient(&weights, &training[begin..begin + share])
        };
        let first = hvd.allreduce_async(part(0), Average);
        // The second part is computed while the first is reduced.
        let second = hvd.allreduce_async(part(1), Average);
        let (first, second) = tokio::try_join!(first, second)?;
        for (weight, (a, b)) in weights.iter_mut().zip(first.iter().zip(&second)) {
            *weight -= RATE * (a + b) / 2.0;
        }
    }
    let fingerprints = hvd
        .allgather_async(vec![digits::fingerprint(&weights)], 1)
        .await?;
    let equal = fingerprints.iter().all(|other| *other == fingerprints[0]);
    let losses = test
        .iter()
        .map(|digit| -softmax(&weights, digit)[digit.label].ln());
    let loss = losses.sum::<f32>() / test.len() as f32;
    let right = test
        .iter()
        .filter(|digit| softmax(&weights, digit)[digit.label] > 0.5);
    if hvd.rank() == 0 {
        let accuracy = right.count() as f32 / test.len() as f32;
        println!("loss {loss} accuracy {accuracy} replicas equal: {equal}");
    }
    Ok(())
}

/// The probability of each digit.
fn softmax(weights: &[f32], digit: &Digit) -> [f32; 10] {
    let row = |class: usize| weights[class * PIXELS..].iter().zip(&digit.pixels);
    let exps: [f32; 10] =
        std::array::from_fn(|class| row(class).map(|(w, x)| w * x).sum::<f32>().exp());
    let sum: f32 = exps.iter().sum();
    exps.map(|exp| exp / sum)
}

/// The mean gradient of these images.
fn gradient(weights: &[f32], images: &[Digit]) -> Vec<f32> {
    let mut gradient = vec![0.0; weights.len()];
    for digit in images {
        for (class, probability) in softmax(weights, digit).into_iter().enumerate() {
            let error = probability - f32::from(u8::from(class == digit.label));
            for (sum, x) in gradient[class * PIXELS..].iter_mut().zip(&digit.pixels) {
                *sum += error * x / images.len() as f32;
            }
        }
    }
    gradient
}
