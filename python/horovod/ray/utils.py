"""Network interfaces of a job's hosts, and calls on many actors."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ray

__all__ = ["detect_nics", "map_blocking", "name_host", "nics_to_env_var"]


def map_blocking(fn: Callable[[Any], Any], collection: Iterable[Any]) -> list[Any]:
    """The results of remote calls: `fn` makes a reference of each item."""
    results: list[Any] = ray.get([fn(item) for item in collection])
    return results


def are_on_this_node(node_ids: Iterable[str]) -> bool:
    """Whether all of these are the node of this process; False where this process is on no node of Ray's."""
    if not ray.is_initialized() or ray.util.client.ray.is_connected():
        return False
    return set(node_ids) == {ray.get_runtime_context().get_node_id()}


def name_host(names: dict[str, str], node_id: str, hostname: str) -> str:
    """The name by which a job knows a node, a host of its own: its host name, which `names` keeps by the node's id.

    Of several nodes on one machine all but the first have a part of the id in it.
    """
    if node_id not in names:
        is_taken = hostname in names.values()
        names[node_id] = f"{hostname}-{node_id[:8]}" if is_taken else hostname
    return names[node_id]


def nics_to_env_var(nics: Iterable[str]) -> dict[str, str]:
    """Variables that make ranks use these interfaces; none without any."""
    names = list(nics)
    if not names:
        return {}
    return {"HOROVOD_GLOO_IFACE": names[0], "NCCL_SOCKET_IFNAME": ",".join(names)}


def _interfaces(_: Any = None) -> list[str]:
    """Names of the interfaces of the host that this runs on."""
    return [name for _, name in socket.if_nameindex()]


def detect_nics(
    settings: Any,
    all_host_names: Sequence[str] | None = None,
    node_workers: Sequence[Any] | None = None,
) -> list[str]:
    """The interfaces of `settings.nics`; none named means that ranks look for a way by themselves.

    Raises
    ------
    ValueError
        A host has none of those that are named.
    """
    wanted = sorted(settings.nics or ())
    if not wanted:
        return []
    hosts = [_interfaces()]
    if node_workers:
        hosts = map_blocking(lambda worker: worker.execute.remote(_interfaces), node_workers)
    common = [name for name in wanted if all(name in names for names in hosts)]
    if not common:
        names = all_host_names or range(len(hosts))
        there = dict(zip(names, hosts, strict=False))
        raise ValueError(f"nics: none of {wanted} is on every host; there are {there}")
    return common
