"""The program of `make test` runs all parts, sums their counts of tests, and ends all processes after an interrupt."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import harness
import landings
import run_parts

TABLE = """
[[first]]
name = "install"
command = "{install}"
[[first]]
name = "two tests"
command = "{tests}"
[[first]]
name = "last"
command = "{last}"
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with the program and nothing else."""
    (tmp_path / "tests").mkdir()
    for name in ("run_parts.py", "landings.py"):
        (tmp_path / "tests" / name).write_bytes((harness.TESTS / name).read_bytes())
    return tmp_path


def start(clone: Path, *options: str, more: str = "", **commands: str) -> subprocess.Popen[str]:
    (clone / "tests" / "parts.toml").write_text(TABLE.format(**commands) + more)
    # No environment of its own: as with the system's Python on a fresh machine.
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", PROGRAM, str(clone / "tests"), "first", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )


PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
sys.argv[:2] = ["run_parts.py"]
import run_parts
sys.exit(run_parts.main())
"""


def test_parts_after_a_failure_run_and_the_table_tells_all(clone: Path) -> None:
    (clone / "test_two.py").write_text(
        "import harness, sys\n"
        "def test_starts_jobs():\n"
        "    for _ in range(2): harness.Job([sys.executable, '-c', '']).succeed().close()\n"
        "def test_fails(): assert False\n"
    )
    tests = f"PYTHONPATH={harness.TESTS} pytest: -p no:cacheprovider -c /dev/null test_two.py"
    process = start(clone, install="exit 3", tests=tests, last="echo the last one")
    text, _ = process.communicate(timeout=harness.LIMIT_S)
    assert process.returncode == 1, text
    assert "the last one" in text.splitlines()
    ends = "tests: 1 passed, 1 failed, 0 skipped; failed parts: install, two tests"
    assert text.splitlines()[-1] == ends
    table = (clone / ".stamps" / "test-parts.txt").read_text()
    rows = [re.split(r"\s{2,}", line.strip()) for line in table.splitlines()]
    assert [row[:1] + row[2:] for row in rows] == [
        ["part", "jobs", "outcome"],
        ["install", "0", "FAILED (exit status 3)"],
        ["two tests", "2", "FAILED (exit status 1) (1 passed, 1 failed)"],
        ["last", "0", "passed"],
        ["all", "2"],
    ]
    slowest = run_parts.slowest_tests(clone / ".stamps" / "test-logs", 1)
    assert [line.split()[-1] for line in slowest] == ["test_two::test_starts_jobs"]


def test_files_by_processor_time(tmp_path: Path) -> None:
    case = """<testcase classname="tests.{0}" name="test" time="1"><properties>
        <property name="processor_s" value="{1}"/></properties></testcase>"""
    cases = [
        case.format(*row) for row in (("one", 1.5), ("two", 2.0), ("one", 1.0), ("three", 9.0))
    ]
    (tmp_path / "a.xml").write_text(f"<testsuites>{''.join(cases[:2])}</testsuites>")
    cases[3] = cases[3].replace(
        "<properties>", '<properties><property name="ranks_processor_s" value="8"/>'
    )
    (tmp_path / "b.xml").write_text(f"<testsuites>{''.join(cases[2:])}</testsuites>")
    lines = [line.split() for line in run_parts.costliest_files(tmp_path, 3)]
    assert [(line[0], line[-1]) for line in lines] == [
        ("13.5", "tests"),
        ("9.0", "tests/three"),
        ("8.0", "tests/threetest"),
        ("2.5", "tests/one"),
    ]


def test_chosen_parts_alone(clone: Path) -> None:
    process = start(clone, "--only", "la", install="exit 3", tests="exit 3", last="true")
    text, _ = process.communicate(timeout=harness.LIMIT_S)
    assert process.returncode == 0, text
    process = start(clone, "--only", "x", install="exit 3", tests="exit 3", last="true")
    text, _ = process.communicate(timeout=harness.LIMIT_S)
    assert process.returncode == 1
    assert "--only x: no part's name begins so; there are install, two tests, last" in text


