"""These tests run on ranks that each have a GPU of the double, over NCCL's double and staged through host memory.

`make gpu-double` builds it; `environments.json` names it to the runtime as it would name the real libraries.
"""

import pytest
from cuda_double import DoubleTensor, OnDouble, violations

from horovod import _core

# The core's own reader of tensors takes exact types, before the adapter names them.
_PlainTensors = _core.PlainTensors
_core.PlainTensors = lambda types, *others: _PlainTensors([*types, DoubleTensor], *others)

import horovod.torch as hvd  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def _job():
    hvd.init()
    yield
    hvd.shutdown()
    assert violations() == []


@pytest.fixture(autouse=True)
def _in_order():
    """Each test leaves the double content; the first that does not is the one to look at."""
    with OnDouble():
        yield
    assert violations() == []
