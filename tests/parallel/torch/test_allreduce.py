"""Allreduce: every form, dtype, operator, shape and layout, on real ranks."""

import pytest
import torch
from ops_support import (
    COMPLEX,
    FLOATS,
    INTEGERS,
    NATIVE,
    OPS,
    SHAPES,
    check,
    reduced,
    same_everywhere,
    sample,
    samples,
)

import horovod.torch as hvd


def reducible():
    for name, op in OPS.items():
        for dtype in NATIVE:
            if not (name == "Average" and dtype == torch.bool):
                yield pytest.param(op, dtype, id=f"{name}-{dtype}".replace("torch.", ""))
    for name in ("Sum", "Average"):
        for dtype in COMPLEX:
            yield pytest.param(OPS[name], dtype, id=f"{name}-{dtype}".replace("torch.", ""))


@pytest.mark.parametrize(("op", "dtype"), list(reducible()))
def test_every_form_reduces_every_shape(op, dtype):
    exact = op != hvd.Average
    for shape in SHAPES:
        everyone = samples(shape, dtype)
        mine = everyone[hvd.rank()]
        want = reduced(op, everyone)

        before = mine.clone()
        check(hvd.allreduce(mine, op=op), want, exact)
        check(hvd.synchronize(hvd.allreduce_async(mine, op=op)), want, exact)
        assert torch.equal(mine, before), "the input was modified"

        in_place = mine.clone()
        assert hvd.allreduce_(in_place, op=op) is in_place
        check(in_place, want, exact)

        in_place = mine.clone()
        assert hvd.synchronize(hvd.allreduce_async_(in_place, op=op)) is in_place
        check(in_place, want, exact)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("elems", [1, 1000, 65_537, 1_000_003])
def test_results_are_bitwise_the_same_on_every_rank(dtype, elems):
    torch.manual_seed(hvd.rank())
    mine = torch.randn(elems, dtype=torch.float64).to(dtype)

    total = hvd.allreduce(mine, op=hvd.Sum)

    same_everywhere(total)
    rows = [
        torch.randn(elems, dtype=torch.float64, generator=torch.Generator().manual_seed(r))
        for r in range(hvd.size())
    ]
    want = sum(row.to(dtype).double() for row in rows)
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-5}.get(dtype, 1e-13)
    torch.testing.assert_close(total.double(), want, rtol=tolerance, atol=tolerance)


def test_the_default_operator_is_the_average():
    tensor = torch.full((4,), float(hvd.rank()))
    mean = (hvd.size() - 1) / 2
    assert hvd.allreduce(tensor).eq(mean).all()
    assert hvd.allreduce_(tensor.clone()).eq(mean).all()
    assert hvd.synchronize(hvd.allreduce_async(tensor)).eq(mean).all()


@pytest.mark.parametrize("dtype", INTEGERS)
def test_the_average_of_equal_integers_is_that_integer(dtype):
    # Multiplying by 1/size loses one for some sizes; division does not.
    for value in (1, 3, 7, 20):
        tensor = torch.full((5,), value, dtype=torch.int64).to(dtype)
        check(hvd.allreduce(tensor, op=hvd.Average), tensor)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_the_average_of_integers_does_not_wrap(dtype):
    for extreme in (torch.iinfo(dtype).max, torch.iinfo(dtype).min):
        tensor = torch.full((70,), extreme, dtype=dtype)
        check(hvd.allreduce(tensor, op=hvd.Average), tensor)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_average_of_integers_is_truncated_toward_zero(dtype):
    for sign in (1, -1):
        tensor = torch.tensor([sign * (hvd.rank() + 1)], dtype=dtype)
        total = hvd.size() * (hvd.size() + 1) // 2
        assert hvd.allreduce(tensor).item() == sign * (total // hvd.size())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
@pytest.mark.parametrize("factor", [2.0, 0.5, 3.0])
def test_an_integer_average_with_a_factor_is_truncated_once(dtype, factor):
    tensor = torch.tensor([hvd.rank() + 1, 7], dtype=dtype)
    total = hvd.size() * (hvd.size() + 1) // 2
    want = [int(total * factor / hvd.size()), int(7 * factor)]
    assert hvd.allreduce(tensor, op=hvd.Average, postscale_factor=factor).tolist() == want
    rows = tensor.repeat(hvd.size()).reshape(hvd.size(), 2)
    if dtype != torch.uint8:
        got = hvd.reducescatter(rows, op=hvd.Average, postscale_factor=factor)
        assert got.tolist() == [want]


def test_averaging_large_integers_is_exact():
    tensor = torch.tensor([2**60 + 1], dtype=torch.int64)
    assert hvd.allreduce(tensor).item() == 2**60 + 1


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32, torch.int64, torch.complex64])
def test_factors_apply_before_and_after(dtype):
    everyone = samples((6,), dtype)
    got = hvd.allreduce(everyone[hvd.rank()], op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5)
    check(
        got,
        reduced(hvd.Sum, [t * 2 for t in everyone]) / 2
        if dtype.is_floating_point or dtype.is_complex
        else reduced(hvd.Sum, everyone),
    )


