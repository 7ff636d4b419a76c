"""Autotuning as users switch it on: options, log file, log lines, right results, a fresh start after shutdown."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

import harness

#: Every operation that the tuned numbers shape, checked in every step; then a second life of the job.
SCRIPT = """
import sys
import numpy as np
import horovod.numpy as hvd

def step(n):
    r, s = hvd.rank(), hvd.size()
    ranks = np.arange(s, dtype=np.float32) + 1
    handles = [hvd.allreduce_async(np.full(k, float(r + 1 + n % 5), np.float32), name=f"g{k}", op=hvd.Sum)
               for k in (1, 3000, 50_000, 400_000)]
    for h in handles:
        assert np.all(hvd.synchronize(h) == (ranks + n % 5).sum())
    assert np.all(hvd.broadcast(np.full(100_000, float(r * 10 + n), np.float32), 0, name="b") == n)
    gathered = hvd.allgather(np.full(20_000, float(r), np.float32), name="a")
    assert np.array_equal(gathered, np.arange(s, dtype=np.float32).repeat(20_000))
    part = hvd.reducescatter(np.full(30_000, float(r), np.float32), name="r", op=hvd.Sum)
    assert np.all(part == s * (s - 1) / 2)

for life in range(2):
    hvd.init()
    for n in range(int(sys.argv[1])):
        step(n)
    hvd.shutdown()
    if life == 0:
        import os, shutil
        log = os.environ["HOROVOD_AUTOTUNE_LOG"]
        if os.environ["HOROVOD_RANK"] == "0":
            shutil.copy(log, log + ".first")
"""

COLUMNS = [
    *["hierarchical_allreduce", "hierarchical_allgather", "torus_allreduce", "cache_enabled"],
    *["cycle_time_ms", "tensor_fusion_threshold", "score"],
    *["chunk_bytes", "direct_max_bytes", "exchange_max_bytes", "wire_chunk_bytes", "phase"],
]


def rows(log: Path) -> list[dict[str, str]]:
    lines = log.read_text().splitlines()
    assert lines[0].split(",") == COLUMNS
    assert " " not in "".join(lines)
    return list(csv.DictReader(lines))


def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


ON_THREE = pytest.mark.thorough(
    also="tests/integration/test_autotune.py::test_tunes_while_results_stay_right_and_begins_anew_after_shutdown"
)


@pytest.mark.parametrize("np", [2, pytest.param(3, marks=ON_THREE)])
def test_tunes_while_results_stay_right_and_begins_anew_after_shutdown(
    np: int, jobs, tmp_path: Path
) -> None:
    log = tmp_path / "autotune.csv"
    options = ["--autotune", "--autotune-log-file", str(log), "--autotune-warmup-samples", "1"]
    options += ["--autotune-steps-per-sample", "1", "--autotune-bayes-opt-max-samples", "6"]
    options += ["--log-level", "INFO"]
    job = jobs(harness.python(np, script(tmp_path), "320", options=options)).succeed()
    for path in (log, Path(f"{log}.first")):
        table = rows(path)
        assert table[0]["cycle_time_ms"] == "0"
        assert table[0]["tensor_fusion_threshold"] == "128"
        assert table[0]["phase"] == "search"
        assert [row["phase"] for row in table].count("best") == 1
        assert table[-1]["phase"] == "best"
        assert all(float(row["score"]) > 0 for row in table)
        assert (
            len({tuple(row[c] for c in COLUMNS if c not in ("score", "phase")) for row in table})
            > 1
        )
    text = job.stdout + job.stderr
    tunable = "cycle_time_ms,chunk_bytes,direct_max_bytes"
    assert f"Autotuner: Tunable params [tensor_fusion_threshold,{tunable}] score" in text
    assert "Autotuner: Warming up (1 remaining)" in text
    assert text.count("Autotuner: Best params [") == 2
    assert "before tuning did" not in text


def test_a_job_that_is_too_short_says_so(jobs, tmp_path: Path) -> None:
    options = ["--autotune", "--autotune-log-file", str(tmp_path / "autotune.csv")]
    job = jobs(harness.python(1, script(tmp_path), "1", options=options)).succeed()
    # Once in each life of the job.
    assert job.stderr.count("Autotuner: the job ended before tuning did") == 2, job.report()


def test_what_the_user_has_set_stays(jobs, tmp_path: Path) -> None:
    log = tmp_path / "autotune.csv"
    options = ["--autotune", "--autotune-log-file", str(log), "--autotune-warmup-samples", "0"]
    options += ["--autotune-steps-per-sample", "1", "--autotune-bayes-opt-max-samples", "4"]
    options += ["--fusion-threshold-mb", "2", "--cycle-time-ms", "0.1"]
    jobs(harness.python(2, script(tmp_path), "200", options=options)).succeed()
    table = rows(log)
    assert len(table) > 2
    fixed = {(row["cycle_time_ms"], row["tensor_fusion_threshold"]) for row in table}
    assert fixed == {("0.1", "2")}
    assert len({row["chunk_bytes"] for row in table}) > 1


def test_is_off_unless_asked_for(jobs, tmp_path: Path) -> None:
    log = tmp_path / "autotune.csv"
    options = ["--autotune-log-file", str(log)]
    show = "import os; print([n for n in os.environ if n.startswith('HOROVOD_AUTOTUNE')])"
    job = jobs(harness.horovodrun(1, [sys.executable, "-c", show], *options)).succeed()
    assert "[]" in job.stdout
    assert not log.exists()


def test_a_bad_value_is_refused(jobs) -> None:
    options = ["--autotune", "--autotune-gaussian-process-noise", "1.5"]
    job = jobs(harness.horovodrun(1, ["true"], *options))
    assert job.fail() == 2
    assert "must be in [0, 1]" in job.stderr
