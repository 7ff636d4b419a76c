"""Sparse tensors among what is broadcast of a model."""

import pytest
import torch

import horovod.torch as hvd

hvd.init()


def matrix_with(entries, layout, value):
    dense = torch.zeros(3, 4)
    dense.view(-1)[:entries] = value
    return dense.to_sparse(layout=layout)


class WithMatrix(torch.nn.Module):
    def __init__(self, entries, layout=torch.sparse_coo):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((2,), float(hvd.rank())))
        self.register_buffer("matrix", matrix_with(entries, layout, hvd.rank() + 1.0))


LAYOUTS = [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "params",
    [lambda model: model.state_dict(), lambda model: list(model.named_buffers())],
    ids=["state_dict", "buffers"],
)
def test_sparse_buffers_become_the_roots(params, layout):
    model = WithMatrix(5, layout)
    before = model.matrix
    hvd.broadcast_parameters(params(model), root_rank=0)
    assert model.matrix is before
    assert model.matrix.layout is layout
    assert torch.equal(model.matrix.to_dense(), matrix_with(5, layout, 1.0).to_dense())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sparse_buffers_with_other_numbers_of_entries(layout, recwarn):
    want = matrix_with(5, layout, 1.0).to_dense()
    model = WithMatrix(5 - hvd.rank(), layout)
    hvd.broadcast_parameters(model.named_buffers(), root_rank=0)
    assert torch.equal(model.matrix.to_dense(), want)

    model = WithMatrix(5 - hvd.rank(), layout)
    state = model.state_dict()
    hvd.broadcast_parameters(state, root_rank=0)
    assert torch.equal(state["matrix"].to_dense(), want)
    warned = [w for w in recwarn if "load_state_dict" in str(w.message)]
    assert len(warned) == (hvd.rank() > 0 and layout is torch.sparse_coo)
    model.load_state_dict(state)
    assert torch.equal(model.matrix.to_dense(), want)

    model = WithMatrix(5 - hvd.rank(), layout)
    hvd.elastic.TorchState(model).sync()
    assert torch.equal(model.matrix.to_dense(), want)
    assert len([w for w in recwarn if "load_state_dict" in str(w.message)]) == len(warned)


def test_sparse_buffers_that_do_not_fit_are_named():
    if hvd.rank() == 0:
        hvd.broadcast_parameters(WithMatrix(5).state_dict(), root_rank=0)
        return
    state = WithMatrix(5, torch.sparse_csr).state_dict()
    with pytest.raises(
        ValueError, match=r"'matrix' is torch.sparse_csr .* torch.sparse_coo .* on rank 0"
    ):
        hvd.broadcast_parameters(state, root_rank=0)


def test_another_number_of_sparse_buffers_is_named():
    state = WithMatrix(5).state_dict()
    if hvd.rank() == 0:
        hvd.broadcast_parameters(state, root_rank=0)
        return
    own = {**state, "another": state["matrix"].clone()}
    with pytest.raises(ValueError, match="are 2 sparse tensors on this rank and 1 on rank 0"):
        hvd.broadcast_parameters(own, root_rank=0)
