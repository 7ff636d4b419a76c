"""Numbers the call sites of functions inside a compiled program, to distinguish operations of the same name.

TensorFlow traces a `tf.function` once and may call it at several sites of a program. An operation of the trace has the
same name at all sites. XLA may run the sites in a different order on each rank, and ranks would then pair operands of
different sites. Each function therefore has an additional captured input, whose value is made at the call site. The
value differs between sites, and is equal on all ranks that trace the same program.
"""

import weakref
from collections.abc import Callable
from typing import Any, Final

import tensorflow as tf
from tensorflow.core.function import trace_type
from tensorflow.python.framework import func_graph as _func_graph
from tensorflow.python.framework import ops as _ops

from horovod.tensorflow import _call_order
from horovod.tensorflow._graphs import BRANCHES, CALLS, LOOPS, function_of, is_compiled

_KEY: Final = "horovod call site"
# The numbers of nested calls are digits in this base of a 64-bit integer that wraps around.
_BASE: Final = 1_000_003
_NODES: Final = CALLS | BRANCHES | LOOPS
# For each gradient graph with operations, the call-site tensor of the differentiated function.
_gradients: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()


def current() -> Any:
    """Return the call site of the traced function as an int64 scalar, 0 for the outermost function of a program.

    Return None if the graph is not a function.

    Raises
    ------
    NotImplementedError
        The graph is the gradient of an inner function, whose call site TensorFlow does not provide.
    """
    function = function_of(_ops.get_default_graph())
    return _of(function) if isinstance(function, _func_graph.FuncGraph) else None


def note_gradient(site: Any) -> None:
    """Record `site` as the call site of the differentiated function, if the current function is a gradient."""
    function = function_of(_ops.get_default_graph())
    if site is not None and _is_gradient(function):
        _gradients[function] = site


def _is_gradient(function: Any) -> bool:
    """Return whether TensorFlow made this graph as the gradient of a function."""
    return str(getattr(function, "name", "")).startswith("__backward_")


def _of(function: Any) -> Any:
    captures = function.function_captures
    if _KEY in captures.by_ref_internal:
        return captures.by_ref_internal[_KEY]
    if _is_gradient(function):
        raise NotImplementedError(
            "Horovod inside jit_compile=True cannot be called by the gradient of a tf.function that is part of the "
            "compiled program: differentiate inside of that function, make it a plain Python function, or set "
            "jit_compile=False."
        )
    spec = trace_type.from_value(
        tf.TensorSpec((), tf.int64), trace_type.InternalTracingContext(True)
    )
    with function.as_default():
        placeholder = spec.placeholder_value(trace_type.InternalPlaceholderContext(function))
    captures.add_or_replace(
        key=_KEY,
        external=_caller_of(weakref.ref(function), spec),
        internal=placeholder,
        tracetype=spec,
        is_by_ref=True,
    )
    return placeholder


def _caller_of(function: Any, spec: Any) -> Callable[[], list[Any]]:
    """Return the function that computes the captured value; TensorFlow calls it at each call site."""

    def number() -> list[Any]:
        _refuse_repeated_gradients(function())
        caller = _ops.get_default_graph()
        if tf.executing_eagerly() or not is_compiled(caller):
            return [tf.constant(0, tf.int64)]
        site, factor, graph, calls = 0, 1, caller, None
        while calls is None:
            site += factor * (1 + sum(op.type in _NODES for op in graph.get_operations()))
            factor *= _BASE
            if not isinstance(graph, _func_graph.FuncGraph):
                # The graph of a session is not a function, so it has no call site of its own.
                calls = tf.constant(0, tf.int64)
            elif graph is function_of(graph):
                calls = _of(graph)
            graph = getattr(graph, "outer_graph", None)
        result = calls * _wrapped(factor) + _wrapped(site)
        before = _call_order.before()
        # This sum makes the function's first call, an operand of which is the number, depend on the call before.
        return [result if before is None else result + _call_order.zero_after(before)]

    number.output_spec = spec  # type: ignore[attr-defined]
    return number


def _wrapped(number: int) -> int:
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _refuse_repeated_gradients(graph: Any) -> None:
    """Check that each call in a graph is differentiated at most once: call sites of gradients cannot be distinguished.

    Raises
    ------
    NotImplementedError
        A persistent tape differentiates a call twice.
    """
    if graph is None or not _gradients:
        return
    sites = {}
    for gradient, site in _gradients.items():
        captured = gradient.function_captures.by_val_internal.get(id(site))
        inputs = [tensor is captured for tensor in gradient.inputs]
        if True in inputs:
            sites[f"__inference_{gradient.name}"] = inputs.index(True)
    seen = set()
    for op in graph.get_operations():
        if op.type not in CALLS:
            continue
        # TensorFlow adds a number to the graph's name.
        name = op.get_attr("f").name.rpartition("_")[0]
        if name not in sites:
            continue
        use = name, op.inputs[sites[name]].ref()
        if use in seen:
            raise NotImplementedError(
                "The gradient of a tf.function with Horovod's operations is taken twice inside jit_compile=True (by a "
                "persistent tape), where ranks could mix up the values of the two: make the tf.function a plain Python "
                "function, or set jit_compile=False."
            )
        seen.add(use)
