"""Process sets: subsets of the ranks that run collective operations among themselves."""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from horovod import _core
from horovod.common import _mpi
from horovod.common.exceptions import HorovodInternalError

# The runtime's face, filled in by `horovod.common.basics`; launchers read it here.
_basics: Any = None
# Ids belong to one job: those of an earlier job in this process must not hit sets of the next.
_registered: "weakref.WeakSet[ProcessSet]" = weakref.WeakSet()


class ProcessSet:
    """A subset of the job's ranks.

    It can be used in operations once registered, by `init(process_sets=[...])` or `add_process_set`.
    The same object (or one with the same ranks) has to be registered on every rank, member or not.

    Parameters
    ----------
    ranks_or_comm
        Global ranks, in any order; results of operations are ordered by ascending rank. Or a communicator of mpi4py
        whose processes are members, for `hvd.init(comm=..., process_sets=[...])`. There each rank passes a set made of
        its own communicator (as `Split` returns it); each group becomes a set. The communicator may be freed then.

    Raises
    ------
    ValueError
        Neither a sequence of `int` nor a communicator, or MPI is not initialized.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any = None
    # The processes of `mpi_comm`; None where this process is no member.
    _mpi_group: Any = None

    def __init__(self, ranks_or_comm: Iterable[int] | Any) -> None:
        if _mpi.is_communicator(ranks_or_comm):
            self.mpi_comm = ranks_or_comm
            self._mpi_group = _mpi.group_of(ranks_or_comm)
            return
        if not isinstance(ranks_or_comm, Iterable):
            raise ValueError(
                "Apparently you tried to build a ProcessSet from an MPI communicator, but Horovod has not "
                f"been built with MPI support (got an object of type {type(ranks_or_comm).__name__})."
            )
        ranks = list(ranks_or_comm)
        for rank in ranks:
            if not isinstance(rank, int):
                raise ValueError(
                    "ProcessSet should be initialized with a list of process ranks, "
                    f"but got the entry {rank!r} of type {type(rank).__name__}."
                )
        self.ranks = sorted(ranks)

    def size(self) -> int | None:
        """Number of members, on members and others alike; None while not registered.

        Raises
        ------
        ValueError
            Horovod is not initialised, or the set is no longer registered.
        """
        if self.process_set_id is None:
            return None
        return len(_core.process_set_ranks(self.process_set_id))

    def rank(self) -> int | None:
        """This process's position among the members, from 0; None while not registered.

        Raises
        ------
        ValueError
            This process is not a member, or as in `size`.
        """
        if self.process_set_id is None:
            return None
        ranks = _core.process_set_ranks(self.process_set_id)
        me = _core.rank()
        if me not in ranks:
            raise ValueError("Process is not part of provided process set.")
        return ranks.index(me)

    def included(self) -> bool | None:
        """Whether this process is a member, registered or not; None if the ranks are unknown."""
        if self.ranks is None:
            return None
        return _core.rank() in self.ranks

    def __copy__(self) -> "ProcessSet":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "ProcessSet":
        # A set belongs to the job and is no value. Copies of a model or optimizer go on using the same one, also when
        # the job begins, or begins again, after the copy was made.
        return self

    def __reduce__(self) -> str | tuple[Any, ...]:
        if self is global_process_set:
            return "global_process_set"
        return (
            ProcessSet,
            (self.ranks,),
        )  # registered or not, it has to be registered where it arrives

    def _invalidate(self) -> None:
        self.process_set_id = None

    def __str__(self) -> str:
        return (
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, "
            f"mpi_comm={self.mpi_comm})"
        )


global_process_set = ProcessSet([])
"""All ranks of the job."""
global_process_set.process_set_id = 0


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set while the job runs, and return it.

    Every rank has to make the same calls to this function and `remove_process_set` in the same order; it
    returns when all of them did. Needs `init(process_sets="dynamic")` or `HOROVOD_DYNAMIC_PROCESS_SETS=1`.

    Raises
    ------
    ValueError
        Not initialised, dynamic process sets are not allowed, the same ranks are already registered, a rank
        is out of range or named twice, or ranks of the job passed different sets.
    NotImplementedError
        The set was made of a communicator of MPI, whose ranks only `init` learns.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    if process_set.ranks is None:
        raise NotImplementedError(
            "Dynamically adding process sets made of MPI communicators is not supported: pass the ranks of its "
            "members, the same list on every rank, or the set to hvd.init(comm=..., process_sets=[...])."
        )
    _require_dynamic("adding")
    ranks = process_set.ranks or []
    if _find(ranks) is not None:
        raise ValueError(f"Attempted to add a duplicate process set: {process_set}")
    process_set.process_set_id = _create(ranks)
    _registered.add(process_set)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set on all ranks; operations pending on it fail.

    Every rank has to make the same calls. Returns False, and does nothing, for the global process set and for
    one that is not registered. Otherwise the object can no longer be used in operations.

    Raises
    ------
    ValueError
        Not initialised, or dynamic process sets are not allowed.
    """
    _require_dynamic("removing")
    number = process_set.process_set_id
    if number is None or number == 0:
        return False
    process_set._invalidate()
    return _core.remove_process_set(number)


