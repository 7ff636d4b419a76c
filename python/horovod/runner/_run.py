"""`horovod.run`: call a function on many ranks and return what each returned."""

from __future__ import annotations

import codecs
import contextlib
import operator
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from horovod import _core
from horovod.runner import _payloads
from horovod.runner._events import FD, Events
from horovod.runner._worker_error import also_runtime_error
from horovod.runner.launch import find_horovodrun

# After Ctrl-C: ranks get SIGINT, after 3 s SIGTERM, after 5 s more SIGKILL.
_INTERRUPT_LIMIT_S = 15.0
_KILL_LIMIT_S = 10.0
_PARENT_WATCH = "HOROVODRUN_LEASH_FD"


class WorkerTraceback(Exception):
    """The traceback of an exception as the rank saw it; the cause of what `run` raises."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    host_discovery_script: str | None = None,
    hosts: str | None = None,
    hostfile: str | os.PathLike[str] | None = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | os.PathLike[str] | None = None,
    disable_cache: bool | None = None,
    output_filename: str | os.PathLike[str] | None = None,
    verbose: bool | int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interfaces: Sequence[str] | None = None,
    executable: str | os.PathLike[str] | None = None,
    network_interface: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Call `func(*args, **kwargs)` on `num_proc` ranks and return what they returned, in the order of ranks.

    The function may be any, also one of a notebook or of the script that calls: no `if __name__ == "__main__"` is
    needed. It travels, as the results do, over authenticated, encrypted connections; its size is not limited. What the
    ranks print appears on `sys.stdout` and `sys.stderr` of the caller. The call may come from any thread; Ctrl-C
    ends the ranks, and no signal handler is changed.

    Parameters
    ----------
    func, args, kwargs
        What to call, and with what.
    num_proc
        Number of ranks; for an elastic job, how many there must be to start.
    min_num_proc, max_num_proc, slots, reset_limit, cooldown_range, host_discovery_script
        As `--min-np`, `--max-np`, `--slots-per-host`, `--reset-limit`, `--blacklist-cooldown-range` and
        `--host-discovery-script` of `horovodrun`.
    hosts, hostfile
        Where: `host1:2,host2:2`, or a file; default this host.
    start_timeout, ssh_port, ssh_identity_file, output_filename, verbose, network_interfaces
        As the options of `horovodrun`.
    disable_cache, use_gloo, use_mpi, mpi_args
        Accepted, with no effect: nothing is cached, and the transport is this package's own.
    executable
        The Python of the ranks; default the caller's.
    np, min_np, max_np, network_interface
        Deprecated names of the above.

    Raises
    ------
    Exception
        What the function raised on a rank, with `WorkerTraceback` as its cause and a note that names the rank. It is
        a `RuntimeError`, too, whatever its class. When several ranks failed, that of the first which did not only
        lose the others.
    RuntimeError
        The ranks could not be started, one ended without a result (it was killed, or called `sys.exit`), or
        its result or exception cannot be pickled.
    ValueError
        Arguments that exclude each other, or that the launcher refuses; nothing was started.
    """
    if not callable(func):
        raise TypeError(f"horovod.run: func: expected a function, got {func!r}")
    num_proc = _whole("num_proc", _renamed("np", np, "num_proc", num_proc))
    min_num_proc = _renamed("min_np", min_np, "min_num_proc", min_num_proc)
    if min_num_proc is not None:
        min_num_proc = _whole("min_num_proc", min_num_proc)
    max_num_proc = _renamed("max_np", max_np, "max_num_proc", max_num_proc)
    if network_interface is not None:
        split = network_interface.split(",")
        network_interfaces = _renamed(
            "network_interface", split, "network_interfaces", network_interfaces
        )
    if hosts is not None and hostfile is not None:
        raise ValueError("Argument hosts and hostfile only allow one provided.")
    if use_gloo and use_mpi:
        raise ValueError("Argument use_gloo and use_mpi only allow one set True.")
    values = {
        "-np": num_proc,
        "--min-np": min_num_proc,
        "--max-np": max_num_proc,
        "--slots-per-host": slots,
        "--reset-limit": reset_limit,
        "-H": hosts,
        "--hostfile": hostfile,
        "--host-discovery-script": host_discovery_script,
        "--start-timeout": start_timeout,
        "-p": ssh_port,
        "-i": ssh_identity_file,
        "--output-filename": output_filename,
        "--network-interfaces": ",".join(network_interfaces) if network_interfaces else None,
    }
    words: list[str] = []
    for name, value in values.items():
        if value is not None:
            words += [name, str(value)]
    if cooldown_range is not None:
        if len(cooldown_range) != 2:
            raise ValueError(
                "cooldown_range: expected two numbers of seconds, the first and the longest time for which a host "
                f"that failed is left alone; got {cooldown_range!r}"
            )
        words += ["--blacklist-cooldown-range", *map(str, cooldown_range)]
    if mpi_args is not None:
        words.append(f"--mpi-args={mpi_args}")
    for name, is_on in {
        "--disable-cache": disable_cache,
        "--verbose": verbose,
        "--gloo": use_gloo,
        "--mpi": use_mpi,
    }.items():
        if is_on:
            words.append(name)
    elsewhere = hostfile is not None or host_discovery_script is not None
    is_local = not elsewhere and all(_is_this_host(item) for item in (hosts or "").split(","))
    python = os.fspath(executable) if executable is not None else sys.executable
    command = [find_horovodrun(), *words, python, "-m", "horovod.runner.run_task"]
    outcomes, report = _launch(
        command, _pickled(func, args, kwargs), is_local, list(network_interfaces or [])
    )
    return _results(outcomes, report, min_num_proc or num_proc)


