"""Horovod in Ray Train: a backend whose workers are ranks, and a trainer with it."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

import ray

from horovod._installation import command

try:
    from ray.train.backend import Backend, BackendConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
except ImportError as error:
    raise ImportError(
        f"horovod.ray.train needs Ray Train of Ray 2.43 or later, which cannot be imported here ({error}); "
        f"install it: {command('horovod-rs[ray]')}"
    ) from error

from horovod.ray.utils import name_host
from horovod.runner import executor

__all__ = ["HorovodConfig", "HorovodTrainer"]

# In the process of rank 0, as long as it is there.
_served: list[executor.Rendezvous] = []


@dataclasses.dataclass
class HorovodConfig(BackendConfig):
    """Makes the workers of a Ray Train job the ranks of a Horovod job: for `DataParallelTrainer(backend_config=...)`.

    Parameters
    ----------
    nics
        Names of the interfaces to use between nodes; none means all.
    environment
        Variables of the ranks.
    """

    nics: set[str] | None = None
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def backend_cls(self) -> type[Backend]:
        """The class that starts the ranks."""
        return _HorovodBackend


class _HorovodBackend(Backend):
    # Users pick a GPU by the local rank.
    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        nics = sorted(backend_config.nics or ())
        names: dict[str, str] = {}
        places = [
            (name_host(names, node_id, hostname), address)
            for node_id, hostname, address in worker_group.execute(_place)
        ]
        address = worker_group.execute_single(
            0, _serve, len(places), nics, len({name for name, _ in places}) == 1
        )
        parts = executor.assign(places, address, interfaces=nics)
        ray.get(
            [
                worker_group.execute_single_async(
                    index, _become, {**part.variables, **backend_config.environment}
                )
                for index, part in enumerate(parts)
            ]
        )


def _place() -> tuple[str, str, str]:
    node_id = ray.get_runtime_context().get_node_id()
    return node_id, socket.gethostname(), ray.util.get_node_ip_address()


def _serve(size: int, nics: list[str], local: bool) -> executor.RendezvousAddress:
    _served[:] = [executor.Rendezvous(size, local=local, interfaces=nics)]
    return _served[0].address


def _become(variables: Mapping[str, str]) -> None:
    for name in os.environ.keys() - executor.without_job(os.environ).keys():
        del os.environ[name]
    os.environ.update(variables)


class HorovodTrainer(DataParallelTrainer):
    """Ray Train's trainer whose workers are ranks: `hvd.init()` in the training function finds the others.

    Parameters
    ----------
    train_loop_per_worker
        The training function; it may take `train_loop_config`.
    horovod_config
        Settings; default those of `HorovodConfig()`.
    arguments
        All others as for Ray Train's `DataParallelTrainer`: `train_loop_config`, `scaling_config`, `run_config`,
        `datasets`, `dataset_config`.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        horovod_config: HorovodConfig | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(
            train_loop_per_worker, backend_config=horovod_config or HorovodConfig(), **arguments
        )