def test_an_integer_prescale_is_truncated_per_element():
    tensor = torch.tensor([3, -3, 5], dtype=torch.int32)
    got = hvd.allreduce(tensor, op=hvd.Sum, prescale_factor=0.5)
    assert got.tolist() == [1 * hvd.size(), -1 * hvd.size(), 2 * hvd.size()]


def test_factors_apply_to_min_too():
    tensor = torch.tensor([float(hvd.rank() + 1)])
    got = hvd.allreduce(tensor, op=hvd.Min, prescale_factor=3.0, postscale_factor=2.0)
    assert got.item() == 6.0


def test_halves_are_summed_in_float32():
    # Summed in float16 pairwise, 2048 + 1 + 1 + ... stays 2048.
    value = 2048.0 if hvd.rank() == 0 else 1.0
    got = hvd.allreduce(torch.tensor([value], dtype=torch.float16), op=hvd.Sum)
    exact = torch.tensor([2048.0 + hvd.size() - 1]).half()
    assert got.item() == exact.item()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_adasum_of_equal_gradients_is_that_gradient(dtype):
    torch.manual_seed(3)
    tensor = torch.randn(50, dtype=torch.float64).to(dtype)
    tolerance = {torch.float16: 5e-3, torch.bfloat16: 4e-2}.get(dtype, 1e-5)
    got = hvd.allreduce(tensor, op=hvd.Adasum)
    torch.testing.assert_close(got.double(), tensor.double(), rtol=tolerance, atol=tolerance)
    same_everywhere(got)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adasum_of_orthogonal_gradients_is_their_sum(dtype):
    tensor = torch.zeros(4 * hvd.size(), dtype=dtype)
    tensor[4 * hvd.rank() : 4 * hvd.rank() + 4] = hvd.rank() + 1.0
    got = hvd.allreduce(tensor, op=hvd.Adasum)
    want = torch.arange(1, hvd.size() + 1, dtype=dtype).repeat_interleave(4)
    torch.testing.assert_close(got, want)


def test_adasum_of_two_ranks_is_the_published_formula():
    if hvd.size() != 2:
        pytest.skip("two ranks")
    a, b = (torch.randn(20, generator=torch.Generator().manual_seed(r)).double() for r in (0, 1))
    dot = (a * b).sum()
    want = (1 - dot / (2 * (a * a).sum())) * a + (1 - dot / (2 * (b * b).sum())) * b
    torch.testing.assert_close(hvd.allreduce((a, b)[hvd.rank()], op=hvd.Adasum), want)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64])
def test_adasum_needs_floats(dtype):
    with pytest.raises(ValueError, match="not supported for op Adasum"):
        hvd.allreduce(torch.zeros(3, dtype=dtype), op=hvd.Adasum)


def layouts():
    """Names and makers of tensors that are not plain contiguous memory, with the shape they have."""
    yield "transposed", (4, 3), lambda t: t.t().contiguous().t()
    yield "channels_last", (2, 3, 4, 5), lambda t: t.contiguous(memory_format=torch.channels_last)
    yield "strided", (5, 3), lambda t: torch.stack([t, t], -1).flatten(1)[:, ::2]
    yield "offset", (5,), lambda t: torch.cat([t, t])[5:]
    yield "column", (5, 1), lambda t: torch.cat([t, t], 1)[:, :1]


