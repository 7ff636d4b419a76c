"""Runs the files of tests/parallel on 1, 2 and 3 real ranks (`--max-np 4`: also on 4), and checks that all ranks ran
the same tests.

All files that are asked for run in one job per number of ranks: starting ranks costs more than most of the tests. Those
of a folder with an `environments.json` run in other jobs, one for each name in it, which folders may share: with the
variables that are set, and the numbers of ranks if not all, such as
`{"jax": {"variables": {"KERAS_BACKEND": "jax"}, "np": [1, 2]}}`; with `--max-np 4` all.
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import harness

HERE = Path(__file__).resolve().parent
LIMIT_S = 600.0


@dataclass(frozen=True)
class Part:
    """One file in one environment; the usual one has no name."""

    file: Path
    environment: str = ""

    def __str__(self) -> str:
        name = str(self.file.relative_to(HERE / "parallel").with_suffix(""))
        return f"{name}@{self.environment}" if self.environment else name

    def description(self) -> dict[str, Any]:
        """What the environment is."""
        return _environments(self.file).get(self.environment, {})

    def runs_on(self, np: int, is_nightly: bool) -> bool:
        """Whether it runs on so many ranks."""
        return is_nightly or np in self.description().get("np", [np])


def _environments(file: Path) -> dict[str, dict[str, Any]]:
    described = file.with_name("environments.json")
    return json.loads(described.read_text()) if described.exists() else {"": {}}


PARTS = [
    Part(file, environment)
    for file in sorted((HERE / "parallel").rglob("test_*.py"))
    for environment in _environments(file)
]


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
    if "part" in metafunc.fixturenames:
        metafunc.parametrize("part", PARTS, ids=map(str, PARTS))


@pytest.fixture(scope="module")
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    """The jobs of so many ranks, by environment."""
    np = request.param
    asked = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    parts = {p["part"] for p in asked if p.get("ran") == np and "part" in p}
    by_environment: dict[str, list[Part]] = {}
    for part in sorted(parts, key=str):
        if part.runs_on(np, _is_nightly(request.config)):
            by_environment.setdefault(part.environment, []).append(part)
    folders = [tmp_path_factory.mktemp(f"np{np}{environment}") for environment in by_environment]
    # As many jobs at once as there are cores for the ranks of.
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // np)) as pool:
        found = pool.map(partial(_run, np), by_environment.values(), folders)
        return dict(zip(by_environment, found, strict=True))


def _is_nightly(config: pytest.Config) -> bool:
    return config.getoption("--max-np") > 3


def _run(np: int, parts: list[Part], folder: Path) -> Ran:
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
    files = [str(part.file) for part in parts]
    variables = {k: v for part in parts for k, v in part.description().get("variables", {}).items()}
    job = harness.horovodrun(
        np,
        [sys.executable, *words, "--rootdir", str(harness.ROOT), *files],
        limit_s=LIMIT_S,
        # What the first rank has compiled of these files, the others and the next jobs need not compile again.
        env={
            "HVD_TEST_REPORT": str(folder),
            "PYTHONDONTWRITEBYTECODE": None,
            **variables,
        },
        cwd=harness.ROOT,
    )
    try:
        code = job.wait()
        if code == 0:
            job.assert_nothing_left()
        return Ran(
            code, [_by_file(folder / f"rank-{rank}.jsonl") for rank in range(np)], job.report()
        )
    finally:
        job.close()


def test_on_every_rank(ran: dict[str, Ran], part: Part, request: pytest.FixtureRequest) -> None:
    if not part.runs_on(request.node.callspec.params["ran"], _is_nightly(request.config)):
        pytest.skip("not with so many ranks in this environment")
    of = ran[part.environment]
    of_file = [rank.get(str(part.file.relative_to(harness.ROOT)), []) for rank in of.ranks]

    if of.code != 0:
        bad = [t for tests in of_file for t in tests if t[1] not in ("passed", "skipped")]
        assert not bad, f"{bad}\n{of.report}"
    assert all(tests == of_file[0] for tests in of_file), f"ranks ran different tests:\n{of_file}"
    outcomes = [outcome for _, outcome in of_file[0]]
    assert outcomes, f"no test ran; the job ended with {of.code}\n{of.report}"
    print(
        f"{len(outcomes)} tests on {len(of.ranks)} ranks: {outcomes.count('passed')} passed, "
        f"{outcomes.count('skipped')} skipped"
    )


def test_the_jobs_end_well(ran: dict[str, Ran]) -> None:
    for environment, of in ran.items():
        assert of.code == 0, f"{environment}: exit status {of.code}\n{of.report}"


def _by_file(report: Path) -> dict[str, list[tuple[str, str]]]:
    lines = report.read_text().splitlines() if report.exists() else []
    files: dict[str, list[tuple[str, str]]] = {}
    for name, outcome in map(json.loads, lines):
        files.setdefault(name.split("::")[0], []).append((name, outcome))
    return files
