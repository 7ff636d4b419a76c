"""Reduces the gradients of Keras 3 on PyTorch, which are plain tensors, with `horovod.torch`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import horovod.torch as hvd
from horovod._keras._reduction import GradientReduction
from horovod.common._operations import wait_for_all
from horovod.torch._memory_owners import Overlaps, is_alone

_NOT_STATELESS = "The PyTorch backend keeps its state in variables: use apply."


class TorchGradients:
    """Reduces and sums one optimizer's gradients."""

    def __init__(self, reduction: GradientReduction) -> None:
        self._reduction = reduction
        self._sums: dict[int, torch.Tensor] = {}
        self._count = 0

    @torch.no_grad()  # type: ignore[untyped-decorator,unused-ignore]
    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the reduced gradients; a `.grad` whose memory has no other owner is reduced in place."""
        how = self._reduction
        result = list(gradients)
        if not how.is_active():
            return result
        if how.local and how.scale_local_gradients:
            size = how.process_set.size() or 1
            for i, variable in enumerate(variables):
                if result[i] is not None and how.is_local(variable):
                    result[i] = result[i] / size
        overlaps = Overlaps(result)
        handles: list[int] = []
        arrivals: list[tuple[int, torch.Tensor, Any, torch.Tensor | None]] = []
        for number, batch in enumerate(how.batches(result, variables)):
            sent = []
            for i in batch:
                tensor, context = how.compression.compress(result[i])
                if tensor is result[i] and not _is_own_grad(tensor, variables[i], overlaps):
                    tensor = tensor.clone()
                is_taken = tensor.is_cpu or tensor.is_cuda
                taken = tensor if is_taken else tensor.cpu()
                sent.append(taken)
                arrivals.append((i, taken, context, None if is_taken else tensor))
            name = f"{how.name}.{number}"
            handles.append(hvd.grouped_allreduce_async_(sent, None, name, *how.reduction()))
        wait_for_all(handles)
        for i, taken, context, own in arrivals:
            tensor = taken if own is None else own.copy_(taken)
            result[i] = how.compression.decompress(tensor, context)
        return result

    def build(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Do nothing: `aggregate` makes the sums."""

    def own_variables(self) -> list[Any]:
        """Return an empty list: the sums are tensors, not variables."""
        return []

    @torch.no_grad()  # type: ignore[untyped-decorator,unused-ignore]
    def aggregate(
        self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], update: Any
    ) -> None:
        """Add the gradients to the sums; every n-th call reduces the sums and calls `update`."""
        how, sums = self._reduction, self._sums
        for gradient, variable in zip(gradients, variables, strict=True):
            if gradient is None:
                continue
            if id(variable) in sums:
                sums[id(variable)].add_(gradient)
            else:
                sums[id(variable)] = gradient.detach().clone()
        self._count += 1
        if self._count < how.passes:
            return
        total = [sums.get(id(variable)) for variable in variables]
        self.reset()
        reduced = self.reduce(total, variables)
        if how.average_aggregated:
            reduced = [None if g is None else g / how.passes for g in reduced]
        update(reduced)

    def apply_without_state(self, *_: Any) -> Any:
        """Raise NotImplementedError: this backend has no stateless steps."""
        raise NotImplementedError(_NOT_STATELESS)

    def agree(self, is_finite: Any) -> Any:
        """Return whether `is_finite` is true on all ranks."""
        how = self._reduction
        if not how.is_active():
            return is_finite
        flag = torch.tensor([float(is_finite)])
        name = f"{how.name}.finite"
        return bool(hvd.allreduce(flag, op=hvd.Min, name=name, process_set=how.process_set))

    def reset(self) -> None:
        """Delete the sums and set their counter to zero."""
        self._sums.clear()
        self._count = 0


def _is_own_grad(tensor: torch.Tensor, variable: Any, overlaps: Overlaps) -> bool:
    value = getattr(variable, "value", variable)
    if getattr(value, "grad", None) is not tensor or overlaps.is_repeated(tensor):
        return False
    return is_alone(tensor)
