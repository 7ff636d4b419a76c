"""Spark servers as processes of their own: of Connect, and standalone masters with workers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import harness

# Prints its address when it listens, and ends with its standard input.
_CONNECT = """
import sys
from pyspark.sql import SparkSession
builder = SparkSession.builder.master(sys.argv[1]).config("spark.ui.enabled", "false")
builder = builder.config("spark.driver.memory", "1g").config("spark.local.dir", sys.argv[2])
builder = builder.config("spark.plugins", "org.apache.spark.sql.connect.SparkConnectPlugin")
builder = builder.config("spark.connect.grpc.binding.port", "0")
session = builder.getOrCreate()
package = session.sparkContext._jvm.org.apache.spark.sql.connect.service
service = getattr(getattr(package, "SparkConnectService$"), "MODULE$")
print(f"sc://127.0.0.1:{service.localPort()}", flush=True)
sys.stdin.read()
session.stop()
"""
START_S = int(harness.LIMIT_S)


@contextlib.contextmanager
def connect_server(folder: Path, master: str = "local[2]") -> Iterator[tuple[str, Path]]:
    """Address of a server of Spark Connect, and the file with what it and its tasks print."""
    log = folder / "server.log"
    with log.open("wb") as err:
        server = subprocess.Popen(
            [sys.executable, "-c", _CONNECT, master, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=err,
            cwd=folder,
            env={**os.environ, "PYSPARK_PYTHON": sys.executable},
            start_new_session=True,
        )
    try:
        assert server.stdout is not None
        address = server.stdout.readline().decode().strip()
        assert address, log.read_text()
        yield address, log
    finally:
        assert server.stdin is not None
        server.stdin.close()
        try:
            server.wait(harness.REAP_LIMIT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)


@contextlib.contextmanager
def standalone_cluster(folder: Path, workers: int, cores: int, gpus: int = 0) -> Iterator[str]:
    """Address of a standalone master on this host, with so many workers of so many cores and GPUs each.

    The GPUs are numbers that Spark hands out: worker `n` has those from `n * gpus` on.
    """
    import pyspark

    program = Path(pyspark.__file__).parent / "bin" / "spark-class"
    package = "org.apache.spark.deploy"
    env = {
        **os.environ,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_MEMORY": "256m",
        "PYSPARK_PYTHON": sys.executable,
    }
    servers: list[subprocess.Popen[bytes]] = []

    def start(name: str, *words: str) -> Path:
        log = folder / f"{name}.log"
        common = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
        with log.open("wb") as out:
            command = [program, *words, *common]
            servers.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    env=env,
                    start_new_session=True,
                )
            )
        return log

    def wait_for(pattern: str, log: Path) -> str:
        deadline = time.monotonic() + START_S
        while (found := re.search(pattern, log.read_text())) is None:
            has_ended = any(server.poll() is not None for server in servers)
            assert time.monotonic() < deadline, log.read_text()
            assert not has_ended, log.read_text()
            time.sleep(0.1)
        return found[0]

    try:
        address = wait_for(r"spark://127\.0\.0\.1:\d+", start("master", f"{package}.master.Master"))
        for number in range(workers):
            home = folder / f"worker{number}"
            size = ["--cores", str(cores), "--memory", "1g", "--work-dir", str(home)]
            if gpus:
                own = list(range(number * gpus, (number + 1) * gpus))
                size += ["--properties-file", str(_with_gpus(folder / f"gpus{number}", own))]
            log = start(home.name, f"{package}.worker.Worker", *size, address)
            wait_for("Successfully registered with master", log)
        yield address
    finally:
        for server in servers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _with_gpus(folder: Path, addresses: list[int]) -> Path:
    """Settings of a worker whose script finds these GPUs."""
    folder.mkdir()
    script = folder / "discover"
    found = json.dumps({"name": "gpu", "addresses": [str(address) for address in addresses]})
    script.write_text(f"#!/bin/sh\necho '{found}'\n")
    script.chmod(0o755)
    settings = folder / "worker.conf"
    prefix = "spark.worker.resource.gpu"
    settings.write_text(f"{prefix}.amount {len(addresses)}\n{prefix}.discoveryScript {script}\n")
    return settings
