"""Output of the ranks of a chaos job, in the order of time, and its invariants."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import model

import harness

# A line of worker.py: text, process, time.
_LINE = re.compile(r"^\[\d+\]<stdout>:(.*) \| (\d+) ([\d.]+)$")
_COMMITTED = re.compile(r"committed (\d+) with (\w+)")
_ROUND = re.compile(r"round of (\d+): rank (\d+), step (\d+) with (\w+)")
_DONE = re.compile(r"done at step (\d+) with (\w+)")


@dataclass(frozen=True)
class Entry:
    text: str
    pid: int
    at: float

    @property
    def committed(self) -> int | None:
        """The step, if this tells of a commit."""
        match = _COMMITTED.match(self.text)
        return int(match[1]) if match else None

    @property
    def round(self) -> tuple[int, int, int] | None:
        """Size, rank and step, if this tells of the beginning of a round."""
        match = _ROUND.match(self.text)
        return (int(match[1]), int(match[2]), int(match[3])) if match else None

    @property
    def state(self) -> tuple[int, str] | None:
        """A step and the digest of the weights after it, if this tells of any."""
        if match := _ROUND.match(self.text):
            return int(match[3]), match[4]
        if match := _COMMITTED.match(self.text) or _DONE.match(self.text):
            return int(match[1]), match[2]
        return None


def parse(lines: Iterable[str]) -> list[Entry]:
    found = [_LINE.match(line) for line in lines]
    return sorted((Entry(m[1], int(m[2]), float(m[3])) for m in found if m), key=lambda s: s.at)


def entries_of(job: harness.Job) -> list[Entry]:
    """All that ranks have said so far."""
    return parse(job.stdout.splitlines())


def faults_in(entries: Sequence[Entry]) -> list[str]:
    """Violations: a committed step that a later round has not, weights other than those of the undisturbed run."""
    wrong = []
    committed = 0
    for entry in entries:
        if entry.committed is not None:
            committed = max(committed, entry.committed)
        elif entry.state and entry.state[0] < committed:
            wrong.append(f"step {committed} was committed, but then: {entry.text} ({entry.pid})")
    undisturbed = model.Undisturbed()
    states = {entry.state for entry in entries if entry.state}
    for step, digest in sorted(states):
        if digest != (right := undisturbed.digest(step)):
            wrong.append(f"weights at step {step}: {digest}, undisturbed: {right}")
    return wrong
