"""The gradient of one parameter within a cycle: how often it was sent, and the parts that it comes in."""

from __future__ import annotations

import torch

from horovod.torch._gradient_hooks import Watched

# Where a gradient stands within a cycle (from one step() to the next): it is accumulated, it waits for the rest of its
# group, it is sent.
IDLE, READY, STARTED = 0, 1, 2


class GradientEntry(Watched):
    """One parameter and where its gradient stands; `settled` while that is sent."""

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
        # Whether a backward pass of this cycle added to it, and it is not sent yet.
        self.is_left = False
        self.sent = 0  # how often in this cycle
        # Sent earlier in this cycle, to be added to what `.grad` holds.
        self.parts: list[torch.Tensor] = []
        self.sparse = False  # whether its last gradient was

    def replace(self, param: torch.Tensor, passes: int) -> None:
        """Take another parameter in place of this one; no gradient of it was sent."""
        self.param = param
        self.nbytes = param.nbytes
        self.passes_left = passes
        self.state = IDLE
        self.settled = self.is_fresh = self.sparse = self.is_left = False
        self.parts = []

    @property
    def wire_name(self) -> str:
        """The name under which the gradient travels that was marked as sent last."""
        return self.name if self.sent == 1 else f"{self.name}.again{self.sent - 1}"

    def put(self, grad: torch.Tensor, result: torch.Tensor) -> None:
        """Put a result that could not be written into `grad` where that is; nowhere if the user dropped it."""
        if self.param.grad is grad:
            self.param.grad = result
        self.parts = [result if part is grad else part for part in self.parts]

    def unite(self) -> None:
        """Add up what was reduced in parts."""
        parts, self.parts = self.parts, []
        last = self.param.grad
        if last is None:  # dropped by the user, and with it what came before
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
    """Gradients that travel together once all of them are ready."""

    __slots__ = ("arrived", "members")

    def __init__(self, members: list[GradientEntry]) -> None:
        self.members = members
        self.arrived: set[GradientEntry] = set()


def zeros_for(param: torch.Tensor, *, sparse: bool) -> torch.Tensor:
    if not sparse:
        return torch.zeros_like(param, requires_grad=False)
    # Without a dense tensor, which may be large, and on a GPU without the host waiting for how many zeros there are.
    own = param.detach()
    rows, values = own.new_empty((1, 0), dtype=torch.int64), own.new_empty((0, *own.shape[1:]))
    return torch.sparse_coo_tensor(
        rows, values, param.shape, device=own.device, check_invariants=False
    )


def unwatch(entries: list[GradientEntry]) -> None:
    for entry in entries:
        entry.unwatch()
