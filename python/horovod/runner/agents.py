"""Calls a function on ranks that run in an executor's tasks; agents in the tasks connect to the launcher.

This serves cluster managers that start processes themselves (Spark tasks, Ray actors, pods). `run_on_agents` starts
the launcher on the caller's host and passes its addresses to `Tasks.start`. Each task calls `serve_as_agent`. The
launcher opens no connection to the tasks' hosts, and needs neither ssh nor name resolution.
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
# Exit statuses of an agent, besides 0 and 1: the launcher has ended the job otherwise than well; the connection has
# ended before the launcher said so; no launcher has answered in time.
STOPPED, LOST, UNREACHED = 3, 4, 5
# Seconds that an agent tries to reach the launcher.
_DIAL_LIMIT_S = 30
# Seconds to wait for an agent to end. An agent that has lost its parent ends its ranks: SIGTERM, after 30 s SIGKILL.
_END_LIMIT_S = 45.0


@dataclasses.dataclass(frozen=True)
class Invitation:
    """The launcher's addresses, and the key by which agents authenticate.

    An invitation can be pickled. Send it only to your own tasks: any process with the key can run ranks of the job.
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

    The rank inherits the working directory and environment of this process, unless `cwd` or `environment` change them.
    The rank ends when this process ends, also when this process is killed.

    Parameters
    ----------
    invitation
        Argument of `Tasks.start`.
    index
        Number of the task, from 0. In a job of fixed size the rank of task 0 is rank 0.
    attempt
        How often this task was started before. If two attempts of a task are connected, the later one is kept.
    host
        A name that identifies the host. The default is its hostname and namespaces; set `host` if these are the same
        on different hosts.
    environment
        Variables for the rank in addition to those of this process; they override variables of the same name.
    cwd
        Working directory of the rank; default that of this process.
    timeout
        Seconds to try to reach the launcher. In a job of fixed size the agent stops earlier if further attempts cannot
        succeed.

    Returns
    -------
    int
        Exit status of the agent: 0 when the job is over, or does not need this task any more. The cause of any other
        status is printed to this process's standard error.
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
    """Do what `serve_as_agent` does; return the agent's exit status and the last line of its standard error."""
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
    agent = start_agent(words, env={**os.environ, **(environment or {})}, cwd=cwd)
    last_line = _LastLine(agent)
    try:
        status = agent.wait()
        # The launcher reports these two itself.
        return (0 if status in (STOPPED, LOST) else status), last_line.last()
    finally:
        end_agent(agent)


def start_agent(
    words: Mapping[str, object],
    *,
    env: Mapping[str, str],
    cwd: str | os.PathLike[str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start an agent that dials its launcher as these words say; its standard error is a pipe."""
    agent = subprocess.Popen(
        [find_horovodrun(), "__agent", "--dial"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=env,
        cwd=cwd,
        start_new_session=True,
    )
    assert agent.stdin is not None
    text = "".join(f"{name}={value}\n" for name, value in words.items())
    # An agent that ends before it has read this prints the cause to its standard error.
    with contextlib.suppress(BrokenPipeError):
        agent.stdin.write(text.encode() + b"\n")
        agent.stdin.flush()
    return agent


def end_agent(agent: subprocess.Popen[bytes]) -> None:
    """End an agent and its ranks, if it still runs."""
    assert agent.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        agent.stdin.close()
    try:
        agent.wait(_END_LIMIT_S)
    except subprocess.TimeoutExpired:
        agent.kill()
        agent.wait()


class _LastLine:
    """Copies an agent's standard error to that of this process, and keeps the last line."""

    def __init__(self, agent: subprocess.Popen[bytes]) -> None:
        assert agent.stderr is not None
        self._stream = agent.stderr
        self._last = ""
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def last(self) -> str:
        """Return the last line that is not empty. Call this after the agent has ended."""
        self._thread.join(_END_LIMIT_S)
        return self._last

    def _copy(self) -> None:
        with self._stream:
            for line in self._stream:
                text = line.decode(errors="replace")
                self._last = text.strip() or self._last
                # An executor that ends may have closed this process's standard error.
                with contextlib.suppress(OSError, ValueError):
                    sys.stderr.write(text)
                    sys.stderr.flush()


class Tasks(Protocol):
    """Starts and ends the tasks of a job through a cluster manager.

    A class may also have the attribute `are_on_this_host`. True means that every task runs on this host, including
    tasks that start later. The launcher then listens on the loopback interface only.
    """

    def start(self, invitation: Invitation) -> None:
        """Start tasks that call `serve_as_agent`, numbered from 0; return without waiting for them."""
        ...

    def failure(self) -> BaseException | None:
        """Return why no more tasks can start; None while they can. Called several times a second."""
        ...

    def stop(self) -> None:
        """End all tasks. Called once, after success and after errors."""
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
    """Call `func(*args, **kwargs)` on ranks that run in tasks and return their results in the order of ranks.

    A job of fixed size begins when `num_proc` tasks are connected. It fails if that takes longer than `start_timeout`
    seconds. The ranks of a host are consecutive, and the rank of task 0 is rank 0. In an elastic job ranks are added
    and removed with their tasks. A task that replaces another one has the same number and a higher attempt.

    Parameters
    ----------
    func, args, kwargs
        Function to call, and its arguments.
    tasks
        Object that starts and ends the tasks.
    num_proc, min_num_proc, max_num_proc, reset_limit, cooldown_range, start_timeout, verbose, output_filename
        As for `horovod.run`.
    elastic_timeout
        Seconds to wait for enough ranks of an elastic job.
    env
        Variables of the ranks; they override the variables of the tasks. A variable of this process is used where the
        task has none of that name.
    stdout, stderr
        Streams to which the output of the ranks is written; default `sys.stdout` and `sys.stderr`.
    network_interfaces
        Names of the interfaces to use between hosts, and to this process; default all.
    prefix_output_with_timestamp
        Put the local time before each line.
    executable
        Path of the Python that runs the ranks; default the Python of their tasks.
    is_elastic
        Whether ranks may be added and removed while the job runs.
    late
        Function that returns the error to raise if no rank of an elastic job has started within `start_timeout`.
        Without it the job waits for `elastic_timeout`.
    caller
        Name of the function that the user has called, for messages.

    Raises
    ------
    Exception
        As from `horovod.run`. If too few ranks run and no more tasks can start, the error that `tasks.failure()`
        returned.
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
    """Do what `run_on_agents` does, with the options as one object."""
    content = pickled(func, args, kwargs, options.caller)
    outcomes, report = launch_on_agents(content, options, tasks=tasks, late=late)
    wanted = options.num_proc
    if options.is_elastic:
        # The number of ranks that finished together: those before the first rank without a result.
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
    """Run a pickled function like `run_on_agents`; return the outcomes of the ranks and the launcher's report."""
    least = options.ranks_min if options.is_elastic else None
    words = dataclasses.replace(options, min_num_proc=least).words()
    # An empty program stands for the Python of the task.
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
    """Return the optional attribute `are_on_this_host`; False if there is none."""
    return bool(getattr(tasks, "are_on_this_host", False))


class _Watch:
    """Starts the tasks once the launcher listens, and ends the job if too few ranks run and no more tasks can start."""

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
        # After a job of fixed size has begun, or a rank has finished, the launcher alone decides whether the job fails.
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
