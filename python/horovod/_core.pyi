"""horovod._core: what Python sees of the runtime.

All functions are thread-safe; those that can wait release the interpreter lock.
"""

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, Final, Self, final

__all__ = [
    "ALLGATHER",
    "ALLREDUCE",
    "ALLTOALL",
    "BROADCAST",
    "FRAMES_MAX",
    "MOVED",
    "NCCL_SHARES_GPUS_SINCE",
    "REDUCESCATTER",
    "THREADS_MAX",
    "Buffer",
    "PayloadServer",
    "PlainTensors",
    "Rendezvous",
    "Streams",
    "__version__",
    "add_process_set",
    "advise_one_gpu",
    "assign_ranks",
    "barrier",
    "called_back",
    "checks_replicas",
    "checksums",
    "consistency",
    "cross_rank",
    "cross_size",
    "deliver_payload",
    "dynamic_process_sets",
    "end_within",
    "enqueue",
    "expect_guests",
    "fetch_payload",
    "gpu_libraries",
    "gpu_loss",
    "group_settings",
    "handles",
    "hold_state",
    "host_updates",
    "hostname",
    "init",
    "is_elastic",
    "is_homogeneous",
    "is_initialized",
    "jax_ordered_calls",
    "join",
    "lacks_rendezvous",
    "launcher",
    "leave_at_exit",
    "leave_interrupted",
    "local_rank",
    "local_size",
    "mark_input",
    "mark_step",
    "names_of_a_job",
    "nccl_version",
    "needs_sync",
    "open_output",
    "parse_hosts",
    "place_ranks",
    "poll",
    "prefer_gpus",
    "prepare_gpus",
    "process_set_ids",
    "process_set_ranks",
    "rank",
    "read_hostfile",
    "registered_process_set",
    "remove_process_set",
    "report_replica",
    "scattered_rows",
    "shutdown",
    "signal_grace",
    "size",
    "start_timeline",
    "stats",
    "staying_threads",
    "stop_timeline",
    "transports",
    "wait",
    "wait_for_devices",
    "wait_softly",
]

# Kinds of operations.
ALLREDUCE: Final = 0
ALLGATHER: Final = 1
BROADCAST: Final = 2
ALLTOALL: Final = 3
REDUCESCATTER: Final = 4

__version__: str
FRAMES_MAX: int
"""Most frames of one thread in a report about a standstill."""
MOVED: Final[str]
"""Error text for a tensor whose memory is not where the operation wrote."""
NCCL_SHARES_GPUS_SINCE: Final[tuple[int, int, int]]
"""The first version of NCCL that allows several ranks on one GPU, where `NCCL_MULTI_RANK_GPU_ENABLE=1` asks for it."""
THREADS_MAX: int
"""Most threads of one process in such a report."""

@final
class Buffer:
    """Host memory owned by the core: 64-byte aligned, writable, exported through the buffer protocol."""

    def __len__(self) -> int:
        """Size in bytes."""

