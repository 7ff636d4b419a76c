"""What all Python tests share: jobs that are always cleaned up, and which files need several ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--garbage-mb",
        type=int,
        default=64,
        help="how much garbage strangers send to a job's ports (MB)",
    )
    parser.addoption(
        "--max-np", type=int, default=4, help="largest number of ranks for tests/parallel"
    )


def pytest_configure() -> None:
    # A shell starts background jobs with SIGINT ignored, and so would be everything that the tests start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`tests/parallel` runs inside ranks, started by test_parallel.py; or alone when it is named."""
    parallel = HERE / "parallel"
    if "HOROVOD_RANK" in os.environ or not collection_path.is_relative_to(parallel):
        return None
    named = any(Path(arg.split("::")[0]).resolve().is_relative_to(parallel) for arg in config.args)
    return None if named else True


@pytest.fixture
def jobs() -> Iterator[Callable[..., object]]:
    """Registers jobs so that they are ended and their folders removed, whatever happens in the test."""
    started = []

    def keep(job: object) -> object:
        started.append(job)
        return job

    yield keep
    for job in started:
        job.close()


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a rank's program to a file."""
    counter = iter(range(1000))

    def write(text: str) -> Path:
        path = tmp_path / f"script{next(counter)}.py"
        path.write_text(text)
        return path

    return write
