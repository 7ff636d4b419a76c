"""Refuses parameters whose gradients somebody else exchanges, too: torch.distributed, or another optimizer of ours."""

from __future__ import annotations

import gc
from collections.abc import Callable, Container, Iterable, Sequence

import torch

# By class name, because importing torch.distributed's modules costs a second.
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel")


def is_sharded(tensor: object) -> bool:
    """Whether a tensor is a DTensor: each rank holds a part, behind an object without memory of its own."""
    return _is_of_torch_distributed(type(tensor), "DTensor")


def sharded_text(name: str) -> str:
    """Advice about a DTensor."""
    return (
        f"{name} is a DTensor (FSDP, tensor parallelism), which torch.distributed splits and reduces itself: train it "
        "with the plain torch optimizer, without Horovod; for a single operation pass tensor.to_local() or "
        "tensor.full_tensor()."
    )


def refuse_foreign(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise if parameters are sharded, or belong to a module that reduces gradients itself."""
    names = {}
    for name, param in named:
        if is_sharded(param):
            raise ValueError(sharded_text(f"the parameter {name!r}"))
        names[id(param)] = name
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return  # no such module can exist
    for module in gc.get_objects():
        kind = next((k for k in _WRAPPERS if _is_of_torch_distributed(type(module), k)), None)
        if kind is None:
            continue
        shared = next((names[id(p)] for p in module.parameters() if id(p) in names), None)
        if shared is not None:
            raise ValueError(
                f"the parameter {shared!r} belongs to a model in {kind}, which reduces its gradients, too; both "
                f"at once give wrong gradients. Use one of them: leave {kind} out and pass the parameters of the model "
                "itself to hvd.DistributedOptimizer, or keep it with the plain torch optimizer."
            )


def refuse_shared(
    named: Sequence[tuple[str, torch.Tensor]],
    others: Callable[[], Iterable[Container[torch.Tensor]]],
) -> None:
    """Raise if parameters are also among those of other optimizers."""

    def shared() -> str | None:
        owned = list(others())
        return next((name for name, param in named if any(param in of for of in owned)), None)

    if shared() is not None:
        gc.collect()  # an optimizer that a scheduler refers to lives longer than its last user
    name = shared()
    if name is not None:
        raise ValueError(
            f"the parameter {name!r} belongs to another distributed optimizer, too, and both would reduce its "
            "gradient. Put it into one of them; an optimizer that is not used any more has to be deleted."
        )


def _is_of_torch_distributed(kind: type, name: str) -> bool:
    return any(
        base.__name__ == name and base.__module__.startswith(("torch.distributed", "torch.nn"))
        for base in kind.__mro__
    )
