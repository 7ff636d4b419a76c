"""Texts of errors about gradients."""

from __future__ import annotations

from collections.abc import Sequence

EXTRA_BACKWARD = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). "
    "Increase backward_passes_per_step to accumulate gradients locally, or put the extra passes into no_sync()."
)

NOT_LINEAR = (
    "Gradients of several backward passes can be reduced one after the other for op=Average and op=Sum only: the "
    f"result of other operators would not be that of their sum. {EXTRA_BACKWARD.partition('. ')[2]}"
)


COMPILED_BACKWARD = (
    "this backward pass runs under compiled autograd, which does not call the hooks of gradients. They would be "
    "reduced in step() only, and clipping or logging before step() would use this rank's own gradients. Leave "
    "torch._dynamo.config.compiled_autograd off: torch.compile(model) also compiles the backward pass without it."
)

DUPLICATE_NAME = (
    "Distributed optimizers whose gradients come from one backward pass need different parameter names: "
    'give each its own named_parameters, such as model.named_parameters(prefix="generator").'
)


def not_reduced(names: Sequence[str], rank: int, operation: str) -> str:
    """Return the text of the warning that `backward()` stopped waiting for these gradients."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"backward() returned before the gradients of {names[0]!r}{more} were reduced: rank {rank} waits for "
        f"{operation}, which this rank has not called yet. They will be reduced in optimizer.synchronize() or "
        "step(); do not read or change them before, so call synchronize() before clipping, and step() under "
        "skip_synchronize() then. Where every rank makes the same calls in the same order, backward() returns with "
        "reduced gradients; with optimizer.wait_in_backward = False it never waits. This is said once."
    )


def changed_early(names: Sequence[str], passes: int) -> str:
    """Return the error text for gradients that the script changed before a step that has to reduce them first."""
    cause = (
        f"fewer than backward_passes_per_step={passes} backward passes used it before the step"
        if passes > 1
        else "its backward pass ran inside of no_sync(), or backward() returned before the reduction"
    )
    return (
        f"the gradient of {_and_more(names)} was changed after backward(), but is not reduced yet: {cause}. So "
        "clipping, GradScaler.unscale_ or other changes saw this rank's own gradients, and ranks would differ. Call "
        "optimizer.synchronize() right after the last backward(), change the gradients then, and take the step inside "
        "of `with optimizer.skip_synchronize():`. If each rank is to change its own gradients, call synchronize() "
        "after the change."
    )


def changed_in_flight(names: Sequence[str]) -> str:
    """Return the error text for gradients that the script changed while they were being reduced."""
    return (
        f"the gradient of {_and_more(names)} was changed after backward(), while it was being reduced: backward() had "
        "returned before the reduction. The result may be wrong. Call optimizer.synchronize() before the change."
    )


def _and_more(names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]!r}{more}"
