"""Allgather, broadcast, alltoall and reducescatter: every dtype, uneven and empty shares, groups, layouts."""

import numpy as np
import pytest
import torch
from ops_support import (
    COMPLEX,
    MOVABLE,
    NATIVE,
    SHAPES,
    check,
    reduced,
    same_everywhere,
    sample,
    samples,
)

import horovod.torch as hvd


def rows_of(rank, dtype, rows, tail=(3,), salt=""):
    return sample(rank, (rows, *tail), dtype, salt)


def cat(tensors):
    """Concatenate tensors of any dtype."""
    dtype = tensors[0].dtype
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        whole = torch.cat(
            [t.to(torch.complex128 if dtype.is_complex else torch.float64) for t in tensors]
        )
    else:
        whole = torch.cat([t.to(torch.int64) for t in tensors])
    return whole.to(dtype)


# -- allgather


@pytest.mark.parametrize("dtype", MOVABLE)
def test_allgather_concatenates_in_the_order_of_ranks(dtype):
    for tail in ((), (3,), (2, 1, 2)):
        everyone = [rows_of(r, dtype, 4, tail) for r in range(hvd.size())]
        mine = everyone[hvd.rank()]
        check(hvd.allgather(mine), cat(everyone))
        check(hvd.synchronize(hvd.allgather_async(mine, name="gathered")), cat(everyone))


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.complex128])
def test_first_dimensions_may_differ_and_be_zero(dtype):
    for counts in ([1, 2, 3, 4], [0, 5, 0, 1], [7, 0, 0, 0], [0, 0, 0, 0]):
        counts = counts[: hvd.size()]
        everyone = [rows_of(r, dtype, n) for r, n in enumerate(counts)]
        check(hvd.allgather(everyone[hvd.rank()]), cat(everyone))


def test_rows_without_elements_are_counted():
    got = hvd.allgather(torch.zeros(2, 0))
    assert got.shape == (2 * hvd.size(), 0)


def test_allgather_of_a_large_tensor():
    mine = torch.full((300_001, 2), float(hvd.rank()))
    got = hvd.allgather(mine)
    assert got.shape == (300_001 * hvd.size(), 2)
    for rank, part in enumerate(got.chunk(hvd.size())):
        assert part.eq(rank).all()


def test_results_own_their_memory():
    # The core's memory is reused; not while a tensor looks at it.
    first = hvd.allgather(torch.full((1000,), 1.0))
    for _ in range(20):
        hvd.allgather(torch.full((1000,), 2.0))
    assert first.eq(1.0).all()
    first += 1
    assert first.eq(2.0).all()


def test_allgather_of_every_layout():
    everyone = samples((4, 6), torch.float32)
    mine = everyone[hvd.rank()].t().contiguous().t()
    check(hvd.allgather(mine), cat(everyone))
    check(hvd.allgather(everyone[hvd.rank()][:, ::2]), cat(everyone)[:, ::2])
    check(hvd.allgather(torch.ones(1, 3).expand(2, 3)), torch.ones(2 * hvd.size(), 3))


def test_grouped_allgather_gives_a_tuple():
    dtypes = [torch.float32, torch.int64, torch.bool]
    everyone = [[rows_of(r, d, r + i) for r in range(hvd.size())] for i, d in enumerate(dtypes)]
    mine = [t[hvd.rank()] for t in everyone]
    for results in (
        hvd.grouped_allgather(mine, name="together"),
        hvd.synchronize(hvd.grouped_allgather_async(mine)),
    ):
        assert type(results) is tuple
        for got, tensors in zip(results, everyone, strict=True):
            check(got, cat(tensors))
    for call in (hvd.grouped_allgather, hvd.grouped_allgather_async):
        with pytest.raises(ValueError, match="at least one tensor"):
            call([])


@pytest.mark.parametrize("tensor", [torch.tensor(1.0), torch.tensor(1j)])
def test_allgather_of_a_scalar_fails_on_every_rank(tensor):
    with pytest.raises(hvd.HorovodInternalError, match="rank-zero tensor"):
        hvd.allgather(tensor, name="scalar")
    with pytest.raises(hvd.HorovodInternalError, match="rank-zero tensor"):
        hvd.alltoall(tensor, name="scalar")


# -- broadcast


@pytest.mark.parametrize("dtype", MOVABLE)
def test_broadcast_gives_the_roots_tensor(dtype):
    for root in range(hvd.size()):
        for shape in SHAPES:
            mine = sample(hvd.rank(), shape, dtype)
            before = mine.clone()
            want = sample(root, shape, dtype)

            got = hvd.broadcast(mine, root)
            check(got, want)
            assert got is not mine
            check(mine, before)
            check(hvd.synchronize(hvd.broadcast_async(mine, root_rank=root)), want)

            assert hvd.broadcast_(mine, root, name="in place") is mine
            check(mine, want)
            mine = before.clone()
            assert hvd.synchronize(hvd.broadcast_async_(mine, root)) is mine
            check(mine, want)


