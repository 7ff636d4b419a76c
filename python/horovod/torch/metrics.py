"""Metrics of torchmetrics over all ranks: by themselves they know the process group of `torch.distributed` only."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

import horovod.torch as hvd

_Part = TypeVar("_Part", bound=torch.nn.Module)


def connect_metrics(module: _Part) -> _Part:
    """Let a metric of torchmetrics gather over all ranks in `compute()`, and return it.

    `module` is a metric, a `MetricCollection`, or a module with metrics inside. Then all ranks have to call
    `compute()`, as often and in the same order. A metric that was given `dist_sync_fn` or `distributed_available_fn`
    keeps those.
    """
    import torchmetrics
    from torchmetrics.metric import jit_distributed_available

    for part in module.modules():
        if not isinstance(part, torchmetrics.Metric):
            continue
        if part.distributed_available_fn is jit_distributed_available:
            part.distributed_available_fn = _has_others
        if part.dist_sync_fn is None:
            part.dist_sync_fn = _gather
    return module


def _has_others() -> bool:
    return hvd.is_initialized() and hvd.size() > 1


def _gather(tensor: torch.Tensor, group: object = None) -> list[torch.Tensor]:
    """The tensors of all ranks, of any shapes."""
    del group
    shapes = hvd.allgather_object(tuple(tensor.shape))
    sizes = [torch.Size(shape).numel() for shape in shapes]
    joined: Any = hvd.allgather(tensor.detach().reshape(-1))
    parts = joined.split(sizes)
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
