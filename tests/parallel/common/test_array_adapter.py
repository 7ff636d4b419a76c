"""A framework of which `horovod.common` knows nothing: operations, elastic state and loop by a small adapter."""

import functools
import inspect
import operator
from array import array

import array_adapter as hvd
import pytest

hvd.init()
SIZE, RANK = hvd.size(), hvd.rank()
ops = hvd.collectives


def test_the_adapter_is_small_and_no_other_is_involved():
    source = inspect.getsource(hvd)
    assert len(source.splitlines()) <= 120
    assert "horovod.torch" not in source
    assert "horovod.numpy" not in source


@pytest.mark.parametrize("kind", hvd.DTYPES)
def test_sums(kind):
    mine = array(kind, [1 + RANK, 2, 3])
    want = array(kind, [sum(range(1, SIZE + 1)), 2 * SIZE, 3 * SIZE])
    assert ops.allreduce(mine, op=hvd.Sum) == want
    assert mine == array(kind, [1 + RANK, 2, 3])
    assert ops.allreduce_(mine, op=hvd.Sum) is mine
    assert mine == want
    assert ops.grouped_allreduce([mine, array(kind)], op=hvd.Max) == (mine, array(kind))


def test_a_group_of_one_array_twice():
    mine = array("d", [RANK + 1.0])
    first, second = ops.grouped_allreduce_([mine, mine], op=hvd.Sum)
    assert first is second is mine
    assert mine == array("d", [sum(range(1, SIZE + 1))])


def test_rows():
    mine = array("i", [RANK] * (RANK + 1))
    everyone = [array("i", [rank] * (rank + 1)) for rank in range(SIZE)]
    assert ops.allgather(mine) == functools.reduce(operator.add, everyone)
    assert ops.broadcast(array("i", [RANK, 7]), SIZE - 1) == array("i", [SIZE - 1, 7])
    received, counts = ops.alltoall(array("q", range(SIZE)), splits=[1] * SIZE)
    assert received == array("q", [RANK] * SIZE)
    assert counts == array("i", [1] * SIZE)
    assert ops.reducescatter(array("f", [1.0] * SIZE), op=hvd.Sum) == array("f", [SIZE])


def test_mistakes():
    with pytest.raises(TypeError, match=r"Expected an array\.array, got list"):
        ops.allreduce([1])
    with pytest.raises(ValueError, match="not supported"):
        ops.allgather(array("u", "text"))
    with pytest.raises(ValueError, match="int32 are not supported for op Adasum"):
        ops.allreduce(array("i", [1]), op=hvd.Adasum)
    with pytest.raises(ValueError, match="at least one"):
        ops.grouped_allgather([])


def test_a_state_goes_back_to_its_last_commit_and_all_have_the_same():
    weights = array("d", [float(RANK), 1.0])
    state = hvd.ArrayState(weights=weights, shape=(RANK, 1), step=RANK)
    calls = []

    @hvd.run
    def train(state):
        calls.append((list(state.weights), state.shape, state.step))
        while state.step < 4:
            state.step += 1
            state.weights[0] += 1
            state.shape = (*state.shape, state.step)
            if state.step == 2:
                state.commit()
            if state.step == 3 and len(calls) == 1:
                raise hvd.HorovodInternalError("by hand")
        return state.step

    assert train(state) == 4
    assert state.weights is weights
    assert calls == [([0.0, 1.0], (0, 1), 0), ([2.0, 1.0], (0, 1, 1, 2), 2)]


def test_samples_are_dealt_out():
    dealer = hvd.SampleDealer(range(2 * SIZE), shuffle=False)
    assert list(dealer) == [RANK, RANK + SIZE]
    dealer.record_batch(0, 1)
    dealer.reset()
    assert list(dealer) == [RANK + SIZE]
