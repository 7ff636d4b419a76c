"""`hvd.elastic`: training that continues after ranks are lost, and hosts are removed or added."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import tensorflow as tf

from horovod.common import _consensus
from horovod.common import elastic as _loop
from horovod.common._gradient_sums import forget_gradients
from horovod.common._snapshot import MayWait
from horovod.common._state_handlers import (
    HandledState,
    HandlerRegistry,
    SnapshotHandler,
    StateHandler,
    refuse_other_shapes,
)
from horovod.common.api import init as init
from horovod.common.api import shutdown as shutdown
from horovod.common.elastic import ObjectState as ObjectState
from horovod.common.elastic import State as State
from horovod.tensorflow._errors import as_horovod_errors
from horovod.tensorflow._variable_values import (
    broadcast_variable_values,
    read_values,
    write_values,
)
from horovod.tensorflow._variables import is_keras_layer, is_keras_optimizer
from horovod.tensorflow.gradient_aggregation import AGGREGATING_COLLECTION

__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]

_S = TypeVar("_S", bound="State")
_P = ParamSpec("_P")
_T = TypeVar("_T")


def run(func: Callable[Concatenate[_S, _P], _T]) -> Callable[Concatenate[_S, _P], _T]:
    """Decorate the training function `func(state, ...)` so that it is called again when the job's members change.

    Before each call all ranks have the same state. After a rank was lost, that is the state of the last
    `state.commit()`; after a change of hosts, the current state. The function therefore has to continue from the
    position in its state. Failures of Horovod's operations inside TensorFlow are recognised; other errors end the
    process.

    Examples
    --------
    >>> @hvd.elastic.run
    ... def train(state):
    ...     for state.batch in range(state.batch, batches):
    ...         train_one_batch(state)
    ...         state.commit()
    >>> train(hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0))
    """

    @functools.wraps(func)
    def translated(state: _S, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        with as_horovod_errors():
            return func(state, *args, **kwargs)

    return _loop.run(translated)  # type: ignore[arg-type] # its first parameter has a name


class _OwnArrays:
    """Copies nothing, because `read_values` returns copies."""

    def copy(self, value: Any, reused: Any, name: str, may_wait: MayWait) -> tuple[Any, None]:
        del reused, name, may_wait
        return value, None


class VariablesHandler(SnapshotHandler):
    """Saves, restores and syncs a list of variables."""

    copies = _OwnArrays()

    def __init__(self, value: Any, session: Callable[[], Any]) -> None:
        self._session = session
        super().__init__(value)

    def variables(self) -> Sequence[Any]:
        """Return the variables that are saved and restored."""
        return list(self.value)

    def shared(self) -> Sequence[Any]:
        """Return the variables that are synced, and therefore equal on all ranks."""
        return self.variables()

    def state(self) -> list[Any]:
        """Return copies of all values."""
        return read_values(self.variables(), self._session())

    def load(self, state: Any) -> None:
        """Assign the saved values, and clear sums of gradients; variables made after the save are unchanged."""
        variables = self.variables()[: len(state)]
        write_values(variables, state, self._session())
        self.reset()

    def refuse_others(self, state: Any) -> None:
        """Raise ValueError for other numbers or shapes of variables, of which `load` would take the first ones."""
        refuse_other_shapes(state, self.state())

    def reset(self) -> None:
        """Set the sums of gradients in a graph to zero, because they may include gradients of lost ranks."""
        session = self._session()
        if session is None:
            return
        sums = session.graph.get_collection(AGGREGATING_COLLECTION)
        zeros = [np.zeros(total.shape.as_list(), total.dtype.as_numpy_dtype) for total in sums]
        write_values(sums, zeros, session)

    def sync(self) -> None:
        """Broadcast the root's values to all ranks."""
        shared = self.shared()
        counts = [count for (count,) in _consensus.everyones([len(shared)], "elastic.variables")]
        if len(set(counts)) > 1:
            raise ValueError(
                f"The elastic state's {type(self.value).__name__} has different numbers of variables on the ranks: "
                f"{counts}. Build models and optimizers on every rank before the state is made: "
                "model.build(input_shape), optimizer.build(model.trainable_variables)."
            )
        broadcast_variable_values(
            shared, self.root_rank, "elastic.variables", session=self._session()
        )
        self.reset()


