"""Names of collectives in traced programs: equal on all ranks, whatever order XLA runs them in.

A name is fixed when a function is traced, and used each time the compiled program runs. So a counter of all traces will
not do: a rank that traces once more than the others, for a last batch of another shape, would have other names from
then on. A name is made of the place of the call in the user's source instead, and of how many calls that place has made
in this trace.
"""

import os
import sys
import weakref
from collections import Counter
from types import FrameType
from typing import Any

import jax

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_IN_JAX = os.path.dirname(os.path.abspath(jax.__file__)) + os.sep

# Calls so far by label, of each program that is being traced.
_calls: "weakref.WeakKeyDictionary[Any, Counter[str]]" = weakref.WeakKeyDictionary()


def of_call(operands: tuple[Any, ...]) -> str:
    """The name of a call on these operands, by the line of the first caller outside of this package and of JAX.

    Only the file's own name is used: its folder may differ between hosts.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_HERE, _IN_JAX)):
        frame = frame.f_back
    if frame is None:
        return numbered("call", operands)
    return numbered(f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}", operands)


def numbered(label: str, operands: tuple[Any, ...]) -> str:
    """The label, with a number from its second use in the program that is being traced."""
    trace = _program(operands)
    if trace is None:
        return label
    calls = _calls.setdefault(trace, Counter())
    calls[label] += 1
    return label if calls[label] == 1 else f"{label}#{calls[label]}"


def is_traced(operands: tuple[Any, ...]) -> bool:
    """Whether one of them is not a value, but stands for one in a function that is being transformed."""
    return any(isinstance(operand, jax.core.Tracer) for operand in operands)


def is_shared(operands: tuple[Any, ...]) -> bool:
    """Whether an operand belongs to a function inside the program, which JAX traces once for all its uses.

    What `jax.checkpoint` computes a second time has the same operands: there no values can be mixed up.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith("ad_checkpoint.py"):
            return False
        frame = frame.f_back
    return any(
        isinstance(operand, jax.core.Tracer) and _recording(operand) is not _program((operand,))
        for operand in operands
    )


def _recording(operand: Any) -> Any:
    """The innermost trace that records a program."""
    trace = operand._trace
    while trace is not None and not hasattr(trace, "frame"):
        trace = getattr(trace, "parent_trace", None)
    return trace


def _program(operands: tuple[Any, ...]) -> Any:
    """The outermost trace of a program to which an operand belongs; None for values, and outside of `jit`."""
    for operand in operands:
        if isinstance(operand, jax.core.Tracer):
            program = None
            trace = operand._trace
            while trace is not None:
                if hasattr(
                    trace, "frame"
                ):  # one that records a program, not one that differentiates or batches
                    program = trace
                trace = getattr(trace, "parent_trace", None)
            return program
    return None
