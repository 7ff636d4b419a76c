"""A distributed optimizer's options for the reduction of gradients, without types of a framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from horovod.common import _optimizer_settings
from horovod.common._ops import Average, Sum
from horovod.common._reduction import Reduction
from horovod.common.process_sets import ProcessSet
from horovod.common.util import split_list

# Default name of an optimizer's operations.
DEFAULT_NAME: Final = "DistributedOptimizer"

_GROUPS = "groups should be a non-negative integer or a list of list of tf.Variable."


@dataclass(slots=True)
class GradientReduction:
    """Options by which the gradients of one optimizer are reduced, equal on every rank."""

    name: str
    """Name that pairs operations across ranks."""
    compression: Any
    op: int
    gradient_predivide_factor: float
    sparse_as_dense: bool
    passes: int
    """Backward passes per step."""
    average_aggregated: bool
    groups: int | Sequence[Sequence[Any]] | None
    process_set: ProcessSet
    scale_local_gradients: bool
    local: set[int] = field(default_factory=set)
    """Identities of variables whose gradients are not reduced."""
    _places: dict[int, int] | None = None
    """Number of a variable's group in `groups`, by the variable's identity."""

    def reduction(self) -> Reduction:
        """Return the operator, factors and process set of the reduction."""
        return Reduction.of_gradients(self.op, self.gradient_predivide_factor, self.process_set)

    def is_active(self) -> bool:
        """Return whether this rank exchanges gradients with other ranks, now or after an elastic reset."""
        return _optimizer_settings.active(self.process_set)

    def register_local(self, variable: Any) -> None:
        """Exclude the gradients of a variable from the reduction."""
        self.local.add(id(variable))
        # On TensorFlow a gradient may belong to the `tf.Variable` inside of Keras's variable. In a scope of mixed
        # precision the public `value` is a cast copy of the `tf.Variable`.
        inner = getattr(variable, "_value", getattr(variable, "value", None))
        if hasattr(inner, "assign"):
            self.local.add(id(inner))

    def is_local(self, variable: Any) -> bool:
        """Return whether the gradients of a variable are excluded from the reduction."""
        return bool(self.local) and id(variable) in self.local

    def batches(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[list[int]]:
        """Return the positions of the reduced gradients of each operation; without `groups` one operation has all."""
        sent = [
            i
            for i, gradient in enumerate(gradients)
            if gradient is not None and not self.is_local(variables[i])
        ]
        if self.groups is None:
            return [sent] if sent else []
        if isinstance(self.groups, int):
            return [list(part) for part in split_list(sent, self.groups) if part]
        if self._places is None:
            self._places = {id(v): n for n, group in enumerate(self.groups) for v in group}
        listed: list[list[int]] = [[] for _ in range(len(self.groups) + 1)]
        for i in sent:
            listed[self._places.get(id(variables[i]), -1)].append(i)
        return [part for part in listed if part]


def checked_groups(groups: Any) -> int | list[list[Any]] | None:
    """Return the groups unchanged; raise ValueError if they are invalid.

    Variables are compared by identity, because variables of different layers have the same names.
    """
    if groups is None or (isinstance(groups, int) and not isinstance(groups, bool) and groups > 0):
        return groups
    if not isinstance(groups, list):
        raise ValueError(_GROUPS)
    seen: set[int] = set()
    for group in groups:
        if not isinstance(group, list | tuple) or not all(map(_is_variable, group)):
            raise ValueError(_GROUPS)
        for variable in group:
            if id(variable) in seen:
                raise ValueError("A variable can only appear once in groups.")
            seen.add(id(variable))
    return groups


def check_options(op: int, gradient_predivide_factor: float, backward_passes_per_step: int) -> None:
    """Raise ValueError unless optimizers support these options."""
    if op not in (Average, Sum):
        raise ValueError("op currently only supports Average and Sum")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if gradient_predivide_factor <= 0:
        raise ValueError(
            f"gradient_predivide_factor={gradient_predivide_factor}: expected a positive number"
        )
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")


def _is_variable(candidate: Any) -> bool:
    return hasattr(candidate, "assign") and hasattr(candidate, "shape")
