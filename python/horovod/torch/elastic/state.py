"""`TorchState`: models, optimizers, samplers and plain objects as one state of an elastic job."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from horovod.torch._types import HoldsModelAndOptimizer
from horovod.torch.elastic._snapshot import Copier, Deferred, Snapshot
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.functions import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from horovod.torch.mpi_ops import rank

if TYPE_CHECKING:
    from horovod.torch._types import ModelHeld, OptimizerHeld
else:
    # Their defaults need a newer Python; at run time nobody looks at them.
    ModelHeld = OptimizerHeld = Any

__all__ = [
    "ModelStateHandler",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "SchedulerStateHandler",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "set_handler_registry",
]


class StateHandler:
    """Saves, restores and syncs one value of a `TorchState`; base class, for handlers of one's own types.

    `root_rank` is the rank whose value `sync` has to give to all.
    """

    root_rank = 0

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Take a snapshot of the value."""
        raise NotImplementedError(f"{type(self).__name__} has to define save")

    def restore(self) -> None:
        """Give the value the state of the last snapshot."""
        raise NotImplementedError(f"{type(self).__name__} has to define restore")

    def sync(self) -> None:
        """Give the value the live state of the root's."""
        raise NotImplementedError(f"{type(self).__name__} has to define sync")

    def reset(self) -> None:
        """Adapt the value to a new rank and size; called after each change of members, before `sync`."""

    def set_value(self, value: Any) -> None:
        """Handle another value from now on, which is saved at once."""
        self.value = value
        self.save()


class _StateDictHandler(StateHandler):
    """Of values that have `state_dict` and `load_state_dict`."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._snapshot = Snapshot()
        self.save()

    def save(self) -> None:
        """Copy the state dict."""
        self.take(lambda name, tensor: False)
        self.complete()

    def take(self, may_wait: Callable[[str, torch.Tensor], bool]) -> list[Deferred]:
        """Begin a copy, which is ended by `complete`; tensors that may wait are left to the caller."""
        return self._snapshot.take(self.value.state_dict(), may_wait)

    def complete(self) -> None:
        """Make the copy that was begun the one to go back to."""
        self._snapshot.complete()

    def restore(self) -> None:
        """Load the copy."""
        self.value.load_state_dict(self._snapshot.value())

    def sync(self) -> None:
        """Load the root's state dict."""
        state = broadcast_object(self.value.state_dict(), self.root_rank, "elastic.state_dict")
        self.value.load_state_dict(state)


class ModelStateHandler(_StateDictHandler):
    """Of `torch.nn.Module`."""

    def sync(self) -> None:
        """Give all ranks the root's parameters and buffers."""
        state = self.value.state_dict()
        broadcast_parameters(state, self.root_rank)
        if not all(isinstance(entry, torch.Tensor) for entry in state.values()):
            self.value.load_state_dict(state)

    def reset(self) -> None:
        """Drop gradients: they may be half reduced, or of ranks that are gone."""
        for param in self.value.parameters():
            param.grad = None


class OptimizerStateHandler(_StateDictHandler):
    """Of `torch.optim.Optimizer`, wrapped or not."""

    def sync(self) -> None:
        """Give all ranks the root's state and options."""
        broadcast_optimizer_state(self.value, self.root_rank)

    def params(self) -> list[torch.Tensor]:
        """The parameters that it moves."""
        return [param for group in self.value.param_groups for param in group["params"]]

    def reset(self) -> None:
        """Drop gradients: they may be half reduced, or of ranks that are gone."""
        for param in self.params():
            param.grad = None


class SchedulerStateHandler(_StateDictHandler):
    """Of learning-rate schedulers and `GradScaler`: what the root has is loaded into the own ones, which stay.

    Sent as an object, a scheduler would arrive with an optimizer of its own, which nobody steps.
    """


class SamplerStateHandler(_StateDictHandler):
    """Of `ElasticSampler`."""

    def reset(self) -> None:
        """Deal the rest of the epoch out to the ranks that are there now."""
        self.value.reset()


