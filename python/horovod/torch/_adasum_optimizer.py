"""The Adasum delta optimizer: every rank takes its own step, and the ranks' moves are combined with Adasum."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from horovod.common._job_events import remember_until_job_ends
from horovod.common._objects import start_reducing_bytes
from horovod.common._optimizer_settings import active
from horovod.common._replicas import FirstStep
from horovod.common.consistency import Watch
from horovod.common.process_sets import global_process_set
from horovod.torch._consistency import report_replica, watch_step
from horovod.torch._group_changes import Changes
from horovod.torch._optimizer_wrapping import Wrapped, of_itself
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
    _hvd_watch: Watch | None = None
    _hvd_first_step: FirstStep

    def _hvd_attach(self) -> None:
        remember_until_job_ends(self)
        if active(self.process_set):
            self._hvd_watch = self._hvd_settings.watch()
            self._hvd_first_step = FirstStep(self.process_set)

    def _hvd_forget_job(self) -> None:
        if self._hvd_watch is not None:
            self._hvd_watch.forget_job()

    def _hvd_note_join(self) -> None:
        if self._hvd_watch is not None:
            self._hvd_watch.note_join()

    @of_itself
    def set_backward_passes_per_step(self, passes: int) -> None:
        """Note the number of backward passes; every step takes what was accumulated since the last one."""
        self.backward_passes_per_step = passes

    def synchronize(self) -> None:
        """Do nothing: there is nothing to wait for before `step()`."""

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Refuse: the reduction is part of the step itself."""
        raise AssertionError(
            "Skipping synchronization is not supported when using Adasum optimizer."
        )

    @of_itself
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the optimizer and include them in the reduction."""
        super().add_param_group(param_group)
        self._hvd_adopt_groups()

    def _hvd_retrack(self, changes: Changes) -> None:
        """Nothing to do: a step looks at all parameters."""

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Ask a GradScaler to leave the decision on infinite gradients to `step()`.

        Gradients are local here, so the scalers of different ranks would decide differently.
        """
        return self._hvd_watch is not None or self._hvd_inner_scales()

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        self.__dict__["_step_supports_amp_scaling"] = value

    def _hvd_inner_scales(self) -> bool:
        inherited = getattr(super(), "_step_supports_amp_scaling", False)
        return bool(self.__dict__.get("_step_supports_amp_scaling", inherited))

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Take the local step (with `closure`, if given) and return its value; combine the ranks' moves."""
        self._hvd_adopt_groups()
        self._hvd_note_step()
        watch = self._hvd_watch
        if watch is None:
            return super().step(*args, **kwargs)
        if self._hvd_some_rank_overflowed():
            return None
        if self.sparse_as_dense:
            for _, param in self._hvd_named_parameters():
                if param.grad is not None and param.grad.is_sparse:
                    param.grad = param.grad.to_dense()
        if self._hvd_settings.options.zero_missing_gradients:
            for _, param in self._hvd_named_parameters():
                if param.grad is None and param.requires_grad:
                    param.grad = torch.zeros_like(param, requires_grad=False)
        moved = [(n, p) for n, p in self._hvd_named_parameters() if p.requires_grad]
        before = [param.detach().clone() for _, param in moved]
        if self._hvd_first_step.is_due():
            report_replica(moved, self.process_set)
        result = super().step(*args, **kwargs)
        self._hvd_combine(moved, before, watch)
        watch_step(watch, self._hvd_named_parameters())
        return result

    def _hvd_some_rank_overflowed(self) -> bool:
        """Under a GradScaler: agree on skipping the step, and undo the loss scale if that is left to us."""
        found = getattr(self, "found_inf", None)
        if found is None:
            return False
        flag = torch.zeros((), dtype=torch.float32, device="cpu") + found.detach().cpu()
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
        self, moved: list[tuple[str, torch.Tensor]], before: list[torch.Tensor], watch: Watch
    ) -> None:
        compression = self._hvd_settings.options.compression
        own, largest = watch.sent, bytearray(watch.sent)
        name = f"consistency.{self._hvd_settings.key}.sent"
        sent = [start_reducing_bytes(largest, Max, name, global_process_set)]
        contexts = []
        with torch.no_grad():
            for (name, param), start in zip(moved, before, strict=True):
                tensor, ctx = compression.compress(param - start)
                sent.append(allreduce_async_(tensor, name=name, op=Adasum))
                contexts.append(ctx)
                param.copy_(start)  # until the combined move is known, and if it never comes
            _, *results = [synchronize(handle) for handle in sent]
            if largest != own:
                watch.receive(bytes(largest))
            watch.raise_difference()
            for (_, param), result, ctx in zip(moved, results, contexts, strict=True):
                param.add_(compression.decompress(result, ctx))