def test_the_result_of_a_broadcast_is_a_copy_on_the_root_too():
    tensor = torch.ones(3)
    result = hvd.broadcast(tensor, 0)
    result.zero_()
    assert tensor.eq(1).all()
    column = torch.ones(3, 2)[:, 0]
    hvd.broadcast(column, 0).zero_()
    assert column.eq(1).all()


def test_broadcast_of_every_layout():
    root = hvd.size() - 1
    for make in (
        lambda t: t.t().contiguous().t(),
        lambda t: torch.stack([t, t], -1)[..., 0],
        lambda t: t,
    ):
        mine = make(sample(hvd.rank(), (4, 6), torch.float32))
        want = sample(root, (4, 6), torch.float32)
        check(hvd.broadcast(mine, root), want)
        assert hvd.broadcast_(mine, root) is mine
        check(mine, want)


def test_a_channels_last_model_may_be_broadcast_from_a_contiguous_one():
    mine = sample(hvd.rank(), (2, 3, 4, 4), torch.float32)
    if hvd.rank():
        mine = mine.contiguous(memory_format=torch.channels_last)
    hvd.broadcast_(mine, 0)
    check(mine, sample(0, (2, 3, 4, 4), torch.float32))
    assert mine.is_contiguous(memory_format=torch.channels_last) or not hvd.rank()


def test_a_zero_dimensional_int64_may_be_broadcast():
    epoch = hvd.broadcast(
        torch.tensor(7 if hvd.rank() == 0 else 0), root_rank=0, name="resume_from_epoch"
    )
    assert epoch.item() == 7


# -- alltoall


@pytest.mark.parametrize("dtype", MOVABLE)
def test_alltoall_sends_even_shares(dtype):
    me, size = hvd.rank(), hvd.size()
    everyone = [rows_of(r, dtype, 2 * size) for r in range(size)]
    want = cat([t[2 * me : 2 * me + 2] for t in everyone])
    got = hvd.alltoall(everyone[me])
    assert isinstance(got, torch.Tensor)
    check(got, want)
    got, received = hvd.synchronize(hvd.alltoall_async(everyone[me], name="shares"))
    check(got, want)
    check(received, torch.full((size,), 2, dtype=torch.int32))


def splits_of(rank, size):
    """Uneven, with zeros: rank r sends (r + d) % 3 rows to member d."""
    return [(rank + d) % 3 for d in range(size)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64, torch.uint16])
@pytest.mark.parametrize("surplus", [0, 2])
def test_alltoall_with_splits(dtype, surplus):
    me, size = hvd.rank(), hvd.size()
    everyone = [rows_of(r, dtype, sum(splits_of(r, size)) + surplus) for r in range(size)]
    parts = []
    for r in range(size):
        start = sum(splits_of(r, size)[:me])
        parts.append(everyone[r][start : start + splits_of(r, size)[me]])
    want = cat(parts)
    counts = [splits_of(r, size)[me] for r in range(size)]
    mine = splits_of(me, size)
    for splits in (
        mine,
        tuple(mine),
        np.array(mine),
        torch.tensor(mine, dtype=torch.int32),
        torch.tensor(mine, dtype=torch.int64),
    ):
        got, received = hvd.alltoall(everyone[me], splits)
        check(got, want)
        check(received, torch.tensor(counts, dtype=torch.int32))


def test_alltoall_may_send_nothing_at_all():
    got, received = hvd.alltoall(torch.zeros(0, 3), splits=[0] * hvd.size())
    assert got.shape == (0, 3)
    assert received.tolist() == [0] * hvd.size()


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        (lambda n: torch.zeros(n, 1, dtype=torch.int32), "expects a 1D splits tensor"),
        (lambda n: torch.zeros(n), "32-bit integer elements"),
        (lambda n: [0] * (n + 1), "Number of entries in splits does not equal"),
        (lambda n: [1000] * n, "Sum of splits entries is greater"),
        (lambda n: [-1] + [0] * (n - 1), "not negative"),
    ],
)
def test_wrong_splits_are_refused_before_anything_is_sent(splits, message):
    with pytest.raises(ValueError, match=message):
        hvd.alltoall(torch.zeros(3, 2), splits=splits(hvd.size()))
    check(hvd.alltoall(torch.ones(hvd.size())), torch.ones(hvd.size()))


