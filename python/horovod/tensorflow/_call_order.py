"""Orders the calls in a program that XLA compiles: each call has an operand that depends on the call before.

On a GPU a call waits for the other ranks before the next one begins. All ranks must therefore make a program's calls
in one order. The same is true on the CPU if XLA runs the parts of a program one after the other, as in short programs
or with small tensors only. XLA orders independent operations in each process separately, by other computations of the
program, by its assignments, and by measured kernels. Each call therefore has an additional operand, a result of the
call before, which the core ignores.

The call before may be inside a function, branch or loop. The operand is then a result of that node that is computed
from a call's result, or a variable to which such a value is assigned. The first call inside a function depends on the
call before the node that runs the function.
"""

import functools
import weakref
from collections.abc import Iterable
from typing import Any, Final

import tensorflow as tf
from tensorflow.python.eager import context as _context
from tensorflow.python.framework import ops as _ops
from tensorflow.python.ops import handle_data_util as _handles

from horovod.tensorflow._graphs import BRANCHES, CALLS, LOOPS, function_of

# Stands for a call of the core in a set of argument numbers.
_CALL: Final = -1

Needs = frozenset[int]

# For each graph the number of operations scanned so far, and the name of a tensor that depends on the last call.
_last: "weakref.WeakKeyDictionary[Any, tuple[int, str | None]]" = weakref.WeakKeyDictionary()


def before() -> Any:
    """Return a tensor that depends on the last call so far in this function; None if there is no such call.

    The tensor has at least one element, unless the results of the call have none.
    """
    graph = _ops.get_default_graph()
    while True:
        tensor = _last_of(graph)
        if tensor is not None or graph is function_of(graph):
            return tensor
        graph = graph.outer_graph


def note(results: list[Any]) -> None:
    """Record the results of the call that was just added to the graph."""
    graph = _ops.get_default_graph()
    _last[graph] = len(graph.get_operations()), _smallest(results).name


def zero_after(tensor: Any) -> Any:
    """Return 0 as an int64 scalar that XLA computes from the tensor; a constant if the tensor has no elements."""
    if not tensor.shape.num_elements():
        return tf.constant(0, tf.int64)
    first = tf.reshape(tensor, [-1])[0]
    if first.dtype == tf.bool or first.dtype.is_floating:
        byte = tf.cast(tf.cast(first, tf.bool), tf.uint8)
    else:
        byte = tf.cast(first, tf.uint8)
    # XLA does not analyse the range of integers, so it does not replace this by a constant.
    return tf.bitwise.right_shift(tf.cast(byte, tf.int64), tf.constant(8, tf.int64))


def _last_of(graph: Any) -> Any:
    seen, name = _last.get(graph, (0, None))
    operations = graph.get_operations()
    for operation in operations[seen:]:
        tensor = _needing(operation)
        if tensor is not None:
            name = tensor.name
    _last[graph] = len(operations), name
    return None if name is None else graph.get_tensor_by_name(name)


def _needing(operation: Any) -> Any:
    """Return a tensor that depends on the calls inside of an operation.

    Return None if there are no calls, or nothing is computed from their results.
    """
    if operation.type not in CALLS | BRANCHES | LOOPS:
        return None
    outputs, written = _needs_of_node(operation.node_def)
    usable = [
        tensor
        for tensor, needs in zip(operation.outputs, outputs, strict=True)
        if _CALL in needs and tensor.shape.num_elements() and _is_array(tensor.dtype)
    ]
    if usable:
        return _smallest(usable)
    for index in sorted(written):
        resource = operation.inputs[index]
        data = _handles.get_resource_handle_data(resource)
        kinds = [tf.dtypes.as_dtype(kind.dtype) for kind in data.shape_and_type]
        if len(kinds) == 1 and _is_array(kinds[0]):
            with operation.graph.as_default():
                value = tf.raw_ops.ReadVariableOp(resource=resource, dtype=kinds[0])
                # One element only: a reference to the whole value would prevent updates in place.
                return tf.reshape(value, [-1])[:1]
    return None


def _is_array(dtype: Any) -> bool:
    return bool(dtype.is_floating or dtype.is_integer or dtype.is_bool)


def _smallest(tensors: list[Any]) -> Any:
    """Return the smallest tensor that has elements: it uses the least memory, and XLA removes empty tensors."""

    def size(tensor: Any) -> tuple[bool, int]:
        elements = tensor.shape.num_elements()
        return elements == 0, elements

    return min(tensors, key=size)


@functools.lru_cache(maxsize=4096)
def _needs(function: str) -> tuple[tuple[Needs, ...], Needs]:
    """Return the dependencies of each result of a function, as numbers of arguments or `_CALL`.

    The second value is the set of arguments that are variables to which values computed from a call are assigned.
    """
    definition = _context.context().get_function_def(function)
    arguments = {argument.name: i for i, argument in enumerate(definition.signature.input_arg)}
    results: dict[str, tuple[Needs, ...]] = {}

    def of(reference: str) -> Needs:
        name, _, rest = reference.partition(":")
        if name in arguments:
            return frozenset((arguments[name],))
        its = results.get(name, ())
        if len(its) == 1:
            return its[0]
        at = int(rest.rpartition(":")[2] or 0)
        return its[at] if at < len(its) else frozenset()

    written: set[int] = set()
    for node in definition.node_def:
        data = [of(reference) for reference in node.input if not reference.startswith("^")]
        if node.op not in CALLS | BRANCHES | LOOPS:
            its = _union(data)
            if node.op == "XlaCallModule" and b"@horovod_xla_" in node.attr["module"].s:
                its |= {_CALL}
            if _CALL in its and node.op != "ReadVariableOp":
                written |= {
                    arguments[reference] for reference in node.input if reference in arguments
                }
            results[node.name] = (its,)
            continue
        outputs, inner = _needs_of_node(node)
        results[node.name] = tuple(
            _union([{_CALL} & its, *(data[i] for i in its if i != _CALL)]) for its in outputs
        )
        written |= {i for at in inner for i in data[at] if i != _CALL}
    resources = {
        i
        for i, argument in enumerate(definition.signature.input_arg)
        if argument.type == tf.resource.as_datatype_enum
    }
    outputs = tuple(of(definition.ret[arg.name]) for arg in definition.signature.output_arg)
    return outputs, frozenset(written & resources)


def _needs_of_node(node: Any) -> tuple[tuple[Needs, ...], Needs]:
    """Return the dependencies of a node that runs functions, in terms of its inputs; see `_needs`."""
    functions = [_needs(name) for name in _functions_of(node)]
    first = 1 if node.op in BRANCHES else 0
    written = _union({first + i for i in its} for _, its in functions)
    if node.op in CALLS:
        return functions[0][0], written
    # All outputs of a branch or a loop are available at its end, and depend on all inputs.
    inputs = frozenset(i for i, name in enumerate(node.input) if not name.startswith("^"))
    outputs = zip(*(its for its, _ in functions), strict=True)
    return tuple(inputs | ({_CALL} & _union(its)) for its in outputs), written


def _functions_of(node: Any) -> list[str]:
    """Return the functions of a node. The node runs one of them, loops repeatedly, without the condition as input."""
    if node.op in LOOPS:
        return [node.attr["body"].func.name]
    if node.op in CALLS:
        return [node.attr["f"].func.name]
    if "branches" in node.attr:
        return [branch.name for branch in node.attr["branches"].list.func]
    return [node.attr[key].func.name for key in ("then_branch", "else_branch")]


def _union(sets: Iterable[Iterable[int]]) -> Needs:
    return frozenset().union(*sets)
