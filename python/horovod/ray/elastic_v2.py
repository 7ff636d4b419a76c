"""Elastic jobs on Ray: ranks come and go with actors and nodes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Listener
from typing import Any

import ray
from ray.util.queue import Empty, Queue
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from horovod.ray import ray_logger
from horovod.ray.adapter import Adapter, BaseParams
from horovod.ray.strategy import resources_here
from horovod.ray.utils import name_host
from horovod.runner import agents, executor
from horovod.runner._options import JobOptions
from horovod.runner.elastic.discovery import HostDiscovery

__all__ = ["ElasticAdapter", "ElasticParams", "RayHostDiscovery", "TestDiscovery"]

_POLL_S = 0.2
_DISCOVERY_POLL_S = 1.0
# An actor that fails sooner has not worked.
_QUICK_S = 10.0
_QUICK_FAILURES = 5
# Before the place of one that has left by itself is taken again.
_LEFT_S = 5.0
_DRAIN_LIMIT_S = 60.0
# An actor with this variable has the list of GPUs that Ray's processes of its node have, instead of its own.
_KEEP_NODES_GPUS = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


@dataclasses.dataclass
class ElasticParams(BaseParams):
    """How many workers there may be, and how changes are dealt with."""

    min_workers: int = 1
    max_workers: int | None = None
    reset_limit: int | None = None
    cooldown_range: Sequence[int] | None = None
    elastic_timeout: int = 600
    override_discovery: bool = True

    @property
    def elastic(self) -> bool:
        """Whether workers come and go."""
        return True


class RayHostDiscovery(HostDiscovery):
    """The nodes of the cluster that are alive, by their ids.

    Parameters
    ----------
    use_gpu, cpus_per_worker, gpus_per_worker
        Resources of a worker. All resources of a node count, as if nobody else used it.
    """

    def __init__(
        self, use_gpu: bool = False, cpus_per_worker: float = 1, gpus_per_worker: float = 1
    ) -> None:
        self.use_gpu = use_gpu
        self.cpus_per_worker = cpus_per_worker
        self.gpus_per_worker = gpus_per_worker

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """How many workers each can have."""
        found = {}
        for node in ray.nodes():
            if not node["Alive"]:
                continue
            resources = node["Resources"]
            slots = (
                [resources.get("CPU", 0) // self.cpus_per_worker] if self.cpus_per_worker else []
            )
            if self.use_gpu:
                slots.append(resources.get("GPU", 0) // self.gpus_per_worker)
            if slots and min(slots) >= 1:
                found[node["NodeID"]] = int(min(slots))
        return found


class TestDiscovery(RayHostDiscovery):
    """For trying out elastic scripts: nodes seem to leave and to come back.

    Parameters
    ----------
    min_hosts, max_hosts
        How many there are at least and at most.
    change_frequency_s
        Seconds between two changes.
    use_gpu, cpus_per_worker, gpus_per_worker
        As for `RayHostDiscovery`.
    verbose
        Print changes.
    """

    __test__ = False

    def __init__(
        self,
        min_hosts: int,
        max_hosts: int,
        change_frequency_s: float,
        use_gpu: bool = False,
        cpus_per_worker: float = 1,
        gpus_per_worker: float = 1,
        verbose: bool = True,
        _graceful: bool = True,
    ) -> None:
        super().__init__(use_gpu, cpus_per_worker, gpus_per_worker)
        if not _graceful:
            raise ValueError("_graceful=False is not there: end a node with `ray stop` on it")
        self._min_hosts = min_hosts
        self._max_hosts = max_hosts
        self._change_frequency_s = change_frequency_s
        self._verbose = verbose
        self._changed_at = time.monotonic()
        self._hidden: set[str] = set()

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Those that are not hidden now."""
        found = super().find_available_hosts_and_slots()
        shown = sorted(found.keys() - self._hidden)
        if time.monotonic() - self._changed_at >= self._change_frequency_s:
            self._changed_at = time.monotonic()
            self._change(shown)
            shown = sorted(found.keys() - self._hidden)
        return {name: found[name] for name in shown[: self._max_hosts]}

    def _change(self, shown: list[str]) -> None:
        can_hide = len(shown) > self._min_hosts
        if can_hide and (not self._hidden or random.random() < 0.5):
            name = random.choice(shown)
            self._hidden.add(name)
            what = "hides"
        elif self._hidden:
            name = random.choice(sorted(self._hidden))
            self._hidden.discard(name)
            what = "shows"
        else:
            return
        if self._verbose:
            print(f"TestDiscovery {what} node {name}", flush=True)  # noqa: T201


