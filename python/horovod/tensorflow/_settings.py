"""Checks the arguments of distributed optimizers and tapes."""

from __future__ import annotations

from typing import Any

from horovod.common._ops import Adasum, Average, resolve_op
from horovod.common._optimizer_settings import groups_given
from horovod.common.basics import basics


def checked_op(
    op: int | str, gradient_predivide_factor: float, average_aggregated_gradients: bool = False
) -> int:
    """Return the code of the operator; raise ValueError if the other arguments do not fit the operator."""
    code = resolve_op(op, None)
    if gradient_predivide_factor != 1.0:
        if basics.rocm_built():
            raise ValueError("gradient_predivide_factor not supported yet with ROCm")
        if code != Average:
            raise ValueError("gradient_predivide_factor not supported with op != Average")
    if code == Adasum and average_aggregated_gradients:
        raise ValueError("Adasum does not support average_aggregated_gradients == True")
    return code


def checked_groups(groups: Any, num_groups: int) -> Any:
    """Return the groups, from `groups` or the deprecated `num_groups`; raise ValueError if they are invalid."""
    groups = groups_given(groups, num_groups)
    fits = groups is None or isinstance(groups, (list, tuple))
    if not fits and (not isinstance(groups, int) or isinstance(groups, bool) or groups <= 0):
        raise ValueError(
            "groups should be a non-negative integer or a list of list of tf.Variable."
        )
    return groups
