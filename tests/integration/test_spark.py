"""Ranks in tasks of real Spark: one session of two slots, whose tasks may fail."""

from __future__ import annotations

import io
import os
import shutil
import signal
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import horovod.spark
from horovod.runner.common.util.timeout import TimeoutException
from horovod.spark.task import get_available_devices

pytest.importorskip("pyspark")
if shutil.which("java") is None:
    pytest.skip("there is no Java, which Spark needs", allow_module_level=True)

START_S = 240


@pytest.fixture(scope="module", autouse=True)
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from pyspark.sql import SparkSession

    folder = tmp_path_factory.mktemp("spark")
    os.environ["PYSPARK_PYTHON"] = sys.executable
    session = (
        SparkSession.builder.master("local[2,8]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "1g")
        .config("spark.local.dir", str(folder))
        .getOrCreate()
    )
    yield session
    session.stop()


def run(fn: Any, *args: Any, **options: Any) -> list[Any]:
    return horovod.spark.run(fn, args, start_timeout=START_S, **options)


def test_results_come_in_the_order_of_ranks() -> None:
    def work(factor: float) -> tuple[Any, ...]:
        import numpy as np

        import horovod.numpy as hvd

        hvd.init()
        total = hvd.allreduce(np.ones(3) * factor * (hvd.rank() + 1), op=hvd.Sum)
        place = hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_size()
        return place, total.tolist(), os.environ["GREETING"], os.getppid()

    results = run(work, 2.0, num_proc=2, env={"GREETING": "hello"}, stdout=io.StringIO())
    assert [result[0] for result in results] == [(0, 2, 0, 2, 1), (1, 2, 1, 2, 1)]
    assert [result[1:3] for result in results] == [([6.0] * 3, "hello")] * 2
    # Nothing is left: each rank's parent was an agent of this job.
    assert not any(Path(f"/proc/{result[3]}").exists() for result in results)


def test_an_exception_of_a_rank_is_raised() -> None:
    def work() -> None:
        import horovod.numpy as hvd

        hvd.init()
        if hvd.rank() == 1:
            raise KeyError("no such column")

    out = io.StringIO()
    with pytest.raises(KeyError, match="no such column") as raised:
        run(work, num_proc=2, stdout=out, stderr=out)
    assert "horovod.spark.run on rank 1" in raised.value.__notes__[0]


def test_too_few_slots_are_told_in_time() -> None:
    with pytest.raises(
        TimeoutException, match="Timed out waiting for Spark tasks to start"
    ) as raised:
        horovod.spark.run(print, num_proc=3, start_timeout=2, stderr=io.StringIO())
    assert "0 of 3 tasks run after 2 s" in str(raised.value)
    assert "2 slots" in str(raised.value)


def test_wrong_calls() -> None:
    with pytest.raises(TypeError, match="expected a function"):
        run(3)
    with pytest.raises(ValueError, match="num_proc: expected a whole number"):
        run(print, num_proc=0)
    with pytest.raises(ValueError, match="min_num_proc <= num_proc <= max_num_proc"):
        horovod.spark.run_elastic(print, num_proc=2, max_num_proc=1)
    with pytest.raises(ValueError, match="expected at least 1 second"):
        horovod.spark.run(print, start_timeout=0)


def test_gpus_of_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    assert get_available_devices() == []
    monkeypatch.setenv("HOROVOD_SPARK_GPU_ADDRESSES", "2,3")
    assert get_available_devices() == ["2", "3"]


def test_an_elastic_job_goes_on_with_the_task_that_spark_starts_again(tmp_path: Path) -> None:
    def work(folder: Path) -> tuple[int, int, int]:
        import numpy as np

        import horovod.numpy as hvd
        from horovod.common import elastic

        hvd.init()

        @elastic.run
        def train(state: Any) -> int:
            killed = folder / "killed"
            while state.batch < 20 or hvd.size() < 2 or not killed.exists():
                hvd.allreduce(np.ones(2), name="x")
                state.batch += 1
                state.commit()
                if state.batch == 5 and hvd.rank() == 1 and not killed.exists():
                    killed.touch()
                    # The agent's parent: the Python of the task.
                    agent = Path(f"/proc/{os.getppid()}/stat").read_text()
                    os.kill(int(agent.rpartition(")")[2].split()[1]), signal.SIGKILL)
                    # Else both could finish before the agent has noticed.
                    signal.pause()
            return int(state.batch)

        state = elastic.ObjectState(hvd.broadcast_object, hvd.rank, batch=0)
        return train(state), hvd.rank(), hvd.size()

    err = io.StringIO()
    results = horovod.spark.run_elastic(
        work,
        (tmp_path,),
        num_proc=2,
        min_num_proc=1,
        start_timeout=START_S,
        elastic_timeout=START_S,
        stderr=err,
    )
    assert sorted(result[1:] for result in results) == [(0, 2), (1, 2)], err.getvalue()
    assert results[0][0] == results[1][0] >= 20
    assert "was lost" in err.getvalue()


def test_none_removes_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> list[str | None]:
        return [os.environ.get(name) for name in ("KEPT", "REMOVED")]

    monkeypatch.setenv("KEPT", "kept")
    monkeypatch.setenv("REMOVED", "of the driver")
    assert run(work, num_proc=1) == [["kept", "of the driver"]]
    assert run(work, num_proc=1, env={"REMOVED": None}) == [["kept", None]]


def test_another_version_on_the_executors_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horovod.spark._tasks.__version__", "0.0.1")
    with pytest.raises(RuntimeError, match=r"task 0 on host .* the driver has 0\.0\.1: install"):
        run(os.getpid, num_proc=1)


def test_executors_without_the_package_are_told(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv.create(tmp_path)
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(tmp_path / "bin" / "python"))
    with pytest.raises(RuntimeError, match="executors have no horovod-rs: install the wheel"):
        run(os.getpid, num_proc=1)


def test_horovod_runner(capsys: pytest.CaptureFixture[str]) -> None:
    def main(base: int) -> int:
        import horovod.numpy as hvd
        from horovod.spark import log_to_driver

        hvd.init()
        print("this is not for the driver")
        if hvd.rank() == 0:
            log_to_driver("first\nsecond")
        return base + hvd.size()

    assert horovod.spark.HorovodRunner(np=2).run(main, base=10) == 12
    out = capsys.readouterr().out
    assert "first\nsecond\n" in out
    assert "not for the driver" not in out
    assert horovod.spark.HorovodRunner(np=2, driver_log_verbosity="all").run(main, base=1) == 3
    out = capsys.readouterr().out
    assert "[1]<stdout>:this is not for the driver" in out
    assert "[0]<stdout>:first\n[0]<stdout>:second\n" in out
    assert horovod.spark.HorovodRunner(np=-1).run(main, base=1) == 2
    assert "first\n[0]<stdout>:second\n" in capsys.readouterr().out
    with pytest.raises(TypeError):
        horovod.spark.HorovodRunner(2)  # type: ignore[misc]
    with pytest.raises(ValueError, match="driver_log_verbosity"):
        horovod.spark.HorovodRunner(np=1, driver_log_verbosity="some")
    with pytest.warns(DeprecationWarning, match="np=0"):
        assert horovod.spark.HorovodRunner(np=0).run(main, base=0) == 2
