"""Optimizer and Gluon trainer that reduce gradients over all ranks before they are applied.

Gradients are summed; the average comes from `rescale_grad`, by which MXNet's optimizers multiply them anyway.
"""

import itertools
import sys
import warnings
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import mxnet as mx

from horovod.common import _replicas
from horovod.common._gradient_grouping import fills_its_host
from horovod.common._ops import Sum
from horovod.common._reduction import Reduction
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.util import split_list
from horovod.mxnet._arrays import NDArray
from horovod.mxnet._first_step import FirstRound, report_parameters
from horovod.mxnet._operations import allreduce_, grouped_allreduce_
from horovod.mxnet.compression import Compression


class _GradientReduction:
    """How gradients travel."""

    def __init__(self, predivide: float, num_groups: int, process_set: ProcessSet) -> None:
        self.num_groups = num_groups
        self.process_set = process_set
        reduction = Reduction(Sum, prescale_factor=1.0 / predivide, process_set=process_set)
        self.options = reduction._asdict()
        self.is_active = bool(process_set.included()) and process_set.size() != 1
        self.rescale = predivide / (process_set.size() or 1) if self.is_active else 1.0
        """Factor for `rescale_grad` that makes averages of sums."""
        self.is_together = self.is_active and num_groups <= 0 and fills_its_host()
        """Whether all gradients of a dtype go as one operation, without having been asked for groups."""

    def run(self, names: Sequence[str], grads: Sequence[NDArray]) -> None:
        """Reduce in place; the first are the most urgent, as the next forward pass needs them first."""
        entries = list(zip(names, grads, strict=True))
        if self.num_groups <= 0 and not (self.is_together and len(entries) > 1):
            for i, (name, grad) in enumerate(entries):
                allreduce_(grad, name=name, priority=-i, **self.options)
            return
        for i, chunk in enumerate(split_list(entries, max(self.num_groups, 1))):
            by_type = sorted(chunk, key=lambda entry: str(entry[1].dtype))
            for _, group in itertools.groupby(by_type, key=lambda entry: str(entry[1].dtype)):
                keys, arrays = zip(*group, strict=True)
                name = f"{keys[0]}:{keys[-1]}"
                if self.is_together:
                    # As one by one, ranks with gradients of other parameters do not mix up those of one shape.
                    name += f"#{zlib.crc32(' '.join(keys).encode()):08x}"
                grouped_allreduce_(arrays, name=name, priority=-i, **self.options)


def _delegated(name: str) -> Any:
    """A method of the wrapped optimizer, in place of the base class's."""
    return lambda self, *args, **kwargs: getattr(self._optimizer, name)(*args, **kwargs)


