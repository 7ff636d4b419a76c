"""An elastic job on two hosts that a script lists: one dies, the job goes on; it comes back, the job grows."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import network
import pytest

import harness

pytestmark = pytest.mark.hosts


# Each step adds what is known; what was lost is done again, so the sum tells whether a committed step is missing.
TRAIN = """
import os, socket, sys
import numpy as np
import horovod.numpy as hvd
from horovod.common import elastic

hvd.init()
state = elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0, total=0)

@elastic.run
def train(state):
    print(f"{hvd.size()} ranks at step {state.step}: rank {hvd.rank()} on {socket.gethostname()} is {os.getpid()}",
          flush=True)
    is_over = False
    while not is_over:
        ones = hvd.allreduce(np.ones(1000, np.float32), op=hvd.Average, name="ones")
        state.total += state.step * int(ones.sum())
        state.step += 1
        stop = hvd.broadcast(np.array(int(os.path.exists(sys.argv[1]))), 0, name="stop")
        is_over = bool(stop)
        state.commit()
    assert state.total == sum(step * 1000 for step in range(state.step)), (state.total, state.step)
    print(f"all right on {socket.gethostname()}", flush=True)

train(state)
"""


def test_a_host_dies_and_comes_back(net, jobs, script, tmp_path: Path) -> None:
    first, second = net.hosts
    stop, listed = tmp_path / "stop", tmp_path / "listed"
    listed.write_text("host-a:1\nhost-b:1\n")
    words = [harness.HOROVODRUN, "-np", "2", "--min-np", "1", "--max-np", "2"]
    words += ["--host-discovery-script", f"cat {listed}", "--blacklist-cooldown-range", "1", "2"]
    words += ["-p", str(network.SSH_PORT), "-i", str(net.folder / "user")]
    words += ["--verbose", sys.executable, script(TRAIN), str(stop)]
    before = first.pids(), second.pids()
    job = jobs(harness.Job(first.enter(words)))
    begun = job.wait_for("2 ranks at step 0", count=2)
    survivor = next(line for line in begun if "on host-a" in line)
    survivor = re.search(r" is (\d+)", survivor)[1]

    # As when a host is switched off and on again: its ranks, its agent and its sshd are gone, and it stays listed.
    second.crash()
    [alone] = job.wait_for("1 ranks at step")
    assert f"rank 0 on host-a is {survivor}" in alone, job.report()

    second.start_sshd()
    grown = job.wait_for("2 ranks at step", count=4)[2:]
    places = {re.search(r"rank (\d) on (host-.) is (\d+)", line).groups()[:2] for line in grown}
    assert places == {("0", "host-a"), ("1", "host-b")}, job.report()
    # The survivor kept its process and its memory.
    assert any(line.endswith(f" is {survivor}") for line in grown), job.report()
    assert int(re.search(r"at step (\d+)", grown[0])[1]) > 0

    stop.touch()
    job.succeed()
    for host in net.hosts:
        assert f"all right on {host.name}" in job.stdout
    for host, known in zip(net.hosts, before, strict=True):
        left = harness.wait_for_processes_to_end(lambda host=host, known=known: host.pids() - known)
        assert not left, f"processes left on {host.name}: {left}"
