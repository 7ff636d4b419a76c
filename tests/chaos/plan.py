"""Which faults strike in which phases, and what is promised for each: a table, no code that does anything."""

from __future__ import annotations

from dataclasses import dataclass

UNTOUCHED = "untouched"
"""Nobody notices: the job ends with 0, with the same processes."""
GOES_ON = "goes on"
"""Elastic: whoever is lost is replaced, no committed step is lost, the job comes back to full size and ends with 0."""
ERROR = "error"
"""Every rank that lives raises the typed error, and the job ends with an exit status that says so."""
BLAMED = "blamed"
"""The work was done: the others end with 0, the exit status tells that one rank did not."""

COLLECTIVES = (
    "allreduce",
    "grouped allreduce",
    "allgather",
    "broadcast",
    "alltoall",
    "reducescatter",
    "barrier",
)
# What an elastic job does between collective operations.
CHANGES = ("commit", "reset", "growth", "growth, sender")
PHASES = ("init", "negotiation", *COLLECTIVES, *CHANGES, "shutdown")

# Where connections, memory and descriptors are new.
CONNECTING = ("init", "reset")

PARTITIONS = ("black hole", "one-way partition, out", "one-way partition, in")
LOSES_A_RANK = ("SIGKILL", "SIGSTOP", "connection reset", *PARTITIONS)
NO_LAUNCHER = "launcher's connections reset"
HARMLESS = ("slow rank", "full disk", "/dev/shm full", "clock jump", "5 % loss", "200 ms delay")
REFUSES = ("memory refused", "no descriptors")


@dataclass(frozen=True)
class Cell:
    fault: str
    phase: str
    elastic: bool
    promise: str
    tcp: bool = False
    """Ranks of one host talk over TCP."""
    torch: bool = False

    @property
    def name(self) -> str:
        kind = "elastic" if self.elastic else "static"
        return f"{self.fault} during {self.phase} ({kind})"


def promise(fault: str, phase: str, elastic: bool) -> str:
    lost = GOES_ON if elastic else ERROR
    if fault in HARMLESS:
        return UNTOUCHED
    if fault in REFUSES:
        # What a rank has it keeps; it fails when it needs more.
        return lost if phase in CONNECTING else UNTOUCHED
    if fault == NO_LAUNCHER:
        # The ranks of a static job need the launcher only to meet; those of another meet anew.
        return lost if phase == "init" or (elastic and phase != "shutdown") else UNTOUCHED
    if phase == "shutdown":
        return BLAMED if fault == "SIGKILL" else UNTOUCHED
    if phase == "init" and (fault == "SIGSTOP" or fault in PARTITIONS):
        return UNTOUCHED
    return lost


def cells() -> list[Cell]:
    """All there are."""
    found = []
    for fault in (*LOSES_A_RANK, NO_LAUNCHER, *HARMLESS, *REFUSES):
        for phase in PHASES:
            for elastic in (True, False):
                if phase in CHANGES and not elastic:
                    continue
                tcp = fault == "connection reset"
                found.append(Cell(fault, phase, elastic, promise(fault, phase, elastic), tcp))
    return found


# Every fault once and every phase once, at least: what `make test` can afford.
_CHOSEN = {
    ("SIGKILL", "init", False),
    ("SIGKILL", "negotiation", True),
    ("SIGKILL", "allreduce", True),
    ("SIGKILL", "commit", True),
    ("SIGKILL", "reset", True),
    ("SIGKILL", "growth", True),
    ("SIGKILL", "growth, sender", True),
    ("SIGKILL", "shutdown", True),
    ("connection reset", "allgather", True),
    ("connection reset", "grouped allreduce", False),
    ("slow rank", "alltoall", False),
    ("full disk", "broadcast", True),
    ("/dev/shm full", "init", False),
    ("clock jump", "reducescatter", True),
    ("clock jump", "barrier", False),
    ("memory refused", "reset", True),
    ("no descriptors", "init", False),
    ("no descriptors", "reset", True),
    ("launcher's connections reset", "negotiation", True),
    ("SIGSTOP", "init", True),
    ("black hole", "shutdown", False),
    ("one-way partition, out", "init", False),
    ("one-way partition, in", "init", True),
    ("5 % loss", "growth", True),
    ("200 ms delay", "barrier", False),
}


def chosen() -> list[Cell]:
    return [cell for cell in cells() if (cell.fault, cell.phase, cell.elastic) in _CHOSEN]
