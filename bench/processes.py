"""Processes of a benchmark that end with it, however it ends: by itself, by an error, Ctrl-C or SIGTERM."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from os import PathLike, killpg
from typing import Any

# How long a launcher may take to end its ranks.
END_LIMIT_S = 10


def unwind_on_sigterm() -> None:
    """From now on SIGTERM ends this program as Ctrl-C does: through every `finally`."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


@contextlib.contextmanager
def started(words: Sequence[str | PathLike[str]], **options: Any) -> Iterator[subprocess.Popen]:
    """A process in a group of its own, of which nothing is left afterwards."""
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True, **options)
    try:
        yield process
    finally:
        # A launcher that is still there ends its ranks when it is asked to; killed, it could not.
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_LIMIT_S)


def output_of(
    words: Sequence[str | PathLike[str]], limit_s: float, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run to the end, as `subprocess.run` would, but leave nothing behind if that does not come."""
    pipe = subprocess.PIPE
    with started(words, stdout=pipe, stderr=pipe, text=True, **options) as process:
        out, err = process.communicate(timeout=limit_s)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
