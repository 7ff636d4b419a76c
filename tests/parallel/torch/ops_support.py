"""Common to the tests of operations: tensors that every rank can compute for every other, and expected results."""

import zlib

import torch

import horovod.torch as hvd

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def sample(rank, shape, dtype, salt=""):
    """The tensor that `rank` contributes: whole numbers so small that every reduction of them is exact."""
    seed = zlib.crc32(f"{rank} {tuple(shape)} {dtype} {salt}".encode())
    generator = torch.Generator().manual_seed(seed)

    def whole(low, high):
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int64)

    if dtype == torch.bool:
        return whole(0, 2).bool()
    if dtype.is_complex:
        real = torch.float64 if dtype == torch.complex128 else torch.float32
        return torch.complex(whole(-2, 3).to(real), whole(-2, 3).to(real))
    unsigned = dtype in (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
    return whole(0 if unsigned else -2, 3).to(dtype)


def samples(shape, dtype, members=None, salt=""):
    """The tensors of all members, in the order of ranks."""
    members = range(hvd.size()) if members is None else members
    return [sample(rank, shape, dtype, salt) for rank in members]


def reduced(op, tensors):
    """The expected result of an allreduce of these tensors."""
    dtype = tensors[0].dtype
    if dtype == torch.bool:
        stacked = torch.stack(tensors)
        return stacked.any(0) if op in (hvd.Sum, hvd.Max) else stacked.all(0)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    stacked = torch.stack([t.to(wide) for t in tensors])
    if op == hvd.Sum:
        result = stacked.sum(0)
    elif op == hvd.Average:
        result = stacked.sum(0) / len(tensors)
        if not (dtype.is_floating_point or dtype.is_complex):
            result = result.trunc()
    elif op == hvd.Min:
        result = stacked.amin(0)
    elif op == hvd.Max:
        result = stacked.amax(0)
    else:
        result = stacked.prod(0)
    return result.to(dtype)


def comparable(tensor):
    """The same values in a dtype that every comparison supports."""
    if tensor.dtype.is_complex or tensor.dtype == torch.bool:
        return tensor
    if tensor.dtype.is_floating_point:
        return tensor.double()
    return tensor.to(torch.int64)


def check(got, want, exact=True):
    """Same dtype, shape and values; `exact` but for the rounding of an average."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    tolerance = 0.0 if exact else {torch.float16: 1e-3, torch.bfloat16: 8e-3}.get(got.dtype, 1e-6)
    torch.testing.assert_close(comparable(got), comparable(want), rtol=tolerance, atol=0.0)


def still_works(process_set=hvd.global_process_set):
    """The job can be used: after errors that concerned one operation."""
    total = hvd.allreduce(torch.ones(3), op=hvd.Sum, process_set=process_set)
    assert total.eq(process_set.size()).all()
