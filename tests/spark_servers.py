"""Spark servers as processes of their own: of Connect, and standalone masters with workers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
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
START_S = 240


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
