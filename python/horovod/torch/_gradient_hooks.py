"""Hooks on a parameter's accumulation node: they run after whatever the user does to a gradient in hooks of the tensor.

Hooks of a tensor run in the order in which they were registered. One of ours would run before a user's later one, which
would then change a gradient that is already being sent. Hooks of the node that accumulates into `.grad` run after all
of them. A parameter gets another node when its dtype or device changes; one hook of ours on the tensor itself, which
stays, notices that before the new node accumulates.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from horovod.torch._gradient_errors import COMPILED_BACKWARD

# The node that this thread's backward pass runs. Without it (torch before 2.1) the hook is one of the tensor.
_current_node: Callable[[], Any] | None = getattr(torch._C, "_current_autograd_node", None)

# Runs a function when the current backward pass is over. Older versions of torch lack it: there `backward()` waits
# only if all trainable parameters got a gradient; otherwise `step()` does.
queue_callback: Callable[[Callable[[], None]], None] | None = getattr(
    torch.autograd.graph, "queue_callback", None
)


class Watched:
    """A parameter whose gradients are watched.

    While `settled` is set, the gradient must not be touched, and `reopen` is called before another is accumulated.
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
        # Whether a gradient is being accumulated that was not sent yet. A hook of the script may take a step before
        # ours runs, which sends it.
        self.is_arriving = False
        self._handles: list[Any] = []
        self._node: Any = None

    def watch(self, reopen: Callable[[], None], after: Callable[..., None]) -> None:
        """Call `after` with a hook's arguments after each accumulation, `reopen` before one if `settled` is set."""
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
        """A hook that runs first in each accumulation, and also where `torch.autograd.grad` accumulates nothing."""

        def before(_: torch.Tensor) -> None:
            node = current_node()
            if node is not self._node:
                self._follow(node)
            self.is_fresh = self.param.grad is None
            self.is_arriving = True
            if self.settled and len(self._handles) == 2:
                # Registered now it still runs before this accumulation, and only if there is one.
                self._handles.append(node.register_prehook(self._guard))

        # Parameters are saved without hooks; that ours is lost then needs no warning.
        before.__torch_unserializable__ = True  # type: ignore[attr-defined]
        return before

    def _follow(self, node: Any) -> None:
        """Hook the node that accumulates from now on, and no other."""
        if node is None:
            raise RuntimeError(COMPILED_BACKWARD)
        for handle in self._handles[1:]:
            handle.remove()
        # Kept: torch makes another one when nobody holds it.
        self._node = node
        self._handles[1:] = [node.register_hook(self._after)]

    def _guard(self, _: Any) -> None:
        if self.settled:
            self._reopen()
            self.is_fresh = True


def passing(seen: tuple[Any, ...]) -> torch.Tensor | None:
    """Return the tensor that is being accumulated, which the node still owns, from the arguments of `after`."""
    tensor: torch.Tensor | None = seen[1][0] if len(seen) == 2 else None
    return tensor


def can_be_watched(param: torch.Tensor) -> bool:
    """Whether torch may accumulate a gradient for the tensor, now or when it is told to."""
    return param.is_leaf and (param.is_floating_point() or param.is_complex())


def _accumulation_node(param: torch.Tensor) -> Any:
    with torch.enable_grad():
        view = param.view_as(param)
    return view.grad_fn.next_functions[0][0] if view.grad_fn is not None else None


@contextlib.contextmanager
def _requiring_grad(param: torch.Tensor) -> Iterator[None]:
    """Let a frozen parameter be hooked: torch wants `requires_grad` only at that moment."""
    before = param.requires_grad
    param.requires_grad_(True)
    try:
        yield
    finally:
        param.requires_grad_(before)
