"""Mixins for optimizers of Keras 3: they reduce gradients in `apply`, which all backends call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from horovod._keras._callable_list import CallableList
from horovod._keras._generation import keras3_backend, require_training
from horovod._keras._reduction import GradientReduction
from horovod.common._gradient_sums import SumsGradients

# Takes the reduced gradients, and makes the step.
Update = Callable[[list[Any]], None]


class GradientBackend(Protocol):
    """Reduces gradients with the framework on which Keras runs; one for each optimizer."""

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the gradients reduced over all ranks; None stays None."""

    def build(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Make the variables for sums over several backward passes, if the backend needs any."""

    def own_variables(self) -> list[Any]:
        """Return the variables for sums that are among the optimizer's variables."""

    def aggregate(
        self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], update: Update
    ) -> None:
        """Add the gradients to the sums; every n-th call reduces the sums and calls `update`."""

    def apply_without_state(
        self,
        optimizer: Any,
        values: Sequence[Any],
        gradients: Sequence[Any],
        weights: Sequence[Any],
        step: Callable[[list[Any], list[Any], list[Any]], Any],
    ) -> tuple[list[Any], list[Any]]:
        """Add the gradients to the sums, make a step in every n-th call, and return values of weights and variables."""

    def agree(self, is_finite: Any) -> Any:
        """Return whether `is_finite` is true on all ranks."""

    def reset(self) -> None:
        """Set the sums to zero."""


def gradient_backend(reduction: GradientReduction) -> GradientBackend:
    """Return a gradient backend for the framework on which Keras runs."""
    name = keras3_backend()
    require_training(name)
    if name == "torch":
        from horovod._keras._torch_gradients import TorchGradients

        return TorchGradients(reduction)
    if name == "jax":
        from horovod._keras._jax_gradients import JaxGradients

        return JaxGradients(reduction)
    from horovod._keras._tensorflow_gradients import TensorFlowGradients

    return TensorFlowGradients(reduction)


class DistributedKeras3(SumsGradients):
    """Mixin for the class of a wrapped optimizer of Keras 3."""

    _hvd: GradientReduction
    _hvd_gradients: GradientBackend
    # Whether a loss-scaling optimizer around this one reduces for it.
    _hvd_is_inner = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._hvd_begin()

    def _hvd_begin(self) -> None:
        """Set up the reduction of gradients."""
        if self._hvd.passes > 1 and getattr(self, "gradient_accumulation_steps", None):
            raise ValueError(
                "backward_passes_per_step and the optimizer's own gradient_accumulation_steps add gradients up both; "
                "use one of them. With backward_passes_per_step gradients travel only once per step."
            )
        self._hvd_gradients = gradient_backend(self._hvd)
        if self.built and self._hvd.passes > 1:  # the optimizer was built before it was wrapped
            self._hvd_gradients.build(self, self._trainable_variables)  # type: ignore[attr-defined]
            # From now on the variable counts batches instead of steps.
            self._iterations.assign(self._iterations * self._hvd.passes)  # type: ignore[attr-defined]

    # ---- interface for scripts ---------------------------------------------------------------------------------

    @property
    def process_set(self) -> Any:
        """Return the process set whose ranks take part."""
        return self._hvd.process_set

    @property
    def lr(self) -> Any:
        """Another name of `learning_rate`."""
        return self.learning_rate

    @lr.setter
    def lr(self, value: Any) -> None:
        self.learning_rate = value

    @property
    def variables(self) -> CallableList:
        """Return the optimizer's variables in a list that older scripts can call."""
        return CallableList(super().variables)  # type: ignore[misc]

    @property
    def iterations(self) -> Any:
        """Return the number of steps: the number of batches divided by the backward passes per step."""
        passes = self._hvd.passes
        batches = super().iterations  # type: ignore[misc]
        if passes == 1 or hasattr(self, "inner_optimizer"):
            return batches
        keras: Any = sys.modules["keras"]
        return keras.ops.floor_divide(batches, passes)

    def register_local_var(self, var: Any) -> None:
        """Exclude the gradients of a variable from the reduction."""
        self._hvd.register_local(var)

    def _hvd_forget_gradients(self) -> None:
        """Set the sums over several passes to zero."""
        self._hvd_gradients.reset()

    # ---- reduction ---------------------------------------------------------------------------------------------

    def build(self, variables: Sequence[Any]) -> None:
        """Make the optimizer's variables, and those of the sums over several passes."""
        is_new = not self.built
        super().build(variables)  # type: ignore[misc]
        if is_new and self._hvd.passes > 1 and not self._hvd_is_inner:
            self._hvd_gradients.build(self, variables)

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Reduce the gradients over the ranks, then make the step."""
        if self._hvd_is_inner or len(grads) == 0:
            self._hvd_step(grads, trainable_variables)
            return
        variables = self._hvd_variables(grads, trainable_variables)
        if self._hvd.passes == 1:
            reduced = self._hvd_gradients.reduce(grads, variables)
            self._hvd_step(reduced, trainable_variables)
            return
        if not self.built:  # type: ignore[has-type]
            keras: Any = sys.modules["keras"]
            with keras.name_scope(self.name):  # type: ignore[attr-defined]
                self.build(variables)
            self.built = True
        self._hvd_gradients.aggregate(
            self, grads, variables, lambda reduced: self._hvd_step(reduced, variables)
        )

    def _hvd_step(self, grads: Sequence[Any], variables: Sequence[Any] | None) -> None:
        """Make a step with reduced gradients, and count its batches."""
        super().apply(grads, variables)  # type: ignore[misc]
        # The inner optimizer of a loss-scaling one counts the batches, and only without an overflow.
        if self._hvd.passes > 1 and not hasattr(self, "inner_optimizer") and len(grads):
            self._iterations.assign_add(self._hvd.passes - 1)  # type: ignore[attr-defined]

    def _hvd_variables(self, grads: Sequence[Any], given: Sequence[Any] | None) -> Sequence[Any]:
        if given is not None:
            return list(given)
        variables: Sequence[Any] = self._trainable_variables  # type: ignore[attr-defined]
        if len(variables) != len(grads):
            raise ValueError(
                f"{len(grads)} gradients were given for {len(variables)} variables with which the optimizer was built; "
                "pass both, or build it first."
            )
        return variables

    # ---- saving: as the wrapped optimizer's, so that it loads where this package is not ------------------------

    def save_own_variables(self, store: Any) -> None:
        """Store the wrapped optimizer's variables."""
        for i, variable in enumerate(self._hvd_saved()):
            store[str(i)] = variable.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Load the wrapped optimizer's variables from a store."""
        variables = self._hvd_saved()
        if len(store.keys()) != len(variables):
            super().load_own_variables(store)  # type: ignore[misc]
            return
        for i, variable in enumerate(variables):
            variable.assign(store[str(i)])

    def _hvd_saved(self) -> list[Any]:
        own = {id(variable) for variable in self._hvd_gradients.own_variables()}
        return [variable for variable in self.variables if id(variable) not in own]


