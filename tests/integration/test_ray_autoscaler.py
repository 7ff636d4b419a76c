"""Jobs on a Ray cluster that grows: its autoscaler starts nodes, here with Ray's provider of nodes on this machine."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import harness

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray[train,tune]'")

from horovod.ray import RayExecutor  # noqa: E402

LIMIT_S = 240
# The provider's name of its own node.
HEAD = "fffffffffffffffffffffffffffffffffffffffffffffffffff00000"
NODES_MAX = 2


def configuration(address: str) -> dict[str, Any]:
    """Of an autoscaler: a head without CPUs, and nodes of one CPU when somebody asks for them."""
    commands = ("initialization", "setup", "head_setup", "worker_setup")
    starts = ("head_start_ray", "worker_start_ray")
    return {
        "cluster_name": "fake",
        "max_workers": NODES_MAX,
        "idle_timeout_minutes": 10.0,
        "upscaling_speed": 100.0,
        "provider": {
            "type": "fake_multinode",
            "head_node_id": HEAD,
            "gcs_address": address,
            # There is no ssh to these nodes.
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "auth": {},
        "head_node_type": "head",
        "available_node_types": {
            "head": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "worker": {
                "resources": {"CPU": 1, "object_store_memory": 100 << 20},
                "node_config": {},
                "min_workers": 0,
                "max_workers": NODES_MAX,
            },
        },
        "file_mounts": {},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        "rsync_exclude": [],
        "rsync_filter": [],
        **{f"{name}_commands": [] for name in (*commands, *starts)},
    }


@pytest.fixture
def growing(port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cluster whose only node has no CPU."""
    ip = ray.util.get_node_ip_address()
    folder = tmp_path_factory.mktemp("ray")
    settings = folder / "cluster.json"
    settings.write_text(json.dumps(configuration(f"{ip}:{port}")))
    inherited = {n: v for n, v in os.environ.items() if n.startswith(harness.NOT_HANDED_DOWN)}
    for name in inherited:
        del os.environ[name]
    command = [Path(sys.executable).with_name("ray"), "start", "--head", "--block"]
    command += [f"--port={port}", "--num-cpus=0", "--include-dashboard=false"]
    command += ["--object-store-memory=150000000", f"--autoscaling-config={settings}"]
    variables = {
        "RAY_AUTH_MODE": "disabled",
        "RAY_FAKE_CLUSTER": "1",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        with harness.Job(command, limit_s=2 * LIMIT_S, env=variables, own_shm=False) as head:
            head.wait_for("Ray runtime started")
            try:
                ray.init(address=f"{ip}:{port}", log_to_driver=False)
                yield
            finally:
                ray.shutdown()
                os.environ.update(inherited)


def place() -> tuple[int, int, str]:
    import horovod.numpy as hvd

    hvd.init()
    return hvd.rank(), hvd.size(), os.environ["HOROVOD_HOSTNAME"]


@pytest.mark.thorough(
    also="tests/integration/test_ray.py::test_an_elastic_job_loses_a_node_and_gets_another"
)
def test_workers_wait_for_pending_nodes(growing: None) -> None:
    executor = RayExecutor(
        RayExecutor.create_settings(placement_group_timeout_s=LIMIT_S), num_workers=1
    )
    executor.start()
    results = executor.run(place)
    executor.shutdown()
    assert [result[:2] for result in results] == [(0, 1)]
    # An elastic job asks for as many as it may have.
    elastic = RayExecutor(
        RayExecutor.create_settings(), min_workers=2, max_workers=2, elastic_timeout=LIMIT_S
    )
    elastic.start()
    results = elastic.run(place)
    elastic.shutdown()
    assert [result[:2] for result in results] == [(0, 2), (1, 2)]
    assert len({result[2] for result in results}) == 2
