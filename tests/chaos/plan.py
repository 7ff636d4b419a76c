"""Which faults strike in which phases, and what is promised for each: a table, no code that does anything."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

UNTOUCHED = "untouched"
"""Nobody notices: the job ends with 0, with the same processes."""
GOES_ON = "goes on"
"""Elastic: whoever is lost is replaced, no committed step is lost, the job comes back to full size and ends with 0."""
ERROR = "error"
"""Every rank that lives raises the typed error, and the job ends with an exit status that says so."""
BLAMED = "blamed"
"""The work was done: the others end with 0, the exit status tells that one rank did not."""

SETTLES = "settles"
"""Static: all ranks end with 0, or all that live raise the typed error."""

COLLECTIVES = (
    "allreduce",
    "grouped allreduce",
    "allgather",
    "broadcast",
    "alltoall",
    "reducescatter",
    "barrier",
)
# Steps of an elastic job between collective operations.
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
    victim: int = 1
    torch: bool = False
    """PyTorch's model, optimizer and state instead of numpy's."""
    inject: str = ""
    """The fault that strace injects into one of the victim's system calls."""

    @property
    def name(self) -> str:
        kind = "elastic" if self.elastic else "static"
        whose = f", rank {self.victim}" if self.inject else ""
        whose += ", torch" if self.torch else ""
        return f"{self.fault} during {self.phase} ({kind}{whose})"


def promise(fault: str, phase: str, elastic: bool) -> str:
    lost = GOES_ON if elastic else ERROR
    if fault in HARMLESS:
        return UNTOUCHED
    if fault in REFUSES:
        # The rank keeps its descriptors; it fails when it needs more.
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


# Where each fault strikes an elastic job with PyTorch; one of fixed size is struck in the middle of an allreduce.
_WITH_TORCH = {
    "SIGKILL": "allreduce",
    "SIGSTOP": "reset",
    "connection reset": "commit",
    "black hole": "negotiation",
    "one-way partition, out": "commit",
    "one-way partition, in": "allreduce",
    NO_LAUNCHER: "growth",
    "slow rank": "growth, sender",
    "full disk": "commit",
    "/dev/shm full": "reset",
    "clock jump": "allreduce",
    "5 % loss": "growth",
    "200 ms delay": "allreduce",
    "memory refused": "reset",
    "no descriptors": "reset",
}


def with_torch() -> list[Cell]:
    """Two cells for each fault."""
    some = [("allreduce", False, fault) for fault in _WITH_TORCH]
    some += [(phase, True, fault) for fault, phase in _WITH_TORCH.items()]
    return [
        dataclasses.replace(cell, torch=True)
        for cell in cells()
        if (cell.phase, cell.elastic, cell.fault) in some
    ]


# System calls of an init and how often a rank makes each at least: at each of them it may die. The first rank of a
# host makes what all of it share, the others get it.
CALLS = {
    0: {
        "socket": 2, "bind": 1, "listen": 1, "memfd_create": 1, "ftruncate": 1, "eventfd2": 3, "connect": 1,
        "accept4": 2, "sendto": 6, "recvfrom": 10, "sendmsg": 2, "epoll_create1": 1, "clone3": 1,
    },
    1: {"socket": 2, "connect": 2, "sendto": 6, "recvfrom": 11, "recvmsg": 1, "epoll_create1": 1, "clone3": 1},
}  # fmt: skip
# And each of these it may be refused once.
REFUSALS = (
    ("memfd_create", "ENOMEM"),
    ("ftruncate", "ENOSPC"),
    ("eventfd2", "EMFILE"),
    ("epoll_create1", "EMFILE"),
    ("socket", "EMFILE"),
    ("accept4", "EMFILE"),
    ("connect", "ENETUNREACH"),
    ("sendto", "ECONNRESET"),
    ("recvfrom", "ECONNRESET"),
    ("sendmsg", "ENOBUFS"),
    ("recvmsg", "ENOBUFS"),
    ("clone3", "EAGAIN"),
)


def inside_init() -> list[Cell]:
    """One cell for each system call of an init."""
    found = []
    for victim, calls in CALLS.items():
        injections = {
            f"SIGKILL at {call} {n}": f"{call}:signal=SIGKILL:when={n}"
            for call, count in calls.items()
            for n in range(1, count + 1)
        }
        injections |= {
            f"{error} of {call} {n}": f"{call}:error={error}:when={n}"
            for call, error in REFUSALS
            for n in range(1, calls.get(call, 0) + 1)
        }
        for fault, inject in injections.items():
            for elastic in (True, False):
                kept = GOES_ON if elastic else SETTLES
                found.append(
                    Cell(fault, "inside init", elastic, kept, victim=victim, inject=inject)
                )
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
    ("SIGSTOP", "allreduce", True),
    ("black hole", "allgather", False),
    ("one-way partition, out", "negotiation", False),
    ("one-way partition, in", "init", True),
    ("5 % loss", "growth", True),
    ("200 ms delay", "barrier", False),
}


def chosen() -> list[Cell]:
    """The cells of `make test`. Those with PyTorch are left to `make chaos`: test_elastic.py kills its ranks too."""
    some = [cell for cell in cells() if (cell.fault, cell.phase, cell.elastic) in _CHOSEN]
    some += [cell for cell in inside_init() if cell.fault == "SIGKILL at sendmsg 1"]
    return some
