"""Where the actors of a job are placed."""

from __future__ import annotations

import dataclasses
import logging
from abc import ABC, abstractmethod
from typing import Any

import ray
from ray.util.placement_group import (
    get_current_placement_group,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from horovod.ray.worker import BaseHorovodWorker

__all__ = [
    "BaseStrategy",
    "ColocatedStrategy",
    "PGStrategy",
    "create_placement_group",
    "resources_here",
]

_log = logging.getLogger(__name__)


def resources_here() -> str:
    """The cluster's resources, for messages."""
    shown = {
        what: {name: resources[name] for name in ("CPU", "GPU") if name in resources}
        for what, resources in (
            ("free", ray.available_resources()),
            ("in all", ray.cluster_resources()),
        )
    }
    alive = sum(node["Alive"] for node in ray.nodes())
    return f"the cluster has {alive} nodes, free {shown['free']}, in all {shown['in all']}"


def create_placement_group(
    resources_per_bundle: dict[str, float], num_bundles: int, pg_timeout: float, pg_strategy: str
) -> tuple[Any, list[dict[str, float]]]:
    """A placement group that is ready, and its bundles.

    Raises
    ------
    TimeoutError
        It is not within `pg_timeout` seconds; it has been removed.
    """
    bundles = [dict(resources_per_bundle) for _ in range(num_bundles)]
    group = placement_group(bundles, strategy=pg_strategy)
    if not group.wait(pg_timeout):
        remove_placement_group(group)
        raise TimeoutError(
            f"Placement group creation timed out after {pg_timeout:g} s: requested {num_bundles} x "
            f"{resources_per_bundle} ({pg_strategy}); {resources_here()}. Ask for less, wait until others "
            "have ended, or raise placement_group_timeout_s while nodes are being added"
        )
    return group, bundles


@dataclasses.dataclass
class BaseStrategy(ABC):
    """Makes the actors of a job, in their placement group."""

    settings: Any
    num_workers: int
    cpus_per_worker: float
    gpus_per_worker: float
    placement_group: Any = dataclasses.field(default=None, init=False)
    _is_own: bool = dataclasses.field(default=False, init=False)

    @abstractmethod
    def create_workers(self) -> list[Any]:
        """The actors; they may not be there yet."""

    def _resources(self, workers: int) -> dict[str, float]:
        resources = {"CPU": self.cpus_per_worker * workers}
        if self.gpus_per_worker:
            resources["GPU"] = self.gpus_per_worker * workers
        return resources

    def _make_group(self, bundles: int, workers_per_bundle: int, kind: str) -> None:
        self.placement_group, _ = create_placement_group(
            self._resources(workers_per_bundle),
            bundles,
            self.settings.placement_group_timeout_s,
            kind,
        )
        self._is_own = True

    def _create(self, bundles: list[int]) -> list[Any]:
        remote = ray.remote(BaseHorovodWorker)
        return [
            remote.options(
                num_cpus=self.cpus_per_worker,
                num_gpus=self.gpus_per_worker,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self.placement_group,
                    placement_group_bundle_index=bundle,
                    placement_group_capture_child_tasks=False,
                ),
            ).remote(world_rank=index, world_size=self.num_workers)
            for index, bundle in enumerate(bundles)
        ]

    def shutdown(self) -> None:
        """Give back the placement group, unless it is the caller's."""
        if self._is_own:
            remove_placement_group(self.placement_group)
        self.placement_group = None
        self._is_own = False


@dataclasses.dataclass
class ColocatedStrategy(BaseStrategy):
    """The same number of workers on each of so many hosts."""

    num_hosts: int = 1

    def create_workers(self) -> list[Any]:
        """Host by host."""
        per_host = self.num_workers // self.num_hosts
        self._make_group(self.num_hosts, per_host, "STRICT_SPREAD")
        return self._create([host for host in range(self.num_hosts) for _ in range(per_host)])


@dataclasses.dataclass
class PGStrategy(BaseStrategy):
    """A number of workers on as few hosts as possible, or in the placement group of the caller."""

    use_current_placement_group: bool = True

    def create_workers(self) -> list[Any]:
        """In any order of hosts."""
        current = get_current_placement_group() if self.use_current_placement_group else None
        if current is None:
            self._make_group(self.num_workers, 1, "PACK")
            return self._create(list(range(self.num_workers)))
        _log.info("using the placement group of the caller: %s", current.bundle_specs)
        self.placement_group = current
        return self._create([-1] * self.num_workers)
