"""A bar that shows the reported progress of ranks in a terminal or a notebook."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from horovod.runner._payloads import Report

# A rank that is behind is named if its last new report is older than this.
_LATE_S = 5.0


class ProgressBar:
    """Shows the progress of the slowest rank, and the epoch and values of the lowest rank.

    Parameters
    ----------
    clock
        Function that returns the time in seconds.
    make
        Function that makes a bar, with the arguments of `tqdm.tqdm`. Default: `tqdm.auto.tqdm` in a terminal or
        notebook, if tqdm is installed; otherwise no bar is shown.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        make: Callable[..., Any] | None = None,
    ) -> None:
        self._clock = clock
        self._make = make if make is not None else _maker()
        self._bar: Any = None
        self._reports: dict[int, tuple[Report, float]] = {}

    def take(self, report: Report) -> None:
        """Store the report of a rank, which `show` displays."""
        known = self._reports.get(report.rank)
        if known is None or known[0] != report:
            self._reports[report.rank] = report, self._clock()
        # Ranks beyond the size have left an elastic job.
        for rank in [rank for rank in self._reports if rank >= report.size]:
            del self._reports[rank]

    def show(self) -> None:
        """Update the bar."""
        if self._make is None or not self._reports:
            return
        leader, _ = self._reports[min(self._reports)]
        if self._bar is None:
            self._bar = self._make(total=None, unit="step", dynamic_ncols=True)
        per_epoch = leader.steps or 0
        done = [_position(report, per_epoch) for report, _ in self._reports.values()]
        self._bar.total = per_epoch * (leader.epochs or 1) or None
        self._bar.n = min(done)
        if leader.epoch is not None:
            of = f"/{leader.epochs}" if leader.epochs else ""
            self._bar.set_description(f"epoch {leader.epoch + 1}{of}", refresh=False)
        values = [f"{name} {value:.4g}" for name, value in leader.values.items()]
        self._bar.set_postfix_str(", ".join([*values, *self._late(per_epoch)]), refresh=False)
        self._bar.refresh()

    def _late(self, per_epoch: int) -> list[str]:
        now = self._clock()
        furthest = max(_position(report, per_epoch) for report, _ in self._reports.values())
        late = []
        for rank, (report, at) in sorted(self._reports.items()):
            behind = furthest - _position(report, per_epoch)
            if behind > 0 and now - at > _LATE_S:
                late.append(f"rank {rank} is {behind} steps behind")
        return late

    @contextlib.contextmanager
    def cleared(self, stream: TextIO) -> Iterator[None]:
        """Remove the bar from the stream inside the block, so that other output can be written."""
        if self._bar is None:
            yield
            return
        with self._bar.external_write_mode(file=stream):
            yield

    def close(self) -> None:
        """Close the bar; its last state stays on the screen."""
        if self._bar is not None:
            self._bar.close()


def _position(report: Report, per_epoch: int) -> int:
    return (report.epoch or 0) * per_epoch + (report.step or 0)


def _maker() -> Callable[..., Any] | None:
    if not ("ipykernel" in sys.modules or sys.stderr.isatty()):
        return None
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return None
    maker: Callable[..., Any] = tqdm
    return maker
