"""Spark tasks that run the ranks of a job, each through an agent that dials the launcher on the driver."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from horovod import __version__
from horovod.runner._options import JobOptions
from horovod.runner.agents import Invitation, serve_and_explain
from horovod.runner.common.util.timeout import TimeoutException
from horovod.spark.task import GPU_ADDRESSES

if TYPE_CHECKING:
    from pyspark import SparkContext

_numbers = itertools.count()
# Tasks end by themselves when the job is over; those that have not by then are cancelled.
_END_LIMIT_S = 3.0
_CANCEL_LIMIT_S = 15.0
# How long the launcher may take to say why it has dismissed all tasks.
_LAST_WORD_S = 10.0
# Tasks that are looked at for the one that has failed.
_TASKS_MAX = 10_000
# Errors that `Attendance` and `check_version` raise.
_OWN_ERROR = re.compile(r"RuntimeError: (task \d+ on host .+)")
# How long a task tries to reach the launcher.
_DIAL_LIMIT_S = 30


class SparkTasks:
    """One Spark job of so many tasks, which hold their slots until the ranks' job is over.

    Parameters
    ----------
    context
        The session's context.
    options
        Those of the job. Within `start_timeout` all tasks of a job of fixed size must run, and enough of an elastic
        one. Spark may start a task of an elastic job again while the others go on.
    """

    def __init__(self, context: SparkContext, options: JobOptions) -> None:
        assert options.start_timeout is not None
        caller = options.caller
        self._context = context
        self._count = options.max_num_proc or options.num_proc
        self._start_timeout = options.start_timeout
        self._is_elastic = options.is_elastic
        self._addresses: tuple[str, ...] = ()
        self._caller = caller
        self._group = f"{caller}.{next(_numbers)}"
        self._deadline = 0.0
        self._error: BaseException | None = None
        self._ended_at: float | None = None

    @property
    def are_on_this_host(self) -> bool:
        """Whether Spark runs every executor here: with the masters `local` and `local-cluster`."""
        return str(self._context.master).startswith("local")

    def start(self, invitation: Invitation) -> None:
        """Submit the Spark job, from a thread of its own."""
        from pyspark import InheritableThread

        self._deadline = time.monotonic() + self._start_timeout
        self._addresses = invitation.addresses
        self._thread = InheritableThread(target=self._run, args=(invitation,), daemon=True)
        self._thread.start()

    def failure(self) -> BaseException | None:
        """Why no more tasks can come."""
        if self._error is not None:
            return self._error
        # Tasks that have ended as they should were told so by the launcher, which shall say why.
        if self._ended_at is not None and time.monotonic() - self._ended_at > _LAST_WORD_S:
            self._error = RuntimeError(f"{self._caller}: the Spark tasks have ended")
            return self._error
        if not self._is_elastic and time.monotonic() > self._deadline:
            self._error = self.late()
            return self._error
        return None

    def stop(self) -> None:
        """End the Spark job."""
        if not hasattr(self, "_thread"):
            return
        if self._error is None and not self._is_elastic:
            self._thread.join(_END_LIMIT_S)
        if self._thread.is_alive():
            self._context.cancelJobGroup(self._group)
            self._thread.join(_CANCEL_LIMIT_S)

    def _run(self, invitation: Invitation) -> None:
        # A task that cannot reach the launcher must report in time.
        dial_limit_s = max(1, min(_DIAL_LIMIT_S, self._start_timeout // 2))
        attendance = Attendance(invitation, __version__, dial_limit_s)
        try:
            self._context.setJobGroup(self._group, f"ranks of {self._caller}", True)
            slots = self._context.range(0, self._count, numSlices=self._count)
            # Spark runs no barrier stage where executors come and go on demand.
            dynamic = self._context.getConf().get("spark.dynamicAllocation.enabled", "false")
            if self._is_elastic or dynamic == "true":
                slots.mapPartitions(attendance).collect()
            else:
                slots.barrier().mapPartitions(attendance).collect()
        except Exception as error:
            self._error = explained(self._caller, error, self._where_failed())
        else:
            self._ended_at = time.monotonic()

    def late(self) -> Exception:
        """Why the job has not begun within `start_timeout`, as far as Spark knows."""
        tracker = self._context.statusTracker()
        running = 0
        for job in tracker.getJobIdsForGroup(self._group):
            info = tracker.getJobInfo(job)
            for stage in info.stageIds if info else ():
                of_stage = tracker.getStageInfo(stage)
                running += of_stage.numActiveTasks if of_stage else 0
        reason = (
            f"{self._caller}: {running} of {self._count} tasks run after {self._start_timeout} s"
        )
        for _, error in self._failed_tasks():
            if own := _OWN_ERROR.findall(error):
                return TimeoutException(
                    f"Timed out waiting for Spark tasks to report. {reason}; {own[-1]}"
                )
        if running == self._count:
            return TimeoutException(
                f"Timed out waiting for Spark tasks to report. {reason}, but not all have reached the launcher on "
                f"{socket.gethostname()} at {', '.join(self._addresses)}. Executors with tasks: "
                f"{', '.join(self._busy_executors())}. Let executors connect to the driver, on any port; choose "
                "the interface with nics, or wait longer with start_timeout or HOROVOD_SPARK_START_TIMEOUT"
            )
        slots = self._context.defaultParallelism
        return TimeoutException(
            f"Timed out waiting for Spark tasks to start. {reason}, and Spark says that it has {slots} slots. Free "
            "some, ask for fewer with num_proc, or wait longer with start_timeout or HOROVOD_SPARK_START_TIMEOUT"
        )

    def _where_failed(self) -> str:
        """The executor of a task that has failed, for a message: Spark does not tell it of barrier stages."""
        for task, _ in self._failed_tasks():
            return f" (executor {task.executorId()} on host {task.host()})"
        return ""

    def _failed_tasks(self) -> list[tuple[Any, str]]:
        """Spark's data of tasks that have failed, and their errors."""
        java: Any = self._context._jsc
        tracker = self._context.statusTracker()
        failed = []
        # Spark's data for its web pages is no public interface.
        with contextlib.suppress(Exception):
            store = java.sc().statusStore()
            for job in tracker.getJobIdsForGroup(self._group):
                info = tracker.getJobInfo(job)
                for stage in info.stageIds if info else ():
                    tasks = store.taskList(stage, 0, _TASKS_MAX)
                    for task in (tasks.apply(number) for number in range(tasks.size())):
                        if task.errorMessage().isDefined():
                            failed.append((task, str(task.errorMessage().get())))
        return failed

    def _busy_executors(self) -> list[str]:
        java: Any = self._context._jsc
        executors = java.sc().statusTracker().getExecutorInfos()
        return sorted(f"{e.host()}:{e.port()}" for e in executors if e.numRunningTasks())


