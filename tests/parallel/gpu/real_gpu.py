"""Helpers of these tests for real GPUs, under the names that the double's have."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

IS_ROCM = torch.version.hip is not None
GpuTensor = torch.Tensor
OnGpu = contextlib.nullcontext
stream = torch.cuda.stream
current_stream = torch.cuda.current_stream


class Stream(torch.cuda.Stream):
    """A stream that can be captured."""

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Nobody can hold a real GPU: tests that do are for the double."""
        raise NotImplementedError

    @contextlib.contextmanager
    def captured(self) -> Iterator[None]:
        """Capture what is put on the stream into a CUDA graph; nothing may end the capture from outside."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self):
            yield


def number_of_gpus() -> int:
    """How many this process sees."""
    return torch.cuda.device_count()


def on_gpu(tensor: torch.Tensor, device: int = 0) -> torch.Tensor:
    """A copy on a GPU."""
    moved = tensor.detach().to(torch.device("cuda", device), copy=True)
    return moved.requires_grad_(tensor.requires_grad)


def module_on_gpu(module: torch.nn.Module, device: int = 0) -> torch.nn.Module:
    """The module, moved."""
    return module.cuda(device)


def violations() -> list[str]:
    """Nobody watches real GPUs."""
    return []


def count(call: str) -> int:
    """Nor counts their calls: tests that compare counts are for the double."""
    raise NotImplementedError(call)


def communicators() -> int:
    """Nobody counts them either."""
    return 0


def wait_for_communicators(left: int) -> None:
    """Nothing holds real GPUs back."""


@contextlib.contextmanager
def without_waiting(*allowed: str) -> Iterator[None]:
    """In the block PyTorch does not have the host wait for the GPU; if some functions may, nobody looks."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default" if allowed else "error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
