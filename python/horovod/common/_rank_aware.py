"""Refuses objects in an elastic state that store their rank: a sync would copy rank 0's object to all ranks."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from operator import index
from types import MemberDescriptorType
from typing import Any

# How libraries call the number of processes, or of shares, and what they call one of them beside it. Leading
# underscores do not count. No pair is here that also stands for a place in common work, such as the next of several
# shards.
_RANKS_BY_COUNT = {
    "num_replicas": ("rank", "replica_id", "replica_rank"),  # torch.utils.data.DistributedSampler
    "world_size": ("rank", "global_rank", "world_rank", "process_rank", "local_rank"),
    "num_ranks": ("rank",),
    "num_processes": ("process_index", "process_id", "rank"),
    "num_shards": ("shard_id", "shard_index", "rank"),
    "shard_count": ("cur_shard", "shard_id", "shard_index"),
    "num_workers": ("worker_rank", "worker_id", "worker_index"),
    "data_parallel_size": ("data_parallel_rank",),
    "dp_world_size": ("dp_rank",),
    "dp_size": ("dp_rank",),
    "hvd_size": ("hvd_rank",),
    "local_size": ("local_rank",),
}
# In a sampler of PyTorch a rank alone can only choose the rank's share.
_SAMPLERS = "torch.utils.data.sampler"
_RANKS_OF_SAMPLERS = ("rank", "global_rank", "world_rank", "local_rank")
_PLAIN = (int, float, bool, str, bytes, type(None))
_SEQUENCES = (list, tuple, set, frozenset, deque)
# A replay buffer is long, and its entries are alike.
_LENGTH_MAX = 1000
# Reaches the sampler in a sampler of batches in a data loader.
_DEPTH_MAX = 4


def refuse(values: Mapping[str, Any]) -> None:
    """Raise if a value of a state, or what it holds, belongs to one rank.

    Raises
    ------
    ValueError
        A value does; the text names it.
    """
    for name, value in values.items():
        for path, found, keys in _belonging(value, name, _DEPTH_MAX, set()):
            numbers = ", ".join(f"{key}={index(_entries(found)[key])}" for key in keys)
            kind = f"{type(found).__module__}.{type(found).__qualname__}"
            raise ValueError(
                f"The elastic state's {path}, a {kind}, belongs to one rank ({numbers}): "
                "sync would copy rank 0's to all ranks, and all would read the same share. Keep it out of the state, "
                "and create it in the function that elastic.run decorates. Instead of a sampler of PyTorch put a "
                "horovod.torch.elastic.ElasticSampler into a TorchState."
            )


def _belonging(
    value: Any, path: str, depth: int, seen: set[int]
) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    if type(value) in _PLAIN or id(value) in seen or isinstance(value, type):
        return
    seen.add(id(value))
    entries = _entries(value)
    keys = _rank_and_count(entries) or _rank_of_sampler(value, entries)
    if keys:
        yield path, value, keys
    if depth == 0:
        return
    for i, entry in enumerate(_first_entries(value)):
        if type(entry) in _PLAIN:  # a list of losses may be long
            continue
        yield from _belonging(entry, f"{path}[{i}]", depth - 1, seen)
    for key, entry in list(entries.items()):
        at = f"{path}[{key!r}]" if isinstance(value, Mapping) else f"{path}.{key}"
        yield from _belonging(entry, at, depth - 1, seen)


def _first_entries(value: Any) -> list[Any]:
    if not isinstance(value, _SEQUENCES):
        return []
    try:
        return list(islice(value, _LENGTH_MAX))
    except RuntimeError:  # a thread has changed it meanwhile
        return []


def _rank_and_count(entries: Mapping[Any, Any]) -> tuple[str, ...]:
    """The keys of a rank and of the number of ranks, if both are there and are integers."""
    keys = {key.lstrip("_"): key for key in entries if isinstance(key, str)}
    for count, ranks in _RANKS_BY_COUNT.items():
        if count not in keys or not _is_integer(entries[keys[count]]):
            continue
        for rank in ranks:
            if rank not in keys or not _is_integer(entries[keys[rank]]):
                continue
            return keys[rank], keys[count]
    return ()


def _rank_of_sampler(value: Any, entries: Mapping[Any, Any]) -> tuple[str, ...]:
    """The key of a rank in a sampler of PyTorch."""
    if not any(kind.__module__ == _SAMPLERS for kind in type(value).__mro__):
        return ()
    for key, entry in entries.items():
        name = key.lstrip("_") if isinstance(key, str) else ""
        if name in _RANKS_OF_SAMPLERS and _is_integer(entry):
            return (key,)
    return ()


def _is_integer(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    try:
        index(value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor with several elements
        return False
    return True


def _entries(value: Any) -> Mapping[Any, Any]:
    """The attributes of an object, or the entries of a mapping. Properties are not read: they may compute."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, functools.partial):
        return {"args": value.args, "keywords": value.keywords}
    fields = getattr(value, "_fields", None)
    if isinstance(value, tuple) and isinstance(fields, tuple):
        return dict(zip(fields, value, strict=True))
    attributes = getattr(value, "__dict__", None)
    entries = dict(attributes) if isinstance(attributes, dict) else {}
    for kind in type(value).__mro__:
        for name, slot in vars(kind).items():
            if isinstance(slot, MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # nothing is in the slot
                    entries[name] = slot.__get__(value)
    return entries
