"""Runs the files of tests/parallel on 1, 2 and 3 real ranks (`--max-np 4`: also on 4), and checks that all ranks ran
the same tests.

All files that are asked for run in one job per number of ranks: starting ranks costs more than most of the tests.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import harness

HERE = Path(__file__).resolve().parent
FILES = sorted((HERE / "parallel").rglob("test_*.py"))
LIMIT_S = 600.0


@dataclass
class Ran:
    """What became of one job: per rank, the outcome of each test by file; and what to show when it went wrong."""

    code: int
    ranks: list[dict[str, list[tuple[str, str]]]]
    report: str


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "ran" not in metafunc.fixturenames:
        return
    sizes = range(1, metafunc.config.getoption("--max-np") + 1)
    metafunc.parametrize(
        "ran", sizes, indirect=True, scope="module", ids=[f"np{np}" for np in sizes]
    )
    if "file" in metafunc.fixturenames:
        names = [str(file.relative_to(HERE / "parallel").with_suffix("")) for file in FILES]
        metafunc.parametrize("file", FILES, ids=names)


@pytest.fixture(scope="module")
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    np = request.param
    asked = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    files = sorted({p["file"] for p in asked if p.get("ran") == np and "file" in p})
    folder = tmp_path_factory.mktemp(f"np{np}")
    words = [
        "-m",
        "pytest",
        "-x",
        "-q",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "-p",
        "rank_report",
    ]
    job = harness.horovodrun(
        np,
        [sys.executable, *words, "--rootdir", str(harness.ROOT), *map(str, files)],
        limit_s=LIMIT_S,
        # What the first rank has compiled of these files, the others and the next jobs need not compile again.
        env={"HVD_TEST_REPORT": str(folder), "PYTHONDONTWRITEBYTECODE": None},
        cwd=harness.ROOT,
    )
    try:
        code = job.wait()
        if code == 0:
            job.assert_nothing_left()
        ranks = [_by_file(folder / f"rank-{rank}.jsonl") for rank in range(np)]
        yield Ran(code, ranks, job.report())
    finally:
        job.close()


def test_on_every_rank(ran: Ran, file: Path) -> None:
    of_file = [rank.get(str(file.relative_to(harness.ROOT)), []) for rank in ran.ranks]

    if ran.code != 0:
        bad = [t for tests in of_file for t in tests if t[1] not in ("passed", "skipped")]
        assert not bad, f"{bad}\n{ran.report}"
    assert all(tests == of_file[0] for tests in of_file), f"ranks ran different tests:\n{of_file}"
    outcomes = [outcome for _, outcome in of_file[0]]
    assert outcomes, f"no test ran; the job ended with {ran.code}\n{ran.report}"
    print(
        f"{len(outcomes)} tests on {len(ran.ranks)} ranks: {outcomes.count('passed')} passed, "
        f"{outcomes.count('skipped')} skipped"
    )


def test_the_job_ends_well(ran: Ran) -> None:
    assert ran.code == 0, f"exit status {ran.code}\n{ran.report}"


def _by_file(report: Path) -> dict[str, list[tuple[str, str]]]:
    lines = report.read_text().splitlines() if report.exists() else []
    files: dict[str, list[tuple[str, str]]] = {}
    for name, outcome in map(json.loads, lines):
        files.setdefault(name.split("::")[0], []).append((name, outcome))
    return files
