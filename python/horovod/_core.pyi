"""horovod._core: what Python sees of the runtime. All functions are thread-safe; those that can wait release the GIL."""
from collections.abc import Sequence
from typing import Any

# kind codes
ALLREDUCE: int      # 0
ALLGATHER: int      # 1
BROADCAST: int      # 2
ALLTOALL: int       # 3
REDUCESCATTER: int  # 4

__version__: str

class Buffer:
    """Host memory owned by the core (64-byte aligned), exported through the buffer protocol, writable. len() = bytes."""
    def __len__(self) -> int: ...

def init(ranks: Sequence[int] | None = None, dynamic_process_sets: bool = False) -> None:
    """Start (or, when running, do nothing). Raises ValueError 'Horovod initialization failed. ...' with the cause.
    `ranks`: subset of launcher ranks that form the job, or None."""
def shutdown() -> None: ...
def is_initialized() -> bool: ...
def rank() -> int: ...            # these eight: ValueError('Horovod has not been initialized; use hvd.init().')
def size() -> int: ...
def local_rank() -> int: ...
def local_size() -> int: ...
def cross_rank() -> int: ...
def cross_size() -> int: ...
def is_homogeneous() -> bool: ...
def hostname() -> str: ...

# process sets. Collective calls; they block.
def add_process_set(ranks: Sequence[int]) -> int: ...        # works also when dynamic mode is off (init uses it); ValueError on duplicate/invalid ranks
def remove_process_set(process_set: int) -> bool: ...
def process_set_ranks(process_set: int) -> list[int]: ...     # ValueError('Process set does not exist or has not been registered.')
def process_set_ids() -> list[int]: ...
def dynamic_process_sets() -> bool: ...

def enqueue(
    kind: int,
    prefix: str,                    # 'allreduce', 'grouped_allreduce', 'allgather', ... -> key '<prefix>.<name>'
    name: str | None,               # None/'' -> '<prefix>.noname.<n>', n counted per process set and prefix, only by successful enqueues
    tensors: Sequence[tuple[int, int, int, tuple[int, ...], Any]],
    # each: (input data pointer, output data pointer or 0 = core allocates, dtype code, shape, owner object kept alive until completion)
    op: int,                        # reduce op code (Average=0...) ; ignored where it means nothing
    prescale: float,
    postscale: float,
    root: int,                      # global root rank for broadcast, else -1
    splits: Sequence[int] | None,   # alltoall: rows per member; None = even
    process_set: int,
    grouped: bool,
) -> int:
    """Queue one operation (a group is one operation with several tensors) and return its handle (ints from 1).
    Contiguous host memory only. Local mistakes raise ValueError here and queue nothing; not initialised / shut down / peer lost:
    raises HorovodInternalError (horovod.common.exceptions), exactly as spec/torch.md 4.3 says.
    Two pointers may be equal (in place). ALLREDUCE, BROADCAST need an output pointer; ALLGATHER, ALLTOALL, REDUCESCATTER pass 0."""

def poll(handle: int) -> bool: ...          # ValueError "Handle {n} was not created or has been cleared."
def wait(handle: int) -> list[tuple[Buffer, tuple[int, ...]] | None] | tuple[list[tuple[Buffer, tuple[int, ...]] | None], list[int]]:
    """Wait (no GIL, Ctrl-C works) and clear the handle. One entry per tensor: None where the caller gave the output,
    else (buffer, shape). For alltoall: (that list, received splits). Raises HorovodInternalError with the cause.
    Unknown handle: ValueError as poll."""
def barrier(process_set: int) -> None: ...
def join() -> int: ...

def transports() -> dict[str, str]: ...     # for --check-build and logs, e.g. {'shm': 'memfd', 'tcp': '...'}
# dtype codes: uint8 0 int8 1 uint16 2 int16 3 int32 4 int64 5 float16 6 float32 7 float64 8 bool 9 bfloat16 10 uint32 11 uint64 12
