"""`horovod.ray` on a Ray of this machine: actors as ranks, elastic jobs, Ray Train."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import harness

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray[train,tune]'")

from ray.cluster_utils import Cluster  # noqa: E402
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: E402

from horovod.ray import ElasticRayExecutor, RayExecutor  # noqa: E402
from horovod.ray.runner import StaticAdapter  # noqa: E402
from horovod.ray.strategy import create_placement_group  # noqa: E402

LIMIT_S = int(harness.LIMIT_S)
# Else Ray takes a minute to believe that a node has gone.
SOON_DEAD = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 3,
}
# GPUs are declared only. The Ray of the other node was started with some of the machine's.
NODE = {"num_cpus": 2, "num_gpus": 2, "object_store_memory": 200 << 20}
OTHER_NODE = {**NODE, "env_vars": {"CUDA_VISIBLE_DEVICES": "2,3"}}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of 2 CPUs and 2 GPUs."""
    inherited = {n: v for n, v in os.environ.items() if n.startswith(harness.NOT_HANDED_DOWN)}
    for name in inherited:
        del os.environ[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "600")
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        head = {**NODE, "include_dashboard": False, "_system_config": SOON_DEAD}
        started = Cluster(initialize_head=True, head_node_args=head)
        try:
            started.add_node(**OTHER_NODE)
            ray.init(address=started.address, log_to_driver=False)
            yield started
        finally:
            ray.shutdown()
            started.shutdown()
            os.environ.update(inherited)


@pytest.fixture
def limit() -> Iterator[None]:
    """A test that hangs ends with the main thread's stack."""

    def strike(*_: object) -> None:
        raise TimeoutError(f"the test has not ended within {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, strike)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


pytestmark = pytest.mark.usefixtures("cluster", "limit")


@pytest.fixture
def two() -> Iterator[RayExecutor]:
    # Else Ray puts a worker on each node where the actors of the test before still have CPUs of both.
    wait_until(lambda: ray.available_resources().get("CPU") == 4.0, "4 free CPUs")
    executor = RayExecutor(RayExecutor.create_settings(), num_workers=2)
    executor.start(extra_env_vars={"COLOUR": "blue"})
    yield executor
    executor.shutdown()
    wait_until(lambda: ray.available_resources().get("CPU") == 4.0, "4 free CPUs")


def wait_until(is_so: Any, what: str) -> None:
    deadline = time.monotonic() + harness.REAP_LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline, f"no {what}"
        threading.Event().wait(0.05)


def total(first: float, factor: float = 1.0) -> tuple[int, int, int, int, float]:
    import numpy as np

    import horovod.numpy as hvd

    hvd.init()
    value = hvd.allreduce(np.array([first + hvd.rank()]), op=hvd.Sum)[0] * factor
    return hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), float(value)


def test_a_function_runs_on_all_ranks(two: RayExecutor) -> None:
    expected = [(0, 2, 0, 2, 10.0), (1, 2, 1, 2, 10.0)]
    assert two.run(total, args=[2.0], kwargs={"factor": 2.0}) == expected
    # In the same processes, which are a job already.
    assert ray.get(two.run_remote(total, args=[2.0], kwargs={"factor": 2.0})) == expected
    assert two.execute(lambda executable: executable) == [None, None]
    assert two.execute_single(lambda _: os.environ["HOROVOD_RANK"]) == "0"


def test_variables_of_the_ranks(two: RayExecutor) -> None:
    names = ("COLOUR", "OMP_NUM_THREADS", "HOROVOD_SIZE")
    assert two.execute(lambda _: [os.environ.get(n) for n in names]) == [["blue", "1", "2"]] * 2


