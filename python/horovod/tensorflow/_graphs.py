"""Graphs of functions that TensorFlow traces for XLA, and the nodes that call other functions."""

from typing import Any, Final

from tensorflow.python.ops import control_flow_util
from tensorflow.python.ops import control_flow_v2_func_graphs as _branches

CALLS: Final = {"PartitionedCall", "StatefulPartitionedCall"}
"""Types of nodes that call a function, which XLA puts in their place."""
BRANCHES: Final = {"If", "StatelessIf", "Case", "StatelessCase"}
"""Types of nodes that call one of several functions, as the first input says."""
LOOPS: Final = {"While", "StatelessWhile"}


def is_compiled(graph: Any) -> bool:
    """Whether a graph is traced for XLA, at any depth of nesting."""
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))


def function_of(graph: Any) -> Any:
    """The graph of the function that a graph is in: itself, unless it is a branch or the body of a loop."""
    while isinstance(
        graph,
        _branches.CondBranchFuncGraph | _branches.WhileCondFuncGraph | _branches.WhileBodyFuncGraph,
    ):
        graph = graph.outer_graph
    return graph
