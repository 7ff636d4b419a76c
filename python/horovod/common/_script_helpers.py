"""Helpers that many training scripts need beside the operations: averages of metrics, norms, NaN, logs, rank 0."""

import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, ParamSpec, TypeVar

import numpy as np

from horovod import _core
from horovod.common import _consensus
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


def check_finite(values: Any, what: str = "check_finite") -> None:
    """Raise on all ranks if a value of any rank is NaN or infinite; the text names the rank and the tensor.

    Every rank has to call it. Check what is still of one rank, such as the loss before `backward()`: after a reduction
    all ranks have the NaN of one.

    Parameters
    ----------
    values
        Tensors or numbers by name, in dictionaries and lists that may contain one another; or pairs of a name and a
        tensor, as `model.named_parameters()` has them. None is passed over.
    what
        The beginning of the text.

    Raises
    ------
    FloatingPointError
        A value is NaN or infinite.

    Examples
    --------
    >>> hvd.check_finite({"loss": loss})
    """
    wrong = [text for name, leaf in _leaves(values, "") if (text := _not_finite(name, leaf))]
    (is_wrong,) = _consensus.greatest([bool(wrong)], "check_finite")
    if not is_wrong:
        return
    shown = wrong[:_SHOWN_MAX] + [f"{len(wrong) - _SHOWN_MAX} more"] * (len(wrong) > _SHOWN_MAX)
    everybody = allgather_object(shown, "check_finite.wrong")
    texts = [f"rank {rank}: {', '.join(its)}" for rank, its in enumerate(everybody) if its]
    raise FloatingPointError(f"{what}: {'; '.join(texts)}.")


# Tensors that an error names for each rank.
_SHOWN_MAX = 8


def global_gradient_norm(
    gradients: Any, sharded: Any = None, process_set: ProcessSet = global_process_set
) -> float:
    """Return the Euclidean norm of all gradients together.

    Call it when gradients are reduced, as after `optimizer.synchronize()`: then they are equal on all ranks, and
    nothing is sent. The norm is infinite or NaN if a gradient is.

    Parameters
    ----------
    gradients
        Arrays or tensors in lists, dictionaries, iterators; None is passed over. Of a parameter of PyTorch its
        gradient is meant.
    sharded
        Gradients of which each rank has a part of its own, such as those of a model that is divided among the ranks.
        Their parts are added up over the ranks. If one rank gives this argument, all must.
    process_set
        The ranks among which `sharded` is divided.

    Examples
    --------
    >>> optimizer.synchronize()
    >>> norm = hvd.global_gradient_norm(model.parameters())
    """
    total = _square_sum(gradients)
    if sharded is not None:
        total += math.fsum(
            allgather_object(_square_sum(sharded), "global_gradient_norm", process_set)
        )
    return math.sqrt(total)


def _square_sum(gradients: Any) -> float:
    found = (_gradient_of(leaf) for _, leaf in _leaves(gradients, ""))
    sums = []
    for gradient in found:
        if gradient is None:
            continue
        values = _dense(gradient)
        # 16-bit types would overflow, and lose small terms. PyTorch and JAX compute where the gradient is.
        if hasattr(values, "detach"):
            values = values.detach()
            values = values if values.element_size() == 8 else values.float()
        elif hasattr(values, "block_until_ready"):
            values = values.astype("float32") if values.dtype.itemsize < 4 else values
        else:
            values = np.asarray(values).astype(np.float64)
        sums.append((abs(values) ** 2).sum())
    # Not one by one above: there each one would be waited for before the next one is computed.
    return math.fsum(float(value) for value in sums)


def _gradient_of(leaf: Any) -> Any:
    """The gradient of a parameter of PyTorch, and everything else itself."""
    is_parameter = hasattr(leaf, "grad") and getattr(leaf, "is_leaf", False) and leaf.requires_grad
    return leaf.grad if is_parameter else leaf


def _dense(tensor: Any) -> Any:
    """The values of a sparse tensor of PyTorch or TensorFlow, each once."""
    if getattr(tensor, "is_sparse", False):
        return tensor.coalesce().values()
    if hasattr(tensor, "values") and hasattr(tensor, "indices") and hasattr(tensor, "dense_shape"):
        rows, places = np.unique(np.asarray(tensor.indices), return_inverse=True)
        values = np.asarray(tensor.values)
        sums = np.zeros((len(rows), *values.shape[1:]), values.dtype)
        np.add.at(sums, places, values)
        return sums
    return tensor


def _not_finite(name: str, leaf: Any) -> str | None:
    """How many values of a tensor are NaN or infinite; None if there are none."""
    values = _dense(leaf)
    if hasattr(values, "detach"):
        values = values.detach()
    # PyTorch and JAX look where the tensor is: of a GPU only one number is copied. Zero times NaN or infinite is NaN.
    is_array = isinstance(values, (np.ndarray, np.generic))
    if hasattr(values, "sum") and not is_array and math.isfinite(abs(complex((values * 0).sum()))):
        return None
    if hasattr(values, "detach"):
        # NumPy has no bfloat16.
        values = (values if values.is_complex() else values.double()).cpu()
    array = np.asarray(values)
    if array.dtype.kind == "V":  # 16-bit and 8-bit types of JAX and TensorFlow are strange to NumPy
        array = array.astype(np.float32)
    if array.dtype.kind not in "fc" or np.isfinite(array).all():
        return None
    nans, infinite = int(np.isnan(array).sum()), int(np.isinf(array).sum())
    return f"{name!r} has {nans} NaN and {infinite} infinite of {array.size} values"


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Tensors and numbers with their paths; None is left out."""
    start = f"{path}." if path else ""
    if tree is None:
        return
    if isinstance(tree, Mapping):
        for key, part in tree.items():
            yield from _leaves(part, f"{start}{key}")
    elif isinstance(tree, (list, tuple)) or (
        isinstance(tree, Iterator) and not hasattr(tree, "shape")
    ):
        for place, part in enumerate(tree):
            if isinstance(part, tuple) and len(part) == 2 and isinstance(part[0], str):
                yield from _leaves(part[1], f"{start}{part[0]}")
            else:
                yield from _leaves(part, f"{start}{place}")
    else:
        yield path, tree


def rank_logger(name: str | None = None, everywhere: int = logging.WARNING) -> "RankLogger":
    """Return a logger whose messages begin with the rank, and of which rank 0 alone logs the less important ones.

    Parameters
    ----------
    name
        The name of the logger, as in `logging.getLogger`, whose level and handlers count.
    everywhere
        The least level of messages that all ranks log; `logging.NOTSET` means all messages.

    Examples
    --------
    >>> log = hvd.rank_logger(__name__)
    >>> log.info("epoch %d", epoch)  # on rank 0
    >>> log.warning("no samples")  # on each rank that comes here
    """
    return RankLogger(logging.getLogger(name), everywhere)


class RankLogger(logging.LoggerAdapter[logging.Logger]):
    """The logger of `rank_logger`. Before `hvd.init()` there is no rank, and every process logs everything."""

    def __init__(self, logger: logging.Logger, everywhere: int) -> None:
        super().__init__(logger, {})
        self._everywhere = everywhere

    def isEnabledFor(self, level: int) -> bool:
        """Return whether this rank logs messages of the level."""
        is_others = _core.is_initialized() and _core.rank() != 0
        return super().isEnabledFor(level) and (level >= self._everywhere or not is_others)

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """Put the rank before the message."""
        return (f"rank {_core.rank()}: {msg}" if _core.is_initialized() else msg), kwargs
