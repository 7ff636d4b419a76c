"""Jobs of the Helm chart and of deploy/manifests, whose pods pods.py plays."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pods
import pytest
import yaml

import charts
import harness

pytestmark = pytest.mark.hosts
# A launcher and two workers.
HOSTS = 3

TRAIN = """
import os, socket, sys
import numpy as np
import horovod.numpy as hvd

hvd.init()
assert os.getuid() == 1000
rng = np.random.default_rng(hvd.rank())
inputs = rng.normal(size=(64, 3))
targets = inputs @ np.array([1.0, -2.0, 0.5])
weights = hvd.broadcast(rng.normal(size=3), 0, name="start")
for step in range(300):
    gradient = inputs.T @ (inputs @ weights - targets) / len(inputs)
    weights -= 0.1 * hvd.allreduce(gradient, name="gradient")
assert np.allclose(weights, [1.0, -2.0, 0.5], atol=1e-3), weights
places = f"local {hvd.local_rank()} of {hvd.local_size()}, cross {hvd.cross_rank()} of {hvd.cross_size()}"
os.write(1, f"trained: rank {hvd.rank()} of {hvd.size()}, {places}, on {socket.gethostname()}\\n".encode())
"""

ELASTIC = """
import os, socket, sys
import numpy as np
import horovod.numpy as hvd
from horovod.common import elastic

hvd.init()
state = elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0, total=0)

@elastic.run
def train(state):
    line = f"{hvd.size()} ranks at step {state.step}: rank {hvd.rank()} on {socket.gethostname()}\\n"
    os.write(1, line.encode())
    is_over = False
    while not is_over:
        ones = hvd.allreduce(np.ones(10, np.float32), op=hvd.Average, name="ones")
        state.total += state.step * int(ones.sum())
        state.step += 1
        stop = hvd.broadcast(np.array(int(os.path.exists("STOP"))), 0, name="stop")
        is_over = bool(stop)
        state.commit()
    assert state.total == sum(step * 10 for step in range(state.step)), (state.total, state.step)
    os.write(1, f"all right on {socket.gethostname()}\\n".encode())