class _AgentActor:
    """An actor that runs a rank as its child, until the job is over."""

    def serve_as_agent(
        self,
        invitation: agents.Invitation,
        index: int,
        attempt: int,
        host: str,
        variables: Mapping[str, str],
        gpus: int,
        queue: Any,
    ) -> int:
        """Exit status of the agent."""
        # Variables of another job in this process would be taken for this job's.
        for name in os.environ.keys() - executor.without_job(os.environ).keys():
            del os.environ[name]
        with contextlib.ExitStack() as stack:
            log_variables = stack.enter_context(_log_listener(queue)) if queue is not None else {}
            return agents.serve_as_agent(
                invitation,
                index=index,
                attempt=attempt,
                host=host,
                environment={**_visible(gpus), **variables, **log_variables},
            )


def _visible(gpus: int) -> dict[str, str]:
    """So many GPUs for a rank on this node: those that Ray was started with, which may be some of the machine's."""
    if not gpus:
        return {}
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = listed.split(",") if listed else [str(number) for number in range(gpus)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[:gpus])}


@contextlib.contextmanager
def _log_listener(queue: Any) -> Any:
    """Variables by which the rank reaches this process with what it logs."""
    key = secrets.token_bytes(32)
    with (
        tempfile.TemporaryDirectory(prefix="hvd-") as folder,
        Listener(os.path.join(folder, "log"), "AF_UNIX", authkey=key) as listener,
    ):
        threading.Thread(target=_accept, args=(listener, queue), daemon=True).start()
        yield {
            ray_logger.SOCKET: str(listener.address),
            ray_logger.KEY: key.hex(),
        }


def _accept(listener: Listener, queue: Any) -> None:
    # Closing the listener ends it.
    with contextlib.suppress(OSError):
        while True:
            connection = listener.accept()
            threading.Thread(target=_pass_on, args=(connection, queue), daemon=True).start()


def _pass_on(connection: Connection[Any, Any], queue: Any) -> None:
    with contextlib.suppress(EOFError, OSError), connection:
        while True:
            queue.put(connection.recv())
            connection.send(None)


@dataclasses.dataclass
class _Running:
    index: int
    attempt: int
    host: str
    actor: Any
    began: float


