"""Decides when each gradient of an optimizer is reduced: hooks, accumulation counters, groups, agreement.

One `GradientReducer` belongs to one wrapped optimizer. A post-accumulate hook per parameter counts backward passes
and starts the reduction; when the last gradient of a backward pass is there, the ranks tell each other which
gradients exist and wait, so that `backward()` returns with reduced gradients and clipping, loss scaling or logging
may follow in any order.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from horovod.common.process_sets import ProcessSet
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

# Where the gradient of one parameter stands within a cycle (from one step() to the next).
_IDLE, _READY, _STARTED = 0, 1, 2

# Rows of the agreement: what some rank may have done with a gradient.
_SENT_DENSE, _SENT_SPARSE, _WAITS_FOR_GROUP, _LOCAL_ONLY = range(4)


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

    __slots__ = ("device", "dtype", "group", "name", "param", "passes_left", "sparse", "state")

    def __init__(self, param: torch.Tensor, name: str, passes: int) -> None:
        self.param = param
        self.name = name
        self.group: _Group | None = None
        self.passes_left = passes
        self.state = _IDLE
        self.sparse = False
        self.dtype = param.dtype
        self.device = param.device


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
        self.step_skipped = (
            False  # a GradScaler decided on this cycle's step, which may be not to take it
        )
        self._options = options
        self._prescale, self._postscale = options.factors()
        self._slots: list[_Slot] = []  # sorted by name: the same order on every rank
        self._by_param: dict[torch.Tensor, _Slot] = {}
        self._in_flight: list[Callable[[], None]] = []
        self._started = 0
        self._touched = False
        self._unannounced = False
        self._agreed = False
        self._holding = 0
        self._fresh_end = False
        self._last_hook = False
        self._hooks: list[Any] = []
        self._end_hook: list[Any] = []
        weakref.finalize(self, _remove_hooks, self._hooks)
        weakref.finalize(self, _remove_hooks, self._end_hook)

    # ---- set-up ------------------------------------------------------------------------------------------------

    def track(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Take parameters under their names on the wire and hook them, frozen ones too: they may thaw."""
        for name, param in named:
            slot = _Slot(param, name, self.passes)
            self._slots.append(slot)
            self._by_param[param] = slot
            self._hook(slot)
        self._slots.sort(key=lambda slot: slot.name)
        self._hook_end_of_backward()

    def tracks(self, param: torch.Tensor) -> bool:
        """Whether `param` was given to `track`."""
        return param in self._by_param

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
        _remove_hooks(self._end_hook)

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

    def _hook_end_of_backward(self) -> None:
        """(Re)build what notices the last gradient of a backward pass.

        `register_multi_grad_hook` knows which parameters take part in the running pass, also when some are unused.
        It is bound to a parameter's dtype and device, hence rebuilt when a model was cast or moved.
        """
        _remove_hooks(self._end_hook)
        params = [slot.param for slot in self._slots if _can_be_hooked(slot.param)]
        if not params:
            return
        me = weakref.ref(self)

        def on_last(_: Sequence[torch.Tensor | None]) -> None:
            reducer = me()
            if reducer is not None:
                reducer._fresh_end = True

        def before_accumulation(grad: torch.Tensor | None) -> torch.Tensor | None:
            reducer = me()
            if reducer is not None:
                # `on_last` also runs for torch.autograd.grad, where no accumulation follows: only a mark that was
                # set just before this call counts.
                reducer._last_hook, reducer._fresh_end = reducer._fresh_end, False
                if grad is None and reducer._last_hook:
                    reducer._end_of_backward()
            # The multi-grad hook keeps its gradients until the pass ends; an alias lets accumulation take over
            # the memory instead of copying it.
            return None if grad is None or grad.requires_grad else grad.detach()

        with torch.enable_grad(), contextlib.ExitStack() as stack:
            for param in params:
                stack.enter_context(_requiring_grad(param))
            self._end_hook.append(torch.autograd.graph.register_multi_grad_hook(params, on_last))
            for param in params:
                self._end_hook.append(param.register_hook(before_accumulation))  # type: ignore[no-untyped-call]

    def refresh(self) -> None:
        """Follow parameters that were cast or moved since the hooks were made."""
        stale = [
            s for s in self._slots if s.param.dtype is not s.dtype or s.param.device != s.device
        ]
        for slot in stale:
            slot.dtype, slot.device = slot.param.dtype, slot.param.device
        if stale:
            self._hook_end_of_backward()

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
        self._in_flight.clear()
        self._started = 0
        self._touched = self._unannounced = self._agreed = self.step_skipped = False
        self._fresh_end = self._last_hook = False
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
        if self._last_hook:
            self._last_hook = False
            self._end_of_backward()

    def _end_of_backward(self) -> None:
        if self._unannounced and self.wait_in_backward and not self._holding:
            try:
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
        slot.sparse = grad.is_sparse and not options.sparse_as_dense
        if slot.sparse:
            result = sparse_allreduce_async(
                grad, name=slot.name, op=options.op, process_set=options.process_set
            )
            self._in_flight.append(lambda: _replace_grad(slot.param, result()))
        else:
            tensor, ctx = options.compression.compress(grad.to_dense() if grad.is_sparse else grad)
            handle = allreduce_async_(
                tensor,
                name=slot.name,
                op=options.op,
                prescale_factor=self._prescale,
                postscale_factor=self._postscale,
                process_set=options.process_set,
            )
            self._in_flight.append(lambda: self._store(slot, grad, synchronize(handle), ctx))
        self._mark_started(slot)

    def _send_group(self, slots: list[_Slot]) -> None:
        if not slots:
            return
        options = self._options
        grads = [grad for slot in slots if (grad := slot.param.grad) is not None]
        packed = [
            options.compression.compress(grad.to_dense() if grad.is_sparse else grad)
            for grad in grads
        ]
        handle = grouped_allreduce_async_(
            [tensor for tensor, _ in packed],
            name=slots[0].name,
            op=options.op,
            prescale_factor=self._prescale,
            postscale_factor=self._postscale,
            process_set=options.process_set,
        )

        def complete() -> None:
            results = synchronize(handle)
            for slot, grad, result, (_, ctx) in zip(slots, grads, results, packed, strict=True):
                self._store(slot, grad, result, ctx)

        self._in_flight.append(complete)
        for slot in slots:
            slot.sparse = False
            self._mark_started(slot)

    def _mark_started(self, slot: _Slot) -> None:
        slot.state = _STARTED
        slot.passes_left = 0
        self._started += 1
        self._unannounced = True

    def _store(self, slot: _Slot, grad: torch.Tensor, reduced: torch.Tensor, ctx: Any) -> None:
        """Put a reduced dense tensor where the gradient was, in the gradient's own memory and layout."""
        result = self._options.compression.decompress(reduced, ctx)
        if grad.is_sparse:
            _replace_grad(slot.param, result.to_sparse(grad.sparse_dim()))
        elif result is not grad:
            with torch.no_grad():
                grad.copy_(result)

    def wait(self) -> None:
        """Wait for the reductions in flight and put their results in place."""
        pending, self._in_flight = self._in_flight, []
        for complete in pending:
            complete()

    # ---- agreement ---------------------------------------------------------------------------------------------

    def _agree(self) -> None:
        """Learn which gradients other ranks sent, and send zeros for those that this rank does not have.

        Without it a parameter that only some ranks used would leave the others waiting, and a parameter that no
        rank used could not keep `None`.
        """
        mine = self._announcement()
        theirs = mine.clone()
        synchronize(
            allreduce_async_(
                theirs,
                name=f"presence.{self._slots[0].name}" if self._slots else "presence",
                op=Max,
                process_set=self._options.process_set,
            )
        )
        self._unannounced = False
        if torch.equal(mine, theirs) and not theirs[_WAITS_FOR_GROUP:].any():
            self._agreed = True
            return
        rows: list[list[int]] = theirs.tolist()
        self._join_others(rows)
        self._unannounced = False
        self._agreed = not any(
            local and slot.state == _IDLE
            for local, slot in zip(rows[_LOCAL_ONLY], self._slots, strict=True)
        )

    def _announcement(self) -> torch.Tensor:
        if self._started == len(self._slots) and not any(slot.sparse for slot in self._slots):
            rows = torch.zeros(4, len(self._slots), dtype=torch.uint8)
            rows[_SENT_DENSE] = 1
            return rows
        flags = [[0] * len(self._slots) for _ in range(4)]
        for index, slot in enumerate(self._slots):
            if slot.state == _STARTED:
                flags[_SENT_SPARSE if slot.sparse else _SENT_DENSE][index] = 1
            elif slot.state == _READY:
                flags[_WAITS_FOR_GROUP][index] = 1
            elif slot.param.grad is not None:
                flags[_LOCAL_ONLY][index] = 1
        return torch.tensor(flags, dtype=torch.uint8).reshape(4, len(self._slots))

    def _join_others(self, rows: list[list[int]]) -> None:
        groups: dict[int, _Group] = {}
        wanted: set[int] = set()
        waits: set[int] = set()
        for index, slot in enumerate(self._slots):
            if rows[_SENT_DENSE][index] and rows[_SENT_SPARSE][index]:
                raise RuntimeError(
                    f"the gradient of {slot.name!r} is sparse on some ranks and dense on others; "
                    "use DistributedOptimizer(..., sparse_as_dense=True)"
                )
            if rows[_SENT_SPARSE][index]:
                if slot.state != _STARTED:
                    self._send(slot, _existing_grad(slot.param, sparse=True))
            elif slot.group is None:
                if rows[_SENT_DENSE][index] and slot.state != _STARTED:
                    self._send(slot, _existing_grad(slot.param, sparse=False))
            elif rows[_SENT_DENSE][index] or rows[_WAITS_FOR_GROUP][index]:
                groups[id(slot.group)] = slot.group
                (wanted if rows[_SENT_DENSE][index] else waits).add(id(slot))
        for group in groups.values():
            # A rank that had all members has fixed which of them travel; otherwise those that some rank has.
            chosen = [m for m in group.members if id(m) in wanted]
            chosen = chosen or [m for m in group.members if id(m) in waits]
            if chosen and chosen[0].state != _STARTED:
                for slot in chosen:
                    _existing_grad(slot.param, sparse=False)
                self._send_group(chosen)


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
    """The gradient of `param` in the layout that other ranks have; zeros where this rank has none."""
    grad = torch.zeros_like(param, requires_grad=False) if param.grad is None else param.grad
    if grad.is_sparse != sparse:
        grad = grad.to_sparse(1) if sparse else grad.to_dense()
    param.grad = grad
    return grad


def _replace_grad(param: torch.Tensor, grad: torch.Tensor) -> None:
    param.grad = grad


def _remove_hooks(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
