"""Ranks in tasks of real Spark: one session of two slots, whose tasks may fail."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import signal
import sys
import threading
import time
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import harness
import horovod.spark
from horovod.runner.agents import Invitation
from horovod.runner.common.util.timeout import TimeoutException
from horovod.spark.task import get_available_devices

pytest.importorskip("pyspark")
if shutil.which("java") is None:
    pytest.skip("there is no Java, which Spark needs", allow_module_level=True)

START_S = int(harness.LIMIT_S)


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
        return (
            place,
            total.tolist(),
            os.environ["GREETING"],
            os.getppid(),
            os.environ["HOROVOD_RENDEZVOUS"],
        )

    results = run(work, 2.0, num_proc=2, env={"GREETING": "hello"}, stdout=io.StringIO())
    assert [result[0] for result in results] == [(0, 2, 0, 2, 1), (1, 2, 1, 2, 1)]
    assert [result[1:3] for result in results] == [([6.0] * 3, "hello")] * 2
    # Nothing is left: each rank's parent was an agent of this job.
    assert not any(Path(f"/proc/{result[3]}").exists() for result in results)
    # The master is `local`: no other host has to reach the launcher.
    assert results[0][4].startswith("127.0.0.1:")
    assert "," not in results[0][4]


def test_an_exception_of_a_rank_is_raised_and_the_others_hear_of_it() -> None:
    def work() -> None:
        import numpy as np

        import horovod.numpy as hvd

        hvd.init()
        if hvd.rank() == 1:
            raise KeyError("no such column")
        hvd.allreduce(np.ones(2))

    out = io.StringIO()
    with pytest.raises(KeyError, match="no such column") as raised:
        run(work, num_proc=2, stdout=out, stderr=out)
    assert "horovod.spark.run on rank 1" in raised.value.__notes__[0]
    assert "the script of rank 1 has ended with an exception" in out.getvalue()
    assert "hvd.join()" not in out.getvalue()


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


def test_every_other_parameter(spark: Any) -> None:
    shared = spark.sparkContext.broadcast([4, 5])

    def work(name: str, *, number: int) -> tuple[Any, ...]:
        print("from a rank", file=sys.stderr)
        return name, number, sys.executable, os.environ["GREETING"], shared.value

    python = str(Path(sys.executable).with_name("python3"))
    assert python != sys.executable
    out, err = io.StringIO(), io.StringIO()
    results = horovod.spark.run(
        work,
        args=["a"],
        kwargs={"number": 3},
        num_proc=2,
        start_timeout=START_S,
        use_mpi=False,
        use_gloo=True,
        extra_mpi_args="-x NAME",
        env={"GREETING": "hello"},
        stdout=out,
        stderr=err,
        verbose=2,
        nics=iter(["lo"]),
        prefix_output_with_timestamp=True,
        executable=python,
    )
    assert results == [("a", 3, python, "hello", [4, 5])] * 2
    assert re.search(r"\d:\d\d:\d\d.*\[1\]<stderr>:from a rank", err.getvalue())
    assert "horovodrun: " in err.getvalue()
    with pytest.raises(ValueError, match="no-such-interface"):
        run(work, num_proc=1, nics=["no-such-interface"])


def pause(folder: Path) -> None:
    """The program of a rank that others end: write its process number, and wait for ever."""
    import horovod.numpy as hvd

    hvd.init()
    (folder / f"{hvd.rank()}.part").write_text(str(os.getpid()))
    (folder / f"{hvd.rank()}.part").rename(folder / f"{hvd.rank()}.pid")
    signal.pause()


@contextlib.contextmanager
def when_ranks_pause(folder: Path, act: Callable[[], object]) -> Iterator[None]:
    """Runs `act` when two ranks pause; in the end there are none of them left, and their slots are free."""

    def wait_and_act() -> None:
        deadline = time.monotonic() + harness.LIMIT_S
        while len(list(folder.glob("*.pid"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        act()

    thread = threading.Thread(target=wait_and_act, daemon=True)
    thread.start()
    yield
    thread.join()
    pids = [int(path.read_text()) for path in folder.glob("*.pid")]
    assert len(pids) == 2
    deadline = time.monotonic() + harness.REAP_LIMIT_S
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert len(run(os.getpid, num_proc=2)) == 2


def interrupt() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def test_an_interrupt_ends_all_ranks(tmp_path: Path) -> None:
    with when_ranks_pause(tmp_path, interrupt), pytest.raises(KeyboardInterrupt):
        run(pause, tmp_path, num_proc=2, stderr=io.StringIO())


def test_an_interrupt_ends_an_elastic_job(tmp_path: Path) -> None:
    with when_ranks_pause(tmp_path, interrupt), pytest.raises(KeyboardInterrupt):
        horovod.spark.run_elastic(
            pause, (tmp_path,), num_proc=2, start_timeout=START_S, stderr=io.StringIO()
        )


def test_a_cancelled_stage_ends_all_ranks(spark: Any, tmp_path: Path) -> None:
    def cancel() -> None:
        tracker = spark.sparkContext.statusTracker()
        for stage in tracker.getActiveStageIds():
            spark.sparkContext._jsc.sc().cancelStage(stage)

    err = io.StringIO()
    with (
        when_ranks_pause(tmp_path, cancel),
        pytest.raises(RuntimeError, match=r"horovod\.spark\.run: .*(cancelled|was lost)"),
    ):
        run(pause, tmp_path, num_proc=2, stderr=err)


def test_what_cannot_be_pickled() -> None:
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"horovod\.spark\.run: .* cannot be pickled") as raised:
        run(lambda: lock, num_proc=1)
    assert "make it inside the function" in str(raised.value)
    with pytest.raises(RuntimeError, match=r"rank 0 on host .* cannot be pickled"):
        run(threading.Lock, num_proc=1, stderr=io.StringIO())


def test_a_driver_that_executors_cannot_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    from horovod.spark._tasks import SparkTasks

    start = SparkTasks.start
    monkeypatch.setattr(
        SparkTasks,
        "start",
        # The port 9 of "discard", where nobody listens.
        lambda self, invitation: start(self, Invitation(("127.0.0.1:9",), invitation.key)),
    )
    with pytest.raises(RuntimeError, match=r"task \d on host \S+ cannot reach the") as raised:
        horovod.spark.run(print, num_proc=2, start_timeout=START_S, stderr=io.StringIO())
    assert "127.0.0.1:9" in str(raised.value)
    assert "nics" in str(raised.value)
    # Spark starts the tasks of an elastic job again and again.
    with pytest.raises(TimeoutException, match=r"cannot reach the|not all have reached") as late:
        horovod.spark.run_elastic(print, num_proc=2, start_timeout=20, stderr=io.StringIO())
    assert "of 2 tasks run after 20 s" in str(late.value)
    assert "127.0.0.1:9" in str(late.value)


def test_too_few_slots_for_an_elastic_job() -> None:
    with pytest.raises((TimeoutException, RuntimeError)) as raised:
        horovod.spark.run_elastic(print, num_proc=3, start_timeout=4, stderr=io.StringIO())
    assert re.search(r"[012] of 3 tasks run after 4 s", str(raised.value))
    assert "2 slots" in str(raised.value)


def test_an_elastic_job_whose_members_may_not_change() -> None:
    def work() -> None:
        import numpy as np

        import horovod.numpy as hvd
        from horovod.common import elastic

        hvd.init()

        @elastic.run
        def train(state: Any) -> None:
            while True:
                hvd.allreduce(np.ones(2), name="x")
                state.batch += 1
                state.commit()
                if state.batch == 5 and hvd.rank() == 1:
                    os.kill(os.getpid(), signal.SIGKILL)

        train(elastic.ObjectState(hvd.broadcast_object, hvd.rank, batch=0))

    with pytest.raises(RuntimeError, match=r"--reset-limit 0 allows"):
        horovod.spark.run_elastic(
            work,
            num_proc=2,
            min_num_proc=1,
            reset_limit=0,
            start_timeout=START_S,
            elastic_timeout=START_S,
            stderr=io.StringIO(),
        )


def test_an_executor_with_another_python(spark: Any, tmp_path: Path, monkeypatch: Any) -> None:
    venv.create(tmp_path)
    (site,) = tmp_path.glob("lib/python*/site-packages")
    shared = ";".join(
        f"sys.path.append({place!r})" for place in sys.path if "site-packages" in place
    )
    fields = {"major": 3, "minor": 99, "micro": 0, "releaselevel": "final", "serial": 0}
    other = f"type('version_info', (tuple,), {fields})({tuple(fields.values())})"
    (site / "other.pth").write_text(f"import sys;sys.version_info={other};{shared}\n")
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(tmp_path / "bin" / "python"))
    with pytest.raises(
        RuntimeError, match=r"executors use another Python .*3(\.|, )99.*PYSPARK_PYTHON"
    ):
        run(os.getpid, num_proc=1)


def test_an_executor_whose_python_does_not_start(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'OSError: no such library' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(program))
    with pytest.raises(RuntimeError, match=r"job has failed: .*OSError: no such library") as raised:
        run(os.getpid, num_proc=1)
    assert re.search(r"\(executor driver on host \S+\)", str(raised.value))


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
    with pytest.raises(
        RuntimeError,
        match=r"executors have no horovod-rs: install the wheel .*\(executor driver on host",
    ):
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
