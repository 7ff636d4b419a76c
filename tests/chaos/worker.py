"""One rank of a job to which something happens: trains, checks every result, waits at the place that its cell names.

    worker.py FOLDER

FOLDER holds cell.json (see cells.py), the pipe `gate` at which the victim waits, and files that the test creates:
`released` when the fault has been done, `stop` when the training may end. cells.py parses the output.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import model
import numpy as np

from horovod import _core
from horovod.common import _objects, _ops, elastic
from horovod.common.basics import basics
from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import global_process_set

FOLDER = Path(sys.argv[1])
CELL = json.loads((FOLDER / "cell.json").read_text())
TORCH = CELL.get("torch", False)
if TORCH:
    import torch

    import horovod.torch as hvd

    # Before init, since making an optimizer imports half of PyTorch, and then the others would wait for it.
    MODULE = torch.nn.Linear(model.WIDTH, 1, bias=False, dtype=torch.float64)
    OPTIMIZER = torch.optim.SGD(MODULE.parameters(), lr=1.0)
PHASE: str = CELL["phase"]
MIDDLE = 7  # the step at which things happen: neither the first, nor one that is committed
COMMIT_EVERY = 3
CODES = {"float64": 8, "float32": 7, "int64": 5}


def note(text: str) -> None:
    print(f"{text} | {os.getpid()} {time.monotonic():.6f}", flush=True)


def is_there(name: str) -> bool:
    return (FOLDER / name).exists()


def first_to(name: str) -> bool:
    try:
        (FOLDER / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def be_traced() -> None:
    """Start anew under strace, which will do something at one of the system calls."""
    if CELL["inject"] and os.environ["HOROVOD_RANK"] == str(CELL["victim"]) and first_to("traced"):
        words = [
            "strace",
            "-f",
            "-qq",
            "-o",
            str(FOLDER / "trace"),
            "-e",
            f"inject={CELL['inject']}",
        ]
        os.execvp("strace", [*words, sys.executable, *sys.argv])


def wait_here(phase: str, *, victim: bool) -> None:
    """Let the test do something to this process while it stands here, once in the life of the job."""
    if phase == PHASE and victim and first_to("happened"):
        # Opened before the test hears of it, which may let nothing more be opened.
        with (FOLDER / "gate").open("rb", buffering=0) as gate:
            note(f"at {phase}")
            gate.read(1)
        note("released")


# -- collective operations, with numpy and nothing else


def enqueue(kind: int, data: np.ndarray, name: str, *, op=_ops.Sum, root=-1, splits=None) -> int:
    in_place = kind in (_core.ALLREDUCE, _core.BROADCAST)
    at = data.ctypes.data
    entry = (at, at if in_place else 0, CODES[data.dtype.name], data.shape, data)
    return _core.enqueue(("chaos", name, 0), (kind, op, 1.0, 1.0, root, splits), [entry])


def output(handle: int) -> np.ndarray:
    result = _core.wait(handle)
    buffer, shape = (result[0] if isinstance(result, tuple) else result)[0]
    return np.frombuffer(buffer, dtype=np.float32).reshape(shape)


def allreduce(data: np.ndarray, name: str, op: int = _ops.Sum) -> np.ndarray:
    _core.wait(enqueue(_core.ALLREDUCE, data, name, op=op))
    return data


def agreed(mine: bool, name: str) -> bool:
    """Whether it is so on any rank; the same answer on all."""
    return bool(allreduce(np.array([mine], dtype=np.int64), name, _ops.Max)[0])


def one_allreduce(length: int) -> None:
    rank, size = _core.rank(), _core.size()
    if TORCH:
        total = hvd.allreduce(torch.full((length,), rank + 1.0), name="large", op=hvd.Sum)
        assert (total == size * (size + 1) / 2).all()
        return
    result = allreduce(np.full(length, rank + 1, dtype=np.float32), "large")
    assert (result == size * (size + 1) / 2).all()


def one_grouped(length: int) -> None:
    """Many small tensors at a time, which run as one."""
    data = [np.full(length // 50, i, dtype=np.float32) for i in range(50)]
    handles = [enqueue(_core.ALLREDUCE, part, f"small.{i}") for i, part in enumerate(data)]
    for handle in handles:
        _core.wait(handle)
    assert all((part == i * _core.size()).all() for i, part in enumerate(data))


def one_allgather(length: int) -> None:
    mine = np.full((length // _core.size(), 1), _core.rank(), dtype=np.float32)
    result = output(enqueue(_core.ALLGATHER, mine, "gathered"))
    assert (result.reshape(_core.size(), -1) == np.arange(_core.size())[:, None]).all()


def one_broadcast(length: int) -> None:
    root = _core.size() - 1
    data = np.full(length, _core.rank(), dtype=np.float32)
    _core.wait(enqueue(_core.BROADCAST, data, "sent", root=root))
    assert (data == root).all()


def one_alltoall(length: int) -> None:
    size = _core.size()
    mine = np.full((length // size * size, 1), _core.rank(), dtype=np.float32)
    result = output(enqueue(_core.ALLTOALL, mine, "exchanged"))
    assert (result.reshape(size, -1) == np.arange(size)[:, None]).all()


def one_reducescatter(length: int) -> None:
    size = _core.size()
    mine = np.full((length // size * size, 1), _core.rank(), dtype=np.float32)
    result = output(enqueue(_core.REDUCESCATTER, mine, "scattered"))
    assert (result == size * (size - 1) / 2).all()


def one_barrier(length: int) -> None:
    del length
    _core.barrier(0)


COLLECTIVES = {
    "allreduce": one_allreduce,
    "grouped allreduce": one_grouped,
    "allgather": one_allgather,
    "broadcast": one_broadcast,
    "alltoall": one_alltoall,
    "reducescatter": one_reducescatter,
    "barrier": one_barrier,
}


def is_victim() -> bool:
    return _core.rank() == CELL["victim"] % _core.size()


def again_and_again(operation) -> None:
    """One operation after the other until the fault has been done; it strikes wherever they stand."""
    rounds = 0
    while True:
        operation(CELL["length"])
        rounds += 1
        if rounds == 3 and is_victim() and first_to("happened"):
            note(f"at {PHASE}")
        if agreed(is_there("released"), "is released"):
            return


# -- the training


class Waits:
    """A state that waits where its cell says."""

    def save(self) -> None:
        super().save()
        is_time = self.step > MIDDLE
        wait_here("commit", victim=is_time and _core.is_initialized() and is_victim())

    def sync(self) -> None:
        is_new = self.step == 0
        wait_here("growth", victim=is_new and is_there("grows"))
        wait_here("growth, sender", victim=is_there("grows") and _core.rank() == self._root_rank)
        super().sync()


class State(Waits, elastic.ObjectState):
    def __init__(self) -> None:
        def send(obj, root_rank):
            return _objects.broadcast_object(obj, root_rank, "state", global_process_set)

        super().__init__(send, basics.rank, weights=model.start(), step=0)

    def advance(self, gradient: np.ndarray) -> None:
        self.weights = model.advance(self.weights, allreduce(gradient, "gradient"))


def with_torch():
    """The same training with PyTorch's model, optimizer and state."""

    class TorchState(Waits, hvd.elastic.TorchState):
        @property
        def weights(self) -> np.ndarray:
            return self.module.weight.detach().numpy().reshape(-1)

        def advance(self, gradient: np.ndarray) -> None:
            # The step of `model.advance` as one of SGD: what is taken away is -(2 * weights + total).
            mine = gradient + 2 * self.weights if _core.rank() == 0 else gradient
            self.optimizer.zero_grad()
            self.module(torch.from_numpy(-mine)).sum().backward()
            self.optimizer.step()
            self.module.weight.data.remainder_(65521)

    MODULE.weight.data.copy_(torch.from_numpy(model.start()))
    names = MODULE.named_parameters()
    optimizer = hvd.DistributedOptimizer(OPTIMIZER, named_parameters=names, op=hvd.Sum)
    return TorchState(module=MODULE, optimizer=optimizer, step=0)


