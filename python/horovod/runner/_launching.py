"""Runs a launcher that calls a function on ranks: sends the function, copies output, collects the outcomes."""

from __future__ import annotations

import codecs
import contextlib
import os
import pickle
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TextIO

import cloudpickle  # type: ignore[import-untyped]

from horovod import _core
from horovod.common import _functions
from horovod.runner import _payloads
from horovod.runner._events import FD, Events
from horovod.runner._options import JobOptions
from horovod.runner._progress_bar import ProgressBar
from horovod.runner._worker_error import also_runtime_error

# Seconds to wait after a second Ctrl-C, at which the launcher kills the ranks.
_KILL_LIMIT_S = 10.0
_POLL_EVERY_S = 0.5
_PARENT_WATCH = "HOROVODRUN_PARENT_WATCH_FD"


class WorkerTraceback(Exception):
    """Text of the traceback on the rank; this is the cause (`__cause__`) of the exception that `run` raises."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


def pickled(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    caller: str = "horovod.run",
) -> bytes:
    """Return the payload that every rank fetches; raise TypeError if the function cannot be pickled."""
    try:
        content = _functions.dumps((func, tuple(args), dict(kwargs or {})))
    except Exception as error:
        raise TypeError(
            f"{caller}: the function {func!r}, or an argument, cannot be pickled, so it cannot be sent to the ranks; "
            f"what it uses and cannot take along, make it inside the function. {type(error).__name__}: {error}"
        ) from error
    return pickle.dumps(_payloads.FunctionCall(content, list(sys.path)), protocol=5)


Outcomes = list[tuple[int, _payloads.Outcome]]
# Replacements of `sys.stdout` and `sys.stderr`; None: no replacement.
Streams = tuple[TextIO | None, TextIO | None]


class Watch(Protocol):
    """Observer of a running launcher."""

    def environment(self, place: _payloads.Place) -> Mapping[str, str]:
        """Return variables for the launcher by which the ranks find this place."""
        ...

    def check(self, events: Events) -> None:
        """Check the job after events and several times a second; an exception of this method ends the job."""
        ...


def launch(
    command: list[str],
    content: bytes,
    options: JobOptions,
    *,
    is_local: bool,
    watch: Watch | None = None,
) -> tuple[Outcomes, str]:
    """Run the launcher until it ends; return the ranks' outcomes, and the launcher's report if it failed."""
    try:
        payloads = _core.PayloadServer(content, is_local, options.interfaces)
    except OSError as error:
        if not options.interfaces:
            raise
        raise ValueError(f"{options.caller}: network_interfaces: {error}") from None
    try:
        place = _payloads.Place(payloads.addresses(), payloads.key())
        variables = place.to_environment() if watch is None else watch.environment(place)
        arrivals = _Arrivals(payloads)
        streams = (options.stdout, options.stderr)
        try:
            exit_status, events = _run_launcher(command, variables, watch, streams, arrivals)
            arrivals.take()
        finally:
            arrivals.bar.close()
        report = events.report(exit_status)
        if events.was_wrong_call():
            raise ValueError(f"{options.caller}: {report}")
        return arrivals.outcomes, report
    finally:
        payloads.close()


class _Arrivals:
    """Messages from ranks while the job runs: progress reports, which a bar shows, and final outcomes."""

    def __init__(self, payloads: _core.PayloadServer) -> None:
        self._payloads = payloads
        self.outcomes: Outcomes = []
        self.bar = ProgressBar()

    def take(self) -> None:
        """Process the messages that have arrived since the last call."""
        while (payload := self._payloads.take()) is not None:
            # Unpickling is safe: the sender has authenticated with the key, which only ranks of this job received.
            rank, content = payload[0], pickle.loads(payload[1])
            if isinstance(content, _payloads.Report):
                self.bar.take(content)
            else:
                self.outcomes.append((rank, content))
        self.bar.show()


def _run_launcher(
    command: list[str],
    variables: Mapping[str, str],
    watch: Watch | None,
    streams: Streams,
    arrivals: _Arrivals,
) -> tuple[int, Events]:
    """Run the launcher until it ends; return its exit status and its events."""
    # The launcher reads the end of this pipe when the calling process ends, also when that process is killed.
    parent_watch, kept_open = os.pipe()
    readable, writable = os.pipe()
    try:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={
                    **os.environ,
                    **variables,
                    _PARENT_WATCH: str(parent_watch),
                    FD: str(writable),
                },
                pass_fds=[parent_watch, writable],
                # The launcher must not receive Ctrl-C from the terminal: `_follow` sends the signal.
                start_new_session=True,
            )
        finally:
            os.close(parent_watch)
            os.close(writable)
        events = Events(readable)
        with process:
            try:
                return _follow(process, events, watch, streams, arrivals), events
            finally:
                if process.poll() is None:
                    process.kill()
    finally:
        os.close(kept_open)
        os.close(readable)


def _follow(
    process: subprocess.Popen[bytes],
    events: Events,
    watch: Watch | None,
    streams: Streams,
    arrivals: _Arrivals,
) -> int:
    """Copy the output of the ranks until the launcher ends, and return its status; end the ranks after an exception."""
    console = _Console(process, events, streams, arrivals.bar)

    def check() -> None:
        if watch is not None:
            watch.check(events)
        arrivals.take()

    try:
        console.show(check=check)
    except BaseException:
        process.send_signal(signal.SIGINT)
        try:
            # The launcher ends after the ranks, at the latest after `--terminate-timeout`.
            console.show()
        except BaseException:
            # At a second SIGINT the launcher kills the ranks.
            process.send_signal(signal.SIGINT)
            console.show(_KILL_LIMIT_S)
        raise
    return process.wait()


class _Console:
    """Copies the launcher's output to this process's `sys.stdout` and `sys.stderr`, which may belong to a notebook."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        events: Events,
        streams: Streams,
        bar: ProgressBar,
    ) -> None:
        self._bar = bar
        self._streams = dict(zip(("stdout", "stderr"), streams, strict=True))
        self._selector = selectors.DefaultSelector()
        self._selector.register(events, selectors.EVENT_READ)
        for stream, name in ((process.stdout, "stdout"), (process.stderr, "stderr")):
            assert stream is not None
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            self._selector.register(stream, selectors.EVENT_READ, (name, decoder))

    def show(self, limit_s: float | None = None, check: Callable[[], None] | None = None) -> None:
        """Copy output until both streams and the events end, or for `limit_s` seconds; call `check` in between."""
        deadline = None if limit_s is None else time.monotonic() + limit_s
        while self._selector.get_map():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return
            if check is not None:
                check()
                left = _POLL_EVERY_S
            for key, _ in self._selector.select(left):
                if isinstance(key.fileobj, Events):
                    goes_on = key.fileobj.read()
                else:
                    goes_on = self._copy(key)
                if not goes_on:
                    self._selector.unregister(key.fileobj)

    def _copy(self, key: selectors.SelectorKey) -> bool:
        name, decoder = key.data
        chunk = os.read(key.fd, 1 << 16)
        text = decoder.decode(chunk, final=not chunk)
        if text:
            # `sys.stdout` may change while the job runs.
            target = self._streams[name] or getattr(sys, name)
            with self._bar.cleared(target):
                target.write(text)
                target.flush()
        return bool(chunk)