@pytest.mark.parametrize("where", ["driver's node", "other node"])
def test_a_job_on_the_drivers_node_listens_on_the_loopback_only(where: str) -> None:
    of_driver = ray.get_runtime_context().get_node_id()
    of_other = next(n["NodeID"] for n in ray.nodes() if n["Alive"] and n["NodeID"] != of_driver)
    full = of_other if where == "driver's node" else of_driver

    class TakesAllCpus:
        def begins(self) -> bool:
            return True

    # Ray is free to place two workers on either node: an actor takes all CPUs of one.
    on_full = NodeAffinitySchedulingStrategy(full, soft=False)
    actor = ray.remote(TakesAllCpus).options(num_cpus=2, scheduling_strategy=on_full).remote()
    executor = RayExecutor(RayExecutor.create_settings(), num_workers=2)
    try:
        assert ray.get(actor.begins.remote())
        executor.start()
        rendezvous = executor.execute(lambda _: os.environ["HOROVOD_RENDEZVOUS"])[0]
    finally:
        executor.shutdown()
        ray.kill(actor)
    wait_until(lambda: ray.available_resources().get("CPU") == 4.0, "4 free CPUs")
    addresses = rendezvous.split(",")
    if where == "driver's node":
        assert len(addresses) == 1
        assert addresses[0].startswith("127.0.0.1:")
    else:
        assert not any(address.startswith("127.") for address in addresses)


class Counter:
    def __init__(self, start: int, step: int = 1) -> None:
        self.value, self.step = start, step

    def count(self) -> int:
        self.value += self.step
        return self.value


def test_each_worker_keeps_its_object() -> None:
    executor = RayExecutor(RayExecutor.create_settings(), num_hosts=1, num_workers_per_host=2)
    executor.start(executable_cls=Counter, executable_args=[5], executable_kwargs={"step": 2})
    try:
        assert executor.execute(lambda counter: counter.count()) == [7, 7]
        assert executor.execute_single(lambda counter: counter.count()) == 9
        assert executor.execute(lambda counter: counter.value) == [9, 7]
    finally:
        executor.shutdown()


def fail_on_1() -> None:
    import numpy as np

    import horovod.numpy as hvd

    hvd.init()
    if hvd.rank() == 1:
        raise LookupError("nothing here")
    hvd.allreduce(np.ones(1), name="of rank 0 alone")


def test_workers_on_two_hosts() -> None:
    executor = RayExecutor(RayExecutor.create_settings(), num_hosts=2, num_workers_per_host=2)
    executor.start()
    try:
        rows = executor.run(total, args=[2.0])
        hosts = executor.run(lambda: os.environ["HOROVOD_HOSTNAME"])
    finally:
        executor.shutdown()
    assert rows == [(0, 4, 0, 2, 14.0), (1, 4, 1, 2, 14.0), (2, 4, 0, 2, 14.0), (3, 4, 1, 2, 14.0)]
    assert hosts[0] == hosts[1] != hosts[2] == hosts[3]
    # Both nodes are on this machine: the second's name has a part of its id.
    ids = {node["NodeID"][:8] for node in ray.nodes()}
    assert hosts[0] == socket.gethostname()
    assert hosts[2].removeprefix(f"{hosts[0]}-") in ids


def test_an_error_names_the_rank(two: RayExecutor) -> None:
    with pytest.raises(LookupError, match="nothing here") as raised:
        two.run(fail_on_1)
    notes = "\n".join(raised.value.__notes__)
    assert "Raised on rank 1 on node " in notes
    assert "Rank 0 had not ended its call" in notes
    with pytest.raises(
        RuntimeError, match=r"there are no workers: they were ended because of .*nothing here"
    ):
        two.run(total, args=[1.0])


def test_an_error_of_all_ranks_leaves_them_alive(two: RayExecutor) -> None:
    def divide() -> float:
        return 1 / 0

    with pytest.raises(ZeroDivisionError):
        two.run(divide)
    assert two.run(total, args=[2.0])[0][-1] == 5.0


def wait_for_the_other(folder: Path) -> None:
    import numpy as np

    import horovod.numpy as hvd

    hvd.init()
    if hvd.rank() == 1:
        (folder / "pid").write_text(str(os.getpid()))
        signal.pause()
    hvd.allreduce(np.ones(1), name="never")


