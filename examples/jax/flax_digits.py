"""Handwritten digits with flax's `TrainState`, on any number of processes.

    horovodrun -np 2 python flax_digits.py

The digits are those inside scikit-learn, so nothing is downloaded.
"""

import argparse
from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state
from sklearn.datasets import load_digits

import horovod.jax as hvd


class Network(nn.Module):
    """A small convolutional network."""

    @nn.compact
    def __call__(self, images):
        """Logits of the digits."""
        x = nn.relu(nn.Conv(16, (3, 3))(images))
        x = nn.relu(nn.Conv(32, (3, 3))(x))
        x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.Dense(64)(x.reshape(len(x), -1)))
        return nn.Dense(10)(x)


def parse_args():
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=48, help="of each process")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of one process")
    return parser.parse_args()


def load_data():
    """Images and labels to learn from, and others to test with, the same on every rank."""
    digits: Any = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = (digits.images / 16.0).astype(np.float32)[order][..., None]
    labels = digits.target[order]
    return (images[:1437], labels[:1437]), (images[1437:], labels[1437:])


@jax.jit
def train_step(state, images, labels):
    """One step; the gradients are averaged over the ranks by the optimizer in the state."""

    def loss_fn(params):
        logits = state.apply_fn({"params": params}, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), hvd.allreduce(loss)


@jax.jit
def count_correct(state, images, labels):
    """Right answers of all ranks."""
    right = state.apply_fn({"params": state.params}, images).argmax(-1) == labels
    return hvd.allreduce(right.sum(), op=hvd.Sum)


def main():
    """Train, test, and report from rank 0."""
    args = parse_args()
    hvd.init()
    (images, labels), test = load_data()
    network = Network()
    params = network.init(jax.random.key(hvd.rank()), images[:1])["params"]
    tx = hvd.DistributedOptimizer(optax.adam(args.lr * hvd.size()))
    state = train_state.TrainState.create(
        apply_fn=network.apply, params=hvd.broadcast_parameters(params, root_rank=0), tx=tx
    )
    steps = len(labels) // (args.batch_size * hvd.size())
    loss = float("nan")  # of no batch at all
    for epoch in range(args.epochs):
        # The same order on every rank, of which each takes every size-th image.
        order = np.random.default_rng(epoch).permutation(len(labels))[hvd.rank() :: hvd.size()]
        for batch in order[: steps * args.batch_size].reshape(steps, -1):
            state, loss = train_step(state, images[batch], labels[batch])
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: loss {float(loss):.4f}", flush=True)
    part = slice(hvd.rank(), None, hvd.size())
    # Asked for on every rank: one that ended before its program has run would be missing in the others'.
    right = int(count_correct(state, test[0][part], test[1][part]))
    if hvd.rank() == 0:
        print(f"accuracy {100 * right / len(test[1]):.1f}%")


if __name__ == "__main__":
    main()
