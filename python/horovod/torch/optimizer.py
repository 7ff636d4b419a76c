"""`DistributedOptimizer`: wraps a torch optimizer so that it trains on the gradients of all ranks."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from horovod import _core
from horovod.common._job_events import remember_until_job_ends
from horovod.common._ops import resolve_op
from horovod.common._optimizer_settings import (
    ReduceOptions,
    Settings,
    active,
    check_arguments,
    grouped_names,
    groups_given,
    names_on_the_wire,
)
from horovod.common._replicas import FirstStep
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch._adasum_optimizer import _DistributedAdasumOptimizer
from horovod.torch._consistency import report_replica, watch_step
from horovod.torch._early_steps import is_unscaled_by_caller
from horovod.torch._exclusive_parameters import refuse_foreign
from horovod.torch._gradient_reducer import GradientReducer
from horovod.torch._group_changes import Changes
from horovod.torch._optimizer_wrapping import Wrapped, of_itself, refuse_others, wrap
from horovod.torch.compression import Compression
from horovod.torch.mpi_ops import (
    Adasum,
    Average,
    Max,
    Min,
    Sum,
    allreduce_async_,
    size,
    synchronize,
)
from horovod.torch.sync_batch_norm import warn_of_lonely

if TYPE_CHECKING:
    from horovod.torch._types import Distributed, OptimizerT

_STEP_AFTER_SYNCHRONIZE = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
    "This can cause training slowdown. You may want to consider using optimizer.skip_synchronize() context "
    "if you use optimizer.synchronize() in your code."
)


class _DistributedOptimizer(Wrapped):
    """Reduces gradients during `backward()`, and the remaining ones in `step()`."""

    gradient_predivide_factor: float
    sparse_as_dense: bool

    _hvd_reducer: GradientReducer | None = None
    _hvd_first_step: FirstStep
    _hvd_given: dict[torch.Tensor, str]
    _hvd_synchronized = False
    _hvd_should_synchronize = True

    def _hvd_attach(self) -> None:
        settings = self._hvd_settings
        self._hvd_given = {}
        self._hvd_first_step = FirstStep(self.process_set)
        remember_until_job_ends(self)
        if not active(self.process_set, settings.options.op):
            return
        named = list(self._hvd_named_parameters())
        params = dict(named)
        self._hvd_reducer = GradientReducer(settings.options, settings.passes, settings.watch())
        self._hvd_reducer.track(named)
        self._hvd_reducer.set_groups(
            [[params[name] for name in group] for group in settings.groups]
        )

    # ---- what a training script calls --------------------------------------------------------------------------

    @of_itself
    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set how many backward passes are accumulated locally before a gradient is reduced."""
        self.backward_passes_per_step = passes
        if self._hvd_reducer is not None:
            self._hvd_reducer.passes = passes
            self._hvd_reducer.reset()

    @property
    @of_itself
    def wait_in_backward(self) -> bool:
        """Whether `backward()` returns with reduced gradients (the default).

        If other ranks wait for an operation that this rank calls after `backward()`, `backward()` returns earlier and
        issues one warning. Set this property to False on all ranks to make `backward()` never wait. Gradients must then
        not be read or changed before `synchronize()` or `step()`.
        """
        return self._hvd_reducer is None or self._hvd_reducer.wait_in_backward

    @wait_in_backward.setter
    @of_itself
    def wait_in_backward(self, value: bool) -> None:
        if self._hvd_reducer is not None:
            self._hvd_reducer.wait_in_backward = value

    @of_itself
    def synchronize(self) -> None:
        """Reduce all gradients that were not reduced yet, and wait for them.

        Call this before clipping or unscaling in a step that is taken early (before `backward_passes_per_step` passes),
        and take that step under `skip_synchronize()`. Otherwise `backward()` returns with reduced gradients.
        """
        self._hvd_adopt_groups(self._hvd_given)
        if self._hvd_reducer is not None:
            self._hvd_reducer.refuse_changed_in_flight()
            self._hvd_reducer.finish()
        self._hvd_synchronized = True

    @of_itself
    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Take the steps in the block without reducing gradients first; use this after `synchronize()`."""
        before = self._hvd_should_synchronize
        self._hvd_should_synchronize = False
        try:
            yield
        finally:
            self._hvd_should_synchronize = before

    @of_itself
    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally in the block; the next reduction after the block includes them.

        Passes in the block do not count towards `backward_passes_per_step`.
        """
        if self._hvd_reducer is None:
            yield
            return
        with self._hvd_reducer.holding():
            yield

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Take a step with the gradients of all ranks and return what the wrapped optimizer's step returns.

        Each call of a `closure` returns with reduced gradients. LBFGS also receives the loss reduced over all ranks: it
        decides by the loss how often to evaluate, and the ranks have to decide alike.
        """
        self._hvd_adopt_groups(self._hvd_given)
        closure = args[0] if args else kwargs.get("closure")
        reducer = self._hvd_reducer
        if self._hvd_should_synchronize:
            if self._hvd_synchronized:
                warnings.warn(_STEP_AFTER_SYNCHRONIZE, UserWarning, stacklevel=3)
            if reducer is not None:
                if self._hvd_synchronized and not reducer.unfinished:
                    # Reducing again is harmless only for operators that return equal inputs unchanged.
                    again = self.op in (Average, Min, Max)
                    if again:
                        reducer.reset()
                else:
                    again = True
                if again and (reducer.touched or not callable(closure)):
                    reducer.refuse_changed()
                    reducer.finish()
        self._hvd_synchronized = False
        if reducer is not None:
            reducer.refuse_changed_in_flight()
            reducer.stepped()
            reducer.watch.raise_difference()
            if callable(closure):
                reducing = self._hvd_reducing(reducer, closure)
                if args:
                    args = (reducing, *args[1:])
                else:
                    kwargs["closure"] = reducing
            if self._hvd_first_step.is_due():
                report_replica(self._hvd_named_parameters(), self.process_set)
        self._hvd_note_step()
        result = super().step(*args, **kwargs)
        if reducer is not None:
            watch_step(reducer.watch, self._hvd_named_parameters())
        return result

    @of_itself
    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Reset the gradients as the wrapped optimizer does.

        After `backward()` this skips the batch, also if an exception has interrupted `backward()`. All ranks have to
        skip the same batches; otherwise the next reduction raises an error on all ranks.
        """
        self._hvd_adopt_groups(self._hvd_given)
        self._hvd_synchronized = False
        if self._hvd_reducer is not None:
            self._hvd_reducer.drop()
        super().zero_grad(*args, **kwargs)

    @of_itself
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimizer's state and begin a new cycle; results of reductions in flight are discarded."""
        self._hvd_should_synchronize = True
        self._hvd_synchronized = False
        if self._hvd_reducer is not None:
            self._hvd_reducer.reset()
        super().load_state_dict(state_dict)

    def _hvd_forget_job(self) -> None:
        self._hvd_synchronized = False
        if self._hvd_reducer is not None:
            self._hvd_reducer.forget_job()

    def _hvd_note_join(self) -> None:
        if self._hvd_reducer is not None:
            self._hvd_reducer.note_join()

    @of_itself
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the optimizer; their gradients are reduced like the others, outside any group.

        If `named_parameters` included a parameter that is added later, the parameter has that name.
        """
        super().add_param_group(param_group)
        self._hvd_adopt_groups(self._hvd_given)

    def _hvd_recipe(self) -> tuple[type[Wrapped], type[torch.optim.Optimizer], Settings]:
        # The base class would adopt new parameters without the names of `named_parameters`, which other ranks use.
        self._hvd_adopt_groups(self._hvd_given)
        return super()._hvd_recipe()

    def _hvd_retrack(self, changes: Changes) -> None:
        if self._hvd_reducer is not None:
            self._hvd_reducer.retrack(changes)

    # ---- read by a GradScaler ----------------------------------------------------------------------------------

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Reduce gradients that an early step has left, and return the wrapped optimizer's own value.

        A GradScaler reads this property right before it inspects the gradients and decides whether to step. If no step
        follows, the scaler has skipped it; `step_skipped` records that.
        """
        reducer = self._hvd_reducer
        if reducer is not None:
            late = self._hvd_should_synchronize and not self._hvd_synchronized
            if reducer.in_flight or (late and reducer.unfinished):
                reducer.refuse_changed(is_unscaled=is_unscaled_by_caller(self, depth=1))
                reducer.finish()
            reducer.step_skipped = True
        inherited = getattr(super(), "_step_supports_amp_scaling", False)
        return bool(self.__dict__.get("_step_supports_amp_scaling", inherited))

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        self.__dict__["_step_supports_amp_scaling"] = value

    def _hvd_reducing(
        self, reducer: GradientReducer, closure: Callable[[], Any]
    ) -> Callable[[], Any]:
        def reducing() -> Any:
            reducer.reset()
            loss = closure()
            if self._hvd_should_synchronize:
                reducer.refuse_changed()
                reducer.finish()
                if isinstance(self, torch.optim.LBFGS):
                    loss = self._hvd_reduced_loss(loss)
            reducer.reset()
            return loss

        return reducing

    def _hvd_reduced_loss(self, loss: Any) -> Any:
        total = torch.as_tensor(loss).detach().clone()
        handle = allreduce_async_(
            total,
            name=f"loss.{self._hvd_settings.key}",
            op=Sum if self.op == Sum else Average,
            process_set=self.process_set,
        )
        reduced = synchronize(handle)
        return reduced if isinstance(loss, torch.Tensor) else reduced.item()


