"""Decides when each gradient of an optimizer is reduced: hooks, accumulation counters, groups, agreement.

One `GradientReducer` belongs to one wrapped optimizer. A hook per parameter counts backward passes and starts the
reduction. At the end of the backward pass the ranks exchange which gradients exist, and wait for the reductions.
`backward()` therefore returns with reduced gradients, and clipping, loss scaling or logging may follow in any order.

A gradient that was sent is never added to. A later gradient of the same parameter and cycle is accumulated in other
memory, reduced as a separate operation, and added to the first result. For averages and sums, which are linear, several
backward passes before a step therefore equal one pass over the sum of their losses. Other operators raise an error.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from horovod.common._gradient_presence import (
    IS_DENSE,
    IS_SPARSE,
    LOCAL_ONLY,
    ROWS,
    SENT,
    WAITS_FOR_GROUP,
    Announcement,
    GradientPresence,
)
from horovod.common._optimizer_settings import ReduceOptions
from horovod.common._soft_wait import SoftWait
from horovod.common.consistency import Watch
from horovod.torch._early_steps import LeftGradients
from horovod.torch._exclusive_parameters import refuse_foreign, refuse_shared
from horovod.torch._gradient_entries import (
    IDLE,
    READY,
    STARTED,
    GradientEntry,
    Group,
    unwatch,
    zeros_for,
)
from horovod.torch._gradient_errors import (
    EXTRA_BACKWARD,
    NOT_LINEAR,
    changed_early,
    changed_in_flight,
    not_reduced,
)
from horovod.torch._gradient_hooks import can_be_watched, passing, queue_callback
from horovod.torch._gradient_sending import Sender
from horovod.torch._group_changes import Changes
from horovod.torch.mpi_ops import Average, Sum

# Reducers whose hooks are registered.
_reducers: weakref.WeakSet[GradientReducer] = weakref.WeakSet()


class _EndOfPass:
    """Callback that torch calls at the end of a backward pass, and releases without a call when the pass fails."""

    __slots__ = ("__weakref__", "_reducer")

    def __init__(self, reducer: weakref.ref[GradientReducer]) -> None:
        self._reducer = reducer

    def __call__(self) -> None:
        reducer = self._reducer()
        if reducer is not None:
            reducer._end_of_backward()


class GradientReducer:
    """Reduces the gradients of one optimizer's parameters over a process set."""

    def __init__(self, options: ReduceOptions, passes: int, watch: Watch) -> None:
        self.passes = passes
        self.watch = watch
        self.wait_in_backward = True
        # Whether a GradScaler took the decision about this cycle's step; it may have skipped the step.
        self.step_skipped = False
        self._options = options
        self._entries: list[GradientEntry] = []  # sorted by name: the same order on every rank
        self._sender = Sender(options, self._entries)
        self._by_param: dict[torch.Tensor, GradientEntry] = {}
        self._presence = GradientPresence(watch, options.process_set)
        self._soft_wait = SoftWait()
        self._in_parts: list[GradientEntry] = []
        self._left = LeftGradients()
        self._announced: Announcement | None = None
        # Number of gradients that were not sent, or were reopened after they were sent.
        self._open = 0
        self._repeated = False  # whether a gradient was sent twice in this cycle
        self._touched = False
        self._unannounced = False
        self._agreed = False
        self._reduced = False  # whether anything was agreed upon in this cycle
        self._refused = False  # whether this rank alone may have ended a step with an error
        # How often each gradient was sent, as of the last agreement; empty before the first agreement of a cycle.
        self._known: Sequence[int] = b""
        self._holding = 0
        # The callback of the current backward pass; the reference is dead if the pass failed.
        self._end: weakref.ref[_EndOfPass] | None = None
        # Names of parameters that were added after the optimizer was wrapped.
        self._late: set[str] = set()
        self._me = weakref.ref(self)
        self._exclusive = False  # whether `_check_exclusive` found no other reducer
        _reducers.add(self)
        weakref.finalize(self, unwatch, self._entries)

    # ---- set-up ------------------------------------------------------------------------------------------------

    def track(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Register parameters under the names of their operations, and hook them.

        Frozen parameters are hooked too, because the script may unfreeze them.
        """
        known = dict(zip(self._entries, self._known or bytes(len(self._entries)), strict=True))
        for name, param in named:
            entry = GradientEntry(param, name, self.passes)
            self._entries.append(entry)
            self._by_param[param] = entry
            if can_be_watched(param):  # `finish` reduces the gradients of other parameters
                self._watch(entry)
        self._entries.sort(key=lambda entry: entry.name)
        self._open += len(named)
        self._known = [known.get(entry, 0) for entry in self._entries]
        self._name_entries()
        self._exclusive = False

    def _name_entries(self) -> None:
        # The shapes of late parameters are compared too, so that ranks that added them in different orders fail.
        late = [tuple(e.param.shape) for e in self._entries if e.name in self._late]
        self._presence.set_names([entry.name for entry in self._entries], late)

    def retrack(self, changes: Changes) -> None:
        """Apply changes of the optimizer's groups; `finish` reduces gradients that exist already."""
        if self._announced is not None:
            self._bring_to_an_end()  # the rows of the announcement match the entries before the change
        for old, new in changes.replaced:
            entry = self._by_param.pop(old)
            self._let_go(entry)
            if entry.state == STARTED:
                self._open += 1
            entry.replace(new, self.passes)
            self._by_param[new] = entry
            if can_be_watched(new):
                self._watch(entry)
        for param in changes.removed:
            entry = self._by_param.pop(param)
            self._let_go(entry)
            if entry.state != STARTED:
                self._open -= 1
            if entry.group is not None:
                entry.group.members.remove(entry)
            index = self._entries.index(entry)
            del self._entries[index]
            self._known = [*self._known[:index], *self._known[index + 1 :]]
        self._agreed = False
        self._late.update(name for name, _ in changes.added)
        self._late.update(self._by_param[new].name for _, new in changes.replaced)
        self.track(changes.added)

    def _let_go(self, entry: GradientEntry) -> None:
        entry.unwatch()
        self._left.forget(entry)
        if entry.group is not None:
            entry.group.arrived.discard(entry)
        if entry in self._in_parts:
            self._in_parts.remove(entry)

    def set_groups(self, groups: Sequence[Sequence[torch.Tensor]]) -> None:
        """Reduce the gradients of each list as one operation."""
        for params in groups:
            members = [self._by_param[param] for param in params]
            if len(members) > 1:
                group = Group(members)
                for entry in members:
                    entry.group = group

    def detach(self) -> None:
        """Remove every hook; this object reduces nothing from now on."""
        unwatch(self._entries)
        _reducers.discard(self)

    def _watch(self, entry: GradientEntry) -> None:
        me = self._me

        def reopen() -> None:
            reducer = me()
            if reducer is not None:
                reducer._reopen(entry)

        def after(*seen: Any) -> None:
            reducer = me()
            if reducer is not None:
                reducer._on_gradient(entry, seen)

        entry.watch(reopen, after)

    # ---- one cycle ---------------------------------------------------------------------------------------------

    @property
    def unfinished(self) -> bool:
        """Return whether backward passes left gradients that `finish` would still reduce."""
        return self._touched and not self._agreed

    @property
    def in_flight(self) -> bool:
        """Return whether gradients or an announcement are in flight because a `backward()` did not wait for them."""
        return self._announced is not None or self._sender.in_flight

    @property
    def touched(self) -> bool:
        """Return whether any gradient was computed in this cycle."""
        return self._touched

    def reset(self) -> None:
        """Begin a new cycle; results of operations in flight are discarded."""
        self._sender.forget()
        self._in_parts.clear()
        self._left.clear()
        self._announced = self._end = None
        self._touched = self._unannounced = self._agreed = self.step_skipped = False
        self._repeated = self._reduced = self._refused = False
        self._known = b""
        self._open = len(self._entries)
        passes = self.passes
        for entry in self._entries:
            entry.state = entry.sent = IDLE
            entry.settled = entry.is_fresh = entry.is_left = False
            entry.passes_left = passes
            if entry.parts:
                entry.parts = []
            if entry.group is not None:
                entry.group.arrived.clear()

    def stepped(self) -> None:
        """Begin a new cycle after a step; operations in flight are completed first."""
        if self._announced is not None:  # a step under skip_synchronize()
            self._bring_to_an_end()
        self._presence.count_step()
        self.wait()
        self.reset()

    def drop(self) -> None:
        """Begin a new cycle without a step; operations that were announced to other ranks are completed first."""
        if self.step_skipped:
            self.wait()
        else:
            if self._sender.handed_over or self._announced is not None:
                self._bring_to_an_end()
            if self._reduced or self._refused:
                self._presence.count_drop()
        self.reset()

    def forget_job(self) -> None:
        """Reset the state for a new generation, whose ranks may have just started."""
        self.reset()
        self._late.clear()  # new ranks wrap an optimizer that has these parameters from the beginning
        self._name_entries()
        self._presence.forget_job()

    def note_join(self) -> None:
        """Reset the counts of steps and drops after a join: ranks with fewer batches took fewer steps."""
        self._presence.note_join()

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """Accumulate gradients inside the block without sending any."""
        self._holding += 1
        try:
            yield
        finally:
            self._holding -= 1
        self._note_left()

    def refuse_changed(self, *, is_unscaled: bool = False) -> None:
        """Raise if the script has changed gradients that are not reduced yet.

        With `is_unscaled`, every gradient that is not reduced yet counts as changed.
        """
        changed = self._left.names() if is_unscaled else self._left.changed()
        if changed:
            self._refused = True
            raise RuntimeError(changed_early(changed, self.passes))

    def refuse_changed_in_flight(self) -> None:
        """Raise if the script has changed gradients while they were being reduced."""
        changed = self._left.changed(lambda entry: entry.settled)
        if changed:
            self._refused = True
            raise RuntimeError(changed_in_flight(changed))

    def finish(self) -> None:
        """Reduce every gradient that exists on any rank and is not reduced yet; wait for all of them.

        A parameter without gradient on all ranks gets zeros.
        """
        if not self._exclusive:  # no backward pass that our hooks have seen
            self._check_exclusive()
        if self._open:
            self._sender.check_again()
            for entry in self._entries:
                if entry.state == IDLE and entry.param.grad is not None:
                    self._ready(entry)
                    self._agreed = False
        if self._agreed:
            self.wait()
        # A peer may still be in a backward pass. It announces its other gradients after the pending agreement.
        while not self._agreed:
            self._bring_to_an_end()
        self._left.clear()
        if self._open and self._options.zero_missing_gradients:
            for entry in self._entries:
                if entry.param.grad is None and entry.param.requires_grad:
                    entry.param.grad = zeros_for(entry.param, sparse=entry.sparse)

    def _bring_to_an_end(self) -> None:
        try:
            if self._announced is not None:
                self._agree()
            if not self._agreed:
                self._agree()
            self.wait()
        except BaseException:
            self.reset()
            raise

    def _on_gradient(self, entry: GradientEntry, seen: tuple[Any, ...]) -> None:
        # A hook of the script may have called step() or synchronize(), which sent this gradient.
        if not entry.is_arriving:
            return
        if self.step_skipped:  # without a zero_grad() of this optimizer since
            self.wait()
            self.reset()
        self._touched = entry.is_left = True
        if self._holding:
            self._keep_apart(entry, seen)
            return
        if queue_callback is not None and (self._end is None or self._end() is None):
            self._begin_pass(entry, queue_callback)
        self._agreed = False
        entry.passes_left -= 1
        if entry.passes_left == 0:
            self._ready(entry, seen)
        elif entry.settled:  # this torch has no hook that runs before the addition
            raise AssertionError(EXTRA_BACKWARD)
        else:
            self._keep_apart(entry, seen)
        if queue_callback is None:
            if self._unannounced and self._all_sent():
                self._end_of_backward()
            else:
                self._left.note([entry])

    def _all_sent(self) -> bool:
        return all(entry.settled for entry in self._entries if entry.param.requires_grad)

    def _begin_pass(
        self, entry: GradientEntry, queue_callback: Callable[[Callable[[], None]], None]
    ) -> None:
        if not self._exclusive:
            self._check_exclusive()
        if self._end is not None:
            # The last pass failed. Its gradients must not be added to those of this pass, whose first one is in `grad`.
            grad, entry.param.grad = entry.param.grad, None
            if self._sender.handed_over or self._announced is not None:
                self._bring_to_an_end()
            else:
                self.reset()
            entry.param.grad = grad
            self._touched = True
        end = _EndOfPass(self._me)
        self._end = weakref.ref(end)
        queue_callback(end)

    def _check_exclusive(self) -> None:
        """Raise if another object reduces these gradients too. Runs once, at the first backward pass or `finish`."""
        named = [(entry.name, entry.param) for entry in self._entries]
        refuse_foreign(named)
        refuse_shared(named, lambda: [r._by_param for r in _reducers if r is not self])
        self._exclusive = True

    def _end_of_backward(self) -> None:
        self._end = None
        try:
            self._sender.hand_over()
            if self._unannounced and self.wait_in_backward and not self._holding:
                self._wait_softly()
        except BaseException:
            self.reset()
            raise
        if self.passes > 1 or self.in_flight:
            self._note_left()

    def _note_left(self) -> None:
        # A gradient from an earlier cycle, such as old zeros, is not noted.
        in_flight = self.in_flight
        self._left.note(e for e in self._entries if e.is_left or (in_flight and e.settled))

    def _reopen(self, entry: GradientEntry) -> None:
        """Store a gradient that was sent in `entry.parts`, so that the next one is accumulated in other memory."""
        self._sender.hand_over()
        grad = entry.param.grad
        if grad is None:  # dropped by the user
            entry.parts.clear()
        else:
            if self._options.op not in (Average, Sum):
                raise AssertionError(NOT_LINEAR)
            if not entry.parts:
                self._in_parts.append(entry)
            entry.parts.append(grad)
            entry.param.grad = None
        entry.state = IDLE
        entry.settled = False
        entry.passes_left = self.passes
        self._open += 1

    # ---- sending -----------------------------------------------------------------------------------------------

    def _keep_apart(self, entry: GradientEntry, seen: tuple[Any, ...] = ()) -> None:
        """Copy an unsent gradient if its memory has other owners, because the next pass adds to it in place."""
        grad = entry.param.grad
        if grad is not None and entry.is_fresh:
            self._sender.own(entry, grad, passing(seen))

    def _ready(self, entry: GradientEntry, seen: tuple[Any, ...] = ()) -> None:
        grad = entry.param.grad
        if grad is None:
            raise RuntimeError(
                f"the gradient of {entry.name!r} vanished while it was being reduced"
            )
        if grad.requires_grad:
            raise AssertionError(
                f"the gradient of {entry.name!r} carries a graph (backward(create_graph=True)); reducing it in place "
                "would falsify its derivative. Take higher derivatives with torch.autograd.grad and put "
                "detached tensors into .grad."
            )
        group = entry.group
        if group is None:
            self._send(entry, grad, seen)
            return
        group.arrived.add(entry)
        if grad.is_sparse and not self._options.sparse_as_dense:
            self._send(entry, grad)
        else:
            entry.state = READY
            self._unannounced = True
        if len(group.arrived) == len(group.members):
            group.arrived.clear()
            self._send_group([member for member in group.members if member.state == READY], seen)
        else:
            self._keep_apart(entry, seen)

    def _send(self, entry: GradientEntry, grad: torch.Tensor, seen: tuple[Any, ...] = ()) -> None:
        self._mark_started(entry)
        # The last gradients are handed over together with the announcement at the end of the pass.
        if self._sender.hold(entry, grad) and (self._open or self._end is None):
            self._sender.hand_over(passing(seen))

    def _send_group(self, entries: list[GradientEntry], seen: tuple[Any, ...] = ()) -> None:
        if not entries:
            return
        for entry in entries:
            self._mark_started(entry)
        self._sender.send_group(entries, passing(seen))

    def _mark_started(self, entry: GradientEntry) -> None:
        entry.state = STARTED
        entry.settled = True
        entry.is_left = False
        self._left.forget(entry)
        entry.is_arriving = False
        entry.passes_left = 0
        entry.sent += 1
        if entry.sent > 1:
            self._repeated = True
        self._open -= 1
        self._unannounced = True

    def wait(self) -> None:
        """Wait for the reductions in flight and write their results to the gradients; raise the first error."""
        self._sender.wait()
        self._left.forget_sent()
        if self._in_parts:
            united = [entry for entry in self._in_parts if entry.settled]
            self._in_parts = [entry for entry in self._in_parts if not entry.settled]
            for entry in united:
                entry.unite()

    def _wait_softly(self) -> None:
        """Agree and wait, but return early if a peer waits for an operation that this rank calls after `backward()`.

        `finish` then does the rest.
        """
        while self._announced is not None or self._unannounced:
            # An announcement of an earlier pass is completed first.
            self._announced = self._announced or self._announce()
            if not self._soft_wait.have_ended([self._announced.handle], self._not_reduced):
                return
            self._agree()
        self._sender.hand_over()
        if self._soft_wait.have_ended(self._sender.awaited, self._not_reduced):
            self.wait()

    def _not_reduced(self, rank: int, operation: str) -> str:
        return not_reduced([entry.name for entry in self._entries], rank, operation)

    # ---- agreement ---------------------------------------------------------------------------------------------

    def _agree(self) -> None:
        """Receive which gradients other ranks sent, and send zeros for those that this rank does not have.

        Without this exchange, ranks that used a parameter would wait forever for ranks that did not use it. If every
        rank sent zeros for its unused parameters, a parameter that no rank used could not keep `None`.
        """
        announced, self._announced = self._announced or self._announce(), None
        rows = self._presence.learn(announced)
        later = self._unannounced
        self._agreed = not later
        if rows is None:
            self._known = self._presence.sent_by_all(announced)
        else:
            self._join_others(rows)
            self._sender.hand_over()  # all ranks take part in these operations, so `drop` need not announce them
        self._unannounced = self._sender.handed_over = later
        self._reduced = True

    def _announce(self) -> Announcement:
        """Start the exchange that announces this rank's gradients to the other ranks, and return it."""
        self._sender.hand_over()
        announced = self._presence.announce(self._rows())
        self._unannounced = False
        return announced

    def _rows(self) -> list[list[int]] | None:
        if not (self._open or self._sender.sparse or self._repeated):
            return None
        rows = [[0] * len(self._entries) for _ in range(ROWS)]
        for index, entry in enumerate(self._entries):
            grad = entry.param.grad
            rows[SENT][index] = entry.sent
            if grad is None:
                continue
            rows[IS_SPARSE if grad.is_sparse else IS_DENSE][index] = 1
            if entry.state == READY:
                rows[WAITS_FOR_GROUP][index] = entry.sent + 1
            elif entry.state == IDLE:
                rows[LOCAL_ONLY][index] = entry.sent + 1
        return rows

    def _join_others(self, rows: Sequence[Sequence[int]]) -> None:
        """Send the gradients that this rank has not sent, but other ranks sent or queued for an incomplete group."""
        wanted = [max(both) for both in zip(rows[SENT], rows[WAITS_FOR_GROUP], strict=True)]
        # Rounds count from the last agreement. A rank that had all members of a group sent them together, no matter how
        # often each was sent before.
        numbers = list(self._known or bytes(len(wanted)))
        while any(number < w for number, w in zip(numbers, wanted, strict=True)):
            numbers = [number + 1 for number in numbers]
            self._join_round(numbers, wanted, rows)
        self._known = wanted
        if any(local > all_ for local, all_ in zip(rows[LOCAL_ONLY], wanted, strict=True)):
            self._agreed = False

    def _join_round(
        self, numbers: Sequence[int], wanted: Sequence[int], rows: Sequence[Sequence[int]]
    ) -> None:
        as_dense = self._options.sparse_as_dense
        # Gradients to send now, by group. Some rank had all members and sent those in `sent`; no rank has sent those in
        # `unsent`.
        sent: dict[Group, list[GradientEntry]] = {}
        unsent: dict[Group, list[GradientEntry]] = {}
        for index, (entry, number) in enumerate(zip(self._entries, numbers, strict=True)):
            if wanted[index] < number:
                continue
            entry.sparse = bool(rows[IS_SPARSE][index])
            if entry.sparse and rows[IS_DENSE][index] and not as_dense:
                raise RuntimeError(
                    f"the gradient of {entry.name!r} is sparse on some ranks and dense on others; "
                    "use DistributedOptimizer(..., sparse_as_dense=True)"
                )
            if entry.sent >= number:
                continue
            if entry.settled:
                self._reopen(entry)
            if entry.param.grad is None:
                entry.param.grad = zeros_for(entry.param, sparse=entry.sparse)
            if entry.group is None or (entry.sparse and not as_dense):
                self._send(entry, entry.param.grad)
            else:
                by_group = sent if rows[SENT][index] >= number else unsent
                by_group.setdefault(entry.group, []).append(entry)
        for groups in (unsent, sent):
            for group, entries in groups.items():
                chosen = set(entries)
                self._send_group([entry for entry in group.members if entry in chosen])
                group.arrived = {entry for entry in group.arrived if entry.state == READY}