def checked_list(process_sets: Iterable[ProcessSet] | None) -> list[ProcessSet]:
    """Return the process sets given to `init` as a list; ValueError for anything else in it."""
    result = list(process_sets or ())
    for entry in result:
        if not isinstance(entry, ProcessSet):
            raise ValueError(
                f'process_sets must be a list of ProcessSet or "dynamic"; it holds {entry!r}.'
            )
    return result


def made_of_communicators(process_sets: Iterable[ProcessSet]) -> list[ProcessSet]:
    """Those of the sets that were made of a communicator of MPI."""
    return [s for s in process_sets if s.mpi_comm is not None and s is not global_process_set]


def with_groups(
    process_sets: Sequence[ProcessSet], groups: Sequence[Sequence[list[int]]], rank: int
) -> list[ProcessSet]:
    """The sets to register, the same on every rank: a set for each group of each communicator, then the lists of ranks.

    Parameters
    ----------
    process_sets
        As this rank passed them to `init`.
    groups
        For each of those made of a communicator, in their order, the groups of all ranks.
    rank
        This rank: the group with it is that of its own object, and a single group is also that of a rank outside.
    """
    result = []
    of_comms = made_of_communicators(process_sets)
    for own, at_position in zip(of_comms, groups, strict=True):
        for ranks in at_position:
            is_own = rank in ranks or len(at_position) == 1
            if is_own:
                own.ranks = ranks
            result.append(own if is_own else ProcessSet(ranks))
    return result + [s for s in process_sets if s not in of_comms]


def forget_registered() -> None:
    """Take their ids from all sets registered so far: they belonged to a job that has ended."""
    for process_set in list(_registered):
        process_set._invalidate()
    _registered.clear()


def register(process_sets: Sequence[ProcessSet], new: bool) -> None:
    """Give ids to the sets passed to `init`; they are created if `new` (the job has just started).

    A set that cannot be created stops the job again: the ranks would disagree about the sets from here on.
    """
    seen = [list(range(_core.size()))] if new else []
    for i, process_set in enumerate(process_sets):
        ranks = process_set.ranks or []
        if ranks in seen:
            process_set._invalidate()
            raise ValueError(
                f"Horovod could not be initialized because process_sets entry number {i} is a duplicate: "
                f"{process_set}"
            )
        seen.append(ranks)
        if new:
            try:
                process_set.process_set_id = _create(ranks)
            except (ValueError, HorovodInternalError) as error:
                # The second: another rank found the mistake first and has stopped the job already.
                _core.shutdown()
                raise ValueError(
                    f"Horovod initialization failed. process_sets entry number {i}, {process_set}: {error}"
                ) from error
        else:
            process_set.process_set_id = _find(ranks)
            if process_set.process_set_id is None:
                raise ValueError(
                    f"Horovod is already initialized without process_sets entry number {i}: {process_set}. "
                    "Shut it down first, or use add_process_set."
                )
        _registered.add(process_set)


def _create(ranks: Sequence[int]) -> int:
    for rank in ranks:
        if rank < 0:
            raise ValueError(f"Tried to register process set with invalid rank: {rank}")
    return _core.add_process_set(ranks)


def _find(ranks: Sequence[int]) -> int | None:
    """The id of the registered set with exactly these ranks."""
    for number in _core.process_set_ids():
        if _core.process_set_ranks(number) == list(ranks):
            return number
    return None


def _require_dynamic(doing: str) -> None:
    _core.rank()  # raises the well-known ValueError before `init`
    if not _core.dynamic_process_sets():
        raise ValueError(
            f"Set HOROVOD_DYNAMIC_PROCESS_SETS=1 to allow {doing} process sets while Horovod is running, "
            'or call hvd.init(process_sets="dynamic").'
        )