def test_alltoall_without_splits_needs_a_multiple():
    if hvd.size() == 1:
        pytest.skip("several ranks")
    with pytest.raises(ValueError, match="not an even multiple"):
        hvd.alltoall(torch.zeros(hvd.size() + 1))


# -- reducescatter


def share(tensor, member, members):
    """The rows of a reduced tensor that a member keeps."""
    rows, longer = divmod(tensor.shape[0], members)
    start = member * rows + min(member, longer)
    return tensor[start : start + rows + (member < longer)]


@pytest.mark.parametrize("dtype", [*(d for d in NATIVE if d != torch.bool), *COMPLEX])
@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average])
def test_reducescatter_leaves_a_share_of_rows(dtype, op):
    for shape in ((1,), (2,), (7, 3), (8, 2), (0, 3), (5, 0), (13, 2, 2)):
        everyone = samples(shape, dtype)
        mine = everyone[hvd.rank()]
        want = share(reduced(op, everyone), hvd.rank(), hvd.size())
        check(hvd.reducescatter(mine, op=op), want, exact=op == hvd.Sum)
        got = hvd.synchronize(hvd.reducescatter_async(mine, name="share", op=op))
        check(got, want, exact=op == hvd.Sum)


def test_reducescatter_averages_by_default():
    tensor = torch.full((hvd.size(), 2), float(hvd.rank()))
    assert hvd.reducescatter(tensor).eq((hvd.size() - 1) / 2).all()
    assert hvd.grouped_reducescatter([tensor])[0].eq((hvd.size() - 1) / 2).all()


def test_reducescatter_scales():
    tensor = torch.ones(hvd.size())
    got = hvd.reducescatter(tensor, op=hvd.Sum, prescale_factor=3.0, postscale_factor=0.5)
    assert got.item() == 1.5 * hvd.size()
    big = torch.ones(hvd.size() * 70_000)
    assert hvd.reducescatter(big, op=hvd.Sum, prescale_factor=3.0).eq(3.0 * hvd.size()).all()


def test_reducescatter_compresses():
    got = hvd.reducescatter(torch.ones(hvd.size()), compression=hvd.Compression.fp16, op=hvd.Sum)
    check(got, torch.full((1,), float(hvd.size())))


def test_grouped_reducescatter_gives_a_list():
    dtypes = [torch.float32, torch.int64, torch.bfloat16]
    everyone = [samples((2 * i + 3, 2), d) for i, d in enumerate(dtypes)]
    mine = [t[hvd.rank()] for t in everyone]
    results = hvd.grouped_reducescatter(mine, op=hvd.Sum)
    assert type(results) is list
    in_flight = hvd.synchronize(hvd.grouped_reducescatter_async(mine, op=hvd.Sum))
    assert type(in_flight) is tuple
    for group in (results, in_flight):
        for got, tensors in zip(group, everyone, strict=True):
            check(got, share(reduced(hvd.Sum, tensors), hvd.rank(), hvd.size()))
    with pytest.raises(ValueError, match="at least one tensor"):
        hvd.grouped_reducescatter([])


@pytest.mark.parametrize("tensor", [torch.tensor(1.0), torch.tensor(1j)])
def test_reducescatter_refuses_scalars(tensor):
    for call in (hvd.reducescatter, hvd.reducescatter_async):
        with pytest.raises(ValueError, match="does not support scalar inputs"):
            call(tensor)
    with pytest.raises(ValueError, match="does not support scalar inputs"):
        hvd.grouped_reducescatter([torch.ones(3), tensor])


def test_reducescatter_only_sums_and_averages():
    for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
        with pytest.raises(hvd.HorovodInternalError, match="only supports AVERAGE and SUM"):
            hvd.reducescatter(torch.ones(4), op=op)
        with pytest.raises(hvd.HorovodInternalError, match="only supports AVERAGE and SUM"):
            hvd.grouped_reducescatter([torch.ones(4)], op=op)


def test_reducescatter_of_bool_sums_with_or():
    everyone = samples((hvd.size(), 3), torch.bool)
    got = hvd.reducescatter(everyone[hvd.rank()], op=hvd.Sum)
    check(got, share(reduced(hvd.Sum, everyone), hvd.rank(), hvd.size()))


def test_gathered_shares_are_the_allreduce():
    torch.manual_seed(hvd.rank())
    tensor = torch.randn(1001, 3)
    whole = hvd.allgather(hvd.reducescatter(tensor, op=hvd.Sum))
    torch.testing.assert_close(whole, hvd.allreduce(tensor, op=hvd.Sum))
    same_everywhere(whole)
