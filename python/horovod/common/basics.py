"""Lifecycle and queries of the runtime that all framework modules of a process share."""

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
from horovod.common import _input_waits, _job_events, _mpi, _ops, _signals
from horovod.common import process_sets as _process_sets
from horovod.common._stacks import threads_within_calls
from horovod.common.exceptions import HorovodInternalError, HorovodNotInitializedError

if TYPE_CHECKING:
    from horovod.common.process_sets import ProcessSet

_log = logging.getLogger("horovod")

# Seconds to wait for running calls at exit. A call that waits for something else, such as a callback, may never end.
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


# Functions that are called before the process leaves the job.
_drains: list[Callable[[], None]] = []


def drain_before_leaving(drain: Callable[[], None]) -> Callable[[], None]:
    """Register `drain`, which waits for operations in a framework's own queue, for calls before leaving the job.

    `drain` must not raise. It is not called at the exit of a failed script, whose peers may never start these
    operations.
    """
    _drains.append(drain)
    return drain


def _drain() -> None:
    for drain in _drains:
        drain()


# Whether the last function that was called in place of a script, such as by `horovod.run`, has failed.
_function_failed = False


@contextlib.contextmanager
def called_for_script() -> Iterator[None]:
    """Mark the block as a script: if it raises, the process leaves the job at exit as after a failed script.

    `sys.last_value` does not record this failure, because the caller catches the exception and sends it to another
    process.
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
    # The interpreter stores the exception that ended the script in `sys.last_value`.
    failed = _function_failed or getattr(sys, "last_value", None) is not None
    if not failed:
        _drain()
    _core.leave_at_exit(failed)
    _await_calls()


def _await_calls() -> None:
    """Wait until threads have returned from calls of this package, or block in a place where they stay.

    CPython unwinds a thread that requests the interpreter's lock during finalization. If the thread's stack contains
    C++ frames of a framework, the unwinding aborts the process.
    """
    deadline = time.monotonic() + _CALLS_END_WITHIN_S
    while time.monotonic() < deadline:
        if threads_within_calls() <= set(_core.staying_threads()):
            return
        time.sleep(0.001)


class HorovodBasics:
    """Lifecycle, topology and build queries.

    The arguments are accepted and have no effect: all frameworks share one runtime, `horovod._core`. In the original
    they named the library of a framework.
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
    # Rank 0's rendezvous in a job of an MPI communicator; None on other ranks and after the job was left.
    _rendezvous: _core.Rendezvous | None = None

    def __init__(self, pkg_path: str | None = None, *args: str) -> None:
        del pkg_path, args

    @functools.cached_property
    def MPI_LIB_CTYPES(self) -> ctypes.CDLL:
        """The loaded library of the runtime; some launchers print it into their log."""
        return ctypes.CDLL(_core.__file__)

    def init(
        self,
        comm: Sequence[int] | Any | None = None,
        process_sets: "Sequence[ProcessSet] | str | None" = None,
    ) -> None:
        """Connect this process with the other processes of its job; every process has to call this.

        Without a launcher the job is this one process. If Horovod is already running, the call only sets the ids of
        `process_sets`. The process leaves the job at exit. A signal handler that runs while `init` waits for the other
        processes may call `shutdown`; `init` then raises an error.

        Parameters
        ----------
        comm
            Processes that form the job. None: all processes that the launcher started. A list of the launcher's ranks:
            these processes, and the position in the list is the new rank. Under `horovodrun` only the list of all ranks
            in order is accepted. A communicator of mpi4py: its processes, in its order; they exchange addresses and the
            key through the communicator, so that no setting is needed. Other processes must not call `init` with the
            same list or communicator.
        process_sets
            Sets to register, the same list on every rank; or "dynamic", which allows `add_process_set` and
            `remove_process_set` later. `HOROVOD_DYNAMIC_PROCESS_SETS=1` allows them too.

        Raises
        ------
        ValueError
            The processes could not be connected (the text names the connection and the cause); a signal handler called
            `shutdown` meanwhile; an argument is invalid; `process_sets` has a duplicate, which is left unregistered; or
            this process is not in `comm`.
        NotImplementedError
            A set of `process_sets` was made from an MPI communicator, and `comm` is not a communicator.
        """
        ranks = _job_ranks(comm)
        dynamic = isinstance(process_sets, str)
        if isinstance(process_sets, str):
            if process_sets.lower() != "dynamic":
                raise ValueError(
                    f'process_sets must be a list of ProcessSet or "dynamic", not {process_sets!r}.'
                )
            # An elastic job calls `init` again without this argument, and its sets must stay dynamic.
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
            _input_waits.job_begins()
        if wanted:
            _process_sets.register(wanted, new=not running)

    def _init_with_communicator(
        self, comm: Any, process_sets: "Sequence[ProcessSet]", dynamic: bool
    ) -> "list[ProcessSet]":
        """Connect the processes of an MPI communicator; return the process sets to register."""
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
        """Leave the job and join its next generation, with the process sets of the first `init`.

        Raises
        ------
        ValueError
            As in `init`; for example a process set has ranks that the smaller job no longer has.
        HorovodInternalError
            Another rank was lost meanwhile, or this process has lost its GPU.
        WorkerRemovedError
            The launcher has removed this process from the job.
        """
        # Launchers of elastic jobs assign new ranks, which a list of ranks does not fit.
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
        """Leave the job; operations that are pending on any rank fail. `init` may be called again afterwards."""
        _drain()
        try:
            _core.wait_for_devices()
        except HorovodInternalError as error:
            _log.warning("Horovod was shut down, and operations on GPUs had failed: %s", error)
        _core.shutdown()
        self._close_rendezvous()

    def is_initialized(self) -> bool:
        """Return whether `init` was called, and `shutdown` not since then.

        In a forked child, such as the worker of a DataLoader, this and `rank()`, `size()` and the other queries return
        the values of the parent. Operations raise `HorovodNotInitializedError` there.
        """
        return _core.is_initialized()

    def start_timeline(self, file_path: str, mark_cycles: bool = False) -> None:
        """Record the events of each tensor on every rank into a file, until `stop_timeline` or `shutdown`.

        Rank 0 writes the events of all ranks. On other ranks the call has no effect and is not required. If another
        file is being recorded, that file is completed first. If the file of this path is being recorded, the call has
        no effect. docs/timeline.md describes the file and how to view it.

        Parameters
        ----------
        file_path
            Path of a file that is created, or emptied, on rank 0's host. If that fails, an error is logged and nothing
            is recorded.
        mark_cycles
            Whether to mark each batch of the coordinator's responses.

        Raises
        ------
        ValueError
            Horovod is not initialised, or `HOROVOD_TIMELINE` was not set at `init` (to a path or to `DYNAMIC`).
        """
        self._require_init()
        _core.start_timeline(os.fspath(file_path), bool(mark_cycles))

    def stop_timeline(self) -> None:
        """Stop recording. When this returns on rank 0, the file contains all events of all ranks until now.

        Raises
        ------
        ValueError
            Horovod is not initialised.
        """
        self._require_init()
        if not _core.stop_timeline():
            _log.info("stop_timeline: no timeline is being recorded.")

    def stats(self) -> dict[str, Any]:
        """Return figures of the job: the operations of each rank, and the ranks and operations for which it waited.

        Every rank reports to rank 0 once a second. On rank 0 the lists contain all ranks, on other ranks only the
        caller. Times are in seconds and sizes in bytes, as the keys are named; docs/watching.md explains every key.
        Counters begin at `init`.

        Returns
        -------
        dict
            `rank`, `size`, `restarts`; `ranks`, a list of dictionaries in the order of the ranks; `hosts`, a list in
            the order of the hosts' first ranks; `waiting_for`, a list of the ranks that others wait for now; and
            `slow`, a dictionary about the rank for which the others wait step after step, or None.

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
        """Mark the end of a training step; `steps` of `stats()` counts the marks.

        Raises
        ------
        ValueError
            Horovod is not initialised.
        """
        self._require_init()
        _core.mark_step()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark the activity of the script in the block, as in `with hvd.phase("data"): batch = next(batches)`.

        Parameters
        ----------
        name
            `"data"`: the script waits for its input, which `input_seconds` of `stats()` counts. Waits in PyTorch's
            `DataLoader` and in datasets of `tf.data` are counted without a mark.

        Raises
        ------
        ValueError
            There is no phase of this name, or Horovod is not initialised.
        """
        if name != "data":
            raise ValueError(f'hvd.phase({name!r}): there is no such phase, expected "data".')
        self._require_init()
        with _input_waits.counted():
            yield

    def size(self) -> int:
        """Return the number of processes of the job. Raise ValueError before `init`."""
        return _core.size()

    def local_size(self) -> int:
        """Return the number of the job's processes on this host. Raise ValueError before `init`."""
        return _core.local_size()

    def cross_size(self) -> int:
        """Return the number of hosts that have a process with this process's local rank.

        Raise ValueError before `init`.
        """
        return _core.cross_size()

    def rank(self) -> int:
        """Return this process's number in the job, from 0. Raise ValueError before `init`."""
        return _core.rank()

    def local_rank(self) -> int:
        """Return this process's number among those on its host, from 0. Raise ValueError before `init`."""
        return _core.local_rank()

    def cross_rank(self) -> int:
        """Return this host's number among the hosts that have a process with this local rank, from 0.

        Raise ValueError before `init`.
        """
        return _core.cross_rank()

    def is_homogeneous(self) -> bool:
        """Return whether all hosts run the same number of processes. Raise ValueError before `init`."""
        return _core.is_homogeneous()

    def mpi_threads_supported(self) -> bool:
        """Return whether calls of mpi4py may be mixed with calls of Horovod from any thread.

        Horovod itself calls MPI only inside `init(comm=...)`, on the calling thread. The result is therefore whether
        MPI was initialised with `MPI_THREAD_MULTIPLE`. This call imports mpi4py, which initialises MPI, if the script
        has not imported it. False under `horovodrun` and other launchers that start no MPI, and without mpi4py.

        Raises
        ------
        ValueError
            Horovod is not initialised, or mpi4py has loaded another MPI than the launcher's.
        """
        self._require_init()
        return _mpi.threads_supported()

    def mpi_enabled(self) -> bool:
        """Return whether a launcher of MPI started this process and mpi4py is installed.

        Horovod's own transport sends the tensors in any case.
        """
        return _mpi.is_enabled()

    def mpi_built(self) -> bool:
        """Return whether mpi4py is installed; `init` and `ProcessSet` accept its communicators."""
        return _mpi.is_installed()

    def gloo_enabled(self) -> bool:
        """Return True, also before `init`: the built-in transport replaces Gloo."""
        return True

    def gloo_built(self) -> bool:
        """Return True: the built-in transport replaces Gloo."""
        return True

    def nccl_built(self) -> int:
        """Return NCCL's version code, such as 23007 for 2.30.7, if operations on GPU tensors can use NCCL; else 0.

        For AMD GPUs the result is the version code of RCCL, as in the original.

        Operations can use NCCL if its library is found at run time and recent enough, and `HOROVOD_GPU_OPERATIONS` does
        not select host memory. The query needs no GPU and does not initialise CUDA. If the result is not 0, Adasum of
        GPU tensors averages inside each host and combines the hosts.
        """
        return _core.nccl_version()

    def ddl_built(self) -> bool:
        """Return False: IBM's DDL is not supported."""
        return False

    def ccl_built(self) -> bool:
        """Return False: Intel's oneCCL is not supported."""
        return False

    def cuda_built(self) -> bool:
        """Return whether CUDA's driver library, `libcuda.so.1`, is found on this host; does not initialise CUDA."""
        return not isinstance(_core.gpu_libraries()["cuda"], str)

    def rocm_built(self) -> bool:
        """Return whether the GPUs of this process are AMD's, and their library (`libamdhip64.so`) is found.

        The GPUs are AMD's if PyTorch is a build for ROCm. Without PyTorch they are AMD's if CUDA's driver is not found
        and this machine has an AMD GPU.
        """
        return isinstance(_core.gpu_libraries().get("rocm"), tuple)

    def __reduce__(self) -> str:
        # Unpickling in another process returns the `basics` object of that process.
        return "basics"

    @staticmethod
    def _tell_environment() -> None:
        """Set the launcher's variables to the values of the new generation; scripts and child processes read them."""
        for name in ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"):
            os.environ[f"HOROVOD_{name.upper()}"] = str(getattr(_core, name)())

    @staticmethod
    def _require_init() -> None:
        if not _core.is_initialized():
            raise HorovodNotInitializedError(_NOT_INITIALIZED)


basics = HorovodBasics()
_process_sets._basics = basics
