"""Names of the network interfaces that hosts have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horovod.ray import utils

__all__: list[str] = []


def _actor_launch_task_servers(
    node_workers: Sequence[Any], num_hosts: int, driver_addresses: Any = None, settings: Any = None
) -> list[list[str]]:
    """Interfaces of each host, as an actor there sees them: no servers are needed."""
    if len(node_workers) != num_hosts:
        raise ValueError(
            f"expected an actor for each of {num_hosts} hosts, got {len(node_workers)}"
        )
    return utils.map_blocking(lambda worker: worker.execute.remote(utils._interfaces), node_workers)


def _driver_fn(
    all_host_names: Sequence[str],
    local_host_names: Sequence[str],
    settings: Any,
    node_workers: Sequence[Any] | None = None,
) -> set[str]:
    """Interfaces that all hosts have, among those of `settings.nics` if there are any."""
    if settings.nics:
        return set(utils.detect_nics(settings, all_host_names, node_workers))
    hosts = [utils._interfaces()]
    if node_workers:
        hosts = _actor_launch_task_servers(node_workers, len(all_host_names))
    return set(hosts[0]).intersection(*hosts)
