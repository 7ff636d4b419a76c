"""A training with `horovod.jax` in which a rank is killed, for test_jax_failures.py.

    jax_worker.py FOLDER STEPS [elastic]

Gradients depend on the number of the step alone, and the largest of all ranks counts, so weights must be those of an
undisturbed run, bit by bit. The last rank is killed once in the job's life.
"""

import os
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import horovod.jax as hvd

FOLDER, STEPS = Path(sys.argv[1]), int(sys.argv[2])
MIDDLE = 5
ROWS = 256


def note(text: str) -> None:
    print(text, flush=True)


def die_once() -> None:
    try:
        (FOLDER / "killed").touch(exist_ok=False)
    except FileExistsError:
        return
    note("now: the last rank dies")
    os.kill(os.getpid(), signal.SIGKILL)


def make_step(tx):
    @jax.jit
    def step(params, opt_state, number):
        grads = jax.tree.map(lambda p: (number * 7 % 5 - 2) * jnp.ones_like(p), params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return step


def start():
    return {"w": jnp.ones((ROWS, ROWS)), "b": jnp.zeros(3)}


def undisturbed():
    tx = optax.sgd(0.125, momentum=0.5)
    params, step = start(), make_step(tx)
    opt_state = tx.init(params)
    for number in range(STEPS):
        params, opt_state = step(params, opt_state, number)
    return params


hvd.init()
tx = hvd.DistributedOptimizer(optax.sgd(0.125, momentum=0.5), op=hvd.Max)
step = make_step(tx)
params = jax.tree.map(lambda p: p + os.getpid(), start()) if hvd.rank() else start()


@hvd.elastic.run
def train(state):
    note(f"generation of {hvd.size()} from step {state.step}")
    while state.step < STEPS:
        if state.step == MIDDLE and hvd.rank() == hvd.size() - 1:
            die_once()
        state.params, state.opt_state = step(state.params, state.opt_state, state.step)
        state.step += 1
        state.commit()


if "elastic" in sys.argv:
    state = hvd.elastic.JaxState(params=params, opt_state=tx.init(params), step=0)
    train(state)
    want = undisturbed()
    for name, value in state.params.items():
        assert np.array_equal(value, want[name]), f"{name} is not that of an undisturbed run"
    note(f"done with {hvd.size()} ranks")
else:
    params = hvd.broadcast_parameters(params, 0)
    opt_state = tx.init(params)
    try:
        for number in range(STEPS):
            if number == MIDDLE and hvd.rank() == hvd.size() - 1:
                die_once()
            params, opt_state = step(params, opt_state, number)
            jax.block_until_ready(params)
    except (RuntimeError, ValueError) as error:
        note(f"rank {hvd.rank()} got {type(error).__name__}: {error}")
        raise
