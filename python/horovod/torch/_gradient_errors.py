"""What mistakes with gradients are answered with."""

from __future__ import annotations

EXTRA_BACKWARD = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). "
    "Increase backward_passes_per_step to accumulate gradients locally, or put the extra passes into no_sync()."
)

NOT_LINEAR = (
    "Gradients of several backward passes can be reduced one after the other for op=Average and op=Sum only: the "
    f"result of other operators would not be that of their sum. {EXTRA_BACKWARD.partition('. ')[2]}"
)


DUPLICATE_NAME = (
    "Distributed optimizers whose gradients come from one backward pass need different parameter names: "
    'give each its own named_parameters, such as model.named_parameters(prefix="generator").'
)
