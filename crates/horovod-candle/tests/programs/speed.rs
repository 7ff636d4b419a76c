//! The time of reductions and training steps with candle: the peer `candle` of `bench/frameworks.py`.

#[path = "../../../horovod/tests/programs/measuring/mod.rs"]
mod measuring;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{AdamW, Conv2d, Linear, Module, Optimizer, SGD, VarBuilder, VarMap};
use candle_nn::{conv2d, linear, loss::cross_entropy};
use horovod::ReduceOp::Average;
use horovod_candle::{DistributedOptimizer, Error, Result};
use measuring::Bench;

/// Images of a step on each rank, of 28 by 28 pixels.
const BATCH: usize = 16;
const SIDE: usize = 28;

fn main() -> Result<()> {
    let hvd = horovod::init()?;
    let bench = Bench::new(&hvd)?;
    reductions(&hvd, &bench)?;
    steps_of_a_cnn(&hvd, &bench)?;
    step_of_a_perceptron(&hvd, &bench)?;
    Ok(bench.done()?)
}

/// Gradients of an optimizer, without a model.
struct Gradients {
    optimizer: DistributedOptimizer<SGD>,
    vars: Vec<Var>,
    gradients: Vec<Tensor>,
    /// Dropped while no time is taken.
    reduced: Option<GradStore>,
}

impl Gradients {
    fn new(hvd: &horovod::Communicator, count: usize, elements: usize) -> Result<Self> {
        let zeros = || Tensor::zeros(elements, DType::F32, &Device::Cpu);
        let vars = (0..count).map(|_| Var::from_tensor(&zeros()?));
        let vars = vars.collect::<candle_core::Result<Vec<Var>>>()?;
        let named = vars.iter().enumerate();
        let named: Vec<_> = named
            .map(|(at, var)| (at.to_string(), var.clone()))
            .collect();
        let inner = SGD::new(vars.clone(), 0.1)?;
        Ok(Self {
            optimizer: DistributedOptimizer::new(hvd, inner, &named)?,
            gradients: (0..count)
                .map(|_| zeros())
                .collect::<candle_core::Result<_>>()?,
            vars,
            reduced: None,
        })
    }

    fn reduce(&mut self, bench: &Bench) -> Result<f64> {
        let mut store = GradStore::default();
        for (var, gradient) in self.vars.iter().zip(&self.gradients) {
            store.insert(var, gradient.clone());
        }
        self.reduced = None;
        bench.time(|| {
            self.reduced = self.optimizer.reduce(store)?;
            Ok(())
        })
    }
}

/// One after the other: in turns, names would come with other shapes each time, which is negotiated in full.
fn reductions(hvd: &horovod::Communicator, bench: &Bench) -> Result<()> {
    for (name, count, elements) in [
        ("2,000 tensors of 1,000", 2_000, 1_000),
        ("1 tensor of 2,000,000", 1, 2_000_000),
    ] {
        let mut gradients = Gradients::new(hvd, count, elements)?;
        bench.in_turns(&mut [(name, &mut |bench| gradients.reduce(bench))])?;
    }
    Ok(())
}

struct Net {
    first: Conv2d,
    second: Conv2d,
    last: Linear,
}

impl Net {
    fn new(vars: VarBuilder<'_>) -> candle_core::Result<Self> {
        let side = (SIDE - 4) / 2;
        Ok(Self {
            first: conv2d(1, 8, 3, Default::default(), vars.pp("first"))?,
            second: conv2d(8, 16, 3, Default::default(), vars.pp("second"))?,
            last: linear(16 * side * side, 10, vars.pp("last"))?,
        })
    }

    fn forward(&self, images: &Tensor) -> candle_core::Result<Tensor> {
        let images = self.first.forward(images)?.relu()?;
        let images = self.second.forward(&images)?.relu()?.max_pool2d(2)?;
        self.last.forward(&images.flatten_from(1)?)
    }
}

/// A step whose gradients the optimizer reduces, and one with one allreduce of as many numbers as there are parameters.
fn steps_of_a_cnn(hvd: &horovod::Communicator, bench: &Bench) -> Result<()> {
    let map = VarMap::new();
    let model = Net::new(VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu))?;
    let images = Tensor::randn(0f32, 1.0, (BATCH, 1, SIDE, SIDE), &Device::Cpu)?;
    let labels = Tensor::zeros(BATCH, DType::U32, &Device::Cpu)?;
    let loss = || cross_entropy(&model.forward(&images)?, &labels);
    let adam = || AdamW::new_lr(map.all_vars(), 1e-4);
    let mut optimizer = DistributedOptimizer::new(hvd, adam()?, &map)?;
    let mut alone = adam()?;
    let mut flat = vec![0f32; map.all_vars().iter().map(|var| var.elem_count()).sum()];
    let named = hvd.named("flat");
    bench.in_turns(&mut [
        ("a CNN's step", &mut |bench| {
            bench.time(|| optimizer.backward_step(&loss()?).map(drop))
        }),
        ("a CNN's step with one flat allreduce", &mut |bench| {
            bench.time(|| {
                let gradients = loss()?.backward()?;
                named.allreduce_in_place(&mut flat, Average)?;
                Ok::<_, Error>(alone.step(&gradients)?)
            })
        }),
    ])
}

/// Mostly products of matrices, which candle computes with the threads of rayon.
fn step_of_a_perceptron(hvd: &horovod::Communicator, bench: &Bench) -> Result<()> {
    const WIDTH: usize = 512;
    let map = VarMap::new();
    let vars = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
    let layers = ["first", "second", "third"].map(|name| linear(WIDTH, WIDTH, vars.pp(name)));
    let [first, second, third] = layers;
    let (first, second, third) = (first?, second?, third?);
    let batch = Tensor::randn(0f32, 1.0, (4 * BATCH, WIDTH), &Device::Cpu)?;
    let inner = SGD::new(map.all_vars(), 1e-4)?;
    let mut optimizer = DistributedOptimizer::new(hvd, inner, &map)?;
    bench.in_turns(&mut [("a perceptron's step", &mut |bench| {
        bench.time(|| {
            let hidden = first.forward(&batch)?.relu()?;
            let hidden = second.forward(&hidden)?.relu()?;
            let loss = third.forward(&hidden)?.sqr()?.mean_all()?;
            optimizer.backward_step(&loss).map(drop)
        })
    })])
}
