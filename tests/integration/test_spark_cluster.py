"""Ranks on a real cluster of Spark: a standalone master with two workers, an executor in each."""

from __future__ import annotations

import contextlib
import io
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import pytest

import harness
import horovod.spark
import spark_servers

pytest.importorskip("pyspark")
if shutil.which("java") is None:
    pytest.skip("there is no Java, which Spark needs", allow_module_level=True)

START_S = spark_servers.START_S


@pytest.fixture(scope="module", autouse=True)
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from pyspark.sql import SparkSession

    folder = tmp_path_factory.mktemp("cluster")
    os.environ["PYSPARK_PYTHON"] = sys.executable
    with spark_servers.standalone_cluster(folder, workers=2, cores=2, gpus=2) as address:
        session = (
            SparkSession.builder.master(address)
            .config("spark.ui.enabled", "false")
            .config("spark.driver.memory", "1g")
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.executor.memory", "512m")
            .config("spark.cores.max", "2")
            .config("spark.executor.cores", "1")
            .config("spark.executor.resource.gpu.amount", "1")
            .config("spark.task.resource.gpu.amount", "1")
            .config("spark.task.maxFailures", "8")
            .config("spark.local.dir", str(folder))
            .config("spark.executorEnv.PYTHONPATH", os.pathsep.join(sys.path))
            # For ranks that others than this package start.
            .config("spark.executorEnv.HOROVOD_JOB_KEY", secrets.token_hex(32))
            .getOrCreate()
        )
        yield session
        session.stop()


OTHER_APPLICATION = """
import pickle
from pyspark.sql import SparkSession
import horovod.spark
builder = SparkSession.builder
for name, value in {conf!r}.items():
    builder = builder.config(name, value)
session = builder.getOrCreate()
work = pickle.loads({work!r})
results = horovod.spark.run(work, ({socket_path!r},), num_proc=2)
print(results)
session.stop()
"""


def place() -> dict[str, Any]:
    """Where a rank is."""
    import horovod.numpy as hvd

    return {
        "place": (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_size()),
        "cwd": os.getcwd(),
    }


def kill_executor() -> None:
    """SIGKILL the Java that is this rank's executor."""
    pid = os.getpid()
    while Path(f"/proc/{pid}/comm").read_text().strip() != "java":
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(pid, signal.SIGKILL)


def test_ranks_of_two_executors_of_one_machine_share_it(spark: Any) -> None:
    def work() -> Any:
        import numpy as np

        import horovod.numpy as hvd

        hvd.init()
        total = hvd.allreduce(np.ones(1 << 16) * hvd.rank(), op=hvd.Sum)
        return place(), float(total.sum())

    results = horovod.spark.run(work, num_proc=2, start_timeout=START_S)
    assert [result[0]["place"] for result in results] == [(0, 2, 0, 2, 1), (1, 2, 1, 2, 1)]
    assert [result[1] for result in results] == [65536.0, 65536.0]
    # The working directory of a rank is that of its executor.
    folders = [result[0]["cwd"] for result in results]
    assert len(set(folders)) == 2
    assert all(re.search(r"/worker[01]/app-[^/]+/\d+$", folder) for folder in folders)


def test_each_rank_has_the_gpus_of_its_task() -> None:
    def work() -> Any:
        import horovod.numpy as hvd
        from horovod.spark.common.job import gpu_of_rank
        from horovod.spark.task import get_available_devices

        hvd.init()
        return get_available_devices(), gpu_of_rank(hvd.local_rank()), os.getcwd()

    results = horovod.spark.run(work, num_proc=2, start_timeout=START_S)
    for devices, chosen, cwd in results:
        (device,) = devices
        worker = re.search(r"/worker(\d)/", cwd)
        assert worker
        # Each worker has two of its own.
        assert int(device) // 2 == int(worker[1])
        assert chosen == int(device)
    assert results[0][0] != results[1][0]


@pytest.mark.thorough(
    also="tests/integration/test_spark_cluster.py::test_two_jobs_at_once_of_one_application"
)
def test_two_applications_at_once(spark: Any) -> None:
    def work(socket_path: str) -> tuple[int, float]:
        """Ends when the ranks of the other application run, too."""
        import numpy as np

        import horovod.numpy as hvd

        hvd.init()
        with socket.socket(socket.AF_UNIX) as own:
            own.settimeout(START_S)
            own.connect(socket_path)
            if own.recv(1) != b".":
                raise RuntimeError(f"the other application did not run within {START_S} s")
        return hvd.size(), float(hvd.allreduce(np.ones(1), op=hvd.Sum)[0])

    def meet(listener: socket.socket) -> None:
        """All four ranks go on when all four are here."""
        with contextlib.ExitStack() as stack:
            ranks = [stack.enter_context(listener.accept()[0]) for _ in range(4)]
            for rank in ranks:
                rank.sendall(b".")

    conf = dict(spark.sparkContext.getConf().getAll())
    del conf["spark.app.id"], conf["spark.driver.port"], conf["spark.app.startTime"]
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        socket_path = f"{folder}/ranks.sock"
        listener.bind(socket_path)
        listener.listen(4)
        listener.settimeout(START_S)
        threading.Thread(target=meet, args=[listener], daemon=True).start()
        program = OTHER_APPLICATION.format(
            conf=conf, work=cloudpickle.dumps(work), socket_path=socket_path
        )
        with harness.Job([sys.executable, "-c", program], limit_s=START_S) as other:
            results = horovod.spark.run(work, (socket_path,), num_proc=2, start_timeout=START_S)
            other.succeed()
    assert results == [(2, 2.0)] * 2
    assert "[(2, 2.0), (2, 2.0)]" in other.stdout


@pytest.mark.thorough(also="tests/integration/test_schedulers.py::test_torchrun")
def test_users_inside_torch_distributor_find_their_ranks() -> None:
    from pyspark.ml.torch.distributor import TorchDistributor

    def work() -> Any:
        import numpy as np

        import horovod.numpy as hvd

        hvd.init()
        return (
            hvd.rank(),
            hvd.size(),
            hvd.local_size(),
            float(hvd.allreduce(np.ones(1), op=hvd.Sum)[0]),
        )

    distributor = TorchDistributor(num_processes=2, local_mode=False, use_gpu=False)
    assert distributor.run(work) == (0, 2, 2, 2.0)


def test_a_killed_executor_ends_a_job_of_fixed_size() -> None:
    def work() -> None:
        import numpy as np

        import horovod.numpy as hvd

        hvd.init()
        if hvd.rank() == 1:
            kill_executor()
            signal.pause()
        hvd.allreduce(np.ones(2), name="with rank 1")

    err = io.StringIO()
    with pytest.raises(RuntimeError, match="rank 1"):
        horovod.spark.run(work, num_proc=2, start_timeout=START_S, stderr=err)
    assert "rank 1 on host" in err.getvalue()
    assert "was lost" in err.getvalue()


def test_an_elastic_job_goes_on_when_an_executor_is_killed(tmp_path: Path) -> None:
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
                    kill_executor()
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


def test_two_jobs_at_once_of_one_application() -> None:
    def work(number: int) -> tuple[int, float]:
        import numpy as np

        import horovod.numpy as hvd

        hvd.init()
        return hvd.size(), float(hvd.allreduce(np.ones(1) * number, op=hvd.Sum)[0])

    results: dict[int, Any] = {}

    def call(number: int) -> None:
        results[number] = horovod.spark.run(work, (number,), num_proc=1, start_timeout=START_S)

    threads = [threading.Thread(target=call, args=[number]) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(START_S)
    assert results == {1: [(1, 1.0)], 2: [(1, 2.0)]}
