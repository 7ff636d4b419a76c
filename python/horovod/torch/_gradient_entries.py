"""State of one parameter's gradient within a cycle: how often it was sent, and results that are to be added up."""

from __future__ import annotations

import torch

from horovod.torch._gradient_hooks import Watched

# States of a gradient within a cycle (from one step() to the next): accumulating, waiting for the rest of its group,
# sent.
IDLE, READY, STARTED = 0, 1, 2


class GradientEntry(Watched):
    """One parameter and the state of its gradient; `settled` is set while the gradient is sent."""

    __slots__ = (
        "group",
        "is_left",
        "name",
        "nbytes",
        "parts",
        "passes_left",
        "sent",
        "sparse",
        "state",
    )

    def __init__(self, param: torch.Tensor, name: str, passes: int) -> None:
        super().__init__(param)
        self.name = name
        self.nbytes = param.nbytes
        self.group: Group | None = None
        self.passes_left = passes
        self.state = IDLE
        # Whether a backward pass of this cycle added to the gradient, which is not sent yet.
        self.is_left = False
        self.sent = 0  # how often the gradient was sent in this cycle
        # Gradients that were sent earlier in this cycle; `unite` adds them to `.grad`.
        self.parts: list[torch.Tensor] = []
        self.sparse = False  # whether the last gradient was sparse

    def replace(self, param: torch.Tensor, passes: int) -> None:
        """Replace the parameter by another one, none of whose gradients was sent."""
        self.param = param
        self.nbytes = param.nbytes
        self.passes_left = passes
        self.state = IDLE
        self.settled = self.is_fresh = self.sparse = self.is_left = False
        self.parts = []

    @property
    def wire_name(self) -> str:
        """Return the operation's name for the gradient that was marked as sent last."""
        return self.name if self.sent == 1 else f"{self.name}.again{self.sent - 1}"

    def put(self, grad: torch.Tensor, result: torch.Tensor) -> None:
        """Replace `grad` by a result in other memory, in `.grad` and in the parts; nothing if the user dropped it."""
        if self.param.grad is grad:
            self.param.grad = result
        self.parts = [result if part is grad else part for part in self.parts]

    def unite(self) -> None:
        """Add the reduced parts to `.grad`."""
        parts, self.parts = self.parts, []
        last = self.param.grad
        if last is None:  # the user dropped the gradient, and its earlier parts are dropped too
            return
        total, *rest = parts
        with torch.no_grad():
            for part in [*rest, last]:
                if total.is_sparse:
                    total = part + total
                else:
                    total.add_(part)
        self.param.grad = total


class Group:
    """Gradients that are reduced as one operation once all of them are ready."""

    __slots__ = ("arrived", "members")

    def __init__(self, members: list[GradientEntry]) -> None:
        self.members = members
        self.arrived: set[GradientEntry] = set()


def zeros_for(param: torch.Tensor, *, sparse: bool) -> torch.Tensor:
    if not sparse:
        return torch.zeros_like(param, requires_grad=False)
    # Made directly: a dense tensor may be large, and its conversion on a GPU makes the host wait for the element count.
    own = param.detach()
    rows, values = own.new_empty((1, 0), dtype=torch.int64), own.new_empty((0, *own.shape[1:]))
    return torch.sparse_coo_tensor(
        rows, values, param.shape, device=own.device, check_invariants=False
    )


def unwatch(entries: list[GradientEntry]) -> None:
    for entry in entries:
        entry.unwatch()
