"""How tensors and objects of a state dict are copied into a snapshot."""

from __future__ import annotations

import copy
import ctypes
from dataclasses import dataclass
from typing import Any

import torch

from horovod.common._snapshot import MayWait

# Smaller tensors are copied at once: that takes less than handing them over.
_DEFERRED_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class _Deferred:
    """One tensor that is still to be copied."""

    target: torch.Tensor
    source: torch.Tensor
    version: int
    name: str

    def copy(self) -> None:
        # Not Tensor.copy_: it would start a second set of compute threads for the thread that calls this. This one lets
        # others run, too.
        ctypes.memmove(self.target.data_ptr(), self.source.data_ptr(), self.source.nbytes)

    def was_changed(self) -> bool:
        return self.source._version != self.version


class TensorCopies:
    """Copies in host memory, in tensors that fit if there are some."""

    def copy(
        self, value: Any, reused: Any, name: str, may_wait: MayWait
    ) -> tuple[Any, _Deferred | None]:
        if not isinstance(value, torch.Tensor):
            return copy.deepcopy(value), None
        source = value.detach()
        if (
            type(value) not in (torch.Tensor, torch.nn.Parameter)
            or value.layout is not torch.strided
        ):
            return source.clone(), None
        shape_and_dtype = (source.shape, source.dtype)
        fits = isinstance(reused, torch.Tensor) and (reused.shape, reused.dtype) == shape_and_dtype
        target = reused if fits else torch.empty_like(source, device="cpu")
        if source.nbytes >= _DEFERRED_BYTES and may_wait(name, source) and _same(source, target):
            return target, _Deferred(target, source, source._version, name)
        target.copy_(source)
        return target, None


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether one `memmove` copies the one into the other."""
    return a.is_cpu and a.is_contiguous() and b.is_contiguous()
