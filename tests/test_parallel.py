"""Runs every file of tests/parallel on 1, 2, 3 and 4 real ranks, and checks that all ranks ran the same tests."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import harness

HERE = Path(__file__).resolve().parent
FILES = sorted((HERE / "parallel").rglob("test_*.py"))
LIMIT_S = 240.0


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    sizes = range(1, metafunc.config.getoption("--max-np") + 1)
    cases = [(file, np) for file in FILES for np in sizes]
    names = [f"{file.relative_to(HERE / 'parallel').with_suffix('')}-np{np}" for file, np in cases]
    metafunc.parametrize(("file", "np"), cases, ids=names)


def test_on_every_rank(file: Path, np: int, tmp_path: Path, jobs) -> None:
    pytest_words = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "--tb=short",
        "-p",
        "no:cacheprovider",
    ]
    job = jobs(
        harness.horovodrun(
            np,
            [*pytest_words, "-p", "rank_report", "--rootdir", str(harness.ROOT), str(file)],
            limit_s=LIMIT_S,
            env={"HVD_TEST_REPORT": str(tmp_path)},
            cwd=harness.ROOT,
        )
    )

    code = job.wait()

    reports = [_read(tmp_path / f"rank-{rank}.json") for rank in range(np)]
    assert code == 0, f"exit status {code}\n{job.report()}"
    job.assert_nothing_left()
    assert all(report == reports[0] for report in reports), f"ranks ran different tests:\n{reports}"
    ran = [outcome for _, outcome in reports[0]["tests"]]
    assert ran, "no test ran"
    print(
        f"{len(ran)} tests on {np} ranks: {ran.count('passed')} passed, {ran.count('skipped')} skipped"
    )


def _read(path: Path) -> dict[str, object]:
    return json.loads(path.read_text()) if path.exists() else {"exit": None, "tests": []}
