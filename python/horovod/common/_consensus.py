"""A few whole numbers that all ranks tell each other, to decide alike: tens of microseconds, no pickling."""

from array import array
from collections.abc import Sequence

from horovod.common import _objects, _ops
from horovod.common.process_sets import global_process_set


def greatest(numbers: Sequence[int], name: str) -> list[int]:
    """Position by position, the greatest number that any rank gave."""
    agreed = array("q", numbers)
    _objects.reduce_numbers(agreed, _ops.Max, name, global_process_set)
    return agreed.tolist()


def everyones(numbers: Sequence[int], name: str) -> list[list[int]]:
    """The numbers of each rank, in the order of ranks; equally many from all."""
    gathered = _objects.allgather_numbers(array("q", numbers), name, global_process_set)
    count = len(numbers)
    return [gathered[i : i + count] for i in range(0, len(gathered), count)]
