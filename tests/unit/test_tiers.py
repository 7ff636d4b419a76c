"""The two tiers of the tests, and the shards of the second, as pytest runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import harness
import landings
import tiers

TEST = """
import os, pytest
@pytest.mark.thorough({arguments})
def test_rare(): pass
def test_usual(): print("ranks run", os.environ["TESTS_TIER"])
"""
THIS = "tests/unit/test_tiers.py::test_a_run_holds_its_tier"


def run(folder: Path, arguments: str, *options: str, **variables: str) -> tuple[int, str]:
    """pytest on a file of two tests, one of them with the mark."""
    env = {k: v for k, v in os.environ.items() if k != tiers.VARIABLE} | variables
    (folder / "test_two.py").write_text(TEST.format(arguments=arguments))
    # Without the tests' own conftest.
    command = [sys.executable, "-m", "pytest", "-p", "tiers", "-p", "no:cacheprovider", "-rA"]
    done = subprocess.run(
        [*command, "--rootdir", str(folder), "-c", "/dev/null", *options, str(folder)],
        cwd=harness.TESTS,
        env=env,
        capture_output=True,
        text=True,
        timeout=harness.LIMIT_S,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), {"usual"}),
        (("--tier", "second"), {"rare"}),
        (("--tier", "all"), {"rare", "usual"}),
    ],
)
def test_a_run_holds_its_tier(options: tuple[str, ...], expected: set[str], tmp_path: Path) -> None:
    code, text = run(tmp_path, f'also="{THIS}"', *options)
    assert code == 0, text
    assert {
        name for name in ("rare", "usual") if re.search(rf"^PASSED .*::test_{name}$", text, re.M)
    } == expected


def test_ranks_run_both_tiers_where_the_test_that_starts_them_is_not_of_the_first(
    tmp_path: Path,
) -> None:
    assert "ranks run first" in run(tmp_path, f'also="{THIS}"')[1]
    assert "ranks run all" in run(tmp_path, f'also="{THIS}"', "--tier", "all")[1]
    code, text = run(tmp_path, f'also="{THIS}"', **{tiers.VARIABLE: "all"})
    assert code == 0
    assert "2 passed" in text


def test_a_shard_holds_its_files_and_may_hold_none(tmp_path: Path) -> None:
    ran = []
    for shard in range(1, landings.SHARDS + 1):
        options = ("--tier", "second", "--shard", f"{shard}/{landings.SHARDS}")
        code, text = run(tmp_path, f'also="{THIS}"', *options)
        assert code == 0, text
        ran += [shard] if "1 passed" in text else []
    assert len(ran) == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", "thorough(also=...) takes one test of the first tier"),
        ('also="tests/unit/test_tiers.py::test_gone"', "there is no test of this name"),
        ('also="tests/unit/gone.py::test_x"', "there is no test of this name"),
        ('also="tests/unit/test_tiers.py"', "there is no test of this name"),
    ],
)
def test_a_mark_without_its_reason_is_refused(
    arguments: str, expected: str, tmp_path: Path
) -> None:
    code, text = run(tmp_path, arguments)
    assert code == pytest.ExitCode.USAGE_ERROR, text
    assert expected in text


@pytest.mark.parametrize("shard", ["0/8", "9/8", "1/7", "x"])
def test_a_shard_that_is_none_is_refused(shard: str, tmp_path: Path) -> None:
    code, text = run(tmp_path, f'also="{THIS}"', "--shard", shard)
    assert code == pytest.ExitCode.USAGE_ERROR, text
    assert f"--shard {shard}: expected K/8" in text


def test_files_that_the_table_names_are_there() -> None:
    for path, shard in tiers._named().items():
        assert (harness.ROOT / path).is_file(), path
        assert 1 <= shard <= landings.SHARDS
