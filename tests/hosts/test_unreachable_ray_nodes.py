"""Ray nodes whose ranks cannot reach each other, though Ray reaches all: every rank says what was tried."""

from __future__ import annotations

import os
import re
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
pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray[train,tune]'")
# Ray listens below 10000 then, and `network.Host.swallow` lets pass what goes there.
GCS_PORT = 6379
PORTS = [
    "--min-worker-port=6500",
    "--max-worker-port=6599",
    *(
        f"--{name}-port={GCS_PORT + number}"
        for number, name in enumerate(
            (
                "node-manager",
                "object-manager",
                "runtime-env-agent",
                "dashboard-agent-grpc",
                "dashboard-agent-listen",
                "metrics-export",
            ),
            start=1,
        )
    ),
]

EXECUTOR = """
import sys
import ray
from horovod.ray import RayExecutor

ray.init(address=sys.argv[1], log_to_driver=False)

def train():
    import horovod.numpy as hvd

    hvd.init()

executor = RayExecutor(RayExecutor.create_settings(), num_hosts=2, num_workers_per_host=1)
executor.start()
print("has started", flush=True)
open(sys.argv[2]).read()
try:
    executor.run(train)
finally:
    executor.shutdown()
"""


@pytest.fixture
def nodes(net: network.Network, jobs) -> list[network.Host]:
    """A node of Ray on each host; the head is on the first."""
    first, second = net.hosts
    start = [Path(sys.executable).with_name("ray"), "start", "--block", "--num-cpus=1", *PORTS]
    as_head = ["--head", f"--port={GCS_PORT}", "--include-dashboard=false"]
    ways = ((first, as_head), (second, [f"--address={first.address}:{GCS_PORT}"]))
    for host, words in ways:
        command = [*start, *words, f"--node-ip-address={host.address}"]
        node = jobs(harness.Job(host.enter(command), env={"RAY_AUTH_MODE": "disabled"}))
        node.wait_for("Ray runtime started")
    return [first, second]


@pytest.mark.parametrize("are_lost", ["questions", "answers"])
def test_a_firewall_between_nodes(are_lost, nodes, jobs, script, tmp_path) -> None:
    here, there = nodes
    path = tmp_path / "go_on"
    os.mkfifo(path)
    command = [sys.executable, script(EXECUTOR), f"{here.address}:{GCS_PORT}", path]
    driver = jobs(harness.Job(here.enter(command), env={"RAY_AUTH_MODE": "disabled"}))
    driver.wait_for("has started")
    source, target = (there, here) if are_lost == "questions" else (here, there)
    source.swallow(target)
    try:
        path.write_text("")
        driver.fail()
    finally:
        source.restore_routes()
    found = re.search(r"rank \d on host-b cannot connect to the launcher.*", driver.stderr)
    assert found, driver.report()
    assert re.search(rf"\(tried {here.address}:\d+: no answer in time", found[0]), found[0]
    assert "A firewall on one of the hosts or between them drops" in found[0]
    assert "`horovodrun --doctor -H " in found[0]
