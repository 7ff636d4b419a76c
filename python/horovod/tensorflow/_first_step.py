"""Reports checksums of variables before an early reduction of their gradients, once scripts have broadcast them."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from itertools import islice
from typing import Any

import tensorflow as tf

from horovod import _core
from horovod.common import _replicas
from horovod.common._dtypes import CODES
from horovod.common.process_sets import ProcessSet
from horovod.tensorflow import _xla
from horovod.tensorflow._variables import tf_variable

AFTER = 15
"""Reductions before the report. Scripts broadcast after the first step, and that step may make several reductions."""

_ADVICE = "Call hvd.broadcast_variables(model.variables, {}) after the first step at the latest."
# Most variables that a TensorFlow function reads for the report. Each adds a fraction of a microsecond to every step.
_IN_FUNCTIONS_MAX = 16
# Most sets of variables that have the same first variable; steps of further sets are not counted.
_SETS_MAX = 16
_SETS = "_hvd_first_steps"
_HOST = "/cpu:0"


class _Readable:
    """Reads TensorFlow variables outside of functions."""

    def shape_of(self, tensor: Any) -> _replicas.Shape:
        dtype = tensor.dtype.base_dtype
        return dtype.name, tuple(tensor.shape), dtype.size

    def checksum(self, tensor: Any, parts: Sequence[slice]) -> int:
        return _replicas.checksum_of([piece.numpy() for piece in _pieces(tensor, parts)])


class _FirstStep(_replicas.FirstStep):
    """Counts the steps of one set of variables until their report.

    TensorFlow functions count the steps in a resource that they find by its name, because a function that captured a
    variable could not be saved. The resource is deleted at the report. A process that loads a saved function does not
    have the resource, so the loaded function counts nothing.
    """

    _shared_name = ""

    def __init__(self, names: Sequence[str], process_set: ProcessSet, after: int) -> None:
        self._names = names
        super().__init__(process_set, after)

    def _hvd_forget_job(self) -> None:
        super()._hvd_forget_job()
        self._count_on()

    def _hvd_note_join(self) -> None:
        super()._hvd_note_join()
        self._count_on()

    def _count_on(self) -> None:
        """Set the counter of functions to the steps that are left; delete the counter if there are none."""
        if not self._shared_name:
            return
        with tf.init_scope(), tf.device(_HOST):
            counter = self._counter()
            if self._left:
                left = tf.constant(self._left, tf.int32)
                tf.raw_ops.AssignVariableOp(resource=counter, value=left)
            else:
                tf.raw_ops.DestroyResourceOp(resource=counter, ignore_lookup_error=True)

    def _counter(self) -> Any:
        return tf.raw_ops.VarHandleOp(dtype=tf.int32, shape=[], shared_name=self._shared_name)

    def report(self, variables: Sequence[Any]) -> None:
        """Report the variables from outside of functions."""
        self._report(list(zip(self._names, variables, strict=True)), _Readable())

    def _report(self, named: Sequence[tuple[str, Any]], arrays: _replicas.Readable[Any]) -> None:
        advice = _ADVICE.format(_replicas.arguments(self._process_set))
        _replicas.report(named, arrays, self._process_set, advice)

    def count_in_graph(self, variables: Sequence[Any]) -> None:
        """Add operations to a graph that count the steps, and report the variables in the last counted step."""
        if not self._shared_name:
            # The name is unique among processes: another process may load a saved function.
            self._shared_name = f"hvd_first_step_{uuid.uuid4().hex}"
            self._count_on()

        def report() -> Any:
            tf.raw_ops.DestroyResourceOp(resource=counter)
            return self._report_in_graph(variables[:_IN_FUNCTIONS_MAX])

        def count() -> Any:
            with tf.device(_HOST):
                tf.raw_ops.AssignSubVariableOp(resource=counter, value=1)
                left = tf.raw_ops.ReadVariableOp(resource=counter, dtype=tf.int32)
                return tf.cond(tf.equal(left, 0), report, _nothing)

        with tf.device(_HOST):
            counter = self._counter()
            tf.cond(tf.raw_ops.VarIsInitializedOp(resource=counter), count, _nothing)

    def _report_in_graph(self, variables: Sequence[Any]) -> Any:
        shapes = [_Readable().shape_of(variable) for variable in variables]
        parts = _replicas.parts_of(shapes)
        counts = [len(cut) for cut in parts]
        # Read on the devices of the variables.
        with tf.device(None):
            read = [_pieces(variable, cut) for variable, cut in zip(variables, parts, strict=True)]

        def report(*pieces: Any) -> Any:
            self._left = 1
            if self.is_due():
                rest = iter(pieces)
                sums = [_replicas.checksum_of(list(islice(rest, count))) for count in counts]
                noted = list(zip(shapes, sums, strict=True))
                self._report(list(zip(self._names, noted, strict=False)), _replicas.Noted())
            return 0

        return tf.numpy_function(report, [piece for pieces in read for piece in pieces], tf.int64)


def _pieces(variable: Any, parts: Sequence[slice]) -> list[Any]:
    """Return these parts of the flattened variable as tensors on its device; a single part keeps the shape."""
    value = variable.read_value()
    if len(parts) == 1:
        return [value]
    flat = tf.reshape(value, [-1])
    return [flat[part] for part in parts]


def _nothing() -> Any:
    return tf.constant(0, tf.int64)


class _Sets:
    """Step counters of all sets of variables with the same first variable; this object is its attribute."""

    def __init__(self) -> None:
        self.by_variables: dict[Any, _FirstStep] = {}
        self.by_sources: dict[Any, _FirstStep] = {}


def note_step(sources: Sequence[Any], process_set: ProcessSet, after: int = AFTER) -> None:
    """Count a reduction of gradients of these sources. The caller calls this before the sources are updated.

    After `after` calls with the same variables, the next call reports the variables.

    Functions that XLA compiles, loops in functions, and graphs of TensorFlow 1 style are not counted.
    """
    is_eager = tf.executing_eagerly()
    known = (process_set.process_set_id, *map(id, sources))
    # Most steps return here: the report was made.
    sets = _sets_of(sources[0]) if is_eager and sources else None
    state = sets.by_sources.get(known) if sets else None
    if state and not state.is_open:
        return
    tf_variables = [tf_variable(source) for source in sources if hasattr(source, "shape")]
    variables = [variable for variable in tf_variables if _is_readable(variable)]
    if not variables or not tf.compat.v1.executing_eagerly_outside_functions():
        return
    state = _state_of(variables, process_set, after)
    if state is None:
        return
    if is_eager:
        if state.is_due():
            state.report(variables)
        # Other sources may be new objects in each step.
        if len(variables) == len(sources):
            sets = variables[0].__dict__[_SETS]
            if len(sets.by_sources) >= _SETS_MAX:
                sets.by_sources.clear()
            sets.by_sources[known] = state
        return
    is_checked = _core.is_elastic() or _core.checks_replicas(process_set.process_set_id)
    if is_checked and not _xla.is_compiling() and not _is_in_loop():
        state.count_in_graph(variables)


def _sets_of(source: Any) -> _Sets | None:
    """Return the counters that `note_step` stored on the source's variable, or None."""
    return getattr(tf_variable(source), "__dict__", {}).get(_SETS)


def _state_of(variables: Sequence[Any], process_set: ProcessSet, after: int) -> _FirstStep | None:
    """Return the step counter of a set of variables; None if there are too many sets."""
    sets: _Sets = variables[0].__dict__.setdefault(_SETS, _Sets())
    states = sets.by_variables
    key = (process_set.process_set_id, *map(id, variables[1:]))
    if key not in states and len(states) < _SETS_MAX:
        states[key] = _FirstStep([variable.name for variable in variables], process_set, after)
    return states.get(key)


def _is_readable(source: Any) -> bool:
    return (
        isinstance(source, tf.Variable)
        and source.dtype.base_dtype.name in CODES
        and source.shape.is_fully_defined()
    )


def _is_in_loop() -> bool:
    """Return whether the graph is the body of a loop, whose steps may all run before the script broadcasts."""
    graph: Any = tf.compat.v1.get_default_graph()
    while graph is not None:
        if type(graph).__name__ == "WhileBodyFuncGraph":
            return True
        graph = getattr(graph, "outer_graph", None)
    return False
