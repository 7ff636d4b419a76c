"""Training that survives ranks that die, hosts that leave and hosts that come: `hvd.elastic`."""

from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from horovod.common.basics import basics
from horovod.common.elastic import ObjectState, State, run_fn
from horovod.torch._handles import forget_job
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.elastic.state import TorchState
from horovod.torch.mpi_ops import init, shutdown

__all__ = [
    "ElasticSampler",
    "ObjectState",
    "State",
    "TorchState",
    "init",
    "run",
    "run_fn",
    "shutdown",
]

_S = TypeVar("_S", bound=State)
_P = ParamSpec("_P")
_T = TypeVar("_T")


def run(func: Callable[Concatenate[_S, _P], _T]) -> Callable[Concatenate[_S, _P], _T]:
    """Decorate the training function `func(state, ...)`: it is called again whenever the job's members change.

    Before each call all ranks have the same state. After a lost rank that is the state of the last
    `state.commit()`; after a change of hosts it is the state as it is. So the function has to go on from where
    its state says, not from the beginning. It also works in jobs that are not elastic.

    Errors other than `HorovodInternalError` and `HostsUpdatedInterrupt` end the process. Between `hvd.init()` and the
    call of the function no collective operation may be used: a worker that joins later would wait for ever.

    Examples
    --------
    >>> @hvd.elastic.run
    ... def train(state):
    ...     for state.epoch in range(state.epoch, epochs):
    ...         train_one_epoch(state)
    ...         state.commit()
    >>> train(hvd.elastic.TorchState(model, optimizer, epoch=0))
    """
    return run_fn(func, _reset)


def _reset() -> None:
    forget_job()
    basics.begin_again()
