"""Decides when each gradient of an optimizer is reduced: hooks, accumulation counters, groups, agreement.

One `GradientReducer` belongs to one wrapped optimizer. A post-accumulate hook per parameter counts backward passes
and starts the reduction; at the end of the backward pass the ranks tell each other which gradients exist and wait,
so that `backward()` returns with reduced gradients and clipping, loss scaling or logging may follow in any order.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import ProcessSet
from horovod.torch._allreduce import allreduce_together_
from horovod.torch.compression import Compression
from horovod.torch.mpi_ops import (
    Average,
    Max,
    allreduce_async_,
    grouped_allreduce_async_,
    sparse_allreduce_async,
    synchronize,
)

EXTRA_BACKWARD = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). "
    "Increase backward_passes_per_step to accumulate gradients locally, or put the extra passes into no_sync()."
)

# Gradients wait for each other until there are this many bytes, or backward is over: each hand-over wakes the engine,
# which then agrees with the other ranks, and where all cores compute that costs more than a small tensor's journey.
_HAND_OVER_BYTES = 256 * 1024

# Runs a function when the current backward pass is over. Older versions of torch lack it: there `backward()` waits
# only if all trainable parameters got a gradient; otherwise `step()` does.
_queue_callback: Callable[[Callable[[], None]], None] | None = getattr(
    torch.autograd.graph, "queue_callback", None
)

# Where the gradient of one parameter stands within a cycle (from one step() to the next).
_IDLE, _READY, _STARTED = 0, 1, 2

# Rows of the agreement: what some rank may have done with a gradient.
_ROWS = 5
_SENT, _WAITS_FOR_GROUP, _LOCAL_ONLY, _IS_DENSE, _IS_SPARSE = range(_ROWS)


@dataclass(frozen=True, slots=True)
class ReduceOptions:
    """How gradients travel; the same on every rank."""

    compression: Any
    op: int
    gradient_predivide_factor: float
    sparse_as_dense: bool
    process_set: ProcessSet

    def factors(self) -> tuple[float, float]:
        """Scale factors before and after the reduction."""
        if self.op != Average:
            return 1.0, 1.0
        return 1.0 / self.gradient_predivide_factor, self.gradient_predivide_factor


class _Slot:
    """One parameter and where its gradient stands."""

    __slots__ = ("group", "name", "param", "passes_left", "state")

    def __init__(self, param: torch.Tensor, name: str, passes: int) -> None:
        self.param = param
        self.name = name
        self.group: _Group | None = None
        self.passes_left = passes
        self.state = _IDLE


@dataclass(slots=True)
class _Group:
    """Gradients that travel together once the last of them is ready."""

    members: list[_Slot]
    waiting: int = field(init=False)

    def __post_init__(self) -> None:
        self.waiting = len(self.members)


class GradientReducer:
    """Reduces the gradients of one optimizer's parameters over a process set."""

    def __init__(self, options: ReduceOptions, passes: int) -> None:
        self.passes = passes
        self.wait_in_backward = True
        # Whether a GradScaler has decided on this cycle's step, maybe not to take it.
        self.step_skipped = False
        self._options = options
        self._prescale, self._postscale = options.factors()
        self._slots: list[_Slot] = []  # sorted by name: the same order on every rank
        self._by_param: dict[torch.Tensor, _Slot] = {}
        self._held: list[tuple[_Slot, torch.Tensor]] = []
        self._held_bytes = 0
        self._uncompressed = options.compression is Compression.none
        self._in_flight: list[Callable[[], object]] = []
        self._announced: tuple[torch.Tensor, torch.Tensor, int] | None = None
        self._started = 0
        self._sparse = False
        self._touched = False
        self._unannounced = False
        self._agreed = False
        self._holding = 0
        self._end_awaited = False
        self._hooks: list[Any] = []
        weakref.finalize(self, _remove_hooks, self._hooks)

    # ---- set-up ------------------------------------------------------------------------------------------------

    def track(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Take parameters under their names on the wire and hook them, frozen ones too: they may thaw."""
        for name, param in named:
            slot = _Slot(param, name, self.passes)
            self._slots.append(slot)
            self._by_param[param] = slot
            self._hook(slot)
        self._slots.sort(key=lambda slot: slot.name)

    def set_groups(self, groups: Sequence[Sequence[torch.Tensor]]) -> None:
        """Let the gradients of each list travel as one operation."""
        for params in groups:
            members = [self._by_param[param] for param in params]
            if len(members) > 1:
                group = _Group(members)
                for slot in members:
                    slot.group = group

    def detach(self) -> None:
        """Remove every hook: the parameters are reduced by somebody else from now on, or by nobody."""
        _remove_hooks(self._hooks)

    def _hook(self, slot: _Slot) -> None:
        if not _can_be_hooked(slot.param):
            return  # such gradients are picked up by `finish`
        me = weakref.ref(self)

        def after_accumulation(_: torch.Tensor) -> None:
            reducer = me()
            if reducer is not None:
                reducer._on_gradient(slot)

        with _requiring_grad(slot.param):
            handle = slot.param.register_post_accumulate_grad_hook(after_accumulation)  # type: ignore[no-untyped-call]
            self._hooks.append(handle)

    # ---- one cycle ---------------------------------------------------------------------------------------------

    @property
    def started(self) -> bool:
        """Whether any gradient was sent in this cycle."""
        return self._started > 0

    @property
    def unfinished(self) -> bool:
        """Whether backward passes left gradients that `finish` would still reduce."""
        return self._touched and not self._agreed

    @property
    def touched(self) -> bool:
        """Whether any gradient was computed in this cycle."""
        return self._touched

    def reset(self) -> None:
        """Begin a new cycle; what is still in flight is forgotten."""
        self._held.clear()
        self._held_bytes = 0
        self._in_flight.clear()
        self._announced = None
        self._started = 0
        self._touched = self._unannounced = self._agreed = self._sparse = self.step_skipped = False
        self._end_awaited = False
        for slot in self._slots:
            slot.state = _IDLE
            slot.passes_left = self.passes
            if slot.group is not None:
                slot.group.waiting = len(slot.group.members)

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """Only accumulate gradients inside the block."""
        self._holding += 1
        try:
            yield
        finally:
            self._holding -= 1

    def finish(self) -> None:
        """Reduce every gradient that exists on any rank and is not reduced yet; wait for all of them."""
        if self._started < len(self._slots):
            for slot in self._slots:
                if slot.state == _IDLE and slot.param.grad is not None:
                    self._ready(slot)
                    self._agreed = False
        try:
            if not self._agreed:
                self._agree()
            self.wait()
        except BaseException:
            self.reset()
            raise

    def _on_gradient(self, slot: _Slot) -> None:
        if self.step_skipped:  # and nobody called zero_grad() of this optimizer since
            self.wait()
            self.reset()
        self._touched = True
        if self._holding:
            return
        if slot.passes_left <= 0:
            raise AssertionError(EXTRA_BACKWARD)
        slot.passes_left -= 1
        self._agreed = False
        if slot.passes_left == 0:
            self._ready(slot)
        if self._unannounced and not self._end_awaited:
            self._await_end_of_backward()
        if self._started == len(self._slots) and self._end_awaited and self.wait_in_backward:
            # Nothing can change any more: the announcement travels with the last gradients, not after them.
            self._announced = self._announced or self._announce()

    def _await_end_of_backward(self) -> None:
        if _queue_callback is not None:
            self._end_awaited = True
            _queue_callback(self._end_of_backward)
        elif all(s.state == _STARTED for s in self._slots if s.param.requires_grad):
            self._end_of_backward()

    def _end_of_backward(self) -> None:
        self._end_awaited = False
        try:
            self._hand_over()
            if self._unannounced and self.wait_in_backward and not self._holding:
                self._agree()
                self.wait()
        except BaseException:
            self.reset()
            raise

    # ---- sending -----------------------------------------------------------------------------------------------

    def _ready(self, slot: _Slot) -> None:
        grad = slot.param.grad
        if grad is None:
            raise RuntimeError(f"the gradient of {slot.name!r} vanished while it was being reduced")
        if grad.requires_grad:
            raise AssertionError(
                f"the gradient of {slot.name!r} carries a graph (backward(create_graph=True)); reducing it in place "
                "would falsify its derivative. Take higher derivatives with torch.autograd.grad and put "
                "detached tensors into .grad."
            )
        group = slot.group
        if group is None:
            self._send(slot, grad)
            return
        group.waiting -= 1
        if grad.is_sparse and not self._options.sparse_as_dense:
            self._send(slot, grad)
        else:
            slot.state = _READY
            self._unannounced = True
        if group.waiting == 0:
            self._send_group([member for member in group.members if member.state == _READY])

    def _send(self, slot: _Slot, grad: torch.Tensor) -> None:
        options = self._options
        is_sparse = grad.is_sparse
        if is_sparse:
            self._sparse = True
        if is_sparse and not options.sparse_as_dense:
            result = sparse_allreduce_async(
                grad, name=slot.name, op=options.op, process_set=options.process_set
            )
            self._in_flight.append(lambda: _replace_grad(slot.param, result()))
            self._mark_started(slot)
            return
        self._mark_started(slot)
        self._held.append((slot, grad))
        self._held_bytes += slot.param.nbytes
        if self._held_bytes >= _HAND_OVER_BYTES:
            self._hand_over()

    def _hand_over(self) -> None:
        """Start to reduce the gradients that were held back, all at once where that is possible."""
        held, self._held, self._held_bytes = self._held, [], 0
        if len(held) > 1 and self._uncompressed:
            handles = allreduce_together_(
                [grad for _, grad in held],
                [slot.name for slot, _ in held],
                self._options.op,
                self._prescale,
                self._postscale,
                self._options.process_set,
            )
            self._in_flight.extend(partial(synchronize, handle) for handle in handles)
            # What has to be prepared, and what was refused and shall say why.
            held = held[len(handles) :]
        for slot, grad in held:
            self._reduce(slot, grad)

    def _reduce(self, slot: _Slot, grad: torch.Tensor) -> None:
        options = self._options
        tensor, ctx = options.compression.compress(grad.to_dense() if grad.is_sparse else grad)
        try:
            handle = allreduce_async_(
                tensor,
                name=slot.name,
                op=options.op,
                prescale_factor=self._prescale,
                postscale_factor=self._postscale,
                process_set=options.process_set,
            )
        except ValueError as error:
            _explain_duplicate(error)
            raise
        if tensor is grad and self._uncompressed:
            self._in_flight.append(partial(synchronize, handle))
        else:
            self._in_flight.append(lambda: self._store(slot, grad, synchronize(handle), ctx))

    def _send_group(self, slots: list[_Slot]) -> None:
        if not slots:
            return
        options = self._options
        grads = [grad for slot in slots if (grad := slot.param.grad) is not None]
        packed = [
            options.compression.compress(grad.to_dense() if grad.is_sparse else grad)
            for grad in grads
        ]
        try:
            handle = grouped_allreduce_async_(
                [tensor for tensor, _ in packed],
                name=slots[0].name,
                op=options.op,
                prescale_factor=self._prescale,
                postscale_factor=self._postscale,
                process_set=options.process_set,
            )
        except ValueError as error:
            _explain_duplicate(error)
            raise

        def complete() -> None:
            results = synchronize(handle)
            for slot, grad, result, (_, ctx) in zip(slots, grads, results, packed, strict=True):
                self._store(slot, grad, result, ctx)

        self._in_flight.append(complete)
        self._sparse = self._sparse or any(grad.is_sparse for grad in grads)
        for slot in slots:
            self._mark_started(slot)

    def _mark_started(self, slot: _Slot) -> None:
        slot.state = _STARTED
        slot.passes_left = 0
        self._started += 1
        self._unannounced = True

    def _store(self, slot: _Slot, grad: torch.Tensor, reduced: torch.Tensor, ctx: Any) -> None:
        """Put a reduced dense tensor where the gradient was, in the gradient's own memory and layout."""
        compression = self._options.compression
        if compression is Compression.fp16 and not grad.is_sparse:
            result = reduced  # what copies it into the gradient also converts it
        else:
            result = compression.decompress(reduced, ctx)
        if grad.is_sparse:
            _replace_grad(slot.param, result.to_sparse(grad.sparse_dim()))
        elif result is not grad:
            with torch.no_grad():
                grad.copy_(result)

    def wait(self) -> None:
        """Wait for the reductions in flight and put their results in place; raise what failed first."""
        self._hand_over()
        pending, self._in_flight = self._in_flight, []
        failure = None
        for complete in pending:
            try:
                complete()
            except HorovodInternalError as error:
                # The others still write into gradients: nobody may touch those before.
                failure = failure or error
        if failure is not None:
            raise failure

    # ---- agreement ---------------------------------------------------------------------------------------------

    def _agree(self) -> None:
        """Learn which gradients other ranks sent, and send zeros for those that this rank does not have.

        Without it a parameter that only some ranks used would leave the others waiting, and a parameter that no
        rank used could not keep `None`.
        """
        mine, theirs, handle = self._announced or self._announce()
        self._announced = None
        synchronize(handle)
        self._unannounced = False
        if torch.equal(mine, theirs) and not mine[_WAITS_FOR_GROUP : _LOCAL_ONLY + 1].any():
            self._agreed = True
            return
        rows: list[list[int]] = theirs.tolist()
        self._join_others(rows)
        self._unannounced = False
        self._agreed = not any(
            local and slot.state == _IDLE
            for local, slot in zip(rows[_LOCAL_ONLY], self._slots, strict=True)
        )

    def _announce(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Tell the others which gradients this rank has: what it said, what all will have said, when."""
        self._hand_over()
        mine = self._announcement()
        theirs = mine.clone()
        handle = allreduce_async_(
            theirs,
            name=f"presence.{self._slots[0].name}" if self._slots else "presence",
            op=Max,
            process_set=self._options.process_set,
        )
        return mine, theirs, handle

    def _announcement(self) -> torch.Tensor:
        rows = torch.zeros(_ROWS, len(self._slots), dtype=torch.uint8)
        if self._started == len(self._slots) and not self._sparse:
            rows[_SENT] = 1
            rows[_IS_DENSE] = 1
            return rows
        flags: list[list[int]] = rows.tolist()
        for index, slot in enumerate(self._slots):
            grad = slot.param.grad
            if grad is None:
                continue
            flags[_IS_SPARSE if grad.is_sparse else _IS_DENSE][index] = 1
            if slot.state == _STARTED:
                flags[_SENT][index] = 1
            elif slot.state == _READY:
                flags[_WAITS_FOR_GROUP][index] = 1
            else:
                flags[_LOCAL_ONLY][index] = 1
        return torch.tensor(flags, dtype=torch.uint8).reshape(_ROWS, len(self._slots))

    def _join_others(self, rows: list[list[int]]) -> None:
        as_dense = self._options.sparse_as_dense
        # By group: what travels now because a rank that had all remaining members sent them, or because some
        # rank holds it back.
        sent: dict[int, list[_Slot]] = {}
        held: dict[int, list[_Slot]] = {}
        for index, slot in enumerate(self._slots):
            if not (rows[_SENT][index] or rows[_WAITS_FOR_GROUP][index]):
                continue
            sparse = bool(rows[_IS_SPARSE][index])
            if sparse and rows[_IS_DENSE][index] and not as_dense:
                raise RuntimeError(
                    f"the gradient of {slot.name!r} is sparse on some ranks and dense on others; "
                    "use DistributedOptimizer(..., sparse_as_dense=True)"
                )
            if slot.state == _STARTED:
                continue
            grad = _existing_grad(slot.param, sparse=sparse)
            if slot.group is None or (sparse and not as_dense):
                self._send(slot, grad)
            else:
                by_group = sent if rows[_SENT][index] else held
                by_group.setdefault(id(slot.group), []).append(slot)
        for slots in (held | sent).values():
            members = slots[0].group.members if slots[0].group is not None else slots
            self._send_group([slot for slot in members if slot in slots])


def _can_be_hooked(param: torch.Tensor) -> bool:
    return param.is_leaf and (param.is_floating_point() or param.is_complex())


@contextlib.contextmanager
def _requiring_grad(param: torch.Tensor) -> Iterator[None]:
    """Let a frozen parameter be hooked: torch wants `requires_grad` only at that moment."""
    before = param.requires_grad
    param.requires_grad_(True)
    try:
        yield
    finally:
        param.requires_grad_(before)


def _existing_grad(param: torch.Tensor, *, sparse: bool) -> torch.Tensor:
    """The gradient of `param`; zeros, in the layout that other ranks have, where this rank has none."""
    if param.grad is None:
        zeros = torch.zeros_like(param, requires_grad=False)
        param.grad = zeros.to_sparse(1) if sparse else zeros
    return param.grad


def _explain_duplicate(error: ValueError) -> None:
    """Add to a complaint about a name in use what it means for gradients."""
    if "same name" in str(error):
        error.add_note(
            "Distributed optimizers whose gradients come from one backward pass need different parameter names: "
            'give each its own named_parameters, such as model.named_parameters(prefix="generator").'
        )


def _replace_grad(param: torch.Tensor, grad: torch.Tensor) -> None:
    param.grad = grad


def _remove_hooks(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
