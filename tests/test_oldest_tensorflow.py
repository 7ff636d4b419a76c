"""`horovod.tensorflow` with the oldest TensorFlow that it takes, in an environment of its own.

`make .stamps/tensorflow-oldest` makes it from requirements-tensorflow-oldest.txt; `HVD_OLDEST_TENSORFLOW_PYTHON` names
another interpreter. Ranks import the same `horovod` as all other tests, through a folder that holds nothing else.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import harness
import horovod

PYTHON = Path(
    os.environ.get(
        "HVD_OLDEST_TENSORFLOW_PYTHON",
        harness.ROOT / ".venv-tensorflow-oldest" / "bin" / "python",
    )
)
FILES = harness.TESTS / "parallel" / "tensorflow"

# Keras 3 came later, and XLA's foreign functions, which jit_compile=True needs.
LATER = [
    "test_jit.py",
    "test_jit_conformance.py",
    "test_tf_elastic_state.py",
    "test_tf_sync_batch_norm.py",
]
SHORT = [
    "test_ops.py",
    "test_ops_graphs.py",
    "test_tf_conformance.py",
    "test_tf_tape.py",
    "test_tf_v1_optimizers.py",
]
ALL = sorted(file.name for file in FILES.glob("test_*.py") if file.name not in LATER)

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason=f"the oldest TensorFlow's environment is not there: {PYTHON}"
)


# With the newest TensorFlow all modes run in the first tier, and test_ops_graphs.py has graphs of the oldest.
EAGERLY = ("-k", "not (TestTensorFlow and (function or session))")


def check(np: int, files: list[str], jobs, tmp_path: Path, *options: str) -> None:
    (tmp_path / "horovod").symlink_to(Path(horovod.__file__).parent)
    words = ["-x", "-q", "--tb=short", "--disable-warnings", "-p", "no:cacheprovider"]
    words += ["-p", "rank_report"]
    env = {
        "PYTHONPATH": f"{harness.RANK_SITE}:{tmp_path}",
        "HVD_TEST_REPORT": str(tmp_path),
        "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    command = [PYTHON, "-m", "pytest", *words, *options, *[FILES / file for file in files]]
    jobs(harness.horovodrun(np, command, env=env, cwd=harness.ROOT)).succeed()
    ranks = [(tmp_path / f"rank-{rank}.jsonl").read_text() for rank in range(np)]
    assert ranks[0].count('"passed"') > 30
    assert ranks == ranks[:1] * np, "ranks ran different tests"


def test_on_two_ranks(jobs, tmp_path: Path) -> None:
    check(2, SHORT, jobs, tmp_path, *EAGERLY)


@pytest.mark.thorough(also="tests/test_oldest_tensorflow.py::test_on_two_ranks")
@pytest.mark.parametrize("np", [1, 2, 3])
def test_everything(np: int, jobs, tmp_path: Path) -> None:
    check(np, ALL, jobs, tmp_path)