def begin_again() -> None:
    """The elastic loop's actions between two generations, with a place to wait in the middle."""
    was_victim = _core.is_initialized() and is_victim()
    basics.shutdown()
    wait_here("reset", victim=was_victim)
    basics.begin_again()


def train(state: State) -> None:
    rank, size = _core.rank(), _core.size()
    note(f"round of {size}: rank {rank}, step {state.step} with {model.digest(state.weights)}")
    while True:
        if state.step == MIDDLE:
            middle()
        if PHASE == "everything":
            list(COLLECTIVES.values())[state.step % len(COLLECTIVES)](CELL["length"])
        state.advance(model.gradient(state.step, rank, size))
        state.step += 1
        time.sleep(CELL["pause_s"])  # a step takes time; newcomers need some of it to be there
        if state.step % COMMIT_EVERY == 0:
            state.commit()
            note(f"committed {state.step} with {model.digest(state.weights)}")
            if agreed(is_there("stop"), "is over"):
                return


def middle() -> None:
    """Every rank comes here once in each generation that begins before this step."""
    if agreed(is_there("happened"), "has happened"):
        return
    wait_here("negotiation", victim=is_victim())
    if PHASE in COLLECTIVES:
        again_and_again(COLLECTIVES[PHASE])
    if PHASE == "reset" and _core.rank() == _core.size() - 1 and first_to("first loss"):
        os.kill(os.getpid(), signal.SIGKILL)
    if PHASE.startswith("growth") and _core.rank() == 0 and first_to("grows"):
        note("may grow")


def main() -> None:
    be_traced()
    guessed = int(os.environ["HOROVOD_RANK"])
    wait_here("init", victim=guessed == CELL["victim"])
    note("begins")
    basics.init()
    state = with_torch() if TORCH else State()
    if _core.is_elastic():
        elastic.run_fn(train, begin_again)(state)
    else:
        train(state)
    note(f"done at step {state.step} with {model.digest(state.weights)}")
    wait_here("shutdown", victim=is_victim())
    basics.shutdown()
    note("shut down")


if CELL["elastic"]:
    main()
else:
    # The launcher's SIGTERM must not hide that the error comes by itself.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        main()
    except (HorovodInternalError, ValueError) as error:
        note(f"ended with {type(error).__name__}: {error}")
        sys.exit(3)
