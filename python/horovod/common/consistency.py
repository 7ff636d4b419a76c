"""Whether all ranks hold the same bytes: checksums compared, and words for what differs.

A checksum of everything travels with the bytes that the ranks exchange in every step anyway (`Watch`). It is a number
and its complement, of which the largest of all ranks is taken: they fit together only if all ranks said the same. Only
after a difference the ranks exchange the checksums of the single tensors.
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
# Bytes of what a watch says.
SENT_BYTES = 48
_NAMED_MAX = 4


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor that is not the same everywhere, and the ranks that have equal ones, most of them first."""

    name: str
    sides: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that differ from the majority; all of them if there is none."""
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
    """The argument that says what a difference is; raise if it is none."""
    if action is not None and action not in ACTIONS:
        raise ValueError(f'consistency_action={action!r}: expected "warn" or "error"')
    return action


def compare(
    names: Sequence[str], sums: Sequence[int], name: str, process_set: ProcessSet
) -> list[Difference]:
    """Differences between the members of a set, all of which call with the checksums of the same tensors."""
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
    """Whether `compare` finds no difference; one is raised or logged, as the action or the setting wants it."""
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
    """All there is to say about a difference."""
    named = "; ".join(str(difference) for difference in differences[:_NAMED_MAX])
    rest = "" if len(differences) <= _NAMED_MAX else "; and others"
    return (
        f"The ranks do not hold the same values{where}: {named}{rest}. {len(differences)} of {total} tensors differ. "
        "They were set differently at the start (hvd.broadcast_parameters makes them equal), changed by something else "
        "than the reduced gradients on some rank, or corrupted by a faulty machine."
    )


class Watch:
    """Compares the parameters of one optimizer every so many steps, by what its ranks tell each other in every step.

    Each rank counts its steps with `steps_on`, and passes its checksums to `report` when that asks for them. It puts
    `sent` into the bytes that are reduced with Max, and calls `receive` with the result, which is the same everywhere.
    So all ranks find a difference at the same moment, and none ever waits for a rank that has nothing to compare.
    Whenever they said different things they agree on the number of steps, which `join` and failures may have made
    uneven.
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
        """Begin anew, with ranks that may have just started."""
        self._every = self._configured
        self._steps = 0
        self._warned: set[str] = set()
        self._failure: str | None = None
        self._report(0, (), ())

    def note_join(self) -> None:
        """Have the ranks, which may have taken different numbers of steps, tell each other how many."""
        if self._every:
            self.sent = self._words(-1 - _core.rank(), 0)  # what no other rank says

    def steps_on(self) -> bool:
        """Count a step; whether `report` is to follow."""
        self._steps += 1
        return self._every > 0 and self._steps % self._every == 0

    def report(self, names: Sequence[str], sums: Sequence[int]) -> None:
        """Say what this rank holds after the step that was counted last; names in the same order everywhere."""
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
        """Take what all ranks said, the largest of each byte; all call that said something, or none."""
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
        # A rank whose last words were lost with a failed backward pass has nothing to compare, or something old.
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
        """Raise if one was found that is to be an error."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise ReplicasDifferError(failure)


def _rows(own: Sequence[int], name: str, process_set: ProcessSet) -> Iterator[list[int]]:
    """The numbers of every rank that has not joined, in the order of ranks."""
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
    """Such as "rank 3" or "ranks 0-2, 4"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(texts)
