"""`horovod.numpy` has the names of `horovod.torch` that mean something for arrays, with the same parameters."""

import inspect

import pytest

import horovod.numpy
import horovod.torch

# Functions that PyTorch's module only passes on to the form with a handle take their arguments as they come.
ASYNC = [name for name in horovod.numpy.__all__ if "async" in name]


def test_every_name_is_one_of_the_other_adapter() -> None:
    assert set(horovod.numpy.__all__) <= {*horovod.torch.__all__, "is_homogeneous"}
    assert all(hasattr(horovod.numpy, name) for name in horovod.numpy.__all__)


def test_nccl_has_no_part_in_arrays() -> None:
    assert horovod.numpy.nccl_built() == 0


@pytest.mark.parametrize("name", ASYNC)
def test_parameters_have_the_same_order_names_and_defaults(name: str) -> None:
    def shape(module: object) -> list[tuple[str, object]]:
        parameters = inspect.signature(getattr(module, name)).parameters.values()
        return [(p.name, p.default) for p in parameters][1:]

    assert shape(horovod.numpy) == shape(horovod.torch)
