"""How events of `horovodrun` are read."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from horovod.runner._events import Events

BEGIN = b'{"event": "begin", "version": 1, "horovodrun": "0.29.0"}\n'
REFUSED = b'{"event": "end", "status": 2, "outcome": "usage", "report": "--np?"}\n'


@pytest.fixture
def pipe() -> Iterator[tuple[Events, int]]:
    readable, writable = os.pipe()
    yield Events(readable), writable
    os.close(readable)


def test_lines_come_in_pieces_and_unknown_events_and_fields_are_passed_over(pipe) -> None:
    events, writable = pipe
    for piece in (BEGIN[:20], BEGIN[20:] + b'{"event": "moon", "phase": 3}\n', REFUSED[:-1]):
        os.write(writable, piece)
        assert events.read()
    assert not events.was_wrong_call()
    os.write(writable, b"\n")
    os.close(writable)
    assert not events.read()
    assert events.was_wrong_call()
    assert events.report(2) == "--np?"
    assert events.report(0) == ""


def test_a_launcher_that_says_nothing_is_known_by_its_exit_status(pipe) -> None:
    events, writable = pipe
    os.write(writable, BEGIN)
    os.close(writable)
    assert not events.read()
    assert events.report(-9) == "horovodrun ended with exit status -9"


def test_events_of_another_version_mean_nothing(pipe) -> None:
    events, writable = pipe
    os.write(writable, BEGIN.replace(b'"version": 1', b'"version": 2') + REFUSED)
    os.close(writable)
    assert not events.read()
    assert not events.was_wrong_call()
    assert "not the one of this version" in events.report(2)
