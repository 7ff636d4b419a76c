"""`hvd.elastic.run` in real elastic jobs: whatever happens, weights and samples are those of an undisturbed run.

The training checks that itself (elastic_worker.py); here things go wrong, and who did what in which order is checked.
Most trainings have no framework: the loop is the same, and so are its states but for what they hold.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

import harness

WORKER = Path(__file__).with_name("elastic_worker.py")
# Slots that fail often would rest for a minute.
PATIENT = {"HOROVOD_ELASTIC_SLOT_FAILURES": "100"}


class Training:
    """An elastic job of the worker; its hosts are in a file if they shall change."""

    def __init__(
        self, jobs, folder, np, *options, mishaps=(), hosts=None, framework="numpy", heartbeat=None
    ):
        self.folder = folder
        self.hosts = folder / "hosts"
        if hosts is not None:
            self.list(*hosts)
            options = ("--host-discovery-script", f"cat {self.hosts}", *options)
        command = [sys.executable, WORKER, framework, str(folder), *mishaps]
        env = PATIENT | ({"HOROVOD_HEARTBEAT_TIMEOUT_SECONDS": heartbeat} if heartbeat else {})
        self.job = jobs(harness.horovodrun(np, command, *options, env=env))

    def list(self, *lines):
        """From now on these are the hosts."""
        new = self.folder / "hosts.new"
        new.write_text("".join(f"{line}\n" for line in lines))
        new.rename(self.hosts)

    def generations(self, size, count=1):
        """Wait for the `count`-th generation of this size; process by rank."""
        lines = self.job.wait_for(f"generation of {size}: ", count=count * size)
        found = [re.search(r"rank (\d+) is process (\d+)", line) for line in lines]
        return {int(m[1]): int(m[2]) for m in found[(count - 1) * size : count * size]}

    def stop(self, size):
        """Let it end when there are so many ranks."""
        new = self.folder / "stop.new"
        new.write_text(str(size))
        new.rename(self.folder / "stop")

    def finish(self, size):
        """Let it end; all ranks that are there must end with the same weights."""
        self.stop(size)
        self.job.succeed()
        ends = re.findall(r"done at step (\d+) with (\w+)", self.job.stdout)
        assert len(ends) == size, self.job.report()
        assert len(set(ends)) == 1, self.job.report()
        return self.job

    def of(self, pid):
        """The loop's lines of one process, in order."""
        words = "generation|sync|restore|reset|first callback|second callback"
        return re.findall(rf"({words})\b.* process {pid}\b", self.job.stdout)


@pytest.fixture
def training(jobs, tmp_path):
    return lambda np, *options, **kwargs: Training(jobs, tmp_path, np, *options, **kwargs)


LOST = ["restore", "reset", "first callback", "second callback", "sync", "generation"]
AFTER_A_CHANGE = ["reset", "first callback", "second callback", "sync", "generation"]


def test_a_rank_that_dies_is_replaced_and_nothing_committed_is_lost(training) -> None:
    run = training(
        2, "--min-np", "1", "-H", "localhost:2",
        mishaps=["last rank dies", "newcomer dies in sync"], framework="torch",
    )  # fmt: skip
    run.job.wait_for("now: last rank dies")
    first = run.generations(2)
    # It goes on alone, lets a newcomer in that dies at the worst moment, goes on alone, lets the next one in.
    alone = run.generations(1, count=2)
    assert alone == {0: first[0]}
    again = run.generations(2, count=2)
    assert again[0] == first[0]
    job = run.finish(2)

    assert "now: newcomer dies in sync" in job.stdout
    assert run.of(first[0]) == [
        "sync",
        "generation",
        *LOST,
        *AFTER_A_CHANGE[:4],
        *LOST,
        *AFTER_A_CHANGE,
    ]
    assert run.of(again[1]) == ["sync", "generation"]
    assert "was killed by signal 9" in job.stderr


def test_any_rank_may_die_or_fail_also_rank_0_and_also_at_the_end(training) -> None:
    run = training(
        3, "--min-np", "1", "-H", "localhost:3",
        mishaps=["rank 0 dies", "rank 1 raises", "rank 1 dies when all is done"],
    )  # fmt: skip
    first = run.generations(3)
    run.job.wait_for("now: rank 0 dies")
    run.job.wait_for("now: rank 1 raises")
    run.stop(3)
    run.job.wait_for("now: rank 1 dies when all is done")
    run.job.succeed()

    ends = re.findall(r"done at step (\d+) with (\w+)", run.job.stdout)
    assert ends
    assert len(set(ends)) == 1
    assert "a mistake of rank 1" in run.job.stderr + run.job.stdout
    assert run.of(first[0]) == ["sync", "generation"]


