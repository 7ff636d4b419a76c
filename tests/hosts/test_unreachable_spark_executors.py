"""Spark executors that cannot connect to each other or to the driver: the error says what was tried."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import network
import pytest

import harness

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.thorough(
        also="tests/hosts/test_unreachable_hosts.py::test_a_firewall_between_ranks_alone"
    ),
]
pyspark = pytest.importorskip("pyspark")
if shutil.which("java") is None:
    pytest.skip("NOT RUN: there is no Java, which Spark needs", allow_module_level=True)
HOSTS = 3
# Spark listens below 10000, and `network.Host.swallow` lets pass what goes there.
MASTER_PORT, WORKER_PORT, DRIVER_PORT, BLOCKS_PORT = 7077, 7177, 7277, 7377

DRIVER = """
import os, sys
import horovod.spark
from pyspark.sql import SparkSession

address, master, path, *conf = sys.argv[1:]
builder = SparkSession.builder.master(master)
for word in conf:
    builder = builder.config(*word.split("=", 1))
context = builder.getOrCreate().sparkContext

def where(parts):
    import socket
    yield socket.gethostname()

def work():
    import os
    import horovod.numpy as hvd

    try:
        hvd.init()
    except Exception as error:
        rank = os.environ["HOROVOD_RANK"]
        os.write(1, f"rank {rank} caught {type(error).__name__}: {error}\\n".encode())  # in one piece
        raise

# In a barrier stage both executors run.
slots = context.range(0, 2, numSlices=2).barrier()
print("executors on", *sorted(slots.mapPartitions(where).collect()), flush=True)
open(path).read()
try:
    horovod.spark.run(work, num_proc=2, start_timeout=600, env={"HOROVOD_GLOO_TIMEOUT_SECONDS": "3600"})
except Exception as error:
    print(f"the driver caught {type(error).__name__}: {error}", flush=True)
    raise
"""


@pytest.fixture
def driver(net: network.Network, jobs, script, tmp_path: Path):
    """Starts a driver on the first host, an executor on each of the others; `go_on` lets the driver call the ranks."""
    program = Path(pyspark.__file__).parent / "bin" / "spark-class"
    first, *others = net.hosts
    env = {"SPARK_DAEMON_MEMORY": "256m", "PYSPARK_PYTHON": sys.executable}

    def serve(host: network.Host, name: str, port: int, *words: str) -> harness.Job:
        common = ["--host", host.address, "--port", str(port), "--webui-port", "0"]
        command = [program, f"org.apache.spark.deploy.{name}", *words, *common]
        return jobs(harness.Job(host.enter(command), env={**env, "SPARK_LOCAL_IP": host.address}))

    serve(first, "master.Master", MASTER_PORT).wait_for("I have been elected leader")
    master = f"spark://{first.address}:{MASTER_PORT}"
    size = ["--cores", "1", "--memory", "1g", "--work-dir", str(tmp_path / "work"), master]
    for worker in [serve(host, "worker.Worker", WORKER_PORT, *size) for host in others]:
        worker.wait_for("Successfully registered with master")
    conf = {
        "spark.ui.enabled": "false",
        "spark.driver.memory": "512m",
        "spark.driver.host": first.address,
        "spark.driver.bindAddress": first.address,
        "spark.driver.port": DRIVER_PORT,
        "spark.driver.blockManager.port": BLOCKS_PORT,
        "spark.blockManager.port": BLOCKS_PORT,
        "spark.executor.memory": "512m",
        "spark.executor.cores": "1",
        "spark.executorEnv.PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    words = [f"{name}={value}" for name, value in conf.items()]
    path = tmp_path / "go_on"
    os.mkfifo(path)
    command = [sys.executable, script(DRIVER), first.address, master, path, *words]
    job = jobs(harness.Job(first.enter(command), env={**env, "SPARK_LOCAL_IP": first.address}))
    job.wait_for("executors on host-b host-c")
    job.go_on = lambda: path.write_text("")
    return job


def test_executors_that_cannot_connect_to_each_other(driver, net: network.Network) -> None:
    _, second, third = net.hosts
    third.swallow(second)
    second.swallow(third)
    try:
        driver.go_on()
        driver.fail()
    finally:
        third.restore_routes()
        second.restore_routes()
    found = re.findall(r"(rank \d|the driver) caught (\w+): (.*)", driver.stdout)
    assert {who for who, _, _ in found} == {"rank 0", "rank 1", "the driver"}, driver.report()
    assert {(name, text) for _, name, text in found} == {found[0][1:]}, driver.report()
    _, name, text = found[0]
    assert name == "ValueError"
    assert re.search(r"rank \d on host-[bc] cannot connect to rank \d on host-[bc] \(tried ", text)
    addresses = {host.address for host in (second, third) if f"{host.address}:" in text}
    assert addresses, text
    assert re.search(r"198\.18\.\d+\.\d+:\d+: no answer in time", text), text
    assert "A firewall on one of the hosts or between them drops" in text
    assert "`horovodrun --doctor -H " in text


def test_an_executor_that_cannot_connect_to_the_driver(driver, net: network.Network) -> None:
    first, second, _ = net.hosts
    second.refuse(first)
    try:
        driver.go_on()
        driver.fail()
    finally:
        second.restore_routes()
    found = re.search(r"the driver caught (\w+): (.*)", driver.stdout)
    assert found, driver.report()
    name, text = found.groups()
    assert name == "RuntimeError"
    assert re.search(r"task \d on host host-b cannot reach the launcher on the driver", text), text
    assert re.search(rf"{first.address}:\d+: no route to host", text), text
