"""Handwritten digits with plain JAX and optax, on any number of processes.

    horovodrun -np 2 python jax_digits.py

Runs with the same --batch-size, which is that of all processes together, give the same losses on one or many. The
digits are those inside scikit-learn, so nothing is downloaded.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import horovod.jax as hvd


def parse_args():
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=96, help="of all processes together")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--bf16-allreduce", action="store_true", help="send gradients as bfloat16")
    return parser.parse_args()


def load_data():
    """1,437 images to learn from and 360 to test with, the same on every rank."""
    digits: Any = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = (digits.data / 16.0).astype(np.float32)[order]
    labels = digits.target[order]
    return (images[:1437], labels[:1437]), (images[1437:], labels[1437:])


def init_params(key):
    """A network with one hidden layer."""
    first, last = jax.random.split(key)
    return {
        "w1": jax.random.normal(first, (64, 128)) * 0.1,
        "b1": jnp.zeros(128),
        "w2": jax.random.normal(last, (128, 10)) * 0.1,
        "b2": jnp.zeros(10),
    }


def predict(params, images):
    """Logits of the digits."""
    return jax.nn.relu(images @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def loss_fn(params, images, labels):
    """Mean cross entropy."""
    logits = predict(params, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def main():
    """Train, test, and report from rank 0."""
    args = parse_args()
    hvd.init()
    if args.batch_size % hvd.size():
        raise SystemExit(
            f"--batch-size {args.batch_size} cannot be shared by {hvd.size()} processes"
        )
    (images, labels), test = load_data()
    compression = hvd.Compression.bf16 if args.bf16_allreduce else hvd.Compression.none
    tx = hvd.DistributedOptimizer(optax.adam(args.lr), compression=compression)
    params = hvd.broadcast_parameters(init_params(jax.random.key(args.seed)), root_rank=0)
    opt_state = tx.init(params)

    @jax.jit
    def step(params, opt_state, images, labels):
        loss, grads = jax.value_and_grad(loss_fn)(params, images, labels)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, hvd.allreduce(loss)

    @jax.jit
    def correct(params, images, labels):
        return hvd.allreduce((predict(params, images).argmax(-1) == labels).sum(), op=hvd.Sum)

    # Every rank draws the same batches and takes its share of each.
    share = args.batch_size // hvd.size()
    mine = slice(hvd.rank() * share, (hvd.rank() + 1) * share)
    rng = np.random.default_rng(args.seed)
    loss = float("nan")  # of no batch at all
    for epoch in range(args.epochs):
        order = rng.permutation(len(labels))
        batches = [
            order[at : at + args.batch_size][mine]
            for at in range(0, len(order) - args.batch_size + 1, args.batch_size)
        ]
        for batch in batches:
            params, opt_state, loss = step(params, opt_state, images[batch], labels[batch])
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: loss {float(loss):.6f}", flush=True)

    part = slice(hvd.rank(), None, hvd.size())
    # Asked for on every rank: one that ended before its program has run would be missing in the others'.
    right = int(correct(params, test[0][part], test[1][part]))
    if hvd.rank() == 0:
        print(f"accuracy {100 * right / len(test[1]):.1f}%")


if __name__ == "__main__":
    main()
