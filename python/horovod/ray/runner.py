"""`RayExecutor`: functions on ranks that are the actors of a Ray cluster."""

from __future__ import annotations

import dataclasses
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import get_current_placement_group

from horovod.ray._results import Call, RanksEnded, collect, stored
from horovod.ray.adapter import Adapter, BaseParams
from horovod.ray.elastic_v2 import ElasticAdapter, ElasticParams
from horovod.ray.strategy import BaseStrategy, ColocatedStrategy, PGStrategy, resources_here
from horovod.ray.utils import (
    are_on_this_node,
    detect_nics,
    map_blocking,
    name_host,
    nics_to_env_var,
)
from horovod.ray.worker import ActorPlace
from horovod.runner import executor
from horovod.runner.common.util import secret, timeout

__all__ = ["Coordinator", "MiniSettings", "RayExecutor", "StaticAdapter", "StaticParams"]

# How long actors may take to end by themselves.
_END_LIMIT_S = 5.0
_OF_ONE_RANK = ("RANK", "SIZE", "HOSTNAME")


@dataclasses.dataclass
class MiniSettings:
    """Settings of `RayExecutor`; those of ssh have no effect, as nothing uses it."""

    nics: set[str] | None = None
    verbose: int = 1
    key: bytes | str = dataclasses.field(default_factory=secret.make_secret_key, repr=False)
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    timeout_s: int = 300
    placement_group_timeout_s: int = 100
    elastic: bool = False

    @property
    def start_timeout(self) -> timeout.Timeout:
        """A limit of `timeout_s` that begins now."""
        return timeout.Timeout(
            self.timeout_s,
            message="Timed out after {timeout} seconds waiting for {activity}. Check that the nodes reach "
            "each other, or raise timeout_s.",
        )


class Coordinator:
    """The places of ranks that somebody else has started, such as Ray Train's, and their rendezvous.

    Parameters
    ----------
    settings
        Its `nics` are the interfaces to use between hosts; none means all.
    """

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self._registered: dict[int, tuple[str, str]] = {}
        self._rendezvous: executor.Rendezvous | None = None
        self._common: dict[str, str] = {}

    @property
    def hostnames(self) -> set[str]:
        """Names of the hosts; several nodes may have the same."""
        return {hostname for hostname, _ in self._registered.values()}

    @property
    def world_size(self) -> int:
        """Number of ranks so far."""
        return len(self._registered)

    def register(self, hostname: str, node_id: str, world_rank: int) -> None:
        """Tell where a rank is; its host is the node."""
        self._registered[world_rank] = (hostname, node_id)

    def finalize_registration(self) -> dict[int, dict[str, str]]:
        """For each rank the variables that are its own."""
        nics = sorted(self.settings.nics or ())
        nodes = {node_id for _, node_id in self._registered.values()}
        self._rendezvous = executor.Rendezvous(
            self.world_size, local=are_on_this_node(nodes), interfaces=nics
        )
        order = sorted(self._registered)
        names: dict[str, str] = {}
        hosts = [self._registered[rank] for rank in order]
        processes = [(name_host(names, node_id, name), name) for name, node_id in hosts]
        assigned = executor.assign(processes, self._rendezvous.address, interfaces=nics)
        self._common = {
            name: value
            for name, value in assigned[0].variables.items()
            if not name.endswith(_OF_ONE_RANK)
        }
        return {
            rank: {n: v for n, v in part.variables.items() if n not in self._common}
            for rank, part in zip(order, assigned, strict=True)
        }

    def establish_rendezvous(self) -> dict[str, str]:
        """The variables that all ranks have in common; the rendezvous is served as long as this object is there."""
        if self._rendezvous is None:
            self.finalize_registration()
        return dict(self._common)