class DistributedOptimizer(mx.optimizer.Optimizer):
    """An optimizer that reduces gradients before it applies them, for `Module.fit(..., kvstore=None, optimizer=...)`.

    It looks like the wrapped optimizer: attributes are read and set there.

    Parameters
    ----------
    optimizer
        Its `rescale_grad`, such as 1 / batch size of one rank, is multiplied by what makes averages of sums; that of
        this object stays what the script has set.
    gradient_predivide_factor
        Gradients are divided by it before the sum, and the sum is multiplied by it.
    num_groups
        Reduce in so many groups of what MXNet hands over at once, each as one operation. 0: one by one; if the job's
        ranks leave no core of their only host over, those of one dtype together.
    process_set
        The ranks that take part; others apply their own gradients.
    """

    def __init__(
        self,
        optimizer: Any,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        # Not the base's, whose attributes would hide those of the wrapped optimizer.
        reduction = _GradientReduction(gradient_predivide_factor, num_groups, process_set)
        first = FirstRound(process_set) if reduction.is_active else None
        self.__dict__.update(_optimizer=optimizer, _reduction=reduction, _first_round=first)
        optimizer.rescale_grad *= reduction.rescale

    def __getattr__(self, name: str) -> Any:
        if name in ("_optimizer", "_reduction", "_first_round"):  # a copy that is being made
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "rescale_grad":
            value *= self._reduction.rescale
        setattr(self._optimizer, name, value)

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # A copy begins anew, and hears of the ends of jobs.
        reduction = self._reduction
        first = FirstRound(reduction.process_set) if reduction.is_active else None
        self.__dict__["_first_round"] = first

    @property
    def rescale_grad(self) -> float:
        """The script's own factor for gradients, without the factor that makes averages of sums."""
        return float(self._optimizer.rescale_grad / self._reduction.rescale)

    @property
    def aggregate_num(self) -> int:
        """How many gradients MXNet may hand over at once, 0: no list; all, if they are reduced together."""
        return sys.maxsize if self._reduction.is_together else int(self._optimizer.aggregate_num)

    def _reduce_and(self, apply: Callable[..., None], *given: Any) -> None:
        """Reduce the gradients in place, then apply as many at once as MXNet would hand to the wrapped optimizer."""
        index, weight, grad, _ = given
        many = isinstance(index, tuple | list)
        if self._reduction.is_active:
            names = [str(i) for i in index] if many else [str(index)]
            if self._first_round is not None and self._first_round.is_open:
                self._first_round.note(names, weight if many else [weight])
            self._reduction.run(names, grad if many else [grad])
        if not (many and self._reduction.is_together):
            apply(*given)
            return
        most = self._optimizer.aggregate_num
        for start in range(0, len(index), max(most, 1)):
            at = slice(start, start + most) if most > 0 else start
            apply(*(values[at] for values in given))

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Reduce the gradients in place, then apply them; one of each or lists."""
        self._reduce_and(self._optimizer.update, index, weight, grad, state)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Reduce the gradients in place, then apply them to weights that may be float16."""
        self._reduce_and(self._optimizer.update_multi_precision, index, weight, grad, state)

    create_state = _delegated("create_state")
    create_state_multi_precision = _delegated("create_state_multi_precision")
    set_learning_rate = _delegated("set_learning_rate")
    set_lr_mult = _delegated("set_lr_mult")
    set_wd_mult = _delegated("set_wd_mult")


class DistributedTrainer(mx.gluon.Trainer):
    """A Gluon trainer whose `step` and `allreduce_grads` reduce the gradients over all ranks.

    Parameters
    ----------
    params
        `block.collect_params()`, a dict or a list of gluon's parameters, the same on every rank; on one device.
    optimizer, optimizer_params
        As of `mxnet.gluon.Trainer`; a `DistributedOptimizer` is unwrapped.
    compression
        `Compression.fp16` sends half as many bytes.
    gradient_predivide_factor, num_groups, process_set
        As of `DistributedOptimizer`.
    prefix
        Begins the names of the operations; several trainers of one program need different ones.

    Raises
    ------
    ValueError
        The parameters are on several devices.
    AssertionError
        `prefix` is no string.
    """

    def __init__(
        self,
        params: Any,
        optimizer: Any,
        optimizer_params: dict[str, Any] | None = None,
        compression: Any = Compression.none,
        gradient_predivide_factor: float = 1.0,
        prefix: str | None = None,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        if not isinstance(prefix, str | None):
            raise AssertionError(f"prefix must be a string or None, not {prefix!r}")
        self._compression = compression
        self._prefix = prefix or ""
        self._reduction = _GradientReduction(gradient_predivide_factor, num_groups, process_set)
        self._first_step = _replicas.FirstStep(process_set)
        if isinstance(optimizer, DistributedOptimizer):
            warnings.warn(
                "DistributedTrainer does not take DistributedOptimizer as its optimizer. It has been unwrapped.",
                stacklevel=2,
            )
            rescale_grad = optimizer.rescale_grad
            optimizer = optimizer._optimizer
            optimizer.rescale_grad = rescale_grad
        if isinstance(params, list | tuple):
            params = sorted(params, key=lambda param: param.name)
        super().__init__(params, optimizer, optimizer_params, kvstore=None)
        if len(self._contexts or ()) > 1:
            raise ValueError(
                f"DistributedTrainer trains on one device per process, not on {self._contexts}: start a process "
                "for each."
            )
        self._scale *= self._reduction.rescale

    def _allreduce_grads(self) -> None:
        if not self._reduction.is_active:
            return
        if self._first_step.is_due():
            report_parameters(self._params, self._reduction.process_set)
        names, grads, sent = [], [], []
        for i, param in enumerate(self._params):
            if param.grad_req != "null":
                names.append(f"{self._prefix}{i}")
                grads.append(param.list_grad()[0])
                sent.append(self._compression.compress(grads[-1]))
        self._reduction.run(names, [tensor for tensor, _ in sent])
        for grad, (tensor, ctx) in zip(grads, sent, strict=True):
            if tensor is not grad:
                grad[:] = self._compression.decompress(tensor, ctx)
