"""Failures of collective operations, found in the exceptions that frameworks make of them."""

from __future__ import annotations

import re

from horovod.common._replicas import is_difference
from horovod.common.exceptions import (
    HorovodInternalError,
    HorovodStalledError,
    ReplicasDifferError,
)

# In front of the cause, where several operations have failed.
_ROOTS = re.compile(r"\s*\d+ root error\(s\) found\.\s+\(0\) [A-Z_ ]+:\s*")
_KINDS = (HorovodStalledError, ReplicasDifferError, HorovodInternalError)


def as_horovod_error(error: BaseException) -> HorovodInternalError | ReplicasDifferError | None:
    """The failure of a collective operation that an exception stands for; None if it has another cause.

    TensorFlow's exceptions name one of our operations; XLA's have our exception's name in front of its text. When a
    jitted step fails, Keras on JAX cleans up with arrays that were given away to the step, which is an error of its
    own: there the one before it counts.
    """
    if isinstance(error, HorovodInternalError | ReplicasDifferError):
        return error
    text = str(error)
    for kind in _KINDS:
        _, mark, message = text.partition(f"{kind.__name__}: ")
        if mark:
            return kind(message)
    if type(error).__module__.startswith("tensorflow.") and "Horovod" in text:
        text = _cause_first(text)
        if type(error).__name__ == "DataLossError":
            # TensorFlow says the same of a file that is damaged.
            return ReplicasDifferError(text) if is_difference(text) else None
        return (HorovodStalledError if "wait for each other" in text else HorovodInternalError)(
            text
        )
    if isinstance(error, RuntimeError | ValueError) and "delete" in text and error.__context__:
        return as_horovod_error(error.__context__)
    return None


def _cause_first(text: str) -> str:
    """The text of a failure in a graph, with the cause in front: TensorFlow puts dozens of lines of its own there."""
    if not text.startswith("Graph execution error"):
        return text
    head = text.partition("\n\t [[{{node")[0]
    # Behind the last line of where the graph was built.
    behind = head.rpartition('\n  File "')[2].partition("\n")[2]
    cause = _ROOTS.sub("", behind, count=1).strip()
    return f"{cause}\n{text}" if cause else text
