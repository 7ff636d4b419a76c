"""Backends: what starts the ranks of an estimator."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from horovod.spark._broadcast import Call


class Backend:
    """An estimator's interface to the starter of its ranks."""

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Call a function on every rank, and return what each returned, in the order of ranks."""
        raise NotImplementedError(f"{type(self).__name__} has to define run")

    def num_processes(self) -> int:
        """Number of ranks."""
        raise NotImplementedError(f"{type(self).__name__} has to define num_processes")


def default_num_proc() -> int:
    """The number of tasks that Spark runs at a time."""
    from pyspark import SparkContext

    context = SparkContext._active_spark_context
    if context is None:
        raise RuntimeError("Could not find an active SparkContext; make a SparkSession first")
    return int(context.defaultParallelism)


class SparkBackend(Backend):
    """Runs ranks in tasks of Spark, by `horovod.spark.run`, which gets the other keyword arguments."""

    def __init__(
        self, num_proc: int | None = None, env: Mapping[str, str] | None = None, **kwargs: Any
    ) -> None:
        self._num_proc = default_num_proc() if num_proc is None else num_proc
        self._env = None if env is None else dict(env)
        self._kwargs = kwargs

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Call a function on every rank."""
        import horovod.spark

        variables = dict(os.environ if self._env is None else self._env)
        variables.update(env or {})
        # The driver's choice of GPUs is not the executors'.
        variables.pop("CUDA_VISIBLE_DEVICES", None)
        spark: Any = horovod.spark
        results: list[Any] = spark.run(
            fn,
            args=tuple(args),
            kwargs=dict(kwargs or {}),
            num_proc=self._num_proc,
            env=variables,
            **self._kwargs,
        )
        return results

    def num_processes(self) -> int:
        """Number of ranks."""
        return self._num_proc


class LocalBackend(Backend):
    """Runs ranks on the driver's machine, by `horovod.run`, which gets the other keyword arguments."""

    def __init__(self, num_proc: int = 1, **kwargs: Any) -> None:
        self._num_proc = num_proc
        self._kwargs = kwargs

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Call a function on every rank."""
        import horovod

        return horovod.run(
            _with_environment,
            (Call(fn, args, kwargs), dict(env or {})),
            num_proc=self._num_proc,
            **self._kwargs,
        )

    def num_processes(self) -> int:
        """Number of ranks."""
        return self._num_proc


def _with_environment(call: Call, env: dict[str, str]) -> Any:
    os.environ.update(env)
    return call()
