"""Reduces the gradients of Keras 3 on JAX inside the jitted training step, with `horovod.jax`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import horovod.jax as hvd
from horovod._keras._jax_trainer import watch_results
from horovod._keras._reduction import GradientReduction
from horovod.jax import _names

# Takes the optimizer's values, the gradients and the weights; returns the weights and the values after a step.
Step = Callable[[list[Any], list[Any], list[Any]], tuple[Sequence[Any], Sequence[Any]]]


class JaxGradients:
    """Reduces and sums one optimizer's gradients.

    The sums are variables of the optimizer, because a jitted step has no other state.
    """

    def __init__(self, reduction: GradientReduction) -> None:
        watch_results(sys.modules["keras"])
        self._reduction = reduction
        self._count: Any = None
        self._sums: dict[int, Any] = {}

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the gradients, reduced by one operation for each group; None stays None."""
        how = self._reduction
        result = list(gradients)
        if not how.is_active():
            return result
        if how.local and how.scale_local_gradients:
            size = how.process_set.size() or 1
            for i, variable in enumerate(variables):
                if result[i] is not None and how.is_local(variable):
                    result[i] = result[i] / size
        options = how.reduction()._asdict()
        for number, batch in enumerate(how.batches(result, variables)):
            compressed = [how.compression.compress(result[i]) for i in batch]
            tensors = tuple(tensor for tensor, _ in compressed)
            reduced = hvd.grouped_allreduce(
                tensors,
                name=_names.numbered(f"{how.name}.{number}", tensors),
                **options,
            )
            for i, tensor, (_, context) in zip(batch, reduced, compressed, strict=True):
                result[i] = how.compression.decompress(tensor, context)
        return result

    def build(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Make the optimizer's variables for the sums."""
        self._count = optimizer.add_variable(
            shape=(), initializer="zeros", dtype="int", name="horovod_passes"
        )
        self._sums = {
            id(variable): optimizer.add_variable_from_reference(variable, name="horovod_sum")
            for variable in variables
        }

    def own_variables(self) -> list[Any]:
        """Return the variables for the sums and their counter."""
        return [] if self._count is None else [self._count, *self._sums.values()]

    def aggregate(
        self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], update: Any
    ) -> None:
        """Add the gradients to the sums; every n-th call reduces the sums and calls `update`."""
        keras: Any = sys.modules["keras"]
        all_variables = list(optimizer.variables)

        def step(values: list[Any], reduced: list[Any], weights: list[Any]) -> Any:
            mapping = [*zip(all_variables, values, strict=True)]
            mapping += zip(variables, weights, strict=True)
            with keras.StatelessScope(state_mapping=mapping) as scope:
                update(reduced)
            # For a variable that was not assigned, the scope returns the value in the mapping.
            return [scope.get_current_value(v) for v in variables], [
                scope.get_current_value(v) for v in all_variables
            ]

        values = [variable.value for variable in all_variables]
        weights = [variable.value for variable in variables]
        weights, values = self._at_every_nth(optimizer, values, gradients, weights, variables, step)
        for variable, value in zip(variables, weights, strict=True):
            variable.assign(value)
        for variable, value in zip(all_variables, values, strict=True):
            variable.assign(value)

    def apply_without_state(
        self,
        optimizer: Any,
        values: Sequence[Any],
        gradients: Sequence[Any],
        weights: Sequence[Any],
        step: Step,
    ) -> tuple[list[Any], list[Any]]:
        """Return the values of weights and variables after a batch; every n-th batch makes a step."""
        variables = optimizer._trainable_variables
        return self._at_every_nth(optimizer, values, gradients, weights, variables, step)

    def _at_every_nth(
        self,
        optimizer: Any,
        values: Sequence[Any],
        gradients: Sequence[Any],
        weights: Sequence[Any],
        variables: Sequence[Any],
        step: Step,
    ) -> tuple[list[Any], list[Any]]:
        how = self._reduction
        place = {id(variable): i for i, variable in enumerate(optimizer.variables)}
        count = place[id(self._count)]
        sums = [place[id(self._sums[id(variable)])] for variable in variables]
        before = list(values)
        totals = [
            before[i] if g is None else before[i] + g for i, g in zip(sums, gradients, strict=True)
        ]

        def skipped() -> tuple[Sequence[Any], Sequence[Any]]:
            after = list(before)
            for i, total in zip(sums, totals, strict=True):
                after[i] = total
            after[count] = before[count] + 1
            return list(weights), after

        def stepped() -> tuple[Sequence[Any], Sequence[Any]]:
            after = list(before)
            for i in sums:
                after[i] = jnp.zeros_like(before[i])
            after[count] = jnp.zeros_like(before[count])
            given = [None if g is None else t for t, g in zip(totals, gradients, strict=True)]
            reduced = self.reduce(given, variables)
            if how.average_aggregated:
                reduced = [None if g is None else g / how.passes for g in reduced]
            return step(after, reduced, list(weights))

        def typed(branch: Callable[[], tuple[Sequence[Any], Sequence[Any]]]) -> Any:
            def run() -> Any:
                new_weights, new_values = branch()
                return _like(new_weights, weights), _like(new_values, before)

            return run

        is_last = before[count] + 1 == how.passes
        result: tuple[list[Any], list[Any]] = jax.lax.cond(is_last, typed(stepped), typed(skipped))
        return result

    def agree(self, is_finite: Any) -> Any:
        """Return whether `is_finite` is true on all ranks."""
        how = self._reduction
        if not how.is_active():
            return is_finite
        flag = jnp.asarray(is_finite, jnp.float32)
        name = _names.numbered(f"{how.name}.finite", (flag,))
        return hvd.allreduce(flag, op=hvd.Min, name=name, process_set=how.process_set) > 0

    def reset(self) -> None:
        """Set the sums and their counter to zero."""
        for variable in self.own_variables():
            variable.assign(jnp.zeros(variable.shape, variable.dtype))


def _like(values: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Return values converted to the types of `others`: both branches of a condition must have the same types."""
    return [
        jax.lax.convert_element_type(value, jnp.result_type(other))
        for value, other in zip(values, others, strict=True)
    ]
