"""The bar of what ranks report, and the way of reports from real ranks to it."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from typing import Any

import pytest

import horovod
from horovod import progress
from horovod.runner import _progress_bar
from horovod.runner._payloads import Report
from horovod.runner._progress_bar import ProgressBar


class Recorder:
    """In place of tqdm: what it was told last."""

    all: list[Recorder]

    def __init__(self, **_: Any) -> None:
        self.n = 0
        self.total: int | None = None
        self.description = self.postfix = ""
        self.is_closed = False
        self.times_cleared = 0
        Recorder.all.append(self)

    def set_description(self, text: str, refresh: bool) -> None:
        assert not refresh
        self.description = text

    def set_postfix_str(self, text: str, refresh: bool) -> None:
        assert not refresh
        self.postfix = text

    def refresh(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True

    @contextlib.contextmanager
    def external_write_mode(self, file: Any) -> Iterator[None]:
        self.times_cleared += 1
        yield


@pytest.fixture(autouse=True)
def recorders() -> list[Recorder]:
    Recorder.all = []
    return Recorder.all


def report(rank: int, step: int, size: int = 2, epoch: int = 0, **values: float) -> Report:
    return Report(rank, size, step, 10, epoch, 3, values)


def test_the_slowest_rank_counts_and_is_named_when_it_is_late(recorders: list[Recorder]) -> None:
    now = 0.0
    bar = ProgressBar(clock=lambda: now, make=Recorder)
    bar.show()
    assert not recorders
    bar.take(report(0, 4, epoch=1, loss=0.25))
    bar.take(report(1, 2, epoch=1, loss=0.5))
    bar.show()
    (shown,) = recorders
    assert (shown.n, shown.total, shown.description) == (12, 30, "epoch 2/3")
    assert shown.postfix == "loss 0.25"
    now = 4.0
    bar.take(report(0, 6, epoch=1, loss=0.25))
    # Said again, it is no news.
    bar.take(report(1, 2, epoch=1, loss=0.5))
    now = 6.0
    bar.show()
    assert shown.postfix == "loss 0.25, rank 1 is 4 steps behind"
    # Rank 1 is no more.
    bar.take(report(0, 7, size=1, epoch=1))
    bar.show()
    assert (shown.n, shown.postfix) == (17, "")
    bar.close()
    assert shown.is_closed


def test_a_bar_without_known_totals(recorders: list[Recorder]) -> None:
    bar = ProgressBar(make=Recorder)
    bar.take(Report(0, 1, 5, None, None, None, {}))
    bar.show()
    assert (recorders[0].n, recorders[0].total, recorders[0].description) == (5, None, "")


def test_no_bar_where_nobody_can_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert _progress_bar._maker() is None
    progress.report(1, 2)


IN_TERMINAL = """
import horovod
def work():
    import horovod.numpy as hvd
    from horovod import progress
    hvd.init()
    for step in range(20):
        progress.report(step + 1, 20, epoch=1, epochs=2, loss=0.25)
    return hvd.rank()
assert horovod.run(work, num_proc=2) == [0, 1]
"""


def test_a_bar_in_a_real_terminal() -> None:
    pytest.importorskip("tqdm")
    own, other = os.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    with subprocess.Popen([sys.executable, "-c", IN_TERMINAL], stdout=other, stderr=other) as job:
        os.close(other)
        shown = b""
        # Linux says EIO once nobody else has the terminal open.
        with contextlib.suppress(OSError):
            while chunk := os.read(own, 1 << 16):
                shown += chunk
        os.close(own)
        assert job.wait(60) == 0, shown
    last = shown.decode().replace("\r", "\n").strip().splitlines()[-1]
    assert "epoch 2/2: 100%" in last
    assert "40/40" in last
    assert "loss 0.25" in last


def test_reports_of_ranks_arrive(
    recorders: list[Recorder], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_progress_bar, "_maker", lambda: Recorder)

    def work() -> int:
        import horovod.numpy as hvd
        from horovod import progress

        hvd.init()
        for step in range(1000):
            progress.report(step + 1, 1000, epoch=0, epochs=1, loss=1 / (step + 1))
        print("done")
        return int(hvd.rank())

    assert horovod.run(work, num_proc=2) == [0, 1]
    (shown,) = recorders
    assert (shown.n, shown.total, shown.description) == (1000, 1000, "epoch 1/1")
    assert shown.postfix == "loss 0.001"
    assert shown.is_closed
    assert "done" in capsys.readouterr().out
