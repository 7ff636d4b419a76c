"""Broadcast of an optimizer's state as data: the root describes it, the others rebuild it and receive tensors."""

from dataclasses import dataclass
from typing import Any

import torch

from horovod import _core
from horovod.common import _objects
from horovod.common._operations import wait_for_all
from horovod.common._trees import rebuilt
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch._broadcast import broadcast_async_


@dataclass(frozen=True)
class _Slot:
    """Stands in the description for a tensor, which is sent by itself."""

    # The same for places that hold the same tensor, such as one learning rate in several groups.
    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    # On the device of the parameter that it belongs to; otherwise on the CPU, where step counters are.
    with_param: bool


@dataclass(frozen=True)
class _Description:
    """A whole optimizer: `_Slot`s in place of tensors, positions in place of parameters."""

    options: list[dict[str, Any]]
    param_state: dict[int, Any]
    other_state: dict[Any, Any]


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give every rank the root's optimizer state and options, such as learning rates.

    Works for every optimizer, wrapped by `DistributedOptimizer` or not, and whether or not the other ranks
    have state already: only the root may have loaded a checkpoint. State is sent as data. Parameters and their
    gradients stay as they are, no step is taken, and tensors that fit are overwritten in place.

    Parameters
    ----------
    optimizer
        Has the same parameter groups, with the same parameters in the same order, on every rank.
    root_rank
        Global rank whose state is used.
    model
        Accepted for scripts that pass it; not needed.
    process_set
        The ranks that take part.

    Raises
    ------
    ValueError
        Parameter groups differ between ranks; raised on all of them.
    HorovodInternalError
        A rank was lost, or Horovod is not initialised.

    Examples
    --------
    >>> hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    """
    del model
    is_root = _core.is_initialized() and _core.rank() == root_rank
    own_shapes = [[tuple(p.shape) for p in group["params"]] for group in optimizer.param_groups]
    shapes, description = _objects.broadcast_object(
        (own_shapes, _describe(optimizer)) if is_root else None,
        root_rank,
        "broadcast_optimizer_state",
        process_set,
    )
    # Asked of everybody, so that no rank waits for tensors of one that gave up.
    problem = None
    if own_shapes != shapes:
        problem = (
            f"parameter groups of rank {_core.rank()} have shapes {own_shapes}, "
            f"those of rank {root_rank} {shapes}"
        )
    problems = _objects.allgather_object(problem, "broadcast_optimizer_state.check", process_set)
    if any(problems):
        raise ValueError("broadcast_optimizer_state: " + "; ".join(filter(None, problems)))
    tensors = _Rebuild(optimizer, description).tensors
    handles = [
        broadcast_async_(tensor, root_rank, f"optimizer_state.{name}", process_set)
        for name, tensor in tensors
    ]
    wait_for_all(handles)


def _params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _describe(optimizer: torch.optim.Optimizer) -> _Description:
    numbers: dict[int, int] = {}

    def describe(tree: Any, param: torch.Tensor | None) -> Any:
        def leaf(value: Any, _: Any, path: str) -> Any:
            if not _is_dense(value):
                return value
            return _Slot(
                numbers.setdefault(id(value), len(numbers)),
                tuple(value.shape),
                value.dtype,
                param is not None and value.device == param.device,
            )

        return rebuilt(tree, None, leaf)

    index = {param: i for i, param in enumerate(_params(optimizer))}
    param_state: dict[int, Any] = {}
    other_state: dict[Any, Any] = {}
    entries: dict[Any, Any] = optimizer.state
    for key, value in entries.items():
        if not isinstance(key, torch.Tensor):
            other_state[key] = describe(value, None)
        elif key in index:
            param_state[index[key]] = describe(value, key)
    options = [
        {key: describe(value, None) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return _Description(options, param_state, other_state)


def _is_dense(value: Any) -> bool:
    """Whether a value is a tensor that can be broadcast by itself; others are pickled."""
    if type(value) is not torch.Tensor and type(value) is not torch.nn.Parameter:
        return False
    return value.layout is torch.strided and not value.is_quantized


class _Rebuild:
    """Gives an optimizer the structure of a description; `tensors` are those whose values are still to come.

    Tensors that fit stay, others are made. On the root itself nothing changes.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, description: _Description) -> None:
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self._by_slot: dict[int, torch.Tensor] = {}
        self._kept: set[int] = set()
        for i, (group, options) in enumerate(
            zip(optimizer.param_groups, description.options, strict=True)
        ):
            for key, item in options.items():
                group[key] = self._fill(item, group.get(key), None, f"{i}.{key}")
        for i, param in enumerate(_params(optimizer)):
            self._replace(optimizer, param, description.param_state.get(i), param, f"{i}")
        others = [key for key in optimizer.state if not isinstance(key, torch.Tensor)]
        for key in dict.fromkeys([*description.other_state, *others]):
            self._replace(optimizer, key, description.other_state.get(key), None, f"{key}")

    def _replace(
        self,
        optimizer: torch.optim.Optimizer,
        key: Any,
        described: Any,
        param: torch.Tensor | None,
        name: str,
    ) -> None:
        """Set one entry of the state, or remove it where the root has none."""
        if described is None:
            optimizer.state.pop(key, None)
            return
        local = optimizer.state.get(key)
        value = self._fill(described, local, param, f"state.{name}")
        if type(local) is dict and type(value) is dict:
            local.clear()
            local.update(value)
        else:
            optimizer.state[key] = value

    def _fill(self, described: Any, local: Any, param: torch.Tensor | None, name: str) -> Any:
        def leaf(slot: Any, own: Any, path: str) -> Any:
            if type(slot) is not _Slot:
                return slot
            tensor = self._by_slot.get(slot.number)
            if tensor is None:
                tensor = self._tensor(slot, own, param)
                self._by_slot[slot.number] = tensor
                self._kept.add(id(tensor))
                self.tensors.append((path, tensor))
            return tensor

        return rebuilt(described, local, leaf, name)

    def _tensor(self, slot: _Slot, local: Any, param: torch.Tensor | None) -> torch.Tensor:
        if (
            _is_dense(local)
            and id(local) not in self._kept
            and tuple(local.shape) == slot.shape
            and local.dtype == slot.dtype
        ):
            kept: torch.Tensor = local
            return kept
        device = param.device if param is not None and slot.with_param else "cpu"
        if param is not None and tuple(param.shape) == slot.shape:
            # Laid out like the parameter, as fused and foreach implementations want it.
            return torch.empty_like(param, dtype=slot.dtype, device=device, requires_grad=False)
        return torch.empty(slot.shape, dtype=slot.dtype, device=device)
