"""Reports variables when their gradients are reduced for the second time, as scripts broadcast after the first step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod import _core
from horovod.common import _replicas
from horovod.common._dtypes import CODES
from horovod.common.process_sets import ProcessSet
from horovod.tensorflow import _xla
from horovod.tensorflow._variables import tf_variable

_ADVICE = "Call hvd.broadcast_variables(model.variables, {}) after the first step at the latest."
# Variables that a function of TensorFlow reads: each costs a step of it a fraction of a microsecond for ever.
_IN_FUNCTIONS_MAX = 16
_STATES = "_hvd_first_steps"


class _Readable:
    """Arrays of NumPy."""

    def shape_of(self, tensor: Any) -> tuple[str, Sequence[int], int]:
        return tensor.dtype.name, tensor.shape, tensor.dtype.itemsize

    def checksum(self, tensor: Any, parts: Sequence[slice]) -> int:
        return _replicas.checksum_of_array(tensor, parts)


class _FirstStep(_replicas.FirstStep):
    """Of some variables; functions of TensorFlow count the steps in a variable."""

    left: Any = None

    def __init__(self, names: Sequence[str], process_set: ProcessSet, after: int) -> None:
        self._names = names
        super().__init__(process_set, after)

    def _hvd_forget_job(self) -> None:
        super()._hvd_forget_job()
        if self.left is not None:
            self.left.assign(self._left)

    def report(self, *values: Any) -> None:
        """Report the values of the variables."""
        named = list(zip(self._names, values, strict=False))
        advice = _ADVICE.format(_replicas.arguments(self._process_set))
        _replicas.report(named, _Readable(), self._process_set, advice)

    def report_if_checked(self, *values: Any) -> Any:
        """As a function of a graph, which did the counting."""
        self._left = 1
        if self.is_due():
            self.report(*values)
        return 0

    def count_in_graph(self, variables: Sequence[Any]) -> None:
        """Add to a graph what counts the steps, and reports in the last of them."""
        if self.left is None:
            with tf.init_scope(), tf.device("/cpu:0"):
                self.left = tf.Variable(self._left, dtype=tf.int32, trainable=False)
        left = self.left

        def report() -> Any:
            values = [variable.read_value() for variable in variables[:_IN_FUNCTIONS_MAX]]
            return tf.numpy_function(self.report_if_checked, values, tf.int64)

        def count() -> Any:
            with tf.device("/cpu:0"):
                left.assign_sub(1, read_value=False)
                return tf.cond(tf.equal(left.read_value(), 0), report, _nothing)

        with tf.device("/cpu:0"):
            tf.cond(left.read_value() > 0, count, _nothing)


def _nothing() -> Any:
    return tf.constant(0, tf.int64)


def note_step(sources: Sequence[Any], process_set: ProcessSet, after: int = 1) -> None:
    """Note that gradients of these sources are about to be reduced, which comes before their update.

    They are reported when that has happened `after` times before.

    Not in functions that XLA compiles, nor in loops of functions, nor in graphs of TensorFlow 1 style.
    """
    held = [tf_variable(source) for source in sources if hasattr(source, "shape")]
    variables = [variable for variable in held if _is_readable(variable)]
    if not variables or not tf.compat.v1.executing_eagerly_outside_functions():
        return
    states: dict[Any, _FirstStep] = variables[0].__dict__.setdefault(_STATES, {})
    key = (process_set.process_set_id, *map(id, variables[1:]))
    if key not in states:
        states[key] = _FirstStep([variable.name for variable in variables], process_set, after)
    state = states[key]
    if tf.executing_eagerly():
        if state.is_due():
            state.report(*(variable.numpy() for variable in variables))
        return
    is_checked = _core.is_elastic() or _core.checks_replicas(process_set.process_set_id)
    if is_checked and not _xla.is_compiling() and not _is_in_loop():
        state.count_in_graph(variables)


def _is_readable(source: Any) -> bool:
    return isinstance(source, tf.Variable) and source.dtype.base_dtype.name in CODES


def _is_in_loop() -> bool:
    """Whether a step is one of several that a function makes, after all of which a script may broadcast."""
    graph: Any = tf.compat.v1.get_default_graph()
    while graph is not None:
        if type(graph).__name__ == "WhileBodyFuncGraph":
            return True
        graph = getattr(graph, "outer_graph", None)
    return False
