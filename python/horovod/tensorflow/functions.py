"""Broadcasts and gathers variables and Python objects between ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from horovod.common import _objects
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.tensorflow import mpi_ops
from horovod.tensorflow._autograph import unconverted
from horovod.tensorflow._variable_values import broadcast_variable_values
from horovod.tensorflow._variables import tf_variable

__all__ = [
    "BroadcastGlobalVariablesHook",
    "allgather_object",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
]


@unconverted
def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Assign the root's values to the variables of every rank, usually after the first step or a loaded checkpoint.

    Parameters
    ----------
    variables
        Variables of TensorFlow or Keras, with numbers or bools of any shape. Their number, shapes, dtypes and order are
        equal on all ranks. Names do not matter.
    root_rank
        Global rank whose values are used.
    process_set
        The ranks that take part.
    inplace
        In graphs: whether to use `broadcast_`, device by device.

    Returns
    -------
    In a graph of TensorFlow 1 an operation to run. Otherwise None: in eager execution the variables are assigned when
    this returns; in a `tf.function` each call of the function assigns them.

    Raises
    ------
    ValueError
        The elements of a variable are not numbers.
    HorovodInternalError
        In eager execution: ranks disagree, or a rank was lost. In graphs the errors are those of `allreduce`.

    Examples
    --------
    >>> hvd.broadcast_variables(model.variables, root_rank=0)
    """
    tf_variables = [tf_variable(variable) for variable in variables]
    if tf.executing_eagerly():
        broadcast_variable_values(tf_variables, root_rank, "broadcast_variables", process_set)
        return None
    if inplace:
        return _to_run(_broadcast_in_place(tf_variables, root_rank, process_set))
    assigned = []
    for position, variable in enumerate(tf_variables):
        value = mpi_ops.broadcast(
            tf.convert_to_tensor(variable),
            root_rank,
            name=f"broadcast_variables_{position}",
            process_set=process_set,
        )
        assigned.append(variable.assign(value))
    return _to_run(assigned)


def _to_run(assigned: Sequence[Any]) -> Any:
    """Return the operation to run in a graph; None in a function, which runs assignments without a fetch."""
    return None if tf.inside_function() else tf.group(*assigned)


def _broadcast_in_place(
    variables: Sequence[Any], root_rank: int, process_set: ProcessSet
) -> list[Any]:
    by_device: dict[str, list[Any]] = {}
    for variable in variables:
        by_device.setdefault(variable.device, []).append(variable)
    results: list[Any] = []
    for device, those in by_device.items():
        with tf.device(device or None):
            results += mpi_ops.broadcast_(those, root_rank, process_set=process_set)
    return results


def broadcast_global_variables(root_rank: int) -> Any:
    """Return the operation that assigns the root's values to all global variables of the default graph.

    Raises
    ------
    RuntimeError
        TensorFlow executes eagerly, so there is no graph.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "hvd.broadcast_global_variables() does not support eager execution. Please use "
            "`hvd.broadcast_variables(<model/optimizer variables>)` instead."
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Assigns the root's values to all global variables after a session is created.

    Pass the hook to `tf.compat.v1.train.MonitoredTrainingSession(hooks=[...])` on every rank.

    Parameters
    ----------
    root_rank
        Rank whose values are used.
    device
        Device on which the operations are placed; TensorFlow chooses if empty.

    Examples
    --------
    >>> hooks = [hvd.BroadcastGlobalVariablesHook(0)]
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.bcast_op: Any = None

    def begin(self) -> None:
        """Add the operation to the graph, once."""
        if self.bcast_op is None or self.bcast_op.graph != tf.compat.v1.get_default_graph():
            with tf.device(self.device or None):
                self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Run the operation."""
        del coord
        session.run(self.bcast_op)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root's object on every rank. It is pickled with cloudpickle and may have any size.

    The call sends the object immediately and adds nothing to a graph; `session` is accepted without effect. The other
    arguments and the errors are those of `horovod.torch.broadcast_object`.
    """
    del session
    return _objects.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Return `f(obj)`, which is `broadcast_object` with these arguments; nothing is added to a graph."""

    def broadcast(obj: Any) -> Any:
        return broadcast_object(obj, root_rank, session, name, process_set)

    return broadcast


def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return the list of all ranks' objects, in the order of ranks, pickled with cloudpickle.

    `session` is accepted without effect, as in `broadcast_object`. This rank's entry of the result is a copy too.
    """
    del session
    return _objects.allgather_object(obj, name, process_set)
