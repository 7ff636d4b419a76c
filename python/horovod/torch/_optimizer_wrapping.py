"""Common to both distributed optimizers: building the subclass, following its groups, copying and pickling it."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import is_
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from horovod.common._optimizer_settings import Settings, find_duplicates
from horovod.common.process_sets import ProcessSet
from horovod.torch._group_changes import Changes, changed_parameters, parameters_of
from horovod.torch._original_attributes import OriginalAttributes

PUBLIC_MODULE = "horovod.torch.optimizer"

S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")


def of_itself(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Have a method run on the optimizer also where a wrapper calls it that has a subclass of the optimizer's class.

    Lightning's wrapper is such an object. It has none of the optimizer's attributes, and asks the optimizer for each.
    """

    @functools.wraps(method)
    def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(self._hvd_itself(), *args, **kwargs)  # type: ignore[attr-defined]

    return run


class Wrapped(OriginalAttributes, torch.optim.Optimizer):
    """Base of the classes that `wrap` mixes into the class of the user's optimizer."""

    _hvd_itself: Callable[[], Any]
    _hvd_settings: Settings
    _hvd_original: Callable[[], torch.optim.Optimizer | None] | None = None
    _hvd_attached = False
    # The parameters of each group that `_hvd_settings` names.
    _hvd_tracked: Sequence[Sequence[torch.Tensor]] = ()

    backward_passes_per_step: int
    process_set: ProcessSet
    op: int

    def _hvd_attach(self) -> None:
        """Install hooks for the current parameters; called once, when `param_groups` are there."""
        raise TypeError(f"{type(self).__name__} does not say how it is attached")

    def _hvd_retrack(self, changes: Changes) -> None:
        """Take parameters that were added later, and let go of those that are gone."""
        raise TypeError(f"{type(self).__name__} does not say how parameters are added")

    def _hvd_adopt_groups(self, given: Mapping[torch.Tensor, str] | None = None) -> None:
        """Take what was changed since in the groups of this optimizer, or of the original, which shares them.

        Groups are added, and parameters within groups are added, replaced and removed.
        """
        tracked, groups = self._hvd_tracked, self.param_groups
        if len(tracked) == len(groups):
            for known, group in zip(tracked, groups, strict=True):
                params = group["params"]
                if len(params) != len(known) or not all(map(is_, params, known)):
                    break
            else:
                return
        current = [parameters_of(index, group) for index, group in enumerate(groups)]
        changes = changed_parameters(tracked, self._hvd_settings.names, current, given or {})
        self._hvd_retrack(changes)
        self._hvd_settings = replace(self._hvd_settings, names=changes.names)
        self._hvd_tracked = current

    def _hvd_named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for group, names in zip(self.param_groups, self._hvd_settings.names, strict=True):
            for param, name in zip(group["params"], names, strict=True):
                yield name, param

    def _hvd_note_step(self) -> None:
        """Let a scheduler that was built on the original optimizer know that a step was taken."""
        original = self._hvd_original() if self._hvd_original is not None else None
        if original is not None:
            original._opt_called = True  # type: ignore[attr-defined]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if not self._hvd_attached:
            self._hvd_attached = True
            self._hvd_tracked = [list(group["params"]) for group in self.param_groups]
            self._hvd_attach()

    def __deepcopy__(self, memo: dict[int, Any]) -> Wrapped:
        result = _blank(*self._hvd_recipe())
        memo[id(self)] = result
        result.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return result

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _blank, self._hvd_recipe(), self.__getstate__()

    def _hvd_recipe(self) -> tuple[type[Wrapped], type[torch.optim.Optimizer], Settings]:
        self._hvd_adopt_groups()
        kind, base = type(self).__bases__
        return kind, base, self._hvd_settings

    @of_itself
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimizer's state; reductions in flight are dropped and a new cycle begins.

        Group dictionaries and state stay the same objects, so that the original optimizer and schedulers
        built on it still see them.
        """
        groups, state = self.param_groups, self.state
        super().load_state_dict(state_dict)
        if self.param_groups is not groups:
            for old, new in zip(groups, self.param_groups, strict=True):
                old.clear()
                old.update(new)
            self.param_groups = groups
        if self.state is not state:
            loaded = dict(self.state)
            state.clear()
            state.update(loaded)
            self.state = state

    find_duplicates = staticmethod(find_duplicates)


def refuse_others(optimizer: object) -> None:
    """Raise TypeError unless the argument is an optimizer of PyTorch, with what to do about something around one."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return
    kind = type(optimizer).__name__
    attributes = getattr(optimizer, "__dict__", {})
    inner = next((k for k, v in attributes.items() if isinstance(v, torch.optim.Optimizer)), None)
    cure = "Pass one, such as torch.optim.SGD(model.parameters(), lr=0.1)."
    if inner is not None:
        cure = (
            f"Wrap the optimizer inside it, its .{inner}, and make the {kind} around the result: "
            f"{kind}(hvd.DistributedOptimizer(optimizer, ...), ...)."
        )
    raise TypeError(f"hvd.DistributedOptimizer() takes a torch.optim.Optimizer, not {kind}. {cure}")


W = TypeVar("W", bound=Wrapped)


def wrap(optimizer: torch.optim.Optimizer, kind: type[W], settings: Settings) -> W:
    """Return an object of a new subclass of the optimizer's class that shares everything it holds.

    No constructor runs: state, defaults, hooks and attributes are those of the original, whose group
    dictionaries and state are shared.
    """
    base = type(optimizer)
    if isinstance(optimizer, Wrapped):
        base = base.__bases__[1]
    result = _blank(kind, base, settings)
    # A scheduler built on the original has put a `step` into the instance, which would hide ours.
    own = {
        key: value
        for key, value in vars(optimizer).items()
        if key != "step" and not key.startswith("_hvd_")
    }
    result.__dict__.update(own, **_public(settings))
    result._hvd_original = weakref.ref(optimizer)
    result._hvd_attached = True
    result._hvd_tracked = [list(group["params"]) for group in result.param_groups]
    result._hvd_attach()
    return result


def _public(settings: Settings) -> dict[str, Any]:
    return {
        "backward_passes_per_step": settings.passes,
        "op": settings.options.op,
        "gradient_predivide_factor": settings.options.gradient_predivide_factor,
        "sparse_as_dense": settings.options.sparse_as_dense,
        "process_set": settings.options.process_set,
        "zero_missing_gradients": settings.options.zero_missing_gradients,
    }


def _blank(kind: type[W], base: type[torch.optim.Optimizer], settings: Settings) -> W:
    """An object of the combined class with no parameters yet."""

    @functools.wraps(base.step)
    def step(self: W, *args: Any, **kwargs: Any) -> Any:
        return kind.step(self, *args, **kwargs)

    # torch instruments every `step` that is not marked so; the step hooks would fire here and in the inner step.
    step.hooked = True  # type: ignore[attr-defined]
    namespace = {"__module__": PUBLIC_MODULE, "__doc__": base.__doc__, "step": step}
    cls: Any = type(base.__name__, (kind, base), namespace)
    result: W = cls.__new__(cls)
    result._hvd_itself = weakref.ref(result)
    result._hvd_settings = settings
    result.__dict__.update(_public(settings))
    return result
