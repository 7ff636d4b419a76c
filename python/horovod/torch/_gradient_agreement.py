"""What ranks tell each other about the gradients of one cycle, as bytes of which the largest of all ranks is taken.

A header says where the rank is: bytes in pairs, a number and its complement, so that the largest of both shows whether
all ranks said the same. Then rows with one byte per parameter.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch

from horovod.common.consistency import SAID_BYTES

# How often the gradient was sent since the last step; the same with the one that waits for the rest of its group;
# whether there is one that was only accumulated; its layout.
ROWS = 5
SENT, WAITS_FOR_GROUP, LOCAL_ONLY, IS_DENSE, IS_SPARSE = range(ROWS)

# First where the rank is, then what its divergence watch says.
_PLACE = 6
_HEADER = _PLACE + SAID_BYTES
_LIMIT = 255


def digest(names: Iterable[str]) -> int:
    """One byte that tells lists of parameters apart, with high probability."""
    return zlib.crc32("\n".join(names).encode()) & _LIMIT


def header(steps: int, drops: int, parameters: int, watch: bytes) -> bytearray:
    """Where this rank is: steps taken, reductions dropped by `zero_grad`, which parameters; what the watch says."""
    numbers = (steps & _LIMIT, drops & _LIMIT, parameters)
    return bytearray(byte for number in numbers for byte in (number, _LIMIT - number)) + watch


def announcement(head: bytearray, rows: list[list[int]]) -> torch.Tensor:
    """What one rank says."""
    flat = [min(value, _LIMIT) for row in rows for value in row]
    return torch.tensor([*head, *flat], dtype=torch.uint8)


def all_sent_once(head: bytearray, parameters: int) -> torch.Tensor:
    """The usual announcement, made quickly."""
    said = torch.zeros(_HEADER + ROWS * parameters, dtype=torch.uint8)
    said[:_HEADER] = torch.frombuffer(head, dtype=torch.uint8)
    said[_HEADER : _HEADER + parameters] = 1
    start = _HEADER + IS_DENSE * parameters
    said[start : start + parameters] = 1
    return said


def rows_of(said: torch.Tensor) -> list[list[int]]:
    """The rows of an announcement."""
    rows: list[list[int]] = said[_HEADER:].reshape(ROWS, -1).tolist()
    return rows


def check(mine: torch.Tensor, theirs: torch.Tensor, steps: int, drops: int) -> bytes | None:
    """Raise if some rank is elsewhere: its gradients are not those that this rank's belong to.

    Return what the watches of all ranks said if it was not the same.
    """
    own, largest = mine[:_HEADER].tolist(), theirs[:_HEADER].tolist()
    if own == largest:
        return None
    if own[:_PLACE] == largest[:_PLACE]:
        return bytes(largest[_PLACE:])
    same = [own[i : i + 2] == largest[i : i + 2] for i in range(0, _PLACE, 2)]
    if not same[2]:
        raise RuntimeError(
            "the ranks do not reduce the gradients of the same parameters: their optimizers hold different ones, or "
            "two distributed optimizers with names in common run backward in another order on some rank. Give each "
            'its own names, such as named_parameters=model.named_parameters(prefix="generator").'
        )
    what = f"step() was called {steps} times" if not same[0] else f"zero_grad() dropped {drops}"
    of = "" if not same[0] else " reduced gradients"
    raise RuntimeError(
        f"the ranks are not at the same step of this optimizer: on this rank {what}{of}, on another rank more or "
        "fewer times. Between two steps every rank has to run the same number of backward passes: put further ones "
        "into optimizer.no_sync(), or set backward_passes_per_step; a batch is skipped by all ranks or by none."
    )