# These errors only report what has become of another rank, so others have precedence. TensorFlow raises an error of its
# own class with the words of the core.
_OF_ANOTHER_RANK = (
    "HorovodInternalError",
    "Horovod has been shut down: ",
    "Horovod lost a member of the job: ",
)


def results(outcomes: Outcomes, report: str, wanted: int, caller: str = "horovod.run") -> list[Any]:
    """Return the results of all ranks, or raise the error that follows from their outcomes and the report."""
    returned: dict[int, Any] = {}
    failed: Outcomes = []
    for rank, outcome in outcomes:
        if outcome.kind == "result":
            returned[rank] = outcome.content
        else:
            failed.append((rank, outcome))
    missing = [rank for rank in range(wanted) if rank not in returned]
    if failed and (missing or report):
        failed.sort(key=lambda item: any(words in item[1].text for words in _OF_ANOTHER_RANK))
        _raise(*failed[0], caller)
    if report or missing:
        ranks = ", ".join(map(str, missing))
        silent = f"no result from rank{'s'[: len(missing) > 1]} {ranks}; " if missing else ""
        raise RuntimeError(f"{caller}: {silent}{report or 'every rank exited with code 0'}")
    return [cloudpickle.loads(returned[rank]) for rank in range(wanted)]


def _raise(rank: int, outcome: _payloads.Outcome, caller: str) -> None:
    where = f"rank {rank} on host {outcome.host}"
    if outcome.kind == "exit":
        raise RuntimeError(
            f"{caller}: {where}: {outcome.text}, so there is no result; return a value instead"
        )
    if outcome.kind == "unpicklable":
        raise RuntimeError(f"{caller}: {where}: {outcome.text}")
    cause = WorkerTraceback(f"{where}:\n{outcome.text}")
    error: Exception | None = None
    if outcome.content:
        with contextlib.suppress(Exception):
            error = pickle.loads(outcome.content)
    if not isinstance(error, Exception):
        last = outcome.text.strip().splitlines()[-1]
        raise RuntimeError(f"{caller}: the function failed on {where}: {last}") from cause
    error = also_runtime_error(error)
    error.add_note(f"Raised by the function of {caller} on {where}.")
    raise error from cause
