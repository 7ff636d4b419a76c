"""Pickling of objects of classes that the script itself defines: each rank gets back those of its own.

cloudpickle sends classes of `__main__` by value, so that a process that runs something else can have them. Ranks that
run the same script have them already, and a copy would be another class. Members of a copied enumeration would be equal
to none of the rank's own, and `isinstance` would be false.
"""

import functools
import pickle
import sys
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

_SCRIPT = "__main__"


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's, which sends a class of the script by name too."""

    def reducer_override(self, obj: Any) -> Any:
        """How classes are sent; cloudpickle decides about the rest."""
        if isinstance(obj, type) and obj.__module__ == _SCRIPT:
            name = obj.__qualname__
            if _of_script(name) is obj:
                return _own_or_sent, (name, _bases(obj), cloudpickle.dumps(obj))
        return super().reducer_override(obj)


def _own_or_sent(name: str, bases: list[str], sent: bytes) -> Any:
    """This process's class of the name, if its script has one like it, otherwise the one that was sent."""
    own = _of_script(name)
    if isinstance(own, type) and own.__module__ == _SCRIPT and _bases(own) == bases:
        return own
    return pickle.loads(sent)


def _of_script(name: str) -> Any:
    try:
        return functools.reduce(getattr, name.split("."), sys.modules.get(_SCRIPT))
    except AttributeError:
        return None


def _bases(kind: type) -> list[str]:
    return [f"{base.__module__}.{base.__qualname__}" for base in kind.__bases__]