@final
class PlainTensors:
    """Types of one framework whose tensors the core can read by itself, through DLPack's C exchange table."""

    def __new__(
        cls, types: Sequence[type], lazy: Callable[[Any], bool], storage: Callable[[Any], object]
    ) -> Self:
        """`types` exactly, no subclasses; `lazy(tensor)`: whether the memory of a single element is not its value.

        `storage(tensor)`: what owns the tensor's memory, also when the tensor is given other memory.
        """

    def allreduce(
        self,
        tensor: Any,
        name: str | None,
        op: int,
        prescale: float,
        postscale: float,
        process_set: int | None,
    ) -> int | None:
        """As `enqueue`, an ALLREDUCE of one tensor in place.

        None, and nothing was queued, if the core cannot read the tensor. It reads dense memory: of the host in any
        order of strides, of a GPU row by row. The type must be one of `types`, the operation must work with the dtype,
        and the framework must have the interface.
        """

    def broadcast(
        self, tensor: Any, root: int, name: str | None, process_set: int | None
    ) -> int | None:
        """As `enqueue`, a BROADCAST of one tensor in place. None as in `allreduce`."""

    def grouped_allreduce(
        self,
        tensors: tuple[Any, ...],
        prefix: str,
        name: str | None,
        reduction: tuple[int, float, float],
        process_set: int | None,
    ) -> int | None:
        """As `enqueue` of one grouped ALLREDUCE in place; `wait` will return `tensors`.

        None where there are none, one of them is not such a tensor, two share memory, or they are on several devices.
        """

    def allreduce_and_wait(
        self,
        tensor: Any,
        name: str | None,
        op: int,
        prescale: float,
        postscale: float,
        process_set: int | None,
    ) -> Any:
        """As `allreduce` and then `wait`: the tensor, or None where `allreduce` has None."""

    def broadcast_and_wait(
        self, tensor: Any, root: int, name: str | None, process_set: int | None
    ) -> Any:
        """As `broadcast` and then `wait`: the tensor, or None where `broadcast` has None."""

    def allreduce_together(
        self,
        tensors: list[Any],
        prefix: str,
        names: list[str],
        reduction: tuple[int, float, float],
        process_set: int | None,
    ) -> list[int]:
        """As `allreduce` of each tensor, of which the other ranks hear at once; the handles.

        There are fewer where `allreduce` would return None or raise: from that tensor on nothing was queued.
        """

@final
class PayloadServer:
    """Holds what every rank of one `horovod.run`, or client of a service, fetches, and collects what they deliver."""

    def __new__(
        cls, payload: bytes, local: bool, interfaces: Sequence[str], key: str | None = None
    ) -> Self:
        """Listens on the loopback only if `local`, else on these interfaces or all. Without a key it makes one."""

    def addresses(self) -> list[str]: ...
    def key(self) -> str:
        """64 hex digits; whoever has them belongs to the call."""

    def publish(self, payload: bytes) -> None:
        """Has those who ask from now on fetch this."""

    def take(self) -> tuple[int, bytes] | None:
        """The next delivery, as rank and content; None if none has arrived."""

    def close(self) -> None: ...

@final
class Rendezvous:
    """Where the ranks of one job meet, served by a thread of this process until it is closed."""

    def __new__(
        cls, size: int, local: bool, interfaces: Sequence[str], key: str | None = None
    ) -> Self:
        """Listens on the loopback only if `local`, else on these interfaces or all. Without a key it makes one.

        ValueError for an interface that is not there or a key that is none, OSError where it cannot listen.
        """

    @staticmethod
    def at(port: int, size: int, key: str) -> Rendezvous:
        """For ranks of any host that have this key and know this port already.

        ValueError for a key that is none, OSError where it cannot listen.
        """

    def addresses(self) -> list[str]:
        """Where ranks reach it, as `ip:port`."""

    def key(self) -> str:
        """64 hex digits; whoever has them belongs to the job."""

    def has_met(self) -> bool:
        """Whether all ranks have met."""

    def report_death(self, rank: int, host: str, cause: str) -> None:
        """Tell all ranks that one of them has died; their errors say so."""

    def close(self) -> None: ...

@final
class Streams:
    """Where a framework tells the current stream of each GPU: DLPack's C exchange table, or a function."""

    def __new__(cls, tensor_type: type, ask: Callable[[int], int], is_rocm: bool = False) -> Self:
        """Of tensors of this type; `ask(ordinal)` gives a stream's address where no table does, as for AMD's GPUs.

        Raises RuntimeError where this process uses GPUs of another kind already.
        """

    def current(self, ordinal: int) -> int:
        """Address of the stream that this thread's work on a GPU goes to; 0 is CUDA's default stream."""

def end_within(seconds: float) -> None:
    """Have the process end by then, with status 1, whatever keeps its threads from it."""

def gpu_libraries() -> dict[str, tuple[str, int] | str]:
    """For "cuda" and "nccl" where the library is and its version code, or why it cannot be used.

    "rocm" is there, too, where AMD's GPUs are those of this process; "nccl" is AMD's then. CUDA is not initialised, and
    no GPU is needed.
    """

def gpu_loss() -> str | None:
    """Why this process can never use its GPU again: its context is lost, or what was aborted does not end there.

    None: it can, as far as is known.
    """

