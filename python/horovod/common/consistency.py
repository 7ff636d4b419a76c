"""Compares checksums of tensors between ranks, and describes the differences.

`Watch` adds a checksum of all tensors to the bytes that the ranks exchange in every step anyway. Each rank sends a
number and its complement, which are reduced with Max. The results are complements of each other only if all ranks sent
the same number. After a difference the ranks exchange the checksums of the single tensors.
"""

import hashlib
import logging
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from horovod import _core
from horovod.common import _objects, _ops
from horovod.common.exceptions import ReplicasDifferError
from horovod.common.process_sets import ProcessSet

_log = logging.getLogger("horovod")

ACTIONS = ("warn", "error")
# Size of `Watch.sent` in bytes.
SENT_BYTES = 48
_NAMED_MAX = 4


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor that differs between ranks. Each side lists the ranks whose tensors are equal, the largest first."""

    name: str
    sides: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks that differ from the majority; all ranks if there is no majority."""
        everybody = sum(len(side) for side in self.sides)
        wrong = self.sides[1:] if 2 * len(self.sides[0]) > everybody else self.sides
        return tuple(sorted(rank for side in wrong for rank in side))

    def __str__(self) -> str:
        everybody = sum(len(side) for side in self.sides)
        if 2 * len(self.sides[0]) > everybody:
            return f"{self.name!r} on {_ranks(self.ranks)} differs from {_ranks(self.sides[0])} (the majority)"
        sides = ", ".join(_ranks(side) for side in self.sides)
        return f"{self.name!r} differs between {sides} (no majority)"


def checked_action(action: str | None) -> str | None:
    """Return the argument `consistency_action` unchanged; raise ValueError if it is invalid."""
    if action is not None and action not in ACTIONS:
        raise ValueError(f'consistency_action={action!r}: expected "warn" or "error"')
    return action


def compare(
    names: Sequence[str], sums: Sequence[int], name: str, process_set: ProcessSet
) -> list[Difference]:
    """Return the differences between the members of a set; all members have to call with the same names."""
    digest = _digest(names, sums)
    sent = array("q", [digest, ~digest])
    _objects.reduce_numbers(sent, _ops.Max, f"consistency.{name}", process_set)
    if sent[0] == ~sent[1]:
        return []
    own = [_core.rank(), _digest(names, ()), *sums]
    rows = list(_rows(own, name, process_set))
    if len({(row[1], len(row)) for row in rows}) > 1:
        raise ValueError(
            f"check_consistency: the ranks name different tensors, {_core.rank()} these {len(names)}: "
            f"{', '.join(names[:_NAMED_MAX])}, ...; every rank has to pass the same names in the same order."
        )
    return _differences(names, [(row[0], row[2:]) for row in rows])


def report(
    names: Sequence[str],
    sums: Sequence[int],
    action: str | None,
    name: str,
    process_set: ProcessSet,
) -> bool:
    """Return whether `compare` finds no difference; raise or log one, depending on the action or the setting."""
    differences = compare(names, sums, name, process_set)
    if not differences:
        return True
    text = describe(differences, len(names), "")
    is_error = _core.consistency()[1] if action is None else action == "error"
    if is_error:
        raise ReplicasDifferError(text)
    if _core.rank() == (process_set.ranks or [0])[0]:
        _log.warning("%s", text)
    return False


def describe(differences: Sequence[Difference], total: int, where: str) -> str:
    """Return the text of the error or warning for these differences."""
    named = "; ".join(str(difference) for difference in differences[:_NAMED_MAX])
    rest = "" if len(differences) <= _NAMED_MAX else "; and others"
    return (
        f"The ranks do not hold the same values{where}: {named}{rest}. {len(differences)} of {total} tensors differ. "
        "They were set differently at the start (hvd.broadcast_parameters makes them equal), changed by something else "
        "than the reduced gradients on some rank, or corrupted by a faulty machine."
    )


