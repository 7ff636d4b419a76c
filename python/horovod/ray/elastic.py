"""`ElasticRayExecutor`: the older way to elastic jobs on Ray."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from horovod.ray import elastic_v2
from horovod.runner.common.util import secret
from horovod.runner.elastic.discovery import HostDiscovery

__all__ = ["ElasticRayExecutor", "ElasticRaySettings", "RayHostDiscovery", "TestDiscovery"]


@dataclasses.dataclass
class ElasticRaySettings:
    """Settings of `ElasticRayExecutor`."""

    min_num_proc: int = 1
    max_num_proc: int | None = None
    num_proc: int = 1
    reset_limit: int | None = None
    elastic_timeout: int = 600
    timeout_s: int = 30
    placement_group_timeout_s: int = 100
    ssh_identity_file: str | None = None
    nics: set[str] | None = None
    verbose: int = 1
    key: bytes | str = dataclasses.field(default_factory=secret.make_secret_key, repr=False)
    cooldown_range: Sequence[int] | None = None
    elastic: bool = True
    discovery: HostDiscovery | None = None


class RayHostDiscovery(elastic_v2.RayHostDiscovery):
    """The nodes of the cluster that are alive, by their ids."""

    def __init__(
        self, use_gpu: bool = False, cpus_per_slot: float = 1, gpus_per_slot: float = 1
    ) -> None:
        super().__init__(use_gpu, cpus_per_slot, gpus_per_slot)


class TestDiscovery(elastic_v2.TestDiscovery):
    """For trying out elastic scripts: nodes seem to leave and to come back."""

    __test__ = False

    def __init__(
        self,
        min_hosts: int,
        max_hosts: int,
        change_frequency_s: float,
        use_gpu: bool = False,
        cpus_per_slot: float = 1,
        gpus_per_slot: float = 1,
        verbose: bool = True,
        _graceful: bool = True,
    ) -> None:
        super().__init__(
            *(min_hosts, max_hosts, change_frequency_s, use_gpu),
            *(cpus_per_slot, gpus_per_slot, verbose, _graceful),
        )


class ElasticRayExecutor:
    """Runs a function on ranks that come and go; `RayExecutor` with `min_workers` does the same.

    Parameters
    ----------
    settings
        Result of `create_settings`; None for its defaults.
    use_gpu, cpus_per_slot, gpus_per_slot
        Resources of each rank.
    env_vars
        Variables of the ranks.
    override_discovery
        Look for nodes in the cluster; else `settings.discovery` says which hosts there are.
    """

    @staticmethod
    def create_settings(
        min_num_proc: int = 1,
        max_num_proc: int | None = None,
        reset_limit: int | None = None,
        elastic_timeout: int = 600,
        timeout_s: int = 30,
        ssh_identity_file: str | None = None,
        nics: set[str] | None = None,
        min_np: int | None = None,
        max_np: int | None = None,
        **kwargs: Any,
    ) -> ElasticRaySettings:
        """Settings; `min_np` and `max_np` are old names of the first two, and nothing uses ssh.

        Parameters
        ----------
        min_num_proc, max_num_proc
            How many ranks there are at least and at most.
        reset_limit, elastic_timeout, nics
            As for `RayExecutor`.
        """
        for old_name, name in (("min_np", "min_num_proc"), ("max_np", "max_num_proc")):
            if (min_np if old_name == "min_np" else max_np) is not None:
                warnings.warn(
                    f"{old_name} is deprecated, use {name} instead",
                    DeprecationWarning,
                    stacklevel=2,
                )
        least = min_num_proc if min_np is None else min_np
        return ElasticRaySettings(
            min_num_proc=least,
            max_num_proc=max_num_proc if max_np is None else max_np,
            num_proc=least,
            reset_limit=reset_limit,
            elastic_timeout=elastic_timeout,
            timeout_s=timeout_s,
            ssh_identity_file=ssh_identity_file,
            nics=nics,
            **kwargs,
        )

    def __init__(
        self,
        settings: Any = None,
        use_gpu: bool = False,
        cpus_per_slot: int = 1,
        gpus_per_slot: int | None = None,
        env_vars: Mapping[str, Any] | None = None,
        override_discovery: bool = True,
    ) -> None:
        self.settings = settings = self.create_settings() if settings is None else settings
        self._env_vars = env_vars
        params = elastic_v2.ElasticParams(
            cpus_per_worker=cpus_per_slot,
            use_gpu=use_gpu,
            gpus_per_worker=gpus_per_slot,
            min_workers=settings.min_num_proc,
            max_workers=settings.max_num_proc,
            reset_limit=settings.reset_limit,
            cooldown_range=settings.cooldown_range,
            elastic_timeout=settings.elastic_timeout,
            override_discovery=override_discovery,
        )
        self._adapter = elastic_v2.ElasticAdapter(settings, params)
        self._has_started = False

    def start(self) -> None:
        """Get ready."""
        self._adapter.start(extra_env_vars=self._env_vars)
        self._has_started = True

    def run(
        self,
        worker_fn: Callable[[], Any],
        callbacks: Sequence[Callable[[Any], Any]] | None = None,
    ) -> list[Any]:
        """The results of `worker_fn()` on the ranks that have finished together."""
        if not self._has_started:
            raise RuntimeError("ElasticRayExecutor: it has not been started; call start() first")
        return self._adapter.run(worker_fn, callbacks=callbacks)