def nccl_version() -> int:
    """NCCL's version code; 0 where its library is not found, or operations on GPU tensors go through host memory."""

def advise_one_gpu(advice: str) -> None:
    """Set the advice of errors about tensors on several GPUs: how a script chooses one with its framework.

    The first framework of a process sets the advice.
    """

def prefer_gpus(is_rocm: bool) -> None:
    """Say whether the framework is made for AMD's GPUs, or for CUDA.

    Nothing is looked for or loaded, and it has no effect where the other ones are used already.
    """

def prepare_gpus() -> None:
    """Tell the runtime in which folders of packages NCCL may be, before compiled programs submit from threads of C++.

    The call neither searches nor loads. Submissions from Python do not need it.
    """

def wait_for_devices() -> None:
    """Wait on the host until everything that was launched on GPUs has ended.

    HorovodInternalError if something went wrong there since it was launched. Before `init`, and where no tensor was on
    a GPU, it does nothing.
    """

def assign_ranks(
    processes: Sequence[tuple[str, str]],
    addresses: Sequence[str],
    port: int,
    key: str,
    interfaces: Sequence[str],
) -> list[tuple[tuple[int, int, int, int, int, int], dict[str, str]]]:
    """Make ranks of processes, given as host and address: for each its numbers and its environment.

    The numbers are rank, size, local rank, local size, cross rank and cross size. The ranks meet at `addresses`;
    without any, rank 0 listens on `port` of its own address. ValueError says what is wrong with the arguments.
    """

def names_of_a_job() -> list[str]:
    """Variables that tell a process its part in a job: whoever starts another with it removes them first."""

def parse_hosts(text: str) -> list[tuple[str, int]]:
    """The hosts of `host1:2,host2:4` with their slots, in order. ValueError names an item that is not of this form."""

def read_hostfile(file: str | PathLike[str]) -> list[tuple[str, int]]:
    """The hosts of a hostfile with their slots; one that is named twice has the sum of its slots.

    OSError if the file cannot be read, ValueError if a line is not understood.
    """

def place_ranks(
    hosts: Sequence[tuple[str, int]], least: int, most: int | None
) -> list[tuple[str, tuple[int, int, int, int, int, int]]]:
    """The host of each rank, and its numbers as from `assign_ranks`; all slots of a host before the next one's.

    As many ranks as there are slots, at most `most`. ValueError if there are fewer slots than `least`.
    """

def open_output(path: str) -> int:
    """Open a file to write to it; it is emptied, or made if it is not there. The descriptor is the caller's.

    OSError if it cannot be opened. PermissionError, too, if the path leads over a link or to a file that another user
    has put into a folder to which others may write.
    """

# Both: RuntimeError when the process that called `horovod.run` cannot be reached or goes away.
def fetch_payload(addresses: Sequence[str], key: str, rank: int, timeout_s: float) -> bytes: ...
def deliver_payload(
    addresses: Sequence[str], key: str, rank: int, content: bytes, timeout_s: float
) -> None: ...
def init(
    ranks: Sequence[int] | None = None,
    dynamic_process_sets: bool = False,
    group: tuple[int, int, Sequence[str], str] | None = None,
) -> None:
    """Start the runtime; when it is running, do nothing.

    `ranks` are those of the launcher's ranks that form the job, in order of their ranks in it; None is all. `group` is
    rank, size, addresses of the rendezvous and key of a group that has one of its own.

    ValueError "Horovod initialization failed. ..." with the cause. In an elastic job it waits for the next round, in
    which rank, size and local rank may be others; WorkerRemovedError when this process is not to be part of it.
    """

def launcher() -> tuple[str, int, int, str, bool] | None:
    """Name, rank, size, variable of the size, and whether it starts MPI, of the launcher of this process.

    None: the process is alone. ValueError where variables tell of several, but not enough.
    """

def lacks_rendezvous() -> bool:
    """Whether a launcher started this process as one of several that have no safe way to meet without a setting."""

def group_settings() -> tuple[float, list[str], str | None, str]:
    """Seconds that init may take, interfaces, the user's key (not a launcher's), and what tells hosts apart."""

