"""Batch normalisation with the statistics of all ranks' batches together."""

import gc
import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.compiler import is_dynamo_compiling
from torch.nn.modules.batchnorm import _BatchNorm

from horovod.common._ops import Sum
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch._allgather import allgather_async
from horovod.torch._allreduce import allreduce_async_
from horovod.torch._handles import eagerly, synchronize

__all__ = ["SyncBatchNorm"]

# Classes whose objects are nothing but a batch normalisation.
_CONVERTIBLE = (
    torch.nn.BatchNorm1d,
    torch.nn.BatchNorm2d,
    torch.nn.BatchNorm3d,
    torch.nn.SyncBatchNorm,
)


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation whose mean and variance are those of all ranks' batches together.

    The result, the input's gradient and the running statistics are what a single process gets from the
    concatenated batch. Gradients of weight and bias are this rank's share: `DistributedOptimizer` averages
    them with all others. In training every member of the process set has to run the layer, forward and, if
    its input requires a gradient, backward; one allgather and one allreduce of a few numbers per channel.
    In evaluation with tracked statistics, or alone, it is ordinary batch normalisation without communication.
    There are no second derivatives when ranks communicate.

    Parameters
    ----------
    num_features
        Number of channels, the size of the input's second dimension. Any number of dimensions from two.
    eps
        Added to the variance.
    momentum
        Weight of the new statistics in the running ones; None for a cumulative average.
    affine
        Whether to learn weight and bias.
    track_running_stats
        Whether to keep running statistics; without them evaluation uses those of the batch, of all ranks.
    process_set
        The ranks whose batches count as one; other ranks normalise by themselves.

    Raises
    ------
    ValueError
        The input has fewer than two dimensions, or there is only one value per channel in training.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        process_set: ProcessSet = global_process_set,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype
        )
        self.process_set = process_set

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_set: ProcessSet = global_process_set
    ) -> torch.nn.Module:
        """Replace the batch normalisations inside a module by synchronised ones, and return the module.

        Parameters and buffers are taken over, not copied. A module that is itself a batch normalisation cannot
        be changed in place: its replacement is returned. A module with several names is replaced under all of them.

        Raises
        ------
        TypeError
            A batch normalisation is of a class of its own, or lazy; nothing was converted.
        """
        for name, child in module.named_modules():
            if _is_other(child, cls) and type(child) not in _CONVERTIBLE:
                raise TypeError(
                    f"{name or 'the module'} is a {type(child).__name__}, which may do more than a batch normalisation "
                    "of PyTorch: a SyncBatchNorm in its place would lose that. Nothing was converted. Put an "
                    "hvd.SyncBatchNorm there yourself, or derive your class from it."
                )
        return cls._converted(module, process_set, {})

    @classmethod
    def _converted(
        cls,
        module: torch.nn.Module,
        process_set: ProcessSet,
        done: dict[torch.nn.Module, torch.nn.Module],
    ) -> torch.nn.Module:
        """Convert a module once, however many names it has."""
        if module in done:
            return done[module]
        result = module
        if isinstance(module, _BatchNorm) and _is_other(module, cls):
            result = cls(
                module.num_features,
                module.eps,
                module.momentum,
                module.affine,
                module.track_running_stats,
                process_set=process_set,
            )
            if module.affine:
                result.weight, result.bias = module.weight, module.bias
            for name, buffer in module.named_buffers(recurse=False):
                setattr(result, name, buffer)
            result.training = module.training
        done[module] = result
        for name, child in list(module._modules.items()):
            replaced = None if child is None else cls._converted(child, process_set, done)
            if replaced is not child:
                setattr(result, name, replaced)
        return result

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def _synchronized(self) -> bool:
        """Whether this forward pass needs the other ranks."""
        if not self.training and self.running_mean is not None:
            return False
        return bool(self.process_set.included()) and (self.process_set.size() or 1) > 1

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise a batch."""
        if is_dynamo_compiling():
            return eagerly(self.forward, input)
        self._check_input_dim(input)
        momentum = self._count_batch()
        if not self._synchronized():
            return F.batch_norm(
                input,
                self.running_mean if not self.training or self.track_running_stats else None,
                self.running_var if not self.training or self.track_running_stats else None,
                self.weight,
                self.bias,
                self.training or self.running_mean is None,
                momentum,
                self.eps,
            )
        mean, var, count = _global_statistics(input, self.process_set)
        # The number of all ranks is on the device: the host looks at it, and waits, only where it can be so small.
        if _values_per_channel(input) <= 1 and int(count) <= 1:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got input size {input.size()} "
                "on all ranks together"
            )
        if self.training and self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
                unbiased = var * (count / (count - 1))
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)
        result: torch.Tensor = _SyncBatchNorm.apply(
            input, self.weight, self.bias, mean, var, count, self.eps, self.process_set
        )
        return result

    def _count_batch(self) -> float:
        """Count a training batch; return the weight of its statistics in the running ones."""
        if not self.training or self.num_batches_tracked is None:
            return self.momentum or 0.0
        self.num_batches_tracked.add_(1)
        if self.momentum is None:
            return 1.0 / float(self.num_batches_tracked)
        return self.momentum


def _is_other(module: torch.nn.Module, than: type[torch.nn.Module]) -> bool:
    return isinstance(module, _BatchNorm) and not isinstance(module, than)


def warn_of_lonely(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Warn if a parameter belongs to a `torch.nn.SyncBatchNorm` that has nobody to synchronise with."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return
    # Its weight is a vector. Most models have no others than biases, and a look at all objects costs 50 ms.
    names = {id(p): name for name, p in named if p.dim() == 1 and not name.endswith("bias")}
    if not names:
        return
    found: set[str] = set()
    kinds = _with_subclasses(torch.nn.SyncBatchNorm)
    for module in gc.get_objects():
        # Not isinstance, which asks proxies of other libraries for their class.
        if type(module) in kinds:
            weight = names.get(id(module._parameters.get("weight")))
            found.update(() if weight is None else (weight.removesuffix(".weight"),))
    if found:
        listed = ", ".join(sorted(found))
        warnings.warn(
            f"torch.nn.SyncBatchNorm ({listed}) synchronises through torch.distributed only, and there is no process "
            "group: each rank normalises its batch alone. Convert the model before building the optimizer: "
            "model = hvd.SyncBatchNorm.convert_sync_batchnorm(model).",
            UserWarning,
            stacklevel=3,
        )


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))


def _values_per_channel(input: torch.Tensor) -> int:
    channels = input.shape[1]
    return input.numel() // channels if channels else 0


def _reduced_dims(input: torch.Tensor) -> list[int]:
    return [dim for dim in range(input.dim()) if dim != 1]


def _per_channel(values: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """View a vector so that it broadcasts along the input's channels."""
    return values.view([-1 if dim == 1 else 1 for dim in range(input.dim())])


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _global_statistics(
    input: torch.Tensor, process_set: ProcessSet
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean, biased variance and number of values per channel, over all ranks; the number as a tensor, too.

    Each rank sends its own mean and sum of squared deviations, which are merged in float64 (Chan, Golub and
    LeVeque, 1979). Unlike sums of squares, they lose no digits when the mean is large.
    """
    with torch.no_grad():
        channels = input.shape[1]
        count = _values_per_channel(input)
        own = torch.zeros(1, 1 + 2 * channels, dtype=torch.float64, device=input.device)
        if count:
            wide = input.to(_compute_dtype(input.dtype))
            var, mean = torch.var_mean(wide, dim=_reduced_dims(input), correction=0)
            # An assignment may copy the number from the host, which waits for that.
            own[:, :1].fill_(count)
            own[0, 1 : 1 + channels] = mean
            own[0, 1 + channels :] = var
        every: torch.Tensor = synchronize(
            allgather_async(own, "sync_batch_norm.statistics", process_set)
        )
        counts = every[:, :1]
        means = every[:, 1 : 1 + channels]
        variances = every[:, 1 + channels :]
        total = counts.sum()
        shares = counts / total.clamp(min=1)
        mean = (shares * means).sum(0)
        var = (shares * (variances + (means - mean) ** 2)).sum(0)
        return mean, var, total


class _SyncBatchNorm(torch.autograd.Function):
    """The differentiable part: normalise by given statistics that depend on every rank's input."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        var: torch.Tensor,
        count: torch.Tensor,
        eps: float,
        process_set: ProcessSet,
    ) -> torch.Tensor:
        """Normalise."""
        dtype = _compute_dtype(input.dtype)
        mean = mean.to(dtype)
        invstd = torch.rsqrt(var + eps).to(dtype)
        ctx.save_for_backward(input, weight, mean, invstd)
        ctx.count = count
        ctx.process_set = process_set
        normal = (input.to(dtype) - _per_channel(mean, input)).mul_(_per_channel(invstd, input))
        if weight is not None:
            normal.mul_(_per_channel(weight.to(dtype), input))
        if bias is not None:
            normal.add_(_per_channel(bias.to(dtype), input))
        return normal.to(input.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        """Gradients: of the input through the statistics of all ranks, of weight and bias locally."""
        input, weight, mean, invstd = ctx.saved_tensors
        need_input, need_weight, need_bias = ctx.needs_input_grad[:3]
        dtype = mean.dtype
        dims = _reduced_dims(input)
        grad = grad_output.to(dtype)
        normal = (input.to(dtype) - _per_channel(mean, input)).mul_(_per_channel(invstd, input))
        sums = torch.stack([grad.sum(dims), (grad * normal).sum(dims)])
        grad_weight = sums[1].to(weight.dtype, copy=True) if need_weight else None
        grad_bias = sums[0].to(weight.dtype, copy=True) if need_bias else None
        grad_input = None
        if need_input:
            handle = allreduce_async_(
                sums, name="sync_batch_norm.gradient", op=Sum, process_set=ctx.process_set
            )
            means = synchronize(handle).div_(ctx.count)
            grad_input = grad - _per_channel(means[0], input)
            grad_input -= normal.mul_(_per_channel(means[1], input))
            scale = invstd if weight is None else invstd * weight.to(dtype)
            grad_input = grad_input.mul_(_per_channel(scale, input)).to(input.dtype)
        return grad_input, grad_weight, grad_bias, None, None, None, None, None
