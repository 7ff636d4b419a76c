"""`TorchState`: models, optimizers, samplers and plain objects as one state of an elastic job."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from horovod.common._snapshot import MayWait
from horovod.common._state_handlers import (
    HandlerRegistry,
    HoldsModelAndOptimizer,
    ModelT,
    OptimizerT,
    Registry,
    SnapshotHandler,
    StateHandler,
)
from horovod.common.process_sets import global_process_set
from horovod.torch.elastic._snapshot import TensorCopies
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.functions import broadcast_optimizer_state, replace_parameters

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


class _StateDictHandler(SnapshotHandler):
    """Of values that have `state_dict` and `load_state_dict`."""

    copies = TensorCopies()


class ModelStateHandler(_StateDictHandler):
    """Of `torch.nn.Module`."""

    def load(self, state: Any) -> None:
        """Load parameters and buffers; drop gradients, which were computed with other ones."""
        super().load(state)
        self.reset()

    def sync(self) -> None:
        """Give all ranks the root's parameters and buffers."""
        state = self.value.state_dict()
        renewed = replace_parameters(state, self.root_rank, global_process_set)
        if renewed or not all(isinstance(entry, torch.Tensor) for entry in state.values()):
            self.value.load_state_dict(state)
        self.reset()

    def reset(self) -> None:
        """Drop gradients: they may be half reduced, or of ranks that are gone."""
        for param in self.value.parameters():
            param.grad = None


class OptimizerStateHandler(_StateDictHandler):
    """Of `torch.optim.Optimizer`, wrapped or not."""

    def load(self, state: Any) -> None:
        """Load state and options, and begin a new cycle of passes: what was added up since is dropped."""
        super().load(state)
        self.reset()

    def sync(self) -> None:
        """Give all ranks the root's state and options; all begin a new cycle of passes."""
        broadcast_optimizer_state(self.value, self.root_rank)
        self.reset()

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


_registry = HandlerRegistry(
    [
        (torch.nn.Module, ModelStateHandler),
        (torch.optim.Optimizer, OptimizerStateHandler),
        (ElasticSampler, SamplerStateHandler),
        (torch.optim.lr_scheduler.LRScheduler, SchedulerStateHandler),
        (torch.amp.GradScaler, SchedulerStateHandler),
    ]
)


def get_handler_registry() -> Registry:
    """Pairs of a type and the handler of values of this type; the first that fits is taken."""
    return _registry.pairs


def set_handler_registry(registry: Sequence[tuple[type, type[StateHandler]]]) -> None:
    """Replace the pairs for states that are made from now on."""
    _registry.pairs = list(registry)


class TorchState(HoldsModelAndOptimizer[ModelT, OptimizerT]):
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
    _handler_registry = _registry

    def __init__(
        self,
        model: ModelT = None,  # type: ignore[assignment]
        optimizer: OptimizerT = None,  # type: ignore[assignment]
        **kwargs: Any,
    ) -> None:
        self._waits_before_step = False
        super().__init__(**kwargs, model=model, optimizer=optimizer)

    def _may_wait(self) -> dict[str, MayWait]:
        """By handler, which tensors only an optimizer's step changes."""
        if not self.commit_in_background:
            return {}
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
        found: dict[str, MayWait] = {}
        for name, handler in self._handlers.items():
            if name in optimizers:
                found[name] = lambda path, _: path.startswith("state.")
            elif isinstance(handler, ModelStateHandler):
                found[name] = lambda _, tensor: tensor.data_ptr() in moved
        return found