class ModelStateHandler(VariablesHandler):
    """Saves, restores and syncs a Keras model or layer."""

    def variables(self) -> Sequence[Any]:
        """Return the weights, and the states of random generators."""
        return list(self.value.variables)

    def shared(self) -> Sequence[Any]:
        """Return the weights; states of random generators differ, because every rank draws its own numbers."""
        return list(self.value.weights)


class OptimizerStateHandler(VariablesHandler):
    """Saves, restores and syncs a Keras optimizer, distributed or not."""

    def variables(self) -> Sequence[Any]:
        """Return all variables of the optimizer."""
        variables = self.value.variables
        return list(variables() if callable(variables) else variables)

    def reset(self) -> None:
        """Discard sums of gradients, because they may include gradients of lost ranks."""
        super().reset()
        forget_gradients(self.value)

    def build(self, model: Any) -> None:
        """Make the optimizer create its variables for the model, if it has not."""
        optimizer, trainable = self.value, model.trainable_variables
        if hasattr(optimizer, "_create_all_weights"):  # of Keras 2, legacy
            optimizer._create_all_weights(trainable)
        elif not getattr(optimizer, "built", getattr(optimizer, "_built", False)):
            optimizer.build(trainable)


class _Variables(list[Any]):
    """List of variables that is one value of a state."""


class _Registry(HandlerRegistry):
    """Returns handlers of variables and of Keras objects of both generations, without importing Keras."""

    def __init__(self, session: Callable[[], Any]) -> None:
        super().__init__([])
        self._session = session

    def handler_of(self, value: Any) -> StateHandler | None:
        if isinstance(value, _Variables):
            return VariablesHandler(value, self._session)
        if is_keras_layer(value):
            return ModelStateHandler(value, self._session)
        if is_keras_optimizer(value):
            return OptimizerStateHandler(value, self._session)
        return super().handler_of(value)


class TensorFlowKerasState(HandledState):
    """State of training with a Keras model, with `fit` or in a custom loop.

    Snapshots are copies in host memory.

    Parameters
    ----------
    model
        A model that is built.
    optimizer
        Default: the model's optimizer. If the optimizer has no variables yet, the first sync makes it create them for
        the model.
    backend
        Keras's backend module, for graphs of TensorFlow 1: its session contains the values.
    kwargs
        Names and initial values of attributes. Keras models and optimizers among them are saved and synced by their
        variables; everything else is a plain object as in `ObjectState`.

    Raises
    ------
    ValueError
        The model has no variables yet.

    Examples
    --------
    >>> state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0, epoch=0)
    """

    def __init__(
        self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any
    ) -> None:
        if not getattr(model, "built", True):
            raise ValueError("Model must be built first. Run `model.build(input_shape)`.")
        optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer

        def session() -> Any:
            return None if backend is None or tf.executing_eagerly() else backend.get_session()

        self._handler_registry = _Registry(session)
        super().__init__(**kwargs, model=model, optimizer=optimizer)

    def sync(self) -> None:
        """Broadcast the root's current state to all ranks."""
        self._copier.finish()
        models = [h.value for h in self._handlers.values() if isinstance(h, ModelStateHandler)]
        if len(models) == 1 and tf.executing_eagerly():
            for handler in self._handlers.values():
                if isinstance(handler, OptimizerStateHandler):
                    handler.build(models[0])
        super().sync()


class TensorFlowState(HandledState):
    """State of training with variables of TensorFlow, in eager execution or in a session.

    Parameters
    ----------
    variables
        Variables of the state; default all global variables of the default graph.
    session
        In graphs, the session that contains the values; default TensorFlow's default session.
    kwargs
        Names and initial values of attributes, which are plain objects as in `ObjectState`.
    """

    def __init__(
        self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any
    ) -> None:
        if variables is None:
            variables = tf.compat.v1.global_variables()
        self.session = session

        def current() -> Any:
            if session is None and not tf.executing_eagerly():
                return tf.compat.v1.get_default_session()
            return session

        self._handler_registry = _Registry(current)
        super().__init__(**kwargs, variables=_Variables(variables))