def test_a_killed_actor_ends_the_job(two: RayExecutor, tmp_path: Path) -> None:
    pids = two.execute(lambda _: os.getpid())

    def kill() -> None:
        wait_until(lambda: (tmp_path / "pid").exists(), "rank 1")
        os.kill(pids[1], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(RuntimeError, match=r"rank 1 on node .* was lost"):
        two.run(wait_for_the_other, args=[tmp_path])
    killer.join()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "end of the actors")


def test_what_cannot_be_pickled_is_told(two: RayExecutor) -> None:
    lock = threading.Lock()
    with pytest.raises(TypeError, match="cannot be pickled, so it cannot be sent to the ranks"):
        two.run(lambda: lock)


def test_too_few_resources() -> None:
    settings = RayExecutor.create_settings(placement_group_timeout_s=1)
    executor = RayExecutor(settings, num_workers=5)
    with pytest.raises(TimeoutError, match=r"requested 5 x \{'CPU': 1\}.* in all \{'CPU': 4"):
        executor.start()
    executor.shutdown()


def test_a_placement_group_comes_with_its_bundles() -> None:
    group, bundles = create_placement_group({"CPU": 1}, 2, LIMIT_S, "PACK")
    try:
        assert bundles == group.bundle_specs == [{"CPU": 1}] * 2
    finally:
        ray.util.remove_placement_group(group)
    wait_until(lambda: ray.available_resources().get("CPU") == 4.0, "4 free CPUs")


def test_settings_have_defaults() -> None:
    assert RayExecutor(None, num_workers=2).settings.timeout_s == 30
    assert ElasticRayExecutor(None).settings.min_num_proc == 1


def gpus_of_a_rank() -> tuple[tuple[int, int, int, int], list[str], list[str]]:
    """Its place, the GPUs that it sees, and those that Ray gave to its actor."""
    import horovod.numpy as hvd

    hvd.init()
    place = hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()
    visible = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    return place, visible, [str(gpu) for gpu in ray.get_gpu_ids()]


def gpus_are_free() -> bool:
    return bool(ray.available_resources().get("GPU") == 4.0)


def test_ranks_with_gpus_on_two_hosts() -> None:
    executor = RayExecutor(
        RayExecutor.create_settings(), num_hosts=2, num_workers_per_host=2, use_gpu=True
    )
    executor.start()
    try:
        rows = executor.run(gpus_of_a_rank)
        wait_until(lambda: "GPU" not in ray.available_resources(), "GPU that is taken")
    finally:
        executor.shutdown()
    assert [row[0] for row in rows] == [(0, 4, 0, 2), (1, 4, 1, 2), (2, 4, 0, 2), (3, 4, 1, 2)]
    assert rows[0][1] == rows[1][1]
    assert rows[2][1] == rows[3][1]
    assert sorted([sorted(rows[0][1]), sorted(rows[2][1])]) == [["0", "1"], ["2", "3"]]
    for place, visible, own in rows:
        # The GPU at the local rank is the one of the rank's actor.
        assert own == [visible[place[2]]]
    wait_until(gpus_are_free, "4 free GPUs")


def test_ranks_with_several_gpus_are_where_these_are() -> None:
    executor = RayExecutor(
        RayExecutor.create_settings(), num_workers=2, use_gpu=True, gpus_per_worker=2
    )
    executor.start()
    try:
        rows = executor.run(gpus_of_a_rank)
    finally:
        executor.shutdown()
    assert [row[0] for row in rows] == [(0, 2, 0, 1), (1, 2, 0, 1)]
    assert sorted(sorted(row[1]) for row in rows) == [["0", "1"], ["2", "3"]]
    wait_until(gpus_are_free, "4 free GPUs")