@dataclasses.dataclass
class StaticParams(BaseParams):
    """Number of workers, or of hosts and workers on each."""

    num_workers: int | None = None
    num_hosts: int | None = None
    num_workers_per_host: int = 1
    use_current_placement_group: bool = True

    @property
    def elastic(self) -> bool:
        """Whether workers come and go."""
        return False

    def check(self) -> None:
        """Complain of numbers that are none, or too many."""
        if self.num_workers and self.num_hosts:
            raise AssertionError(
                f"num_workers={self.num_workers} and num_hosts={self.num_hosts} exclude each other: pass "
                "num_workers, or num_hosts and num_workers_per_host"
            )
        for name in ("num_workers", "num_hosts", "num_workers_per_host"):
            if (value := getattr(self, name)) is not None and value < 0:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        if not self.num_workers and not (self.num_hosts and self.num_workers_per_host):
            raise TypeError(
                "RayExecutor: no workers: pass num_workers, num_hosts and num_workers_per_host, or "
                "min_workers for an elastic job"
            )

    def strategy(self, settings: Any) -> BaseStrategy:
        """How to place them."""
        numbers = (self.cpus_per_worker, self.gpus_per_worker or 0)
        is_inside = self.use_current_placement_group and get_current_placement_group() is not None
        if self.num_workers or is_inside:
            count = self.num_workers or (self.num_hosts or 1) * self.num_workers_per_host
            return PGStrategy(settings, count, *numbers, self.use_current_placement_group)
        hosts = self.num_hosts or 1
        return ColocatedStrategy(settings, hosts * self.num_workers_per_host, *numbers, hosts)


class StaticAdapter(Adapter):
    """A fixed number of actors, each of which is a rank."""

    def __init__(self, settings: Any, params: StaticParams) -> None:
        self.settings = settings
        self.params = params
        self.workers: list[Any] = []
        self._places: list[ActorPlace] = []
        self._strategy: BaseStrategy | None = None
        self._rendezvous: executor.Rendezvous | None = None
        self._ended = "start() has not been called"

    def start(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, Any] | None = None,
    ) -> None:
        """Start the actors and make them ranks."""
        self.params.check()
        if self.workers:
            raise RuntimeError("RayExecutor: it has been started already; call shutdown() first")
        try:
            self._start_workers(extra_env_vars or {})
            self._ended = ""
            made = (executable_cls, executable_args, executable_kwargs)
            stored(made, "the executable's class, or an argument,")
            calls = [worker.start_executable.remote(*made) for worker in self.workers]
            self._collect(calls, range(len(calls)))
        except BaseException:
            self.shutdown()
            raise

    def _start_workers(self, extra_env_vars: Mapping[str, Any]) -> None:
        self._strategy = self.params.strategy(self.settings)
        actors = self._strategy.create_workers()
        self.workers = actors
        limit_s = max(
            self.settings.placement_group_timeout_s, getattr(self.settings, "timeout_s", 0)
        )
        # Modules that the caller can import can be imported there, too, where they exist.
        asked = [actor.place.remote(sys.path) for actor in actors]
        ready, pending = ray.wait(asked, num_returns=len(asked), timeout=limit_s)
        if pending:
            raise TimeoutError(
                f"RayExecutor: {len(ready)} of {len(asked)} workers have started within {limit_s:g} s; each asks for "
                f"{self.params.cpus_per_worker} CPU and {self.params.gpus_per_worker} GPU in the placement group "
                f"{self._strategy.placement_group.bundle_specs}; {resources_here()}"
            )
        places: list[ActorPlace] = ray.get(asked)
        nics = sorted(self.settings.nics or ())
        names: dict[str, str] = {}
        parts = executor.assign(
            [(name_host(names, place.node_id, place.hostname), place.address) for place in places],
            self._serve(actors, places, nics),
            interfaces=nics,
        )
        order = sorted(range(len(actors)), key=lambda index: parts[index].rank)
        self.workers = [actors[index] for index in order]
        self._places = [places[index] for index in order]
        found = detect_nics(self.settings, [str(place) for place in self._places], self.workers)
        environments = [
            {
                **parts[index].variables,
                **self._own_variables(place),
                **{name: str(value) for name, value in extra_env_vars.items()},
                **nics_to_env_var(found),
            }
            for index, place in zip(order, self._places, strict=True)
        ]
        map_blocking(
            lambda pair: pair[0].update_env_vars.remote(pair[1]),
            zip(self.workers, environments, strict=True),
        )

    def _serve(
        self, actors: Sequence[Any], places: Sequence[ActorPlace], nics: Sequence[str]
    ) -> executor.RendezvousAddress:
        """Have the rendezvous served from here, or from the actor of rank 0 where not all reach this process."""
        nodes = {place.node_id for place in places}
        if not ray.util.client.ray.is_connected():
            self._rendezvous = executor.Rendezvous(
                len(actors), local=are_on_this_node(nodes), interfaces=nics
            )
            address = self._rendezvous.address
            here = ray.get_runtime_context().get_node_id()
            far = [a for a, place in zip(actors, places, strict=True) if place.node_id != here]
            if all(map_blocking(lambda actor: actor.reaches.remote(address.addresses), far)):
                return address
            self._rendezvous.close()
            self._rendezvous = None
        served: executor.RendezvousAddress = ray.get(
            actors[0].serve_rendezvous.remote(len(actors), nics, len(nodes) == 1)
        )
        return served

    def _own_variables(self, place: ActorPlace) -> dict[str, str]:
        variables = {"OMP_NUM_THREADS": str(max(1, int(self.params.cpus_per_worker)))}
        # All of the job's on the node, in the order of local ranks: users pick by these.
        gpus = dict.fromkeys(
            gpu for other in self._places if other.node_id == place.node_id for gpu in other.gpus
        )
        if gpus:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        return variables

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[[Any], Any]] | None = None,
    ) -> list[Any]:
        """The results of `fn(*args, **kwargs)` on all ranks."""
        return self._collect(self.run_remote(fn, args, kwargs), range(len(self.workers)))

    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """As `run`, without waiting: references to the results."""
        self._check()
        call = stored(Call(fn, args, kwargs), f"the function {fn!r}, or an argument,")
        return [worker.execute.remote(call) for worker in self.workers]

    def execute(
        self, fn: Callable[[Any], Any], callbacks: Sequence[Callable[[Any], Any]] | None = None
    ) -> list[Any]:
        """The results of `fn(executable)` on all ranks."""
        self._check()
        call = stored(fn, f"the function {fn!r}")
        calls = [worker.execute.remote(call) for worker in self.workers]
        return self._collect(calls, range(len(calls)))

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """The result of `fn(executable)` on rank 0."""
        self._check()
        call = stored(fn, f"the function {fn!r}")
        return self._collect([self.workers[0].execute.remote(call)], [0])[0]

    def shutdown(self) -> None:
        """End the actors and give back their placement group."""
        ending = [] if self._ended else [w.__ray_terminate__.remote() for w in self.workers]
        if ending:
            ray.wait(ending, num_returns=len(ending), timeout=_END_LIMIT_S)
        self._end("shutdown() has been called")

    def _end(self, why: str) -> None:
        self._ended = why
        for worker in self.workers:
            ray.kill(worker)
        self.workers = []
        self._places = []
        if self._strategy is not None:
            self._strategy.shutdown()
            self._strategy = None
        if self._rendezvous is not None:
            self._rendezvous.close()
            self._rendezvous = None

    def _check(self) -> None:
        if self._ended:
            raise RuntimeError(f"RayExecutor: there are no workers: {self._ended}; call start()")

    def _collect(self, references: Sequence[Any], ranks: Sequence[int]) -> list[Any]:
        try:
            return collect(references, [self._places[rank] for rank in ranks], ranks)
        except RanksEnded as ended:
            self._end(f"they were ended because of {str(ended).splitlines()[0]!r}")
            raise ended.error from ended.__cause__