class Watch:
    """Compares the parameters of one optimizer every `every` steps, in the exchange that its ranks make in each step.

    Each rank counts its steps with `steps_on`, and passes its checksums to `report` if that returns True. It adds
    `sent` to the bytes that are reduced with Max, and calls `receive` with the result, which is equal on all ranks. All
    ranks therefore find a difference in the same step, and no rank waits for one that has nothing to compare. If ranks
    sent different bytes, they also agree on the number of steps: `join` and failures can make it uneven.
    """

    def __init__(
        self, every: int | None, action: str | None, name: str, process_set: ProcessSet
    ) -> None:
        set_every, set_error = _core.consistency()
        self._configured = set_every if every is None else every
        self._action = ACTIONS.index(action) if action is not None else int(set_error)
        self._name = name
        self._process_set = process_set
        self.forget_job()

    def forget_job(self) -> None:
        """Reset the state for a new generation, whose ranks may have just started."""
        self._every = self._configured
        self._steps = 0
        self._warned: set[str] = set()
        self._failure: str | None = None
        self._report(0, (), ())

    def note_join(self) -> None:
        """Make the ranks exchange their step counts, which may differ after a join."""
        if self._every:
            self.sent = self._words(-1 - _core.rank(), 0)  # no other rank sends these bytes

    def steps_on(self) -> bool:
        """Count a step; return whether the caller has to call `report` next."""
        self._steps += 1
        return self._every > 0 and self._steps % self._every == 0

    def report(self, names: Sequence[str], sums: Sequence[int]) -> None:
        """Set the checksums of this rank's tensors after the last step; the order of names is equal on all ranks."""
        self._report(self._steps, names, sums)

    def _report(self, step: int, names: Sequence[str], sums: Sequence[int]) -> None:
        self._step, self._names, self._sums = step, names, sums
        self.sent = self._words(step, _digest(names, sums) if step else 0)

    def _words(self, step: int, digest: int) -> bytes:
        raw = b"".join(
            number.to_bytes(8, "little", signed=True) for number in (self._every, step, digest)
        )
        return raw + bytes(255 - byte for byte in raw)

    def receive(self, largest: bytes) -> None:
        """Process the bytes of all ranks, reduced with Max: if they differ, exchange the single checksums.

        This is a collective operation if the bytes differ: every rank that sent bytes has to call it.
        """
        half = len(largest) // 2
        pairs = zip(largest[:half], largest[half:], strict=True)
        if all(a + b == 255 for a, b in pairs):
            return
        own = [_core.rank(), self._configured, self._action, self._steps, self._step, *self._sums]
        rows = list(_rows(own, self._name, self._process_set))
        lead = rows[0]
        if len({row[1] for row in rows}) > 1 and lead[0] == _core.rank():
            _log.warning(
                "The ranks check their consistency every %s steps: the number of rank %d counts, %d%s.",
                " or ".join(str(every) for every in sorted({row[1] for row in rows})),
                lead[0],
                lead[1],
                "" if lead[1] else " (never)",
            )
        self._every = lead[1]
        self._steps = max(row[3] for row in rows)
        names, step = self._names, self._step
        self._report(0, (), ())
        # After a failed backward pass, a rank may have no checksums, or those of an older step.
        if len({(row[4], len(row)) for row in rows}) > 1 or not step:
            return
        differences = _differences(names, [(row[0], row[5:]) for row in rows])
        if not differences:
            return
        text = describe(differences, len(names), f" after step {step} of this optimizer")
        if ACTIONS[lead[2]] == "error":
            self._failure = text
        elif not self._warned.issuperset(found := {d.name for d in differences}):
            self._warned |= found
            if lead[0] == _core.rank():
                _log.warning("%s", text)

    def raise_difference(self) -> None:
        """Raise a difference that `receive` found, if the action is "error"."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise ReplicasDifferError(failure)


def _rows(own: Sequence[int], name: str, process_set: ProcessSet) -> Iterator[list[int]]:
    """Yield the numbers of each rank that has not joined, in the order of ranks."""
    numbers = array("q", [len(own), *own])
    everything = _objects.allgather_numbers(numbers, f"consistency.{name}.each", process_set)
    while everything:
        end = 1 + everything[0]
        yield everything[1:end]
        everything = everything[end:]


def _differences(
    names: Sequence[str], rows: Sequence[tuple[int, Sequence[int]]]
) -> list[Difference]:
    differences = []
    for index, name in enumerate(names):
        sums = Counter(row[index] for _, row in rows)
        if len(sums) > 1:
            sides = tuple(
                tuple(rank for rank, row in rows if row[index] == kind)
                for kind, _ in sums.most_common()
            )
            differences.append(Difference(name, sides))
    return differences


def _digest(names: Sequence[str], sums: Sequence[int]) -> int:
    whole = hashlib.blake2b("\n".join(names).encode("utf-8", "replace"), digest_size=8)
    whole.update(array("q", sums).tobytes())
    return int.from_bytes(whole.digest(), "little", signed=True)


def _ranks(ranks: Sequence[int]) -> str:
    """Return a text such as "rank 3" or "ranks 0-2, 4"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(texts)
