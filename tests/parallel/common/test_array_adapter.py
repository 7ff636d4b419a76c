"""A framework of which `horovod.common` knows nothing: operations, elastic state and loop by a small adapter."""

import inspect
from array import array

import array_adapter as hvd

hvd.init()
SIZE, RANK = hvd.size(), hvd.rank()
ops = hvd.collectives


def test_the_adapter_is_small_and_no_other_is_involved():
    source = inspect.getsource(hvd)
    assert len(source.splitlines()) <= 120
    assert "horovod.torch" not in source
    assert "horovod.numpy" not in source


def test_a_group_of_one_array_twice():
    mine = array("d", [RANK + 1.0])
    first, second = ops.grouped_allreduce_([mine, mine], op=hvd.Sum)
    assert first is second is mine
    assert mine == array("d", [sum(range(1, SIZE + 1))])


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