def _old_name(old_name: str, old: Any, name: str, value: Any) -> Any:
    if old is None:
        return value
    warnings.warn(f"{old_name} is deprecated, use {name} instead", DeprecationWarning, stacklevel=3)
    return old


class RayExecutor:
    """Runs functions on ranks in a Ray cluster.

    Parameters
    ----------
    settings
        Result of `create_settings`; None for its defaults.
    num_workers
        How many ranks, on as few nodes as possible.
    num_hosts, num_workers_per_host
        Instead: on how many nodes, and how many on each.
    cpus_per_worker, use_gpu, gpus_per_worker
        Resources that each rank reserves; `cpus_per_worker` is also the number of threads it computes with.
    use_current_placement_group
        Stay in the placement group of the caller if there is one.
    min_workers, max_workers
        An elastic job: ranks come and go with actors and nodes, between these numbers.
    reset_limit, cooldown_range, elastic_timeout
        As for `horovodrun`: how often ranks may change, how long failed ones are left alone, how long to wait for
        enough of them.
    override_discovery
        Look for nodes in the cluster; else `settings.discovery` says which hosts there are.
    num_slots, cpus_per_slot, gpus_per_slot
        Old names of the above.
    """

    @classmethod
    def create_settings(
        cls,
        timeout_s: int = 30,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: int = 100,
        nics: set[str] | None = None,
        verbose: int = 1,
    ) -> MiniSettings:
        """Settings.

        Parameters
        ----------
        timeout_s, placement_group_timeout_s
            How long workers may take to start, and how long to wait for the resources.
        ssh_identity_file, ssh_str
            Accepted; nothing uses ssh. The second is written to the first if there is no such file.
        nics
            Names of the interfaces to use between hosts; none means all.
        verbose
            Accepted.
        """
        if ssh_str and ssh_identity_file and not os.path.exists(ssh_identity_file):
            # Only a new file: where others may write, a link that leads elsewhere may lie at this place.
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with open(os.open(ssh_identity_file, flags, 0o600), "w") as file:
                file.write(ssh_str)
        return MiniSettings(
            nics=nics,
            verbose=int(verbose),
            ssh_identity_file=ssh_identity_file,
            timeout_s=timeout_s,
            placement_group_timeout_s=placement_group_timeout_s,
        )

    def __init__(
        self,
        settings: Any = None,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: int = 1,
        use_gpu: bool = False,
        gpus_per_worker: int | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: Sequence[int] | None = None,
        elastic_timeout: int = 600,
        override_discovery: bool = True,
        num_slots: int | None = None,
        cpus_per_slot: int | None = None,
        gpus_per_slot: int | None = None,
    ) -> None:
        per_host = _old_name("num_slots", num_slots, "num_workers_per_host", num_workers_per_host)
        cpus = _old_name("cpus_per_slot", cpus_per_slot, "cpus_per_worker", cpus_per_worker)
        gpus = _old_name("gpus_per_slot", gpus_per_slot, "gpus_per_worker", gpus_per_worker)
        if max_workers is not None and not min_workers:
            raise ValueError(
                f"max_workers={max_workers} needs min_workers of at least 1, got {min_workers}"
            )
        if min_workers is not None and num_workers is not None:
            raise ValueError(
                f"min_workers={min_workers} and num_workers={num_workers} exclude each other: the first is for "
                "elastic jobs"
            )
        self.settings = settings = self.create_settings() if settings is None else settings
        self.params: StaticParams | ElasticParams
        if min_workers is not None:
            self.params = ElasticParams(
                cpus_per_worker=cpus,
                use_gpu=use_gpu,
                gpus_per_worker=gpus,
                min_workers=min_workers,
                max_workers=max_workers,
                reset_limit=reset_limit,
                cooldown_range=cooldown_range,
                elastic_timeout=elastic_timeout,
                override_discovery=override_discovery,
            )
        else:
            self.params = StaticParams(
                cpus_per_worker=cpus,
                use_gpu=use_gpu,
                gpus_per_worker=gpus,
                num_workers=num_workers,
                num_hosts=num_hosts,
                num_workers_per_host=per_host,
                use_current_placement_group=use_current_placement_group,
            )
        settings.elastic = self.params.elastic
        self._adapter: Adapter | None = None

    @property
    def adapter(self) -> Adapter:
        """The adapter that does the work, once started."""
        if self._adapter is None:
            raise RuntimeError("RayExecutor: it has not been started; call start() first")
        return self._adapter

    def start(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, Any] | None = None,
    ) -> None:
        """Start the workers.

        Parameters
        ----------
        executable_cls, executable_args, executable_kwargs
            Class of an object that each worker makes and keeps, for `execute`, and its arguments.
        extra_env_vars
            Variables of the workers.

        Raises
        ------
        TimeoutError
            There are not enough resources.
        """
        if self._adapter is not None:
            raise RuntimeError("RayExecutor: it has been started already; call shutdown() first")
        adapter: Adapter
        if isinstance(self.params, ElasticParams):
            adapter = ElasticAdapter(self.settings, self.params)
        else:
            adapter = StaticAdapter(self.settings, self.params)
        adapter.start(executable_cls, executable_args, executable_kwargs, extra_env_vars)
        self._adapter = adapter

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[[Any], Any]] | None = None,
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank and return what they returned, in the order of ranks.

        Parameters
        ----------
        fn, args, kwargs
            Function to call, and its arguments.
        callbacks
            Called here with what ranks of an elastic job give to `ray_logger.log`.

        Raises
        ------
        Exception
            The exception of `fn` on a rank, with a note that names the rank.
        RuntimeError
            A rank was lost; the others have been ended.
        """
        return self.adapter.run(fn, args, kwargs, callbacks)

    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """As `run`, without waiting: references to the results."""
        return self.adapter.run_remote(fn, args, kwargs)

    def execute(
        self, fn: Callable[[Any], Any], callbacks: Sequence[Callable[[Any], Any]] | None = None
    ) -> list[Any]:
        """Call `fn` with the object that `start` has made on every rank; what they returned."""
        return self.adapter.execute(fn, callbacks)

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """As `execute`, on rank 0 only; what it returned."""
        return self.adapter.execute_single(fn)

    def shutdown(self) -> None:
        """End the workers and give back what they had reserved."""
        if self._adapter is not None:
            self._adapter.shutdown()
            self._adapter = None