def _whole(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"horovod.run: {name}: expected a whole number, got {value!r}") from None


def _renamed(old_name: str, old: Any, name: str, value: Any) -> Any:
    if old is None:
        return value
    warnings.warn(f"{old_name} is deprecated, use {name} instead", DeprecationWarning, stacklevel=3)
    return old


def _is_this_host(item: str) -> bool:
    name = item.strip().rsplit(":", 1)[0]
    return name in ("", "localhost", "127.0.0.1", socket.gethostname())


def _pickled(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> bytes:
    content = cloudpickle.dumps((func, tuple(args), dict(kwargs or {})), protocol=5)
    return pickle.dumps(_payloads.FunctionCall(content, list(sys.path)), protocol=5)


Outcomes = list[tuple[int, _payloads.Outcome]]


def _launch(
    command: list[str], content: bytes, is_local: bool, interfaces: list[str]
) -> tuple[Outcomes, str]:
    """Run the launcher to its end: what the ranks brought, and what the launcher said if it failed."""
    try:
        payloads = _core.PayloadServer(content, is_local, interfaces)
    except OSError as error:
        if not interfaces:
            raise
        raise ValueError(f"horovod.run: network_interfaces: {error}") from None
    try:
        place = _payloads.Place(payloads.addresses(), payloads.key())
        exit_status, events = _run_launcher(command, place)
        outcomes = []
        while (payload := payloads.take()) is not None:
            # From a process that holds the key, which only this job's ranks were given.
            outcomes.append((payload[0], pickle.loads(payload[1])))
        report = events.report(exit_status)
        if events.was_wrong_call():
            raise ValueError(f"horovod.run: {report}")
        return outcomes, report
    finally:
        payloads.close()


def _run_launcher(command: list[str], place: _payloads.Place) -> tuple[int, Events]:
    """Run it to its end; its exit status, and what it told."""
    # The end of this pipe tells the launcher that this process has ended, however it did.
    parent_watch, held = os.pipe()
    told, telling = os.pipe()
    try:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={
                    **os.environ,
                    **place.to_environment(),
                    _PARENT_WATCH: str(parent_watch),
                    FD: str(telling),
                },
                pass_fds=[parent_watch, telling],
                # Ctrl-C is this process's to pass on.
                start_new_session=True,
            )
        finally:
            os.close(parent_watch)
            os.close(telling)
        events = Events(told)
        with process:
            try:
                return _attend(process, events), events
            finally:
                if process.poll() is None:
                    process.kill()
    finally:
        os.close(held)
        os.close(told)


def _attend(process: subprocess.Popen[bytes], events: Events) -> int:
    """Show what the ranks print until all is over; end them when this thread is interrupted."""
    console = _Console(process, events)
    try:
        console.show()
    except BaseException:
        process.send_signal(signal.SIGINT)
        try:
            console.show(_INTERRUPT_LIMIT_S)
        except BaseException:
            # A second Ctrl-C: the launcher kills.
            process.send_signal(signal.SIGINT)
            console.show(_KILL_LIMIT_S)
        raise
    return process.wait()


class _Console:
    """The launcher's output on this process's `sys.stdout` and `sys.stderr`, which may be a notebook's."""

    def __init__(self, process: subprocess.Popen[bytes], events: Events) -> None:
        self._selector = selectors.DefaultSelector()
        self._selector.register(events, selectors.EVENT_READ)
        for stream, name in ((process.stdout, "stdout"), (process.stderr, "stderr")):
            assert stream is not None
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            self._selector.register(stream, selectors.EVENT_READ, (name, decoder))

    def show(self, limit_s: float | None = None) -> None:
        """Until both streams and the events end, or for so many seconds."""
        deadline = None if limit_s is None else time.monotonic() + limit_s
        while self._selector.get_map():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return
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
            target = getattr(sys, name)
            target.write(text)
            target.flush()
        return bool(chunk)


def _results(outcomes: Outcomes, report: str, wanted: int) -> list[Any]:
    results: dict[int, Any] = {}
    failed: Outcomes = []
    for rank, outcome in outcomes:
        if outcome.kind == "result":
            results[rank] = outcome.content
        else:
            failed.append((rank, outcome))
    missing = [rank for rank in range(wanted) if rank not in results]
    if failed and (missing or report):
        # Those that only lost another rank come last.
        failed.sort(key=lambda item: "HorovodInternalError" in item[1].text)
        _raise(*failed[0], report)
    if report or missing:
        ranks = ", ".join(map(str, missing))
        silent = f"no result from rank{'s'[: len(missing) > 1]} {ranks}; " if missing else ""
        raise RuntimeError(f"horovod.run: {silent}{report or 'every rank exited with code 0'}")
    return [cloudpickle.loads(results[rank]) for rank in range(wanted)]


def _raise(rank: int, outcome: _payloads.Outcome, report: str) -> None:
    where = f"rank {rank} on host {outcome.host}"
    if outcome.kind == "exit":
        raise RuntimeError(
            f"horovod.run: {where}: {outcome.text}, so there is no result; return a value instead"
        )
    if outcome.kind == "unpicklable":
        raise RuntimeError(f"horovod.run: {where}: {outcome.text}")
    cause = WorkerTraceback(f"{where}:\n{outcome.text}")
    error: Exception | None = None
    if outcome.content:
        with contextlib.suppress(Exception):
            error = pickle.loads(outcome.content)
    if not isinstance(error, Exception):
        last = outcome.text.strip().splitlines()[-1]
        raise RuntimeError(f"horovod.run: the function failed on {where}: {last}") from cause
    error = also_runtime_error(error)
    error.add_note(f"Raised by the function of horovod.run on {where}.")
    raise error from cause
