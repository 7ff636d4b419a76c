"""Lets an elastic state drop gradients that an optimizer has summed over several backward passes."""

from __future__ import annotations

from typing import Any


class SumsGradients:
    """Mixed into every optimizer that keeps sums of gradients outside of its own state."""

    def _hvd_forget_gradients(self) -> None:
        """Drop the sums, and begin a new cycle of passes."""
        raise NotImplementedError(f"{type(self).__name__} has to define _hvd_forget_gradients")


def forget_gradients(optimizer: Any) -> None:
    """Drop what an optimizer, or one that it wraps, has added up since its last step.

    The sums were computed with weights, and perhaps on ranks, that no longer exist.
    """
    while optimizer is not None:
        if isinstance(optimizer, SumsGradients):
            optimizer._hvd_forget_gradients()
        # A loss-scaling optimizer of Keras has another one inside.
        optimizer = getattr(optimizer, "inner_optimizer", None)
