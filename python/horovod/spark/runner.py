"""`run` and `run_elastic`: call a function on ranks that run in Spark tasks."""

from __future__ import annotations

import dataclasses
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from horovod._installation import command
from horovod.runner._options import JobOptions
from horovod.runner.agents import run_job
from horovod.spark._broadcast import Call

if TYPE_CHECKING:
    from pyspark import SparkContext

__all__ = ["run", "run_elastic"]

_START_TIMEOUT = "HOROVOD_SPARK_START_TIMEOUT"
_ELASTIC_TIMEOUT = "HOROVOD_ELASTIC_TIMEOUT"
_TIMEOUT_S = 600
_JAVA = "Java (17 or newer for Spark 4; Debian: default-jre-headless)"
# The launcher's own limit comes after the one that can say what Spark is doing.
_LAUNCHER_EXTRA_S = 30


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: int | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str | None] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: Iterable[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | os.PathLike[str] | None = None,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` on `num_proc` ranks in Spark tasks and return the results, in the order of ranks.

    Every rank is a child of a Spark task's Python, with its working directory and environment, and ends with it. The
    tasks start together, in one stage (barrier mode), and the rank of task 0 is rank 0.

    Parameters
    ----------
    fn, args, kwargs
        Function to call, and its arguments; they travel by cloudpickle, encrypted, not inside Spark's closures. A
        broadcast variable in them is its value there.
    num_proc
        Number of ranks, each in one slot; default the session's `defaultParallelism`.
    start_timeout
        Seconds to wait for all tasks to run; default HOROVOD_SPARK_START_TIMEOUT, or 600.
    env
        Variables of the ranks, above those of the executors; None removes one before `fn` is called.
    stdout, stderr
        Where to write what ranks print; default `sys.stdout` and `sys.stderr` of the driver.
    verbose
        From 2 on the launcher says what it does.
    nics
        Names of the interfaces to use; default all.
    prefix_output_with_timestamp
        Put the local time before each line.
    executable
        The Python of the ranks; default that of the executor.
    use_mpi, use_gloo, extra_mpi_args
        Accepted, with no effect: the transport is this package's own.

    Raises
    ------
    Exception
        The exception of `fn` on a rank, as from `horovod.run`.
    TimeoutException
        Not all tasks ran within `start_timeout`.
    RuntimeError
        There is no session, the Spark job has failed, or a rank has ended without a result.
    """
    del use_mpi, use_gloo, extra_mpi_args
    caller = "horovod.spark.run"
    limit = _seconds("start_timeout", start_timeout, _START_TIMEOUT)
    context = _context(caller)
    options = JobOptions(
        num_proc=_count("num_proc", num_proc, 1 if context is None else context.defaultParallelism),
        start_timeout=limit,
        stdout=stdout,
        stderr=stderr,
        verbose=verbose >= 2,
        network_interfaces=None if nics is None else list(nics),
        prefix_output_with_timestamp=prefix_output_with_timestamp,
        executable=executable,
        caller=caller,
    )
    if context is not None:
        return _run(context, fn, args, kwargs, env, options)
    return _run_on_connect(fn, args, kwargs, env, options, has_count=num_proc is not None)


def run_elastic(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: int | None = None,
    elastic_timeout: int | None = None,
    reset_limit: int | None = None,
    env: Mapping[str, str | None] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: Iterable[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """As `run`, but ranks may come and go: `fn` is decorated by `hvd.elastic.run` of its framework.

    A rank is lost with its task, and comes back when Spark starts the task again: allow that by
    `spark.task.maxFailures` (on a local master: `local[N,FAILURES]`), and leave `spark.speculation` off.

    Parameters
    ----------
    num_proc
        Number of ranks to start with; default `defaultParallelism`.
    min_num_proc, max_num_proc
        Fewest and most ranks; default `num_proc`. Spark is asked for `max_num_proc` tasks.
    elastic_timeout
        Seconds to wait for enough ranks after a loss; default HOROVOD_ELASTIC_TIMEOUT, or 600.
    reset_limit
        How often the members may change before the job is ended; default any number of times.
    min_np, max_np
        Deprecated names of `min_num_proc` and `max_num_proc`.
    fn, args, kwargs, start_timeout, env, stdout, stderr, verbose, nics, prefix_output_with_timestamp
        As in `run`.

    Raises
    ------
    Exception, RuntimeError, TimeoutException
        As from `run`.
    """
    caller = "horovod.spark.run_elastic"
    for old, value, new in (("min_np", min_np, "min_num_proc"), ("max_np", max_np, "max_num_proc")):
        if value is not None:
            text = f"{old} is deprecated, use {new} instead"
            warnings.warn(text, DeprecationWarning, stacklevel=2)
    context = _context(caller)
    if context is None:
        raise RuntimeError(
            f"{caller}: Spark Connect cannot run elastic jobs, as Spark ends all tasks of a job whose tasks know each "
            "other when it loses one: use a classic session (spark-submit), or horovod.spark.run"
        )
    count = _count("num_proc", num_proc, context.defaultParallelism)
    fewest = _count("min_num_proc", min_num_proc or min_np, count)
    most = _count("max_num_proc", max_num_proc or max_np, count)
    if not fewest <= count <= most:
        raise ValueError(
            f"{caller}: expected min_num_proc <= num_proc <= max_num_proc, got {fewest}, {count} and {most}"
        )
    options = JobOptions(
        num_proc=count,
        min_num_proc=fewest,
        max_num_proc=most,
        is_elastic=True,
        start_timeout=_seconds("start_timeout", start_timeout, _START_TIMEOUT),
        elastic_timeout=_seconds("elastic_timeout", elastic_timeout, _ELASTIC_TIMEOUT),
        reset_limit=reset_limit,
        stdout=stdout,
        stderr=stderr,
        verbose=verbose >= 2,
        network_interfaces=None if nics is None else list(nics),
        prefix_output_with_timestamp=prefix_output_with_timestamp,
        caller=caller,
    )
    return _run(context, fn, args, kwargs, env, options)


def _run(
    context: SparkContext,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    env: Mapping[str, str | None] | None,
    options: JobOptions,
) -> list[Any]:
    from horovod.spark._tasks import SparkTasks

    fn, env = _with_environment(fn, env, options.caller)
    tasks = SparkTasks(context, options)
    late = tasks.late if options.is_elastic else None
    limit = options.start_timeout
    if not options.is_elastic and limit is not None:
        limit += _LAUNCHER_EXTRA_S
    options = dataclasses.replace(options, env=env, start_timeout=limit)
    return run_job(Call(fn, args, kwargs), (), None, options, tasks=tasks, late=late)


def _run_on_connect(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    env: Mapping[str, str | None] | None,
    options: JobOptions,
    *,
    has_count: bool,
) -> list[Any]:
    from horovod.spark._connect import active_session, default_parallelism, run_on_connect

    fn, env = _with_environment(fn, env, options.caller)
    session = active_session()
    if session is None:
        has_java = "JAVA_HOME" in os.environ or shutil.which("java") is not None
        raise RuntimeError(
            f"{options.caller}: Could not find an active SparkContext, nor a session of Spark Connect. "
            "Make a SparkSession "
            + (
                "first"
                if has_java
                else f"first; that needs {_JAVA}, which is neither on the PATH nor in JAVA_HOME"
            )
        )
    count = options.num_proc if has_count else default_parallelism(session)
    options = dataclasses.replace(options, num_proc=count, env=env)
    return run_on_connect(session, fn, args, kwargs, options)


def _with_environment(
    fn: Callable[..., Any], env: Mapping[str, str | None] | None, caller: str
) -> tuple[Callable[..., Any], dict[str, str]]:
    """The function to call and the variables to set, of which None removed some."""
    if not callable(fn):
        raise TypeError(f"{caller}: fn: expected a function, got {fn!r}")
    given = dict(env or {})
    removed = [name for name, value in given.items() if value is None]
    kept = {name: value for name, value in given.items() if value is not None}
    return (_CallWithout(fn, removed) if removed else fn), kept


class _CallWithout:
    """Calls a function where some variables of the environment are not set."""

    def __init__(self, func: Callable[..., Any], names: list[str]) -> None:
        self._func = func
        self._names = names

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for name in self._names:
            os.environ.pop(name, None)
        return self._func(*args, **kwargs)


def _context(caller: str) -> SparkContext | None:
    """The context of a classic session; None where pyspark has none, but perhaps a session of Spark Connect."""
    try:
        import pyspark
    except ImportError as error:
        raise ImportError(
            f"{caller} needs pyspark, which is not installed: {command('horovod-rs[spark]')}"
        ) from error
    # The package pyspark-client is without it.
    kind = getattr(pyspark, "SparkContext", None)
    return None if kind is None else kind._active_spark_context


def _count(name: str, value: int | None, default: int) -> int:
    count = default if value is None else value
    if not isinstance(count, int) or count < 1:
        raise ValueError(f"{name}: expected a whole number of at least 1, got {value!r}")
    return count


def _seconds(name: str, value: int | None, variable: str) -> int:
    text = os.environ.get(variable) if value is None else value
    try:
        seconds = _TIMEOUT_S if text is None else int(text)
    except ValueError:
        raise ValueError(f"{name} ({variable}): expected seconds, got {text!r}") from None
    if seconds < 1:
        raise ValueError(f"{name} ({variable}): expected at least 1 second, got {text!r}")
    return seconds