def shutdown() -> None: ...
def leave_at_exit(failed: bool) -> None:
    """As `shutdown`, at the exit of the process: other threads that wait in here do not return from now on."""

def leave_interrupted() -> None:
    """As `shutdown`, for a script that a signal is about to end: other ranks are told that it failed."""

def expect_guests() -> None:
    """Threads of a framework, which Python does not know, may call operations of the running job from now on."""

def called_back() -> list[int]:
    """Handles of operations that have not ended and end with a callback, ascending."""

def staying_threads() -> list[int]:
    """Idents of the threads that came out of a wait, or came to one, after `leave_at_exit`, and do not return."""

def is_initialized() -> bool:
    """A forked child says what its parent would have."""

# These eight, unless in a forked child: HorovodNotInitializedError "Horovod has not been initialized; use hvd.init()."
def rank() -> int: ...
def size() -> int: ...
def local_rank() -> int: ...
def local_size() -> int: ...
def cross_rank() -> int: ...
def cross_size() -> int: ...
def is_homogeneous() -> bool: ...
def hostname() -> str: ...
def signal_grace() -> float:
    """Return for how many seconds the handler of SIGTERM or SIGALRM need not run; 0: however long."""

# Elastic jobs. host_updates and needs_sync raise ValueError as those above.
def is_elastic() -> bool:
    """Whether the launcher of this process may change the members of the job (HOROVOD_ELASTIC); also before init."""

def jax_ordered_calls() -> bool:
    """Whether programs of JAX on CPUs keep the order of operations in inner functions (HOROVOD_JAX_ORDERED_CALLS).

    Raises ValueError where the setting is no yes and no no.
    """

def host_updates() -> tuple[int, int]:
    """Version and kind of the newest change of the members announced to this rank since its last init.

    The version grows with each announcement within the job; 0 when there was none since init. The kind is the OR of
    1 (somebody is removed) and 2 (somebody was added) over all of them. Ranks may learn at different moments.
    """

def hold_state(current: bool = True) -> None:
    """Tell that this process holds the training state.

    `current`: the same as all other ranks of this round (after a sync); else only that of its last commit (after a
    restore). Kept over shutdown and init. Rank 0 of every later round is a process that holds the state, and when the
    last such process has died the job ends.
    """

def needs_sync() -> bool:
    """Whether some rank did not hold the current state when this round was formed; equal on all ranks.

    True outside of elastic jobs. When it is False, a sync would change nothing.
    """

# Process sets. Adding and removing are collective calls that block.
def checksums(regions: Sequence[tuple[int, int]]) -> list[int]:
    """A signed 64-bit checksum of each piece of memory, given as address and bytes, without the interpreter lock."""

def checks_replicas(process_set: int | None) -> bool:
    """Whether an optimizer on this set is to report its parameters before its first update; False outside of a job."""

def report_replica(
    process_set: int, key: int, names: Sequence[str], sums: Sequence[int], advice: str
) -> None:
    """Send checksums of parameters to rank 0, which compares them with those of the other members; returns at once.

    Reports of one set and one 64-bit `key`, a digest of the names, are compared: the first of each rank, then the next.
    """

def consistency() -> tuple[int, bool]:
    """Steps between two comparisons of the replicas (0: none), and whether a difference is an error, as set here."""

def add_process_set(ranks: Sequence[int]) -> int:
    """Register a set and return its id, in static jobs too; ValueError on duplicate or invalid ranks."""

def registered_process_set(process_set: int | None) -> int:
    """The id; ValueError for None, the id of a set that is not registered."""

def remove_process_set(process_set: int) -> bool: ...
def process_set_ranks(process_set: int) -> list[int]:
    """Members in ascending order; ValueError "Process set does not exist or has not been registered.\""""

def scattered_rows(process_set: int | None, rows: int) -> int | None:
    """Rows that this rank gets of a reducescatter of so many; None if it is no member, or there is no job or set."""

