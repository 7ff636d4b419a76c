"""A tf.data service between two real jobs: one computes, the other trains."""

import sys
from pathlib import Path

import pytest

import harness

TRAINING = Path(__file__).with_name("data_service_training.py")
WORKER = [sys.executable, "-m", "horovod.tensorflow.data.compute_worker"]


@pytest.mark.parametrize(
    ("side", "dispatchers", "mode"),
    [("compute", 1, "shared"), ("training", 2, "separate")],
)
def test_one_job_computes_what_another_trains_on(
    tmp_path: Path, side: str, dispatchers: int, mode: str
) -> None:
    file = tmp_path / "service.json"
    options = ["--dispatchers", str(dispatchers), "--dispatcher-side", side, "--timeout", "240"]
    with harness.horovodrun(2, [*WORKER, file, *options], forked=True) as compute:
        with harness.python(2, TRAINING, str(file), mode, forked=True) as training:
            training.succeed()
            assert len(training.wait_for("was given")) >= 1
        compute.succeed()
    assert file.stat().st_mode & 0o077 == 0, "others can read the key"


def test_ranks_that_no_group_fits_are_refused(tmp_path: Path) -> None:
    with harness.horovodrun(
        1, [*WORKER, tmp_path / "service.json", "--dispatchers", "2"]
    ) as compute:
        assert compute.wait() == 1
        assert "must be a multiple of number of dispatchers (2)" in compute.stderr
