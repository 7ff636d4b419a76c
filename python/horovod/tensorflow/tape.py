"""`DistributedGradientTape`: a `tf.GradientTape` that returns the reduced gradients of all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from horovod.common._ops import Average
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.tensorflow._allreduce import divided_by_size
from horovod.tensorflow._autograph import unconverted
from horovod.tensorflow._first_step import note_step
from horovod.tensorflow._gradient_reduction import _make_allreduce_grads_fn
from horovod.tensorflow._settings import checked_groups, checked_op
from horovod.tensorflow._variables import is_keras_layer, key_of
from horovod.tensorflow.compression import Compression

__all__ = ["DistributedGradientTape", "PartialDistributedGradientTape", "_DistributedGradientTape"]


class _DistributedGradientTape:
    """Mixin that reduces the gradients that the given tape computes; it precedes the tape's class in the bases."""

    _allreduce_grads: Any
    _local_sources: set[Any]
    _process_set: ProcessSet
    scale_local_gradients: bool
    # Whether a Jacobian is being computed: TensorFlow then calls `gradient` in a parallel loop over the rows.
    _is_in_jacobian = False

    def register_local_source(self, source: Any) -> None:
        """Exclude the gradient of this source from the reduction; each rank uses its own."""
        self._local_sources.add(key_of(source))

    @unconverted
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Compute the gradients of `target` and return them reduced, except those of local sources.

        Every rank has to call this method with the same sources in the same order.

        Parameters
        ----------
        target, output_gradients
            As in `tf.GradientTape.gradient`.
        sources
            Variables or tensors: a single one, a list, or any nested structure.
        use_generic_names
            Whether to leave the name scopes out of the names that pair gradients across ranks, for ranks whose graphs
            differ.
        kwargs
            Further arguments of `tf.GradientTape.gradient`: `unconnected_gradients`.

        Returns
        -------
        A list if `sources` is a flat list or tuple, otherwise the structure of `sources`.
        """
        computed = super().gradient(target, sources, output_gradients, **kwargs)  # type: ignore[misc]
        if self._is_in_jacobian:
            return computed
        flat_sources = tf.nest.flatten(sources)
        gradients = tf.nest.flatten(computed)
        results = self._reduced(gradients, flat_sources, use_generic_names)
        if isinstance(sources, (list, tuple)) and len(sources) == len(flat_sources):
            return results
        return tf.nest.pack_sequence_as(sources, results)

    @unconverted
    def jacobian(self, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the Jacobians as `tf.GradientTape` does, and return them reduced like gradients."""
        with self._of_jacobian():
            computed = super().jacobian(target, sources, *args, **kwargs)  # type: ignore[misc]
        flat_sources = tf.nest.flatten(sources)
        results = self._reduced(tf.nest.flatten(computed), flat_sources, False)
        return tf.nest.pack_sequence_as(sources, results)

    @unconverted
    def batch_jacobian(self, target: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the batch Jacobian as `tf.GradientTape` does, and return it reduced like a gradient."""
        with self._of_jacobian():
            computed = super().batch_jacobian(target, source, *args, **kwargs)  # type: ignore[misc]
        return self._reduced([computed], [source], False)[0]

    @contextlib.contextmanager
    def _of_jacobian(self) -> Iterator[None]:
        self._is_in_jacobian = True
        try:
            yield
        finally:
            self._is_in_jacobian = False

    @unconverted
    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        **kwargs: Any,
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Call `gradient` and return two lists of `(source, gradient)`: those of local sources, and all others."""
        flat_sources = tf.nest.flatten(sources)
        gradients = self.gradient(
            target, flat_sources, output_gradients, use_generic_names, **kwargs
        )
        local: list[tuple[Any, Any]] = []
        reduced: list[tuple[Any, Any]] = []
        for source, gradient in zip(flat_sources, gradients, strict=True):
            is_local = key_of(source) in self._local_sources
            (local if is_local else reduced).append((source, gradient))
        return local, reduced

    def _reduced(
        self, gradients: Sequence[Any], sources: Sequence[Any], use_generic_names: bool
    ) -> list[Any]:
        if not self._local_sources:
            note_step(sources, self._process_set)
            everything: list[Any] = self._allreduce_grads(gradients, sources, use_generic_names)
            return everything
        results = list(gradients)
        shared = [i for i, s in enumerate(sources) if key_of(s) not in self._local_sources]
        note_step([sources[i] for i in shared], self._process_set)
        reduced = self._allreduce_grads(
            [gradients[i] for i in shared], [sources[i] for i in shared], use_generic_names
        )
        for i, gradient in zip(shared, reduced, strict=True):
            results[i] = gradient
        if self.scale_local_gradients:
            for i in set(range(len(results))).difference(shared):
                if results[i] is not None:
                    results[i] = divided_by_size(results[i], self._process_set)
        return results


def DistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a tape like the given one whose `gradient` reduces the gradients over all ranks.

    The new tape uses the recording of the given tape, or records as a context manager. It works in eager execution, in
    `tf.function` (also with `jit_compile=True`) and in graphs.

    Parameters
    ----------
    gradtape
        A `tf.GradientTape`, or an instance of a subclass.
    device_dense, device_sparse
        Devices on which dense gradients and `tf.IndexedSlices` are reduced; TensorFlow chooses if empty.
    compression
        `Compression.none`, or `Compression.fp16`, which sends float16.
    sparse_as_dense
        Whether to convert `tf.IndexedSlices` to dense tensors before the reduction.
    op
        `Average`, `Sum` or `Adasum`.
    gradient_predivide_factor
        With `Average`: gradients are divided by this before the sum, and by size / factor after it.
    num_groups
        Deprecated: use `groups`.
    groups
        A number of groups, or lists of variables. The gradients of a group are reduced together; a variable that is in
        no list is reduced alone.
    process_set
        The ranks that take part; other ranks get their own gradients unchanged.
    scale_local_gradients
        Whether to divide the gradients of local sources (`register_local_source`) by the number of ranks. They then
        have the same scale as averaged gradients.

    Raises
    ------
    ValueError
        The combination of arguments is invalid.

    Examples
    --------
    >>> with tf.GradientTape() as tape:
    ...     loss = compute_loss(model(x), y)
    >>> tape = hvd.DistributedGradientTape(tape)
    >>> gradients = tape.gradient(loss, model.trainable_variables)
    """
    op = checked_op(op, gradient_predivide_factor)
    groups = checked_groups(groups, num_groups)
    base = type(gradtape)
    result: Any = object.__new__(type(base.__name__, (_DistributedGradientTape, base), {}))
    # The attributes contain the recording, which the `with` block of the given tape ends.
    result.__dict__.update(gradtape.__dict__)
    result._recording = False
    result._allreduce_grads = _make_allreduce_grads_fn(
        "DistributedGradientTape",
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        groups,
        process_set,
    )
    result._local_sources = set()
    result._process_set = process_set
    result.scale_local_gradients = scale_local_gradients
    return result


def PartialDistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a `DistributedGradientTape` that does not reduce the gradients of some layers.

    Parameters
    ----------
    local_layers
        A built Keras layer or a collection of them. The gradients of their trainable weights are not reduced.

    Notes
    -----
    The other parameters are those of `DistributedGradientTape`.

    Raises
    ------
    ValueError
        `local_layers` contains an object that is not a Keras layer.
    """
    layers = [] if local_layers is None else local_layers
    layers = [layers] if is_keras_layer(layers) else layers
    if not isinstance(layers, (list, tuple, set)) or not all(map(is_keras_layer, layers)):
        raise ValueError("All local layers must be of tf.keras.layers.Layer type.")
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    for layer in layers:
        for variable in layer.trainable_weights:
            tape.register_local_source(variable)
    return tape
