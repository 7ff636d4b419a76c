"""These tests run on ranks that each have a GPU of the double, over NCCL's double and staged through host memory.

`make gpu-double` builds it; `environments.json` names it to the runtime as it would name the real libraries.
tests/integration/test_real_gpus.py runs them on the machine's own GPUs, test_gpu_rocm.py on the double as AMD's.
"""

import os

import pytest
import torch
from devices import GpuTensor, OnGpu, violations

from horovod import _core

if os.environ.get("HVD_TEST_GPU") == "rocm":
    # As PyTorch for AMD's GPUs has it.
    torch.version.cuda, torch.version.hip = None, "7.2.0"

# The core's own reader of tensors takes the types that the adapter names, and no subclass.
_PlainTensors = _core.PlainTensors
_core.PlainTensors = lambda types, *others: _PlainTensors([*types, GpuTensor], *others)

import horovod.torch as hvd  # noqa: E402
from horovod.torch._gradient_reducer import GradientReducer  # noqa: E402


def _seeing_subclasses(method):
    """Hooks of a backward pass run without PyTorch's dispatch to subclasses and modes, by which the double works."""

    def run(*args):
        with torch._C._EnableTorchFunction(), OnGpu():
            return method(*args)

    return run


for _name in ("_on_gradient", "_reopen", "_end_of_backward"):
    setattr(GradientReducer, _name, _seeing_subclasses(getattr(GradientReducer, _name)))


@pytest.fixture(scope="session", autouse=True)
def _job():
    hvd.init()
    yield
    hvd.shutdown()
    assert violations() == []


@pytest.fixture(autouse=True)
def _in_order():
    """Each test leaves the double content; the first that does not is the one to look at."""
    with OnGpu():
        yield
    assert violations() == []
