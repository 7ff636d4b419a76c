"""The GPUs of these tests: those of the double, or where `HVD_TEST_GPU` is "real" those of the machine."""

import os

IS_REAL = os.environ.get("HVD_TEST_GPU") == "real"

if IS_REAL:
    from real_gpu import (
        IS_ROCM,
        GpuTensor,
        OnGpu,
        Stream,
        communicators,
        count,
        current_stream,
        module_on_gpu,
        number_of_gpus,
        on_gpu,
        stream,
        violations,
        wait_for_communicators,
        without_waiting,
    )
else:
    from cuda_double import GpuTensor, OnGpu, module_on_gpu, on_gpu, without_waiting
    from double_streams import (
        IS_ROCM,
        Stream,
        communicators,
        count,
        current_stream,
        number_of_gpus,
        stream,
        violations,
        wait_for_communicators,
    )

__all__ = [
    "IS_REAL",
    "IS_ROCM",
    "GpuTensor",
    "OnGpu",
    "Stream",
    "communicators",
    "count",
    "current_stream",
    "module_on_gpu",
    "number_of_gpus",
    "on_gpu",
    "stream",
    "violations",
    "wait_for_communicators",
    "without_waiting",
]
