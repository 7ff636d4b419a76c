"""Tests side by side: each runs once, as its lane and its fixtures allow, and what goes wrong is reported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import harness

CONFTEST = """
import importlib.util, sys
sys.path.insert(0, {tests!r})
spec = importlib.util.spec_from_file_location("real_conftest", {tests!r} + "/conftest.py")
real = importlib.util.module_from_spec(spec)
spec.loader.exec_module(real)
globals().update({{name: value for name, value in vars(real).items() if not name.startswith("__")}})
"""
MARKS = "[pytest]\nmarkers =\n    computes\n    waits\n"
BESIDE = """
import os, time
import pytest

def meet(folder, name, others):
    # Each is in its test until all others are in theirs.
    (folder / name).touch()
    deadline = time.monotonic() + 60
    while not all((folder / other).exists() for other in others):
        assert time.monotonic() < deadline, "not side by side"
        time.sleep(0.01)

FOLDER = __import__("pathlib").Path(__file__).parent
"""


@pytest.fixture
def run(tmp_path: Path):
    """Runs a file of tests as a user does; returns exit status and what is printed."""

    def start(text: str, *options: str) -> tuple[int, str]:
        (tmp_path / "conftest.py").write_text(CONFTEST.format(tests=str(harness.TESTS)))
        (tmp_path / "pytest.ini").write_text(MARKS)
        (tmp_path / "test_it.py").write_text(BESIDE + text)
        words = ["-m", "pytest", "-p", "no:cacheprovider", "-rA", "test_it.py", *options]
        env = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
        done = subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=harness.LIMIT_S,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    return start


def test_those_that_wait_run_together_and_those_that_compute_as_processors_allow(run) -> None:
    text = """
os.cpu_count = lambda: 2
@pytest.mark.waits
@pytest.mark.parametrize("name, other", ["ab", "ba"])
def test_waits(name, other):
    meet(FOLDER, name, other)

@pytest.mark.computes
@pytest.mark.parametrize("name, other", ["cd", "dc", "ef", "fe"])
def test_computes(name, other):
    busy = FOLDER / "busy"
    busy.mkdir(exist_ok=True)
    (busy / name).touch()
    meet(FOLDER, name, other)
    assert len(list(busy.iterdir())) <= 2
    (busy / name).unlink()
"""
    code, out = run(text, "--side-by-side", "6")
    assert code == 0, out
    assert "6 passed" in out


def test_those_that_compute_begin_first_and_large_groups_before_small_ones(run) -> None:
    text = """
@pytest.mark.waits
def test_a_waits():
    pass

@pytest.fixture(scope="module")
def shared():
    pass

@pytest.mark.waits
@pytest.mark.parametrize("number", [1, 2])
def test_b_waits(shared, number):
    pass

@pytest.mark.computes
def test_c_computes():
    pass
"""
    code, out = run(text, "--side-by-side", "1", "-v")
    assert code == 0, out
    ran = re.findall(r"::(test_.)_\w+\S* PASSED", out)
    assert ran == ["test_c", "test_b", "test_b", "test_a"], out


def test_a_fixture_of_a_module_is_made_once_for_each_parameter(run) -> None:
    text = """
pytestmark = pytest.mark.waits

@pytest.fixture(scope="module", params=["one", "two"])
def shared(request):
    (FOLDER / request.param).mkdir()
    yield os.getpid()
    (FOLDER / f"{request.param} is gone").touch()

@pytest.mark.parametrize("number", range(5))
def test_uses_it(shared, number):
    assert shared == os.getpid()

def test_last():
    meet(FOLDER, "last", ["one is gone", "two is gone"])
"""
    code, out = run(text, "--side-by-side", "3")
    assert code == 0, out
    assert "11 passed" in out


def test_the_number_of_an_ended_process_may_come_again(run) -> None:
    text = """
pytestmark = pytest.mark.waits

@pytest.mark.parametrize("number", [1, 2])
def test_has_a_folder_of_its_own(tmp_path_factory, number):
    mine = tmp_path_factory.getbasetemp()
    for later in range(os.getpid() + 1, os.getpid() + 1000):
        (mine.parent / str(later)).mkdir(exist_ok=True)
    assert not list(mine.iterdir())
"""
    code, out = run(text, "--side-by-side", "1")
    assert code == 0, out
    assert "2 passed" in out


def test_failures_and_what_was_printed_are_reported(run) -> None:
    text = """
pytestmark = pytest.mark.waits

def test_fails():
    os.system("echo printed by a child")
    assert 1 + 1 == 3

def test_is_skipped():
    pytest.skip("not here")

def test_dies():
    os._exit(7)
"""
    code, out = run(text, "--side-by-side", "2")
    assert code == 1, out
    assert "assert (1 + 1) == 3" in out
    assert "printed by a child" in out
    assert "not here" in out
    assert "ended while this test ran, with 7" in out
    assert "2 failed, 1 skipped" in out


def test_after_the_first_failure_the_others_are_interrupted_and_clean_up(
    run, tmp_path: Path
) -> None:
    text = """
pytestmark = pytest.mark.waits

@pytest.fixture
def thing():
    yield
    (FOLDER / "cleaned up").touch()

def test_fails():
    meet(FOLDER, "fails", ["hangs"])
    raise AssertionError("on purpose")

def test_hangs(thing):
    (FOLDER / "hangs").touch()
    time.sleep(1000)

def test_never_begins():
    raise AssertionError("begun")
"""
    code, out = run(text, "--side-by-side", "2", "-x")
    assert code == 1, out
    assert "on purpose" in out
    assert "begun" not in out
    assert (tmp_path / "cleaned up").exists()


def test_a_test_without_a_lane_is_refused(run) -> None:
    code, out = run("def test_of_no_lane():\n    pass\n")
    assert code == 4, out
    assert re.search(r"in no lane: .*test_it\.py; say in lanes\.py", out)
