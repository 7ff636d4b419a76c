"""Functions in threads, as launchers of others call them: one, one per set of arguments, one when an event is set."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

__all__ = ["execute_function_multithreaded", "in_thread", "on_event"]

_T = TypeVar("_T")


def in_thread(
    target: Callable[..., Any],
    args: Sequence[Any] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Call a function in a new thread, which is returned; `silent` hides its exceptions."""
    if isinstance(args, str) or not isinstance(args, Sequence):
        raise ValueError(f"args: expected a tuple such as (value,), got {args!r}")

    def call() -> None:
        with contextlib.suppress(Exception) if silent else contextlib.nullcontext():
            target(*args)

    thread = threading.Thread(target=call, name=name, daemon=daemon)
    thread.start()
    return thread


def on_event(
    event: threading.Event,
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    stop: threading.Event | None = None,
    check_stop_interval_s: float = 1.0,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Call a function in a new thread when an event is set; unless `stop` is set before.

    Raises
    ------
    ValueError
        No `stop` and no daemon: such a thread would keep the interpreter from its end until the event is set.
    """
    if stop is None and not daemon:
        raise ValueError("stop: expected an event with daemon=False, got None")

    def call() -> None:
        while not event.wait(None if stop is None else check_stop_interval_s):
            if stop is not None and stop.is_set():
                return
        func(*args)

    return in_thread(call, daemon=daemon, silent=silent)


def execute_function_multithreaded(
    fn: Callable[..., _T],
    args_list: Sequence[Sequence[Any]],
    block_until_all_done: bool = True,
    max_concurrent_executions: int = 1000,
) -> dict[int, _T] | None:
    """Call a function once per set of arguments, each call in a thread.

    Returns
    -------
    dict
        Index of the set of arguments to result; None at once without `block_until_all_done`.

    Raises
    ------
    RuntimeError
        A call failed; its exception is the cause.
    """
    if max_concurrent_executions <= 0:
        raise ValueError(
            f"max_concurrent_executions: must be larger than 0, got {max_concurrent_executions}"
        )
    pool = concurrent.futures.ThreadPoolExecutor(
        min(max_concurrent_executions, len(args_list) or 1)
    )
    calls = [pool.submit(fn, *args) for args in args_list]
    pool.shutdown(wait=block_until_all_done)
    if not block_until_all_done:
        return None
    for index, call in enumerate(calls):
        if error := call.exception():
            raise RuntimeError(f"call {index} of {fn} failed: {error!r}") from error
    return {index: call.result() for index, call in enumerate(calls)}
