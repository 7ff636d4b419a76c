"""Communicators of mpi4py: their processes become a job, and groups of them process sets.

Only mpi4py's own methods are called, on the thread that calls `init`. Nothing is linked with MPI, and once `init` has
returned MPI is not called again. Processes exchange JSON, which is no code: a stranger's message cannot run anything.
"""

import dataclasses
import hashlib
import importlib.util
import itertools
import json
import logging
import sys
import time
from collections.abc import Sequence
from typing import Any

from horovod import _core

_log = logging.getLogger("horovod")

_INIT = "hvd.init(comm=...)"
# Used only where the settings cannot be read, which all ranks are told.
_DEFAULT_TIMEOUT_S = 30.0
_TEST_PAUSE_MAX_S = 0.005
# Exchanges that were given up, with their communicators. MPI may still write into the buffers, which the requests keep.
_given_up: list[tuple[Any, Any]] = []


@dataclasses.dataclass(frozen=True)
class CommunicatorJob:
    """The agreement of the processes of a communicator."""

    rank: int
    size: int
    addresses: list[str]
    key: str = dataclasses.field(repr=False)
    # Rank 0's, which serves the others until it is closed.
    rendezvous: _core.Rendezvous | None
    # For each process set made of a communicator the ranks of its groups, in lexicographic order.
    sets: list[list[list[int]]]


def _loaded() -> Any:
    """The module `mpi4py.MPI`, if the script has imported it."""
    return sys.modules.get("mpi4py.MPI")


def is_loaded() -> bool:
    """Whether the script has imported `mpi4py.MPI`."""
    return _loaded() is not None


def is_installed() -> bool:
    """Whether mpi4py can be found; it is not imported, since that initialises MPI."""
    return is_loaded() or importlib.util.find_spec("mpi4py") is not None


def is_enabled() -> bool:
    """Whether a launcher of MPI started this process, and mpi4py is installed."""
    try:
        launcher = _core.launcher()
    except ValueError:  # variables of half a job: init() explains them
        return False
    return launcher is not None and launcher[4] and is_installed()


def is_communicator(thing: Any) -> bool:
    """Whether this is a communicator of mpi4py."""
    mpi = _loaded()
    return mpi is not None and isinstance(thing, mpi.Comm)


def is_of_job(comm: Any) -> bool:
    """Whether this process has the same rank and size in the communicator as in the job that runs."""
    mpi = _loaded()
    if comm == mpi.COMM_NULL:
        return False
    return (comm.Get_size(), comm.Get_rank()) == (_core.size(), _core.rank())


def group_of(comm: Any) -> Any:
    """The processes of a communicator, which stay known when it is freed; None where this process is no member."""
    mpi = _loaded()
    _require_running(mpi, "hvd.ProcessSet(comm)")
    if comm == mpi.COMM_NULL:
        return None
    _require_one_group(comm, "hvd.ProcessSet(comm)")
    return comm.Get_group()


def ranks_within(group: Any, comm: Any) -> list[int] | None:
    """Ranks of a group's processes in a communicator, ascending; None if one of them is not in it."""
    mpi = _loaded()
    of_comm = comm.Get_group()
    ranks = mpi.Group.Translate_ranks(group, list(range(group.Get_size())), of_comm)
    of_comm.Free()
    return None if mpi.UNDEFINED in ranks else sorted(ranks)


def threads_supported() -> bool:
    """Whether MPI may be called from any thread, beside Horovod. It imports mpi4py, which initialises MPI."""
    launcher = _core.launcher()
    mpi = _loaded()
    if mpi is None:
        if launcher is not None and not launcher[4]:
            return False
        try:
            from mpi4py import MPI as mpi
        except (ImportError, RuntimeError) as error:
            _log.info("mpi_threads_supported: False, because mpi4py cannot be imported: %s", error)
            return False
    if not mpi.Is_initialized() or mpi.Is_finalized():
        return False
    if launcher is not None and not launcher[4] and mpi.COMM_WORLD.Get_size() == 1:
        return False
    _require_world(mpi, "hvd.mpi_threads_supported()")
    return bool(mpi.Query_thread() == mpi.THREAD_MULTIPLE)


def world_to_meet_over() -> Any:
    """`MPI.COMM_WORLD`, if MPI runs in this process and its ranks could not meet otherwise; else None."""
    mpi = _loaded()
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return None
    launcher = _core.launcher()
    if launcher is None or not launcher[4] or not _core.lacks_rendezvous():
        return None
    _require_world(mpi, "hvd.init()")
    return mpi.COMM_WORLD


