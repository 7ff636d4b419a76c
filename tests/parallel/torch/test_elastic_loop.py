"""The elastic loop with ranks that stay the same: rolling back, going on, order of events, who is in step."""

import logging

import pytest
import torch

import horovod.torch as hvd
from horovod.common import elastic as loop
from horovod.common.exceptions import HostsUpdatedInterrupt

LAST = "last rank"


class Recording(hvd.elastic.ObjectState):
    """Writes down what the loop asks of it."""

    def __init__(self, **kwargs):
        self.events = []
        super().__init__(hvd.broadcast_object, hvd.rank, **kwargs)

    def restore(self):
        self.events.append("restore")
        super().restore()

    def sync(self):
        self.events.append("sync")
        super().sync()

    def reset(self):
        self.events.append("reset")


def in_step(*values):
    """Whether all ranks have these values."""
    return all(other == values for other in hvd.allgather_object(values))


def test_a_function_that_returns_is_called_once_with_its_arguments():
    state = Recording(step=hvd.rank())

    @hvd.elastic.run
    def train(state, a, *, b):
        """Doc."""
        state.events.append("func")
        return state.step, a, b

    assert train.__name__ == "train"
    assert train.__doc__ == "Doc."
    assert train(state, 1, b=2) == (0, 1, 2)
    assert state.events == ["sync", "func"]


def test_a_failure_goes_back_to_the_last_commit_and_events_come_in_order():
    state = Recording(step=0, log=[])
    state.register_reset_callbacks([lambda: state.events.append(f"first {hvd.size()}")])
    state.register_reset_callbacks([lambda: state.events.append("second")])

    @hvd.elastic.run
    def train(state):
        state.events.append(f"func from {state.step}")
        while state.step < 6:
            state.step += 1
            state.log.append(state.step)
            if state.step == 4 and "restore" not in state.events:
                raise hvd.HorovodInternalError("by hand")
            if state.step % 2 == 0:
                state.commit()
        return state.step

    assert train(state) == 6
    assert state.log == [1, 2, 3, 4, 5, 6]  # a list that is changed in place goes back too
    round_trip = ["restore", "reset", f"first {hvd.size()}", "second", "sync", "func from 2"]
    assert state.events == ["sync", "func from 0", *round_trip]
    assert in_step(state.step, state.log)


def test_a_failure_of_one_rank_reaches_the_others_and_all_go_on_together():
    state = Recording(step=0)
    calls = []

    @hvd.elastic.run
    def train(state):
        calls.append(state.step)
        while state.step < 5:
            if state.step == 3 and len(calls) == 1 and hvd.rank() == hvd.size() - 1:
                raise hvd.HorovodInternalError("only here")
            hvd.allreduce(torch.ones(3), name="step")
            state.step += 1
            state.commit()

    train(state)
    assert calls == [0, 3]
    assert in_step(state.step)


def test_the_newest_commit_of_any_rank_is_kept():
    """A rank may fail just before a commit that the others have made already; theirs counts, whatever its rank."""
    state = Recording(step=0)
    calls = []

    @hvd.elastic.run
    def train(state):
        calls.append(state.step)
        while state.step < 5:
            hvd.allreduce(torch.ones(3), name="step")
            state.step += 1
            if state.step == 3 and len(calls) == 1 and hvd.rank() == 0:
                raise hvd.HorovodInternalError("rank 0 does not come to its commit")
            state.commit()

    train(state)
    assert calls == [0, 2 if hvd.size() == 1 else 3]
    assert in_step(calls)


@pytest.mark.parametrize("skip_sync", [True, False])
def test_an_interrupt_keeps_what_is_not_committed(skip_sync):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = hvd.elastic.TorchState(model, optimizer, step=0, losses=[])
    seen = []

    @hvd.elastic.run
    def train(state):
        seen.append((state.step, list(state.losses), model.weight.tolist()))
        while state.step < 4:
            with torch.no_grad():
                model.weight.add_(1)
            state.step += 1
            state.losses.append(state.step)
            if state.step == 1:
                state.commit()
            if state.step == 3 and len(seen) == 1:
                now = (state.step, list(state.losses), model.weight.tolist())
                seen.append(now)
                raise HostsUpdatedInterrupt(skip_sync)

    train(state)
    assert seen[2] == seen[1]
    assert seen[2][:2] == (3, [1, 2, 3])
    assert in_step(seen)