train(state)
"""


def _app(folder: Path, text: str) -> Path:
    app = folder / "app"
    app.mkdir(mode=0o755)
    (app / "train.py").write_text(text.replace("STOP", str(app / "stop")))
    return app


@pytest.fixture
def chart(net, jobs, tmp_path: Path) -> Callable[..., tuple[pods.Player, Any, Any]]:
    """Renders the chart with values; the player, and the templates of launcher and worker."""

    def render(text: str, **values: object) -> tuple[pods.Player, Any, Any]:
        documents = charts.render(values)
        names = {"train-horovod-launcher": net.hosts[0]}
        player = pods.Player(documents, jobs, _app(tmp_path, text), names)
        launcher = charts.named(documents, "Job", "train-horovod-launcher")
        worker = charts.named(documents, "Job", "train-horovod-worker")
        return player, launcher["spec"]["template"], worker["spec"]["template"]

    return render


def _trained(launcher: pods.Pod, ranks: int) -> set[str]:
    launcher.job.succeed()
    lines = re.findall(r"trained: (.*), on (host-.)", launcher.job.stdout)
    assert len(lines) == ranks, launcher.job.report()
    return {line for line, _ in lines}


def test_a_job_of_the_chart_trains_and_its_workers_end_well(net, chart) -> None:
    player, launcher, worker = chart(TRAIN, workers=2, slotsPerWorker=2)
    # As Kubernetes may: a worker is there before the launcher.
    workers = [player.start(worker, net.hosts[1], index=0)]
    begun = player.start(launcher, net.hosts[0])
    workers.append(player.start(worker, net.hosts[2], index=1))
    assert _trained(begun, 4) == {
        f"rank {rank} of 4, local {rank % 2} of 2, cross {rank // 2} of 2" for rank in range(4)
    }
    for pod in workers:
        pod.job.succeed()
        assert not pod.pids()


def test_an_elastic_job_of_the_chart_goes_on_without_a_deleted_pod_and_takes_the_next(
    net, chart, tmp_path: Path
) -> None:
    player, launcher, worker = chart(ELASTIC, workers=2, elastic={"enabled": True})
    begun = player.start(launcher, net.hosts[0])
    first, second = (player.start(worker, net.hosts[n + 1], index=n) for n in range(2))
    begun.job.wait_for("2 ranks at step 0", count=2)
    second.delete()
    [alone] = begun.job.wait_for("1 ranks at step")
    assert "rank 0 on host-b" in alone, begun.job.report()
    third = player.start(worker, net.hosts[2], index=1)
    begun.job.wait_for("2 ranks at step", count=4)
    (tmp_path / "app" / "stop").touch()
    begun.job.succeed()
    assert {"all right on host-b", "all right on host-c"} <= set(
        re.findall("all right on host-.", begun.job.stdout)
    )
    first.job.succeed()
    third.job.succeed()


def test_a_failed_job_ends_its_workers_with_the_status_that_their_policy_names(net, chart) -> None:
    player, launcher, worker = chart("import sys; sys.exit(7)", workers=1)
    begun, pod = player.start(launcher, net.hosts[0]), player.start(worker, net.hosts[1], index=0)
    assert begun.job.wait() == 7
    assert pod.job.wait() == 3, pod.job.report()


@pytest.mark.parametrize(
    ("key", "words"),
    [("ab" * 32, "the job keys differ"), ("secret", "is not 64 hex digits")],
)
def test_a_worker_with_another_key_says_so(net, chart, key: str, words: str) -> None:
    player, launcher, worker = chart(TRAIN, workers=1, startTimeout=60)
    begun = player.start(launcher, net.hosts[0])
    pod = player.start(worker, net.hosts[1], index=0, secret={"key": key})
    assert pod.job.wait() == 1
    assert words in pod.job.stderr, pod.job.report()
    assert "secret" not in pod.job.stderr.replace("a Kubernetes secret", "")
    begun.delete()


def test_the_jobset_trains(net, jobs, tmp_path: Path) -> None:
    text = (charts.MANIFESTS / "jobset.yaml").read_text()
    [job_set] = yaml.safe_load_all(text)
    names = {"train-launcher-0-0.train": net.hosts[0]}
    player = pods.Player([job_set], jobs, _app(tmp_path, TRAIN), names)
    key = {"key": secrets.token_hex(32)}
    launcher, worker = (
        part["template"]["spec"]["template"] for part in job_set["spec"]["replicatedJobs"]
    )
    begun = player.start(launcher, net.hosts[0], secret=key)
    for index in range(2):
        player.start(worker, net.hosts[index + 1], index=index, secret=key)
    assert len(_trained(begun, 4)) == 4


def test_the_trainjob_trains_under_the_variables_of_its_operator(net, jobs, tmp_path: Path) -> None:
    text = (charts.MANIFESTS / "trainjob.yaml").read_text()
    runtime, train_job = yaml.safe_load_all(text)
    [part] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    first = "train-node-0-0.train"
    player = pods.Player([], jobs, _app(tmp_path, TRAIN), {first: net.hosts[0]})
    key = {"key": secrets.token_hex(32)}
    trainer = train_job["spec"]["trainer"]
    started = []
    for index in range(trainer["numNodes"]):
        variables = {
            "PET_NNODES": str(trainer["numNodes"]),
            "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
            "PET_NODE_RANK": str(index),
            "PET_MASTER_ADDR": first,
            "PET_MASTER_PORT": "29400",
        }
        template = part["template"]["spec"]["template"]
        host = net.hosts[index]
        started.append(player.start(template, host, index=index, secret=key, variables=variables))
    lines = []
    for pod in started:
        pod.job.succeed()
        lines += re.findall(r"trained: (.*), on host-.", pod.job.stdout)
    assert set(lines) == {
        f"rank {rank} of 4, local {rank % 2} of 2, cross {rank // 2} of 2" for rank in range(4)
    }


def test_the_services_of_the_compose_file_train(net, jobs, tmp_path: Path) -> None:
    compose = yaml.safe_load((charts.ROOT / "deploy/images/compose.yaml").read_text())
    player = pods.Player([], jobs, _app(tmp_path, TRAIN), {"launcher": net.hosts[0]})
    key = {"horovod-key": secrets.token_hex(32)}
    started = {}
    for host, (name, service) in zip(net.hosts, compose["services"].items(), strict=True):
        template = pods.of_compose(service)
        # The names of the hosts here end with letters.
        index = int(name[-1]) if name.startswith("worker-") else None
        started[name] = player.start(template, host, index=index, secret=key)
    assert len(_trained(started["launcher"], 4)) == 4
    for name in ("worker-0", "worker-1"):
        started[name].job.succeed()


def test_a_pod_that_is_asked_to_end_ends_its_ranks(net, chart) -> None:
    player, launcher, worker = chart(ELASTIC, workers=2, elastic={"enabled": True})
    begun = player.start(launcher, net.hosts[0])
    first, second = (player.start(worker, net.hosts[n + 1], index=n) for n in range(2))
    begun.job.wait_for("2 ranks at step 0", count=2)
    second.terminate()
    assert second.job.wait() == 143, second.job.report()
    assert not harness.wait_for_processes_to_end(second.pids)
    begun.job.wait_for("1 ranks at step")
    begun.delete()
    first.delete()
