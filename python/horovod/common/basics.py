"""Lifecycle and queries of the one runtime that all framework modules of a process share."""

import atexit
import contextlib
import ctypes
import functools
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from horovod import _core
from horovod.common import _job_events, _mpi, _ops, _signals
from horovod.common import process_sets as _process_sets
from horovod.common._stacks import threads_within_calls
from horovod.common.exceptions import HorovodInternalError, HorovodNotInitializedError

if TYPE_CHECKING:
    from horovod.common.process_sets import ProcessSet

_log = logging.getLogger("horovod")

# A call that waits for something else, such as a user's callback, may not end at all.
_CALLS_END_WITHIN_S = 0.5

_NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."


def _job_ranks(comm: Any) -> list[int] | None:
    """Turn the `comm` argument of `init` into launcher ranks, or None for all of them."""
    if comm is None or _mpi.is_communicator(comm):
        return None
    if isinstance(comm, Iterable) and not isinstance(comm, (str, bytes)):
        ranks = list(comm)
        if not all(isinstance(rank, int) for rank in ranks):
            raise ValueError(
                "Invalid type of argument comm. Expected None or a list of ranks, "
                f"got a list with {next(r for r in ranks if not isinstance(r, int))!r}."
            )
        return ranks or None
    if _mpi.is_loaded():
        raise ValueError(
            "Invalid type of argument comm. Expected None, a list of ranks or a communicator of mpi4py, "
            f"got an object of type {type(comm).__name__}."
        )
    raise ValueError(
        "Horovod has not been built with MPI support. Ensure that comm is None, a list of ranks or, with mpi4py, a "
        f"communicator: an object of type {type(comm).__name__} was given."
    )


@functools.cache
def _shut_down_at_exit() -> None:
    atexit.register(_leave_at_exit)


# Called before the job is left.
_drains: list[Callable[[], None]] = []


def drain_before_leaving(drain: Callable[[], None]) -> Callable[[], None]:
    """Have `drain` called before the job is left: it waits for operations that a framework's own engine has queued.

    It may not raise. After a script that failed it is not called: other ranks may never come to these operations.
    """
    _drains.append(drain)
    return drain


def _drain() -> None:
    for drain in _drains:
        drain()


# The last function that was called for a script, as by `horovod.run`, has failed.
_function_failed = False


@contextlib.contextmanager
def called_for_script() -> Iterator[None]:
    """Run a function in place of a script: if the function fails, the process leaves the job as after a failed script.

    `sys.last_value` does not show this failure: the caller catches the exception, to send it to another process.
    """
    global _function_failed
    _function_failed = True
    try:
        yield
    except SystemExit as ended:
        _function_failed = ended.code not in (None, 0)
        raise
    _function_failed = False


def _leave_at_exit() -> None:
    # The interpreter has noted here the exception that ended the script, if one did.
    failed = _function_failed or getattr(sys, "last_value", None) is not None
    if not failed:
        _drain()
    _core.leave_at_exit(failed)
    _await_calls()


def _await_calls() -> None:
    """Wait for threads that are within a call of this package to come out of it, or to where they stay.

    CPython unwinds a thread that asks for the interpreter's lock too late. Such a call may have a framework's C++
    frames beneath it, which turn the unwinding into an abort of the process after all its work.
    """
    deadline = time.monotonic() + _CALLS_END_WITHIN_S
    while time.monotonic() < deadline:
        if threads_within_calls() <= set(_core.staying_threads()):
            return
        time.sleep(0.001)