def test_an_interrupt_ends_everything(clone: Path) -> None:
    process = start(clone, install="echo pid $BASHPID; sleep 1000", tests="true", last="true")
    assert process.stdout is not None
    pid = next(int(line.split()[1]) for line in process.stdout if line.startswith("pid "))
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=harness.LIMIT_S)
    assert process.returncode == 130, text
    assert re.search(r"^install .* stopped$", text, re.MULTILINE), text
    assert re.search(r"^last .* not run$", text, re.MULTILINE), text
    with pytest.raises(ProcessLookupError):
        os.killpg(pid, 0)


@pytest.mark.parametrize(
    ("lines", "counts"),
    [
        (
            ["===== 2 failed, 5 passed, 1 skipped, 3 deselected, 1 error in 61.00s (0:01:01) ====="],
            {"passed": 5, "failed": 3, "skipped": 1},
        ),
        # Of ranks inside of a job: they are quiet.
        (["5 passed in 1.0s", "==== 1 passed in 1.0s ====", "=== 2 passed, 1 xfailed in 1s ==="], {"passed": 4}),
        (
            [
                "test result: FAILED. 0 passed; 1 failed; 0 ignored; 0 measured; 9 filtered out",
                "     Summary [   9.1s] 7/9 tests run: 5 passed (1 slow), 1 failed, 1 timed out, 2 skipped",
            ],
            {"passed": 5, "failed": 2, "skipped": 2},
        ),
        (["test result: ok. 4 passed; 0 failed; 1 ignored; 0 measured"] * 2, {"passed": 8, "failed": 0, "skipped": 2}),
        (["nothing"], {}),
    ],
)  # fmt: skip
def test_what_test_programs_say_is_added_up(lines: list[str], counts: dict[str, int]) -> None:
    assert run_parts.count_tests(lines) == counts


def test_the_shards_hold_every_part_once() -> None:
    table = tomllib.loads(run_parts.PARTS.read_text())
    shards = range(1, landings.SHARDS + 1)
    one_by_one = [part.name for shard in shards for part in run_parts.second_tier(table, [shard])]
    assert one_by_one == [part.name for part in run_parts.second_tier(table, shards)]
    assert len(set(one_by_one)) == len(one_by_one)
    for row in table["second"]:
        if "shard" in row:
            assert one_by_one.count(row["name"]) == 1
        else:
            assert "{shard}" in row["command"]
            assert sum(name.startswith(f"{row['name']} ") for name in one_by_one) == len(shards)


@pytest.mark.parametrize("text", ["0/8", "9/8", "3/7", "three"])
def test_a_shard_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(SystemExit, match=rf"SHARD={text}: expected K/8 with K from 1 to 8"):
        run_parts.shards_of(text, 8)


def test_a_part_that_is_due_too_late_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_parts, "STAMPS", tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its own handlers
    late = run_parts.Part("late", "exit 1", begins_within_s=-1.0)
    in_time = run_parts.Part("in time", "true", begins_within_s=harness.LIMIT_S)
    assert run_parts.run([late, in_time]) == 0
    assert (late.outcome, in_time.outcome) == (run_parts.LEFT_OUT, "passed")
    assert "LEFT OUT" in capsys.readouterr().out


def test_a_disk_with_too_little_space_is_refused(clone: Path) -> None:
    commands = {"install": "true", "tests": "true", "last": "true"}
    for needed_gb, code in ((0.0, 0), (1e9, 1)):
        more = f"[writes_gb]\nfrom_nothing = {needed_gb}\ntemporary = 0.0\n"
        process = start(clone, more=more, **commands)
        out, _ = process.communicate(timeout=harness.LIMIT_S)
        assert process.returncode == code, out
    assert re.match(
        rf"the disk of {clone} has [\d.]+ GB free, and this run writes up to 1000000000 GB there",
        out,
    )
