"""`_core.PlainTensors`: which tensors the core reads by itself, and which it leaves to the adapter."""

import warnings

import pytest
import torch

import horovod.torch as hvd
from horovod import _core


@pytest.fixture(scope="module", autouse=True)
def _job():
    hvd.init()
    yield
    hvd.shutdown()


def torch_tensors():
    return _core.PlainTensors(
        [torch.Tensor, torch.nn.Parameter], torch.Tensor.is_neg, torch.Tensor.untyped_storage
    )


def allreduce(tensor, op=hvd.Sum):
    return torch_tensors().allreduce(tensor, None, op, 1.0, 1.0, 0)


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(()),
        torch.ones(0, 3),
        torch.ones(2, 3, dtype=torch.bfloat16),
        torch.ones(2, 1, 3).transpose(0, 1),  # contiguous all the same
        torch.ones(4, 2).t(),
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.ones(4, dtype=torch.bool),
        torch.ones(8)[4:],
        torch.nn.Parameter(torch.ones(3)),
    ],
)
def test_plain_tensors_are_reduced_in_place(tensor):
    handle = allreduce(tensor)
    assert handle is not None
    assert _core.wait(handle) is tensor
    assert tensor.eq(1).all()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(4, 2)[:, :1],
        torch.ones(4, 4).t()[1:],
        torch.ones(1).expand(3),
        torch.tensor([1 + 2j]),
        torch.tensor([1 + 2j]).conj().imag,  # its memory holds the negative
        torch.tensor([1 + 2j, 3 + 4j]).conj().imag,
        torch.tensor([[1 + 2j], [3 + 4j]]).conj().imag,
        torch.ones(3).to_sparse(),
        torch.empty(3, device="meta"),
        torch.zeros(3).to(torch.float8_e5m2),
        torch._efficientzerotensor(3),
        torch.ones(3).as_subclass(Subclass),
        [1.0],
        None,
    ],
    ids=lambda t: f"{type(t).__name__}-{getattr(t, 'dtype', '')}",
)
def test_what_needs_preparation_is_left_to_the_adapter(tensor):
    assert allreduce(tensor) is None


def test_meaningless_operations_are_left_to_the_adapters_words():
    assert allreduce(torch.ones(2, dtype=torch.bool), hvd.Average) is None
    assert allreduce(torch.ones(2, dtype=torch.int32), hvd.Adasum) is None
    with pytest.raises(ValueError, match="not supported for op Average"):
        hvd.allreduce_async_(torch.ones(2, dtype=torch.bool), op=hvd.Average)


def test_quantized_tensors_are_refused_by_the_adapter():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensor = torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8)
    assert allreduce(tensor) is None


def test_a_type_without_the_interface_is_never_read():
    class Other:
        pass

    other = _core.PlainTensors([Other], lambda _: False, lambda _: None)
    assert other.allreduce(Other(), None, hvd.Sum, 1.0, 1.0, 0) is None
    assert other.broadcast(Other(), 0, None, 0) is None


def test_a_type_whose_interface_is_something_else_is_refused():
    class Other:
        __dlpack_c_exchange_api__ = 4711

    with pytest.raises(ValueError, match="is not a capsule"):
        _core.PlainTensors([Other], lambda _: False, lambda _: None)


def reduce_together(tensors, names, op=hvd.Sum):
    return torch_tensors().allreduce_together(tensors, "allreduce", names, (op, 1.0, 1.0), 0)


def test_several_begin_together_up_to_one_that_is_not_plain():
    tensors = [torch.ones(3), torch.ones(2, 2), torch.ones(4, 2)[:, 0], torch.ones(1)]
    handles = reduce_together(tensors, ["together.0", "together.1", "together.2", "together.3"])
    assert [
        _core.wait(handle) is tensor for handle, tensor in zip(handles, tensors, strict=False)
    ] == [True, True]


def test_several_begin_together_up_to_one_that_is_refused():
    tensors = [torch.ones(3), torch.ones(3)]
    [handle] = reduce_together(tensors, ["twice", "twice"])
    assert _core.wait(handle) is tensors[0]


def test_an_operation_that_does_not_exist_is_an_error_for_all():
    with pytest.raises(ValueError, match="not supported"):
        reduce_together([torch.ones(3)], ["x"], op=99)