def process_set_ids() -> list[int]: ...
def dynamic_process_sets() -> bool: ...
def enqueue(
    key: tuple[str, str | None, int | None],
    operation: tuple[int, int, float, float, int, Sequence[int] | None],
    tensors: Sequence[tuple[int, int, int, Sequence[int], Any]],
    finish: Callable[[Any], Any] | None = None,
    gpu: tuple[Streams, int, Sequence[Callable[[tuple[int, ...]], tuple[int, Any]]] | None]
    | None = None,
) -> int:
    """Queue one operation (a group is one operation with several tensors) and return its handle, from 1.

    `key` is prefix, name and process set; a set that is not registered, None, is a ValueError. The operation's name
    is `<prefix>.<name>`; without a name `<prefix>.noname.<n>`, n counted per process set and prefix by calls that
    succeed. `operation` is: kind, operator, factors before and after, root (a rank of the job, -1 where there is none),
    and splits (rows per member of an alltoall, None for even). Each tensor is: input pointer, output pointer, dtype
    code, shape, and an owner that is kept alive until completion. The memory is contiguous, of the host or of the GPU;
    both pointers may be equal (in place). ALLREDUCE and BROADCAST need an output pointer. For ALLGATHER, ALLTOALL and
    REDUCESCATTER it is 0 and the core allocates; but for a REDUCESCATTER on a GPU without allocators it is that of
    memory for `scattered_rows`. `gpu` is: the source of its streams, its number, and allocators. `wait` returns the
    value of `finish` for the outputs, and the outputs themselves without it.

    On a GPU the operands are ready when what is on the current stream now has run. Outputs of which the size is known
    late come from the allocators, one for each tensor: given a shape, an address and what keeps the memory alive. They
    are called in a thread of the core's; what they run must be on the stream that is current now.

    Local mistakes raise ValueError, of which DuplicateNameError is one, and queue nothing. Not initialised, shut down
    or a peer lost: HorovodInternalError.

    dtype codes: uint8 0, int8 1, uint16 2, int16 3, int32 4, int64 5, float16 6, float32 7, float64 8, bool 9,
    bfloat16 10, uint32 11, uint64 12.
    """

def poll(handle: int) -> bool:
    """Whether an operation is done, also on a GPU; ValueError "Handle {n} was not created or has been cleared.\""""

def handles() -> list[int]:
    """Handles of the running job of which nobody has taken the results, ascending."""

def wait(handle: int) -> Any:
    """Wait, clear the handle and return its result; Ctrl-C works. None for a handle that has given it already.

    The result is the tensor itself where `PlainTensors` queued it: RuntimeError `MOVED` if its memory is elsewhere
    now. For `enqueue` it is the value of `finish` for the outputs, or without `finish` the outputs: one entry per
    tensor, None where the caller gave the output, else the memory and its shape. A list of only None is None. For an
    alltoall it is a pair of that list and the received splits. On a GPU the memory is what an allocator has returned to
    keep it alive, and the host does not wait: the current stream waits for the results. With
    `HOROVOD_ENABLE_ASYNC_COMPLETION=0` the host waits, too.

    The operation's error is raised, on all its ranks alike: HorovodInternalError, whose attributes name the rank,
    host, cause, tensor and sides; ValueError.
    HorovodNotInitializedError if the job of the handle was left before anybody had waited.
    """

def wait_softly(handles: list[int]) -> tuple[int, str] | None:
    """Wait until these operations have ended (on a GPU: are under way), and leave the handles as they are; None then.

    Ctrl-C works.

    Ends early when they can never end unless the caller goes on. Some rank waits for an operation that this rank has
    not submitted, and the others wait for that rank, or for this one. Returns that rank and that operation then.
    """

def barrier(process_set: int | None) -> None: ...
def join() -> int: ...
def start_timeline(path: str, mark_cycles: bool) -> None:
    """Record into this file; on other ranks than 0 nothing happens. ValueError without HOROVOD_TIMELINE."""

def stop_timeline() -> bool:
    """End the recording and wait until it is in the file; False when there was none."""

def mark_step() -> None:
    """The script has ended a step."""

def mark_input(seconds: float) -> None:
    """The script has waited for its input for so long."""

def stats() -> str | None:
    """The figures of this rank, on rank 0 of all ranks, as a JSON document; None when nothing is measured."""

def transports() -> dict[str, str]:
    """Transports found at run time, for reports: {"shm": "memfd", ...}."""
