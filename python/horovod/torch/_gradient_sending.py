"""Starts the reductions of gradients, several at once where possible, and writes the results to the gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from horovod.common._gradient_grouping import fills_its_host
from horovod.common._operations import complete_all
from horovod.common._optimizer_settings import ReduceOptions
from horovod.common._reduction import Reduction
from horovod.common.exceptions import DuplicateNameError
from horovod.torch import _sparse
from horovod.torch._gradient_entries import GradientEntry
from horovod.torch._gradient_errors import DUPLICATE_NAME
from horovod.torch._memory_owners import Overlaps, are_alone, is_alone
from horovod.torch._profiling import is_outermost, profiler, recorded
from horovod.torch._tensors import allreduce_plain_together
from horovod.torch.compression import Compression
from horovod.torch.mpi_ops import allreduce_async_, grouped_allreduce_async_, synchronize


def _host_bytes() -> float:
    """Return how many bytes of host gradients are queued before a hand-over during backward; infinite: all.

    Each hand-over wakes the engine, which negotiates with the other ranks and reduces, and needs a core for that. Where
    the ranks use all cores, hand-overs would slow backward down by more than the early start gains.
    """
    return math.inf if fills_its_host() else 256 * 1024


# Bytes of GPU gradients before a hand-over. It takes no core from the computation, and larger operations use the links
# better. The first one is small, so that communication begins early.
_FIRST_GPU_BYTES = 1024 * 1024
_NEXT_GPU_BYTES = 25 * 1024 * 1024


class Sender:
    """The reductions of one optimizer's gradients from when they are ready until their results are in place."""

    def __init__(self, options: ReduceOptions, entries: Sequence[GradientEntry]) -> None:
        self._options = options
        self._entries = entries
        self._reduction = options.reduction()
        self._keywords = self._reduction._asdict()
        self._uncompressed = options.compression is Compression.none
        self._queued: list[tuple[GradientEntry, torch.Tensor]] = []
        self._queued_bytes = 0
        self._host_bytes: float | None = None  # computed in each cycle
        self._in_flight: list[Callable[[], object]] = []
        # Pairs: a gradient whose memory has other owners, and the copy that is reduced. `wait` copies the result back.
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._overlaps: Overlaps | None = None
        self.awaited: list[int] = []  # the handles of the operations in `_in_flight`
        self.handed_over = False  # whether the engine received gradients since the last agreement
        self.sparse = False  # whether a gradient of this cycle was sparse

    @property
    def in_flight(self) -> bool:
        """Return whether gradients are queued, or their results are not written back yet."""
        return bool(self._in_flight or self._queued)

    def forget(self) -> None:
        """Begin a new cycle; results of operations in flight are discarded."""
        self._queued.clear()
        self._queued_bytes = 0
        self._host_bytes = None
        self._in_flight.clear()
        self._copies.clear()
        self.awaited.clear()
        self.handed_over = self.sparse = False
        self.check_again()

    def check_again(self) -> None:
        """Discard the result of the overlap check, because the script may have assigned gradients since."""
        self._overlaps = None

    def hold(self, entry: GradientEntry, grad: torch.Tensor) -> bool:
        """Queue one gradient, which is marked as sent; return whether enough bytes are queued for a hand-over.

        A sparse gradient that stays sparse is sent at once, without the queue.
        """
        if grad.is_sparse:
            self.sparse = entry.sparse = True
            if not self._options.sparse_as_dense:
                self._send_sparse(entry, grad)
                return False
        self._queued.append((entry, grad))
        self._queued_bytes += entry.nbytes
        if grad.is_cpu:
            if self._host_bytes is None:
                self._host_bytes = _host_bytes()
            return self._queued_bytes >= self._host_bytes
        return self._queued_bytes >= (_NEXT_GPU_BYTES if self.handed_over else _FIRST_GPU_BYTES)

    def hand_over(self, passing: torch.Tensor | None = None) -> None:
        """Start to reduce the queued gradients, in one call of the core where that is possible.

        `passing` is the tensor that is being accumulated right now.
        """
        queued, self._queued, self._queued_bytes = self._queued, [], 0
        if not queued:
            return
        self.handed_over = True
        if not self._all_alone(queued, passing):
            queued = [(entry, self.own(entry, grad, passing)) for entry, grad in queued]
        if self._uncompressed:
            handles = allreduce_together_(
                [grad for _, grad in queued],
                [entry.name if entry.sent == 1 else entry.wire_name for entry, _ in queued],
                self._reduction,
            )
            self.awaited.extend(handles)
            self._in_flight.extend(partial(synchronize, handle) for handle in handles)
            # The rest needs preparation, or is refused; a refused tensor raises its error in `_send`.
            queued = queued[len(handles) :]
        for entry, grad in queued:
            self._send(entry, grad)

    @staticmethod
    def _all_alone(
        queued: Sequence[tuple[GradientEntry, torch.Tensor]], passing: torch.Tensor | None
    ) -> bool:
        # A gradient that is not fresh may have been assigned by the script, even to two parameters.
        fresh = [entry.is_fresh for entry, _ in queued]
        return False not in fresh and are_alone([grad for _, grad in queued], passing)

    def own(
        self, entry: GradientEntry, grad: torch.Tensor, passing: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the gradient in memory without another owner: the tensor itself, or a copy.

        The copy becomes the parameter's gradient if PyTorch chose the memory, or if another gradient overlaps it.
        Otherwise the script assigned the memory, such as a slice of one tensor for all gradients. `wait` then copies
        the result back into that memory.
        """
        if grad.layout is not torch.strided:  # gathered, never changed in place
            return grad
        if entry.is_fresh:
            if is_alone(grad, passing):
                return grad
        else:
            if self._overlaps is None:
                self._overlaps = Overlaps(entry.param.grad for entry in self._entries)
            if not self._overlaps.is_repeated(grad) and is_alone(grad, passing):
                return grad
        copy = grad.detach().clone()
        if entry.is_fresh or self._overlaps is None or self._overlaps.has(grad):
            if entry.param.grad is grad:
                entry.param.grad = copy
        else:
            self._copies.append((grad, copy))
        return copy

    def send_group(
        self, entries: Sequence[GradientEntry], passing: torch.Tensor | None = None
    ) -> None:
        """Start to reduce these gradients, which are marked as sent, as one operation."""
        options = self._options
        self.handed_over = True
        queued = [(entry, grad) for entry in entries if (grad := entry.param.grad) is not None]
        if not self._all_alone(queued, passing):
            queued = [(entry, self.own(entry, grad, passing)) for entry, grad in queued]
        grads = [grad for _, grad in queued]
        packed = [
            options.compression.compress(grad.to_dense() if grad.is_sparse else grad)
            for grad in grads
        ]
        try:
            handle = grouped_allreduce_async_(
                [tensor for tensor, _ in packed], name=entries[0].wire_name, **self._keywords
            )
        except DuplicateNameError as error:
            error.add_note(DUPLICATE_NAME)
            raise

        def complete() -> None:
            results = synchronize(handle)
            for entry, grad, result, (_, ctx) in zip(entries, grads, results, packed, strict=True):
                self._store(entry, grad, result, ctx)

        self.awaited.append(handle)
        self._in_flight.append(complete)
        self.sparse = self.sparse or any(grad.is_sparse for grad in grads)

    def wait(self) -> None:
        """Hand over queued gradients, wait for all operations and write back their results; raise the first error."""
        self.hand_over()
        pending, self._in_flight, self.awaited = self._in_flight, [], []
        copies, self._copies = self._copies, []
        complete_all(pending)
        with torch.no_grad():
            for grad, copy in copies:
                grad.copy_(copy)
        self.check_again()

    def _send_sparse(self, entry: GradientEntry, grad: torch.Tensor) -> None:
        self.handed_over = True
        handles, result = _sparse.start(
            grad, entry.wire_name, self._options.op, self._options.process_set
        )
        self.awaited.extend(handles)
        self._in_flight.append(lambda: entry.put(grad, result()))

    def _send(self, entry: GradientEntry, grad: torch.Tensor) -> None:
        options = self._options
        tensor, ctx = options.compression.compress(grad.to_dense() if grad.is_sparse else grad)
        try:
            handle = allreduce_async_(tensor, name=entry.wire_name, **self._keywords)
        except DuplicateNameError as error:
            error.add_note(DUPLICATE_NAME)
            raise
        self.awaited.append(handle)
        if tensor is grad and self._uncompressed:
            self._in_flight.append(partial(synchronize, handle))
        else:
            self._in_flight.append(lambda: self._store(entry, grad, synchronize(handle), ctx))

    def _store(
        self, entry: GradientEntry, grad: torch.Tensor, reduced: torch.Tensor, ctx: Any
    ) -> None:
        """Write a reduced dense tensor to the gradient; a sparse gradient is replaced by a sparse tensor."""
        compression = self._options.compression
        if compression is Compression.fp16 and not grad.is_sparse:
            result = reduced  # `copy_` below converts it
        else:
            result = compression.decompress(reduced, ctx)
        if grad.is_sparse:
            entry.put(grad, result.to_sparse(grad.sparse_dim()))
        elif result is not grad:
            with torch.no_grad():
                grad.copy_(result)


def allreduce_together_(
    tensors: list[torch.Tensor],
    names: list[str],
    reduction: Reduction,
) -> list[int]:
    """Start one `allreduce_async_` per tensor, announce all in one message, and return the handles.

    There are fewer handles than tensors if a tensor needs preparation or is refused: that tensor and all after it were
    not started.
    """
    if is_dynamo_compiling():
        return []
    if profiler._is_profiler_enabled and is_outermost():
        return recorded(allreduce_together_, tensors, names, reduction)
    op, prescale_factor, postscale_factor, process_set = reduction
    set_id = process_set.process_set_id
    return allreduce_plain_together(
        tensors, "allreduce", names, (op, prescale_factor, postscale_factor), set_id
    )