def test_too_few_gpus() -> None:
    settings = RayExecutor.create_settings(placement_group_timeout_s=1)
    executor = RayExecutor(settings, num_workers=3, use_gpu=True, gpus_per_worker=2)
    with pytest.raises(TimeoutError, match=r"requested 3 x \{.*'GPU': 2\}.* in all .*'GPU': 4"):
        executor.start()
    executor.shutdown()


def visible_to_a_rank() -> tuple[int, int, int, int, str]:
    import horovod.numpy as hvd

    hvd.init()
    place = hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()
    return *place, os.environ["CUDA_VISIBLE_DEVICES"]


def test_ranks_of_an_elastic_job_see_the_gpus_of_their_node() -> None:
    executor = RayExecutor(
        RayExecutor.create_settings(), min_workers=4, max_workers=4, use_gpu=True, gpus_per_worker=1
    )
    executor.start()
    rows = executor.run(visible_to_a_rank)
    executor.shutdown()
    assert [row[:-1] for row in rows] == [(0, 4, 0, 2), (1, 4, 1, 2), (2, 4, 0, 2), (3, 4, 1, 2)]
    visible = [row[-1] for row in rows]
    assert visible in (["0,1", "0,1", "2,3", "2,3"], ["2,3", "2,3", "0,1", "0,1"])
    wait_until(gpus_are_free, "4 free GPUs")


def test_arguments_that_exclude_each_other() -> None:
    settings = RayExecutor.create_settings()
    with pytest.raises(ValueError, match="max_workers=2 needs min_workers"):
        RayExecutor(settings, max_workers=2)
    with pytest.raises(ValueError, match="exclude each other"):
        RayExecutor(settings, min_workers=1, num_workers=2)
    with pytest.raises(ValueError, match="pass use_gpu=True"):
        RayExecutor(settings, num_workers=2, gpus_per_worker=1)
    with pytest.raises(AssertionError):
        RayExecutor(settings, num_workers=2, num_hosts=2).start()
    with pytest.raises(TypeError, match="no workers"):
        RayExecutor(settings).start()
    with pytest.warns(DeprecationWarning, match="num_slots is deprecated"):
        executor = RayExecutor(settings, num_hosts=1, num_slots=3)
    with pytest.raises(RuntimeError, match="call start"):
        executor.run(print)


def test_the_actor_of_rank_0_serves_ranks_that_do_not_reach_the_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ray.util.client.ray.is_connected", lambda: True)
    executor = RayExecutor(RayExecutor.create_settings(), num_workers=2)
    executor.start()
    try:
        assert isinstance(executor.adapter, StaticAdapter)
        assert executor.adapter._rendezvous is None
        assert [row[-1] for row in executor.run(total, args=[2.0])] == [5.0, 5.0]
    finally:
        executor.shutdown()


def learn_elastically(folder: Path) -> tuple[int, int, int]:
    import numpy as np

    import horovod.numpy as hvd
    from horovod.common import elastic
    from horovod.ray import ray_logger

    hvd.init()
    agent = str(os.getppid())
    killed = folder / "pid"

    @elastic.run
    def train(state: Any) -> int:
        has_new_rank = False
        while state.batch < 20 or not has_new_rank:
            is_new = hvd.rank() == 1 and killed.exists() and killed.read_text() != agent
            has_new_rank = hvd.allreduce(np.array([float(is_new)]), name="x", op=hvd.Sum)[0] > 0
            state.batch += 1
            state.commit()
            if state.batch == 5 and hvd.rank() == 0:
                ray_logger.log({"batch": state.batch})
            if state.batch >= 5 and hvd.rank() == 1 and not killed.exists():
                (folder / "unready").write_text(agent)
                (folder / "unready").rename(killed)
            time.sleep(0.02)
        return int(state.batch)

    state = elastic.ObjectState(hvd.broadcast_object, hvd.rank, batch=0)
    return train(state), hvd.rank(), hvd.size()


