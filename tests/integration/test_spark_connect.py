"""Ranks on a server of Spark Connect that is a process of its own: one server of two slots, and one session."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import harness
import horovod.spark
import spark_servers
from horovod.runner.common.util.timeout import TimeoutException

pytest.importorskip("pyspark")
pytest.importorskip("grpc")
if shutil.which("java") is None:
    pytest.skip("there is no Java, which Spark needs", allow_module_level=True)


@pytest.fixture(scope="module", autouse=True)
def log(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The output of the server and the ranks."""
    from pyspark.sql import SparkSession

    with (
        # A session of Connect makes PySpark take every later one of the process for one, by the environment.
        mock.patch.dict(os.environ),
        spark_servers.connect_server(tmp_path_factory.mktemp("connect")) as (address, log),
    ):
        session = SparkSession.builder.remote(address).getOrCreate()
        yield log
        session.stop()


def run(fn: Any, *args: Any, **options: Any) -> list[Any]:
    return horovod.spark.run(fn, args, start_timeout=spark_servers.START_S, **options)


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_results_come_in_the_order_of_ranks(log: Path) -> None:
    def work(factor: float) -> tuple[Any, ...]:
        import numpy as np

        import horovod.numpy as hvd

        hvd.init()
        total = hvd.allreduce(np.ones(3) * factor * (hvd.rank() + 1), op=hvd.Sum)
        print("hello from a rank", flush=True)
        place = hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_size()
        return (
            place,
            total.tolist(),
            os.environ["GREETING"],
            os.getpid(),
            bytes(3 << 20),
            os.environ["HOROVOD_RENDEZVOUS"],
        )

    out = io.StringIO()
    # As many ranks as the server has slots.
    results = run(work, 2.0, env={"GREETING": "hello", "HOME": None}, stdout=out)
    assert [result[0] for result in results] == [(0, 2, 0, 2, 1), (1, 2, 1, 2, 1)]
    assert [result[1:3] for result in results] == [([6.0] * 3, "hello")] * 2
    assert [result[4] for result in results] == [bytes(3 << 20)] * 2
    assert not any(is_alive(result[3]) for result in results)
    # All tasks are on one host.
    assert results[0][5].startswith("127.0.0.1:")
    assert "," not in results[0][5]
    for rank in range(2):
        assert f"[{rank}]<stdout>:hello from a rank\n" in out.getvalue()
        assert f"[{rank}]<stdout>:hello from a rank\n" in log.read_text()


def test_an_exception_of_a_rank_is_raised() -> None:
    def work() -> None:
        import horovod.numpy as hvd

        hvd.init()
        if hvd.rank() == 1:
            raise KeyError("no such column")
        hvd.barrier()

    out = io.StringIO()
    with pytest.raises(KeyError, match="no such column") as raised:
        run(work, num_proc=2, stdout=out, stderr=out)
    assert "horovod.spark.run on rank 1" in raised.value.__notes__[0]
    assert "in work" in str(raised.value.__cause__)
    assert "rank 1 on host" in out.getvalue()
    assert "the script of rank 1 has ended with an exception" in out.getvalue()
    assert "hvd.join()" not in out.getvalue()


def test_a_killed_rank_is_named() -> None:
    def work() -> None:
        import horovod.numpy as hvd

        hvd.init()
        if hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.barrier()

    with pytest.raises(RuntimeError, match=r"rank 1 on .*killed by signal 9"):
        run(work, num_proc=2, stderr=io.StringIO())


def test_too_few_slots_are_told_in_time() -> None:
    with pytest.raises(TimeoutException, match="0 of 3 tasks run after 1 s"):
        horovod.spark.run(os.getpid, num_proc=3, start_timeout=1)


def test_an_interrupt_ends_the_operation_and_all_ranks(tmp_path: Path) -> None:
    def work() -> None:
        import horovod.numpy as hvd

        hvd.init()
        (tmp_path / f"{hvd.rank()}.part").write_text(str(os.getpid()))
        (tmp_path / f"{hvd.rank()}.part").rename(tmp_path / f"{hvd.rank()}.pid")
        signal.pause()

    def interrupt() -> None:
        deadline = time.monotonic() + harness.LIMIT_S
        while len(list(tmp_path.glob("*.pid"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run(work, num_proc=2)
    pids = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
    assert len(pids) == 2
    deadline = time.monotonic() + harness.REAP_LIMIT_S
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    # Its slots are free again.
    assert len(run(os.getpid, num_proc=2)) == 2


def test_what_cannot_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = threading.Lock()
    with pytest.raises(TypeError, match="pickle"):
        run(lambda: lock, num_proc=1)
    with pytest.raises(RuntimeError, match=r"rank 0 on host .* cannot be pickled"):
        run(threading.Lock, num_proc=1, stderr=io.StringIO())
    monkeypatch.setattr("horovod.spark._connect._CALL_SIZE_MAX", 1 << 20)
    with pytest.raises(ValueError, match="the function and its arguments take 2 MiB"):
        run(len, bytes(2 << 20), num_proc=1)


def test_wrong_calls() -> None:
    with pytest.raises(TypeError, match="expected a function"):
        run(3)
    with pytest.raises(ValueError, match="num_proc: expected a whole number"):
        run(print, num_proc=0)
    with pytest.raises(RuntimeError, match="Spark Connect cannot run elastic jobs"):
        horovod.spark.run_elastic(print, num_proc=2)


def test_another_version_on_the_executors_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horovod.__version__", "0.0.1")
    with pytest.raises(RuntimeError, match=r"task 0 on host .* the driver has 0\.0\.1: install"):
        run(os.getpid, num_proc=1)


def test_horovod_runner(capsys: pytest.CaptureFixture[str]) -> None:
    def main(base: int) -> int:
        from horovod.spark import log_to_driver

        print("this is not for the driver")
        log_to_driver("this is")
        return base

    assert horovod.spark.HorovodRunner(np=1).run(main, base=10) == 10
    assert capsys.readouterr().out == "this is\n"
