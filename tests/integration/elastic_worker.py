"""A training that checks itself, for test_elastic.py: weights, samples and order of events after whatever happens.

Gradients depend on the number of the step alone, and the largest of all ranks counts, so weights must be those of an
undisturbed run with as many steps, bit by bit, whoever has died meanwhile. All samples that any rank used are in the
state, so that they are taken back with the steps that used them.

    elastic_worker.py FRAMEWORK FOLDER [MISHAP ...]

FRAMEWORK, numpy or torch, is what it trains with. FOLDER/stop, with a number of ranks, ends the training at the end of
an epoch with so many. Each mishap happens once in the job's life.
"""

import hashlib
import importlib
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from horovod.common import elastic

framework = importlib.import_module(f"elastic_with_{sys.argv[1]}")
hvd = framework.hvd

SAMPLES = 22
FOLDER = Path(sys.argv[2])
MISHAPS = sys.argv[3:]
MIDDLE = 5  # a step inside the first epoch, but not at its end


def happens(mishap: str) -> bool:
    """Whether it is time for a mishap: it was asked for, and has not been before."""
    if mishap not in MISHAPS:
        return False
    try:
        (FOLDER / mishap.replace(" ", "-")).touch(exist_ok=False)
    except FileExistsError:
        return False
    note(f"now: {mishap}")
    return True


def note(text: str) -> None:
    print(text, flush=True)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Watched(framework.State):
    """Says what the loop asks for."""

    def sync(self) -> None:
        is_newcomer = self.step == 0 and (FOLDER / "last-rank-dies").exists()
        if is_newcomer and happens("newcomer dies in sync"):
            die()
        note(f"sync in process {os.getpid()}")
        super().sync()

    def restore(self) -> None:
        note(f"restore in process {os.getpid()}")
        super().restore()

    def reset(self) -> None:
        super().reset()
        note(f"reset in process {os.getpid()}")


hvd.init()
training = framework.Training(SAMPLES)
sampler = training.sampler


def check_epoch(seen: list[int]) -> None:
    """Each sample was used, and none twice but those that fill up the last batch."""
    assert set(seen) == set(range(SAMPLES)), sorted(seen)
    assert len(seen) - SAMPLES < 4, sorted(seen)


def check_weights(state: Watched) -> None:
    """The weights are those of as many steps in one process."""
    want = training.undisturbed(state.start, state.step)
    for mine, its in zip(training.weights(), want, strict=True):
        assert np.array_equal(mine, its), (state.step, mine, its)


@elastic.run
def train(state: Watched) -> int:
    rank, size = hvd.rank(), hvd.size()
    note(f"generation of {size}: rank {rank} is process {os.getpid()}, step {state.step}")
    assert (os.environ["HOROVOD_RANK"], os.environ["HOROVOD_SIZE"]) == (str(rank), str(size))
    fresh = state.step
    had_its_death = (FOLDER / "rank-0-dies").exists()
    check_weights(state)
    while not state.is_over:
        for index, ids in enumerate(training.batches):
            training.begin_step(state.step)
            if size > 1 and rank == size - 1 and state.step >= MIDDLE and happens("last rank dies"):
                die()
            training.end_step()
            sampler.record_batch(index, len(ids))
            state.seen.extend(hvd.allgather(ids, name="ids").tolist())
            state.step += 1
            time.sleep(0.002)  # a step takes time; newcomers need some seconds to be there
            if size > 1 and rank == 0 and state.step > fresh + MIDDLE and happens("rank 0 dies"):
                die()
            if rank == 1 and had_its_death and happens("rank 1 raises"):
                raise KeyError("a mistake of rank 1")
            if state.step % 3 == 0:
                state.commit()
        check_epoch(state.seen)
        state.seen = []
        sampler.set_epoch(sampler.epoch + 1)
        stop = FOLDER / "stop"
        wanted = int(stop.read_text()) if stop.exists() else 0
        state.is_over = hvd.broadcast_object(wanted) == size
        state.commit()
    if size > 1 and rank == 1 and happens("rank 1 dies when all is done"):
        die()
    return state.step


state = Watched(training, step=0, seen=[], is_over=False, start=training.weights())
state.register_reset_callbacks(
    [lambda: note(f"first callback in process {os.getpid()}, rank {hvd.rank()} of {hvd.size()}")]
)
state.register_reset_callbacks([lambda: note(f"second callback in process {os.getpid()}")])
assert train(state) == state.step
check_weights(state)
weights = b"".join(array.tobytes() for array in training.weights())
note(f"done at step {state.step} with {hashlib.sha256(weights).hexdigest()}")