class DistributedLossScale(DistributedKeras3):
    """Mixin for the class of a loss-scaling optimizer around a distributed one.

    It checks for overflows after the reduction, so that either all ranks skip a step or none does.
    """

    def __init__(self, inner_optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(inner_optimizer, *args, **kwargs)
        inner_optimizer._hvd_is_inner = True

    def stateless_apply(
        self, optimizer_variables: Any, grads: Any, trainable_variables: Any
    ) -> Any:
        """Reduce the gradients and call the wrapped class's `stateless_apply`, which does not call `apply`."""
        variables = self._trainable_variables  # type: ignore[attr-defined]
        if not self.built or len(variables) != len(grads):
            return super().stateless_apply(optimizer_variables, grads, trainable_variables)  # type: ignore[misc]
        if self._hvd.passes > 1:
            step = super().stateless_apply  # type: ignore[misc]
            return self._hvd_gradients.apply_without_state(
                self, optimizer_variables, grads, trainable_variables, step
            )
        reduced = self._hvd_gradients.reduce(grads, variables)
        return super().stateless_apply(optimizer_variables, reduced, trainable_variables)  # type: ignore[misc]

    def check_finite(self, grads: Any) -> Any:
        """Return whether all gradients are finite on every rank."""
        is_finite = super().check_finite(grads)  # type: ignore[misc]
        return self._hvd_gradients.agree(is_finite) if self._hvd.local else is_finite


def public_module(keras: Any, base: type) -> str:
    """Return the module under whose name an optimizer's class is saved; for Keras's own classes the public module.

    On PyTorch Keras makes objects of a private subclass. With the public name, a saved model loads on every backend.
    """
    for kind in base.__mro__:
        if getattr(keras.optimizers, kind.__name__, None) is kind:
            return "keras.optimizers" if kind.__name__ == base.__name__ else base.__module__
    return base.__module__


def distributed_class(mixin: type, base: type, reduction: GradientReduction) -> type:
    """Return a subclass of an optimizer's class that is saved under the name of that class."""
    keras: Any = sys.modules["keras"]
    attributes = {
        "_hvd": reduction,
        "__module__": public_module(keras, base),
        "__doc__": base.__doc__,
    }
    made = type(base.__name__, (mixin, base), attributes)
    _register_like(keras, made, base)
    return made


def _register_like(keras: Any, made: type, base: type) -> None:
    """Register a class under the name of its base, if the base is registered with Keras."""
    name = keras.saving.get_registered_name(base)
    if name == base.__name__:
        return
    owner = keras.saving.get_registered_object(name)
    keras.saving.register_keras_serializable(*name.split(">", 1))(made)
    # Loading a model must return the plain class, so the name refers to the base again.
    keras.saving.get_custom_objects()[name] = owner


def wrap_loss_scaling(keras: Any) -> None:
    """Make every new `LossScaleOptimizer` around a distributed optimizer distributed, such as those of `compile`."""
    kind: Any = keras.optimizers.LossScaleOptimizer
    if getattr(kind, "_hvd_wraps", False):
        return
    inherited = kind.__new__

    def make(cls: type, *args: Any, **kwargs: Any) -> Any:
        inner = args[0] if args else kwargs.get("inner_optimizer")
        if isinstance(inner, DistributedKeras3) and not issubclass(cls, DistributedLossScale):
            cls = distributed_class(DistributedLossScale, cls, inner._hvd)
        return inherited(cls) if inherited is object.__new__ else inherited(cls, *args, **kwargs)

    kind.__new__ = make
    kind._hvd_wraps = True
