"""Common to static and elastic executors."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["Adapter", "BaseParams"]


@dataclasses.dataclass
class BaseParams:
    """Resources of a worker; `gpus_per_worker` is by default 1 with `use_gpu`, else 0."""

    cpus_per_worker: int = 1
    use_gpu: bool = False
    gpus_per_worker: int | None = None

    def __post_init__(self) -> None:
        if self.gpus_per_worker and not self.use_gpu:
            raise ValueError(
                f"gpus_per_worker is {self.gpus_per_worker}, but use_gpu is not set; pass use_gpu=True"
            )
        if self.use_gpu and self.gpus_per_worker is not None and self.gpus_per_worker < 1:
            raise ValueError(
                f"gpus_per_worker: expected at least 1 with use_gpu=True, got {self.gpus_per_worker}"
            )
        if self.gpus_per_worker is None:
            self.gpus_per_worker = int(self.use_gpu)


class Adapter(ABC):
    """Starts workers, runs functions on them and ends them."""

    @abstractmethod
    def start(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, Any] | None = None,
    ) -> None:
        """Make the workers ready."""

    @abstractmethod
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[[Any], Any]] | None = None,
    ) -> list[Any]:
        """The results of `fn(*args, **kwargs)` on all ranks."""

    @abstractmethod
    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """As `run`, without waiting: references to the results."""

    @abstractmethod
    def execute(
        self, fn: Callable[[Any], Any], callbacks: Sequence[Callable[[Any], Any]] | None = None
    ) -> list[Any]:
        """The results of `fn(executable)` on all ranks."""

    @abstractmethod
    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """The result of `fn(executable)` on rank 0."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the workers."""
