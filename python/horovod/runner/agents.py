"""Functions on ranks that run in an executor's tasks, through agents that dial the launcher.

For cluster managers that start processes by their own means (Spark tasks, Ray actors, pods): `run_on_agents` starts
the launcher where it is called and passes its addresses to `Tasks.start`; each task calls `serve_as_agent`. The
launcher needs no way to the tasks' hosts, no ssh and no names that resolve.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import platform
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TextIO

from horovod.runner import _payloads
from horovod.runner._events import Events
from horovod.runner._launching import Outcomes, launch, pickled, results
from horovod.runner._options import JobOptions
from horovod.runner.launch import find_horovodrun

__all__ = ["Invitation", "Tasks", "run_on_agents", "serve_as_agent"]

_KEY = "HOROVODRUN_AGENTS_KEY"
_PYTHON = "HOROVODRUN_AGENTS_PYTHON"
_HOST = "HOROVODRUN_AGENTS_HOST"
_ON_TOP = "HOROVODRUN_SET_"
# How long an agent tries to reach the launcher.
_DIAL_LIMIT_S = 30
# An agent that has lost its parent ends its ranks: SIGTERM, after 30 s SIGKILL.
_END_LIMIT_S = 45.0


@dataclasses.dataclass(frozen=True)
class Invitation:
    """Address that agents dial, and the key that proves them. Any process with the key can run ranks of the job.

    An invitation can be pickled: send it only to your own tasks.
    """

    addresses: tuple[str, ...]
    key: str = dataclasses.field(repr=False)
    is_elastic: bool = False


def serve_as_agent(
    invitation: Invitation,
    *,
    index: int,
    attempt: int = 0,
    host: str | None = None,
    environment: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    timeout: int = _DIAL_LIMIT_S,
) -> int:
    """Run a rank of the job as a child of this process until the job is over.

    The rank's working directory and environment are this process's. It ends when this process ends, however that does.

    Parameters
    ----------
    invitation
        Argument of `Tasks.start`.
    index
        Number of the task, from 0. In a job of fixed size that of task 0 is rank 0.
    attempt
        How often this task was started before: of two that are connected the later one stays.
    host
        A name for the host where the default, its own name and its namespaces, does not tell hosts apart.
    environment
        Variables for the rank beside those of this process.
    cwd
        Working directory of the rank.
    timeout
        Seconds to try to reach the launcher. In a job of fixed size the agent gives up earlier if trying on is in vain.

    Returns
    -------
    int
        Exit status of the agent: 0 when the job is over, or does not need this task any more. Why it is another
        one is on this process's standard error.
    """
    status, _ = serve_and_explain(
        invitation,
        index=index,
        attempt=attempt,
        host=host,
        environment=environment,
        cwd=cwd,
        timeout=timeout,
    )
    return status


def serve_and_explain(
    invitation: Invitation,
    *,
    index: int,
    attempt: int = 0,
    host: str | None = None,
    environment: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    timeout: int = _DIAL_LIMIT_S,
) -> tuple[int, str]:
    """As `serve_as_agent`: the exit status of the agent, and the last line that it said of itself."""
    words = {
        "addresses": ",".join(invitation.addresses),
        "key": invitation.key,
        "index": index,
        "attempt": attempt,
        "host": host or "",
        "python": sys.executable,
        "python-version": platform.python_version(),
        "parent": os.getpid(),
        "timeout": timeout,
        "elastic": int(invitation.is_elastic),
    }
    text = "".join(f"{name}={value}\n" for name, value in words.items())
    agent = subprocess.Popen(
        [find_horovodrun(), "__agent", "--dial"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, **(environment or {})},
        cwd=cwd,
        start_new_session=True,
    )
    assert agent.stdin is not None
    last_line = _LastLine(agent)
    try:
        # An agent that could not even read this says why on its standard error.
        with contextlib.suppress(BrokenPipeError):
            agent.stdin.write(text.encode() + b"\n")
            agent.stdin.flush()
        status = agent.wait()
        return status, last_line.last()
    finally:
        with contextlib.suppress(BrokenPipeError):
            agent.stdin.close()
        try:
            agent.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            agent.kill()
            agent.wait()


class _LastLine:
    """An agent's messages about itself: on this process's standard error, and its last line."""

    def __init__(self, agent: subprocess.Popen[bytes]) -> None:
        assert agent.stderr is not None
        self._stream = agent.stderr
        self._last = ""
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def last(self) -> str:
        """Once it has ended."""
        self._thread.join(_END_LIMIT_S)
        return self._last

    def _copy(self) -> None:
        with self._stream:
            for line in self._stream:
                text = line.decode(errors="replace")
                self._last = text.strip() or self._last
                # An executor that ends may have closed it.
                with contextlib.suppress(OSError, ValueError):
                    sys.stderr.write(text)
                    sys.stderr.flush()


class Tasks(Protocol):
    """The tasks of a job, as a cluster manager starts and ends them.

    A class may also have the attribute `are_on_this_host`. True means that every task runs on this host, also later
    ones: then the launcher listens on the loopback only.
    """

    def start(self, invitation: Invitation) -> None:
        """Start tasks that call `serve_as_agent`, numbered from 0; does not wait for them."""
        ...

    def failure(self) -> BaseException | None:
        """Why no (more) tasks can come; None while they can. Called several times a second."""
        ...

    def stop(self) -> None:
        """End all tasks. Called once, whatever happened."""
        ...


def run_on_agents(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    tasks: Tasks,
    num_proc: int,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    elastic_timeout: int | None = None,
    start_timeout: int | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: bool | int | None = None,
    network_interfaces: Sequence[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | os.PathLike[str] | None = None,
    output_filename: str | os.PathLike[str] | None = None,
    is_elastic: bool = False,
    late: Callable[[], BaseException] | None = None,
    caller: str = "horovod.run",
) -> list[Any]:
    """Call `func(*args, **kwargs)` on ranks that run in tasks and return what they returned, in the order of ranks.

    A job of fixed size begins when `num_proc` tasks have come, and fails when they have not within `start_timeout`
    seconds; the ranks of a host are consecutive, and the rank of task 0 is rank 0. In an elastic job ranks come and go
    with their tasks; a task that takes the place of another has its number and a higher attempt.

    Parameters
    ----------
    func, args, kwargs
        Function to call, and its arguments.
    tasks
        Starts and ends the tasks.
    num_proc, min_num_proc, max_num_proc, reset_limit, cooldown_range, start_timeout, verbose, output_filename
        As for `horovod.run`.
    elastic_timeout
        Seconds to wait for enough ranks of an elastic job.
    env
        Variables of the ranks, above those of their tasks. Those of this process count where a task has none.
    stdout, stderr
        Where to write what ranks print; default `sys.stdout` and `sys.stderr`.
    network_interfaces
        Names of the interfaces to use between hosts, also to this process; default all.
    prefix_output_with_timestamp
        Put the local time before each line.
    executable
        The Python of the ranks; default that of their tasks.
    is_elastic
        Whether ranks may come and go.
    late
        Error to raise when no rank of an elastic job has started within `start_timeout`; without it the job waits for
        `elastic_timeout`.
    caller
        The function that the user has called, for messages.

    Raises
    ------
    Exception
        As from `horovod.run`; before all tasks are there, what `tasks.failure()` returned.
    """
    options = JobOptions(
        num_proc=num_proc,
        min_num_proc=min_num_proc,
        max_num_proc=max_num_proc,
        reset_limit=reset_limit,
        cooldown_range=cooldown_range,
        elastic_timeout=elastic_timeout,
        start_timeout=start_timeout,
        env=env,
        stdout=stdout,
        stderr=stderr,
        verbose=verbose,
        network_interfaces=network_interfaces,
        prefix_output_with_timestamp=prefix_output_with_timestamp,
        executable=executable,
        output_filename=output_filename,
        is_elastic=is_elastic,
        caller=caller,
    )
    return run_job(func, args, kwargs, options, tasks=tasks, late=late)


def run_job(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    options: JobOptions,
    *,
    tasks: Tasks,
    late: Callable[[], BaseException] | None = None,
) -> list[Any]:
    """As `run_on_agents`."""
    content = pickled(func, args, kwargs, options.caller)
    outcomes, report = launch_on_agents(content, options, tasks=tasks, late=late)
    wanted = options.num_proc
    if options.is_elastic:
        # Those who have finished together.
        ranks = {rank for rank, outcome in outcomes if outcome.kind == "result"}
        finished = next(rank for rank in itertools.count() if rank not in ranks)
        wanted = max(options.ranks_min, finished)
    return results(outcomes, report, wanted, options.caller)


def launch_on_agents(
    content: bytes,
    options: JobOptions,
    *,
    tasks: Tasks,
    late: Callable[[], BaseException] | None = None,
) -> tuple[Outcomes, str]:
    """As `run_on_agents`, with a function that is pickled already, to what the ranks bring and the launcher says."""
    least = options.ranks_min if options.is_elastic else None
    words = dataclasses.replace(options, min_num_proc=least).words()
    # An empty program is the Python of the task.
    python = "" if options.executable is None else os.fspath(options.executable)
    command = [find_horovodrun(), "--dialed-agents", *words]
    try:
        return launch(
            [*command, python, "-m", "horovod.runner.run_task"],
            content,
            options,
            is_local=_are_on_this_host(tasks) and not options.interfaces,
            watch=_Watch(tasks, options, late),
        )
    finally:
        tasks.stop()


def _are_on_this_host(tasks: Tasks) -> bool:
    """The optional attribute of this name."""
    return bool(getattr(tasks, "are_on_this_host", False))


class _Watch:
    """Has the tasks started when the launcher listens, and ends the job when none can come any more."""

    def __init__(
        self, tasks: Tasks, options: JobOptions, late: Callable[[], BaseException] | None
    ) -> None:
        self._tasks = tasks
        self._options = options
        self._key = secrets.token_hex(32)
        self._late = late
        self._invited_at: float | None = None

    def environment(self, place: _payloads.Place) -> Mapping[str, str]:
        on_top = {**(self._options.env or {}), **place.to_environment()}
        variables = {_ON_TOP + name: value for name, value in on_top.items()}
        variables[_KEY] = self._key
        if _are_on_this_host(self._tasks):
            variables[_HOST] = "this"
        if self._options.executable is None:
            variables[_PYTHON] = platform.python_version()
        return variables

    def check(self, events: Events) -> None:
        options = self._options
        if self._invited_at is None:
            if events.addresses is None:
                return
            self._invited_at = time.monotonic()
            self._tasks.start(Invitation(tuple(events.addresses), self._key, options.is_elastic))
        # Once a job of fixed size has begun the launcher knows best, and so it does when a rank has finished.
        if events.has_finished or (events.has_started and not options.is_elastic):
            return
        if (
            len(events.running) < options.ranks_min
            and (failure := self._tasks.failure()) is not None
        ):
            raise failure
        if self._late is None or options.start_timeout is None or events.has_started:
            return
        if time.monotonic() - self._invited_at > options.start_timeout:
            raise self._late()
