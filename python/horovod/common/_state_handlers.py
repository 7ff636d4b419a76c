"""States of an elastic job whose values know by their types how they are saved, restored and synced."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic

import numpy as np

from horovod import _core
from horovod.common._objects import broadcast_object
from horovod.common._snapshot import Copier, Copies, Deferred, MayWait, Snapshot, never
from horovod.common.basics import basics
from horovod.common.elastic import ObjectState


class StateHandler:
    """Saves, restores and syncs one value of a state; base class, for handlers of one's own types.

    `root_rank` is the rank whose value `sync` has to give to all. A value that cannot be changed is replaced: its
    handler's `restore` and `sync` set `value`, which the state has then, and its `set_value` does not save.
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

    def saved(self) -> Any:
        """The content of a checkpoint: the last snapshot, as objects that can be pickled."""
        raise NotImplementedError(f"{type(self).__name__} has to define saved for checkpoints")

    def load(self, state: Any) -> None:
        """Give the value what `saved` has returned."""
        raise NotImplementedError(f"{type(self).__name__} has to define load for checkpoints")

    def refuse_others(self, state: Any) -> None:
        """Raise ValueError if what `saved` has returned is of another value, where `load` would not notice."""

    def reset(self) -> None:
        """Adapt the value to a new rank and size; called after each change of members, before `sync`."""

    def set_value(self, value: Any) -> None:
        """Handle another value from now on, which is saved at once."""
        self.value = value
        self.save()


class SnapshotHandler(StateHandler):
    """Of values whose state is a tree of arrays and objects: by default of those with `state_dict` and its counterpart.

    A framework's subclass says with `copies` how arrays are copied.
    """

    copies: Copies

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._snapshot = Snapshot(self.copies)
        self.save()

    def state(self) -> Any:
        """The value to save and send."""
        return self.value.state_dict()

    def load(self, state: Any) -> None:
        """Give the value this state."""
        self.value.load_state_dict(state)

    def save(self) -> None:
        """Copy the state."""
        self.take(never)
        self.complete()

    def take(self, may_wait: MayWait) -> list[Deferred]:
        """Begin a copy, which is ended by `complete`; arrays that may wait are left to the caller."""
        return self._snapshot.take(self.state(), may_wait)

    def complete(self) -> None:
        """Make the copy that was begun the one to go back to."""
        self._snapshot.complete()

    def saved(self) -> Any:
        """The copy."""
        return self._snapshot.complete_copy

    def restore(self) -> None:
        """Load the copy."""
        self.load(self._snapshot.value())

    def sync(self) -> None:
        """Load the root's state."""
        self.load(broadcast_object(self.state(), self.root_rank, "elastic.state_dict"))


def refuse_other_shapes(found: Sequence[Any], own: Sequence[Any]) -> None:
    """Raise ValueError if a checkpoint has other arrays than the state, by number or shape."""
    shapes, want = ([np.shape(array) for array in arrays] for arrays in (found, own))
    if shapes != want:
        raise ValueError(f"the file has arrays of the shapes {shapes}, the state has {want}")


# Pairs of a type and the handler of values of this type; the first that fits is taken.
Registry = list[tuple[type, type[StateHandler]]]


class HandlerRegistry:
    """The handlers of one framework's types."""

    def __init__(self, pairs: Registry) -> None:
        self.pairs = pairs

    def handler_of(self, value: Any) -> StateHandler | None:
        """The handler of this value, if it needs one."""
        return next(
            (handler(value) for kind, handler in self.pairs if isinstance(value, kind)), None
        )


class HandledState(ObjectState):
    """State whose values have handlers where the registry knows their types; the others are as in `ObjectState`.

    There are two snapshots, one complete and one being written.
    """

    _handler_registry: HandlerRegistry

    def __init__(self, **values: Any) -> None:
        self._copier = Copier()
        self._handlers: dict[str, StateHandler] = {}
        plain: dict[str, Any] = {}
        for name, value in values.items():
            handler = self._handler_registry.handler_of(value)
            if handler is None:
                plain[name] = value
            else:
                self._handlers[name] = handler
                object.__setattr__(self, name, value)
        super().__init__(broadcast_object, basics.rank, **plain)

    def __setattr__(self, name: str, value: Any) -> None:
        handler = self.__dict__.get("_handlers", {}).get(name)
        if handler is not None:
            self._copier.finish()
            handler.set_value(value)
        super().__setattr__(name, value)

    def save(self) -> None:
        """Copy all values."""
        self._copier.finish()
        _core.wait_for_devices()
        may_wait = self._may_wait()
        begun: list[SnapshotHandler] = []
        deferred: list[Deferred] = []
        for name, handler in self._handlers.items():
            if isinstance(handler, SnapshotHandler):
                deferred += handler.take(may_wait.get(name, never))
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
        """Give all values the state of the last snapshot."""
        self._copier.finish()
        for name, handler in self._handlers.items():
            self._adopt(name, handler, handler.restore)
        super().restore()

    def sync(self) -> None:
        """Give all ranks the root's live state, which becomes the snapshot to go back to."""
        self._copier.finish()
        for name, handler in self._handlers.items():
            handler.root_rank = self._root_rank
            self._adopt(name, handler, handler.sync)
        super().sync()
        self.save()

    _parts_of_checkpoint = frozenset({"values", "handled"})

    def _saved(self) -> dict[str, Any]:
        self._copier.finish()
        handled = {name: handler.saved() for name, handler in self._handlers.items()}
        return {**super()._saved(), "handled": handled}

    def _load_saved(self, saved: dict[str, Any]) -> None:
        self._copier.finish()
        handled = saved.get("handled", {})
        if handled.keys() != self._handlers.keys():
            raise ValueError(
                f"the file has {sorted(handled)}, the state has {sorted(self._handlers)}"
            )
        for name, handler in self._handlers.items():
            handler.refuse_others(handled[name])
        for name, handler in self._handlers.items():
            self._adopt(name, handler, functools.partial(handler.load, handled[name]))
        super()._load_saved(saved)

    def _adopt(self, name: str, handler: StateHandler, change: Callable[[], None]) -> None:
        """Have the value with which a handler has replaced its own; not every handler keeps one."""
        before = getattr(handler, "value", None)
        change()
        after = getattr(handler, "value", None)
        if after is not before:
            object.__setattr__(self, name, after)

    def reset(self) -> None:
        """Adapt the values to a new rank and size."""
        self._copier.finish()
        for handler in self._handlers.values():
            handler.reset()

    def _may_wait(self) -> dict[str, MayWait]:
        """By handler, which arrays may be copied in the background."""
        return {}


if TYPE_CHECKING:
    from typing_extensions import TypeVar

    ModelT = TypeVar("ModelT", default=Any)
    OptimizerT = TypeVar("OptimizerT", default=Any)

    class HoldsModelAndOptimizer(HandledState, Generic[ModelT, OptimizerT]):
        """A state by the types of its model and its optimizer."""

        model: ModelT
        optimizer: OptimizerT

else:
    # The defaults of the real ones need a newer Python; at run time nobody looks at them.
    ModelT = OptimizerT = Any

    class HoldsModelAndOptimizer(HandledState):
        """A state by the types of its model and its optimizer; only type checkers look at them."""

        __class_getitem__ = classmethod(types.GenericAlias)
