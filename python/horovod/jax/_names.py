"""Names of collectives in traced programs: equal on all ranks, whatever order XLA runs them in.

A name is fixed when a function is traced, and used each time the compiled program runs. A counter of all traces will
not do. A rank that traces once more than the others, for a last batch of another shape, would have other names from
then on. A name is made of the place of the call in the user's source instead, and of how many calls that place has made
in this trace.
"""

import functools
import os
import sys
import weakref
from collections import Counter
from types import FrameType
from typing import Any

import jax
from jax.extend.core import Primitive

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


def is_inside() -> bool:
    """Whether a call made now becomes part of a program, even if its operands are values."""
    return bool(_recording(_current_trace.bind()))  # type: ignore[no-untyped-call]


def is_recomputed() -> bool:
    """Whether the caller is in a function of `jax.checkpoint`.

    A program may have the call at two places then. Their values are the same, so they cannot be mixed up.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith("ad_checkpoint.py"):
            return True
        frame = frame.f_back
    return False


def is_nested() -> bool:
    """Whether what is called now becomes part of a function inside a program: of a branch, a loop, an inner `jit`."""
    return _is_inside_program(_current_trace.bind())  # type: ignore[no-untyped-call]


class _CurrentTrace(Primitive):
    """Not part of any program: its value is the trace that would have recorded it."""

    def bind_with_trace(self, trace: Any, *_: Any) -> Any:
        """Where JAX asks the trace to record the primitive."""
        return trace


_current_trace = _CurrentTrace("horovod_current_trace")


def _recording(trace: Any) -> list[Any]:
    """The traces that record programs, not those that differentiate or batch, from this one on outwards."""
    traces = []
    while trace is not None:
        if hasattr(trace, "frame"):
            traces.append(trace)
        trace = getattr(trace, "parent_trace", None)
    return traces


def _is_inside_program(trace: Any) -> bool:
    """Whether a trace records a function inside a program, or transforms what such a trace records."""
    traces = _recording(trace)
    # The derivative that a user gave to a function has a trace that knows of no other one.
    return len(traces) > 1 or any(getattr(trace, "parent_trace", trace) is None for trace in traces)


def _program(operands: tuple[Any, ...]) -> Any:
    """The outermost trace of a program to which an operand belongs; None for values, and outside of `jit`."""
    for operand in operands:
        if isinstance(operand, jax.core.Tracer):
            _check_jax()
            return next(reversed(_recording(operand._trace)), None)
    return None


@functools.cache
def _check_jax() -> None:
    """Test the private attributes of JAX that names of calls depend on: without them two calls would have one name.

    Raises
    ------
    ImportError
        This version of JAX does not have them.
    """
    recording: list[int] = []

    def function(x: Any) -> Any:
        recording.append(len(_recording(x._trace)))
        return x * x

    jax.make_jaxpr(jax.grad(function))(1.0)
    # More than one if this runs inside of another program, whose trace is then the outermost.
    if len(recording) != 1 or recording[0] < 1:
        raise ImportError(
            f"horovod.jax does not know how JAX {jax.__version__} traces programs, so it cannot name the operations in "
            "them. Use JAX 0.10, with which the tests run."
        )