def test_state_is_synced_only_when_somebody_needs_it():
    state = Recording(step=0)

    @hvd.elastic.run
    def train(state):
        state.events.append("func")
        calls = state.events.count("func")
        if calls == 1:
            raise HostsUpdatedInterrupt(skip_sync=True)
        if calls == 2:
            # One rank was not told that it may skip: then nobody does.
            raise HostsUpdatedInterrupt(skip_sync=hvd.rank() != hvd.size() - 1)
        if calls == 3 and hvd.rank() == 0:
            raise hvd.HorovodInternalError("this rank goes back")
        if calls == 3:
            raise HostsUpdatedInterrupt(skip_sync=True)

    train(state)
    third = ["restore"] if hvd.rank() == 0 else []
    expected = ["sync", "func", "reset", "func", "reset", "sync", "func", *third, "reset", "sync"]
    assert state.events == [*expected, "func"]


@pytest.mark.parametrize(
    ("kinds", "skip_sync"),
    [({LAST: [1]}, True), ({LAST: [2]}, False), ({0: [1], LAST: [2]}, False), ({0: [1, 1]}, True)],
    ids=["removed", "added", "both, by different ranks", "twice"],
)
def test_news_of_one_rank_interrupt_all_at_the_same_call(kinds, skip_sync):
    state = hvd.elastic.ObjectState(step=0)
    state.check_host_updates()
    state.commit()
    for who, updates in kinds.items():
        if hvd.rank() == (hvd.size() - 1 if who == LAST else who):
            for update in updates:
                state.on_hosts_updated(1, update)
    with pytest.raises(HostsUpdatedInterrupt) as interrupt:
        state.commit()
    assert interrupt.value.skip_sync is skip_sync
    state.commit()  # the same news do not come twice
    if hvd.rank() == 0:
        state.on_hosts_updated(1, 2)
    with pytest.raises(HostsUpdatedInterrupt):
        state.check_host_updates()


def test_errors_of_other_kinds_end_the_function():
    state = Recording(step=0)

    @hvd.elastic.run
    def train(state):
        raise KeyError("not elastic's business")

    with pytest.raises(KeyError):
        train(state)
    assert state.events == ["sync"]


def test_a_failure_that_repeats_itself_with_everybody_there_is_raised():
    """Ranks that disagree would disagree for ever: nobody is lost, nothing is committed."""
    state = Recording(step=0)
    calls = []

    @hvd.elastic.run
    def train(state):
        calls.append(state.step)
        state.step += 1
        raise hvd.HorovodInternalError("Mismatched shapes")

    with pytest.raises(hvd.HorovodInternalError, match="Mismatched") as failure:
        train(state)
    assert "another attempt would not help" in failure.value.__notes__[0]
    assert calls == [0] * 4


def test_a_failure_after_progress_is_never_too_many():
    state = Recording(step=0)

    @hvd.elastic.run
    def train(state):
        while state.step < 8:
            state.step += 1
            state.commit()
            raise hvd.HorovodInternalError("once per step")

    train(state)
    assert state.step == 8


def test_ranks_in_different_decorated_functions_are_told_so():
    """A worker that joins begins the script anew: it must not exchange the state of one phase for another's."""
    if hvd.size() == 1:
        pytest.skip("needs several ranks")
    if hvd.rank() == 0:
        next(loop._runs)
    with pytest.raises(RuntimeError, match="different calls"):
        hvd.elastic.run(lambda state: None)(Recording(step=0))
    if hvd.rank() != 0:
        next(loop._runs)


def test_running_before_init_is_refused():
    hvd.barrier()
    hvd.shutdown()
    state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0)
    with pytest.raises(ValueError, match=r"use hvd\.init"):
        hvd.elastic.run(lambda state: None)(state)


def test_interruptions_are_logged(caplog):
    caplog.set_level(logging.WARNING, logger="horovod")
    state = Recording(step=0)

    @hvd.elastic.run
    def train(state):
        if "restore" not in state.events:
            raise hvd.HorovodInternalError("rank 9 has gone")

    train(state)
    first, second = caplog.messages
    assert f"rank {hvd.rank()} of {hvd.size()}" in first
    assert "rank 9 has gone; going back to the last commit" in first
    assert f"goes on as rank {hvd.rank()} of {hvd.size()}" in second


def test_an_attribute_that_cannot_be_copied_is_named():
    import threading

    with pytest.raises(TypeError) as error:
        hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0, lock=threading.Lock())
    assert "'lock'" in error.value.__notes__[0]


def test_process_sets_of_init_are_there_after_a_reset():
    if hvd.size() < 3:
        pytest.skip("needs several ranks")
    members = hvd.ProcessSet([0, hvd.size() - 1])
    hvd.barrier()
    hvd.shutdown()
    hvd.init(process_sets=[members])
    state = Recording(step=0)

    @hvd.elastic.run
    def train(state):
        if "restore" not in state.events:
            raise hvd.HorovodInternalError("by hand")
        if members.included():
            total = hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=members)
            assert total.item() == 2

    train(state)
    assert members.process_set_id is not None
    hvd.barrier()
    hvd.shutdown()
