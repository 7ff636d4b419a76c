"""Images per second of a model of Keras on made-up data with JAX, on any number of processes.

horovodrun -np 2 python jax_synthetic_benchmark.py --model ResNet50
"""

import argparse
import os
import timeit

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np
import optax

import horovod.jax as hvd


def parse_args():
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="JAX Synthetic Benchmark",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
    parser.add_argument(
        "--no-allreduce", action="store_true", help="train each rank alone, for comparison"
    )
    parser.add_argument("--model", default="ResNet50", help="one of keras.applications")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--num-warmup-batches", type=int, default=10)
    parser.add_argument("--num-batches-per-iter", type=int, default=10)
    parser.add_argument("--num-iters", type=int, default=10)
    return parser.parse_args()


def main():
    """Measure and report from rank 0."""
    args = parse_args()
    hvd.init()
    shape = (args.image_size, args.image_size, 3)
    model = getattr(keras.applications, args.model)(
        weights=None, input_shape=shape, classifier_activation=None
    )
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    optimizer = optax.sgd(0.01 * hvd.size())
    if not args.no_allreduce:
        optimizer = hvd.DistributedOptimizer(optimizer, compression=compression)
    weights = [variable.value for variable in model.trainable_variables]
    # Those of batch normalisation.
    statistics = [variable.value for variable in model.non_trainable_variables]
    weights, statistics = hvd.broadcast_parameters((weights, statistics), root_rank=0)
    state = optimizer.init(weights)
    random = np.random.default_rng(hvd.rank())
    data = jax.device_put(random.random((args.batch_size, *shape), np.float32))
    target = jax.device_put(random.integers(0, 1000, args.batch_size))

    def loss_of(weights, statistics, data, target):
        logits, statistics = model.stateless_call(weights, statistics, data, training=True)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, target)
        return losses.mean(), statistics

    @jax.jit
    def step(weights, statistics, state, *batch):
        gradient_of = jax.value_and_grad(loss_of, has_aux=True)
        (_, statistics), grads = gradient_of(weights, statistics, *batch)
        updates, state = optimizer.update(grads, state, weights)
        return optax.apply_updates(weights, updates), statistics, state

    def benchmark_batches(count):
        nonlocal weights, statistics, state
        for _ in range(count):
            weights, statistics, state = step(weights, statistics, state, data, target)
        jax.block_until_ready(weights)  # until here all of it was only queued

    def log(text):
        if hvd.rank() == 0:
            print(text, flush=True)

    kind = jax.default_backend().upper()
    log(f"Model: {args.model}")
    log(f"Batch size: {args.batch_size}")
    log(f"Number of {kind}s: {hvd.size()}")
    log("Running warmup...")
    benchmark_batches(args.num_warmup_batches)
    hvd.barrier()
    log("Running benchmark...")
    img_secs = []
    for number in range(args.num_iters):
        seconds = timeit.timeit(lambda: benchmark_batches(args.num_batches_per_iter), number=1)
        img_secs.append(args.batch_size * args.num_batches_per_iter / seconds)
        log(f"Iter #{number}: {img_secs[-1]:.2f} img/sec per {kind}")
    rates = np.mean(hvd.allgather_object(img_secs), axis=0)
    mean, spread = np.mean(rates), 1.96 * np.std(rates)
    log(f"Img/sec per {kind}: {mean:.2f} +-{spread:.2f}")
    log(
        f"Total img/sec on {hvd.size()} {kind}(s): "
        f"{hvd.size() * mean:.2f} +-{hvd.size() * spread:.2f}"
    )


if __name__ == "__main__":
    main()
