"""Recognises failures of collective operations in exceptions of frameworks."""

from __future__ import annotations

import re

from horovod.common._replicas import is_difference
from horovod.common.exceptions import (
    HorovodInternalError,
    HorovodStalledError,
    ReplicasDifferError,
)

# Text that precedes the cause if several operations have failed.
_ROOTS = re.compile(r"\s*\d+ root error\(s\) found\.\s+\(0\) [A-Z_ ]+:\s*")
_KINDS = (HorovodStalledError, ReplicasDifferError, HorovodInternalError)


def as_horovod_error(error: BaseException) -> HorovodInternalError | ReplicasDifferError | None:
    """Return the failure of a collective operation that caused an exception; None if the cause is another one.

    TensorFlow's exceptions name one of our operations. XLA's exceptions contain the name of our exception before its
    text. After a failed jitted step, Keras on JAX accesses arrays that were donated to the step, which raises another
    exception; its context is then examined.
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
            # TensorFlow uses this class also for damaged files.
            return ReplicasDifferError(text) if is_difference(text) else None
        return (HorovodStalledError if "wait for each other" in text else HorovodInternalError)(
            text
        )
    if isinstance(error, RuntimeError | ValueError) and "delete" in text and error.__context__:
        return as_horovod_error(error.__context__)
    return None


def _cause_first(text: str) -> str:
    """Return the text of a failure in a graph with the cause first, before TensorFlow's dozens of lines."""
    if not text.startswith("Graph execution error"):
        return text
    head = text.partition("\n\t [[{{node")[0]
    # The cause follows the last line of the stack at which the graph was built.
    behind = head.rpartition('\n  File "')[2].partition("\n")[2]
    cause = _ROOTS.sub("", behind, count=1).strip()
    return f"{cause}\n{text}" if cause else text
