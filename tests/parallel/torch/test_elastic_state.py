"""TorchState, ElasticSampler, optimizers and loaders across resets, with ranks that stay the same."""

import gc
import itertools
import threading

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import horovod.torch as hvd
from horovod.common.exceptions import HostsUpdatedInterrupt
from horovod.data import AsyncDataLoaderMixin, BaseDataLoader
from horovod.torch.elastic import state as handlers
from horovod.torch.elastic.state import TorchState


def make(seed=0, width=4, lr=0.1):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 2)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    return model, optimizer


def step(model, optimizer, seed=1):
    generator = torch.Generator().manual_seed(seed + hvd.rank())
    optimizer.zero_grad()
    model(torch.randn(8, 4, generator=generator)).square().mean().backward()
    optimizer.step()


def values(model, optimizer):
    """All numbers of a model and its optimizer, as bytes."""
    state = optimizer.state_dict()["state"]
    tensors = [
        *model.state_dict().values(),
        *(entry["momentum_buffer"] for entry in state.values()),
    ]
    return [tensor.numpy().tobytes() for tensor in tensors]


@pytest.mark.parametrize("in_background", [False, True])
def test_a_snapshot_is_what_was_there_when_it_was_taken(in_background):
    model, optimizer = make(width=20_000)  # large enough for the background
    state = TorchState(model, optimizer, step=0)
    state.commit_in_background = in_background
    for number in range(3):
        state.commit()
        step(model, optimizer, number)
    state.step = 3
    state.commit()
    committed = values(model, optimizer)
    for number in range(2):
        step(model, optimizer, 10 + number)
        state.step += 1
        assert values(model, optimizer) != committed
        state.restore()
        assert values(model, optimizer) == committed
        assert state.step == 3


def test_what_was_restored_does_not_share_memory_with_the_snapshot():
    model, optimizer = make()
    state = TorchState(model, optimizer, losses=[1])
    step(model, optimizer)
    state.commit()
    committed = values(model, optimizer)
    for _ in range(3):
        state.restore()
        assert values(model, optimizer) == committed
        assert state.losses == [1]
        state.losses.append(2)
        step(model, optimizer)


def test_commits_use_the_same_memory_again():
    model, optimizer = make()
    step(model, optimizer)
    state = TorchState(model, optimizer)

    def memory():
        found = set()
        for name in ("model", "optimizer"):
            snapshot = state._handlers[name]._snapshot
            for tree in (snapshot._complete, snapshot._written):
                entries = [tree] if name == "model" else tree["state"].values()
                for entry in entries:
                    found |= {tensor.data_ptr() for tensor in entry.values()}
        return found

    state.save()
    before = memory()
    for _ in range(5):
        step(model, optimizer)
        state.commit()
    assert memory() == before


def test_a_broken_promise_about_the_background_is_noticed():
    model, optimizer = make(width=20_000)
    state = TorchState(model, optimizer)
    state.commit_in_background = True
    step(model, optimizer)
    state.commit()
    with torch.no_grad():
        model[0].weight.mul_(0.5)
    with pytest.raises(RuntimeError, match=r"0\.weight was changed while commit\(\)"):
        step(model, optimizer)
    optimizer.zero_grad()
    state.commit()
    step(model, optimizer)


def test_scheduler_and_scaler_keep_their_objects():
    model, optimizer = make(lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** hvd.rank())
    state = TorchState(model, optimizer, scheduler=scheduler, scaler=scaler)
    optimizer.step()  # of nothing; or schedulers warn
    for _ in range(hvd.rank()):
        scheduler.step()
    state.sync()
    assert state.scheduler is scheduler
    assert scheduler.optimizer is optimizer
    assert scheduler.last_epoch == 0
    assert optimizer.param_groups[0]["lr"] == 1.0
    assert scaler.get_scale() == 1.0
    state.save()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
    state.restore()
    assert optimizer.param_groups[0]["lr"] == 1.0
    assert scheduler.last_epoch == 0


