"""Order of the calls in a program that XLA compiles: of each graph, a tensor that needs the graph's last call.

On a GPU a call waits for the other ranks before the next one begins, so all ranks must make a program's calls in one
order. So they must on the CPU where XLA runs a program's parts one after the other: short ones, and those with small
tensors only. XLA orders what is independent by itself, for each process anew: by what else the program computes, by
which variables it assigns, by what it has measured of kernels. So each call has one operand more, for which the core
has no use: a result of the call before it.

The call before may be in a function that the graph calls, a branch or a loop; then it is a result of that which is
computed from a call's, or a variable that is assigned such a value there. A call in such a function needs what comes
before it where the function stands.
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

# In the place of an argument's number: a call of the core.
_CALL: Final = -1

Needs = frozenset[int]

# How many operations of each graph have been looked at, and the name of a tensor that needs the last call among them.
_last: "weakref.WeakKeyDictionary[Any, tuple[int, str | None]]" = weakref.WeakKeyDictionary()


def before() -> Any:
    """A tensor that needs the call before one that is made now; None: there is none in this function.

    It has at least one element, but for results of calls that have none.
    """
    graph = _ops.get_default_graph()
    while True:
        tensor = _last_of(graph)
        if tensor is not None or graph is function_of(graph):
            return tensor
        graph = graph.outer_graph


def note(results: list[Any]) -> None:
    """The call that has been made last has these results."""
    graph = _ops.get_default_graph()
    _last[graph] = len(graph.get_operations()), _smallest(results).name


def zero_after(tensor: Any) -> Any:
    """The number 0, an int64 scalar, for which XLA needs the tensor, if that has elements."""
    if not tensor.shape.num_elements():
        return tf.constant(0, tf.int64)
    first = tf.reshape(tensor, [-1])[0]
    if first.dtype == tf.bool or first.dtype.is_floating:
        byte = tf.cast(tf.cast(first, tf.bool), tf.uint8)
    else:
        byte = tf.cast(first, tf.uint8)
    # XLA does not ask which values an integer can have.
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
    """A tensor that needs the calls inside of an operation; None: there are none, or nothing is computed from them."""
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
                # Not the variable itself, which could not be updated in place then.
                return tf.reshape(value, [-1])[:1]
    return None


def _is_array(dtype: Any) -> bool:
    return bool(dtype.is_floating or dtype.is_integer or dtype.is_bool)


def _smallest(tensors: list[Any]) -> Any:
    """That keeps the least memory; but XLA takes tensors without elements out of a program."""

    def size(tensor: Any) -> tuple[bool, int]:
        elements = tensor.shape.num_elements()
        return elements == 0, elements

    return min(tensors, key=size)


@functools.lru_cache(maxsize=4096)
def _needs(function: str) -> tuple[tuple[Needs, ...], Needs]:
    """For each result of a function its inputs: numbers of arguments, or `_CALL`.

    Also the arguments that are variables to which values computed from a call are assigned.
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
    """As `_needs`, of a node that runs functions: what its outputs need of its inputs, and which it assigns."""
    functions = [_needs(name) for name in _functions_of(node)]
    first = 1 if node.op in BRANCHES else 0
    written = _union({first + i for i in its} for _, its in functions)
    if node.op in CALLS:
        return functions[0][0], written
    # A branch or a loop ends as a whole, and needs all that goes in.
    inputs = frozenset(i for i, name in enumerate(node.input) if not name.startswith("^"))
    outputs = zip(*(its for its, _ in functions), strict=True)
    return tuple(inputs | ({_CALL} & _union(its)) for its in outputs), written


def _functions_of(node: Any) -> list[str]:
    """Of which it runs one, perhaps again and again, with its inputs but the condition."""
    if node.op in LOOPS:
        return [node.attr["body"].func.name]
    if node.op in CALLS:
        return [node.attr["f"].func.name]
    if "branches" in node.attr:
        return [branch.name for branch in node.attr["branches"].list.func]
    return [node.attr[key].func.name for key in ("then_branch", "else_branch")]


def _union(sets: Iterable[Iterable[int]]) -> Needs:
    return frozenset().union(*sets)
