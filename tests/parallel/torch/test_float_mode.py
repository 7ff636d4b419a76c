"""Results do not depend on the floating-point mode of the thread that calls."""

import pytest
import torch

import horovod.torch as hvd

BITS = {torch.float32: torch.int32, torch.float64: torch.int64, torch.float16: torch.int16}


def bits(tensor):
    """Subnormals as multiples of the smallest number; comparisons in the tensor's own type would flush them, too."""
    return tensor.view(BITS[tensor.dtype]).long()


def thread_flushes():
    return bits(torch.tensor([1], dtype=torch.int32).view(torch.float32) * 1.0).item() == 0


@pytest.fixture
def flushing():
    """Subnormals are zeros, on all ranks but the last of several."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this machine cannot flush subnormals")
    if 1 < hvd.size() == hvd.rank() + 1:
        torch.set_flush_denormal(False)
    yield
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("dtype", list(BITS))
@pytest.mark.parametrize("elems", [3, 3000, 50_000])
@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average, hvd.Max])
def test_subnormals_are_kept_though_a_thread_flushes_them(flushing, op, elems, dtype):
    size, rank = hvd.size(), hvd.rank()
    smallest = torch.arange(elems) % 200 + 1
    mine = (smallest + rank).to(BITS[dtype]).view(dtype)
    want = smallest + size - 1 if op == hvd.Max else size * smallest + size * (size - 1) // 2
    flushes = thread_flushes()
    for again in range(5):
        # An average of numbers without a fraction, so that no rounding hides what was flushed.
        factor = float(size) if op == hvd.Average else 1.0
        name = f"subnormal.{op}.{elems}.{dtype}"
        got = hvd.allreduce(mine, op=op, name=name, prescale_factor=factor)
        assert torch.equal(bits(got), want), again
    assert thread_flushes() == flushes, "the thread's own mode was changed"
