"""Selects the tests of a pytest run: the first tier, the second (marked `thorough`), or a shard of the second.

`@pytest.mark.thorough(also="tests/integration/test_x.py::test_y")` names the test of the first tier that fails for
the same fault. A mark without `also`, or with a test that does not exist, is a usage error.
"""

from __future__ import annotations

import functools
import os
import re
import tomllib
import zlib
from pathlib import Path

import pytest

import landings

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
TIERS = ("first", "second", "all")
# The variable that passes the tier to the ranks of tests/parallel.
VARIABLE = "TESTS_TIER"


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--tier` and `--shard`."""
    default = os.environ.get(VARIABLE, "first")
    parser.addoption("--tier", choices=TIERS, default=default, help="which tests run")
    parser.addoption("--shard", default="", metavar="K/N", help="this share of the second tier")


def pytest_configure(config: pytest.Config) -> None:
    """Pass the tier to ranks: a test of the second tier has its ranks run the tests of both."""
    os.environ[VARIABLE] = "first" if config.getoption("--tier") == "first" else "all"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of other tiers and shards; refuse a mark that names no test."""
    tier, shard = config.getoption("--tier"), _shard(config.getoption("--shard"))
    chosen, others = [], []
    for item in items:
        marks = list(item.iter_markers("thorough"))
        for mark in marks:
            if reason := fault_of(mark):
                raise pytest.UsageError(f"{item.nodeid}: {reason}")
        is_of_tier = tier == "all" or (tier == "second") == bool(marks)
        path = item.path.as_posix().removeprefix(f"{ROOT.as_posix()}/")
        is_of_shard = not marks or shard in (None, shard_of(path))
        (chosen if is_of_tier and is_of_shard else others).append(item)
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = chosen


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A shard without any of the requested files succeeds."""
    is_empty = exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED
    if is_empty and session.config.getoption("--shard"):
        session.exitstatus = pytest.ExitCode.OK


def fault_of(mark: pytest.Mark) -> str:
    """The error in a mark `thorough`; empty if the mark names a test that exists."""
    also = mark.kwargs.get("also")
    if mark.args or set(mark.kwargs) != {"also"} or not isinstance(also, str):
        return (
            "thorough(also=...) takes one test of the first tier that fails for the same fault, "
            f"not {mark.args} {mark.kwargs}"
        )
    file, _, test = also.partition("::")
    name = test.partition("[")[0]
    if not name or name not in _tests_of(file):
        return f"thorough(also={also!r}): there is no test of this name; write file.py::test_name"
    return ""


def shard_of(path: str) -> int:
    """The shard of a file's thorough tests: from parts.toml, else from a hash of the file's name."""
    return int(_named().get(path, zlib.crc32(path.encode()) % landings.SHARDS + 1))


@functools.cache
def _named() -> dict[str, int]:
    return dict(tomllib.loads((TESTS / "parts.toml").read_text())["files"])


@functools.cache
def _tests_of(file: str) -> frozenset[str]:
    path = ROOT / file
    return frozenset(re.findall(r"def (test_\w+)\(", path.read_text()) if path.is_file() else ())


def _shard(text: str) -> int | None:
    if not text:
        return None
    found = re.fullmatch(rf"(\d+)/{landings.SHARDS}", text)
    if not found or not 1 <= int(found[1]) <= landings.SHARDS:
        raise pytest.UsageError(f"--shard {text}: expected K/{landings.SHARDS}, such as 3/8")
    return int(found[1])