_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
    (torch.optim.lr_scheduler.LRScheduler, SchedulerStateHandler),
    (torch.amp.GradScaler, SchedulerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Pairs of a type and the handler of values of this type; the first that fits is taken."""
    return _registry


def set_handler_registry(registry: Sequence[tuple[type, type[StateHandler]]]) -> None:
    """Replace the pairs for states that are made from now on."""
    global _registry
    _registry = list(registry)


def _handler_of(value: Any) -> StateHandler | None:
    for kind, handler in _registry:
        if isinstance(value, kind):
            return handler(value)
    return None


class TorchState(HoldsModelAndOptimizer[ModelHeld, OptimizerHeld]):
    """State of a training with PyTorch.

    Snapshots are copies in host memory, allocated once; there are two, one complete and one being written.

    Parameters
    ----------
    model, optimizer
        Also several under other names.
    kwargs
        Names and initial values of attributes. Modules, optimizers, schedulers, `GradScaler` and `ElasticSampler` are
        saved and synced by what they hold, and stay the same objects; other types can be registered. Everything else
        is a plain object as in `ObjectState`.

    Attributes
    ----------
    commit_in_background
        False. True lets `commit` return before parameters and optimizer state are copied; the next step of any
        optimizer waits for the copies. It is a promise that between a commit and the next step only that step
        changes them. Changes are noticed and raise, but not those through `.data`.

    Examples
    --------
    >>> state = hvd.elastic.TorchState(model, optimizer, epoch=0, batch=0)
    """

    commit_in_background = False

    def __init__(
        self,
        model: ModelHeld = None,  # type: ignore[assignment]
        optimizer: OptimizerHeld = None,  # type: ignore[assignment]
        **kwargs: Any,
    ) -> None:
        self._copier = Copier()
        self._waits_before_step = False
        self._handlers: dict[str, StateHandler] = {}
        plain: dict[str, Any] = {}
        for name, value in (kwargs | {"model": model, "optimizer": optimizer}).items():
            handler = _handler_of(value)
            if handler is None:
                plain[name] = value
            else:
                self._handlers[name] = handler
                object.__setattr__(self, name, value)
        super().__init__(broadcast_object, rank, **plain)

    def __setattr__(self, name: str, value: Any) -> None:
        handler = self.__dict__.get("_handlers", {}).get(name)
        if handler is not None:
            self._copier.finish()
            handler.set_value(value)
        super().__setattr__(name, value)

    def save(self) -> None:
        """Copy models, optimizers and the other values."""
        self._copier.finish()
        may_wait = self._may_wait() if self.commit_in_background else {}
        begun: list[_StateDictHandler] = []
        deferred: list[Deferred] = []
        for name, handler in self._handlers.items():
            if isinstance(handler, _StateDictHandler):
                deferred += handler.take(may_wait.get(name, lambda _, tensor: False))
                begun.append(handler)
            else:
                handler.save()
        plain = self._snapshot()

        def complete() -> None:
            for handler in begun:
                handler.complete()
            self._saved_state = plain

        if deferred:
            self._copier.start(deferred, complete)
        else:
            complete()

    def restore(self) -> None:
        """Load the last snapshot into models, optimizers and the other values."""
        self._copier.finish()
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Give all ranks the root's live state."""
        self._copier.finish()
        for handler in self._handlers.values():
            handler.root_rank = self._root_rank
            handler.sync()
        super().sync()

    def reset(self) -> None:
        """Drop gradients, and deal samples out anew."""
        self._copier.finish()
        for handler in self._handlers.values():
            handler.reset()

    def _may_wait(self) -> dict[str, Callable[[str, torch.Tensor], bool]]:
        """By handler, which tensors only an optimizer's step changes."""
        if not self._waits_before_step:
            self._waits_before_step = True
            copier = self._copier
            hook = register_optimizer_step_pre_hook(lambda *_: copier.finish())
            weakref.finalize(self, hook.remove)
        optimizers = {
            name: handler
            for name, handler in self._handlers.items()
            if isinstance(handler, OptimizerStateHandler)
        }
        moved = {param.data_ptr() for o in optimizers.values() for param in o.params()}
        found: dict[str, Callable[[str, torch.Tensor], bool]] = {}
        for name, handler in self._handlers.items():
            if name in optimizers:
                found[name] = lambda path, _: path.startswith("state.")
            elif isinstance(handler, ModelStateHandler):
                found[name] = lambda _, tensor: tensor.data_ptr() in moved
        return found
