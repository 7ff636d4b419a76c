"""Progress of training, as ranks report it to the process that called `horovod.run`, `horovod.spark.run` or a kin.

Where that process has a terminal or is a notebook, it shows a bar (by tqdm).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
from collections.abc import Iterator

from horovod import _core
from horovod.runner import _payloads

__all__ = ["report"]

# Between two reports of a rank.
_PERIOD_S = 0.5
_TIMEOUT_S = 5.0


def report(
    step: int | None = None,
    steps: int | None = None,
    *,
    epoch: int | None = None,
    epochs: int | None = None,
    **values: float,
) -> None:
    """Say how far this rank is. Costs microseconds: a thread sends the latest, at most twice a second.

    Without effect where nobody shows it, as in ranks that `horovodrun` started.

    Parameters
    ----------
    step, steps
        Steps done in this epoch, and how many there are.
    epoch, epochs
        The epoch, from 0, and how many there are.
    values
        Other numbers to show, such as `loss`.
    """
    if _sender is not None and _sender.is_of_this_process():
        numbers = {name: float(value) for name, value in values.items()}
        has_begun = _core.is_initialized()
        rank = _core.rank() if has_begun else int(os.environ["HOROVOD_RANK"])
        size = _core.size() if has_begun else int(os.environ["HOROVOD_SIZE"])
        _sender.put(_payloads.Report(rank, size, step, steps, epoch, epochs, numbers))


class _Sender:
    """A thread that brings the latest report of this rank to the caller."""

    def __init__(self, place: _payloads.Place) -> None:
        self._place = place
        self._pid = os.getpid()
        self._latest: _payloads.Report | None = None
        self._news = threading.Event()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def is_of_this_process(self) -> bool:
        """Whether this is no child that was forked."""
        return self._pid == os.getpid()

    def put(self, report: _payloads.Report) -> None:
        """Have this one sent, unless a later one overtakes it."""
        self._latest = report
        self._news.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hvd-progress", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Send the last one."""
        self._ending.set()
        self._news.set()
        if self._thread is not None:
            self._thread.join(2 * _TIMEOUT_S)

    def _run(self) -> None:
        sent = None
        while not (self._ending.is_set() and sent is self._latest):
            self._news.wait()
            self._news.clear()
            sent = self._latest
            if sent is not None:
                self._send(sent)
            self._ending.wait(_PERIOD_S)

    def _send(self, report: _payloads.Report) -> None:
        # Training goes on without anybody who looks on.
        with contextlib.suppress(OSError, RuntimeError):
            content = pickle.dumps(report)
            _core.deliver_payload(
                self._place.addresses, self._place.key, report.rank, content, _TIMEOUT_S
            )


_sender: _Sender | None = None


@contextlib.contextmanager
def sent_to(place: _payloads.Place) -> Iterator[None]:
    """While this rank's function runs: where reports go."""
    global _sender
    _sender = _Sender(place)
    try:
        yield
    finally:
        _sender.close()
        _sender = None
