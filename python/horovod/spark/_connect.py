"""Ranks on Spark Connect: tasks of one barrier stage, of which the first runs the launcher for all."""

from __future__ import annotations

import collections
import dataclasses
import io
import itertools
import os
import pickle
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO, cast

from horovod.runner._launching import Outcomes, pickled, results
from horovod.runner._options import JobOptions
from horovod.runner.agents import Invitation, launch_on_agents
from horovod.runner.common.util.timeout import TimeoutException
from horovod.spark._tasks import Attendance, check_version, explained

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.connect.session import SparkSession
    from pyspark.sql.connect.shell.progress import ProgressHandler

__all__ = ["active_session", "default_parallelism", "run_on_connect"]

_numbers = itertools.count()
# A Connect server takes messages of at most 128 MiB (spark.connect.grpc.maxInboundMessageSize).
_CALL_SIZE_MAX = 120 << 20
_CHUNK_SIZE = 1 << 20
_OUTPUT_SIZE_MAX = 16 << 20
# How often a server says how many tasks run, with a margin.
_REPORT_S = 5.0
# How far the clocks of client and executors may differ.
_CLOCKS_S = 60.0
_POLL_EVERY_S = 0.2
_CANCEL_LIMIT_S = 15.0


def active_session() -> SparkSession | None:
    """The session of this thread, or else the process's."""
    try:
        from pyspark.sql.connect.session import SparkSession
    except ImportError:
        # Of what Connect needs (grpcio, ...) something is missing, so there is no session.
        return None
    return SparkSession.getActiveSession() or SparkSession._get_default_session()


def default_parallelism(session: SparkSession) -> int:
    """Number of slots, as the server counts them: into so many parts it cuts a range."""
    from pyspark.sql import functions

    parts = session.range(1 << 16).select(functions.spark_partition_id().alias("part"))
    row = parts.agg(functions.max("part").alias("last")).first()
    assert row is not None
    return int(row["last"]) + 1


def run_on_connect(
    session: SparkSession,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    options: JobOptions,
) -> list[Any]:
    """Call `fn` on ranks and return what they returned."""
    caller = options.caller
    content = pickled(fn, args, kwargs, caller)
    if len(content) > _CALL_SIZE_MAX:
        raise ValueError(
            f"{caller}: the function and its arguments take {len(content) >> 20} MiB, and Spark Connect sends at most "
            f"{_CALL_SIZE_MAX >> 20} MiB: put the data where ranks can read it, and give them its place"
        )
    outcomes, report, output = _Operation(session, content, options).wait()
    for name, text in output:
        target = getattr(options, name) or getattr(sys, name)
        target.write(text)
        target.flush()
    return results(outcomes, report, options.num_proc, caller)


_Answer = tuple[Outcomes, str, list[tuple[str, str]]]


class _Operation:
    """The Spark operation of a job, run by a thread so that this one can look at the clock and be interrupted."""

    def __init__(self, session: SparkSession, content: bytes, options: JobOptions) -> None:
        assert options.start_timeout is not None
        expires = time.time() + options.start_timeout + _CLOCKS_S
        # The streams stay here; the executor's task has its own.
        self._task = _Task(content, expires, dataclasses.replace(options, stdout=None, stderr=None))
        self._session = session
        self._count = options.num_proc
        self._start_timeout = options.start_timeout
        self._caller = options.caller
        self._tag = f"{self._caller}.{os.getpid()}.{next(_numbers)}.{secrets.token_hex(4)}"
        self._running = 0
        self._rows: list[Any] = []
        self._error: Exception | None = None
        # An interrupted `Thread.join` takes its thread for ended.
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def wait(self) -> _Answer:
        """The first task's answer."""
        deadline = time.monotonic() + self._start_timeout + _REPORT_S
        has_started = False
        progress = cast("ProgressHandler", self._progress)
        self._session.registerProgressHandler(progress)
        self._thread.start()
        try:
            while not self._ended.wait(_POLL_EVERY_S):
                has_started = has_started or self._running > 0
                if not has_started and time.monotonic() > deadline:
                    raise TimeoutException(
                        f"Timed out waiting for Spark tasks to start. {self._caller}: 0 of {self._count} tasks run "
                        f"after {self._start_timeout} s; they start together, in as many free slots. Free some, ask "
                        "for fewer with num_proc, or wait longer with start_timeout or HOROVOD_SPARK_START_TIMEOUT"
                    )
        finally:
            if not self._ended.is_set():
                self._session.interruptTag(self._tag)
                self._ended.wait(_CANCEL_LIMIT_S)
            self._session.removeProgressHandler(progress)
        if self._error is not None:
            raise explained(self._caller, self._error)
        # From the first task, which was given the function in the same way.
        return cast("_Answer", pickle.loads(b"".join(bytes(row["chunk"]) for row in self._rows)))

    def _run(self) -> None:
        try:
            self._session.addTag(self._tag)
            slots = self._session.range(0, self._count, numPartitions=self._count)
            self._rows = slots.mapInArrow(self._task, "chunk binary", barrier=True).collect()
        except Exception as error:
            self._error = error
        finally:
            self._ended.set()

    def _progress(
        self, stages: Any, inflight_tasks: int, operation_id: str | None, done: bool
    ) -> None:
        del stages, operation_id, done
        # The session may have other operations, which other threads wait for.
        if threading.current_thread() is self._thread:
            self._running = inflight_tasks