def explained(caller: str, error: Exception, where: str = "") -> Exception:
    """The error for the user that follows from a failed Spark job."""
    text = str(error)
    if own := _OWN_ERROR.findall(text):
        cure, where = own[-1], ""
    elif "No module named 'horovod" in text:
        cure = "executors have no horovod-rs: install the wheel in the Python that they use (PYSPARK_PYTHON)"
    elif "PYTHON_VERSION_MISMATCH" in text:
        versions = re.findall(r"Python in worker has different version.*?(?=, PySpark|\n|$)", text)
        cure = (
            f"executors use another Python ({versions[0] if versions else 'than the driver'}): set PYSPARK_PYTHON "
            "to one of the driver's version"
        )
    else:
        cure = f"the Spark job has failed: {_cause(text) or type(error).__name__}"
    explained = RuntimeError(f"{caller}: {cure}{where}")
    explained.__cause__ = error
    return explained


def _cause(text: str) -> str:
    """The line that says most: of a Python worker's last exception, else what Spark says of the job."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    of_python = [
        line
        for line in lines
        if re.match(r"(?!org\.|java\.|py4j\.)[\w.]+(Error|Exception): ", line)
    ]
    of_spark = [line for line in lines if re.search("failed|cancelled", line, re.IGNORECASE)]
    return next(iter([*of_python[-1:], *of_spark[:1], *lines[-1:]]), "")


def check_version(wanted: str, index: int) -> None:
    """Refuse to run ranks of another version's launcher."""
    if __version__ != wanted:
        raise RuntimeError(
            f"task {index} on host {socket.gethostname()} ({sys.executable}) has horovod-rs {__version__}, the "
            f"driver has {wanted}: install the same version on both"
        )


class Attendance:
    """The work of a task; of a class, so that an executor without this package says that it is missing."""

    def __init__(
        self, invitation: Invitation, version: str, dial_limit_s: int = _DIAL_LIMIT_S
    ) -> None:
        self._invitation = invitation
        self._version = version
        self._dial_limit_s = dial_limit_s

    def __call__(self, _: Iterable[Any]) -> Iterator[int]:
        index, status, last_line = self.run()
        if status != 0:
            # Spark starts the task again, if it may.
            raise RuntimeError(_failed_agent(index, status, last_line))
        yield index

    def run(self) -> tuple[int, int, str]:
        """Be a rank until the job is over: this task's number, its agent's exit status, and what that said last."""
        from pyspark import SparkFiles, TaskContext

        task = TaskContext.get()
        assert task is not None
        index, attempt = task.partitionId(), task.attemptNumber()
        check_version(self._version, index)
        gpus = task.resources().get("gpu")
        variables = {"HOROVOD_SPARK_WORK_DIR": os.getcwd()}
        if gpus is not None:
            variables[GPU_ADDRESSES] = ",".join(gpus.addresses)
        # Folders that `--py-files` has sent are on the path of this process only.
        sent = [place for place in sys.path if place.startswith(SparkFiles.getRootDirectory())]
        if sent:
            variables["PYTHONPATH"] = os.pathsep.join(
                [*sent, *filter(None, [os.environ.get("PYTHONPATH")])]
            )
        status, last_line = serve_and_explain(
            self._invitation,
            index=index,
            attempt=attempt,
            environment=variables,
            timeout=self._dial_limit_s,
        )
        return index, status, last_line


def _failed_agent(index: int, status: int, last_line: str) -> str:
    where = f"task {index} on host {socket.gethostname()}"
    _, found, why = last_line.partition("cannot reach the launcher: ")
    if found:
        return (
            f"{where} cannot reach the launcher on the driver ({why}): let executors connect to the driver, on any "
            "port, or choose the interface with nics"
        )
    return f"{where}: its agent ended with exit status {status}{': ' * bool(last_line)}{last_line}"
