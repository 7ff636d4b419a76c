"""How long a signal's handler may not run before a rank leaves the job, and whose descriptor Python wakes."""

from __future__ import annotations

import math
import signal
import socket
from collections.abc import Iterator

import pytest

from horovod.common import _signals

NOW = 100.0


def deadline_after(number: int, *again: float, grace_s: float = 0.0) -> float:
    arrived = _signals._Arrived(number, NOW, grace_s)
    for later in again:
        arrived.comes_again(NOW + later)
    return arrived.deadline - NOW


def test_only_a_signal_that_asks_for_the_end_ends_a_wait() -> None:
    assert deadline_after(signal.SIGINT) == 1
    assert deadline_after(signal.SIGTERM) == math.inf
    assert deadline_after(signal.SIGALRM, 5, 10, 15) == math.inf


def test_a_second_sigterm_asks_for_the_end_unless_it_is_the_first_on_another_way() -> None:
    assert deadline_after(signal.SIGTERM, 0.5) == math.inf
    assert deadline_after(signal.SIGTERM, 0.5, 60) == 61
    assert deadline_after(signal.SIGTERM, 60, 90) == 61


def test_a_setting_bounds_the_others() -> None:
    assert deadline_after(signal.SIGTERM, grace_s=30) == 30
    assert deadline_after(signal.SIGALRM, grace_s=30) == 30
    assert deadline_after(signal.SIGINT, grace_s=30) == 1


@pytest.fixture
def wakeup() -> Iterator[None]:
    before = signal.set_wakeup_fd(-1)
    yield
    signal.set_wakeup_fd(before)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    yield reader, writer
    reader.close()
    writer.close()


def test_a_program_that_is_told_of_signals_stays_the_one(wakeup: None, pair) -> None:
    signal.set_wakeup_fd(pair[1].fileno())
    assert _signals._Watch.begin(0.0) is None
    assert signal.set_wakeup_fd(-1) == pair[1].fileno()


def test_a_descriptor_that_its_program_has_closed_is_replaced(wakeup: None, pair) -> None:
    signal.set_wakeup_fd(pair[1].fileno())
    pair[1].close()
    watch = _signals._Watch.begin(0.0)
    assert watch is not None
    assert signal.set_wakeup_fd(-1) == watch._writer.fileno()


def test_a_child_process_restores_no_descriptor_that_was_closed(wakeup: None, pair) -> None:
    watch = _signals._Watch.begin(0.0)
    assert watch is not None
    signal.set_wakeup_fd(pair[1].fileno())
    pair[1].close()
    watch._leave_to_parent()
    assert signal.set_wakeup_fd(-1) == -1
