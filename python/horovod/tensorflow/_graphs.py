"""Queries about graphs that TensorFlow traces for XLA, and the types of nodes that call functions."""

from typing import Any, Final

from tensorflow.python.ops import control_flow_util
from tensorflow.python.ops import control_flow_v2_func_graphs as _branches

CALLS: Final = {"PartitionedCall", "StatefulPartitionedCall"}
"""Types of nodes that call a function; XLA inlines it."""
BRANCHES: Final = {"If", "StatelessIf", "Case", "StatelessCase"}
"""Types of nodes that call one of several functions, selected by the first input."""
LOOPS: Final = {"While", "StatelessWhile"}


def is_compiled(graph: Any) -> bool:
    """Return whether a graph, or a graph that contains it, is traced for XLA."""
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))


def function_of(graph: Any) -> Any:
    """Return the graph of the function around a graph: the graph itself, unless it is a branch or part of a loop."""
    while isinstance(
        graph,
        _branches.CondBranchFuncGraph | _branches.WhileCondFuncGraph | _branches.WhileBodyFuncGraph,
    ):
        graph = graph.outer_graph
    return graph