def test_ranks_start_alike_whatever_they_were_given():
    model, optimizer = make(seed=hvd.rank(), lr=0.1 + hvd.rank())
    if hvd.rank() == 0 and hvd.size() == 1:
        step(model, optimizer)
    state = TorchState(model, optimizer, best=hvd.rank(), history=[hvd.rank()])
    hvd.elastic.run(lambda state: None)(state)
    everyone = hvd.allgather_object((values(model, optimizer), state.best, state.history))
    assert all(one == everyone[0] for one in everyone)
    assert state.history == [0]
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_handled_value_can_be_replaced():
    model, optimizer = make()
    state = TorchState(model=model, optimizer=optimizer)
    other, _ = make(seed=5)
    state.model = other
    before = [p.tolist() for p in other.parameters()]
    with torch.no_grad():
        for param in other.parameters():
            param.add_(1)
    state.restore()
    assert [p.tolist() for p in other.parameters()] == before
    assert state.model is other


def test_without_model_and_optimizer():
    state = TorchState(step=1, more=[model := torch.nn.Linear(1, 1)])
    assert state.model is None
    assert state.optimizer is None
    assert state.more == [model]
    TorchState().commit()


def test_handlers_of_ones_own():
    class Counter:
        def __init__(self):
            self.count = 0

    class CounterHandler(handlers.StateHandler):
        def save(self):
            self.saved = self.value.count

        def restore(self):
            self.value.count = self.saved

        def sync(self):
            self.value.count = hvd.broadcast_object(self.value.count, self.root_rank)

    before = handlers.get_handler_registry()
    handlers.set_handler_registry([(Counter, CounterHandler), *before])
    try:
        counter = Counter()
        counter.count = hvd.rank() + 7
        state = TorchState(counter=counter)
        state.sync()
        state.save()
        assert counter.count == 7
        counter.count = 9
        state.restore()
        assert counter.count == 7
        assert state.counter is counter
    finally:
        handlers.set_handler_registry(before)


def test_a_handler_may_keep_its_value_where_it_likes():
    class Counter:
        def __init__(self, count):
            self.count = count

    class Elsewhere(handlers.StateHandler):
        def __init__(self, value):
            self.mine = value

        def save(self):
            self.saved = self.mine.count

        def restore(self):
            self.mine.count = self.saved

        def sync(self):
            self.mine.count = hvd.broadcast_object(self.mine.count, self.root_rank)

        def set_value(self, value):
            self.mine = value
            self.save()

    class NotNoted(Elsewhere):
        def __init__(self, value):
            super().__init__(value)
            self.value = value  # the first one for ever

    before = handlers.get_handler_registry()
    for handler in (Elsewhere, NotNoted):
        handlers.set_handler_registry([(Counter, handler), *before])
        try:
            state = TorchState(counter=Counter(1))
            state.counter = second = Counter(hvd.rank() + 2)
            second.count += 10
            state.restore()
            assert state.counter is second
            assert second.count == hvd.rank() + 2
            state.sync()
            assert state.counter is second
            assert second.count == 2
        finally:
            handlers.set_handler_registry(before)


def interrupted_once(state, func, error):
    """Run `func(first)` twice under the loop, the first time ended by `error`."""
    calls = []

    @hvd.elastic.run
    def train(state):
        calls.append(None)
        result = func(len(calls) == 1)
        if len(calls) == 1:
            raise error
        return result

    return train(state)


@pytest.mark.parametrize(
    "error",
    [
        hvd.HorovodInternalError("by hand"),
        HostsUpdatedInterrupt(True),
        HostsUpdatedInterrupt(False),
    ],
    ids=["failure", "removal", "addition"],
)
def test_gradients_of_a_cycle_that_was_broken_off_are_gone(error):
    """Also in scripts that call zero_grad() after step() only."""
    model, optimizer = make()
    reference, its_optimizer = make()
    optimizer.set_backward_passes_per_step(2)
    its_optimizer.set_backward_passes_per_step(2)
    generator = torch.Generator().manual_seed(hvd.rank())
    batches = [torch.randn(8, 4, generator=generator) for _ in range(2)]

    def cycle(model, optimizer, whole):
        model(batches[0]).square().mean().backward()
        if whole:
            model(batches[1]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    state = TorchState(model, optimizer)
    model.eval()
    reference.eval()
    interrupted_once(state, lambda first: cycle(model, optimizer, not first), error)
    cycle(reference, its_optimizer, True)
    for mine, want in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine, want)