def agree(comm: Any, groups: Sequence[Any]) -> CommunicatorJob:
    """Have the processes of `comm` agree on a rendezvous, a key, and the ranks of their process sets.

    All of them have to call it. A mistake of one is an error on all; where one does not call, the others get an error
    when `HOROVOD_GLOO_TIMEOUT_SECONDS` are over.

    Parameters
    ----------
    comm
        The order of its ranks is that of the job's.
    groups
        For each process set made of a communicator what `group_of` returned.
    """
    mpi = _loaded()
    _require_running(mpi, _INIT)
    if comm == mpi.COMM_NULL:
        raise ValueError(
            f"{_INIT}: this process has the null communicator: it is no member (its colour in Split was "
            "MPI.UNDEFINED, or Create left it out), or the communicator was freed. A process outside goes on without "
            "Horovod; members call hvd.init before they free the communicator."
        )
    _require_one_group(comm, _INIT)
    _require_world(mpi, _INIT)
    try:
        return _agree(mpi, comm, groups)
    except mpi.Exception as error:
        raise ValueError(
            f"{_INIT}: MPI failed while the ranks exchanged addresses: {error}"
        ) from error


def _agree(mpi: Any, comm: Any, groups: Sequence[Any]) -> CommunicatorJob:
    problem = _thread_level_problem(mpi)
    timeout_s, interfaces, key, host = _DEFAULT_TIMEOUT_S, list[str](), None, ""
    try:
        timeout_s, interfaces, key, host = _core.group_settings()
    except ValueError as error:
        problem = str(error)
    claims: list[list[int] | None] = []
    for at, group in enumerate(groups):
        ranks = None if group is None else ranks_within(group, comm)
        if group is not None and ranks is None:
            problem = f"{_set_number(at)} has processes that are not in comm"
        claims.append(ranks and [ranks[0], len(ranks)])
    exchange = _Exchange(mpi, comm, timeout_s)
    facts = exchange.allgather(
        {"problem": problem, "host": host, "key": _mark_of(key), "claims": claims}
    )
    for rank, of_rank in enumerate(facts):
        if of_rank["problem"] is not None:
            raise ValueError(f"{_INIT}: rank {rank} of the communicator: {of_rank['problem']}")
    lacks = [rank for rank, of_rank in enumerate(facts) if of_rank["key"] is None]
    if lacks and len(lacks) < exchange.size:
        raise ValueError(
            f"{_INIT}: HOROVOD_JOB_KEY (or HOROVOD_JOB_KEY_FILE) is not set on rank {lacks[0]} of the communicator, "
            "but on others: set the same key on all of them, or on none"
        )
    differs = [rank for rank, of_rank in enumerate(facts) if of_rank["key"] != facts[0]["key"]]
    if differs:
        raise ValueError(
            f"{_INIT}: HOROVOD_JOB_KEY (or HOROVOD_JOB_KEY_FILE) differs between ranks 0 and {differs[0]} of the "
            "communicator: set the same key on all of them, or on none"
        )
    sets = _sets_of([of_rank["claims"] for of_rank in facts])
    if exchange.size == 1:
        return CommunicatorJob(0, 1, [], "", None, sets)
    rendezvous, offer = None, {}
    if exchange.rank == 0:
        is_local = len({of_rank["host"] for of_rank in facts}) == 1
        try:
            rendezvous = _core.Rendezvous(exchange.size, is_local, interfaces, key)
            # A key that all have does not travel.
            new_key = rendezvous.key() if key is None else None
            offer = {"addresses": rendezvous.addresses(), "key": new_key}
        except (ValueError, OSError) as error:
            offer = {"problem": str(error)}
    of_root = exchange.allgather(offer)[0]
    if "problem" in of_root:
        raise ValueError(f"{_INIT}: rank 0 of the communicator: {of_root['problem']}")
    key = key or of_root["key"]
    return CommunicatorJob(
        exchange.rank, exchange.size, of_root["addresses"], key, rendezvous, sets
    )


def _mark_of(key: str | None) -> str | None:
    """A part of the key's hash, by which keys are compared without being sent."""
    return None if key is None else hashlib.sha256(key.encode()).hexdigest()[:16]


class _Exchange:
    """Exchanges between all processes of a communicator, within a limit of time."""

    def __init__(self, mpi: Any, comm: Any, timeout_s: float) -> None:
        if any(comm == other for other, _ in _given_up):
            raise ValueError(
                f"{_INIT}: an earlier call with this communicator was given up while members were missing: all members "
                "have to pass a new one, such as comm.Dup()"
            )
        self._mpi = mpi
        self._comm = comm
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()

    def allgather(self, content: dict[str, Any]) -> list[dict[str, Any]]:
        """The content of every rank, in order of ranks."""
        byte = self._mpi.BYTE
        own = json.dumps(content).encode()
        lengths = bytearray(8 * self.size)
        length = len(own).to_bytes(8, "little")
        self._finish(self._comm.Iallgather([length, byte], [lengths, byte]))
        counts = [
            int.from_bytes(lengths[at : at + 8], "little") for at in range(0, len(lengths), 8)
        ]
        starts = [0, *itertools.accumulate(counts)][:-1]
        everything = bytearray(sum(counts))
        self._finish(self._comm.Iallgatherv([own, byte], [everything, (counts, starts), byte]))
        return [
            json.loads(everything[start : start + count])
            for start, count in zip(starts, counts, strict=True)
        ]

    def _finish(self, request: Any) -> None:
        try:
            self._wait(request)
        except BaseException:
            _given_up.append((self._comm, request))
            raise

    def _wait(self, request: Any) -> None:
        pause_s = 0.0
        while not request.Test():
            if time.monotonic() >= self._deadline:
                raise ValueError(
                    f"{_INIT}: not all {self.size} processes of the communicator have called it within "
                    f"{self._timeout_s:g} s (HOROVOD_GLOO_TIMEOUT_SECONDS). All of its members have to call hvd.init "
                    "with it, and with no other MPI collective on it pending"
                )
            time.sleep(pause_s)
            pause_s = min(pause_s + 0.0001, _TEST_PAUSE_MAX_S)