class _Task:
    """The work of a task; of a class, so that an executor without this package says that it is missing."""

    def __init__(self, content: bytes, expires: float, options: JobOptions) -> None:
        from horovod import __version__

        self._content = content
        self._expires = expires
        self._options = options
        self._version = __version__

    def __call__(self, batches: Iterable[Any]) -> Iterator[pyarrow.RecordBatch]:
        import pyarrow
        from pyspark import BarrierTaskContext

        for _ in batches:
            pass
        context = BarrierTaskContext.get()
        index = context.partitionId()
        check_version(self._version, index)
        if time.time() > self._expires:
            # Spark may start a stage long after its operation was interrupted.
            raise RuntimeError(
                f"task {index} on host {socket.gethostname()} was started after start_timeout"
            )
        if index != 0:
            words = context.allGather("")[0].split()
            if words:
                # How it ends is the launcher's to tell.
                Attendance(Invitation(tuple(words[1:]), words[0]), self._version).run()
            return
        answer = pickle.dumps(self._lead(context), protocol=5)
        for start in range(0, len(answer), _CHUNK_SIZE):
            chunk = pyarrow.array([answer[start : start + _CHUNK_SIZE]], pyarrow.binary())
            yield pyarrow.RecordBatch.from_arrays([chunk], ["chunk"])

    def _lead(self, context: Any) -> _Answer:
        output = _Output()
        tasks = _OtherTasks(context, self._version)
        options = dataclasses.replace(
            self._options, stdout=output.stream("stdout"), stderr=output.stream("stderr")
        )
        try:
            outcomes, report = launch_on_agents(self._content, options, tasks=tasks)
        except Exception as error:
            outcomes, report = [], str(error)
        return outcomes, report, output.parts()


class _OtherTasks:
    """The tasks of this stage as the launcher sees them: they run already, and want to know where it is."""

    def __init__(self, context: Any, version: str) -> None:
        self._context = context
        self._version = version
        self._has_reported = False
        self._thread: threading.Thread | None = None

    @property
    def are_on_this_host(self) -> bool:
        """Whether all tasks of the stage have the address of this one."""
        return len({info.address.rpartition(":")[0] for info in self._context.getTaskInfos()}) == 1

    def start(self, invitation: Invitation) -> None:
        """Tell all of them, and be the first of them, too."""
        self._tell(" ".join([invitation.key, *invitation.addresses]))
        attendance = Attendance(invitation, self._version)
        self._thread = threading.Thread(target=attendance.run, daemon=True)
        self._thread.start()

    def failure(self) -> BaseException | None:
        """Spark ends all tasks when one fails."""
        return None

    def stop(self) -> None:
        """Wait for this process's agent; the others' end with the launcher."""
        if not self._has_reported:
            self._tell("")
        if self._thread is not None:
            self._thread.join()

    def _tell(self, text: str) -> None:
        self._has_reported = True
        self._context.allGather(text)


class _Output:
    """The ranks' output: at once in the executor's log, and the end of it for the client."""

    def __init__(self) -> None:
        self._parts: collections.deque[tuple[str, str]] = collections.deque()
        self._size = 0
        self._is_cut = False

    def stream(self, name: str) -> TextIO:
        return cast("TextIO", _Stream(self, name))

    def parts(self) -> list[tuple[str, str]]:
        cut = [("stderr", "(earlier output is in the executor's log)\n")] if self._is_cut else []
        return cut + list(self._parts)

    def add(self, name: str, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()
        self._parts.append((name, text))
        self._size += len(text)
        while self._size > _OUTPUT_SIZE_MAX:
            self._size -= len(self._parts.popleft()[1])
            self._is_cut = True


class _Stream(io.TextIOBase):
    def __init__(self, output: _Output, name: str) -> None:
        self._output = output
        self._name = name

    def write(self, text: str) -> int:
        self._output.add(self._name, text)
        return len(text)
