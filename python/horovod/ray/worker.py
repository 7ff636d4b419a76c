"""Actors that are ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from horovod.common.basics import called_for_script
from horovod.ray import ray_logger
from horovod.runner import executor

__all__ = ["BaseHorovodWorker", "ActorPlace"]

_REACH_LIMIT_S = 3.0


@dataclasses.dataclass(frozen=True)
class ActorPlace:
    """Where an actor is."""

    node_id: str
    hostname: str
    address: str
    gpus: tuple[str, ...]

    def __str__(self) -> str:
        return f"node {self.node_id} ({self.address})"


class BaseHorovodWorker:
    """An actor that is a rank: the functions that it is given run in its process.

    Parameters
    ----------
    world_rank, world_size
        Rank and number of ranks, until `update_env_vars` says otherwise.
    """

    executable: Any = None

    def __init__(self, world_rank: int = 0, world_size: int = 1) -> None:
        self._rendezvous: executor.Rendezvous | None = None
        for name in executor.without_job(os.environ).keys() ^ os.environ.keys():
            del os.environ[name]
        self.update_env_vars(
            {
                "HOROVOD_HOSTNAME": self.hostname(),
                "HOROVOD_RANK": world_rank,
                "HOROVOD_SIZE": world_size,
            }
        )

    def node_id(self) -> str:
        """Ray's id of the node."""
        node_id: str = ray.get_runtime_context().get_node_id()
        return node_id

    def hostname(self) -> str:
        """The name of the host; several nodes may be on one."""
        return socket.gethostname()

    def get_gpu_ids(self) -> list[str]:
        """GPUs that Ray has given to this actor."""
        return [str(gpu) for gpu in ray.get_gpu_ids()]

    def place(self, sys_path: Sequence[str] = ()) -> ActorPlace:
        """Where this is; modules are also searched on `sys_path` from now on."""
        sys.path.extend(place for place in sys_path if place not in sys.path)
        address = ray.util.get_node_ip_address()
        return ActorPlace(self.node_id(), self.hostname(), address, tuple(self.get_gpu_ids()))

    def update_env_vars(self, env_vars: Mapping[str, Any]) -> None:
        """Set environment variables."""
        os.environ.update({name: str(value) for name, value in env_vars.items()})

    def env_vars(self) -> dict[str, str]:
        """The environment of this process."""
        return dict(os.environ)

    def set_queue(self, queue: Any) -> None:
        """Where `ray_logger.log` of this process puts what it is given."""
        ray_logger.configure(queue)

    def start_executable(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Make the object that `execute` passes to functions."""
        if executable_cls is not None:
            self.executable = executable_cls(*(executable_args or ()), **(executable_kwargs or {}))

    def execute(self, func: Callable[[Any], Any]) -> Any:
        """The result of `func` for the object of `start_executable`."""
        with called_for_script():
            return func(self.executable)

    def reaches(self, addresses: Sequence[str]) -> bool:
        """Whether something listens at one of these addresses."""
        for address in addresses:
            host, _, port = address.rpartition(":")
            with contextlib.suppress(OSError):
                socket.create_connection((host.strip("[]"), int(port)), _REACH_LIMIT_S).close()
                return True
        return False

    def serve_rendezvous(
        self, size: int, interfaces: Sequence[str], local: bool
    ) -> executor.RendezvousAddress:
        """Serve the ranks' rendezvous from this process."""
        self._rendezvous = executor.Rendezvous(size, local=local, interfaces=interfaces)
        return self._rendezvous.address
