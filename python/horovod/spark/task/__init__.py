"""Functions for a rank about its Spark task."""

import os

__all__ = ["get_available_devices"]

GPU_ADDRESSES = "HOROVOD_SPARK_GPU_ADDRESSES"


def get_available_devices() -> list[str]:
    """Return the addresses of the GPUs that Spark has assigned to this rank's task, such as `["0"]`; may be empty."""
    return [address for address in os.environ.get(GPU_ADDRESSES, "").split(",") if address]
