"""Horovod on Ray: training on the actors of a Ray cluster."""

from horovod._installation import command as _command

try:
    import ray as _ray  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"horovod.ray needs Ray, which cannot be imported here ({error}); "
        f"install it: {_command('horovod-rs[ray]')}"
    ) from error

from horovod.ray import ray_logger
from horovod.ray.elastic import ElasticRayExecutor
from horovod.ray.runner import RayExecutor
from horovod.ray.worker import BaseHorovodWorker

__all__ = ["BaseHorovodWorker", "ElasticRayExecutor", "RayExecutor", "ray_logger"]
