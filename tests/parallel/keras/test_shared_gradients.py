"""Keras on PyTorch: gradients that share memory with each other, or with the script's own tensors."""

import keras
import numpy as np
import pytest
from keras_support import BACKEND, RANK, SIZE

import horovod.keras as hvd

pytestmark = pytest.mark.skipif(BACKEND != "torch", reason="other backends' arrays never change")
SUM = SIZE * (SIZE + 1) / 2


def applied(assign, groups):
    """The two variables, from zero, after a step of rate 1 with what `assign` puts into their `.grad`."""
    variables = [keras.Variable(np.zeros(6, "float32")) for _ in range(2)]
    values = [variable.value for variable in variables]
    assign(*values)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum, groups=groups)
    optimizer.build(variables)
    optimizer.apply([value.grad for value in values], variables)
    return [value.detach().cpu().numpy() for value in values]


@pytest.mark.parametrize("groups", [None, 1, 2])
def test_two_variables_share_one_gradient(groups):
    import torch

    scale = torch.arange(6.0) * (RANK + 1)

    def views(a, b):
        ((a[None] + b[None]) * scale).sum().backward()

    def one_tensor(a, b):
        a.grad = b.grad = scale.clone()

    for assign in (views, one_tensor):
        for got in applied(assign, groups):
            np.testing.assert_array_equal(got, np.arange(6, dtype="float32") * -SUM)


def test_the_scripts_own_tensor_stays_as_it_is():
    import torch

    given = torch.arange(6.0) * (RANK + 1)
    before = given.clone()
    got, _ = applied(lambda a, b: (a.view(2, 3).backward(given.view(2, 3)), b.sum().backward()), 2)
    np.testing.assert_array_equal(got, np.arange(6, dtype="float32") * -SUM)
    assert torch.equal(given, before)