def kill_one(folder: Path) -> None:
    """The actor whose agent has started rank 1."""
    wait_until(lambda: (folder / "pid").exists(), "rank 1")
    agent = int((folder / "pid").read_text())
    status = Path(f"/proc/{agent}/status").read_text()
    actor = next(line.split()[1] for line in status.splitlines() if line.startswith("PPid:"))
    os.kill(int(actor), signal.SIGKILL)


def test_an_elastic_job_replaces_a_killed_actor(tmp_path: Path) -> None:
    executor = RayExecutor(RayExecutor.create_settings(), min_workers=1, max_workers=2)
    executor.start()
    killer = threading.Thread(target=kill_one, args=[tmp_path])
    killer.start()
    received: list[Any] = []
    results = executor.run(learn_elastically, args=[tmp_path], callbacks=[received.append])
    killer.join()
    executor.shutdown()
    assert [result[1:] for result in results] == [(0, 2), (1, 2)]
    assert results[0][0] == results[1][0] >= 20
    assert received[0] == {"batch": 5}
    wait_until(lambda: ray.available_resources().get("CPU") == 4.0, "4 free CPUs")


def test_ranks_of_an_elastic_job_are_neighbours_on_their_node() -> None:
    executor = RayExecutor(RayExecutor.create_settings(), min_workers=4, max_workers=4)
    executor.start()
    rows = executor.run(total, args=[2.0])
    executor.shutdown()
    assert rows == [(0, 4, 0, 2, 14.0), (1, 4, 1, 2, 14.0), (2, 4, 0, 2, 14.0), (3, 4, 1, 2, 14.0)]


def work_on_two_nodes(folder: Path) -> tuple[int, int, str]:
    import numpy as np

    import horovod.numpy as hvd
    from horovod.common import elastic

    hvd.init()

    @elastic.run
    def train(state: Any) -> None:
        while not ((folder / "alone").exists() and hvd.cross_size() == 2):
            hvd.allreduce(np.ones(2), name="x")
            state.batch += 1
            state.commit()
            if state.batch >= 5 and hvd.rank() == 0 and hvd.cross_size() == 2:
                (folder / "begun").touch()
            if state.batch >= 5 and (folder / "gone").exists() and hvd.cross_size() == 1:
                (folder / "alone").touch()
            time.sleep(0.02)

    train(elastic.ObjectState(hvd.broadcast_object, hvd.rank, batch=0))
    return hvd.rank(), hvd.size(), os.environ["HOROVOD_HOSTNAME"]


def test_an_elastic_job_loses_a_node_and_gets_another(cluster: Any, tmp_path: Path) -> None:
    executor = RayExecutor(RayExecutor.create_settings(), min_workers=1, cpus_per_worker=2)
    executor.start()
    lost = cluster.list_all_nodes()[-1]
    with ThreadPoolExecutor(1) as pool:
        results = pool.submit(executor.run, work_on_two_nodes, args=[tmp_path])
        # Ray adds nodes in the main thread only.
        wait_until(lambda: (tmp_path / "begun").exists(), "ranks on two nodes")
        cluster.remove_node(lost, allow_graceful=False)
        (tmp_path / "gone").touch()
        wait_until(lambda: (tmp_path / "alone").exists(), "rank that goes on alone")
        cluster.add_node(**OTHER_NODE)
    assert [result[:2] for result in results.result()] == [(0, 2), (1, 2)]
    assert (tmp_path / "alone").exists()
    wait_until(lambda: ray.available_resources().get("CPU") == 4.0, "4 free CPUs")


def test_the_older_elastic_executor() -> None:
    settings = ElasticRayExecutor.create_settings(min_num_proc=2, max_num_proc=2, verbose=True)
    executor = ElasticRayExecutor(settings, cpus_per_slot=2, env_vars={"COLOUR": "red"})
    executor.start()

    def work() -> tuple[int, str]:
        import horovod.numpy as hvd

        hvd.init()
        return hvd.rank(), os.environ["COLOUR"]

    assert executor.run(work) == [(0, "red"), (1, "red")]