LAYOUTS = [pytest.param(shape, make, id=name) for name, shape, make in layouts()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
@pytest.mark.parametrize(("shape", "make"), LAYOUTS)
def test_every_layout_works(shape, make, dtype):
    everyone = samples(shape, dtype)
    want = reduced(hvd.Sum, everyone)
    mine = make(everyone[hvd.rank()])
    strides = mine.stride()

    check(hvd.allreduce(mine, op=hvd.Sum), want)
    check(hvd.grouped_allreduce([mine, mine], op=hvd.Sum)[1], want)

    other = make(everyone[hvd.rank()])
    for tensor, result in (
        (mine, hvd.allreduce_(mine, op=hvd.Sum)),
        (other, hvd.grouped_allreduce_([other], op=hvd.Sum)[0]),
    ):
        assert result is tensor
        assert tensor.stride() == strides
        check(tensor, want)


def test_ranks_may_use_different_layouts():
    everyone = samples((4, 6), torch.float32)
    mine = everyone[hvd.rank()].clone()
    if hvd.rank() % 2:
        mine = mine.t().contiguous().t()
    check(hvd.allreduce_(mine, op=hvd.Sum), reduced(hvd.Sum, everyone))


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
    monkeypatch.setattr(plain, lambda *_: None)
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


def test_many_operations_in_flight():
    tensors = [torch.full((i % 40,), float(hvd.rank() + i)) for i in range(500)]
    handles = [
        hvd.allreduce_async_(t, name=f"flight.{i}", op=hvd.Sum) for i, t in enumerate(tensors)
    ]
    for i in reversed(range(500)):
        got = hvd.synchronize(handles[i])
        assert got.eq(sum(r + i for r in range(hvd.size()))).all()


def test_ranks_may_issue_named_operations_in_different_orders():
    order = list(range(40))
    if hvd.rank() % 2:
        order.reverse()
    handles = {
        i: hvd.allreduce_async(torch.tensor(float(i)), name=f"order.{i}", op=hvd.Sum) for i in order
    }
    for i, handle in handles.items():
        assert hvd.synchronize(handle).item() == i * hvd.size()


@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average])
def test_a_group_returns_a_list_and_in_place_a_tuple(op):
    shapes = [(), (3,), (2, 5), (0, 4)]
    everyone = [samples(shape, torch.float32, salt=str(i)) for i, shape in enumerate(shapes)]
    mine = [t[hvd.rank()] for t in everyone]
    wants = [reduced(op, t) for t in everyone]

    results = hvd.grouped_allreduce(mine, op=op)
    assert type(results) is list
    in_flight = hvd.synchronize(hvd.grouped_allreduce_async(mine, op=op))
    assert type(in_flight) is tuple
    inputs = [t.clone() for t in mine]
    in_place = hvd.grouped_allreduce_(inputs, op=op)
    assert type(in_place) is tuple
    for a, b in zip(in_place, inputs, strict=True):
        assert a is b
    inputs_async = [t.clone() for t in mine]
    for a, b in zip(
        hvd.synchronize(hvd.grouped_allreduce_async_(inputs_async, op=op)),
        inputs_async,
        strict=True,
    ):
        assert a is b
    for group in (results, in_flight, inputs, inputs_async):
        for got, want in zip(group, wants, strict=True):
            check(got, want, exact=op == hvd.Sum)


def test_a_group_may_mix_dtypes():
    dtypes = [torch.float32, torch.int64, torch.bfloat16, torch.uint8, torch.complex64]
    everyone = [samples((5,), dtype) for dtype in dtypes]
    results = hvd.grouped_allreduce([t[hvd.rank()] for t in everyone], op=hvd.Sum)
    for got, tensors in zip(results, everyone, strict=True):
        check(got, reduced(hvd.Sum, tensors))


def test_a_group_may_be_any_iterable_but_not_empty():
    [total] = hvd.grouped_allreduce((t for t in [torch.ones(2)]), op=hvd.Sum)
    assert total.eq(hvd.size()).all()
    for call in (hvd.grouped_allreduce, hvd.grouped_allreduce_, hvd.grouped_allreduce_async):
        with pytest.raises(ValueError, match="at least one tensor"):
            call([])


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


def test_the_same_metric_name_may_be_used_every_batch():
    for batch in range(20):
        mean = hvd.allreduce(torch.tensor(float(hvd.rank() + batch)), name="avg_loss").item()
        assert mean == batch + (hvd.size() - 1) / 2


def test_shapes_under_one_name_may_change_from_step_to_step():
    for step in range(12):
        tensor = sample(0, (step % 4 + 1, 2), torch.float32)
        check(hvd.allreduce(tensor, name="changing", op=hvd.Average), tensor)
