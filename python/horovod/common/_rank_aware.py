"""Refuses objects in an elastic state that store their rank: a sync would copy rank 0's object to all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# How libraries call a rank, or a shard, and the number of them.
_PAIRS = (
    ("rank", "num_replicas"),  # torch.utils.data.DistributedSampler and what derives from it
    ("rank", "world_size"),
    ("process_index", "num_processes"),
    ("shard_id", "num_shards"),
    ("shard_index", "num_shards"),
    ("cur_shard", "shard_count"),
)
_PLAIN = (int, float, bool, str, bytes, type(None))
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
        for path, found, pair in _belonging(value, name, _DEPTH_MAX, set()):
            rank, count = (_entries(found)[key] for key in pair)
            kind = f"{type(found).__module__}.{type(found).__qualname__}"
            raise ValueError(
                f"The elastic state's {path}, a {kind}, belongs to one rank ({pair[0]}={rank}, {pair[1]}={count}): "
                "sync would copy rank 0's to all ranks, and all would read the same share. Keep it out of the state, "
                "and create it in the function that elastic.run decorates. Instead of a sampler of PyTorch put a "
                "horovod.torch.elastic.ElasticSampler into a TorchState."
            )


def _belonging(
    value: Any, path: str, depth: int, seen: set[int]
) -> Iterator[tuple[str, Any, tuple[str, str]]]:
    if type(value) in _PLAIN or id(value) in seen or isinstance(value, type):
        return
    seen.add(id(value))
    entries = _entries(value)
    for pair in _PAIRS:
        if all(type(entries.get(key)) is int for key in pair):
            yield path, value, pair
    if depth == 0:
        return
    inner = value if isinstance(value, (list, tuple)) else ()
    for i, entry in enumerate(inner):
        if type(entry) in _PLAIN:  # a list of losses may be long
            continue
        yield from _belonging(entry, f"{path}[{i}]", depth - 1, seen)
    for key, entry in entries.items():
        at = f"{path}[{key!r}]" if isinstance(value, Mapping) else f"{path}.{key}"
        yield from _belonging(entry, at, depth - 1, seen)


def _entries(value: Any) -> Mapping[Any, Any]:
    """The attributes of an object, or the entries of a mapping. Properties are not read: they may compute."""
    if isinstance(value, Mapping):
        return value
    held = getattr(value, "__dict__", None)
    return held if isinstance(held, dict) else {}
