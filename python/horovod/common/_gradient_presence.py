"""The exchange about which gradients exist on which ranks in one cycle: bytes, of which the largest is taken.

A header has the rank's position: bytes in pairs, a number and its complement. The largest of both shows whether all
ranks sent the same. Rows with one byte per parameter follow.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from horovod import _core
from horovod.common import _objects
from horovod.common._ops import Max
from horovod.common.consistency import SENT_BYTES, Watch
from horovod.common.process_sets import ProcessSet

# How often the gradient was sent since the last step; the same with the one that waits for the rest of its group;
# whether there is one that was only accumulated; its layout.
ROWS = 5
SENT, WAITS_FOR_GROUP, LOCAL_ONLY, IS_DENSE, IS_SPARSE = range(ROWS)

# First the rank's position, then the bytes of its divergence watch.
_PLACE = 6
_HEADER = _PLACE + SENT_BYTES
_LIMIT = 255


@dataclass(slots=True)
class Announcement:
    """This rank's announcement, and those of all ranks once the operation has ended."""

    mine: bytearray
    largest: bytearray
    handle: int
    is_all: bool
    """Whether that is all it has: nothing waits for a group, and nothing was only accumulated."""


class GradientPresence:
    """Exchange about the gradients of one optimizer between the ranks, and this rank's position in it."""

    def __init__(self, watch: Watch, process_set: ProcessSet) -> None:
        self.watch = watch
        self._process_set = process_set
        self._name = "presence"
        self._digest = 0
        self._count = 0
        # For the other ranks to compare: steps taken, and reductions that zero_grad() dropped.
        self._steps = self._drops = 0

    def set_names(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]] = ()) -> None:
        """Take the parameters' names, and the shapes of some, in the order of the rows' entries.

        They have to be the same on every rank.
        """
        self._name = f"presence.{names[0]}" if names else "presence"
        # One byte that tells lists of parameters apart, with high probability.
        self._digest = zlib.crc32("\n".join([*names, *map(str, shapes)]).encode()) & _LIMIT
        self._count = len(names)

    def count_step(self) -> None:
        """Note that a step was taken."""
        self._steps += 1

    def count_drop(self) -> None:
        """Note that reduced gradients were dropped without a step."""
        self._drops += 1

    def forget_job(self) -> None:
        """Begin anew with ranks that may have just started."""
        self._steps = self._drops = 0
        self.watch.forget_job()

    def note_join(self) -> None:
        """Count anew: the ranks that had less to do took fewer steps."""
        self._steps = self._drops = 0
        self.watch.note_join()

    def announce(self, rows: Sequence[Sequence[int]] | None) -> Announcement:
        """Send the others which gradients this rank has; without rows, each was sent once and is dense."""
        if rows is None:
            mine = self._header() + bytes(ROWS * self._count)
            for row in (SENT, IS_DENSE):
                start = _HEADER + row * self._count
                mine[start : start + self._count] = b"\1" * self._count
        else:
            mine = self._header() + bytes(min(value, _LIMIT) for row in rows for value in row)
        largest = bytearray(mine)
        handle = _objects.start_reducing_bytes(largest, Max, self._name, self._process_set)
        is_all = rows is None or not (any(rows[WAITS_FOR_GROUP]) or any(rows[LOCAL_ONLY]))
        return Announcement(mine, largest, handle, is_all)

    def learn(self, announcement: Announcement) -> list[bytearray] | None:
        """Wait for what all ranks sent: the rows, or None if all sent the same and no rank has more.

        Raises
        ------
        RuntimeError
            Some rank is elsewhere: its gradients are not those that this rank's belong to.
        """
        _core.wait(announcement.handle)
        mine, largest = announcement.mine, announcement.largest
        if mine == largest and announcement.is_all:
            return None
        if mine[:_HEADER] != largest[:_HEADER]:
            self._compare(mine, largest)
        ends = [_HEADER + row * self._count for row in range(ROWS + 1)]
        return [largest[start:end] for start, end in pairwise(ends)]

    def sent_by_all(self, announcement: Announcement) -> bytearray:
        """How often each gradient was sent, of an announcement in which all ranks sent the same."""
        start = _HEADER + SENT * self._count
        return announcement.mine[start : start + self._count]

    def _header(self) -> bytearray:
        numbers = (self._steps & _LIMIT, self._drops & _LIMIT, self._digest)
        place = [byte for number in numbers for byte in (number, _LIMIT - number)]
        return bytearray(place) + self.watch.sent

    def _compare(self, mine: bytearray, largest: bytearray) -> None:
        if mine[:_PLACE] == largest[:_PLACE]:
            self.watch.receive(bytes(largest[_PLACE:_HEADER]))
            return
        same = [mine[i : i + 2] == largest[i : i + 2] for i in range(0, _PLACE, 2)]
        if not same[2]:
            raise RuntimeError(
                "the ranks do not reduce the gradients of the same parameters: their optimizers hold different ones, "
                'or parameters were put into group["params"] later, in another order or of other shapes on some rank, '
                "or two distributed optimizers with names in common run backward in another order on some rank. Give "
                'each its own names, such as named_parameters=model.named_parameters(prefix="generator"); change '
                "groups in the same way on all ranks."
            )
        steps, drops = self._steps, self._drops
        what = f"step() was called {steps} times" if not same[0] else f"zero_grad() dropped {drops}"
        of = "" if not same[0] else " reduced gradients"
        raise RuntimeError(
            f"the ranks are not at the same step of this optimizer: on this rank {what}{of}, on another rank more or "
            "fewer times. Between two steps every rank has to run the same number of backward passes: put further "
            "ones into optimizer.no_sync(), or set backward_passes_per_step; a batch is skipped by all ranks or by "
            "none."
        )
