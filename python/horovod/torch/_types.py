"""Optimizers as type checkers see them; their classes are made at run time.

An optimizer that `DistributedOptimizer` returns is of a subclass of the wrapped one's class with more methods. No
annotation can say that, so its type here has `Any` among its bases. It may be assigned wherever the wrapped optimizer
may, such as to that optimizer's variable, and has the attributes of any optimizer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic

import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from typing_extensions import TypeVar

    from horovod.common.process_sets import ProcessSet

    OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer, default=Any)

    class Distributed(torch.optim.Optimizer, Any, Generic[OptimizerT]):  # type: ignore[misc]
        """The optimizer given, with what `DistributedOptimizer` adds."""

        backward_passes_per_step: int
        op: int
        gradient_predivide_factor: float
        sparse_as_dense: bool
        process_set: ProcessSet
        wait_in_backward: bool

        def synchronize(self) -> None: ...
        def skip_synchronize(self) -> AbstractContextManager[None]: ...
        def no_sync(self) -> AbstractContextManager[None]: ...
        def set_backward_passes_per_step(self, passes: int) -> None: ...
        def step(self, closure: Callable[[], Any] | None = None) -> Any: ...
        def zero_grad(self, set_to_none: bool = True) -> None: ...
