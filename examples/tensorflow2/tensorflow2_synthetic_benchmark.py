"""Images per second of a model of Keras on made-up data with a gradient tape, on any number of processes.

horovodrun -np 2 python tensorflow2_synthetic_benchmark.py --model ResNet50
"""

import argparse
import timeit
from typing import Any

import numpy as np
import tensorflow as tf

import horovod.tensorflow as hvd


def parse_args():
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="TensorFlow Synthetic Benchmark",
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
    parser.add_argument("--no-cuda", action="store_true", help="compute without GPUs")
    return parser.parse_args()


def main():
    """Measure and report from rank 0."""
    args = parse_args()
    hvd.init()
    gpus = [] if args.no_cuda else tf.config.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    # One GPU per process.
    tf.config.set_visible_devices(gpus[hvd.local_rank()] if gpus else [], "GPU")
    if not gpus:
        tf.config.threading.set_inter_op_parallelism_threads(1)

    keras: Any = tf.keras
    shape = (args.image_size, args.image_size, 3)
    model = getattr(keras.applications, args.model)(
        weights=None, input_shape=shape, classifier_activation=None
    )
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.01 * hvd.size())
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    data = tf.random.uniform((args.batch_size, *shape))
    target = tf.random.uniform((args.batch_size,), 0, 1000, tf.int64)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = loss_of(target, model(data, training=True))
        if not args.no_allreduce:
            tape = hvd.DistributedGradientTape(tape, compression=compression)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    hvd.broadcast_variables(model.variables, root_rank=0)

    def benchmark_batches(count):
        losses = [step() for _ in range(count)]
        losses[-1].numpy()  # until here a GPU has only queued it

    def log(text):
        if hvd.rank() == 0:
            print(text, flush=True)

    kind = "GPU" if gpus else "CPU"
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
