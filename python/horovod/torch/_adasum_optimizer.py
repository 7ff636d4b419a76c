"""The Adasum delta optimizer: every rank takes its own step, and the ranks' moves are combined with Adasum."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from horovod.torch._gradient_reducer import EXTRA_BACKWARD
from horovod.torch._handles import remember_until_job_ends
from horovod.torch._optimizer_wrapping import (
    ZERO_GRAD_TOO_EARLY,
    Wrapped,
    active,
)
from horovod.torch.mpi_ops import Adasum, Max, allreduce_async_, synchronize


class _DistributedAdasumOptimizer(Wrapped):
    """Combines weight changes instead of gradients.

    `step()` lets the wrapped optimizer move the parameters with this rank's gradients, reduces the moves with
    Adasum and applies the result to the parameters as they were. Parameters are never seen half-way.
    """

    sparse_as_dense: bool
    # There only while a GradScaler takes a step.
    grad_scale: torch.Tensor | None
    found_inf: torch.Tensor | None
    _hvd_counter: _PassCounter | None = None

    def _hvd_attach(self) -> None:
        remember_until_job_ends(self)
        if active(self.process_set):
            self._hvd_counter = _PassCounter(self._hvd_settings.passes)
            self._hvd_counter.track([param for _, param in self._hvd_named_parameters()])

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set how many backward passes may be accumulated before a step."""
        self.backward_passes_per_step = passes
        if self._hvd_counter is not None:
            self._hvd_counter.passes = passes
            self._hvd_counter.reset()

    def synchronize(self) -> None:
        """Do nothing: there is nothing to wait for before `step()`."""

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Refuse: the reduction is part of the step itself."""
        raise AssertionError(
            "Skipping synchronization is not supported when using Adasum optimizer."
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the optimizer and include them in the reduction."""
        super().add_param_group(param_group)
        self._hvd_adopt_groups()

    def _hvd_track(self, names: Sequence[str], params: Sequence[torch.Tensor]) -> None:
        if self._hvd_counter is not None:
            self._hvd_counter.track(params)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimizer's state and begin a new cycle."""
        self._hvd_forget_job()
        super().load_state_dict(state_dict)

    def _hvd_forget_job(self) -> None:
        if self._hvd_counter is not None:
            self._hvd_counter.reset()

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Reset the gradients as the wrapped optimizer does; not between a full cycle and its step."""
        counter = self._hvd_counter
        if counter is not None:
            if counter.complete:
                raise AssertionError(ZERO_GRAD_TOO_EARLY)
            counter.reset()
        super().zero_grad(*args, **kwargs)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Ask a GradScaler to leave the decision on infinite gradients to `step()`.

        Gradients are local here, so the scalers of different ranks would decide differently.
        """
        return self._hvd_counter is not None or self._hvd_inner_scales()

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        self.__dict__["_step_supports_amp_scaling"] = value

    def _hvd_inner_scales(self) -> bool:
        inherited = getattr(super(), "_step_supports_amp_scaling", False)
        return bool(self.__dict__.get("_step_supports_amp_scaling", inherited))

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Take the local step (with `closure`, if given) and return its value; combine the ranks' moves."""
        self._hvd_adopt_groups()
        counter = self._hvd_counter
        self._hvd_note_step()
        if counter is None:
            return super().step(*args, **kwargs)
        counter.reset()
        if self._hvd_some_rank_overflowed():
            return None
        if self.sparse_as_dense:
            for _, param in self._hvd_named_parameters():
                if param.grad is not None and param.grad.is_sparse:
                    param.grad = param.grad.to_dense()
        if args and callable(args[0]):
            args = (counter.restarting(args[0]), *args[1:])
        elif callable(kwargs.get("closure")):
            kwargs["closure"] = counter.restarting(kwargs["closure"])
        moved = [(n, p) for n, p in self._hvd_named_parameters() if p.requires_grad]
        before = [param.detach().clone() for _, param in moved]
        result = super().step(*args, **kwargs)
        counter.reset()
        self._hvd_combine(moved, before)
        return result

    def _hvd_some_rank_overflowed(self) -> bool:
        """Under a GradScaler: agree on skipping the step, and undo the loss scale if that is left to us."""
        found = getattr(self, "found_inf", None)
        if found is None:
            return False
        flag = torch.zeros((), dtype=torch.float32) + found.detach().cpu()
        name = f"found_inf.{self._hvd_settings.key}"
        if synchronize(allreduce_async_(flag, name=name, op=Max)).item() > 0:
            return True
        if not self._hvd_inner_scales():
            scale = self.grad_scale
            for _, param in self._hvd_named_parameters():
                if scale is not None and param.grad is not None:
                    param.grad.div_(scale.to(param.grad.device))
            # Nothing is left for the inner step to do about scaling; the scaler deletes both when it is back.
            self.grad_scale = self.found_inf = None
        return False

    def _hvd_combine(
        self, moved: list[tuple[str, torch.Tensor]], before: list[torch.Tensor]
    ) -> None:
        compression = self._hvd_settings.options.compression
        with torch.no_grad():
            sent = []
            for (name, param), start in zip(moved, before, strict=True):
                tensor, ctx = compression.compress(param - start)
                sent.append((allreduce_async_(tensor, name=name, op=Adasum), ctx))
                param.copy_(start)  # until the combined move is known, and if it never comes
            for (_, param), (handle, ctx) in zip(moved, sent, strict=True):
                param.add_(compression.decompress(synchronize(handle), ctx))


class _PassCounter:
    """Counts backward passes per parameter, to refuse more than were announced."""

    def __init__(self, passes: int) -> None:
        self.passes = passes
        self._done: dict[torch.Tensor, int] = {}
        self._hooks: list[Any] = []
        weakref.finalize(self, _remove, self._hooks)

    @property
    def complete(self) -> bool:
        """Whether some parameter has had all its passes since the last step."""
        return any(done >= self.passes for done in self._done.values())

    def reset(self) -> None:
        self._done.clear()

    def track(self, params: Sequence[torch.Tensor]) -> None:
        me = weakref.ref(self)

        def count(param: torch.Tensor) -> None:
            counter = me()
            if counter is not None:
                counter._count(param)

        for param in params:
            if param.is_leaf and param.requires_grad:
                handle = param.register_post_accumulate_grad_hook(count)  # type: ignore[no-untyped-call]
                self._hooks.append(handle)

    def restarting(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure of which every call is a cycle of its own."""

        def restarted() -> Any:
            self.reset()
            return closure()

        return restarted

    def _count(self, param: torch.Tensor) -> None:
        done = self._done.get(param, 0)
        if done >= self.passes:
            raise AssertionError(EXTRA_BACKWARD)
        self._done[param] = done + 1


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
