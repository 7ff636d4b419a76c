"""The common base of the differentiable operations: autograd, and the transforms of `torch.func`.

PyTorch wants a function to keep what its gradient needs either in `forward` or, for `grad` and `vmap` of `torch.func`,
in a function of its own. The second form takes some microseconds more for each call. So a class has both, and the
second is used inside of a transform only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from horovod.common._ops import Adasum

# Whether a transform of torch.func runs in this thread. Without it PyTorch refuses our operations there.
_is_transforming: Callable[[], bool] | None = getattr(
    torch._C, "_are_functorch_transforms_active", None
)

_INSIDE_TRANSFORM = (
    "Inside of a transform of torch.func, such as grad or vmap, use the operations that return new tensors and wait: "
    "hvd.allreduce instead of hvd.allreduce_ or hvd.allreduce_async."
)


def explain(error: RuntimeError) -> None:
    """Say what to do where a tensor has no memory because a transform runs."""
    if _is_transforming is not None and _is_transforming():
        error.add_note(_INSIDE_TRANSFORM)


class Collective(torch.autograd.Function):
    """A differentiable operation. A subclass defines `run`, `remember` and `backward`."""

    by_rows = False
    """Whether it tells the first dimension of a tensor from the others."""

    op_at: int | None = None
    """Which of the inputs is the operator, if any."""

    @staticmethod
    def run(*args: Any, **kwargs: Any) -> Any:
        """Carry the operation out on tensors that have values."""
        raise NotImplementedError

    @staticmethod
    def remember(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep what `backward` needs."""
        raise NotImplementedError

    @classmethod
    def forward(cls, ctx: Any, *inputs: Any) -> Any:
        """Run and remember: PyTorch calls this outside of transforms."""
        output = cls.run(*inputs)
        cls.remember(ctx, inputs, output)
        return output

    @classmethod
    def call(cls, *inputs: Any) -> Any:
        """Carry the operation out so that autograd, or a transform, sees it."""
        if _is_transforming is not None and _is_transforming():
            return _transformable(cls).apply(*inputs)
        return cls.apply(*inputs)


@functools.cache
def _transformable(collective: type[Collective]) -> Any:
    class Transformable(torch.autograd.Function):
        forward = staticmethod(collective.run)
        setup_context = staticmethod(collective.remember)
        backward = staticmethod(collective.backward)

        @staticmethod
        def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
            return _batched(collective, in_dims, inputs)

    Transformable.__name__ = Transformable.__qualname__ = collective.__name__
    return Transformable


def _batched(
    collective: type[Collective], in_dims: tuple[Any, ...], inputs: tuple[Any, ...]
) -> tuple[Any, Any]:
    """The operation on whole batches, whose dimension becomes the last one; and where it is in the results.

    Ranks have to map over batches of the same size.
    """
    if collective.op_at is not None and inputs[collective.op_at] == Adasum:
        raise ValueError(
            "op=Adasum under torch.vmap: it would combine the whole batch as one tensor. Call it outside of vmap."
        )
    moved = list(inputs)
    for i, (dim, value) in enumerate(zip(in_dims, inputs, strict=True)):
        if isinstance(value, torch.Tensor) and dim is not None:
            if collective.by_rows and value.dim() < 2:
                raise ValueError(
                    f"{collective.__name__} under torch.vmap: the tensors of a batch have no dimension; expected at "
                    "least one, of rows."
                )
            moved[i] = value.movedim(dim, -1)
    output = collective.call(*moved)
    batched = [
        dim is not None
        for dim, v in zip(in_dims, inputs, strict=True)
        if isinstance(v, torch.Tensor)
    ]
    if isinstance(output, torch.Tensor):
        return output, output.dim() - 1
    # Of a group each result is that of one tensor; what follows a single tensor's (the splits of alltoall) is no batch.
    flags = batched + [False] * (len(output) - len(batched))
    return output, tuple(
        o.dim() - 1 if is_batch else None for o, is_batch in zip(output, flags, strict=True)
    )
