"""Converts a rank's exception so that it is also a `RuntimeError`, which the original raises."""

from __future__ import annotations

import contextlib
import types
from typing import Any


def also_runtime_error(error: Exception) -> Exception:
    """Return the exception with a class that derives from its own class and from `RuntimeError`.

    If there cannot be such a class, return the exception unchanged.
    """
    if isinstance(error, RuntimeError):
        return error
    kind = type(error)
    with contextlib.suppress(Exception):
        both = _both(kind)
        for convert in (_by_its_class, _by_its_reduction, _by_its_parts):
            with contextlib.suppress(Exception):
                converted = convert(error, both)
                if str(converted) == str(error) and converted.args == error.args:
                    return converted
    return error


def _both(kind: type[Exception]) -> type[Exception]:
    """Return a class that derives from `kind` and `RuntimeError` and has the name of `kind`."""

    def __reduce_ex__(self: Exception, protocol: Any) -> tuple[Any, ...]:
        # The pickle names `kind`, which other processes can import.
        reduced: Any = super(both, self).__reduce_ex__(protocol)
        call, args, *state = reduced
        return _unpickled, (kind if call is both else call, args, *state)

    names = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "__reduce_ex__": __reduce_ex__,
    }
    bases = (kind, RuntimeError)
    both: type[Exception] = types.new_class(
        kind.__name__, bases, exec_body=lambda n: n.update(names)
    )
    return both


def _by_its_class(error: Exception, both: type[Exception]) -> Exception:
    """Replace the class of the exception and nothing else; this fails for classes written in C."""
    error.__class__ = both
    return error


def _by_its_reduction(error: Exception, both: type[Exception]) -> Exception:
    """Make a new exception as copying does: classes written in C have more state than `args`."""
    reduced: Any = error.__reduce__()
    call, args, *state = reduced
    if call is not type(error) or not isinstance(args, tuple):
        raise TypeError("it is not made by calling its class")
    converted = both(*args)
    _set_state(converted, state)
    return converted


def _by_its_parts(error: Exception, both: type[Exception]) -> Exception:
    converted = both.__new__(both, *error.args)
    converted.args = error.args
    vars(converted).update(vars(error))
    return converted


def _set_state(error: Exception, state: list[Any]) -> None:
    if state and state[0]:
        error.__setstate__(state[0])


def _unpickled(call: Any, args: tuple[Any, ...], *state: Any) -> Exception:
    error: Exception
    try:
        error = call(*args)
    except Exception:
        # The `__init__` of this class takes other arguments than `args`.
        error = call.__new__(call, *args)
        error.args = args
    _set_state(error, list(state))
    return also_runtime_error(error)
