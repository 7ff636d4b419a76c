"""Hooks on a parameter's accumulation node: they run after all hooks that the user registers on the tensor.

Hooks of a tensor run in the order in which they were registered. A hook of ours on the tensor would run before hooks
that the user registers later, and those could change a gradient that is being sent. Hooks of the node that accumulates
into `.grad` run after all hooks of the tensor. PyTorch makes another node when the parameter's dtype or device changes.
One hook of ours on the tensor, which remains, detects the new node before that node accumulates.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from horovod.torch._gradient_errors import COMPILED_BACKWARD

# Returns the node that this thread's backward pass runs. Torch before 2.1 lacks it: there the tensor itself is hooked.
_current_node: Callable[[], Any] | None = getattr(torch._C, "_current_autograd_node", None)

# Runs a function when the current backward pass is over. Older versions of torch lack it. There `backward()` waits
# if all trainable parameters got a gradient; otherwise `step()` waits.
queue_callback: Callable[[Callable[[], None]], None] | None = getattr(
    torch.autograd.graph, "queue_callback", None
)


class Watched:
    """A parameter with hooks on the accumulation of its gradients.

    While `settled` is set, nothing may change the gradient; `reopen` is called before the next one is accumulated.
    """

    __slots__ = (
        "_after",
        "_handles",
        "_node",
        "_reopen",
        "is_arriving",
        "is_fresh",
        "param",
        "settled",
    )

    def __init__(self, param: torch.Tensor) -> None:
        self.param = param
        self.settled = False
        # Whether the parameter had no gradient before the last accumulation. Then PyTorch chose the gradient's memory.
        self.is_fresh = False
        # Whether the gradient that is being accumulated is still to be sent. A hook of the script may run before ours
        # and call `step()`, which sends the gradient.
        self.is_arriving = False
        self._handles: list[Any] = []
        self._node: Any = None

    def watch(self, reopen: Callable[[], None], after: Callable[..., None]) -> None:
        """Register hooks: `after` runs after each accumulation, `reopen` before it if `settled` is set.

        `after` receives the arguments of the hook.
        """
        self._reopen, self._after = reopen, after
        with _requiring_grad(self.param):
            if _current_node is None:
                handle = self.param.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]
                self._handles.append(handle)
            else:
                handle = self.param.register_hook(self._before(_current_node))  # type: ignore[no-untyped-call]
                self._handles.append(handle)
                self._follow(_accumulation_node(self.param))

    def unwatch(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._node = None

    def _arrived(self, param: torch.Tensor) -> None:
        self.is_arriving = True
        self._after(param)

    def _before(self, current_node: Callable[[], Any]) -> Callable[[torch.Tensor], None]:
        """Return a hook that runs before each accumulation, and in `torch.autograd.grad`, which does not accumulate."""

        def before(_: torch.Tensor) -> None:
            node = current_node()
            if node is not self._node:
                self._follow(node)
            self.is_fresh = self.param.grad is None
            self.is_arriving = True
            if self.settled and len(self._handles) == 2:
                # A hook registered now still runs before this accumulation. In `torch.autograd.grad` it does not run.
                self._handles.append(node.register_prehook(self._guard))

        # Parameters are saved without hooks. This attribute suppresses the warning about ours.
        before.__torch_unserializable__ = True  # type: ignore[attr-defined]
        return before

    def _follow(self, node: Any) -> None:
        """Hook the node that accumulates from now on, and unhook the node before."""
        if node is None:
            raise RuntimeError(COMPILED_BACKWARD)
        for handle in self._handles[1:]:
            handle.remove()
        # This reference keeps the node alive; without one torch would make another node.
        self._node = node
        self._handles[1:] = [node.register_hook(self._after)]

    def _guard(self, _: Any) -> None:
        if self.settled:
            self._reopen()
            self.is_fresh = True


def passing(seen: tuple[Any, ...]) -> torch.Tensor | None:
    """Return the tensor that is being accumulated, which the node still owns; None if a hook does not receive it.

    `seen` are the arguments of `after`.
    """
    tensor: torch.Tensor | None = seen[1][0] if len(seen) == 2 else None
    return tensor


def can_be_watched(param: torch.Tensor) -> bool:
    """Return whether torch can accumulate a gradient for the tensor, now or after `requires_grad` is set."""
    return param.is_leaf and (param.is_floating_point() or param.is_complex())


def _accumulation_node(param: torch.Tensor) -> Any:
    with torch.enable_grad():
        view = param.view_as(param)
    return view.grad_fn.next_functions[0][0] if view.grad_fn is not None else None


@contextlib.contextmanager
def _requiring_grad(param: torch.Tensor) -> Iterator[None]:
    """Set `requires_grad` inside the block: torch requires it to register hooks on a frozen parameter."""
    before = param.requires_grad
    param.requires_grad_(True)
    try:
        yield
    finally:
        param.requires_grad_(before)