def test_the_last_holder_of_the_state_is_named_when_it_is_stopped(training) -> None:
    """Alone it has no peer that misses it. The job waits, for nobody else has the state, and says so."""
    run = training(1, "--min-np", "1", heartbeat="2")
    process = run.generations(1)[0]
    os.kill(process, signal.SIGSTOP)
    [line] = run.job.wait_for("alone holds the training state")
    assert re.search(r"rank 0 on host \S+ has been stopped by a signal", line), line
    os.kill(process, signal.SIGCONT)
    run.finish(1)


def test_a_host_that_is_added_gets_the_state_and_nothing_goes_back(training) -> None:
    run = training(1, "--min-np", "1", hosts=["localhost:1"])
    first = run.generations(1)
    run.list("localhost:1", "127.0.0.1:2")
    grown = run.generations(3)
    assert grown[0] == first[0]
    run.finish(3)

    # Those who start together are let in together, unless one takes much longer.
    assert run.of(first[0]) in (
        ["sync", "generation", *AFTER_A_CHANGE],
        ["sync", "generation", *AFTER_A_CHANGE, *AFTER_A_CHANGE],
    )
    assert run.of(grown[2]) == ["sync", "generation"]


def test_a_host_that_is_removed(training) -> None:
    """Its ranks end by themselves; who stays has all there is, so nothing is sent."""
    run = training(2, "--min-np", "1", hosts=["localhost:1", "127.0.0.1:1"])
    first = run.generations(2)
    run.list("127.0.0.1:1")
    left = run.generations(1)
    assert left == {0: first[1]}
    job = run.finish(1)

    stays = ["sync", "generation", "reset", "first callback", "second callback", "generation"]
    assert run.of(first[1]) == stays
    assert "This process (rank 0 of 2 before) ends" in job.stderr
    assert "Traceback" not in job.stderr
    assert "exited with" not in job.stderr


WAITS_FOR_NEWS = """
import time
import horovod.numpy as hvd
from horovod.common import elastic
hvd.init()
state = elastic.ObjectState(hvd.broadcast_object, hvd.rank, said="")
@elastic.run
def train(state):
    print("generation of", hvd.size(), flush=True)
    if hvd.size() == 1:
        while state._host_messages.empty():
            time.sleep(0.02)
        print("heard of it", flush=True)
        state.commit()
    return hvd.size()
print("ended with", train(state), flush=True)
"""


def test_a_script_may_wait_for_the_launchers_news_as_the_originals_does(
    script, jobs, tmp_path
) -> None:
    hosts, new = tmp_path / "hosts", tmp_path / "new"
    hosts.write_text("localhost:1\n")
    command = [sys.executable, script(WAITS_FOR_NEWS)]
    options = ("--host-discovery-script", f"cat {hosts}", "--max-np", "2")
    job = jobs(harness.horovodrun(1, command, *options))
    job.wait_for("generation of 1")
    new.write_text("localhost:2\n")
    new.rename(hosts)
    job.succeed()
    assert "heard of it" in job.stdout
    assert job.stdout.count("ended with 2") == 2


DRIFTS_AFTER_A_LOSS = """
import os, signal
import torch
import horovod.torch as hvd
hvd.init()
def trained_with(kind, op):
    model = torch.nn.Linear(3, 2)
    named = [(f"{kind}.{name}", param) for name, param in model.named_parameters()]
    plain = torch.optim.SGD(model.parameters(), lr=0.125)
    return model, hvd.DistributedOptimizer(plain, named, op=op)
trained = [trained_with("average", hvd.Average), trained_with("adasum", hvd.Adasum)]
def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
@hvd.elastic.run
def train(state):
    again = state.again
    state.again = True
    state.commit()
    for _ in range(3):
        for model, optimizer in trained:
            step(model, optimizer)
    if hvd.rank() == 1 and not again:
        os.kill(os.getpid(), signal.SIGKILL)
    for model, optimizer in trained:
        if hvd.rank() == 1:
            model.bias.data += 1
        step(model, optimizer)
        try:
            step(model, optimizer)
        except hvd.ReplicasDifferError as error:
            print("found:", error, flush=True)
(one, its), (other, others) = trained
train(hvd.elastic.TorchState(one, its, other=other, others=others, again=False))
"""


