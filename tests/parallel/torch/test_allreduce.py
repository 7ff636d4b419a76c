"""Allreduce of what only PyTorch has: views, leaves, inference, kinds of groups, compression. For the rest see
tests/conformance.
"""

import pytest
import torch
from ops_support import check, reduced, samples

import horovod.torch as hvd


def test_expanded_tensors_work():
    everyone = samples((1, 4), torch.float32)
    mine = everyone[hvd.rank()].expand(3, 4)
    want = reduced(hvd.Sum, everyone).expand(3, 4)
    check(hvd.allreduce(mine, op=hvd.Sum), want)
    assert hvd.allreduce_(mine, op=hvd.Sum) is mine
    check(mine, want)
    assert mine.stride() == (0, 1)


def test_an_expanded_tensor_does_not_hide_that_its_elements_differ():
    if hvd.size() == 1:
        pytest.skip("several ranks")
    rows = torch.arange(3.0).unsqueeze(1).expand(3, 2)
    mine = torch.zeros(1, 2).expand(3, 2) if hvd.rank() == 0 else rows.clone()
    if hvd.rank() == 0:
        with pytest.raises(ValueError, match="share memory"):
            hvd.allreduce_(mine, op=hvd.Sum)
    else:
        hvd.allreduce_(mine, op=hvd.Sum)


def test_conjugate_and_negative_views_are_resolved():
    everyone = samples((3,), torch.complex64)
    mine = everyone[hvd.rank()]
    check(hvd.allreduce(mine.conj(), op=hvd.Sum), reduced(hvd.Sum, everyone).conj().resolve_conj())

    one = torch.tensor([1 + 2j])
    view = one.conj().imag  # contiguous, and yet its memory holds the opposite value
    assert hvd.allreduce_(view, op=hvd.Sum) is view
    assert view.item() == -2.0 * hvd.size()
    assert one.imag.item() == 2.0 * hvd.size()


@pytest.mark.parametrize("operation", ["allreduce", "broadcast"])
def test_a_torch_without_the_exchange_interface_gets_the_same_results(operation, monkeypatch):
    plain = f"horovod.torch._{operation}.{operation}_plain"
    for name in (plain, f"{plain}_and_wait"):
        monkeypatch.setattr(name, lambda *_: None)
    mine = torch.full((3, 2), float(hvd.rank() + 1))
    handle = hvd.allreduce_async_(mine, op=hvd.Sum, name="described")
    assert hvd.synchronize(handle) is mine
    assert mine.eq(sum(range(1, hvd.size() + 1))).all()
    mine.fill_(hvd.rank())
    assert hvd.broadcast_(mine, hvd.size() - 1) is mine
    assert mine.eq(hvd.size() - 1).all()


def test_in_place_works_on_leaves_that_require_gradients():
    parameter = torch.nn.Parameter(torch.full((3,), float(hvd.rank())))
    version = parameter._version
    assert hvd.allreduce_(parameter, op=hvd.Sum) is parameter
    assert parameter.requires_grad
    assert parameter.is_leaf
    assert parameter._version == version
    assert parameter.detach().eq(sum(range(hvd.size()))).all()

    strided = torch.zeros(4, 2).t().requires_grad_()
    hvd.allreduce_(strided)
    assert strided.is_leaf


def test_inference_tensors_work():
    with torch.inference_mode():
        tensor = torch.ones(4, 3)
        hvd.allreduce_(tensor, op=hvd.Sum)
        hvd.allreduce_(tensor.t(), op=hvd.Sum)
        assert hvd.allreduce(tensor).eq(hvd.size() ** 2).all()


def test_what_groups_return():
    ones = [torch.ones(hvd.size()), torch.ones(2 * hvd.size(), 2)]
    for call in (hvd.grouped_allreduce, hvd.grouped_reducescatter):
        assert type(call(ones, op=hvd.Sum)) is list
    for call in (hvd.grouped_allreduce_, hvd.grouped_allgather):
        assert type(call(ones)) is tuple
    for begin in (
        hvd.grouped_allreduce_async,
        hvd.grouped_allreduce_async_,
        hvd.grouped_allgather_async,
        hvd.grouped_reducescatter_async,
    ):
        assert type(hvd.synchronize(begin(ones))) is tuple


def test_a_group_may_be_any_iterable():
    [total] = hvd.grouped_allreduce((t for t in [torch.ones(2)]), op=hvd.Sum)
    assert total.eq(hvd.size()).all()


def test_compression_travels_small_and_returns_the_dtype():
    tensor = torch.full((5,), 1.0 + 2**-12)  # not representable in float16
    got = hvd.allreduce(tensor, compression=hvd.Compression.fp16, op=hvd.Sum)
    assert got.dtype == torch.float32
    assert got.eq(hvd.size()).all()
    [group, whole] = hvd.grouped_allreduce(
        [tensor.double(), torch.ones(2, dtype=torch.int32)],
        compression=hvd.Compression.fp16,
        op=hvd.Sum,
    )
    assert group.dtype == torch.float64
    assert group.eq(hvd.size()).all()
    assert whole.dtype == torch.int32
    assert hvd.allreduce(tensor, compression=hvd.Compression.none, op=hvd.Average).eq(tensor).all()


def test_any_object_with_the_two_functions_compresses():
    class Doubling:
        def compress(self, tensor):
            return tensor * 2, "context"

        def decompress(self, tensor, ctx):
            assert ctx == "context"
            return tensor / 2

    got = hvd.allreduce(torch.ones(3), compression=Doubling(), op=hvd.Sum)
    assert got.eq(hvd.size()).all()


def test_average_is_deprecated_and_excludes_op():
    tensor = torch.full((2,), 4.0)
    for average, want in ((True, 4.0), (False, 4.0 * hvd.size())):
        with pytest.warns(DeprecationWarning, match="average"):
            assert hvd.allreduce(tensor, average).eq(want).all()
        with pytest.warns(DeprecationWarning, match="average"):
            assert hvd.allreduce_(tensor.clone(), average=average).eq(want).all()
        with pytest.warns(DeprecationWarning, match="average"):
            assert hvd.grouped_allreduce([tensor], average=average)[0].eq(want).all()
    for call in (hvd.allreduce, hvd.allreduce_, hvd.allreduce_async, hvd.allreduce_async_):
        with pytest.raises(ValueError, match="op parameter supersedes average"):
            call(tensor, average=True, op=hvd.Sum)
    for call in (
        hvd.grouped_allreduce,
        hvd.grouped_allreduce_,
        hvd.grouped_allreduce_async,
        hvd.grouped_allreduce_async_,
    ):
        with pytest.raises(ValueError, match="op parameter supersedes average"):
            call([tensor], average=True, op=hvd.Sum)
