"""Runs the files of tests/parallel on 1, 2 and 3 real ranks (`--max-np 4`: also on 4), and checks that all ranks ran
the same tests.

All files that are asked for run in one job per number of ranks: starting ranks costs more than most of the tests. Those
of a folder with an `environments.json` run in other jobs, one for each name in it, which folders may share: with the
variables that are set, the numbers of ranks if not all, and files that also run on one rank, such as
`{"jax": {"variables": {"KERAS_BACKEND": "jax"}, "np": [3], "alone": ["test_jax_training.py"]}}`; with `--max-np 4` all
files run on all numbers.

Cases of two ranks are also cases of three, save those of Adasum, whose rule is for a power of two. So few files of the
usual environment run on two ranks: `ON_TWO_RANKS`. TensorFlow runs the tables of tests/conformance on two ranks. An
environment with all of three runs on two with `--max-np 4`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import harness

HERE = Path(__file__).resolve().parent
# The other files of the usual environment run on 1 and 3 ranks, and with `--max-np 4` on all numbers.
ON_TWO_RANKS = ("torch/test_optimizer_adasum.py",)
# Only what hangs reaches it: some jobs take minutes, and a slow machine has others beside them.
LIMIT_S = 2700.0


@dataclass(frozen=True)
class Part:
    """One file in one environment; the usual one has no name."""

    file: Path
    environment: str = ""

    def __str__(self) -> str:
        name = str(self.file.relative_to(HERE / "parallel").with_suffix(""))
        return f"{name}@{self.environment}" if self.environment else name

    def description(self) -> dict[str, Any]:
        """The environment's description."""
        return _environments(self.file).get(self.environment, {})

    def runs_on(self, np: int, is_thorough: bool) -> bool:
        """Whether it runs on so many ranks."""
        described = self.description()
        is_alone = np == 1 and self.file.name in described.get("alone", [])
        return is_thorough or is_alone or np in described.get("np", [np])


def _environments(file: Path) -> dict[str, dict[str, Any]]:
    described = file.with_name("environments.json")
    if described.exists():
        return json.loads(described.read_text())
    on_two = str(file.relative_to(HERE / "parallel")) in ON_TWO_RANKS
    return {"": {"np": [1, 2, 3] if on_two else [1, 3]}}


PARTS = [
    Part(file, environment)
    for file in sorted((HERE / "parallel").rglob("test_*.py"))
    for environment in _environments(file)
]


@dataclass
class Ran:
    """The outcome of a job: for each rank the outcome of each test by file, and the report to show after a failure."""

    code: int
    ranks: list[dict[str, list[tuple[str, str]]]]
    seconds: list[dict[str, list[tuple[str, float]]]]
    """The processor time of each test, by rank and file."""
    report: str


@dataclass(frozen=True)
class JobOf:
    """The key of a job, which runs all requested files of an environment on this number of ranks."""

    np: int
    environment: str

    def __str__(self) -> str:
        return f"np{self.np}@{self.environment}" if self.environment else f"np{self.np}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "ran" not in metafunc.fixturenames:
        return
    sizes = range(1, metafunc.config.getoption("--max-np") + 1)
    pairs = [
        (JobOf(np, part.environment), part)
        for np in sizes
        for part in sorted(PARTS, key=lambda part: (part.environment, part.file))
        if part.runs_on(np, is_thorough=sizes.stop > 4)
    ]
    if "part" in metafunc.fixturenames:
        ids = [f"np{of.np}-{part}" for of, part in pairs]
        metafunc.parametrize(("ran", "part"), pairs, indirect=["ran"], scope="module", ids=ids)
    else:
        metafunc.parametrize(
            "ran", dict.fromkeys(of for of, _ in pairs), indirect=True, scope="module", ids=str
        )


@pytest.fixture(scope="module")
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Run the job; its outcome."""
    of: JobOf = request.param
    asked = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    parts = [p["part"] for p in asked if p.get("ran") == of and "part" in p]
    return _run(of.np, parts, tmp_path_factory.mktemp(f"np{of.np}{of.environment}"))


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
        # The other ranks and the next jobs need not compile these files again after the first rank.
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
        outcomes = [_by_file(folder / f"rank-{rank}.jsonl") for rank in range(np)]
        seconds = [_by_file(folder / f"rank-{rank}.seconds") for rank in range(np)]
        return Ran(code, outcomes, seconds, job.report())
    finally:
        job.close()


def test_on_every_rank(ran: Ran, part: Part, request: pytest.FixtureRequest) -> None:
    file = str(part.file.relative_to(harness.ROOT))
    of_file = [rank.get(file, []) for rank in ran.ranks]
    used = [sum(s for _, s in rank.get(file, [])) for rank in ran.seconds]
    request.node.user_properties.append(("ranks_processor_s", f"{sum(used):.2f}"))

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


def _by_file(report: Path) -> dict[str, list[tuple[str, Any]]]:
    lines = report.read_text().splitlines() if report.exists() else []
    files: dict[str, list[tuple[str, Any]]] = {}
    for name, value in map(json.loads, lines):
        files.setdefault(name.split("::")[0], []).append((name, value))
    return files