class _Actors:
    """The tasks of the job: an actor in each slot of the hosts that the discovery names."""

    def __init__(
        self, discovery: HostDiscovery, params: ElasticParams, variables: Mapping[str, str]
    ) -> None:
        self._discovery = discovery
        self._params = params
        self._variables = variables
        self.queue: Any = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._running: dict[Any, _Running] = {}
        self._free: list[tuple[float, int, int]] = []
        self._numbers = 0
        self._names: dict[str, str] = {}
        self._quick_failures = 0

    @property
    def are_on_this_host(self) -> bool:
        """Never known: a node may join the cluster later."""
        return False

    def start(self, invitation: agents.Invitation) -> None:
        self._ask_autoscaler(self._params.max_workers or self._params.min_workers)
        self._thread = threading.Thread(target=self._work, args=(invitation,), daemon=True)
        self._thread.start()

    def failure(self) -> BaseException | None:
        return self._failure

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        for running in self._running.values():
            ray.kill(running.actor)
        self._running.clear()
        self._ask_autoscaler(0)

    def _ask_autoscaler(self, workers: int) -> None:
        """Have room for so many workers in the cluster, if it can grow: actors are bound to nodes that are there."""
        if self._params.override_discovery:
            from ray.autoscaler.sdk import request_resources

            worker = {"CPU": self._params.cpus_per_worker, "GPU": self._params.gpus_per_worker}
            bundle = {name: count for name, count in worker.items() if count}
            request_resources(bundles=[bundle] * workers)

    def _work(self, invitation: agents.Invitation) -> None:
        polled_at = -_DISCOVERY_POLL_S
        try:
            while not self._stopping.is_set():
                if time.monotonic() - polled_at >= _DISCOVERY_POLL_S:
                    polled_at = time.monotonic()
                    self._match(self._discovery.find_available_hosts_and_slots(), invitation)
                if self._running:
                    for ended in ray.wait(list(self._running), timeout=_POLL_S)[0]:
                        self._take_leave(ended)
                else:
                    self._stopping.wait(_POLL_S)
        except BaseException as error:
            self._failure = error

    def _match(self, hosts: Mapping[str, int], invitation: agents.Invitation) -> None:
        """Have as many actors on each host as it has slots, and not more than wanted in all."""
        counts: dict[str, int] = {}
        for reference, running in list(self._running.items()):
            counts[running.host] = counts.get(running.host, 0) + 1
            if counts[running.host] > hosts.get(running.host, 0):
                counts[running.host] -= 1
                self._end(reference)
        for host, slots in hosts.items():
            for _ in range(slots - counts.get(host, 0)):
                if len(self._running) >= (self._params.max_workers or len(self._running) + 1):
                    return
                self._start_one(host, invitation)

    def _start_one(self, host: str, invitation: agents.Invitation) -> None:
        now = time.monotonic()
        waiting = [place for place in self._free if place[0] > now]
        able = [place for place in self._free if place[0] <= now]
        if able:
            _, index, attempt = able[0]
            self._free.remove(able[0])
        elif waiting:
            return
        else:
            index, attempt = self._numbers, 0
            self._numbers += 1
        node = _node(host)
        name = name_host(self._names, node, _host_name(node))
        actor = (
            ray.remote(_AgentActor)
            .options(
                num_cpus=self._params.cpus_per_worker,
                num_gpus=self._params.gpus_per_worker or 0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
                runtime_env={"env_vars": _KEEP_NODES_GPUS} if self._params.use_gpu else None,
            )
            .remote()
        )
        reference = actor.serve_as_agent.remote(
            invitation, index, attempt, name, self._variables, self._gpus(host), self.queue
        )
        self._running[reference] = _Running(index, attempt, host, actor, now)

    def _gpus(self, host: str) -> int:
        """All of the node: users pick theirs by the local rank, which changes."""
        if not self._params.use_gpu:
            return 0
        return sum(
            int(node["Resources"].get("GPU", 0))
            for node in ray.nodes()
            if node["NodeID"] == _node(host)
        )

    def _take_leave(self, reference: Any) -> None:
        running = self._running[reference]
        try:
            status = ray.get(reference)
        except Exception as error:
            self._end(reference)
            if time.monotonic() - running.began > _QUICK_S:
                self._quick_failures = 0
            else:
                self._quick_failures += 1
            if self._quick_failures >= _QUICK_FAILURES:
                self._failure = RuntimeError(
                    f"RayExecutor: actors of the job fail at once, the last one on host {running.host}: {error}"
                )
            return
        self._end(reference, _LEFT_S)
        if status != 0 and time.monotonic() - running.began <= _QUICK_S:
            self._quick_failures += 1

    def _end(self, reference: Any, pause_s: float = 0.0) -> None:
        running = self._running.pop(reference)
        ray.kill(running.actor)
        again = (time.monotonic() + pause_s, running.index, running.attempt + 1)
        self._free.append(again)


