"""Private attributes of the original that scripts of others read, told from what this one knows.

They are for reading. Nothing here depends on them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch


class OriginalAttributes:
    """Mixed into the classes of wrapped optimizers."""

    if TYPE_CHECKING:

        def _hvd_named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]: ...

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        """Name of each parameter, by which its gradient travels."""
        return {param: name for name, param in self._hvd_named_parameters()}

    @property
    def _requires_update(self) -> set[torch.Tensor]:
        """Parameters whose gradients are reduced."""
        if getattr(self, "_hvd_reducer", None) is None:
            return set()
        return {param for _, param in self._hvd_named_parameters() if param.requires_grad}

    @property
    def _handles(self) -> dict[torch.Tensor, tuple[Any, Any]]:
        """Parameters with gradients since the last step or `synchronize`; the handles in it are always None.

        The original has one there for each reduction that it has not waited for; here the reducer waits for them.
        """
        reducer = getattr(self, "_hvd_reducer", None)
        if reducer is None or not reducer.touched or self._synchronized:
            return {}
        named = self._hvd_named_parameters()
        return {param: (None, None) for _, param in named if param.grad is not None}

    @property
    def _synchronized(self) -> bool:
        """Whether `synchronize` was called and no step was taken since."""
        return bool(getattr(self, "_hvd_synchronized", False))

    @property
    def _should_synchronize(self) -> bool:
        """Whether `step` reduces what is left: it does not under `skip_synchronize`."""
        return bool(getattr(self, "_hvd_should_synchronize", True))