def test_after_a_change_of_members_all_count_the_steps_of_the_divergence_watch_alike(
    script, jobs
) -> None:
    """A survivor took three steps before, the newcomer none; after the fourth since then they are compared."""
    job = jobs(
        harness.python(
            2,
            script(DRIFTS_AFTER_A_LOSS),
            options=["--min-np", "2", "-H", "localhost:2"],
            env={"HOROVOD_CHECK_CONSISTENCY": "2", "HOROVOD_CONSISTENCY_ACTION": "error"},
        )
    ).succeed()
    found = [line.split("found: ")[1] for line in job.wait_for("found:", count=4)]
    for kind in ("average", "adasum"):
        text = f"after step 4 of this optimizer: '{kind}.bias' differs between rank 0, rank 1"
        assert sum(text in line for line in found) == 2, job.report()
    assert "killed by signal 9" in job.stderr


BEGINS_WITH_WEIGHTS_OF_ITS_OWN = """
import os, signal
import torch
import horovod.torch as hvd

hvd.init()
torch.manual_seed(os.getpid())
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

@hvd.elastic.run
def train(state):
    while state.steps < 20:
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        state.steps += 1
        state.commit()
        if state.steps == 8 and hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

train(hvd.elastic.TorchState(model, optimizer, steps=0))
print("trained", flush=True)
"""


def test_a_newcomer_that_gets_the_state_is_no_replica_that_differs(script, jobs) -> None:
    """Its own weights differ from the others'; in each round all are compared after they are equal."""
    job = jobs(
        harness.python(
            2,
            script(BEGINS_WITH_WEIGHTS_OF_ITS_OWN),
            options=["--min-np", "2", "-H", "localhost:2"],
            env={"HOROVOD_CHECK_REPLICAS": "error"},
        )
    ).succeed()
    assert job.stdout.count("trained") == 2
    assert "killed by signal 9" in job.stderr
    assert "as they begin to train" not in job.stderr


def test_the_example_in_an_elastic_job(jobs) -> None:
    example = harness.ROOT / "examples/elastic/pytorch/pytorch_mnist_elastic.py"
    job = jobs(harness.python(2, example, "--epochs", "2", options=["--min-np", "1"])).succeed()
    assert job.stdout.count("is done") == 2


def test_a_process_set_that_no_longer_fits_ends_the_job_and_says_what_to_do(script, jobs) -> None:
    path = script(
        """
import os, signal
import numpy as np
import horovod.numpy as hvd
from horovod.common import elastic

both = hvd.ProcessSet([1, 2])
hvd.init(process_sets=[both])

@elastic.run
def train(state):
    while state.step < 1000:
        if both.included():
            assert hvd.allreduce(np.ones(1), op=hvd.Sum, process_set=both).item() == 2
        state.step += 1
        if hvd.rank() == 2 and state.step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        state.commit()

train(elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0))
"""
    )
    job = jobs(harness.python(3, path, options=["--min-np", "1", "-H", "localhost:3"]))
    job.fail()
    assert "process_sets entry number 0" in job.stderr
    assert "hvd.init(process_sets='dynamic')" in job.stderr


def test_a_state_that_never_comes_to_the_others_ends_the_job(script, jobs) -> None:
    """Also after commits, of which the failed rounds add none."""
    path = script(
        """
import horovod.numpy as hvd
from horovod.common import elastic
from horovod.common.exceptions import HorovodInternalError

hvd.init()

class State(elastic.ObjectState):
    def sync(self):
        if self.step:
            raise HorovodInternalError("the state does not fit")
        super().sync()

@elastic.run
def train(state):
    state.step += 1
    state.commit()
    raise HorovodInternalError("a failure")

train(State(hvd.broadcast_object, hvd.rank, step=0))
"""
    )
    job = jobs(harness.python(2, path))
    job.fail()
    assert "HorovodInternalError: the state does not fit" in job.stderr
    assert "Elastic training gave up: this is the failure number 3 in a row" in job.stderr
