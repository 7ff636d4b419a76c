"""Common to all Python tests: jobs that are always cleaned up, and the list of files that need several ranks."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import harness
import lanes
import side_by_side

HERE = Path(__file__).resolve().parent
RANK_SITE = str(HERE / "rank_site")
# JAX writes its compiled programs into this folder.
JAX_PROGRAMS = HERE.parent / ".stamps" / "jax-programs"
KEPT_S = 30 * 86400.0
XLA_FLAGS = ("--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true")
BEGUN_S = pytest.StashKey[float]()
sys.path.append(RANK_SITE)

import lean_imports  # noqa: E402, F401 - it acts when it is imported, before the test files import frameworks

pytest_plugins = ["tiers"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--garbage-mb",
        type=int,
        default=64,
        help="how much garbage strangers send to a job's ports (MB)",
    )
    parser.addoption(
        "--max-np", type=int, default=3, help="largest number of ranks for tests/parallel"
    )
    parser.addoption(
        "--side-by-side",
        type=int,
        default=0,
        metavar="N",
        help="run up to N groups of tests at once, each in a process of its own (tests/lanes.py)",
    )


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts background jobs with SIGINT ignored. Every process that the tests start would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Every process that the tests start imports large frameworks faster, as the ranks of the harness do.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [RANK_SITE, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    ).rstrip(os.pathsep)
    if not _is_rank():
        _forget_old_programs()
    # In the first tier ranks share compiled programs of JAX, also those of earlier runs
    # (tests/rank_site/lean_imports.py). XLA optimises less there: the operations of this package are calls, which its
    # passes do not change. In the second tier each rank compiles its own programs, as a user's rank does.
    if config.getoption("--tier") == "first":
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(JAX_PROGRAMS))
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        os.environ.setdefault("XLA_FLAGS", " ".join(XLA_FLAGS))
    # A Java that lives for seconds costs least with its quick compiler alone and no threads that collect garbage.
    os.environ.setdefault("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    if limit := config.getoption("--side-by-side"):
        config.pluginmanager.register(side_by_side.SideBySide(limit))


def _forget_old_programs() -> None:
    """Remove compiled programs that were written long ago: nobody else removes those of changed tests."""
    for path in JAX_PROGRAMS.glob("*"):
        # Another run may remove it at the same time; or it is of another user.
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < time.time() - KEPT_S:
                path.unlink()


def pytest_unconfigure() -> None:
    # Some libraries print warnings at exit about objects that were exempt from garbage collection.
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not _is_rank():
        lanes.assign(items)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> Iterator[None]:
    if _is_rank() or session.config.option.collectonly:
        return (yield)
    with harness.fork_server():
        return (yield)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`tests/parallel` runs inside ranks, started by test_parallel.py; or alone when it is named."""
    parallel = HERE / "parallel"
    if _is_rank() or not collection_path.is_relative_to(parallel):
        return None
    named = any(Path(arg.split("::")[0]).resolve().is_relative_to(parallel) for arg in config.args)
    return None if named else True


def _is_rank() -> bool:
    """Whether this is one of several ranks that run the same tests."""
    return "HOROVOD_RANK" in os.environ


@pytest.fixture(autouse=True)
def keeps_to_its_lane(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test of the lane `waits` does not compute all the time."""
    if _is_rank() or lanes.of(request.node) is lanes.Lane.COMPUTES:
        yield
    else:
        yield from lanes.check_that_it_waits()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Note the processor time of a test and of its processes, for `make test-slowest`."""
    item.stash[BEGUN_S] = lanes.processor_s()
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    if call.when == "teardown":
        used_s = lanes.processor_s() - item.stash[BEGUN_S]
        item.user_properties.append(("processor_s", f"{used_s:.2f}"))


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
def port() -> Iterator[int]:
    """A port that nobody else gets while the test runs: it refuses connections until a job of the test listens there.

    It is bound, so the system gives it to no process that asks for any. Linux lets another socket listen there that
    asks for the very port, as both have SO_REUSEADDR and this one does not listen.
    """
    family, every = (socket.AF_INET6, "::") if socket.has_dualstack_ipv6() else (socket.AF_INET, "")
    with socket.socket(family) as taken:
        if family == socket.AF_INET6:
            taken.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((every, 0))
        yield taken.getsockname()[1]


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a rank's program to a file."""
    counter = iter(range(1000))

    def write(text: str) -> Path:
        path = tmp_path / f"script{next(counter)}.py"
        path.write_text(text)
        return path

    return write
