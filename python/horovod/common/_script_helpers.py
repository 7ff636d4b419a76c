"""Helpers that many training scripts need beside the operations: averages of metrics, calls on rank 0 only."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from horovod.common._objects import allgather_object
from horovod.common.basics import basics
from horovod.common.process_sets import ProcessSet, global_process_set

_P = ParamSpec("_P")
_T = TypeVar("_T")


def average_metrics(
    metrics: Mapping[str, Any],
    weight: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> dict[str, float]:
    """Return the mean of each metric over the ranks, the same on all of them.

    Parameters
    ----------
    metrics
        Numbers by name: Python's, NumPy's, or tensors of one element. All ranks must have the same names.
    weight
        The weight of this rank's values, such as the number of samples that they are means of.
    name
        Pairs the call across ranks, for when several threads average metrics at the same time.
    process_set
        The ranks that take part.

    Raises
    ------
    ValueError
        On all ranks alike: the ranks have different names, a value is no number, or a weight is negative, not finite,
        or zero on all ranks. The text names the rank.

    Examples
    --------
    >>> hvd.average_metrics({"loss": loss, "accuracy": right / seen}, weight=seen)
    {'loss': 0.25, 'accuracy': 0.9}
    """
    everybody = allgather_object(_own(metrics, weight), name or "average_metrics", process_set)
    ranks = process_set.ranks or list(range(len(everybody)))
    for rank, own in zip(ranks, everybody, strict=True):
        if isinstance(own, str):
            raise ValueError(f"average_metrics: rank {rank} {own}")
    first = everybody[0][0]
    for rank, (values, _) in zip(ranks, everybody, strict=True):
        if values.keys() != first.keys():
            raise ValueError(
                f"average_metrics: rank {rank} has the metrics {sorted(values)}, rank {ranks[0]} has {sorted(first)}. "
                "All ranks must have the same ones."
            )
    total = math.fsum(own_weight for _, own_weight in everybody)
    if total == 0:
        raise ValueError("average_metrics: the weight is 0 on all ranks.")
    return {
        key: math.fsum(
            values[key] * (own_weight / total) for values, own_weight in everybody if own_weight
        )
        for key in first
    }


def _own(metrics: Any, weight: Any) -> tuple[dict[str, float], float] | str:
    """This rank's numbers; or what is wrong with them, which all ranks must learn, or the others would wait."""
    if not isinstance(metrics, Mapping):
        return f"has {type(metrics).__qualname__} for its metrics; expected numbers by name."
    values = {}
    for key, value in metrics.items():
        try:
            values[key] = float(value.item() if hasattr(value, "item") else value)
        except Exception as error:  # of the value's own library, too
            return f"has no number for {key!r}, but {type(value).__qualname__}: {error}"
    try:
        number = float(weight)
    except Exception as error:
        return f"has no number as its weight: {error}"
    if not math.isfinite(number) or number < 0:
        return f"has the weight {weight}; expected a number from 0."
    return values, number


def on_rank_zero(function: Callable[_P, _T]) -> Callable[_P, _T | None]:
    """Decorate a function so that it runs on rank 0 only, and returns None at once on every other rank.

    The others do not wait for it: call `hvd.barrier()` where they need what it has done. It must call no operation, for
    which the others would not be there.

    Examples
    --------
    >>> @hvd.on_rank_zero
    ... def save(model, path): ...
    """

    @functools.wraps(function)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _T | None:
        return function(*args, **kwargs) if basics.rank() == 0 else None

    return wrapper
