"""Nested dicts, lists and tuples, rebuilt with other leaves."""

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

# Makes the new leaf of the old one, of what is at the same place in the other tree (None: nothing), and of its path.
Leaf = Callable[[Any, Any, str], Any]


def rebuilt(tree: Any, other: Any, leaf: Leaf, path: str = "") -> Any:
    """The same structure, with what `leaf` makes of everything in it that is no dict, list or tuple.

    Subclasses but `OrderedDict` are leaves. Paths are keys and positions, with dots between them.
    """
    kind = type(tree)
    start = f"{path}." if path else ""
    if kind is dict or kind is OrderedDict:
        known = other if isinstance(other, dict) else {}
        # With its attributes: a module's state dict carries versions in one.
        result = copy.copy(tree)
        for key, item in tree.items():
            result[key] = rebuilt(item, known.get(key), leaf, f"{start}{key}")
        return result
    if kind is list or kind is tuple:
        fits = isinstance(other, kind) and len(other) == len(tree)
        parts = other if fits else [None] * len(tree)
        pairs = enumerate(zip(tree, parts, strict=True))
        return kind([rebuilt(item, part, leaf, f"{start}{i}") for i, (item, part) in pairs])
    return leaf(tree, other, path)