def DistributedOptimizer(
    optimizer: OptimizerT,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int | str = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    zero_missing_gradients: bool = True,
    check_consistency: int | None = None,
    consistency_action: str | None = None,
) -> Distributed[OptimizerT]:
    """Return an optimizer that steps with the gradients of all ranks, and otherwise behaves like the given one.

    The result is an instance of a subclass of the optimizer's class with the same name. It shares parameter groups
    and state with the original and keeps its defaults, attributes and hooks. Each gradient is reduced in place as soon
    as `backward()` has computed it, while `backward()` computes the rest. `backward()` returns when all gradients are
    reduced. Gradient clipping, `torch.amp.GradScaler` and logging therefore see reduced gradients without further
    calls.

    If only some ranks used a parameter, all ranks get its reduced gradient, to which the other ranks contribute zeros.
    A parameter that no rank used gets zeros in `synchronize()` or `step()`. The gradients of several backward passes
    before a step are reduced separately and added up. `zero_grad()` after `backward()` skips the batch; all ranks have
    to skip it. With one process, or on ranks outside `process_set`, the result behaves like the original.

    Parameters
    ----------
    optimizer
        Any `torch.optim.Optimizer`, built over this rank's parameters.
    named_parameters
        Usually `model.named_parameters()`. The names pair the gradients across ranks and have to include every
        parameter of the optimizer. Without this argument gradients are paired by position.
    compression
        `Compression.fp16` sends dense gradients as float16.
    backward_passes_per_step
        Number of backward passes whose gradients are summed locally before they are reduced. The sum is not divided by
        this number. An earlier `step()` reduces the gradients accumulated so far.
    op
        `Average`, `Sum`, `Min`, `Max`, `Product` or `Adasum`. `Adasum` combines the ranks' weight changes instead of
        their gradients, needs the global process set, and ignores `gradient_predivide_factor` and groups. If the model
        is on GPUs and `nccl_built()` is not 0, `Adasum` averages on each host first: multiply the learning rate by
        `local_size()` then.
    gradient_predivide_factor
        With `Average`: gradients are divided by this before the sum and by size / factor after it.
    num_groups
        Deprecated, use `groups`.
    groups
        A number of groups, or lists of parameters: the gradients of a group are reduced as one operation.
    sparse_as_dense
        Reduce sparse gradients as dense tensors. By default their indices and values are gathered.
    process_set
        The ranks that take part.
    zero_missing_gradients
        False leaves `None` where no rank has a gradient, so that weight decay and momentum do not move the
        parameter, as in one process.
    check_consistency
        Number of steps after which the ranks compare checksums of all bits of the parameters; 0: never; None: the
        value of `HOROVOD_CHECK_CONSISTENCY`. The first rank's number applies to all ranks.
    consistency_action
        Severity of a difference. "error" raises `ReplicasDifferError` from the next `step()` of every rank; "warn"
        logs it on the first rank, once per set of tensors; None: the value of `HOROVOD_CONSISTENCY_ACTION`.

    Raises
    ------
    TypeError
        `optimizer` is not a `torch.optim.Optimizer`, but for example a wrapper around one, such as LARC of apex.
    ValueError
        Horovod is not initialised; a parameter is out of range; `named_parameters` or `groups` do not fit the
        optimizer; the model is in `DistributedDataParallel` or sharded by torch.distributed, which reduces gradients
        itself. If a parameter is in two distributed optimizers, the first `backward()` raises the error.
    NotImplementedError
        `Adasum` with a process set other than the global one.

    Examples
    --------
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
    >>> optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    >>> loss.backward()
    >>> torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    >>> optimizer.step()
    """
    refuse_others(optimizer)
    op = resolve_op(op, None)
    groups = groups_given(groups, num_groups)
    check_arguments(
        op,
        gradient_predivide_factor,
        backward_passes_per_step,
        check_consistency,
        consistency_action,
    )
    ranks = size()
    params = [group["params"] for group in optimizer.param_groups]
    names, given = names_on_the_wire(params, named_parameters)
    named = list(zip(chain.from_iterable(names), chain.from_iterable(params), strict=True))
    refuse_foreign(named)
    if ranks > 1:
        warn_of_lonely(named)
    options = ReduceOptions(
        compression,
        op,
        gradient_predivide_factor,
        sparse_as_dense,
        process_set,
        # SparseAdam refuses gradients that are not sparse.
        zero_missing_gradients and not isinstance(optimizer, torch.optim.SparseAdam),
    )
    settings = Settings(options, backward_passes_per_step, names)
    if op == Adasum and (ranks > 1 or _core.is_elastic()):
        if process_set is not global_process_set and process_set.process_set_id != 0:
            raise NotImplementedError("Adasum does not support non-global process sets yet.")
        settings = replace(
            settings, check_consistency=check_consistency, consistency_action=consistency_action
        )
        adasum: Any = wrap(optimizer, _DistributedAdasumOptimizer, settings)
        return adasum  # type: ignore[no-any-return]
    trainable = {param: name for name, param in named if param.requires_grad}
    grouped = grouped_names(groups, trainable, torch.Tensor, settings.key, process_set)
    settings = Settings(
        options, backward_passes_per_step, names, grouped, check_consistency, consistency_action
    )
    if isinstance(optimizer, _DistributedOptimizer) and optimizer._hvd_reducer is not None:
        optimizer._hvd_reducer.detach()
        optimizer._hvd_reducer = None
    result = wrap(optimizer, _DistributedOptimizer, settings)
    result._hvd_given = given
    typed: Any = result
    return typed  # type: ignore[no-any-return]
