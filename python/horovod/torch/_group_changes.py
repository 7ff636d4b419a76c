"""Finds changes that a script made in an optimizer's parameter groups after the optimizer was wrapped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

import torch

from horovod.common._optimizer_settings import Names, default_names


@dataclass(frozen=True)
class Changes:
    """The current names of all parameters by group, and the differences from the last look."""

    names: Names
    added: Sequence[tuple[str, torch.Tensor]]
    replaced: Sequence[tuple[torch.Tensor, torch.Tensor]]
    """Pairs of an old and a new parameter: the new one has the old one's place and name."""
    removed: Sequence[torch.Tensor]


def parameters_of(index: int, group: Mapping[str, Any]) -> list[torch.Tensor]:
    """The parameters of a group, in an order that can be the same on all ranks."""
    params = group["params"]
    if not isinstance(params, (list, tuple)):
        raise TypeError(
            f"the parameters of group {index} are in a {type(params).__name__}. Their order pairs them with those of "
            'other ranks, and this type does not keep an order: put a list into group["params"].'
        )
    return list(params)


def changed_parameters(
    before: Sequence[Sequence[torch.Tensor]],
    names: Names,
    now: Sequence[Sequence[torch.Tensor]],
    given: Mapping[torch.Tensor, str],
) -> Changes:
    """Find the changes, and name the new parameters.

    A parameter keeps its name. A new one is named by `given`, else like the removed parameter whose place it took, else
    by the default for its place. A number is added to a name that is in use.
    """
    old = dict(zip(chain.from_iterable(before), chain.from_iterable(names), strict=True))
    present = set(chain.from_iterable(now))
    removed = {param: name for param, name in old.items() if param not in present}
    taken = {name for param, name in old.items() if param in present}
    added: list[tuple[str, torch.Tensor]] = []
    replaced: list[tuple[torch.Tensor, torch.Tensor]] = []

    def named(param: torch.Tensor, index: int, position: int) -> str:
        if param in old:
            return old[param]
        places = before[index] if index < len(before) else ()
        former = places[position] if position < len(places) else None
        wanted = given.get(param)
        freed = removed.get(former) if wanted is None and former is not None else None
        if former is not None and freed is not None and freed not in taken:
            replaced.append((former, param))
            taken.add(removed.pop(former))
            return freed
        wanted = wanted or default_names(index, position + 1)[-1]
        others = (f"{wanted}.{number}" for number in count(1))
        name = next(n for n in chain([wanted], others) if n not in taken)
        taken.add(name)
        added.append((name, param))
        return name

    new_names = tuple(
        tuple(named(param, index, position) for position, param in enumerate(params))
        for index, params in enumerate(now)
    )
    return Changes(new_names, added, replaced, list(removed))