def write_total(config: dict[str, Any]) -> None:
    row = total(config["first"])
    (config["folder"] / str(row[0])).write_text(repr(row))
    (config["folder"] / "rendezvous").write_text(os.environ["HOROVOD_RENDEZVOUS"])


def test_ray_train(tmp_path: Path) -> None:
    pytest.importorskip("ray.train.v2", reason="Ray Train is not installed")
    from ray.train import RunConfig, ScalingConfig

    from horovod.ray.train import HorovodTrainer

    # Its controller does not know where this module is.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    HorovodTrainer(
        write_total,
        train_loop_config={"first": 2.0, "folder": tmp_path},
        # Else Ray may put them on two nodes, which do not meet on the loopback.
        scaling_config=ScalingConfig(num_workers=2, placement_strategy="STRICT_PACK"),
        run_config=RunConfig(storage_path=str(tmp_path), name="job"),
    ).fit()
    rows = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    assert rows == ["(0, 2, 0, 2, 5.0)", "(1, 2, 1, 2, 5.0)"]
    assert (tmp_path / "rendezvous").read_text().startswith("127.0.0.1:")


@pytest.mark.thorough(also="tests/integration/test_ray.py::test_ray_train")
def test_users_inside_rays_torch_trainer_find_their_ranks(tmp_path: Path) -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    TorchTrainer(
        write_total,
        train_loop_config={"first": 2.0, "folder": tmp_path},
        # Ranks on several nodes need HOROVOD_JOB_KEY.
        scaling_config=ScalingConfig(num_workers=2, placement_strategy="STRICT_PACK"),
        run_config=RunConfig(storage_path=str(tmp_path), name="job"),
    ).fit()
    rows = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    assert rows == ["(0, 2, 0, 2, 5.0)", "(1, 2, 1, 2, 5.0)"]


def test_what_rays_own_trainer_imports() -> None:
    from horovod.ray.runner import Coordinator
    from horovod.ray.utils import detect_nics, nics_to_env_var

    settings = RayExecutor.create_settings()
    coordinator = Coordinator(settings)
    for rank, node in enumerate(["one", "one", "two"]):
        coordinator.register("host", node, rank)
    own = coordinator.finalize_registration()
    assert [own[rank]["HOROVOD_LOCAL_RANK"] for rank in range(3)] == ["0", "1", "0"]
    assert [own[rank]["HOROVOD_CROSS_SIZE"] for rank in range(3)] == ["2", "1", "2"]
    common = coordinator.establish_rendezvous()
    assert {"HOROVOD_RENDEZVOUS", "HOROVOD_JOB_KEY"} <= common.keys()
    assert not common.keys() & own[0].keys()
    assert detect_nics(settings, all_host_names=["host"]) == []
    settings.nics = {"lo"}
    found = detect_nics(settings, all_host_names=["host"])
    assert nics_to_env_var(found) == {"HOROVOD_GLOO_IFACE": "lo", "NCCL_SOCKET_IFNAME": "lo"}


WITH_RAY_TRAIN = pytest.mark.thorough(also="tests/integration/test_ray.py::test_ray_train")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("ray_static.py", []),
        ("ray_elastic.py", []),
        pytest.param("ray_train.py", ["--epochs", "3"], marks=WITH_RAY_TRAIN),
        pytest.param("ray_tune.py", ["--epochs", "3"], marks=WITH_RAY_TRAIN),
    ],
)
def test_examples_learn(script: str, words: list[str], jobs: Any) -> None:
    path = harness.ROOT / "examples" / "ray" / script
    job = jobs(harness.Job([sys.executable, path, *words], limit_s=LIMIT_S - 30)).succeed()
    accuracies = re.findall(r"accuracy ([\d.]+)%", job.stdout)
    assert accuracies, job.report()
    assert float(accuracies[-1]) > 85