class HorovodBasics:
    """Lifecycle, topology and build queries.

    The arguments, which named a framework's own library in earlier versions, are accepted and have no effect:
    there is one runtime, `horovod._core`, for all frameworks.
    """

    Average = _ops.Average
    Sum = _ops.Sum
    Adasum = _ops.Adasum
    Min = _ops.Min
    Max = _ops.Max
    Product = _ops.Product

    HOROVOD_PROCESS_SET_ERROR_INIT = -1
    HOROVOD_PROCESS_SET_ERROR_DYNAMIC = -2
    HOROVOD_PROCESS_SET_ERROR_UNKNOWN_SET = -3
    HOROVOD_PROCESS_SET_ERROR_FOREIGN_SET = -4
    HOROVOD_PROCESS_SET_ERROR_SHUTDOWN = -5
    HOROVOD_PROCESS_SET_ERROR_EXISTING_SET = -6

    _process_sets_of_init: "Sequence[ProcessSet]" = ()
    # Of a job whose processes a communicator of MPI named; rank 0's, until the job is left.
    _rendezvous: _core.Rendezvous | None = None

    def __init__(self, pkg_path: str | None = None, *args: str) -> None:
        del pkg_path, args

    @functools.cached_property
    def MPI_LIB_CTYPES(self) -> ctypes.CDLL:
        """The library of the runtime, as some launchers print it into their log."""
        return ctypes.CDLL(_core.__file__)

    def init(
        self,
        comm: Sequence[int] | Any | None = None,
        process_sets: "Sequence[ProcessSet] | str | None" = None,
    ) -> None:
        """Connect this process with the others of its job; every process has to call it.

        Without a launcher the job is this one process. When Horovod is already running this changes nothing,
        except that ids of `process_sets` are filled in. At exit of the process `shutdown` is called. A signal
        handler that runs while this waits for the other processes may call `shutdown`, which ends it with an error.

        Parameters
        ----------
        comm
            Which processes form the job. None: all that the launcher started. A list of the launcher's ranks: these,
            and the position in the list is the rank; not under `horovodrun`, where only the list of all ranks in
            order is accepted. A communicator of mpi4py: its processes, in its order; they agree on everything else
            through it, so that nothing has to be set. Processes outside must not call this with the same list or
            communicator.
        process_sets
            Sets to register, the same list on every rank; or "dynamic", which allows `add_process_set` and
            `remove_process_set` later (as does `HOROVOD_DYNAMIC_PROCESS_SETS=1`).

        Raises
        ------
        ValueError
            The processes could not be connected (the text says which connection failed and why), or `shutdown`
            was called meanwhile by a signal handler, or an argument is not one of the above, or `process_sets` has
            a duplicate, which is left unregistered, or this process is not among those of `comm`.
        NotImplementedError
            A set of `process_sets` was made of a communicator of MPI, and `comm` is none.
        """
        ranks = _job_ranks(comm)
        dynamic = isinstance(process_sets, str)
        if isinstance(process_sets, str):
            if process_sets.lower() != "dynamic":
                raise ValueError(
                    f'process_sets must be a list of ProcessSet or "dynamic", not {process_sets!r}.'
                )
            # An elastic job initialises again without arguments, and must stay dynamic then.
            os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
            wanted: list[ProcessSet] = []
        else:
            wanted = _process_sets.checked_list(process_sets)
        is_comm = _mpi.is_communicator(comm)
        of_comms = _process_sets.made_of_communicators(wanted)
        if of_comms and not is_comm:
            raise NotImplementedError(
                "At this time process sets defined via MPI communicators need a communicator in init, too: "
                "hvd.init(comm=MPI.COMM_WORLD, process_sets=[...])."
            )
        running = _core.is_initialized()
        if is_comm and running and not _mpi.is_of_job(comm):
            raise ValueError(
                "hvd.init(comm=...): Horovod runs already, with other processes than those of this communicator: call "
                "hvd.shutdown() first."
            )
        if not running:
            _job_events.forget_job()
        try:
            meets_over = comm if is_comm else _mpi.world_to_meet_over() if comm is None else None
            if meets_over is not None and not running:
                wanted = self._init_with_communicator(meets_over, wanted, dynamic)
            else:
                _core.init(ranks, dynamic)
        except ValueError:
            if not running and _core.is_initialized():
                _core.shutdown()  # connected, but not with these arguments
            self._close_rendezvous(running)
            raise
        except BaseException:
            self._close_rendezvous(running)
            raise
        if not running:
            _process_sets.forget_registered()
            _process_sets.global_process_set.mpi_comm = comm if is_comm else None
        _shut_down_at_exit()
        _signals.job_begins()
        _process_sets.global_process_set.ranks = list(range(_core.size()))
        if _core.is_elastic():
            self._tell_environment()
        if not running:
            self._process_sets_of_init = wanted
            self._comm_of_init = comm
        if wanted:
            _process_sets.register(wanted, new=not running)

    def _init_with_communicator(
        self, comm: Any, process_sets: "Sequence[ProcessSet]", dynamic: bool
    ) -> "list[ProcessSet]":
        """Connect the processes of a communicator of MPI; the process sets to register."""
        of_comms = _process_sets.made_of_communicators(process_sets)
        agreed = _mpi.agree(comm, [process_set._mpi_group for process_set in of_comms])
        self._rendezvous = agreed.rendezvous
        _core.init(None, dynamic, (agreed.rank, agreed.size, agreed.addresses, agreed.key))
        return _process_sets.with_groups(process_sets, agreed.sets, agreed.rank)

    def _close_rendezvous(self, running: bool = False) -> None:
        if self._rendezvous is not None and not running:
            self._rendezvous.close()
            self._rendezvous = None

    def begin_again(self) -> None:
        """Leave the job and become a member of its next generation, with the process sets of the first `init`.

        Raises
        ------
        ValueError
            As in `init`; for example a process set has ranks that the smaller job no longer has.
        HorovodInternalError
            Another rank was lost meanwhile, or this process has lost its GPU.
        WorkerRemovedError
            This process is not wanted any more.
        """
        # Launchers of elastic jobs number the ranks anew.
        comm = None if _core.is_elastic() else self._comm_of_init
        if _mpi.is_communicator(comm):
            raise ValueError(
                "a job of hvd.init(comm=<communicator>) cannot begin again after a failure: start the script again, "
                "and go on from its last checkpoint"
            )
        self.shutdown()
        if (loss := _core.gpu_loss()) is not None:
            raise HorovodInternalError(f"this process cannot go on: {loss}")
        process_sets = self._process_sets_of_init
        try:
            self.init(comm=comm, process_sets=process_sets)
        except ValueError as error:
            if isinstance(error.__cause__, HorovodInternalError):
                raise error.__cause__ from None
            if process_sets:
                error.add_note(
                    "Process sets of hvd.init() are registered again when members of an elastic job come or go. Where "
                    "their ranks depend on the size, use hvd.init(process_sets='dynamic') and add them at the "
                    "beginning of the function that hvd.elastic.run decorates."
                )
            raise

    def shutdown(self) -> None:
        """Leave the job: operations still pending anywhere fail. `init` may be called again afterwards."""
        _drain()
        try:
            _core.wait_for_devices()
        except HorovodInternalError as error:
            _log.warning("Horovod was shut down, and operations on GPUs had failed: %s", error)
        _core.shutdown()
        self._close_rendezvous()

    def is_initialized(self) -> bool:
        """Whether `init` was called, and `shutdown` not since then.

        A forked child (such as the worker of a DataLoader) says what its parent would have said, and so do `rank()`,
        `size()` and the other queries; operations raise `HorovodNotInitializedError` there.
        """
        return _core.is_initialized()

    def start_timeline(self, file_path: str, mark_cycles: bool = False) -> None:
        """Record what happens to each tensor on every rank into a file, until `stop_timeline` or `shutdown`.

        Rank 0 writes, and decides for all: on other ranks the call has no effect, and they need not make it. A file
        that was being recorded is finished first; a call with its path changes nothing. docs/timeline.md says what is
        in the file and how to look at it.

        Parameters
        ----------
        file_path
            Created, or emptied, on rank 0's host. When that fails there is an error in the log and no recording.
        mark_cycles
            Mark each batch of answers of the coordinator.

        Raises
        ------
        ValueError
            Horovod is not initialised, or `HOROVOD_TIMELINE` was not set at `init` (to a path or to `DYNAMIC`).
        """
        self._require_init()
        _core.start_timeline(os.fspath(file_path), bool(mark_cycles))

    def stop_timeline(self) -> None:
        """Stop recording; on rank 0 what all ranks did until now is in the file afterwards.

        Raises
        ------
        ValueError
            Horovod is not initialised.
        """
        self._require_init()
        if not _core.stop_timeline():
            _log.info("stop_timeline: no timeline is being recorded.")

    def stats(self) -> dict[str, Any]:
        """Figures of the job: what each rank has done, and for whom and what it has waited.

        Rank 0 knows all ranks, which report to it once a second; on every other rank the lists hold this rank only.
        Times are in seconds and sizes in bytes, as the keys say; docs/watching.md explains every key. Counters begin
        at `init`.

        Returns
        -------
        dict
            `rank`, `size`, `restarts`; `ranks`, a list of dictionaries in the order of the ranks; and `hosts`, a list
            in the order of the hosts' first ranks.

        Raises
        ------
        ValueError
            Horovod is not initialised, or measuring is off, which is the default.
        """
        self._require_init()
        document = _core.stats()
        if document is None:
            raise ValueError(
                "Nothing is measured: HOROVOD_METRICS was not set to 1 at hvd.init(). Set it for all ranks, such as "
                "with HOROVOD_METRICS=1 horovodrun."
            )
        figures: dict[str, Any] = json.loads(document)
        return figures

    def step(self) -> None:
        """Mark the end of a training step, for `steps` of `stats()` and what shows it.

        Raises
        ------
        ValueError
            Horovod is not initialised.
        """
        self._require_init()
        _core.mark_step()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark what the script does meanwhile, as in `with hvd.phase("data"): batch = next(batches)`.

        Parameters
        ----------
        name
            `"data"`: the script waits for its input, which `input_seconds` of `stats()` counts.

        Raises
        ------
        ValueError
            There is no phase of this name, or Horovod is not initialised.
        """
        if name != "data":
            raise ValueError(f'hvd.phase({name!r}): there is no such phase, expected "data".')
        self._require_init()
        begin = time.monotonic()
        try:
            yield
        finally:
            _core.mark_input(time.monotonic() - begin)

    def size(self) -> int:
        """Number of processes of the job. ValueError before `init`, as in all functions below."""
        return _core.size()

    def local_size(self) -> int:
        """Number of the job's processes on this host."""
        return _core.local_size()

    def cross_size(self) -> int:
        """Number of hosts that have a process with this process's local rank."""
        return _core.cross_size()

    def rank(self) -> int:
        """This process's number in the job, from 0."""
        return _core.rank()

    def local_rank(self) -> int:
        """This process's number among those on its host, from 0."""
        return _core.local_rank()

    def cross_rank(self) -> int:
        """The host's number among those that have a process with this local rank, from 0."""
        return _core.cross_rank()

    def is_homogeneous(self) -> bool:
        """Whether all hosts run the same number of processes."""
        return _core.is_homogeneous()

    def mpi_threads_supported(self) -> bool:
        """Whether calls of mpi4py may be mixed with calls of Horovod from any thread.

        Horovod itself calls MPI only inside `init(comm=...)`, on the calling thread. So the answer is that of MPI:
        whether it was initialised with `MPI_THREAD_MULTIPLE`. If the script has not imported mpi4py yet, this does, and
        that initialises MPI. False under `horovodrun` and other launchers that start no MPI, and without mpi4py.

        Raises
        ------
        ValueError
            Horovod is not initialised, or mpi4py has loaded another MPI than the launcher's.
        """
        self._require_init()
        return _mpi.threads_supported()

    def mpi_enabled(self) -> bool:
        """Whether a launcher of MPI started this process, and mpi4py is there for communicators.

        Tensors take Horovod's own transport in any case.
        """
        return _mpi.is_enabled()

    def mpi_built(self) -> bool:
        """Whether mpi4py is installed, whose communicators `init` and `ProcessSet` accept."""
        return _mpi.is_installed()

    def gloo_enabled(self) -> bool:
        """True, also before `init`: the built-in transport stands where Gloo was."""
        return True

    def gloo_built(self) -> bool:
        """True: the built-in transport stands where Gloo was."""
        return True

    def nccl_built(self) -> int:
        """NCCL's version code, such as 23007 for 2.30.7, if operations on tensors of GPUs can use it; else 0.

        With AMD's GPUs it is that of their library (RCCL), as the original has it.

        That is where its library is found and recent enough, and `HOROVOD_GPU_OPERATIONS` does not ask for host memory.
        NCCL is not built in but found at run time. The answer does not need a GPU, and CUDA is not initialised for it.
        Where it is not 0, Adasum of tensors on GPUs averages inside each host and combines the hosts.
        """
        return _core.nccl_version()

    def ddl_built(self) -> bool:
        """False: IBM's DDL is not supported."""
        return False

    def ccl_built(self) -> bool:
        """False: Intel's oneCCL is not supported."""
        return False

    def cuda_built(self) -> bool:
        """Whether the driver's library for CUDA, `libcuda.so.1`, is found here; CUDA is not initialised for it."""
        return not isinstance(_core.gpu_libraries()["cuda"], str)

    def rocm_built(self) -> bool:
        """Whether the GPUs of this process are AMD's, and their library (`libamdhip64.so`) is found.

        They are where PyTorch is one for ROCm; else where CUDA's driver is not found and this machine has an AMD GPU.
        """
        return isinstance(_core.gpu_libraries().get("rocm"), tuple)

    def __reduce__(self) -> str:
        # Functions that are sent to other processes find the one that is there.
        return "basics"

    @staticmethod
    def _tell_environment() -> None:
        """Update the launchers' variables for a new generation; scripts and children read them."""
        for name in ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"):
            os.environ[f"HOROVOD_{name.upper()}"] = str(getattr(_core, name)())

    @staticmethod
    def _require_init() -> None:
        if not _core.is_initialized():
            raise HorovodNotInitializedError(_NOT_INITIALIZED)


basics = HorovodBasics()
_process_sets._basics = basics
