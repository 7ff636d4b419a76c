//! A convolutional network that learns handwritten digits with candle, on any number of processes:
//!
//! ```sh
//! cargo build --release --example cnn
//! horovodrun -np 2 target/release/examples/cnn
//! ```
#![allow(clippy::print_stdout, reason = "the results of an example")]

#[path = "../../horovod/examples/digits/mod.rs"]
mod digits;

use candle_core::{D, DType, Device, Tensor};
use candle_nn::{AdamW, Conv2d, Linear, Module, VarBuilder, VarMap};
use candle_nn::{conv2d, linear, loss::cross_entropy};
use horovod_candle::{DistributedOptimizer, Parameters, Result};

/// Images of one step, over all ranks.
const BATCH: usize = 96;
const STEPS: usize = 96;

struct Net {
    first: Conv2d,
    second: Conv2d,
    last: Linear,
}

impl Net {
    fn new(vars: VarBuilder<'_>) -> candle_core::Result<Self> {
        Ok(Self {
            first: conv2d(1, 8, 3, Default::default(), vars.pp("first"))?,
            second: conv2d(8, 16, 3, Default::default(), vars.pp("second"))?,
            last: linear(16 * 2 * 2, 10, vars.pp("last"))?,
        })
    }

    fn forward(&self, images: &Tensor) -> candle_core::Result<Tensor> {
        let images = self.first.forward(images)?.relu()?;
        let images = self.second.forward(&images)?.relu()?.max_pool2d(2)?;
        self.last.forward(&images.flatten_from(1)?)
    }
}

fn main() -> Result<()> {
    let hvd = horovod::init()?;
    let (training, test) = digits::load();
    let map = VarMap::new();
    let model = Net::new(VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu))?;
    begin_alike_in_every_run(&map)?;
    horovod_candle::broadcast_parameters(&hvd, &map, 0)?;
    let inner = AdamW::new_lr(map.all_vars(), 0.01)?;
    let mut optimizer = DistributedOptimizer::new(&hvd, inner, &map)?;

    let share = BATCH / hvd.size();
    for step in 0..STEPS {
        let begin = step * BATCH % training.len() + hvd.rank() * share;
        let (images, labels) = tensors(&training[begin..begin + share])?;
        let loss = cross_entropy(&model.forward(&images)?, &labels)?;
        optimizer.backward_step(&loss)?; // backward, mean over all ranks, step
    }

    let (images, labels) = tensors(&test)?;
    let outputs = model.forward(&images)?;
    let loss = cross_entropy(&outputs, &labels)?.to_scalar::<f32>()?;
    let right = outputs
        .argmax(D::Minus1)?
        .eq(&labels)?
        .to_dtype(DType::F32)?;
    let accuracy = right.mean_all()?.to_scalar::<f32>()?;
    let mut named = map.named();
    named.sort_by(|(one, _), (other, _)| one.cmp(other));
    let flat = named.iter().map(|(_, var)| var.flatten_all());
    let weights = Tensor::cat(&flat.collect::<candle_core::Result<Vec<_>>>()?, 0)?.to_vec1()?;
    let fingerprints = hvd.allgather(&[digits::fingerprint(&weights)], 1)?;
    let equal = fingerprints.iter().all(|other| *other == fingerprints[0]);
    if hvd.rank() == 0 {
        println!("loss {loss} accuracy {accuracy} replicas equal: {equal}");
    }
    Ok(())
}

fn tensors(digits: &[digits::Digit]) -> candle_core::Result<(Tensor, Tensor)> {
    let pixels: Vec<f32> = digits.iter().flat_map(|digit| digit.pixels).collect();
    let labels: Vec<u32> = digits.iter().map(|digit| digit.label as u32).collect();
    let images = Tensor::from_vec(pixels, (digits.len(), 1, 8, 8), &Device::Cpu)?;
    Ok((images, Tensor::new(labels, &Device::Cpu)?))
}

/// A seed does nothing on candle's CPU, and the tests compare runs.
fn begin_alike_in_every_run(map: &VarMap) -> candle_core::Result<()> {
    for var in map.all_vars() {
        let (count, rows) = (var.elem_count(), var.dims()[0]);
        let wave = Tensor::arange(0.0, count as f32, &Device::Cpu)?.affine(12.9898, 1.0)?;
        let scale = (rows as f64 / count as f64).sqrt();
        var.set(&(wave.sin()? * scale)?.reshape(var.shape())?)?;
    }
    Ok(())
}
