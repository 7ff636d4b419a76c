"""Reports parameters as they are before their first update, so that rank 0 finds ranks that began with others."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from horovod import _core
from horovod.common import _replicas
from horovod.common.process_sets import ProcessSet
from horovod.mxnet._arrays import NDArray

_ADVICE = "Call hvd.broadcast_parameters(params, {}) before training."


class _Readable:
    """Arrays of MXNet."""

    def shape_of(self, tensor: NDArray) -> _replicas.Shape:
        dtype = np.dtype(tensor.dtype)
        return dtype.name, tensor.shape, dtype.itemsize

    def checksum(self, tensor: NDArray, parts: Sequence[slice]) -> int:
        if len(parts) == 1:
            return _replicas.checksum_of([tensor.asnumpy()])
        flat = tensor.reshape(-1)
        return _replicas.checksum_of([flat[part].asnumpy() for part in parts])


def report_parameters(params: Iterable[Any], process_set: ProcessSet) -> None:
    """Report Gluon's parameters that have gradients."""
    named = [(param.name, param.data()) for param in params if param.grad_req != "null"]
    advice = _ADVICE.format(_replicas.arguments(process_set))
    _replicas.report(named, _Readable(), process_set, advice)


class FirstRound(_replicas.FirstStep):
    """Weights as an optimizer sees them first, one by one or several at once; reported when one comes again."""

    def _hvd_forget_job(self) -> None:
        super()._hvd_forget_job()
        self._noted: dict[str, tuple[_replicas.Shape, int]] = {}

    def _hvd_note_join(self) -> None:
        super()._hvd_note_join()
        self._noted = {}

    @property
    def is_open(self) -> bool:
        """Whether weights are still to be noted."""
        return super().is_open and _core.checks_replicas(self._process_set.process_set_id)

    def note(self, names: Sequence[str], weights: Sequence[NDArray]) -> None:
        """Note weights that are about to be updated."""
        if self._noted and names[0] in self._noted:
            noted, self._noted = self._noted, {}
            if self.is_due():
                advice = _ADVICE.format(_replicas.arguments(self._process_set))
                named = sorted(noted.items(), key=lambda entry: entry[0])
                by_name = _replicas.PairedBy.NAME
                _replicas.report(named, _replicas.Noted(), self._process_set, advice, by_name)
            return
        arrays = _Readable()
        for name, weight in zip(names, weights, strict=True):
            shape = arrays.shape_of(weight)
            # As a model of its own: the others come later.
            [parts] = _replicas.parts_of([shape])
            self._noted[name] = (shape, arrays.checksum(weight, parts))