def test_reductions_in_flight_are_dropped_by_a_reset():
    model, optimizer = make()
    optimizer.wait_in_backward = False
    state = TorchState(model, optimizer)

    def work(first):
        model(torch.ones(3, 4)).sum().backward()
        if first:
            return
        optimizer.step()
        optimizer.zero_grad()

    interrupted_once(state, work, hvd.HorovodInternalError("between backward and step"))
    interrupted_once(state, work, HostsUpdatedInterrupt(True))
    assert all(
        one == values(model, optimizer) for one in hvd.allgather_object(values(model, optimizer))
    )


def test_a_synchronized_optimizer_reduces_again_after_a_reset():
    """Or the step after the reset would apply sums of one rank only."""
    model = make()[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), op=hvd.Sum
    )
    optimizer.wait_in_backward = False
    state = TorchState(model, optimizer)

    def work(first):
        optimizer.zero_grad()
        model(torch.full((3, 4), hvd.rank() + 1.0)).sum().backward()
        if first:
            optimizer.synchronize()
        else:
            optimizer.step()

    interrupted_once(state, work, HostsUpdatedInterrupt(True))
    weights = [p.tolist() for p in model.parameters()]
    assert all(one == weights for one in hvd.allgather_object(weights))


# -- data


def test_samplers_are_dealt_out_anew_also_without_a_sync():
    sampler = hvd.elastic.ElasticSampler(range(40), seed=3)
    state = TorchState(sampler=sampler)
    taken = []

    def epoch(first):
        loader = DataLoader(TensorDataset(torch.arange(40)), batch_size=2, sampler=sampler)
        for index, (batch,) in enumerate(loader):
            taken.extend(batch.tolist())
            sampler.record_batch(index, len(batch))
            if first and index == 1:
                return

    interrupted_once(state, epoch, HostsUpdatedInterrupt(True))
    everything = list(itertools.chain(*hvd.allgather_object(taken)))
    assert set(everything) == set(range(40))
    repeated = -(40 - 4 * hvd.size()) % hvd.size()
    assert len(everything) == 40 + repeated


def test_sampler_after_a_failure_goes_back_to_the_last_commit():
    sampler = hvd.elastic.ElasticSampler(range(48), shuffle=False)
    state = TorchState(sampler=sampler)
    taken = []

    def epoch(first):
        if not first:
            assert sampler.state_dict() == {"epoch": 0, "processed_num": 2 * hvd.size()}
        for index, sample in enumerate(sampler):
            taken.append(sample)
            sampler.record_batch(index, 1)
            if first and index == 1:
                state.commit()
            if first and index == 3:
                return
        sampler.set_epoch(1)

    interrupted_once(state, epoch, hvd.HorovodInternalError("by hand"))
    n, me = hvd.size(), hvd.rank()
    order = list(range(48))
    rest = order[2 * n :]
    share = -(-len(rest) // n)
    assert taken == order[me : 4 * n : n] + [rest[(me + i * n) % len(rest)] for i in range(share)]
    assert (sampler.epoch, sampler.processed_num) == (1, 0)


class Slow(BaseDataLoader):
    def __init__(self, sampler):
        self.sampler = sampler

    def __len__(self):
        return len(self.sampler)

    def _iterate(self):
        yield from self.sampler


class Ahead(AsyncDataLoaderMixin, Slow):
    pass


def test_readers_that_run_ahead_end_with_their_generation():
    sampler = hvd.elastic.ElasticSampler(range(1000), shuffle=False)
    loader = Ahead(4, False, sampler)
    state = TorchState(sampler=sampler)
    taken, readers = [], []

    def running():
        return [t for t in threading.enumerate() if t.name == "horovod-data-reader"]

    state.register_reset_callbacks([lambda: readers.append(len(running()))])

    @hvd.elastic.run
    def train(state):
        if not readers:
            for index, sample in enumerate(loader):
                taken.append(sample)
                sampler.record_batch(index, 1)
                if index == 9:
                    raise HostsUpdatedInterrupt(True)
        taken.extend(loader)

    train(state)
    gc.collect()
    assert readers == [0]
    assert running() == []
    n, me = hvd.size(), hvd.rank()
    assert taken[:20] == [me + n * i for i in range(20)]
    assert len(taken) == 10 + -(-(1000 - 10 * n) // n)
