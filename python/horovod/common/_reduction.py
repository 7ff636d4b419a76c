"""How the tensors of a reduction are combined."""

from __future__ import annotations

from typing import NamedTuple

from horovod.common._ops import Average
from horovod.common.process_sets import ProcessSet, global_process_set


class Reduction(NamedTuple):
    """Operator, factors before and after the reduction, and the ranks that take part, in the order of arguments."""

    op: int
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0
    process_set: ProcessSet = global_process_set

    @classmethod
    def of_gradients(cls, op: int, predivide_factor: float, process_set: ProcessSet) -> Reduction:
        """The reduction of an optimizer's gradients: the factor divides an average's operands, not its result."""
        factors = (1.0 / predivide_factor, predivide_factor) if op == Average else (1.0, 1.0)
        return cls(op, *factors, process_set)
