"""How long an elastic job on Spark has fewer ranks when a Python worker or an executor is killed.

    python bench/recovery.py

Two executors on this machine. From the kill to the first step with all ranks, beside the time that the imports of a
rank take; Spark's share is to notice and to start the task, after an executor's death with a Java of its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def ancestors(pid: int) -> list[int]:
    """The parent of a process, its parent, and so on."""
    found = []
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        found.append(pid)
    return found


def work(kill: str, folder: Path) -> dict[str, float]:
    """The program of a rank; returns the times of the kill, of fewer ranks and of all ranks again."""
    import torch

    import horovod.torch as hvd

    hvd.init()

    @hvd.elastic.run
    def train(state: Any) -> dict[str, float]:
        while "whole again" not in state.times:
            hvd.allreduce(torch.ones(2), name="x")
            state.batch += 1
            if state.batch > 5 and hvd.size() == 1:
                state.times = {"alone": time.time(), **state.times}
            if "alone" in state.times and hvd.size() == 2:
                state.times = {"whole again": time.time(), **state.times}
            state.commit()
            if state.batch == 5 and hvd.rank() == 1:
                names = {
                    pid: Path(f"/proc/{pid}/comm").read_text() for pid in ancestors(os.getpid())
                }
                _, python, *others = names
                java = next(pid for pid in others if "java" in names[pid])
                (folder / kill).write_text(str(time.time()))
                os.kill(java if kill == "executor" else python, signal.SIGKILL)
                signal.pause()
        return dict(state.times)

    state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, batch=0, times={})
    return train(state)


def main() -> None:
    """Measure, and print the figures as JSON."""
    from pyspark.sql import SparkSession

    import horovod.spark
    from horovod.spark.conf import SPARK_CONF_ALWAYS_RESTART_FAILED_TASK

    os.environ["PYSPARK_PYTHON"] = sys.executable
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        os.environ["SPARK_WORKER_DIR"] = name
        builder = SparkSession.builder.master("local-cluster[2,1,1024]")
        builder = builder.config(*SPARK_CONF_ALWAYS_RESTART_FAILED_TASK)
        builder = builder.config("spark.ui.enabled", "false").config(
            "spark.executor.memory", "512m"
        )
        session = builder.getOrCreate()
        start = time.time()
        subprocess.run([sys.executable, "-c", "import horovod.torch"], check=True)
        figures["imports_s"] = time.time() - start
        for kill in ("python worker", "executor"):
            times = horovod.spark.run_elastic(work, (kill, Path(name)), num_proc=2, min_num_proc=1)[
                0
            ]
            killed = float((Path(name) / kill).read_text())
            figures[kill] = {
                what: at - killed for what, at in sorted(times.items(), key=lambda item: item[1])
            }
        session.stop()
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