def _sets_of(claims: Sequence[Sequence[Sequence[int] | None]]) -> list[list[list[int]]]:
    """For each position the groups that the ranks' claims (lowest rank and size of their own group) make.

    The claims of all ranks are known to each, so all come to the same result or error.
    """
    if len({len(of_rank) for of_rank in claims}) > 1:
        raise ValueError(
            f"{_INIT}: the ranks passed different numbers of process sets made of communicators"
        )
    return [_groups_at(at, [of_rank[at] for of_rank in claims]) for at in range(len(claims[0]))]


def _set_number(at: int) -> str:
    return f"process set number {at} of those made of communicators"


def _groups_at(at: int, claims: Sequence[Sequence[int] | None]) -> list[list[int]]:
    what = _set_number(at)
    groups: dict[tuple[int, int], list[int]] = {}
    for rank, claim in enumerate(claims):
        if claim is not None:
            groups.setdefault((claim[0], claim[1]), []).append(rank)
    for (lowest, size), members in groups.items():
        if members[0] != lowest or len(members) != size:
            raise ValueError(
                f"{_INIT}: {what}: rank {members[0]} passed a communicator of {size} processes "
                f"from rank {lowest} on, of which {len(members)} passed the same: all members have to"
            )
    if not groups:
        raise ValueError(
            f"{_INIT}: {what} was made of the null communicator on every rank: it was freed "
            "before hvd.ProcessSet(comm) was called, or no rank is a member"
        )
    if None in claims and len(groups) > 1:
        raise ValueError(
            f"{_INIT}: {what}: rank {claims.index(None)} passed the null communicator, and "
            f"the others {len(groups)} different ones, so it is not known which of them this rank means"
        )
    return sorted(groups.values())


def _require_running(mpi: Any, what: str) -> None:
    if not mpi.Is_initialized():
        raise ValueError(
            f"{what}: MPI is not initialized. Import mpi4py.MPI without mpi4py.rc.initialize = False (the variable "
            "MPI4PY_RC_INITIALIZE), or call MPI.Init_thread() before"
        )
    if mpi.Is_finalized():
        raise ValueError(f"{what}: MPI has been finalized: call it before MPI.Finalize()")


def _require_one_group(comm: Any, what: str) -> None:
    if comm.Is_inter():
        raise ValueError(
            f"{what}: an intercommunicator has two groups; make one of them with comm.Merge()"
        )


def _require_world(mpi: Any, what: str) -> None:
    """Raise where MPI does not know the processes that the launcher started."""
    if mpi.COMM_WORLD.Get_size() > 1:
        return
    launcher = _core.launcher()  # raises where a variable tells of several, and none of how many
    if launcher is None or launcher[2] == 1:
        return
    by, rank, size, variable, starts_mpi = launcher
    if not starts_mpi:
        raise ValueError(
            f"{what}: MPI.COMM_WORLD has 1 process, but {by} started {size} ({variable}={size}; this is rank {rank}): "
            f"{by} is no launcher of MPI. Call hvd.init() without a communicator, or start the script with mpirun "
            f"-np {size}"
        )
    version = mpi.Get_library_version().strip("\0\n ").splitlines()[0]
    raise ValueError(
        f"{what}: MPI.COMM_WORLD has 1 process, but {by} started {size} ({variable}={size}; this is rank {rank}): "
        f"mpi4py has loaded another MPI than the launcher's ({version}). Set MPI4PY_LIBMPI to the launcher's libmpi, "
        "or start the script with the mpiexec of that library; under srun choose the library's PMI (srun --mpi=pmix, "
        "--mpi=pmi2)"
    )


def _thread_level_problem(mpi: Any) -> str | None:
    level = mpi.Query_thread()
    if level == mpi.THREAD_SINGLE:
        return (
            "MPI was initialized with MPI_THREAD_SINGLE, which promises that the process has one thread, and Horovod "
            "has threads of its own. Remove mpi4py.rc.threads = False, or set mpi4py.rc.thread_level (the variable "
            "MPI4PY_RC_THREAD_LEVEL) to 'multiple', before mpi4py.MPI is imported"
        )
    if level == mpi.THREAD_FUNNELED and not mpi.Is_thread_main():
        return (
            "MPI was initialized with MPI_THREAD_FUNNELED, and hvd.init was called by another thread than the one that "
            "initialized MPI. Call it there, or set mpi4py.rc.thread_level (the variable MPI4PY_RC_THREAD_LEVEL) to "
            "'multiple' before mpi4py.MPI is imported"
        )
    return None