def _host_name(node_id: str) -> str:
    """The host name of a node; its id if Ray does not know the node any more."""
    names = [n["NodeManagerHostname"] for n in ray.nodes() if n["NodeID"] == node_id]
    return str(names[0]) if names else node_id


def _node(host: str) -> str:
    """The id of a node that may be named by its address or host name."""
    for node in ray.nodes():
        names = (node["NodeID"], node["NodeManagerAddress"], node["NodeManagerHostname"])
        if node["Alive"] and host in names:
            return str(node["NodeID"])
    return host


class ElasticAdapter(Adapter):
    """Ranks that come and go, each a child of an actor."""

    def __init__(self, settings: Any, params: ElasticParams) -> None:
        self.settings = settings
        self.params = params
        self._variables: dict[str, str] = {}

    def start(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, Any] | None = None,
    ) -> None:
        """Look how many workers there can be; they start with the function that they are to run."""
        if ray.util.client.ray.is_connected():
            raise RuntimeError(
                "RayExecutor: elastic jobs cannot be started through Ray Client; run this script on a node of the "
                "cluster (ray job submit)"
            )
        self._variables = {name: str(value) for name, value in (extra_env_vars or {}).items()}
        if self.params.override_discovery:
            self.settings.discovery = RayHostDiscovery(
                self.params.use_gpu, self.params.cpus_per_worker, self.params.gpus_per_worker or 1
            )
        elif getattr(self.settings, "discovery", None) is None:
            raise ValueError("override_discovery=False needs settings.discovery, which is not set")

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[[Any], Any]] | None = None,
    ) -> list[Any]:
        """The results of `fn(*args, **kwargs)` on the ranks that have finished together."""
        actors = _Actors(self.settings.discovery, self.params, self._variables)
        needed = max(1, self.params.min_workers)
        options = JobOptions(
            num_proc=needed,
            min_num_proc=needed,
            max_num_proc=self.params.max_workers,
            reset_limit=self.params.reset_limit,
            cooldown_range=self.params.cooldown_range,
            elastic_timeout=self.params.elastic_timeout or None,
            network_interfaces=sorted(self.settings.nics or ()) or None,
            is_elastic=True,
            caller="RayExecutor.run",
        )
        with contextlib.ExitStack() as stack:
            if callbacks:
                actors.queue = stack.enter_context(_served(callbacks))
            try:
                return agents.run_job(fn, args or (), kwargs, options, tasks=actors)
            except RuntimeError as error:
                error.add_note(
                    f"The job needs {needed} workers or more, each with {self.params.cpus_per_worker} CPU and "
                    f"{self.params.gpus_per_worker} GPU; {resources_here()}."
                )
                raise

    def run_remote(self, fn: Any, args: Any = None, kwargs: Any = None) -> list[Any]:
        """Not there: workers come and go."""
        raise NotImplementedError("elastic workers have no run_remote; use run()")

    def execute(self, fn: Any, callbacks: Any = None) -> list[Any]:
        """Not there: workers come and go, and keep no object."""
        raise NotImplementedError("elastic workers have no execute; use run()")

    def execute_single(self, fn: Any) -> Any:
        """Not there: workers come and go, and keep no object."""
        raise NotImplementedError("elastic workers have no execute_single; use run()")

    def shutdown(self) -> None:
        """Nothing is left after `run`."""


@contextlib.contextmanager
def _served(callbacks: Sequence[Callable[[Any], Any]]) -> Any:
    """A queue whose items are given to the callbacks, the last ones at the end."""
    queue = Queue(actor_options={"num_cpus": 0})
    ending = threading.Event()

    def serve() -> None:
        while True:
            is_last = ending.is_set()
            with contextlib.suppress(Empty):
                while True:
                    item = queue.get(timeout=_POLL_S)
                    for callback in callbacks:
                        callback(item)
            if is_last:
                return

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield queue
    finally:
        ending.set()
        thread.join(_DRAIN_LIMIT_S)
        queue.shutdown()
