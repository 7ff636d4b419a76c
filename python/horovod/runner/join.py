"""Joins the job of a `horovodrun --agents-port PORT` on another host: `python -m horovod.runner.join HOST:PORT`.

This is the main process of a worker's pod or container. It needs neither ssh nor the host's address: it connects to the
launcher and runs ranks of its job as children. Launcher and workers have the same key (`HOROVOD_JOB_KEY_FILE`).
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from horovod.runner.agents import LOST, STOPPED, UNREACHED, end_agent, start_agent
from horovod.runner.launch import find_horovodrun

__all__ = ["main"]

_TIMEOUT_S = 600
# Seconds that one agent tries the addresses that the name had; the name may mean others by then.
_DIAL_LIMIT_S = 30
# Seconds between attempts that fail at once.
_PAUSE_S = 2.0
# Names of pods end with their number: those of a StatefulSet, of an indexed job and of a JobSet.
_NUMBERED_NAME = re.compile(r"-(\d+)$")
_AGAIN = (LOST, UNREACHED)

EXIT_STATUSES = """exit status:
  0    the job has ended well, or needs this worker no more
  1    it could not join; the cause is on standard error
  3    the job has failed or was interrupted
  143  SIGTERM came, and the ranks have ended
"""


class Wrong(Exception):
    """The arguments or the environment are wrong."""


class JoiningHost:
    """The ranks of this host: an agent for each, started again when its connection is lost."""

    def __init__(self, launcher: tuple[str, int], index: int, slots: int, timeout_s: float) -> None:
        self._launcher = launcher
        self._indexes = range(index * slots, (index + 1) * slots)
        self._timeout_s = timeout_s
        self._agents: dict[int, subprocess.Popen[bytes]] = {}
        self._is_ending = threading.Event()
        self._statuses: dict[int, int] = {}

    def run(self) -> int:
        """Run until the job is over; return the exit status of this process."""
        # Here, and not first in several threads at once: the module sysconfig prepares its tables at the first call.
        find_horovodrun()
        threads = [threading.Thread(target=self._serve, args=(index,)) for index in self._indexes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._is_ending.is_set():
            return 128 + signal.SIGTERM
        # All others have the same cause as one that has failed by itself. A thread that has raised has no status.
        statuses = {self._statuses.get(index, 1) for index in self._indexes}
        return next((status for status in (1, STOPPED) if status in statuses), 0)

    def end(self) -> None:
        """Pass SIGTERM on to the ranks and start no more of them. Safe in a signal handler of the main thread."""
        self._is_ending.set()
        for agent in list(self._agents.values()):
            if agent.poll() is None:
                agent.send_signal(signal.SIGTERM)

    def _serve(self, index: int) -> None:
        deadline = time.monotonic() + self._timeout_s
        attempt = 0
        while not self._is_ending.is_set():
            # Later attempts have higher numbers, also those of another pod with the same index.
            attempt = max(attempt + 1, int(time.time()))
            begun = time.monotonic()
            status, why = self._attempt(index, attempt, deadline - begun)
            if status == LOST and time.monotonic() >= begun + _PAUSE_S:
                # The launcher may come back.
                _complain(f"task {index} has lost the launcher, and tries to reach it again")
                deadline = time.monotonic() + self._timeout_s
            if status not in _AGAIN or time.monotonic() >= deadline:
                if why:
                    _complain(why)
                self._statuses[index] = status if status in (0, STOPPED) else 1
                return
            self._is_ending.wait(_PAUSE_S)

    def _attempt(self, index: int, attempt: int, within_s: float) -> tuple[int, str]:
        """Run one agent; return its exit status and its last words."""
        host, port = self._launcher
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            # A pod's name begins to resolve with the pod.
            return UNREACHED, f"{host} has no address: {error.strerror or error}"
        addresses = dict.fromkeys(
            f"[{address}]:{port}" if family == socket.AF_INET6 else f"{address}:{port}"
            for family, address in ((family, str(at[0])) for family, _, _, _, at in found)
        )
        words = {
            "addresses": ",".join(addresses),
            # The agent reads HOROVOD_JOB_KEY_FILE or HOROVOD_JOB_KEY.
            "key": "",
            "index": index,
            "attempt": attempt,
            "host": "",
            "python": sys.executable,
            "python-version": platform.python_version(),
            "parent": os.getpid(),
            "timeout": max(1, min(_DIAL_LIMIT_S, int(within_s))),
            "elastic": 1,
        }
        agent = start_agent(words, env=os.environ)
        self._agents[index] = agent
        try:
            if self._is_ending.is_set():
                agent.send_signal(signal.SIGTERM)
            # Its standard input stays open: the agent ends when that closes.
            assert agent.stderr is not None
            lines = agent.stderr.read().decode(errors="replace").strip().splitlines()
            return agent.wait(), lines[-1] if lines else ""
        finally:
            end_agent(agent)


def _complain(text: str) -> None:
    os.write(2, f"horovod.runner.join: {text.removeprefix('horovodrun: ')}\n".encode())


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise argparse.ArgumentTypeError(f"must be host:port, got {text!r}")
    return host.strip("[]"), int(port)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def _own_index() -> int:
    """Return this worker's number, from the variable of an indexed job or from the host's name."""
    number = os.environ.get("JOB_COMPLETION_INDEX")
    if number is None:
        match = _NUMBERED_NAME.search(socket.gethostname())
        if match is None:
            raise Wrong(
                f"the number of this worker is unknown: neither JOB_COMPLETION_INDEX nor the host's name "
                f"{socket.gethostname()!r} gives it; pass --index, from 0, another on each host"
            )
        number = match[1]
    if not number.isdecimal():
        raise Wrong(f"JOB_COMPLETION_INDEX={number!r} is not a whole number")
    return int(number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m horovod.runner.join",
        description="Run ranks of the job that a `horovodrun --agents-port PORT` on another host starts.",
        epilog=EXIT_STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "launcher", type=_address, metavar="HOST:PORT", help="where the launcher waits"
    )
    parser.add_argument(
        "--slots", type=_positive, default=1, help="ranks on this host, the same on all hosts (1)"
    )
    parser.add_argument(
        "--index",
        type=int,
        help="number of this host, from 0 (JOB_COMPLETION_INDEX, else the number at the end of the host's name)",
    )
    parser.add_argument(
        "--timeout",
        type=_positive,
        default=_TIMEOUT_S,
        help=f"seconds to try to reach the launcher, also after the connection was lost ({_TIMEOUT_S})",
    )
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Join the job; return the exit status."""
    arguments = _parser().parse_args(words)
    try:
        index = _own_index() if arguments.index is None else arguments.index
        if index < 0:
            raise Wrong(f"--index must be at least 0, got {index}")
    except Wrong as error:
        _complain(str(error))
        return 2
    host = JoiningHost(arguments.launcher, index, arguments.slots, arguments.timeout)
    # The main process of a pod has no default action for SIGTERM.
    signal.signal(signal.SIGTERM, lambda *_: host.end())
    return host.run()


if __name__ == "__main__":
    sys.exit(main())
