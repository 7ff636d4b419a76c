"""Settings of distributed optimizers, for every framework: arguments, names of parameters, groups.

Parameters may be anything that can be a key of a dict by identity; they come in the groups of the wrapped optimizer.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from horovod import _core
from horovod.common._objects import broadcast_object
from horovod.common._ops import Average, Max, Min, Product
from horovod.common._reduction import Reduction
from horovod.common.basics import basics
from horovod.common.consistency import Watch, checked_action
from horovod.common.process_sets import ProcessSet
from horovod.common.util import split_list

P = TypeVar("P", bound=Hashable)

# Name on the wire of every parameter, by group and position.
Names = tuple[tuple[str, ...], ...]

_NO_GROUPS = "groups should be a non-negative integer or a list of list of {kind}."


@dataclass(frozen=True, slots=True)
class ReduceOptions:
    """How gradients travel; the same on every rank."""

    compression: Any
    op: int
    gradient_predivide_factor: float
    sparse_as_dense: bool
    process_set: ProcessSet
    zero_missing_gradients: bool = True

    def reduction(self) -> Reduction:
        """How the gradients are combined."""
        return Reduction.of_gradients(self.op, self.gradient_predivide_factor, self.process_set)


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a distributed optimizer, free of tensors, so that a copy can be wired up like the original."""

    options: ReduceOptions
    passes: int
    names: Names
    groups: Names = ()
    """Parameters that are reduced together, by name."""
    check_consistency: int | None = None
    """Steps between two comparisons of the parameters; None: what the setting says."""
    consistency_action: str | None = None

    @property
    def key(self) -> str:
        """The same word on every rank, also when ranks hold their parameters in different orders; "" of none."""
        return min((name for group in self.names for name in group), default="")

    def watch(self) -> Watch:
        """Compares the parameters of the ranks during training."""
        return Watch(
            self.check_consistency, self.consistency_action, self.key, self.options.process_set
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Settings:
        return self


def active(process_set: ProcessSet, op: int = Average) -> bool:
    """Whether this rank has anybody to exchange gradients with, now or after an elastic reset.

    Or has mistakes to find that only matter with several ranks: these operators refuse several backward passes.
    """
    if not basics.is_initialized() or not process_set.included():
        return False
    return basics.size() > 1 or _core.is_elastic() or op in (Min, Max, Product)


def check_arguments(
    op: int,
    gradient_predivide_factor: float,
    backward_passes_per_step: int,
    check_consistency: int | None,
    consistency_action: str | None,
) -> None:
    """Raise ValueError unless a distributed optimizer can be told these."""
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    if check_consistency is not None and check_consistency < 0:
        raise ValueError(f"check_consistency={check_consistency}: expected a number of steps, or 0")
    checked_action(consistency_action)


def groups_given(groups: Any, num_groups: int) -> Any:
    """The `groups` that a call of `DistributedOptimizer` asks for, maybe by the older argument."""
    if num_groups == 0:
        return groups
    warnings.warn(
        "Parameter `num_groups` has been replaced by `groups` and will be removed.",
        DeprecationWarning,
        stacklevel=3,
    )
    return num_groups if groups is None else groups


def find_duplicates(lst: Iterable[Any]) -> set[Any]:
    """Return the elements that occur more than once."""
    seen: set[Any] = set()
    return {x for x in lst if x in seen or seen.add(x)}  # type: ignore[func-returns-value]


def default_names(index: int, count: int) -> tuple[str, ...]:
    """Names of the parameters of group number `index` when the user gave none."""
    return tuple(f"allreduce.noname.{index}.{position}" for position in range(count))


def names_on_the_wire(
    groups: Sequence[Sequence[P]], named_parameters: Iterable[tuple[str, P]] | None
) -> tuple[Names, dict[P, str]]:
    """Check `named_parameters`; return the name of every parameter by group, and all names that were given."""
    if named_parameters is None:
        return tuple(default_names(i, len(group)) for i, group in enumerate(groups)), {}
    named = list(named_parameters)
    if any(not isinstance(entry, tuple) for entry in named):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    duplicates = find_duplicates(name for name, _ in named)
    if duplicates:
        raise ValueError(
            "Parameter names in named_parameters must be unique. Found duplicates: "
            + ", ".join(sorted(duplicates))
        )
    # torch.compile(model) prefixes its names; ranks that took them from the plain model must still agree.
    given = {
        param: name.replace("_orig_mod.", "") for name, param in sorted(named, key=lambda e: e[0])
    }
    unnamed = [param for group in groups for param in group if param not in given]
    if unnamed:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named. Python object "
            "ids: " + ", ".join(str(id(param)) for param in unnamed)
        )
    return tuple(tuple(given[param] for param in group) for group in groups), given


def grouped_names(
    groups: int | Sequence[Sequence[Any]] | None,
    trainable: dict[P, str],
    kind: type[P],
    key: str,
    process_set: ProcessSet,
) -> Names:
    """Check `groups` and return the names of the trainable parameters of each.

    Parameters
    ----------
    kind
        Name of the parameters in errors.
    key
        Pairs the call across ranks.
    """
    if groups is None:
        return ()
    kind_name = f"{kind.__module__}.{kind.__qualname__}"
    if not isinstance(groups, (int, list)) or isinstance(groups, bool):
        raise TypeError(_NO_GROUPS.format(kind=kind_name))
    if isinstance(groups, list):
        return _named_lists(groups, trainable, kind, kind_name)
    if groups <= 0:
        raise ValueError(_NO_GROUPS.format(kind=kind_name))
    order = list(trainable.values())
    if _core.is_elastic():
        order.sort()  # there is nobody to ask: ranks that were here before are elsewhere by now
    elif active(process_set):
        # Ranks may have built the optimizer in different orders; a group must be the same on all.
        root = process_set.ranks[0] if process_set.ranks else 0
        order = broadcast_object(order, root, f"groups.{key}", process_set)
    return tuple(tuple(part) for part in split_list(order, groups))


def _named_lists(
    groups: Sequence[Sequence[Any]], trainable: dict[P, str], kind: type[P], kind_name: str
) -> Names:
    seen: set[Any] = set()
    for group in groups:
        for param in group:
            if not isinstance(param, kind):
                raise ValueError(f"groups must consist of {kind_name}.")
            if param in seen:
                raise ValueError("A parameter can only appear once in groups.")
            seen.add(param)
    return tuple(tuple(trainable[p] for p in group if p in trainable) for group in groups)
